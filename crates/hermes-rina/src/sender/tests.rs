//! Tests of loss detection, probes, credit and the end of a stream, one sender alone.

use super::loss::InvalidAck;
use super::*;
use crate::message::AckInfo;

const MS: Duration = Duration::from_millis(1);
const START: u64 = 5000;

fn sender(bytes: usize) -> Sender {
    let mut sender = Sender::new(Duration::ZERO, START, 100, None);
    sender.open(1 << 20, 100, Some(20 * MS));
    sender.write(Bytes::from(vec![1; bytes]));
    sender
}

/// Sends all that is allowed and returns the numbers and sequence numbers.
fn flush(sender: &mut Sender, now: Duration) -> Vec<(u64, u64)> {
    let mut sent = Vec::new();
    while let Some(plan) = sender.plan(now) {
        sent.push((sender.sent(now, &plan), plan.start - START));
    }
    sent
}

fn ack(sequence: u64, echo: u32) -> AckInfo {
    AckInfo { sequence: START + sequence, credit: 1 << 20, echo: Some(echo), ..AckInfo::default() }
}

#[test]
fn the_initial_window_is_ten_pdus() {
    let mut sender = sender(5000);
    assert_eq!(flush(&mut sender, Duration::ZERO).len(), 10);
    assert_eq!(sender.acknowledge(20 * MS, &ack(200, 1), &[]), Ok(true));
    assert_eq!(flush(&mut sender, 20 * MS).len(), 4, "slow start: two for each one");
}

#[test]
fn a_gap_of_three_pdus_is_a_loss_and_is_sent_again_once() {
    let mut sender = sender(1000);
    flush(&mut sender, Duration::ZERO);
    assert_eq!(sender.acknowledge(20 * MS, &ack(100, 2), &[(100, 100)]), Ok(true));
    assert_eq!(flush(&mut sender, 20 * MS), [], "two later PDUs may be reordering");
    assert_eq!(sender.acknowledge(21 * MS, &ack(100, 4), &[(100, 300)]), Ok(true));
    assert_eq!(flush(&mut sender, 21 * MS), [(10, 100)]);
    assert_eq!(sender.acknowledge(22 * MS, &ack(100, 9), &[(100, 800)]), Ok(true));
    assert_eq!(flush(&mut sender, 22 * MS), [], "the retransmission is younger than all acknowledged PDUs");
    assert_eq!(sender.acknowledge(42 * MS, &ack(1000, 10), &[]), Ok(true));
    assert_eq!(sender.buffered(), 0);
    assert_eq!(sender.deadline(), None);
}

#[test]
fn the_time_threshold_finds_the_last_losses() {
    let mut sender = sender(200);
    flush(&mut sender, Duration::ZERO);
    assert_eq!(sender.acknowledge(20 * MS, &ack(0, 1), &[(100, 100)]), Ok(true));
    let deadline = sender.deadline().unwrap();
    assert_eq!(deadline, Duration::from_micros(22_500));
    sender.timeout(deadline);
    assert_eq!(flush(&mut sender, deadline), [(2, 0)]);
}

#[test]
fn probes_repeat_the_oldest_segment_with_back_off() {
    let mut sender = sender(100);
    flush(&mut sender, Duration::ZERO);
    let mut waits = Vec::new();
    let mut now = Duration::ZERO;
    for _ in 0..3 {
        let deadline = sender.deadline().unwrap();
        waits.push(deadline - now);
        now = deadline;
        sender.timeout(now);
        assert_eq!(flush(&mut sender, now).len(), 2);
    }
    assert_eq!(waits[1], 2 * waits[0]);
    assert_eq!(waits[2], 4 * waits[0]);
    assert_eq!(sender.in_flight, 100);
}

#[test]
fn a_closed_window_is_probed() {
    let mut sender = sender(500);
    sender.limit = START + 150;
    assert_eq!(flush(&mut sender, Duration::ZERO), [(0, 0), (1, 100)]);
    let closed = AckInfo { credit: 0, ..ack(150, 1) };
    assert_eq!(sender.acknowledge(20 * MS, &closed, &[]), Ok(true));
    assert_eq!(flush(&mut sender, 20 * MS), []);
    let deadline = sender.deadline().unwrap();
    sender.timeout(deadline);
    let plan = sender.plan(deadline).unwrap();
    assert!(plan.is_ping());
    sender.sent(deadline, &plan);
    let opened = AckInfo { credit: 1000, ..ack(150, 2) };
    assert_eq!(sender.acknowledge(deadline + MS, &opened, &[]), Ok(false));
    assert_eq!(flush(&mut sender, deadline + MS).len(), 4);
}

#[test]
fn acknowledgements_of_unsent_bytes_are_invalid() {
    let mut sender = sender(100);
    flush(&mut sender, Duration::ZERO);
    for (info, ranges) in [(ack(101, 0), vec![]), (ack(0, 1), vec![]), (ack(0, 0), vec![(50, 51)])] {
        assert_eq!(sender.acknowledge(MS, &info, &ranges), Err(InvalidAck));
    }
    assert_eq!(sender.buffered(), 100);
}

#[test]
fn the_end_needs_no_credit_and_completes_the_stream() {
    let mut sender = sender(100);
    sender.limit = START + 100;
    flush(&mut sender, Duration::ZERO);
    sender.finish();
    assert_eq!(flush(&mut sender, Duration::ZERO), [(1, 100)]);
    assert!(!sender.is_complete());
    assert_eq!(sender.acknowledge(MS, &ack(101, 1), &[]), Ok(true));
    assert!(sender.is_complete());
}

#[test]
fn truncated_numbers_expand_to_the_nearest() {
    assert_eq!(expand(5, 3), 5);
    assert_eq!(expand(u32::MAX, 1 << 32), (1 << 32) - 1);
    assert_eq!(expand(1, (1 << 32) - 1), (1 << 32) + 1);
}

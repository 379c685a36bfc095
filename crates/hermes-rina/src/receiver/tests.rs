//! Tests of reassembly: any order of arrival yields the same bytes within the bounds.

use proptest::prelude::*;

use super::*;
use crate::message::Flags;

const START: u64 = 1 << 33;

fn header(number: u32, at: u64, fin: bool) -> DataHeader {
    DataHeader { number, sequence: START + at, flags: Flags { fin, ..Flags::default() }, ..DataHeader::default() }
}

fn receiver(window: u32) -> Receiver {
    Receiver::new(START, window, 4, 100)
}

fn put(receiver: &mut Receiver, at: u64, length: usize) -> Result<(), Dropped> {
    receiver.receive(Duration::ZERO, &header(0, at, false), Bytes::from(vec![7; length]), usize::MAX)
}

#[test]
fn pdus_outside_the_window_are_dropped() {
    let mut receiver = receiver(1000);
    assert_eq!(put(&mut receiver, 950, 51), Err(Dropped::OutsideWindow));
    assert_eq!(put(&mut receiver, 950, 50), Ok(()));
    assert_eq!(put(&mut receiver, 950, 50), Err(Dropped::Duplicate));
    assert_eq!(put(&mut receiver, 940, 20), Err(Dropped::Inconsistent));
    assert_eq!(put(&mut receiver, 0, 100), Ok(()));
    assert_eq!(put(&mut receiver, 0, 100), Err(Dropped::Duplicate));
    let outside = header(0, 0, false);
    let outside = DataHeader { sequence: outside.sequence - 500, ..outside };
    assert_eq!(receiver.receive(Duration::ZERO, &outside, Bytes::from_static(b"x"), 9), Err(Dropped::Duplicate));
    assert_eq!(receiver.buffered(), 150);
}

#[test]
fn ranges_are_bounded() {
    let mut receiver = receiver(1000);
    for at in 1..=4 {
        assert_eq!(put(&mut receiver, at * 100, 10), Ok(()));
    }
    assert_eq!(put(&mut receiver, 500, 10), Err(Dropped::TooManyRanges));
    assert_eq!(put(&mut receiver, 110, 10), Ok(()), "a range that grows needs no slot");
    assert_eq!(receiver.ranges(), [(100, 20), (200, 10), (300, 10), (400, 10)]);
}

#[test]
fn credit_shrinks_while_nobody_reads_and_an_update_follows() {
    let mut receiver = receiver(1000);
    (0..10).for_each(|at| assert_eq!(put(&mut receiver, at * 100, 100), Ok(())));
    assert_eq!(receiver.acknowledgement(Duration::ZERO, usize::MAX).credit, 0);
    assert!(receiver.read(200).is_some() && !receiver.is_ack_due());
    assert!(receiver.read(200).is_some() && receiver.is_ack_due());
    assert_eq!(receiver.acknowledgement(Duration::ZERO, usize::MAX).credit, 400);
    assert!(receiver.read(300).is_some());
    assert_eq!(receiver.acknowledgement(Duration::ZERO, 450).credit, 450, "total memory limits the credit");
}

#[test]
fn every_second_pdu_is_acknowledged_at_once() {
    let mut receiver = receiver(1000);
    let mut put =
        |number, at| receiver.receive(Duration::ZERO, &header(number, at, false), Bytes::from_static(b"x"), 99);
    assert_eq!(put(0, 0), Ok(()));
    assert_eq!(receiver.deadline(), Some(MAX_ACK_DELAY));
    assert!(!receiver.is_ack_due());
    let mut put =
        |number, at| receiver.receive(Duration::ZERO, &header(number, at, false), Bytes::from_static(b"x"), 99);
    assert_eq!(put(1, 1), Ok(()));
    assert!(receiver.is_ack_due());
}

proptest! {
    #[test]
    fn any_order_yields_the_same_bytes(
        sizes in proptest::collection::vec(1usize..900, 1..40),
        order in proptest::collection::vec(any::<u16>(), 0..200),
    ) {
        let mut receiver = Receiver::new(START, 1 << 20, 64, 100);
        let mut at = 0;
        let mut pdus = Vec::new();
        let all: Vec<u8> = (0..sizes.iter().sum()).map(|at: usize| (at * 31 / 7) as u8).collect();
        for (number, size) in sizes.iter().enumerate() {
            let is_last = number + 1 == sizes.len();
            pdus.push((header(number as u32, at as u64, is_last), Bytes::copy_from_slice(&all[at..at + size])));
            at += size;
        }
        let mut read = Vec::new();
        let order = order.iter().map(|at| usize::from(*at) % pdus.len()).chain(0..pdus.len());
        for at in order {
            let (header, payload) = pdus[at].clone();
            let result = receiver.receive(Duration::ZERO, &header, payload, usize::MAX);
            prop_assert!(matches!(result, Ok(()) | Err(Dropped::Duplicate)));
            while let Some(bytes) = receiver.read(333) {
                read.extend_from_slice(&bytes);
            }
        }
        prop_assert!(receiver.is_complete());
        prop_assert_eq!(read, all);
        prop_assert_eq!(receiver.buffered(), 0);
        prop_assert_eq!(receiver.next(), START + at as u64 + 1);
    }
}

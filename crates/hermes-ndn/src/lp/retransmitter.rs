//! Reliability of NDNLPv2: frames that a neighbour does not acknowledge are sent again.
//!
//! In: frames to send, and numbers that the neighbour acknowledges. Out: numbered frames, and frames to send again. A
//! frame is lost if several later ones were acknowledged, or after the timeout of RFC 6298. Never: an unbounded table, or
//! a clock.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;

use super::LpPacket;
use crate::rtt::RttEstimator;

/// The bytes by which the number makes a frame longer.
pub const NUMBER_OVERHEAD: usize = 20;
/// A frame is lost once this many later frames were acknowledged.
const MAX_LATER_ACKS: u32 = 3;
/// The number of times that a frame is sent again.
const MAX_REPEATS: u32 = 3;
/// The number of frames that wait for an acknowledgement. Later frames are sent without a number.
const MAX_WAITING: usize = 256;

/// Counts of frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetransmitterCounters {
    /// Frames that were sent again.
    pub repeated: u64,
    /// Frames that were lost in spite of all repetitions.
    pub lost: u64,
    /// Frames without a number, because too many waited.
    pub unnumbered: u64,
}

/// Numbers frames, and keeps each until it is acknowledged.
#[derive(Debug)]
pub struct Retransmitter {
    next: u64,
    /// In the order of sending.
    waiting: VecDeque<Unacknowledged>,
    rtt: RttEstimator,
    /// Counts of frames.
    pub counters: RetransmitterCounters,
}

#[derive(Debug)]
struct Unacknowledged {
    number: u64,
    frame: LpPacket,
    sent: Duration,
    repeats: u32,
    later_acks: u32,
}

impl Retransmitter {
    /// Numbers frames from this number on. A random one distinguishes this sender from an earlier one.
    pub fn new(first: u64) -> Self {
        Self {
            next: first,
            waiting: VecDeque::new(),
            rtt: RttEstimator::default(),
            counters: RetransmitterCounters::default(),
        }
    }

    /// Numbers and encodes a frame that is sent now. `now` is the time since any fixed moment.
    pub fn send(&mut self, frame: LpPacket, now: Duration) -> Bytes {
        if frame.fragment.is_none() {
            return frame.encode();
        }
        if self.waiting.len() >= MAX_WAITING {
            self.counters.unnumbered += 1;
            return frame.encode();
        }
        self.number(frame, now, 0)
    }

    fn number(&mut self, frame: LpPacket, now: Duration, repeats: u32) -> Bytes {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        let frame = LpPacket { tx_sequence: Some(number), ..frame };
        let encoded = frame.encode();
        self.waiting.push_back(Unacknowledged { number, frame, sent: now, repeats, later_acks: 0 });
        encoded
    }

    /// Takes the numbers that a frame acknowledges. Returns the frames to send again.
    pub fn take_acks(&mut self, acks: &[u64], now: Duration) -> Vec<Bytes> {
        for ack in acks {
            let Some(at) = self.waiting.iter().position(|waiting| waiting.number == *ack) else { continue };
            let Some(acknowledged) = self.waiting.remove(at) else { continue };
            self.rtt.sample(now.saturating_sub(acknowledged.sent));
            self.waiting.iter_mut().take(at).for_each(|earlier| earlier.later_acks += 1);
        }
        self.repeat(now, |waiting| waiting.later_acks >= MAX_LATER_ACKS)
    }

    /// The time of the next timeout; `None` if no frame waits.
    pub fn next_timeout(&self) -> Option<Duration> {
        Some(self.waiting.front()?.sent + self.rtt.timeout())
    }

    /// Returns the frames to send again because their timeout has passed.
    pub fn handle_timeout(&mut self, now: Duration) -> Vec<Bytes> {
        let timeout = self.rtt.timeout();
        let repeated = self.repeat(now, |waiting| now >= waiting.sent + timeout);
        if !repeated.is_empty() {
            self.rtt.back_off();
        }
        repeated
    }

    fn repeat(&mut self, now: Duration, is_lost: impl Fn(&Unacknowledged) -> bool) -> Vec<Bytes> {
        let (lost, kept) = std::mem::take(&mut self.waiting).into_iter().partition(is_lost);
        self.waiting = kept;
        let mut again = Vec::new();
        for Unacknowledged { frame, repeats, .. } in Vec::from(lost) {
            if repeats < MAX_REPEATS {
                self.counters.repeated += 1;
                again.push(self.number(frame, now, repeats + 1));
            } else {
                self.counters.lost += 1;
            }
        }
        again
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    fn frame(byte: u8) -> LpPacket {
        LpPacket::bare(vec![byte].into())
    }

    fn content(bytes: &Bytes) -> (u64, u8) {
        let frame = LpPacket::decode(bytes.clone()).unwrap();
        (frame.tx_sequence.unwrap(), frame.fragment.unwrap()[0])
    }

    #[test]
    fn acknowledged_frames_are_forgotten() {
        let mut sender = Retransmitter::new(u64::MAX);
        assert_eq!(content(&sender.send(frame(1), Duration::ZERO)), (u64::MAX, 1));
        assert_eq!(content(&sender.send(frame(2), Duration::ZERO)), (0, 2));
        assert!(sender.take_acks(&[0, u64::MAX, 7], MILLISECOND).is_empty());
        assert_eq!(sender.next_timeout(), None);
        assert_eq!(sender.counters, RetransmitterCounters::default());
    }

    #[test]
    fn a_frame_is_lost_after_three_later_acknowledgements() {
        let mut sender = Retransmitter::new(0);
        for byte in 0..5 {
            sender.send(frame(byte), Duration::ZERO);
        }
        assert!(sender.take_acks(&[1, 2], MILLISECOND).is_empty());
        let again = sender.take_acks(&[3], MILLISECOND);
        assert_eq!(again.iter().map(content).collect::<Vec<_>>(), [(5, 0)]);
        // The repeated one is the latest now.
        assert!(sender.take_acks(&[4, 5], MILLISECOND).is_empty());
        assert_eq!(sender.next_timeout(), None);
        assert_eq!(sender.counters.repeated, 1);
    }

    #[test]
    fn silence_repeats_a_frame_three_times() {
        let mut sender = Retransmitter::new(0);
        sender.send(frame(1), Duration::ZERO);
        let mut times = Vec::new();
        while let Some(time) = sender.next_timeout() {
            assert!(sender.handle_timeout(time - MILLISECOND).is_empty());
            sender.handle_timeout(time);
            times.push(time.as_secs());
        }
        // The timeout doubles, up to four seconds.
        assert_eq!(times, [1, 3, 7, 11]);
        assert_eq!(sender.counters, RetransmitterCounters { repeated: 3, lost: 1, unnumbered: 0 });
    }

    #[test]
    fn the_table_is_bounded() {
        let mut sender = Retransmitter::new(0);
        for _ in 0..MAX_WAITING {
            sender.send(frame(1), Duration::ZERO);
        }
        let sent = LpPacket::decode(sender.send(frame(1), Duration::ZERO)).unwrap();
        assert_eq!((sent.tx_sequence, sender.counters.unnumbered), (None, 1));
        // A frame that only acknowledges needs no answer.
        let ack = LpPacket { acks: vec![1], ..LpPacket::default() };
        assert_eq!(sender.send(ack.clone(), Duration::ZERO), ack.encode());
    }
}

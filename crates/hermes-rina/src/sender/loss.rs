//! Acknowledgements, losses and timeouts of a sender.
//!
//! In: acknowledgements, time. Out: segments marked as acknowledged or lost, probes. Never: a PDU.

use std::time::Duration;

use super::{Segment, SegmentState, Sender, expand};
use crate::message::{AckInfo, DELAY_UNIT_US};

/// Reordering, in PDUs, after which a segment is lost.
const PACKET_THRESHOLD: u64 = 3;
/// Number of segments that a probe timeout sends.
const PROBES: u8 = 2;
/// Number of consecutive probe timeouts that mean persistent congestion.
const PERSISTENT_TIMEOUTS: u32 = 3;

/// An acknowledgement of something that was never sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InvalidAck;

impl Sender {
    /// Processes an acknowledgement. `Ok(true)`: it has acknowledged something new.
    ///
    /// # Errors
    /// The acknowledgement covers something that was never sent.
    pub(crate) fn acknowledge(
        &mut self,
        now: Duration,
        info: &AckInfo,
        ranges: &[(u32, u32)],
    ) -> Result<bool, InvalidAck> {
        let (numbers, largest) = (self.first_number + self.log.len() as u64, self.largest);
        let echo = info.echo.map(|echo| expand(echo, numbers)).filter(|echo| largest.is_none_or(|old| *echo > old));
        let end = |range: &(u32, u32)| info.sequence + u64::from(range.0) + u64::from(range.1);
        let is_beyond = info.sequence > self.next || ranges.iter().any(|range| end(range) > self.next);
        if is_beyond || echo.is_some_and(|echo| echo >= numbers) {
            return Err(InvalidAck);
        }
        self.limit = self.limit.max(info.sequence + u64::from(info.credit));
        let sent = echo.and_then(|echo| self.echoed(now, echo, info));
        let acked = self.mark(info.sequence, ranges);
        if acked > 0 || echo.is_some() {
            self.timeouts = 0;
            self.probes = 0;
        }
        if let (Some(sent), true) = (sent, info.marks != self.marks) {
            self.marks = info.marks;
            self.cubic.congestion(now, sent);
        }
        let lost = self.detect_losses(now);
        if let (Some(sent), true) = (sent, acked > 0 && lost.is_none()) {
            let is_limited = echo.is_some_and(|echo| echo < self.limited_until);
            if is_limited {
                self.cubic.acknowledged(now, acked, sent, self.rtt.smoothed());
            }
        }
        self.release();
        Ok(acked > 0)
    }

    /// Takes the sample of a number that was echoed for the first time. Returns when it was sent.
    fn echoed(&mut self, now: Duration, echo: u64, info: &AckInfo) -> Option<Duration> {
        self.largest = Some(echo);
        let at = usize::try_from(echo.checked_sub(self.first_number)?).ok()?;
        let sent = self.log.get(at)?.sent;
        let delay = Duration::from_micros(u64::from(info.delay) * DELAY_UNIT_US);
        self.rtt.sample(now.saturating_sub(sent), delay);
        Some(sent)
    }

    /// Marks acknowledged segments. Returns the number of bytes that are newly acknowledged.
    fn mark(&mut self, sequence: u64, ranges: &[(u32, u32)]) -> u64 {
        let Some(base) = self.segments.front().map(|first| first.start) else { return 0 };
        let mut gaps = std::mem::take(&mut self.gaps);
        gaps.clear();
        for (offset, length) in ranges {
            let start = (sequence + u64::from(*offset)).max(base);
            let end = sequence + u64::from(*offset) + u64::from(*length);
            // An honest peer reports whole segments; any other one must not make the set large.
            let has_slot = self.acked.len() <= self.segments.len() || self.acked.joins(&(start..end));
            if start < end && has_slot {
                self.acked.insert(start..end, |gap| gaps.push(gap));
            }
        }
        let mut acked = 0;
        let mut mark = |segment: &mut Segment| {
            if segment.state == SegmentState::InFlight {
                self.in_flight -= segment.span();
            }
            if segment.state != SegmentState::Acked {
                acked += segment.span();
            }
            segment.state = SegmentState::Acked;
        };
        // The next release removes these segments, so that each is visited once.
        self.segments.iter_mut().take_while(|one| one.end() <= sequence).for_each(&mut mark);
        for gap in &gaps {
            let first = self.segments.partition_point(|one| one.start < gap.start);
            self.segments.range_mut(first..).take_while(|one| one.end() <= gap.end).for_each(&mut mark);
        }
        self.gaps = gaps;
        acked
    }

    /// Marks lost segments. Returns when the last one of them was sent.
    fn detect_losses(&mut self, now: Duration) -> Option<Duration> {
        self.loss_time = None;
        let (largest, delay) = (self.largest?, self.rtt.loss_delay());
        let mut newest = None;
        while let Some(front) = self.log.front().filter(|_| self.first_number <= largest) {
            let (number, sent, id) = (self.first_number, front.sent, front.segment);
            let at = id.and_then(|id| id.checked_sub(self.first_segment)).map(|at| at as usize);
            let segment = at.and_then(|at| self.segments.get_mut(at));
            if let Some(segment) = segment.filter(|one| one.number == number && one.state == SegmentState::InFlight) {
                if number + PACKET_THRESHOLD > largest && sent + delay > now {
                    self.loss_time = Some(sent + delay);
                    break;
                }
                segment.state = SegmentState::Lost;
                self.in_flight -= segment.span();
                self.lost.extend(id);
                newest = Some(sent);
            }
            self.log.pop_front();
            self.first_number += 1;
        }
        if let Some(sent) = newest {
            self.cubic.congestion(now, sent);
        }
        newest
    }

    /// Releases acknowledged segments and their bytes.
    fn release(&mut self) {
        while self.segments.front().is_some_and(|first| first.state == SegmentState::Acked) {
            self.segments.pop_front();
            self.first_segment += 1;
        }
        let base = self.segments.front().map_or(self.next, |first| first.start);
        self.buffer.release(base);
        self.acked.remove_below(base);
        if self.segments.is_empty() {
            self.lost.clear();
        }
    }

    /// Whether bytes or the end wait for credit and nothing in flight will bring it.
    fn is_stalled(&self) -> bool {
        self.in_flight == 0 && self.next < self.buffer.end() && self.limit <= self.next
    }

    /// Returns the time of the next timeout.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        if self.loss_time.is_some() {
            return self.loss_time;
        }
        (self.in_flight > 0 || self.is_stalled()).then(|| self.timer_start + self.rtt.pto(self.timeouts))
    }

    /// Handles a timeout that has passed: marks losses, or sends probes.
    pub(crate) fn timeout(&mut self, now: Duration) {
        if self.deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        if self.loss_time.is_some() {
            self.detect_losses(now);
            return;
        }
        self.timeouts = self.timeouts.saturating_add(1);
        self.timer_start = now;
        if self.is_stalled() {
            self.must_ping = true;
            return;
        }
        self.probes = PROBES;
        if self.timeouts == PERSISTENT_TIMEOUTS {
            self.cubic.collapse(now);
        }
    }
}

//! The sending half of a flow: DTP segments, and the DTCP state that decides when they are sent.
//!
//! In: bytes, acknowledgements, time. Out: segments to send, and the time of the next timeout. Never: a header.
//!
//! A segment is a fixed range of sequence numbers; each transmission of it has a new PDU number. A segment is lost once
//! a PDU with a number at least three higher has arrived, or one that was sent 9/8 round trips later (RFC 9002, section
//! 6.1). The peer echoes the highest number that it received, so that neither round trips nor losses are ambiguous
//! after a retransmission. The end of the stream occupies one sequence number.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use crate::cubic::Cubic;
use crate::message::{AckInfo, DELAY_UNIT_US};
use crate::range_set::RangeSet;
use crate::rtt::Rtt;
use crate::send_buffer::SendBuffer;

/// Reordering, in PDUs, after which a segment is lost.
const PACKET_THRESHOLD: u64 = 3;
/// Number of segments that a probe timeout sends.
const PROBES: u8 = 2;
/// Number of consecutive probe timeouts that mean persistent congestion.
const PERSISTENT_TIMEOUTS: u32 = 3;

/// A range of sequence numbers that is sent as one PDU.
#[derive(Debug)]
struct Segment {
    start: u64,
    /// Length of the payload, in bytes.
    length: u32,
    is_fin: bool,
    /// The number of the latest transmission.
    number: u64,
    state: SegmentState,
}

impl Segment {
    fn end(&self) -> u64 {
        self.start + self.span()
    }

    fn span(&self) -> u64 {
        u64::from(self.length) + u64::from(self.is_fin)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SegmentState {
    InFlight,
    Lost,
    Acked,
}

/// A PDU that was sent.
#[derive(Debug)]
struct Transmission {
    /// The segment. `None`: a probe without payload.
    segment: Option<u64>,
    sent: Duration,
}

/// The next PDU to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    source: Source,
    /// The sequence number of the first byte.
    pub(crate) start: u64,
    /// Length of the payload, in bytes.
    pub(crate) length: usize,
    pub(crate) is_fin: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    New,
    Again(u64),
    Ping,
}

impl Plan {
    /// Whether the peer must answer although the PDU has no payload.
    pub(crate) fn is_ping(&self) -> bool {
        self.source == Source::Ping
    }

    pub(crate) fn is_repeated(&self) -> bool {
        matches!(self.source, Source::Again(_))
    }
}

/// An acknowledgement of something that was never sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InvalidAck;

/// The state of the sending half.
#[derive(Debug)]
pub(crate) struct Sender {
    buffer: SendBuffer,
    /// The first sequence number that was not sent.
    next: u64,
    is_finished: bool,
    /// The sequence number before which the peer accepts bytes.
    limit: u64,
    unit: usize,
    /// Segments from the first unacknowledged one, in order, without gaps.
    segments: VecDeque<Segment>,
    /// The identifier of the first segment; the others count up.
    first_segment: u64,
    /// Transmissions in order; the first one has the number `first_number`.
    log: VecDeque<Transmission>,
    first_number: u64,
    /// Segments to send again. Entries that were acknowledged since are skipped.
    lost: VecDeque<u64>,
    acked: RangeSet,
    in_flight: u64,
    /// The highest number that the peer has echoed.
    largest: Option<u64>,
    /// Numbers below were sent while the congestion window was the limit.
    limited_until: u64,
    marks: u16,
    rtt: Rtt,
    cubic: Cubic,
    loss_time: Option<Duration>,
    last_sent: Duration,
    /// The start of the probe timeout: the last PDU, or the last timeout if its probe was not sent yet.
    timer_start: Duration,
    timeouts: u32,
    probes: u8,
    must_ping: bool,
    gaps: Vec<Range<u64>>,
}

impl Sender {
    /// `unit` is the largest payload of a PDU. Nothing is sent before [`Sender::open`].
    pub(crate) fn new(now: Duration, start: u64, unit: usize, rtt: Option<Duration>) -> Self {
        Self {
            buffer: SendBuffer::new(start),
            next: start,
            is_finished: false,
            limit: start,
            unit,
            segments: VecDeque::new(),
            first_segment: 0,
            log: VecDeque::new(),
            first_number: 0,
            lost: VecDeque::new(),
            acked: RangeSet::default(),
            in_flight: 0,
            largest: None,
            limited_until: 0,
            marks: 0,
            rtt: Rtt::new(rtt),
            cubic: Cubic::new(unit),
            loss_time: None,
            last_sent: now,
            timer_start: now,
            timeouts: 0,
            probes: 0,
            must_ping: false,
            gaps: Vec::new(),
        }
    }

    /// Allows the first bytes: the flow is allocated, with this credit and this largest payload.
    pub(crate) fn open(&mut self, credit: u32, unit: usize, rtt: Option<Duration>) {
        self.limit = self.next + u64::from(credit);
        self.unit = unit;
        (self.rtt, self.cubic) = (Rtt::new(rtt), Cubic::new(unit));
    }

    /// Returns the number of bytes that were written and not acknowledged.
    pub(crate) fn buffered(&self) -> usize {
        self.buffer.len()
    }

    pub(crate) fn rtt(&self) -> &Rtt {
        &self.rtt
    }

    pub(crate) fn congestion_window(&self) -> u64 {
        self.cubic.window()
    }

    pub(crate) fn write(&mut self, bytes: Bytes) {
        self.buffer.push(bytes);
    }

    pub(crate) fn finish(&mut self) {
        self.is_finished = true;
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// Whether the peer has acknowledged everything, including the end.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_finished && self.next > self.buffer.end() && self.segments.is_empty()
    }

    /// Requests a PDU that the peer answers, to test whether the peer is alive.
    pub(crate) fn ping(&mut self) {
        self.must_ping = true;
    }

    /// Returns the next PDU. The caller sends it and calls [`Sender::sent`], or drops the plan.
    pub(crate) fn plan(&mut self, now: Duration) -> Option<Plan> {
        if self.probes > 0 {
            if let Some(at) = self.segments.iter().position(|one| one.state != SegmentState::Acked) {
                return self.segments.get(at).map(|one| self.again(self.first_segment + at as u64, one));
            }
            self.probes = 0;
            self.must_ping = true;
        }
        if self.must_ping {
            return Some(Plan { source: Source::Ping, start: self.next, length: 0, is_fin: false });
        }
        while let Some(id) = self.lost.front().copied() {
            match self.segment(id) {
                Some(segment) if segment.state == SegmentState::Lost => {
                    let plan = self.again(id, segment);
                    return self.fits(plan.length).then_some(plan);
                }
                _ => self.lost.pop_front(),
            };
        }
        let (end, start) = (self.buffer.end(), self.next);
        if start > end {
            return None;
        }
        let allowed = (end - start).min(self.limit.saturating_sub(start)).min(self.unit as u64) as usize;
        // The end itself needs no credit.
        let is_fin = self.is_finished && start + allowed as u64 == end;
        if allowed == 0 && !is_fin {
            return None;
        }
        if self.in_flight == 0 && now.saturating_sub(self.last_sent) > self.rtt.pto(0) {
            self.cubic.restart();
        }
        self.fits(allowed).then_some(Plan { source: Source::New, start, length: allowed, is_fin })
    }

    fn again(&self, id: u64, segment: &Segment) -> Plan {
        let source = Source::Again(id);
        Plan { source, start: segment.start, length: segment.length as usize, is_fin: segment.is_fin }
    }

    /// Whether the congestion window allows a payload. A flow without PDUs in flight may always send one.
    fn fits(&mut self, length: usize) -> bool {
        if self.in_flight == 0 || self.in_flight + length as u64 <= self.cubic.window() {
            return true;
        }
        self.limited_until = self.first_number + self.log.len() as u64;
        false
    }

    /// Appends the payload of a plan.
    pub(crate) fn copy(&self, plan: &Plan, out: &mut BytesMut) {
        self.buffer.copy(plan.start, plan.length, out);
    }

    /// Records that the plan was sent. Returns the number of the PDU.
    pub(crate) fn sent(&mut self, now: Duration, plan: &Plan) -> u64 {
        let number = self.first_number + self.log.len() as u64;
        (self.last_sent, self.timer_start) = (now, now);
        self.probes = self.probes.saturating_sub(1);
        let segment = match plan.source {
            Source::Ping => {
                self.must_ping = false;
                None
            }
            Source::New => {
                let (start, length) = (plan.start, plan.length as u32);
                let segment = Segment { start, length, is_fin: plan.is_fin, number, state: SegmentState::InFlight };
                self.next += segment.span();
                self.in_flight += segment.span();
                self.segments.push_back(segment);
                Some(self.first_segment + self.segments.len() as u64 - 1)
            }
            Source::Again(id) => {
                let at = id.wrapping_sub(self.first_segment) as usize;
                if let Some(segment) = self.segments.get_mut(at) {
                    if segment.state == SegmentState::Lost {
                        self.in_flight += segment.span();
                    }
                    (segment.number, segment.state) = (number, SegmentState::InFlight);
                }
                Some(id)
            }
        };
        self.log.push_back(Transmission { segment, sent: now });
        number
    }

    fn segment(&self, id: u64) -> Option<&Segment> {
        self.segments.get(usize::try_from(id.checked_sub(self.first_segment)?).ok()?)
    }

    /// Processes an acknowledgement. `Ok(true)`: it has acknowledged something new.
    ///
    /// # Errors
    /// It acknowledges something that was never sent.
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

/// Returns the number nearest to `expected` whose low 32 bits are `truncated`.
pub(crate) fn expand(truncated: u32, expected: u64) -> u64 {
    let difference = truncated.wrapping_sub(expected as u32) as i32;
    expected.saturating_add_signed(i64::from(difference))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests;

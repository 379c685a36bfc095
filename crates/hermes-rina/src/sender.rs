//! The sending half of a flow: DTP segments, and the DTCP state that decides when they are sent.
//!
//! In: bytes, acknowledgements, time. Out: segments to send, and the time of the next timeout. Never: a header.
//!
//! A segment is a fixed range of sequence numbers; each transmission of it has a new PDU number. A segment is lost once
//! a PDU with a number at least three higher has arrived, or one that was sent 9/8 round trips later (RFC 9002, section
//! 6.1). The peer echoes the highest number that it received, so that neither round trips nor losses are ambiguous
//! after a retransmission. The end of the stream occupies one sequence number.

mod loss;

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use crate::cubic::Cubic;
use crate::range_set::RangeSet;
use crate::rtt::Rtt;
use crate::send_buffer::SendBuffer;

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
}

/// Returns the number nearest to `expected` whose low 32 bits are `truncated`.
pub(crate) fn expand(truncated: u32, expected: u64) -> u64 {
    let difference = truncated.wrapping_sub(expected as u32) as i32;
    expected.saturating_add_signed(i64::from(difference))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests;

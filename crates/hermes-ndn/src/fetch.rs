//! Fetches the segments of a name: version discovery, a window, and retransmission.
//!
//! In: a name, packets that arrive, and the time. Out: Interests to send, and content in order. Versions are discovered
//! by RDR metadata (`32=metadata`) and by prefix, at once. The window grows and shrinks like that of TCP (AIMD, slow
//! start), and also shrinks on a congestion mark. Timeouts follow RFC 6298. Never: I/O, a clock, or content whose
//! signature was not checked: the caller checks each packet before [`Fetch::take_data`].

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use bytes::Bytes;

use crate::lp::NackReason;
use crate::name::{Component, Name, types};
use crate::nonce::NonceSequence;
use crate::packet::{APPLICATION_NACK, Data, Interest};
use crate::rtt::RttEstimator;
use crate::tlv::Element;

/// The value of the component that names metadata (RDR).
const METADATA: &[u8] = b"metadata";
const INITIAL_WINDOW: f64 = 4.0;
/// The largest number of a segment. Content of more would not end in a lifetime.
pub const MAX_SEGMENT: u64 = 1 << 40;
/// A segment counts as lost when this many later ones were answered (RFC 9002, section 6.1.1).
const OVERTAKEN: u32 = 3;
/// The type of the element that holds a name in metadata.
const NAME: u32 = 7;

/// The limits of a fetch.
#[derive(Clone, Copy, Debug)]
pub struct FetchLimits {
    /// Interests under way at once.
    pub max_window: usize,
    /// Segments that wait for an earlier one, in memory.
    pub max_ahead: u64,
    /// The longest wait for the answer to one Interest, with all repetitions.
    pub patience: Duration,
}

impl Default for FetchLimits {
    fn default() -> Self {
        Self { max_window: 256, max_ahead: 512, patience: Duration::from_secs(10) }
    }
}

/// The reason why a fetch failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// All repetitions of an Interest stayed without an answer.
    #[error("no Data answered in time")]
    NoAnswer,
    /// The network returned an Interest.
    #[error("the network has no route to the name")]
    NoRoute,
    /// The producer says that there is no such content.
    #[error("the producer has no such content")]
    NotFound,
    /// The producer contradicts itself.
    #[error("the producer sent an unexpected segment")]
    Unexpected,
}

struct Sent {
    interest: Interest,
    first: Duration,
    last: Duration,
    is_repeated: bool,
    /// The number of later segments that were answered before it.
    overtaken: u32,
}

impl Sent {
    /// A prefix asks for content of its name, not for all content whose name begins so. A refusal is for one name.
    fn is_answered_by(&self, data: &Data) -> bool {
        let is_content = || data.content_prefixes().any(|name| name == self.interest.name);
        data.answers(&self.interest)
            && (!self.interest.can_be_prefix || is_content() || data.name == self.interest.name)
    }
}

/// The number of an Interest under way: a segment, or one of the discovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Wanted {
    Metadata,
    Prefix,
    Segment(u64),
}

/// The progress of a fetch.
enum Phase {
    /// The version and the segmentation are unknown.
    Discovery,
    /// The segments have this prefix.
    Segments(Name),
    /// All content has been handed out.
    Complete,
}

/// The fetch of one name.
pub struct Fetch {
    name: Name,
    phase: Phase,
    limits: FetchLimits,
    window: f64,
    threshold: f64,
    rtt: RttEstimator,
    under_way: BTreeMap<Wanted, Sent>,
    /// Ways of discovery for which the network has no route.
    unroutable: Vec<Wanted>,
    /// Interests to repeat, which do not count as new.
    repeat: Vec<Wanted>,
    next: u64,
    last: Option<u64>,
    /// The first segment that the producer says it does not have. Content without a last segment in its packets ends
    /// before it.
    absent: Option<u64>,
    /// Content that waits for earlier segments.
    waiting: BTreeMap<u64, Bytes>,
    next_out: u64,
    /// The window does not shrink again before this time.
    calm_until: Duration,
    nonces: NonceSequence,
    /// The first Data of the content, for what it says of all: version, freshness.
    first: Option<Data>,
}

impl Fetch {
    /// Begins to fetch a name. A name that ends with a version or a segment needs no discovery. `nonce` is random.
    pub fn new(name: Name, limits: FetchLimits, nonce: u32) -> Self {
        let last = name.last();
        let kind = last.as_ref().map(Component::kind);
        let (phase, next) = match kind {
            Some(types::VERSION) => (Phase::Segments(name.clone()), 0),
            Some(types::SEGMENT) => {
                let number = last.and_then(|last| last.number(types::SEGMENT)).unwrap_or_default();
                (Phase::Segments(name.parent()), number)
            }
            _ => (Phase::Discovery, 0),
        };
        // A single segment is wanted, and no more.
        let last = (kind == Some(types::SEGMENT)).then_some(next);
        Self {
            name,
            phase,
            limits,
            window: INITIAL_WINDOW,
            threshold: f64::INFINITY,
            rtt: RttEstimator::default(),
            under_way: BTreeMap::new(),
            unroutable: Vec::new(),
            repeat: Vec::new(),
            next,
            last,
            absent: None,
            waiting: BTreeMap::new(),
            next_out: next,
            calm_until: Duration::ZERO,
            nonces: NonceSequence::new(nonce),
            first: None,
        }
    }

    /// Begins to fetch some segments under a prefix, of which each is known to exist.
    pub fn segments(prefix: Name, segments: RangeInclusive<u64>, limits: FetchLimits, nonce: u32) -> Self {
        let (first, last) = segments.into_inner();
        let name = prefix.child(&Component::numbered(types::SEGMENT, first));
        Self { last: Some(last), ..Self::new(name, limits, nonce) }
    }

    /// The number of the last segment, once it is known.
    pub fn last_segment(&self) -> Option<u64> {
        self.last
    }

    /// The first Data of the content, once it has arrived.
    pub fn first(&self) -> Option<&Data> {
        self.first.as_ref()
    }

    /// Whether all content has been handed out.
    pub fn is_complete(&self) -> bool {
        matches!(self.phase, Phase::Complete)
    }

    /// Returns the next Interest to send; `None` while the window is full.
    pub fn next_interest(&mut self, now: Duration) -> Option<Interest> {
        if let Some(wanted) = self.repeat.pop() {
            let nonce = self.nonces.next_nonce();
            let sent = self.under_way.get_mut(&wanted)?;
            sent.last = now;
            sent.is_repeated = true;
            sent.overtaken = 0;
            sent.interest.nonce = Some(nonce);
            return Some(sent.interest.clone());
        }
        let (wanted, interest) = match &self.phase {
            Phase::Discovery => self.next_discovery()?,
            Phase::Segments(prefix) => {
                let has_room = self.under_way.len() < self.window.min(self.limits.max_window as f64) as usize;
                let is_wanted = self.last.is_none_or(|last| self.next <= last)
                    && self.absent.is_none_or(|absent| self.next < absent);
                if !has_room || !is_wanted || self.next - self.next_out >= self.limits.max_ahead {
                    return None;
                }
                let name = prefix.child(&Component::numbered(types::SEGMENT, self.next));
                // Without a version, stored segments may be those of older content.
                let has_version = prefix.last().is_some_and(|last| last.kind() == types::VERSION);
                (Wanted::Segment(self.next), Interest { must_be_fresh: !has_version, ..Interest::new(name) })
            }
            Phase::Complete => return None,
        };
        if let Wanted::Segment(_) = wanted {
            self.next += 1;
        }
        let interest = Interest {
            nonce: Some(self.nonces.next_nonce()),
            lifetime: Some(self.rtt.timeout().max(MIN_LIFETIME)),
            ..interest
        };
        self.under_way.insert(
            wanted,
            Sent { interest: interest.clone(), first: now, last: now, is_repeated: false, overtaken: 0 },
        );
        Some(interest)
    }

    fn next_discovery(&self) -> Option<(Wanted, Interest)> {
        let by_prefix = |name| Interest { can_be_prefix: true, must_be_fresh: true, ..Interest::new(name) };
        let is_new = |wanted: &Wanted| !self.under_way.contains_key(wanted) && !self.unroutable.contains(wanted);
        let wanted = [Wanted::Prefix, Wanted::Metadata].into_iter().find(is_new)?;
        let metadata = || self.name.child(&Component::new(types::KEYWORD, METADATA));
        Some((wanted, by_prefix(if wanted == Wanted::Prefix { self.name.clone() } else { metadata() })))
    }

    /// Whether Data answers an Interest that is under way.
    pub fn awaits(&self, data: &Data) -> bool {
        self.answered(data).is_some()
    }

    /// Returns the Interest that Data answers.
    fn answered(&self, data: &Data) -> Option<Wanted> {
        let number = data.name.last().and_then(|last| last.number(types::SEGMENT));
        let segment = number.map(Wanted::Segment);
        let is_segment = |wanted: &Wanted| self.under_way.get(wanted).is_some_and(|sent| sent.is_answered_by(data));
        let others = || self.under_way.iter().find(|(_, sent)| sent.is_answered_by(data)).map(|(wanted, _)| *wanted);
        segment.filter(is_segment).or_else(others)
    }

    /// Takes a Data packet whose signature is valid. A packet that was not asked for changes nothing. `is_marked` tells
    /// of a congestion mark.
    ///
    /// # Errors
    /// The producer has no such content, or contradicts itself.
    pub fn take_data(&mut self, data: Data, is_marked: bool, now: Duration) -> Result<(), FetchError> {
        let Some(wanted) = self.answered(&data) else { return Ok(()) };
        if let Some(sent) = self.under_way.remove(&wanted)
            && !sent.is_repeated
        {
            self.rtt.sample(now.saturating_sub(sent.last));
        }
        if is_marked {
            self.shrink(now);
        } else {
            self.grow();
        }
        self.repeat_overtaken(wanted, now);
        if data.content_type == APPLICATION_NACK {
            return self.take_refusal(wanted);
        }
        match wanted {
            Wanted::Segment(number) => self.take_segment(number, data),
            Wanted::Metadata | Wanted::Prefix => self.take_discovered(data),
        }
    }

    /// Takes the producer's answer that it has nothing of this name.
    fn take_refusal(&mut self, wanted: Wanted) -> Result<(), FetchError> {
        match wanted {
            Wanted::Prefix => Err(FetchError::NotFound),
            // A producer without metadata may have the content.
            Wanted::Metadata if self.unroutable.is_empty() => {
                self.unroutable.push(wanted);
                Ok(())
            }
            Wanted::Metadata => Err(FetchError::NotFound),
            // The content ends before it: a pipeline asks for segments before it knows the last one.
            Wanted::Segment(number) if number > 0 && self.last.is_none() => {
                let absent = self.absent.map_or(number, |absent| absent.min(number));
                if self.waiting.range(absent..).next().is_some() {
                    return Err(FetchError::Unexpected);
                }
                self.absent = Some(absent);
                self.repeat.retain(|wanted| !matches!(wanted, Wanted::Segment(number) if *number >= absent));
                self.under_way.retain(|wanted, _| !matches!(wanted, Wanted::Segment(number) if *number >= absent));
                if absent <= self.next_out {
                    self.phase = Phase::Complete;
                }
                Ok(())
            }
            Wanted::Segment(_) => Err(FetchError::NotFound),
        }
    }

    /// Repeats segments that several later ones have overtaken, so that a loss costs no timeout.
    fn repeat_overtaken(&mut self, answered: Wanted, now: Duration) {
        let mut is_lost = false;
        for (wanted, sent) in self.under_way.range_mut(..answered) {
            sent.overtaken += 1;
            // A repeated Interest was sent after those that overtake it now.
            if sent.overtaken == OVERTAKEN && !sent.is_repeated {
                self.repeat.push(*wanted);
                is_lost = true;
            }
        }
        if is_lost {
            self.shrink(now);
        }
    }

    /// Learns the version and the segmentation from the answer to a discovery.
    fn take_discovered(&mut self, data: Data) -> Result<(), FetchError> {
        if !matches!(self.phase, Phase::Discovery) {
            return Ok(());
        }
        let marker = data.name.components().nth(self.name.len());
        if marker.is_some_and(|part| part.kind() == types::KEYWORD && part.value() == METADATA) {
            let mut content = data.content.clone();
            let versioned = match Element::take(&mut content) {
                Ok(Some(name)) if name.kind == NAME => Name::decode(name.value).map_err(|_| FetchError::Unexpected)?,
                _ => return Err(FetchError::Unexpected),
            };
            // Metadata of another name would lead the client elsewhere.
            if !self.name.is_prefix_of(&versioned) {
                return Err(FetchError::Unexpected);
            }
            self.begin_segments(versioned);
            return Ok(());
        }
        let segment = data.name.last().and_then(|last| last.number(types::SEGMENT));
        match segment {
            // The content is one packet without a segment number.
            None => {
                self.under_way.clear();
                (self.last, self.next) = (Some(0), 1);
                self.phase = Phase::Segments(data.name.clone());
                self.hold(0, data);
                Ok(())
            }
            Some(number) => {
                self.begin_segments(data.name.parent());
                if number == 0 {
                    self.next = 1;
                    return self.take_segment(0, data);
                }
                Ok(())
            }
        }
    }

    fn begin_segments(&mut self, prefix: Name) {
        self.under_way.clear();
        self.repeat.clear();
        self.phase = Phase::Segments(prefix);
    }

    fn take_segment(&mut self, number: u64, data: Data) -> Result<(), FetchError> {
        if let Some(last) = data.final_block.as_ref().and_then(|last| last.number(types::SEGMENT)) {
            if last > MAX_SEGMENT || last < number && self.last.is_none_or(|known| known != number) {
                return Err(FetchError::Unexpected);
            }
            if self.last.is_none() {
                self.last = Some(last);
                // Interests for segments beyond the last one would only time out.
                self.under_way.retain(|wanted, _| !matches!(wanted, Wanted::Segment(number) if *number > last));
            }
        }
        self.hold(number, data);
        Ok(())
    }

    fn hold(&mut self, number: u64, data: Data) {
        if number >= self.next_out {
            self.waiting.insert(number, data.content.clone());
        }
        if self.first.is_none() {
            self.first = Some(data);
        }
    }

    /// The next content in order; `None` if it has not arrived, or all was handed out.
    pub fn next_content(&mut self) -> Option<Bytes> {
        let content = self.waiting.remove(&self.next_out)?;
        if self.last == Some(self.next_out) || self.absent == Some(self.next_out + 1) {
            self.phase = Phase::Complete;
            self.under_way.clear();
        }
        self.next_out += 1;
        Some(content)
    }

    /// Takes an Interest that the network returned.
    ///
    /// # Errors
    /// No route leads to the name.
    pub fn take_nack(&mut self, name: &Name, reason: NackReason, now: Duration) -> Result<(), FetchError> {
        let returned = self.under_way.iter().find(|(_, sent)| sent.interest.name == *name).map(|(wanted, _)| *wanted);
        let Some(wanted) = returned else { return Ok(()) };
        match reason {
            NackReason::Congestion => self.shrink(now),
            // A network that returns each repetition must not set the pace: the timeout repeats it.
            NackReason::Duplicate => {}
            NackReason::NoRoute | NackReason::None => {
                self.under_way.remove(&wanted);
                self.unroutable.push(wanted);
                // The other way of discovery may have a route.
                if !matches!(self.phase, Phase::Discovery) || self.unroutable.len() > 1 {
                    return Err(FetchError::NoRoute);
                }
            }
        }
        Ok(())
    }

    /// The time at which [`Fetch::handle_timeout`] is due.
    pub fn next_timeout(&self) -> Option<Duration> {
        let timeout = self.rtt.timeout();
        self.under_way.values().map(|sent| sent.last + timeout).min()
    }

    /// Repeats Interests whose answer is late.
    ///
    /// # Errors
    /// An answer is too late.
    pub fn handle_timeout(&mut self, now: Duration) -> Result<(), FetchError> {
        let timeout = self.rtt.timeout();
        let late: Vec<Wanted> =
            self.under_way.iter().filter(|(_, sent)| now >= sent.last + timeout).map(|(wanted, _)| *wanted).collect();
        for wanted in &late {
            let is_hopeless = |sent: &Sent| now.saturating_sub(sent.first) >= self.limits.patience;
            if self.under_way.get(wanted).is_some_and(is_hopeless) {
                return Err(FetchError::NoAnswer);
            }
            if !self.repeat.contains(wanted) {
                self.repeat.push(*wanted);
            }
        }
        if !late.is_empty() {
            self.shrink(now);
            self.rtt.back_off();
        }
        Ok(())
    }

    fn grow(&mut self) {
        self.window += if self.window < self.threshold { 1.0 } else { 1.0 / self.window };
        self.window = self.window.min(self.limits.max_window as f64);
    }

    /// Halves the window, once a round trip.
    fn shrink(&mut self, now: Duration) {
        if now < self.calm_until {
            return;
        }
        self.calm_until = now + self.rtt.smoothed();
        self.threshold = (self.window / 2.0).max(2.0);
        self.window = self.threshold;
    }
}

/// The shortest lifetime of an Interest: forwarders forget it then.
const MIN_LIFETIME: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;

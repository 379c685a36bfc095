//! A forwarder for several consumers before one face: pending Interests, and stored Data.
//!
//! In: Interests of consumers, packets of the face, and the time. Out: Interests for the face, and what each consumer
//! gets. Consumers that ask for the same share one Interest. Each packet is judged by a trust schema before anybody gets
//! it and before it is stored; certificates that the judgement needs are requested here. Everything has a bound. Never:
//! I/O, a clock, or a packet that nobody has asked for.

mod certificates;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use self::certificates::{CertificateRequest, UnverifiedPacket};
use crate::data_store::DataStore;
use crate::lp::NackReason;
use crate::name::{Component, Name, types};
use crate::nonce::NonceSequence;
use crate::packet::{APPLICATION_NACK, Data, Interest};
use crate::trust::{Distrust, TrustSchema, Verdict};

/// Consumers that may wait for one Interest.
const MAX_WAITING: usize = 1024;
/// The shortest and the longest time that an Interest is remembered.
const MIN_LIFETIME: Duration = Duration::from_millis(100);
const MAX_LIFETIME: Duration = Duration::from_secs(60);

/// The number of a consumer.
pub type ConsumerId = u64;

/// The bounds of a forwarder.
#[derive(Clone, Copy, Debug)]
pub struct ForwarderLimits {
    /// Interests that wait for an answer, and the bytes of their names.
    pub pending: usize,
    /// See `pending`.
    pub pending_bytes: usize,
    /// Bytes of stored packets.
    pub store_bytes: usize,
    /// Bytes of packets that wait for a certificate.
    pub unverified_bytes: usize,
    /// Certificates that are requested at once.
    pub certificates: usize,
    /// Certificates that may lead from a packet to an anchor.
    pub chain: usize,
    /// The longest wait for a certificate.
    pub certificate_timeout: Duration,
}

impl Default for ForwarderLimits {
    fn default() -> Self {
        Self {
            pending: 16_384,
            pending_bytes: 8 << 20,
            store_bytes: 16 << 20,
            unverified_bytes: 4 << 20,
            certificates: 64,
            chain: 5,
            certificate_timeout: Duration::from_secs(4),
        }
    }
}

/// No further Interest has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many Interests wait for an answer")]
pub struct PitFull;

/// The answer to an Interest of a consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// A packet that may be used, and whether it came with a congestion mark.
    Data(Rc<Data>, bool),
    /// The network returned the Interest of this name.
    Nack(Name, NackReason),
    /// This answer may not be used.
    Untrusted(Rc<Data>, Distrust),
}

/// A task of the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send an Interest over the face.
    Send(Box<Interest>),
    /// Give this to a consumer.
    Deliver(ConsumerId, Delivery),
}

/// The result of a packet of the face.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataOutcome {
    /// Somebody had asked for it, and gets it.
    Delivered,
    /// It was requested as a certificate.
    Certificate,
    /// It waits for a certificate.
    Unverified,
    /// Nobody had asked for it.
    Unsolicited,
    /// It may not be used, which those who had asked for it learn.
    Untrusted,
    /// It needs a certificate, and there is no room to wait.
    NoRoom,
}

/// The content that an Interest asks for. Interests for the same content share an entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct PitKey {
    name: Name,
    can_be_prefix: bool,
    must_be_fresh: bool,
}

impl PitKey {
    fn of(interest: &Interest) -> Self {
        let Interest { name, can_be_prefix, must_be_fresh, .. } = interest;
        Self { name: name.clone(), can_be_prefix: *can_be_prefix, must_be_fresh: *must_be_fresh }
    }
}

struct PitEntry {
    /// Each consumer, and the value of `sent` when it asked last.
    waiting: Vec<(ConsumerId, u32)>,
    /// The number of times that the Interest was sent.
    sent: u32,
    expires: Duration,
}

/// The forwarder.
pub struct Forwarder {
    limits: ForwarderLimits,
    trust: TrustSchema,
    store: DataStore,
    pending: HashMap<PitKey, PitEntry>,
    /// Pending Interests by their end.
    ends: BTreeSet<(Duration, PitKey)>,
    /// Pending Interests of each consumer.
    asked: HashMap<ConsumerId, HashSet<PitKey>>,
    /// Bytes of the names of pending Interests.
    pending_bytes: usize,
    /// Pending Interests by prefix, and by digest. Without any, Data is looked up by its name alone.
    prefixes: usize,
    digests: usize,
    /// By the name of the key.
    wanted: HashMap<Name, CertificateRequest>,
    held_bytes: usize,
    outputs: VecDeque<Output>,
    refused: u64,
    nonces: NonceSequence,
    /// The time since 1970 at which the last packet arrived.
    utc: Duration,
}

impl Forwarder {
    /// An empty forwarder. `nonce` is random.
    pub fn new(limits: ForwarderLimits, trust: TrustSchema, nonce: u32) -> Self {
        Self {
            limits,
            trust,
            store: DataStore::new(limits.store_bytes),
            pending: HashMap::new(),
            ends: BTreeSet::new(),
            asked: HashMap::new(),
            pending_bytes: 0,
            prefixes: 0,
            digests: 0,
            wanted: HashMap::new(),
            held_bytes: 0,
            outputs: VecDeque::new(),
            refused: 0,
            nonces: NonceSequence::new(nonce),
            utc: Duration::ZERO,
        }
    }

    /// Takes an Interest of a consumer. Stored Data answers it; otherwise it is sent, unless it is under way for another
    /// consumer. A consumer that asks again repeats it.
    ///
    /// # Errors
    /// Too many Interests wait.
    pub fn take_interest(&mut self, consumer: ConsumerId, interest: Interest, now: Duration) -> Result<(), PitFull> {
        self.expire(now);
        if let Some(data) = self.store.find(&interest, now) {
            self.outputs.push_back(Output::Deliver(consumer, Delivery::Data(Rc::new(data), false)));
            return Ok(());
        }
        let key = PitKey::of(&interest);
        let expires = now + interest.wait().clamp(MIN_LIFETIME, MAX_LIFETIME);
        if let Some(pending) = self.pending.get_mut(&key) {
            let Some((_, asked)) = pending.waiting.iter_mut().find(|(id, _)| *id == consumer) else {
                if pending.waiting.len() >= MAX_WAITING {
                    return Err(PitFull);
                }
                pending.waiting.push((consumer, pending.sent));
                self.asked.entry(consumer).or_default().insert(key);
                return Ok(());
            };
            // Another consumer has repeated it for this one, too.
            let is_repeated = *asked < pending.sent;
            *asked = pending.sent;
            if is_repeated {
                return Ok(());
            }
            pending.sent += 1;
            *asked = pending.sent;
            let before = std::mem::replace(&mut pending.expires, expires);
            self.ends.remove(&(before, key.clone()));
        } else {
            let bytes = key.name.encoded().len();
            if self.pending.len() >= self.limits.pending || self.pending_bytes + bytes > self.limits.pending_bytes {
                return Err(PitFull);
            }
            self.pending_bytes += bytes;
            self.asked.entry(consumer).or_default().insert(key.clone());
            self.prefixes += usize::from(key.can_be_prefix);
            self.digests += usize::from(key.name.has_implicit_digest());
            self.pending.insert(key.clone(), PitEntry { waiting: vec![(consumer, 1)], sent: 1, expires });
        }
        self.ends.insert((expires, key));
        self.outputs.push_back(Output::Send(Box::new(interest)));
        Ok(())
    }

    /// Takes a Data packet of the face. `is_marked` tells of a congestion mark. `utc` is the time since 1970, by which
    /// certificates are valid or not.
    pub fn take_data(&mut self, data: Data, is_marked: bool, now: Duration, utc: Duration) -> DataOutcome {
        self.utc = utc;
        self.expire(now);
        let is_certificate = self.take_certificate(&data, now);
        let waiting = self.take_waiting(&data);
        if waiting.is_empty() {
            return if is_certificate { DataOutcome::Certificate } else { DataOutcome::Unsolicited };
        }
        self.judge(data, is_marked, waiting, 0, now)
    }

    /// Takes an Interest that the network returned.
    pub fn take_nack(&mut self, interest: &Interest, reason: NackReason, now: Duration) {
        self.expire(now);
        // Otherwise the certificate is requested again by its timeout.
        let is_final = matches!(reason, NackReason::NoRoute | NackReason::None);
        if is_final && let Some(wanted) = self.wanted.remove(&interest.name) {
            self.fail(wanted, &Distrust::Missing(interest.name.clone()));
        }
        let key = PitKey::of(interest);
        for consumer in self.remove(&key).unwrap_or_default() {
            self.outputs.push_back(Output::Deliver(consumer, Delivery::Nack(interest.name.clone(), reason)));
        }
    }

    /// Forgets a consumer, and the Interests that nobody else waits for.
    pub fn leave(&mut self, consumer: ConsumerId) {
        for key in self.asked.remove(&consumer).unwrap_or_default() {
            let Some(pending) = self.pending.get_mut(&key) else { continue };
            pending.waiting.retain(|(id, _)| *id != consumer);
            if pending.waiting.is_empty() {
                self.remove(&key);
            }
        }
    }

    /// Forgets all Interests, since the face that they were sent over has closed. Requests for certificates are repeated.
    pub fn close_face(&mut self) {
        let keys: Vec<PitKey> = self.pending.keys().cloned().collect();
        for key in keys {
            self.remove(&key);
        }
    }

    /// The next thing to do.
    pub fn next_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// The time at which [`Forwarder::handle_timeout`] is due for a certificate. Interests
    /// that have expired are forgotten by any call.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.wanted.values().map(|wanted| self.due(wanted)).min()
    }

    /// Requests certificates again that did not arrive, gives up those that are too late, and forgets Interests that
    /// have expired.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.expire(now);
        let is_due = |wanted: &CertificateRequest| now >= self.due(wanted);
        let due: Vec<Name> =
            self.wanted.iter().filter(|(_, wanted)| is_due(wanted)).map(|(key, _)| key.clone()).collect();
        for key in due {
            let is_late = |wanted: &CertificateRequest| {
                wanted.has_arrived || now >= wanted.first + self.limits.certificate_timeout
            };
            if self.wanted.get(&key).is_some_and(is_late) {
                if let Some(wanted) = self.wanted.remove(&key) {
                    let distrust = wanted.refused.clone().unwrap_or(Distrust::Missing(key));
                    self.fail(wanted, &distrust);
                }
            } else if let Some(wanted) = self.wanted.get_mut(&key) {
                wanted.last = now;
                self.request(key);
            }
        }
    }

    /// Returns the number of packets that were refused since the last call.
    pub fn take_refused(&mut self) -> u64 {
        std::mem::take(&mut self.refused)
    }

    /// Interests that wait for an answer.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Forgets Interests that have expired. Consumers repeat them by their own clock.
    fn expire(&mut self, now: Duration) {
        while let Some((end, key)) = self.ends.first()
            && *end <= now
        {
            let key = key.clone();
            self.remove(&key);
        }
    }

    fn remove(&mut self, key: &PitKey) -> Option<Vec<ConsumerId>> {
        let pending = self.pending.remove(key)?;
        self.pending_bytes -= key.name.encoded().len();
        for (consumer, _) in &pending.waiting {
            if let Some(asked) = self.asked.get_mut(consumer) {
                asked.remove(key);
            }
        }
        self.ends.remove(&(pending.expires, key.clone()));
        self.prefixes -= usize::from(key.can_be_prefix);
        self.digests -= usize::from(key.name.has_implicit_digest());
        Some(pending.waiting.into_iter().map(|(consumer, _)| consumer).collect())
    }

    /// Removes the Interests that a packet answers, and returns who waits for them.
    fn take_waiting(&mut self, data: &Data) -> Vec<ConsumerId> {
        // A digest in an Interest is that of the packet, whatever the name of the packet contains.
        let mut names = vec![(data.name.clone(), false)];
        if self.prefixes > 0 {
            names.extend(data.content_prefixes().map(|name| (name, true)));
        }
        names.retain(|(name, _)| !name.has_implicit_digest());
        if self.digests > 0 {
            let full = data.name.child(&Component::new(types::IMPLICIT_DIGEST, &data.digest()));
            names.extend([(full.clone(), false), (full, true)]);
        }
        let mut waiting = Vec::new();
        for (name, can_be_prefix) in names {
            for must_be_fresh in [false, true] {
                let key = PitKey { name: name.clone(), can_be_prefix, must_be_fresh };
                waiting.extend(self.remove(&key).unwrap_or_default());
            }
        }
        waiting.sort_unstable();
        waiting.dedup();
        waiting
    }

    fn judge(
        &mut self,
        data: Data,
        is_marked: bool,
        waiting: Vec<ConsumerId>,
        depth: usize,
        now: Duration,
    ) -> DataOutcome {
        match self.trust.judge(&data, self.utc) {
            Verdict::Trusted => {
                // A producer may have later what it refuses now.
                if data.content_type != APPLICATION_NACK {
                    let valid_for = self.trust.valid_for(&data, self.utc);
                    self.store.put(&data, now, valid_for.map(|left| now.saturating_add(left)));
                }
                let data = Rc::new(data);
                for consumer in waiting {
                    self.outputs.push_back(Output::Deliver(consumer, Delivery::Data(data.clone(), is_marked)));
                }
                DataOutcome::Delivered
            }
            Verdict::Untrusted(distrust) => {
                self.refuse(data, waiting, &distrust);
                DataOutcome::Untrusted
            }
            Verdict::NeedsCertificate(key) => {
                self.hold(key, UnverifiedPacket::Data { data, is_marked, waiting }, depth, now)
            }
        }
    }

    fn refuse(&mut self, data: Data, waiting: Vec<ConsumerId>, distrust: &Distrust) {
        self.refused += 1;
        let data = Rc::new(data);
        for consumer in waiting {
            self.outputs.push_back(Output::Deliver(consumer, Delivery::Untrusted(data.clone(), distrust.clone())));
        }
    }
}

#[cfg(test)]
mod tests;

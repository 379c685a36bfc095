//! Packets of the forwarder that wait for the certificates of their signers.
//!
//! In: packets whose judgement needs a certificate, and packets that may be one. Out: Interests for certificates, and
//! judgements. Packets, keys and bytes have bounds, also for one identity. Never: a packet that nobody has asked for.

use std::time::Duration;

use bytes::Bytes;

use super::{ConsumerId, DataOutcome, Forwarder, Output};
use crate::name::Name;
use crate::packet::{Data, Interest};
use crate::trust::{Distrust, Verdict};

/// The time after which a certificate is requested again.
pub(super) const CERTIFICATE_REPEAT: Duration = Duration::from_secs(1);
/// Keys of one identity whose certificates are requested at once, and packets that wait for one of them.
pub(super) const MAX_KEYS_OF_IDENTITY: usize = 4;
const MAX_PACKETS_OF_KEY: usize = 512;
/// Bytes of state for each packet that waits, apart from its own.
pub(super) const OVERHEAD: usize = 400;

/// A packet whose judgement waits for a certificate.
pub(super) enum UnverifiedPacket {
    Data {
        data: Data,
        is_marked: bool,
        waiting: Vec<ConsumerId>,
    },
    /// A certificate that others wait for, under this name of its key.
    Certificate(Name, Data),
}

/// A certificate that was requested.
pub(super) struct CertificateRequest {
    pub(super) first: Duration,
    pub(super) last: Duration,
    /// It has arrived, and waits for that of its own signer.
    pub(super) has_arrived: bool,
    /// The reason why one that has arrived may not be used. Another one may come.
    pub(super) refused: Option<Distrust>,
    /// Certificates between the first packet that waits and this one.
    pub(super) depth: usize,
    pub(super) held: Vec<UnverifiedPacket>,
}

impl Forwarder {
    /// The time at which a certificate is requested again or given up.
    pub(super) fn due(&self, wanted: &CertificateRequest) -> Duration {
        // The certificate of its issuer has a timeout of its own. Two certificates that sign each other end by this one.
        let chain = u32::try_from(self.limits.chain).unwrap_or(u32::MAX);
        let end = wanted.first.saturating_add(self.limits.certificate_timeout.saturating_mul(chain));
        if wanted.has_arrived { end } else { wanted.last + CERTIFICATE_REPEAT }
    }

    /// Lets a packet wait for the certificate of a key, and requests it.
    pub(super) fn hold(&mut self, key: Name, held: UnverifiedPacket, depth: usize, now: Duration) -> DataOutcome {
        let held = held.compact();
        let bytes = held.bytes();
        if depth >= self.limits.chain {
            self.held_bytes += bytes;
            let distrust = Distrust::ChainTooLong(key.clone(), self.limits.chain);
            self.fail(
                CertificateRequest {
                    first: now,
                    last: now,
                    has_arrived: false,
                    refused: None,
                    depth,
                    held: vec![held],
                },
                &distrust,
            );
            return DataOutcome::Untrusted;
        }
        let known = self.wanted.get(&key);
        let is_new = known.is_none();
        let identity = key.prefix(key.len().saturating_sub(2));
        let is_of_identity = |other: &&Name| other.len() == key.len() && identity.is_prefix_of(other);
        let is_full = |known: &CertificateRequest| {
            known.held.len() >= MAX_PACKETS_OF_KEY || known.held.iter().any(|other| other.name() == held.name())
        };
        if self.held_bytes + bytes > self.limits.unverified_bytes
            || known.is_some_and(is_full)
            || is_new && self.wanted.len() >= self.limits.certificates
            || is_new && self.wanted.keys().filter(is_of_identity).count() >= MAX_KEYS_OF_IDENTITY
        {
            // Consumers ask again.
            return DataOutcome::NoRoom;
        }
        self.held_bytes += bytes;
        let wanted = self.wanted.entry(key.clone());
        let wanted = wanted.or_insert_with(|| CertificateRequest {
            first: now,
            last: now,
            has_arrived: false,
            refused: None,
            depth,
            held: Vec::new(),
        });
        wanted.held.push(held);
        if is_new {
            self.request(key);
        }
        DataOutcome::Unverified
    }

    pub(super) fn request(&mut self, key: Name) {
        let interest = Interest {
            can_be_prefix: true,
            must_be_fresh: true,
            nonce: Some(self.nonces.next_nonce()),
            lifetime: Some(CERTIFICATE_REPEAT),
            ..Interest::new(key)
        };
        self.outputs.push_back(Output::Send(Box::new(interest)));
    }

    /// Takes a packet as the certificate that others wait for. Returns false if nobody does.
    pub(super) fn take_certificate(&mut self, data: &Data, now: Duration) -> bool {
        // /IDENTITY/KEY/ID/ISSUER/VERSION
        let key = data.name.prefix(data.name.len().saturating_sub(2));
        let Some(wanted) = self.wanted.remove(&key) else { return false };
        match self.trust.take_certificate(data, self.utc) {
            Verdict::Trusted => {
                for held in wanted.held {
                    self.held_bytes -= held.bytes();
                    match held {
                        UnverifiedPacket::Data { data, is_marked, waiting } => {
                            self.judge(data, is_marked, waiting, wanted.depth + 1, now);
                        }
                        UnverifiedPacket::Certificate(_, certificate) => {
                            // Nobody waits for it if it came twice.
                            self.take_certificate(&certificate, now);
                        }
                    }
                }
            }
            // The first answer decides nothing: a valid certificate may follow.
            Verdict::Untrusted(distrust) => {
                self.wanted.insert(key, CertificateRequest { refused: Some(distrust), ..wanted });
            }
            Verdict::NeedsCertificate(issuer) => {
                let depth = wanted.depth + 1;
                self.wanted.insert(key.clone(), wanted);
                let held = UnverifiedPacket::Certificate(key.clone(), data.clone());
                // Without room for its issuer, it is requested again.
                if self.hold(issuer, held, depth, now) == DataOutcome::Unverified
                    && let Some(wanted) = self.wanted.get_mut(&key)
                {
                    wanted.has_arrived = true;
                }
            }
        }
        true
    }

    /// Refuses everything that waits for a certificate.
    pub(super) fn fail(&mut self, wanted: CertificateRequest, distrust: &Distrust) {
        let mut all = vec![wanted];
        while let Some(wanted) = all.pop() {
            for held in wanted.held {
                self.held_bytes -= held.bytes();
                match held {
                    UnverifiedPacket::Data { data, waiting, .. } => self.refuse(data, waiting, distrust),
                    UnverifiedPacket::Certificate(key, _) => all.extend(self.wanted.remove(&key)),
                }
            }
        }
    }
}

impl UnverifiedPacket {
    fn bytes(&self) -> usize {
        match self {
            Self::Data { data, .. } | Self::Certificate(_, data) => data.packet.len() + OVERHEAD,
        }
    }

    fn name(&self) -> &Name {
        match self {
            Self::Data { data, .. } | Self::Certificate(_, data) => &data.name,
        }
    }

    /// The same packet in memory of its own: it may be a slice of a buffer that is much larger.
    fn compact(mut self) -> Self {
        let (Self::Data { data, .. } | Self::Certificate(_, data)) = &mut self;
        if let Ok(copy) = Data::decode(Bytes::copy_from_slice(&data.packet)) {
            *data = copy;
        }
        self
    }
}

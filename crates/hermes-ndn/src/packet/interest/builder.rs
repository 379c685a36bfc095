//! Encodes and signs Interests (Packet Format 0.3, sections "Interest Packet" and "Signed Interest").
//!
//! In: the fields of a new Interest, and a key. Out: an Interest with a valid parameters digest. The builder never draws
//! a nonce: the caller supplies it.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};

use super::{Fields, Interest};
use crate::name::{self, Component, Name};
use crate::packet::PacketError;
use crate::packet::data::{milliseconds, packet, sha256};
use crate::signature::{SignatureInfo, SigningKey};
use crate::tlv::{self, DIGEST_LEN, types};

/// The fields of a new Interest.
#[derive(Debug, Clone)]
pub struct InterestBuilder {
    name: Name,
    fields: Fields,
    parameters: Option<Bytes>,
    /// Nonce, time and sequence number of the signature.
    replay: (Option<Bytes>, Option<u64>, Option<u64>),
}

impl InterestBuilder {
    /// An Interest of this name.
    pub fn new(name: Name) -> Self {
        Self { name, fields: Fields::default(), parameters: None, replay: (None, None, None) }
    }

    /// Sets CanBePrefix.
    #[must_use]
    pub fn can_be_prefix(mut self, can_be_prefix: bool) -> Self {
        self.fields.can_be_prefix = can_be_prefix;
        self
    }

    /// Sets MustBeFresh.
    #[must_use]
    pub fn must_be_fresh(mut self, must_be_fresh: bool) -> Self {
        self.fields.must_be_fresh = must_be_fresh;
        self
    }

    /// Sets the forwarding hint; at most [`Interest::MAX_FORWARDING_HINT`] names.
    #[must_use]
    pub fn forwarding_hint(mut self, names: Vec<Name>) -> Self {
        self.fields.forwarding_hint = names;
        self
    }

    /// Sets the nonce.
    #[must_use]
    pub fn nonce(mut self, nonce: [u8; 4]) -> Self {
        self.fields.nonce = Some(nonce);
        self
    }

    /// Sets the InterestLifetime, in whole milliseconds.
    #[must_use]
    pub fn lifetime(mut self, lifetime: Duration) -> Self {
        self.fields.lifetime = Some(lifetime);
        self
    }

    /// Sets the HopLimit.
    #[must_use]
    pub fn hop_limit(mut self, limit: u8) -> Self {
        self.fields.hop_limit = Some(limit);
        self
    }

    /// Sets ApplicationParameters. The Interest then carries their digest in its name.
    #[must_use]
    pub fn application_parameters(mut self, parameters: impl Into<Bytes>) -> Self {
        self.parameters = Some(parameters.into());
        self
    }

    /// Sets the SignatureNonce.
    #[must_use]
    pub fn signature_nonce(mut self, nonce: impl Into<Bytes>) -> Self {
        self.replay.0 = Some(nonce.into());
        self
    }

    /// Sets the SignatureTime, in milliseconds since the Unix epoch.
    #[must_use]
    pub fn signature_time(mut self, milliseconds: u64) -> Self {
        self.replay.1 = Some(milliseconds);
        self
    }

    /// Sets the SignatureSeqNum.
    #[must_use]
    pub fn signature_sequence(mut self, sequence: u64) -> Self {
        self.replay.2 = Some(sequence);
        self
    }

    /// Encodes the Interest without a signature. A parameters digest in the name is replaced, or appended if absent.
    ///
    /// # Errors
    /// [`PacketError`] if a field exceeds its limit.
    pub fn build(&self) -> Result<Interest, PacketError> {
        let mut tail = BytesMut::new();
        if let Some(parameters) = &self.parameters {
            tlv::put(&mut tail, types::APPLICATION_PARAMETERS, parameters);
        }
        self.finish(&self.name, &tail)
    }

    /// Encodes and signs the Interest. The parameters digest becomes the last component of its name.
    ///
    /// # Errors
    /// [`PacketError`] if a field exceeds its limit or the key fails to sign.
    pub fn sign(&self, key: &SigningKey) -> Result<Interest, PacketError> {
        let name = self.undigested()?;
        let mut tail = BytesMut::new();
        tlv::put(&mut tail, types::APPLICATION_PARAMETERS, self.parameters.as_deref().unwrap_or_default());
        let (nonce, time, sequence) = self.replay.clone();
        let locator = key.locator().cloned();
        let info =
            SignatureInfo { key_locator: locator, nonce, time, sequence, ..SignatureInfo::new(key.signature_type()) };
        info.encode(types::INTEREST_SIGNATURE_INFO, &mut tail);
        let mut message = BytesMut::from(name.as_bytes());
        message.extend_from_slice(&tail);
        let signature = key.sign(&message)?;
        tlv::put(&mut tail, types::INTEREST_SIGNATURE_VALUE, &signature);
        self.finish(&name, &tail)
    }

    /// The name without parameters digests.
    fn undigested(&self) -> Result<Name, PacketError> {
        let kept: Vec<_> = self.name.components().filter(|part| part.kind() != name::PARAMETERS_DIGEST).collect();
        Ok(Name::from_components(&kept)?)
    }

    /// Encodes everything before `tail`, the elements from ApplicationParameters on.
    fn finish(&self, name: &Name, tail: &[u8]) -> Result<Interest, PacketError> {
        let name = if tail.is_empty() { name.clone() } else { digested(name, sha256(tail))? };
        let mut value = BytesMut::new();
        name.encode(&mut value);
        let fields = &self.fields;
        if fields.can_be_prefix {
            tlv::put(&mut value, types::CAN_BE_PREFIX, &[]);
        }
        if fields.must_be_fresh {
            tlv::put(&mut value, types::MUST_BE_FRESH, &[]);
        }
        if !fields.forwarding_hint.is_empty() {
            let hint = tlv::wrap(types::FORWARDING_HINT, |out| {
                fields.forwarding_hint.iter().for_each(|name| name.encode(out));
            });
            value.extend_from_slice(&hint);
        }
        if let Some(nonce) = fields.nonce {
            tlv::put(&mut value, types::NONCE, &nonce);
        }
        if let Some(lifetime) = fields.lifetime {
            tlv::put_integer(&mut value, types::INTEREST_LIFETIME, milliseconds(lifetime));
        }
        if let Some(limit) = fields.hop_limit {
            tlv::put(&mut value, types::HOP_LIMIT, &[limit]);
        }
        value.put_slice(tail);
        Interest::decode(packet(types::INTEREST, &value)?)
    }
}

/// The name with this parameters digest, instead of its present one or at the end.
fn digested(name: &Name, digest: [u8; DIGEST_LEN]) -> Result<Name, PacketError> {
    let digest = Component::parameters_digest(digest);
    let Some(index) = name.positions(name::PARAMETERS_DIGEST).next() else {
        return Ok(name.push(&digest)?);
    };
    let mut components: Vec<_> = name.components().collect();
    components[index] = digest;
    Ok(Name::from_components(&components)?)
}

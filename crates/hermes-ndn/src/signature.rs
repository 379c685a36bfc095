//! Signatures of Data and of signed Interests (Packet Format 0.3, sections "Signature" and "Signed Interest").
//!
//! In: SignatureInfo elements, or their fields; keys as PKCS#8, SubjectPublicKeyInfo or a secret. Out: the other form;
//! signature values, and whether one is valid. This module never decides whether a key is trusted.

use bytes::{Bytes, BytesMut};

use crate::name::{Name, NameError};
use crate::tlv::{self, Element, TlvError, types};

mod key;
mod time;

pub use key::{KeyError, SigningKey, VerifyingKey};

/// The reason why a signature is malformed or invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    /// An element of SignatureInfo is invalid.
    #[error(transparent)]
    Tlv(#[from] TlvError),
    /// The name of a KeyLocator is invalid.
    #[error("key locator: {0}")]
    Name(#[from] NameError),
    /// A timestamp of a ValidityPeriod is not of the form `YYYYMMDDThhmmss`.
    #[error("validity period has an invalid timestamp")]
    Timestamp,
    /// The packet has no signature.
    #[error("packet is not signed")]
    Unsigned,
    /// The signature type differs from the type of the key.
    #[error("signature of type {signature} does not match a key of type {key}")]
    Mismatch {
        /// The type of the signature.
        signature: u64,
        /// The signature type of the key.
        key: u64,
    },
    /// The signature value is wrong for this packet and this key.
    #[error("signature is invalid")]
    Invalid,
}

/// A SignatureType number (Packet Format 0.3, section "Signature Types").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SignatureType(pub u64);

impl SignatureType {
    /// DigestSha256: integrity alone, without a key.
    pub const DIGEST_SHA256: Self = Self(0);
    /// SignatureSha256WithRsa: RSASSA-PKCS1-v1_5.
    pub const SHA256_WITH_RSA: Self = Self(1);
    /// SignatureSha256WithEcdsa: ASN.1 encoded, on the curve P-256 in this crate.
    pub const SHA256_WITH_ECDSA: Self = Self(3);
    /// SignatureHmacWithSha256.
    pub const HMAC_WITH_SHA256: Self = Self(4);
    /// SignatureEd25519.
    pub const ED25519: Self = Self(5);
}

/// A KeyLocator: the name of a certificate or key, or the SHA-256 digest of a public key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyLocator {
    /// A name, such as that of a certificate.
    Name(Name),
    /// A KeyDigest.
    Digest(Bytes),
}

impl KeyLocator {
    fn decode(element: &Element<'_>) -> Result<Self, SignatureError> {
        let mut reader = element.reader();
        while let Some(inner) = reader.next()? {
            match inner.kind {
                types::NAME => return Ok(Self::Name(Name::from_value(inner.value_bytes())?)),
                types::KEY_DIGEST => return Ok(Self::Digest(inner.value_bytes())),
                kind => tlv::ignore(kind)?,
            }
        }
        Err(TlvError::Missing(types::NAME).into())
    }

    fn encode(&self, out: &mut BytesMut) {
        let element = tlv::wrap(types::KEY_LOCATOR, |out| match self {
            Self::Name(name) => name.encode(out),
            Self::Digest(digest) => tlv::put(out, types::KEY_DIGEST, digest),
        });
        out.extend_from_slice(&element);
    }
}

/// The time during which a certificate is valid, in seconds since the Unix epoch. Both ends are included (Certificate
/// Format 2, section "ValidityPeriod").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValidityPeriod {
    /// The first valid second.
    pub not_before: u64,
    /// The last valid second.
    pub not_after: u64,
}

impl ValidityPeriod {
    /// Whether this second lies within the period.
    pub fn contains(&self, unix_seconds: u64) -> bool {
        (self.not_before..=self.not_after).contains(&unix_seconds)
    }

    fn decode(element: &Element<'_>) -> Result<Self, SignatureError> {
        let (mut not_before, mut not_after) = (None, None);
        let mut reader = element.reader();
        while let Some(inner) = reader.next()? {
            match inner.kind {
                types::NOT_BEFORE if not_before.is_none() && not_after.is_none() => {
                    not_before = Some(time::parse(inner.value()).ok_or(SignatureError::Timestamp)?);
                }
                types::NOT_AFTER if not_after.is_none() => {
                    not_after = Some(time::parse(inner.value()).ok_or(SignatureError::Timestamp)?);
                }
                kind => tlv::ignore(kind)?,
            }
        }
        Ok(Self {
            not_before: not_before.ok_or(TlvError::Missing(types::NOT_BEFORE))?,
            not_after: not_after.ok_or(TlvError::Missing(types::NOT_AFTER))?,
        })
    }

    fn encode(&self, out: &mut BytesMut) {
        let element = tlv::wrap(types::VALIDITY_PERIOD, |out| {
            tlv::put(out, types::NOT_BEFORE, &time::format(self.not_before));
            tlv::put(out, types::NOT_AFTER, &time::format(self.not_after));
        });
        out.extend_from_slice(&element);
    }
}

/// The content of a SignatureInfo or InterestSignatureInfo element.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignatureInfo {
    /// The SignatureType.
    pub kind: SignatureType,
    /// The KeyLocator.
    pub key_locator: Option<KeyLocator>,
    /// The SignatureNonce of a signed Interest.
    pub nonce: Option<Bytes>,
    /// The SignatureTime of a signed Interest, in milliseconds since the Unix epoch.
    pub time: Option<u64>,
    /// The SignatureSeqNum of a signed Interest.
    pub sequence: Option<u64>,
    /// The ValidityPeriod of a certificate.
    pub validity: Option<ValidityPeriod>,
}

impl SignatureInfo {
    /// A SignatureInfo of this type, without other fields.
    pub fn new(kind: SignatureType) -> Self {
        Self { kind, key_locator: None, nonce: None, time: None, sequence: None, validity: None }
    }

    /// Decodes a SignatureInfo or InterestSignatureInfo element.
    ///
    /// # Errors
    /// [`SignatureError`] if the element is malformed. An unknown signature type is not an error.
    pub fn decode(element: &Element<'_>) -> Result<Self, SignatureError> {
        let mut reader = element.reader();
        let kind = match reader.next()? {
            Some(first) if first.kind == types::SIGNATURE_TYPE => SignatureType(first.integer()?),
            Some(_) | None => return Err(TlvError::Missing(types::SIGNATURE_TYPE).into()),
        };
        let mut info = Self::new(kind);
        let mut last = types::SIGNATURE_TYPE;
        while let Some(inner) = reader.next()? {
            match inner.kind {
                // The order of the grammar is the order of the types.
                kind if kind <= last => tlv::ignore(kind)?,
                types::KEY_LOCATOR => info.key_locator = Some(KeyLocator::decode(&inner)?),
                types::SIGNATURE_NONCE if inner.value().is_empty() => return Err(inner.bad_length().into()),
                types::SIGNATURE_NONCE => info.nonce = Some(inner.value_bytes()),
                types::SIGNATURE_TIME => info.time = Some(inner.integer()?),
                types::SIGNATURE_SEQ_NUM => info.sequence = Some(inner.integer()?),
                types::VALIDITY_PERIOD => info.validity = Some(ValidityPeriod::decode(&inner)?),
                kind => {
                    tlv::ignore(kind)?;
                    continue;
                }
            }
            last = last.max(inner.kind);
        }
        Ok(info)
    }

    /// Appends the element with type `kind`: SignatureInfo or InterestSignatureInfo.
    pub fn encode(&self, kind: u32, out: &mut BytesMut) {
        let element = tlv::wrap(kind, |out| {
            tlv::put_integer(out, types::SIGNATURE_TYPE, self.kind.0);
            if let Some(locator) = &self.key_locator {
                locator.encode(out);
            }
            if let Some(nonce) = &self.nonce {
                tlv::put(out, types::SIGNATURE_NONCE, nonce);
            }
            if let Some(time) = self.time {
                tlv::put_integer(out, types::SIGNATURE_TIME, time);
            }
            if let Some(sequence) = self.sequence {
                tlv::put_integer(out, types::SIGNATURE_SEQ_NUM, sequence);
            }
            if let Some(validity) = &self.validity {
                validity.encode(out);
            }
        });
        out.extend_from_slice(&element);
    }
}

#[cfg(test)]
mod tests;

//! Signatures of packets: made and verified (packet format 0.3, "Signature").
//!
//! In: the signed bytes, and a key. Out: a signature, or whether one is valid. Never: a decision whom to trust.

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, ED25519, EcdsaKeyPair, Ed25519KeyPair,
    RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_SHA256, RsaKeyPair, UnparsedPublicKey, VerificationAlgorithm,
};
use aws_lc_rs::{constant_time, hmac};
use bytes::Bytes;

use crate::name::{NAME, Name};
use crate::tlv::{Element, Elements, NdnError, Result, put, put_integer, put_nested};

const SIGNATURE_TYPE: u32 = 0x1b;
const KEY_LOCATOR: u32 = 0x1c;
const KEY_DIGEST: u32 = 0x1d;
const NONCE: u32 = 0x26;
const TIME: u32 = 0x28;
const SEQUENCE: u32 = 0x2a;
const VALIDITY: u32 = 0xfd;
const NOT_BEFORE: u32 = 0xfe;
const NOT_AFTER: u32 = 0xff;

/// The algorithm of a signature (registry "Signature types").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SignatureType {
    /// A SHA-256 digest, which anybody can make.
    Digest,
    /// RSA with PKCS#1 v1.5 and SHA-256.
    Rsa,
    /// ECDSA with SHA-256.
    Ecdsa,
    /// HMAC with SHA-256.
    Hmac,
    /// Ed25519.
    Ed25519,
    /// A type that this crate cannot verify.
    Other(u64),
}

impl SignatureType {
    fn from_number(number: u64) -> Self {
        match number {
            0 => Self::Digest,
            1 => Self::Rsa,
            3 => Self::Ecdsa,
            4 => Self::Hmac,
            5 => Self::Ed25519,
            other => Self::Other(other),
        }
    }

    fn number(self) -> u64 {
        match self {
            Self::Digest => 0,
            Self::Rsa => 1,
            Self::Ecdsa => 3,
            Self::Hmac => 4,
            Self::Ed25519 => 5,
            Self::Other(other) => other,
        }
    }
}

/// The location of the key of a signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyLocator {
    /// The name of a key or of its certificate.
    Name(Name),
    /// The SHA-256 digest of the key.
    Digest(Bytes),
}

/// The algorithm and the key of a signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignatureInfo {
    /// The algorithm.
    pub kind: SignatureType,
    /// The location of the key.
    pub key: Option<KeyLocator>,
    /// The validity period of a certificate: `YYYYMMDDThhmmss` in UTC, both ends included.
    pub validity: Option<(Bytes, Bytes)>,
    /// Protects a signed Interest against replay.
    pub nonce: Option<Bytes>,
    /// The time of a signed Interest, in milliseconds since 1970.
    pub time: Option<u64>,
    /// The number of a signed Interest.
    pub sequence: Option<u64>,
}

/// The signature of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The algorithm and the key.
    pub info: SignatureInfo,
    /// The bytes of the signature.
    pub value: Bytes,
    /// The signed bytes, in order. An Interest has two parts, since its digest component is not signed.
    pub covered: Vec<Bytes>,
}

const INFO_ELEMENTS: &[u32] = &[SIGNATURE_TYPE, KEY_LOCATOR, NONCE, TIME, SEQUENCE, VALIDITY];

impl SignatureInfo {
    /// A signature of this type, without a key.
    pub fn new(kind: SignatureType) -> Self {
        Self { kind, key: None, validity: None, nonce: None, time: None, sequence: None }
    }

    pub(crate) fn decode(value: Bytes) -> Result<Self> {
        let mut elements = Elements::new(value, INFO_ELEMENTS)?;
        let kind = elements.take(SIGNATURE_TYPE)?.ok_or(NdnError::Missing("signature type"))?.integer()?;
        let mut info = Self::new(SignatureType::from_number(kind));
        if let Some(locator) = elements.take(KEY_LOCATOR)? {
            let mut inner = locator.value;
            info.key = match Element::take(&mut inner)? {
                Some(name) if name.kind == NAME => Some(KeyLocator::Name(Name::decode(name.value)?)),
                Some(key) if key.kind == KEY_DIGEST => Some(KeyLocator::Digest(key.value)),
                _ => return Err(NdnError::Invalid("key locator")),
            };
        }
        info.nonce = elements.take(NONCE)?.map(|nonce| nonce.value);
        info.time = elements.take(TIME)?.map(|time| time.integer()).transpose()?;
        info.sequence = elements.take(SEQUENCE)?.map(|sequence| sequence.integer()).transpose()?;
        if let Some(validity) = elements.take(VALIDITY)? {
            let mut ends = Elements::new(validity.value, &[NOT_BEFORE, NOT_AFTER])?;
            let begin = ends.take(NOT_BEFORE)?.ok_or(NdnError::Missing("begin of the validity"))?;
            let end = ends.take(NOT_AFTER)?.ok_or(NdnError::Missing("end of the validity"))?;
            info.validity = Some((begin.value, end.value));
        }
        elements.finish()?;
        Ok(info)
    }

    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        put_integer(out, SIGNATURE_TYPE, self.kind.number());
        match &self.key {
            Some(KeyLocator::Name(name)) => put_nested(out, KEY_LOCATOR, |out| name.put(out)),
            Some(KeyLocator::Digest(key)) => put_nested(out, KEY_LOCATOR, |out| put(out, KEY_DIGEST, key)),
            None => {}
        }
        if let Some(nonce) = &self.nonce {
            put(out, NONCE, nonce);
        }
        for (kind, value) in [(TIME, self.time), (SEQUENCE, self.sequence)] {
            if let Some(value) = value {
                put_integer(out, kind, value);
            }
        }
        if let Some((begin, end)) = &self.validity {
            put_nested(out, VALIDITY, |out| {
                put(out, NOT_BEFORE, begin);
                put(out, NOT_AFTER, end);
            });
        }
    }
}

/// A key that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignError {
    /// The private key has another format or algorithm.
    #[error("invalid key; use PKCS#8 (RSA, ECDSA P-256, Ed25519)")]
    Key,
    /// The library refuses to sign.
    #[error("the key cannot sign")]
    Sign,
}

enum Secret {
    Digest,
    Hmac(Box<hmac::Key>),
    Ecdsa(Box<EcdsaKeyPair>),
    Ed25519(Box<Ed25519KeyPair>),
    Rsa(Box<RsaKeyPair>),
}

/// Signs packets with one key.
pub struct Signer {
    secret: Secret,
    info: SignatureInfo,
    random: SystemRandom,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signer").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Signer {
    /// Protects packets by a digest against errors, not against attackers.
    pub fn digest() -> Self {
        Self { secret: Secret::Digest, info: SignatureInfo::new(SignatureType::Digest), random: SystemRandom::new() }
    }

    /// Signs with a shared secret.
    pub fn hmac(secret: &[u8], key: Name) -> Self {
        Self::with(Secret::Hmac(Box::new(hmac::Key::new(hmac::HMAC_SHA256, secret))), SignatureType::Hmac, key)
    }

    /// Signs with a private key in PKCS#8 (DER): ECDSA P-256, Ed25519 or RSA.
    ///
    /// # Errors
    /// The bytes are no such key.
    pub fn from_pkcs8(der: &[u8], key: Name) -> std::result::Result<Self, SignError> {
        if let Ok(pair) = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, der) {
            return Ok(Self::with(Secret::Ecdsa(Box::new(pair)), SignatureType::Ecdsa, key));
        }
        if let Ok(pair) = Ed25519KeyPair::from_pkcs8_maybe_unchecked(der) {
            return Ok(Self::with(Secret::Ed25519(Box::new(pair)), SignatureType::Ed25519, key));
        }
        let pair = RsaKeyPair::from_pkcs8(der).map_err(|_| SignError::Key)?;
        Ok(Self::with(Secret::Rsa(Box::new(pair)), SignatureType::Rsa, key))
    }

    fn with(secret: Secret, kind: SignatureType, key: Name) -> Self {
        let info = SignatureInfo { key: Some(KeyLocator::Name(key)), ..SignatureInfo::new(kind) };
        Self { secret, info, random: SystemRandom::new() }
    }

    /// Signs certificates with this validity period (see [`SignatureInfo::validity`]).
    #[must_use]
    pub fn for_certificates(mut self, begin: &str, end: &str) -> Self {
        self.info.validity = Some((Bytes::copy_from_slice(begin.as_bytes()), Bytes::copy_from_slice(end.as_bytes())));
        self
    }

    /// The signature info of all packets that it signs.
    pub fn info(&self) -> &SignatureInfo {
        &self.info
    }

    /// Signs these bytes, in order.
    ///
    /// # Errors
    /// The library refuses.
    pub fn sign(&self, parts: &[&[u8]]) -> std::result::Result<Vec<u8>, SignError> {
        let message = parts.concat();
        Ok(match &self.secret {
            Secret::Digest => digest(&SHA256, &message).as_ref().to_vec(),
            Secret::Hmac(key) => hmac::sign(key, &message).as_ref().to_vec(),
            Secret::Ecdsa(pair) => pair.sign(&self.random, &message).map_err(|_| SignError::Sign)?.as_ref().to_vec(),
            Secret::Ed25519(pair) => pair.sign(&message).as_ref().to_vec(),
            Secret::Rsa(pair) => {
                let mut signature = vec![0; pair.public_modulus_len()];
                pair.sign(&RSA_PKCS1_SHA256, &self.random, &message, &mut signature).map_err(|_| SignError::Sign)?;
                signature
            }
        })
    }
}

/// A key that verifies signatures.
#[derive(Clone, Debug)]
pub enum VerifyingKey {
    /// A public key (SubjectPublicKeyInfo, DER), for ECDSA P-256, Ed25519 and RSA.
    Public(Bytes),
    /// A shared secret, for HMAC.
    Secret(Bytes),
}

impl VerifyingKey {
    /// Whether the signature is valid by this key. A digest is never valid by a key.
    pub fn verifies(&self, signature: &Signature) -> bool {
        let message = signature.covered.concat();
        let public = |algorithm: &'static dyn VerificationAlgorithm, key: &[u8]| {
            UnparsedPublicKey::new(algorithm, key).verify(&message, &signature.value).is_ok()
        };
        match (self, signature.info.kind) {
            (Self::Public(key), SignatureType::Ecdsa) => public(&ECDSA_P256_SHA256_ASN1, key),
            (Self::Public(key), SignatureType::Ed25519) => public(&ED25519, key),
            (Self::Public(key), SignatureType::Rsa) => public(&RSA_PKCS1_2048_8192_SHA256, key),
            (Self::Secret(secret), SignatureType::Hmac) => {
                hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, secret), &message, &signature.value).is_ok()
            }
            _ => false,
        }
    }
}

/// Whether the signature is a digest, and the right one. It proves that the packet is intact, not who made it.
pub fn digest_matches(signature: &Signature) -> bool {
    let expected = digest(&SHA256, &signature.covered.concat());
    signature.info.kind == SignatureType::Digest
        && constant_time::verify_slices_are_equal(expected.as_ref(), &signature.value).is_ok()
}

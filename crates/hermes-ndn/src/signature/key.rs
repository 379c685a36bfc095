//! Keys that sign and verify, for the five signature types of the Packet Format 0.3.
//!
//! In: PKCS#8 documents, SubjectPublicKeyInfo, secrets, and signed bytes. Out: signature values, and whether one is
//! valid. A key never signs with more than one signature type. Private keys and secrets never appear in debug output.

use std::fmt;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{self, SHA256};
use aws_lc_rs::encoding::{AsDer, PublicKeyX509Der};
use aws_lc_rs::error::Unspecified;
use aws_lc_rs::hmac::{self, HMAC_SHA256};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, ED25519, EcdsaKeyPair, Ed25519KeyPair, KeyPair,
    ParsedPublicKey, RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_SHA256, RsaKeyPair,
};
use bytes::Bytes;

use super::{KeyLocator, SignatureError, SignatureType};

/// The reason why a key cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The key is not an RSA, P-256 or Ed25519 key.
    #[error("unsupported key algorithm; expected RSA, ECDSA P-256 or Ed25519")]
    Algorithm,
    /// The encoding or the values of the key are invalid, or an RSA key is shorter than 2048 bits.
    #[error("invalid key")]
    Invalid,
    /// The cryptographic library failed to sign.
    #[error("signing failed")]
    Sign,
}

/// A key that signs packets, and the KeyLocator that it puts into them.
pub struct SigningKey {
    secret: Secret,
    locator: Option<KeyLocator>,
}

enum Secret {
    Digest,
    Hmac(Box<hmac::Key>),
    Rsa(RsaKeyPair),
    Ecdsa(EcdsaKeyPair),
    Ed25519(Ed25519KeyPair),
}

/// A key that verifies signatures.
#[derive(Clone)]
pub struct VerifyingKey(Public);

#[derive(Clone)]
enum Public {
    Digest,
    Hmac(Box<hmac::Key>),
    Asymmetric(SignatureType, ParsedPublicKey),
}

/// Algorithms of PKCS#8 and SubjectPublicKeyInfo.
#[derive(Clone, Copy)]
enum Algorithm {
    Rsa,
    P256,
    Ed25519,
}

impl Algorithm {
    /// Object identifiers in DER. That of P-256 is the curve, the second identifier of its AlgorithmIdentifier.
    const OIDS: [(&'static [u8], Self); 3] = [
        (&[0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01], Self::Rsa),
        (&[0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07], Self::P256),
        (&[0x06, 0x03, 0x2b, 0x65, 0x70], Self::Ed25519),
    ];

    /// The algorithm at the front of a key in DER. It only selects a parser, which checks the whole key.
    fn of(der: &[u8]) -> Result<Self, KeyError> {
        let front = &der[..der.len().min(40)];
        let contains = |oid: &[u8]| front.windows(oid.len()).any(|window| window == oid);
        let found = Self::OIDS.iter().find(|(oid, _)| contains(oid));
        found.map(|(_, algorithm)| *algorithm).ok_or(KeyError::Algorithm)
    }
}

impl SigningKey {
    /// The DigestSha256 pseudo-key.
    pub fn digest() -> Self {
        Self { secret: Secret::Digest, locator: None }
    }

    /// An HMAC key.
    pub fn hmac(secret: &[u8]) -> Self {
        Self { secret: Secret::Hmac(Box::new(hmac::Key::new(HMAC_SHA256, secret))), locator: None }
    }

    /// An RSA, ECDSA P-256 or Ed25519 key in PKCS#8.
    ///
    /// # Errors
    /// [`KeyError::Algorithm`] or [`KeyError::Invalid`].
    pub fn from_pkcs8(der: &[u8]) -> Result<Self, KeyError> {
        let secret = match Algorithm::of(der)? {
            Algorithm::Rsa => RsaKeyPair::from_pkcs8(der).map(Secret::Rsa),
            Algorithm::P256 => EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, der).map(Secret::Ecdsa),
            // Version 1 of PKCS#8 lacks the public key, and other implementations write that version.
            Algorithm::Ed25519 => Ed25519KeyPair::from_pkcs8_maybe_unchecked(der).map(Secret::Ed25519),
        };
        Ok(Self { secret: secret.map_err(|_| KeyError::Invalid)?, locator: None })
    }

    /// A new ECDSA P-256 key, as PKCS#8.
    ///
    /// # Errors
    /// [`KeyError::Invalid`] if the cryptographic library fails.
    pub fn generate_p256() -> Result<Vec<u8>, KeyError> {
        let document = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new());
        Ok(document.map_err(|Unspecified| KeyError::Invalid)?.as_ref().to_vec())
    }

    /// Puts this KeyLocator into the packets that the key signs.
    #[must_use]
    pub fn with_locator(self, locator: KeyLocator) -> Self {
        Self { locator: Some(locator), ..self }
    }

    /// The KeyLocator of the packets that the key signs.
    pub fn locator(&self) -> Option<&KeyLocator> {
        self.locator.as_ref()
    }

    /// The type of the signatures.
    pub fn signature_type(&self) -> SignatureType {
        match &self.secret {
            Secret::Digest => SignatureType::DIGEST_SHA256,
            Secret::Hmac(_) => SignatureType::HMAC_WITH_SHA256,
            Secret::Rsa(_) => SignatureType::SHA256_WITH_RSA,
            Secret::Ecdsa(_) => SignatureType::SHA256_WITH_ECDSA,
            Secret::Ed25519(_) => SignatureType::ED25519,
        }
    }

    /// The signature value of a message.
    ///
    /// # Errors
    /// [`KeyError::Sign`].
    pub fn sign(&self, message: &[u8]) -> Result<Bytes, KeyError> {
        let value = match &self.secret {
            Secret::Digest => Ok(Bytes::copy_from_slice(digest::digest(&SHA256, message).as_ref())),
            Secret::Hmac(key) => Ok(Bytes::copy_from_slice(hmac::sign(key, message).as_ref())),
            Secret::Rsa(key) => {
                let mut value = vec![0; key.public_modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), message, &mut value).map(|()| value.into())
            }
            Secret::Ecdsa(key) => {
                key.sign(&SystemRandom::new(), message).map(|value| Bytes::copy_from_slice(value.as_ref()))
            }
            Secret::Ed25519(key) => key.try_sign(message).map(|value| Bytes::copy_from_slice(value.as_ref())),
        };
        value.map_err(|Unspecified| KeyError::Sign)
    }

    /// The public key as SubjectPublicKeyInfo, the content of a certificate; `None` for digests and HMAC.
    pub fn public_key(&self) -> Option<Bytes> {
        let der: Result<PublicKeyX509Der<'_>, Unspecified> = match &self.secret {
            Secret::Digest | Secret::Hmac(_) => return None,
            Secret::Rsa(key) => key.public_key().as_der(),
            Secret::Ecdsa(key) => key.public_key().as_der(),
            Secret::Ed25519(key) => key.public_key().as_der(),
        };
        der.ok().map(|der| Bytes::copy_from_slice(der.as_ref()))
    }

    /// The key that verifies the signatures of this key.
    ///
    /// # Errors
    /// [`KeyError::Invalid`] if the cryptographic library fails.
    pub fn verifying_key(&self) -> Result<VerifyingKey, KeyError> {
        match &self.secret {
            Secret::Digest => Ok(VerifyingKey::digest()),
            Secret::Hmac(key) => Ok(VerifyingKey(Public::Hmac(key.clone()))),
            Secret::Rsa(_) | Secret::Ecdsa(_) | Secret::Ed25519(_) => {
                VerifyingKey::from_spki(&self.public_key().ok_or(KeyError::Invalid)?)
            }
        }
    }
}

impl VerifyingKey {
    /// The DigestSha256 pseudo-key. It proves integrity, not origin.
    pub fn digest() -> Self {
        Self(Public::Digest)
    }

    /// An HMAC key.
    pub fn hmac(secret: &[u8]) -> Self {
        Self(Public::Hmac(Box::new(hmac::Key::new(HMAC_SHA256, secret))))
    }

    /// An RSA (2048 to 8192 bits), ECDSA P-256 or Ed25519 key as SubjectPublicKeyInfo.
    ///
    /// # Errors
    /// [`KeyError::Algorithm`] or [`KeyError::Invalid`].
    pub fn from_spki(der: &[u8]) -> Result<Self, KeyError> {
        let (kind, key) = match Algorithm::of(der)? {
            Algorithm::Rsa => (SignatureType::SHA256_WITH_RSA, ParsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, der)),
            Algorithm::P256 => (SignatureType::SHA256_WITH_ECDSA, ParsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, der)),
            Algorithm::Ed25519 => (SignatureType::ED25519, ParsedPublicKey::new(&ED25519, der)),
        };
        Ok(Self(Public::Asymmetric(kind, key.map_err(|_| KeyError::Invalid)?)))
    }

    /// The type of the signatures that this key verifies.
    pub fn signature_type(&self) -> SignatureType {
        match &self.0 {
            Public::Digest => SignatureType::DIGEST_SHA256,
            Public::Hmac(_) => SignatureType::HMAC_WITH_SHA256,
            Public::Asymmetric(kind, _) => *kind,
        }
    }

    /// Verifies a signature value.
    ///
    /// # Errors
    /// [`SignatureError::Mismatch`] if the signature has another type than the key, so that a peer cannot choose the
    /// algorithm; [`SignatureError::Invalid`] otherwise.
    pub fn verify(&self, kind: SignatureType, message: &[u8], value: &[u8]) -> Result<(), SignatureError> {
        let key = self.signature_type();
        if kind != key {
            return Err(SignatureError::Mismatch { signature: kind.0, key: key.0 });
        }
        let verified = match &self.0 {
            Public::Digest => verify_slices_are_equal(digest::digest(&SHA256, message).as_ref(), value),
            Public::Hmac(key) => hmac::verify(key, message, value),
            Public::Asymmetric(_, key) => key.verify_sig(message, value),
        };
        verified.map_err(|Unspecified| SignatureError::Invalid)
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SigningKey").field("kind", &self.signature_type()).field("locator", &self.locator).finish()
    }
}

impl fmt::Debug for VerifyingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerifyingKey").field("kind", &self.signature_type()).finish_non_exhaustive()
    }
}

//! Ed25519 keys (RFC 8032), and their names.
//!
//! In: a private key as PKCS #8, or a public key as text. Out: signatures, and names. Never: a private key in a message.

use std::fmt;

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use rustls_pki_types::PrivatePkcs8KeyDer;
use rustls_pki_types::pem::PemObject as _;

/// Characters of a line of PEM (RFC 7468, section 2).
const PEM_LINE: usize = 64;

/// A key is unusable.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file is no PEM of a private key.
    #[error("no PEM with a PRIVATE KEY: {0}")]
    Pem(String),
    /// Another kind of key, or a damaged one.
    #[error("no Ed25519 key; make one with `openssl genpkey -algorithm ed25519`, or with `hermes key`")]
    NotEd25519,
    /// The system has no random numbers.
    #[error("the system has no random numbers for a key")]
    Random,
}

/// A public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// Reads a key as it stands in a signature: 43 characters of base64url. `None`: the text is no key.
    pub fn parse(text: &str) -> Option<Self> {
        Some(Self(BASE64_URL_SAFE_NO_PAD.decode(text).ok()?.try_into().ok()?))
    }

    /// A key by its bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The name by which a URI has the key: base64url of its SHA-256, 43 characters.
    pub fn name(&self) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(digest(&SHA256, &self.0))
    }

    pub(crate) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ED25519, self.0).verify(message, signature).is_ok()
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&BASE64_URL_SAFE_NO_PAD.encode(self.0))
    }
}

/// A private key with its public key.
#[derive(Debug)]
pub struct SigningKey {
    pair: Ed25519KeyPair,
    public: PublicKey,
}

impl SigningKey {
    /// A new key, and its PEM.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn generate() -> Result<(Self, String), KeyError> {
        // OpenSSL does not read the second version of PKCS #8.
        let pair = Ed25519KeyPair::generate().map_err(|_| KeyError::Random)?;
        let der = pair.to_pkcs8v1().map_err(|_| KeyError::Random)?;
        let text = BASE64_STANDARD.encode(der.as_ref());
        let lines: String =
            text.as_bytes().chunks(PEM_LINE).map(|line| String::from_utf8_lossy(line).into_owned() + "\n").collect();
        let pem = format!("-----BEGIN PRIVATE KEY-----\n{lines}-----END PRIVATE KEY-----\n");
        Ok((Self::from_pem(pem.as_bytes())?, pem))
    }

    /// Reads a key from PEM.
    ///
    /// # Errors
    /// It is no PEM with an Ed25519 key as PKCS #8.
    pub fn from_pem(pem: &[u8]) -> Result<Self, KeyError> {
        let der = PrivatePkcs8KeyDer::from_pem_slice(pem).map_err(|error| KeyError::Pem(error.to_string()))?;
        // OpenSSL leaves out the public key.
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(der.secret_pkcs8_der());
        let pair = pair.map_err(|_| KeyError::NotEd25519)?;
        let public = pair.public_key().as_ref().try_into().map_err(|_| KeyError::NotEd25519)?;
        Ok(Self { pair, public: PublicKey(public) })
    }

    /// The public key.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    pub(crate) fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.pair.sign(message).as_ref().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_reads_as_it_was_written() {
        let (key, pem) = SigningKey::generate().expect("a key");
        let again = SigningKey::from_pem(pem.as_bytes()).expect("the same key");
        assert_eq!(key.public(), again.public());
        assert_eq!(PublicKey::parse(&key.public().to_string()), Some(*key.public()));
        assert_eq!((key.public().name().len(), key.public().to_string().len()), (43, 43));
        assert!(!format!("{key:?}").contains(&pem[30..60]), "a private key in a message");
        for text in ["", "A", "AAAA", &"A".repeat(42), &"A".repeat(44), &format!("{}=", "A".repeat(43))] {
            assert_eq!(PublicKey::parse(text), None, "{text}");
        }
        assert!(matches!(SigningKey::from_pem(b""), Err(KeyError::Pem(_))));
    }
}

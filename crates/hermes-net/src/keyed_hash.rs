//! Keyed hashes: nobody without the key can predict them, and every process of a node computes the same.
//!
//! In: a node's private key, and the purpose of the hashes. Out: numbers. For a node without a private key, the hash
//! key is random, and the hashes are stable in this process only. Never: the key, or anything that reveals it.

use aws_lc_rs::hmac;

use crate::tls::CertifiedKey;

/// Computes the hashes for one purpose.
#[derive(Clone)]
pub struct KeyedHash(hmac::Key);

impl std::fmt::Debug for KeyedHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeyedHash")
    }
}

impl KeyedHash {
    /// Derives the hash key from the node's private key. If `own` is `None`, the hash key is random. Hashes of
    /// different purposes are independent.
    pub fn of(own: Option<&CertifiedKey>, purpose: &str) -> Self {
        match own {
            Some(own) => Self::from_secret(own.secret(), purpose),
            None => Self::from_secret(&rand::random::<[u8; 32]>(), purpose),
        }
    }

    /// Derives the hash key from a secret that several processes share.
    pub fn from_secret(secret: &[u8], purpose: &str) -> Self {
        let whole = hmac::Key::new(hmac::HMAC_SHA256, secret);
        Self(hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&whole, purpose.as_bytes()).as_ref()))
    }

    /// Returns the hash of a text.
    pub fn hash(&self, text: &str) -> u64 {
        let tag = hmac::sign(&self.0, text.as_bytes());
        // The tag has 32 bytes, so the default is never used.
        tag.as_ref().first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
    }
}

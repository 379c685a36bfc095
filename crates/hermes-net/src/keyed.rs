//! Hashes that no stranger can foresee, and that are the same in every process of a node.
//!
//! In: a node's private key, and what the hashes are for. Out: numbers. Without such a key one is made up, and they are
//! the same in this process alone. Never: the key, nor anything from which it could be found out.

use aws_lc_rs::hmac;

use crate::tls::CertifiedKey;

/// Hashes for one purpose.
#[derive(Clone)]
pub struct Keyed(hmac::Key);

impl std::fmt::Debug for Keyed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keyed")
    }
}

impl Keyed {
    /// Of the holder of this private key, if there is one. Those of two purposes have nothing in common.
    pub fn of(own: Option<&CertifiedKey>, purpose: &str) -> Self {
        match own {
            Some(own) => Self::from_secret(own.secret(), purpose),
            None => Self::from_secret(&rand::random::<[u8; 32]>(), purpose),
        }
    }

    /// Of who knows this.
    pub fn from_secret(secret: &[u8], purpose: &str) -> Self {
        let whole = hmac::Key::new(hmac::HMAC_SHA256, secret);
        Self(hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&whole, purpose.as_bytes()).as_ref()))
    }

    /// The number of a text.
    pub fn hash(&self, text: &str) -> u64 {
        let tag = hmac::sign(&self.0, text.as_bytes());
        // It has 32 bytes.
        tag.as_ref().first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
    }
}

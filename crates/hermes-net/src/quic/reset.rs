//! Stateless resets (RFC 9000, section 10.3) that outlive a process.
//!
//! In: a node's private key. Out: a key for one address, the same in every process that has that key, so that who
//! starts again at an address resets the connections of who died there, at once instead of after their idle timeout.
//! Never: one key for two addresses, since a listener asked for a stranger's connection id would give its reset away
//! (section 21.11).

use std::net::SocketAddr;
use std::sync::Arc;

use aws_lc_rs::hmac;
use quinn::EndpointConfig;

use crate::tls::CertifiedKey;

/// From what the keys of addresses are made.
#[derive(Clone)]
pub struct ResetKey(hmac::Key);

impl std::fmt::Debug for ResetKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ResetKey")
    }
}

impl ResetKey {
    /// Of the holder of this private key. It cannot be found out from what is derived.
    pub fn of(own: &CertifiedKey) -> Self {
        let whole = hmac::Key::new(hmac::HMAC_SHA256, own.secret());
        Self(derived(&whole, "hermes: stateless reset"))
    }

    pub(super) fn endpoint(&self, address: SocketAddr) -> EndpointConfig {
        EndpointConfig::new(Arc::new(derived(&self.0, &address.to_string())))
    }
}

fn derived(from: &hmac::Key, purpose: &str) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(from, purpose.as_bytes()).as_ref())
}

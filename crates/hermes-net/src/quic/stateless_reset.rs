//! Stateless resets (RFC 9000, section 10.3) that work across restarts.
//!
//! In: a node's private key. Out: a reset key for one address, the same in every process with that private key. After a
//! crash, the restarted process resets the old connections at once instead of after their idle timeout. Never: one key
//! for two addresses. Otherwise a listener that receives another listener's connection id would reveal its reset token
//! (section 21.11).

use std::net::SocketAddr;
use std::sync::Arc;

use aws_lc_rs::hmac;
use quinn::EndpointConfig;

use crate::tls::CertifiedKey;

/// The secret from which the reset keys of all addresses are derived.
#[derive(Clone)]
pub struct ResetKey(hmac::Key);

impl std::fmt::Debug for ResetKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ResetKey")
    }
}

impl ResetKey {
    /// Derives the secret from a node's private key. The secret does not reveal the private key.
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

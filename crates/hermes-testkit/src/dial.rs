//! Addresses that clients of a test connect to, with the TLS settings and the header fields for them.
//!
//! In: an address, perhaps a CA and an identity. Out: a value that [`crate::listener_client`] and [`crate::h3`] connect to.

use std::net::{IpAddr, SocketAddr};

use crate::ca::Identity;

/// The name that nodes of a test carry in their certificates beside their URIs, for clients that verify names.
pub const NODE_NAME: &str = "node.test";

/// A listener of a node.
#[derive(Debug, Clone)]
pub struct ListenerClient {
    /// The listener's address.
    pub address: SocketAddr,
    /// The settings of TLS: the trusted CA (PEM), and the client's identity.
    pub tls: Option<(String, Option<Identity>)>,
    /// Fields that each request gets, as lines without line ends.
    pub fields: Vec<(String, String)>,
    /// The source address of QUIC clients; `None` lets the kernel choose.
    pub from: Option<IpAddr>,
}

impl ListenerClient {
    /// Sets the source address of QUIC clients.
    #[must_use]
    pub fn from(mut self, address: impl Into<IpAddr>) -> Self {
        self.from = Some(address.into());
        self
    }

    /// A plaintext listener.
    pub fn plain(address: SocketAddr) -> Self {
        Self { address, tls: None, fields: Vec::new(), from: None }
    }

    /// A TLS listener.
    pub fn tls(address: SocketAddr, ca: &str, identity: Option<&Identity>) -> Self {
        Self { address, tls: Some((ca.to_owned(), identity.cloned())), fields: Vec::new(), from: None }
    }

    /// Adds a header field to each request.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.fields.push((name.to_owned(), value.to_owned()));
        self
    }
}

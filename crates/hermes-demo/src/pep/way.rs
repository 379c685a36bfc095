//! The ways from the client to the server.
//!
//! In: nothing. Out: names, ports, and the paper's figures. Never: behaviour.

use serde::Serialize;

/// A way from the client to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Way {
    /// One TCP connection, which nobody splits.
    Direct,
    /// HAProxy on the first router. The client must know its address.
    Haproxy,
    /// Two TCP connections, split by Hermes on the first router.
    Split,
    /// TCP, HTTP/2 between two routers, TCP.
    Overlay,
    /// TCP, a flow of RINA between two routers, TCP.
    Rina,
    /// HTTP, NDN between two routers, HTTP.
    Ndn,
}

/// Milliseconds that the paper's way adds to a request: on a persistent connection, and with one of its own (Table II).
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Published {
    pub(super) persistent_ms: f64,
    pub(super) own_connection_ms: f64,
}

impl Way {
    pub(super) const ALL: [Self; 6] = [Self::Direct, Self::Haproxy, Self::Split, Self::Overlay, Self::Rina, Self::Ndn];

    /// The name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Direct => "TCP, direct",
            Self::Haproxy => "TCP - HAProxy - TCP",
            Self::Split => "TCP - TCP",
            Self::Overlay => "TCP - HTTP/2 - TCP",
            Self::Rina => "TCP - RINA - TCP",
            Self::Ndn => "HTTP - NDN - HTTP",
        }
    }

    /// The server's port. HAProxy listens on the router, and its server is that of the direct way.
    pub(super) fn port(self) -> u16 {
        match self {
            Self::Direct => 8000,
            Self::Haproxy => 9001,
            Self::Split => 8001,
            Self::Overlay => 8002,
            Self::Rina => 8003,
            Self::Ndn => 8004,
        }
    }

    /// The paper's figures.
    pub(super) fn published(self) -> Option<Published> {
        let (persistent_ms, own_connection_ms) = match self {
            Self::Split => (0.015, 0.032),
            Self::Rina => (0.059, 1.087),
            Self::Ndn => (0.075, 0.081),
            Self::Direct | Self::Haproxy | Self::Overlay => return None,
        };
        Some(Published { persistent_ms, own_connection_ms })
    }

    /// Whether Hermes answers a client's SYN only when the server's connection stands.
    pub(super) fn shares_fate(self) -> bool {
        matches!(self, Self::Direct | Self::Split | Self::Overlay | Self::Rina)
    }
}

//! The connection spec for an endpoint of an upstream.
//!
//! In: the state of an upstream, and the index of a chosen endpoint. Out: the destination to dial, the connection spec,
//! and the key of the endpoint's pool. Never: the choice of the endpoint.

use std::net::SocketAddr;
use std::time::Duration;

use super::connect::Destination;
use super::pool::{ConnectSpec, PoolKey};
use crate::upstream::{Target, UpstreamState};

impl UpstreamState {
    /// Returns the dial target of an endpoint. `source` is the source address of the session, for a PROXY header.
    pub fn destination(&self, index: usize, source: SocketAddr) -> Destination<'_> {
        let endpoint = &self.endpoints[index];
        let (host, port) = match &endpoint.target {
            Target::Address { host, port, .. } => (&**host, *port),
            // This destination is never dialled, because a node is reached over its reverse connections.
            Target::Node(reverse_peer) => (&*reverse_peer.node, 0),
        };
        Destination {
            host,
            port,
            label: &endpoint.label,
            reach: None,
            guarded: false,
            tls: self.tls.as_ref(),
            proxy_source: self.config.proxy_protocol.then_some(source),
            source: None,
            congestion: self.config.congestion.as_deref(),
            urgent: false,
        }
    }

    /// Returns the connection spec for an endpoint, without client and session. For the parameters, see
    /// [`ConnectSpec`] and [`Self::destination`].
    pub fn spec(&self, index: usize, source: SocketAddr, connect_within: Duration, fresh: bool) -> ConnectSpec<'_> {
        ConnectSpec {
            destination: self.destination(index, source),
            protocol: self.config.protocol,
            connect_within,
            fresh,
            node: match &self.endpoints[index].target {
                Target::Address { .. } => None,
                Target::Node(reverse_peer) => Some(reverse_peer),
            },
            client: None,
            session: None,
        }
    }

    /// Returns the pool key of an endpoint. All upstreams share the pool of a node's reverse connections.
    pub fn pool_key(&self, index: usize) -> PoolKey {
        let endpoint = &self.endpoints[index];
        match &endpoint.target {
            Target::Address { .. } => PoolKey { owner: self.id, endpoint: endpoint.name.clone() },
            Target::Node(reverse_peer) => PoolKey::of_node(&reverse_peer.node),
        }
    }
}

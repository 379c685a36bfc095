//! The connection spec of an upstream's endpoint.
//!
//! In: the state of an upstream, and an endpoint that was chosen. Out: the destination to dial, the connection spec,
//! and the key of the endpoint's pool. Never: the choice.

use std::net::SocketAddr;
use std::time::Duration;

use super::connect::Destination;
use super::pool::{ConnectSpec, PoolKey};
use crate::upstream::{Target, UpstreamState};

impl UpstreamState {
    /// The dial target of an endpoint. `source` is the session's source, for a PROXY header.
    pub fn destination(&self, index: usize, source: SocketAddr) -> Destination<'_> {
        let endpoint = &self.endpoints[index];
        let (host, port) = match &endpoint.target {
            Target::Address { host, port, .. } => (&**host, *port),
            // A node target is never dialled.
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
            urgent: false,
        }
    }

    /// The connection spec of a session for an endpoint's pool.
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

    /// The pool key of an endpoint. All upstreams share the pool of a node's reverse connections.
    pub fn pool_key(&self, index: usize) -> PoolKey {
        let endpoint = &self.endpoints[index];
        match &endpoint.target {
            Target::Address { .. } => PoolKey { owner: self.id, endpoint: endpoint.name.clone() },
            Target::Node(reverse_peer) => PoolKey::of_node(&reverse_peer.node),
        }
    }
}

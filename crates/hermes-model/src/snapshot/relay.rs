//! The relay of a snapshot's route: channels of publish and subscribe, and their bounds.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use super::Upstream;
use crate::rendezvous::weight;

/// Serves the URIs of a route as channels: a GET subscribes, a PUT or POST publishes.
#[derive(Clone, Debug, PartialEq)]
pub struct Relay {
    /// The relays that serve the channels together.
    pub tree: RelayTree,
    /// The user of the node's own subscriptions at other relays.
    pub user: Option<Arc<str>>,
    /// The rule for publications that name none.
    pub mode: RelayMode,
    /// Publications and bytes in the queue of a subscriber.
    pub queue: usize,
    /// See `queue`.
    pub queue_bytes: u64,
    /// Maximum size of a publication in bytes.
    pub unit: u64,
    /// Subscribers get a long publication while it arrives.
    pub cut_through: bool,
    /// Maximum timeout of a subscription.
    pub max_timeout: Duration,
    /// Time that a subscriber may read nothing while a reliable publication waits for it.
    pub stall: Duration,
    /// Time between heartbeats to an idle subscriber.
    pub heartbeat: Duration,
    /// Publications that a channel keeps; zero if there is no history.
    pub history: usize,
    /// Bytes that a channel keeps.
    pub history_bytes: u64,
    /// Time that a channel without subscribers keeps its history.
    pub history_age: Duration,
    /// Maximum number of channels.
    pub channels: usize,
    /// Maximum number of subscriptions.
    pub subscriptions: usize,
    /// Maximum number of subscriptions of a user, or of an address without a user.
    pub per_client: usize,
    /// Origins whose web pages may use the relay, beside pages of its own authority; `*` for all.
    pub origins: Vec<Box<str>>,
    /// Public keys (Ed25519, 32 bytes) that verify tokens. With a key, each client needs a token.
    pub tokens: Vec<[u8; 32]>,
    /// Bytes of the publications in queues and histories.
    pub memory: u64,
}

/// The relays that serve a channel together form a tree. Its root numbers the publications.
#[derive(Clone, Debug, PartialEq)]
pub enum RelayTree {
    /// This node is the root of all channels.
    Root,
    /// The next relay towards the root of all channels.
    Below(Arc<Upstream>),
    /// Nodes that share the channels.
    Peers(RelayPeers),
}

/// Nodes that share the channels of a route.
#[derive(Clone, Debug, PartialEq)]
pub struct RelayPeers {
    /// All of them, with this node if it is one.
    pub all: Vec<RelayPeer>,
    /// The choice of the root of a channel.
    pub root: RootChoice,
    /// The authority of channels for requests whose authority is a peer's `url`. `None`: that of the request.
    pub authority: Option<Box<str>>,
}

impl RelayPeers {
    /// The authority of the channels that a request means by its own, which has no default port. All peers have the same list, so a
    /// redirected client means the same channel as before.
    pub fn authority_of<'a>(&'a self, authority: &'a str) -> &'a str {
        let is_url = |peer: &RelayPeer| {
            peer.url.as_ref().and_then(|url| url.split_once("://")).map(|(_, of)| of) == Some(authority)
        };
        match &self.authority {
            Some(ours) if self.all.iter().any(is_url) => ours,
            _ => authority,
        }
    }
}

/// The choice of the root of a channel among peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RootChoice {
    /// By rendezvous hashing of the channel's name.
    #[default]
    Hash,
    /// The peer at which the first client of the channel is, or the one that this client asks for.
    First,
}

/// One of the nodes that share the channels of a route.
#[derive(Clone, Debug, PartialEq)]
pub struct RelayPeer {
    /// The name by which all peers know it.
    pub node: Arc<str>,
    /// The way to it. `None`: it is this node.
    pub upstream: Option<Arc<Upstream>>,
    /// The origin to which clients are redirected if it is the root. `None`: clients stay at the node that they ask.
    pub url: Option<Box<str>>,
}

/// The order of the peers for a channel. The first one that can be reached is the root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChannelRanking {
    /// The upstreams of the peers before this node, best first. If this node is no peer, of all peers.
    pub above: Vec<Arc<str>>,
    /// This node may be the root.
    pub may_lead: bool,
    /// The upstreams of the peers after this node, best first.
    pub below: Vec<Arc<str>>,
}

impl RelayTree {
    /// The upstreams that lead to other relays.
    pub fn upstreams(&self) -> impl Iterator<Item = &Arc<Upstream>> {
        let (next, peers) = match self {
            Self::Root => (None, &[][..]),
            Self::Below(upstream) => (Some(upstream), &[][..]),
            Self::Peers(peers) => (None, &peers.all[..]),
        };
        next.into_iter().chain(peers.iter().filter_map(|peer| peer.upstream.as_ref()))
    }

    /// The nodes that share the channels. `None`: one node has them all.
    pub fn peers(&self) -> Option<&RelayPeers> {
        match self {
            Self::Peers(peers) => Some(peers),
            Self::Root | Self::Below(_) => None,
        }
    }

    /// The order of the relays for a channel. All peers with the same list have the same order: the root, if it is known,
    /// and then by rendezvous hashing.
    pub fn ranking(&self, channel: &str, root: Option<&str>) -> ChannelRanking {
        let mut ranking = ChannelRanking::default();
        match self {
            Self::Root => ranking.may_lead = true,
            Self::Below(upstream) => ranking.above.push(upstream.name.clone()),
            Self::Peers(peers) => {
                let mut ranked: Vec<&RelayPeer> = peers.all.iter().collect();
                let by_hash = |peer: &RelayPeer| Reverse(weight(channel.as_bytes(), &peer.node));
                ranked.sort_by_key(|peer| (root != Some(&*peer.node), by_hash(peer), &peer.node));
                for peer in ranked {
                    match &peer.upstream {
                        None => ranking.may_lead = true,
                        Some(upstream) if ranking.may_lead => ranking.below.push(upstream.name.clone()),
                        Some(upstream) => ranking.above.push(upstream.name.clone()),
                    }
                }
            }
        }
        ranking
    }
}

/// The rule for a publication if the queue of a subscriber is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RelayMode {
    /// The subscriber does not get it.
    #[default]
    Realtime,
    /// The publisher waits.
    Reliable,
}

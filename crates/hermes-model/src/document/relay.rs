//! `relay`: a route whose URIs are channels of publish and subscribe.

use serde::{Deserialize, Serialize};

use super::is_default;
use crate::scalar::{ByteSize, HumanDuration, OneOrMany};
use crate::snapshot::{RelayMode, RootChoice};

/// `relay`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Relay {
    /// Upstream whose nodes are the next relay towards the root of the tree. Default none: this node is the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// Nodes that share the channels: each channel has one of them as its root. Default none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<RelayPeer>,
    /// Authority of the channel if a request has that of a peer's `url`, as in `relay.example`. Default: that of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
    /// Choice of the root of a channel among the peers. Default hash.
    #[serde(default, skip_serializing_if = "is_default")]
    pub root: RootChoice,
    /// User of the node's own subscriptions at other relays, which may match on it. Default none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Rule for a publication if the queue of a subscriber is full. Default realtime.
    #[serde(default, skip_serializing_if = "is_default")]
    pub mode: RelayMode,
    /// Publications in the queue of a subscriber. Default 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<usize>,
    /// Bytes in the queue of a subscriber. Default 4 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_bytes: Option<ByteSize>,
    /// Maximum size of a publication. Default 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<ByteSize>,
    /// Whether subscribers get a long publication while it arrives. Default false: they get it as a whole.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cut_through: bool,
    /// Maximum timeout of a subscription. Default 1 h.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_timeout: Option<HumanDuration>,
    /// Time that a subscriber may read nothing while a reliable publication waits for it. Default 10 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall: Option<HumanDuration>,
    /// Time between heartbeats to an idle subscriber. Default 15 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<HumanDuration>,
    /// Publications that a channel keeps for clients that resume. Default none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<RelayHistory>,
    /// Maximum number of channels. Default 10000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<usize>,
    /// Maximum number of subscriptions. Default 100000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subscriptions: Option<usize>,
    /// Maximum number of subscriptions of a user, or of an address without a user. Default 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_client: Option<usize>,
    /// Origins whose web pages may use the relay, beside pages of its own authority; `*` for all. Default none.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub origins: OneOrMany<String>,
    /// Public keys (Ed25519, base64url) that verify tokens. With a key, each client needs a token. Default none: the routes alone decide.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub tokens: OneOrMany<String>,
    /// Bytes of the publications in queues and histories. Default 256 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
}

/// `relay.peers[]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RelayPeer {
    /// Name of the node. It must be the same in the documents of all peers.
    pub node: String,
    /// Upstream that leads to the node. Default: the upstream with the name of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// Origin to which clients are redirected if this node is the root, as in `https://one.example`. Default none: clients stay
    /// at the node that they ask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// `relay.history`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RelayHistory {
    /// Publications of a channel. Default 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub publications: Option<usize>,
    /// Bytes of a channel. Default 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<ByteSize>,
    /// Time that a channel without subscribers keeps its history. Default 10 min.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age: Option<HumanDuration>,
}

//! The relay of a snapshot's route: channels of publish and subscribe, and their bounds.

use std::sync::Arc;
use std::time::Duration;

use super::Upstream;

/// Serves the URIs of a route as channels: a GET subscribes, a PUT or POST publishes.
#[derive(Clone, Debug, PartialEq)]
pub struct Relay {
    /// The next relay towards the root of the tree. `None`: this node is the root.
    pub upstream: Option<Arc<Upstream>>,
    /// The rule for publications that name none.
    pub mode: RelayMode,
    /// Publications and bytes in the queue of a subscriber.
    pub queue: usize,
    /// See `queue`.
    pub queue_bytes: u64,
    /// Maximum size of a publication in bytes.
    pub unit: u64,
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
    /// Bytes of the publications in queues and histories.
    pub memory: u64,
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

//! The bounds of a relay.
//!
//! In: the settings of a route. Out: numbers that the relay and its channels check. Each has a default.

use std::time::Duration;

/// The bounds of a relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayLimits {
    /// Channels at once.
    pub channels: usize,
    /// Subscriptions at once, and those of one subject.
    pub subscriptions: usize,
    /// See `subscriptions`.
    pub subscriptions_per_subject: usize,
    /// Publications and bytes in the queue of a subscriber.
    pub queue: usize,
    /// See `queue`.
    pub queue_bytes: u64,
    /// The longest timeout of a subscription.
    pub max_timeout: Duration,
    /// The time for which a subscriber may read nothing while a reliable publication waits for it.
    pub stall: Duration,
    /// Publications and bytes in the history of a channel, and the time for which it stays without subscribers.
    pub history: usize,
    /// See `history`.
    pub history_bytes: u64,
    /// See `history`.
    pub history_age: Duration,
    /// Bytes of all publications that are in a queue or a history.
    pub memory: u64,
}

impl Default for RelayLimits {
    fn default() -> Self {
        Self {
            channels: 10_000,
            subscriptions: 100_000,
            subscriptions_per_subject: 10_000,
            queue: 64,
            queue_bytes: 4 << 20,
            max_timeout: Duration::from_secs(3600),
            stall: Duration::from_secs(10),
            history: 0,
            history_bytes: 1 << 20,
            history_age: Duration::from_secs(600),
            memory: 256 << 20,
        }
    }
}

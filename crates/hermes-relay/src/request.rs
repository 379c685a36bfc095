//! The requests to a relay, and the reasons why it refuses them.
//!
//! In: the text of a subscription's number. Out: values that the relay and its callers share.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::event_id::EventId;

/// The number that identifies a subscription. It is random, since a client refreshes the subscription by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SubscriptionId(pub u128);

impl fmt::Display for SubscriptionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for SubscriptionId {
    type Err = SubscribeError;

    fn from_str(text: &str) -> Result<Self, SubscribeError> {
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| is_hex);
        number.map(Self).ok_or(SubscribeError::Unknown)
    }
}

/// A subscription that a client asks for.
#[derive(Clone, Debug)]
pub struct SubscribeRequest {
    /// A new random number.
    pub id: SubscriptionId,
    /// The user or address that the subscription counts for.
    pub subject: Arc<str>,
    /// The channels, and the latest publication of each that the client has.
    pub channels: Vec<(Arc<str>, Option<EventId>)>,
    /// The group for publications that go to one of its members.
    pub group: Option<Arc<str>>,
    /// The time after which it ends unless it is refreshed.
    pub timeout: Duration,
    /// For a relaying node, the number of subscribers behind it. Such a subscription does not count for its subject, since
    /// it stands for many clients.
    pub behind: Option<u64>,
    /// The relaying node keeps a copy of the history, and confirms what it has.
    pub is_stand_by: bool,
    /// A random number, for channels that begin now.
    pub epoch: u64,
}

/// The reason why a subscription or a refresh is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubscribeError {
    /// The timeout is longer than allowed.
    #[error("the longest timeout of a subscription is {} s", .0.as_secs())]
    TimeoutTooLong(Duration),
    /// A bound of the relay.
    #[error("the relay has its most channels ({0})")]
    TooManyChannels(usize),
    /// A bound of the relay.
    #[error("the relay has its most subscribed channels ({0})")]
    TooManySubscriptions(usize),
    /// A bound of each client.
    #[error("this client subscribes to its most channels ({0})")]
    TooManyOfSubject(usize),
    /// The relay has been closed.
    #[error("the relay no longer serves the channel")]
    Closed,
    /// It does not exist, or belongs to another client.
    #[error("no such subscription of this client; it may have expired")]
    Unknown,
}

/// The reason why a publication is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PublishError {
    /// A bound of the relay.
    #[error("the relay has its most channels ({0})")]
    TooManyChannels(usize),
    /// A bound of the relay in bytes.
    #[error("the publications in queues and histories have their most bytes ({0})")]
    Memory(u64),
    /// Another relay is the root of the channel.
    #[error("another relay is the root of the channel")]
    NotRoot,
    /// The relay has been closed.
    #[error("the relay no longer serves the channel")]
    Closed,
}

//! The channels of a relay, its subscriptions, and their bounds.
//!
//! In: subscriptions and publications with the time, from any thread. Out: a [`Subscription`] to read from, and the
//! progress of a publication. Channels and subscriptions are soft state: a channel without subscribers and history is
//! forgotten. Never: a random number of its own; the caller provides them.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::channel::{Audience, Channel, PublishProgress, Receipt};
use crate::event_id::EventId;
use crate::limits::RelayLimits;
use crate::publication::{NewPublication, Reserved};
use crate::queue::{Delivery, End, QueueLimits, SubscriberQueue};

/// The number of unused channels of which the one that was used the longest ago makes room for a new one.
const IDLE_CANDIDATES: usize = 32;

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
    #[error("the relay has its most subscriptions ({0})")]
    TooManySubscriptions(usize),
    /// A bound of each client.
    #[error("this client has its most subscriptions ({0})")]
    TooManyOfSubject(usize),
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
}

/// Numbers of a relay, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RelayCounters {
    /// Channels with a subscriber or a history.
    pub channels: u64,
    /// Subscriptions.
    pub subscriptions: u64,
    /// Bytes of the publications in queues and histories.
    pub memory: u64,
}

/// Channels, and who subscribes to them.
#[derive(Debug)]
pub struct Relay {
    table: Mutex<Table>,
    memory: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Table {
    limits: Arc<RelayLimits>,
    channels: HashMap<Arc<str>, Arc<Channel>>,
    subscriptions: HashMap<SubscriptionId, Registration>,
    by_subject: HashMap<Arc<str>, usize>,
}

/// The channel of a publication, and the bounds that hold now.
struct Target {
    channel: Arc<Channel>,
    limits: Arc<RelayLimits>,
}

#[derive(Debug)]
struct Registration {
    queue: Arc<SubscriberQueue>,
    subject: Arc<str>,
}

impl Relay {
    /// A relay without channels.
    pub fn new(limits: RelayLimits) -> Arc<Self> {
        let table = Table {
            limits: Arc::new(limits),
            channels: HashMap::new(),
            subscriptions: HashMap::new(),
            by_subject: HashMap::new(),
        };
        Arc::new(Self { table: Mutex::new(table), memory: Arc::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the bounds. Channels and subscriptions beyond them stay until they end by themselves.
    pub fn set_limits(&self, limits: &RelayLimits) {
        let mut table = self.lock();
        if *table.limits != *limits {
            table.limits = Arc::new(limits.clone());
        }
    }

    /// Begins a subscription. It ends when it is dropped.
    ///
    /// # Errors
    /// The timeout is too long, or a bound is reached.
    pub fn subscribe(
        self: &Arc<Self>,
        request: SubscribeRequest,
        now: Duration,
    ) -> Result<Subscription, SubscribeError> {
        let mut table = self.lock();
        let limits = table.limits.clone();
        if request.timeout > limits.max_timeout {
            return Err(SubscribeError::TimeoutTooLong(limits.max_timeout));
        }
        if table.subscriptions.len() >= limits.subscriptions {
            return Err(SubscribeError::TooManySubscriptions(limits.subscriptions));
        }
        let of_subject = table.by_subject.get(&request.subject).copied().unwrap_or_default();
        if of_subject >= limits.subscriptions_per_subject {
            return Err(SubscribeError::TooManyOfSubject(limits.subscriptions_per_subject));
        }
        let mut channels = Vec::with_capacity(request.channels.len());
        for (name, after) in request.channels {
            let channel = table.channel(&name, request.epoch, now);
            channels.push((channel.ok_or(SubscribeError::TooManyChannels(limits.channels))?, after));
        }
        let bounds = QueueLimits { publications: limits.queue.max(1), bytes: limits.queue_bytes };
        let queue = Arc::new(SubscriberQueue::new(bounds, now + request.timeout));
        // The table stays locked, so that no channel is forgotten before the subscriber joins it.
        let join = |(channel, after): (Arc<Channel>, Option<EventId>)| {
            let number = channel.join(&queue, request.group.clone(), after, now);
            (channel, number)
        };
        let memberships = channels.into_iter().map(join).collect();
        let registration = Registration { queue: queue.clone(), subject: request.subject.clone() };
        table.subscriptions.insert(request.id, registration);
        *table.by_subject.entry(request.subject).or_default() += 1;
        Ok(Subscription { id: request.id, relay: self.clone(), queue, memberships })
    }

    /// Gives a subscription another timeout, from now on. If it is refused, the subscription stays as it was.
    ///
    /// # Errors
    /// The timeout is too long, or the subject has no such subscription.
    pub fn refresh(
        &self,
        id: SubscriptionId,
        subject: &str,
        timeout: Duration,
        now: Duration,
    ) -> Result<(), SubscribeError> {
        let table = self.lock();
        let registration = table.subscriptions.get(&id).filter(|registration| *registration.subject == *subject);
        let queue = &registration.ok_or(SubscribeError::Unknown)?.queue;
        if timeout > table.limits.max_timeout {
            return Err(SubscribeError::TimeoutTooLong(table.limits.max_timeout));
        }
        if queue.extend(now + timeout, now) { Ok(()) } else { Err(SubscribeError::Unknown) }
    }

    /// Memory for a publication that arrives.
    pub fn reserve(&self) -> Reserved {
        Reserved::new(&self.memory)
    }

    /// Reserves more bytes of a publication that arrives.
    ///
    /// # Errors
    /// The relay has its most bytes.
    pub fn reserve_more(&self, reserved: &mut Reserved, bytes: u64) -> Result<(), PublishError> {
        let most = self.lock().limits.memory;
        if reserved.add(bytes) > most { Err(PublishError::Memory(most)) } else { Ok(()) }
    }

    /// Publishes wherever there is room.
    ///
    /// # Errors
    /// A bound is reached.
    pub fn publish_realtime(
        &self,
        channel: &str,
        content: NewPublication,
        audience: Audience,
        epoch: u64,
        now: Duration,
    ) -> Result<Receipt, PublishError> {
        let Some(Target { channel, limits }) = self.channel_for(channel, epoch, now)? else { return Ok(nobody(epoch)) };
        Ok(channel.publish_realtime(content, audience, &limits, &self.memory, now))
    }

    /// Publishes if all queues have room. Otherwise `publisher` is woken when that may be so.
    ///
    /// # Errors
    /// A bound is reached.
    pub fn poll_publish_reliable(
        &self,
        channel: &str,
        content: &NewPublication,
        audience: Audience,
        epoch: u64,
        publisher: &Waker,
        now: Duration,
    ) -> Result<PublishProgress, PublishError> {
        let Some(Target { channel, limits }) = self.channel_for(channel, epoch, now)? else {
            return Ok(PublishProgress::Done(nobody(epoch)));
        };
        Ok(channel.publish_reliable(content, audience, &limits, &self.memory, publisher, now))
    }

    /// The turn of a reliable publication. To be taken before [`Self::poll_publish_reliable`], and held until that is done.
    /// `None`: the channel has neither subscribers nor a history, so nothing waits.
    pub fn turn(&self, channel: &str) -> Option<Arc<Semaphore>> {
        self.lock().channels.get(channel).map(|channel| channel.turn.clone())
    }

    /// Ends all subscriptions.
    pub fn close(&self) {
        let channels: Vec<Arc<Channel>> = self.lock().channels.values().cloned().collect();
        channels.iter().for_each(|channel| channel.close());
    }

    /// The channel of a publication. `None`: nobody subscribes to it, and it keeps no history.
    fn channel_for(&self, name: &str, epoch: u64, now: Duration) -> Result<Option<Target>, PublishError> {
        let mut table = self.lock();
        let limits = table.limits.clone();
        if self.memory.load(Ordering::Relaxed) > limits.memory {
            return Err(PublishError::Memory(limits.memory));
        }
        // Otherwise, publications to random names would fill the table.
        if limits.history == 0 && !table.channels.contains_key(name) {
            return Ok(None);
        }
        let channel = table.channel(name, epoch, now).ok_or(PublishError::TooManyChannels(limits.channels))?;
        Ok(Some(Target { channel, limits }))
    }

    /// Forgets channels that nobody uses. To be called about once a second. Returns the number of subscriptions that ended
    /// since the last call because they stalled.
    pub fn sweep(&self, now: Duration) -> u64 {
        let mut table = self.lock();
        let stalled = table.channels.values().map(|channel| channel.take_stalled()).sum();
        let age = table.limits.history_age;
        table.channels.retain(|_, channel| Arc::strong_count(channel) > 1 || !channel.is_unused(now, age));
        stalled
    }

    /// Numbers for metrics.
    pub fn counters(&self) -> RelayCounters {
        let table = self.lock();
        RelayCounters {
            channels: table.channels.len() as u64,
            subscriptions: table.subscriptions.len() as u64,
            memory: self.memory.load(Ordering::Relaxed),
        }
    }
}

/// The receipt of a publication to a channel that does not exist.
fn nobody(epoch: u64) -> Receipt {
    Receipt { id: EventId { epoch, sequence: 1 }, subscribers: 0, delivered: 0 }
}

impl Table {
    /// Finds or begins a channel. `None` if there are too many.
    fn channel(&mut self, name: &str, epoch: u64, now: Duration) -> Option<Arc<Channel>> {
        if let Some(channel) = self.channels.get(name) {
            return Some(channel.clone());
        }
        if self.channels.len() >= self.limits.channels {
            // The history of a channel that was not used for long makes room. A search of all channels would take too long.
            // One that a request has looked up is in use.
            let unshared = self.channels.iter().filter(|(_, channel)| Arc::strong_count(channel) == 1);
            let idle = unshared.filter_map(|(name, channel)| Some((channel.idle_since()?, name.clone())));
            let (_, oldest) = idle.take(IDLE_CANDIDATES).min()?;
            self.channels.remove(&oldest);
        }
        let name: Arc<str> = name.into();
        let channel = Arc::new(Channel::new(name.clone(), epoch, now));
        self.channels.insert(name, channel.clone());
        Some(channel)
    }
}

/// A subscriber's end of its subscription.
#[derive(Debug)]
pub struct Subscription {
    id: SubscriptionId,
    relay: Arc<Relay>,
    queue: Arc<SubscriberQueue>,
    memberships: Vec<(Arc<Channel>, u64)>,
}

impl Subscription {
    /// The number by which it can be refreshed.
    pub fn id(&self) -> SubscriptionId {
        self.id
    }

    /// The channels, in the order of the request.
    pub fn channels(&self) -> impl Iterator<Item = &Arc<str>> {
        self.memberships.iter().map(|(channel, _)| &channel.name)
    }

    /// The time at which it expires unless it is refreshed.
    pub fn deadline(&self) -> Duration {
        self.queue.deadline()
    }

    /// Takes the next delivery.
    ///
    /// # Errors
    /// The subscription has ended.
    pub fn poll_next(&self, cx: &mut Context<'_>, now: Duration) -> Poll<Result<Delivery, End>> {
        self.queue.poll_next(cx, now)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        {
            let mut table = self.relay.lock();
            if let Some(registration) = table.subscriptions.remove(&self.id)
                && let Some(count) = table.by_subject.get_mut(&registration.subject)
            {
                *count -= 1;
                if *count == 0 {
                    table.by_subject.remove(&registration.subject);
                }
            }
        }
        let untaken = self.queue.close();
        for (channel, number) in &self.memberships {
            channel.leave(*number, &untaken);
        }
    }
}

//! The channels of a relay, its subscriptions, and their bounds.
//!
//! In: subscriptions and publications with the time, from any thread. Out: a [`Subscription`] to read from, and the
//! progress of a publication. Channels and subscriptions are soft state: a channel without subscribers and history is
//! forgotten. Never: a random number of its own; the caller provides them.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};

use crate::channel::{Channel, HandOver, Joined, Losses, NewMember};
use crate::event_id::EventId;
use crate::history_log::HistoryLog;
use crate::limits::RelayLimits;
use crate::publication::{FedPublication, NewPublication, Publication};
use crate::publishing::{Audience, Copies, Place, PublishProgress, Receipt};
use crate::queue::{Delivery, End, QueueLimits, SubscriberQueue};
use crate::request::{PublishError, SubscribeError, SubscribeRequest, SubscriptionId};
use crate::reserved::Reserved;

/// The most idle channels that are known between two sweeps, to make room for new ones.
const MAX_IDLE: usize = 1024;

/// The time for which a delivery must have waited before its subscriber counts as slow when memory is short.
const MIN_SLOW: Duration = Duration::from_secs(1);

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
    histories: HistoryLog,
    memory: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Table {
    limits: Arc<RelayLimits>,
    channels: HashMap<Arc<str>, Arc<Channel>>,
    subscriptions: HashMap<SubscriptionId, Registration>,
    /// The channels of all subscriptions, counted for each subscription.
    memberships: usize,
    memberships_by_subject: HashMap<Arc<str>, usize>,
    /// Channels that may be idle, with the one that was used the longest ago first.
    idle: VecDeque<Arc<str>>,
    is_closed: bool,
    /// The time of the latest call.
    now: Duration,
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
    /// The channels that count for the subject.
    counted: usize,
    memberships: Arc<[Membership]>,
}

/// A subscriber's place in a channel.
#[derive(Debug)]
struct Membership {
    channel: Arc<Channel>,
    joined: Joined,
}

impl Relay {
    /// A relay without channels.
    pub fn new(limits: RelayLimits) -> Arc<Self> {
        let table = Table {
            limits: Arc::new(limits),
            channels: HashMap::new(),
            subscriptions: HashMap::new(),
            memberships: 0,
            memberships_by_subject: HashMap::new(),
            idle: VecDeque::new(),
            is_closed: false,
            now: Duration::ZERO,
        };
        Arc::new(Self { table: Mutex::new(table), histories: HistoryLog::default(), memory: Arc::default() })
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
        table.now = now;
        let counted = table.admits(&request)?;
        let (limits, more) = (table.limits.clone(), request.channels.len());
        let mut channels = Vec::with_capacity(request.channels.len());
        for (name, after) in request.channels {
            let channel = table.channel(&name, request.epoch, now);
            channels.push((channel.ok_or(SubscribeError::TooManyChannels(limits.channels))?, after));
        }
        let bounds = QueueLimits { publications: limits.queue.max(1), bytes: limits.queue_bytes };
        let queue = Arc::new(SubscriberQueue::new(bounds, now + request.timeout));
        // The table stays locked, so that no channel is forgotten before the subscriber joins it.
        let join = |(channel, after): (Arc<Channel>, Option<EventId>)| {
            let (group, weight) = (request.group.clone(), request.behind.unwrap_or(1));
            let is_stand_by = request.is_stand_by;
            let is_node = request.behind.is_some();
            let member = NewMember { queue: &queue, group, weight, after, is_stand_by, is_node };
            let joined = channel.join(member, now);
            Membership { channel, joined }
        };
        let memberships: Arc<[Membership]> = channels.into_iter().map(join).collect();
        let subject = request.subject.clone();
        let registration = Registration { queue: queue.clone(), subject, counted, memberships: memberships.clone() };
        table.subscriptions.insert(request.id, registration);
        table.memberships += more;
        if counted > 0 {
            *table.memberships_by_subject.entry(request.subject).or_default() += counted;
        }
        Ok(Subscription { id: request.id, relay: self.clone(), queue, memberships })
    }

    /// Gives a subscription another timeout, from now on, and that of a relaying node the number of subscribers behind
    /// it. If it is refused, the subscription stays as it was.
    ///
    /// # Errors
    /// The timeout is too long, or the subject has no such subscription.
    pub fn refresh(
        &self,
        id: SubscriptionId,
        subject: &str,
        timeout: Duration,
        behind: Option<u64>,
        now: Duration,
    ) -> Result<(), SubscribeError> {
        let table = self.lock();
        let registration = table.subscriptions.get(&id).filter(|registration| *registration.subject == *subject);
        let Registration { queue, memberships, .. } = registration.ok_or(SubscribeError::Unknown)?;
        if timeout > table.limits.max_timeout {
            return Err(SubscribeError::TimeoutTooLong(table.limits.max_timeout));
        }
        if !queue.extend(now + timeout, now) {
            return Err(SubscribeError::Unknown);
        }
        if let Some(weight) = behind {
            memberships
                .iter()
                .for_each(|membership| membership.channel.set_weight(membership.joined.number, weight, now));
        }
        Ok(())
    }

    /// The channels of a subscription. Empty: the subject has no such subscription.
    pub fn channels_of(&self, id: SubscriptionId, subject: &str) -> Vec<Arc<str>> {
        let table = self.lock();
        let registration = table.subscriptions.get(&id).filter(|registration| *registration.subject == *subject);
        let memberships = registration.map_or(&[][..], |registration| &registration.memberships);
        memberships.iter().map(|membership| membership.channel.name.clone()).collect()
    }

    /// A relaying node has the publications of a channel up to this one. `None`: it keeps no copy.
    pub fn confirm(&self, id: SubscriptionId, until: Option<EventId>) {
        let table = self.lock();
        let Some(Registration { memberships, .. }) = table.subscriptions.get(&id) else { return };
        let now = table.now;
        memberships.iter().for_each(|membership| membership.channel.confirm(membership.joined.number, until, now));
    }

    /// The confirmed copies of a channel, and their changes. `None`: there is no such channel.
    pub fn copies(&self, channel: &str) -> Option<watch::Receiver<Copies>> {
        self.lock().channels.get(channel).map(|channel| channel.copies())
    }

    /// Ends the subscriptions of stand-bys that have not confirmed a publication. Returns their number.
    pub fn end_stand_bys(&self, channel: &str, id: EventId) -> u64 {
        let table = self.lock();
        table.channels.get(channel).map_or(0, |channel| channel.end_stand_bys(id.sequence, table.now))
    }

    /// Ends the subscriptions of other relays to a channel, so that they look for its root again.
    pub fn end_relays(&self, channel: &str) {
        let channel = self.lock().channels.get(channel).cloned();
        channel.inspect(|channel| channel.end_relays());
    }

    /// Lets another relay, which has the publications of the channel up to `after`, number the next ones. Returns those that
    /// it lacks. `None`: there is no such channel.
    pub fn hand_over(&self, channel: &str, after: EventId) -> Option<HandOver> {
        let channel = self.lock().channels.get(channel).cloned();
        channel.map(|channel| channel.hand_over(after))
    }

    /// Whether a bound of the relay, or of its client, would refuse the subscription now.
    ///
    /// # Errors
    /// The bound.
    pub fn may_subscribe(&self, request: &SubscribeRequest) -> Result<(), SubscribeError> {
        self.lock().admits(request).map(drop)
    }

    /// Whether three quarters of the channels exist. From then on, a relay keeps those alone that somebody uses.
    pub fn is_crowded(&self) -> bool {
        let table = self.lock();
        table.channels.len() >= table.limits.channels / 4 * 3
    }

    /// Whether channels keep a history.
    pub fn keeps_history(&self) -> bool {
        self.lock().limits.history > 0
    }

    pub(crate) fn history_age(&self) -> Duration {
        self.lock().limits.history_age
    }

    /// Whether the relay has this subscription.
    pub fn has(&self, id: SubscriptionId) -> bool {
        self.lock().subscriptions.contains_key(&id)
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
        reserved.add(bytes);
        self.make_room(most)
    }

    /// Reserves bytes that a publisher has announced. `None`: with them, more than half of the memory would be taken. Announced bytes
    /// cost the publisher nothing, so they may not take the memory of others.
    pub fn reserve_announced(&self, bytes: u64) -> Option<Reserved> {
        let most = self.lock().limits.memory;
        let mut reserved = self.reserve();
        (reserved.add(bytes) <= most / 2).then_some(reserved)
    }

    /// Removes the oldest publications of histories until at most `most` bytes are held.
    fn make_room(&self, most: u64) -> Result<(), PublishError> {
        while self.memory.load(Ordering::Relaxed) > most {
            if !self.histories.forget_oldest() {
                return Err(PublishError::Memory(most));
            }
        }
        Ok(())
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
        let target = self.channel_for(channel, audience, epoch, now)?;
        let Some(Target { channel, limits }) = target else { return Ok(nobody(audience, epoch)) };
        let receipt = channel.publish_realtime(content, Place::Next(audience), &limits, &self.memory, now)?;
        self.log(&channel, &receipt, &limits);
        Ok(receipt)
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
        let Some(Target { channel, limits }) = self.channel_for(channel, audience, epoch, now)? else {
            return Ok(PublishProgress::Done(nobody(audience, epoch)));
        };
        let progress =
            channel.publish_reliable(content, Place::Next(audience), &limits, &self.memory, publisher, now)?;
        if let PublishProgress::Done(receipt) = &progress {
            self.log(&channel, receipt, &limits);
        }
        Ok(progress)
    }

    fn log(&self, channel: &Arc<Channel>, receipt: &Receipt, limits: &RelayLimits) {
        if let Some(id) = receipt.id.filter(|_| limits.history > 0) {
            self.histories.push(channel, id);
        }
    }

    /// Finds or begins a channel that another relay feeds.
    pub(crate) fn fed_channel(&self, channel: &str, epoch: u64, now: Duration) -> Result<Arc<Channel>, SubscribeError> {
        let mut table = self.lock();
        table.now = now;
        if table.is_closed {
            return Err(SubscribeError::Closed);
        }
        let most = table.limits.channels;
        let channel = table.channel(channel, epoch, now).ok_or(SubscribeError::TooManyChannels(most))?;
        channel.begin_feed();
        Ok(channel)
    }

    /// Publishes to a fed channel, by the rules of a local publication.
    pub(crate) fn poll_publish_fed(
        &self,
        channel: &Arc<Channel>,
        publication: &FedPublication,
        publisher: &Waker,
        now: Duration,
    ) -> Result<PublishProgress, PublishError> {
        let limits = self.ready_for_publication(now)?.limits.clone();
        let FedPublication { content, id, is_reliable } = publication;
        let progress = if *is_reliable {
            channel.publish_reliable(content, Place::Fed(*id), &limits, &self.memory, publisher, now)?
        } else {
            let receipt = channel.publish_realtime(content.clone(), Place::Fed(*id), &limits, &self.memory, now)?;
            PublishProgress::Done(receipt)
        };
        if let PublishProgress::Done(receipt) = &progress {
            self.log(channel, receipt, &limits);
        }
        Ok(progress)
    }

    /// Adds older publications to the history of a fed channel.
    pub(crate) fn prepend(&self, channel: &Arc<Channel>, older: Vec<FedPublication>) {
        let limits = self.lock().limits.clone();
        let ids: Vec<EventId> = older.iter().filter_map(|publication| publication.id).collect();
        channel.prepend(older, &limits, &self.memory);
        ids.into_iter().for_each(|id| self.histories.push(channel, id));
    }

    /// The turn of a reliable publication. To be taken before [`Self::poll_publish_reliable`], and held until that is done.
    /// `None`: the channel has neither subscribers nor a history, so nothing waits.
    pub fn turn(&self, channel: &str) -> Option<Arc<Semaphore>> {
        self.lock().channels.get(channel).map(|channel| channel.turn.clone())
    }

    /// Ends all subscriptions after what waits in their queues, and refuses new ones and publications.
    pub fn close(&self) {
        let channels: Vec<Arc<Channel>> = {
            let mut table = self.lock();
            table.is_closed = true;
            table.channels.values().cloned().collect()
        };
        channels.iter().for_each(|channel| channel.close());
    }

    /// The channel of a publication. `None`: nobody subscribes to it, and it keeps no history.
    fn channel_for(
        &self,
        name: &str,
        audience: Audience,
        epoch: u64,
        now: Duration,
    ) -> Result<Option<Target>, PublishError> {
        let mut table = self.ready_for_publication(now)?;
        let limits = table.limits.clone();
        // Otherwise, publications to random names would fill the table.
        let is_kept = limits.history > 0 && audience == Audience::All;
        if !is_kept && !table.channels.contains_key(name) {
            return Ok(None);
        }
        let channel = table.channel(name, epoch, now).ok_or(PublishError::TooManyChannels(limits.channels))?;
        Ok(Some(Target { channel, limits }))
    }

    /// The table, once there is memory for a publication.
    fn ready_for_publication(&self, now: Duration) -> Result<MutexGuard<'_, Table>, PublishError> {
        let mut table = self.lock();
        table.now = now;
        let most = table.limits.memory;
        if self.memory.load(Ordering::Relaxed) > most {
            drop(table);
            self.make_room(most)?;
            table = self.lock();
        }
        if table.is_closed { Err(PublishError::Closed) } else { Ok(table) }
    }

    /// Forgets channels that nobody uses. While too much memory is held, ends the subscriptions whose clients have read
    /// nothing for the longest time. To be called about once a second. Returns what was lost since the last call.
    pub fn sweep(&self, now: Duration) -> Losses {
        let limits = self.lock().limits.clone();
        let is_short = self.make_room(limits.memory).is_err();
        let mut table = self.lock();
        table.now = now;
        let mut losses = Losses::default();
        if is_short {
            losses.stalled += table.end_slowest(&self.memory, now);
        }
        table.empty_stalled(now);
        let (age, mut idle) = (table.limits.history_age, Vec::new());
        table.channels.retain(|name, channel| {
            let of_channel = channel.take_losses();
            losses.stalled += of_channel.stalled;
            losses.jobs += of_channel.jobs;
            let is_unshared = Arc::strong_count(channel) == 1;
            if is_unshared && channel.is_unused(now, age) {
                losses.jobs += channel.drop_orphans();
                return false;
            }
            idle.extend(channel.idle_since().filter(|_| is_unshared).map(|since| (since, name.clone())));
            true
        });
        idle.sort();
        table.idle = idle.into_iter().take(MAX_IDLE).map(|(_, name)| name).collect();
        losses
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
fn nobody(audience: Audience, epoch: u64) -> Receipt {
    let id = (audience == Audience::All).then_some(EventId { epoch, sequence: 1 });
    Receipt { id, subscribers: 0, delivered: 0, dropped: 0 }
}

impl Table {
    /// Checks the bounds of a subscription, and returns the number of channels that count for its subject.
    fn admits(&self, request: &SubscribeRequest) -> Result<usize, SubscribeError> {
        let limits = &self.limits;
        if self.is_closed {
            return Err(SubscribeError::Closed);
        }
        if request.timeout > limits.max_timeout {
            return Err(SubscribeError::TimeoutTooLong(limits.max_timeout));
        }
        let more = request.channels.len();
        if self.memberships + more > limits.subscriptions {
            return Err(SubscribeError::TooManySubscriptions(limits.subscriptions));
        }
        let of_subject = self.memberships_by_subject.get(&request.subject).copied().unwrap_or_default();
        let counted = if request.behind.is_some() { 0 } else { more };
        if counted > 0 && of_subject + counted > limits.subscriptions_per_subject {
            return Err(SubscribeError::TooManyOfSubject(limits.subscriptions_per_subject));
        }
        Ok(counted)
    }

    /// Finds or begins a channel. `None` if there are too many.
    fn channel(&mut self, name: &str, epoch: u64, now: Duration) -> Option<Arc<Channel>> {
        if let Some(channel) = self.channels.get(name) {
            return Some(channel.clone());
        }
        while self.channels.len() >= self.limits.channels {
            let oldest = self.idle.pop_front()?;
            // It may be in use again. One that a request has looked up is in use, too.
            let is_idle = |channel: &Arc<Channel>| Arc::strong_count(channel) == 1 && channel.idle_since().is_some();
            if self.channels.get(&oldest).is_some_and(is_idle) {
                self.channels.remove(&oldest);
            }
        }
        let name: Arc<str> = name.into();
        let channel = Arc::new(Channel::new(name.clone(), epoch, now));
        // The next sweep adds the channels of publications; until then, this one may have to make room.
        if self.idle.len() < MAX_IDLE {
            self.idle.push_back(name.clone());
        }
        self.channels.insert(name, channel.clone());
        Some(channel)
    }

    /// Ends subscriptions until enough memory is free, and returns their number. A reliable publication ends them after
    /// `stall`; this ends also those for which publications were dropped.
    fn end_slowest(&self, memory: &AtomicU64, now: Duration) -> u64 {
        let waiting = self.subscriptions.values().filter_map(|entry| Some((entry.queue.waited(now)?, entry)));
        let mut slowest: Vec<(Duration, &Registration)> = waiting.filter(|(waited, _)| *waited >= MIN_SLOW).collect();
        slowest.sort_by_key(|(waited, _)| std::cmp::Reverse(*waited));
        let mut ended = 0;
        for (_, registration) in slowest {
            if memory.load(Ordering::Relaxed) <= self.limits.memory / 8 * 7 {
                break;
            }
            ended += 1;
            registration.queue.end(End::Stalled);
            self.hand_on(registration, now);
        }
        ended
    }

    /// Frees the queues of subscriptions that have stalled, whose clients may stay connected for long.
    fn empty_stalled(&self, now: Duration) {
        self.subscriptions.values().for_each(|registration| self.hand_on(registration, now));
    }

    /// Hands the jobs of a subscription that has stalled to other members of its groups.
    fn hand_on(&self, registration: &Registration, now: Duration) {
        let Some(jobs) = registration.queue.take_stalled() else { return };
        for membership in registration.memberships.iter().filter(|_| !jobs.is_empty()) {
            membership.channel.hand_on(membership.joined.number, &jobs, &self.limits, now);
        }
    }
}

/// A subscriber's end of its subscription.
#[derive(Debug)]
pub struct Subscription {
    id: SubscriptionId,
    relay: Arc<Relay>,
    queue: Arc<SubscriberQueue>,
    memberships: Arc<[Membership]>,
}

impl Subscription {
    /// The number by which it can be refreshed.
    pub fn id(&self) -> SubscriptionId {
        self.id
    }

    /// The channels in the order of the request, each with the position at which the subscription began.
    pub fn channels(&self) -> impl Iterator<Item = (&Arc<str>, EventId)> {
        self.memberships.iter().map(|membership| (&membership.channel.name, membership.joined.start))
    }

    /// The ends of all epochs of the first channel, oldest first; the last one is its position when the subscription began.
    pub fn epochs(&self) -> &[EventId] {
        self.memberships.first().map_or(&[], |membership| &membership.joined.epochs)
    }

    /// The end of the publications that the subscriber lacks of each channel, in the order of [`Self::channels`]. They
    /// begin after the position at which the subscription begins, and come before the deliveries of the channel. The
    /// relay that feeds the channel may have them.
    pub fn lacks(&self) -> impl Iterator<Item = Option<EventId>> {
        self.memberships.iter().map(|membership| membership.joined.lacks_until)
    }

    /// A publication of the relay that feeds a channel, for this subscriber alone.
    pub fn of_feed(&self, channel: &Arc<str>, publication: FedPublication) -> Arc<Publication> {
        let FedPublication { content, id, is_reliable } = publication;
        Arc::new(Publication::new(channel.clone(), id, content, is_reliable, &self.relay.memory))
    }

    /// The time at which it expires unless it is refreshed.
    pub fn deadline(&self) -> Duration {
        self.queue.deadline()
    }

    /// Gives it another timeout, from now on. Returns false if it has ended.
    pub fn refresh(&self, timeout: Duration, now: Duration) -> bool {
        self.queue.extend(now + timeout, now)
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
        let (limits, now) = {
            let mut table = self.relay.lock();
            table.memberships -= self.memberships.len();
            if let Some(registration) = table.subscriptions.remove(&self.id)
                && let Some(count) = table.memberships_by_subject.get_mut(&registration.subject)
            {
                *count -= registration.counted;
                if *count == 0 {
                    table.memberships_by_subject.remove(&registration.subject);
                }
            }
            (table.limits.clone(), table.now)
        };
        let untaken = self.queue.close();
        for membership in self.memberships.iter() {
            membership.channel.leave(membership.joined.number, &untaken, &limits, now);
        }
    }
}

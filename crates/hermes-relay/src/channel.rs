//! A channel: the subscribers of a URI, and its latest publications.
//!
//! In: publications, subscribers that join and leave. Out: each publication in the queues of its audience, in the same
//! order for all subscribers. Never: a publication in the queue of one subscriber that another one of a reliable channel
//! does not get.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::EventId;
use crate::limits::RelayLimits;
use crate::publication::{NewPublication, Publication};
use crate::queue::{Delivery, End, Offered, Queued, Room, SubscriberQueue};

/// The subscribers that get a publication.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Audience {
    /// All subscribers.
    #[default]
    All,
    /// One subscriber of each group. Subscribers without a group form one.
    OneOfEachGroup,
}

/// The outcome of a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The identifier that the channel gave to it.
    pub id: EventId,
    /// The subscribers of the channel.
    pub subscribers: u64,
    /// The subscribers in whose queues it is.
    pub delivered: u64,
}

/// The progress of a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishProgress {
    /// All queues of the audience have it.
    Done(Receipt),
    /// A queue is full. The publisher is woken when it has room.
    Waiting {
        /// The time at which the publisher should try again at the latest.
        until: Duration,
    },
}

#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) name: Arc<str>,
    /// One reliable publication at a time waits for room, so that they keep their order.
    pub(crate) turn: Arc<Semaphore>,
    state: Mutex<ChannelState>,
}

#[derive(Debug)]
struct ChannelState {
    epoch: u64,
    /// The sequence number of the latest publication; 0 before the first.
    latest: u64,
    members: BTreeMap<u64, Member>,
    next_member: u64,
    history: VecDeque<Arc<Publication>>,
    history_bytes: u64,
    /// The member of each group that got the latest publication for one.
    turns: HashMap<Option<Arc<str>>, u64>,
    /// Subscriptions that ended because they stalled, and are not counted yet.
    stalled: u64,
    /// The time at which a subscriber joined or a publication arrived the last time.
    used: Duration,
}

#[derive(Debug)]
struct Member {
    queue: Arc<SubscriberQueue>,
    group: Option<Arc<str>>,
}

impl Channel {
    pub(crate) fn new(name: Arc<str>, epoch: u64, now: Duration) -> Self {
        let state = ChannelState {
            epoch,
            latest: 0,
            members: BTreeMap::new(),
            next_member: 0,
            history: VecDeque::new(),
            history_bytes: 0,
            turns: HashMap::new(),
            stalled: 0,
            used: now,
        };
        Self { name, turn: Arc::new(Semaphore::new(1)), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, ChannelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of subscriptions that ended because they stalled, since the last call.
    pub(crate) fn take_stalled(&self) -> u64 {
        std::mem::take(&mut self.lock().stalled)
    }

    /// Adds a subscriber. After `after`, it gets what the history has first, and learns of what it lacks.
    pub(crate) fn join(
        &self,
        queue: &Arc<SubscriberQueue>,
        group: Option<Arc<str>>,
        after: Option<EventId>,
        now: Duration,
    ) -> u64 {
        let mut state = self.lock();
        if let Some(after) = after {
            let missed = state.missed(after);
            if missed != Some(0) {
                let delivery = Delivery::Gap { channel: self.name.clone(), missed };
                queue.push(Queued { delivery, is_for_one: false });
            }
            for publication in
                state.history.iter().filter(|earlier| earlier.id > after || earlier.id.epoch != after.epoch)
            {
                queue.push(Queued { delivery: Delivery::Publication(publication.clone()), is_for_one: false });
            }
        }
        let number = state.next_member;
        state.next_member += 1;
        state.members.insert(number, Member { queue: queue.clone(), group });
        state.used = now;
        number
    }

    /// Removes a subscriber. Publications that it alone of its group has go to another member.
    pub(crate) fn leave(&self, number: u64, untaken: &[Arc<Publication>]) {
        let mut state = self.lock();
        let Some(member) = state.members.remove(&number) else { return };
        for publication in untaken.iter().filter(|publication| publication.channel == self.name) {
            let others = state.members.values().filter(|other| other.group == member.group);
            if let Some(other) = others.max_by_key(|other| other.queue.room(publication.bytes(), Duration::ZERO)) {
                other.queue.push(Queued { delivery: Delivery::Publication(publication.clone()), is_for_one: true });
            }
        }
        if !state.members.values().any(|other| other.group == member.group) {
            state.turns.remove(&member.group);
        }
    }

    /// Queues a publication wherever there is room.
    pub(crate) fn publish_realtime(
        &self,
        content: NewPublication,
        audience: Audience,
        limits: &RelayLimits,
        memory: &Arc<AtomicU64>,
        now: Duration,
    ) -> Receipt {
        let mut state = self.lock();
        let publication = state.next_publication(&self.name, content, memory, now);
        let mut receipt = Receipt { id: publication.id, subscribers: 0, delivered: 0 };
        match audience {
            Audience::All => {
                for member in state.members.values() {
                    let offered = member.queue.offer(&publication, now);
                    receipt.subscribers += u64::from(offered != Offered::Ended);
                    receipt.delivered += u64::from(offered == Offered::Queued);
                }
            }
            Audience::OneOfEachGroup => {
                let room = state.room(publication.bytes(), now);
                receipt.subscribers = room.len() as u64;
                for number in state.takers(&room).0 {
                    receipt.delivered += 1;
                    state.give(number, &publication, true);
                }
            }
        }
        state.remember(publication, limits);
        receipt
    }

    /// Queues a publication if all queues of its audience have room. Otherwise, `publisher` is woken when that may be so.
    pub(crate) fn publish_reliable(
        &self,
        content: &NewPublication,
        audience: Audience,
        limits: &RelayLimits,
        memory: &Arc<AtomicU64>,
        publisher: &Waker,
        now: Duration,
    ) -> PublishProgress {
        let mut state = self.lock();
        let bytes = crate::publication::cost(content);
        let mut stalled = 0;
        let (targets, subscribers) = loop {
            let room = state.room(bytes, now);
            let (targets, full): (Vec<u64>, Vec<u64>) = match audience {
                Audience::All => {
                    let full = room.iter().filter(|(_, free)| **free == 0).map(|(number, _)| *number).collect();
                    (room.keys().copied().collect(), full)
                }
                Audience::OneOfEachGroup => state.takers(&room),
            };
            if full.is_empty() {
                break (targets, room.len());
            }
            // All full queues begin to block at once, so that stalls do not add up.
            let mut wake_at: Option<Duration> = None;
            let mut has_changed = false;
            for member in full.iter().filter_map(|number| state.members.get(number)) {
                match member.queue.wait_for_room(bytes, publisher, now, limits.stall) {
                    Ok(until) => wake_at = Some(wake_at.map_or(until, |earlier| earlier.min(until))),
                    Err(Room::Changed) => has_changed = true,
                    Err(Room::Stalled) => {
                        has_changed = true;
                        stalled += 1;
                    }
                }
            }
            if let (Some(until), false) = (wake_at, has_changed) {
                return PublishProgress::Waiting { until };
            }
        };
        state.stalled += stalled;
        let publication = state.next_publication(&self.name, content.clone(), memory, now);
        let mut receipt = Receipt { id: publication.id, subscribers: subscribers as u64, delivered: 0 };
        for number in targets {
            receipt.delivered += 1;
            state.give(number, &publication, audience == Audience::OneOfEachGroup);
        }
        state.remember(publication, limits);
        PublishProgress::Done(receipt)
    }

    /// Ends the subscriptions of all members.
    pub(crate) fn close(&self) {
        self.lock().members.values().for_each(|member| member.queue.end(End::Closed));
    }

    /// Whether nobody would miss the channel: it has no subscriber, and its history is older than `age`.
    pub(crate) fn is_unused(&self, now: Duration, age: Duration) -> bool {
        let state = self.lock();
        state.members.is_empty() && (state.history.is_empty() || now.saturating_sub(state.used) >= age)
    }

    /// The time of the latest use, if the channel has no subscriber.
    pub(crate) fn idle_since(&self) -> Option<Duration> {
        let state = self.lock();
        state.members.is_empty().then_some(state.used)
    }
}

impl ChannelState {
    fn next_publication(
        &mut self,
        name: &Arc<str>,
        content: NewPublication,
        memory: &Arc<AtomicU64>,
        now: Duration,
    ) -> Arc<Publication> {
        self.latest += 1;
        self.used = now;
        let id = EventId { epoch: self.epoch, sequence: self.latest };
        Arc::new(Publication::new(name.clone(), id, content, memory))
    }

    /// Adds a publication to the history, and removes what is too much.
    fn remember(&mut self, publication: Arc<Publication>, limits: &RelayLimits) {
        self.history_bytes += publication.bytes();
        self.history.push_back(publication);
        while self.history.len() > limits.history || self.history_bytes > limits.history_bytes {
            let Some(oldest) = self.history.pop_front() else { break };
            self.history_bytes -= oldest.bytes();
        }
    }

    /// The publications after `after` that the history lacks; `None` if their number is unknown.
    fn missed(&self, after: EventId) -> Option<u64> {
        if after.epoch != self.epoch || after.sequence > self.latest {
            return None;
        }
        let oldest = self.history.front().map_or(self.latest + 1, |oldest| oldest.id.sequence);
        Some(oldest.saturating_sub(after.sequence + 1))
    }

    /// The members whose subscription has not ended, with the number of publications that fit in their queue.
    fn room(&self, bytes: u64, now: Duration) -> BTreeMap<u64, usize> {
        let of = |(number, member): (&u64, &Member)| Some((*number, member.queue.room(bytes, now)?));
        self.members.iter().filter_map(of).collect()
    }

    /// The next member with room of each group, in turn; and the members of groups that are all full.
    fn takers(&self, room: &BTreeMap<u64, usize>) -> (Vec<u64>, Vec<u64>) {
        let mut groups: BTreeMap<&Option<Arc<str>>, Vec<(u64, usize)>> = BTreeMap::new();
        for (number, free) in room {
            if let Some(member) = self.members.get(number) {
                groups.entry(&member.group).or_default().push((*number, *free));
            }
        }
        let (mut takers, mut full) = (Vec::new(), Vec::new());
        for (group, members) in groups {
            let last = self.turns.get(group).copied();
            let in_turn = |(number, free): &&(u64, usize)| *free > 0 && last.is_none_or(|last| *number > last);
            match members.iter().find(in_turn).or_else(|| members.iter().find(|(_, free)| *free > 0)) {
                Some((number, _)) => takers.push(*number),
                None => full.extend(members.iter().map(|(number, _)| *number)),
            }
        }
        (takers, full)
    }

    fn give(&mut self, number: u64, publication: &Arc<Publication>, is_for_one: bool) {
        let Some(member) = self.members.get(&number) else { return };
        member.queue.push(Queued { delivery: Delivery::Publication(publication.clone()), is_for_one });
        if is_for_one {
            self.turns.insert(member.group.clone(), number);
        }
    }
}

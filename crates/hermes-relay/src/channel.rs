//! A channel: the subscribers of a URI, and its latest publications.
//!
//! In: publications, subscribers that join and leave. Out: each publication in the queues of its audience, in the same
//! order for all subscribers. A publication for one member of a group is a job: it has no place in this order, no history
//! keeps it, and it goes to another member if its taker goes. Never: a publication in the queue of one subscriber that
//! another one of a reliable channel does not get.

mod jobs;
mod root;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};

use self::jobs::Takers;
use crate::EventId;
use crate::limits::RelayLimits;
use crate::lineage::Lineage;
use crate::publication::{NewPublication, Publication};
use crate::publishing::{Audience, Copies, Place, PublishProgress, Receipt};
use crate::queue::{Delivery, End, Offered, Room, SubscriberQueue};
use crate::request::PublishError;

#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) name: Arc<str>,
    /// One reliable publication at a time waits for room, so that they keep their order.
    pub(crate) turn: Arc<Semaphore>,
    /// The number of subscribers, for a channel that another relay feeds.
    audience: OnceLock<watch::Sender<u64>>,
    /// The confirmed copies of its publications.
    copies: OnceLock<watch::Sender<Copies>>,
    state: Mutex<ChannelState>,
}

#[derive(Debug)]
struct ChannelState {
    epoch: u64,
    /// The sequence number of the latest publication; 0 before the first.
    latest: u64,
    lineage: Lineage,
    members: BTreeMap<u64, Member>,
    next_member: u64,
    /// The sum of the members' weights.
    subscribers: u64,
    history: VecDeque<Arc<Publication>>,
    history_bytes: u64,
    groups: HashMap<Option<Arc<str>>, Group>,
    /// Jobs whose group has no member left. They wait for one.
    orphans: VecDeque<(Option<Arc<str>>, Arc<Publication>)>,
    /// Losses since the last sweep.
    losses: Losses,
    /// The time at which a subscriber joined or a publication arrived the last time.
    used: Duration,
    /// Another relay numbers the publications.
    is_fed: bool,
    /// A publication was realtime. Stand-bys may lack such ones, although their publishers have a response.
    has_realtime: bool,
    /// The times that another relay has become the root by asking this one.
    hand_overs: u64,
    /// The time at which a relay stopped to keep a copy the last time, or promised to keep one.
    copy_lost: Option<Duration>,
    /// Another relay has taken over by asking this one.
    is_handed_over: bool,
}

/// The members of a channel that share jobs.
#[derive(Debug, Default)]
struct Group {
    members: usize,
    /// The member that got the latest job.
    last: Option<u64>,
}

/// Losses of a channel, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Subscriptions that ended because their client read nothing.
    pub stalled: u64,
    /// Jobs that no member of their group took.
    pub jobs: u64,
}

#[derive(Debug)]
struct Member {
    queue: Arc<SubscriberQueue>,
    group: Option<Arc<str>>,
    /// The subscribers that it stands for: 1, or those behind a relaying node.
    weight: u64,
    /// It has the publications up to this number of the epoch, which the feed is still to bring.
    skip_until: Option<u64>,
    /// For a stand-by, the publications that it has confirmed.
    confirmed: Option<u64>,
    is_node: bool,
}

impl Member {
    /// Whether it may get jobs. A relaying node without subscribers would keep them.
    fn takes_jobs(&self) -> bool {
        self.weight > 0
    }

    fn has(&self, id: EventId) -> bool {
        self.skip_until.is_some_and(|until| id.sequence <= until)
    }

    /// The number of publications up to a position that it misses, where others miss `missed`. `None`: it has them all.
    fn misses(&mut self, missed: Option<u64>, until: EventId, is_same_epoch: bool) -> Option<Option<u64>> {
        match self.skip_until.filter(|_| is_same_epoch) {
            Some(has) if until.sequence <= has => None,
            Some(has) => {
                self.skip_until = None;
                Some(missed.map(|missed| missed.min(until.sequence - has)))
            }
            None => {
                self.skip_until = None;
                Some(missed)
            }
        }
    }
}

/// A subscriber that has joined.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) number: u64,
    /// The position from which it continues.
    pub(crate) start: EventId,
    /// It lacks what lies between `start` and this position, and gets it from the relay that feeds the channel.
    pub(crate) lacks_until: Option<EventId>,
    /// The ends of all epochs that are known, oldest first; that of the current one is the position of the channel.
    pub(crate) epochs: Vec<EventId>,
}

/// The state that a relay hands over when another one becomes the root.
#[derive(Debug)]
pub struct HandOver {
    /// The publications that the other relay lacks, and the gaps between them.
    pub lacking: Vec<Delivery>,
    /// The ends of all epochs that are known, oldest first.
    pub epochs: Vec<EventId>,
}

/// A subscriber that joins a channel.
pub(crate) struct NewMember<'a> {
    pub(crate) queue: &'a Arc<SubscriberQueue>,
    pub(crate) group: Option<Arc<str>>,
    pub(crate) weight: u64,
    /// The latest publication that it has.
    pub(crate) after: Option<EventId>,
    /// It keeps a copy of the history.
    pub(crate) is_stand_by: bool,
    /// It is another relay.
    pub(crate) is_node: bool,
}

impl Channel {
    pub(crate) fn new(name: Arc<str>, epoch: u64, now: Duration) -> Self {
        let state = ChannelState {
            epoch,
            latest: 0,
            lineage: Lineage::default(),
            members: BTreeMap::new(),
            next_member: 0,
            subscribers: 0,
            history: VecDeque::new(),
            history_bytes: 0,
            groups: HashMap::new(),
            orphans: VecDeque::new(),
            losses: Losses::default(),
            used: now,
            is_fed: false,
            has_realtime: false,
            hand_overs: 0,
            copy_lost: None,
            is_handed_over: false,
        };
        Self {
            name,
            turn: Arc::new(Semaphore::new(1)),
            audience: OnceLock::new(),
            copies: OnceLock::new(),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ChannelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the losses since the last call.
    pub(crate) fn take_losses(&self) -> Losses {
        std::mem::take(&mut self.lock().losses)
    }

    /// Adds a subscriber. After `after`, it gets what the history has first, and learns of what it lacks. The channel of a
    /// feed may have less than the relay that feeds it, so the subscriber is to get the rest from there.
    pub(crate) fn join(&self, member: NewMember<'_>, now: Duration) -> Joined {
        let NewMember { queue, group, weight, after, is_stand_by, is_node } = member;
        let mut state = self.lock();
        // A fed channel may have less than the relay that feeds it.
        let is_oldest = |after: EventId| after == EventId::OLDEST && !state.is_fed;
        let after = after.map(|after| if is_oldest(after) { state.before_history() } else { after });
        let mut joined =
            Joined { number: state.next_member, start: state.latest_id(), lacks_until: None, epochs: state.epochs() };
        let missed = after.map_or(Some(0), |after| state.missed(after));
        let known = after.and_then(|after| state.lineage.sequence_of(after, state.epoch));
        let is_ahead = |after: EventId| after.epoch == state.epoch && after.sequence > state.latest;
        let skip_until = after.filter(|after| state.is_fed && is_ahead(*after)).map(|after| after.sequence);
        if let Some(after) = after.filter(|_| state.is_fed && missed != Some(0) && skip_until.is_none()) {
            (joined.start, joined.lacks_until) = (after, Some(state.latest_id()));
        } else if let Some(after) = after {
            joined.start = after;
            if missed != Some(0) && skip_until.is_none() {
                let (channel, until) = (self.name.clone(), state.before_history());
                queue.push(Delivery::Gap { channel, missed, until }, now);
            }
            let start = if missed == Some(0) { after } else { state.before_history() };
            self.replay(&state, start, known.unwrap_or_default(), |delivery| {
                queue.push(delivery, now);
            });
        }
        state.next_member += 1;
        state.groups.entry(group.clone()).or_default().members += 1;
        let confirmed = is_stand_by.then(|| known.unwrap_or_default());
        let member = Member { queue: queue.clone(), group, weight, skip_until, confirmed, is_node };
        state.members.insert(joined.number, member);
        state.give_orphans(joined.number, now);
        state.subscribers += weight;
        self.report_audience(&state);
        self.report_copies(&state);
        state.used = now;
        joined
    }

    /// Passes on the publications of the history after a position, and the changes of the epoch between them.
    fn replay(&self, state: &ChannelState, start: EventId, after: u64, mut push: impl FnMut(Delivery)) {
        let mut changes = state.lineage.changes_after(start, state.latest_id()).into_iter().peekable();
        let change = |(until, is_complete): (EventId, bool)| {
            let missed = is_complete.then_some(0);
            Delivery::Gap { channel: self.name.clone(), missed, until }
        };
        let mut epoch = start.epoch;
        for publication in &state.history {
            let Some(id) = publication.id.filter(|id| id.sequence > after) else { continue };
            while let Some(until) = changes.next_if(|_| epoch != id.epoch) {
                epoch = until.0.epoch;
                push(change(until));
            }
            push(Delivery::Publication(publication.clone()));
        }
        changes.map(change).for_each(push);
    }

    /// Removes a subscriber. Jobs that it did not take go to another member of its group.
    pub(crate) fn leave(&self, number: u64, untaken: &[Arc<Publication>], limits: &RelayLimits, now: Duration) {
        let mut state = self.lock();
        let Some(member) = state.members.remove(&number) else { return };
        state.subscribers -= member.weight;
        state.copy_lost = member.confirmed.map_or(state.copy_lost, |_| Some(now));
        self.report_audience(&state);
        self.report_copies(&state);
        state.used = now;
        state.hand_on(&member.group, self.of_this_channel(untaken), limits, now);
        if let Some(group) = state.groups.get_mut(&member.group) {
            group.members -= 1;
            if group.members == 0 {
                state.groups.remove(&member.group);
            }
        }
    }

    /// Changes the number of subscribers that a member stands for.
    pub(crate) fn set_weight(&self, number: u64, weight: u64, now: Duration) {
        let mut state = self.lock();
        let Some(member) = state.members.get_mut(&number) else { return };
        let before = std::mem::replace(&mut member.weight, weight);
        state.subscribers = state.subscribers - before + weight;
        self.report_audience(&state);
        state.give_orphans(number, now);
    }

    /// Lets another relay number the publications.
    pub(crate) fn begin_feed(&self) {
        let mut state = self.lock();
        state.is_fed = true;
        self.report_copies(&state);
    }

    /// The number of subscribers, and its changes.
    pub(crate) fn audience(&self) -> watch::Receiver<u64> {
        let state = self.lock();
        self.audience.get_or_init(|| watch::Sender::new(state.subscribers)).subscribe()
    }

    fn report_audience(&self, state: &ChannelState) {
        if let Some(audience) = self.audience.get() {
            audience.send_if_modified(|before| std::mem::replace(before, state.subscribers) != state.subscribers);
        }
    }

    /// Hands the jobs of a member whose subscription was ended to other members.
    pub(crate) fn hand_on(&self, number: u64, untaken: &[Arc<Publication>], limits: &RelayLimits, now: Duration) {
        let mut state = self.lock();
        let Some(group) = state.members.get(&number).map(|member| member.group.clone()) else { return };
        state.hand_on(&group, self.of_this_channel(untaken), limits, now);
    }

    fn of_this_channel(&self, publications: &[Arc<Publication>]) -> Vec<Arc<Publication>> {
        publications.iter().filter(|publication| publication.channel == self.name).cloned().collect()
    }

    /// Queues a publication wherever there is room.
    pub(crate) fn publish_realtime(
        &self,
        content: NewPublication,
        place: Place,
        limits: &RelayLimits,
        memory: &Arc<AtomicU64>,
        now: Duration,
    ) -> Result<Receipt, PublishError> {
        let mut state = self.lock();
        state.admits(place)?;
        state.used = now;
        state.has_realtime = true;
        Ok(match place.audience() {
            Audience::All => {
                let id = state.take_place(place);
                let publication = Arc::new(Publication::new(self.name.clone(), Some(id), content, false, memory));
                let mut receipt = Receipt { id: Some(id), subscribers: 0, delivered: 0, dropped: 0 };
                for member in state.members.values().filter(|member| !member.has(id)) {
                    match member.queue.offer(&publication, id, now) {
                        Offered::Queued => receipt.delivered += member.weight,
                        Offered::Dropped => receipt.dropped += member.weight,
                        Offered::Ended => {}
                    }
                }
                receipt.subscribers = receipt.delivered + receipt.dropped;
                state.remember(publication, limits);
                receipt
            }
            Audience::OneOfEachGroup => {
                let job = Arc::new(Publication::new(self.name.clone(), None, content, false, memory));
                let room = state.room(job.bytes(), now);
                let Takers { takers, full_groups, .. } = state.takers(&room);
                for number in &takers {
                    state.give(*number, &job, limits, now);
                }
                // A group that is full misses a realtime one, as at the root.
                if full_groups == 0 {
                    state.keep_fed(place, &takers, &job, limits, now);
                }
                let (subscribers, delivered) = (state.weight_of(room.keys()), takers.len() as u64);
                Receipt { id: None, subscribers, delivered, dropped: full_groups }
            }
        })
    }

    /// Queues a publication if all queues of its audience have room. Otherwise, `publisher` is woken when that may be so.
    pub(crate) fn publish_reliable(
        &self,
        content: &NewPublication,
        place: Place,
        limits: &RelayLimits,
        memory: &Arc<AtomicU64>,
        publisher: &Waker,
        now: Duration,
    ) -> Result<PublishProgress, PublishError> {
        let mut state = self.lock();
        state.admits(place)?;
        state.used = now;
        let bytes = crate::publication::cost(content);
        let (targets, subscribers): (Vec<u64>, u64) = loop {
            let room = state.room(bytes, now);
            let (targets, full) = match place.audience() {
                Audience::All => {
                    let full = room.iter().filter(|(_, free)| **free == 0).map(|(number, _)| *number).collect();
                    (room.keys().copied().collect(), full)
                }
                Audience::OneOfEachGroup => {
                    let takers = state.takers(&room);
                    (takers.takers, takers.full)
                }
            };
            if full.is_empty() {
                break (targets, state.weight_of(room.keys()));
            }
            if let Some(until) = state.wait_for(&full, bytes, publisher, limits.stall, now) {
                return Ok(PublishProgress::Waiting { until });
            }
        };
        let mut receipt = Receipt { id: None, subscribers, delivered: subscribers, dropped: 0 };
        match place.audience() {
            Audience::All => {
                let id = state.take_place(place);
                let content = content.clone();
                let publication = Arc::new(Publication::new(self.name.clone(), Some(id), content, true, memory));
                receipt.id = Some(id);
                let members = targets.iter().filter_map(|number| state.members.get(number));
                for member in members.filter(|member| !member.has(id)) {
                    member.queue.push(Delivery::Publication(publication.clone()), now);
                }
                state.remember(publication, limits);
            }
            Audience::OneOfEachGroup => {
                receipt.delivered = targets.len() as u64;
                let job = Arc::new(Publication::new(self.name.clone(), None, content.clone(), true, memory));
                targets.iter().for_each(|number| state.give(*number, &job, limits, now));
                state.keep_fed(place, &targets, &job, limits, now);
            }
        }
        Ok(PublishProgress::Done(receipt))
    }

    /// Whether the history still has this publication.
    pub(crate) fn remembers(&self, id: EventId) -> bool {
        self.lock().remembers(id)
    }

    /// Removes the publications up to this one from the history.
    pub(crate) fn forget(&self, id: EventId) {
        let mut state = self.lock();
        while state.remembers(id) {
            state.forget_oldest();
        }
    }

    /// Ends the subscriptions of all members.
    pub(crate) fn close(&self) {
        self.lock().members.values().for_each(|member| member.queue.end(End::Closed));
    }

    /// Whether nobody would miss the channel: it has no subscriber, and what it keeps is older than `age`.
    pub(crate) fn is_unused(&self, now: Duration, age: Duration) -> bool {
        let state = self.lock();
        let is_empty = state.history.is_empty() && state.orphans.is_empty();
        state.members.is_empty() && (is_empty || now.saturating_sub(state.used) >= age)
    }

    /// The time of the latest use, if the channel has neither a subscriber nor a job.
    pub(crate) fn idle_since(&self) -> Option<Duration> {
        let state = self.lock();
        (state.members.is_empty() && state.orphans.is_empty()).then_some(state.used)
    }

    /// Drops the jobs that nobody took, and returns their number. The channel is forgotten after that.
    pub(crate) fn drop_orphans(&self) -> u64 {
        std::mem::take(&mut self.lock().orphans).len() as u64
    }
}

impl ChannelState {
    fn latest_id(&self) -> EventId {
        EventId { epoch: self.epoch, sequence: self.latest }
    }

    /// Whether the relay that gives the place numbers the publications.
    fn admits(&self, place: Place) -> Result<(), PublishError> {
        if self.is_fed == matches!(place, Place::Fed(_)) { Ok(()) } else { Err(PublishError::NotRoot) }
    }

    /// The confirmed copies.
    fn copies(&self) -> Copies {
        let confirmed = || self.members.values().filter_map(|member| member.confirmed);
        let until = confirmed().min().unwrap_or_default();
        Copies {
            stand_bys: confirmed().count(),
            until,
            lost: self.copy_lost,
            is_root: !self.is_fed,
            is_handed_over: self.is_handed_over,
        }
    }

    /// The ends of all epochs that are known, oldest first; that of the current one is the position of the channel.
    fn epochs(&self) -> Vec<EventId> {
        self.lineage.ends().chain([self.latest_id()]).collect()
    }

    /// The identifier of the next publication.
    fn take_place(&mut self, place: Place) -> EventId {
        match place {
            Place::Fed(Some(id)) => (self.epoch, self.latest) = (id.epoch, id.sequence),
            Place::Next(_) | Place::Fed(None) => self.latest += 1,
        }
        self.latest_id()
    }

    fn weight_of<'a>(&self, members: impl Iterator<Item = &'a u64>) -> u64 {
        members.filter_map(|number| self.members.get(number)).map(|member| member.weight).sum()
    }

    fn remembers(&self, id: EventId) -> bool {
        // A history has no holes, whatever epochs it has.
        let oldest = self.before_history().sequence + 1;
        let at = id.sequence.checked_sub(oldest).and_then(|at| usize::try_from(at).ok());
        at.and_then(|at| self.history.get(at)).is_some_and(|publication| publication.id == Some(id))
    }

    /// The position before the oldest publication of the history.
    fn before_history(&self) -> EventId {
        let epoch = self.history.front().and_then(|oldest| oldest.id).map_or(self.epoch, |oldest| oldest.epoch);
        EventId { epoch, sequence: self.latest.saturating_sub(self.history.len() as u64) }
    }

    /// Adds a publication to the history, and removes what is too much.
    fn remember(&mut self, publication: Arc<Publication>, limits: &RelayLimits) {
        self.history_bytes += publication.bytes();
        self.history.push_back(publication);
        while self.history.len() > limits.history || self.history_bytes > limits.history_bytes {
            self.forget_oldest();
        }
    }

    /// Removes publications that an earlier root has given to this relay, but not to the root that goes on.
    fn forget_after(&mut self, sequence: u64) {
        while let Some(latest) = self.history.pop_back_if(|latest| latest.id.is_some_and(|id| id.sequence > sequence)) {
            self.history_bytes -= latest.bytes();
        }
    }

    /// Removes publications of epochs that are too long ago. A subscriber that resumes there would get them again, since nobody
    /// knows how many of them it has.
    fn forget_unknown_epochs(&mut self) {
        let is_known = |id: EventId| id.epoch == self.epoch || self.lineage.knows(id.epoch);
        let unknown = self.history.iter().take_while(|oldest| oldest.id.is_some_and(|id| !is_known(id))).count();
        (0..unknown).for_each(|_| self.forget_oldest());
    }

    fn forget_oldest(&mut self) {
        if let Some(oldest) = self.history.pop_front() {
            self.history_bytes -= oldest.bytes();
        }
    }

    /// The publications after `after` that the history lacks; `None` if their number is unknown.
    fn missed(&self, after: EventId) -> Option<u64> {
        let sequence = self.lineage.sequence_of(after, self.epoch).filter(|sequence| *sequence <= self.latest)?;
        Some(self.before_history().sequence.saturating_sub(sequence))
    }

    /// Waits for members without room. `None`: something has changed, and it is time to look again.
    fn wait_for(
        &mut self,
        full: &[u64],
        bytes: u64,
        publisher: &Waker,
        stall: Duration,
        now: Duration,
    ) -> Option<Duration> {
        // All full queues begin to block at once, so that stalls do not add up. One of them wakes the publisher, which then
        // looks at the others.
        let mut wake_at: Option<Duration> = None;
        let mut has_changed = false;
        for member in full.iter().filter_map(|number| self.members.get(number)) {
            match member.queue.wait_for_room(bytes, wake_at.is_none().then_some(publisher), now, stall) {
                Ok(until) => wake_at = Some(wake_at.map_or(until, |earlier| earlier.min(until))),
                Err(Room::Changed) => has_changed = true,
                Err(Room::Stalled) => {
                    has_changed = true;
                    self.losses.stalled += 1;
                }
            }
        }
        wake_at.filter(|_| !has_changed)
    }

    /// The members whose subscription has not ended, with the number of publications that fit in their queue.
    fn room(&self, bytes: u64, now: Duration) -> BTreeMap<u64, usize> {
        let of = |(number, member): (&u64, &Member)| Some((*number, member.queue.room(bytes, now)?));
        self.members.iter().filter_map(of).collect()
    }
}

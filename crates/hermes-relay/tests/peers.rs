//! Random histories of relays that share a channel, in computed time.
//!
//! In: publications at the root, roots that are killed and return, links that are slow, and subscribers of any relay that
//! resume. Out: each subscriber gets what was confirmed to publishers, in order and once, whatever root it came from.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use hermes_relay::{
    Audience, BackfillRange, BackfillStep, Delivery, EventId, FedPublication, Feed, MAX_EPOCHS, MissedRange,
    NewPublication, PublishProgress, Relay, RelayLimits, SubscribeRequest, Subscription, SubscriptionId,
};
use proptest::prelude::*;

const CHANNEL: &str = "node/a";
const PEERS: usize = 3;
const NOW: Duration = Duration::ZERO;

fn take(subscription: &Subscription) -> Option<Delivery> {
    match subscription.poll_next(&mut Context::from_waker(Waker::noop()), NOW) {
        Poll::Ready(delivery) => Some(delivery.unwrap()),
        Poll::Pending => None,
    }
}

/// A publication that a relay delivers, as another one publishes it.
fn fed(publication: &hermes_relay::Publication) -> FedPublication {
    let (content, id) = (publication.content.clone(), publication.id);
    FedPublication { content, id, is_reliable: publication.is_reliable }
}

/// The number that a publication has as its content.
fn number_of(publication: &hermes_relay::Publication) -> u64 {
    String::from_utf8(publication.content.body.whole().to_vec()).unwrap().parse().unwrap()
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Publish,
    /// A peer takes this many deliveries of the root.
    Pass(usize, usize),
    Kill(usize),
    Return(usize),
    /// A client subscribes at a peer. The flag resumes after what another one has got.
    Subscribe(usize, bool),
    Read(usize, usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        8 => Just(Operation::Publish),
        8 => (0..PEERS, 1..6_usize).prop_map(|(peer, count)| Operation::Pass(peer, count)),
        1 => (0..PEERS).prop_map(Operation::Kill),
        2 => (0..PEERS).prop_map(Operation::Return),
        2 => (0..PEERS, any::<bool>()).prop_map(|(peer, resumes)| Operation::Subscribe(peer, resumes)),
        6 => (any::<usize>(), 1..6_usize).prop_map(|(subscriber, count)| Operation::Read(subscriber, count)),
    ]
}

/// A peer that is alive.
struct Peer {
    relay: Arc<Relay>,
    feed: Feed,
    /// The subscription at the root, if it is not the root, and the position from which its copy is complete.
    between: Option<(Subscription, SubscriptionId)>,
    copy_from: Option<EventId>,
    /// It has had a subscription.
    has_followed: bool,
}

struct Subscriber {
    peer: usize,
    /// `None`: its peer was killed.
    subscription: Option<Subscription>,
    position: EventId,
    seen: Vec<u64>,
    /// The first publication that it may expect.
    from: u64,
}

#[derive(Default)]
struct World {
    peers: Vec<Option<Peer>>,
    subscribers: Vec<Subscriber>,
    /// Publications at the root that wait for copies: their numbers and places.
    waiting: Vec<(u64, EventId)>,
    confirmed: BTreeSet<u64>,
    number: u64,
    /// The times that another relay became the root.
    changes: usize,
}

impl World {
    fn new() -> Self {
        let mut world = Self::default();
        for _ in 0..PEERS {
            world.peers.push(None);
        }
        (0..PEERS).for_each(|index| world.bring_back(index));
        world
    }

    fn number(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    fn root(&self) -> usize {
        self.peers.iter().position(Option::is_some).unwrap()
    }

    fn peer(&self, index: usize) -> &Peer {
        self.peers[index].as_ref().unwrap()
    }

    fn subscribe_at(&mut self, index: usize, after: Option<EventId>, is_stand_by: bool) -> Subscription {
        let number = self.number();
        let request = SubscribeRequest {
            id: SubscriptionId(number.into()),
            subject: "somebody".into(),
            channels: vec![(CHANNEL.into(), after)],
            group: None,
            timeout: Duration::from_secs(60),
            behind: is_stand_by.then_some(0),
            is_stand_by,
            epoch: number,
        };
        self.peer(index).relay.subscribe(request, NOW).unwrap()
    }

    /// Subscribes a peer at the root.
    fn follow(&mut self, index: usize) {
        let root = self.root();
        let keeps_copy = (root + 1..PEERS).find(|other| self.peers[*other].is_some()) == Some(index);
        let (position, has_followed) = (self.peer(index).feed.position(), self.peer(index).has_followed);
        let after = has_followed.then_some(position);
        let between = self.subscribe_at(root, after, keeps_copy);
        let id = between.id();
        let start = between.channels().next().unwrap().1;
        let epochs = between.epochs().to_vec();
        let peer = self.peers[index].as_mut().unwrap();
        peer.feed.follow();
        peer.feed.begin_at(start, NOW);
        peer.feed.learn(&epochs);
        peer.copy_from = epochs.last().copied().filter(|_| keeps_copy);
        peer.has_followed = true;
        peer.between = Some((between, id));
        if keeps_copy {
            self.copy_history(index);
        }
    }

    /// Gets what the root has from before the peer followed it.
    fn copy_history(&mut self, index: usize) {
        let until = self.peer(index).feed.before_history().sequence;
        let (root, mut older) = (self.root(), Vec::new());
        let copying = self.subscribe_at(root, Some(EventId::OLDEST), false);
        while let Some(delivery) = take(&copying) {
            if let Delivery::Publication(publication) = delivery
                && publication.id.unwrap().sequence <= until
            {
                older.push(fed(&publication));
            }
        }
        self.peer(index).feed.prepend(older);
    }

    /// The first peer is the root from now on.
    fn lead(&mut self) {
        self.changes += 1;
        let (root, number) = (self.root(), self.number());
        let peer = self.peers[root].as_mut().unwrap();
        (peer.between, peer.copy_from) = (None, None);
        assert!(peer.feed.lead(number, true, peer.feed.hand_overs(), NOW));
    }

    fn others_follow(&mut self) {
        let root = self.root();
        let others: Vec<usize> = (root + 1..PEERS).filter(|index| self.peers[*index].is_some()).collect();
        others.into_iter().for_each(|index| self.follow(index));
    }

    fn publish(&mut self) {
        let number = self.number();
        let content = NewPublication { body: Bytes::from(number.to_string()).into(), ..NewPublication::default() };
        let relay = self.peer(self.root()).relay.clone();
        let progress =
            relay.poll_publish_reliable(CHANNEL, &content, Audience::All, number, Waker::noop(), NOW).unwrap();
        if let PublishProgress::Done(receipt) = progress {
            self.waiting.push((number, receipt.id.unwrap()));
        }
        self.confirm();
    }

    /// Confirms to publishers what has been copied.
    fn confirm(&mut self) {
        let Some(copies) = self.peer(self.root()).relay.copies(CHANNEL) else { return };
        let copies = *copies.borrow();
        let (done, waiting) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|(_, id)| copies.stand_bys == 0 || id.sequence <= copies.until);
        self.waiting = waiting;
        let done: Vec<(u64, EventId)> = done;
        self.confirmed.extend(done.into_iter().map(|(number, _)| number));
    }

    fn pass(&mut self, index: usize, count: usize) {
        let root = self.root();
        let Some(peer) = &self.peers[index] else { return };
        let Some((between, id)) = &peer.between else { return };
        for _ in 0..count {
            match take(between) {
                None => break,
                Some(Delivery::Gap { missed, until, .. }) => peer.feed.gap(missed, until, NOW),
                Some(Delivery::Publication(publication)) => {
                    let progress = peer.feed.poll_publish(&fed(&publication), Waker::noop(), NOW).unwrap();
                    assert!(matches!(progress, PublishProgress::Done(_)), "the queues have room");
                }
            }
        }
        if peer.copy_from.is_some() {
            self.peer(root).relay.confirm(*id, Some(peer.feed.position()));
        }
        self.confirm();
    }

    fn is_complete(&self, index: usize) -> bool {
        let peer = self.peer(index);
        peer.copy_from.is_some_and(|from| peer.feed.position() >= from && peer.feed.position().epoch == from.epoch)
    }

    /// A peer is only killed if another one has a copy.
    fn kill(&mut self, index: usize) {
        let root = self.root();
        let alive = self.peers.iter().flatten().count();
        let next = (root + 1..PEERS).find(|other| self.peers[*other].is_some());
        if self.peers[index].is_none() || alive < 2 || index == root && !next.is_some_and(|next| self.is_complete(next))
        {
            return;
        }
        self.peers[index] = None;
        for subscriber in self.subscribers.iter_mut().filter(|subscriber| subscriber.peer == index) {
            subscriber.subscription = None;
        }
        if index == root {
            self.waiting.clear();
            self.lead();
        }
        self.others_follow();
        self.confirm();
    }

    fn bring_back(&mut self, index: usize) {
        if self.peers[index].is_some() {
            return;
        }
        let relay = Relay::new(RelayLimits { queue: 10_000, history: 10_000, ..RelayLimits::default() });
        let number = self.number();
        let feed = relay.feed(CHANNEL, number, NOW).unwrap();
        let before = self.peers.iter().position(Option::is_some);
        self.peers[index] = Some(Peer { relay, feed, between: None, copy_from: None, has_followed: false });
        if self.root() == index {
            if let Some(before) = before {
                let lacking = self.peer(before).relay.hand_over(CHANNEL, self.peer(index).feed.position()).unwrap();
                // What waits for its copy is a part of that.
                self.waiting.clear();
                for delivery in lacking.lacking {
                    let feed = &self.peer(index).feed;
                    match delivery {
                        Delivery::Gap { missed, until, .. } => feed.gap(missed, until, NOW),
                        Delivery::Publication(publication) => {
                            feed.poll_publish(&fed(&publication), Waker::noop(), NOW).map(drop).unwrap();
                        }
                    }
                }
                self.peer(index).feed.learn(&lacking.epochs);
                self.peers[before].as_mut().unwrap().has_followed = true;
            }
            self.lead();
        }
        // The root asks the first peer after it for a copy.
        self.others_follow();
        self.confirm();
    }

    fn subscribe(&mut self, index: usize, resumes: bool) {
        if self.peers[index].is_none() {
            return;
        }
        let earlier = self.subscribers.iter().rposition(|earlier| resumes && earlier.subscription.is_none());
        let after = earlier.map(|earlier| self.subscribers[earlier].position);
        // A peer does not know the epochs of a root that it does not yet follow.
        self.pass(index, 100_000);
        let subscription = self.subscribe_at(index, after, false);
        let start = subscription.channels().next().unwrap().1;
        let mut subscriber = match earlier {
            Some(earlier) => self.subscribers.remove(earlier),
            None => {
                let from = self.number();
                Subscriber { peer: index, subscription: None, position: start, seen: Vec::new(), from }
            }
        };
        subscriber.peer = index;
        if let Some(until) = subscription.lacks().next().unwrap() {
            self.fill(&mut subscriber, until);
        }
        subscriber.subscription = Some(subscription);
        self.subscribers.push(subscriber);
    }

    /// Gets what a peer lacks from the root, as relays do for a subscriber that resumes.
    fn fill(&mut self, subscriber: &mut Subscriber, until: EventId) {
        let filling = self.subscribe_at(self.root(), Some(subscriber.position), false);
        let mut range = BackfillRange::new(subscriber.position, until);
        while !range.is_filled() {
            let gap = match take(&filling).expect("the root has it") {
                Delivery::Gap { missed, until, .. } => range.gap(missed, until),
                Delivery::Publication(publication) => match range.publication(publication.id.unwrap()) {
                    BackfillStep::Skip => continue,
                    BackfillStep::Gap(gap) => gap,
                    BackfillStep::Deliver => {
                        subscriber.take(Delivery::Publication(publication));
                        continue;
                    }
                },
            };
            let MissedRange { missed, until } = gap;
            subscriber.take(Delivery::Gap { channel: CHANNEL.into(), missed, until });
        }
    }

    fn read(&mut self, at: usize) -> bool {
        let Some(subscriber) = self.subscribers.get_mut(at) else { return false };
        let Some(delivery) = subscriber.subscription.as_ref().and_then(take) else { return false };
        subscriber.take(delivery);
        true
    }

    fn run(&mut self, operation: Operation) {
        match operation {
            // A subscriber of an epoch that is forgotten learns of a gap.
            Operation::Kill(_) | Operation::Return(_) if self.changes >= MAX_EPOCHS => {}
            Operation::Publish => self.publish(),
            Operation::Pass(peer, count) => self.pass(peer, count),
            Operation::Kill(peer) => self.kill(peer),
            Operation::Return(peer) => self.bring_back(peer),
            Operation::Subscribe(peer, resumes) => self.subscribe(peer, resumes),
            Operation::Read(at, count) => {
                let at = at % self.subscribers.len().max(1);
                for _ in 0..count {
                    self.read(at);
                }
            }
        }
    }

    /// All links and subscribers catch up.
    fn settle(&mut self) {
        (0..PEERS).for_each(|index| self.pass(index, 100_000));
        let root = self.root();
        for at in 0..self.subscribers.len() {
            if self.subscribers[at].subscription.is_none() {
                let subscription = self.subscribe_at(root, Some(self.subscribers[at].position), false);
                self.subscribers[at].subscription = Some(subscription);
            }
            while self.read(at) {}
        }
    }
}

impl Subscriber {
    fn take(&mut self, delivery: Delivery) {
        match delivery {
            Delivery::Publication(publication) => {
                let number = number_of(&publication);
                assert!(self.seen.last().is_none_or(|last| *last < number), "{number} after {:?}", self.seen);
                self.seen.push(number);
                self.position = publication.id.unwrap();
            }
            Delivery::Gap { missed, until, .. } => {
                // After several changes, a peer may not know the epoch; it tells that, even if nothing is missing.
                let is_none = missed == Some(0) || missed.is_none() && until.sequence == self.position.sequence;
                assert!(is_none, "nothing is missing: {:?} to {until:?}, {missed:?}", self.position);
                self.position = until;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn whatever_was_confirmed_is_delivered(operations in prop::collection::vec(operation(), 1..150)) {
        let mut world = World::new();
        operations.into_iter().for_each(|operation| world.run(operation));
        world.settle();
        for subscriber in &world.subscribers {
            let expected: Vec<u64> = world.confirmed.range(subscriber.from..).copied().collect();
            let seen: BTreeSet<u64> = subscriber.seen.iter().copied().collect();
            let missing: Vec<u64> = expected.into_iter().filter(|number| !seen.contains(number)).collect();
            prop_assert!(missing.is_empty(), "not delivered: {missing:?}");
        }
    }
}

/// A subscriber had more of the first epoch than the next root had got, and resumed at a peer that had nothing.
#[test]
fn a_subscriber_resumes_where_its_epoch_ended_earlier() {
    let mut world = World::new();
    (0..6).for_each(|_| world.publish());
    world.kill(2);
    (0..6).for_each(|_| world.publish());
    world.pass(1, 6);
    (0..4).for_each(|_| world.publish());
    world.subscribe(0, false);
    world.kill(0);
    let from = world.subscribers[0].from;
    world.publish();
    world.bring_back(0);
    world.bring_back(2);
    world.subscribe(2, true);
    world.settle();
    assert_eq!(world.confirmed.range(from..).copied().collect::<Vec<_>>(), world.subscribers[0].seen);
    assert_eq!(world.subscribers[0].seen.len(), 1);
}

/// The first epoch is too long ago, so its publications are forgotten: nobody knows how many of them a subscriber has.
#[test]
fn what_a_forgotten_epoch_had_is_not_delivered_again() {
    let mut world = World::new();
    world.publish();
    world.subscribe(0, false);
    let start = world.subscribers[0].position;
    world.publish();
    assert!(world.read(0));
    for _ in 0..MAX_EPOCHS {
        let root = world.root();
        (0..PEERS).for_each(|index| world.pass(index, 100));
        world.kill(root);
        world.bring_back(root);
        (0..PEERS).for_each(|index| world.pass(index, 100));
    }
    world.publish();
    let latest = world.number;
    let resumed = world.subscribe_at(world.root(), Some(start), false);
    let Some(Delivery::Gap { missed: None, until, .. }) = take(&resumed) else { panic!("the gap is not told") };
    assert_eq!(until.sequence, 2);
    let Some(Delivery::Publication(publication)) = take(&resumed) else { panic!("nothing follows") };
    assert_eq!((publication.id.unwrap().sequence, number_of(&publication)), (3, latest));
    assert!(take(&resumed).is_none());
}

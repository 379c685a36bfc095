//! Random histories of a relay that another relay feeds, in computed time.
//!
//! In: publications at the first relay, a subscription between the two that breaks, and subscribers of the second. Out: the
//! sequence of each subscriber has the identifiers of the first relay, and each hole in it is announced.

#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hermes_relay::{
    Audience, Delivery, EventId, FedPublication, Feed, NewPublication, PublishProgress, Relay, RelayLimits,
    SubscribeRequest, Subscription, SubscriptionId,
};
use proptest::prelude::*;

const CHANNEL: &str = "node/a";
const SECOND: Duration = Duration::from_secs(1);

fn limits() -> RelayLimits {
    RelayLimits { queue: 3, history: 4, stall: 5 * SECOND, max_timeout: 1000 * SECOND, ..RelayLimits::default() }
}

fn subscribe(
    relay: &Arc<Relay>,
    number: u64,
    after: Option<EventId>,
    behind: Option<u64>,
    now: Duration,
) -> Subscription {
    let request = SubscribeRequest {
        id: SubscriptionId(number.into()),
        subject: "somebody".into(),
        channels: vec![(CHANNEL.into(), after)],
        group: None,
        timeout: 1000 * SECOND,
        behind,
        is_stand_by: false,
        epoch: number,
    };
    relay.subscribe(request, now).unwrap()
}

fn take(subscription: &Subscription, now: Duration) -> Option<Delivery> {
    match subscription.poll_next(&mut Context::from_waker(Waker::noop()), now) {
        Poll::Ready(delivery) => Some(delivery.unwrap()),
        Poll::Pending => None,
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Publish(bool),
    /// The second relay takes this many deliveries of the first.
    Pass(usize),
    /// The connection between the relays breaks; true: the first relay is another one afterwards.
    Break(bool),
    /// The flag resumes after what an earlier subscriber got.
    Subscribe(bool),
    Read(usize, usize),
    Leave(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => any::<bool>().prop_map(Operation::Publish),
        6 => (1..4_usize).prop_map(Operation::Pass),
        1 => prop_oneof![4 => Just(false), 1 => Just(true)].prop_map(Operation::Break),
        2 => any::<bool>().prop_map(Operation::Subscribe),
        6 => (any::<usize>(), 1..4_usize).prop_map(|(s, n)| Operation::Read(s, n)),
        1 => any::<usize>().prop_map(Operation::Leave),
    ]
}

struct Subscriber {
    subscription: Option<Subscription>,
    position: EventId,
}

struct World {
    first: Arc<Relay>,
    second: Arc<Relay>,
    feed: Feed,
    between: Subscription,
    /// A delivery for which the second relay has no room yet.
    pending: Option<FedPublication>,
    subscribers: Vec<Subscriber>,
    /// The publications of all first relays.
    published: HashSet<EventId>,
    number: u64,
}

impl World {
    fn new() -> Self {
        let (first, second) = (Relay::new(limits()), Relay::new(limits()));
        let between = subscribe(&first, 1, None, None, Duration::ZERO);
        let feed = second.feed(CHANNEL, 2, Duration::ZERO).unwrap();
        feed.begin_at(between.channels().next().unwrap().1, Duration::ZERO);
        Self {
            first,
            second,
            feed,
            between,
            pending: None,
            subscribers: Vec::new(),
            published: HashSet::new(),
            number: 2,
        }
    }

    fn number(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    fn publish(&mut self, is_reliable: bool) {
        let (content, number) = (NewPublication::default(), self.number());
        if is_reliable {
            let (audience, waker) = (Audience::All, Waker::noop());
            let progress = self.first.poll_publish_reliable(CHANNEL, &content, audience, number, waker, Duration::ZERO);
            // One that finds no room is not published: its publisher left.
            if let PublishProgress::Done(receipt) = progress.unwrap() {
                self.published.extend(receipt.id);
            }
        } else {
            let receipt = self.first.publish_realtime(CHANNEL, content, Audience::All, number, Duration::ZERO).unwrap();
            self.published.extend(receipt.id);
        }
    }

    fn pass(&mut self) {
        if self.pending.is_none() {
            match take(&self.between, Duration::ZERO) {
                None => return,
                Some(Delivery::Gap { missed, until, .. }) => return self.feed.gap(missed, until, Duration::ZERO),
                Some(Delivery::Publication(publication)) => {
                    let (content, id) = (publication.content.clone(), publication.id);
                    self.pending = Some(FedPublication { content, id, is_reliable: publication.is_reliable });
                }
            }
        }
        if let Some(publication) = self.pending.take() {
            let progress = self.feed.poll_publish(&publication, Waker::noop(), Duration::ZERO).unwrap();
            if matches!(progress, PublishProgress::Waiting { .. }) {
                self.pending = Some(publication);
            }
        }
    }

    fn break_off(&mut self, is_replaced: bool) {
        self.pending = None;
        if is_replaced {
            self.first = Relay::new(limits());
        }
        let number = self.number();
        self.between = subscribe(&self.first, number, Some(self.feed.position()), Some(1), Duration::ZERO);
        let (_, start) = self.between.channels().next().unwrap();
        self.feed.begin_at(start, Duration::ZERO);
    }

    fn subscribe(&mut self, resumes: bool) {
        let earlier = self.subscribers.iter().rev().find(|earlier| earlier.subscription.is_none() && resumes);
        let after = earlier.map(|earlier| earlier.position);
        let number = self.number();
        let subscription = subscribe(&self.second, number, after, None, Duration::ZERO);
        let (_, mut position) = subscription.channels().next().unwrap();
        if let Some(until) = subscription.lacks().next().unwrap() {
            position = self.fill(position, until);
        }
        self.subscribers.push(Subscriber { subscription: Some(subscription), position });
    }

    /// Gets what the second relay lacks from the first, as a relaying node does, and returns the position after it.
    fn fill(&mut self, after: EventId, until: EventId) -> EventId {
        let number = self.number();
        let filling = subscribe(&self.first, number, Some(after), Some(0), Duration::ZERO);
        let mut position = after;
        while position.epoch == until.epoch && position.sequence < until.sequence {
            match take(&filling, Duration::ZERO) {
                Some(Delivery::Publication(publication)) => {
                    position.sequence += 1;
                    assert_eq!(publication.id, Some(position));
                }
                // Later publications than `until` arrive by the feed.
                Some(Delivery::Gap { until: gap, .. }) => position = gap.min(EventId { epoch: gap.epoch, ..until }),
                // The first relay is another one: the subscriber learns of a gap.
                None => return until,
            }
        }
        if position.epoch == until.epoch {
            assert_eq!(position, until);
        }
        until
    }

    /// Whether there was something to read.
    fn read(&mut self, at: usize) -> bool {
        let Some(subscriber) = self.subscribers.get_mut(at) else { return false };
        let Some(delivery) = subscriber.subscription.as_ref().and_then(|one| take(one, Duration::ZERO)) else {
            return false;
        };
        let before = subscriber.position;
        subscriber.position = match delivery {
            Delivery::Publication(publication) => {
                let next = EventId { sequence: before.sequence + 1, ..before };
                assert_eq!(publication.id, Some(next), "a hole that nobody announced, or a repetition");
                assert!(self.published.contains(&next));
                next
            }
            Delivery::Gap { missed, until, .. } => {
                if let Some(missed) = missed {
                    assert_eq!(until, EventId { sequence: before.sequence + missed, ..before });
                }
                until
            }
        };
        true
    }

    fn run(&mut self, operation: Operation) {
        match operation {
            Operation::Publish(is_reliable) => self.publish(is_reliable),
            Operation::Pass(count) => (0..count).for_each(|_| self.pass()),
            Operation::Break(is_replaced) => self.break_off(is_replaced),
            Operation::Subscribe(resumes) => self.subscribe(resumes),
            Operation::Read(at, count) => {
                let at = at % self.subscribers.len().max(1);
                for _ in 0..count {
                    self.read(at);
                }
            }
            Operation::Leave(at) => {
                let at = at % self.subscribers.len().max(1);
                if let Some(subscriber) = self.subscribers.get_mut(at) {
                    subscriber.subscription = None;
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn no_hole_behind_a_relaying_node_is_silent(operations in prop::collection::vec(operation(), 1..120)) {
        let mut world = World::new();
        operations.into_iter().for_each(|operation| world.run(operation));
        // At the end, everybody knows all that the second relay knows.
        for at in 0..world.subscribers.len() {
            while world.read(at) {}
            let subscriber = &world.subscribers[at];
            if subscriber.subscription.is_some() {
                prop_assert_eq!(subscriber.position, world.feed.position());
            }
        }
        let live = world.subscribers.iter().filter(|one| one.subscription.is_some()).count() as u64;
        prop_assert_eq!(*world.feed.audience().borrow(), live);
    }
}

/// The subscribers behind a relaying node count, and the feed tells how many they are.
#[test]
fn receipts_count_the_subscribers_behind_relaying_nodes() {
    let relay = Relay::new(limits());
    let near = subscribe(&relay, 1, None, None, Duration::ZERO);
    let node = subscribe(&relay, 2, None, Some(5), Duration::ZERO);
    let publish =
        || relay.publish_realtime(CHANNEL, NewPublication::default(), Audience::All, 1, Duration::ZERO).unwrap();
    assert_eq!((publish().subscribers, publish().delivered), (6, 6));
    relay.refresh(SubscriptionId(2), "somebody", SECOND, Some(7), Duration::ZERO).unwrap();
    assert_eq!(publish().subscribers, 8);
    let feed = relay.feed(CHANNEL, 3, Duration::ZERO).unwrap();
    let audience = feed.audience();
    assert_eq!(*audience.borrow(), 8);
    drop(node);
    assert_eq!(*audience.borrow(), 1);
    drop(near);
    assert_eq!(*audience.borrow(), 0);
    // Without subscribers, the channel stays as long as its feed.
    relay.sweep(10_000 * SECOND);
    assert_eq!(relay.counters().channels, 1);
    drop((feed, audience));
    relay.sweep(20_000 * SECOND);
    assert_eq!(relay.counters().channels, 0);
}

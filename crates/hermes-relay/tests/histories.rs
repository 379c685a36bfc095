//! Random histories of subscribers and publishers, in computed time.
//!
//! In: operations. Out: for each subscriber, a sequence of publications in which each hole is announced, and which has all
//! reliable publications that were answered while it subscribed.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hermes_relay::{
    Audience, Delivery, End, EventId, NewPublication, PublishProgress, Relay, RelayLimits, SubscribeRequest,
    Subscription, SubscriptionId,
};
use proptest::prelude::*;

const CHANNELS: [&str; 2] = ["node/a", "node/b"];
const SECOND: Duration = Duration::from_secs(1);

fn limits() -> RelayLimits {
    RelayLimits {
        queue: 3,
        history: 4,
        stall: 5 * SECOND,
        max_timeout: 100 * SECOND,
        history_age: 60 * SECOND,
        ..RelayLimits::default()
    }
}

#[derive(Clone, Debug)]
enum Operation {
    /// The last field resumes after what an earlier subscriber of the channel got.
    Subscribe(usize, u32, bool),
    Publish(usize, bool),
    Read(usize, usize),
    Leave(usize),
    Refresh(usize, u32),
    Wait(u32),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        2 => (0..2_usize, 1..60_u32, any::<bool>()).prop_map(|(c, t, r)| Operation::Subscribe(c, t, r)),
        6 => (0..2_usize, any::<bool>()).prop_map(|(c, r)| Operation::Publish(c, r)),
        5 => (any::<usize>(), 1..4_usize).prop_map(|(s, n)| Operation::Read(s, n)),
        1 => any::<usize>().prop_map(Operation::Leave),
        1 => (any::<usize>(), 1..60_u32).prop_map(|(s, t)| Operation::Refresh(s, t)),
        2 => (0..4_u32).prop_map(Operation::Wait),
    ]
}

struct Subscriber {
    subscription: Option<Subscription>,
    id: SubscriptionId,
    channel: usize,
    /// The latest publication that it has, or knows that it lacks.
    position: Option<EventId>,
    /// The reliable publications that it must get.
    owed: Vec<EventId>,
    end: Option<End>,
}

impl Subscriber {
    fn read(&mut self, now: Duration) -> bool {
        let Some(subscription) = &self.subscription else { return false };
        let mut cx = Context::from_waker(Waker::noop());
        match subscription.poll_next(&mut cx, now) {
            Poll::Pending => false,
            Poll::Ready(Err(end)) => {
                self.end = Some(end);
                self.subscription = None;
                false
            }
            Poll::Ready(Ok(Delivery::Gap { missed, .. })) => {
                self.position = self
                    .position
                    .and_then(|position| Some(EventId { sequence: position.sequence + missed?, ..position }));
                true
            }
            Poll::Ready(Ok(Delivery::Publication(publication))) => {
                assert_eq!(&*publication.channel, CHANNELS[self.channel]);
                if let Some(position) = self.position {
                    let next = EventId { sequence: position.sequence + 1, ..position };
                    assert_eq!(publication.id, next, "a hole that nobody announced, or a repetition");
                }
                self.position = Some(publication.id);
                self.owed.retain(|owed| *owed != publication.id);
                true
            }
        }
    }
}

#[derive(Default)]
struct World {
    now: Duration,
    subscribers: Vec<Subscriber>,
    /// The latest publication of each channel.
    latest: [Option<EventId>; 2],
    random: u64,
}

impl World {
    fn subscribe(&mut self, relay: &Arc<Relay>, channel: usize, timeout: u32, resumes: bool) {
        let earlier = self.subscribers.iter().rev().filter(|earlier| earlier.channel == channel && resumes);
        let after = earlier.filter(|earlier| earlier.subscription.is_none()).find_map(|earlier| earlier.position);
        self.random += 1;
        let id = SubscriptionId(self.random.into());
        let request = SubscribeRequest {
            id,
            subject: "somebody".into(),
            channels: vec![(CHANNELS[channel].into(), after)],
            group: None,
            timeout: timeout * SECOND,
            epoch: self.random,
        };
        let subscription = Some(relay.subscribe(request, self.now).unwrap());
        // Without a position, the first publication begins the sequence.
        let position = after;
        self.subscribers.push(Subscriber { subscription, id, channel, position, owed: Vec::new(), end: None });
    }

    fn publish(&mut self, relay: &Relay, channel: usize, is_reliable: bool) {
        self.random += 1;
        let (name, epoch, now) = (CHANNELS[channel], self.random, self.now);
        let receipt = if is_reliable {
            let content = NewPublication::default();
            let progress = relay.poll_publish_reliable(name, &content, Audience::All, epoch, Waker::noop(), now);
            let PublishProgress::Done(receipt) = progress.unwrap() else { return };
            receipt
        } else {
            relay.publish_realtime(name, NewPublication::default(), Audience::All, epoch, now).unwrap()
        };
        if let Some(latest) = self.latest[channel].filter(|latest| latest.epoch == receipt.id.epoch) {
            assert_eq!(receipt.id.sequence, latest.sequence + 1);
        }
        self.latest[channel] = Some(receipt.id);
        assert!(receipt.delivered <= receipt.subscribers);
        if is_reliable {
            assert_eq!(receipt.delivered, receipt.subscribers);
            let of_channel = |subscriber: &&mut Subscriber| {
                let is_live = |subscription: &Subscription| subscription.deadline() > now;
                subscriber.channel == channel && subscriber.subscription.as_ref().is_some_and(is_live)
            };
            self.subscribers.iter_mut().filter(of_channel).for_each(|subscriber| subscriber.owed.push(receipt.id));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn no_hole_is_silent_and_nothing_reliable_is_lost(operations in prop::collection::vec(operation(), 1..80)) {
        let relay = Relay::new(limits());
        let mut world = World::default();
        for operation in operations {
            let count = world.subscribers.len().max(1);
            match operation {
                Operation::Subscribe(channel, timeout, resumes) => world.subscribe(&relay, channel, timeout, resumes),
                Operation::Publish(channel, is_reliable) => world.publish(&relay, channel, is_reliable),
                Operation::Read(which, most) => {
                    if let Some(subscriber) = world.subscribers.get_mut(which % count) {
                        (0..most).all(|_| subscriber.read(world.now));
                    }
                }
                Operation::Leave(which) => {
                    if let Some(subscriber) = world.subscribers.get_mut(which % count) {
                        subscriber.subscription = None;
                        subscriber.owed.clear();
                    }
                }
                Operation::Refresh(which, timeout) => {
                    if let Some(subscriber) = world.subscribers.get(which % count) {
                        let (id, now) = (subscriber.id, world.now);
                        prop_assert!(relay.refresh(id, "another", timeout * SECOND, now).is_err());
                        let refreshed = relay.refresh(id, "somebody", timeout * SECOND, now);
                        prop_assert!(refreshed.is_err() || subscriber.subscription.is_some());
                    }
                }
                Operation::Wait(seconds) => {
                    world.now += seconds * SECOND;
                    relay.sweep(world.now);
                }
            }
        }
        for subscriber in &mut world.subscribers {
            while subscriber.read(world.now) {}
            prop_assert!(subscriber.end == Some(End::Stalled) || subscriber.owed.is_empty(), "{:?}", subscriber.owed);
        }
        let live = world.subscribers.iter().filter(|subscriber| subscriber.subscription.is_some()).count();
        prop_assert_eq!(relay.counters().subscriptions, live as u64);
        // Nothing stays behind.
        drop(world);
        relay.sweep(10_000 * SECOND);
        prop_assert_eq!(relay.counters(), Default::default());
    }
}

#[test]
fn a_publication_for_one_reaches_another_member_when_its_taker_leaves() {
    let relay = Relay::new(limits());
    let subscribe = |number: u128| {
        let request = SubscribeRequest {
            id: SubscriptionId(number),
            subject: "somebody".into(),
            channels: vec![("node/jobs".into(), None)],
            group: Some("workers".into()),
            timeout: SECOND,
            epoch: 1,
        };
        relay.subscribe(request, Duration::ZERO).unwrap()
    };
    let publish = || {
        let audience = Audience::OneOfEachGroup;
        relay.publish_realtime("node/jobs", NewPublication::default(), audience, 1, Duration::ZERO).unwrap()
    };
    let next = |subscription: &Subscription| {
        let mut cx = Context::from_waker(Waker::noop());
        match subscription.poll_next(&mut cx, Duration::ZERO) {
            Poll::Ready(Ok(Delivery::Publication(publication))) => Some(publication.id.sequence),
            Poll::Ready(other) => panic!("{other:?}"),
            Poll::Pending => None,
        }
    };
    let (first, second) = (subscribe(1), subscribe(2));
    let receipts = [publish(), publish(), publish(), publish()];
    assert!(receipts.iter().all(|receipt| receipt.subscribers == 2 && receipt.delivered == 1));
    assert_eq!(next(&first), Some(1));
    // It has not taken the third one.
    drop(first);
    assert_eq!([next(&second), next(&second), next(&second), next(&second)], [Some(2), Some(4), Some(3), None]);
}

#[test]
fn memory_and_names_are_bounded() {
    let limits = RelayLimits { memory: 10_000, channels: 3, history: 0, ..limits() };
    let relay = Relay::new(limits.clone());
    let content = |bytes: usize| NewPublication { body: vec![0; bytes].into(), ..NewPublication::default() };
    let publish = |name: &str, bytes| relay.publish_realtime(name, content(bytes), Audience::All, 1, Duration::ZERO);
    // Publications that nobody gets leave nothing.
    for number in 0..10 {
        assert_eq!(publish(&format!("node/{number}"), 1).unwrap().subscribers, 0);
    }
    assert_eq!(relay.counters(), Default::default());
    // Bytes that arrive count.
    let mut arriving = relay.reserve();
    relay.reserve_more(&mut arriving, 9000).unwrap();
    assert!(relay.reserve_more(&mut arriving, 9000).is_err());
    assert!(publish("node/1", 1).is_err());
    drop(arriving);
    assert_eq!(relay.counters().memory, 0);
    // With a history, a new name replaces one that nobody subscribes to.
    relay.set_limits(&RelayLimits { history: 2, ..limits });
    for number in 0..10 {
        publish(&format!("node/{number}"), 1).unwrap();
    }
    assert_eq!(relay.counters().channels, 3);
}

#[test]
fn silent_subscribers_stall_at_the_same_time() {
    let relay = Relay::new(limits());
    let subscribe = |number: u128, timeout: u32| {
        let request = SubscribeRequest {
            id: SubscriptionId(number),
            subject: "somebody".into(),
            channels: vec![("node/a".into(), None)],
            group: None,
            timeout: timeout * SECOND,
            epoch: 1,
        };
        relay.subscribe(request, Duration::ZERO).unwrap()
    };
    let _silent: Vec<Subscription> = (0..10).map(|number| subscribe(number, 50)).collect();
    let publish = |now| {
        let content = NewPublication::default();
        relay.poll_publish_reliable("node/a", &content, Audience::All, 1, Waker::noop(), now).unwrap()
    };
    for _ in 0..3 {
        assert!(matches!(publish(Duration::ZERO), PublishProgress::Done(receipt) if receipt.delivered == 10));
    }
    assert_eq!(publish(SECOND), PublishProgress::Waiting { until: 6 * SECOND });
    assert!(matches!(publish(6 * SECOND), PublishProgress::Done(receipt) if receipt.subscribers == 0));
    assert_eq!(relay.sweep(7 * SECOND), 10);
    // An expiry is no later than a stall.
    let _brief = subscribe(11, 9);
    for _ in 0..3 {
        publish(8 * SECOND);
    }
    assert_eq!(publish(8 * SECOND), PublishProgress::Waiting { until: 9 * SECOND });
}

//! Random histories of subscribers and publishers, in computed time.
//!
//! In: operations. Out: for each subscriber, a sequence of publications in which each hole is announced, and which has all
//! reliable publications that were answered while it subscribed.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hermes_relay::{
    Audience, Delivery, End, EventId, Losses, NewPublication, PublishError, PublishProgress, Receipt, Relay,
    RelayLimits, SubscribeRequest, Subscription, SubscriptionId,
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
    /// The latest publication that it has, or knows that it lacks; before the first, the position at which it began.
    position: EventId,
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
            Poll::Ready(Ok(Delivery::Gap { missed, until, .. })) => {
                if let Some(missed) = missed {
                    assert_eq!(until, EventId { sequence: self.position.sequence + missed, ..self.position });
                }
                self.position = until;
                true
            }
            Poll::Ready(Ok(Delivery::Publication(publication))) => {
                assert_eq!(&*publication.channel, CHANNELS[self.channel]);
                let next = EventId { sequence: self.position.sequence + 1, ..self.position };
                assert_eq!(publication.id, Some(next), "a hole that nobody announced, or a repetition");
                self.position = next;
                self.owed.retain(|owed| *owed != next);
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
        let after = earlier.filter(|earlier| earlier.subscription.is_none()).map(|earlier| earlier.position).next();
        self.random += 1;
        let id = SubscriptionId(self.random.into());
        let request = SubscribeRequest {
            id,
            subject: "somebody".into(),
            channels: vec![(CHANNELS[channel].into(), after)],
            group: None,
            timeout: timeout * SECOND,
            behind: None,
            is_stand_by: false,
            epoch: self.random,
        };
        let subscription = relay.subscribe(request, self.now).unwrap();
        let (_, position) = subscription.channels().next().unwrap();
        let subscription = Some(subscription);
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
        let id = receipt.id.unwrap();
        if let Some(latest) = self.latest[channel].filter(|latest| latest.epoch == id.epoch) {
            assert_eq!(id.sequence, latest.sequence + 1);
        }
        self.latest[channel] = Some(id);
        assert_eq!(receipt.delivered + receipt.dropped, receipt.subscribers);
        if is_reliable {
            assert_eq!(receipt.delivered, receipt.subscribers);
            let of_channel = |subscriber: &&mut Subscriber| {
                let is_live = |subscription: &Subscription| subscription.deadline() > now;
                subscriber.channel == channel && subscriber.subscription.as_ref().is_some_and(is_live)
            };
            self.subscribers.iter_mut().filter(of_channel).for_each(|subscriber| subscriber.owed.push(id));
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
                        prop_assert!(relay.refresh(id, "another", timeout * SECOND, None, now).is_err());
                        let refreshed = relay.refresh(id, "somebody", timeout * SECOND, None, now);
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

fn subscribe(relay: &Arc<Relay>, number: u128, channel: &str, group: Option<&str>, timeout: u32) -> Subscription {
    let request = SubscribeRequest {
        id: SubscriptionId(number),
        subject: "somebody".into(),
        channels: vec![(channel.into(), None)],
        group: group.map(Arc::from),
        timeout: timeout * SECOND,
        behind: None,
        is_stand_by: false,
        epoch: 1,
    };
    relay.subscribe(request, Duration::ZERO).unwrap()
}

fn content(text: &str) -> NewPublication {
    NewPublication { body: bytes::Bytes::from(text.to_owned()).into(), ..NewPublication::default() }
}

/// The content of the next publication, `-N` for a gap of N, or an empty text if nothing waits.
fn next(subscription: &Subscription, now: Duration) -> String {
    match subscription.poll_next(&mut Context::from_waker(Waker::noop()), now) {
        Poll::Ready(Ok(Delivery::Publication(publication))) => {
            String::from_utf8(publication.content.body.whole().to_vec()).unwrap()
        }
        Poll::Ready(Ok(Delivery::Gap { missed, .. })) => format!("-{}", missed.unwrap()),
        Poll::Ready(Err(end)) => panic!("{end}"),
        Poll::Pending => String::new(),
    }
}

#[test]
fn a_job_reaches_another_member_when_its_taker_leaves() {
    let relay = Relay::new(limits());
    let job = |text: &str| {
        let audience = Audience::OneOfEachGroup;
        relay.publish_realtime("node/jobs", content(text), audience, 1, Duration::ZERO).unwrap()
    };
    let worker = |number| subscribe(&relay, number, "node/jobs", Some("workers"), 10);
    let (first, second) = (worker(1), worker(2));
    for text in ["1", "2", "3", "4"] {
        let Receipt { id, subscribers, delivered, dropped } = job(text);
        assert_eq!((id, subscribers, delivered, dropped), (None, 2, 1, 0));
    }
    assert_eq!(next(&first, SECOND), "1");
    // It has not taken the third one.
    drop(first);
    assert_eq!([(); 4].map(|()| next(&second, SECOND)), ["2", "4", "3", ""]);
    // Without a member, a job waits for the next one of its group.
    job("5");
    drop(second);
    let stranger = subscribe(&relay, 3, "node/jobs", None, 10);
    assert_eq!(next(&stranger, SECOND), "");
    let third = worker(4);
    assert_eq!([(); 2].map(|()| next(&third, SECOND)), ["5", ""]);
    // No history keeps a job, and no position counts it.
    let publication = relay.publish_realtime("node/jobs", content("6"), Audience::All, 1, SECOND).unwrap();
    assert_eq!(publication.id, Some(EventId { epoch: 1, sequence: 1 }));
    // Jobs of a member that stalls do not wait for the end of its connection.
    for text in ["7", "8"] {
        job(text);
    }
    assert_eq!([(); 2].map(|()| next(&stranger, SECOND)), ["6", "7"]);
    let fourth = worker(5);
    let reliable = |now| {
        let all = Audience::All;
        relay.poll_publish_reliable("node/jobs", &content("9"), all, 1, Waker::noop(), now).unwrap()
    };
    assert_eq!(reliable(SECOND), PublishProgress::Waiting { until: 6 * SECOND });
    assert!(matches!(reliable(7 * SECOND), PublishProgress::Done(_)));
    assert_eq!(relay.sweep(7 * SECOND), Losses { stalled: 1, jobs: 0 });
    assert_eq!([(); 4].map(|()| next(&fourth, 7 * SECOND)), ["9", "7", "8", ""]);
}

#[test]
fn jobs_of_a_stalled_member_stay_in_their_channel() {
    let relay = Relay::new(limits());
    let request = SubscribeRequest {
        id: SubscriptionId(1),
        subject: "somebody".into(),
        channels: vec![("node/a".into(), None), ("node/b".into(), None)],
        group: Some("g".into()),
        timeout: 90 * SECOND,
        behind: None,
        is_stand_by: false,
        epoch: 1,
    };
    let _silent = relay.subscribe(request, Duration::ZERO).unwrap();
    let publish = |channel: &str, text: &str, audience, now| {
        relay.poll_publish_reliable(channel, &content(text), audience, 1, Waker::noop(), now).unwrap()
    };
    for text in ["1", "2", "3"] {
        publish("node/b", text, Audience::OneOfEachGroup, Duration::ZERO);
    }
    let of_a = subscribe(&relay, 2, "node/a", Some("g"), 90);
    assert!(matches!(publish("node/a", "x", Audience::All, SECOND), PublishProgress::Waiting { .. }));
    assert!(matches!(publish("node/a", "x", Audience::All, 6 * SECOND), PublishProgress::Done(_)));
    relay.sweep(7 * SECOND);
    assert_eq!([(); 2].map(|()| next(&of_a, 7 * SECOND)), ["x", ""]);
    let of_b = subscribe(&relay, 3, "node/b", Some("g"), 90);
    assert_eq!([(); 4].map(|()| next(&of_b, 7 * SECOND)), ["1", "2", "3", ""]);
}

#[test]
fn a_reliable_publication_has_the_next_room() {
    let relay = Relay::new(limits());
    let slow = subscribe(&relay, 1, "node/a", None, 90);
    let realtime =
        |text: &str| relay.publish_realtime("node/a", content(text), Audience::All, 1, SECOND).unwrap().delivered;
    let reliable =
        || relay.poll_publish_reliable("node/a", &content("r"), Audience::All, 1, Waker::noop(), SECOND).unwrap();
    assert_eq!(["1", "2", "3"].map(realtime), [1, 1, 1]);
    assert!(matches!(reliable(), PublishProgress::Waiting { .. }));
    assert_eq!(next(&slow, SECOND), "1");
    assert_eq!(realtime("4"), 0);
    assert!(matches!(reliable(), PublishProgress::Done(_)));
    assert_eq!([(); 4].map(|()| next(&slow, SECOND)), ["2", "3", "-1", "r"]);
    assert_eq!(realtime("5"), 1);
}

#[test]
fn a_history_stays_for_its_age_after_the_last_subscriber() {
    let relay = Relay::new(limits());
    let subscription = subscribe(&relay, 1, "node/a", None, 90);
    let first = relay.publish_realtime("node/a", content("1"), Audience::All, 1, SECOND).unwrap();
    // Longer than the age of histories.
    relay.sweep(80 * SECOND);
    drop(subscription);
    relay.sweep(81 * SECOND);
    let second = relay.publish_realtime("node/a", content("2"), Audience::All, 2, 82 * SECOND).unwrap();
    assert_eq!(second.id.unwrap().epoch, first.id.unwrap().epoch);
}

#[test]
fn a_full_queue_is_told_when_it_is_empty() {
    let relay = Relay::new(limits());
    let subscription = subscribe(&relay, 1, "node/a", None, 10);
    for text in ["1", "2", "3", "4", "5"] {
        relay.publish_realtime("node/a", content(text), Audience::All, 1, SECOND).unwrap();
    }
    assert_eq!([(); 5].map(|()| next(&subscription, SECOND)), ["1", "2", "3", "-2", ""]);
}

#[test]
fn a_relay_that_closes_delivers_what_it_has() {
    let relay = Relay::new(limits());
    let subscription = subscribe(&relay, 1, "node/a", None, 10);
    relay.publish_realtime("node/a", content("1"), Audience::All, 1, SECOND).unwrap();
    relay.close();
    let refused = relay.publish_realtime("node/a", content("2"), Audience::All, 1, SECOND);
    assert_eq!(refused, Err(PublishError::Closed));
    assert_eq!(next(&subscription, SECOND), "1");
    let ended = subscription.poll_next(&mut Context::from_waker(Waker::noop()), SECOND);
    assert!(matches!(ended, Poll::Ready(Err(End::Closed))));
}

#[test]
fn histories_give_way_before_publications_are_refused() {
    let relay = Relay::new(RelayLimits { memory: 10_000, history: 4, ..limits() });
    let long = "x".repeat(900);
    for number in 0..100 {
        let name = format!("node/{number}");
        relay.publish_realtime(&name, content(&long), Audience::All, 1, SECOND).unwrap();
    }
    assert!(relay.counters().memory <= 12_000, "{:?}", relay.counters());
    // Those of the latest channels are still there.
    let request = SubscribeRequest {
        id: SubscriptionId(1),
        subject: "somebody".into(),
        channels: vec![("node/99".into(), Some(EventId { epoch: 1, sequence: 0 }))],
        group: None,
        timeout: SECOND,
        behind: None,
        is_stand_by: false,
        epoch: 1,
    };
    let subscription = relay.subscribe(request, SECOND).unwrap();
    assert_eq!(next(&subscription, SECOND), long);
}

#[test]
fn subscribers_that_read_nothing_do_not_take_the_memory_of_others() {
    let relay = Relay::new(RelayLimits { memory: 20_000, history: 0, queue: 100, ..limits() });
    let slow: Vec<Subscription> =
        (0..4).map(|number| subscribe(&relay, number, &format!("node/{number}"), None, 60)).collect();
    let publish = |name: &str, now| relay.publish_realtime(name, content("x"), Audience::All, 1, now);
    for round in 0..40 {
        for number in 0..4 {
            let _ = publish(&format!("node/{number}"), SECOND * (1 + round));
        }
    }
    assert!(publish("node/1", 41 * SECOND).is_err());
    let losses = relay.sweep(42 * SECOND);
    assert!(losses.stalled > 0 && losses.stalled < 4, "{losses:?}");
    publish("node/3", 42 * SECOND).unwrap();
    drop(slow);
    assert_eq!(relay.counters().memory, 0);
}

#[test]
fn memory_and_names_are_bounded() {
    let limits = RelayLimits { memory: 10_000, channels: 3, history: 0, ..limits() };
    let relay = Relay::new(limits.clone());
    let publish = |name: &str, bytes: usize| {
        relay.publish_realtime(name, content(&"x".repeat(bytes)), Audience::All, 1, Duration::ZERO)
    };
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
    let _silent: Vec<Subscription> = (0..10).map(|number| subscribe(&relay, number, "node/a", None, 50)).collect();
    let publish = |now| {
        let content = NewPublication::default();
        relay.poll_publish_reliable("node/a", &content, Audience::All, 1, Waker::noop(), now).unwrap()
    };
    for _ in 0..3 {
        assert!(matches!(publish(Duration::ZERO), PublishProgress::Done(receipt) if receipt.delivered == 10));
    }
    assert_eq!(publish(SECOND), PublishProgress::Waiting { until: 6 * SECOND });
    assert!(matches!(publish(6 * SECOND), PublishProgress::Done(receipt) if receipt.subscribers == 0));
    assert_eq!(relay.sweep(7 * SECOND).stalled, 10);
    // An expiry is no later than a stall.
    let _brief = subscribe(&relay, 11, "node/a", None, 9);
    for _ in 0..3 {
        publish(8 * SECOND);
    }
    assert_eq!(publish(8 * SECOND), PublishProgress::Waiting { until: 9 * SECOND });
}

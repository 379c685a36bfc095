//! Simulates a hundred uncoordinated clients in front of various limiters, in computed time.
//!
//! Each client requests its objects one after the other. Without the estimator, it repeats refused requests by itself,
//! as clients do: after the demanded wait, with a little jitter. The clock jumps from event to event. A seeded
//! generator provides the network's delays.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use crate::estimator::{Admission, RateEstimator};
use crate::fair_queue::{Client, Ticket};
use crate::headers::RateHeaders;

const SECOND: Duration = Duration::from_secs(1);

/// A limiter of a service.
#[derive(Clone, Debug)]
pub(crate) enum Limiter {
    /// This number of requests in each window of the clock; `offset` shifts the windows.
    Fixed { limit: usize, window: Duration, offset: Duration, current: u128, taken: usize },
    /// This number of requests in any window.
    Sliding { limit: usize, window: Duration, taken: VecDeque<Duration> },
    /// A token bucket with a rate a second and a depth.
    Bucket { rate: f64, depth: f64, level: f64, at: Duration },
}

impl Limiter {
    fn fixed(limit: usize, window: Duration, offset: Duration) -> Self {
        Self::Fixed { limit, window, offset, current: 0, taken: 0 }
    }

    fn sliding(limit: usize, window: Duration) -> Self {
        Self::Sliding { limit, window, taken: VecDeque::new() }
    }

    fn bucket(rate: f64, depth: f64) -> Self {
        Self::Bucket { rate, depth, level: depth, at: Duration::ZERO }
    }

    /// Accepts a request, or returns the time until there is room.
    fn take(&mut self, now: Duration) -> Result<(), Duration> {
        match self {
            Self::Fixed { limit, window, offset, current, taken } => {
                let shifted = now + *offset;
                let number = shifted.as_nanos() / window.as_nanos();
                if number != *current {
                    (*current, *taken) = (number, 0);
                }
                if *taken < *limit {
                    *taken += 1;
                    return Ok(());
                }
                Err(window.saturating_sub(Duration::from_nanos(
                    u64::try_from(shifted.as_nanos() % window.as_nanos()).unwrap_or_default(),
                )))
            }
            Self::Sliding { limit, window, taken } => {
                taken.retain(|at| *at + *window > now);
                match taken.front() {
                    Some(first) if taken.len() >= *limit => Err(*first + *window - now),
                    _ => {
                        taken.push_back(now);
                        Ok(())
                    }
                }
            }
            Self::Bucket { rate, depth, level, at } => {
                *level = (*level + *rate * now.saturating_sub(*at).as_secs_f64()).min(*depth);
                *at = now;
                if *level >= 1.0 {
                    *level -= 1.0;
                    return Ok(());
                }
                Err(Duration::from_secs_f64((1.0 - *level) / *rate))
            }
        }
    }

    /// The earliest possible completion of this number of requests.
    fn ideal(&self, requests: usize) -> Duration {
        match self {
            Self::Fixed { limit, window, offset, .. } => {
                let windows = u32::try_from(requests.div_ceil(*limit) - 1).unwrap_or(u32::MAX);
                let first =
                    Duration::from_nanos(u64::try_from(offset.as_nanos() % window.as_nanos()).unwrap_or_default());
                (*window * windows).saturating_sub(first)
            }
            Self::Sliding { limit, window, .. } => {
                *window * u32::try_from(requests.div_ceil(*limit) - 1).unwrap_or(u32::MAX)
            }
            Self::Bucket { rate, depth, .. } => Duration::from_secs_f64((requests as f64 - depth) / rate),
        }
    }
}

/// The headers of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Says {
    /// `Retry-After` in whole seconds, as the specification requires.
    Seconds,
    Nothing,
    /// A policy in addition.
    Policy(u32, Duration),
}

impl Says {
    fn hint(self, wait: Duration) -> RateHeaders {
        let after = Some(Duration::from_secs(wait.as_secs_f64().ceil().max(1.0) as u64));
        match self {
            Self::Seconds => RateHeaders { after, quota: None },
            Self::Nothing => RateHeaders::default(),
            Self::Policy(count, window) => RateHeaders { after, quota: Some((f64::from(count), window)) },
        }
    }
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A client sends a request, refused this number of times before.
    Wants(usize, u32),
    /// A request arrives at the service.
    Arrives(usize, Duration, u32),
    /// The response arrives: refused with this wait, or accepted.
    Answered(usize, Duration, u32, Option<Duration>),
    /// A waiting request may be sent.
    Release,
}

/// The result of a simulation.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Completion of the last request.
    pub ended: Duration,
    /// Number of refusals by the service.
    pub refused: usize,
    /// Number of those that applications saw.
    pub seen: usize,
    /// Completion of each client.
    pub done: Vec<Duration>,
}

pub(crate) struct Case {
    pub clients: usize,
    pub each: usize,
    pub limiter: Limiter,
    pub says: Says,
    pub seed: u64,
}

impl Case {
    /// Runs the simulation, with the estimator (`is_paced`) or without.
    pub(crate) fn play(&self, is_paced: bool) -> Outcome {
        let mut random = SmallRng::seed_from_u64(self.seed);
        let mut limiter = self.limiter.clone();
        let mut budget = RateEstimator::new(4096);
        let mut events = BinaryHeap::new();
        let mut left = vec![self.each; self.clients];
        let mut waiting: HashMap<Ticket, usize> = HashMap::new();
        let mut outcome = Outcome { done: vec![Duration::ZERO; self.clients], ..Outcome::default() };
        for client in 0..self.clients {
            events.push(Reverse((Duration::from_micros(random.random_range(0..20_000)), 0, Event::Wants(client, 0))));
        }
        let (mut number, mut ticket, mut timer) = (0u64, 0, None);
        let mut push = |events: &mut BinaryHeap<_>, at: Duration, event| {
            number += 1;
            events.push(Reverse((at, number, event)));
        };
        while let Some(Reverse((now, _, event))) = events.pop() {
            // The path through two nodes and a network takes some milliseconds, with jitter.
            let mut delay = || Duration::from_micros(random.random_range(2_000..6_000));
            match event {
                Event::Wants(client, tries) => {
                    if !is_paced {
                        push(&mut events, now + delay(), Event::Arrives(client, now, tries));
                        continue;
                    }
                    ticket += 1;
                    match budget.enter(now, &name(client), ticket, tries > 0) {
                        Admission::Goes => push(&mut events, now + delay(), Event::Arrives(client, now, tries)),
                        Admission::Waits => drop(waiting.insert(ticket, client)),
                        other => panic!("{other:?}"),
                    }
                }
                Event::Release => {
                    timer = None;
                    while let Some(ticket) = budget.release(now) {
                        let client = waiting.remove(&ticket).unwrap_or_default();
                        push(&mut events, now + delay(), Event::Arrives(client, now, 1));
                    }
                }
                Event::Arrives(client, went, tries) => {
                    let wait = limiter.take(now).err();
                    outcome.refused += usize::from(wait.is_some());
                    push(&mut events, now + delay(), Event::Answered(client, went, tries, wait));
                }
                Event::Answered(client, went, tries, Some(wait)) => {
                    let hint = self.says.hint(wait);
                    if is_paced {
                        budget.refused(now, went, &hint);
                        push(&mut events, now, Event::Wants(client, tries + 1));
                    } else {
                        outcome.seen += 1;
                        // A client without `Retry-After` doubles its waits.
                        let told = hint.after.unwrap_or(SECOND / 10 * (1 << tries.min(8)));
                        let jitter = Duration::from_secs_f64(random.random_range(0.0..0.1) * told.as_secs_f64());
                        push(&mut events, now + told + jitter, Event::Wants(client, tries + 1));
                    }
                }
                Event::Answered(client, went, _, None) => {
                    budget.passed(went, || match self.says {
                        Says::Policy(..) => self.says.hint(Duration::ZERO),
                        _ => RateHeaders::default(),
                    });
                    left[client] -= 1;
                    outcome.ended = now;
                    outcome.done[client] = now;
                    if left[client] > 0 {
                        push(&mut events, now, Event::Wants(client, 0));
                    }
                }
            }
            if let Some(at) = budget.next_at().filter(|at| timer != Some(*at)) {
                timer = Some(at);
                // Timers fire up to two milliseconds late.
                let late = Duration::from_micros(random.random_range(100..2_000));
                push(&mut events, at.max(now) + late, Event::Release);
            }
        }
        assert_eq!(left.iter().sum::<usize>(), 0);
        outcome
    }
}

fn name(client: usize) -> Client {
    Client::User(client.to_string().into())
}

/// The same limit with each kind of limiter, and with various offsets of its windows.
fn limiters() -> Vec<Limiter> {
    let phases = [0.0, 0.3, 0.6, 0.99].map(|phase| Limiter::fixed(20, SECOND, SECOND.mul_f64(phase)));
    let others = [Limiter::sliding(20, SECOND), Limiter::bucket(20.0, 20.0)];
    phases.into_iter().chain(others).collect()
}

fn case(limiter: &Limiter, says: Says, seed: u64) -> Case {
    Case { clients: 100, each: 20, limiter: limiter.clone(), says, seed }
}

#[test]
fn a_hundred_clients_are_through_within_5_percent_of_the_ideal_and_see_no_refusal() {
    for says in [Says::Seconds, Says::Nothing, Says::Policy(20, SECOND)] {
        for limiter in limiters() {
            for seed in 1..=5 {
                let case = case(&limiter, says, seed);
                let (with, without) = (case.play(true), case.play(false));
                let ideal = limiter.ideal(case.clients * case.each);
                let beyond = with.ended.as_secs_f64() / ideal.as_secs_f64() - 1.0;
                println!(
                    "{says:?} {limiter:?} {seed}: {:.1} s, {:+.1} %, {} refused; without {:.1} s, {} refused",
                    with.ended.as_secs_f64(),
                    100.0 * beyond,
                    with.refused,
                    without.ended.as_secs_f64(),
                    without.refused
                );
                assert!(beyond < 0.05, "{says:?} {limiter:?} {seed}: {beyond}");
                // Refusals are rare even inside the node, where clients do not see them.
                assert!(with.seen == 0 && with.refused * 10 < without.refused, "{} {}", with.refused, without.refused);
            }
        }
    }
}

#[test]
fn clients_are_through_together_and_not_one_after_the_other() {
    let outcome = case(&Limiter::sliding(20, SECOND), Says::Seconds, 1).play(true);
    let first = outcome.done.iter().min().copied().unwrap_or_default();
    assert!(first > outcome.ended.mul_f64(0.9), "{first:?} {:?}", outcome.ended);
}

#[test]
fn a_rate_far_above_the_first_burst_is_found() {
    for says in [Says::Seconds, Says::Nothing] {
        let limiter = Limiter::bucket(20.0, 5.0);
        let outcome = case(&limiter, says, 1).play(true);
        let beyond = outcome.ended.as_secs_f64() / limiter.ideal(2000).as_secs_f64() - 1.0;
        assert!(beyond < 0.15, "{says:?} {beyond}");
    }
}

#[test]
fn a_limit_that_goes_down_is_followed_and_one_that_nobody_waits_for_forgotten() {
    let mut budget = RateEstimator::new(10);
    let client = name(0);
    let ms = Duration::from_millis;
    let again = RateHeaders { after: Some(SECOND), quota: None };
    for number in 0..20 {
        assert_eq!(budget.enter(ms(number), &client, number, false), Admission::Goes);
    }
    budget.refused(ms(30), ms(19), &again);
    assert_eq!(budget.enter(ms(40), &client, 50, true), Admission::Waits);
    assert_eq!((budget.release(ms(500)), budget.next_at()), (None, Some(ms(1030))));
    assert_eq!(budget.release(ms(1030)), Some(50));
    let before = budget.rate().unwrap_or_default();
    assert!((18.0..20.0).contains(&before), "{before}");
    // A refusal of a request that was sent before the last refusal changes nothing.
    budget.passed(ms(1030), RateHeaders::default);
    budget.refused(ms(1040), ms(18), &RateHeaders::default());
    assert_eq!(budget.rate(), Some(before));
    budget.refused(ms(1100), ms(1030), &again);
    assert_eq!(budget.enter(ms(1100), &client, 51, true), Admission::Waits);
    assert_eq!(budget.release(ms(2100)), Some(51));
    assert!(budget.rate().is_some_and(|rate| rate < 0.95 * before), "{:?}", budget.rate());
    assert_eq!(budget.enter(ms(70_000), &client, 52, false), Admission::Goes);
    assert_eq!(budget.rate(), None);
}

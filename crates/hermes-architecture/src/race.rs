//! A race: a destination that several architectures reach, of which the best is kept.
//!
//! In: the architectures of a route, the first one preferred. Out: the first flow that opens, or the first response. Never: a change of a flow that stands: its bytes cannot be repeated.
//!
//! The preferred architecture has a head start (as in RFC 8305, Happy Eyeballs). If it fails, the next one starts at
//! once. Now and then a session is a heat: all start together, so the others are measured, too. Another one becomes the
//! preferred one by winning several heats in a row, or where the preferred one has failed. So a single slow moment
//! changes nothing.

pub mod repeatable_body;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use hermes_model::authority::Authority;
use hermes_model::facts::Facts;
use hermes_model::snapshot::Route;
use hermes_outbound::outbound::Outbound;
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

use crate::{Architecture, Opening};

/// The head start of the preferred architecture (RFC 8305, section 8).
const HEAD_START: Duration = Duration::from_millis(250);
/// The shortest time between two heats for one destination, in milliseconds.
const HEAT_INTERVAL: u64 = 10_000;
/// The number of heats in a row that another architecture must win to become the preferred one.
const WINS: u32 = 3;
/// The number of destinations that a worker remembers.
const MAX_DESTINATIONS: usize = 4096;

/// A route, and a destination of its sessions.
type RaceKey = (Arc<str>, Authority);

/// The results of a worker's races, by destination.
#[derive(Default)]
pub struct Standings {
    by_destination: RefCell<HashMap<RaceKey, Standing>>,
}

/// The results for one destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Standing {
    /// The place of the preferred architecture in the route.
    preferred: usize,
    /// The architecture that won the last heats in place of the preferred one, and the number of these heats.
    challenger: (usize, u32),
    /// The time of the next heat, in milliseconds of the worker's clock.
    next_heat: u64,
}

impl Standing {
    /// Records who won a session.
    fn record(&mut self, winner: usize, is_heat: bool, has_preferred_failed: bool) {
        if !is_heat && !has_preferred_failed {
            return;
        }
        if winner == self.preferred {
            self.challenger = (winner, 0);
            return;
        }
        let wins = if self.challenger.0 == winner { self.challenger.1 + 1 } else { 1 };
        self.challenger = (winner, wins);
        if has_preferred_failed || wins >= WINS {
            (self.preferred, self.challenger) = (winner, (winner, 0));
        }
    }
}

impl Standings {
    /// Returns the preferred architecture of `count`, and whether this session is a heat. `None`: the table has no room
    /// for this destination.
    fn before(&self, key: &RaceKey, now: u64, count: usize) -> Option<(usize, bool)> {
        let mut all = self.by_destination.borrow_mut();
        if all.len() >= MAX_DESTINATIONS && !all.contains_key(key) {
            // Destinations that are still in use have had a heat since.
            all.retain(|_, standing| now < standing.next_heat);
            if all.len() >= MAX_DESTINATIONS {
                return None;
            }
        }
        let standing = all.entry(key.clone()).or_default();
        // A reload may have made the race shorter.
        if standing.preferred >= count {
            *standing = Standing::default();
        }
        let is_heat = now >= standing.next_heat;
        if is_heat {
            standing.next_heat = now + HEAT_INTERVAL;
        }
        Some((standing.preferred, is_heat))
    }

    /// Records that an alternative has taken the place of one that broke off.
    pub fn replaced(&self, route: &Route, facts: &Facts, by: usize) {
        self.after(&(route.name.clone(), facts.authority.clone()), by, false, true);
    }

    /// Records the winner of a session.
    fn after(&self, key: &RaceKey, winner: usize, is_heat: bool, has_preferred_failed: bool) {
        if let Some(standing) = self.by_destination.borrow_mut().get_mut(key) {
            standing.record(winner, is_heat, has_preferred_failed);
        }
    }
}

/// Several architectures, as a route with `terminate: {race: ...}` uses them.
pub(crate) struct Race<'a> {
    pub(crate) outbound: &'a Rc<Outbound>,
    pub(crate) standings: &'a Standings,
    pub(crate) alternatives: Vec<Box<dyn Architecture + 'a>>,
    pub(crate) route: &'a Route,
}

impl Architecture for Race<'_> {
    fn keyword(&self) -> &'static str {
        "race"
    }

    fn reaches(&self, facts: &Facts) -> bool {
        self.alternatives.iter().any(|one| one.reaches(facts))
    }

    /// Opens the flow that stands first. If none does, the error is that of the preferred architecture.
    fn open<'a>(&'a self, entry: &'a SessionEntry) -> Opening<'a> {
        Box::pin(async move {
            let all = &self.alternatives;
            let reaches = |at: usize| all.get(at).is_some_and(|one| one.reaches(&entry.facts));
            let start = |at: usize| async move {
                match all.get(at) {
                    Some(one) => one.open(entry).await,
                    None => Err(no_destination()),
                }
            };
            let of = RaceContext { outbound: self.outbound, standings: self.standings, route: self.route };
            run(of, &entry.facts, all.len(), reaches, start).await.map(|(_, stream)| stream)
        })
    }
}

fn no_destination() -> Error {
    Error::Malformed("no destination of the race can serve this session".to_owned())
}

/// The race of one route on one worker.
#[derive(Clone, Copy)]
pub struct RaceContext<'a> {
    /// The connections of the worker.
    pub outbound: &'a Rc<Outbound>,
    /// The results of the worker's races.
    pub standings: &'a Standings,
    /// The route.
    pub route: &'a Route,
}

/// Starts the alternatives of a race, and returns the index and the result of the one that succeeds first. The others are
/// dropped. `count` is their number, `reaches` tells whether one can serve the session. An error of the client, such as 404,
/// tells nothing about an alternative, and changes no preference.
///
/// # Errors
/// The error of the preferred alternative, if none succeeds.
pub async fn run<T, F: Future<Output = Result<T, Error>>>(
    of: RaceContext<'_>,
    facts: &Facts,
    count: usize,
    reaches: impl Fn(usize) -> bool,
    start: impl Fn(usize) -> F,
) -> Result<(usize, T), Error> {
    let RaceContext { outbound, standings, route } = of;
    let key = (route.name.clone(), facts.authority.clone());
    let known = standings.before(&key, outbound.now(), count);
    if known.is_none() {
        outbound.shared.metrics.limit("race-destinations");
    }
    let (preferred, is_heat) = known.unwrap_or_default();
    let mut waiting = (0..count).map(|at| (preferred + at) % count).filter(|at| reaches(*at));
    let indexed = |at: usize| {
        let attempt = start(at);
        async move { (at, attempt.await) }
    };
    let mut running = FuturesUnordered::new();
    let mut errors: Vec<(usize, Error)> = Vec::new();
    loop {
        if running.is_empty() || is_heat {
            let batch = if is_heat { count } else { 1 };
            running.extend(waiting.by_ref().take(batch).map(&indexed));
        }
        let head_start = tokio::time::sleep(HEAD_START);
        let outcome = tokio::select! {
            outcome = running.next() => outcome,
            () = head_start => {
                running.extend(waiting.by_ref().take(1).map(&indexed));
                continue;
            }
        };
        match outcome {
            Some((winner, Ok(result))) => {
                let has_failed = errors.iter().any(|(at, _)| *at == preferred);
                if !errors.iter().any(|(_, error)| error.status().is_client_error()) {
                    standings.after(&key, winner, is_heat, has_failed);
                }
                return Ok((winner, result));
            }
            Some((at, Err(error))) => {
                tracing::debug!(route = %route.name, alternative = at, %error, "a destination has failed");
                errors.push((at, error));
                running.extend(waiting.by_ref().take(1).map(&indexed));
            }
            None => {
                errors.sort_by_key(|(at, _)| (count + at - preferred) % count);
                return Err(errors.into_iter().next().map_or_else(no_destination, |(_, error)| error));
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;

    const SECOND: u64 = 1000;

    fn key(port: u16) -> RaceKey {
        (Arc::from("route"), Authority::parse("10.0.0.1", Some(port)).unwrap())
    }

    fn run(standings: &Standings, now: u64, winner: usize, has_failed: bool) -> usize {
        let (preferred, is_heat) = standings.before(&key(80), now, 2).unwrap();
        standings.after(&key(80), winner, is_heat, has_failed && preferred != winner);
        preferred
    }

    #[test]
    fn three_heats_in_a_row_change_the_preference() {
        let standings = Standings::default();
        let winners = [1, 1, 0, 1, 1, 1];
        let preferred: Vec<usize> = winners
            .iter()
            .enumerate()
            .map(|(at, winner)| run(&standings, (at as u64 + 1) * 10 * SECOND, *winner, false))
            .collect();
        assert_eq!(preferred, [0; 6]);
        assert_eq!(run(&standings, 70 * SECOND, 1, false), 1);
    }

    #[test]
    fn sessions_between_heats_change_nothing() {
        let standings = Standings::default();
        run(&standings, 10 * SECOND, 0, false);
        for at in 11..20 {
            assert_eq!(standings.before(&key(80), at * SECOND, 2), Some((0, false)));
            run(&standings, at * SECOND, 1, false);
        }
        // One heat that another architecture wins is not three.
        assert_eq!(run(&standings, 20 * SECOND, 1, false), 0);
        assert_eq!(standings.before(&key(80), 30 * SECOND, 2), Some((0, true)));
    }

    #[test]
    fn sessions_that_begin_together_have_one_heat() {
        let standings = Standings::default();
        let heats = (0..5).filter(|_| standings.before(&key(80), SECOND, 2).unwrap().1);
        assert_eq!(heats.count(), 1);
    }

    #[test]
    fn a_failure_changes_the_preference_at_once() {
        let standings = Standings::default();
        run(&standings, SECOND, 0, false);
        run(&standings, 2 * SECOND, 1, true);
        assert_eq!(standings.before(&key(80), 3 * SECOND, 2), Some((1, false)));
        // After a reload, the race has one destination.
        assert_eq!(standings.before(&key(80), 3 * SECOND, 1), Some((0, true)));
    }

    #[test]
    fn the_table_is_bounded() {
        let standings = Standings::default();
        for port in 1..=MAX_DESTINATIONS as u16 {
            assert!(standings.before(&key(port), SECOND, 2).is_some());
        }
        assert_eq!(standings.before(&key(60_000), 2 * SECOND, 2), None);
        assert!(standings.before(&key(60_000), SECOND + HEAT_INTERVAL, 2).is_some());
        assert_eq!(standings.by_destination.borrow().len(), 1);
    }
}

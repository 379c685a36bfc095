//! Whose each prefix is that clients were given, on all devices of the node: they share the machine's routes.
//!
//! In: prefixes, as sessions take them and give them back. Out: whether one may have it. Nothing overlaps what is
//! another's, nor for a while what was the one's whose session broke. Never: a prefix that a listener captures; those are a device's own.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ipnet::IpNet;

use super::device::Owner;
use super::table::Table;

/// Of the whole node. Taken where sessions begin and end, never for a packet.
#[derive(Debug, Default)]
pub(crate) struct Given(Mutex<Holdings>);

#[derive(Debug, Default)]
struct Holdings {
    table: Table<Holding>,
    /// Prefixes that rest, and until when: the first to end first.
    resting: VecDeque<(IpNet, Instant)>,
}

/// A prefix that sessions of one owner have, or had a moment ago.
#[derive(Debug)]
struct Holding {
    owner: Owner,
    sessions: usize,
    /// The session that gives it back next was broken off.
    is_broken: bool,
    until: Option<Instant>,
}

/// Whose session broke has its prefixes for so long: connections to them last, and what comes for them is nobody else's.
const REST: Duration = Duration::from_secs(60);
/// Prefixes that rest, of all owners. With more the first are free at once.
const MOST_RESTING: usize = 4096;

impl Given {
    fn lock(&self) -> MutexGuard<'_, Holdings> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more session of this owner has it. False: a part of it, or more than it, is another's.
    pub(super) fn take(&self, prefix: IpNet, owner: &Owner) -> bool {
        let mut holdings = self.lock();
        holdings.forget(Instant::now());
        if holdings.table.overlapping(prefix).any(|holding| holding.owner != *owner) {
            return false;
        }
        match holdings.table.get_mut(prefix) {
            Some(holding) => {
                holding.sessions += 1;
                holding.until = None;
            }
            None => {
                let holding = Holding { owner: owner.clone(), sessions: 1, is_broken: false, until: None };
                holdings.table.insert(prefix, holding);
            }
        }
        true
    }

    /// The session that is about to give it back was broken off: its owner may come again.
    pub(super) fn breaks(&self, prefix: IpNet) {
        if let Some(holding) = self.lock().table.get_mut(prefix) {
            holding.is_broken = true;
        }
    }

    /// One less has it.
    pub(super) fn give_back(&self, prefix: IpNet) {
        let mut holdings = self.lock();
        let Some(holding) = holdings.table.get_mut(prefix) else { return };
        holding.sessions = holding.sessions.saturating_sub(1);
        let is_broken = std::mem::take(&mut holding.is_broken);
        if holding.sessions > 0 {
            return;
        }
        if !is_broken {
            holdings.table.remove(prefix);
            return;
        }
        let until = Instant::now() + REST;
        holding.until = Some(until);
        holdings.resting.push_back((prefix, until));
        if holdings.resting.len() > MOST_RESTING {
            holdings.free_first(|_| true);
        }
    }

    /// Whether nobody has it, a part of it or more than it.
    pub(super) fn is_free(&self, prefix: IpNet) -> bool {
        let mut holdings = self.lock();
        holdings.forget(Instant::now());
        holdings.table.overlapping(prefix).next().is_none()
    }

    /// Where no address is free, the one that has rested for longest.
    pub(super) fn free_resting(&self, fits: impl Fn(IpNet) -> bool) -> Option<IpNet> {
        let mut holdings = self.lock();
        while holdings.resting.iter().any(|(prefix, _)| fits(*prefix)) {
            if let Some(freed) = holdings.free_first(&fits) {
                return Some(freed);
            }
        }
        None
    }
}

impl Holdings {
    /// Frees what has rested long enough.
    fn forget(&mut self, now: Instant) {
        while self.resting.front().is_some_and(|(_, until)| *until <= now) {
            self.free_first(|_| true);
        }
    }

    /// Frees the first that rests and fits. Those that were taken again are none.
    fn free_first(&mut self, fits: impl Fn(IpNet) -> bool) -> Option<IpNet> {
        let at = self.resting.iter().position(|(prefix, _)| fits(*prefix))?;
        let (prefix, until) = self.resting.remove(at)?;
        let is_resting = self.table.get(prefix).is_some_and(|holding| holding.until == Some(until));
        if is_resting {
            self.table.remove(prefix);
        }
        is_resting.then_some(prefix)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn no_part_of_what_is_given_is_given_to_another_until_its_last_session_is_over() {
        let given = Given::default();
        let [alice, bob] = ["alice", "bob"].map(|name| Owner::User(name.into()));
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let (network, one) = (net("10.20.0.16/28"), net("10.20.0.17/32"));
        // A session that moves has it on two devices for a while.
        assert!(given.take(network, &alice) && given.take(network, &alice) && given.take(one, &alice));
        given.give_back(one);
        for part in [one, network, net("10.20.0.0/24")] {
            assert!(!given.take(part, &bob) && !given.is_free(part), "{part}");
        }
        assert!(given.take(net("10.20.0.1/32"), &bob));
        given.give_back(network);
        assert!(!given.take(one, &bob));
        given.give_back(network);
        assert!(given.is_free(one) && given.take(one, &bob));
    }

    #[test]
    fn what_was_lost_by_a_broken_session_waits_for_its_owner() {
        let given = Given::default();
        let [alice, bob] = ["alice", "bob"].map(|name| Owner::User(name.into()));
        let one: IpNet = "10.20.0.17/32".parse().unwrap();
        let part = |is_broken| {
            if is_broken {
                given.breaks(one);
            }
            given.give_back(one);
        };
        assert!(given.take(one, &alice) && given.take(one, &alice));
        // One of two is broken off: it is hers in any case, and free when the other ends in order.
        part(true);
        part(false);
        assert!(given.take(one, &bob));
        part(true);
        assert!(!given.is_free(one) && !given.take(one, &alice) && given.take(one, &bob));
        part(true);
        assert_eq!(given.free_resting(|net| net != one), None);
        // Of the two times that it rested the first is no longer true.
        assert_eq!(given.free_resting(|net| net == one), Some(one));
        assert!(given.take(one, &alice));
        part(true);
        given.lock().forget(Instant::now() + REST);
        assert!(given.is_free(one) && given.lock().resting.is_empty());
    }

    #[test]
    fn no_more_rest_than_there_may_be() {
        let given = Given::default();
        let alice = Owner::User("alice".into());
        for number in 0..2 * MOST_RESTING as u32 {
            let one = IpNet::from(std::net::IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + number)));
            assert!(given.take(one, &alice));
            given.breaks(one);
            given.give_back(one);
        }
        let holdings = given.lock();
        assert_eq!((holdings.resting.len(), holdings.table.iter().count()), (MOST_RESTING, MOST_RESTING));
    }
}

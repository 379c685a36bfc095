//! A neighbour: its session, an enrolment in progress, and the requests that it has made.
//!
//! In: port-ids of requests. Out: whether a request is new. Never: PDUs.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use crate::auth::{Key, Role};
use crate::message::{Cookie, Nonce, Reason};

/// Number of refused requests whose answer is remembered for repetitions.
const MAX_REFUSED: usize = 256;
/// Number of port-ids below the highest one that may still arrive.
const REPLAY_WINDOW: u32 = 1024;

/// A neighbour.
#[derive(Debug, Default)]
pub(crate) struct Neighbour {
    pub(crate) session: Option<Session>,
    pub(crate) attempt: Option<Attempt>,
    /// Slots of its flows.
    pub(crate) flows: BTreeSet<u16>,
    pub(crate) scheduled: Option<Duration>,
    /// The last time at which the neighbour had a flow or an enrolment.
    pub(crate) last_used: Duration,
    /// The last time at which a hint of it started an enrolment.
    pub(crate) last_hint: Option<Duration>,
}

/// An enrolled neighbour's session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) key: Key,
    pub(crate) role: Role,
    pub(crate) nonce: Nonce,
    pub(crate) cookie: Cookie,
    pub(crate) mtu: u16,
    /// A cookie that was issued before, in microseconds, cannot replace this session.
    pub(crate) since: u64,
    pub(crate) rtt: Option<Duration>,
    /// The next port-id for a request of this node.
    pub(crate) next_port: u32,
    seen: ReplayWindow,
    /// Slots of flows that the neighbour has requested, by its port-id.
    pub(crate) requests: HashMap<u32, u16>,
    /// Requests that the application has not decided.
    pub(crate) pending: usize,
    refused: VecDeque<(u32, Reason)>,
}

impl Session {
    pub(crate) fn new(key: Key, role: Role, nonce: Nonce, cookie: Cookie, mtu: u16, since: u64) -> Self {
        Self {
            key,
            role,
            nonce,
            cookie,
            mtu,
            since,
            rtt: None,
            next_port: 0,
            seen: ReplayWindow::default(),
            requests: HashMap::new(),
            pending: 0,
            refused: VecDeque::new(),
        }
    }

    /// Whether this port-id is new. It is not new afterwards.
    pub(crate) fn is_new(&mut self, port: u32) -> bool {
        self.seen.insert(port)
    }

    pub(crate) fn refuse(&mut self, port: u32, reason: Reason) {
        if self.refused.len() == MAX_REFUSED {
            self.refused.pop_front();
        }
        self.refused.push_back((port, reason));
    }

    /// Returns why a request was refused earlier.
    pub(crate) fn refusal(&self, port: u32) -> Option<Reason> {
        self.refused.iter().find(|(one, _)| *one == port).map(|(_, reason)| *reason)
    }
}

/// An enrolment that this node has started.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) nonce: Nonce,
    /// The cookie of the responder; zero before the challenge.
    pub(crate) cookie: Cookie,
    pub(crate) tries: u32,
    pub(crate) sent: Duration,
    pub(crate) retry_at: Duration,
    pub(crate) deadline: Duration,
    /// The round trip to the responder, from a PDU that was not repeated.
    pub(crate) rtt: Option<Duration>,
}

/// The port-ids seen in a session, like the window of IPsec (RFC 4303, section 3.4.3).
#[derive(Debug, Default)]
struct ReplayWindow {
    highest: Option<u32>,
    bits: [u64; (REPLAY_WINDOW / 64) as usize],
}

impl ReplayWindow {
    fn bit(&mut self, port: u32) -> Option<(&mut u64, u64)> {
        let at = port % REPLAY_WINDOW;
        self.bits.get_mut((at / 64) as usize).map(|word| (word, 1 << (at % 64)))
    }

    /// Whether the number is new and not too old.
    fn insert(&mut self, port: u32) -> bool {
        match self.highest {
            Some(highest) => {
                let ahead = port.wrapping_sub(highest) as i32;
                if ahead <= 0 && ahead.unsigned_abs() >= REPLAY_WINDOW {
                    return false;
                }
                if ahead > 0 {
                    // Each number that enters the window clears the bit of the one that leaves it.
                    (1..=(ahead as u32).min(REPLAY_WINDOW)).for_each(|step| {
                        if let Some((word, bit)) = self.bit(port.wrapping_sub(step - 1)) {
                            *word &= !bit;
                        }
                    });
                    self.highest = Some(port);
                }
            }
            None => self.highest = Some(port),
        }
        let Some((word, bit)) = self.bit(port) else { return false };
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_number_is_new_once(start: u32, steps in proptest::collection::vec(-50i32..60, 1..200)) {
            let (mut window, mut seen) = (ReplayWindow::default(), std::collections::HashSet::new());
            let mut port = start;
            for step in steps {
                port = port.wrapping_add_signed(step);
                let is_first = seen.insert(port);
                prop_assert!(is_first || !window.insert(port), "{port} is new twice");
                window.insert(port);
                prop_assert!(!window.insert(port));
            }
        }
    }

    #[test]
    fn numbers_within_the_window_may_arrive_late() {
        let mut window = ReplayWindow::default();
        assert!(window.insert(5000) && window.insert(5000 - 1023) && window.insert(4999));
        assert!(!window.insert(5000 - 1024) && !window.insert(4999));
        assert!(window.insert(1 << 30) && !window.insert(5000));
    }
}

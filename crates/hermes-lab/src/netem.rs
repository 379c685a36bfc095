//! The emulated conditions of a link direction: rate, delay, loss, reordering, and outages.
//!
//! In: a frame's length, and when it was sent. Out: when it arrives and how often, or why it is dropped. Pure: times
//! are durations since an epoch that the links of one lab share, and random numbers are seeded, so a run can be
//! repeated.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

/// The conditions of one direction of a link.
#[derive(Clone, Debug, PartialEq)]
pub struct Conditions {
    /// Bits per second, of whole frames. `None`: unlimited.
    pub rate: Option<u64>,
    /// The size of the queue, as the longest time that a frame may wait for its transmission to begin. A frame that
    /// would wait longer is dropped.
    pub queue: Duration,
    /// Propagation delay, from the end of a frame's transmission to its arrival.
    pub one_way: Duration,
    /// The share of frames that are lost, from 0 to 1.
    pub loss: f64,
    /// The share of frames that arrive later than others by `late_by`, and so out of order.
    pub late: f64,
    /// The additional delay of the frames that `late` selects.
    pub late_by: Duration,
    /// The share of duplicated frames.
    pub twice: f64,
    /// The times at which the link is up.
    pub up: Up,
}

impl Default for Conditions {
    /// Returns the conditions of a cable: no delay, no loss and no limit of the rate.
    fn default() -> Self {
        Self {
            rate: None,
            queue: Duration::from_millis(100),
            one_way: Duration::ZERO,
            loss: 0.0,
            late: 0.0,
            late_by: Duration::ZERO,
            twice: 0.0,
            up: Up::Always,
        }
    }
}

/// The times at which a link is up. During an outage frames are dropped, but the devices stay up.
#[derive(Clone, Debug, PartialEq)]
pub enum Up {
    /// At all times.
    Always,
    /// In one slot of a cycle of slots, so that links take turns. Slot 0 begins at the epoch.
    Turns {
        /// The length of a slot.
        slot: Duration,
        /// The number of slots in a cycle.
        of: u32,
        /// The index of the link's slot, from 0.
        turn: u32,
    },
    /// In random slots, which are the same for the same seed.
    Chance {
        /// The length of a slot.
        slot: Duration,
        /// The share of slots in which the link is up, from 0 to 1.
        share: f64,
        /// The seed of the random sequence.
        seed: u64,
    },
    /// Between these times since the epoch.
    Between(Duration, Duration),
    /// In each of these intervals, in order and since the epoch; the sequence repeats after `of`.
    Listed {
        /// Start and end of each interval.
        times: Arc<[(Duration, Duration)]>,
        /// The time after which the sequence repeats.
        of: Duration,
    },
}

impl Up {
    /// Whether the link is up at this time.
    pub fn is_up(&self, at: Duration) -> bool {
        match self {
            Up::Always => true,
            &Up::Turns { slot, of, turn } => number(at, slot) % u128::from(of.max(1)) == u128::from(turn),
            &Up::Chance { slot, share, seed } => {
                let number = number(at, slot) as u64;
                SmallRng::seed_from_u64(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).random_bool(bounded(share))
            }
            Up::Between(from, to) => (*from..*to).contains(&at),
            Up::Listed { times, of } => {
                let at = Duration::from_nanos((at.as_nanos() % of.as_nanos().max(1)) as u64);
                let begun = times.partition_point(|(from, _)| *from <= at);
                times[..begun].last().is_some_and(|(_, to)| at < *to)
            }
        }
    }
}

/// Returns the index of the slot at this time.
fn number(at: Duration, slot: Duration) -> u128 {
    at.as_nanos() / slot.as_nanos().max(1)
}

fn bounded(share: f64) -> f64 {
    share.clamp(0.0, 1.0)
}

/// The reason why a frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// The link was down when the frame was sent, or before its transmission ended.
    Dark,
    /// The queue was full.
    Full,
    /// Random loss.
    Lost,
}

/// The arrival of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The time of arrival, since the epoch.
    pub at: Duration,
    /// Whether a duplicate arrives with the frame.
    pub is_double: bool,
}

/// The emulator of one direction of a link, with its queue.
#[derive(Debug)]
pub struct LinkEmulator {
    conditions: Conditions,
    /// The time at which all accepted frames are transmitted.
    busy_until: Duration,
    chance: SmallRng,
}

impl LinkEmulator {
    /// Creates the emulator of an idle direction.
    pub fn new(conditions: Conditions, seed: u64) -> Self {
        Self { conditions, busy_until: Duration::ZERO, chance: SmallRng::seed_from_u64(seed) }
    }

    /// Accepts a frame. Times must not decrease between calls.
    ///
    /// # Errors
    /// The frame is dropped.
    pub fn take(&mut self, at: Duration, length: usize) -> Result<Arrival, Dropped> {
        let conditions = &self.conditions;
        if !conditions.up.is_up(at) {
            return Err(Dropped::Dark);
        }
        let begins = self.busy_until.max(at);
        if begins - at > conditions.queue {
            return Err(Dropped::Full);
        }
        let bits = 8 * length as u128;
        let takes = conditions.rate.map_or(0, |rate| bits * 1_000_000_000 / u128::from(rate.max(1)));
        let sent = begins + Duration::from_nanos(u64::try_from(takes).unwrap_or(u64::MAX));
        // The frame uses the link even if it is lost later.
        self.busy_until = sent;
        if !conditions.up.is_up(sent) {
            return Err(Dropped::Dark);
        }
        if self.chance.random_bool(bounded(conditions.loss)) {
            return Err(Dropped::Lost);
        }
        let late = if self.chance.random_bool(bounded(conditions.late)) { conditions.late_by } else { Duration::ZERO };
        let is_double = self.chance.random_bool(bounded(conditions.twice));
        Ok(Arrival { at: sent + conditions.one_way + late, is_double })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn frames_leave_one_after_the_other_and_a_full_queue_takes_none() {
        let conditions = Conditions { rate: Some(8_000_000), queue: 2 * MS, one_way: 5 * MS, ..Conditions::default() };
        let mut emulator = LinkEmulator::new(conditions, 1);
        // A thousand bytes take a millisecond.
        let arrivals: Vec<_> = (0..5).map(|_| emulator.take(Duration::ZERO, 1000).map(|arrival| arrival.at)).collect();
        assert_eq!(arrivals, [Ok(6 * MS), Ok(7 * MS), Ok(8 * MS), Err(Dropped::Full), Err(Dropped::Full)]);
        assert_eq!(emulator.take(10 * MS, 500).map(|arrival| arrival.at), Ok(15 * MS + MS / 2));
    }

    #[test]
    fn in_turns_one_link_passes_what_is_sent_whole_in_its_slot() {
        let up = |turn| Up::Turns { slot: 1000 * MS, of: 3, turn };
        for second in 0..9 {
            let at = Duration::from_secs(second) + MS;
            assert_eq!([0, 1, 2].map(|turn| up(turn).is_up(at)), [0, 1, 2].map(|turn| second % 3 == turn));
        }
        let mut emulator =
            LinkEmulator::new(Conditions { rate: Some(8_000_000), up: up(1), ..Conditions::default() }, 1);
        assert_eq!(emulator.take(999 * MS, 1), Err(Dropped::Dark));
        assert!(emulator.take(1998 * MS, 1000).is_ok());
        // Half of the frame would be sent after the slot.
        assert_eq!(emulator.take(1999 * MS, 1500), Err(Dropped::Dark));
    }

    #[test]
    fn what_is_listed_is_up_then_and_then_again() {
        let up = Up::Listed { times: [(2 * MS, 4 * MS), (7 * MS, 8 * MS)].into(), of: 10 * MS };
        let ups: Vec<_> = (0..20).filter(|at| up.is_up(*at * MS)).collect();
        assert_eq!(ups, [2, 3, 7, 12, 13, 17]);
    }

    #[test]
    fn chance_is_as_often_as_it_is_asked_for_and_the_same_again() {
        let conditions = Conditions { loss: 0.1, late: 0.2, late_by: MS, twice: 0.3, ..Conditions::default() };
        let run = || {
            let mut emulator = LinkEmulator::new(conditions.clone(), 7);
            (0..10_000).map(|_| emulator.take(Duration::ZERO, 100)).collect::<Vec<_>>()
        };
        let taken = run();
        assert_eq!(taken, run());
        let arrived: Vec<_> = taken.iter().flatten().collect();
        let share = |count: usize, of: usize| count as f64 / of as f64;
        assert!((share(arrived.len(), taken.len()) - 0.9).abs() < 0.02);
        let late = arrived.iter().filter(|arrival| arrival.at == MS).count();
        assert!((share(late, arrived.len()) - 0.2).abs() < 0.02);
        assert!((share(arrived.iter().filter(|arrival| arrival.is_double).count(), arrived.len()) - 0.3).abs() < 0.02);
        let up = Up::Chance { slot: MS, share: 0.1, seed: 3 };
        let slots = (0..10_000).filter(|slot| up.is_up(*slot * MS)).count();
        assert!((share(slots, 10_000) - 0.1).abs() < 0.02, "{slots}");
    }
}

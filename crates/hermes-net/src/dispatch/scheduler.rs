//! Which workers get new connections (paper 003, Algorithm 1).
//!
//! In: the status of each worker, the time, parameters. Out: the selected workers as a bitmap. A worker whose loop stands still is left
//! out; then one with more connections than the others; then one with more pending events. Never: an empty selection while a
//! worker turns.

use std::time::Duration;

/// The latest status of a worker, by its own account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The time at which its loop last turned (CLOCK_MONOTONIC).
    pub turned: Duration,
    /// It waits for events, so its loop need not turn.
    pub is_parked: bool,
    /// Tasks that are woken and not yet polled.
    pub pending: u64,
    /// Open connections.
    pub connections: u64,
    /// Sessions in progress: requests, and tunnels.
    pub sessions: u64,
}

/// The parameters of the cascade.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// The time without a turn after which a worker counts as hung.
    pub hung_after: Duration,
    /// How many connections a session counts for. A neighbour brings few connections, with many sessions each.
    pub session_weight: f64,
    /// How far above the average of connections a worker may be, as a part of the average.
    pub connections_offset: f64,
    /// The same for pending events.
    pub pending_offset: f64,
}

impl Default for Parameters {
    /// Returns the defaults of the document. `connections_offset` was measured (bench/README.md); the paper has 0.5 (Figure 15).
    fn default() -> Self {
        Self { hung_after: Duration::from_millis(5), session_weight: 1.0, connections_offset: 0.2, pending_offset: 0.5 }
    }
}

/// The selected workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// One bit for each worker; the lowest one is worker 0.
    pub workers: u64,
    /// The workers whose loop turns, selected or not.
    pub turning: u64,
}

impl Selection {
    /// Adds the selection among workers whose first one has this number.
    pub fn add(&mut self, other: &Self, first: usize) {
        let shifted =
            |bits: u64| u32::try_from(first).ok().and_then(|first| bits.checked_shl(first)).unwrap_or_default();
        self.workers |= shifted(other.workers);
        self.turning |= shifted(other.turning);
    }
}

/// Selects workers. Those beyond the 64th are left out.
pub fn select(workers: &[Status], now: Duration, parameters: &Parameters) -> Selection {
    // Another thread may have stamped its turn after this one has read the clock.
    let turns = |status: &Status| status.is_parked || now.saturating_sub(status.turned) < parameters.hung_after;
    let turning = filter(u64::MAX, workers, turns);
    let load = |status: &Status| status.connections as f64 + status.sessions as f64 * parameters.session_weight;
    let few = below_average(turning, workers, parameters.connections_offset, load);
    let idle = below_average(few, workers, parameters.pending_offset, |status| status.pending as f64);
    Selection { workers: idle, turning }
}

/// The workers of a set that are below its average plus the offset, which is one at least. So the lowest one always is.
fn below_average(set: u64, workers: &[Status], offset: f64, value: impl Fn(&Status) -> f64) -> u64 {
    let members = workers.iter().enumerate().filter(|(index, _)| contains(set, *index));
    let (count, sum) = members.fold((0.0, 0.0), |(count, sum), (_, status)| (count + 1.0, sum + value(status)));
    let average = sum / f64::max(count, 1.0);
    let limit = average + (average * offset).max(1.0);
    filter(set, workers, |status| value(status) < limit)
}

fn filter(set: u64, workers: &[Status], keeps: impl Fn(&Status) -> bool) -> u64 {
    let kept = workers.iter().enumerate().filter(|(index, status)| contains(set, *index) && keeps(status));
    kept.fold(0, |bits, (index, _)| bits | 1 << index)
}

fn contains(set: u64, index: usize) -> bool {
    u32::try_from(index).ok().and_then(|index| set.checked_shr(index)).is_some_and(|rest| rest & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    /// A worker that has just turned.
    fn worker(connections: u64, pending: u64) -> Status {
        Status { turned: NOW - Duration::from_millis(1), is_parked: false, pending, connections, sessions: 0 }
    }

    fn selected(workers: &[Status]) -> u64 {
        select(workers, NOW, &Parameters::default()).workers
    }

    #[test]
    fn a_worker_that_stands_still_gets_nothing() {
        let hung = Status { turned: NOW - Duration::from_millis(20), ..worker(0, 0) };
        let parked = Status { turned: Duration::ZERO, is_parked: true, ..worker(0, 0) };
        let early = Status { turned: NOW + Duration::from_millis(1), ..worker(0, 0) };
        assert_eq!(selected(&[worker(0, 0), hung, parked, early]), 0b1101);
        let all_hung = select(&[hung, hung], NOW, &Parameters::default());
        assert_eq!(all_hung, Selection { workers: 0, turning: 0 });
    }

    #[test]
    fn each_average_is_over_those_that_passed_the_stage_before() {
        // The average of connections is 10. The third one is above 12, so that its pending events do not count.
        assert_eq!(selected(&[worker(5, 0), worker(5, 8), worker(20, 1000)]), 0b001);
        // Below the average plus one fifth.
        assert_eq!(selected(&[worker(10, 0), worker(11, 0), worker(9, 0)]), 0b111);
        assert_eq!(selected(&[worker(10, 0), worker(13, 0), worker(7, 0)]), 0b101);
    }

    #[test]
    fn few_connections_are_no_difference() {
        // The offset is one at least.
        assert_eq!(selected(&[worker(0, 0), worker(1, 0)]), 0b11);
        assert_eq!(selected(&[worker(0, 0), worker(3, 0)]), 0b01);
    }

    #[test]
    fn sessions_weigh_as_much_as_they_are_told_to() {
        let neighbour = Status { sessions: 300, ..worker(2, 0) };
        let clients = worker(40, 0);
        assert_eq!(selected(&[neighbour, clients]), 0b10);
        let parameters = Parameters { session_weight: 0.0, ..Parameters::default() };
        assert_eq!(select(&[neighbour, clients], NOW, &parameters).workers, 0b01);
    }

    #[test]
    fn somebody_is_selected_while_a_worker_turns() {
        use rand::Rng as _;
        let mut random = rand::rng();
        for _ in 0..10_000 {
            let count = random.random_range(1..=64);
            let few_or_many = |random: &mut rand::rngs::ThreadRng| {
                let most = 1_u64 << random.random_range(1..40);
                random.random_range(0..most)
            };
            let workers: Vec<Status> = (0..count)
                .map(|_| Status {
                    turned: NOW - Duration::from_millis(random.random_range(0..40)),
                    is_parked: random.random_bool(0.2),
                    pending: few_or_many(&mut random),
                    connections: few_or_many(&mut random),
                    sessions: few_or_many(&mut random),
                })
                .collect();
            let selection = select(&workers, NOW, &Parameters::default());
            assert_eq!(selection.workers == 0, selection.turning == 0, "{workers:?}");
            assert_eq!(selection.workers & !selection.turning, 0, "{workers:?}");
        }
    }

    #[test]
    fn the_offset_decides_whether_an_empty_worker_fills_up() {
        // One was replaced, beside three with 1,000 connections each. Their average is 750.
        let workers = [worker(1000, 0), worker(1000, 0), worker(1000, 0), worker(0, 0)];
        let with = |connections_offset| {
            let parameters = Parameters { connections_offset, ..Parameters::default() };
            select(&workers, NOW, &parameters).workers
        };
        assert_eq!((with(0.5), with(0.1)), (0b1111, 0b1000));
    }
}

//! Links in a row with independent random outages, and the physical limit of a download over them.
//!
//! In: the mean duration of an up time, a seed; a number of bytes, a start time. Out: the links' up times; the earliest
//! time at which a download can be complete. Pure: the same seed gives the same times.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use crate::turns::{RATE, SHARE, STEP, steady};
use crate::{Conditions, Up};

/// Ratio of the mean outage to the mean up time: a link is up a tenth of the time.
const OUTAGE_RATIO: u32 = 9;
/// The time after which the sequence repeats; longer than any run.
const PERIOD: Duration = Duration::from_secs(6 * 3600);

/// Returns the conditions of links at [`RATE`], each up a tenth of the time. Up times and outages are exponentially
/// distributed, so nothing predicts them. Each link of a seed has its own times.
pub fn random_outages(up: Duration, seed: u64) -> impl Fn(usize) -> Conditions + Copy {
    move |link| Conditions { up: times(up, seed, link), ..steady() }
}

fn times(up: Duration, seed: u64, link: usize) -> Up {
    let mut chance = SmallRng::seed_from_u64(seed ^ (link as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut draw = |mean: Duration| mean.mul_f64(-(1.0 - chance.random::<f64>()).ln());
    let mut times = Vec::new();
    let mut now = Duration::ZERO;
    while now < PERIOD {
        let from = now + draw(OUTAGE_RATIO * up);
        now = from + draw(up);
        times.push((from, now));
    }
    Up::Listed { times: Arc::from(times), of: now }
}

/// Returns the minimum duration of a download over these links, in seconds. The client's link is first, and the
/// download begins `from` after the links' epoch. The request crosses each link towards the server as soon as that link
/// is up. Then the bytes cross all links that are up at the same time towards the client, without delay at the nodes.
/// Round-trip times and losses are not counted.
///
/// `unnoticed` is the time at the start of each up time that a node cannot use, because it detects only by periodic
/// probes that the link is up. Each link must be up at some time.
pub fn limit(links: &[Conditions], bytes: u64, from: Duration, unnoticed: Duration) -> f64 {
    let is_up = |link: &Conditions, now: f64| {
        let now = Duration::from_secs_f64(now);
        link.up.is_up(now) && now.checked_sub(unnoticed).is_none_or(|before| link.up.is_up(before))
    };
    let climb = |mut now: f64, link| {
        while !is_up(link, now) {
            now += STEP;
        }
        now
    };
    let asked = links.iter().fold(from.as_secs_f64(), climb);
    // The bytes that wait at each node, from the client (index 0) to the server.
    let mut held = vec![0.0; links.len() + 1];
    held[links.len()] = bytes as f64;
    let mut now = asked;
    // Whether a link has carried all bytes and the end of the stream.
    let mut whole = vec![false; links.len()];
    while whole.first() == Some(&false) {
        for (link, conditions) in links.iter().enumerate().rev() {
            if !is_up(conditions, now) {
                continue;
            }
            let moved = held[link + 1].min(conditions.rate.unwrap_or(RATE) as f64 / 8.0 * SHARE * STEP);
            held[link + 1] -= moved;
            held[link] += moved;
            whole[link] = held[link + 1] < 0.5 && whole.get(link + 1) != Some(&false);
        }
        now += STEP;
    }
    now - from.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const UP: Duration = Duration::from_millis(300);

    #[test]
    fn a_link_is_up_a_tenth_of_the_time_and_by_its_own() {
        let links: Vec<_> = (0..8).map(random_outages(UP, 7)).collect();
        let looks = 600_000_u64;
        let at = |look: u64| Duration::from_millis(10 * look);
        let mut together = 0;
        for (number, link) in links.iter().enumerate() {
            let up = (0..looks).filter(|look| link.up.is_up(at(*look))).count() as f64;
            assert!((up / looks as f64 - 0.1).abs() < 0.02, "{number}: {up}");
            assert_eq!(link, &random_outages(UP, 7)(number));
            assert_ne!(link.up, random_outages(UP, 8)(number).up);
            together += (0..looks)
                .filter(|look| number > 0 && link.up.is_up(at(*look)) && links[0].up.is_up(at(*look)))
                .count();
        }
        // Two independent links are up together in a hundredth of the time.
        assert!((together as f64 / (7.0 * looks as f64) - 0.01).abs() < 0.004, "{together}");
    }

    /// Returns a link that is up between these seconds.
    fn up(times: &[(u64, u64)]) -> Conditions {
        let times = times.iter().map(|(from, to)| (SECOND * *from as u32, SECOND * *to as u32)).collect();
        Conditions { up: Up::Listed { times, of: 1000 * SECOND }, ..steady() }
    }

    fn limit(links: &[Conditions], bytes: u64, from: Duration) -> f64 {
        super::limit(links, bytes, from, Duration::ZERO)
    }

    fn is_about(one: f64, other: f64) -> bool {
        (one - other).abs() < 0.01
    }

    #[test]
    fn the_limit_is_what_the_times_allow() {
        let second = (RATE as f64 / 8.0 * SHARE) as u64;
        let always = up(&[(0, 1000)]);
        assert!(is_about(limit(&vec![always; 8], second, SECOND), 1.0), "over all at the same time");
        // The request moves up at 2 s and at 5 s; the response moves down at once, and over the first link at 9 s.
        let two = [up(&[(2, 3), (9, 10), (20, 30)]), up(&[(5, 7)])];
        assert!(is_about(limit(&two, 1, Duration::ZERO), 9.0));
        assert!(is_about(limit(&two, second / 2, SECOND), 8.5));
        assert!(is_about(limit(&two, second * 3 / 2, SECOND), 19.5));
        assert!(is_about(limit(&two, 0, SECOND), 8.0), "that there is nothing has to come, too");
        // No byte arrives before it is requested.
        assert!(is_about(limit(&[up(&[(0, 1), (4, 5)]), up(&[(3, 10)])], 1, Duration::ZERO), 4.0));
    }

    #[test]
    fn who_does_not_notice_at_once_has_less_of_each_time() {
        let half = |links: &[Conditions]| {
            super::limit(links, (RATE as f64 / 16.0 * SHARE) as u64, Duration::ZERO, Duration::from_millis(600))
        };
        assert!(is_about(half(&[up(&[(0, 5)])]), 0.5), "it was up before, so far as anybody knows");
        assert!(is_about(half(&[up(&[(2, 5)])]), 3.1));
        assert!(is_about(half(&[up(&[(2, 3), (7, 8)])]), 7.7));
    }

    /// Compares the result with that of [`crate::turns::limit`].
    #[test]
    fn it_is_that_of_links_in_turns_where_they_are() {
        let links: Vec<_> = (0..3).map(crate::turns::in_turns(3)).collect();
        for (bytes, phase) in [(45 << 10, 0.0), (1 << 20, 0.5), (5 << 20, 2.25)] {
            let (one, other) =
                (limit(&links, bytes, Duration::from_secs_f64(phase)), crate::turns::limit(3, bytes, 1, phase));
            assert!((one - other).abs() < 0.02, "{bytes}: {one} and not {other}");
        }
    }
}

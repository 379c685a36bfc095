//! Links in a row that are up in turns, as in the papers of docs/guide-unstable.md, and the physical limit of a
//! download over them.
//!
//! In: a number of links, a number of bytes, a start time. Out: the links' conditions; the earliest time at which a
//! download can be complete. Pure.

use std::time::Duration;

use crate::{Conditions, Up};

/// Bits per second of each link, as in the papers of docs/guide-unstable.md.
pub const RATE: u64 = 10_000_000;
/// The time for which one link is up, before the next one's turn.
pub const SLOT: Duration = Duration::from_secs(1);
/// The share of the rate that carries payload: frames of 1,514 bytes carry 1,448.
pub(crate) const SHARE: f64 = 1448.0 / 1514.0;
/// Bytes that a TLS handshake sends in its longer direction.
const HANDSHAKE: f64 = 1500.0;
/// Time step of the simulation, in seconds.
pub(crate) const STEP: f64 = 0.001;

/// Returns the conditions of a number of links in turns, each at [`RATE`]. The first link is the client's.
pub fn in_turns(of: u32) -> impl Fn(usize) -> Conditions + Copy {
    move |link| Conditions { up: Up::Turns { slot: SLOT, of, turn: link as u32 }, ..steady() }
}

/// Returns the conditions of such a link without outages.
pub fn steady() -> Conditions {
    Conditions { rate: Some(RATE), one_way: Duration::from_micros(500), ..Conditions::default() }
}

/// Returns the minimum number of seconds in which such a link carries `bytes` bytes of payload.
pub fn at_full_rate(bytes: u64) -> f64 {
    bytes as f64 * 8.0 / (RATE as f64 * SHARE)
}

/// Returns the minimum duration of a download over links in turns, in seconds. It begins `phase` seconds after a slot
/// of the client's link began. HTTP takes one round trip; a TLS handshake with the server takes one more.
pub fn limit(links: u32, bytes: u64, round_trips: u32, phase: f64) -> f64 {
    let begin = (1..round_trips).fold(phase, |now, _| down(links, up(links, now), HANDSHAKE));
    down(links, up(links, begin), bytes as f64) - phase
}

/// Returns the earliest time at which these bytes reach the client, if the server has them at `from`.
fn down(links: u32, from: f64, bytes: f64) -> f64 {
    let count = links as usize;
    // The bytes that wait at each node, from the client (index 0) to the server.
    let mut held = vec![0.0; count + 1];
    held[count] = bytes;
    let (mut now, each) = (from, RATE as f64 / 8.0 * SHARE * STEP);
    while held[0] < bytes - 0.5 {
        let up = now.rem_euclid(f64::from(links)) as usize;
        let moved = held[up + 1].min(each);
        held[up + 1] -= moved;
        held[up] += moved;
        now += STEP;
    }
    now
}

/// Returns the time at which a message that the client sends at `from` reaches the server.
fn up(links: u32, from: f64) -> f64 {
    (0..links).fold(from, |now, link| {
        let turn = now.rem_euclid(f64::from(links));
        let wait = (f64::from(link) - turn).rem_euclid(f64::from(links));
        if turn >= f64::from(link) && turn < f64::from(link + 1) { now } else { now + wait }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed independently by another program: 45 KB, 500 KB, 1 MB and 5 MB, with one round trip and with two.
    #[test]
    fn the_limit_is_what_was_computed_before() {
        let mean = |size, round_trips| {
            (0..30).map(|number| limit(3, size, round_trips, 0.05 + 0.1 * f64::from(number))).sum::<f64>() / 30.0
        };
        let known = [(45 << 10, 6.54, 12.5), (500 << 10, 6.93, 12.9), (1 << 20, 7.37, 13.4), (5 << 20, 18.85, 24.9)];
        for (size, plain, connect) in known {
            let (one, two) = (mean(size, 1), mean(size, 2));
            assert!((one - plain).abs() < 0.06, "{size}: {one} and not {plain}");
            assert!((two - connect).abs() < 0.1, "{size}: {two} and not {connect}");
        }
    }

    #[test]
    fn each_link_has_its_turn_and_no_two_at_once() {
        let links: Vec<_> = (0..3).map(in_turns(3)).collect();
        for tenth in 0..60 {
            let at = Duration::from_millis(100 * tenth + 50);
            let up: Vec<_> = (0..3).filter(|link| links[*link].up.is_up(at)).collect();
            assert_eq!(up, [tenth as usize / 10 % 3]);
        }
    }
}

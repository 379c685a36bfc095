//! Backoff between attempts.
//!
//! In: failed attempts in a row, the origin's `Retry-After`, the remaining time. Out: a pause. Pure; the caller
//! provides the random number.

use std::time::Duration;

/// Maximum of the first pause; it doubles.
const BASE: Duration = Duration::from_millis(200);
/// Maximum jitter beyond `Retry-After`, because all refused clients have received the same value.
const MAX_JITTER: Duration = Duration::from_secs(1);

/// The pause before the next attempt. `fruitless` attempts in a row brought no byte. `most` limits pauses that the
/// origin does not demand. `dice` is a random number from 0 to 1.
pub fn pause(fruitless: u32, after: Option<Duration>, left: Duration, most: Duration, dice: f64) -> Duration {
    let ceiling = BASE.saturating_mul(1 << fruitless.min(16)).min(most);
    // Full jitter: clients that failed together must not return together.
    let jitter = ceiling.mul_f64(dice);
    let wanted = match after {
        Some(after) => after.saturating_add(jitter.min(MAX_JITTER)).max(jitter),
        None => jitter,
    };
    // An attempt just before the deadline is better than none, whatever the origin demands.
    wanted.min(left.mul_f64(0.9))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);
    const MAX_PAUSE: Duration = Duration::from_secs(30);

    #[test]
    fn pauses_grow_up_to_a_ceiling_and_are_anywhere_below_it() {
        assert_eq!(pause(0, None, LONG, MAX_PAUSE, 1.0), BASE);
        assert_eq!(pause(3, None, LONG, MAX_PAUSE, 1.0), BASE * 8);
        assert_eq!(pause(3, None, LONG, MAX_PAUSE, 0.25), BASE * 2);
        assert_eq!(pause(60, None, LONG, MAX_PAUSE, 1.0), MAX_PAUSE);
        assert_eq!(pause(60, None, LONG, MAX_PAUSE, 0.0), Duration::ZERO);
    }

    #[test]
    fn what_the_origin_says_is_kept_but_not_beyond_the_deadline() {
        let said = Some(Duration::from_secs(7));
        assert_eq!(pause(0, said, LONG, MAX_PAUSE, 0.0), Duration::from_secs(7));
        assert_eq!(pause(0, said, LONG, MAX_PAUSE, 1.0), Duration::from_secs(7) + BASE);
        assert_eq!(pause(9, said, LONG, MAX_PAUSE, 1.0), MAX_PAUSE, "it may ask for less than we would do");
        let hostile = Some(Duration::from_secs(u64::MAX));
        assert_eq!(pause(0, hostile, Duration::from_secs(10), MAX_PAUSE, 0.5), Duration::from_secs(9));
    }
}

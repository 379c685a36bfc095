//! How long to wait between tries.
//!
//! In: how many tries in a row brought nothing, what the origin asked for, the time that is left. Out: a pause. Pure: the
//! dice are the caller's.

use std::time::Duration;

/// The ceiling of the first pause; it doubles.
const BASE: Duration = Duration::from_millis(200);
/// What is added to a time that an origin said, at the most: all that it turned away have heard the same.
const SPREAD: Duration = Duration::from_secs(1);

/// A pause before the next try. `fruitless` tries in a row brought no byte; `most` is the ceiling of all pauses that
/// the origin does not ask for; `dice` is from 0 to 1.
pub fn pause(fruitless: u32, after: Option<Duration>, left: Duration, most: Duration, dice: f64) -> Duration {
    let ceiling = BASE.saturating_mul(1 << fruitless.min(16)).min(most);
    // Anywhere below the ceiling: who failed together shall not come back together.
    let jitter = ceiling.mul_f64(dice);
    let wanted = match after {
        Some(after) => after.saturating_add(jitter.min(SPREAD)).max(jitter),
        None => jitter,
    };
    // A try at the last moment is worth more than none, whatever the origin said.
    wanted.min(left.mul_f64(0.9))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);
    const MOST: Duration = Duration::from_secs(30);

    #[test]
    fn pauses_grow_up_to_a_ceiling_and_are_anywhere_below_it() {
        assert_eq!(pause(0, None, LONG, MOST, 1.0), BASE);
        assert_eq!(pause(3, None, LONG, MOST, 1.0), BASE * 8);
        assert_eq!(pause(3, None, LONG, MOST, 0.25), BASE * 2);
        assert_eq!(pause(60, None, LONG, MOST, 1.0), MOST);
        assert_eq!(pause(60, None, LONG, MOST, 0.0), Duration::ZERO);
    }

    #[test]
    fn what_the_origin_says_is_kept_but_not_beyond_the_deadline() {
        let said = Some(Duration::from_secs(7));
        assert_eq!(pause(0, said, LONG, MOST, 0.0), Duration::from_secs(7));
        assert_eq!(pause(0, said, LONG, MOST, 1.0), Duration::from_secs(7) + BASE);
        assert_eq!(pause(9, said, LONG, MOST, 1.0), MOST, "it may ask for less than we would do");
        let hostile = Some(Duration::from_secs(u64::MAX));
        assert_eq!(pause(0, hostile, Duration::from_secs(10), MOST, 0.5), Duration::from_secs(9));
    }
}

//! Polls a condition that nothing announces.
//!
//! In: the name of the condition, and a check. Out: returns once the check succeeds. Bounded: after a timeout the test
//! fails with the name.

use std::time::{Duration, Instant};

use crate::overlay::EFFECT_TIMEOUT;

/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Polls until the check succeeds.
///
/// # Panics
/// The check does not succeed within [`EFFECT_TIMEOUT`].
pub async fn until<F: Future<Output = bool>>(what: &str, mut look: impl FnMut() -> F) {
    let deadline = Instant::now() + EFFECT_TIMEOUT;
    while !look().await {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

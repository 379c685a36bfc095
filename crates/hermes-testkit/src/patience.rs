//! Waiting for something to become so, where nothing tells of it: look, and look again.
//!
//! In: what is waited for, in words, and a look. Out: once the look is satisfied. Bounded: what does not become so in
//! time fails the test, in those words.

use std::time::{Duration, Instant};

use crate::overlay::PATIENCE;

/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Looks until it is so.
///
/// # Panics
/// When it is not so within [`PATIENCE`].
pub async fn until<F: Future<Output = bool>>(what: &str, mut look: impl FnMut() -> F) {
    let deadline = Instant::now() + PATIENCE;
    while !look().await {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

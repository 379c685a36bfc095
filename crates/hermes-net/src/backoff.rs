//! Exponential back-off for repeated actions; resets after a quiet period.
//!
//! In: each run of the action. Out: the time at which it may run next. The first run is immediate. Never: the action
//! itself.

use std::time::Duration;

use tokio::time::Instant;

/// A back-off between a minimum and a maximum delay.
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    pause: Duration,
    next: Option<Instant>,
}

impl Backoff {
    /// Creates a back-off whose delays double from `first` up to `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, pause: first, next: None }
    }

    /// Waits until the action may run.
    pub async fn due(&self) {
        if let Some(next) = self.next {
            tokio::time::sleep_until(next).await;
        }
    }

    /// Returns the time at which the action may run next. `None` if it has not run yet.
    pub const fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Whether the action may run now.
    pub fn is_due(&self) -> bool {
        self.next.is_none_or(|next| Instant::now() >= next)
    }

    /// Records a run. Returns the delay until the next one.
    pub fn begin(&mut self) -> Duration {
        let now = Instant::now();
        // The first run after a quiet period starts with the minimum again.
        let is_alone = self.next.is_none_or(|next| now > next + self.pause);
        self.pause = if is_alone { self.first } else { (self.pause * 2).min(self.longest) };
        self.next = Some(now + self.pause);
        self.pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_and_begin_anew_where_it_was_left_alone() {
        let second = Duration::from_secs(1);
        let mut backoff = Backoff::new(second, 5 * second);
        let mut pauses = Vec::new();
        for _ in 0..5 {
            let before = Instant::now();
            backoff.due().await;
            pauses.push(before.elapsed().as_secs());
            backoff.begin();
        }
        assert_eq!(pauses, [0, 1, 2, 4, 5]);
        tokio::time::sleep(11 * second).await;
        assert_eq!(backoff.begin(), second);
    }
}

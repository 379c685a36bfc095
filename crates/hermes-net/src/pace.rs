//! How soon something may be done again that is called for time after time: at once the first time, then after pauses
//! that grow, until it was left alone for a while.
//!
//! In: each time that it is done. Out: when it may be done next. Never: what it is.

use std::time::Duration;

use tokio::time::Instant;

/// A pace, from a shortest pause to a longest.
#[derive(Debug)]
pub struct Pace {
    first: Duration,
    longest: Duration,
    pause: Duration,
    next: Option<Instant>,
}

impl Pace {
    /// Nothing was done yet.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, pause: first, next: None }
    }

    /// Waits until it may be done.
    pub async fn due(&self) {
        if let Some(next) = self.next {
            tokio::time::sleep_until(next).await;
        }
    }

    /// When it may be done next; `None`: at once.
    pub const fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Whether it may be done now.
    pub fn is_due(&self) -> bool {
        self.next.is_none_or(|next| Instant::now() >= next)
    }

    /// It is being done. Returns how long the next time has to wait.
    pub fn begin(&mut self) -> Duration {
        let now = Instant::now();
        // Long after the last time it is an occasion of its own.
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
        let mut pace = Pace::new(second, 5 * second);
        let mut pauses = Vec::new();
        for _ in 0..5 {
            let before = Instant::now();
            pace.due().await;
            pauses.push(before.elapsed().as_secs());
            pace.begin();
        }
        assert_eq!(pauses, [0, 1, 2, 4, 5]);
        tokio::time::sleep(11 * second).await;
        assert_eq!(pace.begin(), second);
    }
}

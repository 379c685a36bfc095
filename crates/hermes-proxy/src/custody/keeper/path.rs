//! The path of a connection over TCP, and whether it is dark.
//!
//! In: what the kernel knows of what was sent. Out: whether that was lost. Never: a byte of its own.

use hermes_net::tcp::Acks;
use tokio::time::Instant;

use super::{BEACON, DARK, TRIPS};

/// A connection whose path is watched.
pub(super) struct Path {
    acks: Acks,
    /// Since when something is owed, and what had been acknowledged then.
    owed: Option<(Instant, u64)>,
}

impl Path {
    pub(super) fn new(acks: Acks) -> Self {
        Self { acks, owed: None }
    }

    /// Whether what is owed was lost in the dark; and whether anything is owed at all.
    pub(super) fn look(&mut self) -> (bool, bool) {
        let Ok(seen) = self.acks.look() else { return (true, true) };
        if seen.owed_for.is_none() {
            self.owed = None;
            return (false, false);
        }
        let now = Instant::now();
        let since = match self.owed {
            Some((since, acknowledged)) if acknowledged == seen.acknowledged => since,
            _ => {
                self.owed = Some((now, seen.acknowledged));
                now
            }
        };
        (now - since >= DARK.max(TRIPS * seen.rtt), true)
    }

    /// Ready when it is dark.
    pub(super) async fn darkness(&mut self) {
        let mut look = tokio::time::interval(BEACON);
        while !self.look().0 {
            look.tick().await;
        }
    }
}

//! How long and how often: every number of the benchmark that is a choice.
//!
//! In: `--quick` and `--rounds`. Out: [`Settings`], written into each result file.

use serde::Serialize;

use crate::Options;

/// Payload of a request or an echo, in bytes.
pub(crate) const PAYLOAD: usize = 128;
/// Payload of a datagram in the rate test, in bytes.
pub(crate) const DATAGRAM: usize = 1200;
/// Clients that stay idle in the memory test.
pub(crate) const IDLE_CLIENTS: usize = 1000;
/// Round-trip time between the proxies in the delayed test, in milliseconds.
pub(crate) const RTT_MS: u64 = 20;
/// Accept queue of the Python server: what `asyncio` and most Python servers ask for.
pub(crate) const PYTHON_BACKLOG: usize = 100;

/// Lengths and counts.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Settings {
    /// Times that everything is repeated, contenders in turn.
    pub(crate) rounds: usize,
    /// Rounds of the delayed test, whose bursts take seconds.
    pub(crate) delayed_rounds: usize,
    /// Single requests a round, case and contender.
    pub(crate) singles: usize,
    /// Concurrent one-shot clients.
    pub(crate) clients: Vec<usize>,
    /// Bursts a round at each number of clients.
    pub(crate) bursts: usize,
    /// Unmeasured time of a throughput measurement, in milliseconds.
    pub(crate) warmup_ms: u64,
    /// Measured time of it, in milliseconds.
    pub(crate) window_ms: u64,
}

impl Settings {
    /// The settings that `options` ask for.
    pub(crate) fn new(options: &Options) -> Self {
        let mut settings = if options.quick { Self::quick() } else { Self::whole() };
        if let Some(rounds) = options.rounds {
            (settings.rounds, settings.delayed_rounds) = (rounds, rounds);
        }
        settings
    }

    fn whole() -> Self {
        Self {
            rounds: 5,
            delayed_rounds: 3,
            singles: 1000,
            clients: vec![200, 400, 600, 800, 1000],
            bursts: 2,
            warmup_ms: 500,
            window_ms: 2000,
        }
    }

    fn quick() -> Self {
        Self {
            rounds: 1,
            delayed_rounds: 1,
            singles: 200,
            clients: vec![200, 1000],
            bursts: 1,
            warmup_ms: 300,
            window_ms: 700,
        }
    }
}

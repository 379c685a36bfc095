//! The settings: all durations and counts that the benchmark chooses.
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
/// The accept queue of the Python server: the value of `asyncio` and most Python servers. With the 5 of `socketserver`
/// a hundred concurrent clients already lose connections permanently, which the paper did not observe.
pub(crate) const PYTHON_BACKLOG: usize = 100;

/// Lengths and counts.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Settings {
    /// Rounds of `figure10` and `memory`: proxies are started anew in each.
    pub(crate) rounds: usize,
    /// Rounds of `throughput` and `tunnels`: many and short, since only measurements that are close in time are
    /// compared.
    pub(crate) window_rounds: usize,
    /// Rounds of the delayed test, whose bursts take seconds.
    pub(crate) delayed_rounds: usize,
    /// Single requests a round, case and contender.
    pub(crate) singles: usize,
    /// The same in the delayed test, where each takes at least 20 ms.
    pub(crate) delayed_singles: usize,
    /// Concurrent one-shot clients.
    pub(crate) clients: Vec<usize>,
    /// Unmeasured time of a throughput measurement, in milliseconds.
    pub(crate) warmup_ms: u64,
    /// Measured time of a throughput measurement, in milliseconds.
    pub(crate) window_ms: u64,
}

impl Settings {
    /// The settings that `options` ask for.
    pub(crate) fn new(options: &Options) -> Self {
        let mut settings = if options.quick { Self::quick() } else { Self::whole() };
        if let Some(rounds) = options.rounds {
            (settings.rounds, settings.window_rounds, settings.delayed_rounds) = (rounds, rounds, rounds);
        }
        settings
    }

    fn whole() -> Self {
        Self {
            rounds: 5,
            window_rounds: 9,
            delayed_rounds: 3,
            singles: 500,
            delayed_singles: 20,
            clients: vec![200, 400, 600, 800, 1000],
            warmup_ms: 300,
            window_ms: 1000,
        }
    }

    fn quick() -> Self {
        Self {
            rounds: 1,
            window_rounds: 1,
            delayed_rounds: 1,
            singles: 200,
            delayed_singles: 10,
            clients: vec![200, 1000],
            warmup_ms: 300,
            window_ms: 600,
        }
    }
}

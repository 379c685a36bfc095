//! A series of clients, one after another: the latency of a single request without other load.
//!
//! In: an exchange and how often. Out: mean, deviation, median and 99th percentile. Each client is new: it opens its
//! own connection (or flow) and closes it, as Table IX's do; the proxies between are warm.

use std::time::Instant;

use super::{Exchange, Outcome, exchange::Client, outcome::Recorder, window::Window};
use crate::Result;

pub(super) async fn run(exchange: &Exchange, count: usize, warmup: usize, watch: &[u32]) -> Result<Outcome> {
    let client = Client::new(exchange)?;
    let mut unmeasured = Recorder::default();
    for number in 0..warmup {
        once(&client, number as u64, &mut unmeasured).await?;
    }
    let mut recorder = Recorder::default();
    let window = Window::open(watch);
    for number in 0..count {
        once(&client, (warmup + number) as u64, &mut recorder).await?;
    }
    let mut outcome = recorder.outcome();
    window.close(&mut outcome);
    // A failure before the measured time is a failure none the less.
    for (kind, failures) in unmeasured.outcome().failures {
        outcome.failed += failures;
        *outcome.failures.entry(format!("{kind} (warm-up)")).or_default() += failures;
    }
    Ok(outcome)
}

async fn once(client: &Client, number: u64, recorder: &mut Recorder) -> Result<()> {
    let prepared = client.prepare().await?;
    let began = Instant::now();
    let result = client.exchange(prepared, number).await;
    recorder.record(result.map(|_closed_now| began.elapsed()));
    Ok(())
}

//! Many clients at the same instant, each its own: Figure 10.
//!
//! In: an exchange and how many clients. Out: the completion times, from the common instant (`latency`) and from the
//! moment at which each client's own first system call was made (`own_latency`). Sockets are opened before the
//! instant; connections are not.

use std::{cell::Cell, rc::Rc, time::Instant};

use tokio::{sync::watch, task::JoinSet};

use super::{
    Exchange, Outcome,
    exchange::{Client, PreparedSocket},
    outcome::{Failure, Recorder},
    window::Window,
};
use crate::Result;

struct Finished {
    since_instant: std::time::Duration,
    since_own: std::time::Duration,
    failure: Option<Failure>,
}

pub(super) async fn run(exchange: &Exchange, clients: usize, watched: &[u32]) -> Result<Outcome> {
    let client = Rc::new(Client::new(exchange)?);
    let (start, waiting) = watch::channel(None);
    let waiting_clients = Rc::new(Cell::new(0));
    let mut tasks = JoinSet::new();
    for number in 0..clients {
        let prepared = client.prepare().await?;
        let (client, start, counter) = (Rc::clone(&client), waiting.clone(), Rc::clone(&waiting_clients));
        tasks.spawn_local(async move {
            counter.set(counter.get() + 1);
            one(&client, prepared, number as u64, start).await
        });
    }
    // Every client is ready before the common instant.
    while waiting_clients.get() < clients {
        tokio::task::yield_now().await;
    }
    let window = Window::open(watched);
    start.send_replace(Some(Instant::now()));
    let (mut common, mut own) = (Recorder::default(), Recorder::default());
    while let Some(finished) = tasks.join_next().await {
        match finished {
            Ok(Finished { failure: Some(failure), .. }) => common.failure(&failure),
            Ok(finished) => {
                common.success(finished.since_instant);
                own.success(finished.since_own);
            }
            Err(_) => common.failure(&Failure::Malformed("a client's task broke")),
        }
    }
    let mut outcome = common.outcome();
    outcome.own_latency = own.latency();
    window.close(&mut outcome);
    Ok(outcome)
}

async fn one(
    client: &Client,
    prepared: PreparedSocket,
    number: u64,
    mut start: watch::Receiver<Option<Instant>>,
) -> Finished {
    // The sender outlives all clients, so the wait cannot fail; without an instant there is nothing to measure.
    let instant = start.wait_for(Option::is_some).await.ok().and_then(|i| *i).unwrap_or_else(Instant::now);
    let began = Instant::now();
    let result = client.exchange(prepared, number).await;
    let finished = Instant::now();
    Finished {
        since_instant: finished - instant,
        since_own: finished - began,
        // The connection, kept until here, closes now: after the answer, as a client does.
        failure: result.err(),
    }
}

//! A surge of requests on connections that were idle: where they ended up, nobody can change any more.
//!
//! In: how many clients connect and how fast, their idle time, and the requests of the surge. Out: the latency of each response in the
//! surge. Never: a new connection in the surge.

use std::time::{Duration, Instant};

use rand::{SeedableRng as _, rngs::SmallRng};
use tokio::task::JoinSet;

use super::{
    Load, Outcome,
    arrivals::{RESPONSE, connect, request},
    exchange::RESPONSE_TIMEOUT,
    outcome::{Failure, Recorder},
    window::Window,
};
use crate::Result;

pub(super) async fn run(load: &Load, watch: &[u32]) -> Result<Outcome> {
    let Load::Surge { address, clients, rate, idle, requests, work } = load else {
        unreachable!("dispatched by kind");
    };
    let mut all = Recorder::default();
    let mut connections = Vec::new();
    let mut random = SmallRng::seed_from_u64(0);
    let begun = Instant::now();
    for number in 0..*clients {
        tokio::time::sleep_until((begun + Duration::from_secs_f64(number as f64 / rate)).into()).await;
        let opened = async {
            let mut connection = connect(*address, &mut random).await?;
            connection.get(&request("none"), RESPONSE).await?;
            Ok(connection)
        };
        match opened.await {
            Ok(connection) => connections.push(connection),
            Err(failure) => all.failure(&failure),
        }
    }
    tokio::time::sleep(Duration::from_millis(*idle)).await;
    let window = Window::open(watch);
    let mut tasks = JoinSet::new();
    for mut connection in connections {
        let (request, count) = (request(work), *requests);
        tasks.spawn_local(async move {
            let mut recorder = Recorder::default();
            for _ in 0..count {
                let begun = Instant::now();
                let response = tokio::time::timeout(RESPONSE_TIMEOUT, connection.get(&request, RESPONSE)).await;
                let result = response.unwrap_or(Err(Failure::Timeout));
                let is_over = result.is_err();
                recorder.record(result.map(|()| begun.elapsed()));
                if is_over {
                    break;
                }
            }
            recorder
        });
    }
    while let Some(client) = tasks.join_next().await {
        match client {
            Ok(recorder) => all.absorb(recorder),
            Err(_) => all.failure(&Failure::Malformed("a client's task broke")),
        }
    }
    let mut outcome = all.outcome();
    window.close(&mut outcome);
    Ok(outcome)
}

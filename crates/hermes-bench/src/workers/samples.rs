//! Looks at the workers of a proxy while a load runs.
//!
//! In: a running proxy. Out: how evenly CPU time and connections are spread over its workers. Never: a pause of the load.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use hermes_testkit::process::Running;

use super::contenders::{ADMIN, Contender, Place};
use crate::pep::mean_and_median;
use crate::relay::client::ended;

/// The figures of a round by name.
pub(super) type Figures = BTreeMap<&'static str, f64>;

/// Time between two looks at the workers.
const INTERVAL: Duration = Duration::from_secs(1);

/// Looks at the workers after a time, for some seconds, and adds the means of what it sees to the figures.
pub(super) fn take(
    place: &Place<'_>,
    proxy: &Running,
    contender: Contender,
    (after, seconds): (Duration, u64),
    figures: &mut Figures,
) -> Result<()> {
    pause(after);
    let mut seen: Vec<Figures> = Vec::new();
    let mut before = worker_times(proxy.pid(), place.workers)?;
    let mut asked = Instant::now();
    let mut scheduled = None;
    for _ in 0..seconds {
        pause(INTERVAL);
        let now = worker_times(proxy.pid(), place.workers)?;
        let passed = asked.elapsed().as_secs_f64();
        asked = Instant::now();
        let shares: Vec<f64> = now.iter().zip(&before).map(|(now, before)| (now - before) / passed * 100.0).collect();
        before = now;
        let mut look = Figures::from([("cpu_sd", deviation(&shares))]);
        if let Contender::Hermes(_) = contender {
            let workers = workers_of(place)?;
            let each = |field: &str| workers.iter().filter_map(|worker| worker[field].as_f64()).collect::<Vec<f64>>();
            let connections = each("connections");
            look.insert("conn_sd", deviation(&connections));
            let most = connections.iter().copied().fold(0.0, f64::max);
            look.insert("conn_max", most);
            // The share of connections that end if this worker breaks.
            look.insert("conn_max_share", most / connections.iter().sum::<f64>().max(1.0));
            look.insert("selected", workers.iter().filter(|worker| worker["selected"] == true).count() as f64);
            let selections: f64 = each("selections").iter().sum();
            if let Some(before) = scheduled.replace(selections) {
                look.insert("selections_s", (selections - before) / passed);
            }
        }
        seen.push(look);
    }
    let names: Vec<&'static str> = seen.last().into_iter().flat_map(|look| look.keys().copied()).collect();
    for name in names {
        let values: Vec<f64> = seen.iter().filter_map(|look| look.get(name).copied()).collect();
        figures.insert(name, mean_and_median(&values).0);
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "the thread has nothing else to do")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// The standard deviation.
fn deviation(values: &[f64]) -> f64 {
    let mean = mean_and_median(values).0;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / values.len().max(1) as f64).sqrt()
}

/// CPU seconds of each worker of a process.
fn worker_times(pid: u32, workers: usize) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = entry?.path();
        let name = std::fs::read_to_string(path.join("comm"))?;
        // Workers of Hermes and Envoy have names; those of HAProxy are all its threads.
        if ["worker-", "wrk:", "haproxy"].iter().any(|prefix| name.starts_with(prefix)) {
            let times_of = std::fs::read_to_string(path.join("schedstat"))?;
            let nanoseconds: f64 = times_of.split_whitespace().next().context("schedstat")?.parse()?;
            times.push((name, path, nanoseconds * 1e-9));
        }
    }
    times.sort_by(|(_, one, _), (_, other, _)| one.cmp(other));
    times.truncate(workers);
    Ok(times.into_iter().map(|(_, _, time)| time).collect())
}

/// The workers of Hermes, as `/workers` lists them.
fn workers_of(place: &Place<'_>) -> Result<Vec<serde_json::Value>> {
    let asked = place.namespace.spawn_thread(|| -> Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, ADMIN))?;
        stream.write_all(b"GET /workers HTTP/1.0\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })?;
    let text = ended(asked)?;
    let (_, body) = text.split_once("\r\n\r\n").context("no response of /workers")?;
    let status: serde_json::Value = serde_json::from_str(body).context("/workers")?;
    Ok(status["workers"].as_array().context("/workers has no list")?.clone())
}

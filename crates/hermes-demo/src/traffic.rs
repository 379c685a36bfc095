//! Real traffic of four kinds, sent into the overlay as ordinary programs would send it.
//!
//! In: the listeners of the laptop's node. Out: for each kind the amount of traffic and the duration of an exchange.
//! Every received byte is compared with the expected one; the first difference or failure ends the demo.

mod byte_streams;
mod datagrams;
mod web;

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use tokio::task::JoinSet;

use super::terminal::Progress;

/// Clients of a kind at once.
const CLIENTS: u64 = 4;

/// The traffic of one kind.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Carried {
    /// `http`, `https`, `tcp` or `udp`.
    pub(crate) kind: &'static str,
    /// The target that the program requested.
    pub(crate) asked_for: String,
    /// The protocol that carried it between nodes.
    pub(crate) carried_as: &'static str,
    /// The unit of `exchanges`.
    pub(crate) unit: &'static str,
    /// The number of exchanges.
    pub(crate) exchanges: u64,
    /// Bytes that were compared, there and back.
    pub(crate) bytes: u64,
    /// Median of a small exchange, there and back, in microseconds.
    pub(crate) median_us: u64,
}

/// The results of one client.
#[derive(Debug, Default)]
struct Tally {
    exchanges: u64,
    bytes: u64,
    times: Vec<Duration>,
}

impl Tally {
    fn add(&mut self, bytes: usize) {
        self.exchanges += 1;
        self.bytes += bytes as u64;
    }

    fn merge(&mut self, mut other: Self) {
        self.exchanges += other.exchanges;
        self.bytes += other.bytes;
        self.times.append(&mut other.times);
    }

    fn median_us(&mut self) -> u64 {
        self.times.sort_unstable();
        let middle = self.times.get(self.times.len() / 2).copied().unwrap_or_default();
        u64::try_from(middle.as_micros()).unwrap_or(u64::MAX)
    }
}

/// The listeners that programs connect to.
#[derive(Clone, Copy)]
pub(crate) struct Entrances<'a> {
    /// HTTP.
    pub(crate) apps: SocketAddr,
    /// TCP for the database.
    pub(crate) database: SocketAddr,
    /// UDP for the call.
    pub(crate) call: SocketAddr,
    /// The CA that the bank's clients know; no node does.
    pub(crate) bank_ca: &'a Path,
}

/// Drives all four kinds, one after the other.
///
/// # Errors
/// The kind that failed, and how.
pub(crate) async fn drive(entrances: &Entrances<'_>, progress: &Progress) -> anyhow::Result<Vec<Carried>> {
    let Entrances { apps, database, call, bank_ca } = *entrances;
    let mut carried = Vec::new();
    progress.step("HTTP by name: http://SHOP/");
    let mut tally = together(|client| web::by_name(apps, client)).await.context("HTTP by name failed")?;
    carried.push(Carried {
        kind: "HTTP",
        asked_for: "http://SHOP/".to_owned(),
        carried_as: "HTTP/2 request",
        unit: "requests",
        exchanges: tally.exchanges,
        bytes: tally.bytes,
        median_us: tally.median_us(),
    });
    progress.step("HTTPS, encrypted from end to end: https://BANK/");
    let tls = web::bank_tls(bank_ca)?;
    let mut tally = together(|client| web::end_to_end(apps, tls.clone(), client)).await.context("HTTPS failed")?;
    carried.push(Carried {
        kind: "HTTPS",
        asked_for: "https://BANK/".to_owned(),
        carried_as: "CONNECT, TLS inside",
        unit: "requests",
        exchanges: tally.exchanges,
        bytes: tally.bytes,
        median_us: tally.median_us(),
    });
    progress.step("TCP: DB:5432");
    let mut tally = together(|client| byte_streams::echo(database, client)).await.context("TCP failed")?;
    carried.push(Carried {
        kind: "TCP",
        asked_for: format!("DB:5432, port {}", database.port()),
        carried_as: "CONNECT",
        unit: "messages",
        exchanges: tally.exchanges,
        bytes: tally.bytes,
        median_us: tally.median_us(),
    });
    progress.step("UDP: CALL:5004");
    let mut tally = together(|client| datagrams::echo(call, client)).await.context("UDP failed")?;
    carried.push(Carried {
        kind: "UDP",
        asked_for: format!("CALL:5004, port {}", call.port()),
        carried_as: "CONNECT-UDP",
        unit: "datagrams",
        exchanges: tally.exchanges,
        bytes: tally.bytes,
        median_us: tally.median_us(),
    });
    Ok(carried)
}

/// Runs clients at once; the first failure ends them all.
async fn together<F>(client: impl Fn(u64) -> F) -> anyhow::Result<Tally>
where
    F: Future<Output = anyhow::Result<Tally>> + Send + 'static,
{
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(client(number));
    }
    let mut all = Tally::default();
    while let Some(done) = clients.join_next().await {
        all.merge(done??);
    }
    Ok(all)
}

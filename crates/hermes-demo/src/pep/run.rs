//! The measurements of the case.
//!
//! In: the options. Out: for each way the times of requests, the rate of downloads, and what both ends saw. The ways take
//! turns, so that all have the same share of a machine's slower moments. Never: a download that is not compared.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use hermes_lab::Conditions;
use http::Method;
use tokio::net::TcpStream;

use super::Options;
use super::lab::{self, CLOSED, Lab};
use super::nodes;
use super::way::Way;
use crate::client::Client;
use crate::content::{MAX_BYTES, content};
use crate::program::{Program, last_words};
use crate::terminal::Progress;

/// Requests between two changes of the way.
const TURN: u32 = 10;
/// Downloads over cables on each way.
const CABLE_DOWNLOADS: u64 = 5;
/// The download over the path that loses packets, in bytes.
pub(super) const LOSSY_BYTES: usize = 2 << 20;
/// The longest download over it.
const LOSSY_TIMEOUT: Duration = Duration::from_secs(120);
/// One way delays of the path that loses packets: the client's link and the two others.
const NEAR_DELAY: Duration = Duration::from_micros(2500);
const FAR_DELAY: Duration = Duration::from_micros(23_750);
pub(super) const LOSS: f64 = 0.01;
const RATE: u64 = 100_000_000;

/// The measurements of one way.
#[derive(Debug, Default)]
pub(super) struct Measured {
    /// Milliseconds of requests on a persistent connection, and with a connection of their own.
    pub(super) persistent_ms: Vec<f64>,
    pub(super) own_connection_ms: Vec<f64>,
    /// Seconds of downloads of [`MAX_BYTES`] over cables, and of [`LOSSY_BYTES`] over the path that loses packets.
    pub(super) cable_s: Vec<f64>,
    pub(super) lossy_s: Vec<f64>,
    /// The server sees the address of the client.
    pub(super) shows_client: bool,
}

/// Everything that was measured.
pub(super) struct Played {
    pub(super) ways: BTreeMap<Way, Measured>,
    /// A client was refused where the server refuses.
    pub(super) is_refusal_passed: bool,
}

/// Runs the case.
///
/// # Errors
/// A program does not start, or something did not arrive intact; the error has the last words of the programs.
pub(super) async fn play(options: &Options, directory: &Path, progress: &Progress) -> anyhow::Result<Played> {
    progress.step("client, two routers and a server: four namespaces and their programs start");
    let lab = Lab::new(0, None)?;
    let mut programs = nodes::start(&lab, directory).await?;
    let played = on_cables(options, &lab, progress).await;
    let mut played = explained(played, &mut programs)?;
    drop((programs, lab));
    if options.downloads > 0 {
        progress.step("the same over a path of 100 ms that loses packets next to the client");
        let far = Conditions { one_way: FAR_DELAY, rate: Some(RATE), ..Conditions::default() };
        let near = Conditions { one_way: NEAR_DELAY, loss: LOSS, ..far.clone() };
        let lab = Lab::new(1, Some([near, far.clone(), far]))?;
        let mut programs = nodes::start(&lab, directory).await?;
        let lossy = over_losses(options, &lab, &mut played, progress).await;
        explained(lossy, &mut programs)?;
    }
    Ok(played)
}

fn explained<T>(outcome: anyhow::Result<T>, programs: &mut [Program]) -> anyhow::Result<T> {
    outcome.map_err(|error| anyhow::anyhow!("{error:#}{}", last_words(programs)))
}

fn ways() -> impl Iterator<Item = Way> {
    let has_haproxy = nodes::has_haproxy();
    Way::ALL.into_iter().filter(move |way| *way != Way::Haproxy || has_haproxy)
}

async fn connect(lab: &Lab, way: Way) -> anyhow::Result<TcpStream> {
    let address = if way == Way::Haproxy { lab::ingress(way.port()) } else { lab::server(way.port()) };
    lab.client().tcp()?.connect(address).await.with_context(|| format!("{}: cannot connect", way.name()))
}

async fn on_cables(options: &Options, lab: &Lab, progress: &Progress) -> anyhow::Result<Played> {
    let mut all: BTreeMap<Way, Measured> = BTreeMap::new();
    for way in ways() {
        let stream = connect(lab, way).await?;
        let own = stream.local_addr()?.to_string();
        let seen = Client::over(stream).await?.get("/whoami").await.with_context(|| way.name())?;
        all.entry(way).or_default().shows_client = seen == own.as_bytes();
    }
    progress.step("requests on each way, in turns");
    for turn in 0..options.requests.div_ceil(TURN) {
        progress.detail(&format!("requests on each way, in turns: {} of {}", turn * TURN, options.requests));
        for way in ways() {
            let count = TURN.min(options.requests - turn * TURN);
            requests(lab, way, count, options.pause, all.entry(way).or_default()).await?;
        }
    }
    progress.step("downloads on each way");
    for seed in 0..CABLE_DOWNLOADS {
        for way in ways() {
            // Content of NDN must be new, or a store answers; the others need no warm connection.
            let seconds = download(lab, way, seed, MAX_BYTES).await?;
            all.entry(way).or_default().cable_s.push(seconds);
        }
    }
    let refused = lab.client().tcp()?.connect(lab::server(CLOSED)).await;
    let is_refusal_passed = refused.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
    Ok(Played { ways: all, is_refusal_passed })
}

async fn requests(lab: &Lab, way: Way, count: u32, pause: Duration, measured: &mut Measured) -> anyhow::Result<()> {
    let head = async |client: &mut Client| client.send_request(Method::HEAD, "/content/0/0", "".into()).await;
    let mut kept = Client::over(connect(lab, way).await?).await?;
    head(&mut kept).await.with_context(|| way.name())?;
    for _ in 0..count {
        tokio::time::sleep(pause).await;
        let begun = Instant::now();
        head(&mut kept).await.with_context(|| way.name())?;
        measured.persistent_ms.push(begun.elapsed().as_secs_f64() * 1e3);
        tokio::time::sleep(pause).await;
        let socket = lab.client().tcp()?;
        let address = if way == Way::Haproxy { lab::ingress(way.port()) } else { lab::server(way.port()) };
        let begun = Instant::now();
        let mut fresh = Client::over(socket.connect(address).await?).await?;
        head(&mut fresh).await.with_context(|| way.name())?;
        measured.own_connection_ms.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    Ok(())
}

/// Downloads and compares content. Returns the seconds.
async fn download(lab: &Lab, way: Way, seed: u64, bytes: usize) -> anyhow::Result<f64> {
    let expected = content(seed, bytes);
    let begun = Instant::now();
    let mut client = Client::over(connect(lab, way).await?).await?.waiting_for(LOSSY_TIMEOUT);
    let received = client.get(&format!("/content/{seed}/{bytes}")).await.with_context(|| way.name())?;
    let seconds = begun.elapsed().as_secs_f64();
    ensure!(received == expected, "{}: {} of {bytes} bytes arrived, or others", way.name(), received.len());
    Ok(seconds)
}

async fn over_losses(options: &Options, lab: &Lab, played: &mut Played, progress: &Progress) -> anyhow::Result<()> {
    for seed in 0..options.downloads {
        for way in ways() {
            progress.detail(&format!("download {} of {}: {}", seed + 1, options.downloads, way.name()));
            let seconds = download(lab, way, u64::from(seed), LOSSY_BYTES).await?;
            played.ways.entry(way).or_default().lossy_s.push(seconds);
        }
    }
    Ok(())
}

//! One publisher and many subscribers of a track at a moq-relay.
//!
//! In: the relay's port, and the numbers of subscribers, publications and bytes. All publications are one group, so they share
//! a stream. It writes `ready` when all have subscribed, publishes after a line of standard input, and writes `done` when all
//! publications have arrived everywhere. Never: more than [`WINDOW`] publications under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use moq_tokio::moq_net;
use moq_tokio::moq_net::{Timestamp, broadcast, group, track};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use url::Url;

/// As many as the other contenders have.
const WINDOW: u64 = 8;
const BROADCAST: &str = "bench";
const TRACK: &str = "t";
/// Handshakes that are under way at once.
const HANDSHAKES: usize = 32;

struct Load {
    url: Url,
    subscribers: usize,
    publications: u64,
    bytes: usize,
}

#[derive(Default)]
struct Arrivals {
    count: AtomicU64,
    changed: Notify,
}

impl Arrivals {
    fn add(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_one();
    }

    async fn reach(&self, count: u64) {
        while self.count.load(Ordering::Relaxed) < count {
            self.changed.notified().await;
        }
    }
}

fn client() -> Result<moq_tokio::Client> {
    let mut config = moq_tokio::connect::Config::default();
    config.tls.insecure = Some(true);
    Ok(config.init(moq_tokio::quic::Config::default())?)
}

fn load() -> Result<Load> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [port, subscribers, publications, bytes] = arguments.as_slice() else {
        bail!("usage: moq-load PORT SUBSCRIBERS PUBLICATIONS BYTES");
    };
    Ok(Load {
        url: Url::parse(&format!("https://localhost:{port}/"))?,
        subscribers: subscribers.parse()?,
        publications: publications.parse()?,
        bytes: bytes.parse()?,
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    moq_tokio::crypto::install_default().ok();
    let load = load()?;
    let origin = moq_tokio::origin::spawn();
    let producer = origin.create_broadcast(BROADCAST).context("no broadcast")?;
    producer.announce(Default::default())?;
    let track = producer.create_track(TRACK, None)?;
    let publisher = client()?.with_publisher(&origin).connect(load.url.clone());

    let arrivals = Arc::new(Arrivals::default());
    let mut tasks = JoinSet::new();
    let client = client()?;
    let handshakes = Arc::new(tokio::sync::Semaphore::new(HANDSHAKES));
    let (subscribed, mut subscriptions) = tokio::sync::mpsc::channel(HANDSHAKES);
    for _ in 0..load.subscribers {
        let (client, url, handshakes) = (client.clone(), load.url.clone(), handshakes.clone());
        let (arrivals, subscribed, bytes) = (arrivals.clone(), subscribed.clone(), load.bytes);
        tasks.spawn(async move {
            let turn = handshakes.acquire_owned().await?;
            let origin = moq_tokio::origin::spawn();
            let connection = client.with_subscriber(origin.clone()).connect(url);
            let track = subscribe(&origin).await?;
            drop(turn);
            subscribed.send(()).await?;
            tokio::select! {
                counted = count(track, bytes, &arrivals) => counted,
                closed = connection.closed() => bail!("a subscriber lost its connection: {closed:?}"),
            }
        });
    }
    for _ in 0..load.subscribers {
        tokio::select! {
            _ = subscriptions.recv() => {}
            Some(ended) = tasks.join_next() => ended??,
        }
    }
    println!("ready");
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    lines.next_line().await?;
    tokio::select! {
        published = publish(track, &load, &arrivals) => published?,
        Some(ended) = tasks.join_next() => ended??,
        closed = publisher.closed() => bail!("the publisher lost its connection: {closed:?}"),
    }
    println!("done");
    producer.close();
    Ok(())
}

async fn subscribe(origin: &moq_net::origin::Producer) -> Result<track::Subscriber> {
    let consumer = origin.consume();
    let mut announced = consumer.announced();
    loop {
        let update = announced.next().await.context("the relay announces nothing")?;
        if update.kind.is_active() {
            let broadcast: broadcast::Consumer = consumer.request_broadcast(&update.prefix).await?;
            return Ok(broadcast.track(TRACK)?.subscribe(None).await?);
        }
    }
}

async fn count(mut track: track::Subscriber, bytes: usize, arrivals: &Arc<Arrivals>) -> Result<()> {
    while let Some(group) = track.recv_group().await? {
        let mut group: group::Consumer = group;
        while let Some(frame) = group.read_frame().await? {
            ensure!(frame.payload.len() == bytes, "a frame has {} bytes", frame.payload.len());
            arrivals.add();
        }
    }
    Ok(())
}

async fn publish(track: track::Producer, load: &Load, arrivals: &Arrivals) -> Result<()> {
    let content = Bytes::from(vec![b'x'; load.bytes]);
    let mut group = track.append_group()?;
    for number in 0..load.publications {
        arrivals.reach(number.saturating_sub(WINDOW) * load.subscribers as u64).await;
        group.write_frame(Timestamp::now(), content.clone())?;
    }
    let all = arrivals.reach(load.publications * load.subscribers as u64);
    tokio::time::timeout(Duration::from_secs(120), all).await.context("a delivery is missing")
}

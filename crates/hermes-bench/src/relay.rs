//! `relay`: one publisher and many subscribers of a channel, beside NATS and moq-relay.
//!
//! In: the binary of Hermes, `nats-server` and `moq-relay`. Out: a JSON file with every round, and a table: deliveries for each CPU
//! second of the server, and its memory for each idle subscription. All contenders get the same publications in turns. Some
//! publications are under way at once, so that no queue fills. Never: a round in which a delivery is missing.

pub(crate) mod bare;
pub(crate) mod client;
mod moq;
pub(crate) mod pair;
pub(crate) mod receivers;
pub(crate) mod rendezvous;
mod voice;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use clap::Args;
use h2::client::SendRequest;
use hermes_relay::framing::multipart::Parser;
use hermes_testkit::process::{Port, Program, Running};
use http::Request;
use serde::Serialize;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::pep::{cpu_of, mean_and_median, memory_of};
use hermes_testkit::tool::on_path;

/// Publications that are under way at once. The queues of Hermes have room for 64.
const WINDOW: u64 = 8;
/// Subscriptions of one HTTP/2 connection, as many as browsers and Envoy open.
const STREAMS_A_CONNECTION: usize = 100;
/// The time for all subscriptions, and for all deliveries of a round.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The time after which memory is measured, so that buffers of the handshakes are freed.
const SETTLE: Duration = Duration::from_secs(2);

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct RelayOptions {
    /// Directory of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// Name of the JSON file.
    #[arg(long, default_value = "relay.json")]
    file: String,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// Directory with `bin/moq-relay` and `release/moq-load`.
    #[arg(long, default_value = "target/moq")]
    moq: PathBuf,
    /// Subscribers of the channel.
    #[arg(long, default_value_t = 1000)]
    subscribers: usize,
    /// Publications of a round.
    #[arg(long, default_value_t = 300)]
    publications: u64,
    /// Bytes of a publication.
    #[arg(long, default_value_t = 1024)]
    bytes: usize,
    /// Idle subscriptions beside the active ones, for one of the contenders.
    #[arg(long, default_value_t = 20_000)]
    idle: usize,
    /// Rounds of each contender.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// A way to subscribe to a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// HTTP/2 with 100 subscriptions on each connection.
    HermesH2,
    /// The same, while other channels have idle subscriptions.
    HermesH2BesideIdle,
    /// HTTP/2 with one subscription on each connection.
    HermesH2Own,
    /// The protocol of NATS with one subscription on each connection.
    Nats,
    /// MoQ with one subscription on each connection, and all publications on one stream.
    Moq,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::HermesH2 => "hermes-h2",
            Self::HermesH2BesideIdle => "hermes-h2-beside-idle",
            Self::HermesH2Own => "hermes-h2-own",
            Self::Nats => "nats",
            Self::Moq => "moq",
        }
    }
}

impl Way {
    /// The subscriptions that share one connection.
    fn streams_a_connection(self) -> usize {
        match self {
            Self::HermesH2 | Self::HermesH2BesideIdle => STREAMS_A_CONNECTION,
            Self::HermesH2Own | Self::Nats | Self::Moq => 1,
        }
    }

    /// All subscriptions, the idle ones included.
    fn subscriptions(self, options: &RelayOptions) -> usize {
        options.subscribers + if self == Self::HermesH2BesideIdle { options.idle } else { 0 }
    }
}

/// The figures of a contender.
#[derive(Debug, Default, Serialize)]
struct Figures {
    seconds: Vec<f64>,
    cpu_s: Vec<f64>,
    deliveries_a_cpu_s: Vec<f64>,
    /// Resident bytes of the server for each subscription while nothing is published.
    idle_bytes: Vec<f64>,
}

/// Counts deliveries of all subscribers.
#[derive(Debug, Default)]
struct Arrivals {
    count: AtomicU64,
    changed: Notify,
}

impl Arrivals {
    fn add(&self, count: u64) {
        if count > 0 {
            self.count.fetch_add(count, Ordering::Relaxed);
            self.changed.notify_one();
        }
    }

    async fn reach(&self, count: u64) -> Result<()> {
        let reached = async {
            while self.count.load(Ordering::Relaxed) < count {
                self.changed.notified().await;
            }
        };
        let waited = tokio::time::timeout(TIMEOUT, reached).await;
        let arrived = self.count.load(Ordering::Relaxed);
        waited.with_context(|| format!("{arrived} of {count} deliveries arrived in {} s", TIMEOUT.as_secs()))
    }
}

/// Runs the measurements.
///
/// # Errors
/// A program does not start, or a delivery is missing.
pub(crate) fn run(options: &RelayOptions) -> Result<()> {
    std::fs::create_dir_all(&options.out)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut ways = vec![Way::HermesH2, Way::HermesH2BesideIdle, Way::HermesH2Own];
    match on_path("nats-server") {
        Some(_) => ways.push(Way::Nats),
        None => eprintln!("!!! nats IS LEFT OUT: install the Debian package nats-server"),
    }
    if moq::exists(&options.moq) {
        ways.push(Way::Moq);
    } else {
        eprintln!("!!! moq-relay IS LEFT OUT: `make bench-relay` builds it");
    }
    let mut all: BTreeMap<&str, Figures> = BTreeMap::new();
    for round in 0..options.rounds {
        for way in &ways {
            eprintln!("round {} of {}: {}", round + 1, options.rounds, way.name());
            let figures = all.entry(way.name()).or_default();
            runtime.block_on(one_round(options, *way, figures)).context(way.name())?;
        }
    }
    println!(
        "contender              seconds  CPU s  deliveries/CPU s  bytes/idle subscription, medians of {}",
        options.rounds
    );
    for (name, figures) in &all {
        let median = |values: &[f64]| mean_and_median(values).1;
        let (seconds, cpu) = (median(&figures.seconds), median(&figures.cpu_s));
        let (rate, idle) = (median(&figures.deliveries_a_cpu_s), median(&figures.idle_bytes));
        println!("{name:21} {seconds:8.2} {cpu:6.2} {rate:17.0} {idle:24.0}");
    }
    let RelayOptions { subscribers, idle, publications, bytes, .. } = options;
    let report = serde_json::json!({
        "subscribers": subscribers, "idle": idle, "publications": publications, "bytes": bytes, "contenders": all,
    });
    let file = options.out.join(&options.file);
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n").context(file.display().to_string())
}

async fn one_round(options: &RelayOptions, way: Way, figures: &mut Figures) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (server, address) = start(options, way, dir.path())?;
    let before = memory_of(server.pid())?;
    let arrivals = Arc::new(Arrivals::default());
    let mut tasks = JoinSet::new();
    let mut load = None;
    let subscribing = async {
        match way {
            Way::Moq => {
                load = Some(moq::Load::start(options, address.port()).await?);
                Ok(())
            }
            _ => subscribe(options, way, address, &arrivals, &mut tasks).await,
        }
    };
    tokio::time::timeout(TIMEOUT, subscribing).await.context("the subscriptions take too long")??;
    tokio::time::sleep(SETTLE).await;
    let idle = memory_of(server.pid())?.saturating_sub(before);
    figures.idle_bytes.push(idle as f64 / way.subscriptions(options) as f64);

    let (begun, cpu) = (Instant::now(), cpu_of(server.pid())?);
    let publishing = async {
        match &mut load {
            Some(load) => load.run().await,
            None => publish(options, way, address, &arrivals).await,
        }
    };
    tokio::select! {
        published = publishing => published?,
        Some(ended) = tasks.join_next() => {
            ended??;
            bail!("a subscription has ended");
        }
    }
    let (seconds, cpu) = (begun.elapsed().as_secs_f64(), cpu_of(server.pid())? - cpu);
    let deliveries = options.publications * options.subscribers as u64;
    figures.seconds.push(seconds);
    figures.cpu_s.push(cpu);
    figures.deliveries_a_cpu_s.push(deliveries as f64 / cpu.max(0.01));
    Ok(())
}

fn start(options: &RelayOptions, way: Way, dir: &Path) -> Result<(Running, SocketAddr)> {
    let port = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let mut listens = Port::Tcp(port);
    let program = if way == Way::Nats {
        Program::new("nats", "nats-server", dir).args(["-a", "127.0.0.1", "-p", &port.to_string()])
    } else if way == Way::Moq {
        listens = Port::Udp(port);
        moq::server(&options.moq, port, dir)
    } else {
        let document = format!(
            "node: relay\naccess-log: off\nlimits: {{request-memory: 512MiB}}\n\
             listeners:\n- {{name: web, bind: '127.0.0.1:{port}', protocol: http}}\n\
             routes:\n- {{name: all, match: {{path: '/*'}}, relay: {{subscriptions: 200000, per-client: 200000}}}}\n"
        );
        let file = dir.join("relay.yaml");
        std::fs::write(&file, document)?;
        let hermes = options.hermes.canonicalize().unwrap_or_else(|_| options.hermes.clone());
        Program::new("relay", hermes, dir).args(["proxy", "--config"]).args([&file])
    };
    let mut server = program.start()?;
    server.wait_listening(&[listens], Duration::from_secs(10))?;
    Ok((server, (Ipv4Addr::LOCALHOST, port).into()))
}

/// Begins all subscriptions. Each has a task that counts what arrives.
async fn subscribe(
    options: &RelayOptions,
    way: Way,
    address: SocketAddr,
    arrivals: &Arc<Arrivals>,
    tasks: &mut JoinSet<Result<()>>,
) -> Result<()> {
    let streams = way.streams_a_connection();
    let mut sender = None;
    for number in 0..way.subscriptions(options) {
        if way == Way::Nats {
            let reader = nats_connection(address, "SUB t 1\r\n").await?.0;
            tasks.spawn(count_messages(reader, options.bytes, arrivals.clone()));
            continue;
        }
        if number % streams == 0 {
            sender = Some(connect(address, tasks).await?);
        }
        let sender = sender.clone().context("no connection")?;
        let path = if number < options.subscribers { "t" } else { "idle" };
        let body = subscription(sender, path).await?;
        tasks.spawn(count_parts(body, arrivals.clone()));
    }
    Ok(())
}

async fn connect(address: SocketAddr, tasks: &mut JoinSet<Result<()>>) -> Result<SendRequest<Bytes>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    // As large as those of browsers, so that no window of a connection delays a stream.
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(1 << 20).initial_connection_window_size(16 << 20);
    let (sender, connection) = builder.handshake(stream).await?;
    tasks.spawn(async move { Ok(connection.await?) });
    Ok(sender)
}

async fn subscription(sender: SendRequest<Bytes>, path: &str) -> Result<http::Response<h2::RecvStream>> {
    let request = Request::get(format!("http://relay/{path}")).header("hermes-subscribe", "true").body(())?;
    let (response, _) = sender.ready().await?.send_request(request, true)?;
    let response = response.await?;
    ensure!(response.status() == 200, "a subscription got {}", response.status());
    Ok(response)
}

async fn count_parts(response: http::Response<h2::RecvStream>, arrivals: Arc<Arrivals>) -> Result<()> {
    let content_type = response.headers().get("content-type").context("no content type")?.to_str()?;
    let mut parser = Parser::new(content_type, 1 << 20).context("no parts")?;
    let mut body = response.into_body();
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        parser.push(&data);
        let mut count = 0;
        while let Some(part) = parser.next_part()? {
            ensure!(!part.headers.contains_key("hermes-missed"), "the relay dropped publications");
            count += u64::from(!part.is_heartbeat());
        }
        arrivals.add(count);
    }
    Ok(())
}

/// Opens a connection to NATS, sends a command, and waits until the server has read it.
async fn nats_connection(address: SocketAddr, command: &str) -> Result<(BufReader<TcpStream>, String)> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).await?;
    let hello = "CONNECT {\"verbose\":false,\"pedantic\":false,\"echo\":false}\r\n";
    reader.get_mut().write_all(format!("{hello}{command}PING\r\n").as_bytes()).await?;
    let mut pong = String::new();
    reader.read_line(&mut pong).await?;
    ensure!(pong.starts_with("PONG"), "NATS answered {pong:?}");
    Ok((reader, line))
}

async fn count_messages(mut reader: BufReader<TcpStream>, bytes: usize, arrivals: Arc<Arrivals>) -> Result<()> {
    let message = format!("MSG t 1 {bytes}\r\n").len() + bytes + 2;
    let mut buffer = vec![0; 64 << 10];
    let (mut arrived, mut counted) = (0, 0);
    loop {
        let count = reader.read(&mut buffer).await?;
        ensure!(count > 0, "NATS closed a subscription");
        arrived += count;
        let whole = (arrived / message) as u64;
        arrivals.add(whole - counted);
        counted = whole;
    }
}

async fn publish(options: &RelayOptions, way: Way, address: SocketAddr, arrivals: &Arrivals) -> Result<()> {
    let subscribers = options.subscribers as u64;
    let content = Bytes::from(vec![b'x'; options.bytes]);
    let mut tasks = JoinSet::new();
    let mut to_nats = match way {
        Way::Nats => Some(nats_connection(address, "").await?.0),
        _ => None,
    };
    let sender = if to_nats.is_none() { Some(connect(address, &mut tasks).await?) } else { None };
    for number in 0..options.publications {
        reach(arrivals, number.saturating_sub(WINDOW) * subscribers, &mut tasks).await?;
        if let Some(nats) = &mut to_nats {
            let head = format!("PUB t {}\r\n", content.len());
            nats.get_mut().write_all(&[head.as_bytes(), &content, b"\r\n"].concat()).await?;
        } else if let Some(sender) = &sender {
            let (sender, content) = (sender.clone(), content.clone());
            tasks.spawn(async move {
                let request = Request::post("http://relay/t").body(())?;
                let (response, mut body) = sender.ready().await?.send_request(request, false)?;
                body.send_data(content, true)?;
                let response = response.await?;
                ensure!(response.status() == 204, "a publication got {}", response.status());
                let delivered = response.headers().get("hermes-delivered").context("no receipt")?;
                ensure!(delivered.to_str()?.parse() == Ok(subscribers), "delivered to {delivered:?}");
                Ok(())
            });
        }
    }
    reach(arrivals, options.publications * subscribers, &mut tasks).await
}

/// Waits for deliveries, or for the first publication that fails.
async fn reach(arrivals: &Arrivals, count: u64, tasks: &mut JoinSet<Result<()>>) -> Result<()> {
    let failed = async {
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        std::future::pending().await
    };
    tokio::select! {
        reached = arrivals.reach(count) => reached,
        failed = failed => failed,
    }
}

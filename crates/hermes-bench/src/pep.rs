//! `pep`: connections that a router splits, beside direct ones and other splitters (PEP-DNA, Table II, Figures 5 and 6).
//!
//! In: the binary. Out: a JSON file with every figure, and a table. Client, router and server are namespaces. All
//! contenders run at once and are measured in turns: each has a port of the server, except the proxies with a port of
//! their own (`contenders`). The minimal splitter stands for the paper's user-space PEP: a thread for each direction.
//! `paths` has transfers over slow and over lossy paths.

mod contenders;
mod paths;

use std::{
    cell::Cell,
    collections::BTreeMap,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use hermes_testkit::{limits::raise_open_files, netns::Namespace, process::Usage};
use serde::Serialize;

pub(crate) use self::contenders::split_one;
use self::contenders::{
    content_path, publish, serve, serve_flows, split, start_egress, start_haproxy, start_nginx, start_router,
    start_transparent_haproxy,
};

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
const ROUTER_BY_SERVER: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
/// The server's ports: not intercepted, intercepted, intercepted with held SYNs.
const DIRECT_PORT: u16 = 8000;
const SPLIT_PORT: u16 = 8001;
const HELD_PORT: u16 = 8002;
/// Intercepted, too: RINA to an application of the server, RINA to a node on the server, NDN.
const NATIVE_PORT: u16 = 8003;
const FLOW_PORT: u16 = 8004;
const NAMED_PORT: u16 = 8005;
/// The ports of the other splitters on the router.
const SPLITTER_PORT: u16 = 9001;
const HAPROXY_PORT: u16 = 9002;
const NGINX_PORT: u16 = 9003;
/// Hermes as an ordinary TCP proxy: it accepts at the router, and the server sees the router's address.
const RELAY_PORT: u16 = 9004;
/// The server's port that HAProxy intercepts, and its own port for that.
const HAPROXY_SPLIT_PORT: u16 = 8006;
const TPROXY_PORT: u16 = 9005;
/// The UDP ports of the server: an application of the DIF and a producer of NDN, and a node of the DIF.
const APPLICATION_PORT: u16 = 4000;
const PRODUCER_PORT: u16 = 6363;
const EGRESS_PORT: u16 = 4001;
/// The sizes of Figure 5, in bytes.
const SIZES: [u64; 6] = [1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20, 256 << 20];
/// Connections that are idle at once, and those before them, which fill the caches of a splitter.
const IDLE: usize = 500;
const BEFORE_IDLE: usize = 100;
/// The transfer of Figure 6.
const BULK: u64 = 4 << 30;
const BUFFER: usize = 256 << 10;
/// The sizes of NDN content, and the largest transfers over RINA and NDN.
const NAMED_SIZES: [u64; 6] = [0, 1 << 10, 16 << 10, 256 << 10, 4 << 20, MAX_NAMED_BYTES];
const MAX_NAMED_BYTES: u64 = 64 << 20;
const MAX_FLOW_BYTES: u64 = 256 << 20;

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct PepOptions {
    /// Directory of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// HEADs of a kind for each contender.
    #[arg(long, default_value_t = 100)]
    heads: usize,
    /// Time between two HEADs of a kind to the same contender. The others have theirs meanwhile.
    #[arg(long, default_value_t = 1000)]
    interval_ms: u64,
    /// GETs of each size for each contender; 0 leaves them out.
    #[arg(long, default_value_t = 10)]
    gets: usize,
    /// Transfers of 4 GiB for each contender; 0 leaves them out.
    #[arg(long, default_value_t = 3)]
    transfers: usize,
    /// Turns segmentation offload off: each frame passes the network stack alone.
    #[arg(long)]
    no_offload: bool,
    /// Transfers over each slow or lossy path for each contender; 0 leaves them out.
    #[arg(long, default_value_t = 3)]
    path_transfers: usize,
    /// Measures only these contenders and the direct connection.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

/// A path from the client to the server.
struct Target {
    name: &'static str,
    address: SocketAddr,
    /// The process to which its CPU time counts. `None`: none, or that of the benchmark, which does other work too.
    pid: Option<u32>,
    /// The name of content in requests is that of NDN.
    is_named: bool,
    /// Larger transfers are left out.
    max_bytes: u64,
    /// Requests so far.
    turns: Cell<u64>,
}

impl Target {
    fn new(name: &'static str, address: (Ipv4Addr, u16), pid: Option<u32>) -> Self {
        Self { name, address: address.into(), pid, is_named: false, max_bytes: u64::MAX, turns: Cell::new(0) }
    }
}

/// The figures of one contender.
#[derive(Debug, Default, Serialize)]
struct Figures {
    /// Milliseconds of a HEAD on a persistent connection, and with a connection of its own.
    persistent_ms: Vec<f64>,
    non_persistent_ms: Vec<f64>,
    /// By size in bytes: milliseconds of a GET on a persistent connection.
    get_ms: BTreeMap<u64, Vec<f64>>,
    /// Gbit/s and CPU seconds of the splitter for each transfer of 4 GiB.
    bulk_gbit_s: Vec<f64>,
    bulk_cpu_s: Vec<f64>,
    /// Resident memory of the splitter for each idle connection, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Report {
    interval_ms: u64,
    segmentation_offload: bool,
    contenders: BTreeMap<&'static str, Figures>,
    /// By path and contender: seconds of each transfer.
    paths: BTreeMap<&'static str, paths::PathFigures>,
}

/// Runs the measurements.
///
/// # Errors
/// The process lacks root, or a contender cannot be started.
pub(crate) fn run(options: &PepOptions) -> Result<()> {
    raise_open_files()?;
    std::fs::create_dir_all(&options.out)?;
    let dir = tempfile::tempdir()?;
    let [client, router, server] = [Namespace::new()?, Namespace::new()?, Namespace::new()?];
    let [of_client, router_by_client] = client.join(CLIENT, &router, ROUTER)?;
    let [router_by_server, of_server] = router.join(ROUTER_BY_SERVER, &server, SERVER)?;
    if options.no_offload {
        for (namespace, device) in
            [(&client, &of_client), (&router, &router_by_client), (&router, &router_by_server), (&server, &of_server)]
        {
            namespace.ip(&["link", "set", "dev", device, "gso_max_segs", "1"])?;
        }
    }
    client.ip(&["route", "add", "default", "via", &ROUTER.to_string()])?;
    server.ip(&["route", "add", "default", "via", &ROUTER_BY_SERVER.to_string()])?;
    router.sysctl("net/ipv4/ip_forward", "1")?;
    let serving = [DIRECT_PORT, SPLIT_PORT, HELD_PORT];
    serving.into_iter().try_for_each(|port| in_namespace(&server, move || serve((SERVER, port).into())))?;
    in_namespace(&router, || split((ROUTER, SPLITTER_PORT).into(), (SERVER, DIRECT_PORT).into()))?;
    let haproxy = start_haproxy(&router, dir.path())?;
    let transparent = start_transparent_haproxy(&router, dir.path())?;
    let nginx = start_nginx(&router, dir.path())?;
    in_namespace(&server, serve_flows)?;
    in_namespace(&server, || publish(&NAMED_SIZES))?;
    let _egress = start_egress(&options.hermes, &server, dir.path())?;
    let hermes = start_router(&options.hermes, &router, dir.path())?;
    let ours = Some(hermes.pid());
    let targets = vec![
        Target::new("direct", (SERVER, DIRECT_PORT), None),
        Target::new("splitter", (ROUTER, SPLITTER_PORT), None),
        Target::new("haproxy", (ROUTER, HAPROXY_PORT), Some(haproxy.pid())),
        Target::new("haproxy-transparent", (SERVER, HAPROXY_SPLIT_PORT), Some(transparent.pid())),
        Target::new("nginx", (ROUTER, NGINX_PORT), Some(nginx.pid())),
        Target::new("hermes-relay", (ROUTER, RELAY_PORT), ours),
        Target::new("hermes", (SERVER, SPLIT_PORT), ours),
        Target::new("hermes-held", (SERVER, HELD_PORT), ours),
        Target { max_bytes: MAX_FLOW_BYTES, ..Target::new("hermes-rina", (SERVER, NATIVE_PORT), ours) },
        Target { max_bytes: MAX_FLOW_BYTES, ..Target::new("hermes-rina-tcp", (SERVER, FLOW_PORT), ours) },
        Target { max_bytes: MAX_NAMED_BYTES, is_named: true, ..Target::new("hermes-ccn", (SERVER, NAMED_PORT), ours) },
    ];
    let is_wanted = |target: &Target| {
        let mut wanted = options.only.iter().map(String::as_str).chain(["direct"]);
        options.only.is_empty() || wanted.any(|name| name == target.name)
    };
    let targets: Vec<Target> = targets.into_iter().filter(is_wanted).collect();
    let measuring = options.clone();
    let contenders = in_namespace_to_end(&client, move || measure(&measuring, &targets))??;
    drop((haproxy, transparent, nginx, hermes));
    let paths = paths::measure(options, dir.path())?;
    let report =
        Report { interval_ms: options.interval_ms, segmentation_offload: !options.no_offload, contenders, paths };
    print_table(&report);
    let file = options.out.join(if options.no_offload { "pep-no-offload.json" } else { "pep.json" });
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n").context(file.display().to_string())
}

/// Runs a function on a thread inside a namespace. Threads that the function starts stay there and keep serving.
fn in_namespace(namespace: &Namespace, set_up: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    in_namespace_to_end(namespace, set_up)?
}

fn in_namespace_to_end<T: Send>(namespace: &Namespace, work: impl FnOnce() -> T + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| namespace.enter().map(|()| work()));
        let done = thread.join().map_err(|_| anyhow::anyhow!("a thread of the benchmark panicked"))?;
        Ok(done?)
    })
}

/// Sends a request, and reads its answer.
fn ask(target: &Target, stream: &mut TcpStream, method: &str, bytes: u64, buffer: &mut [u8]) -> Result<()> {
    let turn = target.turns.replace(target.turns.get() + 1);
    let path = if target.is_named { content_path(bytes, turn) } else { format!("/{bytes}") };
    stream.write_all(format!("{method} {path} HTTP/1.1\r\nhost: server\r\n\r\n").as_bytes())?;
    let (mut head, mut found) = (Vec::new(), None);
    while found.is_none() {
        let read = stream.read(buffer)?;
        ensure!(read > 0, "the connection ended within a head");
        head.extend_from_slice(&buffer[..read]);
        found = head.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4);
    }
    let mut body = head.split_off(found.unwrap_or_default());
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    ensure!(head.starts_with("http/1.1 200"), "{}: {head}", target.name);
    if method != "GET" {
        return Ok(());
    }
    // Content consists of zeros, so these bytes occur only at the end.
    let is_chunked = head.contains("transfer-encoding: chunked");
    let is_complete = |received: u64, tail: &[u8]| {
        if is_chunked { tail.ends_with(b"\r\n0\r\n\r\n") } else { received >= bytes }
    };
    let mut received = body.len() as u64;
    while !is_complete(received, &body) {
        let read = stream.read(buffer)?;
        ensure!(read > 0, "the connection ended after {received} bytes");
        received += read as u64;
        body.extend_from_slice(&buffer[read.saturating_sub(TAIL)..read]);
        body.drain(..body.len().saturating_sub(TAIL));
    }
    ensure!(received >= bytes, "{}: {received} of {bytes} bytes", target.name);
    Ok(())
}

/// Bytes at the end of a chunked body.
const TAIL: usize = 7;

fn connect(target: &Target) -> Result<TcpStream> {
    let stream = TcpStream::connect(target.address).with_context(|| target.name)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn measure(options: &PepOptions, targets: &[Target]) -> Result<BTreeMap<&'static str, Figures>> {
    let mut all: BTreeMap<&'static str, Figures> =
        targets.iter().map(|target| (target.name, Figures::default())).collect();
    let mut buffer = vec![0; BUFFER];
    heads(options, targets, &mut all, &mut buffer)?;
    gets(options, targets, &mut all, &mut buffer)?;
    for transfer in 0..options.transfers {
        for target in targets.iter().filter(|target| target.max_bytes >= BULK) {
            eprintln!("pep: transfer {} of {}, {}", transfer + 1, options.transfers, target.name);
            let mut stream = connect(target)?;
            let (cpu, began) = (target.pid.map_or(Ok(0.0), cpu_of)?, Instant::now());
            ask(target, &mut stream, "GET", BULK, &mut buffer)?;
            let (seconds, cpu) = (began.elapsed().as_secs_f64(), target.pid.map_or(Ok(0.0), cpu_of)? - cpu);
            let figures = all.entry(target.name).or_default();
            figures.bulk_gbit_s.push(BULK as f64 * 8e-9 / seconds);
            figures.bulk_cpu_s.push(cpu);
        }
    }
    // All stay open, so that no memory is used twice.
    let mut open = Vec::new();
    for target in targets {
        let Some(pid) = target.pid else { continue };
        eprintln!("pep: idle connections, {}", target.name);
        open.extend(idle(target, BEFORE_IDLE, &mut buffer)?);
        let before = Usage::of_tree(pid)?.memory.rss;
        open.extend(idle(target, IDLE, &mut buffer)?);
        let more = Usage::of_tree(pid)?.memory.rss.saturating_sub(before);
        all.entry(target.name).or_default().idle_bytes = Some(more / IDLE as u64);
    }
    Ok(all)
}

/// Opens connections that have each had one request.
fn idle(target: &Target, count: usize, buffer: &mut [u8]) -> Result<Vec<TcpStream>> {
    let one = |_| {
        let mut stream = connect(target)?;
        ask(target, &mut stream, "HEAD", 0, buffer)?;
        Ok(stream)
    };
    (0..count).map(one).collect()
}

/// Requests of Table II. Contenders have one in turn, so that each finds the caches of the processors as the others have
/// left them.
fn heads(
    options: &PepOptions,
    targets: &[Target],
    all: &mut BTreeMap<&'static str, Figures>,
    buffer: &mut [u8],
) -> Result<()> {
    let turns = u32::try_from(targets.len() * 2)?;
    let pause = Duration::from_millis(options.interval_ms) / turns;
    let mut kept = targets.iter().map(connect).collect::<Result<Vec<_>>>()?;
    for (target, stream) in targets.iter().zip(&mut kept) {
        ask(target, stream, "HEAD", 0, buffer)?;
    }
    for turn in 0..options.heads {
        if turn % 10 == 0 {
            eprintln!("pep: {turn} of {} HEADs", options.heads);
        }
        for (target, stream) in targets.iter().zip(&mut kept) {
            let figures = all.entry(target.name).or_default();
            wait(pause);
            let began = Instant::now();
            ask(target, stream, "HEAD", 0, buffer)?;
            figures.persistent_ms.push(milliseconds(began));
            wait(pause);
            let began = Instant::now();
            let mut fresh = connect(target)?;
            ask(target, &mut fresh, "HEAD", 0, buffer)?;
            figures.non_persistent_ms.push(milliseconds(began));
        }
    }
    Ok(())
}

/// Requests of Figure 5, on a persistent connection.
fn gets(
    options: &PepOptions,
    targets: &[Target],
    all: &mut BTreeMap<&'static str, Figures>,
    buffer: &mut [u8],
) -> Result<()> {
    for turn in 0..options.gets {
        eprintln!("pep: GETs, {} of {}", turn + 1, options.gets);
        for target in targets {
            let figures = all.entry(target.name).or_default();
            let mut stream = connect(target)?;
            ask(target, &mut stream, "HEAD", 0, buffer)?;
            for size in SIZES.into_iter().filter(|size| *size <= target.max_bytes) {
                let began = Instant::now();
                ask(target, &mut stream, "GET", size, buffer)?;
                figures.get_ms.entry(size).or_default().push(milliseconds(began));
            }
        }
    }
    Ok(())
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

#[allow(clippy::disallowed_methods, reason = "a pause between requests of the paper, on a thread of its own")]
fn wait(pause: Duration) {
    thread::sleep(pause);
}

/// CPU seconds of a process and its children so far.
pub(crate) fn cpu_of(pid: u32) -> Result<f64> {
    Ok(Usage::of_tree(pid)?.cpu.as_secs_f64())
}

/// Resident bytes of a process and its children.
pub(crate) fn memory_of(pid: u32) -> Result<u64> {
    Ok(Usage::of_tree(pid)?.memory.rss)
}

/// The mean and the median. Both are 0 without values.
pub(crate) fn mean_and_median(values: &[f64]) -> (f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |index: usize| sorted.get(index).copied().unwrap_or_default();
    let median = (at(sorted.len().saturating_sub(1) / 2) + at(sorted.len() / 2)) / 2.0;
    (values.iter().sum::<f64>() / values.len().max(1) as f64, median)
}

fn print_table(report: &Report) {
    println!(
        "contender            P ms: mean median   NP ms: mean median   1 KB..256 MB ms (median)   4 GiB: Gbit/s  CPU s   bytes/idle"
    );
    for (name, figures) in &report.contenders {
        let (persistent, fresh) =
            (mean_and_median(&figures.persistent_ms), mean_and_median(&figures.non_persistent_ms));
        let sizes: Vec<String> =
            figures.get_ms.values().map(|times| format!("{:.2}", mean_and_median(times).1)).collect();
        let (rate, cpu) = (mean_and_median(&figures.bulk_gbit_s).1, mean_and_median(&figures.bulk_cpu_s).1);
        let idle = figures.idle_bytes.map_or_else(|| "-".to_owned(), |bytes| bytes.to_string());
        println!(
            "{name:19} {:9.3} {:7.3} {:13.3} {:7.3}   {}   {rate:.1} {cpu:.2} {idle}",
            persistent.0,
            persistent.1,
            fresh.0,
            fresh.1,
            sizes.join(" ")
        );
    }
    for (path, figures) in &report.paths {
        for (name, seconds) in &figures.seconds {
            let median = mean_and_median(seconds).1;
            println!("{path}: {name:12} {} MB in {median:.2} s", figures.bytes >> 20);
        }
    }
}

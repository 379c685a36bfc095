//! `pep`: connections that a router splits, beside direct ones and other splitters (PEP-DNA, Table II, Figures 5 and 6).
//!
//! In: the binary. Out: a JSON file with every round, and a table. Client, router and server are namespaces. All
//! contenders run at once and are measured in turns: each has a port of the server, except the proxies with a port of
//! their own. The minimal splitter stands for the paper's user-space PEP: a thread for each direction.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use hermes_testkit::{
    limits::raise_open_files,
    netns::Namespace,
    process::{Port, Program, Running},
};
use serde::Serialize;

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
const ROUTER_BY_SERVER: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
/// The server's ports: not intercepted, intercepted, intercepted with held SYNs.
const DIRECT_PORT: u16 = 8000;
const SPLIT_PORT: u16 = 8001;
const HELD_PORT: u16 = 8002;
/// The ports of the other splitters on the router.
const SPLITTER_PORT: u16 = 9001;
const HAPROXY_PORT: u16 = 9002;
/// The sizes of Figure 5, in bytes.
const SIZES: [u64; 6] = [1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20, 256 << 20];
/// The transfer of Figure 6.
const BULK: u64 = 4 << 30;
const BUFFER: usize = 256 << 10;

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct PepOptions {
    /// Directory of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// Rounds; each has ten requests of a kind for each contender.
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// Time between requests [default: 20 ms; the paper: 1000]
    #[arg(long, default_value_t = 20)]
    pause_ms: u64,
    /// Transfers of 4 GiB for each contender; 0 leaves them out.
    #[arg(long, default_value_t = 3)]
    transfers: usize,
}

/// A path from the client to the server.
struct Target {
    name: &'static str,
    address: SocketAddr,
    /// The process to which its CPU time counts.
    pid: Option<u32>,
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
}

#[derive(Debug, Serialize)]
struct Report {
    rounds: usize,
    pause_ms: u64,
    contenders: BTreeMap<&'static str, Figures>,
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
    client.join(CLIENT, &router, ROUTER)?;
    router.join(ROUTER_BY_SERVER, &server, SERVER)?;
    client.ip(&["route", "add", "default", "via", &ROUTER.to_string()])?;
    server.ip(&["route", "add", "default", "via", &ROUTER_BY_SERVER.to_string()])?;
    router.sysctl("net/ipv4/ip_forward", "1")?;
    let serving = [DIRECT_PORT, SPLIT_PORT, HELD_PORT];
    serving.into_iter().try_for_each(|port| in_namespace(&server, move || serve((SERVER, port).into())))?;
    in_namespace(&router, || split((ROUTER, SPLITTER_PORT).into(), (SERVER, DIRECT_PORT).into()))?;
    let haproxy = start_haproxy(&router, dir.path())?;
    let hermes = start_hermes(options, &router, dir.path())?;
    let (own, ours) = (Some(std::process::id()), Some(hermes.pid()));
    let target = |name, address: (Ipv4Addr, u16), pid| Target { name, address: address.into(), pid };
    let targets = vec![
        target("direct", (SERVER, DIRECT_PORT), None),
        target("splitter", (ROUTER, SPLITTER_PORT), own),
        target("haproxy", (ROUTER, HAPROXY_PORT), Some(haproxy.pid())),
        target("hermes", (SERVER, SPLIT_PORT), ours),
        target("hermes-held", (SERVER, HELD_PORT), ours),
    ];
    let measuring = options.clone();
    let contenders = in_namespace_to_end(&client, move || measure(&measuring, &targets))??;
    let report = Report { rounds: options.rounds, pause_ms: options.pause_ms, contenders };
    print_table(&report);
    let file = options.out.join("pep.json");
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n").context(file.display().to_string())
}

fn start_haproxy(router: &Namespace, dir: &std::path::Path) -> Result<Running> {
    let config = format!(
        "global\n  nbthread 2\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n  \
         option splice-auto\nlisten pep\n  bind {ROUTER}:{HAPROXY_PORT}\n  server s {SERVER}:{DIRECT_PORT}\n"
    );
    let file = dir.join("haproxy.cfg");
    std::fs::write(&file, config)?;
    let program = Program::new("haproxy", "haproxy", dir).args(["-db", "-f"]).args([&file]).within(Some(router));
    let mut running = program.start()?;
    running.wait_listening(&[Port::Tcp(HAPROXY_PORT)], Duration::from_secs(10))?;
    Ok(running)
}

fn start_hermes(options: &PepOptions, router: &Namespace, dir: &std::path::Path) -> Result<Running> {
    let document = format!(
        "node: pep\nadmin: 127.0.0.1:9900\naccess-log: /dev/null\nlisteners:\n\
         - {{name: split, protocol: transparent, capture: [0.0.0.0/0], ports: [{SPLIT_PORT}], hold-syn: false}}\n\
         - {{name: held, protocol: transparent, capture: [0.0.0.0/0], ports: [{HELD_PORT}]}}\n\
         routes:\n- {{name: pep, match: {{kind: tcp}}, terminate: {{tcp: original, source: client}}}}\n"
    );
    let file = dir.join("pep.yaml");
    std::fs::write(&file, document)?;
    let program = Program::new("hermes", &options.hermes, dir).args(["proxy", "--config"]).args([&file]);
    let mut running = program.within(Some(router)).start()?;
    running.wait_listening(&[Port::Tcp(9900)], Duration::from_secs(10))?;
    Ok(running)
}

/// Runs a function on a thread inside a namespace. Threads that the function starts stay there and keep serving.
pub(crate) fn in_namespace(namespace: &Namespace, set_up: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    in_namespace_to_end(namespace, set_up)?
}

pub(crate) fn in_namespace_to_end<T: Send>(namespace: &Namespace, work: impl FnOnce() -> T + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| namespace.enter().map(|()| work()));
        let done = thread.join().map_err(|_| anyhow::anyhow!("a thread of the benchmark panicked"))?;
        Ok(done?)
    })
}

/// Serves requests at an address: HEAD with a head, `GET /BYTES` with so many bytes. Threads inherit the namespace.
fn serve(address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| address.to_string())?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve_one(stream));
        }
    });
    Ok(())
}

fn serve_one(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let zeros = vec![0; BUFFER];
    while let Some(head) = read_head(&mut stream)? {
        let bytes: u64 = head.split(['/', ' ']).nth(2).and_then(|size| size.parse().ok()).unwrap_or_default();
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {bytes}\r\n\r\n")?;
        let mut left = if head.starts_with("GET") { bytes } else { 0 };
        while left > 0 {
            let part = left.min(BUFFER as u64);
            stream.write_all(&zeros[..part as usize])?;
            left -= part;
        }
    }
    Ok(())
}

/// Reads up to the end of a head; `None` at the end of the connection. Heads come one at a time.
fn read_head(stream: &mut TcpStream) -> std::io::Result<Option<String>> {
    let mut head = Vec::new();
    let mut buffer = [0; 4096];
    while !head.ends_with(b"\r\n\r\n") {
        let read = stream.read(&mut buffer)?;
        if read == 0 {
            return Ok(None);
        }
        head.extend_from_slice(&buffer[..read]);
    }
    Ok(Some(String::from_utf8_lossy(&head).into_owned()))
}

/// The minimal splitter: a connection for each one that it accepts, and two threads that copy.
fn split(address: SocketAddr, to: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address)?;
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            thread::spawn(move || split_one(client, to));
        }
    });
    Ok(())
}

fn split_one(client: TcpStream, to: SocketAddr) -> std::io::Result<()> {
    let server = TcpStream::connect(to)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (client_too, server_too) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || copy(client_too, server_too));
    copy(server, client)
}

fn copy(mut from: TcpStream, mut to: TcpStream) -> std::io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            return to.shutdown(std::net::Shutdown::Write);
        }
        to.write_all(&buffer[..read])?;
    }
}

/// Sends a request, and reads its answer.
fn ask(stream: &mut TcpStream, method: &str, bytes: u64, buffer: &mut [u8]) -> Result<()> {
    stream.write_all(format!("{method} /{bytes} HTTP/1.1\r\nhost: server\r\n\r\n").as_bytes())?;
    let (mut head, mut found) = (Vec::new(), None);
    while found.is_none() {
        let read = stream.read(buffer)?;
        ensure!(read > 0, "the connection ended within a head");
        head.extend_from_slice(&buffer[..read]);
        found = head.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4);
    }
    let mut received = (head.len() - found.unwrap_or_default()) as u64;
    while method == "GET" && received < bytes {
        let read = stream.read(buffer)?;
        ensure!(read > 0, "the connection ended after {received} bytes");
        received += read as u64;
    }
    Ok(())
}

fn connect(target: &Target) -> Result<TcpStream> {
    let stream = TcpStream::connect(target.address).with_context(|| target.name)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn measure(options: &PepOptions, targets: &[Target]) -> Result<BTreeMap<&'static str, Figures>> {
    let mut all: BTreeMap<&'static str, Figures> =
        targets.iter().map(|target| (target.name, Figures::default())).collect();
    let mut buffer = vec![0; BUFFER];
    for round in 0..options.rounds {
        eprintln!("pep: round {} of {}", round + 1, options.rounds);
        for target in targets {
            let figures = all.entry(target.name).or_default();
            requests(options, target, figures, &mut buffer)?;
        }
    }
    for transfer in 0..options.transfers {
        for target in targets {
            eprintln!("pep: transfer {} of {}, {}", transfer + 1, options.transfers, target.name);
            let mut stream = connect(target)?;
            let (cpu, began) = (target.pid.map_or(Ok(0.0), cpu_of)?, Instant::now());
            ask(&mut stream, "GET", BULK, &mut buffer)?;
            let (seconds, cpu) = (began.elapsed().as_secs_f64(), target.pid.map_or(Ok(0.0), cpu_of)? - cpu);
            let figures = all.entry(target.name).or_default();
            figures.bulk_gbit_s.push(BULK as f64 * 8e-9 / seconds);
            figures.bulk_cpu_s.push(cpu);
        }
    }
    Ok(all)
}

/// Ten requests of a kind, and one of each size.
fn requests(options: &PepOptions, target: &Target, figures: &mut Figures, buffer: &mut [u8]) -> Result<()> {
    let pause = Duration::from_millis(options.pause_ms);
    let ms = |began: Instant| began.elapsed().as_secs_f64() * 1e3;
    let mut kept = connect(target)?;
    ask(&mut kept, "HEAD", 0, buffer)?;
    for _ in 0..10 {
        wait(pause);
        let began = Instant::now();
        ask(&mut kept, "HEAD", 0, buffer)?;
        figures.persistent_ms.push(ms(began));
        wait(pause);
        let began = Instant::now();
        let mut fresh = connect(target)?;
        ask(&mut fresh, "HEAD", 0, buffer)?;
        figures.non_persistent_ms.push(ms(began));
    }
    for size in SIZES {
        let began = Instant::now();
        ask(&mut kept, "GET", size, buffer)?;
        figures.get_ms.entry(size).or_default().push(ms(began));
    }
    Ok(())
}

#[allow(clippy::disallowed_methods, reason = "a pause between requests of the paper, on a thread of its own")]
fn wait(pause: Duration) {
    thread::sleep(pause);
}

/// CPU seconds of a process so far, from `/proc/PID/stat`.
fn cpu_of(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // utime and stime are fields 14 and 15; the state, field 3, is the first one here.
    let ticks: f64 = [11, 12].iter().filter_map(|at| fields.get(*at)?.parse::<f64>().ok()).sum();
    Ok(ticks / 100.0)
}

/// The mean and the median.
pub(crate) fn mean_and_median(values: &[f64]) -> (f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len().max(1);
    (values.iter().sum::<f64>() / count as f64, sorted.get(sorted.len() / 2).copied().unwrap_or_default())
}

fn print_table(report: &Report) {
    println!("contender     P ms: mean median   NP ms: mean median   1 KB..256 MB ms (median)   4 GiB: Gbit/s  CPU s");
    for (name, figures) in &report.contenders {
        let (persistent, fresh) =
            (mean_and_median(&figures.persistent_ms), mean_and_median(&figures.non_persistent_ms));
        let sizes: Vec<String> =
            figures.get_ms.values().map(|times| format!("{:.2}", mean_and_median(times).1)).collect();
        let (rate, cpu) = (mean_and_median(&figures.bulk_gbit_s).1, mean_and_median(&figures.bulk_cpu_s).1);
        println!(
            "{name:12} {:9.3} {:7.3} {:13.3} {:7.3}   {}   {rate:.1} {cpu:.2}",
            persistent.0,
            persistent.1,
            fresh.0,
            fresh.1,
            sizes.join(" ")
        );
    }
}

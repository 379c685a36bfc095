//! `gateway`: content of an NDN producer by HTTP through Hermes, beside the same content read natively.
//!
//! In: the binary, and the Python packages of `scripts/setup.sh`. Out: a JSON file with every round, and a table. The
//! producers are one of python-ndn, which signs each packet when it is asked, and one with all packets prepared. Both
//! ways use the fetch engine of `hermes-ndn` and check each digest, in turns. Never: content that is not compared.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use clap::Args;
use hermes_ndn::fetch::{Fetch, FetchLimits};
use hermes_ndn::lp::LpPacket;
use hermes_ndn::name::types;
use hermes_ndn::packet::{Data, DataBuilder, Interest, Packet};
use hermes_ndn::signature::{Signer, digest_matches};
use hermes_ndn::{Component, Name};
use hermes_testkit::{
    process::{Port, Program, Running},
    python,
};
use serde::Serialize;

use crate::pep::{cpu_of, mean_and_median};

/// The content of python-ndn's producer, in its version 7.
const PYTHON: &str = "/org/file/v=7";
const PREPARED: &str = "/prepared/file/v=7";
const SEGMENT: usize = 8000;
const BUFFER: usize = 64 << 10;
/// Bytes of socket buffers, so that a full window of packets waits in the kernel.
const SOCKET_BUFFER: usize = 4 << 20;

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct GatewayOptions {
    /// Directory of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// The target directory, which has the Python packages.
    #[arg(long, default_value = "target")]
    target: PathBuf,
    /// Fetches from each producer, by HTTP and natively.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Bytes of the content. The node answers less than 16 MiB from its store.
    #[arg(long, default_value_t = 100_000_000)]
    bytes: usize,
}

/// The figures of one producer.
#[derive(Debug, Default, Serialize)]
struct Figures {
    native_s: Vec<f64>,
    http_s: Vec<f64>,
    /// CPU seconds of Hermes for each fetch by HTTP.
    http_cpu_s: Vec<f64>,
    /// The speed by HTTP as a share of the native one, by medians.
    ratio: f64,
}

/// Runs the measurements.
///
/// # Errors
/// A program does not start, or content is not what was published.
pub(crate) fn run(options: &GatewayOptions) -> Result<()> {
    std::fs::create_dir_all(&options.out)?;
    let dir = tempfile::tempdir()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tools = python::find(&options.target, python::NDN_PRODUCER)?;
    let python = runtime.block_on(python::start(python::NDN_PRODUCER, &tools, &[&options.bytes.to_string()]))?;
    let python_address = (Ipv4Addr::LOCALHOST, python.port).into();
    let prepared_address = publish(options.bytes)?;
    let (mut hermes, web) = start_gateway(&options.hermes, dir.path(), python_address, prepared_address)?;
    hermes.wait_listening(&[Port::Tcp(web)], Duration::from_secs(10))?;
    let producers = [("python-ndn", python_address, PYTHON), ("prepared", prepared_address, PREPARED)];
    let mut all: BTreeMap<&str, Figures> = BTreeMap::new();
    for _ in 0..options.rounds {
        for (producer, address, name) in producers {
            let figures = all.entry(producer).or_default();
            figures.native_s.push(fetch_natively(address, name, options.bytes)?);
            let cpu = cpu_of(hermes.pid())?;
            figures.http_s.push(fetch_by_http((Ipv4Addr::LOCALHOST, web).into(), name, options.bytes)?);
            figures.http_cpu_s.push(cpu_of(hermes.pid())? - cpu);
        }
    }
    println!("producer      native s   HTTP s   ratio   CPU s of Hermes, medians of {}", options.rounds);
    for (producer, figures) in &mut all {
        let median = |values: &[f64]| mean_and_median(values).1;
        let (native, http) = (median(&figures.native_s), median(&figures.http_s));
        figures.ratio = native / http;
        let cpu = median(&figures.http_cpu_s);
        println!("{producer:12} {native:9.3} {http:8.3} {:7.3} {cpu:9.2}", figures.ratio);
    }
    let file = options.out.join("ndn-gateway.json");
    let report = serde_json::json!({"bytes": options.bytes, "rounds": options.rounds, "producers": all});
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n").context(file.display().to_string())
}

fn start_gateway(hermes: &Path, dir: &Path, python: SocketAddr, prepared: SocketAddr) -> Result<(Running, u16)> {
    let web = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let document = format!(
        "node: gateway\naccess-log: /dev/null\nworkers: 1\nlisteners:\n\
         - {{name: web, bind: '127.0.0.1:{web}', protocol: http}}\nroutes:\n\
         - {{name: python, match: {{path: '/org/*'}}, terminate: {{ndn: 'udp://{python}', accept-digest: true}}}}\n\
         - {{name: prepared, match: {{path: '/prepared/*'}}, \
         terminate: {{ndn: 'udp://{prepared}', accept-digest: true}}}}\n"
    );
    let file = dir.join("gateway.yaml");
    std::fs::write(&file, document)?;
    Ok((Program::new("gateway", hermes, dir).args(["proxy", "--config"]).args([&file]).start()?, web))
}

/// The byte at each position of the content, as python-ndn's producer has it.
fn expected(at: usize) -> u8 {
    u8::try_from(at % 251 * 31 % 251).unwrap_or_default()
}

/// Compares the content that arrives with the expected one.
struct Comparison {
    pattern: Vec<u8>,
    arrived: usize,
}

impl Comparison {
    fn new() -> Self {
        Self { pattern: (0..251 + BUFFER).map(expected).collect(), arrived: 0 }
    }

    fn take(&mut self, content: &[u8]) -> Result<()> {
        for part in content.chunks(BUFFER) {
            let from = self.arrived % 251;
            ensure!(part == &self.pattern[from..from + part.len()], "other bytes after {}", self.arrived);
            self.arrived += part.len();
        }
        Ok(())
    }
}

/// Answers Interests with packets that were made before.
fn publish(bytes: usize) -> Result<SocketAddr> {
    let prefix: Name = PREPARED.parse().map_err(anyhow::Error::msg)?;
    let last = bytes.saturating_sub(1) / SEGMENT;
    let packets = (0..=last).map(|number| {
        let builder = DataBuilder {
            name: prefix.child(&Component::numbered(types::SEGMENT, number as u64)),
            freshness: Some(Duration::from_secs(10)),
            final_block: Some(Component::numbered(types::SEGMENT, last as u64)),
            ..DataBuilder::default()
        };
        let content: Vec<u8> = (number * SEGMENT..bytes.min((number + 1) * SEGMENT)).map(expected).collect();
        Ok(builder.sign(&content, &Signer::digest())?)
    });
    let packets: Vec<Bytes> = packets.collect::<Result<_>>()?;
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    set_buffers(&socket)?;
    let address = socket.local_addr()?;
    thread::spawn(move || {
        let mut buffer = vec![0; BUFFER];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let Ok(frame) = LpPacket::decode(Bytes::copy_from_slice(&buffer[..length])) else { continue };
            let Some(Ok(Packet::Interest(interest))) = frame.fragment.map(Packet::decode) else { continue };
            let number = interest.name.last().and_then(|last| last.number(types::SEGMENT));
            let packet = number.and_then(|number| packets.get(usize::try_from(number).ok()?));
            packet.map(|packet| socket.send_to(packet, from));
        }
    });
    Ok(address)
}

fn set_buffers(socket: &UdpSocket) -> Result<()> {
    use nix::sys::socket::{setsockopt, sockopt};
    Ok(setsockopt(socket, sockopt::RcvBufForce, &SOCKET_BUFFER)?)
}

/// Fetches content over UDP. Returns the seconds.
fn fetch_natively(producer: SocketAddr, name: &str, bytes: usize) -> Result<f64> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    set_buffers(&socket)?;
    socket.connect(producer)?;
    let begun = Instant::now();
    let mut fetch = Fetch::new(name.parse().map_err(anyhow::Error::msg)?, FetchLimits::default(), 1);
    let (mut comparison, mut buffer) = (Comparison::new(), vec![0; BUFFER]);
    while !fetch.is_complete() {
        while let Some(interest) = fetch.next_interest(begun.elapsed()) {
            socket.send(&Interest::encode(&interest))?;
        }
        let left = fetch.next_timeout().unwrap_or_default().saturating_sub(begun.elapsed());
        socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let Ok(length) = socket.recv(&mut buffer) else {
            fetch.handle_timeout(begun.elapsed())?;
            continue;
        };
        let frame = LpPacket::decode(Bytes::copy_from_slice(&buffer[..length]))?;
        let data = Data::decode(frame.fragment.context("a frame without a packet")?)?;
        ensure!(digest_matches(&data.signature), "{}: the digest is wrong", data.name);
        fetch.take_data(data, frame.congestion.is_some(), begun.elapsed())?;
        while let Some(content) = fetch.next_content() {
            comparison.take(&content)?;
        }
    }
    ensure!(comparison.arrived == bytes, "{} bytes of {bytes}", comparison.arrived);
    Ok(begun.elapsed().as_secs_f64())
}

/// Fetches content by HTTP. Returns the seconds.
fn fetch_by_http(gateway: SocketAddr, path: &str, bytes: usize) -> Result<f64> {
    let begun = Instant::now();
    let mut stream = TcpStream::connect(gateway)?;
    // HTTP/1.0 has no chunks, so the bytes of the body are those of the content.
    stream.write_all(format!("GET {path} HTTP/1.0\r\nhost: gateway\r\n\r\n").as_bytes())?;
    let (mut comparison, mut buffer, mut head) = (Comparison::new(), vec![0; BUFFER], Vec::new());
    let mut is_head = true;
    loop {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        if !is_head {
            comparison.take(&buffer[..length])?;
            continue;
        }
        head.extend_from_slice(&buffer[..length]);
        if let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") {
            ensure!(
                head.starts_with(b"HTTP/1.1 200") || head.starts_with(b"HTTP/1.0 200"),
                "{}",
                String::from_utf8_lossy(&head)
            );
            comparison.take(&head[end + 4..])?;
            is_head = false;
        }
    }
    ensure!(comparison.arrived == bytes, "{} bytes of {bytes}", comparison.arrived);
    Ok(begun.elapsed().as_secs_f64())
}

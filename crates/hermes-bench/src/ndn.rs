//! `ndn`: files fetched by NDN over a slow link, directly and through an overlay (the first paper, Table VIII).
//!
//! In: the binary. Out: a JSON file with every round, and a table. A device and a server are namespaces with a link of
//! 10 Mbit/s between them. The consumer asks for one segment after the other with at most 20 Interests under way; the
//! producer answers each with fresh content. Both are of this program, with the codec of Hermes, over UDP or TCP. With
//! an overlay, consumer and producer talk to the node of their own machine over TCP, and the nodes over HTTP with TLS.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use clap::Args;
use hermes_ndn::{
    Component, MAX_FRAME, Name,
    fetch::{Fetch, FetchLimits},
    framing::PacketSplitter,
    lp::LpPacket,
    name::types,
    packet::{Data, Interest, Packet},
    publish::{PublishedContent, content_name},
    signature::{Signer, digest_matches},
};
use hermes_testkit::{
    ca::{Authority, Subject},
    limits::raise_open_files,
    link::{Conditions, join},
    netns::Namespace,
    process::{Port, Program, Running},
};
use serde::Serialize;

use crate::pep::{in_namespace, in_namespace_to_end, mean_and_median};

const DEVICE: Ipv4Addr = Ipv4Addr::new(10, 3, 0, 2);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 3, 0, 1);
const PRODUCER_PORT: u16 = 6363;
const OVERLAY_PORT: u16 = 9443;
const ADMIN_PORT: u16 = 9900;
/// The files of Table VIII, in bytes.
const SIZES: [usize; 4] = [0, 1_090_352, 26_236_224, 50_000_000];
/// Interests under way at once: the paper's pipeline.
const PIPELINE: usize = 20;
/// The version of all files. Consumers know it, so that no discovery takes a round trip.
const VERSION: u64 = 1;
const RATE: u64 = 10_000_000;
/// The device's ports for the versions of HTTP between the nodes.
const OVERLAYS: [(&str, u16); 3] = [("h1", 7001), ("h2", 7002), ("h3", 7003)];
const BUFFER: usize = 64 << 10;

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct NdnOptions {
    /// Directory of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// Fetches of each file for each contender.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Fetches of the empty file and of the file of 1 MB for each other one.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// Leaves out larger files.
    #[arg(long, default_value_t = usize::MAX)]
    max_bytes: usize,
}

/// The figures of one contender, by the size of the file.
#[derive(Debug, Default, Serialize)]
struct Figures {
    seconds: BTreeMap<usize, Vec<f64>>,
    /// Interests that were sent again.
    repeated: BTreeMap<usize, u64>,
}

#[derive(Debug, Serialize)]
struct Report {
    rounds: usize,
    repeats: usize,
    rate_bits_s: u64,
    pipeline: usize,
    segment_bytes: usize,
    contenders: BTreeMap<&'static str, Figures>,
}

/// Runs the measurements.
///
/// # Errors
/// The process lacks root, a node cannot be started, or content does not arrive.
pub(crate) fn run(options: &NdnOptions) -> Result<()> {
    raise_open_files()?;
    std::fs::create_dir_all(&options.out)?;
    let dir = tempfile::tempdir()?;
    let [device, server] = [Namespace::new()?, Namespace::new()?];
    // The queue holds a pipeline of segments, so that none is lost in the link.
    let slow = Conditions {
        rate: Some(RATE),
        one_way: Duration::from_micros(500),
        queue: Duration::from_millis(250),
        ..Conditions::default()
    };
    let _link = join((&device, DEVICE), (&server, SERVER), [slow.clone(), slow], Instant::now())?;
    in_namespace(&server, || produce((SERVER, PRODUCER_PORT).into()))?;
    let ca = Authority::new("bench")?;
    let _far = start_node(options, &server, dir.path(), &ca, "far", &far_document())?;
    let _near = start_node(options, &device, dir.path(), &ca, "near", &near_document())?;
    let measuring = options.clone();
    let contenders = in_namespace_to_end(&device, move || measure(&measuring))??;
    let segment_bytes = contents(0).1;
    let (rounds, repeats) = (options.rounds, options.repeats);
    let report = Report { rounds, repeats, rate_bits_s: RATE, pipeline: PIPELINE, segment_bytes, contenders };
    print_table(&report);
    let file = options.out.join("ndn.json");
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n").context(file.display().to_string())
}

fn far_document() -> String {
    format!(
        "listeners:\n- {{name: overlay, bind: '{SERVER}:{OVERLAY_PORT}', protocol: http, http3: true, \
         tls: {{client: required}}}}\nroutes:\n\
         - {{name: packets, match: {{kind: tcp}}, terminate: {{ndn: 'tcp://{SERVER}:{PRODUCER_PORT}'}}}}\n"
    )
}

fn near_document() -> String {
    let mut document = "listeners:\n".to_owned();
    for (version, port) in OVERLAYS {
        document +=
            &format!("- {{name: {version}, bind: '127.0.0.1:{port}', protocol: ndn, namespaces: {{BENCH: /bench}}}}\n");
    }
    document += "routes:\n";
    for (version, _) in OVERLAYS {
        document += &format!("- {{name: {version}, match: {{listener: {version}}}, upstream: {version}}}\n");
    }
    document += "upstreams:\n";
    for (version, _) in OVERLAYS {
        document += &format!(
            "- {{name: {version}, protocol: {version}, endpoints: ['{SERVER}:{OVERLAY_PORT}'], overlay: true, \
             tls: {{node: far}}}}\n"
        );
    }
    document
}

fn start_node(
    options: &NdnOptions,
    namespace: &Namespace,
    dir: &Path,
    ca: &Authority,
    name: &str,
    document: &str,
) -> Result<Running> {
    let files = ca.issue(&Subject::node(name))?.write(dir, name)?;
    let roots = dir.join("ca.pem");
    std::fs::write(&roots, ca.pem())?;
    let [cert, key, roots] = [&files.cert, &files.key, &roots].map(|file| file.display().to_string());
    let head = format!(
        "node: {name}\nadmin: 127.0.0.1:{ADMIN_PORT}\naccess-log: /dev/null\n\
         identity: {{cert: {cert}, key: {key}, ca: {roots}}}\n"
    );
    let file = dir.join(format!("{name}.yaml"));
    std::fs::write(&file, head + document)?;
    let program = Program::new(name, &options.hermes, dir).args(["proxy", "--config"]).args([&file]);
    let mut running = program.within(Some(namespace)).start()?;
    running.wait_listening(&[Port::Tcp(ADMIN_PORT)], Duration::from_secs(10))?;
    Ok(running)
}

fn name_of(size: usize) -> Name {
    format!("/bench/{size}").parse().unwrap_or_default()
}

/// A file, and the bytes of its full segments.
fn contents(size: usize) -> (Option<PublishedContent>, usize) {
    let bytes: Bytes = (0..size).map(|at| (at * 31 % 251) as u8).collect::<Vec<_>>().into();
    let content = PublishedContent::new(name_of(size), VERSION, bytes);
    let segment = content.as_ref().map_or(0, PublishedContent::segment_bytes);
    (content, segment)
}

/// The files of the producer, by their name.
type Files = BTreeMap<Name, PublishedContent>;

/// Produces all files at an address, over UDP and TCP. Threads inherit the namespace.
fn produce(address: SocketAddr) -> Result<()> {
    let files: Files = SIZES.iter().filter_map(|size| Some((name_of(*size), contents(*size).0?))).collect();
    let files: &'static Files = Box::leak(Box::new(files));
    let socket = UdpSocket::bind(address)?;
    thread::spawn(move || {
        let mut buffer = vec![0; BUFFER];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            if let Some(data) = answer(files, Bytes::copy_from_slice(&buffer[..length])) {
                let _ = socket.send_to(&data, from);
            }
        }
    });
    let listener = TcpListener::bind(address)?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || produce_over(stream, files));
        }
    });
    Ok(())
}

fn produce_over(mut stream: TcpStream, files: &Files) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut splitter = PacketSplitter::new(MAX_FRAME);
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = stream.read(&mut buffer)?;
        if read == 0 {
            return Ok(());
        }
        splitter.push(&buffer[..read]);
        while let Some(packet) = splitter.next_packet().map_err(std::io::Error::other)? {
            if let Some(data) = answer(files, packet) {
                stream.write_all(&data)?;
            }
        }
    }
}

fn answer(files: &Files, packet: Bytes) -> Option<Bytes> {
    let frame = LpPacket::decode(packet).ok()?;
    let Ok(Packet::Interest(interest)) = Packet::decode(frame.fragment?) else { return None };
    let content = files.get(&content_name(&interest.name))?;
    let data = content.answer(&interest, Duration::from_secs(1), &Signer::digest()).ok()??;
    Some(LpPacket { pit_token: frame.pit_token, ..LpPacket::bare(data) }.encode())
}

/// The consumer's connection.
enum Face {
    Udp(UdpSocket),
    Tcp(TcpStream, PacketSplitter),
}

impl Face {
    fn udp(to: SocketAddr) -> Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(to)?;
        Ok(Self::Udp(socket))
    }

    fn tcp(to: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(to).context(to.to_string())?;
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream, PacketSplitter::new(MAX_FRAME)))
    }

    fn send(&mut self, interest: &Interest) -> Result<()> {
        let packet = interest.encode();
        match self {
            Self::Udp(socket) => drop(socket.send(&packet)?),
            Self::Tcp(stream, _) => stream.write_all(&packet)?,
        }
        Ok(())
    }

    /// Waits for a packet; `None` if none comes in time.
    fn receive(&mut self, timeout: Duration, buffer: &mut [u8]) -> Result<Option<Bytes>> {
        let timeout = Some(timeout.max(Duration::from_millis(1)));
        let is_late = |error: &std::io::Error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        let (received, splitter) = match self {
            Self::Udp(socket) => {
                socket.set_read_timeout(timeout)?;
                (socket.recv(buffer), None)
            }
            Self::Tcp(stream, splitter) => {
                if let Some(packet) = splitter.next_packet()? {
                    return Ok(Some(packet));
                }
                stream.set_read_timeout(timeout)?;
                (stream.read(buffer), Some(splitter))
            }
        };
        let length = match received {
            Ok(length) => length,
            Err(error) if is_late(&error) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let Some(splitter) = splitter else { return Ok(Some(Bytes::copy_from_slice(&buffer[..length]))) };
        ensure!(length > 0, "the face has closed");
        splitter.push(&buffer[..length]);
        Ok(splitter.next_packet()?)
    }
}

/// Fetches a file, and checks its segments. Returns the seconds, and the number of repeated Interests.
fn fetch(face: &mut Face, size: usize, buffer: &mut [u8]) -> Result<(f64, u64)> {
    // The paper uses a pipeline of one for the empty file.
    let limits = FetchLimits { max_window: if size == 0 { 1 } else { PIPELINE }, ..FetchLimits::default() };
    let name = name_of(size).child(&Component::numbered(types::VERSION, VERSION));
    let began = Instant::now();
    let mut fetch = Fetch::new(name, limits, began.elapsed().subsec_nanos());
    let (mut sent, mut segments, mut received) = (0, 0, 0);
    while !fetch.is_complete() {
        while let Some(interest) = fetch.next_interest(began.elapsed()) {
            face.send(&interest)?;
            sent += 1;
        }
        let now = began.elapsed();
        let timeout = fetch.next_timeout().unwrap_or(now).saturating_sub(now);
        let Some(packet) = face.receive(timeout, buffer)? else {
            fetch.handle_timeout(began.elapsed())?;
            continue;
        };
        let frame = LpPacket::decode(packet)?;
        ensure!(frame.nack.is_none(), "an Interest came back: {:?}", frame.nack);
        let Some(fragment) = frame.fragment else { continue };
        let data = Data::decode(fragment)?;
        ensure!(digest_matches(&data.signature), "{} has another digest", data.name);
        fetch.take_data(data, frame.congestion.is_some(), began.elapsed())?;
        while let Some(content) = fetch.next_content() {
            received += content.len();
            segments += 1;
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    ensure!(received == size, "{received} of {size} bytes");
    Ok((seconds, sent - segments))
}

fn measure(options: &NdnOptions) -> Result<BTreeMap<&'static str, Figures>> {
    let producer = (SERVER, PRODUCER_PORT).into();
    let mut faces = vec![("direct-udp", Face::udp(producer)?), ("direct-tcp", Face::tcp(producer)?)];
    for (version, port) in OVERLAYS {
        faces.push((version, Face::tcp((Ipv4Addr::LOCALHOST, port).into())?));
    }
    let mut all: BTreeMap<&'static str, Figures> = BTreeMap::new();
    let mut buffer = vec![0; BUFFER];
    // Faces and sessions stay, as the paper's do, so opening them is not measured.
    for (_, face) in &mut faces {
        fetch(face, 0, &mut buffer)?;
    }
    for round in 0..options.rounds {
        for size in SIZES.into_iter().filter(|size| *size <= options.max_bytes) {
            let repeats = if size <= SIZES[1] { options.repeats } else { 1 };
            for _ in 0..repeats {
                for (name, face) in &mut faces {
                    let (seconds, repeated) =
                        fetch(face, size, &mut buffer).with_context(|| format!("{name}: {size} bytes"))?;
                    let figures = all.entry(name).or_default();
                    figures.seconds.entry(size).or_default().push(seconds);
                    *figures.repeated.entry(size).or_default() += repeated;
                }
            }
            eprintln!("ndn: round {} of {}, {size} bytes", round + 1, options.rounds);
        }
    }
    Ok(all)
}

fn print_table(report: &Report) {
    println!("segments of {} bytes, at most {PIPELINE} under way; medians", report.segment_bytes);
    let medians = |name: &str, size: &usize| {
        let seconds = report.contenders.get(name).and_then(|figures| figures.seconds.get(size));
        seconds.map_or(0.0, |seconds| mean_and_median(seconds).1)
    };
    for (name, figures) in &report.contenders {
        for (size, seconds) in &figures.seconds {
            let median = mean_and_median(seconds).1;
            let direct = [medians("direct-udp", size), medians("direct-tcp", size)];
            let repeated = figures.repeated.get(size).copied().unwrap_or_default();
            println!(
                "{name:10} {size:9} bytes {median:9.4} s, {:+.4} s and {:.3} of UDP, {:+.4} s and {:.3} of TCP; \
                 {repeated} repeated",
                median - direct[0],
                median / direct[0],
                median - direct[1],
                median / direct[1],
            );
        }
    }
}

//! `relay-rendezvous`: a publication at the relay that a rendezvous chooses, beside the relay of median performance (HTTP-RS,
//! Figure 8d).
//!
//! In: the binary of Hermes. Out: a JSON file with every time, and a table: how often the rendezvous is faster, by the length of
//! the content. Five regions have a relay and two clients each; links have the delays of public clouds. Each ordered
//! pair of clients is measured, 90 in all. Never: a connection that stands before the measurement, but those between relays.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::Args;
use hermes_testkit::link::{self, Conditions, Link};
use hermes_testkit::netns::Namespace;
use hermes_testkit::process::{Port, Program, Running};
use serde::Serialize;

use super::client::read_head;
use crate::pep::mean_and_median;

const REGIONS: usize = 5;
const CLIENTS: usize = 2 * REGIONS;
/// Round-trip times between the regions in milliseconds: Virginia, Oregon, Frankfurt, Tokyo, São Paulo. They are rounded medians
/// of public measurements between data centres.
const ROUND_TRIPS: [[u64; REGIONS]; REGIONS] = [
    [0, 60, 90, 150, 115],
    [60, 0, 140, 100, 175],
    [90, 140, 0, 225, 205],
    [150, 100, 225, 0, 260],
    [115, 175, 205, 260, 0],
];
/// Round-trip times of the two clients of a region to its relay, in milliseconds.
const ACCESS: [u64; 2] = [6, 20];
/// The rate of a client's link in bits a second.
const ACCESS_RATE: u64 = 100_000_000;
const PORT: u16 = 8000;
/// The authority of all channels.
const AUTHORITY: &str = "relay.example";
const TIMEOUT: Duration = Duration::from_secs(60);

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct RendezvousOptions {
    /// Directory of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// Bytes of a publication; each pair has one of each length.
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 10_000, 100_000, 1_000_000])]
    bytes: Vec<usize>,
}

/// The way of a publication to its subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By the relay of this region, which both know.
    Fixed(usize),
    /// The sender asks its nearest relay, and is redirected to that of the channel, which is near the receiver.
    Redirect,
    /// The sender's nearest relay forwards the publication.
    Through,
}

/// The times of one pair and length.
#[derive(Clone, Debug, Serialize)]
struct Times {
    sender: usize,
    receiver: usize,
    bytes: usize,
    /// By the relay of each region, in milliseconds.
    fixed: Vec<f64>,
    redirect: f64,
    through: f64,
}

impl Times {
    fn median(&self) -> f64 {
        mean_and_median(&self.fixed).1
    }
}

fn relay_address(region: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 200, u8::try_from(region).unwrap_or_default(), 1)
}

fn client_address(client: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 100, u8::try_from(client).unwrap_or_default(), 2)
}

struct Testbed {
    clients: Vec<Namespace>,
    _links: Vec<Link>,
    _relays: Vec<Running>,
    _regions: Vec<Namespace>,
}

impl Testbed {
    fn new(options: &RendezvousOptions, dir: &Path) -> Result<Self> {
        let all = |count: usize| (0..count).map(|_| Namespace::new()).collect::<Result<Vec<_>, _>>();
        let (regions, clients) = (all(REGIONS)?, all(CLIENTS)?);
        let mut links = Vec::new();
        for (region, namespace) in regions.iter().enumerate() {
            namespace.sysctl("net/ipv4/ip_forward", "1")?;
            // The address by which everybody knows the relay.
            namespace.address("lo", relay_address(region))?;
        }
        for (here, round_trips) in ROUND_TRIPS.iter().enumerate() {
            for (there, round_trip) in round_trips.iter().enumerate().skip(here + 1) {
                let ends = [(here, 1), (there, 2)].map(|(region, last)| {
                    let number = u8::try_from(here * REGIONS + there).unwrap_or_default();
                    (region, Ipv4Addr::new(10, 150, number, last))
                });
                let [a, b] = ends.map(|(region, address)| (&regions[region], address));
                links.push(link::delayed(a, b, Duration::from_micros(round_trip * 500))?);
                for [own, other] in [ends, [ends[1], ends[0]]] {
                    let relay = format!("{}/24", relay_network(relay_address(other.0)));
                    regions[own.0].ip(&["route", "add", &relay, "via", &other.1.to_string()])?;
                    for client in [2 * other.0, 2 * other.0 + 1] {
                        let network = format!("{}/24", relay_network(client_address(client)));
                        regions[own.0].ip(&["route", "add", &network, "via", &other.1.to_string()])?;
                    }
                }
            }
        }
        for (client, namespace) in clients.iter().enumerate() {
            let router = Ipv4Addr::from_bits(client_address(client).to_bits() - 1);
            let one_way = Duration::from_micros(ACCESS[client % 2] * 500);
            let conditions = Conditions { one_way, rate: Some(ACCESS_RATE), ..Conditions::default() };
            let ends = [(namespace, client_address(client)), (&regions[client / 2], router)];
            links.push(link::join(ends[0], ends[1], [conditions.clone(), conditions], Instant::now())?);
            namespace.ip(&["route", "add", "default", "via", &router.to_string()])?;
        }
        let start = |(region, namespace): (usize, &Namespace)| -> Result<Running> {
            let file = dir.join(format!("relay-{region}.yaml"));
            std::fs::write(&file, document(region))?;
            let hermes = options.hermes.canonicalize().unwrap_or_else(|_| options.hermes.clone());
            let name = format!("relay-{region}");
            let program = Program::new(&name, hermes, dir).args(["proxy", "--config"]).args([&file]);
            let mut relay = program.within(Some(namespace)).start()?;
            relay.wait_listening(&[Port::Tcp(PORT)], TIMEOUT)?;
            Ok(relay)
        };
        let relays = regions.iter().enumerate().map(start).collect::<Result<_>>()?;
        Ok(Self { clients, _links: links, _relays: relays, _regions: regions })
    }
}

fn relay_network(address: Ipv4Addr) -> Ipv4Addr {
    Ipv4Addr::from_bits(address.to_bits() & !0xff)
}

/// The document of a region's relay.
fn document(region: usize) -> String {
    let peers = |with_url: bool| {
        let peer = |other: usize| {
            let url = format!(", url: 'http://{}:{PORT}'", relay_address(other));
            format!("{{node: relay-{other}{}}}", if with_url { &url } else { "" })
        };
        (0..REGIONS).map(peer).collect::<Vec<_>>().join(", ")
    };
    let upstreams = (0..REGIONS).filter(|other| *other != region).map(|other| {
        format!(
            "- {{name: relay-{other}, protocol: h2, overlay: true, endpoints: ['{}:{PORT}']}}\n",
            relay_address(other)
        )
    });
    let (with_url, without) = (peers(true), peers(false));
    format!(
        "node: relay-{region}\naccess-log: off\n\
         listeners:\n- {{name: web, bind: '0.0.0.0:{PORT}', protocol: http, trust: [10.200.0.0/16, 10.150.0.0/16]}}\n\
         routes:\n\
         - {{name: fixed, match: {{path: '/fixed/*'}}, relay: {{mode: reliable, unit: 4MiB}}}}\n\
         - {{name: redirect, match: {{path: '/redirect/*'}}, relay: {{mode: reliable, unit: 4MiB, root: first, authority: {AUTHORITY}, peers: [{with_url}]}}}}\n\
         - {{name: through, match: {{path: '/through/*'}}, relay: {{mode: reliable, unit: 4MiB, root: first, peers: [{without}]}}}}\n\
         upstreams:\n{}",
        upstreams.collect::<String>()
    )
}

fn connect(region: usize) -> Result<TcpStream> {
    let stream = TcpStream::connect(SocketAddr::from((relay_address(region), PORT)))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

fn subscribe(region: usize, path: &str) -> Result<TcpStream> {
    let mut stream = connect(region)?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {AUTHORITY}\r\nhermes-subscribe: true\r\n\r\n")?;
    let head = read_head(&mut stream)?;
    ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
    Ok(stream)
}

/// Publishes over a connection of its own.
fn publish(way: Way, nearest: usize, path: &str, content: &[u8]) -> Result<()> {
    let request = |host: &str, expect: &str| {
        format!("POST {path} HTTP/1.1\r\nhost: {host}\r\n{expect}content-length: {}\r\n\r\n", content.len())
    };
    let region = match way {
        Way::Fixed(region) => region,
        Way::Through => nearest,
        Way::Redirect => {
            let mut stream = connect(nearest)?;
            // The content is not sent in vain.
            stream.write_all(request(AUTHORITY, "expect: 100-continue\r\n").as_bytes())?;
            let head = read_head(&mut stream)?.to_ascii_lowercase();
            if !head.starts_with("http/1.1 307") {
                ensure!(head.starts_with("http/1.1 100"), "{head}");
                stream.write_all(content)?;
                return Ok(());
            }
            let location = head.split("location: http://10.200.").nth(1).and_then(|rest| rest.split('.').next());
            location.context("no location")?.parse()?
        }
    };
    let host = if way == Way::Redirect { format!("{}:{PORT}", relay_address(region)) } else { AUTHORITY.to_owned() };
    let mut stream = connect(region)?;
    stream.write_all(&[request(&host, "").as_bytes(), content].concat())?;
    // The connection stays until the response has come, so that nothing is cut.
    std::thread::spawn(move || read_head(&mut stream));
    Ok(())
}

/// The milliseconds from the first packet of the sender until the receiver has all.
fn transfer(subscriber: &mut TcpStream, way: Way, sender: usize, path: &str, bytes: usize) -> Result<f64> {
    let content = vec![b'x'; bytes];
    let begun = Instant::now();
    publish(way, sender / 2, path, &content)?;
    let mut buffer = vec![0; 64 << 10];
    let mut arrived = 0;
    while arrived < bytes {
        let read = subscriber.read(&mut buffer)?;
        ensure!(read > 0, "the subscription ended after {arrived} of {bytes} bytes");
        // The framing has no x.
        arrived += buffer[..read].iter().filter(|byte| **byte == b'x').count();
    }
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

/// The publications of one sender, in the order of all. Each step gives every receiver another sender.
fn sender(number: usize, lengths: &[usize], shared: &Shared) -> Result<Vec<Times>> {
    let mut all = Vec::new();
    for step in 1..CLIENTS {
        let (receiver, sender_here) = ((number + step) % CLIENTS, (number + CLIENTS - step) % CLIENTS);
        for bytes in lengths {
            let mut times =
                Times { sender: number, receiver, bytes: *bytes, fixed: Vec::new(), redirect: 0.0, through: 0.0 };
            let ways = (0..REGIONS).map(Way::Fixed).chain([Way::Redirect, Way::Through]);
            for way in ways {
                let name = |sender: usize, receiver: usize| match way {
                    Way::Fixed(region) => format!("/fixed/{region}-{sender}-{receiver}-{bytes}"),
                    Way::Redirect => format!("/redirect/{sender}-{receiver}-{bytes}"),
                    Way::Through => format!("/through/{sender}-{receiver}-{bytes}"),
                };
                // This client is a receiver, too.
                let region = if let Way::Fixed(region) = way { region } else { number / 2 };
                let subscription = subscribe(region, &name(sender_here, number));
                *shared.slots[number].lock().unwrap_or_else(PoisonError::into_inner) = Some(subscription);
                shared.barrier.wait();
                let taken = shared.slots[receiver].lock().unwrap_or_else(PoisonError::into_inner).take();
                let measured = taken
                    .context("no subscription")
                    .and_then(|subscription| subscription)
                    .and_then(|mut stream| transfer(&mut stream, way, number, &name(number, receiver), *bytes))
                    .with_context(|| format!("{number} to {receiver}, {way:?}, {bytes} bytes"));
                shared.barrier.wait();
                // All leave together, or the others would wait.
                if let Err(error) = &measured {
                    *shared.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{error:#}"));
                }
                shared.barrier.wait();
                let failure = shared.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
                ensure!(failure.is_none(), "{}", failure.unwrap_or_default());
                match way {
                    Way::Fixed(_) => times.fixed.push(measured?),
                    Way::Redirect => times.redirect = measured?,
                    Way::Through => times.through = measured?,
                }
            }
            all.push(times);
        }
        if number == 0 {
            eprintln!("step {step} of {}", CLIENTS - 1);
        }
    }
    Ok(all)
}

/// The state that the threads of all clients share.
struct Shared {
    /// The subscription of each receiver for the next publication.
    slots: Vec<Mutex<Option<Result<TcpStream>>>>,
    barrier: Barrier,
    failure: Mutex<Option<String>>,
}

/// Runs the measurements.
///
/// # Errors
/// A program does not start, a publication is missing, or the process is not root.
pub(crate) fn run(options: &RendezvousOptions) -> Result<()> {
    std::fs::create_dir_all(&options.out)?;
    let dir = tempfile::tempdir()?;
    let testbed = Testbed::new(options, dir.path())?;
    let slots = (0..CLIENTS).map(|_| Mutex::new(None)).collect();
    let shared = Arc::new(Shared { slots, barrier: Barrier::new(CLIENTS), failure: Mutex::new(None) });
    let threads = testbed.clients.iter().enumerate().map(|(number, namespace)| {
        let (shared, lengths) = (shared.clone(), options.bytes.clone());
        Ok(namespace.spawn_thread(move || sender(number, &lengths, &shared))?)
    });
    let threads: Vec<_> = threads.collect::<Result<_>>()?;
    let mut all = Vec::new();
    for thread in threads {
        all.extend(thread.join().map_err(|_| anyhow!("a thread of the benchmark panicked"))???);
    }
    println!("    bytes  pairs  median relay ms  redirect ms  faster  through ms  faster");
    let mut series = Vec::new();
    for bytes in &options.bytes {
        let of: Vec<&Times> = all.iter().filter(|times| times.bytes == *bytes).collect();
        let median =
            |value: &dyn Fn(&Times) -> f64| mean_and_median(&of.iter().map(|one| value(one)).collect::<Vec<_>>()).1;
        let faster = |value: &dyn Fn(&Times) -> f64| {
            of.iter().filter(|one| value(one) < one.median()).count() as f64 / of.len() as f64 * 100.0
        };
        println!(
            "{bytes:9} {:6} {:16.1} {:12.1} {:6.0}% {:11.1} {:6.0}%",
            of.len(),
            median(&Times::median),
            median(&|one| one.redirect),
            faster(&|one| one.redirect),
            median(&|one| one.through),
            faster(&|one| one.through),
        );
        // The change of throughput, as the paper draws it.
        let mut change: Vec<f64> = of.iter().map(|one| (one.median() / one.redirect - 1.0) * 100.0).collect();
        change.sort_by(f64::total_cmp);
        series.push((*bytes, change));
    }
    let changes: Vec<_> =
        series.iter().map(|(bytes, change)| serde_json::json!({"bytes": bytes, "percent": change})).collect();
    let report =
        serde_json::json!({"round-trips-ms": ROUND_TRIPS, "access-ms": ACCESS, "changes": changes, "times": all});
    let file = options.out.join("relay-rendezvous.json");
    std::fs::write(&file, serde_json::to_string(&report)? + "\n").context(file.display().to_string())
}

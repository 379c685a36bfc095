//! Measures how long a change takes to reach many nodes: a controller in this process, its nodes in another one.
//!
//! In: `scale [NODES] [ROUTES] [CHANGES]`. Out: JSON: the time from commit to acknowledgement, for changes of all nodes
//! and of one node; a cold start with all nodes at once; and the controller's memory and CPU time. Each node has its
//! own TLS connection, and parses, checks and swaps its document before it acknowledges.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use hermes_controller::audit::Audit;
use hermes_controller::client::{Client, ControllerAddr, ControllerPin};
use hermes_controller::control::{EnrolRequest, Report};
use hermes_controller::controller::{Controller, Request};
use hermes_controller::digest::sha256;
use hermes_controller::document::read;
use hermes_controller::server;
use hermes_controller::store::{BaseState, LogRead, Revision, Sqlite, Store, StoreError};
use hermes_controller::token::EnrolmentToken;
use hermes_model::Snapshot;
use hermes_net::tls::CertifiedKey;
use rcgen::{CertificateParams, KeyPair};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

const STEP_TIMEOUT: Duration = Duration::from_secs(300);
/// The maximum number of simultaneous handshakes, except in a cold start.
const AT_ONCE: usize = 64;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    hermes_net::host::raise_descriptor_limit(1 << 20);
    if args.first().is_some_and(|first| first == "nodes") {
        return runtime.block_on(nodes(args[1].parse().unwrap()));
    }
    let number = |at: usize, default: usize| args.get(at).map_or(default, |text| text.parse().unwrap());
    runtime.block_on(measure(number(0, 1000), number(1, 100), number(2, 20)));
}

/// Seconds of the clock that all processes share.
fn seconds() -> f64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    now.as_secs_f64()
}

/// A service; changing one is the measured change.
fn service(number: usize, port: usize) -> String {
    format!(
        "---\n{{kind: Service, name: S{number}, at: {{node: server, http: \"127.0.0.1:{port}\"}}, for: everyone}}\n"
    )
}

fn slow_service(number: usize, seconds: usize) -> String {
    format!(
        "---\n{{kind: Service, name: S{number}, at: {{node: server, http: \"127.0.0.1:1\"}}, for: everyone, timeout: {{idle: {seconds}s}}}}\n"
    )
}

fn node(number: usize, drain: usize) -> String {
    format!("---\n{{kind: Node, name: d{number}, links: hub, apps: {{bind: \"127.0.0.1:8080\"}}, drain: {drain}s}}\n")
}

fn apply(text: &str) -> Request {
    Request { by: "operator".to_owned(), put: read(text).unwrap(), ..Request::default() }
}

/// The process with all nodes.
struct Nodes {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Nodes {
    fn start(port: u16) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["nodes", &port.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        Self { process, input, output }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
        self.input.flush().unwrap();
    }

    /// The times at which this number of nodes acknowledged the revision or a later one.
    fn acknowledged(&mut self, count: usize, revision: u64) -> Vec<f64> {
        let mut at: HashMap<String, f64> = HashMap::new();
        let mut line = String::new();
        while at.len() < count {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the nodes' process ended");
            let mut words = line.split_whitespace();
            let (name, of, when) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
            if of.parse::<u64>().unwrap() >= revision {
                at.insert(name.to_owned(), when.parse().unwrap());
            }
        }
        at.into_values().collect()
    }
}

/// Milliseconds: median, 99th percentile, and maximum.
fn quantiles(mut all: Vec<f64>) -> serde_json::Value {
    all.sort_by(f64::total_cmp);
    let at = |share: f64| all[((all.len() - 1) as f64 * share).round() as usize];
    let rounded = |value: f64| (value * 10.0).round() / 10.0;
    json!({ "median_ms": rounded(at(0.5)), "p99_ms": rounded(at(0.99)), "most_ms": rounded(at(1.0)), "of": all.len() })
}

/// This process's resident memory in KiB, and its CPU seconds.
fn usage() -> (u64, f64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    (resident.split_whitespace().next().unwrap().parse().unwrap(), ticks / 100.0)
}

/// A store that records when its last entry was written.
struct Timed {
    store: Sqlite,
    at: Mutex<f64>,
}

impl Store for Timed {
    fn base(&self) -> BoxFuture<'_, Result<Option<BaseState>, StoreError>> {
        self.store.base()
    }

    fn read(&self, after: Revision) -> BoxFuture<'_, Result<LogRead, StoreError>> {
        self.store.read(after)
    }

    fn append(&self, after: Revision, bytes: Bytes) -> BoxFuture<'_, Result<Revision, StoreError>> {
        Box::pin(async move {
            let revision = self.store.append(after, bytes).await?;
            *self.at.lock().unwrap() = seconds();
            Ok(revision)
        })
    }

    fn changed(&self, after: Revision) -> BoxFuture<'_, Result<(), StoreError>> {
        self.store.changed(after)
    }

    fn begin(&self, base: BaseState) -> BoxFuture<'_, Result<(), StoreError>> {
        self.store.begin(base)
    }

    fn compact(&self, base: BaseState) -> BoxFuture<'_, Result<(), StoreError>> {
        self.store.compact(base)
    }
}

/// A controller that serves, and its port.
async fn controller(directory: &Path) -> (Arc<Controller>, Arc<Timed>, u16, JoinSet<()>) {
    let store = Arc::new(Timed { store: Sqlite::open(directory).unwrap(), at: Mutex::new(0.0) });
    let controller = Arc::new(Controller::start(store.clone()).await.unwrap());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    controller.authority().await.unwrap();
    let mut serving = JoinSet::new();
    let served = controller.clone();
    let audit = Arc::new(Audit::open(directory).unwrap());
    serving.spawn(async move {
        server::serve(served, audit, (listener, None), vec!["127.0.0.1".to_owned()]).await.unwrap()
    });
    (controller, store, port, serving)
}

fn overlay(count: usize, routes: usize) -> String {
    let mut text = "kind: Overlay\nname: scale\n---\n\
         {kind: Node, name: hub, role: standalone, address: \"192.0.2.1:9443\", links: server}\n---\n\
         {kind: Node, name: server, address: \"192.0.2.2:9443\"}\n"
        .to_owned();
    text.extend((0..routes).map(|number| service(number, 1)));
    text.extend((0..count).map(|number| node(number, 10)));
    text
}

async fn measure(count: usize, routes: usize, changes: usize) {
    let directory = tempfile::tempdir().unwrap();
    let (controller, store, port, _serving) = controller(directory.path()).await;
    let text = overlay(count, routes);
    let begun = seconds();
    controller.apply(&apply(&text)).await.unwrap();
    let first = (seconds() - begun) * 1000.0;
    eprintln!("{count} nodes, {routes} services: the first apply took {first:.0} ms");

    let mut nodes = Nodes::start(port);
    let before = usage();
    let begun = seconds();
    for number in 0..count {
        let ticket =
            controller.create_token("operator", &format!("d{number}").parse().unwrap(), STEP_TIMEOUT).await.unwrap();
        nodes.say(&format!("d{number} {}", ticket.reveal()));
    }
    nodes.say("all");
    nodes = tokio::task::spawn_blocking(move || {
        nodes.acknowledged(count, 0);
        nodes
    })
    .await
    .unwrap();
    let enrolled = seconds() - begun;
    let after = usage();
    let each = (after.0.saturating_sub(before.0)) as f64 / count as f64;
    eprintln!("enrolled and running after {enrolled:.1} s; {each:.1} KiB a node");

    let (mut all, mut one, mut until_commit) = (Vec::new(), Vec::new(), Vec::new());
    let (mut all_cpu, mut one_cpu) = (0.0, 0.0);
    // All large changes first: memory that one frees would be counted with the next small one.
    for is_all in [true, false] {
        for round in 0..changes {
            let text = if is_all { slow_service(0, 20 + round) } else { node(round % count, 20 + round) };
            let cpu = usage().1;
            let begun = seconds();
            let outcome = controller.apply(&apply(&text)).await.unwrap();
            let touched = outcome.nodes.keys().filter(|name| name.as_str().starts_with('d')).count();
            let times;
            (nodes, times) = tokio::task::spawn_blocking(move || {
                let times = nodes.acknowledged(touched, outcome.revision);
                (nodes, times)
            })
            .await
            .unwrap();
            let committed = *store.at.lock().unwrap();
            let taken = times.into_iter().map(|at| (at - committed) * 1000.0);
            let spent = usage().1 - cpu;
            until_commit.push((committed - begun) * 1000.0);
            if is_all {
                all.extend(taken);
                all_cpu += spent;
            } else {
                one.extend(taken);
                one_cpu += spent;
            }
        }
    }
    // All nodes at once.
    nodes.say("again");
    let begun = seconds();
    let restarted = tokio::task::spawn_blocking(move || {
        nodes.acknowledged(count, 0);
        nodes
    });
    let mut nodes = restarted.await.unwrap();
    let cold = seconds() - begun;
    let end = usage();
    let result = json!({
        "nodes": count, "routes": routes, "changes": changes,
        "first_apply_ms": first.round(),
        "all": quantiles(all), "one": quantiles(one), "from_call_to_commit": quantiles(until_commit),
        "cpu_ms_a_change": { "all": (all_cpu * 1000.0 / changes as f64).round(), "one": (one_cpu * 1000.0 / changes as f64).round() },
        "enrol_s": enrolled, "cold_start_s": cold,
        "kib_a_node": each, "resident_mib": end.0 / 1024,
    });
    println!("{}", serde_json::to_string_pretty(&result).unwrap());
    let _ = nodes.process.kill();
    let _ = nodes.process.wait();
}

/// All nodes: each enrols and follows.
async fn nodes(port: u16) {
    let place: ControllerAddr = format!("https://127.0.0.1:{port}").parse().unwrap();
    let (say, mut said) = mpsc::unbounded_channel::<String>();
    let (told, mut lines) = mpsc::unbounded_channel::<String>();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if told.send(line).is_err() {
                return;
            }
        }
    });
    let mut printing = JoinSet::new();
    printing.spawn(async move {
        while let Some(line) = said.recv().await {
            let mut out = std::io::stdout().lock();
            writeln!(out, "{line}").unwrap();
            while let Ok(line) = said.try_recv() {
                writeln!(out, "{line}").unwrap();
            }
            out.flush().unwrap();
        }
    });
    let mut identities = Vec::new();
    let slots = Arc::new(tokio::sync::Semaphore::new(AT_ONCE));
    let mut following = JoinSet::new();
    while let Some(line) = lines.recv().await {
        match line.split_once(' ') {
            Some((name, token)) => {
                let (name, ticket): (String, EnrolmentToken) = (name.to_owned(), token.parse().unwrap());
                let slot = slots.clone().acquire_owned().await.unwrap();
                let identity = enrol(&place, &ticket).await;
                drop(slot);
                identities.push((name.clone(), identity.clone()));
                following.spawn(follow(place.clone(), name, identity, say.clone()));
            }
            None if line == "again" => {
                following.shutdown().await;
                following = JoinSet::new();
                for (name, identity) in &identities {
                    following.spawn(follow(place.clone(), name.clone(), identity.clone(), say.clone()));
                }
            }
            None => {}
        }
    }
}

type Identity = (CertifiedKey, String);

async fn enrol(place: &ControllerAddr, ticket: &EnrolmentToken) -> Identity {
    let key = KeyPair::generate().unwrap();
    let request = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec().into();
    let client = Client::connect(place, &ControllerPin::Pin(ticket.pin), None).await.unwrap();
    let issued = client.enrol(EnrolRequest { token: ticket.reveal(), request }).await.unwrap();
    let own = CertifiedKey::from_pem(issued.certificate.as_bytes(), key.serialize_pem().as_bytes()).unwrap();
    (own, issued.authorities)
}

async fn follow(place: ControllerAddr, name: String, (own, authorities): Identity, say: mpsc::UnboundedSender<String>) {
    let mut snapshot: Option<Arc<Snapshot>> = None;
    loop {
        let connected = Client::connect(&place, &ControllerPin::Authorities(authorities.clone()), Some(&own)).await;
        let Ok(client) = connected else {
            tokio::time::sleep(Duration::from_millis(200)).await;
            continue;
        };
        let (report, reports) = mpsc::channel(4);
        report.send(Report::default()).await.unwrap();
        let reports = futures_util::stream::unfold(reports, async |mut reports| Some((reports.recv().await?, reports)));
        let Ok(mut orders) = client.follow(reports).await else { continue };
        while let Ok(Some(order)) = orders.message().await {
            let checked = hermes_model::check_json(&order.document, Path::new(".")).unwrap();
            // Frees the earlier snapshot here.
            drop(snapshot.replace(Arc::new(checked.snapshot)));
            let running = sha256(&order.document);
            report.send(Report { running, tried: order.revision, ..Report::default() }).await.unwrap();
            say.send(format!("{name} {} {:.6}", order.revision, seconds())).unwrap();
        }
    }
}

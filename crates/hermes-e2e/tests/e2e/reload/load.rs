//! Reloads under load: every kind of change, over and over, while every kind of traffic goes on.
//!
//! `HERMES_LONG=1` runs the thousand reloads of the issue; without it their number is small enough for every run of
//! `make test`. Figures are printed, and asserted only as hang bounds.

use hermes_testkit::binary::hermes;
use std::{
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use hermes_testkit::{
    ca::{Authority, Identity, Subject},
    generation_log::GenerationLog,
    origin::{self, Origin, stream},
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    poll::until,
    tls,
    traffic::{Traffic, TunnelTarget},
};
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::reload::{get, loopback, overlay};

/// How many reloads: a few in every run, the issue's thousand on demand.
fn reloads(short: u64) -> u64 {
    if std::env::var_os("HERMES_LONG").is_some() { 1000 } else { short }
}

/// A far node behind a near one, and origins behind both: what is reloaded in the large test.
struct Fixture {
    overlay: Overlay,
    generations: GenerationLog,
    web: [Origin; 3],
    far: Node,
    ports: [SocketAddr; 2],
    strangers: Authority,
    _echoes: [Origin; 2],
}

const FAR: &str = "
access-log: off
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
$MORE
routes:
- {name: db, match: {kind: tcp, authority: 'DB:3306'}, terminate: {tcp: '$ECHO'}}
- {name: video, match: {kind: udp, authority: 'VIDEO:5004'}, terminate: {udp: '$UDP'}}
";

const NEAR: &str = "
limits: {upstream-idle: 1s}
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http}
- {name: db, bind: '127.0.0.1:0', protocol: tcp, authority: 'DB:3306'}
- {name: video, bind: '127.0.0.1:0', protocol: udp, authority: 'VIDEO:5004'}
- {name: secure, bind: '127.0.0.1:0', protocol: http, tls: {client: none, cert: '$CERT', key: '$KEY'}}
- {name: moving, bind: '$MOVING', protocol: http}
routes:
- name: app
  match: {authority: APP}
  upstream: $TARGET
  rewrite: {set-headers: {x-generation: '$NUMBER', x-colour: '$COLOUR'}}
- {name: db, match: {kind: tcp, authority: 'DB:3306'}, upstream: far}
- {name: video, match: {kind: udp, authority: 'VIDEO:5004'}, upstream: far, timeout: {idle: 3s}}
upstreams:
- {name: first, protocol: h1, endpoints: ['$FIRST']}
- {name: second, protocol: h1, endpoints: ['$SECOND']}
- {name: far, protocol: h2, endpoints: ['$FAR'], tls: {node: far}}
";

/// What the near node's document says, and what can be seen of it.
#[derive(Clone, Copy)]
struct Plan {
    number: u64,
    second: bool,
    other_endpoint: bool,
    red: bool,
    certificate: u64,
    other_port: bool,
}

impl Plan {
    fn next(self) -> Self {
        let number = self.number + 1;
        let turn = |now: bool, of: u64| if number % 5 == of { !now } else { now };
        Self {
            number,
            second: turn(self.second, 0),
            other_endpoint: turn(self.other_endpoint, 1),
            red: turn(self.red, 2),
            certificate: if number % 5 == 3 { number } else { self.certificate },
            other_port: turn(self.other_port, 4),
        }
    }

    /// The label of the origin that it leads to.
    fn origin(self) -> &'static str {
        match (self.second, self.other_endpoint) {
            (true, _) => "b",
            (false, false) => "a",
            (false, true) => "c",
        }
    }

    fn colour(self) -> &'static str {
        if self.red { "red" } else { "blue" }
    }
}

impl Fixture {
    async fn new() -> Self {
        let overlay = overlay();
        let generations = GenerationLog::default();
        let web = [
            generations.origin(loopback(), "a").await.unwrap(),
            generations.origin(loopback(), "b").await.unwrap(),
            generations.origin(loopback(), "c").await.unwrap(),
        ];
        let echo = stream::echo(origin::listen(loopback()).unwrap()).unwrap();
        let udp = Origin::udp_echo(loopback()).unwrap();
        let far = overlay.node("far").identity(&Subject::node("far")).unwrap().document(FAR);
        let far = far.with("ECHO", echo.address()).with("UDP", udp.address()).with("MORE", "").start().await.unwrap();
        let ports = [(); 2].map(|()| hermes_testkit::port::reserve("127.0.33.1"));
        let strangers = Authority::new("strangers").unwrap();
        Self { overlay, generations, web, far, ports, strangers, _echoes: [echo, udp] }
    }

    /// A new certificate of the `secure` listener, under a name of its own.
    fn certificate(&self, number: u64) -> (PathBuf, PathBuf, Identity) {
        let identity = self.strangers.issue(&Subject::server("secure.example")).unwrap();
        let files = identity.write(self.overlay.dir(), &format!("secure-{number}")).unwrap();
        (files.cert, files.key, identity)
    }

    fn values(&self, plan: Plan, certificate: &(PathBuf, PathBuf, Identity)) -> Vec<(&'static str, String)> {
        let first = if plan.other_endpoint { 2 } else { 0 };
        vec![
            ("NUMBER", plan.number.to_string()),
            ("TARGET", if plan.second { "second" } else { "first" }.to_owned()),
            ("FIRST", self.web[first].address().to_string()),
            ("SECOND", self.web[1].address().to_string()),
            ("COLOUR", plan.colour().to_owned()),
            ("CERT", certificate.0.display().to_string()),
            ("KEY", certificate.1.display().to_string()),
            ("MOVING", self.ports[usize::from(plan.other_port)].to_string()),
            ("FAR", self.far.address("overlay").to_string()),
        ]
    }

    /// What was changed can be seen from outside.
    async fn see(&self, near: &Node, plan: Plan, certificate: &Identity) {
        let first_request = self.generations.of(plan.number, EFFECT_TIMEOUT).await;
        assert_eq!(first_request.origin, plan.origin(), "generation {} leads elsewhere", plan.number);
        assert_eq!(first_request.head.header("x-colour").as_deref(), Some(plan.colour()));
        let (moved, left) = (self.ports[usize::from(plan.other_port)], self.ports[usize::from(!plan.other_port)]);
        match plan.number % 5 {
            3 => {
                let secure = near.address("secure");
                until("the new certificate", || shows(secure, certificate, self.strangers.pem())).await;
            }
            4 => {
                assert_eq!(get(moved, "APP", "/").await.unwrap().0, 200, "the listener is not at its new port");
                until("the old port closed", || async { TcpStream::connect(left).await.is_err() }).await;
            }
            _ => {}
        }
    }
}

/// Whether a handshake shows this certificate. A handshake that fails is never right.
async fn shows(secure: SocketAddr, identity: &Identity, ca: &str) -> bool {
    let wanted = CertificateDer::from_pem_slice(identity.cert_pem.as_bytes()).unwrap();
    let connector = TlsConnector::from(tls::client(ca, None, &["http/1.1"]).unwrap());
    let tcp = TcpStream::connect(secure).await.unwrap();
    let stream = connector.connect(ServerName::try_from("secure.example").unwrap(), tcp).await.unwrap();
    stream.get_ref().1.peer_certificates().unwrap()[0] == wanted
}

fn all_kinds(near: &Node) -> Traffic {
    let mut traffic = Traffic::default();
    let apps = near.address("apps");
    for _ in 0..2 {
        traffic.one_shot(apps, "APP", "/one-shot");
        traffic.keep_alive(apps, "APP", "/keep-alive");
        traffic.h2(apps, "app", "/h2");
        traffic.uploads(apps, "APP", "/upload");
    }
    for seed in 0..3 {
        traffic.tunnel(TunnelTarget::Bare(near.address("db")), seed);
        traffic.tunnel(TunnelTarget::Connect(apps, "DB:3306".to_owned()), 10 + seed);
        traffic.flow(near.address("video"), 20 + seed);
    }
    traffic
}

fn print_latencies(mut all: Vec<Duration>) {
    all.sort();
    let at = |share: f64| all[((all.len() - 1) as f64 * share) as usize];
    let (p50, p99, max) = (at(0.5), at(0.99), at(1.0));
    println!("{} reloads; write to first sight at the origin: p50 {p50:.1?} p99 {p99:.1?} max {max:.1?}", all.len());
    assert!(max < EFFECT_TIMEOUT);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reloads_under_load_lose_nothing_and_are_seen_at_once() {
    let mut fixture = Fixture::new().await;
    let mut plan =
        Plan { number: 0, second: false, other_endpoint: false, red: false, certificate: 0, other_port: false };
    let mut certificate = fixture.certificate(0);
    let mut near = fixture.overlay.node("near").identity(&Subject::node("near")).unwrap().document(NEAR);
    for (name, value) in fixture.values(plan, &certificate) {
        near = near.with(name, value);
    }
    let near = near.start().await.unwrap();
    let traffic = all_kinds(&near);
    traffic.progress(2).await;
    let (descriptors, threads, memory) = (near.descriptors().unwrap(), near.threads().unwrap(), near.memory().unwrap());
    let mut latencies = Vec::new();
    for round in 0..reloads(60) {
        plan = plan.next();
        if plan.certificate == plan.number {
            certificate = fixture.certificate(plan.number);
        }
        let written = Instant::now();
        near.replace(NEAR, &fixture.values(plan, &certificate)).unwrap();
        let first_request = fixture.generations.of(plan.number, EFFECT_TIMEOUT).await;
        latencies.push(first_request.at.saturating_duration_since(written));
        fixture.see(&near, plan, &certificate.2).await;
        if round % 10 == 9 {
            let more = "- {name: more, bind: '127.0.0.1:0', protocol: http}";
            let more = if round % 20 == 9 { more } else { "" };
            let [echo, udp] = [&fixture._echoes[0], &fixture._echoes[1]].map(|origin| origin.address().to_string());
            fixture.far.reload(FAR, &[("MORE", more.to_owned()), ("ECHO", echo), ("UDP", udp)]).await.unwrap();
        }
    }
    traffic.progress(2).await;
    let report = traffic.finish().await;
    print!("{report}");
    report.assert_whole(10);
    print_latencies(latencies);
    let number = plan.number as f64;
    assert_eq!(near.metric("hermes_reloads_total", "result=\"applied\"").await.unwrap(), number, "{}", near.log());
    assert_eq!(near.metric("hermes_reloads_total", "result=\"refused\"").await.unwrap(), 0.0, "{}", near.log());
    near.quiet().await;
    println!(
        "descriptors {descriptors} -> {}, memory {memory} -> {}",
        near.descriptors().unwrap(),
        near.memory().unwrap()
    );
    until("descriptors are given back", || async { near.descriptors().unwrap() <= descriptors }).await;
    assert_eq!(near.threads().unwrap(), threads);
    let grown = near.memory().unwrap().saturating_sub(memory);
    assert!(grown < 48 << 20, "{grown} bytes more after {number} reloads");
}

/// A node that went from many routes to few keeps nothing of the many.
#[tokio::test]
async fn memory_of_a_large_document_is_returned() {
    let overlay = Overlay::new(hermes()).unwrap();
    let document = |routes: usize| {
        let routes: String = (0..routes)
            .map(|at| {
                let matches = format!("authority: 'h{at}.example', path: '/a/{at}/*'");
                format!("- {{name: r{at}, match: {{{matches}}}, respond: {{body: x}}}}\n")
            })
            .collect();
        format!("listeners: [{{name: in, bind: '127.0.0.1:0', protocol: http}}]\nroutes:\n{routes}")
    };
    let (few, many) = (document(5), document(ROUTES));
    let node = overlay.node("large").document(&few).start().await.unwrap();
    let begin = node.memory().unwrap();
    for (number, document) in [&many, &few, &many, &few].into_iter().enumerate() {
        // `/config` would make another copy of the document.
        node.replace(document, &[]).unwrap();
        node.says(&format!("applied generation={} ", number + 2)).await;
    }
    let peak = node.peak_memory().unwrap();
    println!("begin {begin}, peak {peak}");
    assert!(peak - begin < PEAK, "begin {begin}, peak {peak}");
    until("the memory is returned", || async { node.memory().unwrap().saturating_sub(begin) < RETURNED }).await;
}

const ROUTES: usize = 20_000;
/// Twelve runs took 90 to 98 MiB.
const PEAK: u64 = 105 << 20;
const RETURNED: u64 = 20 << 20;

//! client - node - link - node - ... - node - origin: a chain whose links may be dark, each node in a namespace of its own.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use hermes_testkit::{
    ca::Subject,
    door::NODE_NAME,
    link::{self, Conditions, Link, Up},
    netns::Namespace,
    origin::{self, Origin, http::Version},
    overlay::{Draft, Node, Overlay},
    skip::needs_root,
    tls,
};
use nix::sys::signal::Signal;
use tokio::net::TcpListener;

/// Bits a second, as in the papers.
pub(crate) const RATE: u64 = 10_000_000;
pub(crate) const SECOND: Duration = Duration::from_secs(1);
const PORT: u16 = 9443;

const FIRST: &str = "
workers: 2
state: $STATE
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http}
";
const DOOR: &str = "
workers: 2
state: $STATE
listeners:
- {name: door, bind: '$AT', protocol: http, tls: {client: required}}
";
const ON: &str = "
routes:
- {name: on, upstream: next, custody: {deadline: 5m}}
upstreams:
- {name: next, protocol: h2, endpoints: ['$NEXT'], tls: {node: $NAME}}
";
const LAST: &str = "
routes:
- {name: secure, match: {kind: tcp, authority: 'SECURE:443'}, terminate: {tcp: '$SECURE'}}
- {name: closed, match: {kind: tcp, authority: 'CLOSED:443'}, terminate: {tcp: '127.0.0.1:1'}}
- {name: all, match: {kind: http}, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";

/// A chain of nodes.
pub(crate) struct Chain {
    pub(crate) namespaces: Vec<Arc<Namespace>>,
    pub(crate) _links: Vec<Link>,
    pub(crate) epoch: Instant,
    pub(crate) overlay: Overlay,
    pub(crate) nodes: Vec<Node>,
    pub(crate) origin: Origin,
    secure: Origin,
    killed: usize,
    /// How often a node went on with what it held before it was killed.
    pub(crate) resumed: usize,
}

/// Links that are always up, at the papers' rate.
pub(crate) fn always(_: usize) -> Conditions {
    Conditions { rate: Some(RATE), one_way: Duration::from_millis(2), ..Conditions::default() }
}

/// The two ends of a link.
fn ends(link: usize) -> [Ipv4Addr; 2] {
    [1, 2].map(|end| Ipv4Addr::new(10, 71, link as u8, end))
}

/// One link of so many each second, in turns, at the papers' rate.
pub(crate) fn in_turns(of: usize) -> impl Fn(usize) -> Conditions {
    move |link| Conditions {
        rate: Some(RATE),
        one_way: Duration::from_micros(500),
        up: Up::Turns { slot: SECOND, of: of as u32, turn: link as u32 },
        ..Conditions::default()
    }
}

impl Chain {
    /// So many links, each under its conditions. The client is where the first node is.
    pub(crate) async fn start(links: usize, conditions: impl Fn(usize) -> Conditions) -> Self {
        let serve = |listener| origin::http::serve(listener, Version::H1, Bytes::from_static(b"origin")).unwrap();
        Self::before(links, conditions, serve).await
    }

    /// The same before another origin.
    pub(crate) async fn before(
        links: usize,
        conditions: impl Fn(usize) -> Conditions,
        serve: impl FnOnce(TcpListener) -> Origin,
    ) -> Self {
        let namespaces: Vec<_> = (0..=links).map(|_| Arc::new(Namespace::new().unwrap())).collect();
        let epoch = Instant::now();
        let joined = (0..links).map(|number| {
            let ([near, far], both) = (ends(number), conditions(number));
            let [a, b] = [&namespaces[number], &namespaces[number + 1]];
            link::join((a, near), (b, far), [both.clone(), both], epoch).unwrap()
        });
        let joined = joined.collect();
        let at_origin = async { origin::listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap() };
        let listener = namespaces[links].run(at_origin).await.unwrap();
        let origin = serve(listener);
        let at_secure = async { origin::listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap() };
        let listener = namespaces[links].run(at_secure).await.unwrap();
        let overlay = Overlay::new(env!("CARGO_BIN_EXE_hermes")).unwrap();
        let identity = overlay.authority().issue(&Subject::server("secure")).unwrap();
        let config = tls::server(&identity, None, &["http/1.1"]).unwrap();
        let secure = origin::http::serve_tls(listener, config, Bytes::from_static(b"secure")).unwrap();
        let mut chain = Self {
            namespaces,
            _links: joined,
            epoch,
            overlay,
            nodes: Vec::new(),
            origin,
            secure,
            killed: 0,
            resumed: 0,
        };
        for number in (0..=links).rev() {
            let node = chain.draft(number).start().await.unwrap();
            chain.nodes.insert(0, node);
        }
        chain
    }

    pub(crate) fn draft(&self, number: usize) -> Draft<'_> {
        let last = self.namespaces.len() - 1;
        let comes_in = if number == 0 { FIRST } else { DOOR };
        let goes_on = if number == last { LAST } else { ON };
        let name = format!("n{number}");
        let next = SocketAddr::from((ends(number)[1], PORT));
        let mut draft = self.overlay.node(&name).document(&format!("{comes_in}{goes_on}")).with("NEXT", next);
        if number > 0 {
            draft = draft.with("AT", SocketAddr::from((ends(number - 1)[1], PORT)));
        }
        draft = draft.with("STATE", self.overlay.dir().join(format!("state-{name}")).display());
        draft = draft.with("NAME", format!("n{}", number + 1)).with("ORIGIN", self.origin.address());
        draft = draft.with("SECURE", self.secure.address());
        let subject = Subject::node(&name).with_dns(NODE_NAME);
        draft.identity(&subject).unwrap().within(&self.namespaces[number])
    }

    /// Waits until the links are so far in their turns.
    pub(crate) async fn phase(&self, phase: Duration, turn: Duration) {
        let passed = self.epoch.elapsed().as_nanos() % turn.as_nanos();
        let left = (phase.as_nanos() + turn.as_nanos() - passed) % turn.as_nanos();
        tokio::time::sleep(Duration::from_nanos(left as u64)).await;
    }

    /// What curl says of a GET: status, bytes and seconds.
    pub(crate) async fn curl(&self, path: &str) -> (u16, u64, f64) {
        self.timed(&[&format!("http://{}{path}", self.nodes[0].address("apps"))]).await
    }

    /// The same of TLS with the origin itself, by a tunnel.
    pub(crate) async fn curl_through(&self, path: &str) -> (u16, u64, f64) {
        let proxy = format!("http://{}", self.nodes[0].address("apps"));
        self.timed(&["-k", "-p", "-x", &proxy, &format!("https://SECURE{path}")]).await
    }

    async fn timed(&self, words: &[&str]) -> (u16, u64, f64) {
        let form = "%{http_code} %{size_download} %{time_total}";
        let words = [&["curl", "-sS", "-o", "/dev/null", "-w", form, "--max-time", "400"], words].concat();
        let said = self.namespaces[0].output(&words).await.unwrap();
        let mut said = said.split(' ');
        let mut next = || said.next().unwrap();
        (next().parse().unwrap(), next().parse().unwrap(), next().parse().unwrap())
    }

    /// Kills a node as a lack of memory would, and starts it again.
    pub(crate) async fn kill(&mut self, number: usize, pause: Duration) {
        let node = self.nodes.remove(number);
        node.signal(Signal::SIGKILL).unwrap();
        node.ended().await;
        tokio::time::sleep(pause).await;
        let name = format!("n{number}-{}", self.killed);
        self.killed += 1;
        let again = self.draft(number).called(&name).start().await.unwrap();
        self.resumed += usize::from(again.log().contains("goes on with what was held before"));
        self.nodes.insert(number, again);
    }

    pub(crate) fn logs(&self) -> String {
        self.nodes.iter().map(|node| format!("--- {}\n{}\n", node.name(), node.log())).collect()
    }
}

/// Runs a test that makes namespaces.
pub(crate) fn as_root(test: &str) -> bool {
    needs_root(test)
}

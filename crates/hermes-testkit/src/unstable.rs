//! A chain client - node - link - node - ... - node - origin with intermittent links; each node is in its own
//! namespace.
//!
//! In: the links' conditions, and the protocol between nodes. Out: a running chain, with a plaintext origin and a TLS
//! origin after the last node, and downloads by curl. Nodes use custody, with a journal each.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    Error, Result,
    ca::Subject,
    link::{self, Conditions, Link},
    listener_client::NODE_NAME,
    netns::Namespace,
    origin::{self, Origin, http::Version},
    overlay::{Draft, Node, Overlay},
    process, tls,
};
use bytes::Bytes;
pub use hermes_lab::random_outages::{limit, random_outages as seldom};
use hermes_lab::turns;
pub use hermes_lab::turns::{RATE, SLOT as SECOND, in_turns};
use nix::sys::signal::Signal;
use tokio::net::TcpListener;

/// The custody deadline of requests under `/soon/` (see [`HopSettings::custody_or_soon`]).
pub const SHORT_DEADLINE: Duration = Duration::from_secs(12);

const PORT: u16 = 9443;

const FIRST: &str = "
workers: 2
state: $STATE
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http}
- {name: raw, bind: '127.0.0.1:0', protocol: tcp, authority: 'SECURE:443'}
";
const DOOR: &str = "
workers: 2
state: $STATE
listeners:
- {name: door, bind: '$AT', protocol: http, http3: true, tls: {client: required}}
";
const ON: &str = "
routes:
- {name: on, upstream: next$TREATMENT}
upstreams:
- {name: next, protocol: $PROTOCOL, endpoints: ['$NEXT'], tls: {node: $NAME}}
";
const LAST: &str = "
routes:
- {name: secure, match: {kind: tcp, authority: 'SECURE:443'}, terminate: {tcp: '$SECURE'}}
- {name: closed, match: {kind: tcp, authority: 'CLOSED:443'}, terminate: {tcp: '127.0.0.1:1'}}
- {name: all, match: {kind: http}, upstream: origin$LAST}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";

/// The protocol and the routes between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HopSettings {
    /// `h2` or `h3`.
    pub protocol: &'static str,
    /// Settings of a route besides its upstream, with a comma before them.
    pub treatment: &'static str,
    /// The same settings for the route to the origin.
    pub last: &'static str,
}

impl HopSettings {
    /// Custody over this protocol.
    pub fn custody(protocol: &'static str) -> Self {
        Self { protocol, treatment: ", custody: {deadline: 5m}", last: "" }
    }

    /// Custody over this protocol, with a cache.
    pub fn custody_and_cache(protocol: &'static str) -> Self {
        Self { treatment: ", custody: {deadline: 5m}, cache: {}", ..Self::custody(protocol) }
    }

    /// Custody, with the deadline [`SHORT_DEADLINE`] for requests under `/soon/`.
    pub fn custody_or_soon(protocol: &'static str) -> Self {
        let treatment = ", match: {path: '/soon/*'}, custody: {deadline: 12s}}
- {name: late, upstream: next, custody: {deadline: 5m}";
        Self { treatment, ..Self::custody(protocol) }
    }

    /// No custody and no cache.
    pub fn nothing(protocol: &'static str) -> Self {
        Self { treatment: "", ..Self::custody(protocol) }
    }
}

/// A chain of nodes.
#[derive(Debug)]
pub struct Chain {
    /// The namespaces from the client's, with the first node, to the origins'.
    pub namespaces: Vec<Arc<Namespace>>,
    links: Vec<Link>,
    epoch: Instant,
    overlay: Overlay,
    /// The nodes, in the same order.
    pub nodes: Vec<Node>,
    origin: Origin,
    secure: Origin,
    between: HopSettings,
    killed: usize,
    /// Number of exchanges that a node resumed from its journal after it was killed.
    pub resumed: usize,
}

/// Links that are always up, at the papers' rate.
pub fn always(_: usize) -> Conditions {
    Conditions { one_way: Duration::from_millis(2), ..turns::steady() }
}

/// The addresses of both ends of a link.
fn ends(link: usize) -> [Ipv4Addr; 2] {
    [1, 2].map(|end| Ipv4Addr::new(10, 71, link as u8, end))
}

/// The result of a download by curl.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Download {
    /// The HTTP status code.
    pub status: u16,
    /// Bytes of content.
    pub bytes: u64,
    /// Seconds from the start to the last byte.
    pub seconds: f64,
}

impl Chain {
    /// Starts a chain over links with these conditions, with nodes of this binary.
    ///
    /// # Errors
    /// Missing root privileges, or a part that cannot be started.
    pub async fn start(
        hermes: &Path,
        links: usize,
        between: HopSettings,
        conditions: impl Fn(usize) -> Conditions,
    ) -> Result<Self> {
        let serve = |listener| origin::http::serve(listener, Version::H1, Bytes::from_static(b"origin"));
        Self::before(hermes, links, between, conditions, serve).await
    }

    /// Starts a chain before an origin of the caller.
    ///
    /// # Errors
    /// The errors of [`Self::start`].
    pub async fn before(
        hermes: &Path,
        links: usize,
        between: HopSettings,
        conditions: impl Fn(usize) -> Conditions,
        serve: impl FnOnce(TcpListener) -> Result<Origin>,
    ) -> Result<Self> {
        let namespaces = (0..=links).map(|_| Namespace::new().map(Arc::new)).collect::<Result<Vec<_>>>()?;
        let epoch = Instant::now();
        let joined = (0..links).map(|number| {
            let ([near, far], both) = (ends(number), conditions(number));
            let [a, b] = [&namespaces[number], &namespaces[number + 1]];
            link::join((a, near), (b, far), [both.clone(), both], epoch)
        });
        let joined = joined.collect::<Result<Vec<_>>>()?;
        let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
        let listen = || namespaces[links].run(async move { origin::listen(loopback) });
        let origin = serve(listen().await??)?;
        let overlay = Overlay::new(hermes)?;
        let identity = overlay.authority().issue(&Subject::server("secure"))?;
        let config = tls::server(&identity, None, &["http/1.1"])?;
        let secure = origin::http::serve_tls(listen().await??, config, Bytes::from_static(b"secure"))?;
        let (nodes, killed, resumed) = (Vec::new(), 0, 0);
        let mut chain =
            Self { namespaces, links: joined, epoch, overlay, nodes, origin, secure, between, killed, resumed };
        for number in (0..=links).rev() {
            let node = chain.draft(number)?.start().await?;
            chain.nodes.insert(0, node);
        }
        Ok(chain)
    }

    fn draft(&self, number: usize) -> Result<Draft<'_>> {
        let last = self.namespaces.len() - 1;
        let comes_in = if number == 0 { FIRST } else { DOOR };
        let goes_on = if number == last { LAST } else { ON };
        let name = format!("n{number}");
        let next = SocketAddr::from((ends(number)[1], PORT));
        let mut draft = self.overlay.node(&name).document(&format!("{comes_in}{goes_on}")).with("NEXT", next);
        if number > 0 {
            draft = draft.with("AT", SocketAddr::from((ends(number - 1)[1], PORT)));
        }
        draft = draft.with("STATE", self.state(number).display()).with("PROTOCOL", self.between.protocol);
        draft = draft.with("TREATMENT", self.between.treatment).with("LAST", self.between.last);
        draft = draft.with("NAME", format!("n{}", number + 1)).with("ORIGIN", self.origin.address());
        draft = draft.with("SECURE", self.secure.address());
        let subject = Subject::node(&name).with_dns(NODE_NAME);
        Ok(draft.identity(&subject)?.within(&self.namespaces[number]))
    }

    /// The state directory of a node.
    pub fn state(&self, number: usize) -> std::path::PathBuf {
        self.overlay.dir().join(format!("state-n{number}"))
    }

    /// The temporary directory of the chain.
    pub fn dir(&self) -> &Path {
        self.overlay.dir()
    }

    /// The links of the chain.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// The time since the links' epoch.
    pub fn elapsed(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// Waits until this phase of the links' cycle.
    pub async fn phase(&self, phase: Duration, turn: Duration) {
        let passed = self.epoch.elapsed().as_nanos() % turn.as_nanos();
        let left = (phase.as_nanos() + turn.as_nanos() - passed) % turn.as_nanos();
        tokio::time::sleep(Duration::from_nanos(left as u64)).await;
    }

    /// The address at which the first node accepts requests, also as a proxy.
    pub fn apps(&self) -> String {
        format!("http://{}", self.nodes[0].address("apps"))
    }

    /// Downloads a path with curl.
    ///
    /// # Errors
    /// The error message of curl.
    pub async fn curl(&self, path: &str) -> Result<Download> {
        self.timed(&[&format!("{}{path}", self.apps())]).await
    }

    /// Downloads a path from the TLS origin with curl, over TLS 1.3 through a tunnel.
    ///
    /// # Errors
    /// The error message of curl.
    pub async fn curl_through(&self, path: &str) -> Result<Download> {
        self.timed(&["-k", "-p", "-x", &self.apps(), &format!("https://SECURE{path}")]).await
    }

    async fn timed(&self, words: &[&str]) -> Result<Download> {
        let form = "%{http_code} %{size_download} %{time_total}";
        let words = [&["curl", "-sS", "-o", "/dev/null", "-w", form, "--max-time", "400"], words].concat();
        let text = self.namespaces[0].output(&words).await?;
        let all: Vec<_> = text.split(' ').collect();
        let parsed = match all[..] {
            [status, bytes, seconds] => (status.parse().ok()).zip(bytes.parse().ok()).zip(seconds.parse().ok()),
            _ => None,
        };
        let unreadable = || Error::Command { command: "curl".to_owned(), output: text.clone() };
        let ((status, bytes), seconds) = parsed.ok_or_else(unreadable)?;
        Ok(Download { status, bytes, seconds })
    }

    /// Kills a node with SIGKILL, and restarts it.
    ///
    /// # Errors
    /// The node does not start.
    pub async fn kill(&mut self, number: usize, pause: Duration) -> Result<()> {
        self.kill_all(&[number], pause).await
    }

    /// Kills several nodes at the same time. Restarts them one by one, with a pause before each.
    ///
    /// # Errors
    /// A node does not start.
    pub async fn kill_all(&mut self, numbers: &[usize], pause: Duration) -> Result<()> {
        let mut places = numbers.to_vec();
        places.sort_unstable();
        numbers.iter().try_for_each(|number| self.nodes[*number].signal(Signal::SIGKILL))?;
        for number in places.iter().rev() {
            self.nodes.remove(*number).ended().await;
        }
        let mut again = BTreeMap::new();
        for number in numbers {
            tokio::time::sleep(pause).await;
            let name = format!("n{number}-{}", self.killed);
            self.killed += 1;
            let node = self.draft(*number)?.called(&name).start().await?;
            self.resumed += usize::from(node.log().contains("continues with the stored bytes"));
            again.insert(*number, node);
        }
        again.into_iter().for_each(|(number, node)| self.nodes.insert(number, node));
        Ok(())
    }

    /// CPU seconds of all nodes so far.
    ///
    /// # Errors
    /// The system does not report it.
    pub fn cpu(&self) -> Result<f64> {
        let weigh = Error::io("weighing the nodes".to_owned());
        let of = |node: &Node| process::Usage::of_tree(node.pid()).map(|usage| usage.cpu.as_secs_f64());
        self.nodes.iter().map(of).sum::<std::io::Result<f64>>().map_err(weigh)
    }

    /// The logs of all nodes.
    pub fn logs(&self) -> String {
        self.nodes.iter().map(|node| format!("--- {}\n{}\n", node.name(), node.log())).collect()
    }
}

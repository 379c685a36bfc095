//! Nodes in a row, each in its own namespace: a device at either end, and hops of any version between them.
//!
//! In: the hops. Out: a running chain whose far address answers. No MTU is configured.

use hermes_testkit::binary::hermes;
use std::net::{IpAddr, Ipv4Addr};

use hermes_testkit::{
    ca::Subject,
    listener_client::NODE_NAME,
    netns::Namespace,
    overlay::{Draft, Node, Overlay},
    poll::until,
    skip::needs_root,
};

/// How a node passes packets on to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hop {
    H1,
    H2,
    H3,
}

impl Hop {
    pub(crate) fn protocol(self) -> &'static str {
        match self {
            Hop::H1 => "h1",
            Hop::H2 => "h2",
            Hop::H3 => "h3",
        }
    }
}

/// The near machine's addresses in the overlay.
pub(crate) const NEAR: [&str; 2] = ["10.20.0.2", "fd00:20::2"];
/// The far machine's.
pub(crate) const FAR: [&str; 2] = ["10.0.0.1", "fd00:10::1"];
/// Where every node listens.
pub(crate) const PORT: u16 = 9443;

pub(crate) const NEAR_DOCUMENT: &str = "
workers: 2
listeners:
- name: l3
  protocol: tun
  device: hermes0
  address: [10.20.0.2, 'fd00:20::2']
  capture: [10.0.0.1/32, 'fd00:10::1/128']
  set-headers: {hermes-user: alice}
routes:
- {name: vpn, match: {kind: ip}, upstream: next}
upstreams:
- {name: next, protocol: $PROTOCOL, endpoints: ['$NEXT'], tls: {}}
";

pub(crate) const MIDDLE_DOCUMENT: &str = "
workers: 2
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, http3: true, tls: {client: required}}
routes:
- {name: vpn, match: {kind: ip}, upstream: next}
upstreams:
- {name: next, protocol: $PROTOCOL, endpoints: ['$NEXT'], tls: {}}
";

pub(crate) const FAR_DOCUMENT: &str = "
workers: 2
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, http3: true, tls: {client: required}}
routes:
- {name: gateway, match: {kind: ip}, terminate: {tun: gw0, address: [10.0.0.1, 'fd00:10::1'], assign: [10.20.0.0/16, 'fd00:20::/64']}}
";

/// A running row.
pub(crate) struct NodeChain {
    /// The near end first. They end before their namespaces.
    pub(crate) nodes: Vec<Node>,
    pub(crate) namespaces: Vec<Namespace>,
    /// The devices of each link, the nearer end's first.
    pub(crate) links: Vec<[String; 2]>,
    pub(crate) overlay: Overlay,
}

/// Runs a test on this thread, where that can be; says so where it cannot.
pub(crate) fn as_root<F: Future<Output = ()>>(test: &str, body: impl FnOnce() -> F) {
    if needs_root(test) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(body());
    }
}

/// The address of the farther end of a link, where the next node listens.
pub(crate) fn next(link: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, u8::try_from(link).unwrap(), 2)
}

impl NodeChain {
    /// So many places in a row, without nodes.
    pub(crate) fn empty(count: usize) -> Self {
        let overlay = Overlay::new(hermes()).unwrap();
        let namespaces: Vec<Namespace> = (0..count).map(|_| Namespace::new().unwrap()).collect();
        let pairs = namespaces.iter().zip(&namespaces[1..]).enumerate();
        let join = |(link, (one, other)): (usize, (&Namespace, &Namespace))| {
            let there = next(link);
            let [a, b, c, _] = there.octets();
            one.join(Ipv4Addr::new(a, b, c, 1), other, there).unwrap()
        };
        let links = pairs.map(join).collect();
        Self { nodes: Vec::new(), namespaces, links, overlay }
    }

    /// Starts one node more than there are hops, from the far one on, and waits until the far end answers.
    pub(crate) async fn start(hops: &[Hop]) -> Self {
        let mut chain = Self::empty(hops.len() + 1);
        chain.add(hops.len(), FAR_DOCUMENT, None).await;
        for (index, hop) in hops.iter().enumerate().rev() {
            chain.add(index, if index == 0 { NEAR_DOCUMENT } else { MIDDLE_DOCUMENT }, Some(*hop)).await;
        }
        chain.answers().await;
        chain
    }

    /// Waits until the far end answers.
    pub(crate) async fn answers(&self) {
        for far in FAR {
            until("the far end answers", async || self.near().output(&["ping", "-c1", "-W0.3", far]).await.is_ok())
                .await;
        }
    }

    /// Starts a node in front of those that there are.
    pub(crate) async fn add(&mut self, index: usize, document: &str, hop: Option<Hop>) {
        let name = if index == 0 { "near".to_owned() } else { format!("node-{index}") };
        let draft = draft(self, index, &name, document).with("NEXT", format!("{}:{PORT}", next(index)));
        let draft = draft.with("PROTOCOL", hop.map_or("", Hop::protocol));
        let node = draft.start().await.unwrap();
        self.nodes.insert(0, node);
    }

    /// Where the programs of the near end run.
    pub(crate) fn near(&self) -> &Namespace {
        &self.namespaces[0]
    }

    /// Where those of the far end run.
    pub(crate) fn far(&self) -> &Namespace {
        &self.namespaces[self.namespaces.len() - 1]
    }

    /// What nodes have dropped, for a failure's message.
    pub(crate) async fn dropped(&self) -> String {
        let mut report = String::new();
        for node in &self.nodes {
            let (_, metrics) = node.ask("/metrics").await.unwrap_or_default();
            let loss =
                |line: &&str| ["hermes_datagrams_dropped", "hermes_quic_packets"].iter().any(|of| line.starts_with(of));
            for line in metrics.lines().filter(loss) {
                report += &format!("{}: {line}\n", node.name());
            }
        }
        for (number, namespace) in self.namespaces.iter().enumerate() {
            for program in
                [&["ip", "-s", "-s", "link"][..], &["cat", "/proc/net/snmp", "/proc/net/snmp6", "/proc/net/udp"]]
            {
                let text = namespace.output(program).await.unwrap_or_else(|error| error.to_string());
                report += &format!("place {number}, {}:\n{text}\n", program.join(" "));
            }
        }
        report
    }
}

/// A process of the node at a place, which takes over from the one that runs, if one does.
pub(crate) fn process<'a>(
    chain: &'a NodeChain,
    index: usize,
    name: &str,
    document: &str,
    hop: Hop,
    called: &str,
) -> Draft<'a> {
    let socket = chain.overlay.dir().join(format!("{name}.sock"));
    let draft = draft(chain, index, name, document).called(called).args(&["--takeover", socket.to_str().unwrap()]);
    draft.with("NEXT", format!("{}:{PORT}", next(index))).with("PROTOCOL", hop.protocol())
}

/// A node at a place.
pub(crate) fn draft<'a>(chain: &'a NodeChain, index: usize, name: &str, document: &str) -> Draft<'a> {
    let subject = Subject::node(name).standalone().with_dns(NODE_NAME);
    chain.overlay.node(name).document(document).within(&chain.namespaces[index]).identity(&subject).unwrap()
}

/// All addresses of this machine, of both families.
pub(crate) fn anywhere(port: u16) -> std::net::SocketAddr {
    (IpAddr::from([0u8; 16]), port).into()
}

/// Has a node read its document again, as it is; waits until it has.
pub(crate) async fn hang_up(node: &Node) {
    let wanted = node.generation().await.unwrap() + 1;
    node.signal(nix::sys::signal::Signal::SIGHUP).unwrap();
    node.says(&format!("applied generation={wanted} ")).await;
}

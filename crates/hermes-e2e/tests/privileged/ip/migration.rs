//! A live session whose route changes moves: make before break, at each place of its way.
//!
//! In: a near node, two nodes in the middle, two far machines with one address; a ping a hundredth of a second, and a
//! connection. Out: no ping is lost, whoever changes the route; the connection lives on where the far machine stays.

use std::net::Ipv4Addr;

use hermes_testkit::{
    netns::Namespace,
    origin::{self, Origin, stream},
    overlay::Node,
    poll::until,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::ip::node_chain::{FAR, FAR_DOCUMENT, Hop, NEAR_DOCUMENT, NodeChain, anywhere, as_root, draft};
use crate::ip::pings::{pinging, pings};

const ECHO: u16 = 7;
/// One a hundredth of a second: the change comes in their midst.
const PINGS: usize = 120;

const NEAR: &str = "
workers: 2
listeners:
- {name: l3, protocol: tun, device: hermes0, address: [10.20.0.2], capture: [10.0.0.1/32], set-headers: {hermes-user: alice}}
routes:
- {name: vpn, match: {kind: ip}, upstream: $TO}
upstreams:
- {name: one, protocol: $PROTOCOL, endpoints: ['10.77.0.2:9001'], tls: {}}
- {name: other, protocol: $PROTOCOL, endpoints: ['10.77.0.2:9002'], tls: {}}
";

const MIDDLE: &str = "
workers: 2
listeners:
- {name: overlay, bind: '0.0.0.0:$PORT', protocol: http, http3: true, tls: {client: required}}
routes:
- {name: vpn, match: {kind: ip}, upstream: $TO}
upstreams:
- {name: far, protocol: $PROTOCOL, endpoints: ['10.77.1.2:9443'], tls: {}}
- {name: elsewhere, protocol: $PROTOCOL, endpoints: ['10.77.2.2:9443'], tls: {}}
- {name: other, protocol: $PROTOCOL, endpoints: ['127.0.0.1:9002'], tls: {}}
";

/// Two ways in the middle (`one`, `other`), and two far machines: `far`, and `elsewhere`.
struct Fork {
    near: Node,
    one: Node,
    hop: Hop,
    _far: [Node; 2],
    other: Node,
    _echoes: [Origin; 2],
    chain: NodeChain,
}

impl Fork {
    async fn new(hop: Hop) -> Self {
        let mut chain = NodeChain::empty(3);
        let elsewhere = Namespace::new().unwrap();
        chain.namespaces[1].join(Ipv4Addr::new(10, 77, 2, 1), &elsewhere, Ipv4Addr::new(10, 77, 2, 2)).unwrap();
        chain.namespaces.push(elsewhere);
        let start = async |namespace, name: &str, document, port: &str, to: &str| {
            let draft = draft(&chain, namespace, name, document).with("PROTOCOL", hop.protocol());
            draft.with("PORT", port).with("TO", to).start().await.unwrap()
        };
        let far = [start(2, "far", FAR_DOCUMENT, "", "").await, start(3, "elsewhere", FAR_DOCUMENT, "", "").await];
        let other = start(1, "other", MIDDLE, "9002", "far").await;
        let one = start(1, "one", MIDDLE, "9001", "far").await;
        let near = start(0, "near", NEAR, "", "one").await;
        let listening = async || stream::echo(origin::listen(anywhere(ECHO)).unwrap()).unwrap();
        let echoes =
            [chain.namespaces[2].run(listening()).await.unwrap(), chain.namespaces[3].run(listening()).await.unwrap()];
        let this = Self { near, one, hop, _far: far, other, _echoes: echoes, chain };
        until("the far end answers", async || this.ping().await.is_ok()).await;
        this
    }

    async fn ping(&self) -> hermes_testkit::Result<String> {
        self.chain.near().output(&["ping", "-q", "-W", "2", "-c", "1", FAR[0]]).await
    }

    /// The port of the one of both that its session goes by.
    async fn used_of_both(&self) -> &'static str {
        let (_, sessions) = self.near.ask("/sessions").await.unwrap();
        if sessions.contains("10.77.0.2:9001") { "9001" } else { "9002" }
    }

    async fn connection(&self) -> TcpStream {
        let far: Ipv4Addr = FAR[0].parse().unwrap();
        self.chain.near().run(TcpStream::connect((far, ECHO))).await.unwrap().unwrap()
    }

    /// A document is replaced under pings; none is lost.
    async fn pings_through(&mut self, what: &str, change: Change) {
        let (hop, protocol) = (self.hop, self.hop.protocol().to_owned());
        let near = self.chain.near();
        let pinging = pings(near, &["-i", "0.01"], PINGS, FAR[0]);
        let (node, document, port) = match change {
            Change::Near(_) => (&mut self.near, NEAR, ""),
            Change::Middle(_) => (&mut self.one, MIDDLE, "9001"),
        };
        let (Change::Near(to) | Change::Middle(to)) = change;
        let values = [("PROTOCOL", protocol), ("PORT", port.to_owned()), ("TO", to.to_owned())];
        let (pinged, reloaded) = tokio::join!(pinging, node.reload(document, &values));
        reloaded.unwrap();
        let lost = pinged.lost();
        assert!(lost.is_none(), "{what} over {hop:?}: {lost:?}\n{}", self.dropped().await);
        let log = format!("{}{}", self.near.log(), self.one.log());
        assert!(!log.contains("cannot move a flow"), "{what} over {hop:?}: {log}");
    }

    async fn dropped(&self) -> String {
        let mut logs = String::new();
        for node in [&self.near, &self.one, &self.other, &self._far[0], &self._far[1]] {
            let (_, metrics) = node.ask("/metrics").await.unwrap_or_default();
            for line in metrics.lines().filter(|line| line.starts_with("hermes_datagrams_dropped_total")) {
                logs += &format!("{}: {line}\n", node.name());
            }
        }
        logs
    }
}

/// Whose route changes, and whither.
#[derive(Clone, Copy)]
enum Change {
    Near(&'static str),
    Middle(&'static str),
}

async fn still_there(connection: &mut TcpStream) {
    connection.write_all(b"still there?").await.unwrap();
    let mut answer = [0; 12];
    connection.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"still there?");
}

async fn moves(hop: Hop) {
    let mut fork = Fork::new(hop).await;
    let mut connection = fork.connection().await;
    still_there(&mut connection).await;
    fork.pings_through("the near node goes another way", Change::Near("other")).await;
    still_there(&mut connection).await;
    let moved = "INFO a session has moved listener=l3 network=10.0.0.1/32 user=alice route=vpn from=one/10.77.0.2:9001 \
                 to=other/10.77.0.2:9002 reason=the document changed its route";
    assert_eq!(fork.near.log().matches(moved).count(), 1, "{}", fork.near.log());
    fork.pings_through("and back", Change::Near("one")).await;
    assert_eq!(fork.near.log().matches("a session has moved").count(), 2, "{}", fork.near.log());
    still_there(&mut connection).await;
    fork.pings_through("a node in the middle goes another way", Change::Middle("other")).await;
    still_there(&mut connection).await;
    fork.pings_through("the far end becomes another machine", Change::Middle("elsewhere")).await;
    // That machine knows nothing of the connection, and serves new ones.
    still_there(&mut fork.connection().await).await;
}

#[test]
fn no_packet_is_lost_by_a_move() {
    as_root("no packet is lost by a move", || async {
        // Side by side: they wait more than they work.
        tokio::join!(moves(Hop::H1), moves(Hop::H2), moves(Hop::H3));
    });
}

/// Two ways to the same far machine.
const NEAR_BOTH: &str = "
workers: 2
listeners:
- {name: l3, protocol: tun, device: hermes0, address: [10.20.0.2], capture: [10.0.0.1/32], set-headers: {hermes-user: alice}}
routes:
- {name: vpn, match: {kind: ip}, upstream: both, timeout: {connect: 3s}}
upstreams:
- {name: both, protocol: h2, endpoints: ['10.77.0.2:9001', '10.77.0.2:9002'], tls: {}}
";

/// Packets to these ports are dropped, and those that come from there: nobody is told.
async fn darken(namespace: &Namespace, transport: &str, ports: &str) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let rules = format!(
        "table inet dark\ndelete table inet dark\ntable inet dark {{\n\
         chain out {{ type filter hook output priority 0; {transport} dport {{ {ports} }} drop; }}\n\
         chain in {{ type filter hook input priority 0; {transport} sport {{ {ports} }} drop; }}\n}}\n"
    );
    std::fs::write(file.path(), rules).unwrap();
    namespace.output(&["nft", "-f", file.path().to_str().unwrap()]).await.unwrap();
}

async fn lighten(namespace: &Namespace) {
    namespace.output(&["nft", "delete", "table", "inet", "dark"]).await.unwrap();
}

/// A session lasts, and asks for no other connection by itself.
#[test]
fn a_session_goes_back_to_quic_once_that_gets_through() {
    as_root("a session goes back to QUIC", || async {
        let fork = Fork::new(Hop::H3).await;
        darken(fork.chain.near(), "udp", "9001").await;
        until("it goes by HTTP/2", async || {
            fork.ping().await.is_ok() && fork.near.log().contains("HTTP/2 is used instead")
        })
        .await;
        let mut connection = fork.connection().await;
        still_there(&mut connection).await;
        let by_tcp = ["ss", "-Htn", "state", "established", "dst", "10.77.0.2"];
        let over_tcp = async || fork.chain.near().output(&by_tcp).await.unwrap();
        assert!(over_tcp().await.contains(":9001"));
        lighten(fork.chain.near()).await;
        // In another network it is tried before its time.
        fork.chain.near().ip(&["addr", "add", "10.9.9.9/32", "dev", "lo"]).unwrap();
        let pinged = pings(fork.chain.near(), &["-i", "0.01"], PINGS, FAR[0]);
        let (pinged, ()) = tokio::join!(pinged, fork.near.says("a session has moved"));
        assert!(pinged.lost().is_none(), "{:?}\n{}", pinged.lost(), fork.dropped().await);
        let log = fork.near.log();
        assert!(log.contains("QUIC works again"), "{log}");
        still_there(&mut connection).await;
        until("no connection of HTTP/2 is left", async || over_tcp().await.is_empty()).await;
    });
}

/// TCP would try for a quarter of an hour, and less and less often.
#[test]
fn a_session_leaves_a_path_that_is_dark() {
    as_root("a path that is dark", || async {
        let mut fork = Fork::new(Hop::H2).await;
        fork.near.reload(NEAR_BOTH, &[]).await.unwrap();
        until("it has both", async || fork.ping().await.is_ok() && fork.near.log().contains("to=both/")).await;
        let mut connection = fork.connection().await;
        still_there(&mut connection).await;
        let used = fork.used_of_both().await;
        let other = if used == "9001" { "9002" } else { "9001" };
        darken(fork.chain.near(), "tcp", used).await;
        until("it goes by the other one", async || {
            fork.ping().await.is_ok() && fork.near.log().contains(&format!("to=both/10.77.0.2:{other}"))
        })
        .await;
        still_there(&mut connection).await;
        fork.near.says("HTTP/2 connection acknowledges no data").await;
        darken(fork.chain.near(), "tcp", "9001, 9002").await;
        let failed = async || fork.ping().await.is_err() && fork.near.log().contains("cannot move a flow");
        until("there is no way", failed).await;
        lighten(fork.chain.near()).await;
        until("it answers again", async || fork.ping().await.is_ok()).await;
        still_there(&mut connection).await;
        assert!(!fork.near.records().iter().any(|record| record["kind"] == "ip"), "a session has ended");
    });
}

/// Only where the document leads a session elsewhere has it no right to be where it was.
#[test]
fn a_session_stays_if_its_new_path_refuses_it() {
    as_root("a session that is refused by another way", || async {
        let mut fork = Fork::new(Hop::H2).await;
        let mut connection = fork.connection().await;
        fork.near.reload(NEAR_BOTH, &[]).await.unwrap();
        until("it has both", async || fork.ping().await.is_ok() && fork.near.log().contains("to=both/")).await;
        let used = fork.used_of_both().await;
        let refuses = MIDDLE.replace("upstream: $TO", "respond: {status: 403}");
        let (other, port) = if used == "9001" { (&mut fork.other, "9002") } else { (&mut fork.one, "9001") };
        other.reload(&refuses, &[("PROTOCOL", "h2".to_owned()), ("PORT", port.to_owned())]).await.unwrap();
        darken(fork.chain.near(), "tcp", used).await;
        let failed = async || fork.ping().await.is_err() && fork.near.log().contains("cannot move a flow");
        until("the other one refuses", failed).await;
        assert!(fork.near.log().contains("refused the tunnel with status 403"), "{}", fork.near.log());
        lighten(fork.chain.near()).await;
        until("it answers again", async || fork.ping().await.is_ok()).await;
        still_there(&mut connection).await;
        assert!(!fork.near.records().iter().any(|record| record["kind"] == "ip"), "a session has ended");
    });
}

/// A gateway whose route changes: `bobs` keeps a device where it is named.
const GATE: &str = "
workers: 2
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, http3: true, tls: {client: required}}
routes:
- {name: bobs, match: {kind: ip, user: bob}, terminate: {tun: $BOBS, address: [10.0.0.1, 'fd00:10::1']}}
- {name: vpn, match: {kind: ip}, $ACTION}
upstreams:
- {name: elsewhere, protocol: h2, endpoints: ['10.77.1.2:9443'], tls: {}}
";
const HERE: &str = "terminate: {tun: gw0, address: [10.0.0.1, 'fd00:10::1']}";
const ELSEWHERE: &str = "upstream: elsewhere";

const REFUSES: &str = "
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, tls: {client: required}}
routes:
- {name: nobody, respond: {status: 403}}
";

/// A near node, and a gate behind it whose device answers.
async fn gateway(chain: &mut NodeChain, bobs: &str) -> Node {
    let draft = draft(chain, 1, "gate", GATE).with("BOBS", bobs).with("ACTION", HERE);
    let gateway = draft.start().await.unwrap();
    chain.add(0, NEAR_DOCUMENT, Some(Hop::H2)).await;
    chain.answers().await;
    gateway
}

async fn goes_elsewhere(gateway: &mut Node, bobs: &str) {
    gateway.reload(GATE, &[("BOBS", bobs.to_owned()), ("ACTION", ELSEWHERE.to_owned())]).await.unwrap();
}

/// Where the new way is not there yet the session goes on with the old device, which the document names no more.
#[test]
fn a_move_that_fails_is_tried_again() {
    as_root("a move that fails is tried again", || async {
        let mut chain = NodeChain::empty(3);
        let mut gateway = gateway(&mut chain, "gw1").await;
        goes_elsewhere(&mut gateway, "gw1").await;
        gateway.says("cannot move a flow").await;
        pings(chain.near(), &["-i", "0.01"], 20, FAR[0]).await.all_came(&chain, "with the old device").await;
        let _elsewhere = draft(&chain, 2, "elsewhere", FAR_DOCUMENT).start().await.unwrap();
        let has_device = async || chain.namespaces[1].output(&["ip", "link", "show", "gw0"]).await.is_ok();
        until("the old device is left", async || !has_device().await).await;
        chain.answers().await;
    });
}

/// Who may not go where the document says has lost the right to be where it was.
#[test]
fn a_session_that_is_refused_where_it_would_move_ends() {
    as_root("a session that is refused where it would move ends", || async {
        let mut chain = NodeChain::empty(3);
        let _elsewhere = draft(&chain, 2, "elsewhere", REFUSES).start().await.unwrap();
        let mut gateway = gateway(&mut chain, "gw0").await;
        goes_elsewhere(&mut gateway, "gw0").await;
        for far in FAR {
            let answers = async || chain.near().output(&["ping", "-c1", "-W0.3", far]).await.is_ok();
            until("nothing answers", async || !answers().await).await;
        }
        let ended = gateway.record(|record| record["kind"] == "ip" && record["error"].is_string()).await;
        assert!(ended.to_string().contains("403"), "{ended}");
    });
}

/// To the new device the old one's route for the session's address is nobody else's.
#[test]
fn a_device_that_is_named_anew_keeps_its_sessions() {
    as_root("a device that is named anew", || async {
        let mut chain = NodeChain::empty(2);
        let mut gateway = gateway(&mut chain, "gw9").await;
        for device in ["gw1", "gw0"] {
            let action = HERE.replace("gw0", device);
            let values = [("BOBS", "gw9".to_owned()), ("ACTION", action)];
            let [v4, v6] = FAR;
            let ((v4, reloaded), (v6, ())) =
                tokio::join!(pinging(&chain, v4, gateway.reload(GATE, &values)), pinging(&chain, v6, async {}));
            reloaded.unwrap();
            for pinged in [v4, v6] {
                pinged.all_came(&chain, &format!("{device}, {}", gateway.log())).await;
            }
            let mode = async || {
                chain.namespaces[1].output(&["ip", "route", "get", crate::ip::node_chain::NEAR[0]]).await.unwrap()
            };
            until("the session has moved", async || mode().await.contains(&format!("dev {device}"))).await;
        }
        assert!(!gateway.records().iter().any(|record| record["kind"] == "ip"), "a session has ended");
        let links = async || chain.namespaces[1].output(&["ip", "-brief", "link"]).await.unwrap();
        until("the other device goes with what sessions had of it", async || !links().await.contains("gw1")).await;
        assert!(links().await.contains("gw0"));
    });
}

//! The `ip` listener: IP packets in UDP datagrams, who may send them, and how their addresses are translated.
//!
//! In: handmade datagrams, and a gateway that assigns any address. Out: packets at the gateway and back, counters,
//! ICMP. Needs no root, since there is no device.

use hermes_testkit::binary;
use std::{
    fs,
    net::{IpAddr, SocketAddr},
    process::Command,
};

use hermes_testkit::{
    flow::capsule,
    ip::{self, icmp, packet, ping},
    origin,
    overlay::{Node, Overlay},
    poll::until,
    skip::needs_root,
};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, UdpSocket},
};

use crate::ip::scripted_gateway::{ScriptedGateway, address, within};

const DOCUMENT: &str = "
workers: 1
listeners:
- {name: ten, bind: '127.0.0.1:0', protocol: ip, network: 10.0.0.0/8, peers: {from: $FROM, address: $ADDRESS}, set-headers: {x-net: ten}}
routes:
- {name: vpn, match: {kind: ip, headers: {hermes-network: 10.0.0.0/8, x-net: ten}}, upstream: far}
upstreams:
- {name: far, protocol: h1, endpoints: ['$FAR'], overlay: true}
";
const OWN: &str = "10.20.0.2";
const FAR: &str = "10.0.0.1";
const DROPPED: &str = "hermes_datagrams_dropped_total";

/// A node with an `ip` listener.
struct Fixture {
    node: Node,
    far: TcpListener,
    _overlay: Overlay,
}

impl Fixture {
    async fn new() -> Self {
        let overlay = Overlay::new(binary::hermes()).unwrap();
        let far = origin::listen(([127, 0, 0, 1], 0).into()).unwrap();
        let draft = overlay.node("dp").document(DOCUMENT).with("FAR", far.local_addr().unwrap());
        let node = draft.with("FROM", "127.0.0.0/8").with("ADDRESS", OWN).start().await.unwrap();
        Self { node, far, _overlay: overlay }
    }

    fn port(&self) -> SocketAddr {
        self.node.address("ten")
    }

    async fn dropped(&self, reason: &str) -> f64 {
        self.node.metric(DROPPED, &format!("reason=\"{reason}\"")).await.unwrap()
    }

    async fn reaches(&self, reason: &str, least: f64) {
        self.node.metric_reaches(DROPPED, &format!("reason=\"{reason}\""), least).await;
    }

    /// The far end of the next session, which gives this address instead of the one that is asked for.
    async fn accept(&self, given: &str) -> ScriptedGateway {
        let (mut far, head) = ScriptedGateway::accept(&self.far).await;
        assert!(head.contains("hermes-network: 10.0.0.0/8"), "{head}");
        let requests = far.requests().await;
        let (request, wanted, length) = requests[0];
        assert_eq!((wanted, length), (address(OWN), 32));
        far.assign(&[(request, address(given))]).await;
        far
    }
}

fn source_of(packet: &[u8]) -> IpAddr {
    IpAddr::from(<[u8; 4]>::try_from(&packet[12..16]).unwrap())
}

async fn peer_at(from: &str) -> UdpSocket {
    UdpSocket::bind((address(from), 0)).await.unwrap()
}

async fn next_of(peer: &UdpSocket) -> Vec<u8> {
    let mut room = vec![0; 65_536];
    let length = within("a packet for the peer", peer.recv(&mut room)).await.unwrap();
    room.truncate(length);
    room
}

/// Another address than the peer's: the peer knows nothing of it.
#[tokio::test]
async fn an_address_that_the_far_end_likes_better() {
    let fixture = Fixture::new().await;
    let peer = peer_at("127.0.0.1").await;
    // What comes before the far end has spoken waits.
    peer.send_to(&ping(address(OWN), address(FAR), 1, b"first"), fixture.port()).await.unwrap();
    let mut far = fixture.accept("10.99.0.9").await;
    let received = far.packet().await;
    let (mut expected, theirs) = (ping(address("10.99.0.9"), address(FAR), 1, b"first"), received.clone());
    // Identification and hops aside they are the same, the checksum of the header too.
    expected[4..6].copy_from_slice(&theirs[4..6]);
    assert_eq!((icmp(&received), source_of(&received)), (Some((8, 0)), address("10.99.0.9")));
    assert_eq!(received[20..], expected[20..]);
    assert_eq!(ip::checksum(&[&received[..20]]), 0, "{received:?}");

    far.send(&ping(address(FAR), address("10.99.0.9"), 2, b"back")).await;
    let back = next_of(&peer).await;
    assert_eq!(back[16..20], [10, 20, 0, 2], "{back:?}");
    assert_eq!(ip::checksum(&[&back[..20]]), 0, "{back:?}");
    // Under its own address it is not there.
    far.send(&ping(address(FAR), address(OWN), 3, b"")).await;
    fixture.reaches("out-of-scope", 1.0).await;
}

/// That there is none, said without end, fills no log.
#[tokio::test]
async fn a_gateway_that_assigns_no_address_is_logged_at_intervals() {
    let fixture = Fixture::new().await;
    let peer = peer_at("127.0.0.1").await;
    peer.send_to(&ping(address(OWN), address(FAR), 1, b"first"), fixture.port()).await.unwrap();
    let mut far = fixture.accept(OWN).await;
    far.packet().await;
    let nothing = capsule(ip::ADDRESS_ASSIGN, &[]).to_vec();
    far.tcp.write_all(&nothing.repeat(10_000)).await.unwrap();
    far.send(&ping(address(FAR), address(OWN), 2, b"behind it")).await;
    fixture.reaches("out-of-scope", 1.0).await;
    let times = fixture.node.log().matches("assigns none of the requested addresses").count();
    assert!((1..1000).contains(&times), "{times} lines");
}

/// Whoever had it may be gone by then.
#[tokio::test]
async fn an_address_that_is_not_given_is_asked_for_again() {
    let fixture = Fixture::new().await;
    let peer = peer_at("127.0.0.1").await;
    peer.send_to(&ping(address(OWN), address(FAR), 1, b"first"), fixture.port()).await.unwrap();
    let mut far = fixture.accept("0.0.0.0").await;
    let first = far.requests[0];
    let request_count = far.requests().await;
    // No identifier is used twice (RFC 9484, 4.7.2).
    assert_ne!(request_count[0].0, first);
    far.assign(&[(request_count[0].0, address(OWN))]).await;
    fixture.node.says("assigns an address by now").await;
    far.send(&ping(address(FAR), address(OWN), 2, b"back")).await;
    assert_eq!(next_of(&peer).await[16..20], [10, 20, 0, 2]);
}

/// Nobody but the peer, with no other address than its own.
#[tokio::test]
async fn packets_of_others_are_dropped_and_counted() {
    let mut fixture = Fixture::new().await;
    let peer = peer_at("127.0.0.1").await;
    peer.send_to(b"", fixture.port()).await.unwrap();
    let mut far = fixture.accept(OWN).await;
    let send = async |bytes: &[u8]| peer.send_to(bytes, fixture.port()).await.unwrap();
    let udp = |from: &str, to: &str| packet(address(from), address(to), 17, &[0, 7, 0, 7, 0, 8, 0, 0]);
    send(&udp("10.20.0.3", FAR)).await;
    fixture.reaches("source-not-assigned", 1.0).await;
    // Communication administratively prohibited (RFC 1812).
    assert_eq!(icmp(&next_of(&peer).await), Some((3, 13)));
    send(&udp(OWN, "192.0.2.1")).await;
    fixture.reaches("out-of-scope", 1.0).await;
    assert_eq!(icmp(&next_of(&peer).await), Some((3, 13)));
    send(&udp(OWN, "224.0.0.1")).await;
    fixture.reaches("not-unicast", 1.0).await;
    send(b"no packet").await;
    fixture.reaches("malformed-packet", 1.0).await;
    // What came between was not passed on.
    send(&ping(address(OWN), address(FAR), 7, b"good")).await;
    let received = far.packet().await;
    assert_eq!((icmp(&received), source_of(&received)), (Some((8, 0)), address(OWN)));

    // The document lets others in, and this one no more.
    let values = [
        ("FROM", "127.9.0.0/16".to_owned()),
        ("ADDRESS", OWN.to_owned()),
        ("FAR", fixture.far.local_addr().unwrap().to_string()),
    ];
    fixture.node.reload(DOCUMENT, &values).await.unwrap();
    until("packets of the peer are a stranger's", async || {
        peer.send_to(&ping(address(OWN), address(FAR), 8, b""), fixture.port()).await.unwrap();
        fixture.dropped("not-a-peer").await >= 1.0
    })
    .await;
    let other = peer_at("127.9.0.1").await;
    other.send_to(&ping(address(OWN), address(FAR), 9, b"new"), fixture.port()).await.unwrap();
    let mut far = fixture.accept(OWN).await;
    assert_eq!(icmp(&far.packet().await), Some((8, 0)));
    fixture.node.assert_sound();
}

fn hermes(words: &[&str]) -> (bool, String) {
    let output = Command::new(binary::hermes()).args(words).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

/// What `explain` and `doctor` say of such a listener.
#[test]
fn explain_and_doctor_describe_an_ip_listener() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("dp.yaml");
    let values = [("$FROM", "192.0.2.7"), ("$ADDRESS", OWN), ("$FAR", "127.0.0.1:1"), ("127.0.0.1:0", "0.0.0.0:0")];
    let document = values.iter().fold(DOCUMENT.to_owned(), |text, (name, value)| text.replace(name, value));
    fs::write(&config, format!("node: dp{document}")).unwrap();
    let config = config.to_str().unwrap();
    let (good, output) = hermes(&["explain", "--config", config, "--source", "192.0.2.7"]);
    assert!(good && output.contains("vpn"), "{output}");
    let (good, output) = hermes(&["explain", "--config", config, "--source", "192.0.2.8"]);
    assert!(!good && output.contains("--source 192.0.2.8: not a peer of listener ten"), "{output}");
    let (_, output) = hermes(&["doctor", "--config", config]);
    let program = "at 192.0.2.7/32 run `hermes tun --address 10.20.0.2 --to 10.0.0.0/8=ADDRESS:0`";
    assert!(output.contains(program), "{output}");
}

/// A machine whose device file has another mode.
const OTHER_FILE: &str = "mount -t tmpfs none /dev/net && mknod -m $0 /dev/net/tun c 10 200 && exec \"$@\"";

#[test]
fn a_device_without_the_privilege_names_it() {
    if !needs_root("a_device_without_the_privilege") {
        return;
    }
    let unprivileged =
        ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", "--reuid", "65534", "--clear-groups", "--"];
    let words = [binary::hermes(), "tun", "--address", OWN, "--to", "10.0.0.0/8=127.0.0.1:1"];
    for (mode, wanted) in [("666", ["CAP_NET_ADMIN", "setcap"]), ("600", ["cannot open /dev/net/tun", "0666"])] {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", OTHER_FILE, mode]).args(unprivileged).args(words);
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && wanted.iter().all(|word| text.contains(word)), "{mode}: {text}");
    }
}

//! Connections that a router splits on their way: neither end is configured, and both behave as without it.
//!
//! In: a client, one or two routers and a server, each in a namespace. Out: addresses that each end sees, refusals,
//! silence, resets and half-closes as the far end means them; and rules that go with their process.

mod many_connections;

use std::future::Future;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};

use hermes_testkit::binary::hermes;
use hermes_testkit::netns::Namespace;
use hermes_testkit::origin::{self, Origin};
use hermes_testkit::overlay::{EFFECT_TIMEOUT, Node, Overlay};
use hermes_testkit::skip::needs_root;
use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream, UdpSocket};

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const ROUTER_BY_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
const ROUTER_BY_SERVER: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
const PORT: u16 = 8000;
/// A host on the server's network that does not exist, so that nobody answers for it.
const DARK: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 99);
/// The time that a client waits where no answer must come.
const SILENCE: Duration = Duration::from_millis(1500);

const SPLIT: &str = "
workers: 2
limits: {held-syns: $HELD}
listeners:
- {name: pep, protocol: transparent, capture: ['0.0.0.0/0', '::/0'] $MORE}
routes:
- {name: split, match: {kind: tcp}, terminate: {tcp: original, source: client}, timeout: {connect: 3s}}
";

/// A client, a router and a server.
struct Path {
    client: Namespace,
    router: Namespace,
    server: Namespace,
}

impl Path {
    fn new() -> Self {
        let [client, router, server] = [(); 3].map(|()| Namespace::new().unwrap());
        let [to_router, from_client] = client.join(CLIENT, &router, ROUTER_BY_CLIENT).unwrap();
        let [to_server, from_router] = router.join(ROUTER_BY_SERVER, &server, SERVER).unwrap();
        client.ip(&["route", "add", "default", "via", "10.1.0.1"]).unwrap();
        server.ip(&["route", "add", "default", "via", "10.2.0.1"]).unwrap();
        for (namespace, device, address) in [
            (&client, &to_router, "fd01::2/64"),
            (&router, &from_client, "fd01::1/64"),
            (&router, &to_server, "fd02::1/64"),
            (&server, &from_router, "fd02::2/64"),
        ] {
            namespace.ip(&["addr", "add", address, "dev", device, "nodad"]).unwrap();
        }
        client.ip(&["-6", "route", "add", "default", "via", "fd01::1"]).unwrap();
        server.ip(&["-6", "route", "add", "default", "via", "fd02::1"]).unwrap();
        router.sysctl("net/ipv4/ip_forward", "1").unwrap();
        router.sysctl("net/ipv6/conf/all/forwarding", "1").unwrap();
        Self { client, router, server }
    }

    /// Serves every connection at the server's address and port with its client's address, and then echoes.
    async fn echo(&self, address: SocketAddr) -> Origin {
        let serve = |mut stream: TcpStream| async move {
            let peer = stream.peer_addr().unwrap();
            if stream.write_all(format!("{peer}\n").as_bytes()).await.is_err() {
                return;
            }
            let (mut read, mut write) = stream.split();
            let _ = tokio::io::copy(&mut read, &mut write).await;
        };
        self.server.run(async { Origin::accepting(origin::listen(address).unwrap(), serve).unwrap() }).await.unwrap()
    }

    async fn connect(&self, to: SocketAddr) -> std::io::Result<TcpStream> {
        self.client.run(TcpStream::connect(to)).await.unwrap()
    }

    async fn rules(&self) -> String {
        let rules = self.router.output(&["ip", "rule"]).await.unwrap();
        let tables = self.router.output(&["nft", "list", "tables"]).await.unwrap();
        let routes = self.router.output(&["ip", "route", "show", "table", "all", "proto", "72"]).await.unwrap();
        let of_hermes = |line: &&str| line.contains("proto 72") || line.contains("hermes") || line.contains("local");
        let rules: Vec<&str> = rules.lines().filter(|line| line.contains("proto 72")).collect();
        let others: Vec<&str> = tables.lines().chain(routes.lines()).filter(of_hermes).collect();
        [rules, others].concat().join("\n")
    }
}

fn on_a_path<F: Future<Output = ()>>(test: &str, body: impl FnOnce(Path, Overlay) -> F) {
    if !needs_root(test) {
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(body(Path::new(), Overlay::new(hermes()).unwrap()));
}

async fn splitter(overlay: &Overlay, path: &Path, more: &str, held: usize) -> Node {
    let draft = overlay.node("pep").document(SPLIT).with("MORE", more).with("HELD", held).within(&path.router);
    draft.start().await.unwrap()
}

/// Reads the line in which the server names its client, then sends, half-closes and reads the echo.
async fn converse(mut stream: TcpStream) -> String {
    let mut text = vec![0; 64];
    let read = stream.read(&mut text).await.unwrap();
    let named = String::from_utf8_lossy(&text[..read]).trim().to_owned();
    stream.write_all(b"hello").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut echo = String::new();
    stream.read_to_string(&mut echo).await.unwrap();
    assert_eq!(echo, "hello");
    named
}

#[test]
fn each_end_sees_the_address_of_the_other() {
    on_a_path("transparent::addresses", async |path, overlay| {
        for more in ["", ", hold-syn: false"] {
            let mut node = splitter(&overlay, &path, more, 100).await;
            for server in [SocketAddr::from((SERVER, PORT)), "[fd02::2]:8000".parse().unwrap()] {
                let _origin = path.echo(server).await;
                let stream = path.connect(server).await.unwrap();
                let own = stream.local_addr().unwrap();
                assert_eq!(stream.peer_addr().unwrap(), server);
                assert_eq!(converse(stream).await, own.to_string(), "{more}");
                let record = node.record(|record| record["authority"] == server.to_string()).await;
                assert_eq!((&record["source"], &record["sent"]), (&own.to_string().into(), &record["sent"]));
            }
            node.assert_sound();
        }
    });
}

#[test]
fn a_client_shares_the_fate_of_its_far_connection() {
    on_a_path("transparent::fate", async |path, overlay| {
        let node = splitter(&overlay, &path, "", 100).await;
        let refused = path.connect((SERVER, PORT).into()).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        let unroutable = path.connect("10.77.0.1:80".parse().unwrap()).await.unwrap_err();
        assert_eq!(unroutable.kind(), ErrorKind::HostUnreachable);
        // A dark host answers nobody, so the node does not answer either.
        assert!(tokio::time::timeout(SILENCE, path.connect((DARK, PORT).into())).await.is_err());
        let _origin = path.echo((SERVER, PORT).into()).await;
        converse(path.connect((SERVER, PORT).into()).await.unwrap()).await;
        drop(node);
    });
}

#[test]
fn a_reset_of_one_end_reaches_the_other() {
    on_a_path("transparent::resets", async |path, overlay| {
        let _node = splitter(&overlay, &path, "", 100).await;
        let listener = path.server.run(async { origin::listen((SERVER, PORT).into()).unwrap() }).await.unwrap();
        for by_server in [true, false] {
            let (client, server) = tokio::join!(path.connect((SERVER, PORT).into()), listener.accept());
            let (mut client, (mut server, _)) = (client.unwrap(), server.unwrap());
            client.write_all(b"x").await.unwrap();
            server.read_u8().await.unwrap();
            let (resetting, mut other) = if by_server { (server, client) } else { (client, server) };
            socket2::SockRef::from(&resetting).set_linger(Some(Duration::ZERO)).unwrap();
            drop(resetting);
            assert_eq!(other.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset, "{by_server}");
        }
    });
}

#[test]
fn connections_beyond_the_limit_pass_unsplit() {
    on_a_path("transparent::limit", async |path, overlay| {
        let node = splitter(&overlay, &path, "", 1).await;
        let _origin = path.echo((SERVER, PORT).into()).await;
        // Both workers hold a SYN to a dark host, once enough sources have tried.
        let dark = (0..16).map(|_| path.connect((DARK, PORT).into()));
        let waiting = futures_util::future::join_all(dark.map(|dark| tokio::time::timeout(SILENCE, dark)));
        let served = async {
            node.metric_reaches("hermes_limit_hits_total", "limit=\"held-syns\"", 1.0).await;
            for _ in 0..4 {
                let stream = path.connect((SERVER, PORT).into()).await.unwrap();
                let own = stream.local_addr().unwrap();
                assert_eq!(converse(stream).await, own.to_string());
            }
        };
        tokio::join!(waiting, served);
        assert!(node.metric("hermes_limit_hits_total", "limit=\"unsplit\"").await.unwrap() >= 4.0);
        assert!(node.records().iter().all(|record| record["authority"] != "10.2.0.2:8000"));
    });
}

#[test]
fn the_rules_go_with_their_process() {
    on_a_path("transparent::rules", async |path, overlay| {
        assert_eq!(path.rules().await, "");
        let node = splitter(&overlay, &path, "", 100).await;
        let rules = path.rules().await;
        assert!(rules.contains("hermes_tproxy_00") && rules.contains("hermes_divert_00"), "{rules}");
        let _origin = path.echo((SERVER, PORT).into()).await;
        node.signal(Signal::SIGKILL).unwrap();
        node.ended().await;
        // The kernel has removed the table, so connections pass; the rules of routing select nothing then.
        assert!(!path.rules().await.contains("hermes"), "{}", path.rules().await);
        converse(path.connect((SERVER, PORT).into()).await.unwrap()).await;
        // The next start sweeps what the killed process left, and leaves nothing itself.
        let next = splitter(&overlay, &path, "", 100).await;
        assert_eq!(path.rules().await.matches("lookup").count(), 2, "{}", path.rules().await);
        next.signal(Signal::SIGTERM).unwrap();
        next.ended().await;
        assert_eq!(path.rules().await, "");
    });
}

#[test]
fn a_live_connection_outlasts_a_reload_and_the_end_of_its_listener() {
    on_a_path("transparent::reload", async |path, overlay| {
        let mut node = splitter(&overlay, &path, "", 100).await;
        let _origin = path.echo((SERVER, PORT).into()).await;
        let mut stream = path.connect((SERVER, PORT).into()).await.unwrap();
        let more = ", ports: [9]".to_owned();
        node.reload(SPLIT, &[("MORE", more), ("HELD", "100".to_owned())]).await.unwrap();
        // The port is no longer intercepted.
        converse(path.connect((SERVER, PORT).into()).await.unwrap()).await;
        let without = "workers: 2\nlisteners: [{name: other, bind: '127.0.0.1:0', protocol: http}]\nroutes: []\n";
        node.reload(without, &[]).await.unwrap();
        stream.write_all(b"still").await.unwrap();
        let mut text = vec![0; 64];
        let mut heard = String::new();
        while !heard.ends_with("still") {
            let read = stream.read(&mut text).await.unwrap();
            assert!(read > 0, "{heard}");
            heard.push_str(&String::from_utf8_lossy(&text[..read]));
        }
        drop(stream);
        node.record(|record| record["authority"] == "10.2.0.2:8000" && record["received"] == 5).await;
        // Connections may outlast their listener, so what delivers their packets stays.
        assert!(!path.rules().await.contains("tproxy"), "{}", path.rules().await);
    });
}

/// Splits a connection at two routers. `leads` is the action of the first one, `listens` the protocol of the second one,
/// which connects with the client's address.
async fn assert_split_into_three(path: Path, overlay: Overlay, leads: &str, listens: &str) {
    let far = Namespace::new().unwrap();
    path.router.join(Ipv4Addr::new(10, 3, 0, 1), &far, Ipv4Addr::new(10, 3, 0, 2)).unwrap();
    let server = Namespace::new().unwrap();
    far.join(Ipv4Addr::new(10, 4, 0, 1), &server, Ipv4Addr::new(10, 4, 0, 2)).unwrap();
    server.ip(&["route", "add", "default", "via", "10.4.0.1"]).unwrap();
    far.ip(&["route", "add", "10.1.0.0/24", "via", "10.3.0.1"]).unwrap();
    let path = Path { server, ..path };
    std::fs::write(overlay.dir().join("dif.key"), "a key that both routers have").unwrap();
    let second = format!(
        "
listeners:
- {{name: between, bind: '10.3.0.2:9000', {listens}}}
routes:
- {{name: out, match: {{kind: tcp}}, terminate: {{tcp: original, source: client}}, timeout: {{connect: 20s}}}}
"
    );
    let _second = overlay.node("second").document(&second).within(&far).start().await.unwrap();
    let first = format!(
        "
listeners:
- {{name: pep, protocol: transparent, capture: [10.4.0.0/24]}}
routes:
- {{name: over, match: {{kind: tcp}}, {leads}}}
upstreams:
- {{name: second, protocol: h2, endpoints: ['10.3.0.2:9000'], overlay: true}}
"
    );
    let _first = overlay.node("first").document(&first).within(&path.router).start().await.unwrap();
    let server: SocketAddr = "10.4.0.2:8000".parse().unwrap();
    assert_eq!(path.connect(server).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    let dark = "10.4.0.99:8000".parse().unwrap();
    assert!(tokio::time::timeout(SILENCE, path.connect(dark)).await.is_err());
    let _origin = path.echo(server).await;
    let stream = path.connect(server).await.unwrap();
    let own = stream.local_addr().unwrap();
    assert_eq!(converse(stream).await, own.to_string());
}

#[test]
fn a_connection_is_split_into_three() {
    on_a_path("transparent::overlay", async |path, overlay| {
        assert_split_into_three(path, overlay, "upstream: second", "protocol: http, trust: [10.3.0.0/24]").await;
    });
}

/// The paper's TCP-RINA-TCP over two boxes.
#[test]
fn a_connection_crosses_a_dif() {
    on_a_path("transparent::dif", async |path, overlay| {
        let leads = "terminate: {rina: '10.3.0.2:9000', dif: backbone, dif-key: dif.key}";
        assert_split_into_three(path, overlay, leads, "protocol: rina, dif: backbone, dif-key: dif.key").await;
    });
}

/// Each request of an intercepted connection has a route of its own.
#[test]
fn requests_of_a_connection_are_decided_one_by_one() {
    on_a_path("transparent::http", async |path, overlay| {
        let document = "
listeners:
- {name: web, protocol: transparent, capture: ['0.0.0.0/0', '::/0'], ports: 8000, http: true}
routes:
- {name: here, match: {authority: web.example, path: /here}, respond: {body: from the router}}
- {name: denied, match: {path: /denied}, respond: {status: 403, body: no}}
";
        let _node = overlay.node("pep").document(document).within(&path.router).start().await.unwrap();
        for server in ["10.2.0.2:8000", "[fd02::2]:8000"] {
            let url = format!("http://{server}");
            let curl = ["curl", "-sS", "--max-time", "5", "-H", "host: web.example"];
            let urls = [format!("{url}/here"), format!("{url}/denied"), format!("{url}/other")];
            let urls: Vec<&str> = urls.iter().flat_map(|url| ["-w", " %{http_code} %{num_connects}\n", url]).collect();
            let said = path.client.output(&[&curl[..], &urls[..]].concat()).await.unwrap();
            let lines: Vec<&str> = said.lines().collect();
            assert_eq!(lines[..2], ["from the router 200 1", "no 403 0"], "{said}");
            assert!(said.trim_end().ends_with(" 404 0"), "{said}");
        }
    });
}

/// The rules of a container host: published ports, masquerading, and a forward chain that drops by default.
#[test]
fn rules_of_a_container_host_and_ours_do_not_meet() {
    on_a_path("transparent::docker", async |path, overlay| {
        let rules = "
table ip nat {
  chain prerouting { type nat hook prerouting priority dstnat; fib daddr type local tcp dport 9999 dnat to 10.2.0.2:8000; }
  chain postrouting { type nat hook postrouting priority srcnat; ip saddr 10.1.0.0/24 oifname != lo masquerade; }
}
table ip filter {
  chain input { type filter hook input priority filter; policy accept; ct state invalid drop; }
  chain forward { type filter hook forward priority filter; policy drop; ct state established,related accept; tcp dport 8000 accept; }
}
";
        let file = overlay.dir().join("docker.nft");
        std::fs::write(&file, rules).unwrap();
        let load = ["netns", "exec", path.router.name(), "nft", "-f", file.to_str().unwrap()];
        assert!(Command::new("ip").args(load).status().unwrap().success());
        let node = splitter(&overlay, &path, "", 100).await;
        let _origin = path.echo((SERVER, PORT).into()).await;
        for _ in 0..3 {
            let stream = path.connect((SERVER, PORT).into()).await.unwrap();
            let own = stream.local_addr().unwrap();
            assert_eq!(converse(stream).await, own.to_string());
        }
        // A published port is an address of the router, which is not intercepted.
        let published = SocketAddr::from((ROUTER_BY_CLIENT, 9999));
        assert_eq!(converse(path.connect(published).await.unwrap()).await.split(':').next(), Some("10.2.0.1"));
        let kept = path.router.output(&["nft", "list", "table", "ip", "nat"]).await.unwrap();
        assert!(kept.contains("dport 9999"), "{kept}");
        drop(node);
    });
}

/// A client's port that is used again at once, since a new connection may have the tuple of an old one.
#[test]
fn a_port_is_used_again() {
    on_a_path("transparent::again", async |path, overlay| {
        let node = splitter(&overlay, &path, "", 100).await;
        let _origin = path.echo((SERVER, PORT).into()).await;
        let connect = || {
            path.client.run(async {
                let socket = TcpSocket::new_v4().unwrap();
                socket.set_reuseaddr(true).unwrap();
                socket.bind((CLIENT, 5555).into()).unwrap();
                socket.connect((SERVER, PORT).into()).await
            })
        };
        for _ in 0..3 {
            let deadline = Instant::now() + EFFECT_TIMEOUT;
            let stream = loop {
                match connect().await.unwrap() {
                    Ok(stream) => break stream,
                    // A program that another test starts has copies of all sockets of this process until it runs, so
                    // that the last one is not closed yet.
                    Err(error) if error.kind() == ErrorKind::AddrNotAvailable && Instant::now() < deadline => {
                        tokio::task::yield_now().await;
                    }
                    Err(error) => panic!("{error}: {:?}", node.records()),
                }
            };
            // A reset leaves no TIME_WAIT at the client.
            socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
    });
}

/// UDP passes untouched, or becomes sessions with `udp: true`. The addresses are the same either way.
#[test]
fn udp_flows_pass_or_are_carried() {
    on_a_path("transparent::udp", async |path, overlay| {
        let document = "
workers: 2
listeners:
- {name: pep, protocol: transparent, capture: ['0.0.0.0/0', '::/0'], udp: $UDP}
routes:
- {name: flows, match: {kind: udp}, terminate: {udp: original, source: client}}
";
        for carried in [false, true] {
            let draft = overlay.node("pep").document(document).with("UDP", carried).within(&path.router);
            let node = draft.start().await.unwrap();
            for (server, client) in [("10.2.0.2:8000", "10.1.0.2:0"), ("[fd02::2]:8000", "[fd01::2]:0")] {
                let server: SocketAddr = server.parse().unwrap();
                let at_server = path.server.run(async { UdpSocket::bind(server).await.unwrap() }).await.unwrap();
                let at_client = path.client.run(async { UdpSocket::bind(client).await.unwrap() }).await.unwrap();
                at_client.connect(server).await.unwrap();
                for round in 0..3_u8 {
                    at_client.send(&[round; 1000]).await.unwrap();
                    let mut datagram = [0; 2000];
                    let (length, from) = at_server.recv_from(&mut datagram).await.unwrap();
                    assert_eq!((&datagram[..length], from), (&[round; 1000][..], at_client.local_addr().unwrap()));
                    // A connected socket accepts answers from the server's address alone.
                    at_server.send_to(b"answer", from).await.unwrap();
                    let length = at_client.recv(&mut datagram).await.unwrap();
                    assert_eq!(&datagram[..length], b"answer");
                }
            }
            let (_, sessions) = node.ask("/sessions").await.unwrap();
            assert_eq!(sessions.matches("\"kind\": \"udp\"").count(), if carried { 2 } else { 0 }, "{sessions}");
        }
    });
}

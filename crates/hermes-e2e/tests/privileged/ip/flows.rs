//! Names through a device as connections and flows: programs without a proxy setting connect to a name's address.
//!
//! In: a user with a device that carries names as flows, and a far node with servers of TCP, UDP and HTTP; getent, curl
//! and Python as programs. Out: each gets its bytes, and errors match those of the far end.

use hermes_testkit::{
    dns::resolving_by,
    origin::{self, Origin, datagram::UdpEcho, http, stream},
    overlay::Node,
    poll::until,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::ip::node_chain::{Hop, NodeChain, as_root, draft, process};

const NEAR: &str = "
workers: 2
limits: {name-sessions: $LIMIT}
listeners:
- name: dns
  bind: '127.0.0.53:53'
  protocol: dns
  names: [DB, SHOP, CLOSED, CLOCK, '*.corp']
  addresses: [100.64.0.0/10, 'fd00:6865:726d::/64']
  forward: ['127.0.0.1:1']
- name: l3
  protocol: tun
  device: hermes0
  address: [10.20.0.2, 'fd00:20::2']
  capture: [100.64.0.0/10, 'fd00:6865:726d::/64']
  carry-names: flows
  set-headers: {hermes-user: alice}
routes:
- {name: services, match: {user: alice, authority: ['DB:*', SHOP, 'CLOSED:*', 'CLOCK:*']}, upstream: next}
- {name: shop, match: {kind: http, authority: SHOP}, upstream: next}
upstreams:
- {name: next, protocol: $PROTOCOL, endpoints: ['$NEXT'], tls: {}}
";

const FAR: &str = "
workers: 2
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, http3: true, tls: {client: required}}
routes:
- {name: db, match: {kind: tcp, authority: 'DB:*', user: alice}, terminate: {tcp: '$TCP'}}
- {name: closed, match: {kind: tcp, authority: 'CLOSED:*'}, terminate: {tcp: '127.0.0.1:1'}}
- {name: clock, match: {kind: udp, authority: 'CLOCK:*'}, terminate: {udp: '$UDP'}}
- {name: shop, match: {kind: http, authority: SHOP}, terminate: {http: '$HTTP'}}
";

/// Connects to argv 1 at port argv 2, sends argv 3 bytes and its half-close, and prints what came back, or the error.
const CLIENT: &str = "
import socket, sys, threading
name, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
try:
    s = socket.create_connection((name, port), timeout=20)
except OSError as error:
    print(type(error).__name__, error.errno); sys.exit(0)
sent = bytes(n % 251 for n in range(size))
def send():
    s.sendall(sent); s.shutdown(socket.SHUT_WR)
sender = threading.Thread(target=send); sender.start()
back = b''
while True:
    piece = s.recv(65536)
    if not piece: break
    back += piece
sender.join()
print('same' if back == sent else ('other', len(back)))
";

/// Sends datagrams of growing sizes to argv 1 at port argv 2, and prints how many came back as they were.
const DATAGRAMS: &str = "
import socket, sys
family, _, _, _, to = socket.getaddrinfo(sys.argv[1], int(sys.argv[2]), type=socket.SOCK_DGRAM)[0]
s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(0.5)
same = 0
for size in (1, 100, 1200):
    for attempt in range(40):
        s.sendto(b'%d' % size * size, to)
        try:
            if s.recv(65536).endswith(b'%d' % size): same += 1; break
        except OSError: pass
print(same)
";

struct Services {
    near: Node,
    _far: Node,
    _tcp: Origin,
    _http: Origin,
    _udp: UdpEcho,
    chain: NodeChain,
}

impl Services {
    async fn new(hop: Hop, limit: usize) -> Self {
        let chain = NodeChain::empty(2);
        let tcp = chain.far().run(async { stream::echo(origin::listen("127.0.0.1:0".parse().unwrap()).unwrap()) });
        let tcp = tcp.await.unwrap().unwrap();
        let page = chain.far().run(async {
            http::serve(
                origin::listen("127.0.0.1:0".parse().unwrap()).unwrap(),
                http::Version::H1,
                "of the shop".into(),
            )
        });
        let http = page.await.unwrap().unwrap();
        let udp = chain.far().run(async { UdpEcho::start("127.0.0.1:0".parse().unwrap(), "") });
        let udp = udp.await.unwrap().unwrap();
        let far = draft(&chain, 1, "far", FAR).with("TCP", tcp.address()).with("HTTP", http.address());
        let far = far.with("UDP", udp.address()).start().await.unwrap();
        let near = process(&chain, 0, "near", NEAR, hop, "near-0").with("LIMIT", limit).start().await.unwrap();
        near.says("connections to names are served").await;
        Self { near, _far: far, _tcp: tcp, _http: http, _udp: udp, chain }
    }

    /// The output of a program in alice's namespace.
    async fn output(&self, program: &[&str]) -> Result<String, String> {
        let mut words = resolving_by([127, 0, 0, 53].into(), self.chain.overlay.dir()).unwrap();
        words.extend(program.iter().map(|word| (*word).to_owned()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let text = self.chain.near().output(&words).await;
        text.map(|text| text.trim().to_owned()).map_err(|error| error.to_string())
    }

    async fn connect(&self, name: &str, size: usize) -> String {
        self.output(&["python3", "-c", CLIENT, name, "5432", &size.to_string()]).await.unwrap()
    }
}

#[test]
fn programs_reach_services_by_name_without_a_proxy_setting() {
    as_root("names as flows", || async {
        for hop in [Hop::H2, Hop::H3] {
            let services = Services::new(hop, 100).await;
            let hosts = services.output(&["getent", "ahosts", "DB"]).await.unwrap();
            assert!(hosts.contains("100.") && hosts.contains("fd00:6865:726d:"), "{hosts}");
            for (version, address) in [("-4", "100."), ("-6", "fd00:6865:726d:")] {
                let found = hosts.split_whitespace().find(|word| word.starts_with(address)).unwrap();
                assert_eq!(services.connect(found, 3_000_000).await, "same", "{hop:?}");
                let page = services.output(&["curl", version, "-sS", "--max-time", "20", "http://SHOP/"]).await;
                assert_eq!(page.as_deref(), Ok("of the shop"), "{hop:?} {version}");
            }
            assert_eq!(services.connect("DB", 10).await, "same", "{hop:?}");
            let datagrams = services.output(&["python3", "-c", DATAGRAMS, "CLOCK", "123"]).await;
            assert_eq!(datagrams.as_deref(), Ok("3"), "{hop:?}: {}", services.near.log());
            let is_of = |record: &serde_json::Value, kind: &str, authority: &str| {
                record["kind"] == kind && record["authority"] == authority && record["user"] == "alice"
            };
            until("the sessions are recorded under their names", async || {
                let records = services.near.records();
                [("tcp", "db:5432"), ("http", "shop")]
                    .iter()
                    .all(|(kind, authority)| records.iter().any(|record| is_of(record, kind, authority)))
            })
            .await;
        }
    });
}

#[test]
fn a_program_receives_the_connect_errors_of_the_gateway() {
    as_root("refusals of names as flows", || async {
        let services = Services::new(Hop::H2, 100).await;
        assert_eq!(
            services.connect("CLOSED", 1).await,
            format!("ConnectionRefusedError {}", libc_errno("ECONNREFUSED"))
        );
        // No route matches this name.
        let text = services.connect("nobody.corp", 1).await;
        assert!(text.starts_with("OSError ") || text.starts_with("ConnectionRefusedError"), "{text}");
        // An address that stands for no name.
        let text = services.connect("100.64.0.1", 1).await;
        assert_eq!(text, format!("OSError {}", libc_errno("ENETUNREACH")));
        let text = services.output(&["curl", "-sS", "--max-time", "20", "https://SHOP/"]).await.unwrap_err();
        assert!(!text.contains("timed out"), "{text}");
    });
}

#[test]
fn connections_to_names_meet_a_limit_and_end_with_their_sessions() {
    as_root("a limit of names as flows", || async {
        let services = Services::new(Hop::H2, 1).await;
        let held = services.chain.near().run(async {
            let hosts = services.output(&["getent", "ahostsv4", "DB"]).await.unwrap();
            let address = hosts.split_whitespace().next().unwrap().to_owned();
            (TcpStream::connect((&*address, 5432)).await.unwrap(), address)
        });
        let (held, address) = held.await.unwrap();
        assert!(services.connect(&address, 1).await.starts_with("OSError "));
        assert!(services.near.metric("hermes_limit_hits_total", "name-sessions").await.unwrap() >= 1.0);
        drop(held);
        until("another one has its place", async || services.connect(&address, 1).await == "same").await;
    });
}

#[test]
fn one_program_with_many_connections_keeps_no_other_name_out() {
    as_root("shares of names as flows", || async {
        let services = Services::new(Hop::H2, 4).await;
        let held = services.chain.near().run(async {
            let hosts = services.output(&["getent", "ahostsv4", "DB"]).await.unwrap();
            let address = hosts.split_whitespace().next().unwrap().to_owned();
            let mut held = Vec::new();
            for _ in 0..4 {
                held.push(TcpStream::connect((&*address, 5432)).await.unwrap());
            }
            held
        });
        let mut held = held.await.unwrap();
        let text = services.output(&["curl", "-4", "-sS", "--max-time", "20", "http://SHOP/"]).await;
        assert!(text.is_ok(), "{text:?}: {}", services.near.log());
        // The connection that was idle for longest has ended; the others go on.
        let mut echoes = Vec::new();
        for connection in &mut held {
            let sent = connection.write_all(b"x").await;
            echoes.push(sent.is_ok() && connection.read_u8().await.is_ok());
        }
        assert_eq!(echoes.iter().filter(|echoes| **echoes).count(), 3, "{echoes:?}");
        assert!(services.near.metric("hermes_limit_hits_total", "name-sessions").await.unwrap() >= 1.0);
    });
}

#[test]
fn connections_to_names_outlive_a_takeover() {
    as_root("a takeover of names as flows", || async {
        let mut services = Services::new(Hop::H2, 100).await;
        let start = async |services: &Services, called: &str| {
            let draft = process(&services.chain, 0, "near", NEAR, Hop::H2, called).with("LIMIT", 100);
            let node = draft.start().await.unwrap();
            node.says("connections to names are served").await;
            node
        };
        let hosts = services.output(&["getent", "ahostsv4", "DB"]).await.unwrap();
        let address = hosts.split_whitespace().next().unwrap();
        let connect = TcpStream::connect((address, 5432));
        let mut connection = services.chain.near().run(connect).await.unwrap().unwrap();
        let mut echoed = async |byte: u8| {
            connection.write_all(&[byte]).await.unwrap();
            assert_eq!(connection.read_u8().await.unwrap(), byte);
        };
        echoed(1).await;
        let second = start(&services, "near-1").await;
        let before = std::mem::replace(&mut services.near, second);
        until("the old process parts", async || before.log().contains("another process has the listeners")).await;
        echoed(2).await;
        assert_eq!(services.connect("DB", 100_000).await, "same");
        let datagrams = services.output(&["python3", "-c", DATAGRAMS, "CLOCK", "123"]).await;
        assert_eq!(datagrams.as_deref(), Ok("3"));
        // The old process keeps only its existing connections from here on.
        before.says("another process serves new connections to names").await;
        echoed(3).await;
    });
}

fn libc_errno(name: &str) -> i32 {
    match name {
        "ECONNREFUSED" => nix::errno::Errno::ECONNREFUSED as i32,
        _ => nix::errno::Errno::ENETUNREACH as i32,
    }
}

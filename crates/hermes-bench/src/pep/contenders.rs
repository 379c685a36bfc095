//! The servers and the splitters of the benchmark of split connections.
//!
//! In: namespaces of router and server. Out: servers of TCP, RINA and NDN, and splitters between them and a client. Never:
//! a measurement.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use hermes_ndn::lp::LpPacket;
use hermes_ndn::name::types;
use hermes_ndn::packet::Packet;
use hermes_ndn::publish::{PublishedContent, content_name};
use hermes_ndn::signature::Signer;
use hermes_ndn::{Component, Name};
use hermes_testkit::{
    netns::Namespace,
    process::{Port, Program, Running},
    rina::RinaApplication,
};

use super::{
    APPLICATION_PORT, BUFFER, DIRECT_PORT, EGRESS_PORT, FLOW_PORT, HAPROXY_PORT, HAPROXY_SPLIT_PORT, HELD_PORT,
    NAMED_PORT, NATIVE_PORT, NGINX_PORT, PRODUCER_PORT, RELAY_PORT, ROUTER, SERVER, SPLIT_PORT, TPROXY_PORT,
    in_namespace, wait,
};

/// The version of all NDN content. Its name is known, so no discovery takes a round trip.
pub(super) const CONTENT_VERSION: u64 = 1;
/// The number of names with empty content.
const EMPTY_NAMES: u64 = 20_000;
/// The DIF of the benchmark, its key, and the application at the server.
const DIF: &str = "bench";
const KEY: &str = "the key of the benchmark";
const APPLICATION: &str = "web";

pub(super) fn start_haproxy(router: &Namespace, dir: &Path) -> Result<Running> {
    let config = format!(
        "global\n  nbthread 2\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n  \
         option splice-auto\nlisten pep\n  bind {ROUTER}:{HAPROXY_PORT}\n  server s {SERVER}:{DIRECT_PORT}\n"
    );
    let file = dir.join("haproxy.cfg");
    std::fs::write(&file, config)?;
    let program = Program::new("haproxy", "haproxy", dir).args(["-db", "-f"]).args([&file]).within(Some(router));
    let mut running = program.start()?;
    running.wait_listening(&[Port::Tcp(HAPROXY_PORT)], Duration::from_secs(10))?;
    Ok(running)
}

/// HAProxy as transparent as Hermes: it accepts connections to the server's port, and connects with the client's address.
/// HAProxy does not install the rules that divert packets to it.
pub(super) fn start_transparent_haproxy(router: &Namespace, dir: &Path) -> Result<Running> {
    let config = format!(
        "global\n  nbthread 2\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n  \
         option splice-auto\nlisten pep\n  bind 0.0.0.0:{TPROXY_PORT} transparent\n  \
         source 0.0.0.0 usesrc clientip\n  server s {SERVER}:{DIRECT_PORT}\n"
    );
    let file = dir.join("haproxy-transparent.cfg");
    std::fs::write(&file, config)?;
    router.nft("add table ip haproxy; add chain ip haproxy divert { type filter hook prerouting priority mangle; }")?;
    let divert = |packets: &str| router.nft(&format!("add rule ip haproxy divert {packets} meta mark set 0x99 accept"));
    divert(&format!("ip daddr {SERVER} tcp dport {HAPROXY_SPLIT_PORT} tproxy to :{TPROXY_PORT}"))?;
    divert(&format!("ip saddr {SERVER} tcp sport {DIRECT_PORT} socket transparent 1"))?;
    router.ip(&["rule", "add", "fwmark", "0x99", "lookup", "99"])?;
    router.ip(&["route", "add", "local", "default", "dev", "lo", "table", "99"])?;
    let program = Program::new("haproxy-transparent", "haproxy", dir).args(["-db", "-f"]).args([&file]);
    let mut running = program.within(Some(router)).start()?;
    running.wait_listening(&[Port::Tcp(TPROXY_PORT)], Duration::from_secs(10))?;
    Ok(running)
}

pub(super) fn start_nginx(router: &Namespace, dir: &Path) -> Result<Running> {
    let config = format!(
        "load_module /usr/lib/nginx/modules/ngx_stream_module.so;\ndaemon off;\nworker_processes 2;\n\
         pid {0}/nginx.pid;\nerror_log {0}/nginx.log;\nevents {{ worker_connections 4096; }}\nstream {{ server {{ listen {ROUTER}:{NGINX_PORT}; \
         proxy_pass {SERVER}:{DIRECT_PORT}; tcp_nodelay on; }} }}\n",
        dir.display()
    );
    let file = dir.join("nginx.conf");
    std::fs::write(&file, config)?;
    let program = Program::new("nginx", "nginx", dir).args(["-c"]).args([&file]).within(Some(router));
    let mut running = program.start()?;
    running.wait_listening(&[Port::Tcp(NGINX_PORT)], Duration::from_secs(10))?;
    Ok(running)
}

/// Starts the node on the router, with a port of the server for each of its ways.
pub(super) fn start_router(hermes: &Path, router: &Namespace, dir: &Path) -> Result<Running> {
    let rina = |port| format!("rina: '{SERVER}:{port}', dif: {DIF}, dif-key: dif.key");
    let document = format!(
        "listeners:\n\
         - {{name: split, protocol: transparent, capture: [0.0.0.0/0], ports: [{SPLIT_PORT}], hold-syn: false}}\n\
         - {{name: held, protocol: transparent, capture: [0.0.0.0/0], \
         ports: [{HELD_PORT}, {NATIVE_PORT}, {FLOW_PORT}]}}\n\
         - {{name: named, protocol: transparent, capture: [0.0.0.0/0], ports: [{NAMED_PORT}], http: true}}\n\
         {}\
         routes:\n\
         {}\
         - {{name: native, match: {{port: {NATIVE_PORT}}}, terminate: {{{}, application: {APPLICATION}}}}}\n\
         - {{name: flow, match: {{port: {FLOW_PORT}}}, terminate: {{{}}}}}\n\
         - {{name: named, match: {{kind: http}}, \
         terminate: {{ndn: 'udp://{SERVER}:{PRODUCER_PORT}', accept-digest: true}}}}\n\
         - {{name: pep, match: {{listener: [split, held]}}, terminate: {{tcp: original, source: client}}}}\n",
        format_args!(
            "- {{name: relay, bind: '{ROUTER}:{RELAY_PORT}', protocol: tcp, authority: 'server:{DIRECT_PORT}'}}\n"
        ),
        format_args!("- {{name: relay, match: {{listener: relay}}, terminate: {{tcp: '{SERVER}:{DIRECT_PORT}'}}}}\n"),
        rina(APPLICATION_PORT),
        rina(EGRESS_PORT),
    );
    start_node(hermes, router, dir, "pep", &document)
}

/// Starts the node on the server that accepts flows of the DIF for the server of TCP.
pub(super) fn start_egress(hermes: &Path, server: &Namespace, dir: &Path) -> Result<Running> {
    let document = format!(
        "listeners:\n- {{name: dif, bind: '{SERVER}:{EGRESS_PORT}', protocol: rina, dif: {DIF}, dif-key: dif.key}}\n\
         routes:\n- {{name: out, match: {{kind: tcp}}, terminate: {{tcp: '{SERVER}:{DIRECT_PORT}'}}}}\n"
    );
    start_node(hermes, server, dir, "egress", &document)
}

fn start_node(hermes: &Path, namespace: &Namespace, dir: &Path, name: &str, document: &str) -> Result<Running> {
    std::fs::write(dir.join("dif.key"), KEY)?;
    let file = dir.join(format!("{name}.yaml"));
    std::fs::write(&file, format!("node: {name}\nadmin: 127.0.0.1:9900\naccess-log: /dev/null\n{document}"))?;
    let program = Program::new(name, hermes, dir).args(["proxy", "--config"]).args([&file]);
    let mut running = program.within(Some(namespace)).start()?;
    running.wait_listening(&[Port::Tcp(9900)], Duration::from_secs(10))?;
    in_namespace(namespace, wait_ready)?;
    Ok(running)
}

/// Waits until all listeners of a node accept.
fn wait_ready() -> Result<()> {
    let began = Instant::now();
    loop {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, 9900))?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        if response.starts_with("HTTP/1.1 200") {
            return Ok(());
        }
        ensure!(began.elapsed() < Duration::from_secs(10), "the node is not ready: {response}");
        wait(Duration::from_millis(10));
    }
}

/// The head of a response, and the length of its body.
fn answer(request: &str) -> (String, u64) {
    let bytes: u64 = request.split(['/', ' ']).nth(2).and_then(|size| size.parse().ok()).unwrap_or_default();
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {bytes}\r\n\r\n");
    (head, if request.starts_with("GET") { bytes } else { 0 })
}

/// Serves the same requests as an application of the DIF.
pub(super) fn serve_flows() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let address = (SERVER, APPLICATION_PORT).into();
    let application = runtime.block_on(RinaApplication::bind(address, DIF, KEY.as_bytes()))?;
    thread::spawn(move || runtime.block_on(application.respond(APPLICATION, answer)));
    Ok(())
}

/// Publishes zeros under `/BYTES` over UDP, for each of the sizes.
pub(super) fn publish(sizes: &'static [u64]) -> Result<()> {
    let content = |(name, bytes): (String, u64)| {
        let name: Name = name.parse().ok()?;
        let zeros = Bytes::from(vec![0; usize::try_from(bytes).ok()?]);
        Some((name.clone(), PublishedContent::new(name, CONTENT_VERSION, zeros)?))
    };
    let sizes = sizes.iter().map(|bytes| (format!("/{bytes}"), *bytes));
    let empty = (0..EMPTY_NAMES).map(|turn| (format!("/0/{turn}"), 0));
    let all: BTreeMap<Name, PublishedContent> = sizes.chain(empty).filter_map(content).collect();
    let socket = UdpSocket::bind((SERVER, PRODUCER_PORT))?;
    thread::spawn(move || {
        let mut buffer = vec![0; BUFFER];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let Ok(frame) = LpPacket::decode(Bytes::copy_from_slice(&buffer[..length])) else { continue };
            let Some(Ok(Packet::Interest(interest))) = frame.fragment.map(Packet::decode) else { continue };
            let Some(content) = all.get(&content_name(&interest.name)) else { continue };
            if let Ok(Some(data)) = content.answer(&interest, Duration::from_secs(1), &Signer::digest()) {
                let frame = LpPacket { pit_token: frame.pit_token, ..LpPacket::bare(data) };
                let _ = socket.send_to(&frame.encode(), from);
            }
        }
    });
    Ok(())
}

/// The path of the content of this length.
pub(super) fn content_path(bytes: u64, turn: u64) -> String {
    // Empty content has a new name each time, so that it comes from its producer and not from what the node has stored.
    let name = if bytes == 0 { format!("/0/{}", turn % EMPTY_NAMES) } else { format!("/{bytes}") };
    format!("{name}/{}", Component::numbered(types::VERSION, CONTENT_VERSION))
}

/// Serves requests at an address: HEAD with a head, `GET /BYTES` with that number of bytes. Threads inherit the namespace.
pub(super) fn serve(address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| address.to_string())?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve_one(stream));
        }
    });
    Ok(())
}

fn serve_one(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let zeros = vec![0; BUFFER];
    while let Some(head) = read_head(&mut stream)? {
        let (head, mut left) = answer(&head);
        stream.write_all(head.as_bytes())?;
        while left > 0 {
            let part = left.min(BUFFER as u64);
            stream.write_all(&zeros[..part as usize])?;
            left -= part;
        }
    }
    Ok(())
}

/// Reads up to the end of a head; `None` at the end of the connection. Heads come one at a time.
fn read_head(stream: &mut TcpStream) -> std::io::Result<Option<String>> {
    let mut head = Vec::new();
    let mut buffer = [0; 4096];
    while !head.ends_with(b"\r\n\r\n") {
        let read = stream.read(&mut buffer)?;
        if read == 0 {
            return Ok(None);
        }
        head.extend_from_slice(&buffer[..read]);
    }
    Ok(Some(String::from_utf8_lossy(&head).into_owned()))
}

/// The minimal splitter: a connection for each one that it accepts, and two threads that copy.
pub(super) fn split(address: SocketAddr, to: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address)?;
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            thread::spawn(move || split_one(client, to));
        }
    });
    Ok(())
}

/// Copies a connection to this address, and back.
pub(crate) fn split_one(client: TcpStream, to: SocketAddr) -> std::io::Result<()> {
    let server = TcpStream::connect(to)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (client_too, server_too) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || copy(client_too, server_too));
    copy(server, client)
}

fn copy(mut from: TcpStream, mut to: TcpStream) -> std::io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            return to.shutdown(std::net::Shutdown::Write);
        }
        to.write_all(&buffer[..read])?;
    }
}

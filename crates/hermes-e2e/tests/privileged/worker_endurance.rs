//! Connections one after the other, for as long as one likes, while modes change, documents are read again, and processes follow one
//! another: none is lost whose handshake is done.
//!
//! In: the number of connections, from `HERMES_CONNECTIONS` (20,000 without it). Out: each has its response. As root, since the kernel
//! loads programs for root alone.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{Draft, Node, Overlay};
use hermes_testkit::poll;
use hermes_testkit::skip::needs_root;
use socket2::{Domain, Socket, Type};

const CONNECTIONS: u64 = 20_000;
const CLIENTS: u64 = 4;
/// Changes of the mode, about as many.
const STEPS: u64 = 400;
/// Changes of the mode before the next process takes over.
const CHANGES: usize = 8;
const MODES: [&str; 4] = ["directed", "exclusive", "roundrobin", "reuseport"];

const DOCUMENT: &str = "
workers: 4
dispatch: $MODE
access-log: off
drain: 5s
listeners:
- {name: web, bind: '127.0.0.1:$PORT', protocol: http}
routes:
- {name: all, respond: {status: 200, body: ok}}
";

fn wanted() -> u64 {
    std::env::var("HERMES_CONNECTIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(CONNECTIONS)
}

/// Connects from an address of its own, sends a request and reads the whole response.
fn serve_one(to: SocketAddr, number: u64) -> std::io::Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    let from = Ipv4Addr::from(0x7f01_0000 | (u32::try_from(number % 0xfff0).unwrap_or_default() + 1));
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::new(IpAddr::V4(from), 0).into())?;
    socket.connect(&to.into())?;
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\r\n")?;
    let mut response = Vec::new();
    stream.read_to_end(&mut response)?;
    if response.starts_with(b"HTTP/1.1 200 ") && response.ends_with(b"ok") {
        return Ok(());
    }
    Err(std::io::Error::other(String::from_utf8_lossy(&response).into_owned()))
}

/// Connects until so many connections are served.
fn serve_all(to: SocketAddr, wanted: u64, served: Arc<AtomicU64>) -> Vec<thread::JoinHandle<Vec<String>>> {
    let begun = Arc::new(AtomicU64::new(0));
    let client = || {
        let (begun, served) = (begun.clone(), served.clone());
        move || {
            let mut lost = Vec::new();
            loop {
                let number = begun.fetch_add(1, Ordering::Relaxed);
                if number >= wanted {
                    return lost;
                }
                match serve_one(to, number) {
                    Ok(()) => drop(served.fetch_add(1, Ordering::Relaxed)),
                    Err(error) => lost.push(format!("connection {number}: {error}")),
                }
            }
        }
    };
    (0..CLIENTS).map(|_| thread::spawn(client())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_connection_is_lost_however_often_modes_and_processes_change() {
    if !needs_root("no_connection_is_lost_however_often_modes_and_processes_change") {
        return;
    }
    let (overlay, wanted) = (Overlay::new(hermes()).unwrap(), wanted());
    let host = Ipv4Addr::LOCALHOST;
    let (web, admin) = (hermes_testkit::port::reserve(host), hermes_testkit::port::reserve(host));
    let socket = overlay.dir().join("takeover.sock");
    let draft = |name: &str, mode: &str| -> Draft<'_> {
        let draft = overlay.node("node").document(DOCUMENT).with("MODE", mode).with("PORT", web.port());
        draft.called(name).admin(admin).args(&["--takeover", socket.to_str().unwrap()])
    };
    let mut node: Node = draft("node-0", MODES[MODES.len() - 1]).start().await.unwrap();
    let served = Arc::<AtomicU64>::default();
    let clients = serve_all(web, wanted, served.clone());
    let (mut changes, mut processes) = (0, 1);
    while clients.iter().any(|client| !client.is_finished()) {
        let mode = MODES[changes % MODES.len()];
        node.reload(DOCUMENT, &[("MODE", mode.to_owned()), ("PORT", web.port().to_string())]).await.unwrap();
        changes += 1;
        if changes % CHANGES == 0 {
            let next = draft(&format!("node-{processes}"), mode).start().await.unwrap();
            let old = std::mem::replace(&mut node, next);
            poll::until("the old process parts", || async { old.log().contains("another process has the listeners") })
                .await;
            assert!(old.ended().await.success());
            processes += 1;
        }
        let before = served.load(Ordering::Relaxed);
        let goes_on = || async {
            served.load(Ordering::Relaxed) >= before + wanted / STEPS || clients.iter().all(|c| c.is_finished())
        };
        poll::until("connections are served", goes_on).await;
    }
    let lost: Vec<_> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
    let served = served.load(Ordering::Relaxed);
    println!("{served} connections, {changes} changes of the mode, {processes} processes, {} lost", lost.len());
    assert!(lost.is_empty(), "{} lost: {:?}", lost.len(), &lost[..lost.len().min(5)]);
    assert_eq!(served, wanted);
    assert!(processes > 1 && changes > CHANGES, "{processes} processes, {changes} changes");
    node.assert_sound();
}

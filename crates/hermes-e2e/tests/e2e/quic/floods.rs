//! Handshakes that nobody finishes, from addresses that nobody may have.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use hermes_testkit::poll::until;
use tokio::{net::UdpSocket, task::JoinSet};

use crate::quic::lab::{Behind, Echo, client, loopback, overlay};

/// What a node sends to an address before it knows that somebody is there: three times what it got from
/// there (RFC 9000, section 8.1).
const AMPLIFICATION: usize = 3;

/// Passes one datagram of a client through, and nothing back: to the node, a client that sent from an address
/// which is not its own.
struct Forger {
    /// Where its client connects to.
    address: SocketAddr,
    sent: Arc<AtomicUsize>,
    received: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Forger {
    async fn start(node: SocketAddr) -> Self {
        let near = UdpSocket::bind(loopback()).await.unwrap();
        let far = UdpSocket::bind(loopback()).await.unwrap();
        far.connect(node).await.unwrap();
        let (sent, received) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let address = near.local_addr().unwrap();
        let mut tasks = JoinSet::new();
        let counts = (sent.clone(), received.clone());
        tasks.spawn(async move {
            let mut room = [0; 2048];
            let first = near.recv(&mut room).await.unwrap();
            far.send(&room[..first]).await.unwrap();
            counts.0.fetch_add(first, Ordering::Relaxed);
            loop {
                counts.1.fetch_add(far.recv(&mut room).await.unwrap(), Ordering::Relaxed);
            }
        });
        Self { address, sent, received, _tasks: tasks }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_handshakes_exclude_no_client_and_amplify_nothing() {
    const FORGED: usize = 6;
    let (overlay, behind) = (overlay(), Behind::start());
    let draft = behind.limited(&overlay, 1, loopback(), "handshakes: 4, connections: 40");
    let mut node = draft.start().await.unwrap();
    let to = node.address("in");
    let mut forgers = Vec::new();
    let mut clients = JoinSet::new();
    for _ in 0..FORGED {
        let forger = Forger::start(to).await;
        let client = client(&overlay, forger.address);
        clients.spawn(async move { client.h3().await.map(drop) });
        until("the forged datagram is answered", || async { forger.received.load(Ordering::Relaxed) > 0 }).await;
        forgers.push(forger);
    }
    let retried = || node.metric("hermes_limit_hits_total", "limit=\"handshakes\"");
    assert_eq!(retried().await.unwrap(), 2.0, "the first four are believed");
    assert_eq!(node.metric("hermes_connections_open", "").await.unwrap(), 4.0, "a Retry costs no memory");
    // Who shows that it has its address gets in.
    Echo::open(&client(&overlay, to), 1).await.round(10_000).await;
    assert_eq!(retried().await.unwrap(), 3.0);
    for forger in &forgers {
        let (sent, received) = (forger.sent.load(Ordering::Relaxed), forger.received.load(Ordering::Relaxed));
        assert!(received <= AMPLIFICATION * sent, "{sent} bytes from a forged address made {received}");
    }
    clients.shutdown().await;
    node.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_stand_are_no_handshakes() {
    const STANDING: u64 = 12;
    let (overlay, behind) = (overlay(), Behind::start());
    let mut node = behind.limited(&overlay, 1, loopback(), "handshakes: 2").start().await.unwrap();
    let mut standing = Vec::new();
    for seed in 0..STANDING {
        standing.push(Echo::open(&client(&overlay, node.address("in")), seed).await);
    }
    assert_eq!(node.metric("hermes_limit_hits_total", "limit=\"handshakes\"").await.unwrap(), 0.0);
    for echo in &mut standing {
        echo.round(1000).await;
    }
    node.assert_sound();
}

//! Documents that change where HTTP/3 is spoken: what runs goes on at its socket, what is new finds the new listener.

use hermes_testkit::{overlay::Node, poll::until};

use crate::quic::lab::{Behind, DOCUMENT, Echo, client, overlay};

/// The document with something replaced.
async fn reload(node: &mut Node, behind: &Behind, at: std::net::SocketAddr, from: &str, to: &str) {
    assert!(DOCUMENT.contains(from), "nothing would change");
    let values = [
        ("WORKERS", "2".to_owned()),
        ("LIMITS", String::new()),
        ("IN", at.to_string()),
        ("ECHO", behind.echo.address().to_string()),
        ("WEB", behind.web.address().to_string()),
    ];
    node.reload(&DOCUMENT.replace(from, to), &values).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_outlive_their_listener_and_its_successor_shares_their_sockets() {
    let (overlay, behind) = (overlay(), Behind::start());
    let at = hermes_testkit::port::reserve("127.0.36.1");
    let mut node = behind.node(&overlay, 2, at).start().await.unwrap();
    let client = client(&overlay, at);
    let mut tunnels = Vec::new();
    for seed in 0..6 {
        tunnels.push(Echo::open(&client, seed).await);
    }

    // Another name at the same address, then no HTTP/3, then HTTP/3 again.
    reload(&mut node, &behind, at, "name: in,", "name: another,").await;
    tunnels.push(Echo::open(&client, 10).await);
    for tunnel in &mut tunnels {
        tunnel.round(20_000).await;
    }
    reload(&mut node, &behind, at, "http3: true", "http3: false").await;
    let refused = client.h3().await.unwrap_err();
    assert_ne!(refused.kind(), std::io::ErrorKind::TimedOut, "who comes anew is told at once: {refused}");
    for tunnel in &mut tunnels {
        tunnel.round(20_000).await;
    }
    reload(&mut node, &behind, at, "access-log: off", "access-log: off").await;
    for seed in 20..26 {
        tunnels.push(Echo::open(&client, seed).await);
    }
    for tunnel in &mut tunnels {
        tunnel.round(20_000).await;
    }
    assert_eq!(node.metric("hermes_quic_forwarded_total", "").await.unwrap(), 0.0);

    // Its sockets close with the last connection at them.
    reload(&mut node, &behind, at, "http3: true", "http3: false").await;
    drop(tunnels);
    until("the address is free", || async { std::net::UdpSocket::bind(at).is_ok() }).await;
    node.assert_sound();
}

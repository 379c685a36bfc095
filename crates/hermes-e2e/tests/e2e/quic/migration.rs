//! Clients that move to another address in the middle of everything.

use tokio::task::JoinSet;

use crate::quic::lab::{Behind, Download, Echo, client, elsewhere, loopback, overlay};

const TUNNELS: u64 = 24;
const DOWNLOADS: u64 = 8;
const SIZE: u64 = 6 << 20;
const MOVES: u64 = 3;

/// All of them at once, several times. More connections than workers, so that each worker has some; a new
/// port is a new place among the kernel's sockets, were it not for the connection's id.
async fn connections_survive_moves(workers: usize) {
    let (overlay, behind) = (overlay(), Behind::start());
    let mut node = behind.node(&overlay, workers, loopback()).start().await.unwrap();
    let listener = client(&overlay, node.address("in"));
    let mut clients = JoinSet::new();
    for seed in 0..TUNNELS {
        let listener = listener.clone();
        clients.spawn(async move {
            let mut echo = Echo::open(&listener, seed).await;
            for _ in 0..MOVES {
                echo.round(30_000).await;
                echo.connection.move_to(elsewhere()).unwrap();
                echo.round(30_000).await;
            }
        });
    }
    for _ in 0..DOWNLOADS {
        let listener = listener.clone();
        clients.spawn(async move {
            let mut download = Download::begin(&listener, SIZE).await;
            for step in 1..=MOVES {
                download.read_to(step * SIZE / (MOVES + 1)).await;
                download.connection.move_to(elsewhere()).unwrap();
            }
            download.finish().await;
        });
    }
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    // Two moves that come close upon each other are seen as one; every tunnel has moved at least once.
    node.metric_reaches("hermes_quic_migrations_total", "", TUNNELS as f64).await;
    let passed_on = node.metric("hermes_quic_forwarded_total", "").await.unwrap();
    assert_eq!(passed_on, 0.0, "the kernel finds the worker by itself");
    let lost = node.metric("hermes_quic_packets_lost_total", "").await.unwrap();
    let sent = node.metric("hermes_quic_packets_sent_total", "").await.unwrap();
    println!("{workers} workers: {lost} of {sent} packets lost");
    node.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_two_workers_connections_survive_moves() {
    connections_survive_moves(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_four_workers_connections_survive_moves() {
    connections_survive_moves(4).await;
}

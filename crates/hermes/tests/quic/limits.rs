//! What an operator sets of QUIC: how long silence may last, and how large packets may be.

use hermes_testkit::{
    door::Door,
    h3::relay::{Lets, Relay},
    patience::until,
};

use crate::{
    lab::{Behind, Echo, door, loopback, overlay},
    restart::{Lasting, download},
};

const SHORT: &str = "quic-idle: 3s, quic-keep-alive: 500ms";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_ends_a_connection_after_its_time_and_what_is_kept_is_not_silent() {
    let (overlay, behind) = (overlay(), Behind::start());
    let node = behind.limited(&overlay, 1, loopback(), SHORT).start().await.unwrap();
    let relay = Relay::before(node.address("in")).await.unwrap();
    let through: Door = door(&overlay, relay.address());
    let mut echo = Echo::open(&through, 1).await;
    echo.round(1000).await;
    // Its client says nothing by itself: ten times the node does, which takes longer than the time of silence.
    let sent = node.metric("hermes_quic_packets_sent_total", "").await.unwrap();
    node.metric_reaches("hermes_quic_packets_sent_total", "", sent + 10.0).await;
    echo.round(1000).await;
    relay.lets(Lets::Nothing);
    until("the connection is given up", || async { node.metric("hermes_connections_open", "").await.unwrap() == 0.0 })
        .await;
}

/// QUIC packets in which a node sends so much. `None` where a busy machine let the handshake take so long that
/// HTTP/2 was taken instead.
async fn packets_of(lasting: &Lasting, limits: &str, size: usize) -> Option<f64> {
    let limits = format!("upstream-idle: 1s{limits}");
    let far = lasting.start("far", 1, &limits).await;
    let near = lasting.neighbour(&limits).await;
    assert_eq!(download(&near, size).await, 200);
    if near.metric("hermes_quic_fallbacks_total", "").await.unwrap() > 0.0 {
        return None;
    }
    // What a connection sent is counted to the end with it.
    let open = || far.metric("hermes_connections_open", "");
    until("the connection ends", || async { open().await.unwrap() == 0.0 }).await;
    Some(far.metric("hermes_quic_packets_sent_total", "").await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_frames_are_jumbo_packets_may_be_too() {
    const SIZE: usize = 16 << 20;
    let mut packets = Vec::new();
    for limits in ["", ", quic-initial-mtu: 6500B, quic-largest-mtu: 6500B"] {
        for attempt in 0.. {
            assert!(attempt < 5, "QUIC never got through");
            let lasting = Lasting::new([127, 0, 36, 3]);
            if let Some(sent) = packets_of(&lasting, limits, SIZE).await {
                packets.push(sent);
                break;
            }
        }
    }
    println!("{packets:?} packets");
    assert!(packets[0] > (SIZE / 3000) as f64 && packets[1] < (SIZE / 3000) as f64, "{packets:?}");
}

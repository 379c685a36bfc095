//! What an operator sets of QUIC: how long silence may last, and how large packets may be.

use hermes_testkit::{
    h3::relay::{Direction, Relay},
    listener_client::ListenerClient,
    poll::until,
    raw_http1::RawHttp1,
};

use crate::quic::{
    lab::{Behind, Echo, client, loopback, overlay},
    restart::{Lasting, download},
};

const SHORT: &str = "quic-idle: 3s, quic-keep-alive: 500ms";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_times_out_and_keepalives_prevent_it() {
    let (overlay, behind) = (overlay(), Behind::start());
    let node = behind.limited(&overlay, 1, loopback(), SHORT).start().await.unwrap();
    let relay = Relay::before(node.address("in")).await.unwrap();
    let through: ListenerClient = client(&overlay, relay.address());
    let mut echo = Echo::open(&through, 1).await;
    echo.round(1000).await;
    // Its client says nothing by itself: ten times the node does, which takes longer than the time of silence.
    let sent = node.metric("hermes_quic_packets_sent_total", "").await.unwrap();
    node.metric_reaches("hermes_quic_packets_sent_total", "", sent + 10.0).await;
    echo.round(1000).await;
    relay.direction(Direction::Nothing);
    until("the connection is given up", || async { node.metric("hermes_connections_open", "").await.unwrap() == 0.0 })
        .await;
}

async fn echo(tunnel: &mut RawHttp1<tokio::net::TcpStream>) {
    tunnel.send("1").await.unwrap();
    assert_eq!(tunnel.exactly(1).await.unwrap(), b"1");
}

/// Where only the far side asks for signs of life, all that the near side says is that it heard them: nobody answers that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_path_where_only_signs_of_life_are_heard_is_not_dark() {
    let lasting = Lasting::new([127, 0, 36, 4]);
    let far = lasting.start("far", 1, "quic-idle: 5s, quic-keep-alive: 2470ms").await;
    let mut idle = Vec::new();
    // An answer is held back for 25 ms, and a neighbour looks every 250 ms from its dial on: of ten whose last word was
    // said at other times after it, one looks between a sign of life and its answer.
    for number in 0..10 {
        let near = lasting.neighbour_called(&format!("near-{number}"), "quic-keep-alive: 25s").await;
        let mut tunnel = RawHttp1::connect(near.address("in")).await.unwrap();
        tunnel.send("CONNECT echo.test:7 HTTP/1.1\r\nhost: echo.test:7\r\n\r\n").await.unwrap();
        assert_eq!(tunnel.head().await.unwrap().status(), 200);
        tokio::time::sleep(std::time::Duration::from_millis(25 * number)).await;
        echo(&mut tunnel).await;
        idle.push((near, tunnel));
    }
    let sent = far.metric("hermes_quic_packets_sent_total", "").await.unwrap();
    far.metric_reaches("hermes_quic_packets_sent_total", "", sent + 40.0).await;
    for (near, tunnel) in &mut idle {
        assert_eq!(near.metric("hermes_quic_fallbacks_total", "").await.unwrap(), 0.0, "{}", near.log());
        echo(tunnel).await;
    }
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
async fn packets_may_be_jumbo_on_jumbo_links() {
    const SIZE: usize = 16 << 20;
    let mut packets = Vec::new();
    for limits in ["", ", quic-initial-mtu: 6500B, quic-max-mtu: 6500B"] {
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

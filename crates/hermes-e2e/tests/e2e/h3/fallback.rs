//! HTTP/2 as the fallback between two nodes: it serves while QUIC packets are dropped, health checks use it, and it is
//! left again. A far node with few streams gets more connections.

use std::{net::SocketAddr, time::Duration};

use hermes_testkit::{
    ca::Subject,
    h3::relay::{Direction, Relay},
    listener_client::{ListenerClient, NODE_NAME, TunnelMode},
    netns::Namespace,
    origin::{self, Origin, stream},
    overlay::{Draft, Node, Overlay},
    poll::until,
    raw_http1::RawHttp1,
    skip::needs_root,
    tunnel::Tunnel,
};

use crate::h3::lab::{ANY, overlay};

const FAR: &str = "
workers: 1
limits: {$LIMITS}
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
routes:
- {name: echo, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
- {name: web, respond: {body: far}}
";

const NEAR: &str = "
workers: 1
limits: {$LIMITS}
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: far}
upstreams:
- {name: far, protocol: h3, overlay: false, endpoints: ['$FAR'], tls: {server-name: node.test, ca: $CA} $MORE}
";

fn far<'o>(overlay: &'o Overlay, echo: &Origin, limits: &str) -> Draft<'o> {
    let draft = overlay.node("far").document(FAR).with("ECHO", echo.address()).with("LIMITS", limits);
    draft.identity(&Subject::node("far").with_dns(NODE_NAME)).unwrap()
}

fn near<'o>(overlay: &'o Overlay, far: SocketAddr, more: &str) -> Draft<'o> {
    near_within(overlay, far, more, "")
}

fn near_within<'o>(overlay: &'o Overlay, far: SocketAddr, more: &str, limits: &str) -> Draft<'o> {
    let ca = overlay.dir().join("far-ca.pem");
    std::fs::write(&ca, overlay.authority().pem()).unwrap();
    let draft = overlay.node("near").document(NEAR).with("FAR", far).with("CA", ca.display());
    draft.with("MORE", more).with("LIMITS", limits)
}

/// So many tunnels, each of which has carried something.
async fn tunnels(near: &Node, count: usize) -> Vec<Tunnel> {
    let client = ListenerClient::plain(near.address("apps"));
    let mut tunnels = Vec::new();
    for number in 0..count {
        let mut tunnel =
            client.tunnel(TunnelMode::ConnectH1, "ECHO:7").await.unwrap_or_else(|error| panic!("{number}: {error}"));
        tunnel.writer.send(&b"here"[..]).await.unwrap();
        assert_eq!(tunnel.reader.at_least(4).await.unwrap(), b"here", "{number}");
        tunnels.push(tunnel);
    }
    tunnels
}

/// A request that has begun, and waits.
async fn begin(near: &Node) -> RawHttp1<tokio::net::TcpStream> {
    let before = near.metric("hermes_sessions_open", "").await.unwrap();
    let mut http1 = RawHttp1::connect(near.address("apps")).await.unwrap();
    http1.send("GET / HTTP/1.1\r\nhost: WEB\r\nconnection: close\r\n\r\n").await.unwrap();
    open_are(near, before + 1.0).await;
    http1
}

async fn open_are(near: &Node, count: f64) {
    until("as many sessions", || async { near.metric("hermes_sessions_open", "").await.unwrap() == count }).await;
}

async fn ask(near: &Node, path: &str) -> u16 {
    let mut http1 = RawHttp1::connect(near.address("apps")).await.unwrap();
    http1.send(format!("GET {path} HTTP/1.1\r\nhost: WEB\r\nconnection: close\r\n\r\n")).await.unwrap();
    http1.head().await.unwrap().status()
}

/// Who the far node says has asked for this path.
async fn source(far: &Node, path: &str) -> String {
    far.record(|record| record["path"] == path).await["source"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn an_upstream_that_http_2_serves_is_healthy() {
    let (overlay, echo) = (overlay(), stream::echo(origin::listen(ANY).unwrap()).unwrap());
    let far = far(&overlay, &echo, "").start().await.unwrap();
    let relay = Relay::beside_tcp(far.address("door"), Direction::Nothing).await.unwrap();
    let more = ", health: {path: /healthz, interval: 1s, timeout: 1s, unhealthy: 1, healthy: 1}";
    let near = near(&overlay, relay.address(), more).start().await.unwrap();
    // One that fails would be followed by another.
    far.metric_reaches("hermes_sessions_total", "", 2.0).await;
    source(&far, "/healthz").await;
    assert_eq!(near.metric("hermes_upstream_healthy", "").await.unwrap(), 1.0, "{}", near.log());
    assert_eq!(ask(&near, "/").await, 200);
}

/// Who hears the peer and is not heard himself would hear of it without end that the peer hears nothing.
#[tokio::test]
async fn a_path_that_drops_one_direction_is_abandoned() {
    let (overlay, echo) = (overlay(), stream::echo(origin::listen(ANY).unwrap()).unwrap());
    let far = far(&overlay, &echo, "quic-keep-alive: 500ms").start().await.unwrap();
    let relay = Relay::beside_tcp(far.address("door"), Direction::Both).await.unwrap();
    let near = near(&overlay, relay.address(), "").start().await.unwrap();
    let mut tunnel = ListenerClient::plain(near.address("apps")).tunnel(TunnelMode::ConnectH1, "ECHO:7").await.unwrap();
    assert_eq!(ask(&near, "/").await, 200);
    assert_eq!(near.metric("hermes_quic_fallbacks_total", "").await.unwrap(), 0.0, "{}", near.log());
    relay.direction(Direction::Down);
    tunnel.writer.send(&b"lost"[..]).await.unwrap();
    near.says("no packet is answered").await;
    assert_eq!(ask(&near, "/").await, 200);
}

/// QUIC says how many streams its peer allows only as they are opened: tunnels beyond would wait for others to end.
#[tokio::test]
async fn a_peer_that_allows_few_streams_gets_more_connections() {
    const TUNNELS: usize = 11;
    let (overlay, echo) = (overlay(), stream::echo(origin::listen(ANY).unwrap()).unwrap());
    let mut far = far(&overlay, &echo, "streams: 4").start().await.unwrap();
    let mut near = near(&overlay, far.address("door"), "").start().await.unwrap();
    let tunnels = tunnels(&near, TUNNELS).await;
    assert_eq!(far.metric("hermes_connections_open", "").await.unwrap(), TUNNELS.div_ceil(4) as f64);
    drop(tunnels);
    open_are(&near, 0.0).await;
    // Streams that have ended are allowed anew, and no further connection is needed.
    for _ in 0..3 * TUNNELS {
        assert_eq!(ask(&near, "/").await, 200);
    }
    assert_eq!(far.metric("hermes_connections_open", "").await.unwrap(), TUNNELS.div_ceil(4) as f64);
    [&mut near, &mut far].into_iter().for_each(Node::assert_sound);
}

/// Where no further connection may be dialled, a place on any of them will do.
#[tokio::test]
async fn a_waiting_request_takes_the_first_free_stream() {
    let (overlay, echo) = (overlay(), stream::echo(origin::listen(ANY).unwrap()).unwrap());
    let far = far(&overlay, &echo, "streams: 2").start().await.unwrap();
    let near = near_within(&overlay, far.address("door"), "", "upstream-connections: 2").start().await.unwrap();
    let mut tunnels = tunnels(&near, 4).await;
    for number in (0..4).rev() {
        let mut waits = begin(&near).await;
        let tunnel = tunnels.remove(number);
        drop(tunnel);
        assert_eq!(waits.head().await.unwrap().status(), 200, "after tunnel {number}");
        tunnels.push(self::tunnels(&near, 1).await.remove(0));
    }
    assert_eq!(far.metric("hermes_connections_open", "").await.unwrap(), 2.0);
}

/// A connection is quiet because nobody has said anything on it: it is none that is lost.
#[tokio::test]
async fn a_cancelled_wait_costs_no_connection() {
    let (overlay, echo) = (overlay(), stream::echo(origin::listen(ANY).unwrap()).unwrap());
    let far = far(&overlay, &echo, "streams: 2").start().await.unwrap();
    let near = near_within(&overlay, far.address("door"), "", "upstream-connections: 1").start().await.unwrap();
    let mut tunnels = tunnels(&near, 2).await;
    let waits = begin(&near).await;
    // After a second of silence a connection is one that may be lost.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    waits.stream().set_zero_linger().unwrap();
    drop(waits);
    open_are(&near, 2.0).await;
    let mut next = begin(&near).await;
    tunnels.pop();
    assert_eq!(next.head().await.unwrap().status(), 200);
    assert_eq!(near.metric("hermes_upstream_connects_total", "").await.unwrap(), 1.0);
}

/// Several connections on one path that goes dark are one failure of QUIC.
#[tokio::test]
async fn a_path_that_stops_passing_packets_is_logged_once() {
    let (overlay, echo) = (overlay(), stream::echo(origin::listen(ANY).unwrap()).unwrap());
    let far = far(&overlay, &echo, "streams: 1").start().await.unwrap();
    let relay = Relay::beside_tcp(far.address("door"), Direction::Both).await.unwrap();
    let near = near(&overlay, relay.address(), "").start().await.unwrap();
    let mut tunnels = tunnels(&near, 4).await;
    relay.direction(Direction::Nothing);
    for tunnel in &mut tunnels {
        tunnel.writer.send(&b"lost"[..]).await.unwrap();
    }
    open_are(&near, 0.0).await;
    assert_eq!(near.log().matches("HTTP/2 is used instead").count(), 1, "{}", near.log());
    assert_eq!(near.metric("hermes_quic_fallbacks_total", "").await.unwrap(), 1.0);
}

/// A tunnel over HTTP/2 lasts, and requests come all the time: neither keeps the others from QUIC for ever.
#[test]
fn quic_is_used_again_once_it_gets_through() {
    if !needs_root("quic_is_used_again_once_it_gets_through") {
        return;
    }
    let thread = std::thread::spawn(|| {
        let home = Namespace::new().unwrap();
        home.enter().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(comes_back(home));
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

async fn comes_back(home: Namespace) {
    let (overlay, echo) = (overlay(), stream::echo(origin::listen(ANY).unwrap()).unwrap());
    let mut far = far(&overlay, &echo, "").within(&home).start().await.unwrap();
    let relay = Relay::beside_tcp(far.address("door"), Direction::Nothing).await.unwrap();
    let mut near = near(&overlay, relay.address(), "").within(&home).start().await.unwrap();
    let mut tunnel = ListenerClient::plain(near.address("apps")).tunnel(TunnelMode::ConnectH1, "ECHO:7").await.unwrap();
    near.says("HTTP/2 is used instead").await;
    assert_eq!(ask(&near, "/blocked").await, 200);
    assert_ne!(source(&far, "/blocked").await, relay.source().to_string());
    relay.direction(Direction::Both);
    assert_eq!(ask(&near, "/avoided").await, 200);
    // In another network it is tried before its time.
    home.ip(&["addr", "add", "10.9.9.9/32", "dev", "lo"]).unwrap();
    let mut requests = 0;
    while !near.log().contains("QUIC works again") {
        requests += 1;
        assert_eq!(ask(&near, "/meanwhile").await, 200);
        assert!(requests < 10_000, "{}", near.log());
    }
    assert_eq!(ask(&near, "/again").await, 200);
    assert_eq!(source(&far, "/again").await, relay.source().to_string());
    assert_ne!(source(&far, "/avoided").await, relay.source().to_string());
    // What was under way by TCP goes on there, and its connection ends with it.
    tunnel.writer.send(&b"still here"[..]).await.unwrap();
    assert_eq!(tunnel.reader.at_least(10).await.unwrap(), b"still here");
    tunnel.writer.finish().await.unwrap();
    assert_eq!(tunnel.reader.to_end().await.unwrap(), b"");
    until("QUIC's connection alone is left", || async {
        far.metric("hermes_connections_open", "").await.unwrap() == 1.0
    })
    .await;
    [&mut near, &mut far].into_iter().for_each(Node::assert_sound);
}

//! What of a message passes a node and what ends there: fields of the hop, of the overlay, of the trace.

use std::io;

use hermes_testkit::{
    listener_client::ListenerClient,
    multiplex::Exchange,
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
    raw_http1::Head,
};
use http::{HeaderMap, Request, Response};

use crate::http::lab::{Seen, before, next, overlay, seen};

/// Answers with fields that must not pass, and tells what it was asked.
fn origin_h1() -> (Origin, Seen<Head>) {
    let (sender, receiver) = seen();
    let origin = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            loop {
                let _ = sender.send(http1.head().await?);
                http1
                    .send(
                        "HTTP/1.1 200 OK\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\n\
                         proxy-connection: keep-alive\r\nhermes-user: eve\r\nhermes-secret: 1\r\nx-stays: yes\r\n\
                         content-length: 0\r\n\r\n",
                    )
                    .await?;
            }
        }
    });
    (origin.unwrap(), receiver)
}

fn origin_h2() -> (Origin, Seen<HeaderMap>) {
    let (sender, receiver) = seen();
    let origin = scripted::h2(move |exchange: Exchange| {
        let sender = sender.clone();
        async move {
            let _ = sender.send(exchange.request.headers().clone());
            let response = Response::builder().header("hermes-user", "eve").header("x-stays", "yes").body(());
            exchange.answer(response.map_err(io::Error::other)?, "").await
        }
    });
    (origin.unwrap(), receiver)
}

const REQUEST: &str = "GET /x HTTP/1.1\r\nhost: WEB\r\nconnection: close, X-Named\r\nx-named: 1\r\nkeep-alive: 300\r\n\
                       proxy-connection: keep-alive\r\nproxy-authorization: Basic eDp5\r\nte: gzip\r\n\
                       hermes-user: eve\r\nhermes-network: 10.0.0.0/8\r\nforwarded: for=1.2.3.4\r\n\
                       authorization: Bearer t\r\naccept: */*\r\n\r\n";
const GONE: [&str; 8] = [
    "x-named",
    "keep-alive",
    "proxy-connection",
    "proxy-authorization",
    "te",
    "hermes-user",
    "hermes-network",
    "upgrade",
];

#[tokio::test]
async fn fields_of_the_hop_and_the_overlay_end_at_the_edge() {
    let (origin, mut receiver) = origin_h1();
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    http1.send(REQUEST).await.unwrap();
    let head = next(&mut receiver).await;
    for name in GONE {
        assert_eq!(head.header(name), None, "{name} went to the origin: {head:?}");
    }
    // What is between the ends passes, and the origin learns by whom and for whom it is asked.
    assert_eq!(head.header("authorization").as_deref(), Some("Bearer t"));
    assert_eq!(head.header("host").as_deref(), Some("WEB"));
    assert_eq!(head.header("via").as_deref(), Some("1.1 edge"));
    assert_eq!(head.header("forwarded").as_deref(), Some("for=127.0.0.1"), "a stranger's own claim is dropped");
    let answer = http1.head().await.unwrap();
    for name in ["x-hop", "keep-alive", "proxy-connection", "hermes-user", "hermes-secret"] {
        assert_eq!(answer.header(name), None, "{name} came back: {answer:?}");
    }
    assert_eq!(answer.header("x-stays").as_deref(), Some("yes"));
    assert_eq!(answer.header("via").as_deref(), Some("1.1 edge"));
}

#[tokio::test]
async fn fields_of_the_hop_do_not_reach_an_h2_origin() {
    let (origin, mut receiver) = origin_h2();
    let overlay = overlay();
    let node = before(&overlay, "h2", origin.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    http1.send(REQUEST).await.unwrap();
    let headers = next(&mut receiver).await;
    for name in GONE.iter().chain(&["connection", "transfer-encoding", "host"]) {
        assert!(!headers.contains_key(*name), "{name} went to the origin: {headers:?}");
    }
    let answer = http1.head().await.unwrap();
    assert_eq!((answer.header("hermes-user"), answer.header("x-stays").as_deref()), (None, Some("yes")));
}

/// A device's node, then the edge; the edge's listener believes the device's node.
async fn two_nodes(overlay: &Overlay, origin: &Origin, hop: &str) -> (Node, Node) {
    let far = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
    let far = overlay.node("edge").document(far).with("ORIGIN", origin.address()).start().await.unwrap();
    let near = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, set-headers: {hermes-user: alice, hermes-service: video}}
routes:
- {name: all, upstream: far}
upstreams:
- {name: far, protocol: $HOP, overlay: true, endpoints: ['$FAR']}
";
    let near = overlay.node("laptop").document(near).with("HOP", hop).with("FAR", far.address("door"));
    (near.start().await.unwrap(), far)
}

#[tokio::test]
async fn the_overlay_s_fields_pass_between_nodes_and_end_at_the_last() {
    for hop in ["h1", "h2"] {
        let (origin, mut receiver) = origin_h1();
        let overlay = overlay();
        let (near, far) = two_nodes(&overlay, &origin, hop).await;
        let mut connection = ListenerClient::plain(near.address("in")).h2().await.unwrap();
        let answer = connection.get("http://WEB/").await.unwrap();
        assert_eq!((answer.status, answer.header("hermes-user")), (200, None));
        let head = next(&mut receiver).await;
        assert!(head.headers.iter().all(|(name, _)| !name.starts_with("hermes-")), "{hop}: {head:?}");
        let version = if hop == "h1" { "1.1" } else { "2" };
        assert_eq!(head.header("via").unwrap(), format!("2 laptop, {version} edge"), "{hop}");
        assert_eq!(head.header("forwarded").as_deref(), Some("for=127.0.0.1"), "{hop}: the first node's word");
        far.record(|record| record["user"] == "alice").await;
    }
}

#[tokio::test]
async fn a_trace_is_continued_and_each_hop_is_a_span() {
    let (origin, mut receiver) = origin_h1();
    let overlay = overlay();
    let (near, far) = two_nodes(&overlay, &origin, "h2").await;
    let mut connection = ListenerClient::plain(near.address("in")).h2().await.unwrap();
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let request = Request::get("http://WEB/").header("traceparent", format!("00-{trace}-b7ad6b7169203331-01"));
    let request = request.header("tracestate", "vendor=1").body(()).unwrap();
    connection.ask(request, b"").await.unwrap();
    let head = next(&mut receiver).await;
    let parent = head.header("traceparent").unwrap();
    let parts: Vec<&str> = parent.split('-').collect();
    assert_eq!((parts[0], parts[1], parts[3]), ("00", trace, "01"), "{parent}");
    assert_ne!(parts[2], "b7ad6b7169203331", "the origin's parent is the last hop, not the client");
    assert_eq!(head.header("tracestate").as_deref(), Some("vendor=1"));
    for node in [&near, &far] {
        node.record(|record| record["trace"] == trace).await;
    }
    // A malformed one begins a new trace, and so does none.
    for request in [Request::get("http://WEB/").header("traceparent", "00-nonsense"), Request::get("http://WEB/")] {
        connection.ask(request.body(()).unwrap(), b"").await.unwrap();
        let parent = next(&mut receiver).await.header("traceparent").unwrap();
        assert!(parent.len() == 55 && !parent.contains(trace), "{parent}");
    }
}

#[tokio::test]
async fn a_trace_goes_through_tunnels() {
    let echo =
        hermes_testkit::origin::stream::echo(hermes_testkit::origin::listen("127.0.0.1:0".parse().unwrap()).unwrap());
    let echo = echo.unwrap();
    let lab = crate::http::lab::Tunnels::to(echo.address()).await;
    let trace = "0af7651916cd43dd8448eb211c80319c";
    for hop in ["H1", "H2", "POST-H1", "POST-H2"] {
        let client = lab.client(hermes_testkit::listener_client::TunnelMode::ConnectH2, hop);
        let client = client.with("traceparent", &format!("00-{trace}-b7ad6b7169203331-01"));
        let tunnel =
            client.tunnel(hermes_testkit::listener_client::TunnelMode::ConnectH2, &format!("{hop}:7")).await.unwrap();
        drop(tunnel);
        let authority = format!("{}:7", hop.to_ascii_lowercase());
        for node in [&lab.near, &lab.far] {
            node.record(|record| record["trace"] == trace && record["authority"] == *authority).await;
        }
    }
}

#[tokio::test]
async fn crumbs_of_a_cookie_are_joined_for_h1() {
    let (origin, mut receiver) = origin_h1();
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
    let request = Request::get("http://WEB/").header("cookie", "a=1").header("cookie", "b=2").body(()).unwrap();
    connection.ask(request, b"").await.unwrap();
    let cookies: Vec<_> = next(&mut receiver).await.headers.into_iter().filter(|(name, _)| name == "cookie").collect();
    assert_eq!(cookies, [("cookie".to_owned(), "a=1; b=2".to_owned())]);
}

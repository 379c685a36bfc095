//! Upgrades: WebSocket in both versions and across them (RFC 6455, RFC 8441), and protocols that nobody knows.

use std::{io, net::SocketAddr};

use base64::Engine as _;
use bytes::Bytes;
use h2::ext::Protocol;
use hermes_testkit::{
    ca::Subject,
    flow::Flow,
    listener_client::{ListenerClient, open_h2},
    multiplex::{self, Exchange, joined},
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
    raw_http1::Head,
    tunnel::Tunnel,
};
use http::{Method, Request, Response, StatusCode};

use crate::http::lab::{Seen, before, in_front, next, overlay, seen};

/// The key and its proof in RFC 6455, section 1.3.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const PROOF: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";

/// RFC 6455, 4.2.2: what proves that the server has understood.
fn proof(key: &str) -> String {
    let text = format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
    base64::engine::general_purpose::STANDARD.encode(hash)
}

/// What a WebSocket origin saw of the handshake.
#[derive(Debug)]
pub(crate) struct Handshake {
    pub(crate) protocol: String,
    version: Option<String>,
    subprotocol: Option<String>,
    key: Option<String>,
}

/// Echoes what comes after the handshake; `/refuse` is refused.
pub(crate) fn websocket(version: &str) -> (Origin, Seen<Handshake>) {
    let (sender, receiver) = seen();
    if version == "h1" {
        let origin = scripted::h1(move |mut http1| {
            let sender = sender.clone();
            async move {
                let head: Head = http1.head().await?;
                let key = head.header("sec-websocket-key");
                let _ = sender.send(Handshake {
                    protocol: head.header("upgrade").unwrap_or_default(),
                    version: head.header("sec-websocket-version"),
                    subprotocol: head.header("sec-websocket-protocol"),
                    key: key.clone(),
                });
                if head.target() == "/refuse" {
                    return http1.send("HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno").await;
                }
                let proof = key.map_or_else(String::new, |key| format!("sec-websocket-accept: {}\r\n", proof(&key)));
                let upgrade = head.header("upgrade").unwrap_or_default();
                http1
                    .send(format!(
                        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: {upgrade}\r\n\
                         sec-websocket-protocol: chat\r\n{proof}\r\n"
                    ))
                    .await?;
                while let Some(bytes) = http1.some().await? {
                    http1.send(bytes).await?;
                }
                http1.finish().await
            }
        });
        return (origin.unwrap(), receiver);
    }
    let origin = scripted::h2(move |exchange: Exchange| {
        let sender = sender.clone();
        async move { websocket_h2(exchange, &sender).await }
    });
    (origin.unwrap(), receiver)
}

async fn websocket_h2(exchange: Exchange, sender: &tokio::sync::mpsc::UnboundedSender<Handshake>) -> io::Result<()> {
    let Exchange { request, mut respond } = exchange;
    let field = |name| joined(request.headers(), name);
    let protocol = request.extensions().get::<Protocol>().map(|protocol| protocol.as_str().to_owned());
    let _ = sender.send(Handshake {
        protocol: format!("{} {}", request.method(), protocol.unwrap_or_default()),
        version: field("sec-websocket-version"),
        subprotocol: field("sec-websocket-protocol"),
        key: field("sec-websocket-key"),
    });
    if request.uri().path() == "/refuse" {
        let refusal = Response::builder().status(StatusCode::FORBIDDEN).body(()).map_err(io::Error::other)?;
        return Exchange { request, respond }.answer(refusal, "no").await;
    }
    let response = Response::builder().header("sec-websocket-protocol", "chat").body(()).map_err(io::Error::other)?;
    let mut send = respond.send_response(response, false).map_err(io::Error::other)?;
    let mut recv = request.into_body();
    while let Some(chunk) = multiplex::receive(&mut recv).await? {
        multiplex::send_all(&mut send, chunk, false).await?;
    }
    send.send_data(Bytes::new(), true).map_err(io::Error::other)
}

const HANDSHAKE: &str = "host: CHAT\r\nconnection: keep-alive, Upgrade\r\nsec-websocket-version: 13\r\n\
                         sec-websocket-protocol: chat\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

async fn echoes(mut tunnel: Tunnel) {
    tunnel.writer.send("hello").await.unwrap();
    assert_eq!(tunnel.reader.at_least(5).await.unwrap(), b"hello");
    tunnel.writer.send("once more").await.unwrap();
    tunnel.writer.finish().await.unwrap();
    assert_eq!(tunnel.reader.to_end().await.unwrap(), b"once more");
}

pub(crate) async fn opened_by_h1(client: &ListenerClient) -> Tunnel {
    let mut http1 = client.h1().await.unwrap();
    http1.send(format!("GET /chat HTTP/1.1\r\nupgrade: websocket\r\n{HANDSHAKE}")).await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!(head.status(), 101, "{head:?}");
    assert_eq!(head.header("upgrade").as_deref(), Some("websocket"), "{head:?}");
    assert_eq!(head.header("sec-websocket-accept").as_deref(), Some(PROOF), "{head:?}");
    assert_eq!(head.header("sec-websocket-protocol").as_deref(), Some("chat"), "{head:?}");
    let (stream, ahead) = http1.into_parts();
    Tunnel::io(stream, ahead)
}

fn extended(path: &str) -> Request<()> {
    Request::builder()
        .method(Method::CONNECT)
        .uri(format!("http://CHAT{path}"))
        .header("sec-websocket-version", "13")
        .header("sec-websocket-protocol", "chat")
        .extension(Protocol::from_static("websocket"))
        .body(())
        .unwrap()
}

pub(crate) async fn opened_by_h2(client: &ListenerClient) -> Tunnel {
    let mut connection = client.h2().await.unwrap();
    assert!(connection.takes_extended_connect());
    let (recv, send) = open_h2(&mut connection, extended("/chat")).await.unwrap();
    Tunnel::h2(connection, recv, send)
}

pub(crate) async fn by_h1(client: &ListenerClient) {
    echoes(opened_by_h1(client).await).await;
}

pub(crate) async fn by_h2(client: &ListenerClient) {
    echoes(opened_by_h2(client).await).await;
}

#[tokio::test]
async fn websocket_through_every_pair_of_versions() {
    for version in ["h1", "h2"] {
        let (origin, mut receiver) = websocket(version);
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let client = ListenerClient::plain(node.address("in"));
        for from_h2 in [false, true] {
            if from_h2 {
                by_h2(&client).await
            } else {
                by_h1(&client).await
            }
            let handshake = next(&mut receiver).await;
            assert_eq!(handshake.version.as_deref(), Some("13"), "{handshake:?}");
            assert_eq!(handshake.subprotocol.as_deref(), Some("chat"), "{handshake:?}");
            let protocol = if version == "h2" { "CONNECT websocket" } else { "websocket" };
            assert_eq!(handshake.protocol, protocol);
            // Over HTTP/2 nobody has a key (RFC 8441, 5).
            match handshake.key {
                None => assert_eq!(version, "h2"),
                Some(key) if from_h2 => {
                    assert_eq!(base64::engine::general_purpose::STANDARD.decode(key).unwrap().len(), 16);
                }
                Some(key) => assert_eq!((version, key.as_str()), ("h1", KEY)),
            }
        }
    }
}

/// A client over HTTP/2 that sends a key although it need not gets the proof: Envoy sends its own client's, and has no
/// other proof to give it.
#[tokio::test]
async fn a_key_is_proven_whatever_carries_it() {
    for version in ["h1", "h2"] {
        let (origin, _tells) = websocket(version);
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        let mut request = extended("/chat");
        request.headers_mut().insert("sec-websocket-key", http::HeaderValue::from_static(KEY));
        let (response, _send) = connection.open(request, false).await.unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(joined(response.headers(), "sec-websocket-accept").as_deref(), Some(PROOF), "{response:?}");
        // And who sends none is told none.
        let (response, _send) = connection.open(extended("/chat"), false).await.unwrap();
        assert!(!response.await.unwrap().headers().contains_key("sec-websocket-accept"));
    }
}

/// nghttpx accepts no key over HTTP/2; a proxy that translates to HTTP/1.1 without adding a key, like Envoy, needs one.
#[tokio::test]
async fn an_http2_peer_gets_a_key_where_it_wants_one() {
    for wants_key in [false, true] {
        let (sender, mut receiver) = seen();
        let origin = scripted::h2(move |exchange: Exchange| {
            let sender = sender.clone();
            async move {
                if exchange.request.headers().contains_key("sec-websocket-key") == wants_key {
                    return websocket_h2(exchange, &sender).await;
                }
                let refusal = Response::builder().status(StatusCode::BAD_REQUEST).body(()).map_err(io::Error::other)?;
                exchange.answer(refusal, "bad handshake").await
            }
        });
        let (origin, overlay) = (origin.unwrap(), overlay());
        let node = before(&overlay, "h2", origin.address()).await;
        let client = ListenerClient::plain(node.address("in"));
        by_h1(&client).await;
        by_h2(&client).await;
        for _ in 0..2 {
            assert_eq!(next(&mut receiver).await.key.is_some(), wants_key);
        }
    }
}

/// `SPDY/3.1` and other protocols have a version, over every hop.
#[tokio::test]
async fn a_protocol_with_a_version_passes_every_hop() {
    for hop in ["h1", "h2", "h3"] {
        let (origin, mut receiver) = websocket("h1");
        let overlay = overlay();
        let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
        let far = overlay.node("far").document(document).with("ORIGIN", origin.address());
        let far = far.identity(&Subject::node("far")).unwrap().start().await.unwrap();
        let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: far}
upstreams:
- {name: far, protocol: $PROTOCOL, tls: {}, endpoints: ['$FAR']}
";
        let near = overlay.node("near").document(document).with("PROTOCOL", hop).with("FAR", far.address("in"));
        let near = near.identity(&Subject::node("near")).unwrap().start().await.unwrap();
        let mut http1 = ListenerClient::plain(near.address("in")).h1().await.unwrap();
        http1.send("GET / HTTP/1.1\r\nhost: K8S\r\nconnection: upgrade\r\nupgrade: SPDY/3.1\r\n\r\n").await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.status(), 101, "{hop}: {head:?}");
        assert!(head.header("upgrade").unwrap().eq_ignore_ascii_case("SPDY/3.1"), "{hop}: {head:?}");
        assert!(next(&mut receiver).await.protocol.eq_ignore_ascii_case("SPDY/3.1"), "{hop}");
        let (stream, ahead) = http1.into_parts();
        echoes(Tunnel::io(stream, ahead)).await;
    }
}

#[tokio::test]
async fn websocket_through_a_chain_of_both_versions() {
    let (origin, _tells) = websocket("h1");
    let overlay = overlay();
    let far = before(&overlay, "h1", origin.address()).await;
    let near = in_front(&overlay, "h2", &far).await;
    let client = ListenerClient::plain(near.address("in"));
    by_h1(&client).await;
    by_h2(&client).await;
    near.quiet().await;
    far.quiet().await;
}

#[tokio::test]
async fn a_refused_upgrade_is_an_ordinary_answer() {
    for version in ["h1", "h2"] {
        let (origin, _tells) = websocket(version);
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let client = ListenerClient::plain(node.address("in"));
        let mut http1 = client.h1().await.unwrap();
        http1.send(format!("GET /refuse HTTP/1.1\r\nupgrade: websocket\r\n{HANDSHAKE}")).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(
            (head.status(), http1.body(&head).await.unwrap().text().as_str()),
            (403, "no"),
            "{version}: {head:?}"
        );
        let answer = client.h2().await.unwrap().ask(extended("/refuse"), b"").await.unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (403, "no"), "{version}: {answer:?}");
    }
}

/// 200 means "nothing was switched" in HTTP/1.1 and "the tunnel is open" in HTTP/2: it must not pass from the one to
/// the other.
#[tokio::test]
async fn an_origin_that_ignores_an_upgrade_opens_no_tunnel() {
    let origin = scripted::h1(|mut http1| async move {
        http1.head().await?;
        http1.send("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\na page").await
    });
    let (origin, overlay) = (origin.unwrap(), overlay());
    let node = before(&overlay, "h1", origin.address()).await;
    let client = ListenerClient::plain(node.address("in"));
    let mut http1 = client.h1().await.unwrap();
    http1.send(format!("GET /chat HTTP/1.1\r\nupgrade: websocket\r\n{HANDSHAKE}")).await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!((head.status(), http1.body(&head).await.unwrap().text().as_str()), (200, "a page"), "{head:?}");
    let answer = client.h2().await.unwrap().ask(extended("/chat"), b"").await.unwrap();
    assert_eq!(answer.status, StatusCode::BAD_GATEWAY, "{answer:?}");
    assert!(answer.header("proxy-status").unwrap().contains("http_upgrade_failed"), "{answer:?}");
}

/// The client gets a proof of the node's making: what the origin proves, the node has to judge.
#[tokio::test]
async fn an_origin_that_did_not_understand_the_key_is_refused() {
    for accept in ["", "sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOA=\r\n"] {
        let origin = scripted::h1(move |mut http1| async move {
            http1.head().await?;
            let switching = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n";
            http1.send(format!("{switching}{accept}\r\n")).await?;
            http1.to_end().await.map(drop)
        });
        let (origin, overlay) = (origin.unwrap(), overlay());
        let node = before(&overlay, "h1", origin.address()).await;
        let client = ListenerClient::plain(node.address("in"));
        let mut http1 = client.h1().await.unwrap();
        http1.send(format!("GET /chat HTTP/1.1\r\nupgrade: websocket\r\n{HANDSHAKE}")).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 502, "{accept:?}");
        let answer = client.h2().await.unwrap().ask(extended("/chat"), b"").await.unwrap();
        assert_eq!(answer.status, StatusCode::BAD_GATEWAY, "{accept:?}: {answer:?}");
        node.record(|record| record["reason"].as_str().is_some_and(|reason| reason.contains("RFC 6455"))).await;
    }
}

#[tokio::test]
async fn an_unknown_protocol_passes_and_h2c_is_ignored() {
    let (origin, mut receiver) = websocket("h1");
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    let client = ListenerClient::plain(node.address("in"));
    let mut http1 = client.h1().await.unwrap();
    http1.send("GET / HTTP/1.1\r\nhost: CHAT\r\nconnection: upgrade\r\nupgrade: gopher/2\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 101);
    assert_eq!(next(&mut receiver).await.protocol, "gopher/2");
    let (stream, ahead) = http1.into_parts();
    echoes(Tunnel::io(stream, ahead)).await;

    // RFC 9113, 3.1: h2c by Upgrade is obsolete; the request is served as it stands, without the field.
    let mut http1 = client.h1().await.unwrap();
    let h2c = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n";
    http1.send(format!("GET /refuse HTTP/1.1\r\nhost: CHAT\r\n{h2c}\r\n")).await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 403);
    assert_eq!(next(&mut receiver).await.protocol, "");
}

/// An origin that switches to `tcp` after a request with a body, like docker's, and reports its requests.
fn switching() -> (Origin, Seen<String>) {
    let (sender, receiver) = seen();
    let origin = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            let head: Head = http1.head().await?;
            let body = http1.body(&head).await?.text();
            let upgrade = head.header("upgrade").unwrap_or_default();
            let overlay = head.header("hermes-method").is_some();
            let _ = sender.send(format!("{} {upgrade} {body:?} {overlay}", head.method()));
            if upgrade.is_empty() {
                return http1.send("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nasis").await;
            }
            http1.send("HTTP/1.1 101 UPGRADED\r\nconnection: Upgrade\r\nupgrade: tcp\r\n\r\n").await?;
            while let Some(bytes) = http1.some().await? {
                http1.send(bytes).await?;
            }
            http1.finish().await
        }
    });
    (origin.unwrap(), receiver)
}

#[tokio::test]
async fn an_upgrade_keeps_its_method_and_its_body() {
    let (origin, mut receiver) = switching();
    let overlay = overlay();
    let far = before_nodes(&overlay, origin.address()).await;
    let direct = ListenerClient::plain(far.address("in"));
    for (hop, body) in [("", "{}"), ("", ""), ("h1", "{}"), ("h1", ""), ("h2", ""), ("h2", "{}")] {
        let near = if hop.is_empty() { None } else { Some(in_front(&overlay, hop, &far).await) };
        let client = near.as_ref().map_or_else(|| direct.clone(), |near| ListenerClient::plain(near.address("in")));
        let mut http1 = client.h1().await.unwrap();
        let length = body.len();
        let head = format!(
            "POST /exec/1/start HTTP/1.1\r\nhost: DOCKER\r\nconnection: Upgrade\r\nupgrade: tcp\r\ncontent-length: {length}\r\n\r\n"
        );
        http1.send(format!("{head}{body}")).await.unwrap();
        assert_eq!(next(&mut receiver).await, format!("POST tcp {body:?} false"), "{hop:?}");
        let answer = http1.head().await.unwrap();
        assert_eq!((answer.status(), answer.header("upgrade").as_deref()), (101, Some("tcp")), "{hop:?}");
        let (stream, ahead) = http1.into_parts();
        echoes(Tunnel::io(stream, ahead)).await;
    }
}

/// As [`before`], for an h1 origin, where nodes are believed.
async fn before_nodes(overlay: &Overlay, origin: SocketAddr) -> Node {
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes:
- {name: all, match: {method: POST}, upstream: origin}
upstreams:
- {name: origin, protocol: h1, overlay: false, endpoints: ['$ORIGIN']}
";
    overlay.node("far").document(document).with("ORIGIN", origin).start().await.unwrap()
}

/// A flow and a WebSocket look alike on the wire; only one has a UDP path.
#[tokio::test]
async fn connect_udp_without_its_path_is_malformed() {
    let (origin, _tells) = websocket("h1");
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    let client = ListenerClient::plain(node.address("in"));
    let request = Request::builder().method(Method::CONNECT).uri("http://proxy.test/somewhere");
    let request = request.extension(Protocol::from_static("connect-udp")).body(()).unwrap();
    let answer = client.h2().await.unwrap().ask(request, b"").await.unwrap();
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert!(answer.text().contains("/.well-known/masque/udp/"), "{}", answer.text());
    let refused = Flow::open(&client, hermes_testkit::flow::FlowMode::UpgradeH1, "NAME", 0).await.err().unwrap();
    assert!(refused.to_string().contains("400"), "{refused}");
}

/// What `limits.tunnels` bounds is what stays open, by whichever name it was asked for.
#[tokio::test]
async fn upgrades_are_tunnels_of_the_node() {
    let (origin, mut receiver) = websocket("h1");
    let overlay = overlay();
    let document = "
limits: {tunnels: 2}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
    let node = overlay.node("edge").document(document).with("ORIGIN", origin.address()).start().await.unwrap();
    let client = ListenerClient::plain(node.address("in"));
    let handshake = format!("GET /chat HTTP/1.1\r\nupgrade: websocket\r\n{HANDSHAKE}");
    let ask = async || {
        let mut http1 = client.h1().await.unwrap();
        http1.send(&handshake).await.unwrap();
        (http1.head().await.unwrap().status(), http1)
    };
    let (status, first) = ask().await;
    assert_eq!(status, 101);
    let mut connection = client.h2().await.unwrap();
    let second = open_h2(&mut connection, extended("/chat")).await.unwrap();
    assert_eq!(ask().await.0, 503);
    let refused = open_h2(&mut connection, extended("/chat")).await.err().unwrap().to_string();
    assert!(refused.contains("503"), "{refused}");
    assert_eq!(node.metric("hermes_limit_hits_total", "limit=\"tunnels\"").await.unwrap(), 2.0);
    for _ in 0..2 {
        next(&mut receiver).await;
    }
    assert!(receiver.try_recv().is_err(), "a third was asked for");
    // A place that is given back is taken again; what is refused by the origin keeps none.
    drop(first);
    hermes_testkit::poll::until("room for another", || async { ask().await.0 == 101 }).await;
    drop(second);
}

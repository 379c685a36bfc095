//! What is more than a request and a response: trailers, messages both ways on one stream, WebSocket across versions.

use std::io;

use base64::Engine as _;
use bytes::Bytes;
use h2::ext::Protocol;
use hermes_testkit::{
    listener_client::{ListenerClient, open_h2},
    multiplex::{self, Exchange},
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
    tunnel::Tunnel,
};
use http::{HeaderMap, HeaderValue, Method, Request, Response};

use crate::envoy::{
    config::{self, Speaks},
    lab::{Envoy, envoy_binary, overlay},
};

const NODE: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: grpc, match: {authority: GRPC}, upstream: grpc}
- {name: chat, match: {authority: CHAT}, upstream: chat}
upstreams:
- {name: grpc, protocol: $GRPC_PROTOCOL, overlay: false, endpoints: ['$GRPC']}
- {name: chat, protocol: $CHAT_PROTOCOL, overlay: false, endpoints: ['$CHAT']}
";

/// A server as gRPC has them: each message is answered at once, the status follows the last.
fn grpc() -> Origin {
    let origin = scripted::h2(|Exchange { mut request, mut respond }| async move {
        if request.uri().path() == "/refuse" {
            let refusal = Response::builder().header("content-type", "application/grpc").header("grpc-status", "7");
            respond.send_response(refusal.body(()).map_err(io::Error::other)?, true).map_err(io::Error::other)?;
            return Ok(());
        }
        let head = Response::builder().header("content-type", "application/grpc").body(()).map_err(io::Error::other)?;
        let mut send = respond.send_response(head, false).map_err(io::Error::other)?;
        let mut length = 0;
        while let Some(message) = multiplex::receive(request.body_mut()).await? {
            length += message.len();
            multiplex::send_all(&mut send, message, false).await?;
        }
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        trailers.insert("grpc-message", HeaderValue::from(length));
        send.send_trailers(trailers).map_err(io::Error::other)
    });
    origin.unwrap()
}

/// RFC 6455, 4.2.2.
fn proof(key: &str) -> String {
    let text = format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
    base64::engine::general_purpose::STANDARD.encode(hash)
}

/// A WebSocket server as there are most: over HTTP/1.1. Echoes bytes.
fn chat() -> Origin {
    let origin = scripted::h1(|mut http1| async move {
        let head = http1.head().await?;
        // RFC 6455, 4.2.1: without a key it is no handshake.
        let Some(key) = head.header("sec-websocket-key") else {
            return http1.send("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
        };
        let proof = proof(&key);
        let protocol = head.header("sec-websocket-protocol").unwrap_or_default();
        http1
            .send(format!(
                "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
                 sec-websocket-accept: {proof}\r\nsec-websocket-protocol: {protocol}\r\n\r\n"
            ))
            .await?;
        while let Some(bytes) = http1.some().await? {
            http1.send(bytes).await?;
        }
        Ok(())
    });
    origin.unwrap()
}

/// Whether Envoy is before the node or behind it, and what the two speak.
struct Fixture {
    envoy: Envoy,
    node: Node,
    envoy_is_first: bool,
    _origins: [Origin; 2],
    _overlay: Overlay,
}

impl Fixture {
    async fn start(test: &str, envoy_is_first: bool, hop: &str) -> Option<Self> {
        let binary = envoy_binary(test)?;
        let (overlay, grpc, chat) = (overlay(), grpc(), chat());
        let node = |grpc, chat, protocols: (&str, &str)| {
            let node = overlay.node("edge").document(NODE).with("GRPC", grpc).with("CHAT", chat);
            node.with("GRPC_PROTOCOL", protocols.0).with("CHAT_PROTOCOL", protocols.1).start()
        };
        let listener =
            |hosts: &[_]| config::listener("web", &config::http(&Envoy::log(&overlay, "envoy"), hosts), None);
        let (envoy, node) = if envoy_is_first {
            let node = node(grpc.address(), chat.address(), ("h2", "h1")).await.unwrap();
            let speaks = if hop == "h1" { Speaks::H1 } else { Speaks::H2 };
            let clusters = [config::cluster("node", node.address("door"), speaks, None)];
            let document = config::bootstrap(&[listener(&[("*", config::forward("node"))])], &clusters);
            (Envoy::start(&overlay, &binary, "envoy", &document).await, node)
        } else {
            let clusters = [
                config::cluster("grpc", grpc.address(), Speaks::H2, None),
                config::cluster("chat", chat.address(), Speaks::H1, None),
            ];
            let hosts = [("GRPC", config::forward("grpc")), ("CHAT", config::forward("chat"))];
            let envoy =
                Envoy::start(&overlay, &binary, "envoy", &config::bootstrap(&[listener(&hosts)], &clusters)).await;
            let node = node(envoy.address("web"), envoy.address("web"), (hop, hop)).await.unwrap();
            (envoy, node)
        };
        Some(Self { envoy, node, envoy_is_first, _origins: [grpc, chat], _overlay: overlay })
    }

    fn client(&self) -> ListenerClient {
        if self.envoy_is_first { self.envoy.client("web") } else { ListenerClient::plain(self.node.address("door")) }
    }
}

const BEDS: [(bool, &str); 4] = [(true, "h1"), (true, "h2"), (false, "h1"), (false, "h2")];

fn call(path: &str) -> Request<()> {
    let request = Request::post(format!("http://GRPC{path}")).version(http::Version::HTTP_2);
    request.header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap()
}

#[tokio::test]
async fn trailers_of_grpc_arrive() {
    for (envoy_is_first, hop) in BEDS {
        let Some(fixture) = Fixture::start("trailers_of_grpc_arrive", envoy_is_first, hop).await else { return };
        let what = format!("Envoy first: {envoy_is_first}, over {hop}");
        let mut connection = fixture.client().h2().await.unwrap();
        for size in [0, 5, 1 << 20] {
            let body = vec![7; size];
            let answer = connection.ask(call("/echo"), &body).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!((answer.status, answer.data.len()), (200, size), "{what}");
            assert!(answer.data == body, "{what}: other bytes");
            assert_eq!(
                answer.trailer("grpc-status").as_deref(),
                Some("0"),
                "{what}, {size} bytes: {:?}",
                answer.trailers
            );
            assert_eq!(answer.trailer("grpc-message"), Some(size.to_string()), "{what}: {:?}", answer.trailers);
        }
        // A status alone is in the head.
        let refused = connection.ask(call("/refuse"), b"").await.unwrap();
        assert_eq!((refused.status, refused.header("grpc-status").as_deref()), (200, Some("7")), "{what}: {refused:?}");
    }
}

#[tokio::test]
async fn messages_go_both_ways_on_one_stream() {
    // HTTP/1.1 between the two may wait for the end of the request: gRPC is for HTTP/2.
    for envoy_is_first in [true, false] {
        let Some(fixture) = Fixture::start("messages_go_both_ways", envoy_is_first, "h2").await else { return };
        let mut connection = fixture.client().h2().await.unwrap();
        let (response, mut send) = connection.open(call("/echo"), false).await.unwrap();
        multiplex::send_all(&mut send, Bytes::from_static(b"first"), false).await.unwrap();
        let mut body = response.await.unwrap().into_body();
        for message in ["first", "second", "third"] {
            if message != "first" {
                multiplex::send_all(&mut send, Bytes::from(message), false).await.unwrap();
            }
            assert_eq!(multiplex::receive(&mut body).await.unwrap().as_deref(), Some(message.as_bytes()));
        }
        send.send_data(Bytes::new(), true).unwrap();
        let (rest, trailers) = multiplex::receive_all(body).await.unwrap();
        assert!(rest.is_empty());
        assert_eq!(trailers.unwrap()["grpc-message"], "16");
    }
}

async fn echoes(mut tunnel: Tunnel, what: &str) {
    for size in [1usize, 125, 70_000] {
        let bytes = hermes_testkit::pattern::Pattern::new(size as u64).bytes(size);
        tunnel.writer.send(bytes.clone()).await.unwrap();
        let back = tunnel.reader.at_least(size).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(back == bytes, "{what}: other bytes");
    }
}

#[tokio::test]
async fn websocket_passes_in_every_pair_of_versions() {
    for (envoy_is_first, hop) in BEDS {
        let Some(fixture) = Fixture::start("websocket_passes", envoy_is_first, hop).await else { return };
        let what = format!("Envoy first: {envoy_is_first}, over {hop}");
        let mut http1 = fixture.client().h1().await.unwrap();
        // The key and the proof of RFC 6455, 1.3.
        http1
            .send(
                "GET /chat HTTP/1.1\r\nhost: CHAT\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
                 sec-websocket-version: 13\r\nsec-websocket-protocol: chat\r\n\
                 sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
            )
            .await
            .unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.status(), 101, "{what}: {head:?}");
        assert_eq!(head.header("sec-websocket-protocol").as_deref(), Some("chat"), "{what}: {head:?}");
        assert_eq!(
            head.header("sec-websocket-accept").as_deref(),
            Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
            "{what}: {head:?}"
        );
        let (stream, ahead) = http1.into_parts();
        echoes(Tunnel::io(stream, ahead), &what).await;

        let mut connection = fixture.client().h2().await.unwrap();
        assert!(connection.takes_extended_connect(), "{what}");
        let request = Request::builder().method(Method::CONNECT).uri("http://CHAT/chat");
        let request = request.header("sec-websocket-version", "13").header("sec-websocket-protocol", "chat");
        let request = request.extension(Protocol::from_static("websocket")).body(()).unwrap();
        let opened = open_h2(&mut connection, request).await;
        let (recv, send) = opened.unwrap_or_else(|error| panic!("{what}, from HTTP/2: {error}"));
        echoes(Tunnel::h2(connection, recv, send), &what).await;
    }
}

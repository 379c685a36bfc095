//! Trailers in both directions, through every pair of versions: gRPC stands on them.

use std::io;

use bytes::Bytes;
use hermes_testkit::{
    listener_client::ListenerClient,
    multiplex::{self, Exchange, joined},
    origin::{Origin, scripted},
    raw_http1::Head,
};
use http::{HeaderMap, HeaderValue, Request, Response};

use crate::http::lab::{Seen, before, in_front, next, overlay, seen};

/// What an origin saw of a request.
#[derive(Debug)]
struct ObservedTrailers {
    te: Option<String>,
    checksum: Option<String>,
    forbidden: Option<String>,
    body: Vec<u8>,
}

/// Trailers of a response: gRPC's, and some that may never be trailers (RFC 9110, 6.5.1).
const GRPC: [(&str, &str); 2] = [("grpc-status", "0"), ("grpc-message", "fine")];

fn origin(version: &str) -> (Origin, Seen<ObservedTrailers>) {
    let (sender, receiver) = seen();
    if version == "h1" {
        let origin = scripted::h1(move |mut http1| {
            let sender = sender.clone();
            async move {
                let head: Head = http1.head().await?;
                let content = http1.body(&head).await?;
                let (checksum, forbidden) = (content.trailer("x-checksum"), content.trailer("content-length"));
                let _ =
                    sender.send(ObservedTrailers { te: head.header("te"), checksum, forbidden, body: content.data });
                http1
                    .send("HTTP/1.1 200 OK\r\ncontent-type: application/grpc\r\ntransfer-encoding: chunked\r\n")
                    .await?;
                http1.send("trailer: grpc-status, grpc-message\r\n\r\n").await?;
                http1.send_chunk(b"reply").await?;
                let trailers = GRPC.map(|(name, value)| format!("{name}: {value}\r\n")).concat();
                http1.send(format!("0\r\n{trailers}\r\n")).await
            }
        });
        return (origin.unwrap(), receiver);
    }
    let origin = scripted::h2(move |exchange: Exchange| {
        let sender = sender.clone();
        async move {
            let Exchange { request, mut respond } = exchange;
            let te = joined(request.headers(), "te");
            let (body, trailers) = multiplex::receive_all(request.into_body()).await?;
            let field = |name| trailers.as_ref().and_then(|trailers| joined(trailers, name));
            let _ = sender.send(ObservedTrailers {
                te,
                checksum: field("x-checksum"),
                forbidden: field("content-length"),
                body,
            });
            // As gRPC servers do: no `trailer` field announces them.
            let response = Response::builder().header("content-type", "application/grpc").body(());
            let response = response.map_err(io::Error::other)?;
            let mut stream = respond.send_response(response, false).map_err(io::Error::other)?;
            multiplex::send_all(&mut stream, Bytes::from_static(b"reply"), false).await?;
            let trailers: HeaderMap = GRPC
                .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
                .into_iter()
                .collect();
            stream.send_trailers(trailers).map_err(io::Error::other)
        }
    });
    (origin.unwrap(), receiver)
}

#[tokio::test]
async fn from_an_h1_client() {
    for version in ["h1", "h2"] {
        let (origin, mut receiver) = origin(version);
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
        http1
            .send(
                "POST /svc/Call HTTP/1.1\r\nhost: RPC\r\nte: trailers\r\nconnection: te\r\ntransfer-encoding: chunked\r\n\
                 trailer: x-checksum\r\n\r\n",
            )
            .await
            .unwrap();
        http1.send_chunk(b"call").await.unwrap();
        http1.send("0\r\nx-checksum: abc\r\ncontent-length: 99\r\n\r\n").await.unwrap();
        let saw = next(&mut receiver).await;
        assert_eq!((saw.te.as_deref(), saw.checksum.as_deref()), (Some("trailers"), Some("abc")), "{version}: {saw:?}");
        assert_eq!((saw.forbidden.as_deref(), saw.body.as_slice()), (None, b"call".as_slice()), "{version}: {saw:?}");
        let head = http1.head().await.unwrap();
        let content = http1.body(&head).await.unwrap();
        assert_eq!(content.text(), "reply", "{version}");
        for (name, value) in GRPC {
            assert_eq!(content.trailer(name).as_deref(), Some(value), "{version}: {head:?} {content:?}");
        }
    }
}

#[tokio::test]
async fn from_an_h2_client() {
    for version in ["h1", "h2"] {
        let (origin, mut receiver) = origin(version);
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        // RFC 9110, 6.6.2: announced, since on HTTP/1.1 nobody may send on what was not.
        let request = Request::post("http://RPC/svc/Call").header("te", "trailers").header("trailer", "x-checksum");
        let request = request.body(()).unwrap();
        let (response, mut stream) = connection.open(request, false).await.unwrap();
        multiplex::send_all(&mut stream, Bytes::from_static(b"call"), false).await.unwrap();
        let mut trailers = HeaderMap::new();
        trailers.insert("x-checksum", HeaderValue::from_static("abc"));
        trailers.insert("content-length", HeaderValue::from_static("99"));
        stream.send_trailers(trailers).unwrap();
        let saw = next(&mut receiver).await;
        assert_eq!((saw.te.as_deref(), saw.checksum.as_deref()), (Some("trailers"), Some("abc")), "{version}: {saw:?}");
        assert_eq!((saw.forbidden.as_deref(), saw.body.as_slice()), (None, b"call".as_slice()), "{version}: {saw:?}");
        let answer = multiplex::answer(response).await.unwrap();
        assert_eq!(answer.text(), "reply", "{version}");
        for (name, value) in GRPC {
            assert_eq!(answer.trailer(name).as_deref(), Some(value), "{version}: {answer:?}");
        }
    }
}

/// Trailers that no `Trailer` field announces, from an origin of either version, over an h1 hop, to clients of either.
#[tokio::test]
async fn unannounced_ones_arrive_in_every_version_and_are_no_failure() {
    let h1 = scripted::h1(|mut http1| async move {
        while let Ok(head) = http1.head().await {
            let content = http1.body(&head).await?;
            let seen = content.trailer("x-asked").unwrap_or_default();
            http1.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
            http1.send_chunk(b"reply").await?;
            // The second looks like the end of a chunked body.
            http1.send_chunk(b"0\r\n\r\n").await?;
            http1.send(format!("0\r\nx-meta: one\r\nx-meta: two\r\nx-saw: {seen}\r\nhost: evil\r\n\r\n")).await?;
        }
        Ok(())
    });
    let h2 = scripted::h2(|exchange: Exchange| async move {
        let Exchange { request, mut respond } = exchange;
        let (_, trailers) = multiplex::receive_all(request.into_body()).await?;
        let seen = trailers.as_ref().and_then(|trailers| joined(trailers, "x-asked")).unwrap_or_default();
        let mut stream = respond.send_response(Response::new(()), false).map_err(io::Error::other)?;
        multiplex::send_all(&mut stream, Bytes::from_static(b"reply0\r\n\r\n"), false).await?;
        let mut trailers = HeaderMap::new();
        trailers.append("x-meta", HeaderValue::from_static("one"));
        trailers.append("x-meta", HeaderValue::from_static("two"));
        trailers.append("x-saw", HeaderValue::try_from(seen).unwrap());
        stream.send_trailers(trailers).map_err(io::Error::other)
    });
    for (version, origin) in [("h1", h1.unwrap()), ("h2", h2.unwrap())] {
        let overlay = overlay();
        let far = before(&overlay, version, origin.address()).await;
        let near = in_front(&overlay, "h1", &far).await;
        let mut http1 = ListenerClient::plain(near.address("in")).h1().await.unwrap();
        // Twice: leftovers of one message would break the next one.
        for _ in 0..2 {
            http1.send("POST /h1 HTTP/1.1\r\nhost: WEB\r\nte: trailers\r\nconnection: te\r\n").await.unwrap();
            http1.send("transfer-encoding: chunked\r\n\r\n4\r\ncall\r\n0\r\nx-asked: 7\r\n\r\n").await.unwrap();
            let head = http1.head().await.unwrap();
            let content = http1.body(&head).await.unwrap();
            assert_eq!(content.text(), "reply0\r\n\r\n", "{version}");
            assert_eq!(content.trailer("x-meta").as_deref(), Some("one, two"), "{version}: {content:?}");
            assert_eq!(content.trailer("x-saw").as_deref(), Some("7"), "{version}: {content:?}");
            assert_eq!(content.trailer("host"), None, "{version}: {content:?}");
        }
        // A client that does not accept trailers gets none, and its next response is intact.
        for _ in 0..2 {
            http1.send("GET /none HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
            let head = http1.head().await.unwrap();
            let content = http1.body(&head).await.unwrap();
            assert_eq!((content.text().as_str(), content.trailers.len()), ("reply0\r\n\r\n", 0), "{version}");
        }
        let mut connection = ListenerClient::plain(near.address("in")).h2().await.unwrap();
        let request = Request::post("http://WEB/h2").header("te", "trailers").body(()).unwrap();
        let (response, mut stream) = connection.open(request, false).await.unwrap();
        multiplex::send_all(&mut stream, Bytes::from_static(b"call"), false).await.unwrap();
        let mut trailers = HeaderMap::new();
        trailers.insert("x-asked", HeaderValue::from_static("8"));
        stream.send_trailers(trailers).unwrap();
        let answer = multiplex::answer(response).await.unwrap();
        assert_eq!(answer.trailer("x-meta").as_deref(), Some("one, two"), "{version}: {answer:?}");
        assert_eq!(answer.trailer("x-saw").as_deref(), Some("8"), "{version}: {answer:?}");
        for (node, path) in [(&near, "/h1"), (&near, "/h2"), (&far, "/h1"), (&far, "/h2"), (&near, "/none")] {
            let record = node.record(|record| record["path"] == path).await;
            assert_eq!(record["error"], serde_json::Value::Null, "{version}: {record}");
        }
    }
}

/// gRPC over two nodes that speak HTTP/1.1 to each other.
#[tokio::test]
async fn through_an_h1_hop_between_h2_ends() {
    let (origin, mut receiver) = origin("h2");
    let overlay = overlay();
    let far = before(&overlay, "h2", origin.address()).await;
    let near = in_front(&overlay, "h1", &far).await;
    let mut connection = ListenerClient::plain(near.address("in")).h2().await.unwrap();
    let request = Request::post("http://RPC/svc/Call").header("te", "trailers").body(()).unwrap();
    let answer = connection.ask(request, b"call").await.unwrap();
    assert_eq!(next(&mut receiver).await.te.as_deref(), Some("trailers"));
    assert_eq!((answer.text().as_str(), answer.trailer("grpc-status").as_deref()), ("reply", Some("0")), "{answer:?}");
}

const RULES: &str = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, set-headers: {x-user: web}}
routes:
- name: all
  upstream: origin
  rewrite:
    set-headers: {x-team: blue}
    remove-headers: [x-secret]
    response: {set-headers: {x-frame: deny}, remove-headers: [x-powered]}
upstreams:
- {name: origin, protocol: $PROTOCOL, overlay: false, endpoints: ['$ORIGIN']}
";

/// Trailers of requests and responses, each with one that may pass. The rules above and RFC 9110 forbid the others.
const ASKED: [&str; 12] = [
    "x-checksum",
    "x-user",
    "x_user",
    "x_team",
    "x-secret",
    "cookie",
    "authorization",
    "hermes_user",
    "content_length",
    "transfer_encoding",
    "set-cookie",
    "x_forwarded_for",
];
const ANSWERED: [&str; 9] = [
    "x-meta",
    "x-frame",
    "x_frame",
    "x-powered",
    "set-cookie",
    "www-authenticate",
    "content_length",
    "hermes-user",
    "location",
];

fn section(names: &[&str]) -> HeaderMap {
    names.iter().map(|name| (name.parse().unwrap(), HeaderValue::from_static("1"))).collect()
}

fn lines(names: &[&str]) -> String {
    names.iter().map(|name| format!("{name}: 1\r\n")).collect()
}

/// Answers with the trailers that it got as its body, and with trailers.
fn trailing(version: &str) -> Origin {
    if version == "h1" {
        let origin = scripted::h1(|mut http1| async move {
            while let Ok(head) = http1.head().await {
                let content = http1.body(&head).await?;
                let got =
                    ASKED.into_iter().filter(|name| content.trailer(name).is_some()).collect::<Vec<_>>().join(" ");
                http1.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
                http1.send_chunk(got.as_bytes()).await?;
                http1.send(format!("0\r\n{}\r\n", lines(&ANSWERED))).await?;
            }
            Ok(())
        });
        return origin.unwrap();
    }
    let origin = scripted::h2(|exchange: Exchange| async move {
        let Exchange { request, mut respond } = exchange;
        let (_, trailers) = multiplex::receive_all(request.into_body()).await?;
        let trailers = trailers.unwrap_or_default();
        let got = ASKED.into_iter().filter(|name| trailers.contains_key(*name)).collect::<Vec<_>>().join(" ");
        let mut stream = respond.send_response(Response::new(()), false).map_err(io::Error::other)?;
        multiplex::send_all(&mut stream, Bytes::from(got), false).await?;
        stream.send_trailers(section(&ANSWERED)).map_err(io::Error::other)
    });
    origin.unwrap()
}

/// Trailers come after the head was judged and rewritten: a recipient that merges them must find nothing there that a head
/// would not have had.
#[tokio::test]
async fn names_that_heads_may_not_have_are_dropped_in_every_version() {
    for version in ["h1", "h2"] {
        let origin = trailing(version);
        let overlay = overlay();
        let node = overlay.node("edge").document(RULES).with("PROTOCOL", version).with("ORIGIN", origin.address());
        let node = node.start().await.unwrap();
        let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
        http1.send("POST / HTTP/1.1\r\nhost: WEB\r\nte: trailers\r\nconnection: te\r\n").await.unwrap();
        http1.send("transfer-encoding: chunked\r\n\r\n4\r\ncall\r\n0\r\n").await.unwrap();
        http1.send(format!("{}\r\n", lines(&ASKED))).await.unwrap();
        let head = http1.head().await.unwrap();
        let content = http1.body(&head).await.unwrap();
        let got: Vec<_> = ANSWERED.into_iter().filter(|name| content.trailer(name).is_some()).collect();
        assert_eq!((content.text().as_str(), got), ("x-checksum", vec!["x-meta"]), "h1 client, {version} origin");
        let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        let request = Request::post("http://WEB/").header("te", "trailers").body(()).unwrap();
        let (response, mut stream) = connection.open(request, false).await.unwrap();
        multiplex::send_all(&mut stream, Bytes::from_static(b"call"), false).await.unwrap();
        // The library refuses to send `transfer-encoding` and its kin, but not names that are only alike.
        stream.send_trailers(section(&ASKED)).unwrap();
        let answer = multiplex::answer(response).await.unwrap();
        let got: Vec<_> = ANSWERED.into_iter().filter(|name| answer.trailer(name).is_some()).collect();
        assert_eq!((answer.text().as_str(), got), ("x-checksum", vec!["x-meta"]), "h2 client, {version} origin");
    }
}

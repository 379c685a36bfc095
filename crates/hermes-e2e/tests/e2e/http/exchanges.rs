//! Requests and responses: early answers, absent bodies, and what breaks half-way.

use std::io;

use bytes::Bytes;
use h2::Reason;
use hermes_testkit::{
    listener_client::ListenerClient,
    multiplex::{self, Exchange},
    origin::{Origin, scripted},
    raw_http1::RawHttp1,
};
use http::{Request, Response, StatusCode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc::UnboundedSender;

use crate::http::lab::{Seen, before, next, overlay, seen};

/// An origin that refuses a large upload at its head, in either version. It says through `seen` how much it was sent
/// after that.
fn refusing(version: &str) -> Origin {
    if version == "h1" {
        return scripted::h1(|mut http1| async move {
            http1.head().await?;
            http1
                .send("HTTP/1.1 413 Content Too Large\r\ncontent-length: 7\r\nconnection: close\r\n\r\ntoo big")
                .await?;
            http1.finish().await?;
            // Lingers, so that no RST overtakes the answer; reads nothing more than the kernel takes.
            http1.to_end().await.map(drop)
        })
        .unwrap();
    }
    scripted::h2(|exchange: Exchange| async move {
        // RFC 9113, 8.1: once the whole response is out, h2 resets the stream with NO_ERROR for us.
        exchange.answer(Response::builder().status(413).body(()).map_err(io::Error::other)?, "too big").await
    })
    .unwrap()
}

#[tokio::test]
async fn an_answer_before_the_end_of_the_upload_reaches_the_client() {
    for version in ["h1", "h2"] {
        let origin = refusing(version);
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let client = ListenerClient::plain(node.address("in"));

        let mut http1 = client.h1().await.unwrap();
        http1.send("POST /up HTTP/1.1\r\nhost: WEB\r\ncontent-length: 100000000\r\n\r\nfirst bytes").await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.status(), 413, "{version}: {head:?}");
        assert_eq!(http1.body(&head).await.unwrap().text(), "too big", "{version}");

        let mut connection = client.h2().await.unwrap();
        let request = Request::post("http://WEB/up").header("content-length", MUCH).body(()).unwrap();
        let (response, mut stream) = connection.open(request, false).await.unwrap();
        stream.send_data(Bytes::from_static(b"first bytes"), false).unwrap();
        let answer = multiplex::answer(response).await.unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (413, "too big"), "{version}");
        // The connection is as good as before.
        assert_eq!(connection.get("http://WEB/").await.unwrap().status, 413);
        drop(stream);
        node.quiet().await;
    }
}

/// Answers by path: `/empty` 204, `/same` 304, all else 200 with ten bytes.
async fn answer_h1(mut http1: RawHttp1<tokio::net::TcpStream>) -> io::Result<()> {
    loop {
        let head = http1.head().await?;
        let (status, body) = match (head.target(), head.method()) {
            ("/empty", _) => ("204 No Content\r\n", ""),
            ("/same", _) => ("304 Not Modified\r\netag: \"x\"\r\ncontent-length: 10\r\n", ""),
            (_, "HEAD") => ("200 OK\r\ncontent-length: 10\r\n", ""),
            _ => ("200 OK\r\ncontent-length: 10\r\n", "0123456789"),
        };
        http1.send(format!("HTTP/1.1 {status}\r\n{body}")).await?;
    }
}

async fn answer_h2(exchange: Exchange) -> io::Result<()> {
    let Exchange { request, mut respond } = exchange;
    let response = Response::builder();
    let (response, body) = match (request.uri().path(), request.method().as_str()) {
        ("/empty", _) => (response.status(204), ""),
        ("/same", _) => (response.status(304).header("etag", "\"x\"").header("content-length", "10"), ""),
        (_, "HEAD") => (response.header("content-length", "10"), ""),
        _ => (response.header("content-length", "10"), "0123456789"),
    };
    let response = response.body(()).map_err(io::Error::other)?;
    let mut stream = respond.send_response(response, body.is_empty()).map_err(io::Error::other)?;
    if body.is_empty() { Ok(()) } else { multiplex::send_all(&mut stream, Bytes::from(body), true).await }
}

#[tokio::test]
async fn responses_without_bodies_have_none_and_leave_the_connection_usable() {
    for version in ["h1", "h2"] {
        let origin = if version == "h1" { scripted::h1(answer_h1) } else { scripted::h2(answer_h2) };
        let origin = origin.unwrap();
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let client = ListenerClient::plain(node.address("in"));
        without_bodies_h1(&mut client.h1().await.unwrap(), version).await;
        let mut connection = client.h2().await.unwrap();
        for (method, path, status, length) in
            [("HEAD", "/", 200, Some("10")), ("GET", "/empty", 204, None), ("GET", "/same", 304, Some("10"))]
        {
            let request = Request::builder().method(method).uri(format!("http://WEB{path}")).body(()).unwrap();
            let answer = connection.ask(request, b"").await.unwrap();
            let got = (answer.status, answer.header("content-length"), answer.data.len());
            assert_eq!(got, (status, length.map(str::to_owned), 0), "{method} {path} from {version}");
        }
        assert_eq!(connection.get("http://WEB/").await.unwrap().text(), "0123456789");
    }
}

async fn without_bodies_h1(http1: &mut RawHttp1<hermes_testkit::tunnel::BoxedStream>, version: &str) {
    for (method, path, status) in [("HEAD", "/", 200), ("GET", "/empty", 204), ("GET", "/same", 304), ("GET", "/", 200)]
    {
        http1.send(format!("{method} {path} HTTP/1.1\r\nhost: WEB\r\n\r\n")).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.status(), status, "{method} {path} from {version}: {head:?}");
        assert!(head.header("transfer-encoding").is_none(), "{method} {path} from {version}: {head:?}");
        // RFC 9110, 8.6: never with 204; with 304 it may be left out, and hyper does.
        let wanted = if status == 200 { Some("10".to_owned()) } else { None };
        assert_eq!(head.header("content-length"), wanted, "{method} {path} from {version}");
        if method == "GET" && status == 200 {
            assert_eq!(http1.body(&head).await.unwrap().text(), "0123456789");
        }
        // A byte of a body here would be taken for the beginning of the next answer.
        assert_eq!(http1.unread(), b"", "{method} {path} from {version}");
    }
}

/// Promises 100 bytes, sends 10, and breaks off.
fn breaking(version: &str) -> Origin {
    if version == "h1" {
        return scripted::h1(|mut http1| async move {
            http1.head().await?;
            http1.send("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n0123456789").await
        })
        .unwrap();
    }
    scripted::h2(|exchange: Exchange| async move {
        let mut respond = exchange.respond;
        let response = Response::builder().header("content-length", "100").body(()).map_err(io::Error::other)?;
        let mut stream = respond.send_response(response, false).map_err(io::Error::other)?;
        multiplex::send_all(&mut stream, Bytes::from_static(b"0123456789"), false).await?;
        // What was sent must be out before the reset, which would throw it away.
        tokio::task::yield_now().await;
        stream.send_reset(Reason::INTERNAL_ERROR);
        Ok(())
    })
    .unwrap()
}

#[tokio::test]
async fn an_interrupted_response_is_not_complete() {
    for version in ["h1", "h2"] {
        let origin = breaking(version);
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let client = ListenerClient::plain(node.address("in"));
        let mut http1 = client.h1().await.unwrap();
        http1.send("GET / HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
        let whole = async {
            let head = http1.head().await?;
            if head.status() == 502 { Err(io::Error::other("said so")) } else { http1.body(&head).await }
        };
        assert!(whole.await.is_err(), "{version} to h1");
        let answer = client.h2().await.unwrap().get("http://WEB/").await;
        assert!(answer.as_ref().map_or(true, |answer| answer.status == 502), "{version} to h2: {answer:?}");
        node.record(|record| record["error"] == "connection_terminated").await;
    }
}

/// A chunked response must not look whole either, though it says no length.
#[tokio::test]
async fn an_interrupted_chunked_response_is_not_complete() {
    let origin = scripted::h1(|mut http1| async move {
        http1.head().await?;
        http1.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
        http1.send_chunk(b"0123456789").await
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    let client = ListenerClient::plain(node.address("in"));
    let mut http1 = client.h1().await.unwrap();
    http1.send("GET / HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
    let whole = async {
        let head = http1.head().await?;
        http1.body(&head).await
    };
    assert!(whole.await.is_err());
    assert!(client.h2().await.unwrap().get("http://WEB/").await.is_err());
}

/// What an origin makes of an upload: that it begins, then how many bytes it had, or that it broke off.
#[derive(Debug, PartialEq, Eq)]
enum Upload {
    Begins,
    Whole(usize),
    Abort,
}

fn listening(version: &str) -> (Origin, Seen<Upload>) {
    let (sender, receiver) = seen();
    if version == "h1" {
        let origin = scripted::h1(move |mut http1| {
            let sender = sender.clone();
            async move {
                let head = http1.head().await?;
                let _ = sender.send(Upload::Begins);
                let body = http1.body(&head).await;
                let _ = sender.send(body.map_or(Upload::Abort, |content| Upload::Whole(content.data.len())));
                Ok(())
            }
        });
        return (origin.unwrap(), receiver);
    }
    let origin = scripted::h2(move |exchange: Exchange| {
        let sender = sender.clone();
        async move {
            // Both halves are kept: dropping one would reset the stream.
            let Exchange { request, respond: _respond } = exchange;
            let _ = sender.send(Upload::Begins);
            let body = multiplex::receive_all(request.into_body()).await;
            let _ = sender.send(body.map_or(Upload::Abort, |(data, _)| Upload::Whole(data.len())));
            Ok(())
        }
    });
    (origin.unwrap(), receiver)
}

#[tokio::test]
async fn an_interrupted_upload_is_not_complete() {
    for version in ["h1", "h2"] {
        let (origin, mut receiver) = listening(version);
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let client = ListenerClient::plain(node.address("in"));

        let mut http1 = client.h1().await.unwrap();
        http1.send("POST / HTTP/1.1\r\nhost: WEB\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n").await.unwrap();
        assert_eq!(next(&mut receiver).await, Upload::Begins);
        http1.finish().await.unwrap();
        assert_eq!(next(&mut receiver).await, Upload::Abort, "h1 to {version}");

        let mut connection = client.h2().await.unwrap();
        let (_, mut stream) = connection.open(Request::post("http://WEB/").body(()).unwrap(), false).await.unwrap();
        multiplex::send_all(&mut stream, Bytes::from_static(b"half"), false).await.unwrap();
        assert_eq!(next(&mut receiver).await, Upload::Begins);
        stream.send_reset(Reason::CANCEL);
        assert_eq!(next(&mut receiver).await, Upload::Abort, "h2 to {version}");
    }
}

/// Bodies of unknown length, with methods that seldom have one.
#[tokio::test]
async fn a_body_reaches_an_h1_origin_whatever_the_method() {
    let origin = scripted::h1(|mut http1| async move {
        while let Ok(head) = http1.head().await {
            let body = http1.body(&head).await?.text();
            let coding = head.header("transfer-encoding").unwrap_or_default();
            let saw = format!("{}: {body:?} by {coding:?}", head.method());
            let content = if head.method() == "HEAD" { "" } else { saw.as_str() };
            http1
                .send(format!("HTTP/1.1 200 OK\r\nx-saw: {saw}\r\ncontent-length: {}\r\n\r\n{content}", saw.len()))
                .await?;
        }
        Ok(())
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let node = before(&overlay, "h1", origin.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
    for method in ["GET", "HEAD", "DELETE", "OPTIONS"] {
        let wanted = format!("{method}: \"query\" by \"chunked\"");
        let request =
            format!("{method} / HTTP/1.1\r\nhost: WEB\r\ntransfer-encoding: chunked\r\n\r\n5\r\nquery\r\n0\r\n\r\n");
        http1.send(request).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.header("x-saw").as_deref(), Some(wanted.as_str()), "{method} over h1");
        if method != "HEAD" {
            http1.body(&head).await.unwrap();
        }
        let request = Request::builder().method(method).uri("http://WEB/").body(()).unwrap();
        let answer = connection.ask(request, b"query").await.unwrap();
        assert_eq!(answer.header("x-saw").as_deref(), Some(wanted.as_str()), "{method} over h2");
        // A request without a body stays without.
        let request = Request::builder().method(method).uri("http://WEB/").body(()).unwrap();
        let answer = connection.ask(request, b"").await.unwrap();
        assert_eq!(answer.header("x-saw").as_deref(), Some(format!("{method}: \"\" by \"\"").as_str()), "{method}");
    }
}

#[tokio::test]
async fn nobody_home_is_a_502_and_no_route_a_404() {
    let closed = hermes_testkit::port::reserve("127.0.0.1");
    let overlay = overlay();
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
- {name: trusted, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes:
- {name: web, match: {authority: WEB}, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
    let node = overlay.node("edge").document(document).with("ORIGIN", closed).start().await.unwrap();
    let mut stranger = ListenerClient::plain(node.address("in")).h2().await.unwrap();
    let answer = stranger.get("http://WEB/").await.unwrap();
    assert_eq!(answer.status, StatusCode::BAD_GATEWAY);
    let proxy_status = answer.header("proxy-status").unwrap();
    assert!(proxy_status.starts_with("edge; error=connection_refused"), "{proxy_status}");
    // A stranger learns what kind of failure it was, not where the origin is.
    assert!(!proxy_status.contains("127.0.0.1") && !answer.text().contains("127.0.0.1"), "{proxy_status}");
    let answer = stranger.get("http://ELSEWHERE/").await.unwrap();
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert!(answer.header("proxy-status").unwrap().starts_with("edge; error=http_request_denied"), "{answer:?}");

    let mut friend = ListenerClient::plain(node.address("trusted")).h2().await.unwrap();
    let answer = friend.get("http://WEB/").await.unwrap();
    assert!(answer.header("proxy-status").unwrap().contains(&closed.to_string()), "{answer:?}");
}

/// More than all sockets and windows on the way hold.
const MUCH: usize = 64 << 20;

/// Answers at once and at length, and reads the upload beside that. Says through `told` when it has all of it.
fn talkative(version: &str, sender: UnboundedSender<()>) -> Origin {
    if version == "h1" {
        return scripted::h1(move |mut http1| {
            let sender = sender.clone();
            async move {
                http1.head().await?;
                let (stream, ahead) = http1.into_parts();
                let (mut read, mut write) = stream.into_split();
                let talk = async {
                    write.write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: {MUCH}\r\n\r\n").as_bytes()).await?;
                    for _ in 0..MUCH >> 16 {
                        write.write_all(&[7; 1 << 16]).await?;
                    }
                    io::Result::Ok(())
                };
                let listen = async {
                    let mut rest = (&mut read).take((MUCH - ahead.len()) as u64);
                    tokio::io::copy(&mut rest, &mut tokio::io::sink()).await?;
                    let _ = sender.send(());
                    io::Result::Ok(())
                };
                tokio::try_join!(talk, listen).map(drop)
            }
        })
        .unwrap();
    }
    scripted::h2(move |mut exchange: Exchange| {
        let sender = sender.clone();
        async move {
            let response = exchange.respond.send_response(Response::new(()), false).map_err(io::Error::other)?;
            let talk = async {
                let mut response = response;
                for sent in 1..=MUCH >> 16 {
                    let chunk = Bytes::from_static(&[7; 1 << 16]);
                    multiplex::send_all(&mut response, chunk, sent == MUCH >> 16).await?;
                }
                io::Result::Ok(())
            };
            let listen = async {
                let (data, _) = multiplex::receive_all(exchange.request.into_body()).await?;
                assert_eq!(data.len(), MUCH);
                let _ = sender.send(());
                Ok(())
            };
            tokio::try_join!(talk, listen).map(drop)
        }
    })
    .unwrap()
}

#[tokio::test]
async fn an_upload_continues_while_its_response_is_unread() {
    for version in ["h1", "h2"] {
        let (sender, mut receiver) = seen();
        let origin = talkative(version, sender);
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let chunk = Bytes::from_static(&[7; 1 << 16]);

        let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
        http1.send(format!("POST /up HTTP/1.1\r\nhost: WEB\r\ncontent-length: {MUCH}\r\n\r\n")).await.unwrap();
        for _ in 0..MUCH >> 16 {
            http1.send(&chunk).await.unwrap();
        }
        next(&mut receiver).await;
        let head = http1.head().await.unwrap();
        assert_eq!(http1.body(&head).await.unwrap().data.len(), MUCH, "{version}");

        let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        let request = Request::post("http://WEB/up").header("content-length", MUCH).body(()).unwrap();
        let (response, mut upload) = connection.open(request, false).await.unwrap();
        for sent in 1..=MUCH >> 16 {
            multiplex::send_all(&mut upload, chunk.clone(), sent == MUCH >> 16).await.unwrap();
        }
        next(&mut receiver).await;
        assert_eq!(multiplex::answer(response).await.unwrap().data.len(), MUCH, "{version}");
    }
}

//! Bytes that a client sends before its tunnel is open travel with the request, to nodes only.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::Reason;
use hermes_testkit::frames::{Frame, Frames, kind};
use hermes_testkit::multiplex::{Exchange, receive, send_all};
use hermes_testkit::origin::Origin;
use hermes_testkit::overlay::{EFFECT_TIMEOUT, Node, Overlay};
use http::Response;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use crate::http::lab::{Seen, next, overlay, seen};

const EDGE: &str = "
listeners:
- {name: db, bind: '127.0.0.1:0', protocol: tcp, authority: 'DB:7'}
- {name: video, bind: '127.0.0.1:0', protocol: udp, authority: 'VIDEO:7'}
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: next}
upstreams:
- {name: next, protocol: h2, overlay: $OVERLAY, balance: round-robin, endpoints: [$NEXT]}
";

async fn edge(overlay: &Overlay, is_node: bool, next: &[SocketAddr]) -> Node {
    let next: Vec<String> = next.iter().map(|address| format!("'{address}'")).collect();
    let draft = overlay.node("edge").document(EDGE).with("OVERLAY", is_node).with("NEXT", next.join(", "));
    draft.start().await.unwrap()
}

async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

/// Hears the first bytes of a stream before it answers, then sends back whatever comes.
async fn hear_then_echo(mut exchange: Exchange, received: impl FnOnce(Bytes)) -> std::io::Result<()> {
    let first = receive(exchange.request.body_mut()).await?.unwrap_or_default();
    received(first.clone());
    let mut answers = exchange.respond.send_response(Response::new(()), false).map_err(std::io::Error::other)?;
    send_all(&mut answers, first, false).await?;
    while let Some(chunk) = receive(exchange.request.body_mut()).await? {
        send_all(&mut answers, chunk, false).await?;
    }
    answers.send_data(Bytes::new(), true).map_err(std::io::Error::other)
}

/// A node that hears before it answers, and what it heard.
async fn hearing() -> (Origin, Seen<Bytes>) {
    let (received, receiver) = seen();
    let origin = hermes_testkit::origin::scripted::h2_on(listener().await, move |exchange| {
        let received = received.clone();
        hear_then_echo(exchange, move |first| drop(received.send(first)))
    });
    (origin.unwrap(), receiver)
}

async fn exchange_bytes(client: &mut TcpStream, bytes: &[u8]) {
    client.write_all(bytes).await.unwrap();
    let mut back = vec![0; bytes.len()];
    tokio::time::timeout(EFFECT_TIMEOUT, client.read_exact(&mut back)).await.expect("no answer").unwrap();
    assert_eq!(back, bytes);
}

#[tokio::test]
async fn a_node_hears_tcp_before_it_answers() {
    let (overlay, (origin, mut receiver)) = (overlay(), hearing().await);
    let node = edge(&overlay, true, &[origin.address()]).await;
    let mut client = TcpStream::connect(node.address("db")).await.unwrap();
    // The peer waits for this with its answer: a node that waits for the answer would wait for ever.
    exchange_bytes(&mut client, b"hello").await;
    assert_eq!(next(&mut receiver).await, "hello");
    exchange_bytes(&mut client, b"and more").await;
    client.shutdown().await.unwrap();
    assert_eq!(client.read(&mut [0; 8]).await.unwrap(), 0);
    let record = node.record(|record| record["kind"] == "tcp").await;
    assert_eq!((record["received"].as_u64(), record["sent"].as_u64()), (Some(13), Some(13)), "{record}");
}

#[tokio::test]
async fn a_node_hears_datagrams_before_it_answers() {
    let (overlay, (origin, mut receiver)) = (overlay(), hearing().await);
    let node = edge(&overlay, true, &[origin.address()]).await;
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.send_to(b"frame", node.address("video")).await.unwrap();
    // DATAGRAM, six bytes: context 0 and the payload (RFC 9297, 3.2; RFC 9298, 5).
    assert_eq!(next(&mut receiver).await, &b"\x00\x06\x00frame"[..]);
    let mut back = [0; 16];
    let length = tokio::time::timeout(EFFECT_TIMEOUT, client.recv(&mut back)).await.expect("no answer").unwrap();
    assert_eq!(&back[..length], b"frame");
}

#[tokio::test]
async fn an_endpoint_that_refuses_the_stream_is_followed_by_one_that_hears_the_same() {
    let refuses = hermes_testkit::origin::scripted::h2_on(listener().await, |mut exchange| async move {
        receive(exchange.request.body_mut()).await?;
        exchange.respond.send_reset(Reason::REFUSED_STREAM);
        Ok(())
    });
    let serves = hermes_testkit::origin::scripted::h2_on(listener().await, |exchange| hear_then_echo(exchange, drop));
    let overlay = overlay();
    let (refuses, serves) = (refuses.unwrap(), serves.unwrap());
    let node = edge(&overlay, true, &[refuses.address(), serves.address()]).await;
    // Round robin begins with either: two clients, one of whom meets the refusal first.
    for _ in 0..2 {
        let mut client = TcpStream::connect(node.address("db")).await.unwrap();
        exchange_bytes(&mut client, b"hello").await;
        exchange_bytes(&mut client, b"and more").await;
    }
    assert!(node.metric("hermes_retries_total", "").await.unwrap() >= 1.0);
}

#[tokio::test]
async fn early_bytes_go_only_to_nodes() {
    let (answered, mut answers) = seen();
    let origin = hermes_testkit::origin::scripted::h2_on(listener().await, move |mut exchange| {
        let answered = answered.clone();
        async move {
            let early = tokio::time::timeout(std::time::Duration::from_millis(200), exchange.request.body_mut().data());
            let _ = answered.send(early.await.is_err());
            hear_after(exchange).await
        }
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let node = edge(&overlay, false, &[origin.address()]).await;
    let mut client = TcpStream::connect(node.address("db")).await.unwrap();
    exchange_bytes(&mut client, b"hello").await;
    assert!(next(&mut answers).await, "it heard bytes before its answer");
}

/// Answers, then sends back what comes.
async fn hear_after(mut exchange: Exchange) -> std::io::Result<()> {
    let mut answers = exchange.respond.send_response(Response::new(()), false).map_err(std::io::Error::other)?;
    while let Some(chunk) = receive(exchange.request.body_mut()).await? {
        send_all(&mut answers, chunk, false).await?;
    }
    Ok(())
}

#[tokio::test]
async fn early_tunnel_data_is_bounded() {
    let (received, mut receiver) = seen();
    let origin = hermes_testkit::origin::scripted::h2_on(listener().await, move |mut exchange| {
        let received = received.clone();
        async move {
            // Never answers; hears until nothing more comes.
            let mut bytes = 0;
            let quiet = std::time::Duration::from_millis(500);
            while let Ok(Ok(Some(chunk))) = tokio::time::timeout(quiet, receive(exchange.request.body_mut())).await {
                bytes += chunk.len();
            }
            let _ = received.send(bytes);
            Ok(())
        }
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let node = edge(&overlay, true, &[origin.address()]).await;
    // One frame of the largest size: no more of it goes ahead, and its window is not given back.
    let mut frames = Frames::connect(node.address("web"), &[]).await.unwrap();
    let connect = Frame::headers(1, false, &[(":method", "CONNECT"), (":authority", "DB:7")]);
    frames.send(&[connect, Frame::new(kind::DATA, 0, 1, vec![7; 65_535])]).await.unwrap();
    assert_eq!(next(&mut receiver).await, 16_384);
    let mut client = TcpStream::connect(node.address("db")).await.unwrap();
    let flood = async { while client.write_all(&[7; 65536]).await.is_ok() {} };
    let bytes = tokio::select! {
        // The origin has told what it heard before its end reaches the client.
        biased;
        bytes = next(&mut receiver) => bytes,
        () = flood => panic!("the node closed"),
    };
    assert!((1..=16384 + 65536).contains(&bytes), "{bytes} bytes went ahead");
}

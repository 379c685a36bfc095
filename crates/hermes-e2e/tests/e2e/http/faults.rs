//! Faults of one session stay its own: what is cut never passes as whole, one stream's end is not its connection's,
//! and nobody is blamed for what somebody else did.

use std::{io, time::Duration};

use bytes::Bytes;
use h2::Reason;
use hermes_testkit::{
    listener_client::ListenerClient,
    multiplex::{self, Multiplex, receive},
    origin::{Origin, scripted},
    overlay::{EFFECT_TIMEOUT, Node},
    poll::until,
    raw_http1::RawHttp1,
};
use http::{Method, Request, Response, Version};
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};

use crate::http::lab::{before, next, overlay, seen};

async fn h2_origin<F>(serve: impl Fn(multiplex::Exchange) -> F + Clone + Send + 'static) -> Origin
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    scripted::h2_on(TcpListener::bind("127.0.0.1:0").await.unwrap(), serve).unwrap()
}

/// Waits until a session has received so many bytes.
async fn under_way(node: &Node, received: u64) {
    until("the bytes are on their way", || async {
        let (_, text) = node.ask("/sessions").await.unwrap();
        text.replace(char::is_whitespace, "").contains(&format!("\"received\":{received},"))
    })
    .await;
}

fn post(path: &str) -> Request<()> {
    Request::builder().method(Method::POST).version(Version::HTTP_2).uri(format!("http://WEB{path}")).body(()).unwrap()
}

#[tokio::test]
async fn a_truncated_request_is_not_complete() {
    let (sender, mut receiver) = seen();
    let origin = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            http1.head().await?;
            let _ = sender.send(String::from_utf8_lossy(&http1.to_end().await.unwrap_or_default()).into_owned());
            Ok(())
        }
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let node = before(&overlay, "h1", origin.address()).await;
    let mut client = Multiplex::connect(node.address("in")).await.unwrap();
    let (_response, mut body) = client.open(post("/"), false).await.unwrap();
    body.send_data(Bytes::from_static(b"half of it"), false).unwrap();
    // So that it is on its way before the reset, which may overtake it in the library.
    under_way(&node, 10).await;
    body.send_reset(Reason::NO_ERROR);
    let received = next(&mut receiver).await;
    assert!(received.contains("half of it") && !received.contains("0\r\n\r\n"), "{received:?}");
}

#[tokio::test]
async fn a_truncated_response_is_not_complete() {
    let origin = h2_origin(|mut exchange| async move {
        let mut body = exchange.respond.send_response(Response::new(()), false).map_err(io::Error::other)?;
        body.send_data(Bytes::from_static(b"half of it"), false).map_err(io::Error::other)?;
        // Long enough for it to leave.
        tokio::time::sleep(Duration::from_millis(50)).await;
        body.send_reset(Reason::NO_ERROR);
        Ok(())
    });
    let (overlay, origin) = (overlay(), origin.await);
    let node = before(&overlay, "h2", origin.address()).await;
    let mut client = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    client.send("GET / HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
    let head = client.head().await.unwrap();
    assert_eq!(head.status(), 200);
    assert!(client.body(&head).await.is_err(), "it passed as whole");
    let record = node.record(|record| record["status"] == 200).await;
    assert!(record["error"].is_string(), "{record}");
}

/// RFC 9110, 10.1.1: not for ever.
#[tokio::test]
async fn a_body_is_sent_after_a_timeout_without_100_continue() {
    let origin = scripted::h1(|mut http1| async move {
        let head = http1.head().await?;
        let length = http1.body(&head).await?.data.len();
        http1.send(format!("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{length}")).await
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let node = before(&overlay, "h1", origin.address()).await;
    let mut client = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    client.send("POST / HTTP/1.1\r\nhost: WEB\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n").await.unwrap();
    client.send("body").await.unwrap();
    let mut head = client.head().await.unwrap();
    if head.status() == 100 {
        head = client.head().await.unwrap();
    }
    assert_eq!(client.body(&head).await.unwrap().data, b"4");
}

#[tokio::test]
async fn a_stream_that_fails_leaves_its_connection_to_the_others() {
    let (sender, mut receiver) = seen();
    let origin = h2_origin(move |mut exchange| {
        let sender = sender.clone();
        async move {
            let path = exchange.request.uri().path().to_owned();
            let _ = sender.send(path.clone());
            if path == "/fails" {
                exchange.respond.send_reset(Reason::INTERNAL_ERROR);
                return Ok(());
            }
            exchange.answer(Response::new(()), "fine").await
        }
    });
    let (overlay, origin) = (overlay(), origin.await);
    let node = before(&overlay, "h2", origin.address()).await;
    let mut client = Multiplex::connect(node.address("in")).await.unwrap();
    for (path, status) in [("/", 200), ("/fails", 502), ("/", 200), ("/fails", 502), ("/", 200)] {
        assert_eq!(client.get(&format!("http://WEB{path}")).await.unwrap().status, status);
        // Once: a GET that was seen is not sent again without the route's leave.
        assert_eq!(next(&mut receiver).await, path);
    }
    assert!(receiver.try_recv().is_err());
    // One worker has the client's connection, and one pool.
    let connects = node.metric("hermes_upstream_connects_total", "upstream=\"origin\"").await.unwrap();
    assert!((1.0..=1.0).contains(&connects), "{connects} connections");
}

#[tokio::test]
async fn clients_that_break_their_uploads_do_not_rest_an_endpoint() {
    let origin = scripted::h1(|mut http1| async move {
        loop {
            let head = http1.head().await?;
            http1.body(&head).await?;
            http1.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await?;
        }
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let document = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN'], outlier: {failures: 2, ejection-time: 60s}}
";
    let node = overlay.node("edge").document(document).with("ORIGIN", origin.address()).start().await.unwrap();
    for _ in 0..6 {
        let mut client = RawHttp1::connect(node.address("in")).await.unwrap();
        client.send("POST /up HTTP/1.1\r\nhost: WEB\r\ncontent-length: 1000\r\n\r\nsome").await.unwrap();
        under_way(&node, 4).await;
        drop(client);
    }
    for _ in 0..6 {
        let record = node.record(|record| record["path"] == "/up").await;
        assert_eq!(record["error"], "http_request_error", "{record}");
    }
    let mut client = RawHttp1::connect(node.address("in")).await.unwrap();
    client.send("GET / HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
    assert_eq!(client.head().await.unwrap().status(), 200);
    assert!(!node.log().contains("rests"), "{}", node.log());
}

#[tokio::test]
async fn a_request_that_its_client_gives_up_is_no_success() {
    let (sender, mut receiver) = seen();
    let origin = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            http1.head().await?;
            let _ = sender.send(());
            http1.to_end().await.map(drop)
        }
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let node = before(&overlay, "h1", origin.address()).await;
    let stream = TcpStream::connect(node.address("in")).await.unwrap();
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    let mut client = RawHttp1::new(stream);
    client.send("GET / HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
    next(&mut receiver).await;
    drop(client);
    let record = node.record(|record| record["path"] == "/").await;
    assert_eq!((&record["status"], &record["error"]), (&0.into(), &"http_request_error".into()), "{record}");
    node.metric_reaches("hermes_sessions_total", "outcome=\"failed\"", 1.0).await;
}

/// The time for a request's head is none of a connection on which no request is under way.
#[tokio::test]
async fn frames_that_begin_no_request_do_not_end_an_idle_connection() {
    let overlay = overlay();
    let document = "
limits: {header-timeout: 300ms, keep-alive: 60s}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, respond: {body: fine}}
";
    let node = overlay.node("edge").document(document).start().await.unwrap();
    let stream = TcpStream::connect(node.address("in")).await.unwrap();
    let (mut sender, mut connection) = h2::client::handshake(stream).await.unwrap();
    let mut pings = connection.ping_pong().unwrap();
    let asking = async {
        for _ in 0..8 {
            pings.ping(h2::Ping::opaque()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let (response, _) = sender.send_request(Request::get("http://WEB/").body(()).unwrap(), true).unwrap();
        response.await.unwrap().status()
    };
    let status = tokio::select! {
        status = asking => status,
        ended = connection => panic!("it ended: {ended:?}"),
    };
    assert_eq!(status, 200);
    assert_eq!(node.metric("hermes_limit_hits_total", "limit=\"slow-client\"").await.unwrap_or_default(), 0.0);
}

/// A CONNECT-UDP stream that is over its idle time, and whose client does not end its half, ends alone.
#[tokio::test]
async fn an_idle_flow_ends_without_its_connection() {
    let overlay = overlay();
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: flow, match: {kind: udp}, terminate: {udp: '127.0.0.1:9'}, timeout: {idle: 300ms}}
- {name: all, respond: {body: fine}}
";
    let node = overlay.node("edge").document(document).start().await.unwrap();
    let mut client = Multiplex::connect(node.address("in")).await.unwrap();
    let mut request = Request::builder()
        .method(Method::CONNECT)
        .version(Version::HTTP_2)
        .uri("http://proxy/.well-known/masque/udp/CALL/7/")
        .header("capsule-protocol", "?1")
        .body(())
        .unwrap();
    request.extensions_mut().insert(h2::ext::Protocol::from_static("connect-udp"));
    let (response, _never_ended) = client.open(request, false).await.unwrap();
    let response = response.await.unwrap();
    assert_eq!(response.status(), 200);
    let mut body = response.into_body();
    // In order, or by a reset: either way it ends.
    let ended =
        tokio::time::timeout(EFFECT_TIMEOUT, async { while let Ok(Some(_)) = receive(&mut body).await {} }).await;
    assert!(ended.is_ok(), "the flow does not end");
    node.record(|record| record["kind"] == "udp").await;
    assert_eq!(client.get("http://WEB/").await.unwrap().status, 200);
}

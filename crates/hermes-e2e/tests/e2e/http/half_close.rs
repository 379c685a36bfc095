//! HTTP/1.1 clients that half-close after their requests (RFC 9112, section 9.6): each gets its responses.

use std::io;

use hermes_testkit::{
    origin::{Origin, scripted},
    raw_http1::RawHttp1,
};
use socket2::SockRef;
use tokio::net::TcpStream;

use crate::http::lab::{Seen, before, next, overlay, seen};

/// An origin that reports each path, and responds in two parts when the test releases it.
fn origin() -> (Origin, Seen<String>, tokio::sync::broadcast::Sender<()>) {
    let (sender, receiver) = seen();
    let (release, _) = tokio::sync::broadcast::channel(16);
    let released = release.clone();
    let origin = scripted::h1(move |mut http1| {
        let (sender, released) = (sender.clone(), released.clone());
        async move {
            while let Ok(head) = http1.head().await {
                let body = http1.body(&head).await?.text();
                let mut released = released.subscribe();
                let _ = sender.send(format!("{} {} {body}", head.method(), head.target()));
                released.recv().await.map_err(io::Error::other)?;
                http1.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
                http1.send_chunk(b"first ").await?;
                released.recv().await.map_err(io::Error::other)?;
                http1.send_chunk(head.target().as_bytes()).await?;
                http1.send("0\r\n\r\n").await?;
            }
            Ok(())
        }
    });
    (origin.unwrap(), receiver, release)
}

#[tokio::test]
async fn a_client_that_closes_its_side_gets_its_answers() {
    let (origin, mut receiver, release) = origin();
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    let requests = [
        ("a GET", "GET /a HTTP/1.1\r\nhost: WEB\r\n\r\n", 1),
        ("HTTP/1.0", "GET /b HTTP/1.0\r\nhost: WEB\r\n\r\n", 1),
        ("a POST", "POST /c HTTP/1.1\r\nhost: WEB\r\ncontent-length: 4\r\n\r\nbody", 1),
        ("chunks", "POST /d HTTP/1.1\r\nhost: WEB\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n", 1),
        ("a pipeline", "GET /e HTTP/1.1\r\nhost: WEB\r\n\r\nGET /e HTTP/1.1\r\nhost: WEB\r\n\r\n", 2),
    ];
    for (name, request, answers) in requests {
        let mut client = RawHttp1::connect(node.address("in")).await.unwrap();
        client.send(request).await.unwrap();
        client.finish().await.unwrap();
        for _ in 0..answers {
            let request_count = next(&mut receiver).await;
            release.send(()).unwrap();
            let head = client.head().await.unwrap_or_else(|error| panic!("{name}: {error}"));
            // The node has seen the end of the client's side by now, in the middle of the answer.
            release.send(()).unwrap();
            let content = client.body(&head).await.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(head.status(), 200, "{name}");
            let path = request_count.split(' ').nth(1).unwrap_or_default();
            assert_eq!(content.text(), format!("first {path}"), "{name}: {request_count}");
        }
        assert!(client.is_ended().await, "{name}");
    }
    // The first record of each is a success.
    let record = node.record(|record| record["path"] == "/d").await;
    assert_eq!(record["error"], serde_json::Value::Null, "{record}");
}

/// The node's own responses reach such clients too.
#[tokio::test]
async fn a_client_of_the_admin_endpoint_may_close_its_side() {
    let (origin, _tells, _release) = origin();
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    for path in ["/healthz", "/sessions", "/metrics"] {
        let mut client = RawHttp1::connect(node.admin()).await.unwrap();
        client.send(format!("GET {path} HTTP/1.1\r\nhost: {}\r\n\r\n", node.admin())).await.unwrap();
        client.finish().await.unwrap();
        let head = client.head().await.unwrap_or_else(|error| panic!("{path}: {error}"));
        assert_eq!(head.status(), 200, "{path}");
        client.body(&head).await.unwrap();
    }
}

/// A body that a half-close cuts off is incomplete, and so is its request.
#[tokio::test]
async fn a_client_that_closes_its_side_within_a_body_gets_no_answer_to_it() {
    let (origin, mut receiver, _release) = origin();
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    let mut client = RawHttp1::connect(node.address("in")).await.unwrap();
    client.send("POST /a HTTP/1.1\r\nhost: WEB\r\ncontent-length: 9\r\n\r\nbody").await.unwrap();
    client.finish().await.unwrap();
    let record = node.record(|record| record["path"] == "/a").await;
    assert_eq!(record["error"], "http_request_error", "{record}");
    assert!(receiver.try_recv().is_err());
}

/// A reset shows that no client waits.
#[tokio::test]
async fn a_client_that_resets_its_connection_ends_its_request() {
    let (origin, mut receiver, _release) = origin();
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    let stream = TcpStream::connect(node.address("in")).await.unwrap();
    SockRef::from(&stream).set_linger(Some(std::time::Duration::ZERO)).unwrap();
    let mut client = RawHttp1::new(stream);
    client.send("GET /a HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
    next(&mut receiver).await;
    drop(client);
    let record = node.record(|record| record["path"] == "/a").await;
    assert_eq!((&record["status"], &record["error"]), (&0.into(), &"http_request_error".into()), "{record}");
}

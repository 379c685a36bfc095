//! Early responses to uploads, from the origin or the node: they reach the client, and no reset overtakes them (RFC
//! 9112, section 9.6).

use std::{io, time::Duration};

use bytes::Bytes;
use hermes_testkit::{
    frames::{END_STREAM, Frame, Frames, INITIAL_WINDOW_SIZE, kind},
    listener_client::ListenerClient,
    multiplex,
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
    raw_http1::RawHttp1,
};
use http::Request;
use tokio::net::TcpStream;

use crate::http::lab::{before, overlay};

/// More than all buffers between a client and the origin hold.
const UPLOAD: usize = 24 << 20;
/// The part of the upload that the origin reads.
const READ: usize = 1 << 20;
/// How often each case is tried: a race that is lost in half of all cases is lost in one of these.
const TIMES: usize = 8;

/// An origin that reads a little of an upload, answers, and closes with the rest unread.
fn origin() -> Origin {
    let origin = scripted::h1(|mut http1| async move {
        http1.head().await?;
        http1.exactly(READ).await?;
        http1.send("HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-length: 9\r\n\r\ntoo large").await
    });
    origin.unwrap()
}

/// A client that reads only after it has sent the upload, or the connection broke.
async fn upload(client: &mut RawHttp1<TcpStream>, head: &str, is_chunked: bool) -> io::Result<(u16, String)> {
    client.send(head).await?;
    let data = vec![b'x'; 64 << 10];
    for _ in 0..UPLOAD / data.len() {
        let sent = if is_chunked { client.send_chunk(&data).await } else { client.send(&data).await };
        if sent.is_err() {
            break;
        }
    }
    let head = client.head().await?;
    Ok((head.status(), client.body(&head).await?.text()))
}

fn heads(path: &str) -> [(String, bool); 2] {
    let length = format!("POST {path} HTTP/1.1\r\nhost: WEB\r\ncontent-length: {UPLOAD}\r\n\r\n");
    let chunks = format!("POST {path} HTTP/1.1\r\nhost: WEB\r\ntransfer-encoding: chunked\r\n\r\n");
    [(length, false), (chunks, true)]
}

#[tokio::test]
async fn an_origin_that_answers_and_closes_is_heard() {
    let origin = origin();
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    for (head, is_chunked) in heads("/") {
        for time in 0..TIMES {
            let mut client = RawHttp1::connect(node.address("in")).await.unwrap();
            let answer = upload(&mut client, &head, is_chunked).await;
            let answer = answer.unwrap_or_else(|error| panic!("{time}, chunked {is_chunked}: {error}"));
            assert_eq!(answer, (413, "too large".to_owned()), "{time}, chunked {is_chunked}");
        }
    }
}

#[tokio::test]
async fn an_origin_that_answers_and_closes_is_heard_by_h2_clients() {
    let origin = origin();
    let overlay = overlay();
    let node = before(&overlay, "h1", origin.address()).await;
    for time in 0..TIMES {
        let mut client = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        let request = Request::post("http://WEB/").body(()).unwrap();
        let (response, mut stream) = client.open(request, false).await.unwrap();
        // The node ends the stream as soon as nothing reads its body.
        let _ = multiplex::send_all(&mut stream, Bytes::from(vec![b'x'; UPLOAD]), true).await;
        let answer = multiplex::answer(response).await.unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (413, "too large"), "{time}");
    }
}

/// The same with an h2 origin, which reads as much as an h1 origin, and closes its whole connection.
fn h2_origin() -> Origin {
    let origin = scripted::h1(|http1| async move {
        let window = u32::try_from(UPLOAD).unwrap_or(u32::MAX);
        let mut frames = Frames::accept(http1, &[(INITIAL_WINDOW_SIZE, window)]).await?;
        frames.send(&[Frame::new(kind::WINDOW_UPDATE, 0, 0, window.to_be_bytes().to_vec())]).await?;
        let data = frames.until("DATA", |frame| frame.kind == kind::DATA).await?;
        let answer = [(":status", "413"), ("content-length", "9")];
        let head = Frame::headers(data.stream, false, &answer);
        frames.send(&[head, Frame::new(kind::DATA, END_STREAM, data.stream, "too large")]).await
    });
    origin.unwrap()
}

#[tokio::test]
async fn an_h2_origin_that_answers_and_closes_is_heard() {
    let origin = h2_origin();
    let overlay = overlay();
    let node = before(&overlay, "h2", origin.address()).await;
    for (head, is_chunked) in heads("/") {
        for time in 0..TIMES {
            let mut client = RawHttp1::connect(node.address("in")).await.unwrap();
            let answer = upload(&mut client, &head, is_chunked).await;
            let answer = answer.unwrap_or_else(|error| panic!("{time}, chunked {is_chunked}: {error}"));
            assert_eq!(answer, (413, "too large".to_owned()), "{time}, chunked {is_chunked}");
        }
    }
}

async fn refusing(overlay: &Overlay) -> Node {
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: no, match: {path: /no}, respond: {status: 405, body: 'not this way'}}
";
    overlay.node("edge").document(document).start().await.unwrap()
}

#[tokio::test]
async fn a_node_that_refuses_an_upload_is_heard() {
    let overlay = overlay();
    let node = refusing(&overlay).await;
    for (head, is_chunked) in heads("/no") {
        for time in 0..TIMES {
            let mut client = RawHttp1::connect(node.address("in")).await.unwrap();
            let answer = upload(&mut client, &head, is_chunked).await;
            let answer = answer.unwrap_or_else(|error| panic!("{time}, chunked {is_chunked}: {error}"));
            assert_eq!(answer, (405, "not this way".to_owned()), "{time}, chunked {is_chunked}");
        }
    }
    // A head that is too long is refused before all of it is read.
    for time in 0..TIMES {
        let mut client = RawHttp1::connect(node.address("in")).await.unwrap();
        client.send("GET / HTTP/1.1\r\nhost: WEB\r\n").await.unwrap();
        for _ in 0..200 {
            if client.send(format!("x: {}\r\n", "y".repeat(8 << 10))).await.is_err() {
                break;
            }
        }
        assert_eq!(client.head().await.unwrap_or_else(|error| panic!("{time}: {error}")).status(), 431, "{time}");
    }
}

/// The connection ends although its client sends and closes nothing; a body that has already arrived keeps it open.
#[tokio::test]
async fn a_connection_that_ends_is_announced_and_not_held_for_long() {
    let overlay = overlay();
    let node = refusing(&overlay).await;
    let mut client = RawHttp1::connect(node.address("in")).await.unwrap();
    let (head, _) = &heads("/no")[0];
    client.send(head).await.unwrap();
    let answer = client.head().await.unwrap();
    assert_eq!(answer.header("connection").as_deref(), Some("close"), "{answer:?}");
    assert_eq!(client.body(&answer).await.unwrap().text(), "not this way");
    assert!(client.is_ended().await);
    node.metric_reaches("hermes_limit_hits_total", "limit=\"linger\"", 1.0).await;
    hermes_testkit::poll::until("it is closed", || async {
        node.metric("hermes_connections_open", "").await.unwrap() < 1.0
    })
    .await;
    let mut client = RawHttp1::connect(node.address("in")).await.unwrap();
    for _ in 0..2 {
        client.send("POST /no HTTP/1.1\r\nhost: WEB\r\ncontent-length: 4\r\n\r\nbody").await.unwrap();
        let answer = client.head().await.unwrap();
        assert_eq!((answer.status(), answer.header("connection")), (405, None), "{answer:?}");
        client.body(&answer).await.unwrap();
        // Gives the connection time to reach its state after the response.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

//! `Expect: 100-continue`: the request's body is asked for when the origin asks for it, and not before.

use std::{io, time::Duration};

use bytes::Bytes;
use hermes_testkit::{
    listener_client::ListenerClient,
    multiplex::{self, Exchange},
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
};
use http::{Request, Response, StatusCode};
use tokio::sync::mpsc::UnboundedSender;

use crate::http::lab::{Seen, before, next, overlay, seen};

/// What an origin does once the test lets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// 100, then 200 with the length of the body.
    Continue,
    /// 401 at once.
    Refuse,
    /// 200 at once, without a 100 (RFC 9110, 10.1.1 allows it).
    Answer,
}

struct Lab {
    node: Node,
    _overlay: Overlay,
    _origin: Origin,
    /// The origin has a head with this `expect`.
    heads: Seen<Option<String>>,
    /// Lets the origin continue.
    verdict: UnboundedSender<Verdict>,
}

/// Longer than any detour of a 100 that was sent too early. A slower machine makes the test weaker, never wrong.
const EARLY: Duration = Duration::from_millis(250);

async fn lab(version: &str) -> Lab {
    let (sender, heads) = seen();
    let (verdict, verdicts) = seen::<Verdict>();
    let verdicts = std::sync::Arc::new(tokio::sync::Mutex::new(verdicts));
    let origin = if version == "h1" {
        scripted::h1(move |mut http1| {
            let (sender, verdicts) = (sender.clone(), verdicts.clone());
            async move {
                let head = http1.head().await?;
                let _ = sender.send(head.header("expect"));
                let verdict = verdicts.lock().await.recv().await;
                if verdict == Some(Verdict::Refuse) {
                    return http1
                        .send("HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
                        .await;
                }
                if verdict == Some(Verdict::Continue) {
                    http1.send("HTTP/1.1 100 Continue\r\n\r\n").await?;
                    let length = http1.body(&head).await?.data.len().to_string();
                    return http1
                        .send(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{length}", length.len()))
                        .await;
                }
                http1.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
                let length = http1.body(&head).await?.data.len().to_string();
                http1.send_chunk(length.as_bytes()).await?;
                http1.send("0\r\n\r\n").await
            }
        })
    } else {
        scripted::h2(move |exchange: Exchange| {
            let (sender, verdicts) = (sender.clone(), verdicts.clone());
            async move {
                let Exchange { request, mut respond } = exchange;
                let _ = sender.send(multiplex::joined(request.headers(), "expect"));
                let verdict = verdicts.lock().await.recv().await;
                if verdict == Some(Verdict::Refuse) {
                    let refusal =
                        Response::builder().status(StatusCode::UNAUTHORIZED).body(()).map_err(io::Error::other)?;
                    return Exchange { request, respond }.answer(refusal, "no").await;
                }
                if verdict == Some(Verdict::Continue) {
                    let go_on = Response::builder().status(StatusCode::CONTINUE).body(()).map_err(io::Error::other)?;
                    respond.send_informational(go_on).map_err(io::Error::other)?;
                    let (data, _) = multiplex::receive_all(request.into_body()).await?;
                    let mut stream = respond.send_response(Response::new(()), false).map_err(io::Error::other)?;
                    return multiplex::send_all(&mut stream, Bytes::from(data.len().to_string()), true).await;
                }
                let mut stream = respond.send_response(Response::new(()), false).map_err(io::Error::other)?;
                let (data, _) = multiplex::receive_all(request.into_body()).await?;
                multiplex::send_all(&mut stream, Bytes::from(data.len().to_string()), true).await
            }
        })
    };
    let origin = origin.unwrap();
    let overlay = overlay();
    let node = before(&overlay, version, origin.address()).await;
    Lab { node, _overlay: overlay, _origin: origin, heads, verdict }
}

const HEAD: &str = "POST /up HTTP/1.1\r\nhost: WEB\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n";

#[tokio::test]
async fn an_h1_client_receives_100_continue_from_the_origin() {
    for version in ["h1", "h2"] {
        let mut lab = lab(version).await;
        let mut http1 = ListenerClient::plain(lab.node.address("in")).h1().await.unwrap();
        http1.send(HEAD).await.unwrap();
        assert_eq!(next(&mut lab.heads).await.as_deref(), Some("100-continue"), "{version}");
        let early = tokio::time::timeout(EARLY, http1.head()).await;
        assert!(early.is_err(), "{version}: the client was answered before the origin said anything: {early:?}");
        lab.verdict.send(Verdict::Continue).unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 100, "{version}");
        http1.send("hello").await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!((head.status(), http1.body(&head).await.unwrap().text().as_str()), (200, "5"), "{version}");
    }
}

#[tokio::test]
async fn an_h2_client_receives_100_continue_from_the_origin() {
    for version in ["h1", "h2"] {
        let mut lab = lab(version).await;
        let mut connection = ListenerClient::plain(lab.node.address("in")).h2().await.unwrap();
        let request = Request::post("http://WEB/up").header("expect", "100-continue").body(()).unwrap();
        let (mut response, mut stream) = connection.open(request, false).await.unwrap();
        assert_eq!(next(&mut lab.heads).await.as_deref(), Some("100-continue"), "{version}");
        let mut interim = async || std::future::poll_fn(|cx| response.poll_informational(cx)).await;
        let early = tokio::time::timeout(EARLY, interim()).await;
        assert!(early.is_err(), "{version}: the client was answered before the origin said anything: {early:?}");
        lab.verdict.send(Verdict::Continue).unwrap();
        let go_on = tokio::time::timeout(hermes_testkit::overlay::EFFECT_TIMEOUT, interim()).await.unwrap();
        assert_eq!(go_on.unwrap().unwrap().status(), 100, "{version}");
        multiplex::send_all(&mut stream, Bytes::from_static(b"hello"), true).await.unwrap();
        let answer = multiplex::answer(response).await.unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (200, "5"), "{version}");
    }
}

#[tokio::test]
async fn a_refusal_comes_without_a_100() {
    for version in ["h1", "h2"] {
        let mut lab = lab(version).await;
        let client = ListenerClient::plain(lab.node.address("in"));
        let mut http1 = client.h1().await.unwrap();
        http1.send(HEAD).await.unwrap();
        next(&mut lab.heads).await;
        lab.verdict.send(Verdict::Refuse).unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!((head.status(), http1.body(&head).await.unwrap().text().as_str()), (401, "no"), "{version}");

        let mut connection = client.h2().await.unwrap();
        let request = Request::post("http://WEB/up").header("expect", "100-continue").body(()).unwrap();
        let (response, _stream) = connection.open(request, false).await.unwrap();
        next(&mut lab.heads).await;
        lab.verdict.send(Verdict::Refuse).unwrap();
        let answer = multiplex::answer(response).await.unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (401, "no"), "{version}");
        assert!(answer.interim.is_empty(), "{version}: {answer:?}");
    }
}

/// The final head without a 100 before it lets the body through as well: the origin reads it after all.
#[tokio::test]
async fn a_final_head_lets_the_body_through() {
    for version in ["h1", "h2"] {
        let mut lab = lab(version).await;
        let mut connection = ListenerClient::plain(lab.node.address("in")).h2().await.unwrap();
        let request = Request::post("http://WEB/up").header("expect", "100-continue").body(()).unwrap();
        let (response, mut stream) = connection.open(request, false).await.unwrap();
        next(&mut lab.heads).await;
        lab.verdict.send(Verdict::Answer).unwrap();
        let (answer, sent) = tokio::join!(
            multiplex::answer(response),
            multiplex::send_all(&mut stream, Bytes::from_static(b"hello"), true)
        );
        let answer = answer.unwrap();
        assert_eq!((answer.status, answer.text().as_str(), sent.is_ok()), (200, "5", true), "{version}");
    }
}

/// Whoever does not wait is not made to.
#[tokio::test]
async fn a_client_that_does_not_wait_is_served_too() {
    for version in ["h1", "h2"] {
        let mut lab = lab(version).await;
        let mut http1 = ListenerClient::plain(lab.node.address("in")).h1().await.unwrap();
        http1.send(format!("{HEAD}hello")).await.unwrap();
        next(&mut lab.heads).await;
        lab.verdict.send(Verdict::Continue).unwrap();
        let mut head = http1.head().await.unwrap();
        if head.status() == 100 {
            head = http1.head().await.unwrap();
        }
        assert_eq!((head.status(), http1.body(&head).await.unwrap().text().as_str()), (200, "5"), "{version}");
    }
}

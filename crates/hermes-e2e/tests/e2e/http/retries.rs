//! What is tried again and what is not: nothing is done twice that must not be.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use h2::Reason;
use hermes_testkit::{
    frames::{Frame, Frames, kind},
    listener_client::ListenerClient,
    multiplex::{self, Answer, Exchange},
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
};
use http::{Method, Request};

use crate::http::lab::{Seen, next, overlay, seen};

/// What an origin does with one request.
#[derive(Clone, Copy, Debug)]
enum OriginBehaviour {
    /// Answers with this status.
    Status(u16),
    /// Reads it whole and closes without an answer.
    Break,
}

/// Does one deed after the other, the last one for ever. Tells the body of each request it got.
fn origin(deeds: &'static [OriginBehaviour]) -> (Origin, Seen<Vec<u8>>) {
    let (sender, receiver) = seen();
    let count = Arc::new(AtomicUsize::new(0));
    let origin = scripted::h1(move |mut http1| {
        let (sender, count) = (sender.clone(), count.clone());
        async move {
            loop {
                let head = http1.head().await?;
                let body = http1.body(&head).await?.data;
                let number = count.fetch_add(1, Ordering::SeqCst);
                let _ = sender.send(body);
                match deeds[number.min(deeds.len() - 1)] {
                    OriginBehaviour::Status(status) => {
                        http1.send(format!("HTTP/1.1 {status} Said\r\ncontent-length: 2\r\n\r\nok")).await?;
                    }
                    OriginBehaviour::Break => return Ok(()),
                }
            }
        }
    });
    (origin.unwrap(), receiver)
}

const DOCUMENT: &str = "
limits: {min-retry-concurrency: $FLOOR, request-body-buffer: 64KiB}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origins $RETRY}
upstreams:
- {name: origins, protocol: $PROTOCOL, overlay: false, balance: round-robin, outlier: {failures: 0}, endpoints: [$ENDPOINTS]}
";

/// Retries on everything, at once.
const ALL: &str = ", retry: {on: [connect-failure, reset, 5xx, 429], attempts: 3, backoff: {base: 1ms, max: 1ms}}";

async fn node(overlay: &Overlay, protocol: &str, retry: &str, endpoints: &[SocketAddr]) -> Node {
    let endpoints: Vec<String> = endpoints.iter().map(|endpoint| format!("'{endpoint}'")).collect();
    let draft = overlay.node("edge").document(DOCUMENT).with("RETRY", retry).with("PROTOCOL", protocol);
    draft.with("FLOOR", 3).with("ENDPOINTS", endpoints.join(", ")).start().await.unwrap()
}

async fn ask(node: &Node, method: Method, body: &[u8]) -> Answer {
    let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
    let request = Request::builder().method(method).uri("http://WEB/thing").body(()).unwrap();
    connection.ask(request, body).await.unwrap()
}

/// How many requests an origin got that were not waited for.
fn further<T>(receiver: &mut Seen<T>) -> usize {
    std::iter::from_fn(|| receiver.try_recv().ok()).count()
}

fn nobody() -> SocketAddr {
    hermes_testkit::port::reserve("127.0.0.1")
}

#[tokio::test]
async fn an_endpoint_that_refuses_is_followed_by_another() {
    let (origin, mut receiver) = origin(&[OriginBehaviour::Status(200)]);
    let overlay = overlay();
    let node = node(&overlay, "h1", ALL, &[nobody(), origin.address()]).await;
    // Nothing was sent: whatever the method, and with its whole body.
    for _ in 0..4 {
        assert_eq!(ask(&node, Method::POST, b"body").await.status, 200);
        assert_eq!(next(&mut receiver).await, b"body");
    }
    node.record(|record| record["attempts"] == 2).await;
}

#[tokio::test]
async fn without_a_policy_nothing_is_tried_again() {
    let (origin, mut receiver) =
        origin(&[OriginBehaviour::Status(503), OriginBehaviour::Break, OriginBehaviour::Status(200)]);
    let overlay = overlay();
    let node = node(&overlay, "h1", "", &[origin.address()]).await;
    assert_eq!(ask(&node, Method::GET, b"").await.status, 503);
    // The connection is in the pool, but it was no stale one: the origin read the request.
    let broken = ask(&node, Method::POST, b"x").await;
    assert_eq!((broken.status, broken.header("proxy-status").is_some()), (502, true));
    assert_eq!(further(&mut receiver), 2);
}

#[tokio::test]
async fn a_broken_exchange_is_retried_only_if_safe() {
    for (method, body, status, attempts) in [
        (Method::GET, &b""[..], 200, 2),
        (Method::PUT, b"whole", 200, 2),
        (Method::DELETE, b"", 200, 2),
        // The origin may have done it already.
        (Method::POST, b"once", 502, 1),
        (Method::PATCH, b"once", 502, 1),
    ] {
        let (origin, mut receiver) = origin(&[OriginBehaviour::Break, OriginBehaviour::Status(200)]);
        let overlay = overlay();
        let node = node(&overlay, "h1", ALL, &[origin.address()]).await;
        assert_eq!(ask(&node, method.clone(), body).await.status, status, "{method}");
        for attempt in 0..attempts {
            assert_eq!(next(&mut receiver).await, body, "{method}, attempt {attempt}");
        }
        assert_eq!(further(&mut receiver), 0, "{method}");
    }
}

#[tokio::test]
async fn statuses_are_retried_by_policy() {
    for (method, deeds, status, attempts) in [
        (
            Method::GET,
            &[OriginBehaviour::Status(503), OriginBehaviour::Status(500), OriginBehaviour::Status(200)][..],
            200,
            3,
        ),
        // 429 says that it was not done; 503 does not.
        (Method::POST, &[OriginBehaviour::Status(429), OriginBehaviour::Status(200)], 200, 2),
        (Method::POST, &[OriginBehaviour::Status(503), OriginBehaviour::Status(200)], 503, 1),
        (Method::GET, &[OriginBehaviour::Status(404), OriginBehaviour::Status(200)], 404, 1),
        // Three tries in all; the last answer is the client's.
        (Method::GET, &[OriginBehaviour::Status(502)], 502, 3),
    ] {
        let (origin, mut receiver) = origin(Box::leak(deeds.to_vec().into_boxed_slice()));
        let overlay = overlay();
        let node = node(&overlay, "h1", ALL, &[origin.address()]).await;
        let body: &[u8] = if method == Method::POST { b"body" } else { b"" };
        assert_eq!(ask(&node, method.clone(), body).await.status, status, "{method} {deeds:?}");
        assert_eq!(further(&mut receiver), attempts, "{method} {deeds:?}");
    }
}

#[tokio::test]
async fn a_body_larger_than_the_buffer_is_not_retried() {
    let (origin, mut receiver) = origin(&[OriginBehaviour::Break, OriginBehaviour::Status(200)]);
    let overlay = overlay();
    let node = node(&overlay, "h1", ALL, &[origin.address()]).await;
    let large = vec![b'x'; 100 << 10];
    assert_eq!(ask(&node, Method::PUT, &large).await.status, 502);
    assert_eq!(next(&mut receiver).await.len(), large.len());
    assert_eq!(further(&mut receiver), 0);
    // What fits is kept.
    assert_eq!(ask(&node, Method::PUT, &large[..60 << 10]).await.status, 200);
}

/// An idle connection that the origin closed meanwhile costs no request, whatever the policy.
#[tokio::test]
async fn a_stale_connection_is_replaced_free_of_charge() {
    let (closed, mut closes) = seen();
    let origin = scripted::h1(move |mut http1| {
        let closed = closed.clone();
        async move {
            let head = http1.head().await?;
            http1.body(&head).await?;
            // Promises to stay, and goes.
            http1.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await?;
            drop(http1);
            let _ = closed.send(());
            Ok(())
        }
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let node = node(&overlay, "h1", "", &[origin.address()]).await;
    for method in [Method::GET, Method::POST, Method::GET, Method::POST] {
        assert_eq!(ask(&node, method.clone(), b"x").await.status, 200, "{method}");
        next(&mut closes).await;
    }
}

/// REFUSED_STREAM says that nothing was done (RFC 9113, 8.7): even POST is sent again.
#[tokio::test]
async fn a_refused_stream_is_always_retried() {
    let (sender, mut receiver) = seen();
    let count = Arc::new(AtomicUsize::new(0));
    let origin = scripted::h2(move |exchange: Exchange| {
        let (sender, count) = (sender.clone(), count.clone());
        async move {
            let Exchange { request, mut respond } = exchange;
            if count.fetch_add(1, Ordering::SeqCst) == 0 {
                respond.send_reset(Reason::REFUSED_STREAM);
                return Ok(());
            }
            let (body, _) = multiplex::receive_all(request.into_body()).await?;
            let _ = sender.send(body);
            respond.send_response(http::Response::new(()), true).map(drop).map_err(io::Error::other)
        }
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let node = node(&overlay, "h2", ALL, &[origin.address()]).await;
    assert_eq!(ask(&node, Method::POST, b"body").await.status, 200);
    assert_eq!(next(&mut receiver).await, b"body");
}

/// The same without `retry`, at the only endpoint, for a stream that is refused after some of its body has come.
#[tokio::test]
async fn a_refused_stream_is_opened_again_without_a_policy() {
    let (sender, mut receiver) = seen();
    let count = Arc::new(AtomicUsize::new(0));
    let origin = scripted::h2(move |exchange: Exchange| {
        let (sender, count) = (sender.clone(), count.clone());
        async move {
            let Exchange { request, mut respond } = exchange;
            let always = request.uri().path() == "/never";
            let mut body = request.into_body();
            if always || count.fetch_add(1, Ordering::SeqCst) == 0 {
                multiplex::receive(&mut body).await?;
                let _ = sender.send(b"refused".to_vec());
                respond.send_reset(Reason::REFUSED_STREAM);
                return Ok(());
            }
            let (body, _) = multiplex::receive_all(body).await?;
            let _ = sender.send(body);
            respond.send_response(http::Response::new(()), true).map(drop).map_err(io::Error::other)
        }
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let node = node(&overlay, "h2", "", &[origin.address()]).await;
    let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
    let grpc =
        || Request::post("http://WEB/svc/Call").header("content-type", "application/grpc").header("te", "trailers");
    let (response, mut stream) = connection.open(grpc().body(()).unwrap(), false).await.unwrap();
    stream.send_data("first ".into(), false).unwrap();
    // The rest of the body comes after the refusal.
    assert_eq!(next(&mut receiver).await, b"refused");
    stream.send_data("second".into(), true).unwrap();
    assert_eq!(multiplex::answer(response).await.unwrap().status, 200);
    assert_eq!(next(&mut receiver).await, b"first second");

    // A peer that always refuses is not asked for ever.
    let request = Request::post("http://WEB/never").body(()).unwrap();
    assert_eq!(connection.ask(request, b"body").await.unwrap().status, 502);
    assert_eq!((next(&mut receiver).await, further(&mut receiver)), (b"refused".to_vec(), 2));
    // A body that is no longer held is not sent again.
    let request = Request::post("http://WEB/never").body(()).unwrap();
    let (response, mut stream) = connection.open(request, false).await.unwrap();
    let _ = multiplex::send_all(&mut stream, vec![7; 100 << 10].into(), false).await;
    let status = multiplex::answer(response).await.unwrap().status;
    let requests = 1 + {
        next(&mut receiver).await;
        further(&mut receiver)
    };
    assert!(status == 502 && requests <= 3, "{status} {requests}");
}

/// GOAWAY names the last stream that was looked at; those beyond it go to a new connection (RFC 9113, 6.8).
#[tokio::test]
async fn a_stream_beyond_goaway_is_opened_again_without_a_policy() {
    let (sender, mut receiver) = seen();
    let count = Arc::new(AtomicUsize::new(0));
    let origin = scripted::h1(move |http1| {
        let (sender, count) = (sender.clone(), count.clone());
        async move {
            let mut frames = Frames::accept(http1, &[]).await?;
            let data = frames.until("DATA", |frame| frame.kind == kind::DATA).await?;
            let _ = sender.send(data.payload.to_vec());
            if count.fetch_add(1, Ordering::SeqCst) == 0 {
                frames.send(&[Frame::new(kind::GOAWAY, 0, 0, vec![0; 8])]).await?;
                // The connection stays: nothing but the frame says that the stream is lost.
                return frames.until("the end", |_| false).await.map(drop);
            }
            frames.send(&[Frame::headers(data.stream, true, &[(":status", "200")])]).await?;
            frames.until("the end", |_| false).await.map(drop)
        }
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let node = node(&overlay, "h2", "", &[origin.address()]).await;
    assert_eq!(ask(&node, Method::POST, b"body").await.status, 200);
    assert_eq!((next(&mut receiver).await, next(&mut receiver).await), (b"body".to_vec(), b"body".to_vec()));
}

/// Many requests fail together: only a part of them may come again.
#[tokio::test]
async fn retries_keep_to_their_budget() {
    const TOGETHER: usize = 20;
    let (sender, mut receiver) = seen();
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let opened = gate.clone();
    let origin = scripted::h1(move |mut http1| {
        let (sender, gate) = (sender.clone(), gate.clone());
        async move {
            loop {
                http1.head().await?;
                let _ = sender.send(());
                gate.acquire().await.map_err(io::Error::other)?.forget();
                http1.send("HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n").await?;
            }
        }
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let retry = ", retry: {on: [5xx], attempts: 2, backoff: {base: 1ms, max: 1ms}, budget: 20%}";
    let draft = overlay.node("edge").document(DOCUMENT).with("RETRY", retry).with("PROTOCOL", "h1").with("FLOOR", 0);
    let node = draft.with("ENDPOINTS", format!("'{}'", origin.address())).start().await.unwrap();
    let mut requests = tokio::task::JoinSet::new();
    for _ in 0..TOGETHER {
        let client = ListenerClient::plain(node.address("in"));
        requests.spawn(async move { client.h2().await?.get("http://WEB/").await.map(|answer| answer.status) });
    }
    for _ in 0..TOGETHER {
        next(&mut receiver).await;
    }
    // All fail at one instant; those that come again wait at the gate, so that none makes room for others.
    opened.add_permits(TOGETHER);
    let again = TOGETHER / 5;
    for _ in 0..TOGETHER - again {
        assert_eq!(requests.join_next().await.unwrap().unwrap().unwrap(), 503);
    }
    for _ in 0..again {
        next(&mut receiver).await;
    }
    assert_eq!(further(&mut receiver), 0, "more than a fifth of the requests came again");
    node.metric_reaches("hermes_limit_hits_total", "retry-budget", (TOGETHER - again) as f64).await;
    opened.add_permits(again);
    for _ in 0..again {
        assert_eq!(requests.join_next().await.unwrap().unwrap().unwrap(), 503);
    }
}

/// An endpoint that refuses a stream is busy. Only a refusal that nobody makes good counts against it.
#[tokio::test]
async fn a_refused_stream_that_is_sent_elsewhere_does_not_count_against_the_endpoint() {
    let (sender, mut receiver) = seen();
    let origin = |name: &'static str| {
        let (sender, count) = (sender.clone(), Arc::new(AtomicUsize::new(0)));
        let origin = scripted::h2(move |exchange: Exchange| {
            let (sender, count) = (sender.clone(), count.clone());
            async move {
                let Exchange { request, mut respond } = exchange;
                let is_first = count.fetch_add(1, Ordering::SeqCst) == 0;
                if request.uri().path() == "/never" || (name == "busy" && is_first) {
                    let _ = sender.send("refused");
                    respond.send_reset(Reason::REFUSED_STREAM);
                    return Ok(());
                }
                let _ = sender.send(name);
                respond.send_response(http::Response::new(()), true).map(drop).map_err(io::Error::other)
            }
        });
        origin.unwrap()
    };
    let (busy, other) = (origin("busy"), origin("other"));
    let overlay = overlay();
    let endpoints = format!("'{}', '{}'", busy.address(), other.address());
    let document = DOCUMENT.replace("failures: 0", "failures: 1, ejection-time: 1h");
    let draft = overlay.node("edge").document(&document).with("RETRY", "").with("PROTOCOL", "h2");
    let node = draft.with("FLOOR", 3).with("ENDPOINTS", endpoints).start().await.unwrap();
    let mut served = Vec::new();
    for _ in 0..6 {
        assert_eq!(ask(&node, Method::POST, b"body").await.status, 200);
        served.push(next(&mut receiver).await);
        if served.last() == Some(&"refused") {
            served.push(next(&mut receiver).await);
        }
    }
    assert!(served.contains(&"refused") && served.contains(&"busy"), "{served:?}");
    assert!(!node.log().contains("and rests"), "{}", node.log());
    let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
    let request = Request::post("http://WEB/never").body(()).unwrap();
    assert_eq!(connection.ask(request, b"body").await.unwrap().status, 502);
    node.says("and rests").await;
}

//! The retriever within a node, for clients that ask once: `resume`.

use hermes_testkit::binary::hermes;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hermes_testkit::listener_client::ListenerClient;
use hermes_testkit::origin::{Origin, scripted};
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::pattern::Pattern;
use hermes_testkit::raw_http1::Head;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

use crate::fetch::lab::{Reply, origin, sha256};

pub(crate) const LENGTH: usize = 300_000;
pub(crate) const DOCUMENT: &str = "
workers: 2
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: site, upstream: origin, $TREATMENT}
upstreams:
- {name: origin, protocol: h1, overlay: false, endpoints: ['$ORIGIN'], outlier: {failures: 0}}
";

pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

pub(crate) async fn node(overlay: &Overlay, treatment: &str, origin: SocketAddr) -> Node {
    let draft = overlay.node("device").document(DOCUMENT).with("TREATMENT", treatment).with("ORIGIN", origin);
    draft.start().await.unwrap()
}

/// One request of a client that knows of nothing, and all that it gets; `Err` where that is cut off.
pub(crate) async fn ask(node: &Node, head: &str, content: &str) -> (Head, io::Result<Vec<u8>>) {
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    let length = content.len();
    http1.send(format!("{head}\r\nhost: site\r\ncontent-length: {length}\r\n\r\n{content}")).await.unwrap();
    let head = http1.head().await.unwrap();
    let content = http1.body(&head).await.map(|content| content.data);
    (head, content)
}

pub(crate) async fn events(node: &Node, event: &str) -> f64 {
    let labels = format!("route=\"site\",event=\"{event}\"");
    node.metric("hermes_resume_requests_total", &labels).await.unwrap()
}

#[tokio::test]
async fn a_repeatedly_interrupted_download_is_complete_for_the_client() {
    for seed in 1..=3 {
        let content = Pattern::new(seed).bytes(LENGTH);
        let mut random = SmallRng::seed_from_u64(seed);
        let from = content.clone();
        let (origin, seen) = origin(move |number, head| {
            let reply = Reply::of(&from, "\"one\"", head).with("repr-digest", sha256(&from));
            let at = if number > 12 { usize::MAX } else { random.random_range(0..40_000) };
            reply.cut(at)
        });
        let overlay = overlay();
        let node = node(&overlay, "resume: {}", origin.address()).await;
        let (head, got) = ask(&node, "GET / HTTP/1.1", "").await;
        assert_eq!((head.status(), head.header("content-length")), (200, Some(LENGTH.to_string())));
        assert_eq!(got.unwrap(), content);
        assert!(seen.count() > 8, "{}", seen.count());
        // The first asks as the client did, and the others for what is missing of the same.
        assert_eq!(seen.fields("if-range")[0], None);
        assert!(seen.fields("if-range")[1..].iter().flatten().all(|tag| tag == "\"one\""));
        let starts: Vec<u64> = seen.fields("range").iter().flatten().map(|range| start(range)).collect();
        assert!(starts.is_sorted(), "{starts:?}");
        assert_eq!(events(&node, "resumed").await as usize, seen.count() - 1);
        let record = node.record(|record| record["path"] == "/").await;
        assert!(record["error"].is_null(), "{record}");
    }
}

fn start(range: &str) -> u64 {
    range.trim_start_matches("bytes=").split('-').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_node_waits_for_an_origin_that_starts_later() {
    let place = hermes_testkit::port::reserve("127.0.0.1");
    let overlay = overlay();
    // Longer than any session may make no progress.
    let node = node(&overlay, "resume: {}, timeout: {progress: 1s}", place).await;
    let labels = "route=\"site\",event=\"retried\"";
    let begin = async {
        node.metric_reaches("hermes_resume_requests_total", labels, 16.0).await;
        let listener = tokio::net::TcpListener::bind(place).await.unwrap();
        Origin::accepting(listener, |mut stream| async move {
            use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
            let mut head = Vec::new();
            while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                let Ok(1..) = stream.read_buf(&mut head).await else { return };
            }
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\nhere").await;
        })
        .unwrap()
    };
    // Nothing has been sent of an order either.
    let (get, post, _origin) =
        tokio::join!(ask(&node, "GET / HTTP/1.1", ""), ask(&node, "POST / HTTP/1.1", "an order"), begin);
    for (head, content) in [get, post] {
        assert_eq!((head.status(), content.unwrap()), (200, b"here".to_vec()));
    }
}

#[tokio::test]
async fn a_503_is_retried_if_the_method_allows_it() {
    let (origin, seen) = origin(|number, head| match (number, head.method()) {
        (0..2, _) | (_, "POST") => Reply::status(503).with("retry-after", 0),
        _ => Reply::of(b"now it can", "\"one\"", head),
    });
    let overlay = overlay();
    let node = node(&overlay, "resume: {}", origin.address()).await;
    let (head, content) = ask(&node, "GET / HTTP/1.1", "").await;
    assert_eq!((head.status(), content.unwrap(), seen.count()), (200, b"now it can".to_vec(), 3));
    let (head, _) = ask(&node, "POST / HTTP/1.1", "once").await;
    assert_eq!((head.status(), seen.count()), (503, 4), "an order is sent once");
    // Neither does its key help where the route does not say that the origin knows keys.
    let (head, _) = ask(&node, "POST / HTTP/1.1\r\nidempotency-key: \"k\"", "once").await;
    assert_eq!((head.status(), seen.count()), (503, 5));
}

#[tokio::test]
async fn an_order_with_a_key_is_sent_again_where_its_route_trusts_keys() {
    let bodies = Arc::<AtomicUsize>::default();
    let counted = bodies.clone();
    let origin = scripted::h1(move |mut http1| {
        let counted = counted.clone();
        async move {
            loop {
                let head = http1.head().await?;
                let whole = http1.body(&head).await?.data == b"an order";
                let number = counted.fetch_add(usize::from(whole), Ordering::SeqCst);
                let status = if number < 2 { "502 Bad Gateway" } else { "200 OK" };
                http1.send(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n")).await?;
            }
        }
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let node = node(&overlay, "resume: {}, idempotency-key: true", origin.address()).await;
    let (head, _) = ask(&node, "POST / HTTP/1.1", "an order").await;
    assert_eq!((head.status(), bodies.load(Ordering::SeqCst)), (502, 1), "without a key it goes once");
    let (head, _) = ask(&node, "POST / HTTP/1.1\r\nidempotency-key: \"k\"", "an order").await;
    assert_eq!((head.status(), bodies.load(Ordering::SeqCst)), (200, 3));
}

#[tokio::test]
async fn parts_of_two_are_never_put_together() {
    let (old, new) = (Pattern::new(1).bytes(LENGTH), Pattern::new(2).bytes(LENGTH));
    let before = old.clone();
    let (origin, _) = origin(move |number, head| match number {
        0 => Reply::of(&old, "\"old\"", head).cut(100_000),
        _ => Reply::of(&new, "\"new\"", head),
    });
    let overlay = overlay();
    let node = node(&overlay, "resume: {}", origin.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    http1.send("GET /one HTTP/1.1\r\nhost: site\r\n\r\n").await.unwrap();
    http1.head().await.unwrap();
    let got = http1.to_end().await.unwrap();
    assert_eq!(got, before[..100_000]);
    let record = node.record(|record| record["path"] == "/one").await;
    assert!(
        record["reason"].as_str().unwrap().contains("the content changed at the origin meanwhile (200"),
        "{record}"
    );
}

#[tokio::test]
async fn a_body_with_a_wrong_digest_is_never_complete() {
    let content = Pattern::new(3).bytes(LENGTH);
    let (origin, _) = origin(move |number, head| {
        let reply = Reply::of(&content, "\"one\"", head).with("repr-digest", sha256(b"something else"));
        if number == 0 { reply.cut(100_000) } else { reply }
    });
    let overlay = overlay();
    let node = node(&overlay, "resume: {}", origin.address()).await;
    let (head, got) = ask(&node, "GET /one HTTP/1.1", "").await;
    assert_eq!(head.status(), 200);
    assert!(got.is_err(), "{} bytes", got.unwrap().len());
    let record = node.record(|record| record["path"] == "/one").await;
    assert!(record["reason"].as_str().unwrap().contains("does not match its digest"), "{record}");
}

#[tokio::test]
async fn a_resumed_download_without_progress_times_out() {
    let (origin, seen) = origin(|number, head| match (number, head.target()) {
        (_, "/never") => Reply::status(503),
        (1.., "/half") if head.header("range").is_some() => Reply::status(503),
        _ => Reply::of(b"only some of it", "\"one\"", head).cut(4),
    });
    let overlay = overlay();
    let node = node(&overlay, "resume: {deadline: 1s}", origin.address()).await;
    let (head, _) = ask(&node, "GET /never HTTP/1.1", "").await;
    assert_eq!(head.status(), 503, "the last answer is the client's");
    assert!(seen.count() > 1);
    let (head, got) = ask(&node, "GET /half HTTP/1.1", "").await;
    assert_eq!(head.status(), 200);
    assert!(got.is_err());
    let record = node.record(|record| record["path"] == "/half").await;
    assert!(record["reason"].as_str().unwrap().contains("the request for the rest was answered with 503"), "{record}");
    assert_eq!(events(&node, "expired").await, 2.0);
}

#[tokio::test]
async fn an_origin_that_falls_silent_is_left() {
    let content = Pattern::new(4).bytes(LENGTH);
    let from = content.clone();
    let (origin, seen) = origin(move |number, head| match number {
        // Not a word; then some of it, and not a word more.
        0 | 2 => Reply::mute(),
        1 => Reply::of(&from, "\"one\"", head).stalling().cut(1000),
        3 => Reply::of(&from, "\"one\"", head).cut(0).stalling(),
        _ => Reply::of(&from, "\"one\"", head),
    });
    let overlay = overlay();
    let node = node(&overlay, "resume: {}, timeout: {progress: 1s}", origin.address()).await;
    let (head, got) = ask(&node, "GET / HTTP/1.1", "").await;
    assert_eq!((head.status(), seen.count()), (200, 5));
    assert_eq!(got.unwrap(), content);
}

#[tokio::test]
async fn a_range_request_is_resumed_as_a_range() {
    let content = Pattern::new(5).bytes(LENGTH);
    let from = content.clone();
    let (origin, seen) = origin(move |number, head| {
        let first = start(&head.header("range").unwrap()) as usize;
        let reply = Reply { content: from[first..200_000].to_vec(), ..Reply::status(206) };
        let reply = reply.with("etag", "\"one\"").with("content-range", format!("bytes {first}-199999/{LENGTH}"));
        if number < 2 { reply.cut(10_000) } else { reply }
    });
    let overlay = overlay();
    let node = node(&overlay, "resume: {}", origin.address()).await;
    let (head, got) = ask(&node, "GET / HTTP/1.1\r\nrange: bytes=100000-199999", "").await;
    assert_eq!((head.status(), seen.count()), (206, 3));
    assert_eq!(got.unwrap(), content[100_000..200_000]);
    let requests: Vec<_> = seen.fields("range").into_iter().flatten().collect();
    assert_eq!(requests, ["bytes=100000-199999", "bytes=110000-199999", "bytes=120000-199999"]);
}

/// Whoever answers with more than the rest is left there: it may bring it for long, or no more at all.
#[tokio::test]
async fn a_range_ends_at_its_last_byte_although_more_arrives() {
    let content = Pattern::new(12).bytes(LENGTH);
    // The whole, or a wider part: it stalls at the last byte that is wanted, or behind it.
    for (status, first, cut) in [(200, 0, 110), (200, 0, 5000), (206, 104, 6), (206, 100, 5000)] {
        let from = content.clone();
        let (origin, seen) = origin(move |number, _| {
            let (status, first, last) = if number == 0 { (206, 100, 109) } else { (status, first, LENGTH - 1) };
            let reply = Reply { content: from[first..=last].to_vec(), ..Reply::status(status) }.with("etag", "\"one\"");
            let reply = match status {
                206 => reply.with("content-range", format!("bytes {first}-{last}/{LENGTH}")),
                _ => reply,
            };
            if number == 0 { reply.cut(4) } else { reply.cut(cut).stalling() }
        });
        let overlay = overlay();
        let node = node(&overlay, "resume: {}", origin.address()).await;
        // HTTP/1.1 tells the end by the length alone.
        let mut client = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        let requests = http::Request::get("http://site/").header("range", "bytes=100-109").body(()).unwrap();
        let got = client.ask(requests, b"").await.unwrap();
        assert_eq!((got.status, &got.data[..]), (206, &content[100..110]));
        assert_eq!(seen.fields("range")[1..], [Some("bytes=104-109".to_owned())]);
    }
}

/// The way changes while a response is on it: it goes on over the new one.
#[tokio::test]
async fn a_resumed_download_follows_the_current_route() {
    let content = Pattern::new(6).bytes(LENGTH);
    let (from, also) = (content.clone(), content.clone());
    let (before, _) = origin(move |number, head| match number {
        0 => Reply::of(&from, "\"one\"", head).cut(50_000),
        _ => Reply::status(503),
    });
    let (after, seen) = origin(move |_, head| Reply::of(&also, "\"one\"", head));
    let overlay = overlay();
    let mut node = node(&overlay, "resume: {}", before.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    http1.send("GET / HTTP/1.1\r\nhost: site\r\n\r\n").await.unwrap();
    let head = http1.head().await.unwrap();
    node.metric_reaches("hermes_resume_requests_total", "route=\"site\",event=\"resumed\"", 1.0).await;
    let values = [("TREATMENT", "resume: {}".to_owned()), ("ORIGIN", after.address().to_string())];
    node.reload(DOCUMENT, &values).await.unwrap();
    assert_eq!(http1.body(&head).await.unwrap().data, content);
    assert_eq!(start(&seen.fields("range")[0].clone().unwrap()), 50_000);
}

/// Who waits for an origin that cannot be reached goes where the document leads once somebody has changed it.
#[tokio::test]
async fn a_waiting_request_follows_a_changed_route() {
    let nobody = hermes_testkit::port::reserve("127.0.0.1");
    let (there, seen) = origin(|_, head| Reply::of(b"it is here now", "\"one\"", head));
    let overlay = overlay();
    let mut node = node(&overlay, "resume: {}", nobody).await;
    let http1 = async || {
        let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
        http1.send("POST / HTTP/1.1\r\nhost: site\r\ncontent-length: 5\r\n\r\norder").await.unwrap();
        http1
    };
    let mut http1 = http1().await;
    node.metric_reaches("hermes_resume_requests_total", "route=\"site\",event=\"retried\"", 2.0).await;
    // By another route, another upstream, and with another head.
    let elsewhere = DOCUMENT
        .replace("{name: site, upstream: origin,", "{name: other, upstream: new, rewrite: {set-headers: {x-by: new}},")
        .replace("name: origin,", "name: new,");
    let values = [("TREATMENT", "resume: {}".to_owned()), ("ORIGIN", there.address().to_string())];
    node.reload(&elsewhere, &values).await.unwrap();
    let head = http1.head().await.unwrap();
    let content = http1.body(&head).await.unwrap().data;
    assert_eq!((head.status(), content), (200, b"it is here now".to_vec()));
    assert_eq!(seen.fields("x-by"), [Some("new".to_owned())]);
    assert_eq!(seen.fields("content-length"), [Some("5".to_owned())]);
    let record = node.record(|record| record["path"] == "/").await;
    assert_eq!(record["route"], "other");
}

/// An origin that gives a little to each who asks is not asked for it all the time.
#[tokio::test]
async fn a_download_in_tiny_pieces_is_resumed_at_intervals() {
    let content = Pattern::new(8).bytes(10);
    let from = content.clone();
    let (origin, seen) = origin(move |_, head| Reply::of(&from, "\"one\"", head).cut(1));
    let overlay = overlay();
    let node = node(&overlay, "resume: {}", origin.address()).await;
    let began = std::time::Instant::now();
    assert_eq!(ask(&node, "GET / HTTP/1.1", "").await.1.unwrap(), content);
    assert_eq!(seen.count(), 10);
    // The second one at once, and the others 200 ms apart.
    assert!(began.elapsed() >= std::time::Duration::from_millis(1600), "{:?}", began.elapsed());
}

/// What was put together is kept as if it had come in one piece.
#[tokio::test]
async fn a_cache_stores_a_resumed_download() {
    let content = Pattern::new(7).bytes(LENGTH);
    let from = content.clone();
    let (origin, seen) = origin(move |number, head| {
        let reply = Reply::of(&from, "\"one\"", head).with("cache-control", "max-age=600");
        if number < 3 { reply.cut(70_000) } else { reply }
    });
    let overlay = overlay();
    let node = node(&overlay, "resume: {}, cache: {}", origin.address()).await;
    for _ in 0..2 {
        let (head, got) = ask(&node, "GET / HTTP/1.1", "").await;
        assert_eq!((head.status(), got.unwrap() == content), (200, true));
    }
    assert_eq!(seen.count(), 4);
}

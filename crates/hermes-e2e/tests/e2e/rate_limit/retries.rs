//! Which refused requests are repeated, and how long a client waits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use hermes_testkit::listener_client::ListenerClient;
use hermes_testkit::overlay::Node;
use hermes_testkit::poll;
use hermes_testkit::raw_http1::{Content, Head};

use crate::rate_limit::lab::{node, origin, overlay};

async fn ask(node: &Node, request: &str) -> (Head, Content) {
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    http1.send(request).await.unwrap();
    let head = http1.head().await.unwrap();
    let content = http1.body(&head).await.unwrap();
    (head, content)
}

fn request(method: &str, body: &str) -> String {
    format!("{method} /x HTTP/1.1\r\nhost: service\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn a_429_repeats_any_request_and_a_503_only_idempotent_ones() {
    for (status, method, times) in [("429", "POST", 3), ("503", "PUT", 3), ("503", "POST", 1)] {
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let recorded = bodies.clone();
        let origin = origin(move |number, _, content| {
            recorded.lock().unwrap().push(String::from_utf8_lossy(content).into_owned());
            match number {
                0 | 1 => (format!("{status} Later\r\nretry-after: 1"), "later".into()),
                _ => ("200 OK".into(), "done".into()),
            }
        });
        let overlay = overlay();
        let edge = node(&overlay, ", upstream-rate-limit: {}", origin.address()).await;
        let (head, content) = ask(&edge, &request(method, "the whole of it")).await;
        assert_eq!(*bodies.lock().unwrap(), vec!["the whole of it"; times], "{status} {method}");
        let wanted = if times == 3 { (200, "done") } else { (503, "later") };
        assert_eq!((head.status(), content.text().as_str()), wanted);
    }
}

#[tokio::test]
async fn a_retry_after_of_eleven_days_is_limited_by_the_deadline() {
    let requests = Arc::new(AtomicUsize::new(0));
    let counter = requests.clone();
    let origin = origin(move |_, _, _| {
        counter.fetch_add(1, Ordering::SeqCst);
        ("429 Too Many Requests\r\nretry-after: 999999\r\nx-why: quota".into(), "come next week".into())
    });
    let overlay = overlay();
    let edge = node(&overlay, ", upstream-rate-limit: {deadline: 700ms}", origin.address()).await;
    let (head, content) = ask(&edge, &request("GET", "")).await;
    assert_eq!((head.status(), content.text().as_str()), (429, "come next week"), "the last answer");
    assert_eq!(head.header("x-why").as_deref(), Some("quota"));
    // Who comes meanwhile is not sent at all.
    let (head, _) = ask(&edge, &request("GET", "")).await;
    assert_eq!((head.status(), requests.load(Ordering::SeqCst)), (503, 1));
    edge.record(|record| record.to_string().contains("upstream-rate-limit.deadline")).await;
    edge.metric_reaches("hermes_upstream_rate_limit_requests_total", "event=\"expired\"", 2.0).await;
}

#[tokio::test]
async fn a_full_queue_rejects_requests_and_departures_free_it() {
    let origin = origin(|_, _, _| ("429 Too Many Requests\r\nretry-after: 60".into(), "later".into()));
    let overlay = overlay();
    let edge =
        node(&overlay, ", upstream-rate-limit: {queue: 2, deadline: 1h}, timeout: {progress: 2s}", origin.address())
            .await;
    let mut waiting = Vec::new();
    for number in 1..=2 {
        let mut http1 = ListenerClient::plain(edge.address("in")).h1().await.unwrap();
        http1.send(request("GET", "")).await.unwrap();
        edge.metric_reaches("hermes_sessions_open", "", f64::from(number)).await;
        if number == 1 {
            edge.metric_reaches("hermes_upstream_rate_limit_requests_total", "event=\"queued\"", 1.0).await;
        }
        waiting.push(http1);
    }
    let (head, _) = ask(&edge, &request("GET", "")).await;
    assert_eq!(head.status(), 503);
    edge.record(|record| record.to_string().contains("upstream-rate-limit.queue")).await;
    assert!(edge.metric("hermes_limit_hits_total", "limit=\"upstream-rate-limit-queue\"").await.unwrap() >= 1.0);
    // A client that goes leaves no place taken: it may have closed its side alone, so not at once.
    waiting.pop();
    poll::until("a place is free", || async { edge.metric("hermes_sessions_open", "").await.unwrap() < 1.5 }).await;
    let mut http1 = ListenerClient::plain(edge.address("in")).h1().await.unwrap();
    http1.send(request("GET", "")).await.unwrap();
    edge.metric_reaches("hermes_sessions_open", "", 2.0).await;
    assert!(
        (edge.metric("hermes_limit_hits_total", "limit=\"upstream-rate-limit-queue\"").await.unwrap() - 1.0).abs()
            < 0.5
    );
}

//! Concurrent requests for the same resource.

use std::sync::Arc;

use hermes_testkit::overlay::{Node, Overlay};
use tokio::sync::Notify;

use crate::cache::lab::{Scripted, Step, begin, body, get, head, node, overlay, response};

/// An origin that stops amid its answer, after so many bytes of it, until it is released.
fn stopping_at(at: usize, whole: &[u8]) -> (Scripted, Arc<Notify>) {
    let released = Arc::new(Notify::new());
    let (hold, whole) = (released.clone(), whole.to_vec());
    let origin = Scripted::new(move |_, _| {
        let head = head(200, "cache-control: max-age=600", whole.len());
        let (first, rest) = whole.split_at(at);
        vec![Step::Send(head), Step::Send(first.to_vec()), Step::Await(hold.clone()), Step::Send(rest.to_vec())]
    });
    (origin, released)
}

/// A node whose first client has asked for `/x` and never gets an answer, while the origin has one for all others; and
/// what must stay for that.
async fn behind_one_that_is_slow(overlay: &Overlay) -> (Node, impl Sized) {
    let mut origin = Scripted::new(|_, number| match number {
        0 => vec![Step::Await(Arc::default())],
        _ => vec![Step::Send(response(200, "cache-control: max-age=600", b"second"))],
    });
    let node = node(overlay, "", origin.origin.address()).await;
    let first = begin(&node, "in", "GET", "/x", &[]).await.unwrap();
    origin.next().await;
    (node, (origin, first))
}

#[tokio::test]
async fn concurrent_requests_are_collapsed_into_one() {
    let whole = body(500_000);
    let (mut origin, released) = stopping_at(100_000, &whole);
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    let clients: Vec<_> = (0..30).map(|_| get(&node, "/x")).collect();
    let release = async {
        origin.next().await;
        // All but the first one read along.
        node.metric_reaches("hermes_cache_requests_total", "route=\"all\",outcome=\"collapsed\"", 29.0).await;
        released.notify_one();
    };
    let (all, ()) = tokio::join!(futures_join(clients), release);
    assert!(all.iter().all(|got| got.status() == 200 && got.data == whole));
    assert_eq!(all.iter().filter(|got| got.says().contains("; collapsed")).count(), 29);
    assert_eq!(origin.seen().len(), 0);
}

#[tokio::test]
async fn the_first_one_takes_nothing_along_when_it_leaves() {
    let whole = body(2_000_000);
    let (mut origin, released) = stopping_at(1000, &whole);
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    let mut leader = begin(&node, "in", "GET", "/x", &[]).await.unwrap();
    leader.head().await.unwrap();
    let follower = get(&node, "/x");
    let rest = async {
        node.metric_reaches("hermes_cache_requests_total", "route=\"all\",outcome=\"collapsed\"", 1.0).await;
        drop(leader);
        node.record(|record| record["error"].is_object() || record["error"].is_string()).await;
        released.notify_one();
    };
    let (got, ()) = tokio::join!(follower, rest);
    assert!(got.data == whole, "{:?}", got.head);
    origin.next().await;
    assert_eq!(origin.seen().len(), 0);
    assert!(get(&node, "/x").await.is_hit());
}

#[tokio::test]
async fn a_slow_first_request_blocks_followers_for_a_bounded_time() {
    let overlay = overlay();
    let (node, _slow) = behind_one_that_is_slow(&overlay).await;
    assert_eq!(get(&node, "/x").await.text(), "second");
}

/// What another one has asked for is too old for it, whatever comes of that.
#[tokio::test]
async fn a_no_cache_request_does_not_wait_for_another() {
    for field in ["cache-control: no-cache", "cache-control: max-age=0", "pragma: no-cache"] {
        let overlay = overlay();
        let (node, _slow) = behind_one_that_is_slow(&overlay).await;
        assert_eq!(crate::cache::lab::ask(&node, "GET", "/x", &[field]).await.text(), "second");
        assert!(node.metric("hermes_limit_hits_total", "limit=\"cache-wait\"").await.unwrap() < 0.5, "{field}");
    }
}

#[tokio::test]
async fn a_client_that_reads_nothing_delays_no_follower() {
    let whole = body(3_000_000);
    let sent = whole.clone();
    let mut origin = Scripted::new(move |_, _| vec![Step::Send(response(200, "cache-control: max-age=600", &sent))]);
    let overlay = overlay();
    let node = node(&overlay, "memory: 16MiB, disk: 0B", origin.origin.address()).await;
    let mut sleeper = begin(&node, "in", "GET", "/x", &[]).await.unwrap();
    sleeper.head().await.unwrap();
    assert!(get(&node, "/x").await.data == whole);
    assert_eq!(origin.seen().len(), 1);
    assert!(get(&node, "/x").await.is_hit());
}

#[tokio::test]
async fn an_oversized_response_without_a_length_passes_uncached() {
    let whole = body(3 << 20);
    let sent = whole.clone();
    let mut origin = Scripted::new(move |_, _| {
        let mut bytes =
            b"HTTP/1.1 200 Said\r\ntransfer-encoding: chunked\r\ncache-control: max-age=600\r\n\r\n".to_vec();
        for chunk in sent.chunks(50_000) {
            bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
            bytes.extend_from_slice(chunk);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(b"0\r\n\r\n");
        vec![Step::Send(bytes)]
    });
    let overlay = overlay();
    let node = node(&overlay, "memory: 4MiB, disk: 0B", origin.origin.address()).await;
    for _ in 0..2 {
        let got = get(&node, "/x").await;
        assert!(got.data == whole, "{:?} {}", got.head, got.data.len());
    }
    assert_eq!(origin.seen().len(), 2);
    node.metric_reaches("hermes_limit_hits_total", "limit=\"cache-object\"", 2.0).await;
}

async fn futures_join<T>(all: Vec<impl Future<Output = T>>) -> Vec<T> {
    let mut all: Vec<_> = all.into_iter().map(|one| (Box::pin(one), None)).collect();
    std::future::poll_fn(move |cx| {
        for (future, got) in all.iter_mut().filter(|(_, got)| got.is_none()) {
            if let std::task::Poll::Ready(value) = future.as_mut().poll(cx) {
                *got = Some(value);
            }
        }
        if all.iter().any(|(_, got)| got.is_none()) {
            return std::task::Poll::Pending;
        }
        std::task::Poll::Ready(all.iter_mut().filter_map(|(_, got)| got.take()).collect())
    })
    .await
}

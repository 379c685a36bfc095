//! The limits of resumption within a node, and the requests that it leaves alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hermes_testkit::listener_client::ListenerClient;
use hermes_testkit::origin::scripted;
use hermes_testkit::pattern::Pattern;
use hermes_testkit::poll::until;

use crate::fetch::lab::{Reply, origin};
use crate::fetch::node::{DOCUMENT, LENGTH, ask, events, node, overlay};

/// What came of a request with content may be of that content, which is not there any more: its rest is nobody's to ask
/// for, and its head must not go out without it.
#[tokio::test]
async fn requests_with_a_body_are_not_resumed() {
    let content = Pattern::new(9).bytes(LENGTH);
    let (origin, seen) = origin(move |_, head| Reply::of(&content, "\"one\"", head).cut(50_000));
    let overlay = overlay();
    let node = node(&overlay, "resume: {}", origin.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    http1.send("GET / HTTP/1.1\r\nhost: site\r\ncontent-length: 10\r\n\r\na question").await.unwrap();
    let got = match http1.head().await {
        Ok(head) => http1.body(&head).await.map(|content| content.data.len()),
        Err(error) => Err(error),
    };
    got.unwrap_err();
    assert_eq!((seen.count(), events(&node, "resumed").await as usize), (1, 0));
}

/// The rest of such a part would stand where its client, or another one on that connection, looks for the next response.
#[tokio::test]
async fn a_range_is_cut_at_its_declared_length() {
    let (origin, seen) = origin(|_, _| {
        let reply = Reply { content: b"short".to_vec(), ..Reply::status(206) };
        reply.with("etag", "\"one\"").with("content-range", "bytes 0-50/1000000")
    });
    let overlay = overlay();
    let node = node(&overlay, "resume: {}", origin.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    for requests in 1..3 {
        http1.send("GET / HTTP/1.1\r\nhost: site\r\nrange: bytes=0-\r\n\r\n").await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!((head.status(), http1.body(&head).await.unwrap().data), (206, b"short".to_vec()));
        assert_eq!(seen.count(), requests);
    }
}

/// An origin may give less than it is asked for, and not know how much there is.
#[tokio::test]
async fn ranges_of_an_unknown_length_are_requested_to_the_end() {
    let content = Pattern::new(10).bytes(104);
    let from = content.clone();
    let number = Arc::<AtomicUsize>::default();
    let origin = scripted::h1(move |mut http1| {
        let (from, number) = (from.clone(), number.fetch_add(1, Ordering::SeqCst));
        async move {
            http1.head().await?;
            let part = |first: usize, last: usize, of: &str| {
                let head =
                    format!("HTTP/1.1 206 Part\r\netag: \"one\"\r\ncontent-range: bytes {first}-{last}/{of}\r\n");
                let head = format!("{head}content-length: {}\r\n\r\n", last + 1 - first);
                [head.as_bytes(), &from[first..=last]].concat()
            };
            let whole = b"HTTP/1.1 200 OK\r\netag: \"one\"\r\ntransfer-encoding: chunked\r\n\r\n28\r\n";
            http1
                .send(match number {
                    0 => [whole, &from[..40], b"\r\n"].concat(),
                    1 => part(40, 59, "*"),
                    2 => part(60, 103, "*"),
                    _ => b"HTTP/1.1 416 Beyond\r\ncontent-range: bytes */104\r\ncontent-length: 0\r\n\r\n".to_vec(),
                })
                .await?;
            http1.finish().await
        }
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let node = node(&overlay, "resume: {}", origin.address()).await;
    let (head, got) = ask(&node, "GET / HTTP/1.1", "").await;
    assert_eq!((head.status(), got.unwrap()), (200, content));
}

/// It moves all the time, for longer than it may stand still.
#[tokio::test]
async fn a_long_upload_is_no_silence() {
    let (origin, seen) = origin(|_, head| Reply::of(b"thanks", "\"one\"", head));
    let overlay = overlay();
    let node = node(&overlay, "resume: {}, timeout: {progress: 3s}", origin.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    http1.send("PUT / HTTP/1.1\r\nhost: site\r\ncontent-length: 450000\r\n\r\n").await.unwrap();
    for _ in 0..45 {
        http1.send([7; 10_000]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let head = http1.head().await.unwrap();
    assert_eq!((head.status(), seen.count()), (200, 1));
}

#[tokio::test]
async fn a_client_that_stalls_its_request_is_not_waited_for() {
    let (origin, seen) = origin(|_, head| Reply::of(b"thanks", "\"one\"", head));
    let overlay = overlay();
    let node = node(&overlay, "resume: {}, timeout: {progress: 1s}", origin.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    http1.send("PUT / HTTP/1.1\r\nhost: site\r\ncontent-length: 300000\r\n\r\nonly this").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 408);
    assert_eq!((seen.count(), events(&node, "retried").await as usize), (0, 0));
}

/// And whose silence it was is known.
#[tokio::test]
async fn a_deadline_shorter_than_one_attempt_applies() {
    let (origin, seen) = origin(|_, _| Reply::mute());
    let overlay = overlay();
    let document = DOCUMENT.replace("failures: 0", "failures: 1");
    let draft = overlay.node("device").document(&document).with("TREATMENT", "resume: {deadline: 1s}");
    let node = draft.with("ORIGIN", origin.address()).start().await.unwrap();
    let (head, _) = ask(&node, "GET / HTTP/1.1", "").await;
    assert_eq!((head.status(), seen.count()), (504, 1));
    node.says("the endpoint failed several times in a row and rests").await;
}

#[tokio::test]
async fn no_more_wait_than_may() {
    let nobody = hermes_testkit::port::reserve("127.0.0.1");
    let overlay = overlay();
    let document = format!("{}limits: {{resume-pending: 1}}\n", DOCUMENT.replace("workers: 2", "workers: 1"));
    let draft = overlay.node("device").document(&document).with("TREATMENT", "resume: {}");
    let node = draft.with("ORIGIN", nobody).start().await.unwrap();
    let mut first = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    first.send("GET / HTTP/1.1\r\nhost: site\r\n\r\n").await.unwrap();
    node.metric_reaches("hermes_resume_requests_total", "route=\"site\",event=\"retried\"", 1.0).await;
    assert_eq!(ask(&node, "GET / HTTP/1.1", "").await.0.status(), 502);
    node.metric_reaches("hermes_limit_hits_total", "limit=\"resume-pending\"", 1.0).await;
    // Whoever leaves makes room.
    drop(first);
    let mut third = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    let waits = events(&node, "retried").await;
    third.send("GET / HTTP/1.1\r\nhost: site\r\n\r\n").await.unwrap();
    node.metric_reaches("hermes_resume_requests_total", "route=\"site\",event=\"retried\"", waits + 3.0).await;
}

/// Though what it sent is not read.
#[tokio::test]
async fn retries_end_when_the_client_disconnects() {
    let nobody = hermes_testkit::port::reserve("127.0.0.1");
    let overlay = overlay();
    let node = node(&overlay, "resume: {}", nobody).await;
    let another = "GET / HTTP/1.1\r\nhost: site\r\n\r\n".to_owned();
    let long = format!("PUT / HTTP/1.1\r\nhost: site\r\ncontent-length: 9999999\r\n\r\n{}", "a".repeat(20_000));
    for (number, behind) in [another, long].into_iter().enumerate() {
        let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
        http1.send(format!("GET / HTTP/1.1\r\nhost: site\r\n\r\n{behind}")).await.unwrap();
        let tries = events(&node, "retried").await + 2.0;
        node.metric_reaches("hermes_resume_requests_total", "route=\"site\",event=\"retried\"", tries).await;
        assert_eq!(node.metric("hermes_sessions_open", "").await.unwrap(), 1.0, "{number}");
        drop(http1);
        until("nobody waits", async || node.metric("hermes_sessions_open", "").await.unwrap() == 0.0).await;
    }
}

#[tokio::test]
async fn a_waiting_request_receives_the_answer_of_a_changed_document() {
    let answers = [("redirect: {location: 'https://elsewhere/'}", 308), ("respond: {status: 503, body: closed}", 503)];
    for (answer, status) in answers {
        let nobody = hermes_testkit::port::reserve("127.0.0.1");
        let overlay = overlay();
        let mut node = node(&overlay, "resume: {}", nobody).await;
        let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
        http1.send("GET / HTTP/1.1\r\nhost: site\r\n\r\n").await.unwrap();
        node.metric_reaches("hermes_resume_requests_total", "route=\"site\",event=\"retried\"", 1.0).await;
        let document = DOCUMENT.replace("upstream: origin, $TREATMENT", answer);
        node.reload(&document, &[("ORIGIN", nobody.to_string())]).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.status(), status, "{answer}");
    }
}

/// The origin says no before it has all of a request whose client is slow: what came of it is there for another try.
#[tokio::test]
async fn a_request_refused_during_its_body_is_repeated() {
    let whole = Arc::<AtomicBool>::default();
    let got = whole.clone();
    let origin = scripted::h1(move |mut http1| {
        let got = got.clone();
        async move {
            let head = http1.head().await?;
            if !got.swap(true, Ordering::SeqCst) {
                http1.send("HTTP/1.1 503 Busy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await?;
                return http1.finish().await;
            }
            let content = http1.body(&head).await?.data;
            http1.send(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", content.len())).await?;
            http1.send(content).await
        }
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let node = node(&overlay, "resume: {}", origin.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    http1.send("PUT / HTTP/1.1\r\nhost: site\r\ncontent-length: 10\r\n\r\nfirst").await.unwrap();
    node.metric_reaches("hermes_resume_requests_total", "route=\"site\",event=\"retried\"", 1.0).await;
    http1.send("other").await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!((head.status(), http1.body(&head).await.unwrap().data), (200, b"firstother".to_vec()));
}

/// The route that it comes by next does not say that its origin knows keys.
#[tokio::test]
async fn an_order_is_not_sent_again_by_a_route_that_does_not_say_that_it_may() {
    let (origin, seen) = origin(|_, _| Reply::status(503).with("retry-after", 5));
    let overlay = overlay();
    let mut node = node(&overlay, "resume: {}, idempotency-key: true", origin.address()).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    let order = "POST / HTTP/1.1\r\nhost: site\r\nidempotency-key: \"k\"\r\ncontent-length: 5\r\n\r\norder";
    http1.send(order).await.unwrap();
    node.metric_reaches("hermes_resume_requests_total", "route=\"site\",event=\"retried\"", 1.0).await;
    let values = [("TREATMENT", "resume: {}".to_owned()), ("ORIGIN", origin.address().to_string())];
    node.reload(DOCUMENT, &values).await.unwrap();
    let head = http1.head().await.unwrap();
    let output = String::from_utf8(http1.body(&head).await.unwrap().data).unwrap();
    assert!(head.status() == 503 && output.contains("now matches, and it does not permit a retry"), "{output}");
    assert_eq!(seen.count(), 1);
}

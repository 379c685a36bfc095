//! The connection between two nodes carries the sessions of all clients: no client and no origin ends it for the
//! others.
//!
//! In: clients that abort or send junk, and origins that respond with anything. Out: at most that session fails;
//! another client's tunnel lives, and the connection is not replaced.

use std::time::Duration;

use bytes::Bytes;
use hermes_testkit::{
    listener_client::ListenerClient,
    origin::{Origin, scripted},
    poll::until,
    raw_http1::RawHttp1,
};
use nix::sys::signal::Signal;
use tokio::task::JoinSet;

use crate::hostile::node_pair::Pair;

/// Answers all with this, head and all.
fn saying(answer: impl Into<Bytes>) -> Origin {
    let answer = answer.into();
    scripted::h1(move |mut http1| {
        let answer = answer.clone();
        async move {
            loop {
                http1.head().await?;
                http1.send(&answer).await?;
            }
        }
    })
    .unwrap()
}

/// Sends a request, and what it is told to wait for, from as many connections at once.
async fn together(
    pair: &Pair,
    count: usize,
    request: &'static str,
    waits: bool,
) -> Vec<RawHttp1<tokio::net::TcpStream>> {
    let mut clients = JoinSet::new();
    let to = pair.edge.address("in");
    for _ in 0..count {
        clients.spawn(async move {
            let mut http1 = RawHttp1::connect(to).await.unwrap();
            http1.send(request).await.unwrap();
            if waits {
                http1.head().await.unwrap();
            }
            http1
        });
    }
    clients.join_all().await
}

/// A little every few milliseconds, for ever.
fn trickling() -> Origin {
    scripted::h1(|mut http1| async move {
        http1.head().await?;
        http1.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
        loop {
            http1.send_chunk(&[7; 300]).await?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .unwrap()
}

#[tokio::test]
async fn aborted_downloads_end_no_other_tunnel() {
    let pair = Pair::before(trickling(), "h1", "").await;
    let mut tunnel = pair.bystander().await;
    for _ in 0..6 {
        let clients = together(&pair, 100, "GET / HTTP/1.1\r\nHost: ORIGIN\r\n\r\n", true).await;
        // Meanwhile much of it gets under way: it comes when its streams are reset.
        pair.edge.signal(Signal::SIGSTOP).unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        for client in clients {
            client.into_parts().0.set_zero_linger().unwrap();
        }
        pair.edge.signal(Signal::SIGCONT).unwrap();
        pair.assert_shared(&mut tunnel).await;
    }
}

#[tokio::test]
async fn rejected_uploads_end_no_other_tunnel() {
    // What is still sent when the answer is there comes for a stream that is none.
    let pair = Pair::before(saying(""), "h1", "error-resets: 20").await;
    let mut tunnel = pair.bystander().await;
    let body = Bytes::from(vec![7; 200_000]);
    for _ in 0..5 {
        let mut clients = JoinSet::new();
        for _ in 0..100 {
            let (to, body) = (pair.edge.address("in"), body.clone());
            clients.spawn(async move {
                let mut http1 = RawHttp1::connect(to).await.unwrap();
                http1.send("POST / HTTP/1.1\r\nHost: REFUSES\r\nContent-Length: 200000\r\n\r\n").await.unwrap();
                let _ = http1.send(&body).await;
            });
        }
        clients.join_all().await;
        pair.assert_shared(&mut tunnel).await;
    }
}

#[tokio::test]
async fn cancelled_requests_to_a_busy_node_end_no_other_tunnel() {
    let pair = Pair::before(saying(""), "h1", "").await;
    let mut tunnel = pair.bystander().await;
    // It sees each of these together with its end.
    pair.behind.signal(Signal::SIGSTOP).unwrap();
    let clients = together(&pair, 100, "GET / HTTP/1.1\r\nHost: ORIGIN\r\n\r\n", false).await;
    let open = async |is_some: bool| {
        until("the edge knows of it", || async {
            (pair.edge.metric("hermes_sessions_open", "").await.unwrap() > 1.0) == is_some
        })
        .await;
    };
    open(true).await;
    // Those that are open wait for the far node: they are under way when the last is.
    tokio::time::sleep(Duration::from_millis(100)).await;
    for client in clients {
        client.into_parts().0.set_zero_linger().unwrap();
    }
    open(false).await;
    pair.behind.signal(Signal::SIGCONT).unwrap();
    pair.assert_shared(&mut tunnel).await;
}

#[tokio::test]
async fn a_head_that_no_node_takes_is_its_origin_s_fault_alone() {
    // 64,000 bytes on the wire, and some more as HTTP/2 counts them.
    let lines: String = (0..90).map(|number| format!("x-{number:02}: {}\r\n", "y".repeat(700))).collect();
    let answer = format!("HTTP/1.1 200 OK\r\n{lines}content-length: 0\r\n\r\n");
    let pair = Pair::before(saying(answer), "h1", "").await;
    let mut tunnel = pair.bystander().await;
    for _ in 0..10 {
        let mut http1 = RawHttp1::connect(pair.edge.address("in")).await.unwrap();
        http1.send("GET / HTTP/1.1\r\nHost: ORIGIN\r\n\r\n").await.unwrap();
        let head = http1.head().await.unwrap();
        let output = head.header("proxy-status").unwrap_or_default();
        assert!(head.status() >= 502 && output.starts_with("behind;"), "{head:?}");
    }
    pair.assert_shared(&mut tunnel).await;
    pair.behind.says(" rests ").await;
    assert!(!pair.edge.log().contains(" rests "), "{}", pair.edge.log());
}

#[tokio::test]
async fn an_interim_response_with_a_length_is_passed_on_without_it() {
    let answer = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\nContent-Length: 0\r\n\r\n\
                  HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ngood";
    let pair = Pair::before(saying(answer), "h1", "").await;
    let mut tunnel = pair.bystander().await;
    let answer =
        ListenerClient::plain(pair.edge.address("in")).h2().await.unwrap().get("http://ORIGIN/").await.unwrap();
    assert_eq!((answer.status, answer.text().as_str()), (200, "good"));
    let [(103, hints)] = &answer.interim[..] else { panic!("{answer:?}") };
    assert!(hints.contains_key("link") && !hints.contains_key("content-length"), "{hints:?}");
    pair.assert_shared(&mut tunnel).await;
}

/// A head that HTTP/1.1 lets pass, and that HTTP/2 peers would refuse, or nobody could read the body of.
#[tokio::test]
async fn heads_of_origins_are_validated_before_they_are_forwarded() {
    for (head, body, status) in [
        ("200 OK\r\nContent-Length: 4, 4", "good", 200),
        ("204 No Content\r\nContent-Length: some", "", 204),
        ("304 Not Modified\r\nContent-Length: 1, 2", "", 304),
        ("200 OK\r\nTransfer-Encoding: gzip, chunked", "4\r\ngood\r\n0\r\n\r\n", 502),
    ] {
        let pair = Pair::before(saying(format!("HTTP/1.1 {head}\r\n\r\n{body}")), "h1", "").await;
        let mut tunnel = pair.bystander().await;
        let answer =
            ListenerClient::plain(pair.edge.address("in")).h2().await.unwrap().get("http://ORIGIN/").await.unwrap();
        assert_eq!(answer.status, status, "{head}: {answer:?}");
        assert!(status != 200 || answer.text() == "good", "{head}: {answer:?}");
        pair.assert_shared(&mut tunnel).await;
    }
}

#[tokio::test]
async fn responses_that_break_after_their_heads_are_not_blamed_on_the_next_node() {
    let answer = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n";
    let pair = Pair::before(saying(answer), "h1", "").await;
    let mut tunnel = pair.bystander().await;
    for _ in 0..10 {
        let mut http1 = RawHttp1::connect(pair.edge.address("in")).await.unwrap();
        http1.send("GET / HTTP/1.1\r\nHost: ORIGIN\r\nConnection: close\r\n\r\n").await.unwrap();
        let _ = http1.to_end().await;
    }
    pair.assert_shared(&mut tunnel).await;
    assert!(!pair.edge.log().contains(" rests "), "{}", pair.edge.log());
}

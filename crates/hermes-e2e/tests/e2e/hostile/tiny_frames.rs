//! Single bytes in chunks and frames: the sender pays for the work that each one causes, and no other session does.
//!
//! In: single-byte chunks and frames by the hundred thousand, and responses that never end. Out: the shared connection
//! stays open, the node's memory stays bounded, and other clients are served meanwhile.

use std::{io, time::Duration};

use bytes::Bytes;
use hermes_testkit::{
    frames::{Frame, Frames, INITIAL_WINDOW_SIZE, kind},
    origin::{Origin, scripted},
    overlay::{EFFECT_TIMEOUT, Node},
    raw_http1::RawHttp1,
};
use tokio::task::JoinSet;

use crate::hostile::lab::overlay;
use crate::hostile::node_pair::Pair;

/// A chunk of one byte, many times.
const CRUMBS: usize = 10_000;
/// What a node may grow by.
const GROWTH: u64 = 64 << 20;

fn crumbs() -> Bytes {
    Bytes::from("1\r\nx\r\n".repeat(CRUMBS))
}

/// Speaks HTTP/2 and takes no byte of any body.
fn stalled() -> Origin {
    scripted::h1(|http1| async move {
        let mut frames = Frames::accept(http1, &[(INITIAL_WINDOW_SIZE, 0)]).await?;
        while frames.next().await.is_ok() {}
        Ok(())
    })
    .unwrap()
}

#[tokio::test]
async fn unread_single_bytes_do_not_end_the_connection_between_nodes() {
    let pair = Pair::before(stalled(), "h2", "").await;
    let mut tunnel = pair.bystander().await;
    for node in [&pair.edge, &pair.behind] {
        node.forget_peak().unwrap();
    }
    let before = [pair.edge.memory().unwrap(), pair.behind.memory().unwrap()];
    let mut http1 = RawHttp1::connect(pair.edge.address("in")).await.unwrap();
    http1.send("POST / HTTP/1.1\r\nHost: ORIGIN\r\nTransfer-Encoding: chunked\r\n\r\n").await.unwrap();
    // A million of them, unless it is made to wait.
    let crumbs = crumbs();
    for _ in 0..1_000_000 / CRUMBS {
        let sent = tokio::time::timeout(Duration::from_millis(500), http1.send(&crumbs)).await;
        if !matches!(sent, Ok(Ok(()))) {
            break;
        }
    }
    settled(&pair.edge, "received").await;
    pair.assert_shared(&mut tunnel).await;
    for (node, before) in [&pair.edge, &pair.behind].into_iter().zip(before) {
        let grown = node.peak_memory().unwrap().saturating_sub(before);
        assert!(grown < GROWTH, "{}: {} MiB", node.name(), grown >> 20);
    }
}

#[tokio::test]
async fn unread_frames_of_one_byte_do_not_end_their_connection() {
    let pair = Pair::before(stalled(), "h2", "").await;
    let mut frames = Frames::connect(pair.behind.address("in"), &[]).await.unwrap();
    let fields = [(":method", "POST"), (":scheme", "http"), (":authority", "ORIGIN"), (":path", "/")];
    frames.send(&[Frame::headers(1, false, &fields)]).await.unwrap();
    let crumb = Frame::new(kind::DATA, 0, 1, "x").bytes().repeat(CRUMBS);
    // More than h2 keeps unread for a connection of this window: half of 16 MiB, at 255 bytes each.
    for _ in 0..20 {
        frames.send_bytes(&crumb).await.unwrap();
        frames.ping().await.unwrap();
        // More than a tick of the worker, which moves what lies unread out of h2; the tick is announced nowhere.
        tokio::time::sleep(Duration::from_millis(120)).await;
    }
    let fields = [(":method", "CONNECT"), (":authority", "ECHO:7")];
    frames.send(&[Frame::headers(3, false, &fields), Frame::new(kind::DATA, 0, 3, "hello")]).await.unwrap();
    let echoed = frames.until("an echo", |frame| frame.stream == 3 && frame.kind == kind::DATA).await.unwrap();
    assert_eq!(echoed.payload, "hello");
}

/// Sends chunks of one byte for as long as they are taken; or only ever begins to answer.
fn crumbling() -> Origin {
    scripted::h1(|mut http1| async move {
        let target = http1.head().await?.target().to_owned();
        let chunk = if target == "/hints" {
            Bytes::from("HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n".repeat(1000))
        } else {
            http1.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
            crumbs()
        };
        loop {
            http1.send(&chunk).await?;
        }
    })
    .unwrap()
}

const FORT: &str = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: here, match: {authority: HERE}, respond: {body: here}}
- {name: crumbs, upstream: crumbs}
upstreams:
- {name: crumbs, protocol: h1, endpoints: ['$ORIGIN']}
";

/// Bytes of all sessions that are under way: `sent` or `received`.
async fn moved(node: &Node, field: &str) -> f64 {
    let (_, sessions) = node.ask("/sessions").await.unwrap();
    let sessions: Vec<serde_json::Value> = serde_json::from_str(&sessions).unwrap();
    sessions.iter().filter_map(|session| session[field].as_f64()).sum()
}

/// Waits until nothing more moves, or long enough to see that it does not end.
async fn settled(node: &Node, field: &str) {
    let mut now = 0.0;
    for _ in 0..16 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let before = std::mem::replace(&mut now, moved(node, field).await);
        if before == now && now > 0.0 {
            return;
        }
    }
}

/// Twenty requests, one after the other.
async fn is_served(node: &Node) {
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    for _ in 0..20 {
        http1.send("GET / HTTP/1.1\r\nHost: HERE\r\n\r\n").await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(http1.body(&head).await.unwrap().text(), "here");
    }
}

#[tokio::test]
async fn unread_single_byte_responses_hold_bounded_memory() {
    let (overlay, origin) = (overlay(), crumbling());
    let node = overlay.node("fort").document(FORT).with("ORIGIN", origin.address()).start().await.unwrap();
    let before = node.memory().unwrap();
    // The window is as wide as can be, and nobody reads the socket.
    let mut frames = Frames::connect(node.address("in"), &[(INITIAL_WINDOW_SIZE, u32::MAX >> 1)]).await.unwrap();
    let wide = Frame::new(kind::WINDOW_UPDATE, 0, 0, (u32::MAX >> 2).to_be_bytes().to_vec());
    let gets: Vec<Frame> = (0..10).map(|number| Frame::get(2 * number + 1, "CRUMBS", "/")).collect();
    frames.send(&[&[wide][..], &gets].concat()).await.unwrap();
    settled(&node, "sent").await;
    let grown = node.peak_memory().unwrap().saturating_sub(before);
    assert!(grown < GROWTH, "{} MiB", grown >> 20);
    is_served(&node).await;
}

#[tokio::test]
async fn answers_in_single_bytes_leave_others_their_turn() {
    let (overlay, origin) = (overlay(), crumbling());
    let node = overlay.node("fort").document(FORT).with("ORIGIN", origin.address()).start().await.unwrap();
    let to = node.address("in");
    let mut reading = JoinSet::new();
    for path in ["/", "/hints"] {
        reading.spawn(async move {
            let mut h1 = RawHttp1::connect(to).await?;
            h1.send(format!("GET {path} HTTP/1.1\r\nHost: CRUMBS\r\n\r\n")).await?;
            while h1.some().await?.is_some() {}
            io::Result::Ok(())
        });
        reading.spawn(async move {
            let mut h2 = Frames::connect(to, &[(INITIAL_WINDOW_SIZE, u32::MAX >> 1)]).await?;
            let wide = Frame::new(kind::WINDOW_UPDATE, 0, 0, (u32::MAX >> 2).to_be_bytes().to_vec());
            h2.send(&[wide, Frame::get(1, "CRUMBS", path)]).await?;
            while h2.next().await.is_ok() {}
            Ok(())
        });
    }
    let served = async {
        while moved(&node, "sent").await == 0.0 {}
        is_served(&node).await;
    };
    // Twenty turns beside four floods, on a machine that may be busy with other tests.
    tokio::time::timeout(3 * EFFECT_TIMEOUT, served).await.expect("nobody else was served");
}

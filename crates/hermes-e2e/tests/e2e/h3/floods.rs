//! Too much of what HTTP/3 has: whoever floods is told H3_EXCESSIVE_LOAD, or is made to wait; the node holds no more
//! than before, and serves the others.

use bytes::Bytes;
use hermes_testkit::h3::{
    Abort, abort_of,
    wire::{self, code},
};

use crate::h3::lab::NodeFixture;

/// What a node of one worker may grow by, whatever is sent to it: some buffers, not what was sent.
const GROWTH: u64 = 32 << 20;

fn post() -> Bytes {
    wire::headers(&[(":method", "POST"), (":scheme", "https"), (":authority", "WEB"), (":path", "/flood")])
}

#[tokio::test]
async fn requests_that_are_begun_only_to_be_broken_off_end_the_connection() {
    let fixture = NodeFixture::with("cancels: 50").await;
    let connection = fixture.connect().await;
    let mut begun = 0;
    let closed = loop {
        let (mut send, recv) = match connection.open().await {
            Ok(stream) => stream,
            Err(error) => break abort_of(&error),
        };
        begun += 1;
        assert!(begun < 5000, "it went on");
        if let Err(error) = send.bytes(post()).await {
            break abort_of(&error);
        }
        send.reset(code::REQUEST_CANCELLED);
        drop(recv);
    };
    assert_eq!(closed, Some(Abort::Connection(code::EXCESSIVE_LOAD)), "after {begun}");
    assert!(begun > 50, "{begun}");
    fixture.node.metric_reaches("hermes_limit_hits_total", "rapid-reset", 1.0).await;
    fixture.serves_on(&fixture.connect().await, "afterwards").await;
    fixture.node.quiet().await;
}

#[tokio::test]
async fn malformed_requests_without_end_end_the_connection() {
    let fixture = NodeFixture::with("error-resets: 20").await;
    let connection = fixture.connect().await;
    let mut answers = 0;
    let closed = loop {
        let requests = async {
            let (mut send, mut recv) = connection.open().await?;
            send.headers(&[(":method", "GET")]).await?;
            send.finish()?;
            recv.answer().await
        };
        answers += 1;
        assert!(answers < 1000, "it went on");
        match requests.await.map_err(|error| abort_of(&error)) {
            Err(Some(Abort::Stream(code::MESSAGE_ERROR))) => {}
            other => break other.err().flatten(),
        }
    };
    assert_eq!(closed, Some(Abort::Connection(code::EXCESSIVE_LOAD)), "after {answers}");
    fixture.serves_on(&fixture.connect().await, "afterwards").await;
}

/// Nothing but a connection's time would end them, and what was read of them no window counts.
#[tokio::test]
async fn heads_that_do_not_end_share_one_bound() {
    const STREAMS: usize = 16;
    let fixture = NodeFixture::with("anonymous-connection-window: 200KiB, header-timeout: 1m").await;
    let connection = fixture.connect().await;
    let mut refused = 0;
    let mut held = Vec::new();
    for _ in 0..STREAMS {
        let (mut send, mut recv) = connection.open().await.unwrap();
        let mut begun = wire::frame(wire::kind::HEADERS, &[0; 60_000]).to_vec();
        begun.truncate(50_000);
        // It may be told to stop in the midst of it.
        let _ = send.bytes(begun).await;
        let answer = tokio::time::timeout(std::time::Duration::from_millis(500), recv.answer()).await;
        match answer {
            Ok(answer) => {
                assert_eq!(answer.unwrap().status, 431);
                refused += 1;
            }
            Err(_none) => held.push((send, recv)),
        }
    }
    assert!((STREAMS - 5..STREAMS).contains(&refused), "{refused} of {STREAMS}");
    fixture.serves_on(&connection, "beside them").await;
    fixture.node.metric_reaches("hermes_limit_hits_total", "headers", refused as f64).await;
    // What goes makes room.
    held.iter_mut().for_each(|(send, _)| send.reset(code::REQUEST_CANCELLED));
    held.clear();
    let (mut send, mut recv) = connection.open().await.unwrap();
    let large = "x".repeat(60_000);
    send.headers(&[
        (":method", "GET"),
        (":scheme", "https"),
        (":authority", "HERE"),
        (":path", "/"),
        ("large", &large),
    ])
    .await
    .unwrap();
    send.finish().unwrap();
    assert_eq!(recv.answer().await.unwrap().status, 200);
}

#[tokio::test]
async fn a_request_that_is_broken_off_before_its_empty_body_is_not_malformed() {
    let fixture = NodeFixture::with("error-resets: 5").await;
    let connection = fixture.connect().await;
    for round in 0..20 {
        let (mut send, recv) = connection.open().await.unwrap();
        let empty =
            [(":method", "POST"), (":scheme", "https"), (":authority", "WEB"), (":path", "/"), ("content-length", "0")];
        send.headers(&empty).await.unwrap();
        send.reset(code::REQUEST_CANCELLED);
        drop(recv);
        fixture.serves_on(&connection, &format!("round {round}")).await;
    }
}

#[tokio::test]
async fn a_client_that_cancels_few_of_its_requests_is_kept() {
    let fixture = NodeFixture::with("cancels: 5").await;
    let connection = fixture.connect().await;
    for round in 0..30 {
        // Two are served for one that is broken off.
        for _ in 0..2 {
            fixture.serves_on(&connection, &format!("round {round}")).await;
        }
        let (mut send, _recv) = connection.open().await.unwrap();
        send.bytes(post()).await.unwrap();
        send.reset(code::REQUEST_CANCELLED);
    }
    fixture.serves_on(&connection, "at last").await;
}

#[tokio::test]
async fn endless_heads_hold_bounded_memory() {
    let fixture = NodeFixture::with("streams: 50, header-bytes: 64KiB").await;
    fixture.serves_on(&fixture.connect().await, "before").await;
    let before = fixture.node.memory().unwrap();
    let mut kept = Vec::new();
    for number in 0..4 {
        let connection = fixture.connect().await;
        for _ in 0..50 {
            let (mut send, recv) = connection.open().await.unwrap();
            // As much as may be, and never the last byte.
            let head = wire::frame(wire::kind::HEADERS, &vec![0; 64 << 10]);
            // Beyond what all heads share it is told to stop, perhaps before it is through.
            let _ = send.bytes(head.slice(..head.len() - 1)).await;
            kept.push((send, recv));
        }
        // What came before was taken: an answer on another connection tells.
        fixture.serves_on(&fixture.connect().await, &format!("beside {number}")).await;
    }
    let grown = fixture.node.memory().unwrap().saturating_sub(before);
    assert!(grown < GROWTH, "{grown} bytes");
}

#[tokio::test]
async fn unread_responses_are_bounded_by_flow_control() {
    let fixture = NodeFixture::new().await;
    fixture.serves_on(&fixture.connect().await, "before").await;
    fixture.node.forget_peak().unwrap();
    let before = fixture.node.memory().unwrap();
    let connection = fixture.connect().await;
    // An echo that is fed, and never heard.
    let mut kept = Vec::new();
    for _ in 0..20 {
        let (mut send, recv) = connection.open().await.unwrap();
        let chunk = Bytes::from(vec![7; 64 << 10]);
        let feeding = async {
            send.headers(&[(":method", "CONNECT"), (":authority", "ECHO:7")]).await.unwrap();
            for _ in 0..64 {
                send.data(chunk.clone()).await.unwrap();
            }
        };
        // Once its windows are full it is made to wait.
        let _ = tokio::time::timeout(std::time::Duration::from_millis(300), feeding).await;
        kept.push((send, recv));
    }
    let peak = fixture.node.peak_memory().unwrap().saturating_sub(before);
    assert!(peak < 3 * GROWTH, "{peak} bytes");
    fixture.serves_on(&fixture.connect().await, "beside").await;
}

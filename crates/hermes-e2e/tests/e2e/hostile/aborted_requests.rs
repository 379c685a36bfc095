//! Requests that clients abort are not blamed on the origin.

use std::io;

use hermes_testkit::{
    frames::{CANCEL, Frame, Frames},
    overlay::Node,
    raw_http1::RawHttp1,
};

use crate::hostile::lab::{BOTH, NodeFixture};

/// More than enough in a row to make an endpoint rest.
const MANY: u32 = 20;

/// Uploads over HTTP/1.1 and HTTP/2 that are begun and broken off.
async fn break_off(node: &Node, listener: &str) -> io::Result<()> {
    for number in 0..MANY {
        let mut http1 = RawHttp1::connect(node.address(listener)).await?;
        http1.send("POST /broken HTTP/1.1\r\nHost: WEB\r\nContent-Length: 1000\r\n\r\nhello").await?;
        if number % 2 == 0 {
            http1.finish().await?;
        }
        drop(http1);
    }
    let mut frames = Frames::connect(node.address(listener), &[]).await?;
    let fields = [(":method", "POST"), (":scheme", "http"), (":authority", "WEB"), (":path", "/broken")];
    for number in 0..MANY {
        let stream = 2 * number + 1;
        frames.send(&[Frame::headers(stream, false, &fields), Frame::new(0, 0, stream, "hello")]).await?;
        frames.ping().await?;
        frames.send(&[Frame::reset(stream, CANCEL)]).await?;
    }
    frames.ping().await
}

#[tokio::test]
async fn uploads_that_clients_break_off_do_not_make_an_origin_rest() {
    let mut fixture = NodeFixture::new().await;
    for listener in BOTH {
        break_off(&fixture.node, listener).await.unwrap();
        fixture.node.quiet().await;
        let seen = fixture.still_serves(listener).await;
        assert!(!seen.is_empty() && seen.iter().all(|seen| seen.body.is_none()), "{listener}: {seen:?}");
        let broken = |record: &serde_json::Value| record["listener"] == listener && record["path"] == "/broken";
        fixture.node.record(broken).await;
        for record in fixture.node.records().iter().filter(|record| broken(record)) {
            assert_eq!(record["error"], "http_request_error", "{listener}: {record}");
        }
    }
    let log = fixture.node.log();
    assert!(!log.contains("rests"), "{log}");
}

//! A follower of a collapsed request is unaffected by the session of the first client.

use std::sync::Arc;

use bytes::Bytes;
use hermes_testkit::{multiplex, origin::scripted};
use http::Response;
use tokio::sync::Notify;

use crate::cache::lab::{begin, body, overlay};

const DOCUMENT: &str = "
listeners:
- {name: alice, bind: '127.0.0.1:0', protocol: http, set-headers: {hermes-user: alice}}
- {name: bob, bind: '127.0.0.1:0', protocol: http, set-headers: {hermes-user: bob}}
routes:
- {name: all, $MATCH upstream: origin, cache: {memory: 4MiB, disk: 0B}}
upstreams:
- {name: origin, protocol: h2, overlay: false, endpoints: ['$ORIGIN']}
";

#[tokio::test]
async fn a_session_ended_by_a_reload_does_not_end_its_followers() {
    // More than sockets hold, and too large to be kept: who reads sets the pace.
    let whole = body(24 << 20);
    let (sent, released) = (Bytes::from(whole.clone()), Arc::new(Notify::new()));
    let hold = released.clone();
    let origin = scripted::h2(move |mut exchange| {
        let (sent, hold) = (sent.clone(), hold.clone());
        async move {
            let head = Response::builder().header("cache-control", "max-age=600").body(()).unwrap();
            let mut stream = exchange.respond.send_response(head, false).map_err(std::io::Error::other)?;
            let mut first = sent.clone();
            let rest = first.split_off(1000);
            multiplex::send_all(&mut stream, first, false).await?;
            hold.notified().await;
            multiplex::send_all(&mut stream, rest, true).await
        }
    })
    .unwrap();
    let overlay = overlay();
    let values = |match_: &str| [("MATCH", match_.to_owned()), ("ORIGIN", origin.address().to_string())];
    let mut draft = overlay.node("edge").document(DOCUMENT);
    for (name, value) in values("") {
        draft = draft.with(name, value);
    }
    let mut node = draft.start().await.unwrap();
    let mut alice = begin(&node, "alice", "GET", "/x", &[]).await.unwrap();
    alice.head().await.unwrap();
    let mut bob = begin(&node, "bob", "GET", "/x", &[]).await.unwrap();
    let head = bob.head().await.unwrap();
    node.metric_reaches("hermes_cache_requests_total", "outcome=\"collapsed\"", 1.0).await;
    released.notify_one();
    node.metric_reaches("hermes_limit_hits_total", "limit=\"cache-object\"", 1.0).await;
    node.reload(DOCUMENT, &values("match: {user: bob},")).await.unwrap();
    // Nobody reads. What a session that ended has unread goes with a turn of its worker's clock, which tells nobody.
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    let (his, _) = tokio::join!(bob.body(&head), alice.to_end());
    let data = his.unwrap().data;
    assert!(data == whole, "{} of {} bytes", data.len(), whole.len());
}

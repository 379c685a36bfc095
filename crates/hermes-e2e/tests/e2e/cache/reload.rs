//! What is kept where the document changes: it stays where its route means the same, and nowhere else.

use std::net::SocketAddr;
use std::sync::Arc;

use hermes_testkit::overlay::{Node, Overlay};
use tokio::sync::Notify;

use crate::cache::lab::{Scripted, Step, ask_at, begin, get, overlay, response};

const DOCUMENT: &str = "
state: '$STATE'
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
- {name: alice, bind: '127.0.0.1:0', protocol: http, set-headers: {hermes-user: alice}}
routes:
- {name: all, $ROUTE}
- {name: rest, $REST, match: {path: /rest}}
upstreams:
- {name: origin, protocol: h1, overlay: false, endpoints: ['$ORIGIN']}
- {name: other, protocol: h1, overlay: false, endpoints: ['$OTHER']}
";

/// Says who it is, and how often it has said so.
fn saying(name: &'static str) -> Scripted {
    Scripted::new(move |_, number| {
        let output = format!("{name} {number}");
        vec![Step::Send(response(200, "cache-control: max-age=600", output.as_bytes()))]
    })
}

struct Lab {
    node: Node,
    values: Vec<(&'static str, String)>,
}

impl Lab {
    async fn new(overlay: &Overlay, route: &str, origin: SocketAddr, other: SocketAddr) -> Self {
        let values = vec![
            ("STATE", overlay.dir().join("state").display().to_string()),
            ("ORIGIN", origin.to_string()),
            ("OTHER", other.to_string()),
        ];
        let mut draft = overlay.node("edge").document(DOCUMENT).with("ROUTE", route).with("REST", "upstream: other");
        for (name, value) in &values {
            draft = draft.with(name, value);
        }
        Self { node: draft.start().await.unwrap(), values }
    }

    async fn becomes(&mut self, route: &str, rest: &str) {
        let mut values = self.values.clone();
        values.extend([("ROUTE", route.to_owned()), ("REST", rest.to_owned())]);
        self.node.reload(DOCUMENT, &values).await.unwrap();
    }
}

#[tokio::test]
async fn a_route_that_means_something_else_begins_anew() {
    let (origin, other) = (saying("origin"), saying("other"));
    let overlay = overlay();
    let terminate = |to: SocketAddr| format!("terminate: {{http: '{to}'}}, cache: {{}}");
    let before = "upstream: origin, cache: {}".to_owned();
    let mut lab = Lab::new(&overlay, &before, origin.origin.address(), other.origin.address()).await;
    assert_eq!(get(&lab.node, "/x").await.text(), "origin 0");
    let mut requests = 0;
    for after in [
        "upstream: origin, rewrite: {set-headers: {x-tenant: b}}, cache: {}".to_owned(),
        "upstream: origin, rewrite: {set-headers: {x-tenant: c}}, cache: {}".to_owned(),
        "upstream: origin, match: {listener: [in, alice]}, cache: {}".to_owned(),
        "upstream: origin, match: {listener: in}, cache: {}".to_owned(),
    ] {
        lab.becomes(&after, "upstream: other").await;
        requests += 1;
        assert_eq!(get(&lab.node, "/x").await.text(), format!("origin {requests}"), "{after}");
        assert!(get(&lab.node, "/x").await.is_hit(), "{after}");
    }
    lab.becomes("upstream: other, cache: {}", "upstream: other").await;
    assert_eq!(get(&lab.node, "/x").await.text(), "other 0");
    for (to, expected) in [(&origin, format!("origin {}", requests + 1)), (&other, "other 1".to_owned())] {
        lab.becomes(&terminate(to.origin.address()), "upstream: other").await;
        assert_eq!(get(&lab.node, "/x").await.text(), expected);
        assert!(get(&lab.node, "/x").await.is_hit());
    }
}

#[tokio::test]
async fn an_equivalent_route_keeps_its_cache() {
    let (mut origin, other) = (saying("origin"), saying("other"));
    let overlay = overlay();
    let mut lab =
        Lab::new(&overlay, "upstream: origin, cache: {}", origin.origin.address(), other.origin.address()).await;
    get(&lab.node, "/x").await;
    for (after, rest) in [
        ("upstream: origin, cache: {}", "upstream: origin"),
        ("upstream: origin, cache: {}, rewrite: {response: {set-headers: {x-by: us}}}", "upstream: origin"),
        ("upstream: origin, cache: {}, timeout: {progress: 3s}", "upstream: origin"),
    ] {
        lab.becomes(after, rest).await;
        assert!(get(&lab.node, "/x").await.is_hit(), "{after}");
    }
    // With other bounds it begins anew in memory, and finds what is on disk: one cache at a time has that.
    lab.node.metric_reaches("hermes_cache_bytes", "route=\"all\",tier=\"disk\"", 1.0).await;
    for memory in ["1MiB", "2MiB", "3MiB"] {
        let after = format!("upstream: origin, cache: {{memory: {memory}}}");
        lab.becomes(&after, "upstream: origin").await;
        lab.node.says_times("loaded cached responses from disk", 1).await;
        lab.node.metric_reaches("hermes_cache_bytes", "route=\"all\",tier=\"disk\"", 1.0).await;
    }
    assert_eq!(origin.seen().len(), 1);
}

/// Who was let in before asked the origin before: its answer comes when another one holds already.
#[tokio::test]
async fn an_answer_of_before_is_none_of_now() {
    let released = Arc::new(Notify::new());
    let hold = released.clone();
    let mut origin = Scripted::new(move |_, _| {
        let answer = response(200, "cache-control: max-age=600", b"before");
        vec![Step::Await(hold.clone()), Step::Send(answer)]
    });
    let other = saying("other");
    let overlay = overlay();
    let mut lab =
        Lab::new(&overlay, "upstream: origin, cache: {}", origin.origin.address(), other.origin.address()).await;
    let mut slow = begin(&lab.node, "in", "GET", "/x", &[]).await.unwrap();
    origin.next().await;
    lab.becomes("upstream: other, cache: {}", "upstream: other").await;
    released.notify_one();
    let head = slow.head().await.unwrap();
    assert_eq!(slow.body(&head).await.unwrap().data, b"before");
    assert_eq!(get(&lab.node, "/x").await.text(), "other 0");
    assert_eq!(ask_at(&lab.node, "alice", "GET", "/x", &[]).await.text(), "other 0");
}

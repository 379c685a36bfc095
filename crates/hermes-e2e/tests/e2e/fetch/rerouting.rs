//! A retry that a changed document routes elsewhere: its response and the first route's cache stay apart.

use std::net::SocketAddr;

use hermes_testkit::listener_client::ListenerClient;
use hermes_testkit::origin::Origin;
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::pattern::Pattern;
use hermes_testkit::poll::until;
use hermes_testkit::raw_http1::Head;

use crate::fetch::lab::{Reply, Seen, origin};
use crate::fetch::node::{DOCUMENT, LENGTH, ask, node, overlay};

const TREATMENT: &str = "resume: {}, cache: {}";
const ALICE: &str = "GET /x HTTP/1.1\r\nhost: site\r\nx-who: alice\r\n\r\n";

async fn site(overlay: &Overlay, origin: SocketAddr) -> Node {
    node(overlay, TREATMENT, origin).await
}

/// From now on a route of her own is alice's, which does this; and everybody else's has its origin here.
async fn alice_goes_elsewhere(node: &mut Node, action: &str, origin: SocketAddr, hers: SocketAddr) {
    let route = format!("- {{name: alices, {action}, match: {{headers: {{x-who: alice}}}}}}\n- {{name: site,");
    let hers = format!("upstreams:\n- {{name: hers, protocol: h1, overlay: false, endpoints: ['{hers}']}}\n");
    let document = DOCUMENT.replace("- {name: site,", &route).replace("upstreams:\n", &hers);
    let values = [("TREATMENT", TREATMENT.to_owned()), ("ORIGIN", origin.to_string())];
    node.reload(&document, &values).await.unwrap();
}

async fn tries(node: &Node, event: &str, count: f64) {
    let labels = format!("route=\"site\",event=\"{event}\"");
    node.metric_reaches("hermes_resume_requests_total", &labels, count).await;
}

fn hit(head: &Head) -> bool {
    head.header("cache-status").is_some_and(|output| output.contains("; hit"))
}

#[tokio::test]
async fn a_response_of_another_route_reaches_only_its_client() {
    let document = "respond: {body: for alice, headers: {cache-control: max-age=600}}";
    for action in ["upstream: hers", "upstream: hers, cache: {}", document] {
        let nobody = hermes_testkit::port::reserve("127.0.0.1");
        let keeping = |content: &'static [u8]| {
            origin(move |_, head| Reply::of(content, "\"one\"", head).with("cache-control", "max-age=600"))
        };
        let ((all, seen), (hers, _)) = (keeping(b"for all"), keeping(b"for alice"));
        let overlay = overlay();
        let mut node = site(&overlay, nobody).await;
        let mut alice = ListenerClient::plain(node.address("in")).h1().await.unwrap();
        alice.send(ALICE).await.unwrap();
        tries(&node, "retried", 1.0).await;
        // He waits for what she has asked for.
        let mut bob = ListenerClient::plain(node.address("in")).h1().await.unwrap();
        bob.send("GET /x HTTP/1.1\r\nhost: site\r\n\r\n").await.unwrap();
        until("he waits", async || node.metric("hermes_sessions_open", "").await.unwrap() == 2.0).await;
        alice_goes_elsewhere(&mut node, action, all.address(), hers.address()).await;
        let head = alice.head().await.unwrap();
        assert_eq!(alice.body(&head).await.unwrap().data, b"for alice", "{action}");
        let head = bob.head().await.unwrap();
        assert_eq!(bob.body(&head).await.unwrap().data, b"for all", "{action}: {head:?}");
        let (head, got) = ask(&node, "GET /x HTTP/1.1", "").await;
        assert_eq!((hit(&head), got.unwrap(), seen.count()), (true, b"for all".to_vec(), 1), "{action}");
    }
}

/// An origin that has nothing for alice for now, and answers all others by what they hold, and want of it.
fn not_for_alice(content: &'static [u8], age: &'static str) -> (Origin, Seen) {
    origin(move |_, head| {
        if head.header("x-who").is_some() {
            return Reply::status(503);
        }
        let is_held = head.header("if-none-match").is_some();
        let reply = if is_held { Reply::status(304) } else { part(content, head) };
        reply.without("etag").with("etag", "\"one\"").with("cache-control", age)
    })
}

/// What was asked for by `bytes=FIRST-LAST`, or all.
fn part(content: &[u8], head: &Head) -> Reply {
    let Some(range) = head.header("range") else { return Reply::of(content, "\"one\"", head) };
    let (first, last) = range.trim_start_matches("bytes=").split_once('-').unwrap();
    let first: usize = first.parse().unwrap();
    let last = last.parse().unwrap_or(content.len() - 1);
    let range = format!("bytes {first}-{last}/{}", content.len());
    let reply = Reply { content: content[first..=last].to_vec(), ..Reply::status(206) };
    reply.with("etag", "\"one\"").with("content-range", range)
}

/// Her origin would say of its own what the first one's cache asks of that one's.
#[tokio::test]
async fn another_route_is_not_revalidated_with_the_first_routes_cache() {
    for (age, before) in [("max-age=0", ""), ("max-age=600", "\r\nrange: bytes=0-3")] {
        let (all, seen) = not_for_alice(b"for all of them", age);
        let (hers, hers_seen) = origin(|_, head| {
            let is_held = head.header("if-none-match").is_some();
            let reply = if is_held { Reply::status(304) } else { part(b"for alice alone", head) };
            reply.without("etag").with("etag", "\"one\"").with("cache-control", "max-age=600")
        });
        let overlay = overlay();
        let mut node = site(&overlay, all.address()).await;
        ask(&node, &format!("GET /x HTTP/1.1{before}"), "").await.1.unwrap();
        let mut alice = ListenerClient::plain(node.address("in")).h1().await.unwrap();
        alice.send(ALICE).await.unwrap();
        tries(&node, "retried", 1.0).await;
        let requests =
            |seen: &Seen, at: usize| (seen.fields("if-none-match")[at].clone(), seen.fields("range")[at].clone());
        assert_ne!(requests(&seen, 1), (None, None), "{age}: the first is asked by what is kept");
        alice_goes_elsewhere(&mut node, "upstream: hers", all.address(), hers.address()).await;
        let head = alice.head().await.unwrap();
        let got = String::from_utf8(alice.body(&head).await.unwrap().data).unwrap();
        assert_eq!((head.status(), &*got), (200, "for alice alone"), "{age}: {head:?}");
        assert_eq!(requests(&hers_seen, 0), (None, None));
        // And what is kept is what it was: neither newer nor more.
        let before = seen.count();
        let (head, got) = ask(&node, "GET /x HTTP/1.1", "").await;
        assert_eq!((head.status(), got.unwrap()), (200, b"for all of them".to_vec()));
        assert_eq!(seen.count(), before + 1, "{age}");
        assert_ne!(requests(&seen, before), (None, None), "{age}");
    }
}

/// By its tag the rest is of the same; for whom it is the first origin has not said.
#[tokio::test]
async fn a_response_completed_by_another_route_is_not_cached() {
    let content = Pattern::new(11).bytes(LENGTH);
    let (from, also) = (content.clone(), content.clone());
    let (all, seen) = origin(move |number, head| match (number, head.header("x-who")) {
        (1.., Some(_)) => Reply::status(503),
        (0, _) => Reply::of(&from, "\"one\"", head).with("cache-control", "max-age=600").cut(50_000),
        _ => Reply::of(&from, "\"one\"", head).with("cache-control", "max-age=600"),
    });
    let (hers, hers_seen) = origin(move |_, head| Reply::of(&also, "\"one\"", head));
    let overlay = overlay();
    let mut node = site(&overlay, all.address()).await;
    let mut alice = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    alice.send(ALICE).await.unwrap();
    let head = alice.head().await.unwrap();
    tries(&node, "resumed", 1.0).await;
    alice_goes_elsewhere(&mut node, "upstream: hers", all.address(), hers.address()).await;
    assert!(alice.body(&head).await.unwrap().data == content);
    assert_eq!(hers_seen.fields("range"), [Some("bytes=50000-".to_owned())]);
    let before = seen.count();
    let (head, got) = ask(&node, "GET /x HTTP/1.1", "").await;
    assert!(!hit(&head) && got.unwrap() == content, "{head:?}");
    assert_eq!((seen.count(), seen.fields("range")[before].clone()), (before + 1, None));
}

/// Where something stands in the first route's origin has less time, so that it can; it does not for another one.
#[tokio::test]
async fn a_stale_response_does_not_replace_another_routes_failure() {
    let (all, _) = not_for_alice(b"for all of them", "max-age=0");
    let (hers, _) = origin(|number, head| match number {
        0 => Reply::mute(),
        _ => Reply::of(b"for alice alone", "\"two\"", head),
    });
    let overlay = overlay();
    let mut node = node(&overlay, &format!("{TREATMENT}, timeout: {{progress: 6s}}"), all.address()).await;
    ask(&node, "GET /x HTTP/1.1", "").await.1.unwrap();
    let mut alice = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    alice.send(ALICE).await.unwrap();
    tries(&node, "retried", 1.0).await;
    alice_goes_elsewhere(&mut node, "upstream: hers, timeout: {progress: 6s}", all.address(), hers.address()).await;
    let head = alice.head().await.unwrap();
    assert_eq!((head.status(), alice.body(&head).await.unwrap().data), (200, b"for alice alone".to_vec()), "{head:?}");
}

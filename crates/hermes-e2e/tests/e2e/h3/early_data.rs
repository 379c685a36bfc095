//! 0-RTT: what a client says with its first packet may be somebody's replay (RFC 8470).
//!
//! The packets are a real client's, and what is sent again are the same bytes.

use std::time::{Duration, Instant};

use bytes::Bytes;
use hermes_testkit::overlay::EFFECT_TIMEOUT;
use hermes_testkit::{
    ca::Subject,
    h3::{
        Connection, Receiving,
        relay::{Direction, Relay},
        returning_client::ReturningClient,
    },
    listener_client::ListenerClient,
};
use http::Request;
use tokio::net::UdpSocket;

use crate::h3::lab::{NodeFixture, Seen};

const EARLY: &str = ", early-data: true";

/// A client before a node, and what stands between them.
struct Fixture {
    fixture: NodeFixture,
    relay: Relay,
    visitor: ReturningClient,
}

impl Fixture {
    /// The client has been here before.
    async fn start(client: &str, more: &str, subject: Option<&Subject>) -> Self {
        let fixture = NodeFixture::of("", client, more).await;
        let relay = Relay::before(fixture.node.address("door")).await.unwrap();
        let identity = subject.map(|subject| fixture.overlay.authority().issue(subject).unwrap());
        let listener =
            ListenerClient::tls(fixture.node.address("door"), fixture.overlay.authority().pem(), identity.as_ref());
        let visitor = ReturningClient::new(&listener, relay.address()).unwrap();
        let connection = visitor.connect().await.unwrap();
        fixture.serves_on(&connection, "the first time").await;
        relay.recorded();
        Self { fixture, relay, visitor }
    }

    /// A connection that speaks at once.
    async fn early(&self) -> (Connection, quinn_accepted::Accepted) {
        let (connection, accepted) = self.visitor.early().await.unwrap().expect("a ticket for early data");
        (connection, Box::pin(accepted))
    }

    /// What the origin saw up to this request of an honest client, which comes behind all that was sent.
    async fn seen_before(&mut self, target: &str) -> Vec<Seen> {
        let answer = self.fixture.connect().await.get(&format!("https://WEB{target}")).await.unwrap();
        assert_eq!(answer.status, 200);
        let mut seen = Vec::new();
        loop {
            let next = self.fixture.sees().await;
            if next.head.target() == target {
                return seen;
            }
            seen.push(next);
        }
    }

    /// Says again what was recorded until the node takes it for a connection: what it has of the true one, if that
    /// came through, it remembers for a while.
    async fn replay(&self) -> Vec<UdpSocket> {
        let taken = || async { self.fixture.node.metric("hermes_connections_total", "").await.unwrap() };
        let before = taken().await;
        let (mut recorded, mut sockets) = (Vec::new(), Vec::new());
        let deadline = Instant::now() + EFFECT_TIMEOUT;
        while taken().await == before {
            assert!(Instant::now() < deadline, "the node takes no notice");
            recorded.extend(self.relay.recorded());
            sockets.push(self.relay.replay(&recorded).await.unwrap());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        sockets
    }
}

mod quinn_accepted {
    pub(super) type Accepted = std::pin::Pin<Box<dyn Future<Output = bool> + Send>>;
}

/// Sends a request with its whole body; its answer is for later.
async fn send(connection: &Connection, method: &str, target: &str, body: &'static str) -> Receiving {
    let request = Request::builder().method(method).uri(format!("https://WEB{target}")).body(()).unwrap();
    let (mut send, recv) = connection.request(&request, body.is_empty()).await.unwrap();
    if !body.is_empty() {
        send.data(Bytes::from_static(body.as_bytes())).await.unwrap();
        send.finish().unwrap();
    }
    recv
}

fn targets(seen: &[Seen]) -> Vec<&str> {
    seen.iter().map(|seen| seen.head.target()).collect()
}

#[tokio::test]
async fn only_idempotent_requests_are_served_in_early_data() {
    let mut fixture = Fixture::start("none", EARLY, None).await;
    fixture.relay.direction(Direction::Up);
    let (connection, accepted) = fixture.early().await;
    let mut waiting = Vec::new();
    for (method, target, body) in
        [("POST", "/post", "hello"), ("PUT", "/put", ""), ("DELETE", "/delete", ""), ("GET", "/with-a-body", "hello")]
    {
        waiting.push(send(&connection, method, target, body).await);
    }
    let mut safe = Vec::new();
    for method in ["GET", "OPTIONS"] {
        safe.push(send(&connection, method, "/safe", "").await);
        let seen = fixture.fixture.sees().await;
        assert_eq!((seen.head.method(), seen.head.target()), (method, "/safe"), "before all that waits");
        assert_eq!(seen.head.header("early-data").as_deref(), Some("1"), "{:?}", seen.head);
    }
    assert_eq!(targets(&fixture.seen_before("/between").await), Vec::<&str>::new());
    fixture.relay.direction(Direction::Both);
    assert!(accepted.await, "the node took it");
    for mut recv in waiting.into_iter().chain(safe) {
        assert_eq!(recv.answer().await.unwrap().status, 200);
    }
    let seen = fixture.seen_before("/behind").await;
    let mut requests = targets(&seen);
    requests.sort_unstable();
    assert_eq!(requests, ["/delete", "/post", "/put", "/with-a-body"]);
    assert!(seen.iter().all(|seen| seen.head.header("early-data").is_none()), "{seen:?}");
}

#[tokio::test]
async fn a_route_and_an_origin_may_wait_for_the_end_of_the_handshake() {
    let mut fixture = Fixture::start("none", EARLY, None).await;
    fixture.relay.direction(Direction::Up);
    let (connection, accepted) = fixture.early().await;
    let mut requests = Vec::new();
    for target in ["/late", "/picky"] {
        requests.push(send(&connection, "GET", target, "").await);
    }
    let seen = fixture.fixture.sees().await;
    let early = |seen: &Seen| (seen.head.target().to_owned(), seen.head.header("early-data"));
    assert_eq!(early(&seen), ("/picky".to_owned(), Some("1".to_owned())));
    assert_eq!(targets(&fixture.seen_before("/between").await), Vec::<&str>::new());
    fixture.relay.direction(Direction::Both);
    assert!(accepted.await, "the node took it");
    for mut recv in requests {
        assert_eq!(recv.answer().await.unwrap().status, 200);
    }
    let mut seen: Vec<_> = fixture.seen_before("/behind").await.iter().map(early).collect();
    seen.sort_unstable();
    assert_eq!(seen, [("/late".to_owned(), None), ("/picky".to_owned(), None)]);
}

#[tokio::test]
async fn a_request_with_early_data_header_may_be_answered_425() {
    let mut fixture = NodeFixture::new().await;
    let connection = fixture.connect().await;
    for target in ["/late", "/picky"] {
        let request = Request::get(format!("https://WEB{target}")).header("early-data", "1").body(()).unwrap();
        assert_eq!(connection.ask(&request, b"").await.unwrap().status, 425, "{target}");
    }
    assert_eq!(fixture.sees().await.head.target(), "/picky", "the route let nothing through");
}

#[tokio::test]
async fn packets_that_are_sent_again_do_nothing_a_second_time() {
    let mut fixture = Fixture::start("none", EARLY, None).await;
    let (connection, accepted) = fixture.early().await;
    let mut post = send(&connection, "POST", "/post", "hello").await;
    let mut get = send(&connection, "GET", "/get", "").await;
    assert!(accepted.await);
    assert_eq!((post.answer().await.unwrap().status, get.answer().await.unwrap().status), (200, 200));
    connection.quic.close(0_u32.into(), b"");
    let _sockets = fixture.replay().await;
    let seen = fixture.seen_before("/behind").await;
    let mut requests = targets(&seen);
    requests.sort_unstable();
    assert_eq!(requests, ["/get", "/post"]);
}

#[tokio::test]
async fn early_data_without_a_handshake_has_only_safe_effects() {
    let mut fixture = Fixture::start("none", EARLY, None).await;
    // The attacker keeps them for himself.
    fixture.relay.direction(Direction::Nothing);
    let (connection, _accepted) = fixture.early().await;
    let _post = send(&connection, "POST", "/post", "hello").await;
    let _get = send(&connection, "GET", "/get", "").await;
    let _sockets = fixture.replay().await;
    let seen = fixture.fixture.sees().await;
    assert_eq!((seen.head.target(), seen.head.header("early-data").as_deref()), ("/get", Some("1")));
    let _again = fixture.relay.replay(&fixture.relay.recorded()).await.unwrap();
    assert_eq!(targets(&fixture.seen_before("/behind").await), Vec::<&str>::new());
}

#[tokio::test]
async fn early_data_is_offered_only_if_configured() {
    let fixture = Fixture::start("none", "", None).await;
    assert!(fixture.visitor.early().await.unwrap().is_none());
}

#[tokio::test]
async fn a_client_is_known_early_by_the_certificate_that_it_showed_before() {
    let alice = Subject::node("laptop").with_user("alice");
    let fixture = Fixture::start("required", EARLY, Some(&alice)).await;
    fixture.relay.direction(Direction::Up);
    let (connection, accepted) = fixture.early().await;
    let mut who = send(&connection, "GET", "/who", "").await;
    let record = fixture.fixture.node.record(|record| record["path"] == "/who").await;
    assert_eq!((&record["user"], &record["status"]), (&"alice".into(), &200.into()), "{record}");
    fixture.relay.direction(Direction::Both);
    assert!(accepted.await);
    assert_eq!(who.answer().await.unwrap().text(), "alice");
}

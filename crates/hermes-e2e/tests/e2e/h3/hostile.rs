//! Known attacks on HTTP/3 and QUIC: bombs of QPACK, frames and streams without end, datagrams for nobody.
//!
//! In: what costs a client little and might cost a node much. Out: the node holds what its limits say, ends whom they
//! say, and serves the others.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_testkit::{
    ca::Subject,
    h3::{
        Connection, Receiving, Sending,
        wire::{self, H3_DATAGRAM},
    },
    listener_client::ListenerClient,
    overlay::EFFECT_TIMEOUT,
    poll::until,
};

use crate::h3::lab::NodeFixture;

/// What a node of one worker may grow by, whatever is sent to it: some buffers, not what was sent.
const GROWTH: u64 = 32 << 20;
/// A type of frame, and of stream, that nobody knows (RFC 9114, 7.2.8).
const GREASE: u64 = 0x21;

struct Watched {
    fixture: NodeFixture,
    client: ListenerClient,
    before: u64,
}

impl Watched {
    async fn with(limits: &str) -> Self {
        Self::of(limits, "none").await
    }

    /// With such demands on clients.
    async fn of(limits: &str, client: &str) -> Self {
        let fixture = NodeFixture::of(limits, client, "").await;
        let identity = fixture.overlay.authority().issue(&Subject::node("near")).unwrap();
        let identity = (client == "required").then_some(&identity);
        let client = ListenerClient::tls(fixture.node.address("door"), fixture.overlay.authority().pem(), identity);
        fixture.serves_on(&client.h3().await.unwrap(), "before").await;
        let before = fixture.node.memory().unwrap();
        fixture.node.forget_peak().unwrap();
        Self { fixture, client, before }
    }

    /// Honest clients are served, and the node has not grown.
    async fn stands(&mut self, what: &str) {
        self.fixture.serves_on(&self.client.h3().await.unwrap(), what).await;
        let grown = self.fixture.node.peak_memory().unwrap().saturating_sub(self.before);
        assert!(grown < GROWTH, "{what}: {} MiB", grown >> 20);
        self.fixture.node.assert_sound();
    }
}

/// Lines of the static table, a byte each: 56 bytes of name and value come out (RFC 9204, appendix A, 56).
fn bomb(lines: usize) -> Bytes {
    let mut section = BytesMut::from(&wire::section(&wire::get("HERE", "/"))[..]);
    section.resize(section.len() + lines, 0xc0 | 56);
    wire::frame(wire::kind::HEADERS, &section)
}

#[tokio::test]
async fn sections_that_swell_are_refused_before_they_have_swollen() {
    let mut watched = Watched::with("error-resets: 2000").await;
    for _ in 0..4 {
        let connection = watched.fixture.connect().await;
        let mut streams = Vec::new();
        for _ in 0..100 {
            let (mut send, recv) = connection.open().await.unwrap();
            // The node may refuse the section, and stop reading, before all of it has come.
            if send.bytes(bomb(60_000)).await.is_ok() {
                let _ = send.finish();
            }
            streams.push(recv);
        }
        for mut recv in streams {
            assert_eq!(recv.answer().await.unwrap().status, 431);
        }
    }
    watched.stands("after bombs").await;
}

#[tokio::test]
async fn frames_of_the_future_without_end_are_no_request_and_end_as_idle() {
    let mut watched = Watched::with("keep-alive: 2s").await;
    let chunk = wire::frame(GREASE, &[0; 8000]);
    let mut connection = watched.fixture.connect().await;
    let mut control = connection.control.take().unwrap();
    let (mut request, _recv) = connection.open().await.unwrap();
    let talking = async {
        let on_control = async { while control.write_all(&chunk).await.is_ok() {} };
        let on_request = async { while request.bytes(chunk.clone()).await.is_ok() {} };
        tokio::join!(on_control, on_request);
    };
    tokio::time::timeout(EFFECT_TIMEOUT, talking).await.expect("it may talk on for ever");
    watched.stands("after frames of the future").await;
}

#[tokio::test]
async fn endless_unknown_streams_hold_no_memory() {
    let mut watched = Watched::with("").await;
    let connection = watched.fixture.connect().await;
    for _ in 0..5000 {
        let mut stream = connection.open_uni().await.unwrap();
        stream.write_all(&wire::integer(GREASE)).await.unwrap();
    }
    watched.fixture.serves_on(&connection, "the same client").await;
    // Those that say nothing, not even what they are, are as many as QUIC's limit lets be.
    let mut silent = Vec::new();
    let flood = async {
        loop {
            let mut stream = connection.quic.open_uni().await.unwrap();
            // A varint of two bytes, of which one comes.
            stream.write_all(&[0x40]).await.unwrap();
            silent.push(stream);
        }
    };
    let _: Result<(), _> = tokio::time::timeout(Duration::from_millis(500), flood).await;
    assert!(silent.len() < 8, "{}", silent.len());
    watched.stands("after streams of the future").await;
}

fn datagram(stream: u64, payload: &[u8]) -> Bytes {
    [&wire::integer(stream / 4)[..], payload].concat().into()
}

#[tokio::test]
async fn datagrams_for_unknown_streams_are_counted_and_dropped() {
    let mut watched = Watched::with("").await;
    let connection = Connection::connect(&watched.fixture.client(), &[(H3_DATAGRAM, 1)]).await.unwrap();
    for number in 0..20_000_u64 {
        // The last of all streams' numbers among them.
        let stream = if number % 2 == 0 { 4 * number } else { (1 << 62) - 4 * number };
        connection.quic.send_datagram_wait(datagram(stream, &[7; 1000])).await.unwrap();
    }
    watched.fixture.serves_on(&connection, "the same client").await;
    watched.fixture.node.metric_reaches("hermes_datagrams_dropped_total", "no-stream", 1000.0).await;
    watched.stands("after datagrams for nobody").await;
}

fn udp_to(path: &str) -> [(&str, &str); 6] {
    [
        (":method", "CONNECT"),
        (":protocol", "connect-udp"),
        (":scheme", "https"),
        (":authority", "x.test"),
        (":path", path),
        ("capsule-protocol", "?1"),
    ]
}

/// A flow to the origin that sends back what it is sent, open.
async fn open_flow(connection: &Connection) -> (Sending, Receiving) {
    let (mut send, mut recv) = connection.open().await.unwrap();
    send.headers(&udp_to("/.well-known/masque/udp/ECHO/7/")).await.unwrap();
    let (pseudo, _) = recv.head().await.unwrap();
    assert_eq!(pseudo, [(":status".to_owned(), "200".to_owned())]);
    (send, recv)
}

/// The next datagram that comes.
async fn received(connection: &Connection) -> Bytes {
    tokio::time::timeout(EFFECT_TIMEOUT, connection.quic.read_datagram()).await.expect("none comes").unwrap()
}

/// They are dropped, and what comes next is carried, though nothing else moves.
#[tokio::test]
async fn datagrams_of_unknown_contexts_delay_nothing() {
    let watched = Watched::with("").await;
    let connection = Connection::connect(&watched.fixture.client(), &[(H3_DATAGRAM, 1)]).await.unwrap();
    let _flow = open_flow(&connection).await;
    for round in 1..=3 {
        connection.quic.send_datagram_wait(datagram(0, &[2, 7])).await.unwrap();
        watched
            .fixture
            .node
            .metric_reaches("hermes_datagrams_dropped_total", "unknown-context", f64::from(round))
            .await;
        connection.quic.send_datagram_wait(datagram(0, b"\0hello")).await.unwrap();
        assert_eq!(received(&connection).await, datagram(0, b"\0hello"), "round {round}");
    }
}

/// A datagram without a context ends its flow; those before it are carried.
#[tokio::test]
async fn datagrams_before_a_malformed_one_are_forwarded() {
    let watched = Watched::with("").await;
    let connection = Connection::connect(&watched.fixture.client(), &[(H3_DATAGRAM, 1)]).await.unwrap();
    let (_send, mut recv) = open_flow(&connection).await;
    for payload in [&b"\0one"[..], b"\0two", b""] {
        connection.quic.send_datagram(datagram(0, payload)).unwrap();
    }
    let ended = tokio::time::timeout(EFFECT_TIMEOUT, recv.chunk()).await.expect("the flow stays open");
    assert!(!matches!(ended, Ok(Some(_))), "{ended:?}");
    let record = watched.fixture.node.record(|record| record["kind"] == "udp").await;
    assert_eq!(record["received"], 6, "{record}");
}

/// Who goes on behind it is broken off all the same. One alone might be dropped by a full queue.
#[tokio::test]
async fn a_malformed_datagram_among_many_ends_its_flow() {
    let watched = Watched::with("").await;
    let connection = Connection::connect(&watched.fixture.client(), &[(H3_DATAGRAM, 1)]).await.unwrap();
    let (_send, mut recv) = open_flow(&connection).await;
    let goes_on = async {
        for number in 0_u64.. {
            let payload: &[u8] = if number % 100 == 99 { b"" } else { b"\0good" };
            connection.quic.send_datagram_wait(datagram(0, payload)).await.unwrap();
        }
    };
    tokio::select! {
        () = goes_on => {}
        ended = tokio::time::timeout(EFFECT_TIMEOUT, recv.chunk()) => {
            assert!(!matches!(ended, Ok(Ok(Some(_)))), "{ended:?}");
            assert!(ended.is_ok(), "the flow stays open");
        }
    }
    watched.fixture.node.record(|record| record["kind"] == "udp").await;
}

/// Flows that never open.
async fn waiting_flows(watched: &Watched, connection: &Connection, count: usize) -> Vec<(Sending, Receiving)> {
    let mut flows = Vec::new();
    for _ in 0..count {
        let (mut send, recv) = connection.open().await.unwrap();
        send.headers(&udp_to("/.well-known/masque/udp/MUTE/7/")).await.unwrap();
        flows.push((send, recv));
    }
    until("all flows wait", || async {
        watched.fixture.node.metric("hermes_sessions_open", "").await.unwrap() >= count as f64
    })
    .await;
    flows
}

/// Of a peer that is known whole batches are received at once: one short datagram of each that is kept keeps no batch.
#[tokio::test]
async fn short_datagrams_of_a_peer_that_is_known_keep_nothing_but_themselves() {
    const CLIENTS: usize = 10;
    const BATCHES: usize = 900;
    let mut watched = Watched::of("", "required").await;
    let mut kept = Vec::new();
    for client in 0..CLIENTS {
        let connection = Connection::connect(&watched.client, &[(H3_DATAGRAM, 1)]).await.unwrap();
        // Others' flows are counted with it.
        let flow = waiting_flows(&watched, &connection, 1).await;
        until("the flow waits", || async {
            watched.fixture.node.metric("hermes_sessions_open", "").await.unwrap() > client as f64
        })
        .await;
        for _ in 0..BATCHES {
            connection.quic.send_datagram_wait(datagram(0, &[7])).await.unwrap();
            // What quinn sends at once, and nobody keeps.
            for _ in 0..10 {
                connection.quic.send_datagram_wait(datagram(400, &[7; 1100])).await.unwrap();
            }
        }
        kept.push((connection, flow));
    }
    watched.stands("with flows that wait").await;
}

#[tokio::test]
async fn datagrams_for_flows_that_never_open_share_one_bound() {
    const FLOWS: usize = 200;
    let mut watched = Watched::with("").await;
    let connection = Connection::connect(&watched.fixture.client(), &[(H3_DATAGRAM, 1)]).await.unwrap();
    let _flows = waiting_flows(&watched, &connection, FLOWS).await;
    // For each of them a quarter of what one alone may have.
    for _ in 0..250 {
        for flow in 0..FLOWS as u64 {
            connection.quic.send_datagram_wait(datagram(4 * flow, &[7; 1000])).await.unwrap();
        }
    }
    watched.fixture.node.metric_reaches("hermes_datagrams_dropped_total", "queue-full", 1000.0).await;
    watched.stands("with flows that wait").await;
    connection.quic.close(0_u32.into(), b"");
    watched.fixture.node.quiet().await;
}

#[tokio::test]
async fn a_client_that_moves_all_the_time_is_one_client() {
    let mut watched = Watched::with("").await;
    let connection = watched.fixture.connect().await;
    for number in 0..200 {
        connection.move_to(std::net::UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
        if number % 20 == 19 {
            watched.fixture.serves_on(&connection, &format!("after {number} moves")).await;
        }
    }
    assert!(watched.fixture.node.metric("hermes_connections_open", "").await.unwrap() <= 2.0);
    watched.stands("after moves").await;
}

//! Heads that cost the node a hundred times as much as their sender, and requests that only wait.
//!
//! In: a hundred connections at the default limits, each with as many requests as it may have, all of which wait: for a
//! window that stays shut, or for an origin that never answers. Out: the peak of the node's resident memory, from the
//! kernel, and a bystander who is served meanwhile.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use hermes_testkit::{
    ca::Subject,
    frames::{END_HEADERS, END_STREAM, Frame, Frames, INITIAL_WINDOW_SIZE, kind},
    listener_client::{ListenerClient, NODE_NAME},
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
    raw_http1::RawHttp1,
};
use tokio::{sync::watch, task::JoinSet};

use crate::hostile::lab::overlay;

const CONNECTIONS: usize = 100;
/// The bound of the node's resident memory.
const BOUND: u64 = 300 << 20;

const DOCUMENT: &str = "
workers: 2
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
- {name: tls, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
routes:
- {name: here, match: {authority: HERE}, respond: {body: here}}
- {name: mute, match: {authority: MUTE}, upstream: mute}
- {name: deaf, match: {authority: DEAF}, upstream: deaf}
upstreams:
- {name: mute, protocol: h1, endpoints: ['$MUTE']}
- {name: deaf, protocol: h2, overlay: false, endpoints: ['$DEAF']}
";

struct NodeFixture {
    node: Node,
    overlay: Overlay,
    _origins: [Origin; 2],
}

impl NodeFixture {
    async fn new() -> Self {
        let mute = scripted::h1(|mut http1| async move { http1.to_end().await.map(drop) }).unwrap();
        let deaf = scripted::h1(|http1| async move {
            let mut frames = Frames::accept(http1, &[(INITIAL_WINDOW_SIZE, 0)]).await?;
            while frames.next().await.is_ok() {}
            Ok(())
        });
        let origins = [mute, deaf.unwrap()];
        let overlay = overlay();
        let draft = overlay.node("fort").identity(&Subject::node("fort").with_dns(NODE_NAME)).unwrap();
        let draft = draft.document(DOCUMENT).with("MUTE", origins[0].address()).with("DEAF", origins[1].address());
        let node = draft.start().await.unwrap();
        Self { node, overlay, _origins: origins }
    }

    /// Attacks from a hundred connections. Each reports when the node has read all that it sent, and stays open;
    /// meanwhile a bystander has to be served.
    async fn withstands<F, T>(&self, what: &str, attack: impl Fn(usize) -> F)
    where
        F: Future<Output = T> + Send + 'static,
        T: Send + 'static,
    {
        let (stop, stopped) = watch::channel(false);
        let mut bystanders = JoinSet::new();
        bystanders.spawn(bystander(self.node.address("in"), stopped));
        let mut attacks = JoinSet::new();
        (0..CONNECTIONS).for_each(|number| drop(attacks.spawn(attack(number))));
        let open = attacks.join_all().await;
        stop.send_replace(true);
        let served = bystanders.join_next().await.unwrap().unwrap();
        let mut waits = served.unwrap_or_else(|error| panic!("{what}: a bystander: {error}"));
        waits.sort_unstable();
        let peak = self.node.peak_memory().unwrap();
        println!(
            "{what}: {} MiB; {} requests of a bystander, p50 {:?}, p99 {:?}, longest {:?}",
            peak >> 20,
            waits.len(),
            waits[waits.len() / 2],
            waits[waits.len() * 99 / 100],
            waits[waits.len() - 1]
        );
        assert!(peak < BOUND, "{what}: {} MiB", peak >> 20);
        drop(open);
    }
}

/// Sends requests on a connection of its own until it is stopped, and returns the response times.
async fn bystander(to: SocketAddr, stopped: watch::Receiver<bool>) -> io::Result<Vec<Duration>> {
    let mut waits = Vec::new();
    let mut http1 = RawHttp1::connect(to).await?;
    while waits.is_empty() || !*stopped.borrow() {
        let began = Instant::now();
        http1.send("GET / HTTP/1.1\r\nHost: HERE\r\n\r\n").await?;
        let head = http1.head().await?;
        assert_eq!((head.status(), http1.body(&head).await?.text()), (200, "here".to_owned()));
        waits.push(began.elapsed());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(waits)
}

/// `:method GET`, `:scheme http`, `:path /` of HPACK's static table, and the authority.
fn pseudo(authority: &str) -> Vec<u8> {
    [&[0x82, 0x86, 0x84, 0x01, u8::try_from(authority.len()).unwrap()], authority.as_bytes()].concat()
}

/// The same with `POST`.
fn pseudo_post(authority: &str) -> Vec<u8> {
    [&[0x83], &pseudo(authority)[1..]].concat()
}

/// `cookie: a` with indexing: entry 62 of the table from then on.
const CRUMB: [u8; 3] = [0x60, 1, b'a'];
/// The same for `x: a`.
const LINE: [u8; 5] = [0x40, 1, b'x', 1, b'a'];
/// The reference to entry 62.
const INDEXED_FIELD: u8 = 0xbe;

fn head(stream: usize, ends: bool, block: Vec<u8>) -> Vec<u8> {
    let flags = if ends { END_HEADERS | END_STREAM } else { END_HEADERS };
    Frame::new(kind::HEADERS, flags, 2 * u32::try_from(stream).unwrap() + 1, block).bytes()
}

/// Sends `said` on a connection whose windows stay closed. Returns once the node has read all of it.
async fn shut(to: SocketAddr, output: Vec<u8>) -> Option<Frames<tokio::net::TcpStream>> {
    let mut frames = Frames::connect(to, &[(INITIAL_WINDOW_SIZE, 0)]).await.ok()?;
    // A connection that the node closes has done its part.
    frames.send_bytes(output).await.ok()?;
    frames.ping().await.ok()?;
    Some(frames)
}

#[tokio::test]
async fn lines_that_cost_a_byte() {
    let fixture = NodeFixture::new().await;
    let to = fixture.node.address("in");
    // The cookie crumbs are joined into one line; the others are too many lines.
    for first in [&CRUMB[..], &LINE] {
        let output = (0..30).map(|stream| {
            let first = if stream == 0 { first } else { &[] };
            head(stream, true, [&pseudo("HERE"), first, &[INDEXED_FIELD; 1600]].concat())
        });
        let output: Vec<u8> = output.collect::<Vec<_>>().concat();
        fixture.withstands("lines of two bytes", |_| shut(to, output.clone())).await;
    }
}

#[tokio::test]
async fn heads_that_are_as_small_as_can_be() {
    let fixture = NodeFixture::new().await;
    let to = fixture.node.address("in");
    let output: Vec<u8> = (0..400).map(|stream| head(stream, true, pseudo("HERE"))).collect::<Vec<_>>().concat();
    fixture.withstands("small heads", |_| shut(to, output.clone())).await;
}

#[tokio::test]
async fn heads_that_wait_for_an_origin() {
    let fixture = NodeFixture::new().await;
    let to = fixture.node.address("in");
    // Sixty distinct lines, so that no buffer is shared.
    let lines = |stream: usize| {
        let line = |number: usize| {
            let name = format!("x-{number}");
            let value = format!("{stream:0>200}");
            let length =
                |text: &str| if text.len() < 127 { vec![text.len() as u8] } else { vec![127, text.len() as u8 - 127] };
            [&[0][..], &length(&name), name.as_bytes(), &length(&value), value.as_bytes()].concat()
        };
        (0..60).flat_map(line).collect::<Vec<u8>>()
    };
    let output = (0..40).map(|stream| head(stream, true, [pseudo("MUTE"), lines(stream)].concat()));
    let output: Vec<u8> = output.collect::<Vec<_>>().concat();
    fixture.withstands("heads that wait for an origin", |_| shut(to, output.clone())).await;
}

#[tokio::test]
async fn unread_trailers_hold_bounded_memory() {
    let fixture = NodeFixture::new().await;
    let to = fixture.node.address("in");
    let output = (0..30).flat_map(|stream| {
        let first = if stream == 0 { &CRUMB[..] } else { &[] };
        let data = Frame::new(kind::DATA, 0, 2 * stream + 1, "x").bytes();
        let stream = stream as usize;
        [head(stream, false, pseudo_post("DEAF")), data, head(stream, true, [first, &[INDEXED_FIELD; 1600]].concat())]
    });
    let output: Vec<u8> = output.collect::<Vec<_>>().concat();
    fixture.withstands("trailers", |_| shut(to, output.clone())).await;
}

#[tokio::test]
async fn small_heads_in_large_buffers_hold_bounded_memory() {
    let fixture = NodeFixture::new().await;
    let to = fixture.node.address("in");
    let line = [&[0, 1, b'x', 10][..], b"0123456789"].concat();
    let junk = Frame::new(0xee, 0, 0, vec![0; 8 << 10]).bytes();
    let output =
        (0..150).flat_map(|stream| [head(stream, true, [pseudo("HERE"), line.clone()].concat()), junk.clone()]);
    let output: Vec<u8> = output.collect::<Vec<_>>().concat();
    fixture.withstands("heads in large buffers", |_| shut(to, output.clone())).await;
}

#[tokio::test]
async fn unread_responses_hold_bounded_memory() {
    let fixture = NodeFixture::new().await;
    let to = fixture.node.address("in");
    let block = [&[0x02, 4], &b"HEAD"[..], &pseudo("HERE")[1..]].concat();
    let output: Vec<u8> = (0..4000).map(|stream| head(stream, true, block.clone())).collect::<Vec<_>>().concat();
    fixture
        .withstands("answers without a body", |_| {
            let output = output.clone();
            async move {
                let socket = tokio::net::TcpSocket::new_v4().ok()?;
                socket.set_recv_buffer_size(4096).ok()?;
                let mut frames = Frames::begin(socket.connect(to).await.ok()?, &[]).await.ok()?;
                let _ = tokio::time::timeout(Duration::from_secs(3), frames.send_bytes(output)).await;
                Some(frames)
            }
        })
        .await;
}

#[tokio::test]
async fn requests_in_a_row_with_long_heads() {
    let fixture = NodeFixture::new().await;
    let to = fixture.node.address("in");
    let lines: String = (0..90).map(|number| format!("x-{number}: {}\r\n", "y".repeat(600))).collect();
    let output = format!("GET / HTTP/1.1\r\nHost: MUTE\r\n{lines}\r\n").repeat(20);
    fixture
        .withstands("requests in a row", |_| {
            let output = output.clone();
            async move {
                let mut http1 = RawHttp1::connect(to).await.ok()?;
                let _ = tokio::time::timeout(Duration::from_secs(3), http1.send(output)).await;
                Some(http1)
            }
        })
        .await;
}

#[tokio::test]
async fn streams_of_http_3_that_wait() {
    let fixture = NodeFixture::new().await;
    let client = ListenerClient::tls(fixture.node.address("tls"), fixture.overlay.authority().pem(), None);
    let fields: Vec<(String, String)> = (0..80).map(|number| (format!("x-{number}"), "y".repeat(100))).collect();
    fixture
        .withstands("streams of HTTP/3", |number| {
            let (client, fields) = (client.clone(), fields.clone());
            async move {
                let connection = client.h3().await.ok()?;
                let mut lines = vec![(":method", "GET"), (":scheme", "https"), (":authority", "MUTE"), (":path", "/")];
                lines.extend(fields.iter().map(|(name, value)| (name.as_str(), value.as_str())));
                let whole = hermes_testkit::h3::wire::headers(&lines);
                let mut streams = Vec::new();
                for _ in 0..50 {
                    let opened = tokio::time::timeout(Duration::from_secs(3), connection.open()).await;
                    let Ok(Ok((mut send, recv))) = opened else { break };
                    // Half of the connections never complete a head.
                    let most = if number % 2 == 0 { whole.len() } else { whole.len() - 1 };
                    let sending = tokio::time::timeout(Duration::from_secs(3), send.bytes(whole.slice(..most))).await;
                    streams.push((send, recv));
                    if !matches!(sending, Ok(Ok(()))) {
                        break;
                    }
                }
                Some((connection, streams))
            }
        })
        .await;
}

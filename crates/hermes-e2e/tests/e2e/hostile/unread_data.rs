//! What lies unread: readers who are slow, gone or not there yet hold up nobody beside them, and what waits for them
//! is counted.
//!
//! In: uploads whose origin takes a little at a time, tunnels that never open, requests between two attempts. Out:
//! others' transfers on the same connection go on, the connection lives, and where too much lies there, those lose who
//! hold most of it.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use hermes_testkit::{
    frames::{Frame, Frames, INITIAL_WINDOW_SIZE, kind},
    multiplex::{self, Exchange, Multiplex},
    origin::{self, Origin, scripted},
    overlay::{Node, Overlay},
    raw_http1::Head,
};
use http::{Request, Response};
use tokio::net::{TcpSocket, TcpStream};

use crate::hostile::lab::overlay;

/// The window of an anonymous client's stream. Six are more than that of its connection.
const WINDOWFUL: usize = 256 << 10;
/// The largest frame that everybody takes.
const FULL: usize = 16 << 10;
/// Read one at a time: smaller ones are put together.
const CHUNK_SIZE: usize = 256;

const DOCUMENT: &str = "
workers: 1
limits: {receive-buffer: $UNREAD, header-count: 20}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: slow, match: {authority: SLOW}, upstream: slow, timeout: {progress: 10m}}
- {name: fast, match: {authority: FAST}, upstream: fast}
- {name: closes, match: {authority: CLOSES}, upstream: closes,
   retry: {on: [reset], attempts: 10, budget: 100%, backoff: {base: 1m, max: 10m}}}
- {name: echo, match: {kind: tcp, authority: 'ECHO:7'}, terminate: {tcp: '$ECHO'}}
- {name: sink, match: {kind: tcp, authority: 'SINK:7'}, terminate: {tcp: '$SINK'}}
- {name: mute, match: {kind: tcp}, upstream: mute, timeout: {connect: 1m}}
upstreams:
- {name: slow, protocol: h2, overlay: false, endpoints: ['$SLOW']}
- {name: fast, protocol: h2, overlay: false, endpoints: ['$FAST']}
- {name: closes, protocol: h1, endpoints: ['$CLOSES']}
- {name: mute, protocol: h1, endpoints: ['$MUTE']}
";

/// Takes little, and waits before it takes more: of each stream something in each tick of a node.
const SIP: u32 = 256;
const PAUSE: Duration = Duration::from_millis(12);
/// Time for several ticks of a worker. No event marks a tick; on a slow machine the test only shows less.
const STALLED: Duration = Duration::from_millis(200);

/// Counts what it takes.
fn slow(taken: &Arc<AtomicUsize>) -> Origin {
    let taken = taken.clone();
    let serve = move |http1| {
        let taken = taken.clone();
        async move {
            let mut frames = Frames::accept(http1, &[(INITIAL_WINDOW_SIZE, 0)]).await?;
            loop {
                let frame = frames.next().await?;
                if frame.kind == kind::DATA {
                    taken.fetch_add(frame.payload.len(), Ordering::Relaxed);
                    tokio::time::sleep(PAUSE).await;
                } else if frame.kind != kind::HEADERS {
                    continue;
                }
                let more = |stream| Frame::new(kind::WINDOW_UPDATE, 0, stream, SIP.to_be_bytes().to_vec());
                frames.send(&[more(0), more(frame.stream)]).await?;
            }
        }
    };
    scripted::h1(serve).unwrap()
}

fn fast() -> Origin {
    let serve = |mut exchange: Exchange| async move {
        let mut length = 0;
        while let Some(chunk) = multiplex::receive(exchange.request.body_mut()).await? {
            length += chunk.len();
        }
        exchange.answer(Response::new(()), length.to_string()).await
    };
    scripted::h2(serve).unwrap()
}

/// Reads a head, answers nothing, and closes or not.
fn silent(closes: bool) -> Origin {
    scripted::h1(move |mut http1| async move {
        let _: Head = http1.head().await?;
        if !closes {
            std::future::pending::<()>().await;
        }
        Ok(())
    })
    .unwrap()
}

/// Accepts, and takes nothing.
fn sink() -> Origin {
    scripted::h1(|http1| async move {
        std::future::pending::<()>().await;
        drop(http1);
        Ok(())
    })
    .unwrap()
}

struct Fixture {
    node: Node,
    /// Bytes that the slow origin took.
    taken: Arc<AtomicUsize>,
    _overlay: Overlay,
    _origins: [Origin; 6],
}

impl Fixture {
    async fn new() -> Self {
        Self::with("2MiB").await
    }

    /// With another bound of what may lie unread.
    async fn with(unread: &str) -> Self {
        let overlay = overlay();
        let echo = origin::stream::echo(origin::listen("127.0.0.1:0".parse().unwrap()).unwrap()).unwrap();
        let taken = Arc::default();
        let origins = [slow(&taken), fast(), silent(true), silent(false), echo, sink()];
        let names = ["SLOW", "FAST", "CLOSES", "MUTE", "ECHO", "SINK"];
        let draft = names
            .iter()
            .zip(&origins)
            .fold(overlay.node("fort").document(DOCUMENT).with("UNREAD", unread), |draft, (name, origin)| {
                draft.with(name, origin.address())
            });
        let node = draft.start().await.unwrap();
        Self { node, taken, _overlay: overlay, _origins: origins }
    }

    fn assert_grown_less_than(&self, before: u64, most: u64) {
        let grown = self.node.memory().unwrap().saturating_sub(before);
        assert!(grown < most, "{} MiB", grown >> 20);
    }

    /// A client's connection, from an address of its own.
    async fn client(&self, from: &str) -> Multiplex {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::new(from.parse().unwrap(), 0)).unwrap();
        Multiplex::over(socket.connect(self.node.address("in")).await.unwrap()).await.unwrap()
    }
}

fn post(host: &str) -> Request<()> {
    Request::post(format!("http://{host}/")).version(http::Version::HTTP_2).body(()).unwrap()
}

/// Fills its window, or sends until it is made to wait.
async fn pour(stream: &mut h2::SendStream<Bytes>) {
    let chunk = Bytes::from_static(&[7; CHUNK_SIZE]);
    for _ in (0..WINDOWFUL).step_by(CHUNK_SIZE) {
        let sending = multiplex::send_all(stream, chunk.clone(), false);
        if !matches!(tokio::time::timeout(STALLED, sending).await, Ok(Ok(()))) {
            return;
        }
    }
}

#[tokio::test]
async fn slow_readers_delay_no_other_session() {
    let fixture = Fixture::new().await;
    let mut client = fixture.client("127.0.0.1").await;
    let mut slow = Vec::new();
    for _ in 0..6 {
        let (answer, mut stream) = client.open(post("SLOW"), false).await.unwrap();
        pour(&mut stream).await;
        slow.push((answer, stream));
    }
    let body = vec![7; 64 << 20];
    let answer = client.ask(post("FAST"), &body).await.unwrap();
    assert_eq!((answer.status, answer.text()), (200, body.len().to_string()));
    // Without help two windows of streams are taken before there is room for it in that of the connection.
    let taken = fixture.taken.load(Ordering::Relaxed);
    assert!(taken < WINDOWFUL, "it waited until the slow ones had taken {taken} bytes");
}

#[tokio::test]
async fn pending_tunnels_count_and_the_largest_holder_ends_first() {
    let fixture = Fixture::new().await;
    let mut innocent = fixture.client("127.0.0.2").await;
    let (_answer, mut upload) = innocent.open(post("SLOW"), false).await.unwrap();
    // The first of all to stall.
    pour(&mut upload).await;
    let mut greedy = Vec::new();
    for _ in 0..4 {
        let mut client = fixture.client("127.0.0.1").await;
        let mut tunnels = Vec::new();
        for _ in 0..4 {
            let connect = Request::connect("MUTE:1").version(http::Version::HTTP_2).body(()).unwrap();
            let (answer, mut stream) = client.open(connect, false).await.unwrap();
            pour(&mut stream).await;
            tunnels.push((answer, stream));
        }
        greedy.push((client, tunnels));
    }
    fixture.node.metric_reaches("hermes_limit_hits_total", "receive-buffer", 2.0).await;
    let (_, sessions) = fixture.node.ask("/sessions").await.unwrap();
    assert!(sessions.contains("127.0.0.2"), "the innocent lost: {sessions}");
}

/// The window of a connection, as the node gives it.
struct Room(usize);

impl Room {
    /// Waits until there is room for so many bytes, and takes it.
    async fn take(&mut self, frames: &mut Frames<TcpStream>, bytes: usize) {
        while self.0 < bytes {
            let gives = |frame: &Frame| frame.kind == kind::WINDOW_UPDATE && frame.stream == 0;
            let frame = frames.until("room", gives).await.unwrap();
            self.0 += frame.payload.iter().fold(0, |number, byte| number << 8 | usize::from(*byte));
        }
        self.0 -= bytes;
    }
}

#[tokio::test]
async fn ended_tunnels_are_not_ended_again_while_their_reset_is_unread() {
    let fixture = Fixture::with("1MiB").await;
    let mut frames = Frames::connect(fixture.node.address("in"), &[(INITIAL_WINDOW_SIZE, 0)]).await.unwrap();
    let mut room = Room(65_535);
    let fields = [(":method", "CONNECT"), (":authority", "MUTE:1")];
    for stream in (0..8).map(|number| 2 * number + 1) {
        frames.send(&[Frame::headers(stream, false, &fields)]).await.unwrap();
        for _ in 0..WINDOWFUL / FULL {
            room.take(&mut frames, FULL).await;
            frames.send(&[Frame::new(kind::DATA, 0, stream, vec![7; FULL])]).await.unwrap();
        }
    }
    fixture.node.metric_reaches("hermes_limit_hits_total", "receive-buffer", 1.0).await;
    // Some ticks.
    tokio::time::sleep(5 * STALLED).await;
    let ended = fixture.node.metric("hermes_limit_hits_total", "receive-buffer").await.unwrap();
    assert!(ended <= 8.0, "{ended} of 8 sessions");
}

#[tokio::test]
async fn requests_that_are_refused_keep_nothing_of_their_bodies() {
    let fixture = Fixture::new().await;
    // Their answers wait for a window that stays shut.
    let mut frames = Frames::connect(fixture.node.address("in"), &[(INITIAL_WINDOW_SIZE, 0)]).await.unwrap();
    let before = fixture.node.memory().unwrap();
    // Of a connection (RFC 9113, 6.9.2).
    let mut room = Room(65_535);
    let lines: Vec<String> = (0..30).map(|number| format!("x-{number}")).collect();
    let mut fields = vec![(":method", "POST"), (":scheme", "http"), (":authority", "SLOW"), (":path", "/")];
    fields.extend(lines.iter().map(|line| (line.as_str(), "")));
    for stream in (0..256).map(|number| 2 * number + 1) {
        frames.send(&[Frame::headers(stream, false, &fields)]).await.unwrap();
        for _ in 0..WINDOWFUL / FULL {
            room.take(&mut frames, FULL).await;
            frames.send(&[Frame::new(kind::DATA, 0, stream, vec![7; FULL])]).await.unwrap();
        }
    }
    fixture.assert_grown_less_than(before, 24 << 20);
}

#[tokio::test]
async fn unread_small_frames_do_not_retain_their_buffers() {
    let fixture = Fixture::with("64MiB").await;
    let before = fixture.node.memory().unwrap();
    let fields = [(":method", "POST"), (":scheme", "http"), (":authority", "SLOW"), (":path", "/")];
    // Of a type that nobody knows: to be ignored (RFC 9113, 4.1).
    let ballast = Frame::new(0xfe, 0, 0, vec![7; 8_000]);
    let mut open = Vec::new();
    // A megabyte that is unread, with 32 that are ignored: what comes between two ticks is kept until the second.
    for _ in 0..6 {
        let mut frames = Frames::connect(fixture.node.address("in"), &[]).await.unwrap();
        for stream in [1, 3, 5, 7] {
            frames.send(&[Frame::headers(stream, false, &fields)]).await.unwrap();
            let pair = [Frame::new(kind::DATA, 0, stream, vec![7; 256]), ballast.clone()];
            for _ in 0..10 {
                frames.send(&vec![&pair[..]; 100].concat()).await.unwrap();
                frames.ping().await.unwrap();
            }
        }
        open.push(frames);
        tokio::time::sleep(STALLED).await;
    }
    fixture.assert_grown_less_than(before, 64 << 20);
}

#[tokio::test]
async fn aborted_tunnels_end_although_their_bytes_are_unread() {
    let fixture = Fixture::new().await;
    let mut client = fixture.client("127.0.0.1").await;
    let mut tunnels = Vec::new();
    for _ in 0..4 {
        let connect = Request::connect("SINK:7").version(http::Version::HTTP_2).body(()).unwrap();
        let (answer, mut stream) = client.open(connect, false).await.unwrap();
        let answer = answer.await.unwrap();
        let chunk = Bytes::from(vec![7; 64 << 10]);
        while matches!(
            tokio::time::timeout(STALLED, multiplex::send_all(&mut stream, chunk.clone(), false)).await,
            Ok(Ok(()))
        ) {}
        tunnels.push((answer, stream));
    }
    for (_, stream) in &mut tunnels {
        stream.send_reset(h2::Reason::CANCEL);
    }
    fixture.node.quiet().await;
}

#[tokio::test]
async fn single_bytes_for_a_closed_reader_do_not_end_the_connection() {
    let fixture = Fixture::new().await;
    let mut frames = Frames::connect(fixture.node.address("in"), &[]).await.unwrap();
    let fields = [(":method", "PUT"), (":scheme", "http"), (":authority", "CLOSES"), (":path", "/")];
    // Each attempt fails, and the next is up to minutes away; ten do not fit into the test.
    frames.send(&[Frame::headers(1, false, &fields)]).await.unwrap();
    fixture.node.metric_reaches("hermes_retries_total", "", 1.0).await;
    // More than h2 lets lie: 32 MiB, at 255 bytes each.
    let crumbs = Frame::new(kind::DATA, 0, 1, "x").bytes().repeat(5_000);
    for _ in 0..40 {
        frames.send_bytes(&crumbs).await.unwrap();
        frames.ping().await.unwrap();
        // More than a tick of the worker, which moves what lies unread out of h2; the tick is announced nowhere.
        tokio::time::sleep(Duration::from_millis(110)).await;
    }
    echoes(&mut frames).await;
}

#[tokio::test]
async fn a_burst_of_small_frames_does_not_end_its_connection() {
    let fixture = Fixture::new().await;
    let mut frames = Frames::connect(fixture.node.address("in"), &[]).await.unwrap();
    let fields = [(":method", "POST"), (":scheme", "http"), (":authority", "FAST"), (":path", "/")];
    frames.send(&[Frame::headers(1, false, &fields)]).await.unwrap();
    frames.send_bytes(&Frame::new(kind::DATA, 0, 1, vec![7; 50]).bytes().repeat(5_000)).await.unwrap();
    frames.ping().await.unwrap();
    echoes(&mut frames).await;
}

/// Opens a tunnel on the same connection, and hears itself.
async fn echoes(frames: &mut Frames<TcpStream>) {
    let fields = [(":method", "CONNECT"), (":authority", "ECHO:7")];
    frames.send(&[Frame::headers(3, false, &fields), Frame::new(kind::DATA, 0, 3, "hello")]).await.unwrap();
    let echoed = frames.until("an echo", |frame| frame.stream == 3 && frame.kind == kind::DATA).await.unwrap();
    assert_eq!(echoed.payload, "hello");
}

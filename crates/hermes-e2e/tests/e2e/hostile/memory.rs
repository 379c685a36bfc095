//! Bytes that nobody takes: whoever stalls makes the other side wait, and the node keeps some buffers and no more.
//!
//! In: uploads to origins that read nothing, downloads of clients that read nothing, datagrams for a tunnel that
//! takes none; some hundred megabytes each. Out: the peak of the node's resident memory, from the kernel. The bounds
//! are generous: what they catch is that bytes are kept.

use std::{any::Any, io, time::Duration};

use bytes::Bytes;
use hermes_testkit::{
    frames::{Frame, Frames, INITIAL_WINDOW_SIZE, kind},
    listener_client::{ListenerClient, TunnelMode},
    multiplex::{self, Exchange},
    origin::{Origin, scripted},
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    raw_http1::RawHttp1,
};
use tokio::{
    net::{TcpStream, UdpSocket},
    task::{JoinSet, LocalSet},
};

use crate::hostile::lab::overlay;

/// What a node may grow by for sessions that stall: windows and socket buffers' worth of copies, for all together.
const GROWTH: u64 = 64 << 20;
/// What each of the many sends, unless it is made to wait.
const MUCH: usize = 32 << 20;
const MANY: usize = 8;
const CHUNK_SIZE: usize = 64 << 10;
/// Time for stalled peers to fill what they can. No event marks it; on a slow machine the test only shows less.
const STALLED: Duration = Duration::from_millis(500);

/// Accepts, reads nothing, and keeps everything open.
fn stalled() -> Origin {
    scripted::h1(|http1| async move {
        std::future::pending::<()>().await;
        drop(http1);
        io::Result::Ok(())
    })
    .unwrap()
}

static CONTENT: [u8; CHUNK_SIZE] = [7; CHUNK_SIZE];

/// The length that `/bytes/N` asks for.
fn asked_for(target: &str) -> usize {
    target.strip_prefix("/bytes/").and_then(|length| length.parse().ok()).unwrap_or_default()
}

/// Sends as much as is asked for, as fast as it is taken, at no cost of its own.
fn fast_h1() -> Origin {
    let serve = |mut http1: RawHttp1<TcpStream>| async move {
        loop {
            let length = asked_for(http1.head().await?.target());
            http1.send(format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n")).await?;
            for sent in (0..length).step_by(CHUNK_SIZE) {
                http1.send(&CONTENT[..CHUNK_SIZE.min(length - sent)]).await?;
            }
        }
    };
    scripted::h1(serve).unwrap()
}

fn fast_h2() -> Origin {
    let serve = |mut exchange: Exchange| async move {
        let length = asked_for(exchange.request.uri().path());
        let response = http::Response::new(());
        let mut stream = exchange.respond.send_response(response, false).map_err(io::Error::other)?;
        for sent in (0..length).step_by(CHUNK_SIZE) {
            let chunk = Bytes::from_static(&CONTENT[..CHUNK_SIZE.min(length - sent)]);
            multiplex::send_all(&mut stream, chunk, sent + CHUNK_SIZE >= length).await?;
        }
        Ok(())
    };
    scripted::h2(serve).unwrap()
}

struct Fixture {
    node: Node,
    before: u64,
    _overlay: Overlay,
    _origins: Vec<Origin>,
}

const DOCUMENT: &str = "
workers: 1
limits: {receive-buffer: 16MiB}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
- {name: game, bind: '127.0.0.1:0', protocol: udp, authority: 'GAME:9'}
routes:
- {name: here, match: {authority: HERE}, respond: {body: here}}
- {name: stalled-h1, match: {kind: http, authority: STALLED-H1}, upstream: stalled-h1}
- {name: stalled-tcp, match: {kind: tcp, authority: 'STALLED:1'}, terminate: {tcp: '$STALLED'}}
- {name: udp, match: {kind: udp}, upstream: proxy}
- {name: h1, match: {authority: H1}, upstream: h1}
- {name: h2, match: {authority: H2}, upstream: h2}
- {name: h2-hasty, match: {authority: HASTY}, upstream: h2, timeout: {progress: 1s, idle: 10m}}
upstreams:
- {name: stalled-h1, protocol: h1, endpoints: ['$STALLED']}
- {name: proxy, protocol: h1, overlay: true, endpoints: ['$PROXY']}
- {name: h1, protocol: h1, endpoints: ['$H1']}
- {name: h2, protocol: h2, overlay: false, endpoints: ['$H2']}
";

impl Fixture {
    async fn new() -> Self {
        // Takes the tunnel, and nothing that goes through it.
        let proxy = scripted::h1(|mut http1| async move {
            http1.head().await?;
            http1
                .send("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: connect-udp\r\n\r\n")
                .await?;
            std::future::pending::<io::Result<()>>().await
        });
        let origins = vec![stalled(), proxy.unwrap(), fast_h1(), fast_h2()];
        let overlay = overlay();
        let names = ["STALLED", "PROXY", "H1", "H2"];
        let draft = names
            .iter()
            .zip(&origins)
            .fold(overlay.node("fort").document(DOCUMENT), |draft, (name, origin)| draft.with(name, origin.address()));
        let node = draft.start().await.unwrap();
        // What it has once it has worked.
        for host in ["h1", "h2"] {
            let request = format!("GET /bytes/4000000 HTTP/1.1\r\nHost: {host}\r\n\r\n");
            let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
            http1.send(request).await.unwrap();
            let head = http1.head().await.unwrap();
            assert_eq!(http1.body(&head).await.unwrap().data.len(), 4_000_000);
        }
        node.forget_peak().unwrap();
        let before = node.memory().unwrap();
        Self { node, before, _overlay: overlay, _origins: origins }
    }

    async fn assert_bounded(&self, what: &str) {
        let grown = self.node.peak_memory().unwrap().saturating_sub(self.before);
        assert!(grown < GROWTH, "{what}: {} MiB", grown >> 20);
        let mut http1 = RawHttp1::connect(self.node.address("in")).await.unwrap();
        http1.send("GET / HTTP/1.1\r\nHost: HERE\r\n\r\n").await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200, "{what}: and now for somebody else");
    }
}

/// Sends much, until it is made to wait. How much went.
async fn pour(mut send: impl AsyncFnMut(Bytes) -> io::Result<()>) -> usize {
    let chunk = Bytes::from(vec![7; CHUNK_SIZE]);
    for sent in (0..MUCH).step_by(CHUNK_SIZE) {
        match tokio::time::timeout(STALLED, send(chunk.clone())).await {
            Ok(Ok(())) => {}
            _ => return sent,
        }
    }
    MUCH
}

/// Runs it many times at once, and returns what they poured in all; their connections stay open meanwhile.
async fn many<F>(begin: impl Fn() -> F) -> (usize, Vec<Box<dyn Any>>)
where
    F: Future<Output = (usize, Box<dyn Any>)> + 'static,
{
    let here = LocalSet::new();
    let mut tasks = JoinSet::new();
    for _ in 0..MANY {
        tasks.spawn_local_on(begin(), &here);
    }
    let (mut poured, mut open) = (0, Vec::new());
    here.run_until(async {
        while let Some(joined) = tasks.join_next().await {
            let (bytes, kept) = joined.unwrap();
            poured += bytes;
            open.push(kept);
        }
    })
    .await;
    (poured, open)
}

#[tokio::test]
async fn unread_uploads_wait_at_their_clients() {
    let fixture = Fixture::new().await;
    let to = fixture.node.address("in");
    let (poured, _open) = many(|| async move {
        let mut http1 = RawHttp1::connect(to).await.unwrap();
        let head = format!("POST / HTTP/1.1\r\nHost: STALLED-H1\r\nContent-Length: {MUCH}\r\n\r\n");
        http1.send(head).await.unwrap();
        (pour(async |chunk| http1.send(chunk).await).await, Box::new(http1) as Box<dyn Any>)
    })
    .await;
    assert!(poured < MANY * MUCH, "nobody was made to wait: {poured}");
    fixture.assert_bounded("over HTTP/1.1").await;
    let (_, _open) = many(|| async move {
        let request = http::Request::post("http://STALLED-H1/").body(()).unwrap();
        let mut connection = ListenerClient::plain(to).h2().await.unwrap();
        let (_answer, mut stream) = connection.open(request, false).await.unwrap();
        let sent = pour(async |chunk| multiplex::send_all(&mut stream, chunk, false).await).await;
        (sent, Box::new((connection, stream)) as Box<dyn Any>)
    })
    .await;
    fixture.assert_bounded("over HTTP/2").await;
    let (_, _open) = many(|| async move {
        let mode = TunnelMode::ConnectH2;
        let mut tunnel = ListenerClient::plain(to).tunnel(mode, "STALLED:1").await.unwrap();
        (pour(async |chunk| tunnel.writer.send(chunk).await).await, Box::new(tunnel) as Box<dyn Any>)
    })
    .await;
    fixture.assert_bounded("through tunnels").await;
}

#[tokio::test]
async fn requests_in_a_row_wait_until_somebody_reads_their_answers() {
    let fixture = Fixture::new().await;
    let burst = Bytes::from("GET / HTTP/1.1\r\nHost: HERE\r\n\r\n".repeat(CHUNK_SIZE / 32));
    let mut open = Vec::new();
    for _ in 0..MANY {
        let mut http1 = RawHttp1::connect(fixture.node.address("in")).await.unwrap();
        let poured = pour(async |_| http1.send(&burst).await).await;
        assert!(poured < MUCH, "nobody was made to wait");
        open.push(http1);
    }
    fixture.assert_bounded("requests in a row").await;
}

#[tokio::test]
async fn unread_downloads_wait_at_their_origins() {
    let fixture = Fixture::new().await;
    let mut open: Vec<TcpStream> = Vec::new();
    for host in ["H1", "H2"] {
        for _ in 0..MANY {
            let mut http1 = RawHttp1::connect(fixture.node.address("in")).await.unwrap();
            http1.send(format!("GET /bytes/{MUCH} HTTP/1.1\r\nHost: {host}\r\n\r\n")).await.unwrap();
            http1.head().await.unwrap();
            open.push(http1.into_parts().0);
        }
    }
    tokio::time::sleep(STALLED).await;
    fixture.assert_bounded("over HTTP/1.1").await;
    // Windows that stay shut, and windows that are as wide as can be though nobody reads the socket.
    let mut streams = Vec::new();
    for window in [0, u32::MAX >> 1] {
        for host in ["H1", "H2"] {
            let mut frames =
                Frames::connect(fixture.node.address("in"), &[(INITIAL_WINDOW_SIZE, window)]).await.unwrap();
            let path = format!("/bytes/{MUCH}");
            let gets: Vec<Frame> = (0..100).map(|number| Frame::get(2 * number + 1, host, &path)).collect();
            let wide = Frame::new(kind::WINDOW_UPDATE, 0, 0, (u32::MAX >> 2).to_be_bytes().to_vec());
            frames.send(&[&[wide][..], &gets].concat()).await.unwrap();
            streams.push(frames);
        }
    }
    tokio::time::sleep(STALLED).await;
    fixture.assert_bounded("over HTTP/2").await;
}

#[tokio::test]
async fn unread_datagrams_are_dropped_and_counted() {
    let fixture = Fixture::new().await;
    let mut sockets = Vec::new();
    for _ in 0..MANY {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(fixture.node.address("game")).await.unwrap();
        sockets.push(socket);
    }
    // The kernel drops what the node has no time to take: go on until enough of it was taken.
    let deadline = tokio::time::Instant::now() + EFFECT_TIMEOUT;
    while fixture.node.metric("hermes_datagrams_dropped_total", "queue-full").await.unwrap() < 10_000.0 {
        assert!(tokio::time::Instant::now() < deadline, "no queue was ever full");
        for _ in 0..100 {
            for socket in &sockets {
                let _ = socket.try_send(&[7; 1200]);
            }
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    fixture.assert_bounded("datagrams").await;
}

#[tokio::test]
async fn one_that_reads_nothing_does_not_stop_the_others() {
    // Its answers would fill the window of the connection that all share.
    let fixture = Fixture::new().await;
    let mut frames = Frames::connect(fixture.node.address("in"), &[(INITIAL_WINDOW_SIZE, 0)]).await.unwrap();
    let path = format!("/bytes/{MUCH}");
    let gets: Vec<Frame> = (0..100).map(|number| Frame::get(2 * number + 1, "H2", &path)).collect();
    frames.send(&gets).await.unwrap();
    frames.ping().await.unwrap();
    let mut http1 = RawHttp1::connect(fixture.node.address("in")).await.unwrap();
    // Larger than any window: it goes on, and does not only begin.
    http1.send(format!("GET /bytes/{MUCH} HTTP/1.1\r\nHost: H2\r\nConnection: close\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!(http1.body(&head).await.unwrap().data.len(), MUCH);
    // Most of it was more than may lie unread.
    fixture.node.metric_reaches("hermes_limit_hits_total", "receive-buffer", 1.0).await;
    fixture.assert_bounded("a hundred answers that nobody reads").await;
}

#[tokio::test]
async fn one_that_reads_nothing_is_given_up_once_it_owes_progress() {
    let fixture = Fixture::new().await;
    let mut frames = Frames::connect(fixture.node.address("in"), &[(INITIAL_WINDOW_SIZE, 0)]).await.unwrap();
    let path = format!("/bytes/{MUCH}");
    frames.send(&[Frame::get(1, "HASTY", &path)]).await.unwrap();
    let mut http1 = RawHttp1::connect(fixture.node.address("in")).await.unwrap();
    http1.send(format!("GET {path} HTTP/1.1\r\nHost: HASTY\r\n\r\n")).await.unwrap();
    http1.head().await.unwrap();
    fixture.node.quiet().await;
    fixture.assert_bounded("two answers that nobody reads").await;
}

//! Unread data of HTTP/3 streams: a stalled peer delays no other session, neither on a client's connection nor on one
//! between nodes, and its unread bytes are counted.
//!
//! In: uploads that no origin reads, responses that no client reads, tunnels that never open. Out: other transfers on
//! the same connection continue; beyond the limit, the sessions with most unread data end.

use std::time::Duration;

use bytes::Bytes;
use hermes_testkit::{
    ca::Subject,
    frames::{Frame, Frames, INITIAL_WINDOW_SIZE},
    listener_client::{ListenerClient, NODE_NAME},
    multiplex::{self, Multiplex},
    origin::{
        self, Origin,
        http::{Version, serve},
        scripted,
    },
    overlay::{Node, Overlay},
    raw_http1::Head,
};
use http::{Method, Request};

use crate::h3::lab::{ANY, overlay};

/// The window of a stream, everywhere; that of a connection is four of them.
const WINDOWFUL: usize = 256 << 10;
/// Streams that nobody reads: more than a connection has windows for.
const STALLED: usize = 6;
/// Time for stalled streams to fill what they can. No event marks it; on a slow machine the test only shows less.
const WAITED: Duration = Duration::from_millis(300);
/// What goes by beside them.
const BESIDE: usize = 8 << 20;

const FAR: &str = "
workers: 1
limits: {receive-buffer: $UNREAD, stream-window: 256KiB, connection-window: 1MiB}
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: optional}}
routes:
- {name: shut, match: {authority: SHUT}, upstream: shut, timeout: {progress: 10m}}
- {name: mute, match: {kind: tcp}, upstream: mute, timeout: {connect: 1m}}
- {name: web, upstream: web}
upstreams:
- {name: shut, protocol: h2, overlay: false, endpoints: ['$SHUT']}
- {name: mute, protocol: h1, endpoints: ['$MUTE']}
- {name: web, protocol: h1, endpoints: ['$WEB']}
";

const NEAR: &str = "
workers: 1
limits: {stream-window: 256KiB, connection-window: 1MiB}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: far, upstream: far, timeout: {progress: 10m}}
upstreams:
- {name: far, protocol: h3, endpoints: ['$FAR'], tls: {node: far}}
";

/// Two nodes with one connection between them.
struct Fixture {
    near: Node,
    far: Node,
    /// Connections that the near node has dialled, before anybody stalls.
    dialled: f64,
    overlay: Overlay,
    _origins: [Origin; 3],
}

/// Grants no stream any window, so that no client sends a body.
fn shut() -> Origin {
    scripted::h1(|http1| async move {
        let mut frames = Frames::accept(http1, &[(INITIAL_WINDOW_SIZE, 0)]).await?;
        loop {
            frames.next().await?;
        }
    })
    .unwrap()
}

/// Reads a head, and answers nothing.
fn mute() -> Origin {
    scripted::h1(|mut http1| async move {
        let _: Head = http1.head().await?;
        std::future::pending().await
    })
    .unwrap()
}

impl Fixture {
    async fn start(unread: &str) -> Self {
        let overlay = overlay();
        let web = serve(origin::listen(ANY).unwrap(), Version::H1, Bytes::new()).unwrap();
        let origins = [shut(), mute(), web];
        let draft = overlay.node("far").identity(&Subject::node("far").with_dns(NODE_NAME)).unwrap();
        let draft = draft.document(FAR).with("UNREAD", unread).with("SHUT", origins[0].address());
        let draft = draft.with("MUTE", origins[1].address()).with("WEB", origins[2].address());
        let far = draft.start().await.unwrap();
        let draft = overlay.node("near").identity(&Subject::node("near")).unwrap().document(NEAR);
        let near = draft.with("FAR", far.address("door")).start().await.unwrap();
        let mut client = Multiplex::connect(near.address("in")).await.unwrap();
        assert_eq!(client.ask(request(Method::GET, "WEB", "/"), b"").await.unwrap().status, 200);
        let dialled = near.metric("hermes_upstream_connects_total", "").await.unwrap();
        Self { near, far, dialled, overlay, _origins: origins }
    }

    async fn client(&self) -> Multiplex {
        Multiplex::connect(self.near.address("in")).await.unwrap()
    }

    /// Somebody else's upload and download go through.
    async fn serves_beside(&self) {
        let mut client = self.client().await;
        let upload = request(Method::POST, "WEB", "/upload");
        assert_eq!(client.ask(upload, &[7; BESIDE]).await.unwrap().status, 200);
        let answer = client.ask(request(Method::GET, "WEB", &format!("/bytes/{BESIDE}")), b"").await.unwrap();
        assert_eq!((answer.status, answer.data.len()), (200, BESIDE));
        let dialled = self.near.metric("hermes_upstream_connects_total", "").await.unwrap();
        assert_eq!(dialled, self.dialled, "all of it went over one connection");
    }
}

fn request(method: Method, host: &str, path: &str) -> Request<()> {
    let request = Request::builder().method(method).uri(format!("http://{host}{path}"));
    request.version(http::Version::HTTP_2).body(()).unwrap()
}

/// Sends until it is made to wait.
async fn pour(mut send: impl AsyncFnMut(Bytes) -> std::io::Result<()>) {
    let chunk = Bytes::from(vec![7; 16 << 10]);
    for _ in 0..8 * WINDOWFUL / chunk.len() {
        if !matches!(tokio::time::timeout(WAITED, send(chunk.clone())).await, Ok(Ok(()))) {
            return;
        }
    }
}

#[tokio::test]
async fn unread_uploads_delay_no_session_between_nodes() {
    let fixture = Fixture::start("64MiB").await;
    let mut kept = Vec::new();
    for _ in 0..STALLED {
        let mut client = fixture.client().await;
        let (answer, mut stream) = client.open(request(Method::POST, "SHUT", "/"), false).await.unwrap();
        pour(async |chunk| multiplex::send_all(&mut stream, chunk, false).await).await;
        kept.push((client, answer, stream));
    }
    fixture.serves_beside().await;
}

#[tokio::test]
async fn unread_responses_delay_no_session_between_nodes() {
    let fixture = Fixture::start("64MiB").await;
    let mut frames = Frames::connect(fixture.near.address("in"), &[(INITIAL_WINDOW_SIZE, 0)]).await.unwrap();
    for stream in 0..STALLED as u32 {
        frames.send(&[Frame::get(2 * stream + 1, "WEB", "/bytes/100000000")]).await.unwrap();
        frames.until("an answer", |frame| frame.stream == 2 * stream + 1).await.unwrap();
    }
    tokio::time::sleep(WAITED).await;
    fixture.serves_beside().await;
}

#[tokio::test]
async fn pending_tunnels_count_and_the_largest_holder_ends_first() {
    let fixture = Fixture::start("2MiB").await;
    fixture.serves_beside().await;
    let listener = ListenerClient::tls(fixture.far.address("door"), fixture.overlay.authority().pem(), None);
    // The first of all to stall, and from another address than the greedy ones.
    let innocent = listener.clone().from([127, 0, 0, 2]).h3().await.unwrap();
    let (mut upload, _answer) = innocent.open().await.unwrap();
    let post = [(":method", "POST"), (":scheme", "https"), (":authority", "SHUT"), (":path", "/")];
    upload.headers(&post).await.unwrap();
    pour(async |chunk| upload.data(chunk).await).await;
    let before = fixture.far.memory().unwrap();
    let mut greedy = Vec::new();
    for _ in 0..4 {
        let client = listener.h3().await.unwrap();
        for _ in 0..STALLED {
            let (mut send, recv) = client.open().await.unwrap();
            send.headers(&[(":method", "CONNECT"), (":authority", "MUTE:1")]).await.unwrap();
            pour(async |chunk| send.data(chunk).await).await;
            greedy.push((send, recv));
        }
    }
    fixture.far.metric_reaches("hermes_limit_hits_total", "receive-buffer", 2.0).await;
    let grown = fixture.far.memory().unwrap().saturating_sub(before);
    assert!(grown < 32 << 20, "{} MiB", grown >> 20);
    fixture.serves_beside().await;
    let (_, sessions) = fixture.far.ask("/sessions").await.unwrap();
    assert!(sessions.contains("127.0.0.2"), "the innocent lost: {sessions}");
}

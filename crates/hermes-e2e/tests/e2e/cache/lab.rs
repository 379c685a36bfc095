//! What these tests share: a node with a cache, an origin by script, and a client that says what it got.

use hermes_testkit::binary::hermes;
use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use hermes_testkit::{
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
    raw_http1::{Head, RawHttp1, in_time},
};
use tokio::sync::{Notify, mpsc};

/// What an origin does next for a request.
pub(crate) enum Step {
    Send(Vec<u8>),
    /// Until the test says so.
    Await(Arc<Notify>),
    /// Breaks off.
    Close,
}

/// An origin, and the heads of the requests that it got.
pub(crate) struct Scripted {
    pub(crate) origin: Origin,
    seen: mpsc::UnboundedReceiver<Head>,
}

impl Scripted {
    /// `script` gets each request's head, and its number from zero.
    pub(crate) fn new(script: impl Fn(&Head, usize) -> Vec<Step> + Send + Sync + 'static) -> Self {
        let (sender, seen) = mpsc::unbounded_channel();
        let (script, count) = (Arc::new(script), Arc::new(AtomicUsize::new(0)));
        let origin = scripted::h1(move |mut http1| {
            let (sender, script, count) = (sender.clone(), script.clone(), count.clone());
            async move {
                loop {
                    let head = http1.head().await?;
                    http1.body(&head).await?;
                    let number = count.fetch_add(1, Ordering::SeqCst);
                    let steps = script(&head, number);
                    let _ = sender.send(head);
                    for step in steps {
                        match step {
                            Step::Send(bytes) => http1.send(bytes).await?,
                            Step::Await(notify) => notify.notified().await,
                            Step::Close => return Ok(()),
                        }
                    }
                }
            }
        });
        Self { origin: origin.unwrap(), seen }
    }

    /// The requests that came since the last look.
    pub(crate) fn seen(&mut self) -> Vec<Head> {
        std::iter::from_fn(|| self.seen.try_recv().ok()).collect()
    }

    /// The next request, when it comes.
    pub(crate) async fn next(&mut self) -> Head {
        let waited = tokio::time::timeout(hermes_testkit::overlay::EFFECT_TIMEOUT, self.seen.recv()).await;
        waited.expect("the origin got no request").expect("the origin is gone")
    }
}

/// A whole response.
pub(crate) fn response(status: u16, fields: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = head(status, fields, body.len());
    bytes.extend_from_slice(body);
    bytes
}

/// A head alone. Each field stands on a line of its own.
pub(crate) fn head(status: u16, fields: &str, length: usize) -> Vec<u8> {
    let fields: String = fields.lines().map(|line| format!("{}\r\n", line.trim())).collect();
    format!("HTTP/1.1 {status} Said\r\ncontent-length: {length}\r\n{fields}\r\n").into_bytes()
}

/// The part of a body that a request asks for by one range, or the whole, with this tag; as an origin answers it.
pub(crate) fn by_range(request: &Head, tag: &str, body: &[u8]) -> Vec<u8> {
    let is_same = request.header("if-range").is_none_or(|of| of == tag);
    let range = request.header("range").filter(|_| is_same);
    let fields = format!("cache-control: max-age=600\netag: {tag}");
    match range.as_deref().and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) {
        Some((first, last)) => {
            let first: usize = first.parse().unwrap();
            let end = if last.is_empty() { body.len() } else { last.parse::<usize>().unwrap() + 1 };
            let fields = format!("{fields}\ncontent-range: bytes {first}-{}/{}", end - 1, body.len());
            response(206, &fields, &body[first..end])
        }
        None => response(200, &fields, body),
    }
}

/// Bytes that are nowhere the same.
pub(crate) fn body(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 7 + at * 31) as u8).collect()
}

pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

pub(crate) const DOCUMENT: &str = "
state: '$STATE'
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
- {name: alice, bind: '127.0.0.1:0', protocol: http, set-headers: {hermes-user: alice}}
- {name: bob, bind: '127.0.0.1:0', protocol: http, set-headers: {hermes-user: bob}}
routes:
- {name: all, upstream: origin, cache: {$CACHE}, timeout: {progress: 4s}}
upstreams:
- {name: origin, protocol: h1, overlay: false, endpoints: ['$ORIGIN']}
";

/// A node with these settings of its cache, before an origin.
pub(crate) async fn node(overlay: &Overlay, cache: &str, origin: SocketAddr) -> Node {
    let state = overlay.dir().join("state");
    let draft = overlay.node("edge").document(DOCUMENT).with("CACHE", cache);
    draft.with("STATE", state.display()).with("ORIGIN", origin).start().await.unwrap()
}

/// What a client got.
#[derive(Debug)]
pub(crate) struct ReceivedResponse {
    pub(crate) head: Head,
    pub(crate) data: Vec<u8>,
}

impl ReceivedResponse {
    pub(crate) fn status(&self) -> u16 {
        self.head.status()
    }

    /// What the node says of its cache.
    pub(crate) fn says(&self) -> String {
        self.head.header("cache-status").unwrap_or_default()
    }

    pub(crate) fn is_hit(&self) -> bool {
        self.says().starts_with("edge; hit")
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.data).into_owned()
    }
}

/// Asks on a connection of its own.
pub(crate) async fn ask(node: &Node, method: &str, path: &str, fields: &[&str]) -> ReceivedResponse {
    ask_at(node, "in", method, path, fields).await
}

/// Asks at this listener.
pub(crate) async fn ask_at(node: &Node, listener: &str, method: &str, path: &str, fields: &[&str]) -> ReceivedResponse {
    in_time("an answer", try_ask(node, listener, method, path, fields)).await.unwrap()
}

pub(crate) async fn get(node: &Node, path: &str) -> ReceivedResponse {
    ask(node, "GET", path, &[]).await
}

/// Asks, and reads to the end or to where it breaks.
pub(crate) async fn try_ask(
    node: &Node,
    listener: &str,
    method: &str,
    path: &str,
    fields: &[&str],
) -> std::io::Result<ReceivedResponse> {
    let mut http1 = begin(node, listener, method, path, fields).await?;
    let head = http1.head().await?;
    let data = if method == "HEAD" { Vec::new() } else { http1.body(&head).await?.data };
    Ok(ReceivedResponse { head, data })
}

/// Asks, and leaves the reading to the test.
pub(crate) async fn begin(
    node: &Node,
    listener: &str,
    method: &str,
    path: &str,
    fields: &[&str],
) -> std::io::Result<RawHttp1<tokio::net::TcpStream>> {
    let mut http1 = RawHttp1::connect(node.address(listener)).await?;
    let fields: String = fields.iter().map(|field| format!("{field}\r\n")).collect();
    http1.send(format!("{method} {path} HTTP/1.1\r\nhost: WEB\r\n{fields}\r\n")).await?;
    Ok(http1)
}

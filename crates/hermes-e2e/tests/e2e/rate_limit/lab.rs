//! What the tests of `upstream-rate-limit` share: a node, an origin that limits, and clients that know nothing of each other.

use hermes_testkit::binary::hermes;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hermes_testkit::listener_client::ListenerClient;
use hermes_testkit::origin::{Origin, scripted};
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::raw_http1::Head;
use tokio::task::JoinSet;

const DOCUMENT: &str = "
workers: 2
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: service, upstream: origin $PACE}
upstreams:
- {name: origin, protocol: h1, overlay: false, endpoints: ['$ORIGIN']}
";

pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

pub(crate) async fn node(overlay: &Overlay, pace: &str, origin: SocketAddr) -> Node {
    overlay.node("edge").document(DOCUMENT).with("PACE", pace).with("ORIGIN", origin).start().await.unwrap()
}

/// An origin; `reply` gets the number of each request from 0, its head and content, and returns all of the answer but for
/// the content's length.
pub(crate) fn origin(reply: impl FnMut(usize, &Head, &[u8]) -> (String, String) + Send + 'static) -> Origin {
    let reply = Arc::new(Mutex::new(reply));
    let count = Arc::new(AtomicUsize::new(0));
    let origin = scripted::h1(move |mut http1| {
        let (reply, count) = (reply.clone(), count.clone());
        async move {
            loop {
                let head = http1.head().await?;
                let content = http1.body(&head).await?.data;
                let number = count.fetch_add(1, Ordering::SeqCst);
                let (head, content) = (reply.lock().unwrap())(number, &head, &content);
                let length = content.len();
                http1.send(format!("HTTP/1.1 {head}\r\ncontent-length: {length}\r\n\r\n{content}")).await?;
            }
        }
    });
    origin.unwrap()
}

/// What a limiting origin has done.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) passed: AtomicUsize,
    pub(crate) refused: AtomicUsize,
}

/// So many in each second of its clock, by 429 and `Retry-After`.
pub(crate) fn limiting(limit: usize) -> (Origin, Arc<Tally>) {
    let tally = Arc::new(Tally::default());
    let (shared, began) = (tally.clone(), Instant::now());
    let (mut window, mut taken) = (0, 0);
    let origin = origin(move |_, _, _| {
        let now = began.elapsed().as_secs();
        if now != window {
            (window, taken) = (now, 0);
        }
        taken += 1;
        if taken <= limit {
            shared.passed.fetch_add(1, Ordering::SeqCst);
            return ("200 OK".into(), "well".into());
        }
        shared.refused.fetch_add(1, Ordering::SeqCst);
        ("429 Too Many Requests\r\nretry-after: 1".into(), "too many".into())
    });
    (origin, tally)
}

/// What clients saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) passed: usize,
    pub(crate) refused: usize,
    pub(crate) took: Duration,
}

/// Each asks for `each` objects, one after the other, from an address of its own. Who is refused tries again when it was
/// told to, with some jitter, as a client does by itself.
pub(crate) async fn clients(node: &Node, count: u8, each: usize) -> Seen {
    let began = Instant::now();
    let mut running = JoinSet::new();
    for number in 1..=count {
        let address = IpAddr::V4(Ipv4Addr::new(127, 0, 1, number));
        let client = ListenerClient::plain(node.address("in")).from(address);
        running.spawn(async move {
            let mut http1 = client.h1().await.unwrap();
            let (mut passed, mut refused) = (0, 0);
            while passed < each {
                http1.send("GET / HTTP/1.1\r\nhost: service\r\n\r\n").await.unwrap();
                let head = http1.head().await.unwrap();
                http1.body(&head).await.unwrap();
                if head.status() == 200 {
                    passed += 1;
                    continue;
                }
                refused += 1;
                let seconds: f64 = head.header("retry-after").unwrap_or_default().parse().unwrap_or(1.0);
                let wait = seconds * (1.0 + rand::random_range(0.0..0.1));
                tokio::time::sleep(Duration::from_secs_f64(wait)).await;
            }
            (passed, refused)
        });
    }
    let mut seen = Seen::default();
    while let Some(ended) = running.join_next().await {
        let (passed, refused) = ended.unwrap();
        seen.passed += passed;
        seen.refused += refused;
    }
    seen.took = began.elapsed();
    seen
}

//! An upstream that is always ready does not keep a worker to itself (paper 003, Appendix C).
//!
//! In: downloads that never end, by curl over HTTP/1.1 and HTTP/2, in the clear and over TLS, all at one worker. Out: how long small
//! requests of others wait meanwhile.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use hermes_testkit::binary::hermes;
use hermes_testkit::ca::Subject;
use hermes_testkit::overlay::Overlay;
use hermes_testkit::raw_http1::RawHttp1;
use tokio::net::TcpStream;
use tokio::process::Command;

const DOCUMENT: &str = "
workers: 1
listeners:
- {name: plain, bind: '127.0.0.1:0', protocol: http}
- {name: secure, bind: '127.0.0.1:0', protocol: http, tls: {client: none}}
routes:
- {name: fast, match: {path: /fast}, upstream: fast}
- {name: small, respond: {status: 200, body: ok}}
upstreams:
- {name: fast, protocol: h1, endpoints: ['$FAST']}
";
/// Downloads at the same time, of each kind.
const DOWNLOADS: usize = 3;
const REQUESTS: usize = 60;
/// A worker that drained one socket until it is empty would need seconds.
const MAX_WAIT: Duration = Duration::from_millis(250);

/// A server whose responses never end, as fast as it is read.
fn endless() -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n");
                let payload = vec![b'x'; 1 << 20];
                while stream.write_all(&payload).is_ok() {}
            });
        }
    });
    address
}

#[tokio::test]
async fn downloads_at_full_speed_leave_time_for_small_requests() {
    let overlay = Overlay::new(hermes()).unwrap();
    let draft = overlay.node("node").identity(&Subject::node("node")).unwrap();
    let mut node = draft.document(DOCUMENT).with("FAST", endless()).start().await.unwrap();
    let (plain, secure) = (node.address("plain"), node.address("secure"));
    let urls = [(plain, "http", "--http1.1"), (plain, "http", "--http2-prior-knowledge"), (secure, "https", "--http2")];
    let mut downloads = Vec::new();
    for (address, scheme, version) in urls {
        for _ in 0..DOWNLOADS {
            let mut curl = Command::new("curl");
            curl.args(["-sk", version, "-o", "/dev/null", &format!("{scheme}://{address}/fast")]).kill_on_drop(true);
            downloads.push(curl.spawn().unwrap());
        }
    }
    let mut times = Vec::new();
    for _ in 0..REQUESTS {
        let begun = Instant::now();
        let mut http1 = RawHttp1::new(TcpStream::connect(plain).await.unwrap());
        http1.send("GET /small HTTP/1.1\r\nhost: node\r\n\r\n").await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200);
        times.push(begun.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    times.sort_unstable();
    assert!(times[REQUESTS / 2] < MAX_WAIT, "{times:?}");
    let sessions: serde_json::Value = serde_json::from_str(&node.ask("/sessions").await.unwrap().1).unwrap();
    let sent: Vec<u64> = sessions.as_array().unwrap().iter().filter_map(|session| session["sent"].as_u64()).collect();
    assert!(sent.iter().filter(|bytes| **bytes > 1 << 20).count() == 3 * DOWNLOADS, "{sent:?}");
    for download in &mut downloads {
        assert!(download.try_wait().unwrap().is_none(), "each download goes on");
    }
    drop(downloads);
    node.assert_sound();
}

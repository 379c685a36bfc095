//! A process that dies and restarts: its peers learn of it with the next packet.
//!
//! In: connections whose server is killed. Out: stateless resets from its successor, and a neighbor that continues
//! over a new connection of the same kind.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use hermes_testkit::{
    ca::{IdentityFiles, Subject},
    listener_client::NODE_NAME,
    overlay::{Node, Overlay},
    poll::until,
    port,
    raw_http1::RawHttp1,
};
use nix::sys::signal::Signal;

use crate::quic::lab::{Behind, client, overlay};

const DOCUMENT: &str = "
access-log: off
workers: $WORKERS
limits: {$LIMITS}
listeners:
- {name: in, bind: '$IN', protocol: http, http3: true, tls: {client: none, cert: $CERT, key: $KEY}}
routes:
- {name: echo, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
- {name: web, upstream: web}
upstreams:
- {name: web, protocol: h1, endpoints: ['$WEB']}
";

const NEAR: &str = "
access-log: off
workers: 1
limits: {$LIMITS}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: far, upstream: far}
upstreams:
- {name: far, protocol: h3, overlay: false, endpoints: ['$FAR'], tls: {server-name: node.test, ca: $CA}}
";

/// A node that has the same certificate, and the same address, whenever it is started.
pub(crate) struct Lasting {
    pub(crate) overlay: Overlay,
    behind: Behind,
    files: IdentityFiles,
    pub(crate) at: SocketAddr,
}

impl Lasting {
    pub(crate) fn new(host: [u8; 4]) -> Self {
        let at = port::reserve(Ipv4Addr::from(host));
        let overlay = overlay();
        let identity = overlay.authority().issue(&Subject::server(NODE_NAME)).unwrap();
        let files = identity.write(overlay.dir(), "lasting").unwrap();
        Self { overlay, behind: Behind::start(), files, at }
    }

    pub(crate) async fn start(&self, process: &str, workers: usize, limits: &str) -> Node {
        let draft = self.overlay.node("far").called(process).document(DOCUMENT).with("WORKERS", workers);
        let draft = draft.with("IN", self.at).with("LIMITS", limits);
        let draft = draft.with("CERT", self.files.cert.display()).with("KEY", self.files.key.display());
        draft.with("ECHO", self.behind.echo.address()).with("WEB", self.behind.web.address()).start().await.unwrap()
    }

    /// A neighbour that goes to it over HTTP/3.
    pub(crate) async fn neighbour(&self, limits: &str) -> Node {
        self.neighbour_called("near", limits).await
    }

    pub(crate) async fn neighbour_called(&self, name: &str, limits: &str) -> Node {
        let draft = self.overlay.node(name).document(NEAR).with("LIMITS", limits);
        draft.with("FAR", self.at).with("CA", self.files.ca.display()).start().await.unwrap()
    }
}

/// Asks for so many bytes; the status of the answer.
pub(crate) async fn download(near: &Node, size: usize) -> u16 {
    let mut http1 = RawHttp1::connect(near.address("in")).await.unwrap();
    http1.send(format!("GET /bytes/{size} HTTP/1.1\r\nhost: WEB\r\nconnection: close\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    let body = http1.body(&head).await.unwrap();
    assert!(head.status() != 200 || body.data.len() == size, "{} of {size} bytes", body.data.len());
    head.status()
}

async fn killed(node: Node) {
    node.signal(Signal::SIGKILL).unwrap();
    node.ended().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_of_a_process_that_died_are_reset_by_the_next_one() {
    const CONNECTIONS: usize = 6;
    let lasting = Lasting::new([127, 0, 36, 1]);
    let first = lasting.start("first", 2, "").await;
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let client = client(&lasting.overlay, lasting.at).h3().await.unwrap();
        assert_eq!(client.get("https://WEB/").await.unwrap().status, 200);
        clients.push(client);
    }
    killed(first).await;
    let mut second = lasting.start("second", 1, "").await;
    for client in clients {
        // It may have heard of it already, by what it had still to say.
        if let Ok((mut send, _recv)) = client.open().await {
            let _ = send.bytes(Bytes::from_static(&[0; 600])).await;
        }
        // Neither the end of its time, nor a word on the connection, which nobody could say.
        assert_eq!(client.closed().await.unwrap_err().to_string(), "reset by peer");
    }
    second.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_neighbor_reconnects_at_once_after_a_restart() {
    let lasting = Lasting::new([127, 0, 36, 2]);
    let first = lasting.start("first", 1, "").await;
    let near = lasting.neighbour("").await;
    assert_eq!(download(&near, 1000).await, 200);
    killed(first).await;
    let _second = lasting.start("second", 2, "").await;
    until("it goes on", || async { download(&near, 1000).await == 200 }).await;
    // Had it waited until it found out by itself, it would have said so.
    let log = near.log();
    assert!(!log.contains("no packet is answered"), "{log}");
}

/// It says goodbye: who is spoken to does not wait for silence.
#[tokio::test]
async fn a_neighbour_that_ends_closes_its_connections() {
    let lasting = Lasting::new([127, 0, 0, 1]);
    let far = lasting.start("far", 1, "").await;
    let near = lasting.neighbour("").await;
    assert_eq!(download(&near, 1000).await, 200);
    let open = async || far.metric("hermes_connections_open", "").await.unwrap();
    assert_eq!(open().await, 1.0);
    near.end(Duration::from_secs(5)).unwrap();
    // Else it would be a minute.
    until("the connection is over", async || open().await == 0.0).await;
}

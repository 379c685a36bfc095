//! A node that speaks HTTP/3, its origins, and clients that check every byte.

use hermes_testkit::binary::hermes;
use std::net::{SocketAddr, UdpSocket};

use ::http::Request;
use bytes::Bytes;
use hermes_testkit::{
    ca::Subject,
    h3,
    listener_client::{ListenerClient, NODE_NAME, open_h3},
    origin::{
        self, Origin,
        http::{self, BYTES_SEED, Version},
        stream,
    },
    overlay::{Draft, Overlay},
    pattern::Pattern,
};

/// `$IN` is where it listens.
pub(crate) const DOCUMENT: &str = "
access-log: off
workers: $WORKERS
limits: {$LIMITS}
listeners:
- {name: in, bind: '$IN', protocol: http, http3: true, tls: {client: none}}
routes:
- {name: echo, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
- {name: web, upstream: web}
upstreams:
- {name: web, protocol: h1, endpoints: ['$WEB']}
";

pub(crate) fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// What is behind the node.
pub(crate) struct Behind {
    pub(crate) echo: Origin,
    pub(crate) web: Origin,
}

impl Behind {
    pub(crate) fn start() -> Self {
        let echo = stream::echo(origin::listen(loopback()).unwrap()).unwrap();
        let web = http::serve(origin::listen(loopback()).unwrap(), Version::H1, Bytes::from_static(b"web")).unwrap();
        Self { echo, web }
    }

    /// A node in front, with the limits that there are.
    pub(crate) fn node<'o>(&self, overlay: &'o Overlay, workers: usize, at: SocketAddr) -> Draft<'o> {
        self.limited(overlay, workers, at, "")
    }

    /// A node in front, with limits of its own.
    pub(crate) fn limited<'o>(&self, overlay: &'o Overlay, workers: usize, at: SocketAddr, limits: &str) -> Draft<'o> {
        let draft = overlay.node("front").document(DOCUMENT).with("WORKERS", workers).with("IN", at);
        let draft = draft.with("LIMITS", limits);
        let draft = draft.with("ECHO", self.echo.address()).with("WEB", self.web.address());
        draft.identity(&Subject::node("front").with_dns(NODE_NAME)).unwrap()
    }
}

pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

pub(crate) fn client(overlay: &Overlay, address: SocketAddr) -> ListenerClient {
    ListenerClient::tls(address, overlay.authority().pem(), None)
}

/// A tunnel to the echo.
pub(crate) struct Echo {
    pub(crate) connection: h3::Connection,
    send: h3::Sending,
    recv: h3::Receiving,
    ahead: Vec<u8>,
    pattern: Pattern,
    offset: u64,
}

impl Echo {
    pub(crate) async fn open(client: &ListenerClient, seed: u64) -> Self {
        let connection = client.h3().await.unwrap();
        let request = Request::connect("ECHO:7").body(()).unwrap();
        let (recv, send) = open_h3(&connection, &request).await.unwrap();
        Self { connection, send, recv, ahead: Vec::new(), pattern: Pattern::new(seed), offset: 0 }
    }

    /// There and back.
    pub(crate) async fn round(&mut self, length: usize) {
        let mut sent = vec![0; length];
        self.pattern.fill(self.offset, &mut sent);
        self.send.data(Bytes::from(sent)).await.unwrap();
        while self.ahead.len() < length {
            let chunk = self.recv.chunk().await.unwrap().expect("the tunnel ended");
            self.ahead.extend_from_slice(&chunk);
        }
        let behind = self.ahead.split_off(length);
        assert_eq!(self.pattern.mismatch(self.offset, &self.ahead), None);
        self.ahead = behind;
        self.offset += length as u64;
    }
}

/// A download of so many bytes.
pub(crate) struct Download {
    pub(crate) connection: h3::Connection,
    recv: h3::Receiving,
    _send: h3::Sending,
    offset: u64,
    size: u64,
}

impl Download {
    pub(crate) async fn begin(client: &ListenerClient, size: u64) -> Self {
        let connection = client.h3().await.unwrap();
        let request = Request::get(format!("https://WEB/bytes/{size}")).body(()).unwrap();
        let (send, mut recv) = connection.request(&request, true).await.unwrap();
        recv.head().await.unwrap();
        Self { connection, recv, _send: send, offset: 0, size }
    }

    /// Reads up to this byte at least.
    pub(crate) async fn read_to(&mut self, end: u64) {
        while self.offset < end.min(self.size) {
            let chunk = self.recv.chunk().await.unwrap().expect("the download ended");
            assert_eq!(Pattern::new(BYTES_SEED).mismatch(self.offset, &chunk), None);
            self.offset += chunk.len() as u64;
        }
    }

    pub(crate) async fn finish(mut self) {
        self.read_to(self.size).await;
        assert_eq!((self.offset, self.recv.chunk().await.unwrap()), (self.size, None));
    }
}

/// Another port of the loopback, in truth of any address.
pub(crate) fn elsewhere() -> UdpSocket {
    UdpSocket::bind("0.0.0.0:0").unwrap()
}

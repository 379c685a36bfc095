//! A CONNECT-IP gateway over HTTP/1.1 whose behaviour the test scripts.
//!
//! In: the next session of a listener. Out: the requests and packets that it receives. It assigns any address.

use std::net::IpAddr;

use bytes::{Buf as _, BytesMut};
use hermes_testkit::{
    flow::{capsule, varint},
    ip,
    overlay::EFFECT_TIMEOUT,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// Ends the test where it takes too long.
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(EFFECT_TIMEOUT, future).await.unwrap_or_else(|_| panic!("never: {what}"))
}

pub(crate) fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The far end of a session, over HTTP/1.1.
pub(crate) struct ScriptedGateway {
    pub(crate) tcp: TcpStream,
    read: BytesMut,
    /// The identifiers under which it was asked for addresses.
    pub(crate) requests: Vec<u64>,
}

impl ScriptedGateway {
    /// The next session, and the head of its request.
    pub(crate) async fn accept(listener: &TcpListener) -> (Self, String) {
        let (tcp, _) = within("a session at the far end", listener.accept()).await.unwrap();
        let mut far = Self { tcp, read: BytesMut::new(), requests: Vec::new() };
        let head = far.head().await;
        let answer = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: connect-ip\r\n\
                      capsule-protocol: ?1\r\n\r\n";
        far.tcp.write_all(answer.as_bytes()).await.unwrap();
        (far, head)
    }

    /// What the next request for addresses is for: identifier, address, length.
    pub(crate) async fn requests(&mut self) -> Vec<(u64, IpAddr, u8)> {
        let request_count = ip::entries(&self.capsule(ip::ADDRESS_REQUEST).await).unwrap();
        self.requests.extend(request_count.iter().map(|(request, ..)| *request));
        request_count
    }

    /// Gives these, each for a request; the unspecified one is none.
    pub(crate) async fn assign(&mut self, given: &[(u64, IpAddr)]) {
        let mut value = BytesMut::new();
        for (request, address) in given {
            ip::put_entry(&mut value, *request, *address, if address.is_ipv4() { 32 } else { 128 });
        }
        self.tcp.write_all(&capsule(ip::ADDRESS_ASSIGN, &value)).await.unwrap();
    }

    async fn more(&mut self) {
        let count = within("bytes at the far end", self.tcp.read_buf(&mut self.read)).await.unwrap();
        assert!(count > 0, "the session ended");
    }

    async fn head(&mut self) -> String {
        loop {
            if let Some(end) = self.read.windows(4).position(|four| four == b"\r\n\r\n") {
                return String::from_utf8(self.read.split_to(end + 4).to_vec()).unwrap().to_lowercase();
            }
            self.more().await;
        }
    }

    /// The value of the next capsule of this kind.
    pub(crate) async fn capsule(&mut self, kind: u64) -> Vec<u8> {
        loop {
            let Some((found, value)) = self.whole() else {
                self.more().await;
                continue;
            };
            if found == kind {
                return value;
            }
        }
    }

    fn whole(&mut self) -> Option<(u64, Vec<u8>)> {
        let (kind, first) = varint(&self.read)?;
        let (length, second) = varint(&self.read[first..])?;
        let end = first + second + usize::try_from(length).unwrap();
        let value = self.read.get(first + second..end)?.to_vec();
        self.read.advance(end);
        Some((kind, value))
    }

    /// The next packet, without its context.
    pub(crate) async fn packet(&mut self) -> Vec<u8> {
        self.capsule(0).await.split_off(1)
    }

    pub(crate) async fn send(&mut self, packet: &[u8]) {
        self.tcp.write_all(&capsule(0, &[&[0], packet].concat())).await.unwrap();
    }
}

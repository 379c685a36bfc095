//! A UDP flow into a node, raw or as CONNECT-UDP (RFC 9298) with handwritten capsules (RFC 9297).
//!
//! In: a listener client, a mode, and datagrams. Out: the returned datagrams. Capsules are encoded and decoded here byte by byte,
//! so that the product's codec does not check itself.

use std::io;

use bytes::{Buf as _, Bytes, BytesMut};
use h2::ext::Protocol;
use http::{Method, Request};
use tokio::net::UdpSocket;

pub use crate::varint::{put_varint, varint};
use crate::{listener_client::ListenerClient, origin::connect_udp, raw_http1::in_time, tunnel::Tunnel};

/// The largest payload of a UDP datagram over IPv4.
pub const MAX_PAYLOAD: usize = 65_507;

/// The mode of a flow through the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowMode {
    /// A plain socket to a `udp` listener.
    Raw,
    /// Upgrade over HTTP/1.1.
    UpgradeH1,
    /// Extended CONNECT over HTTP/2.
    ConnectH2,
    /// The bodies of a POST over HTTP/1.1.
    PostH1,
    /// The bodies of a POST over HTTP/2.
    PostH2,
    /// Extended CONNECT over HTTP/3, all in capsules.
    ConnectH3,
    /// The bodies of a POST over HTTP/3.
    PostH3,
}

impl FlowMode {
    /// The modes over HTTP/3, which is never plaintext.
    pub const H3: [Self; 2] = [Self::ConnectH3, Self::PostH3];
    /// All plaintext modes.
    pub const ALL: [Self; 5] = [Self::Raw, Self::UpgradeH1, Self::ConnectH2, Self::PostH1, Self::PostH2];
    /// The plaintext modes with capsules.
    pub const TUNNELS: [Self; 4] = [Self::UpgradeH1, Self::ConnectH2, Self::PostH1, Self::PostH2];
}

/// A flow.
pub enum Flow {
    /// A connected socket.
    Socket(UdpSocket),
    /// Capsules in a tunnel.
    Capsules(Box<Capsules>),
}

/// A tunnel of capsules.
pub struct Capsules {
    /// The tunnel, for other bytes than datagrams.
    pub tunnel: Tunnel,
    unread: BytesMut,
}

/// A capsule as it was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capsule {
    /// The capsule type; 0 is DATAGRAM.
    pub kind: u64,
    /// The payload.
    pub value: Bytes,
}

impl Flow {
    /// Opens a flow to a target (a raw listener uses its configured one).
    ///
    /// # Errors
    /// The flow was refused (with the response), or the connection failed.
    pub async fn open(client: &ListenerClient, mode: FlowMode, host: &str, port: u16) -> io::Result<Self> {
        match mode {
            FlowMode::Raw => {
                let socket = connect_udp(client.address).map_err(io::Error::other)?;
                Ok(Flow::Socket(UdpSocket::from_std(socket)?))
            }
            FlowMode::UpgradeH1 => Ok(Self::capsules(client.upgrade("connect-udp", &path(host, port)).await?)),
            FlowMode::ConnectH2 => Ok(Self::capsules(client.over_h2(extended_connect(host, port)).await?)),
            FlowMode::PostH1 => Ok(Self::capsules(client.post_h1(&path(host, port), "proxy.test").await?)),
            FlowMode::PostH2 => {
                let uri = format!("http://proxy.test{}", path(host, port));
                Ok(Self::capsules(client.over_h2(Request::builder().method(Method::POST).uri(uri)).await?))
            }
            FlowMode::ConnectH3 => Ok(Self::capsules(client.over_h3(extended_connect(host, port)).await?)),
            FlowMode::PostH3 => {
                let uri = format!("https://proxy.test{}", path(host, port));
                Ok(Self::capsules(client.over_h3(Request::builder().method(Method::POST).uri(uri)).await?))
            }
        }
    }

    /// Capsules in an open tunnel.
    pub fn capsules(tunnel: Tunnel) -> Self {
        Flow::Capsules(Box::new(Capsules::new(tunnel)))
    }

    /// Sends a datagram.
    ///
    /// # Errors
    /// The errors of the socket or the tunnel.
    pub async fn send(&mut self, payload: &[u8]) -> io::Result<()> {
        match self {
            Flow::Socket(socket) => socket.send(payload).await.map(drop),
            Flow::Capsules(capsules) => capsules.tunnel.writer.send(datagram(payload)).await,
        }
    }

    /// Receives the next datagram.
    ///
    /// # Errors
    /// The tunnel ends, or no datagram arrives.
    pub async fn receive(&mut self) -> io::Result<Vec<u8>> {
        match self {
            Flow::Socket(socket) => {
                let mut room = vec![0; 65_536];
                let length = in_time("waiting for a datagram", socket.recv(&mut room)).await?;
                room.truncate(length);
                Ok(room)
            }
            Flow::Capsules(capsules) => loop {
                let Some(mut capsule) = capsules.next().await? else {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                };
                // Context 0 is a UDP payload; no other was agreed on.
                match (capsule.kind, capsule.value.first()) {
                    (0, Some(0)) => {
                        capsule.value.advance(1);
                        return Ok(capsule.value.to_vec());
                    }
                    (0, _) => return Err(io::Error::other(format!("a datagram of another context: {capsule:?}"))),
                    _ => {}
                }
            },
        }
    }

    /// The capsules of the flow.
    ///
    /// # Panics
    /// The flow is a bare socket: an error in the test.
    pub fn as_capsules(&mut self) -> &mut Capsules {
        match self {
            Flow::Capsules(capsules) => capsules,
            Flow::Socket(_) => panic!("a bare socket has no capsules"),
        }
    }
}

impl Capsules {
    /// Capsules in an open tunnel.
    pub fn new(tunnel: Tunnel) -> Self {
        Self { tunnel, unread: BytesMut::new() }
    }

    /// Receives the next capsule of any type; `None` at the end of the stream between two of them.
    ///
    /// # Errors
    /// The tunnel failed, or ended within a capsule.
    pub async fn next(&mut self) -> io::Result<Option<Capsule>> {
        loop {
            if let Some(capsule) = parse(&mut self.unread) {
                return Ok(Some(capsule));
            }
            match self.tunnel.reader.chunk().await? {
                Some(chunk) => self.unread.extend_from_slice(&chunk),
                None if self.unread.is_empty() => return Ok(None),
                None => return Err(io::Error::other("the tunnel ended within a capsule")),
            }
        }
    }
}

impl Capsules {
    /// Closes our direction, and waits for the end of the other. Returns a capsule that still arrived before it.
    ///
    /// # Errors
    /// The tunnel failed, or ended within a capsule.
    pub async fn close(&mut self) -> io::Result<Option<Capsule>> {
        self.tunnel.writer.finish().await?;
        self.next().await
    }
}

/// A DATAGRAM capsule with a UDP payload.
pub fn datagram(payload: &[u8]) -> Bytes {
    let value = [&[0][..], payload].concat();
    capsule(0, &value)
}

/// Any capsule.
pub fn capsule(kind: u64, value: &[u8]) -> Bytes {
    let mut out = BytesMut::new();
    put_varint(&mut out, kind);
    put_varint(&mut out, value.len() as u64);
    out.extend_from_slice(value);
    out.freeze()
}

/// Removes the next whole capsule; `None` if more bytes are needed.
pub fn parse(unread: &mut BytesMut) -> Option<Capsule> {
    let (kind, one) = varint(unread)?;
    let (length, other) = varint(&unread[one..])?;
    let (begin, length) = (one + other, usize::try_from(length).ok()?);
    if unread.len() < begin + length {
        return None;
    }
    unread.advance(begin);
    Some(Capsule { kind, value: unread.split_to(length).freeze() })
}

/// The path of a request (RFC 9298, section 2): a colon of an IPv6 address is escaped.
pub fn path(host: &str, port: u16) -> String {
    format!("/.well-known/masque/udp/{}/{port}/", host.replace(':', "%3A"))
}

fn extended_connect(host: &str, port: u16) -> http::request::Builder {
    Request::builder()
        .method(Method::CONNECT)
        .uri(format!("http://proxy.test{}", path(host, port)))
        .header("capsule-protocol", "?1")
        .extension(Protocol::from_static("connect-udp"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datagram_has_type_length_and_context() {
        assert_eq!(datagram(b"hi"), &[0, 3, 0, b'h', b'i'][..]);
    }
}

//! Handwritten CONNECT-IP (RFC 9484) over HTTP/1.1, HTTP/2 and HTTP/3, and IP packets built byte by byte.
//!
//! In: a listener client, a scope, valid or invalid packets, any capsule. Out: the received capsules and packets, unchanged. Does
//! not use the product's codec, which is under test.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::ext::Protocol;
use http::{Method, Request};

use crate::{
    flow::{Capsule, Capsules, capsule, put_varint, varint},
    h3::{self, wire},
    listener_client::{self, ListenerClient},
    raw_http1::in_time,
    tunnel::Tunnel,
};

/// ADDRESS_ASSIGN (RFC 9484, section 4.7.1).
pub const ADDRESS_ASSIGN: u64 = 1;
/// ADDRESS_REQUEST (section 4.7.2).
pub const ADDRESS_REQUEST: u64 = 2;
/// ROUTE_ADVERTISEMENT (section 4.7.3).
pub const ROUTE_ADVERTISEMENT: u64 = 3;

/// The HTTP version and encoding of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IpMode {
    /// Upgrade over HTTP/1.1.
    H1,
    /// Extended CONNECT over HTTP/2.
    H2,
    /// Extended CONNECT over HTTP/3, with packets in QUIC datagrams.
    H3,
    /// Extended CONNECT over HTTP/3 by a client without QUIC datagrams: packets in capsules.
    H3Capsules,
}

impl IpMode {
    /// All modes.
    pub const ALL: [Self; 4] = [Self::H1, Self::H2, Self::H3, Self::H3Capsules];
}

/// An open tunnel.
pub struct IpTunnel {
    capsules: Capsules,
    /// The connection, and a quarter of the stream's id.
    quic: Option<(quinn::Connection, u64)>,
}

/// A received message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IpMessage {
    /// A capsule, also DATAGRAM.
    Capsule(Capsule),
    /// An HTTP Datagram in a QUIC datagram, with its context identifier.
    Datagram(Bytes),
}

impl IpMessage {
    /// The IP packet in the message, if it contains one.
    pub fn packet(&self) -> Option<Bytes> {
        let datagram = match self {
            IpMessage::Capsule(Capsule { kind: 0, value }) => value,
            IpMessage::Datagram(datagram) => datagram,
            IpMessage::Capsule(_) => return None,
        };
        (datagram.first() == Some(&0)).then(|| datagram.slice(1..))
    }
}

/// The path by the default template. `target` is a name, an address, a prefix or `*`.
pub fn path(target: &str, protocol: &str) -> String {
    format!("/.well-known/masque/ip/{}/{protocol}/", target.replace(':', "%3A").replace('/', "%2F"))
}

impl IpTunnel {
    /// Opens a tunnel.
    ///
    /// # Errors
    /// The tunnel was refused (with the response), or the connection failed.
    pub async fn open(client: &ListenerClient, mode: IpMode, path: &str) -> io::Result<Self> {
        let request = Request::builder()
            .method(Method::CONNECT)
            .uri(format!("https://proxy.test{path}"))
            .header("capsule-protocol", "?1")
            .extension(Protocol::from_static("connect-ip"));
        let (tunnel, quic) = match mode {
            IpMode::H1 => (client.upgrade("connect-ip", path).await?, None),
            IpMode::H2 => (client.over_h2(request).await?, None),
            IpMode::H3Capsules => (client.over_h3(request).await?, None),
            IpMode::H3 => {
                let settings = [(wire::ENABLE_CONNECT_PROTOCOL, 1), (wire::H3_DATAGRAM, 1)];
                let connection = h3::Connection::connect(client, &settings).await?;
                let request = client.dressed(request).body(()).map_err(io::Error::other)?;
                let (recv, send) = listener_client::open_h3(&connection, &request).await?;
                let quic = (connection.quic.clone(), u64::from(send.send.id()) / 4);
                (Tunnel::h3(connection, recv, send), Some(quic))
            }
        };
        Ok(Self { capsules: Capsules::new(tunnel), quic })
    }

    /// Sends bytes on the stream.
    ///
    /// # Errors
    /// The tunnel failed.
    pub async fn bytes(&mut self, bytes: impl Into<Bytes>) -> io::Result<()> {
        self.capsules.tunnel.writer.send(bytes).await
    }

    /// Sends a capsule.
    ///
    /// # Errors
    /// The tunnel failed.
    pub async fn capsule(&mut self, kind: u64, value: &[u8]) -> io::Result<()> {
        self.bytes(capsule(kind, value)).await
    }

    /// Sends an HTTP Datagram with its context identifier: in a QUIC datagram if the mode uses them.
    ///
    /// # Errors
    /// The tunnel failed, or the datagram exceeds the path MTU.
    pub async fn datagram(&mut self, datagram: &[u8]) -> io::Result<()> {
        let Some((quic, quarter)) = &self.quic else { return self.capsule(0, datagram).await };
        let mut out = BytesMut::new();
        put_varint(&mut out, *quarter);
        out.put_slice(datagram);
        quic.send_datagram(out.freeze()).map_err(io::Error::other)
    }

    /// Sends a packet.
    ///
    /// # Errors
    /// The errors of [`Self::datagram`].
    pub async fn packet(&mut self, packet: &[u8]) -> io::Result<()> {
        self.datagram(&[&[0][..], packet].concat()).await
    }

    /// Receives the next message; `None` at the end of the stream.
    ///
    /// # Errors
    /// The tunnel failed, or nothing arrives.
    pub async fn next(&mut self) -> io::Result<Option<IpMessage>> {
        let Some((quic, quarter)) = &self.quic else { return Ok(self.capsules.next().await?.map(IpMessage::Capsule)) };
        let (quic, quarter) = (quic.clone(), *quarter);
        let datagram = async {
            loop {
                let datagram = quic.read_datagram().await.map_err(io::Error::other)?;
                match varint(&datagram) {
                    Some((stream, length)) if stream == quarter => return Ok(datagram.slice(length..)),
                    _ => {}
                }
            }
        };
        tokio::select! {
            capsule = self.capsules.next() => Ok(capsule?.map(IpMessage::Capsule)),
            datagram = in_time("waiting for a datagram", datagram) => datagram.map(|datagram| Some(IpMessage::Datagram(datagram))),
        }
    }

    /// Receives the next packet, and skips other messages.
    ///
    /// # Errors
    /// The tunnel ends, or none arrives.
    pub async fn next_packet(&mut self) -> io::Result<Bytes> {
        loop {
            match self.next().await? {
                Some(received) => {
                    if let Some(packet) = received.packet() {
                        return Ok(packet);
                    }
                }
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }

    /// Receives the next capsule of this type, and skips other messages.
    ///
    /// # Errors
    /// The tunnel ends, or none arrives.
    pub async fn next_capsule(&mut self, kind: u64) -> io::Result<Bytes> {
        loop {
            match self.next().await? {
                Some(IpMessage::Capsule(capsule)) if capsule.kind == kind => return Ok(capsule.value),
                Some(_) => {}
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }

    /// Requests addresses, and waits for the answer: all assigned addresses.
    ///
    /// # Errors
    /// No answer arrives.
    pub async fn ask_for(&mut self, addresses: &[IpAddr]) -> io::Result<Vec<(u64, IpAddr, u8)>> {
        let mut wanted = BytesMut::new();
        for (request, address) in (1..).zip(addresses) {
            put_entry(&mut wanted, request, *address, if address.is_ipv4() { 32 } else { 128 });
        }
        self.ask(&wanted).await
    }

    /// Requests a network, with the request identifier 9; returns as [`Self::ask_for`].
    ///
    /// # Errors
    /// No answer arrives.
    pub async fn ask_for_network(&mut self, start: IpAddr, length: u8) -> io::Result<Vec<(u64, IpAddr, u8)>> {
        let mut wanted = BytesMut::new();
        put_entry(&mut wanted, 9, start, length);
        self.ask(&wanted).await
    }

    async fn ask(&mut self, wanted: &[u8]) -> io::Result<Vec<(u64, IpAddr, u8)>> {
        self.capsule(ADDRESS_REQUEST, wanted).await?;
        let assigned = self.next_capsule(ADDRESS_ASSIGN).await?;
        entries(&assigned).ok_or_else(|| io::Error::other(format!("no ADDRESS_ASSIGN: {assigned:?}")))
    }

    /// Closes our direction of the stream.
    ///
    /// # Errors
    /// The tunnel failed.
    pub async fn finish(&mut self) -> io::Result<()> {
        self.capsules.tunnel.writer.finish().await
    }
}

/// An entry of ADDRESS_ASSIGN or ADDRESS_REQUEST.
pub fn put_entry(out: &mut BytesMut, request: u64, address: IpAddr, length: u8) {
    put_varint(out, request);
    put_address(out, address);
    out.put_u8(length);
}

fn put_address(out: &mut BytesMut, address: IpAddr) {
    match address {
        IpAddr::V4(address) => {
            out.put_u8(4);
            out.put_slice(&address.octets());
        }
        IpAddr::V6(address) => {
            out.put_u8(6);
            out.put_slice(&address.octets());
        }
    }
}

/// The entries of ADDRESS_ASSIGN: request, address, length.
pub fn entries(mut value: &[u8]) -> Option<Vec<(u64, IpAddr, u8)>> {
    let mut entries = Vec::new();
    while !value.is_empty() {
        let (request, length) = varint(value)?;
        value = &value[length..];
        let (address, rest): (IpAddr, _) = match value.split_first()? {
            (4, rest) => (rest.first_chunk::<4>().copied()?.into(), rest.get(4..)?),
            (6, rest) => (rest.first_chunk::<16>().copied()?.into(), rest.get(16..)?),
            _ => return None,
        };
        let (prefix, rest) = rest.split_first()?;
        entries.push((request, address, *prefix));
        value = rest;
    }
    Some(entries)
}

/// The Internet checksum (RFC 1071).
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let bytes = parts.concat();
    let words = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// An IPv4 or IPv6 packet of this protocol.
///
/// # Panics
/// The addresses are not of one version: an error in the test.
pub fn packet(source: IpAddr, destination: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => packet_v4(source, destination, protocol, payload),
        (IpAddr::V6(source), IpAddr::V6(destination)) => packet_v6(source, destination, protocol, payload),
        _ => panic!("{source} and {destination} are not of one version"),
    }
}

fn packet_v4(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let length = (20 + payload.len()) as u16;
    let mut packet = vec![0x45, 0];
    packet.extend_from_slice(&length.to_be_bytes());
    packet.extend_from_slice(&[0, 7, 0, 0, 64, protocol, 0, 0]);
    packet.extend_from_slice(&source.octets());
    packet.extend_from_slice(&destination.octets());
    let sum = checksum(&[&packet]).to_be_bytes();
    packet[10..12].copy_from_slice(&sum);
    packet.extend_from_slice(payload);
    packet
}

fn packet_v6(source: Ipv6Addr, destination: Ipv6Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend_from_slice(&(payload.len() as u16).to_be_bytes());
    packet.extend_from_slice(&[protocol, 64]);
    packet.extend_from_slice(&source.octets());
    packet.extend_from_slice(&destination.octets());
    packet.extend_from_slice(payload);
    packet
}

/// An echo request (ICMP or ICMPv6) with this number.
pub fn ping(source: IpAddr, destination: IpAddr, number: u16, data: &[u8]) -> Vec<u8> {
    let kind = if source.is_ipv4() { 8 } else { 128 };
    let [high, low] = number.to_be_bytes();
    let mut message = [&[kind, 0, 0, 0, 0x12, 0x34, high, low], data].concat();
    let length = (message.len() as u32).to_be_bytes();
    let sum = match (source, destination) {
        // ICMPv6 has a pseudo-header (RFC 4443, section 2.3).
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            checksum(&[&source.octets(), &destination.octets(), &length, &[0, 0, 0, 58], &message])
        }
        _ => checksum(&[&message]),
    };
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    packet(source, destination, if source.is_ipv4() { 1 } else { 58 }, &message)
}

/// Type and code of the ICMP or ICMPv6 message in a packet without options.
pub fn icmp(packet: &[u8]) -> Option<(u8, u8)> {
    let (at, protocol) = match packet.first()? >> 4 {
        4 => (20, *packet.get(9)?),
        _ => (40, *packet.get(6)?),
    };
    matches!(protocol, 1 | 58).then_some(())?;
    Some((*packet.get(at)?, *packet.get(at + 1)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_those_of_the_rfcs() {
        let [one, other] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        let echo = ping(one, other, 1, b"abcd");
        assert_eq!(echo.len(), 32);
        // A valid checksum makes the sum over all bytes zero.
        assert_eq!((checksum(&[&echo[..20]]), checksum(&[&echo[20..]])), (0, 0));
        assert_eq!(icmp(&echo), Some((8, 0)));
        let [one, other] = [Ipv6Addr::LOCALHOST, "fd00::2".parse().unwrap_or(Ipv6Addr::LOCALHOST)].map(IpAddr::V6);
        let echo = ping(one, other, 1, b"abcd");
        assert_eq!((echo.len(), icmp(&echo)), (52, Some((128, 0))));
        assert_eq!(checksum(&[&echo[8..40], &[0, 0, 0, 12, 0, 0, 0, 58], &echo[40..]]), 0);
    }

    #[test]
    fn entries_are_those_of_rfc_9484() {
        let mut out = BytesMut::new();
        put_entry(&mut out, 1, [192, 0, 2, 11].into(), 32);
        assert_eq!(out, &[1, 4, 192, 0, 2, 11, 32][..]);
        assert_eq!(entries(&out), Some(vec![(1, [192, 0, 2, 11].into(), 32)]));
    }
}

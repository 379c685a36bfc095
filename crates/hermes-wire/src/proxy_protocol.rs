//! The PROXY protocol: versions 1 and 2 are parsed, version 2 is sent (HAProxy's `proxy-protocol.txt`, sections 2.1 and
//! 2.2).
//!
//! In: the first bytes of an accepted connection, or two socket addresses. Out: the original source and destination, or
//! a header for the next server. Extensions (TLVs) are skipped. The listener decides which peers are trusted.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bytes::{Buf, BufMut, BytesMut};

/// The first bytes of a version 2 header.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";

/// The first bytes of a version 1 header, a line of text.
const V1: &[u8] = b"PROXY ";

/// The shortest line of version 1: `PROXY UNKNOWN` with CRLF.
const MIN_V1: usize = 15;

/// The longest line of version 1, with CRLF.
const MAX_V1: usize = 107;

/// Bytes of the fixed part: signature, version and command, family and protocol, length of the rest.
const FIXED: usize = 16;

/// The longest accepted header, in bytes. The specification promises senders 536 (one TCP segment); certificates and
/// cloud identifiers in TLVs need more. The limit bounds the buffer for a peer that has sent nothing else.
pub const MAX_HEADER: usize = FIXED + 2_048;

/// The longest header that [`encode`] creates, in bytes.
pub const MAX_ENCODED: usize = FIXED + 36;

/// The header of a connection on the proxy's own behalf, for example a health check: the receiver uses the connection's
/// addresses.
pub const LOCAL: [u8; FIXED] = *b"\r\n\r\n\0\r\nQUIT\n\x20\x00\x00\x00";

/// The result of parsing the first bytes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parsed {
    /// The bytes are valid so far. Parse again when the buffer has this number of bytes in total, at most
    /// [`MAX_HEADER`].
    Incomplete(usize),
    /// The header is complete.
    Done {
        /// Bytes of the header; the bytes after it belong to the connection.
        len: usize,
        /// Source and destination. `None` for a connection on the sender's own behalf (LOCAL), or with unknown
        /// addresses (UNSPEC): the connection's own addresses apply. IPv4 addresses mapped into IPv6 are returned as
        /// IPv4, so that networks match them.
        source: Option<(SocketAddr, SocketAddr)>,
    },
}

/// The reason why a header is not acceptable. The connection must be closed: the specification forbids guessing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProxyProtocolError {
    /// The connection does not begin with a signature.
    #[error(
        "missing PROXY protocol header; \
         enable it at the sender, or disable it for this listener"
    )]
    NotProxyProtocol,
    /// A line of version 1 is malformed.
    #[error(
        "malformed PROXY protocol line (version 1); expected PROXY TCP4|TCP6 SOURCE DESTINATION PORT PORT, or UNKNOWN"
    )]
    Line,
    /// The version is unknown.
    #[error("unknown PROXY protocol version {0}; expected 1 or 2")]
    Version(u8),
    /// The command is neither LOCAL nor PROXY.
    #[error("unknown PROXY protocol command {0}")]
    Command(u8),
    /// The protocol is neither TCP nor UDP over IP.
    #[error("unsupported PROXY protocol family and protocol 0x{0:02x}; expected TCP or UDP over IPv4 or IPv6")]
    Family(u8),
    /// The header is longer than [`MAX_HEADER`].
    #[error("PROXY protocol header of {0} bytes exceeds the limit of {MAX_HEADER}")]
    TooLong(usize),
    /// The header is too short for two addresses of its family.
    #[error("PROXY protocol header too short: {length} bytes for addresses of {needed} bytes")]
    AddressesCut {
        /// The length field of the header.
        length: usize,
        /// The length of the addresses.
        needed: usize,
    },
}

/// Parses the header at the front of `bytes`, which must be all bytes that the connection has sent so far.
///
/// # Errors
/// The bytes cannot become an acceptable header; an error is reported at the first wrong byte.
pub fn parse(bytes: &[u8]) -> Result<Parsed, ProxyProtocolError> {
    if let Some(needed) = check_signature(bytes)? {
        return Ok(Parsed::Incomplete(needed));
    }
    if bytes.starts_with(V1) {
        return parse_line(bytes);
    }
    let Some((fixed, rest)) = bytes.split_at_checked(FIXED) else {
        return Ok(Parsed::Incomplete(FIXED));
    };
    let (version, command) = (fixed[12] >> 4, fixed[12] & 0x0f);
    if version != 2 {
        return Err(ProxyProtocolError::Version(version));
    }
    let length = usize::from(u16::from_be_bytes([fixed[14], fixed[15]]));
    let len = FIXED + length;
    if len > MAX_HEADER {
        return Err(ProxyProtocolError::TooLong(len));
    }
    let layout = match command {
        0 => None,
        1 => Layout::of(fixed[13], length)?,
        other => return Err(ProxyProtocolError::Command(other)),
    };
    match rest.get(..length) {
        None => Ok(Parsed::Incomplete(len)),
        Some(block) => Ok(Parsed::Done { len, source: layout.map(|layout| layout.read(block)) }),
    }
}

/// `Some(needed)` if more bytes are needed for a decision.
fn check_signature(bytes: &[u8]) -> Result<Option<usize>, ProxyProtocolError> {
    let here = bytes.len().min(SIGNATURE.len());
    if bytes[..here] == SIGNATURE[..here] {
        // Either version has at least this number of bytes.
        let least = if here == 0 { MIN_V1 } else { FIXED };
        return Ok((bytes.len() < FIXED).then_some(least));
    }
    let here = bytes.len().min(V1.len());
    if bytes[..here] == V1[..here] {
        return Ok((bytes.len() < MIN_V1).then_some(MIN_V1));
    }
    Err(ProxyProtocolError::NotProxyProtocol)
}

/// Parses a line of version 1. Never requests a byte after its end.
fn parse_line(bytes: &[u8]) -> Result<Parsed, ProxyProtocolError> {
    let Some(end) = bytes.iter().take(MAX_V1).position(|byte| *byte == b'\n') else {
        if bytes.len() >= MAX_V1 {
            return Err(ProxyProtocolError::Line);
        }
        let missing = if bytes.ends_with(b"\r") { 1 } else { 2 };
        return Ok(Parsed::Incomplete(bytes.len() + missing));
    };
    let line = bytes[..end].strip_suffix(b"\r").and_then(|line| std::str::from_utf8(line).ok());
    let source = read_line(line.ok_or(ProxyProtocolError::Line)?).ok_or(ProxyProtocolError::Line)?;
    Ok(Parsed::Done { len: end + 1, source })
}

/// Source and destination of a line; the inner `None` is UNKNOWN, the outer a malformed line.
fn read_line(line: &str) -> Option<Option<(SocketAddr, SocketAddr)>> {
    let mut words = line.split(' ').skip(1);
    let is_family = match words.next()? {
        // The rest of the line is ignored.
        "UNKNOWN" => return Some(None),
        "TCP4" => IpAddr::is_ipv4,
        "TCP6" => IpAddr::is_ipv6,
        _ => return None,
    };
    let mut address = || words.next()?.parse().ok().filter(is_family);
    let (source, destination): (IpAddr, IpAddr) = (address()?, address()?);
    let mut port = || {
        let digits = words.next()?;
        let is_number = digits == "0" || (!digits.starts_with('0') && digits.bytes().all(|byte| byte.is_ascii_digit()));
        digits.parse::<u16>().ok().filter(|_| is_number)
    };
    let (source_port, destination_port) = (port()?, port()?);
    let both = (
        SocketAddr::new(source.to_canonical(), source_port),
        SocketAddr::new(destination.to_canonical(), destination_port),
    );
    words.next().is_none().then_some(Some(both))
}

/// The layout of the two addresses after the fixed part.
#[derive(Clone, Copy)]
enum Layout {
    Ipv4,
    Ipv6,
}

impl Layout {
    /// `None` for UNSPEC: the rest is skipped.
    fn of(family: u8, length: usize) -> Result<Option<Self>, ProxyProtocolError> {
        let (layout, needed) = match family {
            0x00 => return Ok(None),
            0x11 | 0x12 => (Self::Ipv4, 12),
            0x21 | 0x22 => (Self::Ipv6, 36),
            other => return Err(ProxyProtocolError::Family(other)),
        };
        if length < needed {
            return Err(ProxyProtocolError::AddressesCut { length, needed });
        }
        Ok(Some(layout))
    }

    /// Source and destination from a block whose length [`Layout::of`] has checked.
    fn read(self, mut block: &[u8]) -> (SocketAddr, SocketAddr) {
        let mut ip = || match self {
            Self::Ipv4 => IpAddr::V4(Ipv4Addr::from(block.get_u32())),
            Self::Ipv6 => IpAddr::V6(Ipv6Addr::from(block.get_u128())).to_canonical(),
        };
        let (source, destination) = (ip(), ip());
        let (source_port, destination_port) = (block.get_u16(), block.get_u16());
        (SocketAddr::new(source, source_port), SocketAddr::new(destination, destination_port))
    }
}

/// Encodes the header for a TCP connection that `source` made to `destination`.
///
/// If one of them is IPv4 and the other IPv6, the IPv4 address is mapped into IPv6, since a header has one family.
/// Scope and flow label of IPv6 are not encoded.
pub fn encode(source: SocketAddr, destination: SocketAddr) -> BytesMut {
    let mut out = BytesMut::with_capacity(MAX_ENCODED);
    out.put_slice(&SIGNATURE);
    out.put_u8(0x21);
    match (source.ip().to_canonical(), destination.ip().to_canonical()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            out.put_u8(0x11);
            out.put_u16(12);
            out.put_slice(&from.octets());
            out.put_slice(&to.octets());
        }
        (from, to) => {
            out.put_u8(0x21);
            out.put_u16(36);
            out.put_slice(&mapped(from).octets());
            out.put_slice(&mapped(to).octets());
        }
    }
    out.put_u16(source.port());
    out.put_u16(destination.port());
    out
}

fn mapped(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

#[cfg(test)]
mod tests;

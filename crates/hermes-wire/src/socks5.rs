//! SOCKS version 5 (RFC 1928), server side.
//!
//! In: the first bytes of a connection, and the datagrams of an association. Out: the greeting, the request, the
//! destination of a datagram, and the replies. Names are never resolved here. Never: more than [`MAX_MESSAGE`] buffered
//! bytes of an incomplete message.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// The first byte of every message.
pub const VERSION: u8 = 5;

/// The longest message of a client, in bytes: a request with a name of 255 bytes.
pub const MAX_MESSAGE: usize = 4 + 1 + 255 + 2;

/// The longest header of a UDP datagram, in bytes.
pub const MAX_DATAGRAM_HEADER: usize = MAX_MESSAGE;

/// Address types (RFC 1928, section 5).
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

/// An authentication method (RFC 1928, section 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// No authentication.
    None,
    /// The client offers no acceptable method.
    Unacceptable,
}

impl Method {
    fn number(self) -> u8 {
        match self {
            Method::None => 0,
            Method::Unacceptable => 0xff,
        }
    }

    /// The reply to a greeting. After `Unacceptable` the client must close.
    pub fn selection(self) -> [u8; 2] {
        [VERSION, self.number()]
    }
}

/// A client's first message: its authentication methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting<'a> {
    methods: &'a [u8],
}

impl<'a> Greeting<'a> {
    /// Parses the greeting at the front of `bytes`, with its length; `None` if it is incomplete.
    ///
    /// # Errors
    /// The client speaks another protocol.
    pub fn parse(bytes: &'a [u8]) -> Result<Option<(Self, usize)>, Socks5Error> {
        check_version(bytes)?;
        let Some(count) = bytes.get(1) else { return Ok(None) };
        let len = 2 + usize::from(*count);
        Ok(bytes.get(2..len).map(|methods| (Self { methods }, len)))
    }

    /// Whether the client offers this method.
    pub fn offers(&self, method: Method) -> bool {
        method != Method::Unacceptable && self.methods.contains(&method.number())
    }
}

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// A TCP connection to the target.
    Connect,
    /// A port at which the target may connect to the client.
    Bind,
    /// A UDP relay. The target is the client's source address, if it knows it.
    UdpAssociate,
    /// Unknown in RFC 1928.
    Unknown(u8),
}

/// A host in its original form: an address, or a name, which the overlay interprets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    /// An address.
    Ip(IpAddr),
    /// A name of 1 to 255 bytes, UTF-8. Not checked further.
    Name(Box<str>),
}

/// A host and a port. `Display` formats an authority: `VIDEO:80`, `[::1]:80`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// The host.
    pub host: Host,
    /// The port; 0 if the client does not know it.
    pub port: u16,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            // Some clients send addresses as names.
            Host::Name(name) if name.parse::<Ipv6Addr>().is_ok() => write!(f, "[{name}]:{}", self.port),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

impl Target {
    /// Parses the address type, address and port at the front of `bytes`, with their length.
    fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, Socks5Error> {
        let Some((kind, rest)) = bytes.split_first() else { return Ok(None) };
        let (skip, length) = match *kind {
            IPV4 => (0, 4),
            IPV6 => (0, 16),
            NAME => match rest.first() {
                Some(0) => return Err(Socks5Error::EmptyName),
                Some(length) => (1, usize::from(*length)),
                None => return Ok(None),
            },
            other => return Err(Socks5Error::AddressType(other)),
        };
        let Some(mut rest) = rest.get(skip..skip + length + 2) else { return Ok(None) };
        let host = match *kind {
            IPV4 => Host::Ip(Ipv4Addr::from(rest.get_u32()).into()),
            IPV6 => Host::Ip(Ipv6Addr::from(rest.get_u128()).into()),
            _ => {
                let (name, port) = rest.split_at(length);
                rest = port;
                Host::Name(std::str::from_utf8(name).map_err(|_| Socks5Error::Name)?.into())
            }
        };
        Ok(Some((Self { host, port: rest.get_u16() }, 1 + skip + length + 2)))
    }
}

/// A client's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// The target.
    pub target: Target,
}

impl Request {
    /// Parses the request at the front of `bytes`, with its length; `None` if it is incomplete.
    ///
    /// # Errors
    /// The request is malformed; [`Socks5Error::reply`] is the reply to the client.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, Socks5Error> {
        check_version(bytes)?;
        let [_, command, reserved, address @ ..] = bytes else { return Ok(None) };
        if *reserved != 0 {
            return Err(Socks5Error::Reserved);
        }
        let command = match command {
            1 => Command::Connect,
            2 => Command::Bind,
            3 => Command::UdpAssociate,
            other => Command::Unknown(*other),
        };
        Ok(Target::parse(address)?.map(|(target, length)| (Self { command, target }, 3 + length)))
    }
}

/// The reply code for a request (RFC 1928, section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Succeeded.
    Succeeded = 0,
    /// General failure, without a more specific code.
    Failed = 1,
    /// The rules forbid the request.
    NotAllowed = 2,
    /// The network is unreachable.
    NetworkUnreachable = 3,
    /// The host is unknown or unreachable.
    HostUnreachable = 4,
    /// Connection refused.
    Refused = 5,
    /// Timeout, or TTL expired.
    Expired = 6,
    /// The command is not supported.
    CommandUnsupported = 7,
    /// The address type is not supported.
    AddressUnsupported = 8,
}

impl Reply {
    /// Encodes the reply with the address that is bound for the client. For CONNECT the address is unspecified if it is
    /// not known.
    pub fn encode(self, bound: SocketAddr) -> Bytes {
        let mut out = BytesMut::with_capacity(MAX_MESSAGE);
        out.put_slice(&[VERSION, self as u8, 0]);
        match bound.ip() {
            IpAddr::V4(ip) => {
                out.put_u8(IPV4);
                out.put_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                out.put_u8(IPV6);
                out.put_slice(&ip.octets());
            }
        }
        out.put_u16(bound.port());
        out.freeze()
    }
}

/// The reason why a message is not SOCKS 5, or not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Socks5Error {
    /// The client speaks SOCKS 4, or another protocol.
    #[error("not SOCKS 5: version byte is {0}, expected 5; configure the client for SOCKS 5")]
    Version(u8),
    /// A reserved byte is not 0.
    #[error("reserved byte is not 0")]
    Reserved,
    /// The address type is neither IPv4, IPv6 nor a name.
    #[error("unknown address type {0}")]
    AddressType(u8),
    /// The name is empty.
    #[error("empty name")]
    EmptyName,
    /// The name is not UTF-8.
    #[error("name is not UTF-8")]
    Name,
    /// The datagram ends before its address does.
    #[error("datagram truncated within its header")]
    Cut,
    /// The datagram is a fragment, which a relay may drop (RFC 1928).
    #[error("fragmented datagrams are not supported")]
    Fragment,
}

impl Socks5Error {
    /// The reply to the client; `None` if it speaks another protocol.
    pub fn reply(&self) -> Option<Reply> {
        match self {
            Socks5Error::Version(_) => None,
            Socks5Error::AddressType(_) => Some(Reply::AddressUnsupported),
            _ => Some(Reply::Failed),
        }
    }
}

/// Splits a client's datagram into header and payload. Replies use the same header.
///
/// # Errors
/// The datagram is a fragment or malformed. RFC 1928 requires that it is dropped silently.
pub fn split_datagram(mut datagram: Bytes) -> Result<(Bytes, Bytes), Socks5Error> {
    let (_, length) = parse_header(&datagram)?;
    let header = datagram.split_to(length);
    Ok((header, datagram))
}

/// The destination of a datagram with this header.
///
/// # Errors
/// The datagram is a fragment or malformed.
pub fn datagram_target(header: &[u8]) -> Result<Target, Socks5Error> {
    parse_header(header).map(|(target, _)| target)
}

fn parse_header(datagram: &[u8]) -> Result<(Target, usize), Socks5Error> {
    let [reserved @ .., fragment] = datagram.first_chunk::<3>().ok_or(Socks5Error::Cut)?;
    if *reserved != [0, 0] {
        return Err(Socks5Error::Reserved);
    }
    if *fragment != 0 {
        return Err(Socks5Error::Fragment);
    }
    let (target, length) = Target::parse(&datagram[3..])?.ok_or(Socks5Error::Cut)?;
    Ok((target, 3 + length))
}

fn check_version(bytes: &[u8]) -> Result<(), Socks5Error> {
    match bytes.first() {
        Some(&VERSION) | None => Ok(()),
        Some(other) => Err(Socks5Error::Version(*other)),
    }
}

#[cfg(test)]
mod tests;

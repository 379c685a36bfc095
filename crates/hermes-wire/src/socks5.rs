//! SOCKS, version 5 (RFC 1928), as a server reads it.
//!
//! In: the first bytes of a connection, and the datagrams of an association. Out: greeting, request,
//! and where a datagram goes; the answers to them. Names stay names: they are never resolved here.
//! Never: more than [`MAX_MESSAGE`] bytes of a message that is not whole yet.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// The first byte of every message.
pub const VERSION: u8 = 5;

/// The longest message of a client, in bytes: a request with a name of 255.
pub const MAX_MESSAGE: usize = 4 + 1 + 255 + 2;

/// What comes before the payload of a datagram at most, in bytes.
pub const MAX_DATAGRAM_HEADER: usize = MAX_MESSAGE;

/// Address types (RFC 1928, 5).
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

/// How a client may prove who it is (RFC 1928, 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Not at all.
    None,
    /// No method that it offers will do.
    Unacceptable,
}

impl Method {
    fn number(self) -> u8 {
        match self {
            Method::None => 0,
            Method::Unacceptable => 0xff,
        }
    }

    /// The answer to a greeting. After `Unacceptable` the client closes.
    pub fn selection(self) -> [u8; 2] {
        [VERSION, self.number()]
    }
}

/// A client's first message: the methods that it offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting<'a> {
    methods: &'a [u8],
}

impl<'a> Greeting<'a> {
    /// Reads the greeting at the front of `bytes`, with its length; `None` where more has to come.
    ///
    /// # Errors
    /// Another protocol is spoken.
    pub fn parse(bytes: &'a [u8]) -> Result<Option<(Self, usize)>, Socks5Error> {
        check_version(bytes)?;
        let Some(count) = bytes.get(1) else { return Ok(None) };
        let len = 2 + usize::from(*count);
        Ok(bytes.get(2..len).map(|methods| (Self { methods }, len)))
    }

    /// Does the client offer this method?
    pub fn offers(&self, method: Method) -> bool {
        method != Method::Unacceptable && self.methods.contains(&method.number())
    }
}

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// A TCP connection to the target.
    Connect,
    /// A port at which somebody else may connect to it.
    Bind,
    /// A relay of its datagrams. The target is where it will send them from, if it knows.
    UdpAssociate,
    /// None that RFC 1928 knows.
    Unknown(u8),
}

/// A host as it was written: an address, or a name that means what the overlay makes of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    /// An address.
    Ip(IpAddr),
    /// A name of 1 to 255 bytes, UTF-8. Nothing else was checked.
    Name(Box<str>),
}

/// A host and a port. `Display` gives it as an authority: `VIDEO:80`, `[::1]:80`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Whom.
    pub host: Host,
    /// The port; 0 where a client does not know it.
    pub port: u16,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            // Some clients write addresses as names.
            Host::Name(name) if name.parse::<Ipv6Addr>().is_ok() => write!(f, "[{name}]:{}", self.port),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

impl Target {
    /// Reads address type, address and port at the front of `bytes`, with their length.
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
    /// What it asks for.
    pub command: Command,
    /// Whom it is about.
    pub target: Target,
}

impl Request {
    /// Reads the request at the front of `bytes`, with its length; `None` where more has to come.
    ///
    /// # Errors
    /// It is malformed; [`Socks5Error::reply`] says what the client is told.
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

/// What a client is told of its request (RFC 1928, 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It was done.
    Succeeded = 0,
    /// A failure that no other code says.
    Failed = 1,
    /// A rule forbids it.
    NotAllowed = 2,
    /// There is no way to it.
    NetworkUnreachable = 3,
    /// It is not known, or nobody is there.
    HostUnreachable = 4,
    /// It refused the connection.
    Refused = 5,
    /// It took too long, or went in a circle.
    Expired = 6,
    /// The command is not served here.
    CommandUnsupported = 7,
    /// The address is of a type that nobody knows.
    AddressUnsupported = 8,
}

impl Reply {
    /// The message, with the address that is bound for the client: for CONNECT unspecified, where
    /// nobody knows it.
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

/// Why a message is none of SOCKS 5, or is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Socks5Error {
    /// SOCKS 4, or something else altogether.
    #[error("the message begins with {0}, and SOCKS 5 with 5; set the client to SOCKS 5")]
    Version(u8),
    /// A byte that has to be 0.
    #[error("a reserved byte is not 0")]
    Reserved,
    /// Not IPv4, IPv6 or a name.
    #[error("address type {0} is unknown")]
    AddressType(u8),
    /// A name of no bytes.
    #[error("the name is empty")]
    EmptyName,
    /// A name that is no text.
    #[error("the name is not UTF-8")]
    Name,
    /// A datagram that ends before its address does.
    #[error("the datagram ends within its header")]
    Cut,
    /// A part of a datagram: RFC 1928 lets a relay drop those.
    #[error("the datagram is a fragment")]
    Fragment,
}

impl Socks5Error {
    /// What a client is told whose request it was; `None` where it speaks something else.
    pub fn reply(&self) -> Option<Reply> {
        match self {
            Socks5Error::Version(_) => None,
            Socks5Error::AddressType(_) => Some(Reply::AddressUnsupported),
            _ => Some(Reply::Failed),
        }
    }
}

/// A datagram of a client: the header, which also stands before each answer, and the payload.
///
/// # Errors
/// It is a fragment or malformed. RFC 1928 says that it is dropped without a word.
pub fn split_datagram(mut datagram: Bytes) -> Result<(Bytes, Bytes), Socks5Error> {
    let (_, length) = parse_header(&datagram)?;
    let header = datagram.split_to(length);
    Ok((header, datagram))
}

/// Where a datagram with this header goes.
///
/// # Errors
/// It is a fragment or malformed.
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

//! CONNECT-IP (RFC 9484): its URI template and its three capsules.
//!
//! In: the path of a request, or the payload of a capsule whose type the caller has read. Out: what
//! the request is scoped to; addresses that are assigned or asked for; routes. What is malformed by
//! the RFC is an error that ends the stream. Never: whether an address may be had or a route used.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::connect_udp;
use crate::varint;

/// What stands in front of the two variables (RFC 9484, section 3).
pub const PREFIX: &str = "/.well-known/masque/ip/";

/// Capsule type of ADDRESS_ASSIGN (section 4.7.1).
pub const ADDRESS_ASSIGN: u64 = 0x01;
/// Capsule type of ADDRESS_REQUEST (section 4.7.2).
pub const ADDRESS_REQUEST: u64 = 0x02;
/// Capsule type of ROUTE_ADVERTISEMENT (section 4.7.3).
pub const ROUTE_ADVERTISEMENT: u64 = 0x03;

/// Capsule type of our own, from the range that is for anyone: the longest IP packet that goes further
/// from here, as a variable-length integer. The last one counts. Who does not know it skips it (RFC 9297,
/// section 3.2), and learns the same by ICMP.
pub const MTU: u64 = 0x2d48_524d_5f4d_5455;

/// Another one: who sends it is about to go, and its peer had better open the session elsewhere, as GOAWAY says of a
/// whole connection over HTTP/2 and HTTP/3. It is empty.
pub const LEAVING: u64 = 0x2d48_524d_5f42_5945;

/// Addresses or ranges in one capsule. More are an error: a peer could otherwise have us hold and look
/// through as many as it likes for each packet.
pub const MOST_ENTRIES: usize = 1024;

/// The longest payload of one of the three capsules that can hold no more than [`MOST_ENTRIES`].
pub const MAX_CAPSULE: usize = MOST_ENTRIES * (varint::MAX_LEN + 1 + 2 * 16 + 1);

/// All but the unreserved characters of RFC 3986; `*` stands for itself, as the RFC writes it.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'*');

/// What a request asks for (section 4.6).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    /// Where packets may go.
    pub target: Target,
    /// The only IP protocol that may be used; `None` stands for `*`.
    pub protocol: Option<u8>,
}

/// Where packets of a request may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// `*`: anywhere.
    Any,
    /// A name, which the proxy resolves.
    Name(String),
    /// An address, or all of a prefix.
    Prefix(Prefix),
}

/// Addresses that begin alike. An address alone is a prefix of its whole length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Prefix {
    address: IpAddr,
    length: u8,
}

/// What is wrong with a path or with a capsule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectIpError {
    /// Not two segments, each followed by a slash.
    #[error("a CONNECT-IP path reads {PREFIX}TARGET/PROTOCOL/, with nothing behind it")]
    Shape,
    /// The target is neither `*`, a name, an address nor a prefix.
    #[error("the target of the CONNECT-IP path is no name, address or prefix: {0}")]
    Target(connect_udp::ConnectUdpError),
    /// The protocol is neither `*` nor 0 to 255.
    #[error("the protocol of the CONNECT-IP path is not `*` or a number from 0 to 255")]
    Protocol,
    /// A prefix longer than its address, or with bits set behind it.
    #[error("{address}/{length} is no prefix: it is longer than the address, or bits behind it are set")]
    Prefix {
        /// The address as it came.
        address: IpAddr,
        /// The length as it came.
        length: u8,
    },
    /// The capsule ends within an entry.
    #[error("a capsule of CONNECT-IP ends within an entry")]
    Truncated,
    /// An IP version that is neither 4 nor 6.
    #[error("a capsule of CONNECT-IP names IP version {0}; there are 4 and 6")]
    Version(u8),
    /// An ADDRESS_REQUEST that asks for nothing.
    #[error("an ADDRESS_REQUEST asks for no address")]
    NothingAsked,
    /// An ADDRESS_REQUEST with the identifier that stands for "not asked for".
    #[error("an ADDRESS_REQUEST has the request identifier 0")]
    ZeroRequest,
    /// A range that ends before it begins.
    #[error("the range {start}-{end} ends before it begins")]
    Range {
        /// Its first address.
        start: IpAddr,
        /// Its last address.
        end: IpAddr,
    },
    /// Ranges out of order, or that overlap.
    #[error("the ranges of a ROUTE_ADVERTISEMENT are not in order: version, protocol, address, none touching another")]
    Order,
    /// More entries than [`MOST_ENTRIES`].
    #[error("a capsule of CONNECT-IP has more than {MOST_ENTRIES} entries")]
    TooMany,
}

type Result<T> = std::result::Result<T, ConnectIpError>;

impl Prefix {
    /// A prefix.
    ///
    /// # Errors
    /// [`ConnectIpError::Prefix`]: it is longer than the address, or bits behind it are set.
    pub fn new(address: IpAddr, length: u8) -> Result<Self> {
        let this = Self { address, length };
        if length > bits(address) || this.first() != address {
            return Err(ConnectIpError::Prefix { address, length });
        }
        Ok(this)
    }

    /// One address.
    pub fn of(address: IpAddr) -> Self {
        Self { address, length: bits(address) }
    }

    /// Its address: the first of all that it covers.
    pub fn address(self) -> IpAddr {
        self.address
    }

    /// Its length in bits.
    pub fn length(self) -> u8 {
        self.length
    }

    /// Whether it covers this address.
    pub fn contains(self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => (own.to_bits() ^ other.to_bits()) & self.mask_v4() == 0,
            (IpAddr::V6(own), IpAddr::V6(other)) => (own.to_bits() ^ other.to_bits()) & self.mask_v6() == 0,
            _ => false,
        }
    }

    /// The last address that it covers.
    pub fn last(self) -> IpAddr {
        match self.address {
            IpAddr::V4(own) => Ipv4Addr::from_bits(own.to_bits() | !self.mask_v4()).into(),
            IpAddr::V6(own) => Ipv6Addr::from_bits(own.to_bits() | !self.mask_v6()).into(),
        }
    }

    fn first(self) -> IpAddr {
        match self.address {
            IpAddr::V4(own) => Ipv4Addr::from_bits(own.to_bits() & self.mask_v4()).into(),
            IpAddr::V6(own) => Ipv6Addr::from_bits(own.to_bits() & self.mask_v6()).into(),
        }
    }

    fn mask_v4(self) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(self.length.min(32))).unwrap_or(0)
    }

    fn mask_v6(self) -> u128 {
        u128::MAX.checked_shl(128 - u32::from(self.length.min(128))).unwrap_or(0)
    }
}

impl std::fmt::Display for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// The path of a CONNECT-IP request, by the default template.
pub fn path(scope: &Scope) -> String {
    let target = match &scope.target {
        Target::Any => "*".to_owned(),
        Target::Name(name) => name.clone(),
        Target::Prefix(prefix) if prefix.length == bits(prefix.address) => prefix.address.to_string(),
        Target::Prefix(prefix) => prefix.to_string(),
    };
    let protocol = scope.protocol.map_or_else(|| "*".to_owned(), |protocol| protocol.to_string());
    format!("{PREFIX}{}/{protocol}/", utf8_percent_encode(&target, RESERVED))
}

/// What the path of a request asks for. `None` if it is not of the template at all.
///
/// # Errors
/// It starts like the template and is malformed: 400 (section 4.6).
pub fn parse_path(path: &str) -> Result<Option<Scope>> {
    let Some(rest) = path.strip_prefix(PREFIX) else {
        return Ok(None);
    };
    let (target, rest) = rest.split_once('/').ok_or(ConnectIpError::Shape)?;
    let (protocol, rest) = rest.split_once('/').ok_or(ConnectIpError::Shape)?;
    if !rest.is_empty() {
        return Err(ConnectIpError::Shape);
    }
    Ok(Some(Scope { target: parse_target(target)?, protocol: parse_protocol(protocol)? }))
}

fn parse_target(encoded: &str) -> Result<Target> {
    if encoded == "*" || encoded.eq_ignore_ascii_case("%2a") {
        return Ok(Target::Any);
    }
    // The slash of a prefix is the one character that no host has.
    let decoded = percent_decode_str(encoded).decode_utf8_lossy();
    if let Some((address, length)) = decoded.split_once('/')
        && let (Ok(address), Some(length)) = (address.parse(), parse_number(length))
    {
        return Prefix::new(address, length).map(Target::Prefix);
    }
    let host = connect_udp::parse_host(encoded).map_err(ConnectIpError::Target)?;
    Ok(host.parse().map_or_else(|_| Target::Name(host.clone()), |address| Target::Prefix(Prefix::of(address))))
}

fn parse_protocol(text: &str) -> Result<Option<u8>> {
    if text == "*" || text.eq_ignore_ascii_case("%2a") {
        return Ok(None);
    }
    parse_number(text).map(Some).ok_or(ConnectIpError::Protocol)
}

/// `parse` alone would take a plus sign, and any number of leading zeros.
fn parse_number(text: &str) -> Option<u8> {
    (text.len() <= 3 && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
}

/// One entry of ADDRESS_ASSIGN or ADDRESS_REQUEST.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// What it answers, or what its answer will be known by. 0: it was not asked for.
    pub request: u64,
    /// The address or prefix. In a request, one of zeros asks for any.
    pub prefix: Prefix,
}

/// The payload of an [`MTU`] capsule.
pub fn mtu_payload(mtu: usize) -> BytesMut {
    let mut payload = BytesMut::new();
    varint::encode(mtu as u64, &mut payload);
    payload
}

/// The longest packet that goes further, of an [`MTU`] capsule.
///
/// # Errors
/// It is malformed.
pub fn parse_mtu(payload: &[u8]) -> Result<usize> {
    match varint::decode(payload) {
        Some((mtu, size)) if size == payload.len() => Ok(usize::try_from(mtu).unwrap_or(usize::MAX)),
        _ => Err(ConnectIpError::Truncated),
    }
}

/// Addresses that the receiver may send from, all of them: what an earlier capsule named and this one
/// does not is withdrawn (section 4.7.1).
///
/// # Errors
/// It is malformed.
pub fn parse_address_assign(payload: Bytes) -> Result<Vec<Address>> {
    parse_addresses(payload)
}

/// Addresses that the sender would like to have (section 4.7.2).
///
/// # Errors
/// It is malformed; also where it asks for nothing, or under the identifier 0.
pub fn parse_address_request(payload: Bytes) -> Result<Vec<Address>> {
    let wanted = parse_addresses(payload)?;
    if wanted.is_empty() {
        return Err(ConnectIpError::NothingAsked);
    }
    if wanted.iter().any(|address| address.request == 0) {
        return Err(ConnectIpError::ZeroRequest);
    }
    Ok(wanted)
}

fn parse_addresses(mut payload: Bytes) -> Result<Vec<Address>> {
    let mut addresses = Vec::new();
    while !payload.is_empty() {
        let (request, size) = varint::decode(&payload).ok_or(ConnectIpError::Truncated)?;
        payload.advance(size);
        let version = take_u8(&mut payload)?;
        let address = take_address(version, &mut payload)?;
        let prefix = Prefix::new(address, take_u8(&mut payload)?)?;
        push(&mut addresses, Address { request, prefix })?;
    }
    Ok(addresses)
}

/// The payload of an ADDRESS_ASSIGN or ADDRESS_REQUEST.
pub fn put_addresses(addresses: &[Address], out: &mut impl BufMut) {
    for Address { request, prefix } in addresses {
        varint::encode(*request, out);
        out.put_u8(version(prefix.address));
        put_address(prefix.address, out);
        out.put_u8(prefix.length);
    }
}

/// One entry of ROUTE_ADVERTISEMENT: packets to these addresses may be sent to its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The first address.
    pub start: IpAddr,
    /// The last address, of the same version.
    pub end: IpAddr,
    /// The only protocol; 0 stands for all.
    pub protocol: u8,
}

impl Route {
    /// All protocols, to all addresses of a prefix.
    pub fn to(prefix: Prefix) -> Self {
        Self { start: prefix.address, end: prefix.last(), protocol: 0 }
    }

    /// Whether it leads to this address, for this protocol. ICMP goes everywhere that anything may go
    /// (section 4.8).
    pub fn covers(&self, address: IpAddr, protocol: u8) -> bool {
        let is_same_version = self.start.is_ipv4() == address.is_ipv4();
        let is_icmp = protocol == if address.is_ipv4() { 1 } else { 58 };
        is_same_version
            && self.start <= address
            && address <= self.end
            && (self.protocol == 0 || self.protocol == protocol || is_icmp)
    }

    /// The order in which the RFC has them: version, protocol, address.
    fn comes_before(&self, next: &Self) -> bool {
        let key = |route: &Self| (version(route.start), route.protocol);
        key(self) < key(next) || (key(self) == key(next) && self.end < next.start)
    }
}

/// The routes of a ROUTE_ADVERTISEMENT, all of them: they replace those of an earlier one.
///
/// # Errors
/// It is malformed; also where the ranges are out of order or overlap (section 4.7.3).
pub fn parse_route_advertisement(mut payload: Bytes) -> Result<Vec<Route>> {
    let mut routes: Vec<Route> = Vec::new();
    while !payload.is_empty() {
        let version = take_u8(&mut payload)?;
        let start = take_address(version, &mut payload)?;
        let end = take_address(version, &mut payload)?;
        let protocol = take_u8(&mut payload)?;
        if start > end {
            return Err(ConnectIpError::Range { start, end });
        }
        let route = Route { start, end, protocol };
        if routes.last().is_some_and(|last| !last.comes_before(&route)) {
            return Err(ConnectIpError::Order);
        }
        push(&mut routes, route)?;
    }
    Ok(routes)
}

/// Brings routes into the order of the RFC. Ranges of one protocol that overlap or touch become one.
pub fn normalise(routes: &mut Vec<Route>) {
    routes.sort_by_key(|route| (version(route.start), route.protocol, route.start, route.end));
    let mut merged: Vec<Route> = Vec::with_capacity(routes.len());
    for route in routes.drain(..) {
        match merged.last_mut() {
            Some(last)
                if version(last.start) == version(route.start)
                    && last.protocol == route.protocol
                    && successor(last.end).is_none_or(|next| route.start <= next) =>
            {
                last.end = last.end.max(route.end);
            }
            _ => merged.push(route),
        }
    }
    *routes = merged;
}

/// The payload of a ROUTE_ADVERTISEMENT. The routes are as [`normalise`] leaves them.
pub fn put_routes(routes: &[Route], out: &mut impl BufMut) {
    for Route { start, end, protocol } in routes {
        out.put_u8(version(*start));
        put_address(*start, out);
        put_address(*end, out);
        out.put_u8(*protocol);
    }
}

fn push<T>(entries: &mut Vec<T>, entry: T) -> Result<()> {
    if entries.len() == MOST_ENTRIES {
        return Err(ConnectIpError::TooMany);
    }
    entries.push(entry);
    Ok(())
}

/// `None` behind the last address that there is.
fn successor(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(address) => address.to_bits().checked_add(1).map(|bits| Ipv4Addr::from_bits(bits).into()),
        IpAddr::V6(address) => address.to_bits().checked_add(1).map(|bits| Ipv6Addr::from_bits(bits).into()),
    }
}

fn version(address: IpAddr) -> u8 {
    if address.is_ipv4() { 4 } else { 6 }
}

fn take_u8(payload: &mut Bytes) -> Result<u8> {
    payload.try_get_u8().map_err(|_| ConnectIpError::Truncated)
}

fn take_address(version: u8, payload: &mut Bytes) -> Result<IpAddr> {
    let truncated = |_| ConnectIpError::Truncated;
    match version {
        4 => Ok(Ipv4Addr::from_bits(payload.try_get_u32().map_err(truncated)?).into()),
        6 => Ok(Ipv6Addr::from_bits(payload.try_get_u128().map_err(truncated)?).into()),
        other => Err(ConnectIpError::Version(other)),
    }
}

fn put_address(address: IpAddr, out: &mut impl BufMut) {
    match address {
        IpAddr::V4(address) => out.put_u32(address.to_bits()),
        IpAddr::V6(address) => out.put_u128(address.to_bits()),
    }
}

#[cfg(test)]
mod tests;

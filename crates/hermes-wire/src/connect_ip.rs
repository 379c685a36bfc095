//! CONNECT-IP (RFC 9484): its URI template and its three capsules.
//!
//! In: the path of a request, or the payload of a capsule whose type the caller has read. Out: the scope of the
//! request; assigned or requested addresses; routes. Malformed capsules are errors that end the stream. Never: whether
//! an address may be assigned or a route used.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::connect_udp;
use crate::varint;

/// The path before the two variables (RFC 9484, section 3).
pub const PREFIX: &str = "/.well-known/masque/ip/";

/// Capsule type of ADDRESS_ASSIGN (section 4.7.1).
pub const ADDRESS_ASSIGN: u64 = 0x01;
/// Capsule type of ADDRESS_REQUEST (section 4.7.2).
pub const ADDRESS_REQUEST: u64 = 0x02;
/// Capsule type of ROUTE_ADVERTISEMENT (section 4.7.3).
pub const ROUTE_ADVERTISEMENT: u64 = 0x03;

/// A private capsule type: the largest IP packet that is forwarded from here, as a variable-length integer. The last
/// capsule applies. Peers that do not know it skip it (RFC 9297, section 3.2), and learn the MTU by ICMP.
pub const MTU: u64 = 0x2d48_524d_5f4d_5455;

/// A private capsule type: the sender is about to drain, and its peer should open the session elsewhere. GOAWAY does
/// the same for a whole connection of HTTP/2 and HTTP/3. The payload is empty.
pub const LEAVING: u64 = 0x2d48_524d_5f42_5945;

/// Maximum number of addresses or ranges in one capsule. The limit bounds the memory and the search for each packet.
pub const MAX_ENTRIES: usize = 1024;

/// The longest payload of one of the three capsules with at most [`MAX_ENTRIES`] entries.
pub const MAX_CAPSULE: usize = MAX_ENTRIES * (varint::MAX_LEN + 1 + 2 * 16 + 1);

/// All but the unreserved characters of RFC 3986; `*` is not encoded, as in the RFC.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'*');

/// The scope of a request (section 4.6).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    /// The allowed destinations.
    pub target: Target,
    /// The only allowed IP protocol; `None` stands for `*`.
    pub protocol: Option<u8>,
}

/// The allowed destinations of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// `*`: all destinations.
    Any,
    /// A name, which the proxy resolves.
    Name(String),
    /// An address, or all addresses of a prefix.
    Prefix(Prefix),
}

/// An address prefix. A single address is a prefix of its full length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Prefix {
    address: IpAddr,
    length: u8,
}

/// An error in a path or in a capsule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectIpError {
    /// The path does not have two segments, each followed by a slash.
    #[error("malformed CONNECT-IP path; expected {PREFIX}TARGET/PROTOCOL/")]
    Shape,
    /// The target is neither `*`, a name, an address nor a prefix.
    #[error("invalid target in CONNECT-IP path: {0}")]
    Target(connect_udp::ConnectUdpError),
    /// The protocol is neither `*` nor 0 to 255.
    #[error("invalid protocol in CONNECT-IP path; expected `*` or a number from 0 to 255")]
    Protocol,
    /// The prefix is longer than its address, or has host bits set.
    #[error("invalid prefix {address}/{length}: longer than the address, or host bits are set")]
    Prefix {
        /// The address in the message.
        address: IpAddr,
        /// The length in the message.
        length: u8,
    },
    /// The capsule ends within an entry.
    #[error("CONNECT-IP capsule truncated within an entry")]
    Truncated,
    /// The IP version is neither 4 nor 6.
    #[error("CONNECT-IP capsule with unknown IP version {0}; expected 4 or 6")]
    Version(u8),
    /// The ADDRESS_REQUEST is empty.
    #[error("empty ADDRESS_REQUEST")]
    NothingAsked,
    /// The request identifier is 0, which is reserved for unrequested addresses.
    #[error("ADDRESS_REQUEST with the reserved request identifier 0")]
    ZeroRequest,
    /// The end of a range is before its start.
    #[error("invalid range {start}-{end}: the end is before the start")]
    Range {
        /// The first address of the range.
        start: IpAddr,
        /// The last address of the range.
        end: IpAddr,
    },
    /// The ranges are out of order, or overlap.
    #[error("ROUTE_ADVERTISEMENT ranges overlap or are not sorted by version, protocol and address")]
    Order,
    /// The capsule has more entries than [`MAX_ENTRIES`].
    #[error("CONNECT-IP capsule with more than {MAX_ENTRIES} entries")]
    TooMany,
}

type Result<T> = std::result::Result<T, ConnectIpError>;

impl Prefix {
    /// Creates a prefix.
    ///
    /// # Errors
    /// [`ConnectIpError::Prefix`]: it is longer than the address, or host bits are set.
    pub fn new(address: IpAddr, length: u8) -> Result<Self> {
        let this = Self { address, length };
        if length > bits(address) || this.first() != address {
            return Err(ConnectIpError::Prefix { address, length });
        }
        Ok(this)
    }

    /// The prefix of a single address.
    pub fn of(address: IpAddr) -> Self {
        Self { address, length: bits(address) }
    }

    /// The first address of the prefix.
    pub fn address(self) -> IpAddr {
        self.address
    }

    /// The length in bits.
    pub fn length(self) -> u8 {
        self.length
    }

    /// Whether the prefix contains this address.
    pub fn contains(self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => (own.to_bits() ^ other.to_bits()) & self.mask_v4() == 0,
            (IpAddr::V6(own), IpAddr::V6(other)) => (own.to_bits() ^ other.to_bits()) & self.mask_v6() == 0,
            _ => false,
        }
    }

    /// The last address of the prefix.
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

/// Parses the path of a request. `None` if it does not begin like the template.
///
/// # Errors
/// The path begins like the template but is malformed: status 400 (section 4.6).
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
    // Only a prefix has a slash; no host does.
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

/// Stricter than `parse`, which accepts a plus sign and any number of leading zeros.
fn parse_number(text: &str) -> Option<u8> {
    (text.len() <= 3 && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
}

/// An entry of ADDRESS_ASSIGN or ADDRESS_REQUEST.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The request identifier, which links a request and its assignment. 0: an unrequested assignment.
    pub request: u64,
    /// The address or prefix. In a request, an address of zeros asks for any.
    pub prefix: Prefix,
}

/// The payload of an [`MTU`] capsule.
pub fn mtu_payload(mtu: usize) -> BytesMut {
    let mut payload = BytesMut::new();
    varint::encode(mtu as u64, &mut payload);
    payload
}

/// Parses the largest forwarded packet from an [`MTU`] capsule.
///
/// # Errors
/// The payload is malformed.
pub fn parse_mtu(payload: &[u8]) -> Result<usize> {
    match varint::decode(payload) {
        Some((mtu, size)) if size == payload.len() => Ok(usize::try_from(mtu).unwrap_or(usize::MAX)),
        _ => Err(ConnectIpError::Truncated),
    }
}

/// Parses the addresses that the receiver may use as sources. The list is complete: addresses of an earlier capsule
/// that are not listed are withdrawn (section 4.7.1).
///
/// # Errors
/// The payload is malformed.
pub fn parse_address_assign(payload: Bytes) -> Result<Vec<Address>> {
    parse_addresses(payload)
}

/// Parses the addresses that the sender requests (section 4.7.2).
///
/// # Errors
/// The payload is malformed, empty, or has the identifier 0.
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

/// Encodes the payload of an ADDRESS_ASSIGN or ADDRESS_REQUEST.
pub fn put_addresses(addresses: &[Address], out: &mut impl BufMut) {
    for Address { request, prefix } in addresses {
        varint::encode(*request, out);
        out.put_u8(version(prefix.address));
        put_address(prefix.address, out);
        out.put_u8(prefix.length);
    }
}

/// An entry of ROUTE_ADVERTISEMENT: its sender forwards packets to these addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The first address.
    pub start: IpAddr,
    /// The last address, of the same version.
    pub end: IpAddr,
    /// The only allowed protocol; 0 stands for all.
    pub protocol: u8,
}

impl Route {
    /// A route for all protocols to all addresses of a prefix.
    pub fn to(prefix: Prefix) -> Self {
        Self { start: prefix.address, end: prefix.last(), protocol: 0 }
    }

    /// Whether the route covers this address and protocol. ICMP is always allowed (section 4.8).
    pub fn covers(&self, address: IpAddr, protocol: u8) -> bool {
        let is_same_version = self.start.is_ipv4() == address.is_ipv4();
        let is_icmp = protocol == if address.is_ipv4() { 1 } else { 58 };
        is_same_version
            && self.start <= address
            && address <= self.end
            && (self.protocol == 0 || self.protocol == protocol || is_icmp)
    }

    /// The order that the RFC requires: version, protocol, address.
    fn comes_before(&self, next: &Self) -> bool {
        let key = |route: &Self| (version(route.start), route.protocol);
        key(self) < key(next) || (key(self) == key(next) && self.end < next.start)
    }
}

/// Parses the routes of a ROUTE_ADVERTISEMENT. They replace those of an earlier one.
///
/// # Errors
/// The payload is malformed, or its ranges are out of order or overlap (section 4.7.3).
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

/// Sorts routes in the order of the RFC. Merges overlapping or adjacent ranges of one protocol.
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

/// Encodes the payload of a ROUTE_ADVERTISEMENT. The routes must be sorted by [`normalise`].
pub fn put_routes(routes: &[Route], out: &mut impl BufMut) {
    for Route { start, end, protocol } in routes {
        out.put_u8(version(*start));
        put_address(*start, out);
        put_address(*end, out);
        out.put_u8(*protocol);
    }
}

fn push<T>(entries: &mut Vec<T>, entry: T) -> Result<()> {
    if entries.len() == MAX_ENTRIES {
        return Err(ConnectIpError::TooMany);
    }
    entries.push(entry);
    Ok(())
}

/// The next address; `None` after the last one.
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

//! IP packets, as far as a forwarding node must inspect them: RFC 791, 8200, 792, 4443.
//!
//! In: a packet from a device or a tunnel. Out: its addresses and protocol; the packet with a lower MSS; its fragments;
//! the ICMP error for it. Never: connection state, a route, a clock, or a changed hop limit: the kernels on both sides
//! of a tunnel route packets and decrement it. Forwarded bytes after the transport header are not inspected.

mod readdress;
mod transport;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use self::readdress::{Side, readdress, readdress_cited};
pub use self::transport::{ACK, FIN, RST, SYN, ports, set_port, tcp_flags, tcp_reset};

/// ICMP as an IPv4 protocol number.
pub const ICMP: u8 = 1;
/// The protocol number of TCP.
pub const TCP: u8 = 6;
/// The protocol number of UDP.
pub const UDP: u8 = 17;
/// ICMPv6 as a next header.
pub const ICMPV6: u8 = 58;

/// The smallest MTU of a link that carries IPv6 (RFC 8200, section 5).
pub const MIN_MTU_V6: usize = 1280;
/// The smallest MTU of a link that carries IPv4 (RFC 791, section 3.2).
pub const MIN_MTU_V4: usize = 68;

const HEADER_V4: usize = 20;
const HEADER_V6: usize = 40;
/// Bytes of an ICMP error before the packet that it cites.
const MIN_ICMP: usize = 8;
/// The maximum size of an ICMPv4 error (RFC 1812, section 4.3.2.3).
const MAX_ICMP_V4: usize = 576;
/// The maximum number of extension headers: a packet with more is invalid.
const MAX_EXTENSION_HEADERS: usize = 16;
/// The hop limit of packets that are created here (RFC 1700: 64).
const OWN_HOP_LIMIT: u8 = 64;

/// The header fields of a packet that matter for forwarding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The source address.
    pub source: IpAddr,
    /// The destination address.
    pub destination: IpAddr,
    /// The transport protocol; for IPv6 the next header after all extensions (RFC 9484, section 4.8).
    pub protocol: u8,
    /// The offset of the transport header.
    pub transport: usize,
    /// Bytes of the whole packet.
    pub length: usize,
    /// The packet is a fragment other than the first, without a transport header.
    pub is_later_fragment: bool,
    /// Routers may fragment it (IPv4 without DF).
    pub may_be_cut: bool,
    /// The packet has a source-route option (IPv4) or a routing header (IPv6), so its destination address is not where
    /// it ends.
    pub is_source_routed: bool,
    /// The TTL or hop limit.
    pub hops: u8,
}

/// The reason why bytes are not a valid packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// The packet is shorter than its headers.
    #[error("truncated packet: {0} bytes end within its headers")]
    Truncated(usize),
    /// The version is neither 4 nor 6.
    #[error("unknown IP version {0}")]
    Version(u8),
    /// The length field differs from the packet's length.
    #[error("packet length field is {said}, but the packet has {has} bytes")]
    Length {
        /// The length field.
        said: usize,
        /// The packet's length.
        has: usize,
    },
    /// The IPv4 header length is below 20 bytes.
    #[error("invalid IPv4 header length {0}")]
    HeaderLength(usize),
    /// The packet has more extension headers than any sender needs.
    #[error("packet with more than {MAX_EXTENSION_HEADERS} extension headers")]
    TooManyExtensions,
    /// The checksum of the IPv4 header is wrong.
    #[error("wrong IPv4 header checksum")]
    Checksum,
}

type Result<T> = std::result::Result<T, PacketError>;

/// Parses a packet's headers. The length field must match the packet's length, and the checksum of an IPv4 header must
/// be right: only such packets are forwarded.
///
/// `PacketError`: the packet is invalid.
pub fn parse(packet: &[u8]) -> Result<Header> {
    match packet.first().map(|byte| byte >> 4) {
        Some(4) => parse_v4(packet),
        Some(6) => parse_v6(packet),
        Some(other) => Err(PacketError::Version(other)),
        None => Err(PacketError::Truncated(0)),
    }
}

fn parse_v4(packet: &[u8]) -> Result<Header> {
    let head: &[u8; HEADER_V4] = packet.first_chunk().ok_or(PacketError::Truncated(packet.len()))?;
    let transport = usize::from(head[0] & 0xf) * 4;
    if transport < HEADER_V4 {
        return Err(PacketError::HeaderLength(transport));
    }
    let said = usize::from(u16::from_be_bytes([head[2], head[3]]));
    if said != packet.len() {
        return Err(PacketError::Length { said, has: packet.len() });
    }
    let whole = packet.get(..transport).ok_or(PacketError::Truncated(packet.len()))?;
    if checksum(sum(whole)) != 0 {
        return Err(PacketError::Checksum);
    }
    let fragment = u16::from_be_bytes([head[6], head[7]]);
    Ok(Header {
        source: Ipv4Addr::new(head[12], head[13], head[14], head[15]).into(),
        destination: Ipv4Addr::new(head[16], head[17], head[18], head[19]).into(),
        protocol: head[9],
        transport,
        length: said,
        is_later_fragment: fragment & 0x1fff != 0,
        may_be_cut: fragment & 0x4000 == 0,
        is_source_routed: has_source_route(&whole[HEADER_V4..]),
        hops: head[8],
    })
}

fn parse_v6(packet: &[u8]) -> Result<Header> {
    let head: &[u8; HEADER_V6] = packet.first_chunk().ok_or(PacketError::Truncated(packet.len()))?;
    let said = HEADER_V6 + usize::from(u16::from_be_bytes([head[4], head[5]]));
    if said != packet.len() {
        return Err(PacketError::Length { said, has: packet.len() });
    }
    let Transport { protocol, at: transport, is_later_fragment, is_source_routed } = transport_v6(packet, head[6])?;
    Ok(Header {
        source: address_v6(&packet[8..24]),
        destination: address_v6(&packet[24..40]),
        protocol,
        transport,
        length: said,
        is_later_fragment,
        may_be_cut: false,
        is_source_routed,
        hops: head[7],
    })
}

/// Whether IPv4 options contain a loose or a strict source route (RFC 791, section 3.1).
fn has_source_route(mut options: &[u8]) -> bool {
    while let [kind, rest @ ..] = options {
        let length = match (kind, rest.first()) {
            (0, _) => return false,
            (1, _) => 1,
            (131 | 137, _) => return true,
            (_, Some(length)) => usize::from(*length),
            (_, None) => return false,
        };
        match options.get(length.max(1)..) {
            Some(behind) => options = behind,
            None => return false,
        }
    }
    false
}

/// The transport header after the extension headers.
struct Transport {
    protocol: u8,
    at: usize,
    /// The packet is a later fragment, without a transport header.
    is_later_fragment: bool,
    /// The packet has a routing header.
    is_source_routed: bool,
}

/// Skips the extension headers.
fn transport_v6(packet: &[u8], first: u8) -> Result<Transport> {
    let (mut next, mut at, mut is_source_routed) = (first, HEADER_V6, false);
    for _ in 0..MAX_EXTENSION_HEADERS {
        let is_extension = matches!(next, 0 | 43 | 44 | 51 | 60 | 135 | 139 | 140);
        if !is_extension {
            return Ok(Transport { protocol: next, at, is_later_fragment: false, is_source_routed });
        }
        is_source_routed |= next == 43;
        let head = packet.get(at..at + 8).ok_or(PacketError::Truncated(packet.len()))?;
        let size = match next {
            44 => 8,
            // The unit of this length is four bytes, minus two (RFC 4302, section 2.2).
            51 => (usize::from(head[1]) + 2) * 4,
            _ => (usize::from(head[1]) + 1) * 8,
        };
        let is_later = next == 44 && u16::from_be_bytes([head[2], head[3]]) & 0xfff8 != 0;
        (next, at) = (head[0], at + size);
        if at > packet.len() {
            return Err(PacketError::Truncated(packet.len()));
        }
        if is_later {
            return Ok(Transport { protocol: next, at, is_later_fragment: true, is_source_routed });
        }
    }
    Err(PacketError::TooManyExtensions)
}

/// The source and destination address. Checks nothing else of the packet.
pub fn ends(packet: &[u8]) -> Option<(IpAddr, IpAddr)> {
    let v4 = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).ok().map(|bytes| Ipv4Addr::from(bytes).into());
    match packet.first()? >> 4 {
        4 => Some((v4(packet.get(12..16)?)?, v4(packet.get(16..20)?)?)),
        6 => Some((address_v6(packet.get(8..24)?), address_v6(packet.get(24..40)?))),
        _ => None,
    }
}

/// The slice has sixteen bytes.
fn address_v6(bytes: &[u8]) -> IpAddr {
    Ipv6Addr::from(<[u8; 16]>::try_from(bytes).unwrap_or_default()).into()
}

/// Lowers the MSS of a TCP SYN, so that its segments fit into packets of `mtu` bytes (RFC 9293, section 3.7.1). Returns
/// true if it was higher. The packet must have been parsed by [`parse`].
pub fn clamp_mss(packet: &mut [u8], header: &Header, mtu: usize) -> bool {
    let at = header.transport;
    let is_syn =
        header.protocol == TCP && !header.is_later_fragment && packet.len() >= at + 20 && packet[at + 13] & 2 != 0;
    if !is_syn {
        return false;
    }
    let ip = if header.source.is_ipv4() { HEADER_V4 } else { HEADER_V6 };
    let Ok(most) = u16::try_from(mtu.saturating_sub(ip + 20)) else { return false };
    let end = (at + usize::from(packet[at + 12] >> 4) * 4).min(packet.len());
    let mut option = at + 20;
    while option + 1 < end {
        match packet[option] {
            0 => break,
            1 => option += 1,
            2 if packet[option + 1] == 4 && option + 4 <= end => {
                let offered = u16::from_be_bytes([packet[option + 2], packet[option + 3]]);
                if offered <= most {
                    return false;
                }
                packet[option + 2..option + 4].copy_from_slice(&most.to_be_bytes());
                let is_odd = (option + 2 - at) % 2 == 1;
                let turn = |value: u16| if is_odd { value.swap_bytes() } else { value };
                adjust(packet, at + 16, turn(offered), turn(most));
                return true;
            }
            _ if packet[option + 1] < 2 => break,
            _ => option += usize::from(packet[option + 1]),
        }
    }
    false
}

/// Fragments an IPv4 packet that [`parse`] accepted, and that may be fragmented, into packets of at most `mtu` bytes
/// (RFC 791, section 3.2), at least [`MIN_MTU_V4`]. Returns none if the packet is a fragment that would end beyond the
/// largest packet, so that nobody could reassemble it.
pub fn fragment(packet: &[u8], header: &Header, mtu: usize) -> Vec<Vec<u8>> {
    let (head, payload) = packet.split_at(header.transport);
    let before = u16::from_be_bytes([head[6], head[7]]);
    let later = later_head(head);
    let mut fragments = Vec::new();
    let mut at = 0;
    while at < payload.len() || fragments.is_empty() {
        let head = if at == 0 { head } else { &later[..] };
        let room = (mtu.max(MIN_MTU_V4) - head.len()) & !7;
        let here = room.min(payload.len() - at);
        let is_last = at + here == payload.len();
        let mut fragment = [head, &payload[at..at + here]].concat();
        // Offsets count units of eight bytes; a fragment of a fragment continues at that one's offset.
        let offset = (before & 0x1fff) + (at / 8) as u16;
        if offset > 0x1fff {
            return Vec::new();
        }
        let more = if is_last { before & 0x2000 } else { 0x2000 };
        let length = fragment.len() as u16;
        fragment[2..4].copy_from_slice(&length.to_be_bytes());
        fragment[6..8].copy_from_slice(&(offset | more).to_be_bytes());
        finish_v4(&mut fragment, head.len());
        fragments.push(fragment);
        at += here;
    }
    fragments
}

/// The header of all fragments but the first: it keeps only the options with the copy flag.
fn later_head(head: &[u8]) -> Vec<u8> {
    let mut later = head[..HEADER_V4].to_vec();
    let mut at = HEADER_V4;
    while at < head.len() {
        let kind = head[at];
        let length = match kind {
            0 => break,
            1 => 1,
            _ => head.get(at + 1).map_or(0, |length| usize::from(*length)),
        };
        let Some(option) = head.get(at..at + length).filter(|_| kind == 1 || length >= 2) else { break };
        if kind & 0x80 != 0 {
            later.extend_from_slice(option);
        }
        at += length;
    }
    later.resize(later.len().next_multiple_of(4), 0);
    later[0] = 0x40 | (later.len() / 4) as u8;
    later
}

/// An ICMP error that is reported to the sender of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IcmpError {
    /// The packet is larger than the path MTU, which is given (RFC 1191, RFC 8201).
    TooBig(usize),
    /// No route leads to the destination.
    NoRoute,
    /// A policy forbids the packet (also: the source address does not belong to the sender).
    Prohibited,
}

/// Builds the ICMP error for a packet that [`parse`] accepted, from `own` to its sender. `None` if no error may be
/// sent: for errors, later fragments, and packets whose addresses are not those of single hosts (RFC 1122, section
/// 3.2.2; RFC 4443, section 2.4). The caller limits the rate.
pub fn icmp_error(packet: &[u8], header: &Header, cause: IcmpError, own: IpAddr) -> Option<Vec<u8>> {
    let may_be_to_many = matches!(cause, IcmpError::TooBig(_)) && header.source.is_ipv6();
    if header.is_later_fragment || !is_one_host(header.source) || !(may_be_to_many || is_one_host(header.destination)) {
        return None;
    }
    if is_icmp_error(packet, header) {
        return None;
    }
    match (own, header.source) {
        (IpAddr::V4(own), IpAddr::V4(to)) => Some(icmp_v4(packet, cause, own, to)),
        (IpAddr::V6(own), IpAddr::V6(to)) => Some(icmp_v6(packet, cause, own, to)),
        _ => None,
    }
}

/// Whether this can be the address of a single host: neither unspecified, nor multicast, nor broadcast.
pub fn is_one_host(address: IpAddr) -> bool {
    let is_broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast() || address.octets()[0] == 0);
    !(address.is_unspecified() || address.is_multicast() || is_broadcast)
}

/// Whether a packet that [`parse`] accepted is an ICMP error, or may be one.
pub fn is_icmp_error(packet: &[u8], header: &Header) -> bool {
    let kind = packet.get(header.transport);
    match header.protocol {
        // Only queries and their replies are not errors; a message without a type may be one.
        ICMP => !kind.is_some_and(|kind| matches!(kind, 0 | 8..=10 | 13..=18)),
        ICMPV6 => kind.is_none_or(|kind| *kind < 128),
        _ => false,
    }
}

/// The source and destination of the packet that an ICMP error cites. `None`: the packet is not an error that a router
/// on the path sends (destination unreachable, packet too big, time exceeded, parameter problem; RFC 792, RFC 4443), or
/// cites too few bytes. The error must have been parsed by [`parse`].
pub fn cited(packet: &[u8], header: &Header) -> Option<(IpAddr, IpAddr)> {
    let kind = *packet.get(header.transport)?;
    let is_error = match header.protocol {
        ICMP => matches!(kind, 3 | 11 | 12),
        ICMPV6 => matches!(kind, 1..=4),
        _ => false,
    };
    if !is_error || header.is_later_fragment {
        return None;
    }
    ends(packet.get(header.transport + MIN_ICMP..)?)
}

fn icmp_v4(packet: &[u8], cause: IcmpError, own: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    let (kind, code, rest) = match cause {
        IcmpError::TooBig(mtu) => (3, 4, u32::try_from(mtu.min(0xffff)).unwrap_or_default()),
        IcmpError::NoRoute => (3, 0, 0),
        IcmpError::Prohibited => (3, 13, 0),
    };
    let cited = &packet[..packet.len().min(MAX_ICMP_V4 - HEADER_V4 - 8)];
    let length = (HEADER_V4 + 8 + cited.len()) as u16;
    let mut error = vec![0x45, 0xc0];
    error.extend_from_slice(&length.to_be_bytes());
    error.extend_from_slice(&[0, 0, 0, 0, OWN_HOP_LIMIT, ICMP, 0, 0]);
    error.extend_from_slice(&own.octets());
    error.extend_from_slice(&to.octets());
    finish_v4(&mut error, HEADER_V4);
    error.extend_from_slice(&[kind, code, 0, 0]);
    error.extend_from_slice(&rest.to_be_bytes());
    error.extend_from_slice(cited);
    let check = checksum(sum(&error[HEADER_V4..]));
    error[HEADER_V4 + 2..HEADER_V4 + 4].copy_from_slice(&check.to_be_bytes());
    error
}

fn icmp_v6(packet: &[u8], cause: IcmpError, own: Ipv6Addr, to: Ipv6Addr) -> Vec<u8> {
    let (kind, code, rest) = match cause {
        IcmpError::TooBig(mtu) => (2, 0, u32::try_from(mtu).unwrap_or(u32::MAX)),
        IcmpError::NoRoute => (1, 0, 0),
        IcmpError::Prohibited => (1, 1, 0),
    };
    let cited = &packet[..packet.len().min(MIN_MTU_V6 - HEADER_V6 - 8)];
    let length = (8 + cited.len()) as u16;
    let mut error = vec![0x60, 0, 0, 0];
    error.extend_from_slice(&length.to_be_bytes());
    error.extend_from_slice(&[ICMPV6, OWN_HOP_LIMIT]);
    error.extend_from_slice(&own.octets());
    error.extend_from_slice(&to.octets());
    error.extend_from_slice(&[kind, code, 0, 0]);
    error.extend_from_slice(&rest.to_be_bytes());
    error.extend_from_slice(cited);
    // The pseudo-header: both addresses, length, next header (RFC 8200, section 8.1).
    let pseudo = sum(&error[8..HEADER_V6]) + u64::from(length) + u64::from(ICMPV6);
    let check = checksum(pseudo + sum(&error[HEADER_V6..]));
    error[HEADER_V6 + 2..HEADER_V6 + 4].copy_from_slice(&check.to_be_bytes());
    error
}

/// Sets the checksum of an IPv4 header of `header` bytes.
fn finish_v4(packet: &mut [u8], header: usize) {
    packet[10..12].fill(0);
    let check = checksum(sum(&packet[..header]));
    packet[10..12].copy_from_slice(&check.to_be_bytes());
}

/// The sum of 16-bit words, an odd byte padded (RFC 1071). It cannot overflow for a packet.
fn sum(bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(2);
    let odd = words.remainder().first().map_or(0, |byte| u64::from(*byte) << 8);
    words.map(|word| u64::from(u16::from_be_bytes([word[0], word[1]]))).sum::<u64>() + odd
}

fn checksum(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Updates the checksum at an offset after one word has changed (RFC 1624, equation 3).
fn adjust(packet: &mut [u8], at: usize, before: u16, after: u16) {
    let old = u16::from_be_bytes([packet[at], packet[at + 1]]);
    let new = checksum(u64::from(!old) + u64::from(!before) + u64::from(after));
    packet[at..at + 2].copy_from_slice(&new.to_be_bytes());
}

#[cfg(test)]
mod tests;

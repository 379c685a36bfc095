//! Address translation of packets (RFC 3022, section 4.1; RFC 7915, section 4.5).
//!
//! In: a parsed packet, and the new address. Out: the same packet with the new address and updated checksums. ICMP
//! errors cite a packet with the translated address: it changes there, too.

use std::net::IpAddr;

use super::{HEADER_V4, HEADER_V6, Header, ICMPV6, MIN_ICMP, TCP, UDP, adjust, is_icmp_error};

/// The address of a packet to replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The source address.
    Source,
    /// The destination address.
    Destination,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }

    /// The offset of the address in a header.
    fn offset(self, is_v4: bool) -> usize {
        match (self, is_v4) {
            (Self::Source, true) => 12,
            (Self::Destination, true) => 16,
            (Self::Source, false) => 8,
            (Self::Destination, false) => 24,
        }
    }
}

/// Replaces an address of a packet that [`parse`](super::parse) accepted. Returns false, without a change, if the new
/// address has another IP version.
pub fn readdress(packet: &mut [u8], header: &Header, side: Side, address: IpAddr) -> bool {
    if address.is_ipv4() != header.source.is_ipv4() {
        return false;
    }
    let before = if side == Side::Source { header.source } else { header.destination };
    // A router's error cites a packet of the opposite direction.
    if is_icmp_error(packet, header) && !header.is_later_fragment {
        readdress_within(packet, header, side.other(), before, address);
    }
    replace(packet, header, side, address);
    true
}

/// Replaces the address only in the packet that an ICMP error cites, for an error with other addresses itself. The
/// error must be one that [`cited`](super::cited) accepts.
pub fn readdress_cited(packet: &mut [u8], header: &Header, side: Side, before: IpAddr, address: IpAddr) {
    if before.is_ipv4() == address.is_ipv4() && address.is_ipv4() == header.source.is_ipv4() {
        readdress_within(packet, header, side, before, address);
    }
}

/// Replaces the address in the cited packet, which may be truncated, and updates the error's checksum.
fn readdress_within(packet: &mut [u8], header: &Header, side: Side, before: IpAddr, address: IpAddr) {
    let is_v4 = address.is_ipv4();
    let (outer, within) = packet.split_at_mut((header.transport + MIN_ICMP).min(header.length));
    let least = if is_v4 { HEADER_V4 } else { HEADER_V6 };
    let at = side.offset(is_v4);
    let length = if is_v4 { 4 } else { 16 };
    let is_whole = within.len() >= least && (within[0] >> 4 == 4) == is_v4;
    if !is_whole || octets(before) != within[at..at + length] {
        return;
    }
    let new = octets(address);
    let checksum = header.transport + 2;
    for index in (0..length).step_by(2) {
        let old_word = u16::from_be_bytes([within[at + index], within[at + index + 1]]);
        let new_word = u16::from_be_bytes([new[index], new[index + 1]]);
        if is_v4 {
            // The cited header's checksum changes by the opposite amount, so that of the error stays.
            adjust(within, 10, old_word, new_word);
        } else {
            adjust(outer, checksum, old_word, new_word);
        }
    }
    within[at..at + length].copy_from_slice(&new);
}

fn replace(packet: &mut [u8], header: &Header, side: Side, address: IpAddr) {
    let is_v4 = address.is_ipv4();
    let at = side.offset(is_v4);
    let new = octets(address);
    let checksum = transport_checksum(packet, header);
    for (index, word) in new.chunks_exact(2).enumerate() {
        let place = at + 2 * index;
        let old_word = u16::from_be_bytes([packet[place], packet[place + 1]]);
        let new_word = u16::from_be_bytes([word[0], word[1]]);
        if is_v4 {
            adjust(packet, 10, old_word, new_word);
        }
        if let Some(checksum) = checksum {
            adjust(packet, checksum, old_word, new_word);
        }
    }
    packet[at..at + new.len()].copy_from_slice(&new);
    // In UDP, zero means that there is no checksum (RFC 768).
    if let (UDP, Some(checksum)) = (header.protocol, checksum)
        && packet[checksum..checksum + 2] == [0, 0]
    {
        packet[checksum..checksum + 2].copy_from_slice(&[0xff, 0xff]);
    }
}

/// The offset of the checksum that covers the addresses. `None`: the packet has none, or it is not in this fragment.
fn transport_checksum(packet: &[u8], header: &Header) -> Option<usize> {
    if header.is_later_fragment {
        return None;
    }
    let at = header.transport
        + match header.protocol {
            TCP => 16,
            UDP => 6,
            ICMPV6 => 2,
            _ => return None,
        };
    let checksum = packet.get(at..at + 2)?;
    (header.protocol != UDP || checksum != [0, 0]).then_some(at)
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::{tcp, transport_sum, udp, v4, v6};
    use super::super::{ICMP, IcmpError, checksum, icmp_error, parse, sum};
    use super::*;

    fn with(mut packet: Vec<u8>, side: Side, address: &str) -> Vec<u8> {
        let header = parse(&packet).unwrap();
        assert!(readdress(&mut packet, &header, side, address.parse().unwrap()));
        packet
    }

    #[test]
    fn checksums_follow_and_the_way_back_leads_back() {
        let of_v4 = |segment: &[u8]| v4(TCP, 0x4000, segment);
        let of_v6 = |segment: &[u8]| v6(TCP, segment);
        let packets = [
            (tcp(2, &[2, 4, 5, 180], of_v4), "10.99.0.5"),
            (tcp(16, &[], of_v6), "fd00::5"),
            (udp(b"question", |segment| v4(UDP, 0, segment)), "198.18.255.255"),
            (udp(b"odd", |segment| v6(UDP, segment)), "::1"),
        ];
        for (packet, address) in packets {
            for side in [Side::Source, Side::Destination] {
                let before = parse(&packet).unwrap();
                let changed = with(packet.clone(), side, address);
                let header = parse(&changed).unwrap();
                let (has, stays) = match side {
                    Side::Source => (header.source, header.destination == before.destination),
                    Side::Destination => (header.destination, header.source == before.source),
                };
                assert_eq!((has, stays), (address.parse().unwrap(), true));
                assert_eq!(transport_sum(&changed), 0);
                let original = if side == Side::Source { before.source } else { before.destination };
                assert_eq!(with(changed, side, &original.to_string()), packet);
            }
        }
    }

    #[test]
    fn an_error_names_the_address_within_too() {
        for (packet, own, other) in [
            (tcp(16, &[], |segment| v4(TCP, 0x4000, segment)), "10.0.0.2", "10.99.0.5"),
            (tcp(16, &[], |segment| v6(TCP, segment)), "2001:db8::2", "fd00::5"),
        ] {
            // The error comes from the packet's destination, so its source is the cited destination.
            let header = parse(&packet).unwrap();
            let error = icmp_error(&packet, &header, IcmpError::TooBig(1280), own.parse().unwrap()).unwrap();
            let changed = with(error.clone(), Side::Source, other);
            let header = parse(&changed).unwrap();
            let within = &changed[header.transport + MIN_ICMP..];
            let at = Side::Destination.offset(header.source.is_ipv4());
            let address = octets(other.parse().unwrap());
            assert_eq!(&within[at..at + address.len()], address);
            if header.protocol == ICMP {
                assert_eq!(checksum(sum(&changed[header.transport..])), 0);
                assert_eq!(checksum(sum(&within[..HEADER_V4])), 0);
            } else {
                assert_eq!(transport_sum(&changed), 0);
            }
            assert_eq!(with(changed, Side::Source, own), error);
        }
    }

    #[test]
    fn what_has_no_transport_header_keeps_its_bytes() {
        let later = v4(UDP, 0x0001, &[0; 16]);
        let changed = with(later.clone(), Side::Destination, "10.99.0.5");
        assert_eq!(changed[HEADER_V4..], later[HEADER_V4..]);
        let mut other = later.clone();
        let header = parse(&other).unwrap();
        assert!(!readdress(&mut other, &header, Side::Source, "::1".parse().unwrap()));
        assert_eq!(other, later);
    }
}

//! Ports and flags of TCP and UDP headers, for a node that translates ports or answers instead of a server.
//!
//! In: a packet that [`parse`](super::parse) accepted. Out: its ports and TCP flags; the packet with another port and
//! an updated checksum; a TCP reset that refuses a connection. Never: a connection's state.

use super::{Header, Side, TCP, UDP, adjust, checksum, finish_v4, sum};

/// TCP flags (RFC 9293, section 3.1).
pub const FIN: u8 = 0x01;
/// The flag SYN.
pub const SYN: u8 = 0x02;
/// The flag RST.
pub const RST: u8 = 0x04;
/// The flag ACK.
pub const ACK: u8 = 0x10;

const TCP_HEADER: usize = 20;
const UDP_HEADER: usize = 8;

/// Source and destination port. `None`: the packet is neither TCP nor UDP, is cut short, or is a later fragment.
pub fn ports(packet: &[u8], header: &Header) -> Option<(u16, u16)> {
    let at = header.transport;
    let least = match header.protocol {
        TCP => TCP_HEADER,
        UDP => UDP_HEADER,
        _ => return None,
    };
    if header.is_later_fragment || packet.len() < at + least {
        return None;
    }
    let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
    Some((port(at), port(at + 2)))
}

/// The flags of a TCP segment; `None` if [`ports`] returns `None`.
pub fn tcp_flags(packet: &[u8], header: &Header) -> Option<u8> {
    ports(packet, header).filter(|_| header.protocol == TCP).map(|_| packet[header.transport + 13])
}

/// Replaces a port. Returns false, without a change, if the packet has no [`ports`].
pub fn set_port(packet: &mut [u8], header: &Header, side: Side, port: u16) -> bool {
    let Some((source, destination)) = ports(packet, header) else { return false };
    let (before, at) = match side {
        Side::Source => (source, header.transport),
        Side::Destination => (destination, header.transport + 2),
    };
    let check = header.transport + if header.protocol == TCP { 16 } else { 6 };
    // A UDP checksum of zero means that the packet has no checksum (RFC 768), so a computed zero is sent as ones.
    let has_checksum = header.protocol == TCP || packet[check..check + 2] != [0, 0];
    if has_checksum {
        adjust(packet, check, before, port);
        if header.protocol == UDP && packet[check..check + 2] == [0, 0] {
            packet[check..check + 2].copy_from_slice(&[0xff, 0xff]);
        }
    }
    packet[at..at + 2].copy_from_slice(&port.to_be_bytes());
    true
}

/// The reset that the destination of a TCP segment sends if no socket listens there (RFC 9293, section 3.5.2). `None`:
/// the packet is not a TCP segment, or is a reset itself.
pub fn tcp_reset(packet: &[u8], header: &Header) -> Option<Vec<u8>> {
    let flags = tcp_flags(packet, header)?;
    if flags & RST != 0 {
        return None;
    }
    let segment = packet.get(header.transport..)?;
    let word = |at: usize| u32::from_be_bytes([segment[at], segment[at + 1], segment[at + 2], segment[at + 3]]);
    let data = segment.len().saturating_sub(usize::from(segment[12] >> 4) * 4) as u32;
    let length = data + u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
    let (sequence, acknowledged, answer) =
        if flags & ACK != 0 { (word(8), 0, RST) } else { (0, word(4).wrapping_add(length), RST | ACK) };
    let mut reset = Vec::with_capacity(TCP_HEADER);
    reset.extend_from_slice(&segment[2..4]);
    reset.extend_from_slice(&segment[0..2]);
    reset.extend_from_slice(&sequence.to_be_bytes());
    reset.extend_from_slice(&acknowledged.to_be_bytes());
    reset.extend_from_slice(&[0x50, answer, 0, 0, 0, 0, 0, 0]);
    let mut answer = ip_header(header, reset.len());
    let pseudo = pseudo_header_sum(&answer, header, reset.len());
    let check = checksum(pseudo + sum(&reset));
    reset[16..18].copy_from_slice(&check.to_be_bytes());
    answer.extend_from_slice(&reset);
    Some(answer)
}

/// The IP header of a TCP packet in the other direction, with this many bytes of payload.
fn ip_header(header: &Header, payload: usize) -> Vec<u8> {
    match (header.source, header.destination) {
        (std::net::IpAddr::V4(to), std::net::IpAddr::V4(from)) => {
            let length = (super::HEADER_V4 + payload) as u16;
            let mut answer = vec![0x45, 0];
            answer.extend_from_slice(&length.to_be_bytes());
            answer.extend_from_slice(&[0, 0, 0x40, 0, super::OWN_HOP_LIMIT, TCP, 0, 0]);
            answer.extend_from_slice(&from.octets());
            answer.extend_from_slice(&to.octets());
            finish_v4(&mut answer, super::HEADER_V4);
            answer
        }
        (source, destination) => {
            let octets = |address: std::net::IpAddr| match address {
                std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                std::net::IpAddr::V6(v6) => v6.octets(),
            };
            let mut answer = vec![0x60, 0, 0, 0];
            answer.extend_from_slice(&(payload as u16).to_be_bytes());
            answer.extend_from_slice(&[TCP, super::OWN_HOP_LIMIT]);
            answer.extend_from_slice(&octets(destination));
            answer.extend_from_slice(&octets(source));
            answer
        }
    }
}

/// The sum of the pseudo-header: addresses, length, protocol (RFC 9293, section 3.1; RFC 8200, section 8.1).
fn pseudo_header_sum(answer: &[u8], header: &Header, length: usize) -> u64 {
    let addresses = if header.source.is_ipv4() { &answer[12..20] } else { &answer[8..40] };
    sum(addresses) + length as u64 + u64::from(TCP)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::parse;
    use super::super::tests::{tcp, transport_sum, udp, v4, v6};
    use super::*;

    #[test]
    fn ports_change_with_their_checksum_and_back() {
        let packets = [
            tcp(SYN, &[2, 4, 5, 180], |segment| v4(TCP, 0x4000, segment)),
            tcp(ACK, &[], |segment| v6(TCP, segment)),
            udp(b"question", |segment| v4(UDP, 0, segment)),
            udp(b"odd", |segment| v6(UDP, segment)),
        ];
        for packet in packets {
            let header = parse(&packet).unwrap();
            let (source, destination) = ports(&packet, &header).unwrap();
            for (side, before) in [(Side::Source, source), (Side::Destination, destination)] {
                for port in [1, 443, 0xffff] {
                    let mut changed = packet.clone();
                    assert!(set_port(&mut changed, &header, side, port));
                    let (now_source, now_destination) = ports(&changed, &header).unwrap();
                    assert_eq!(if side == Side::Source { now_source } else { now_destination }, port);
                    assert_eq!(transport_sum(&changed), 0);
                    assert!(set_port(&mut changed, &header, side, before));
                    assert_eq!(changed, packet);
                }
            }
        }
    }

    #[test]
    fn a_packet_without_ports_keeps_its_bytes() {
        for packet in [v4(UDP, 0x0001, &[0; 16]), v4(TCP, 0, &[0; 19]), v4(UDP, 0, &[0; 7]), v4(1, 0, &[0; 32])] {
            let header = parse(&packet).unwrap();
            let mut changed = packet.clone();
            assert_eq!(ports(&packet, &header), None);
            assert!(!set_port(&mut changed, &header, Side::Source, 1));
            assert_eq!((changed, tcp_reset(&packet, &header)), (packet, None));
        }
    }

    #[test]
    fn a_reset_answers_each_segment_as_rfc_9293_says() {
        type Wrap = fn(&[u8]) -> Vec<u8>;
        for of in [(|segment| v4(TCP, 0, segment)) as Wrap, |segment| v6(TCP, segment)] {
            let syn = tcp(SYN, &[2, 4, 5, 180], of);
            let header = parse(&syn).unwrap();
            let reset = tcp_reset(&syn, &header).unwrap();
            let answer = parse(&reset).unwrap();
            assert_eq!((answer.source, answer.destination), (header.destination, header.source));
            assert_eq!(ports(&reset, &answer), Some((90, 80)));
            assert_eq!(tcp_flags(&reset, &answer), Some(RST | ACK));
            // The SYN has sequence number 1, and counts as one.
            let at = answer.transport;
            assert_eq!((&reset[at + 4..at + 8], &reset[at + 8..at + 12]), (&[0; 4][..], &[0, 0, 0, 2][..]));
            assert_eq!(transport_sum(&reset), 0);
            let acknowledging = tcp(ACK, &[], of);
            let reset = tcp_reset(&acknowledging, &parse(&acknowledging).unwrap()).unwrap();
            assert_eq!(tcp_flags(&reset, &answer), Some(RST));
            assert_eq!(transport_sum(&reset), 0);
            assert_eq!(tcp_reset(&reset, &answer), None, "a reset is never answered by one");
        }
    }
}

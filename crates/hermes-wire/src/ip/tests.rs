//! Tests of IP packets, valid and malformed.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

/// A UDP packet from 192.168.0.1 to 192.168.0.199, DF set; its checksum was computed by other software.
const UDP_V4: [u8; 28] = [
    0x45, 0x00, 0x00, 0x1c, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0xb8, 0xb8, 0xc0, 0xa8, 0x00, 0x01, 0xc0, 0xa8, 0x00,
    0xc7, 0x12, 0x34, 0x00, 0x35, 0x00, 0x08, 0x00, 0x00,
];

pub(super) fn v4(protocol: u8, flags: u16, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0];
    packet.extend_from_slice(&((HEADER_V4 + payload.len()) as u16).to_be_bytes());
    packet.extend_from_slice(&[7, 8]);
    packet.extend_from_slice(&flags.to_be_bytes());
    packet.extend_from_slice(&[64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    finish_v4(&mut packet, HEADER_V4);
    packet.extend_from_slice(payload);
    packet
}

pub(super) fn v6(next: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend_from_slice(&(payload.len() as u16).to_be_bytes());
    packet.extend_from_slice(&[next, 64]);
    packet.extend_from_slice(&"2001:db8::1".parse::<Ipv6Addr>().unwrap().octets());
    packet.extend_from_slice(&"2001:db8::2".parse::<Ipv6Addr>().unwrap().octets());
    packet.extend_from_slice(payload);
    packet
}

/// A TCP header with these flags and options, and a valid checksum.
pub(super) fn tcp(flags: u8, options: &[u8], of: impl Fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
    let mut segment =
        vec![0, 80, 0, 90, 0, 0, 0, 1, 0, 0, 0, 0, 0x50 + (options.len() as u8 / 4 * 16), flags, 255, 255, 0, 0, 0, 0];
    segment.extend_from_slice(options);
    let packet = of(&segment);
    let check = transport_sum(&packet);
    segment[16..18].copy_from_slice(&check.to_be_bytes());
    of(&segment)
}

/// The checksum of a transport header with its pseudo-header, computed independently: zero if the packet's is valid.
pub(super) fn transport_sum(packet: &[u8]) -> u16 {
    let header = parse(packet).unwrap();
    let mut bytes = match (header.source, header.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => [source.octets(), destination.octets()].concat(),
        (IpAddr::V6(source), IpAddr::V6(destination)) => [source.octets(), destination.octets()].concat(),
        _ => unreachable!(),
    };
    let transport = &packet[header.transport..];
    bytes.extend_from_slice(&(transport.len() as u16).to_be_bytes());
    bytes.extend_from_slice(&[0, header.protocol]);
    bytes.extend_from_slice(transport);
    bytes.resize(bytes.len().next_multiple_of(2), 0);
    let mut total = 0_u32;
    for word in bytes.chunks(2) {
        total += u32::from(word[0]) * 256 + u32::from(word[1]);
        total = total % 0x1_0000 + total / 0x1_0000;
    }
    !(total as u16)
}

#[test]
fn headers_are_read() {
    let header = parse(&UDP_V4).unwrap();
    assert_eq!(
        (header.source.to_string(), header.destination.to_string()),
        ("192.168.0.1".to_owned(), "192.168.0.199".to_owned())
    );
    assert_eq!((header.protocol, header.transport, header.length), (UDP, 20, 28));
    assert!(!header.may_be_cut && !header.is_later_fragment);
    // Hop-by-hop, destination options, first fragment, then TCP.
    let extensions = [[60, 0, 1, 4, 0, 0, 0, 0], [44, 0, 1, 4, 0, 0, 0, 0], [TCP, 0, 0, 1, 0, 0, 0, 9]].concat();
    let header = parse(&v6(0, &[&extensions[..], &[0; 20]].concat())).unwrap();
    assert_eq!((header.protocol, header.transport, header.is_later_fragment), (TCP, 64, false));
    // A later fragment has no transport header, regardless of its bytes.
    let header = parse(&v6(44, &[6, 0, 0, 9, 0, 0, 0, 9, 0, 80])).unwrap();
    assert_eq!((header.protocol, header.is_later_fragment), (TCP, true));
    assert!(parse(&v4(TCP, 1, &[])).unwrap().is_later_fragment && parse(&v4(TCP, 0x2000, &[])).unwrap().may_be_cut);
}

#[test]
fn what_is_no_packet_is_refused() {
    for cut in 0..UDP_V4.len() {
        assert!(parse(&UDP_V4[..cut]).is_err(), "{cut}");
    }
    let changed = |at: usize, to: u8| {
        let mut packet = UDP_V4;
        packet[at] = to;
        parse(&packet).unwrap_err()
    };
    assert_eq!(changed(0, 0x55), PacketError::Version(5));
    assert_eq!(changed(0, 0x44), PacketError::HeaderLength(16));
    assert_eq!(changed(0, 0x4f), PacketError::Truncated(28));
    assert_eq!(changed(3, 29), PacketError::Length { said: 29, has: 28 });
    assert_eq!(changed(15, 2), PacketError::Checksum);
    assert_eq!(parse(&v6(0, &[0, 0, 1, 4, 0, 0, 0, 0].repeat(17))), Err(PacketError::TooManyExtensions));
    assert_eq!(parse(&v6(60, &[6, 1, 1, 4, 0, 0, 0, 0])), Err(PacketError::Truncated(48)));
    assert_eq!(parse(&v6(51, &[6, 1])), Err(PacketError::Truncated(42)));
}

#[test]
fn a_syn_offers_no_more_than_fits() {
    let as_v4 = |segment: &[u8]| v4(TCP, 0x4000, segment);
    let as_v6 = |segment: &[u8]| v6(TCP, segment);
    let clamped = |mut packet: Vec<u8>, mtu: usize| {
        let header = parse(&packet).unwrap();
        let was = clamp_mss(&mut packet, &header, mtu);
        assert_eq!(transport_sum(&packet), 0, "its checksum is right");
        (was, packet[header.transport + 20..].to_vec())
    };
    assert_eq!(clamped(tcp(2, &[2, 4, 5, 180], as_v4), 1400), (true, vec![2, 4, 5, 80]));
    assert_eq!(clamped(tcp(0x12, &[2, 4, 5, 160], as_v6), 1280), (true, vec![2, 4, 4, 196]));
    // The MSS option after other options, also at an odd offset.
    assert_eq!(clamped(tcp(2, &[1, 3, 3, 7, 1, 1, 1, 2, 4, 5, 180, 0], as_v4), 1000).1[7..11], [2, 4, 3, 192]);
    for (flags, options, mtu) in [
        (2, &[2, 4, 5, 80][..], 1400),
        (0x10, &[2, 4, 5, 180], 1400),
        (2, &[0, 0, 2, 4, 5, 180, 0, 0], 1000),
        (2, &[8, 0, 2, 4], 1000),
        (2, &[1, 1, 1, 2], 1000),
        (2, &[], 100),
    ] {
        assert_eq!(clamped(tcp(flags, options, as_v4), mtu), (false, options.to_vec()));
    }
}

#[test]
fn fragments_hold_all_and_fit() {
    let payload: Vec<u8> = (0..3000).map(|at| (at % 251) as u8).collect();
    // A record-route option, which only the first fragment has, and one that all have.
    let mut packet = v4(UDP, 0, &[&[7, 7, 4, 0, 0, 0, 0, 1, 0x94, 4, 0, 0], &payload[..]].concat());
    packet[0] = 0x48;
    finish_v4(&mut packet, 32);
    let header = parse(&packet).unwrap();
    let fragments = fragment(&packet, &header, 576);
    let mut whole = Vec::new();
    for (index, fragment) in fragments.iter().enumerate() {
        let header = parse(fragment).unwrap();
        assert!(fragment.len() <= 576);
        assert_eq!(header.transport, if index == 0 { 32 } else { 24 });
        let flags = u16::from_be_bytes([fragment[6], fragment[7]]);
        assert_eq!(usize::from(flags & 0x1fff) * 8, whole.len());
        assert_eq!(flags & 0x2000 != 0, index + 1 < fragments.len());
        assert_eq!(fragment[4..6], packet[4..6]);
        whole.extend_from_slice(&fragment[header.transport..]);
    }
    assert_eq!(whole, payload);
    // Fragments of a fragment continue at its offset, and the last one keeps the more-fragments flag.
    let middle = v4(UDP, 0x2000 | 100, &payload[..1600]);
    let cut = fragment(&middle, &parse(&middle).unwrap(), 1000);
    let flags: Vec<u16> = cut.iter().map(|fragment| u16::from_be_bytes([fragment[6], fragment[7]])).collect();
    assert_eq!(flags, [0x2000 | 100, 0x2000 | 222]);
    let beyond = v4(UDP, 0x1fff, &payload[..1600]);
    assert_eq!(fragment(&beyond, &parse(&beyond).unwrap(), 1000), Vec::<Vec<u8>>::new());
}

#[test]
fn senders_are_told_what_they_can_use() {
    let own: IpAddr = "10.9.9.9".parse().unwrap();
    let packet = v4(UDP, 0x4000, &[1; 1400]);
    let error = icmp_error(&packet, &parse(&packet).unwrap(), IcmpError::TooBig(1280), own).unwrap();
    let header = parse(&error).unwrap();
    assert_eq!((header.source, header.destination.to_string(), header.protocol), (own, "10.0.0.1".to_owned(), ICMP));
    assert_eq!(error[20..28], [3, 4, error[22], error[23], 0, 0, 5, 0]);
    assert_eq!((checksum(sum(&error[20..])), error.len()), (0, 576));
    assert_eq!(error[28..], packet[..548]);

    let own: IpAddr = "2001:db8::9".parse().unwrap();
    let packet = v6(UDP, &[1; 1400]);
    for (cause, begin) in [
        (IcmpError::TooBig(1300), [2, 0, 0, 0, 5, 20]),
        (IcmpError::NoRoute, [1, 0, 0, 0, 0, 0]),
        (IcmpError::Prohibited, [1, 1, 0, 0, 0, 0]),
    ] {
        let error = icmp_error(&packet, &parse(&packet).unwrap(), cause, own).unwrap();
        assert_eq!((error.len(), transport_sum(&error)), (1280, 0));
        assert_eq!([error[40], error[41], error[44], error[45], error[46], error[47]], begin);
        assert_eq!(error[48..], packet[..1232]);
        let again = icmp_error(&error, &parse(&error).unwrap(), cause, own);
        assert_eq!(again, None, "no error about an error");
    }
}

#[test]
fn nobody_is_told_who_was_not_one_host() {
    let own: IpAddr = "10.9.9.9".parse().unwrap();
    let told = |packet: &[u8], cause| icmp_error(packet, &parse(packet).unwrap(), cause, own).is_some();
    assert!(told(&v4(ICMP, 0, &[8, 0]), IcmpError::NoRoute) && told(&v4(TCP, 0, &[]), IcmpError::Prohibited));
    assert!(!told(&v4(ICMP, 0, &[3, 0]), IcmpError::NoRoute) && !told(&v4(ICMP, 0, &[]), IcmpError::NoRoute));
    assert!(!told(&v4(UDP, 9, &[]), IcmpError::NoRoute), "a later fragment");
    let between = |source: [u8; 4], destination: [u8; 4]| {
        let mut packet = v4(UDP, 0, &[]);
        packet[12..16].copy_from_slice(&source);
        packet[16..20].copy_from_slice(&destination);
        finish_v4(&mut packet, 20);
        told(&packet, IcmpError::TooBig(576))
    };
    assert!(between([10, 0, 0, 1], [10, 0, 0, 2]));
    assert!(!between([10, 0, 0, 1], [224, 0, 0, 1]) && !between([10, 0, 0, 1], [255; 4]));
    assert!(!between([0; 4], [10, 0, 0, 1]) && !between([239, 1, 1, 1], [10, 0, 0, 1]));
}

proptest! {
    #[test]
    fn nothing_panics(mut packet: Vec<u8>, mtu in 0..2000_usize, version in 4..=6_u8) {
        if let Some(first) = packet.first_mut() {
            *first = version << 4 | *first & 0xf;
        }
        if packet.len() >= 20 && version == 4 {
            let length = (packet.len() as u16).to_be_bytes();
            packet[2..4].copy_from_slice(&length);
            let header = usize::from(packet[0] & 0xf) * 4;
            if (20..=packet.len()).contains(&header) {
                finish_v4(&mut packet, header);
            }
        } else if packet.len() >= 40 {
            let length = ((packet.len() - 40) as u16).to_be_bytes();
            packet[4..6].copy_from_slice(&length);
        }
        let Ok(header) = parse(&packet) else { return Ok(()) };
        let own = if header.source.is_ipv4() { "10.0.0.1" } else { "::1" }.parse().unwrap();
        for cause in [IcmpError::TooBig(mtu), IcmpError::NoRoute, IcmpError::Prohibited] {
            if let Some(error) = icmp_error(&packet, &header, cause, own) {
                prop_assert!(parse(&error).is_ok());
            }
        }
        if header.may_be_cut {
            for fragment in fragment(&packet, &header, mtu) {
                prop_assert!(parse(&fragment).is_ok() && fragment.len() <= mtu.max(MIN_MTU_V4));
            }
        }
        clamp_mss(&mut packet, &header, mtu);
    }
}

/// A UDP header and payload with a valid checksum.
pub(super) fn udp(payload: &[u8], of: impl Fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
    let mut segment = vec![0, 53, 0, 54];
    segment.extend_from_slice(&(8 + payload.len() as u16).to_be_bytes());
    segment.extend_from_slice(&[0, 0]);
    segment.extend_from_slice(payload);
    let check = transport_sum(&of(&segment));
    segment[6..8].copy_from_slice(&check.to_be_bytes());
    of(&segment)
}

//! Tests of the PROXY protocol: transcripts, each kind of refusal, round trips, arbitrary bytes.

#![allow(clippy::unwrap_used)]

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// A header: version and command, family and protocol, length field, and the rest.
fn header(version_command: u8, family: u8, length: u16, block: &[u8]) -> Vec<u8> {
    let mut bytes = SIGNATURE.to_vec();
    bytes.extend([version_command, family]);
    bytes.extend(length.to_be_bytes());
    bytes.extend(block);
    bytes
}

fn addresses(source: &str, destination: &str) -> Option<(SocketAddr, SocketAddr)> {
    Some((source.parse().unwrap(), destination.parse().unwrap()))
}

const BLOCK_V4: &[u8] = &[192, 0, 2, 1, 198, 51, 100, 2, 0xc3, 0x50, 0x01, 0xbb];

#[test]
fn tcp_over_ipv4() {
    let bytes = header(0x21, 0x11, 12, BLOCK_V4);
    let source = addresses("192.0.2.1:50000", "198.51.100.2:443");
    assert_eq!(parse(&bytes), Ok(Parsed::Done { len: 28, source }));
    let (from, to) = source.unwrap();
    assert_eq!(encode(from, to), bytes);
}

#[test]
fn tcp_over_ipv6() {
    let mut block = [0; 36];
    block[..16].copy_from_slice(&"2001:db8::1".parse::<Ipv6Addr>().unwrap().octets());
    block[16..32].copy_from_slice(&"2001:db8::2".parse::<Ipv6Addr>().unwrap().octets());
    block[32..].copy_from_slice(&[0xc3, 0x50, 0x01, 0xbb]);
    let bytes = header(0x21, 0x21, 36, &block);
    let source = addresses("[2001:db8::1]:50000", "[2001:db8::2]:443");
    assert_eq!(parse(&bytes), Ok(Parsed::Done { len: MAX_ENCODED, source }));
    let (from, to) = source.unwrap();
    assert_eq!(encode(from, to), bytes);
}

#[test]
fn udp_is_read_like_tcp() {
    let source = addresses("192.0.2.1:50000", "198.51.100.2:443");
    let bytes = header(0x21, 0x12, 12, BLOCK_V4);
    assert_eq!(parse(&bytes), Ok(Parsed::Done { len: 28, source }));
    let bytes = header(0x21, 0x22, 36, &[0; 36]);
    let source = addresses("[::]:0", "[::]:0");
    assert_eq!(parse(&bytes), Ok(Parsed::Done { len: 52, source }));
}

#[test]
fn extensions_are_skipped_and_the_connection_goes_on_behind_them() {
    let mut block = BLOCK_V4.to_vec();
    block.extend(b"\x01\x00\x02h2GET / HTTP/1.1\r\n");
    let bytes = header(0x21, 0x11, 17, &block);
    let source = addresses("192.0.2.1:50000", "198.51.100.2:443");
    assert_eq!(parse(&bytes), Ok(Parsed::Done { len: 33, source }));
    assert!(bytes[33..].starts_with(b"GET "));
}

#[test]
fn local_and_unspecified_leave_the_addresses_of_the_connection() {
    let none = |len| Ok(Parsed::Done { len, source: None });
    assert_eq!(parse(&LOCAL), none(16));
    // LOCAL discards any family and addresses.
    assert_eq!(parse(&header(0x20, 0x11, 12, BLOCK_V4)), none(28));
    assert_eq!(parse(&header(0x20, 0xff, 3, b"abc")), none(19));
    assert_eq!(parse(&header(0x21, 0x00, 0, b"")), none(16));
    assert_eq!(parse(&header(0x21, 0x00, 5, b"abcde")), none(21));
}

#[test]
fn refusals() {
    use ProxyProtocolError::*;
    for (bytes, error) in [
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 50000\r\n".to_vec(), Line),
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 50000 443 7\r\n".to_vec(), Line),
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 50000 65536\r\n".to_vec(), Line),
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 +1 443\r\n".to_vec(), Line),
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 50000 443\n".to_vec(), Line),
        (b"PROXY TCP4  192.0.2.1 198.51.100.2 50000 443\r\n".to_vec(), Line),
        (b"PROXY TCP4 2001:db8::1 198.51.100.2 50000 443\r\n".to_vec(), Line),
        (b"PROXY TCP6 192.0.2.1 198.51.100.2 50000 443\r\n".to_vec(), Line),
        (b"PROXY UDP4 192.0.2.1 198.51.100.2 50000 443\r\n".to_vec(), Line),
        ([&b"PROXY UNKNOWN "[..], &[b'x'; 100]].concat(), Line),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), NotProxyProtocol),
        (b"POST / HTTP/1.1\r\n".to_vec(), NotProxyProtocol),
        (b"\x16\x03\x01".to_vec(), NotProxyProtocol),
        (b"\r\n\r\n\0\r\nQUIX".to_vec(), NotProxyProtocol),
        (header(0x11, 0x11, 12, BLOCK_V4), Version(1)),
        (header(0x31, 0x11, 12, BLOCK_V4), Version(3)),
        (header(0x22, 0x11, 12, BLOCK_V4), Command(2)),
        (header(0x21, 0x31, 216, b""), Family(0x31)),
        (header(0x21, 0x10, 12, BLOCK_V4), Family(0x10)),
        (header(0x21, 0x01, 12, BLOCK_V4), Family(0x01)),
        (header(0x21, 0x13, 12, BLOCK_V4), Family(0x13)),
        (header(0x21, 0x11, 11, b""), AddressesCut { length: 11, needed: 12 }),
        (header(0x21, 0x21, 35, b""), AddressesCut { length: 35, needed: 36 }),
        (header(0x21, 0x11, 2_049, b""), TooLong(MAX_HEADER + 1)),
        (header(0x20, 0x00, 65_535, b""), TooLong(65_551)),
    ] {
        assert_eq!(parse(&bytes), Err(error), "{bytes:02x?}");
    }
}

#[test]
fn the_longest_header_passes() {
    let mut block = BLOCK_V4.to_vec();
    block.resize(2_048, 0);
    let bytes = header(0x21, 0x11, 2_048, &block);
    assert!(matches!(parse(&bytes), Ok(Parsed::Done { len: MAX_HEADER, source: Some(_) })));
}

#[test]
fn a_cut_header_says_how_much_is_needed() {
    let bytes = header(0x21, 0x11, 12, BLOCK_V4);
    for cut in 0..bytes.len() {
        let needed = match cut {
            0 => 15,
            1..16 => 16,
            _ => 28,
        };
        assert_eq!(parse(&bytes[..cut]), Ok(Parsed::Incomplete(needed)), "{cut}");
    }
    // The parser of a line requests no byte after the line.
    for line in [&b"PROXY UNKNOWN\r\n"[..], b"PROXY TCP4 192.0.2.1 198.51.100.2 50000 443\r\n"] {
        for cut in 0..line.len() {
            match parse(&line[..cut]) {
                Ok(Parsed::Incomplete(needed)) => assert!(needed > cut && needed <= line.len(), "{cut}: {needed}"),
                other => panic!("{cut}: {other:?}"),
            }
        }
    }
}

#[test]
fn lines_of_version_1_are_read() {
    for (line, source) in [
        ("PROXY TCP4 192.0.2.1 198.51.100.2 50000 443\r\n", addresses("192.0.2.1:50000", "198.51.100.2:443")),
        ("PROXY TCP6 2001:db8::1 2001:db8::2 50000 443\r\n", addresses("[2001:db8::1]:50000", "[2001:db8::2]:443")),
        ("PROXY TCP6 ::ffff:192.0.2.1 2001:db8::2 1 2\r\n", addresses("192.0.2.1:1", "[2001:db8::2]:2")),
        ("PROXY UNKNOWN\r\n", None),
        ("PROXY UNKNOWN ffff:f...f:ffff ffff:f...f:ffff 65535 65535\r\n", None),
    ] {
        let bytes = format!("{line}GET / HTTP/1.1\r\n");
        assert_eq!(parse(bytes.as_bytes()), Ok(Parsed::Done { len: line.len(), source }), "{line}");
    }
}

#[test]
fn mixed_families_are_written_as_ipv6_and_read_back() {
    for (from, to) in
        [addresses("192.0.2.1:1", "[2001:db8::2]:2").unwrap(), addresses("[2001:db8::2]:1", "192.0.2.1:2").unwrap()]
    {
        let bytes = encode(from, to);
        assert_eq!(bytes[13], 0x21);
        assert_eq!(parse(&bytes), Ok(Parsed::Done { len: 52, source: Some((from, to)) }));
    }
}

#[test]
fn mapped_addresses_of_a_dual_stack_socket_are_ipv4() {
    let (from, to) = addresses("[::ffff:192.0.2.1]:1", "[::ffff:198.51.100.2]:2").unwrap();
    let bytes = encode(from, to);
    assert_eq!((bytes[13], bytes.len()), (0x11, 28));
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

proptest! {
    #[test]
    fn round_trip(from: SocketAddr, to: SocketAddr, tail in vec(any::<u8>(), 0..32)) {
        let mut bytes = encode(from, to);
        let len = bytes.len();
        bytes.extend_from_slice(&tail);
        let source = Some((canonical(from), canonical(to)));
        prop_assert_eq!(parse(&bytes), Ok(Parsed::Done { len, source }));
    }

    /// More bytes never change a result, and `Incomplete` always requests more bytes than the input has.
    #[test]
    fn any_bytes_behind_any_part_of_the_signature(
        keep in 0..=12_usize,
        tail in vec(prop_oneof![any::<u8>(), Just(0x21), Just(0x11), Just(0)], 0..80),
    ) {
        let bytes = [&SIGNATURE[..keep], &tail].concat();
        let verdict = parse(&bytes);
        for cut in 0..bytes.len() {
            match parse(&bytes[..cut]) {
                Ok(Parsed::Incomplete(needed)) => prop_assert!(cut < needed && needed <= MAX_HEADER),
                early => prop_assert_eq!(early, verdict),
            }
        }
    }
}

//! Tests of SOCKS 5: tables of messages byte by byte, and properties of arbitrary ones.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn name(name: &str, port: u16) -> Target {
    Target { host: Host::Name(name.into()), port }
}

fn ip(address: &str) -> Target {
    let address: SocketAddr = address.parse().unwrap();
    Target { host: Host::Ip(address.ip()), port: address.port() }
}

fn request(command: Command, target: Target) -> Option<Request> {
    Some(Request { command, target })
}

#[test]
fn greetings() {
    let offered =
        |bytes: &[u8]| Greeting::parse(bytes).map(|done| done.map(|(it, len)| (it.offers(Method::None), len)));
    assert_eq!(offered(b"\x05\x01\x00"), Ok(Some((true, 3))));
    assert_eq!(offered(b"\x05\x02\x02\x00rest"), Ok(Some((true, 4))));
    assert_eq!(offered(b"\x05\x01\x02"), Ok(Some((false, 3))));
    assert_eq!(offered(b"\x05\x00"), Ok(Some((false, 2))), "nothing is offered");
    assert_eq!(offered(b"\x05\xff\x00"), Ok(None), "254 more are announced");
    assert_eq!(offered(b""), Ok(None));
    assert_eq!(offered(b"\x04\x01\x00\x50"), Err(Socks5Error::Version(4)));
    assert_eq!(offered(b"GET / HTTP/1.1"), Err(Socks5Error::Version(b'G')));
    let (all, _) = Greeting::parse(b"\x05\x01\xff").unwrap().unwrap();
    assert!(!all.offers(Method::Unacceptable), "0xff is no method");
    assert_eq!((Method::None.selection(), Method::Unacceptable.selection()), ([5, 0], [5, 0xff]));
}

#[test]
fn requests() {
    type Parsed = Result<Option<Request>, Socks5Error>;
    let table: [(&[u8], Parsed); 14] = [
        (b"\x05\x01\0\x03\x05VIDEO\0\x50", Ok(request(Command::Connect, name("VIDEO", 80)))),
        (b"\x05\x01\0\x01\x0a\0\0\x01\x01\xbb", Ok(request(Command::Connect, ip("10.0.0.1:443")))),
        (b"\x05\x03\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\0\0", Ok(request(Command::UdpAssociate, ip("[::1]:0")))),
        (b"\x05\x02\0\x01\0\0\0\0\0\x01", Ok(request(Command::Bind, ip("0.0.0.0:1")))),
        (b"\x05\x09\0\x01\0\0\0\0\0\x01", Ok(request(Command::Unknown(9), ip("0.0.0.0:1")))),
        (b"\x05\x01\0", Ok(None)),
        (b"\x05\x01\0\x03", Ok(None)),
        (b"\x05\x01\0\x03\x05VIDEO\0", Ok(None)),
        (b"\x05\x01\0\x01\0\0\0\0\0", Ok(None)),
        (b"\x05\x01\x01\x01", Err(Socks5Error::Reserved)),
        (b"\x05\x01\0\x03\0\0\x50", Err(Socks5Error::EmptyName)),
        (b"\x05\x01\0\x03\x01\xff\0\x50", Err(Socks5Error::Name)),
        (b"\x05\x01\0\x02", Err(Socks5Error::AddressType(2))),
        (b"\x01", Err(Socks5Error::Version(1))),
    ];
    for (bytes, wanted) in table {
        assert_eq!(Request::parse(bytes).map(|done| done.map(|(request, _)| request)), wanted, "{bytes:?}");
    }
}

#[test]
fn what_a_client_is_told_of_a_bad_request() {
    assert_eq!(Socks5Error::AddressType(2).reply(), Some(Reply::AddressUnsupported));
    assert_eq!(Socks5Error::EmptyName.reply(), Some(Reply::Failed));
    assert_eq!(Socks5Error::Version(4).reply(), None);
}

#[test]
fn targets_are_authorities() {
    for (target, text) in [
        (name("VIDEO", 80), "VIDEO:80"),
        (name("::1", 80), "[::1]:80"),
        (name("10.0.0.1", 80), "10.0.0.1:80"),
        (ip("10.0.0.1:443"), "10.0.0.1:443"),
        (ip("[2001:db8::1]:443"), "[2001:db8::1]:443"),
    ] {
        assert_eq!(target.to_string(), text);
    }
}

#[test]
fn replies() {
    assert_eq!(*Reply::Succeeded.encode("127.0.0.1:1080".parse().unwrap()), *b"\x05\0\0\x01\x7f\0\0\x01\x04\x38");
    let wanted = [&b"\x05\x05\0\x04"[..], &[0; 15], b"\x01\0\x07"].concat();
    assert_eq!(*Reply::Refused.encode("[::1]:7".parse().unwrap()), *wanted);
}

#[test]
fn datagrams() {
    let split = |bytes: &'static [u8]| split_datagram(Bytes::from_static(bytes));
    let (header, payload) = split(b"\0\0\0\x03\x02NS\0\x35query").unwrap();
    assert_eq!((&header[..], &payload[..]), (&b"\0\0\0\x03\x02NS\0\x35"[..], &b"query"[..]));
    assert_eq!(datagram_target(&header), Ok(name("NS", 53)));
    let (_, empty) = split(b"\0\0\0\x01\x7f\0\0\x01\0\x35").unwrap();
    assert!(empty.is_empty(), "a datagram may carry nothing");
    for (bytes, error) in [
        (&b"\0\0\x01\x01\x7f\0\0\x01\0\x35first part"[..], Socks5Error::Fragment),
        (b"\0\0\x80\x01\x7f\0\0\x01\0\x35last part", Socks5Error::Fragment),
        (b"\0\x01\0\x01\x7f\0\0\x01\0\x35", Socks5Error::Reserved),
        (b"\0\0\0\x01\x7f\0\0\x01\0", Socks5Error::Cut),
        (b"\0\0", Socks5Error::Cut),
        (b"", Socks5Error::Cut),
        (b"\0\0\0\x05aaaaaa", Socks5Error::AddressType(5)),
    ] {
        assert_eq!(split(bytes), Err(error), "{bytes:?}");
    }
}

fn targets() -> impl Strategy<Value = (Target, Vec<u8>)> {
    let ip = any::<IpAddr>().prop_map(|ip| match ip {
        IpAddr::V4(v4) => (Host::Ip(ip), [&[IPV4][..], &v4.octets()].concat()),
        IpAddr::V6(v6) => (Host::Ip(ip), [&[IPV6][..], &v6.octets()].concat()),
    });
    let name = "[a-zA-Z0-9.-]{1,255}".prop_map(|name| {
        let written = [&[NAME, name.len() as u8][..], name.as_bytes()].concat();
        (Host::Name(name.into()), written)
    });
    (prop_oneof![ip, name], any::<u16>()).prop_map(|((host, mut written), port)| {
        written.extend(port.to_be_bytes());
        (Target { host, port }, written)
    })
}

proptest! {
    #[test]
    fn a_request_means_what_was_written_and_no_part_of_it_means_anything(
        (target, written) in targets(), rest in any::<Vec<u8>>(),
    ) {
        let message = [&[VERSION, 1, 0][..], &written].concat();
        prop_assert!(message.len() <= MAX_MESSAGE);
        for cut in 0..message.len() {
            prop_assert_eq!(Request::parse(&message[..cut]), Ok(None));
        }
        let whole = Request { command: Command::Connect, target };
        prop_assert_eq!(Request::parse(&[&message[..], &rest].concat()), Ok(Some((whole, message.len()))));
    }

    #[test]
    fn a_datagram_goes_where_its_header_says((target, written) in targets(), payload in any::<Vec<u8>>()) {
        let header = [&[0; 3][..], &written].concat();
        let datagram = Bytes::from([&header[..], &payload].concat());
        let (got, rest) = split_datagram(datagram).unwrap();
        prop_assert_eq!(datagram_target(&got), Ok(target));
        prop_assert_eq!((&got[..], &rest[..]), (&header[..], &payload[..]));
    }

    #[test]
    fn nothing_makes_it_wait_for_more_than_a_message(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let long = bytes.len() >= MAX_MESSAGE;
        if long {
            prop_assert!(!matches!(Greeting::parse(&bytes), Ok(None)));
            prop_assert!(!matches!(Request::parse(&bytes), Ok(None)));
        }
        let _ = split_datagram(bytes.into());
    }
}

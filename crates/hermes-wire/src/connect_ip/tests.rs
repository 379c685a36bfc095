//! Tests of CONNECT-IP paths and capsules: examples of the RFC, malformed ones, and round trips.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn prefix(text: &str) -> Prefix {
    let (address, length) = text.split_once('/').unwrap();
    Prefix::new(address.parse().unwrap(), length.parse().unwrap()).unwrap()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn paths_name_what_they_are_scoped_to() {
    let table = [
        ("*/*/", Target::Any, None),
        ("%2A/%2a/", Target::Any, None),
        ("target.example.com/*/", Target::Name("target.example.com".to_owned()), None),
        ("192.0.2.7/17/", Target::Prefix(prefix("192.0.2.7/32")), Some(17)),
        ("192.0.2.0%2F24/0/", Target::Prefix(prefix("192.0.2.0/24")), Some(0)),
        ("2001%3Adb8%3A1234%3A%3A%2F48/255/", Target::Prefix(prefix("2001:db8:1234::/48")), Some(255)),
        ("0.0.0.0%2f0/6/", Target::Prefix(prefix("0.0.0.0/0")), Some(6)),
    ];
    for (text, target, protocol) in table {
        let scope = Scope { target, protocol };
        assert_eq!(parse_path(&format!("{PREFIX}{text}")), Ok(Some(scope.clone())), "{text}");
        assert_eq!(parse_path(&path(&scope)), Ok(Some(scope)), "{text}");
    }
    assert_eq!(parse_path("/.well-known/masque/udp/a/1/"), Ok(None));
    assert_eq!(
        path(&Scope { target: Target::Prefix(prefix("::/0")), protocol: None }),
        format!("{PREFIX}%3A%3A%2F0/*/")
    );
}

#[test]
fn paths_that_name_nothing_are_refused() {
    for text in ["", "*", "*/", "*/*", "*/*/x", "*/*//", "/*/", "*//", "*/256/", "*/+1/", "*/0001/", "*/1x/", "a b/*/"]
    {
        assert!(parse_path(&format!("{PREFIX}{text}")).is_err(), "{text}");
    }
    for text in ["192.0.2.1%2F24", "192.0.2.0%2F33", "::1%2F64", "192.0.2.0%2F", "name%2F8", "%2F8", "10.0.0.0%2F08%2F"]
    {
        assert!(parse_path(&format!("{PREFIX}{text}/*/")).is_err(), "{text}");
    }
}

#[test]
fn prefixes_cover_what_begins_like_them() {
    let v4 = prefix("10.20.0.0/15");
    assert_eq!(v4.last(), address("10.21.255.255"));
    assert!(
        v4.contains(address("10.21.3.4")) && !v4.contains(address("10.22.0.0")) && !v4.contains(address("::a14:0"))
    );
    assert!(prefix("0.0.0.0/0").contains(address("255.255.255.255")) && prefix("::/0").contains(address("ffff::")));
    assert!(
        Prefix::of(address("::1")).contains(address("::1")) && !Prefix::of(address("::1")).contains(address("::2"))
    );
    assert_eq!(prefix("2001:db8::/32").last(), address("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"));
    assert_eq!(
        Prefix::new(address("10.0.0.1"), 33),
        Err(ConnectIpError::Prefix { address: address("10.0.0.1"), length: 33 })
    );
}

#[test]
fn addresses_are_read_as_they_are_written() {
    let bytes = Bytes::from_static(&[0x00, 4, 192, 0, 2, 3, 32, 0x40, 0x41, 4, 10, 0, 0, 0, 8]);
    let wanted = [
        Address { request: 0, prefix: prefix("192.0.2.3/32") },
        Address { request: 0x41, prefix: prefix("10.0.0.0/8") },
    ];
    assert_eq!(parse_address_assign(bytes.clone()), Ok(wanted.to_vec()));
    assert_eq!(parse_address_request(bytes), Err(ConnectIpError::ZeroRequest));
    assert_eq!(parse_address_assign(Bytes::new()), Ok(Vec::new()), "all are withdrawn");
    assert_eq!(parse_address_request(Bytes::new()), Err(ConnectIpError::NothingAsked));
}

#[test]
fn malformed_capsules_say_what_is_wrong() {
    let assign = |bytes: &'static [u8]| parse_address_assign(Bytes::from_static(bytes)).unwrap_err();
    assert_eq!(assign(&[0x40]), ConnectIpError::Truncated);
    assert_eq!(assign(&[1]), ConnectIpError::Truncated);
    assert_eq!(assign(&[1, 4, 10, 0, 0]), ConnectIpError::Truncated);
    assert_eq!(assign(&[1, 4, 10, 0, 0, 0]), ConnectIpError::Truncated);
    assert_eq!(assign(&[1, 5, 10, 0, 0, 0, 8]), ConnectIpError::Version(5));
    assert_eq!(assign(&[1, 4, 10, 0, 0, 1, 8]), ConnectIpError::Prefix { address: address("10.0.0.1"), length: 8 });
    let routes = |bytes: &'static [u8]| parse_route_advertisement(Bytes::from_static(bytes)).unwrap_err();
    assert_eq!(routes(&[4, 10, 0, 0, 0, 10, 0, 0, 1]), ConnectIpError::Truncated);
    assert!(matches!(routes(&[4, 10, 0, 0, 1, 10, 0, 0, 0, 0]), ConnectIpError::Range { .. }));
    // Adjacent ranges are valid; overlapping ones, and any other order, are not.
    let apart: &[u8] = &[4, 10, 0, 0, 0, 10, 0, 0, 1, 0, 4, 10, 0, 0, 2, 10, 0, 0, 2, 0, 4, 9, 0, 0, 0, 9, 0, 0, 0, 6];
    assert_eq!(parse_route_advertisement(Bytes::from_static(apart)).unwrap().len(), 3);
    assert_eq!(routes(&[4, 10, 0, 0, 0, 10, 0, 0, 2, 0, 4, 10, 0, 0, 2, 10, 0, 0, 2, 0]), ConnectIpError::Order);
    assert_eq!(routes(&[4, 9, 0, 0, 0, 9, 0, 0, 0, 6, 4, 10, 0, 0, 0, 10, 0, 0, 1, 0]), ConnectIpError::Order);
    let many: Bytes = [0, 4, 10, 0, 0, 1, 32].repeat(MAX_ENTRIES + 1).into();
    assert_eq!(parse_address_assign(many), Err(ConnectIpError::TooMany));
}

#[test]
fn routes_lead_where_they_say_and_icmp_goes_along() {
    let route = Route { start: address("10.0.0.5"), end: address("10.0.0.9"), protocol: 17 };
    assert!(route.covers(address("10.0.0.5"), 17) && route.covers(address("10.0.0.9"), 1));
    assert!(!route.covers(address("10.0.0.7"), 6) && !route.covers(address("10.0.0.7"), 58));
    assert!(!route.covers(address("10.0.0.4"), 17) && !route.covers(address("10.0.0.10"), 17));
    let all = Route::to(prefix("::/0"));
    assert!(all.covers(address("::1"), 6) && all.covers(address("ffff::1"), 58) && !all.covers(address("1.2.3.4"), 6));
}

fn prefixes() -> impl Strategy<Value = Prefix> {
    let cut = |address: IpAddr, length: u8| Prefix { address, length: length.min(bits(address)) };
    (any::<IpAddr>(), 0..=128_u8).prop_map(move |(address, length)| {
        let cut = cut(address, length);
        Prefix { address: cut.first(), ..cut }
    })
}

proptest! {
    #[test]
    fn scopes_there_and_back(target in prefixes(), protocol: Option<u8>) {
        let scope = Scope { target: Target::Prefix(target), protocol };
        prop_assert_eq!(parse_path(&path(&scope)), Ok(Some(scope)));
    }

    #[test]
    fn addresses_there_and_back(entries in prop::collection::vec((1..=varint::MAX, prefixes()), 1..20)) {
        let entries: Vec<Address> = entries.into_iter().map(|(request, prefix)| Address { request, prefix }).collect();
        let mut out = Vec::new();
        put_addresses(&entries, &mut out);
        prop_assert!(out.len() <= MAX_CAPSULE);
        prop_assert_eq!(parse_address_assign(out.clone().into()), Ok(entries.clone()));
        prop_assert_eq!(parse_address_request(out.into()), Ok(entries));
    }

    /// Normalised routes are in order, and cover the same addresses as before.
    #[test]
    fn routes_there_and_back(entries in prop::collection::vec((0..60_u32, 0..9_u32, 0..3_u8, any::<bool>()), 0..12)) {
        let at = |bits: u32, is_v4: bool| if is_v4 {
            IpAddr::from(Ipv4Addr::from_bits(bits))
        } else {
            Ipv6Addr::from_bits(bits.into()).into()
        };
        let mut routes: Vec<Route> = entries.into_iter()
            .map(|(start, more, protocol, is_v4)| Route { start: at(start, is_v4), end: at(start + more, is_v4), protocol })
            .collect();
        let before = routes.clone();
        normalise(&mut routes);
        let mut out = Vec::new();
        put_routes(&routes, &mut out);
        prop_assert_eq!(parse_route_advertisement(out.into()), Ok(routes.clone()));
        for (bits, protocol, is_v4) in (0..72).flat_map(|bits| (0..4).flat_map(move |protocol| [(bits, protocol, true), (bits, protocol, false)])) {
            let covers = |routes: &[Route]| routes.iter().any(|route| route.covers(at(bits, is_v4), protocol));
            prop_assert_eq!(covers(&before), covers(&routes), "{} {} {}", bits, protocol, is_v4);
        }
    }

    #[test]
    fn nothing_panics(bytes: Vec<u8>, path in "[a-z0-9.*%/:2F]{0,40}") {
        let bytes = Bytes::from(bytes);
        let _ = (parse_address_assign(bytes.clone()), parse_address_request(bytes.clone()), parse_route_advertisement(bytes));
        let _ = parse_path(&format!("{PREFIX}{path}"));
    }
}

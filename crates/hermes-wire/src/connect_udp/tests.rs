//! Tests of the CONNECT-UDP path: tables of good and bad paths, and round trips.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn target(host: &str, port: u16) -> Result<Option<(String, u16)>, ConnectUdpError> {
    Ok(Some((host.to_owned(), port)))
}

/// The examples of RFC 9298, figures 1 and 2, and further valid targets.
#[test]
fn targets_and_their_paths() {
    for (host, port, expected) in [
        ("192.0.2.6", 443, "/.well-known/masque/udp/192.0.2.6/443/"),
        ("2001:db8::42", 443, "/.well-known/masque/udp/2001%3Adb8%3A%3A42/443/"),
        ("VIDEO", 5004, "/.well-known/masque/udp/VIDEO/5004/"),
        ("a_b.example-c.org", 1, "/.well-known/masque/udp/a_b.example-c.org/1/"),
        ("x~y", 65_535, "/.well-known/masque/udp/x~y/65535/"),
        ("a*b", 53, "/.well-known/masque/udp/a%2Ab/53/"),
    ] {
        assert_eq!(path(host, port), expected);
        assert_eq!(parse_path(expected), target(host, port));
    }
}

#[test]
fn brackets_of_ipv6_are_taken_off() {
    assert_eq!(path("[::1]", 53), path("::1", 53));
}

#[test]
fn other_spellings_of_the_same_target() {
    for path in [
        "/.well-known/masque/udp/2001%3adb8%3a%3a42/443/",
        // A colon is legal within a segment (RFC 3986, section 3.3).
        "/.well-known/masque/udp/2001:db8::42/443/",
        "/.well-known/masque/udp/%32001%3Adb8%3A%3A42/00443/",
    ] {
        assert_eq!(parse_path(path), target("2001:db8::42", 443), "{path}");
    }
}

#[test]
fn paths_that_belong_to_somebody_else() {
    for path in [
        "",
        "/",
        "*",
        "/files/1",
        "/.well-known/masque/udp",
        "/.well-known/masque/ip/192.0.2.6/17/",
        "/.Well-Known/masque/udp/a/1/",
        "//.well-known/masque/udp/a/1/",
        "/.well-known/masque/ud%70/a/1/",
    ] {
        assert_eq!(parse_path(path), Ok(None), "{path}");
    }
}

#[test]
fn malformed_paths() {
    use ConnectUdpError::*;
    for (rest, error) in [
        ("", Shape),
        ("a", Shape),
        ("a/", Shape),
        ("a/1", Shape),
        ("a/1//", Shape),
        ("a/1/x", Shape),
        ("a/1/?x=y", Shape),
        ("/1/", EmptyHost),
        ("a//", Port),
        ("a/0/", Port),
        ("a/00000/", Port),
        ("a/65536/", Port),
        ("a/000443/", Port),
        ("a/+443/", Port),
        ("a/-1/", Port),
        ("a/4 3/", Port),
        ("a/%34/", Port),
        ("a/http/", Port),
        ("%/1/", Escape { at: 0 }),
        ("ab%4/1/", Escape { at: 2 }),
        ("a%2/1/", Escape { at: 1 }),
        ("%zz/1/", Escape { at: 0 }),
        ("%+1/1/", Escape { at: 0 }),
        ("a%2Fb/1/", HostByte { byte: b'/' }),
        ("a%5Cb/1/", HostByte { byte: b'\\' }),
        ("a%00/1/", HostByte { byte: 0 }),
        ("a%0D%0Ab/1/", HostByte { byte: b'\r' }),
        ("a%20b/1/", HostByte { byte: b' ' }),
        ("a?b/1/", HostByte { byte: b'?' }),
        ("user%40a/1/", HostByte { byte: b'@' }),
        ("%5B%3A%3A1%5D/1/", HostByte { byte: b'[' }),
        ("fe80%3A%3A1%25eth0/1/", HostByte { byte: b'%' }),
        ("a%252e/1/", HostByte { byte: b'%' }),
        ("b%C3%BCcher/1/", HostByte { byte: 0xc3 }),
        ("b\u{fc}cher/1/", HostByte { byte: 0xc3 }),
        ("a%3A443/1/", NotIpv6),
        (":/1/", NotIpv6),
        ("1:2:3/1/", NotIpv6),
        ("./1/", DotSegment),
        ("../1/", DotSegment),
        ("%2e%2E/1/", DotSegment),
    ] {
        assert_eq!(parse_path(&format!("{PREFIX}{rest}")), Err(error), "{rest}");
    }
}

#[test]
fn the_longest_host_passes_and_a_byte_more_does_not() {
    let longest = "a".repeat(MAX_HOST);
    assert_eq!(parse_path(&path(&longest, 1)), target(&longest, 1));
    let error = ConnectUdpError::HostTooLong { length: MAX_HOST + 1 };
    assert_eq!(parse_path(&path(&"a".repeat(MAX_HOST + 1), 1)), Err(error));
}

fn any_host() -> impl Strategy<Value = String> {
    prop_oneof![
        // Without dot segments, which are rejected.
        "[A-Za-z0-9._~!$&'()*+,;=-]{0,200}[A-Za-z0-9]",
        any::<std::net::Ipv4Addr>().prop_map(|ip| ip.to_string()),
        any::<Ipv6Addr>().prop_map(|ip| ip.to_string()),
    ]
}

proptest! {
    #[test]
    fn round_trip(host in any_host(), port in 1..=u16::MAX) {
        prop_assert_eq!(parse_path(&path(&host, port)), target(&host, port));
    }

    #[test]
    fn a_path_is_plain_whatever_the_host(host: String, port: u16) {
        let path = path(&host, port);
        prop_assert!(path.bytes().all(|byte| byte.is_ascii_graphic()));
        prop_assert_eq!(path.bytes().filter(|byte| *byte == b'/').count(), 6);
    }

    /// Every accepted path can be encoded again, and then names the same target.
    #[test]
    fn what_is_accepted_survives_another_hop(rest in "[a-c0-9:.%2F/\\[\\]é -]{0,24}") {
        if let Ok(Some((host, port))) = parse_path(&format!("{PREFIX}{rest}/443/")) {
            prop_assert_eq!(parse_path(&path(&host, port)), target(&host, port));
        }
    }
}

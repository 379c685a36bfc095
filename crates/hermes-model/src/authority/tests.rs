//! Authorities: each has one spelling, and any other text has an error message.

#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn one_name_has_one_spelling() {
    for (text, host, port, shown) in [
        ("VIDEO", "video", None, "video"),
        ("Video.Example.COM:8080", "video.example.com", Some(8080), "video.example.com:8080"),
        ("db.example.", "db.example", None, "db.example"),
        ("db.example.:80", "db.example", Some(80), "db.example:80"),
        ("[2001:DB8:0:0::1]", "2001:db8::1", None, "[2001:db8::1]"),
        ("[::ffff:1.2.3.4]:443", "1.2.3.4", Some(443), "1.2.3.4:443"),
        ("a_b~c:65535", "a_b~c", Some(65535), "a_b~c:65535"),
        ("a:080", "a", Some(80), "a:80"),
    ] {
        let authority = Authority::parse(text, None).unwrap();
        assert_eq!((authority.host(), authority.explicit_port(), authority.to_string().as_str()), (host, port, shown));
    }
}

#[test]
fn invalid_authorities_say_why() {
    use AuthorityError::*;
    for (text, error) in [
        ("", EmptyHost),
        (".", EmptyHost),
        (":80", EmptyHost),
        (".a", EmptyLabel),
        ("a..b", EmptyLabel),
        ("a..", EmptyLabel),
        ("a::", Port),
        (":", EmptyHost),
        ("a:0", Port),
        ("a:65536", Port),
        ("a:+80", Port),
        ("a:80:80", Port),
        ("2001:db8::1", Port),
        ("[::1", Ipv6),
        ("[::1]80", Port),
        ("[]:80", Ipv6),
        ("[a]", Ipv6),
        ("[fe80::1%25eth0]", Ipv6),
        ("[1.2.3.4]", Ipv6),
        ("user@host", UserInfo),
        ("a b", Character(' ')),
        ("a/b", Character('/')),
        ("a%20b", Character('%')),
        ("caf\u{e9}", Character('\u{e9}')),
        ("a\0", Character('\0')),
    ] {
        assert_eq!(Authority::parse(text, Some(80)), Err(error), "{text}");
    }
    let label = "a".repeat(MAX_HOST_BYTES);
    assert!(Authority::parse(&label, None).is_ok());
    assert_eq!(Authority::parse(&format!("{label}a"), None), Err(TooLong));
    assert!(Authority::parse(&"A.".repeat(100_000), None).is_err());
}

#[test]
fn default_ports_follow_the_scheme() {
    let of = |text: &str, default| {
        let authority = Authority::parse(text, default).unwrap();
        (authority.port(), authority.has_default_port())
    };
    assert_eq!(of("a", Some(80)), (Some(80), true));
    assert_eq!(of("a:80", Some(80)), (Some(80), true));
    assert_eq!(of("a:443", Some(80)), (Some(443), false));
    assert_eq!(of("a", Some(443)), (Some(443), true));
    assert_eq!(of("a:443", None), (Some(443), true));
    assert_eq!(of("a:80", None), (Some(80), true));
    assert_eq!(of("a:81", None), (Some(81), false));
    assert_eq!(of("a", None), (None, true));
}

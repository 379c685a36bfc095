//! Scalars: all valid spellings, and messages for the others.

#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn durations_have_units() {
    for (text, millis) in [
        ("0s", 0),
        ("250ms", 250),
        ("1s", 1000),
        ("10m", 600_000),
        ("1h", 3_600_000),
        ("1d", 86_400_000),
        ("1m30s", 90_000),
        ("1h5ms", 3_600_005),
    ] {
        assert_eq!(text.parse::<HumanDuration>(), Ok(HumanDuration(Duration::from_millis(millis))), "{text}");
    }
    for text in [
        "",
        "1",
        "s",
        "1 s",
        "-1s",
        "1.5s",
        "1w",
        "1S",
        "99999999999999999999s",
        "18446744073709551615d",
        "1s ",
        "\u{661}s",
    ] {
        let error = text.parse::<HumanDuration>().unwrap_err();
        assert!(error.contains("use a number with a unit"), "{text}: {error}");
    }
    for text in ["1s1m", "1s1s", "10ms1h"] {
        let error = text.parse::<HumanDuration>().unwrap_err();
        assert!(error.contains("units must descend"), "{text}: {error}");
    }
}

#[test]
fn sizes_have_units() {
    for (text, bytes) in [("0B", 0), ("100B", 100), ("64KiB", 65_536), ("4MiB", 4 << 20), ("1GiB", 1 << 30)] {
        assert_eq!(text.parse::<ByteSize>(), Ok(ByteSize(bytes)), "{text}");
        assert_eq!(ByteSize(bytes).to_string(), text);
    }
    for text in ["", "64", "KiB", "64KB", "64K", "64kib", "1.5MiB", "-1B", "64 KiB", "99999999999GiB"] {
        assert!(text.parse::<ByteSize>().is_err(), "{text}");
    }
}

#[test]
fn shares_are_percentages() {
    for (text, share) in [("0%", 0.0), ("20%", 0.2), ("12.5%", 0.125), ("100%", 1.0)] {
        assert_eq!(text.parse::<Percentage>(), Ok(Percentage(share)), "{text}");
        assert_eq!(Percentage(share).to_string(), text);
    }
    assert_eq!("7%".parse::<Percentage>().unwrap().to_string(), "7%");
    for text in ["", "%", "20", "0.2", "101%", "-1%", "1e1%", "inf%", "nan%", "20 %"] {
        assert!(text.parse::<Percentage>().is_err(), "{text}");
    }
}

#[test]
fn prefixes_and_endpoints() {
    for (text, shown) in [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.0.0.1", "10.0.0.1/32"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("::1", "::1/128"),
    ] {
        assert_eq!(text.parse::<Prefix>().unwrap().to_string(), shown);
    }
    assert_eq!(
        "10.0.0.1/8".parse::<Prefix>().unwrap_err(),
        "invalid network \"10.0.0.1/8\": host bits are set; use 10.0.0.0/8 or 10.0.0.1/32"
    );
    for text in ["", "10.0.0.0/33", "a/8", "10.0.0/8", "10.0.0.0/"] {
        assert!(text.parse::<Prefix>().is_err(), "{text}");
    }
    for (text, shown) in [("A:1", "a:1"), ("127.0.0.1:80", "127.0.0.1:80"), ("[2001:DB8::0]:9", "[2001:db8::]:9")] {
        assert_eq!(text.parse::<HostPort>().unwrap().to_string(), shown);
    }
    for text in ["a", "a:0", "a:65536", ":1", "2001:db8::1:80", "http://a:1", "*:80", "*.a:80", "a b:1"] {
        assert!(text.parse::<HostPort>().is_err(), "{text}");
    }
}

#[test]
fn one_or_many() {
    let read = |json: &str| serde_json::from_str::<OneOrMany<u16>>(json).map(|many| many.0);
    assert_eq!(read("80").unwrap(), [80]);
    assert_eq!(read("[80, 443]").unwrap(), [80, 443]);
    assert!(read("[]").unwrap_err().to_string().contains("empty list"));
    assert!(read("\"a\"").is_err());
    assert_eq!(serde_json::to_string(&OneOrMany(vec![80])).unwrap(), "80");
    assert_eq!(serde_json::to_string(&OneOrMany(vec![80, 443])).unwrap(), "[80,443]");
}

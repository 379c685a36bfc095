//! Tests of names: the URI form, the canonical order, and the limits.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn name(uri: &str) -> Name {
    uri.parse().unwrap()
}

#[test]
fn uris_print_as_they_were_parsed() {
    let digest = "0123456789abcdef".repeat(4);
    for uri in [
        "/",
        "/a/b/c",
        "/a/%00b/42=x",
        "/...",
        "/....",
        "/......",
        "/32=...",
        "/32=metadata",
        "/a/seg=0/off=256/v=65536/t=1600000000000000/seq=18446744073709551615",
        "/50=%00%01",
        "/50=...",
        "/%3D%25%2F",
        &format!("/a/sha256digest={digest}"),
        &format!("/a/params-sha256={digest}"),
    ] {
        assert_eq!(name(uri).to_string(), uri);
    }
    assert_eq!(name("ndn:/8=a/b/"), name("a/b"));
    assert_eq!(name("/8=..."), Name::from_components([&Component::generic("")]).unwrap());
    assert_eq!(name("/%2e%2E%2e%2e").last(), Some(Component::generic(".")));
}

#[test]
fn bad_uris_are_rejected() {
    for uri in [
        "//",
        "/a//b",
        "/.",
        "/..",
        "/32=..",
        "/0=a",
        "/65536=a",
        "/x=a",
        "/=a",
        "/%",
        "/%0",
        "/%gg",
        "/seg=",
        "/seg=+1",
        "/seg=01",
        "/a=b=c",
        "/sha256digest=00",
        "/params-sha256=zz",
        "/08=a",
        "/seg=18446744073709551616",
    ] {
        assert!(uri.parse::<Name>().is_err(), "{uri}");
    }
}

#[test]
fn order_is_canonical() {
    let digest = "00".repeat(32);
    let ordered = [
        "/".to_owned(),
        format!("/sha256digest={digest}"),
        "/...".to_owned(),
        "/a".to_owned(),
        "/a/b".to_owned(),
        "/z".to_owned(),
        "/aa".to_owned(),
        format!("/{}", "b".repeat(300)),
        "/seg=1".to_owned(),
        "/300=a".to_owned(),
        "/65535=a".to_owned(),
    ];
    for pair in ordered.windows(2) {
        assert!(name(&pair[0]) < name(&pair[1]), "{pair:?}");
    }
}

#[test]
fn prefixes_share_bytes_and_match() {
    let whole = name("/a/bb/seg=3");
    assert_eq!(whole.prefix(2), name("/a/bb"));
    assert_eq!(whole.prefix(9), whole);
    assert_eq!(whole.prefix_bytes(1), name("/a").as_bytes());
    assert!(whole.prefix(0).is_prefix_of(&whole) && whole.is_prefix_of(&whole));
    assert!(!name("/a/b").is_prefix_of(&whole));
    assert_eq!(name("/a/bb").push(&Component::segment(3)).unwrap(), whole);
    assert_eq!(name("/a").join(&name("/bb/seg=3")).unwrap(), whole);
    assert_eq!(whole.last().unwrap().as_number(), Some(3));
    assert!(whole.get(3).is_none());
}

#[test]
fn names_are_bounded() {
    let many = Bytes::from([8, 0].repeat(Name::MAX_COMPONENTS));
    let most = Name::from_value(many.clone()).unwrap();
    assert_eq!(most.len(), Name::MAX_COMPONENTS);
    assert_eq!(most.push(&Component::generic("")), Err(NameError::TooManyComponents));
    let more = Bytes::from([8, 0].repeat(Name::MAX_COMPONENTS + 1));
    assert_eq!(Name::from_value(more), Err(NameError::TooManyComponents));
    assert_eq!(Name::from_value(Bytes::from([8, 0].repeat(10_000))), Err(NameError::TooLong));
    assert_eq!("/a".repeat(10_000).parse::<Name>(), Err(NameError::TooManyComponents));
}

#[test]
fn components_are_checked() {
    for (bytes, error) in [
        (&[1, 1, 0][..], NameError::DigestLength(1)),
        (&[254, 0, 1, 0, 0, 0], NameError::ComponentType(65_536)),
        (&[8, 2, 0], TlvError::Truncated.into()),
        (&[0, 0], TlvError::TypeOutOfRange(0).into()),
    ] {
        assert_eq!(Name::from_value(Bytes::from_static(bytes)), Err(error));
    }
}

fn any_component() -> impl Strategy<Value = Component> {
    let kinds = prop_oneof![Just(GENERIC), Just(KEYWORD), Just(SEGMENT), Just(VERSION), 3..=u16::MAX];
    let values =
        prop_oneof![proptest::collection::vec(any::<u8>(), 0..10), proptest::collection::vec(Just(b'.'), 0..5)];
    (kinds, values).prop_map(|(kind, value)| Component::new(kind, value).unwrap())
}

proptest! {
    #[test]
    fn uris_round_trip(components in proptest::collection::vec(any_component(), 0..20)) {
        let name = Name::from_components(&components).unwrap();
        prop_assert_eq!(name.to_string().parse::<Name>().unwrap(), name);
    }

    #[test]
    fn byte_order_is_component_order(
        left in proptest::collection::vec(any_component(), 0..4),
        right in proptest::collection::vec(any_component(), 0..4),
    ) {
        let names = (Name::from_components(&left).unwrap(), Name::from_components(&right).unwrap());
        prop_assert_eq!(names.0.cmp(&names.1), left.cmp(&right));
        prop_assert_eq!(names.0.is_prefix_of(&names.1), right.starts_with(&left));
    }
}

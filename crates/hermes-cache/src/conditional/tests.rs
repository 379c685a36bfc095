//! Tests of conditional requests and their responses, with simulated times.

#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

use http::{StatusCode, Version};

use super::*;

const NOW: u64 = 1_700_000_000_000;
const THEN: &str = "Tue, 14 Nov 2023 10:00:00 GMT";
const LATER: &str = "Tue, 14 Nov 2023 11:00:00 GMT";

fn fields(lines: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut fields = HeaderMap::new();
    for (name, value) in lines {
        fields.append(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    fields
}

fn head(lines: &[(&'static str, &'static str)]) -> Head {
    let times = Times { asked: NOW, came: NOW };
    Head::new(StatusCode::OK, Version::HTTP_11, fields(lines), &HeaderMap::new(), times, true).unwrap()
}

#[test]
fn a_client_that_has_it_is_told_so() {
    let met = |request: &[_], response: &[_]| Conditions::of(&fields(request)).are_met(&head(response).headers);
    for (line, tag, expected) in [
        ("\"a\"", "\"a\"", true),
        ("\"b\"", "\"a\"", false),
        ("\"b\", \"a\"", "\"a\"", true),
        ("\"a, b\"", "\"a\"", false),
        ("\"b,\\\", \"a\"", "\"a\"", true),
        ("W/\"a\"", "\"a\"", true),
        ("\"a\"", "W/\"a\"", true),
        ("a", "\"a\"", false),
        ("*", "\"a\"", true),
    ] {
        assert_eq!(met(&[("if-none-match", line)], &[("etag", tag)]), expected, "{line} {tag}");
    }
    assert!(met(&[("if-modified-since", THEN)], &[("last-modified", THEN)]));
    assert!(met(&[("if-modified-since", LATER)], &[("last-modified", THEN)]));
    assert!(!met(&[("if-modified-since", THEN)], &[("last-modified", LATER)]));
    assert!(met(&[("if-modified-since", LATER)], &[("date", THEN)]));
    assert!(!met(&[("if-modified-since", THEN)], &[("date", LATER)]));
    // `If-Modified-Since` is ignored beside `If-None-Match`.
    assert!(!met(
        &[("if-none-match", "\"b\""), ("if-modified-since", LATER)],
        &[("etag", "\"a\""), ("last-modified", THEN)]
    ));
    assert!(!met(&[("if-modified-since", "yesterday")], &[("last-modified", THEN)]));
}

#[test]
fn a_part_is_of_the_one_that_the_client_has() {
    let wants = |of, response: &[_]| Conditions::of(&fields(&[("if-range", of)])).want_part(&head(response).headers);
    assert!(wants("\"a\"", &[("etag", "\"a\"")]));
    assert!(!wants("\"b\"", &[("etag", "\"a\"")]));
    assert!(!wants("W/\"a\"", &[("etag", "W/\"a\"")]));
    assert!(wants(THEN, &[("last-modified", THEN), ("date", LATER)]));
    assert!(!wants(THEN, &[("last-modified", THEN), ("date", THEN)]));
    assert!(!wants(LATER, &[("last-modified", THEN), ("date", LATER)]));
    assert!(Conditions::default().want_part(&head(&[]).headers));
}

#[test]
fn what_still_holds_has_the_fields_of_now() {
    let lines = [
        ("etag", "\"a\""),
        ("age", "50"),
        ("a", "1"),
        ("b", "1"),
        ("content-length", "5"),
        ("content-encoding", "gzip"),
    ];
    let old = head(&lines);
    let times = Times { asked: NOW + 5000, came: NOW + 5000 };
    let by = [
        ("etag", "\"a\""),
        ("a", "2"),
        ("a", "3"),
        ("content-length", "0"),
        ("content-encoding", "br"),
        ("cache-control", "max-age=7"),
    ];
    let new = freshened(&old, &fields(&by), times).unwrap();
    let all = |name: &str| {
        new.headers.get_all(name).iter().map(|value| value.to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!((all("a"), all("b")), (vec!["2".to_owned(), "3".to_owned()], vec!["1".to_owned()]));
    assert_eq!((all("content-length"), all("content-encoding")), (vec!["5".to_owned()], vec!["gzip".to_owned()]));
    assert_eq!((all("age"), new.ttl(times.came)), (Vec::new(), 7));
    // The response describes another representation.
    assert!(freshened(&old, &fields(&[("etag", "\"b\"")]), times).is_none());
}

#[test]
fn the_origin_is_asked_by_what_it_said() {
    let asked = validators(&head(&[("etag", "W/\"a\""), ("last-modified", THEN)]));
    let expected = [(IF_NONE_MATCH, "W/\"a\""), (IF_MODIFIED_SINCE, THEN)];
    assert_eq!(asked, expected.map(|(name, value)| (name, HeaderValue::from_static(value))));
    assert!(validators(&head(&[])).is_empty());
}

#[test]
fn what_names_another_one_says_nothing_of_this_one() {
    let times = Times { asked: NOW, came: NOW };
    for (own, by, is_same) in [
        (&[("etag", "W/\"a\"")][..], &[("etag", "W/\"b\"")][..], false),
        (&[("etag", "W/\"a\"")], &[("etag", "W/\"a\"")], true),
        (&[("etag", "\"a\"")], &[("etag", "W/\"b\"")], false),
        (&[("etag", "\"a\"")], &[("etag", "W/\"a\"")], true),
        (&[("etag", "W/\"a\"")], &[("etag", "\"b\"")], false),
        // The stored response has only `Last-Modified`. The new response adds an entity tag, or differs.
        (&[("last-modified", THEN)], &[("etag", "\"b\""), ("last-modified", THEN)], true),
        (&[("last-modified", THEN)], &[("etag", "\"b\"")], false),
        (&[("last-modified", THEN)], &[("last-modified", LATER)], false),
        (&[("last-modified", THEN)], &[], true),
        (&[("etag", "\"a\""), ("last-modified", THEN)], &[("etag", "\"a\""), ("last-modified", LATER)], true),
        (&[("etag", "\"a\"")], &[], true),
    ] {
        assert_eq!(freshened(&head(own), &fields(by), times).is_some(), is_same, "{own:?} {by:?}");
    }
}

//! Tests of freshness, storage and use of responses, with simulated times.

#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

use super::*;

/// Tue, 14 Nov 2023 22:13:20 GMT; a whole second, because HTTP dates have no fractions.
const NOW: Millis = 1_700_000_000_000;
const SECOND: Millis = 1000;

fn fields(lines: &[(&'static str, &str)]) -> HeaderMap {
    let mut fields = HeaderMap::new();
    for (name, value) in lines {
        // The text `@-5` stands for a date five seconds before.
        let value = match value.strip_prefix('@') {
            Some(seconds) => date(NOW.saturating_add_signed(seconds.parse::<i64>().unwrap() * 1000)),
            None => value.parse().unwrap(),
        };
        fields.append(HeaderName::from_static(name), value);
    }
    fields
}

fn head_of(status: u16, lines: &[(&'static str, &str)], shared: bool) -> Head {
    let times = Times { asked: NOW, came: NOW };
    let status = StatusCode::from_u16(status).unwrap();
    Head::new(status, Version::HTTP_11, fields(lines), &HeaderMap::new(), times, shared).unwrap()
}

fn head(lines: &[(&'static str, &str)]) -> Head {
    head_of(200, lines, true)
}

fn asks(line: &'static str) -> Directives {
    Directives::of_request(&fields(&[("cache-control", line)]))
}

#[test]
fn a_response_is_fresh_for_as_long_as_it_says() {
    for (lines, ttl) in [
        (&[("cache-control", "max-age=60")][..], 60),
        (&[("cache-control", "max-age=60, s-maxage=5")], 5),
        (&[("cache-control", "max-age=60"), ("age", "20")], 40),
        (&[("cache-control", "max-age=60"), ("date", "@-30")], 30),
        (&[("cache-control", "max-age=60"), ("date", "@-10"), ("age", "20")], 40),
        // The origin's clock may be ahead; the age is never negative.
        (&[("cache-control", "max-age=60"), ("date", "@3600")], 60),
        (&[("expires", "@60"), ("date", "@0")], 60),
        (&[("expires", "@60"), ("date", "@-40")], 60),
        (&[("expires", "@-1")], 0),
        (&[("expires", "0")], 0),
        (&[("expires", "@60"), ("expires", "@60")], 0),
        (&[("cache-control", "max-age=7"), ("expires", "@60")], 7),
        (&[("cdn-cache-control", "max-age=9"), ("cache-control", "max-age=1"), ("expires", "@60")], 9),
        // Heuristic freshness is a tenth of the time since the last modification, and at most a day.
        (&[("last-modified", "@-1000"), ("date", "@0")], 100),
        (&[("last-modified", "@-99999999"), ("date", "@0")], 24 * 3600),
        (&[], 0),
    ] {
        assert_eq!(head(lines).ttl(NOW), ttl, "{lines:?}");
    }
    for age in ["abc", "-1", "1.0", "0, 7", "7;x=1"] {
        assert_eq!(
            head(&[("cache-control", "max-age=60"), ("age", age)]).usability(&asks(""), NOW),
            Use::Stale,
            "{age}"
        );
    }
    assert_eq!(head_of(200, &[("cache-control", "max-age=60, s-maxage=5")], false).ttl(NOW), 60);
    let slow = Times { asked: NOW - 20 * SECOND, came: NOW };
    let headers = fields(&[("cache-control", "max-age=60")]);
    let head = Head::new(StatusCode::OK, Version::HTTP_11, headers, &HeaderMap::new(), slow, true).unwrap();
    assert_eq!((head.ttl(NOW), head.ttl(NOW + 45 * SECOND)), (40, -5));
}

#[test]
fn what_may_be_kept() {
    let kept =
        |status, lines: &[_], request: &[_], shared| head_of(status, lines, shared).may_be_kept(&fields(request), NOW);
    for (lines, request, kept_by_many, kept_by_one) in [
        (&[("cache-control", "max-age=60")][..], &[][..], Ok(()), Ok(())),
        (&[("cache-control", "no-store, max-age=60")], &[], Err("no-store"), Err("no-store")),
        (&[("cache-control", "private, max-age=60")], &[], Err("private"), Ok(())),
        (&[("cache-control", "private=\"x\", max-age=60")], &[], Ok(()), Ok(())),
        (
            &[("cache-control", "max-age=60")],
            &[("cache-control", "no-store")],
            Err("request-no-store"),
            Err("request-no-store"),
        ),
        (&[("cache-control", "max-age=60")], &[("authorization", "x")], Err("authorization"), Ok(())),
        (&[("cache-control", "max-age=60, public")], &[("authorization", "x")], Ok(()), Ok(())),
        (&[("cache-control", "max-age=60, must-revalidate")], &[("authorization", "x")], Ok(()), Ok(())),
        (&[("cache-control", "s-maxage=60")], &[("authorization", "x")], Ok(()), Err("stale")),
        (&[("cache-control", "max-age=60"), ("set-cookie", "a=b")], &[], Err("set-cookie"), Ok(())),
        (&[("cache-control", "public, max-age=60"), ("set-cookie", "a=b")], &[], Ok(()), Ok(())),
        (&[("cache-control", "no-cache"), ("etag", "\"a\"")], &[], Ok(()), Ok(())),
        (&[("etag", "\"a\"")], &[], Ok(()), Ok(())),
        (&[], &[], Err("stale"), Err("stale")),
        (&[("cdn-cache-control", "no-store"), ("cache-control", "max-age=60")], &[], Err("no-store"), Ok(())),
        (&[("cdn-cache-control", "max-age=60"), ("cache-control", "no-store")], &[], Ok(()), Err("no-store")),
    ] {
        assert_eq!(kept(200, lines, request, true), kept_by_many, "{lines:?} {request:?}");
        assert_eq!(kept(200, lines, request, false), kept_by_one, "{lines:?} {request:?}");
    }
    let modified = &[("last-modified", "@-1000")][..];
    for status in [200, 203, 204, 301, 308, 404, 410, 414, 501] {
        assert_eq!(kept(status, modified, &[], true), Ok(()), "{status}");
    }
    for status in [201, 202, 302, 403, 500, 502, 599] {
        assert_eq!(kept(status, modified, &[], true), Err("status"), "{status}");
        assert_eq!(kept(status, &[("cache-control", "max-age=9")], &[], true), Ok(()), "{status}");
    }
    assert_eq!(kept(599, &[("cache-control", "max-age=9, must-understand")], &[], true), Err("must-understand"));
    assert_eq!(kept(200, &[("cache-control", "max-age=9, must-understand, no-store")], &[], true), Ok(()));
}

#[test]
fn requests_say_what_they_take() {
    let at = |seconds: u64| NOW + seconds * SECOND;
    for (response, request, seconds, expected) in [
        ("max-age=60", "", 59, Use::Fresh),
        ("max-age=60", "", 60, Use::Stale),
        ("max-age=60", "no-cache", 0, Use::Asked),
        ("max-age=60, no-cache", "", 0, Use::Asked),
        ("max-age=60", "max-age=0", 0, Use::Asked),
        ("max-age=60, immutable", "max-age=0", 10, Use::Fresh),
        ("max-age=60, immutable", "max-age=0", 61, Use::Stale),
        ("max-age=60, immutable", "no-cache", 10, Use::Asked),
        ("max-age=60", "max-age=30", 29, Use::Fresh),
        ("max-age=60", "max-age=30", 31, Use::Asked),
        ("max-age=60", "min-fresh=30", 29, Use::Fresh),
        ("max-age=60", "min-fresh=30", 31, Use::Asked),
        ("max-age=60", "max-stale", 999, Use::StaleAllowed),
        ("max-age=60", "max-stale=10", 70, Use::StaleAllowed),
        ("max-age=60", "max-stale=10", 71, Use::Stale),
        ("max-age=60, must-revalidate", "max-stale", 61, Use::Stale),
        ("max-age=60, proxy-revalidate", "max-stale", 61, Use::Stale),
        ("s-maxage=60", "max-stale", 61, Use::Stale),
    ] {
        let judged = head(&[("cache-control", response)]).usability(&asks(request), at(seconds));
        assert_eq!(judged, expected, "{response} | {request} | {seconds}");
    }
}

#[test]
fn what_is_stale_stands_in_where_nobody_forbids_it() {
    let hour = Some(Duration::from_secs(3600));
    for (response, request, seconds, unreachable, expected) in [
        ("max-age=1", "", 2, hour, true),
        ("max-age=1", "", 3602, hour, false),
        // The origin was reached, and no directive allows a stale response.
        ("max-age=1", "", 2, None, false),
        ("max-age=1, stale-if-error=60", "", 60, None, true),
        ("max-age=1, stale-if-error=60", "", 62, None, false),
        ("max-age=1, stale-if-error=60", "", 62, hour, false),
        ("max-age=1", "stale-if-error=60", 60, None, true),
        ("max-age=1, must-revalidate, stale-if-error=60", "", 2, hour, false),
        ("max-age=1, proxy-revalidate", "", 2, hour, false),
        ("s-maxage=1", "", 2, hour, false),
        ("max-age=1, no-cache", "", 2, hour, false),
        ("max-age=1", "no-cache", 2, hour, false),
    ] {
        let head = head(&[("cache-control", response)]);
        let stands = head.may_stand_in(&asks(request), unreachable, NOW + seconds * SECOND);
        assert_eq!(stands, expected, "{response} | {request} | {seconds}");
    }
}

#[test]
fn fields_for_one_are_not_kept_for_many() {
    let lines = &[
        ("cache-control", "max-age=9, private=\"a\", no-cache=\"b, set-cookie\""),
        ("a", "1"),
        ("b", "1"),
        ("c", "1"),
    ];
    let names = |shared| {
        let mut head = head_of(200, lines, shared);
        head.strip();
        ["a", "b", "c"].map(|name| head.headers.contains_key(name))
    };
    assert_eq!((names(true), names(false)), ([false, false, true], [true, false, true]));
}

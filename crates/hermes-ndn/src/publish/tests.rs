//! Tests of published content: what an Interest gets, and that the fetch engine gets all of it.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::fetch::{Fetch, FetchLimits};
use crate::packet::Data;

const FRESH: Duration = Duration::from_secs(5);

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn bytes(count: usize) -> Bytes {
    (0..count).map(|at| u8::try_from(at * 31 % 251).unwrap()).collect::<Vec<_>>().into()
}

fn answered(content: &PublishedContent, text: &str, can_be_prefix: bool) -> Option<Data> {
    let interest = Interest { can_be_prefix, ..Interest::new(name(text)) };
    let packet = content.answer(&interest, FRESH, &Signer::digest()).unwrap()?;
    assert!(packet.len() <= MAX_PACKET, "{} bytes", packet.len());
    let data = Data::decode(packet).unwrap();
    assert!(data.answers(&interest), "{} for {text}", data.name);
    assert_eq!(data.freshness, Some(FRESH));
    Some(data)
}

#[test]
fn an_interest_gets_the_part_that_it_names() {
    let content = PublishedContent::new(name("/org/file"), 7, bytes(20_000)).unwrap();
    let expected = [
        ("/org/file", true, Some("/org/file/v=7/seg=0")),
        ("/org/file/v=7", true, Some("/org/file/v=7/seg=0")),
        ("/org/file/v=7/seg=2", false, Some("/org/file/v=7/seg=2")),
        ("/org/file/32=metadata", true, Some("/org/file/32=metadata/v=7/seg=0")),
        ("/org/file/v=7/seg=3", false, None),
        ("/org/file/v=7/seg=18446744073709551615", false, None),
        ("/org/file/v=8/seg=0", false, None),
        ("/org/file/v=7", false, None),
        ("/org/file", false, None),
        ("/org/file/32=metadata", false, None),
        ("/org/file/v=7/off=0", true, None),
        ("/org", true, None),
    ];
    for (asked, can_be_prefix, answer) in expected {
        let found = answered(&content, asked, can_be_prefix).map(|data| data.name.to_string());
        assert_eq!(found.as_deref(), answer, "{asked}");
    }
    // Content of one packet answers an Interest for exactly its name, too.
    for count in [0, 5] {
        let content = PublishedContent::new(name("/org/file"), 7, bytes(count)).unwrap();
        assert_eq!(answered(&content, "/org/file", false).unwrap().content, bytes(count));
    }
}

#[test]
fn the_fetch_engine_gets_all_of_it() {
    let long = format!("/org/{}", "x".repeat(3700));
    for (text, count) in [("/org/file", 0), ("/org/file", 1), ("/org/file", 300_000), (long.as_str(), 50_000)] {
        let content = PublishedContent::new(name(text), 7, bytes(count)).unwrap();
        let mut fetch = Fetch::new(name(text), FetchLimits::default(), 1);
        let mut got = Vec::new();
        let mut now = Duration::ZERO;
        while !fetch.is_complete() {
            while let Some(interest) = fetch.next_interest(now) {
                let answer = content.answer(&interest, FRESH, &Signer::digest()).unwrap().unwrap();
                fetch.take_data(Data::decode(answer).unwrap(), false, now).unwrap();
            }
            while let Some(part) = fetch.next_content() {
                got.extend_from_slice(&part);
            }
            now += Duration::from_millis(1);
            assert!(now < Duration::from_secs(10), "{text}: {} of {count} bytes", got.len());
        }
        assert!(got == bytes(count), "{text}: {} of {count} bytes", got.len());
    }
    assert!(PublishedContent::new(name(&format!("/{}", "x".repeat(4000))), 1, bytes(1)).is_none());
}

#[test]
fn the_name_of_content_ends_before_the_conventions() {
    for (asked, content) in [
        ("/a/b", "/a/b"),
        ("/a/b/v=1/seg=2", "/a/b"),
        ("/a/b/seg=2", "/a/b"),
        ("/a/32=metadata/v=3", "/a"),
        ("/a/32=other/b", "/a/32=other/b"),
        ("/v=1", "/"),
    ] {
        assert_eq!(content_name(&name(asked)), name(content), "{asked}");
    }
    assert!(asks_for_newest(&name("/a/32=metadata")) && !asks_for_newest(&name("/a/v=1")));
}

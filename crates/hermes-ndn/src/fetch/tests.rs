//! Tests of a fetch against a simulated producer, in computed time.

#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::packet::DataBuilder;
use crate::signature::Signer;

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// A producer of segments under a version.
struct Producer {
    versioned: Name,
    segments: u64,
    has_metadata: bool,
    answers_prefix: bool,
}

impl Producer {
    fn segment(&self, number: u64) -> Data {
        let builder = DataBuilder {
            name: self.versioned.child(&Component::numbered(types::SEGMENT, number)),
            final_block: Some(Component::numbered(types::SEGMENT, self.segments - 1)),
            ..DataBuilder::default()
        };
        Data::decode(builder.sign(&number.to_be_bytes(), &Signer::digest()).unwrap()).unwrap()
    }

    fn answer(&self, interest: &Interest) -> Option<Data> {
        let metadata = self.versioned.parent().child(&Component::new(types::KEYWORD, METADATA));
        if interest.name == metadata && self.has_metadata {
            let mut content = Vec::new();
            self.versioned.put(&mut content);
            let name =
                metadata.child(&Component::numbered(types::VERSION, 1)).child(&Component::numbered(types::SEGMENT, 0));
            let builder = DataBuilder { name, ..DataBuilder::default() };
            return Some(Data::decode(builder.sign(&content, &Signer::digest()).unwrap()).unwrap());
        }
        if interest.can_be_prefix {
            return (self.answers_prefix && interest.name.is_prefix_of(&self.versioned)).then(|| self.segment(0));
        }
        let number = interest.name.last()?.number(types::SEGMENT)?;
        (interest.name.parent() == self.versioned && number < self.segments).then(|| self.segment(number))
    }
}

/// Runs a fetch to its end. `lost` decides which answers get lost, by their number.
fn run(
    fetch: &mut Fetch,
    producer: &Producer,
    rtt: Duration,
    mut lost: impl FnMut(u64) -> bool,
) -> Result<Vec<u8>, FetchError> {
    let (mut now, mut content, mut sent) = (Duration::ZERO, Vec::new(), 0);
    let mut arriving: VecDeque<(Duration, Data)> = VecDeque::new();
    while !fetch.is_complete() {
        while let Some(interest) = fetch.next_interest(now) {
            sent += 1;
            if let Some(data) = producer.answer(&interest).filter(|_| !lost(sent)) {
                arriving.push_back((now + rtt, data));
            }
        }
        let timeout = fetch.next_timeout();
        match arriving.front() {
            Some((at, _)) if timeout.is_none_or(|timeout| *at <= timeout) => {
                let (at, data) = arriving.pop_front().unwrap();
                now = at;
                fetch.take_data(data, false, now)?;
            }
            _ => {
                now = timeout.expect("nothing is under way, and the fetch is not complete");
                fetch.handle_timeout(now)?;
            }
        }
        while let Some(part) = fetch.next_content() {
            content.extend_from_slice(&part);
        }
    }
    Ok(content)
}

fn expected(segments: u64) -> Vec<u8> {
    (0..segments).flat_map(u64::to_be_bytes).collect()
}

#[test]
fn a_version_is_found_by_metadata_or_by_prefix() {
    for (has_metadata, answers_prefix) in [(true, false), (false, true), (true, true)] {
        let producer = Producer { versioned: name("/a/b/v=9"), segments: 50, has_metadata, answers_prefix };
        for asked in ["/a/b", "/a/b/v=9"] {
            let mut fetch = Fetch::new(name(asked), FetchLimits::default(), 1);
            let content = run(&mut fetch, &producer, Duration::from_millis(20), |_| false);
            assert_eq!(content, Ok(expected(50)), "{asked} {has_metadata} {answers_prefix}");
            assert_eq!(fetch.first().unwrap().name, name("/a/b/v=9/seg=0"));
        }
        let mut single = Fetch::new(name("/a/b/v=9/seg=7"), FetchLimits::default(), 1);
        let content = run(&mut single, &producer, Duration::from_millis(20), |_| false).unwrap();
        assert_eq!(content, 7_u64.to_be_bytes());
    }
}

#[test]
fn content_without_segments_is_one_packet() {
    let mut fetch = Fetch::new(name("/page"), FetchLimits::default(), 1);
    let interest = fetch.next_interest(Duration::ZERO).unwrap();
    assert!(interest.can_be_prefix);
    let builder = DataBuilder { name: name("/page"), ..DataBuilder::default() };
    let data = Data::decode(builder.sign(b"hello", &Signer::digest()).unwrap()).unwrap();
    fetch.take_data(data, false, Duration::ZERO).unwrap();
    assert_eq!(fetch.next_content().as_deref(), Some(&b"hello"[..]));
    assert!(fetch.is_complete());
}

#[test]
fn silence_and_refusals_end_it() {
    let nobody = Producer { versioned: name("/x/v=1"), segments: 1, has_metadata: false, answers_prefix: false };
    let mut fetch = Fetch::new(name("/a"), FetchLimits::default(), 1);
    assert_eq!(run(&mut fetch, &nobody, Duration::ZERO, |_| false), Err(FetchError::NoAnswer));
    let mut fetch = Fetch::new(name("/a/v=1"), FetchLimits::default(), 1);
    let interest = fetch.next_interest(Duration::ZERO).unwrap();
    assert_eq!(fetch.take_nack(&interest.name, NackReason::NoRoute, Duration::ZERO), Err(FetchError::NoRoute));
    let mut fetch = Fetch::new(name("/a/v=1"), FetchLimits::default(), 1);
    let interest = fetch.next_interest(Duration::ZERO).unwrap();
    let builder = DataBuilder { name: interest.name, content_type: APPLICATION_NACK, ..DataBuilder::default() };
    let data = Data::decode(builder.sign(b"", &Signer::digest()).unwrap()).unwrap();
    assert_eq!(fetch.take_data(data, false, Duration::ZERO), Err(FetchError::NotFound));
}

fn refusal(of: Name) -> Data {
    let builder = DataBuilder { name: of, content_type: APPLICATION_NACK, ..DataBuilder::default() };
    Data::decode(builder.sign(b"", &Signer::digest()).unwrap()).unwrap()
}

#[test]
fn a_refusal_is_for_one_name() {
    let mut fetch = Fetch::new(name("/a"), FetchLimits::default(), 1);
    while fetch.next_interest(Duration::ZERO).is_some() {}
    // The answer to an Interest of an earlier fetch, for a segment that the content does not have.
    let stale = refusal(name("/a/v=1/seg=7"));
    fetch.take_data(stale, false, Duration::ZERO).unwrap();
    // Without metadata, the content may still be there.
    fetch.take_data(refusal(name("/a/32=metadata")), false, Duration::ZERO).unwrap();
    assert_eq!(fetch.take_data(refusal(name("/a")), false, Duration::ZERO), Err(FetchError::NotFound));
}

#[test]
fn content_without_a_last_segment_ends_before_the_first_absent_one() {
    // The refusal arrives before and after the content has been handed out.
    for is_early in [true, false] {
        let mut fetch = Fetch::new(name("/a/v=1"), FetchLimits::default(), 1);
        while fetch.next_interest(Duration::ZERO).is_some() {}
        let segment = |number| name("/a/v=1").child(&Component::numbered(types::SEGMENT, number));
        let builder = DataBuilder { name: segment(0), ..DataBuilder::default() };
        let data = Data::decode(builder.sign(b"all", &Signer::digest()).unwrap()).unwrap();
        if is_early {
            fetch.take_data(refusal(segment(1)), false, Duration::ZERO).unwrap();
            fetch.take_data(data, false, Duration::ZERO).unwrap();
            assert_eq!(fetch.next_content().unwrap(), "all");
        } else {
            fetch.take_data(data, false, Duration::ZERO).unwrap();
            assert_eq!(fetch.next_content().unwrap(), "all");
            assert!(!fetch.is_complete());
            fetch.take_data(refusal(segment(1)), false, Duration::ZERO).unwrap();
        }
        assert!(fetch.is_complete());
        assert!(fetch.next_content().is_none());
    }
}

#[test]
fn metadata_of_another_name_is_refused() {
    let mut fetch = Fetch::new(name("/a"), FetchLimits::default(), 1);
    while fetch.next_interest(Duration::ZERO).is_some() {}
    let mut content = Vec::new();
    name("/evil/v=1").put(&mut content);
    let builder = DataBuilder { name: name("/a/32=metadata/v=1/seg=0"), ..DataBuilder::default() };
    let data = Data::decode(builder.sign(&content, &Signer::digest()).unwrap()).unwrap();
    assert_eq!(fetch.take_data(data, false, Duration::ZERO), Err(FetchError::Unexpected));
}

#[test]
fn a_congestion_mark_halves_the_window_once_a_round_trip() {
    let producer = Producer { versioned: name("/a/v=1"), segments: 1000, has_metadata: false, answers_prefix: false };
    let mut fetch = Fetch::new(name("/a/v=1"), FetchLimits::default(), 1);
    let mut now = Duration::ZERO;
    for _ in 0..40 {
        let interest = fetch.next_interest(now).unwrap();
        now += Duration::from_millis(10);
        fetch.take_data(producer.answer(&interest).unwrap(), false, now).unwrap();
    }
    let before = fetch.window;
    for _ in 0..3 {
        let interest = fetch.next_interest(now).unwrap();
        fetch.take_data(producer.answer(&interest).unwrap(), true, now).unwrap();
    }
    assert!((fetch.window - before / 2.0).abs() < 0.01, "{before} {}", fetch.window);
}

proptest! {
    #[test]
    fn content_is_whole_and_in_order_in_spite_of_loss(segments in 1..300_u64, seed in any::<u64>(), percent in 0..20_u64) {
        let producer = Producer { versioned: name("/a/b/v=9"), segments, has_metadata: true, answers_prefix: true };
        let limits = FetchLimits { max_ahead: 64, patience: Duration::from_secs(300), ..FetchLimits::default() };
        let mut fetch = Fetch::new(name("/a/b"), limits, 7);
        let lost = |number: u64| (number ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57 < percent * 128 / 100;
        prop_assert_eq!(run(&mut fetch, &producer, Duration::from_millis(30), lost), Ok(expected(segments)));
    }
}

//! Tests of the stored packets.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::name::{Component, types};
use crate::packet::DataBuilder;
use crate::signature::Signer;

const SECOND: Duration = Duration::from_secs(1);

fn data(text: &str, fresh: Duration) -> Data {
    let name = text.parse().unwrap();
    let builder = DataBuilder { name, freshness: Some(fresh), ..DataBuilder::default() };
    Data::decode(builder.sign(text.as_bytes(), &Signer::digest()).unwrap()).unwrap()
}

fn interest(text: &str) -> Interest {
    Interest::new(text.parse().unwrap())
}

#[test]
fn a_name_a_prefix_and_a_digest_find_a_packet() {
    let mut store = DataStore::new(1 << 20);
    let packet = data("/a/b/v=1", SECOND);
    store.put(&packet, SECOND, None);
    store.put(&data("/a/c", SECOND), SECOND, None);
    assert_eq!(store.find(&interest("/a/b/v=1"), SECOND), Some(packet.clone()));
    assert_eq!(store.find(&interest("/a/b"), SECOND), None);
    let by_prefix = Interest { can_be_prefix: true, ..interest("/a/b") };
    assert_eq!(store.find(&by_prefix, SECOND), Some(packet.clone()));
    let by_digest = |digest: &[u8]| Interest::new(packet.name.child(&Component::new(types::IMPLICIT_DIGEST, digest)));
    assert_eq!(store.find(&by_digest(&packet.digest()), SECOND), Some(packet.clone()));
    assert_eq!(store.find(&by_digest(&[0; 32]), SECOND), None);
}

#[test]
fn fresh_packets_alone_answer_an_interest_that_must_be_fresh() {
    let mut store = DataStore::new(1 << 20);
    store.put(&data("/a/v=1", SECOND), Duration::ZERO, None);
    let fresh = Interest { can_be_prefix: true, must_be_fresh: true, ..interest("/a") };
    assert!(store.find(&fresh, SECOND - Duration::from_millis(1)).is_some());
    assert_eq!(store.find(&fresh, SECOND), None);
    assert!(store.find(&interest("/a/v=1"), SECOND).is_some());
    // A fresh one behind it is found.
    store.put(&data("/a/v=2", SECOND * 9), Duration::ZERO, None);
    assert_eq!(store.find(&fresh, SECOND).unwrap().content, "/a/v=2");
}

#[test]
fn the_least_recently_used_goes_first_and_the_bytes_are_bounded() {
    let one = cost(&data("/0", SECOND));
    let mut store = DataStore::new(3 * one);
    for text in ["/0", "/1", "/2"] {
        store.put(&data(text, SECOND), Duration::ZERO, None);
    }
    assert!(store.find(&interest("/0"), Duration::ZERO).is_some());
    store.put(&data("/3", SECOND), Duration::ZERO, None);
    assert_eq!(store.find(&interest("/1"), Duration::ZERO), None);
    assert!(store.find(&interest("/0"), Duration::ZERO).is_some());
    // The same name again takes no more room.
    for _ in 0..10 {
        store.put(&data("/3", SECOND), Duration::ZERO, None);
    }
    assert_eq!((store.bytes, store.packets.len(), store.order.len()), (3 * one, 3, 3));
    let mut small = DataStore::new(one - 1);
    small.put(&data("/0", SECOND), Duration::ZERO, None);
    assert_eq!((small.bytes, small.packets.len(), small.order.len()), (0, 0, 0));
}

#[test]
fn a_packet_answers_until_its_signature_has_expired() {
    let mut store = DataStore::new(1 << 20);
    store.put(&data("/a", SECOND * 9), Duration::ZERO, Some(SECOND));
    assert!(store.find(&interest("/a"), SECOND - Duration::from_millis(1)).is_some());
    assert_eq!(store.find(&interest("/a"), SECOND), None);
}

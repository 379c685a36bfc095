//! Tests of stored content: versions, freshness and bounds.

#![allow(clippy::unwrap_used)]

use super::*;

const LIMITS: StoreLimits = StoreLimits { bytes: 10_000, overhead: 1000, waiting: 5, requests: 2, receiving: 100 };
const SECOND: Duration = Duration::from_secs(1);

fn key(text: &str) -> ContentKey {
    (Arc::from("face"), text.parse().unwrap())
}

fn versions(store: &mut ContentStore<u8>, text: &str, now: u64) -> Option<Vec<u64>> {
    let name: Name = text.parse().unwrap();
    match store.find(&key("/a"), &name, now) {
        Found::Versions(versions, _) => Some(versions.iter().map(|content| content.version()).collect()),
        Found::Nothing => None,
    }
}

#[test]
fn versions_follow_the_content_and_the_last_two_are_kept() {
    let mut store = ContentStore::new(LIMITS);
    let put = |store: &mut ContentStore<u8>, version, bytes: &'static [u8], now| {
        store.put(key("/a"), version, Bytes::from_static(bytes), SECOND, now).unwrap().version()
    };
    assert_eq!(versions(&mut store, "/a", 0), None);
    assert_eq!(put(&mut store, 50, b"one", 0), 50);
    assert_eq!(put(&mut store, 60, b"one", 900), 50, "equal content");
    assert_eq!(versions(&mut store, "/a", 1899), Some(vec![50]));
    assert_eq!(versions(&mut store, "/a", 1900), None, "no longer fresh");
    assert_eq!(versions(&mut store, "/a/v=50/seg=0", 1900), Some(vec![50]), "a version never changes");
    assert_eq!(put(&mut store, 40, b"two", 2000), 51, "a clock that went back");
    assert_eq!(versions(&mut store, "/a/v=50/seg=0", 2000), Some(vec![51, 50]));
    assert_eq!(versions(&mut store, "/a", 2000), Some(vec![51]));
    assert_eq!(put(&mut store, 70, b"three", 2100), 70);
    assert_eq!(versions(&mut store, "/a/v=50/seg=0", 2100), Some(vec![70, 51]), "known, and without this version");
    assert_eq!(versions(&mut store, "/a/v=50/seg=0", 9999), None);
    assert_eq!(store.bytes, 2000 + b"three".len() + b"two".len());
}

#[test]
fn the_least_recently_used_content_goes() {
    let mut store: ContentStore<u8> = ContentStore::new(LIMITS);
    for name in ["/a", "/b", "/c"] {
        store.put(key(name), 1, vec![0; 2000].into(), SECOND, 0).unwrap();
    }
    assert_eq!(versions(&mut store, "/a", 0), Some(vec![1]));
    store.put(key("/d"), 1, vec![0; 2000].into(), SECOND, 0).unwrap();
    assert!(store.stored.contains_key(&key("/a")) && !store.stored.contains_key(&key("/b")));
    // The version before goes first, if both do not fit.
    for byte in [1, 2] {
        store.put(key("/d"), 1, vec![byte; 6000].into(), SECOND, 0).unwrap();
    }
    let found = store.stored.get(&key("/d")).unwrap();
    assert!(found.previous.is_none() && found.newest.bytes()[0] == 2);
    // Content beyond the bound is answered once, and not kept.
    assert!(store.put(key("/e"), 1, vec![0; 20_000].into(), SECOND, 0).is_some());
    assert_eq!((store.stored.len(), store.order.len(), store.bytes), (0, 0, 0));
}

#[test]
fn another_generation_forgets_the_content() {
    let mut store: ContentStore<u8> = ContentStore::new(LIMITS);
    store.set_generation(1);
    store.put(key("/a"), 1, vec![0; 20].into(), SECOND, 0).unwrap();
    store.set_generation(1);
    assert_eq!(versions(&mut store, "/a", 0), Some(vec![1]));
    store.set_generation(2);
    assert_eq!((versions(&mut store, "/a", 0), store.bytes, store.order.len()), (None, 0, 0));
}

#[test]
fn bytes_under_way_are_bounded() {
    let mut store: ContentStore<u8> = ContentStore::new(LIMITS);
    assert!(store.reserve(60) && store.reserve(40) && !store.reserve(1));
    store.release(60);
    assert!(store.reserve(60) && !store.reserve(1));
}

#[test]
fn waiting_interests_and_requests_are_bounded() {
    let mut store = ContentStore::new(LIMITS);
    assert_eq!(store.wait(&key("/a"), 1), Ok(true));
    assert_eq!(store.wait(&key("/a"), 2), Ok(false));
    assert_eq!(store.wait(&key("/b"), 3), Ok(true));
    assert_eq!(store.wait(&key("/c"), 4), Err(4), "two requests");
    assert_eq!(store.wait(&key("/b"), 5), Ok(false));
    assert_eq!(store.wait(&key("/b"), 6), Ok(false));
    assert_eq!(store.wait(&key("/b"), 7), Err(7), "five Interests");
    assert_eq!(store.take_waiters(&key("/b")), [3, 5, 6]);
    assert_eq!(store.wait(&key("/c"), 8), Ok(true));
}

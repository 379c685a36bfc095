//! Tests of the store at the limits of memory, disk and runs, together with the disk tier's thread.

use hermes_model::authority::Authority;
use http::header::{CACHE_CONTROL, ETAG};
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderValue, Method, StatusCode, Version};

use super::super::content::{CHUNK_COST, ChargedBytes, MAX_RUNS, Run};
use super::super::head::Times;
use super::disk::root::Root;
use super::*;
use crate::lookup::RequestHead;

const NOW: Millis = 1_700_000_000_000;

struct Store {
    cache: Arc<Cache>,
    /// The directory of the cache; dropped after the cache.
    _directory: tempfile::TempDir,
}

fn store(memory: u64, disk: u64) -> Store {
    let directory = tempfile::tempdir().unwrap();
    let cache = at(directory.path().join("cache"), memory, disk);
    Store { cache, _directory: directory }
}

/// Waits for an action of a thread that signals nothing.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let began = std::time::Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::yield_now();
    }
}

fn at(directory: PathBuf, memory: u64, disk: u64) -> Arc<Cache> {
    let settings =
        hermes_model::snapshot::Cache { memory, disk, shared: true, stale_if_error: Duration::from_secs(60) };
    let root = Root::new(directory.parent().unwrap().to_owned());
    let place = CacheDir { root, directory, former: None };
    Cache::new(settings, "test".to_owned(), CacheMetrics::default(), Some(place))
}

fn ask(path: &str) -> CacheLookup {
    let head = RequestHead {
        method: Method::GET,
        scheme: Scheme::HTTP,
        authority: Authority::parse("web:80", None).unwrap(),
        path: PathAndQuery::try_from(path).unwrap(),
        fields: HeaderMap::new(),
    };
    CacheLookup::new(head, true, None)
}

fn head() -> Arc<Head> {
    let mut headers = HeaderMap::new();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("max-age=600"));
    headers.insert(ETAG, HeaderValue::from_static("\"a\""));
    let times = Times { asked: NOW, came: NOW };
    Arc::new(Head::new(StatusCode::OK, Version::HTTP_11, headers, &HeaderMap::new(), times, true).unwrap())
}

/// These bytes of a representation, charged to the cache's memory.
fn part(cache: &Cache, range: std::ops::Range<u64>, total: u64) -> Content {
    let mut run = Run::at(range.start);
    let bytes: Vec<u8> = range.map(|at| at as u8).collect();
    let charge = cache.room(bytes.len() + CHUNK_COST).unwrap();
    run.push(ChargedBytes { bytes, charge }.into_chunk());
    Content::new([run], total)
}

impl Store {
    fn keep(&self, path: &str, range: std::ops::Range<u64>, total: u64) {
        let content = part(&self.cache, range, total);
        self.cache.keep(&ask(path).key, &head(), content, None);
    }

    fn stored(&self, path: &str) -> Option<Stored> {
        match self.cache.lookup(&ask(path), NOW, false) {
            LookupResult::Hit(stored) => Some(stored),
            LookupResult::Fetch { stored, .. } => stored,
            _ => None,
        }
    }

    /// Waits until the response is in a file.
    fn filed(&self, path: &str) -> Stored {
        until("it is written", || self.stored(path).is_some_and(|stored| stored.file.is_some()));
        let place = (ask(path).key, self.stored(path).unwrap().id);
        // The disk thread still references the content for a moment.
        until("it is let go", || self.cache.lock().find(&place).is_none_or(|variant| !variant.is_busy()));
        self.stored(path).unwrap()
    }

    /// Takes all memory, as clients that read slowly do.
    fn exhaust(&self) -> Vec<Charge> {
        std::iter::from_fn(|| self.cache.room(4096)).collect()
    }
}

#[test]
fn memory_that_is_full_does_not_cost_what_is_on_disk() {
    let store = store(1 << 20, 64 << 20);
    for number in 0..20 {
        store.keep(&format!("/{number}"), 0..50_000, 50_000);
        store.filed(&format!("/{number}"));
    }
    let held = store.exhaust();
    assert!(held.len() > 100, "{}", held.len());
    for number in 0..20 {
        let stored = store.stored(&format!("/{number}")).unwrap_or_else(|| panic!("{number} is gone"));
        assert!(stored.file.is_some() && stored.content.is_none(), "{number}");
    }
}

#[tokio::test]
async fn what_cannot_be_read_for_now_is_not_gone() {
    let store = store(1 << 20, 64 << 20);
    store.keep("/x", 0..200_000, 200_000);
    store.filed("/x");
    let held = store.exhaust();
    let (key, stored) = (ask("/x").key, store.stored("/x").unwrap());
    assert!(matches!(store.cache.content(&key, &stored).await, Loaded::Busy));
    drop(held);
    let stored = store.stored("/x").expect("it is gone");
    let Loaded::Content(content) = store.cache.content(&key, &stored).await else { panic!("it cannot be read") };
    assert_eq!(content.slice(100_000).unwrap()[0], 100_000_u64 as u8);
}

#[tokio::test]
async fn who_wants_the_same_file_has_it_read_once() {
    let store = store(1 << 20, 64 << 20);
    store.keep("/x", 0..200_000, 200_000);
    store.filed("/x");
    // The disk may finish one write before the next one is queued, but not at each attempt.
    for attempt in 0..50 {
        drop(store.exhaust());
        let (key, stored) = (ask("/x").key, store.stored("/x").unwrap());
        assert!(stored.content.is_none());
        store.keep(&format!("/{attempt}"), 0..200_000, 200_000);
        let load = || store.cache.content(&key, &stored);
        let (one, two, three) = tokio::join!(load(), load(), load());
        let contents = [&one, &two, &three].map(|loaded| match loaded {
            Loaded::Content(content) => Arc::as_ptr(content),
            _ => panic!("it cannot be read"),
        });
        if contents.iter().all(|content| *content == contents[0]) {
            return;
        }
    }
    panic!("each reads it for itself");
}

/// Evicting a content that is still being written would free nothing.
#[test]
fn what_is_being_written_stays() {
    let store = store(1 << 20, 64 << 20);
    for number in 0..7 {
        store.keep(&format!("/{number}"), 0..50_000, 50_000);
    }
    // Some contents are not written yet.
    let _held = store.exhaust();
    for number in 0..7 {
        store.filed(&format!("/{number}"));
    }
}

#[test]
fn the_heads_of_many_files_have_an_end_and_the_latest_stay() {
    let store = store(1 << 20, 64 << 20);
    for number in 0..1000 {
        store.keep(&format!("/{number}"), 0..10, 10);
    }
    let kept = (0..1000).filter(|number| store.stored(&format!("/{number}")).is_some()).count();
    assert!((200..500).contains(&kept), "{kept}");
    assert!(store.stored("/999").is_some() && store.stored("/0").is_none());
}

#[test]
fn ranges_without_end_make_no_more_runs() {
    let store = store(4 << 20, 0);
    for number in 0..1000 {
        store.keep("/x", number * 2..number * 2 + 1, 100_000);
    }
    assert_eq!(store.stored("/x").unwrap().shape.runs.len(), MAX_RUNS);
    // A content that fills the gaps is stored nevertheless.
    store.keep("/x", 0..90_000, 100_000);
    assert_eq!(store.stored("/x").unwrap().shape.runs.len(), 1);
}

#[test]
fn ranges_beside_each_other_are_put_together() {
    let store = store(4 << 20, 0);
    for number in 0..5000 {
        store.keep("/x", number..number + 1, 100_000);
    }
    let stored = store.stored("/x").unwrap();
    assert_eq!(stored.shape.runs, [0..5000]);
    let content = stored.content.unwrap();
    assert!(!content.is_scattered());
    for at in [0, 1, 2500, 4999] {
        assert_eq!(content.slice(at).unwrap()[0], at as u8);
    }
    // Each chunk costs more than its byte.
    let used = store.cache.metrics.memory.get();
    assert!((5000..200_000).contains(&used), "{used}");
}

#[test]
fn a_file_is_written_anew_when_it_has_grown() {
    let store = store(16 << 20, 64 << 20);
    let (mut files, each) = (HashSet::new(), 10_000);
    for number in 0..200 {
        store.keep("/x", number * each..(number + 1) * each, 200 * each);
        let place = (ask("/x").key, store.stored("/x").unwrap().id);
        until("it is written", || store.cache.lock().find(&place).unwrap().writes == 0);
        files.insert(store.stored("/x").unwrap().file);
    }
    assert!((2..25).contains(&files.len()), "{}", files.len());
    // The content is complete.
    let place = (ask("/x").key, store.stored("/x").unwrap().id);
    let in_file = store.cache.lock().find(&place).unwrap().file.as_ref().unwrap().shape.clone();
    assert_eq!(in_file.runs, [0..200 * each]);
}

/// Bytes that arrived after the write are in memory alone; after an eviction, the variant has the bytes of its file.
#[test]
fn what_leaves_memory_is_what_its_file_is() {
    let store = store(1 << 20, 64 << 20);
    store.keep("/x", 0..100_000, 200_000);
    store.filed("/x");
    store.keep("/x", 100_000..110_000, 200_000);
    assert_eq!(store.stored("/x").unwrap().shape.runs, [0..110_000]);
    drop(store.exhaust());
    let stored = store.stored("/x").unwrap();
    assert!(stored.content.is_none());
    assert_eq!(stored.shape.runs, [0..100_000]);
}

#[test]
fn keys_of_answers_for_one_alone_cost_little() {
    let mut state = State::default();
    for number in 0..10_000 {
        state.is_solitary(&format!("{number}"), NOW + number);
    }
    assert!(!state.is_for_many("9999", NOW));
    assert!(state.is_for_many("0", NOW) && state.is_for_many("other", NOW));
}

/// Another process holds the directory for a while, and a target is invalidated meanwhile.
#[test]
fn what_ended_before_it_was_found_is_not_given() {
    let directory = tempfile::tempdir().unwrap();
    let place = || directory.path().join("cache");
    let first = Store { cache: at(place(), 1 << 20, 1 << 20), _directory: tempfile::tempdir().unwrap() };
    for path in ["/x", "/y"] {
        first.keep(path, 0..10, 10);
        first.filed(path);
    }
    drop(first);
    let lock = || hermes_net::lock::Lock::take(&directory.path().join("lock"));
    until("the first one has let go", || lock().is_ok());
    let others = lock().unwrap();
    let second = Store { cache: at(place(), 1 << 20, 1 << 20), _directory: directory };
    second.cache.forget(&ask("/x").key);
    drop(others);
    second.filed("/y");
    assert!(second.stored("/x").is_none());
    until("all is found", || second.cache.lock().ended.is_none());
    second.keep("/x", 0..10, 10);
    second.filed("/x");
}

/// The entity tag is the same, but the bytes differ: the complete response replaces the parts, on disk as well.
#[tokio::test]
async fn the_whole_is_written_anew() {
    let store = store(1 << 20, 1 << 20);
    store.keep("/x", 0..100, 100);
    let before = store.filed("/x").file;
    store.keep("/x", 0..100, 100);
    assert_ne!(store.filed("/x").file, before);
}

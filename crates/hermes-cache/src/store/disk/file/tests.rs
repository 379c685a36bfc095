//! Tests that a written file is read completely, or rejected.

#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

use bytes::Bytes;

use super::*;
use crate::content::Tier;

fn written(path: &Path) -> (Layout, Head) {
    let mut headers = HeaderMap::new();
    headers.insert("etag", HeaderValue::from_bytes(b"\"\xe4\"").unwrap());
    headers.append("a", HeaderValue::from_static("1"));
    headers.append("a", HeaderValue::from_static("2"));
    headers.insert("vary", HeaderValue::from_static("b, c"));
    let mut request = HeaderMap::new();
    request.insert("b", HeaderValue::from_static("x"));
    let times = Times { asked: 1_700_000_000_000, came: 1_700_000_000_500 };
    let head = Head::new(StatusCode::OK, Version::HTTP_2, headers, &request, times, false).unwrap();
    let run = |start: u64, length: usize| {
        let mut run = Run::at(start);
        run.push(Bytes::from((0..length).map(|at| at as u8).collect::<Vec<_>>()));
        run
    };
    let content = Content::new([run(10, 200_000), run(300_000, 7)], 400_000);
    (Layout::write(path, "key", &head, &content).unwrap(), head)
}

fn read(layout: &Layout, path: &Path) -> io::Result<Content> {
    let tier = Tier::new(1 << 30, prometheus_client::metrics::gauge::Gauge::default());
    layout.read(path, |bytes| tier.take(bytes))
}

struct CacheDir(std::path::PathBuf);

impl CacheDir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("hermes-cache-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Self(path)
    }
}

impl Drop for CacheDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn an_object_is_read_as_it_was_written() {
    let place = CacheDir::new("whole");
    let (_, head) = written(&place.0);
    let (mut layout, key, found) = Layout::open(&place.0).unwrap();
    assert_eq!((&*key, &found.headers, &found.vary, found.times), ("key", &head.headers, &head.vary, head.times));
    assert_eq!((found.status, found.version, found.shared), (head.status, head.version, head.shared));
    let content = read(&layout, &place.0).unwrap();
    assert_eq!(content.shape(), StoredRanges { total: 400_000, runs: vec![10..200_010, 300_000..300_007] });
    for at in [10, 70_000, 200_009, 300_006] {
        let start = if at < 300_000 { 10 } else { 300_000 };
        assert_eq!(content.slice(at).unwrap()[0], (at - start) as u8, "{at}");
    }
    // A slightly longer head still fits.
    let mut grown = head.clone();
    grown.headers.insert("more", HeaderValue::from_static("of it"));
    layout.patch(&place.0, "key", &grown).unwrap();
    assert_eq!(Layout::open(&place.0).unwrap().2.headers, grown.headers);
    read(&layout, &place.0).unwrap();
    grown.headers.insert("more", HeaderValue::try_from("x".repeat(9000)).unwrap());
    assert!(layout.patch(&place.0, "key", &grown).is_err());
    assert!(Layout::open(&place.0).is_ok());
}

#[test]
fn what_was_cut_or_changed_is_noticed() {
    let place = CacheDir::new("broken");
    let (layout, _) = written(&place.0);
    let whole = std::fs::read(&place.0).unwrap();
    for length in [0, 7, FIXED, layout.area, whole.len() - 1] {
        std::fs::write(&place.0, &whole[..length]).unwrap();
        assert!(Layout::open(&place.0).is_err(), "{length} bytes");
    }
    for at in [0, 8, 12, 20, FIXED + 5] {
        let mut changed = whole.clone();
        changed[at] ^= 0x40;
        std::fs::write(&place.0, &changed).unwrap();
        assert!(Layout::open(&place.0).is_err(), "byte {at}");
    }
    for at in [layout.area, whole.len() - 1] {
        let mut changed = whole.clone();
        changed[at] ^= 1;
        std::fs::write(&place.0, &changed).unwrap();
        let (layout, _, _) = Layout::open(&place.0).unwrap();
        assert!(read(&layout, &place.0).is_err(), "byte {at}");
    }
}

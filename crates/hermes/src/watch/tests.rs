//! Tests which changes a watch reports, and which directories it watches for them.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;

use super::*;

/// Longer than any wait of a watch, so that silence proves that nothing was reported.
const NOTHING: Duration = Duration::from_millis(800);

async fn changes(watch: &mut Watch) -> bool {
    tokio::time::timeout(NOTHING, watch.changed()).await.is_ok()
}

fn put(path: &Path, text: &str) {
    let next = path.with_extension("next");
    fs::write(&next, text).unwrap();
    fs::rename(&next, path).unwrap();
}

#[test]
fn every_link_on_the_way_is_an_entry() {
    let room = tempfile::tempdir().unwrap();
    let at = room.path().canonicalize().unwrap();
    fs::create_dir_all(at.join("v1")).unwrap();
    fs::write(at.join("v1/node.yaml"), "one").unwrap();
    symlink("v1", at.join("..data")).unwrap();
    symlink("..data/node.yaml", at.join("node.yaml")).unwrap();
    assert_eq!(entries_of(&at.join("node.yaml")), [at.join("node.yaml"), at.join("..data"), at.join("v1/node.yaml")]);
    // A symbolic link to itself must not cause an endless loop.
    symlink("round", at.join("round")).unwrap();
    assert!(entries_of(&at.join("round")).len() <= MAX_LINKS + 1);
}

#[tokio::test]
async fn a_renamed_a_written_and_a_removed_file_are_changes_and_others_are_none() {
    let room = tempfile::tempdir().unwrap();
    let (document, other) = (room.path().join("node.yaml"), room.path().join("access.log"));
    fs::write(&document, "one").unwrap();
    let mut watch = Watch::new(&document).unwrap();
    fs::write(&other, "a line").unwrap();
    assert!(!changes(&mut watch).await, "a neighbour is no business of ours");
    put(&document, "two");
    assert!(changes(&mut watch).await);
    fs::write(&document, "three").unwrap();
    assert!(changes(&mut watch).await);
    fs::write(&document, "three").unwrap();
    assert!(!changes(&mut watch).await, "the same content is no change");
    fs::remove_file(&document).unwrap();
    assert!(changes(&mut watch).await);
    fs::write(&document, "four").unwrap();
    assert!(changes(&mut watch).await);
}

#[tokio::test]
async fn a_file_that_is_being_written_is_waited_for() {
    let room = tempfile::tempdir().unwrap();
    let document = room.path().join("node.yaml");
    fs::write(&document, "one").unwrap();
    let mut watch = Watch::new(&document).unwrap();
    for is_new in [false, true] {
        if is_new {
            fs::remove_file(&document).unwrap();
            assert!(changes(&mut watch).await);
        }
        let mut writer = fs::File::create(&document).unwrap();
        for _ in 0..5 {
            writer.write_all(b"a piece ").unwrap();
            writer.flush().unwrap();
            let seen = tokio::time::timeout(UNCLOSED / 5, watch.changed()).await;
            assert!(seen.is_err(), "half of a document was taken for a whole one");
        }
        drop(writer);
        assert!(changes(&mut watch).await);
    }
}

#[tokio::test]
async fn a_new_link_is_no_file_that_somebody_writes() {
    let room = tempfile::tempdir().unwrap();
    let (document, target) = (room.path().join("node.yaml"), room.path().join("target"));
    fs::write(&target, "one").unwrap();
    let mut watch = Watch::new(&document).unwrap();
    for link in [fs::hard_link::<&Path, &Path>, symlink] {
        link(&target, &document).unwrap();
        assert!(tokio::time::timeout(AT_LATEST / 2, watch.changed()).await.is_ok());
        fs::remove_file(&document).unwrap();
        assert!(changes(&mut watch).await);
    }
}

#[tokio::test]
async fn an_interrupted_wait_forgets_nothing() {
    let room = tempfile::tempdir().unwrap();
    let document = room.path().join("node.yaml");
    fs::write(&document, "one").unwrap();
    let mut watch = Watch::new(&document).unwrap();
    put(&document, "two");
    // Each wait is cancelled, some after they received an event.
    for _ in 0..50 {
        let interrupted = tokio::time::timeout(Duration::from_micros(100), watch.changed()).await;
        assert!(interrupted.is_err(), "it settles for longer than this");
        if watch.due.is_some() {
            break;
        }
    }
    assert!(changes(&mut watch).await);
}

#[tokio::test]
async fn a_link_that_is_turned_is_followed_to_where_it_leads_now() {
    let room = tempfile::tempdir().unwrap();
    let at = room.path();
    for (version, text) in [("v1", "one"), ("v2", "two")] {
        fs::create_dir(at.join(version)).unwrap();
        fs::write(at.join(version).join("node.yaml"), text).unwrap();
    }
    symlink("v1", at.join("current")).unwrap();
    let document = at.join("current/node.yaml");
    let mut watch = Watch::new(&document).unwrap();
    symlink("v2", at.join("next")).unwrap();
    fs::rename(at.join("next"), at.join("current")).unwrap();
    assert!(changes(&mut watch).await);
    put(&at.join("v2/node.yaml"), "three");
    assert!(changes(&mut watch).await, "the new directory is watched");
    put(&at.join("v1/node.yaml"), "four");
    assert!(!changes(&mut watch).await, "the old one is not");
}

#[tokio::test]
async fn files_that_are_no_longer_named_are_no_longer_watched() {
    let room = tempfile::tempdir().unwrap();
    let keys = room.path().join("keys");
    fs::create_dir(&keys).unwrap();
    let (document, key) = (room.path().join("node.yaml"), keys.join("node.key"));
    fs::write(&document, "one").unwrap();
    fs::write(&key, "one").unwrap();
    let mut watch = Watch::new(&document).unwrap();
    watch.follow([key.as_path()].into_iter());
    fs::write(&key, "two").unwrap();
    assert!(changes(&mut watch).await);
    watch.follow(std::iter::empty());
    assert_eq!(watch.directories.len(), 1);
    fs::write(&key, "three").unwrap();
    assert!(!changes(&mut watch).await);
}

/// Waits for as long as the slow poll may take.
async fn polled(watch: &mut Watch) -> bool {
    tokio::time::timeout(4 * POLL_INTERVAL, watch.changed()).await.is_ok()
}

#[tokio::test]
async fn a_directory_that_is_replaced_is_watched_again() {
    let room = tempfile::tempdir().unwrap();
    let at = |name: &str| room.path().join(name);
    let make = |name: &str, text: &str| {
        fs::create_dir_all(at(name)).unwrap();
        fs::write(at(name).join("node.yaml"), text).unwrap();
    };
    make("conf", "one");
    let mut watch = Watch::new(&at("conf/node.yaml")).unwrap();
    make("new", "two");
    fs::rename(at("conf"), at("old")).unwrap();
    fs::rename(at("new"), at("conf")).unwrap();
    assert!(polled(&mut watch).await);
    put(&at("conf/node.yaml"), "three");
    assert!(changes(&mut watch).await, "and what happens in it");
    put(&at("old/node.yaml"), "four");
    assert!(!changes(&mut watch).await, "what was moved away is nobody's");
    // The directory is removed, and created again later.
    fs::remove_dir_all(at("conf")).unwrap();
    assert!(polled(&mut watch).await);
    assert!(!changes(&mut watch).await);
    make("conf", "five");
    assert!(polled(&mut watch).await);
    put(&at("conf/node.yaml"), "six");
    assert!(changes(&mut watch).await);
}

#[tokio::test]
async fn a_directory_that_is_made_again_at_once_is_watched_again() {
    let room = tempfile::tempdir().unwrap();
    let directory = room.path().join("conf");
    fs::create_dir(&directory).unwrap();
    let document = directory.join("node.yaml");
    fs::write(&document, "one").unwrap();
    let mut watch = Watch::new(&document).unwrap();
    // The new directory often gets the inode of the old one.
    fs::remove_dir_all(&directory).unwrap();
    fs::create_dir(&directory).unwrap();
    fs::write(&document, "two").unwrap();
    assert!(changes(&mut watch).await);
    put(&document, "three");
    assert!(changes(&mut watch).await, "before the next poll");
}

#[tokio::test]
async fn a_directory_further_up_that_is_replaced_is_found_by_polling() {
    let room = tempfile::tempdir().unwrap();
    let at = |name: &str| room.path().join(name);
    for (name, text) in [("a", "one"), ("b", "two")] {
        fs::create_dir_all(at(name).join("conf")).unwrap();
        fs::write(at(name).join("conf/node.yaml"), text).unwrap();
    }
    let mut watch = Watch::new(&at("a/conf/node.yaml")).unwrap();
    fs::rename(at("a"), at("c")).unwrap();
    fs::rename(at("b"), at("a")).unwrap();
    assert!(polled(&mut watch).await);
    put(&at("a/conf/node.yaml"), "three");
    assert!(changes(&mut watch).await);
}

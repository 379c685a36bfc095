//! Interrupted, changed and wrong responses: the downloaded file is correct in the end.

use hermes_testkit::pattern::Pattern;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

use crate::fetch::lab::{Reply, events, fetch, files, named, origin, sha256, stderr};

const LENGTH: usize = 300_000;

#[tokio::test]
async fn a_repeatedly_interrupted_transfer_repeats_no_byte() {
    for seed in 1..=3 {
        let content = Pattern::new(seed).bytes(LENGTH);
        let mut random = SmallRng::seed_from_u64(seed);
        let (from, mut breaks) = (content.clone(), 0);
        let (origin, seen) = origin(move |number, head| {
            let reply = Reply::of(&from, "\"one\"", head);
            breaks += 1;
            // What is left, or something of it.
            let at = if breaks > 12 { usize::MAX } else { random.random_range(0..40_000) };
            let reply = reply.cut(at);
            if number == 0 { reply.with("repr-digest", sha256(&from)) } else { reply }
        });
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("object");
        let (status, events) = events(&format!("http://{}/object", origin.address()), &file, &[]).await;
        assert_eq!(status, 0, "{events:?}");
        assert_eq!(std::fs::read(&file).unwrap(), content);
        assert_eq!(files(room.path()), ["object"]);
        // Each goes on where the one before broke off, and nowhere else.
        let mut at = 0;
        for event in named(&events, "request") {
            assert_eq!(event["from"].as_u64().unwrap(), at);
            at = held_after(&events, event["attempt"].as_u64().unwrap());
        }
        assert!(seen.count() > 8, "{}", seen.count());
        assert!(seen.fields("if-range").iter().flatten().all(|tag| tag == "\"one\""));
        assert_eq!(seen.fields("accept-encoding")[0].as_deref(), Some("identity"));
        let done = named(&events, "done")[0];
        assert_eq!((done["held"].as_u64(), done["verified"].as_bool()), (Some(LENGTH as u64), Some(true)));
    }
}

/// How much was held when a try broke off.
fn held_after(events: &[serde_json::Value], attempt: u64) -> u64 {
    let retry = named(events, "retry").into_iter().find(|event| event["attempt"] == attempt);
    retry.map_or(LENGTH as u64, |event| event["held"].as_u64().unwrap())
}

#[tokio::test]
async fn content_that_changes_between_tries_is_never_mixed() {
    let versions: Vec<Vec<u8>> = (1..=4).map(|seed| Pattern::new(seed).bytes(LENGTH)).collect();
    let last = versions[3].clone();
    let (origin, _) = origin(move |number, head| {
        let version = (number / 2).min(3);
        let reply = Reply::of(&versions[version], &format!("\"v{version}\""), head);
        if number < 7 { reply.cut(LENGTH / 3) } else { reply }
    });
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("object");
    let (status, events) = events(&format!("http://{}/", origin.address()), &file, &[]).await;
    assert_eq!((status, named(&events, "anew").len()), (0, 3), "{events:?}");
    assert_eq!(std::fs::read(&file).unwrap(), last);
}

#[tokio::test]
async fn content_that_changes_with_the_same_range_is_seen_by_its_tag() {
    let (old, new) = (Pattern::new(1).bytes(LENGTH), Pattern::new(2).bytes(LENGTH));
    let wanted = new.clone();
    // It does not know If-Range.
    let (origin, seen) = origin(move |number, head| match number {
        0 => Reply::of(&old, "\"old\"", head).cut(1000),
        _ => {
            let reply = Reply::of(&new, head.header("if-range").as_deref().unwrap_or("\"new\""), head);
            reply.without("etag").with("etag", "\"new\"")
        }
    });
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("object");
    let (status, _) = events(&format!("http://{}/", origin.address()), &file, &[]).await;
    assert_eq!((status, seen.count()), (0, 3));
    assert_eq!(std::fs::read(&file).unwrap(), wanted);
}

#[tokio::test]
async fn an_origin_without_ranges_is_asked_until_it_sends_all() {
    for etag in [Some("\"one\""), Some("W/\"one\""), None] {
        let content = Pattern::new(5).bytes(LENGTH);
        let from = content.clone();
        let (origin, seen) = origin(move |number, _| {
            let reply = Reply { status: 200, content: from.clone(), ..Reply::default() };
            let reply = etag.map_or(reply.clone(), |etag| reply.with("etag", etag));
            [200_000, 100, 250_000].get(number).map_or(reply.clone(), |at| reply.cut(*at))
        });
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("object");
        let (status, events) = events(&format!("http://{}/", origin.address()), &file, &[]).await;
        assert_eq!((status, seen.count()), (0, 4), "{events:?}");
        assert_eq!(std::fs::read(&file).unwrap(), content);
        // What no strong tag vouches for is not asked for in parts.
        let ranges = seen.fields("range").iter().flatten().count();
        assert_eq!(ranges, if etag == Some("\"one\"") { 3 } else { 0 });
    }
}

#[tokio::test]
async fn a_lie_about_the_range_costs_a_try_and_no_byte() {
    for lie in ["bytes 0-99999/300000", "bytes 200000-299999/300000", "nonsense"] {
        let content = Pattern::new(6).bytes(LENGTH);
        let from = content.clone();
        let (origin, _) = origin(move |number, head| {
            let reply = Reply::of(&from, "\"one\"", head);
            match number {
                0 => reply.cut(150_000),
                _ if reply.status == 206 => reply.without("content-range").with("content-range", lie),
                _ => reply,
            }
        });
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("object");
        let (status, events) = events(&format!("http://{}/", origin.address()), &file, &[]).await;
        assert_eq!(status, 0, "{lie}: {events:?}");
        assert_eq!(std::fs::read(&file).unwrap(), content);
    }
}

#[tokio::test]
async fn inconsistent_ranges_fail_the_digest_and_are_fetched_again() {
    let content = Pattern::new(7).bytes(LENGTH);
    let from = content.clone();
    // Its parts are of something else, and have the right numbers.
    let (origin, _) = origin(move |number, head| {
        let mut reply = Reply::of(&from, "\"one\"", head).with("repr-digest", sha256(&from));
        if reply.status == 206 {
            reply.content.fill(0);
        }
        if number == 0 { reply.cut(150_000) } else { reply }
    });
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("object");
    let (status, events) = events(&format!("http://{}/", origin.address()), &file, &[]).await;
    assert_eq!((status, named(&events, "anew").len()), (0, 1), "{events:?}");
    assert_eq!(std::fs::read(&file).unwrap(), content);
}

#[tokio::test]
async fn a_wrong_digest_is_tried_once_more_and_then_believed() {
    for field in ["repr-digest", "content-digest", "--digest"] {
        let content = Pattern::new(8).bytes(LENGTH);
        let (from, wrong) = (content.clone(), sha256(b"something else"));
        let output = wrong.clone();
        let (origin, seen) = origin(move |_, head| {
            let reply = Reply::of(&from, "\"one\"", head);
            if field == "--digest" { reply } else { reply.with(field, &output) }
        });
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("object");
        let typed = if field == "--digest" { vec!["--digest", &wrong] } else { Vec::new() };
        let (status, events) = events(&format!("http://{}/", origin.address()), &file, &typed).await;
        assert_eq!((status, seen.count()), (1, 2), "{field}: {events:?}");
        assert!(events.last().unwrap()["error"].as_str().unwrap().contains("does not match its digest"));
        assert!(files(room.path()).is_empty(), "{:?}", files(room.path()));
    }
}

#[tokio::test]
async fn a_corrupted_byte_is_fetched_again() {
    let content = Pattern::new(9).bytes(LENGTH);
    let (from, digest) = (content.clone(), sha256(&content));
    let (origin, seen) = origin(move |number, head| {
        let mut reply = Reply::of(&from, "\"one\"", head).with("repr-digest", "sha-256=:AAAA:, md5=:AAAA:");
        if number == 0 {
            reply.content[LENGTH / 2] ^= 1;
        }
        reply
    });
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("object");
    let (status, _) = events(&format!("http://{}/", origin.address()), &file, &["--digest", &digest]).await;
    assert_eq!((status, seen.count()), (0, 2));
    assert_eq!(std::fs::read(&file).unwrap(), content);
    assert!(seen.fields("want-repr-digest")[0].as_deref().unwrap().contains("sha-256=10"));
}

#[tokio::test]
async fn standard_output_has_each_byte_once_whatever_the_origin_does() {
    let content = Pattern::new(10).bytes(LENGTH);
    for honours_ranges in [true, false] {
        let from = content.clone();
        let (origin, _) = origin(move |number, head| {
            let reply = Reply::of(&from, "\"one\"", head);
            let whole = Reply { status: 200, content: from.clone(), ..Reply::default() };
            let reply = if honours_ranges { reply } else { whole };
            [120_000, 10_000, 90_000].get(number).map_or(reply.clone(), |at| reply.cut(*at))
        });
        let output = fetch([&format!("http://{}/", origin.address()), "-o", "-"]).await;
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(output.stdout == content, "{} bytes", output.stdout.len());
    }
}

#[tokio::test]
async fn standard_output_never_has_two_contents() {
    let (old, new) = (Pattern::new(1).bytes(LENGTH), Pattern::new(2).bytes(LENGTH));
    let written = old[..100_000].to_vec();
    let (origin, _) = origin(move |number, head| match number {
        0 => Reply::of(&old, "\"old\"", head).cut(100_000),
        _ => Reply::of(&new, "\"new\"", head),
    });
    let output = fetch([&format!("http://{}/", origin.address()), "-o", "-"]).await;
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("changed at the origin after 100000 bytes"), "{}", stderr(&output));
    assert!(output.stdout == written);
}

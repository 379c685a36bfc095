//! `hermes fetch` over time: temporary refusals, silence, deadlines, and killed runs.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hermes_testkit::pattern::Pattern;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::fetch::lab::{Reply, STALL_TIMEOUT, command, events, fetch, files, grown, named, origin, stderr};

const LENGTH: usize = 200_000;

#[tokio::test]
async fn fetch_waits_as_long_as_retry_after_says() {
    let (origin, seen) = origin(|number, head| match number {
        0 => Reply::status(503).with("retry-after", 1),
        1 => {
            let later = std::time::SystemTime::now() + Duration::from_secs(2);
            Reply::status(429).with("retry-after", httpdate::fmt_http_date(later))
        }
        2..=5 => Reply::status([408, 500, 502, 504][number - 2]),
        _ => Reply::of(b"at last", "\"a\"", head),
    });
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("object");
    let (status, events) = events(&format!("http://{}/", origin.address()), &file, &[]).await;
    assert_eq!((status, seen.count()), (0, 7), "{events:?}");
    let waits: Vec<f64> = named(&events, "retry").iter().map(|event| event["wait-seconds"].as_f64().unwrap()).collect();
    assert!(waits[0] >= 1.0 && waits[0] < 2.5, "{waits:?}");
    assert!(waits[1] > 0.0 && waits[1] < 4.0, "{waits:?}");
    assert_eq!(std::fs::read(&file).unwrap(), b"at last");
}

#[tokio::test]
async fn a_silent_origin_ends_at_the_deadline() {
    // A listener that nobody accepts at.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("object");
    let timeout = format!("{}ms", STALL_TIMEOUT.as_millis());
    let url = format!("http://{}/", silent.local_addr().unwrap());
    let (status, events) = events(&url, &file, &["--deadline", "2s", "--patience", &timeout]).await;
    assert_eq!(status, 3, "{events:?}");
    assert!(named(&events, "request").len() > 1, "{events:?}");
    assert_eq!(events.last().unwrap()["event"], "deadline");
    assert!(!file.exists());
}

#[tokio::test]
async fn a_stalled_transfer_is_aborted_and_resumed() {
    let content = Pattern::new(3).bytes(LENGTH);
    let from = content.clone();
    let (origin, seen) = origin(move |number, head| {
        let reply = Reply::of(&from, "\"a\"", head);
        if number < 3 { reply.cut(50_000).stalling() } else { reply }
    });
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("object");
    let timeout = format!("{}ms", STALL_TIMEOUT.as_millis());
    let (status, _) = events(&format!("http://{}/", origin.address()), &file, &["--patience", &timeout]).await;
    assert_eq!((status, seen.count()), (0, 4));
    assert_eq!(seen.fields("range")[3].as_deref(), Some("bytes=150000-"));
    assert_eq!(std::fs::read(&file).unwrap(), content);
}

#[tokio::test]
async fn a_run_ended_by_its_deadline_is_resumed_by_the_next() {
    let content = Pattern::new(4).bytes(LENGTH);
    let from = content.clone();
    let well = Arc::new(AtomicBool::new(false));
    let is_well = well.clone();
    let (origin, seen) = origin(move |number, head| match number {
        0 => Reply::of(&from, "\"a\"", head).cut(70_000),
        _ if is_well.load(Ordering::SeqCst) => Reply::of(&from, "\"a\"", head),
        _ => Reply::status(503).with("retry-after", 999_999),
    });
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("object");
    let url = format!("http://{}/x", origin.address());
    let output = fetch([&url, "-o", file.to_str().unwrap(), "--deadline", "1500ms"]).await;
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let text = stderr(&output);
    assert!(
        text.contains("70.0 kB are stored in") && text.contains("; the same command resumes the download"),
        "{text}"
    );
    assert_eq!(files(room.path()), ["object.part", "object.part.json"]);
    let before = seen.count();
    // A try is worth more than an origin's word of eleven days; but it was asked seldom.
    assert!((2..30).contains(&before), "{before}");
    well.store(true, Ordering::SeqCst);
    let output = fetch([&url, "-o", file.to_str().unwrap()]).await;
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(seen.fields("range")[before].as_deref(), Some("bytes=70000-"));
    assert_eq!(std::fs::read(&file).unwrap(), content);
}

#[tokio::test]
async fn a_killed_run_is_resumed_by_the_next() {
    let content = Pattern::new(5).bytes(LENGTH);
    let (from, changed) = (content.clone(), Arc::new(AtomicBool::new(false)));
    let now_other = changed.clone();
    let other = Pattern::new(6).bytes(LENGTH);
    let wanted = other.clone();
    let (origin, seen) = origin(move |number, head| {
        if now_other.load(Ordering::SeqCst) {
            return Reply::of(&other, "\"b\"", head);
        }
        let reply = Reply::of(&from, "\"a\"", head);
        if number < 2 { reply.cut(60_000).stalling() } else { reply }
    });
    let url = format!("http://{}/", origin.address());
    for is_other in [false, true] {
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("object");
        let part = room.path().join("object.part");
        let args = [&url, "-o", file.to_str().unwrap()];
        for held in if is_other { vec![] } else { vec![60_000, 120_000] } {
            let mut running = command(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            grown(&part, held).await;
            kill(Pid::from_raw(running.id().unwrap().cast_signed()), Signal::SIGKILL).unwrap();
            running.wait().await.unwrap();
        }
        if is_other {
            // What an earlier run held is of content that is no more.
            std::fs::write(&part, &content[..60_000]).unwrap();
            let record = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
            let record = serde_json::json!({"url": url, "synced": 0, "boot": record.trim(),
                "known": {"validator": {"etag": "\"a\""}, "total": LENGTH}});
            std::fs::write(room.path().join("object.part.json"), record.to_string()).unwrap();
            changed.store(true, Ordering::SeqCst);
        }
        let before = seen.count();
        let output = fetch(args).await;
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let requests = seen.fields("range")[before].clone();
        assert_eq!(requests.as_deref(), Some(if is_other { "bytes=60000-" } else { "bytes=120000-" }));
        assert!(std::fs::read(&file).unwrap() == *if is_other { &wanted } else { &content });
        assert_eq!(files(room.path()), ["object"]);
    }
}

#[tokio::test]
async fn an_origin_that_is_not_up_yet_is_waited_for() {
    let port = hermes_testkit::port::reserve("127.0.0.1");
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("object");
    let running = command([&format!("http://{port}/"), "--json", "-o", file.to_str().unwrap()]).spawn().unwrap();
    let part = room.path().join("object.part");
    grown(&part, 0).await;
    let listener = std::net::TcpListener::bind(port).unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    let serving = async {
        let (stream, _) = listener.accept().await.unwrap();
        let mut http1 = hermes_testkit::raw_http1::RawHttp1::new(stream);
        http1.head().await.unwrap();
        http1.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
        http1.send_chunk(b"here ").await.unwrap();
        http1.send_chunk(b"now").await.unwrap();
        http1.send("0\r\n\r\n").await.unwrap();
        http1.finish().await.unwrap();
    };
    let ended = async { running.wait_with_output().await.unwrap() };
    let (output, ()) = tokio::join!(ended, serving);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(std::fs::read(&file).unwrap(), b"here now");
}

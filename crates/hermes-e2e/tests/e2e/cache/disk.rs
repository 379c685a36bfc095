//! The disk tier: what is found again, and what is not given.

use std::{fs, path::PathBuf};

use hermes_testkit::overlay::{Node, Overlay};
use nix::sys::signal::Signal;

use crate::cache::lab::{Scripted, Step, ask, body, get, node, overlay, response};

fn files(overlay: &Overlay) -> Vec<PathBuf> {
    let folders = fs::read_dir(overlay.dir().join("state/cache")).unwrap().flatten();
    let folders = folders.filter(|entry| entry.path().is_dir());
    let files = folders.flat_map(|folder| fs::read_dir(folder.path()).unwrap().flatten());
    files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|e| e == "object")).collect()
}

async fn on_disk(node: &Node, bytes: f64) {
    node.metric_reaches("hermes_cache_bytes", "route=\"all\",tier=\"disk\"", bytes).await;
}

async fn end(node: Node) {
    node.signal(Signal::SIGTERM).unwrap();
    node.ended().await;
}

#[tokio::test]
async fn a_restart_keeps_cached_responses() {
    let whole = body(300_000);
    let sent = whole.clone();
    let mut origin = Scripted::new(move |request, _| {
        let fields = match request.target() {
            "/stale" => "cache-control: max-age=0\netag: \"a\"",
            _ => "cache-control: max-age=600\netag: \"a\"",
        };
        vec![Step::Send(match request.header("if-none-match") {
            Some(_) => b"HTTP/1.1 304 Same\r\netag: \"a\"\r\n\r\n".to_vec(),
            None => response(200, fields, &sent),
        })]
    });
    let overlay = overlay();
    let before = node(&overlay, "", origin.origin.address()).await;
    for path in ["/x", "/stale", "/changed"] {
        assert!(get(&before, path).await.data == whole);
    }
    on_disk(&before, 900_000.0).await;
    ask(&before, "POST", "/changed", &["content-length: 0"]).await;
    end(before).await;
    assert_eq!(origin.seen().len(), 4);
    let after = node(&overlay, "", origin.origin.address()).await;
    on_disk(&after, 600_000.0).await;
    let got = get(&after, "/x").await;
    assert!(got.is_hit() && got.data == whole, "{:?}", got.head);
    assert!(ask(&after, "GET", "/x", &["range: bytes=299990-"]).await.data == whole[299_990..]);
    assert_eq!(origin.seen().len(), 0);
    let got = get(&after, "/stale").await;
    assert!(got.says().contains("fwd-status=304") && got.data == whole, "{:?}", got.head);
    // What was ended stays so.
    assert!(get(&after, "/changed").await.says().contains("fwd=uri-miss"));
}

#[tokio::test]
async fn corrupted_cache_files_are_ignored() {
    let whole = body(100_000);
    let sent = whole.clone();
    let mut origin = Scripted::new(move |_, _| vec![Step::Send(response(200, "cache-control: max-age=600", &sent))]);
    let overlay = overlay();
    let before = node(&overlay, "", origin.origin.address()).await;
    for path in ["/a", "/b", "/c"] {
        get(&before, path).await;
    }
    on_disk(&before, 300_000.0).await;
    end(before).await;
    let files = files(&overlay);
    assert_eq!(files.len(), 3);
    // Cut, changed in its head, and changed in its bytes.
    let bytes = fs::read(&files[0]).unwrap();
    fs::write(&files[0], &bytes[..bytes.len() - 1]).unwrap();
    for (file, from_end) in [(&files[1], bytes.len() - 100), (&files[2], 10)] {
        let mut bytes = fs::read(file).unwrap();
        let at = bytes.len() - from_end;
        bytes[at] ^= 1;
        fs::write(file, bytes).unwrap();
    }
    origin.seen();
    let after = node(&overlay, "", origin.origin.address()).await;
    on_disk(&after, 100_000.0).await;
    for path in ["/a", "/b", "/c"] {
        assert!(get(&after, path).await.data == whole, "{path}");
    }
    assert_eq!(origin.seen().len(), 3);
}

#[tokio::test]
async fn responses_evicted_from_memory_are_read_from_disk() {
    let whole = body(200_000);
    let sent = whole.clone();
    let mut origin = Scripted::new(move |_, _| vec![Step::Send(response(200, "cache-control: max-age=600", &sent))]);
    let overlay = overlay();
    let node = node(&overlay, "memory: 1MiB, disk: 8MiB", origin.origin.address()).await;
    for number in 0..12 {
        get(&node, &format!("/{number}")).await;
        on_disk(&node, 200_000.0 * f64::from(number + 1)).await;
    }
    let memory = node.metric("hermes_cache_bytes", "route=\"all\",tier=\"memory\"").await.unwrap();
    assert!(memory <= f64::from(1 << 20), "{memory}");
    origin.seen();
    for number in 0..12 {
        let got = get(&node, &format!("/{number}")).await;
        assert!(got.is_hit() && got.data == whole, "{number}: {:?}", got.head);
    }
    assert_eq!(origin.seen().len(), 0);
}

/// The directory may hold what somebody else has put there, and what a process left that ended amid writing.
#[tokio::test]
async fn foreign_files_in_the_cache_directory_stay_and_links_are_not_followed() {
    let sent = body(1000);
    let mut origin = Scripted::new(move |_, _| vec![Step::Send(response(200, "cache-control: max-age=600", &sent))]);
    let overlay = overlay();
    let before = node(&overlay, "", origin.origin.address()).await;
    get(&before, "/x").await;
    on_disk(&before, 1000.0).await;
    end(before).await;
    let written = files(&overlay).remove(0);
    let (folder, root) = (written.parent().unwrap(), overlay.dir().join("state/cache"));
    let elsewhere = overlay.dir().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let precious = elsewhere.join("0123456789abcdef.object");
    fs::write(&precious, "precious").unwrap();
    let foreign = [
        folder.join("notes.txt"),
        folder.join("mine.object"),
        folder.join("mine.draft"),
        root.join("mine"),
        root.join("folder/file"),
        // A folder as a route that is gone has left it, and something beside it.
        root.join("was.0123456789abcdef/mine"),
    ];
    for path in &foreign {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "mine").unwrap();
    }
    let link = folder.join("0123456789abcdef.object");
    std::os::unix::fs::symlink(&precious, &link).unwrap();
    std::os::unix::fs::symlink(&elsewhere, root.join("link.0123456789abcdef")).unwrap();
    let ours = [
        folder.join("0123456789abcdee.draft"),
        root.join("was.0123456789abcdef/0123456789abcdee.object"),
        root.join("gone.0123456789abcdef/0123456789abcdee.object"),
    ];
    for path in &ours {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "of before").unwrap();
    }
    origin.seen();
    let after = node(&overlay, "", origin.origin.address()).await;
    after.says("loaded cached responses from disk").await;
    assert!(get(&after, "/x").await.is_hit());
    let is_gone = || async { ours.iter().all(|path| !path.exists()) && !root.join("gone.0123456789abcdef").exists() };
    hermes_testkit::poll::until("what is left of before is removed", is_gone).await;
    end(after).await;
    for path in &foreign {
        assert_eq!(fs::read_to_string(path).unwrap(), "mine", "{}", path.display());
    }
    assert!(link.is_symlink() && root.join("link.0123456789abcdef").is_symlink());
    assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
}

#[tokio::test]
async fn one_process_at_a_time_has_the_directory() {
    let sent = body(1000);
    let origin = Scripted::new(move |_, _| vec![Step::Send(response(200, "cache-control: max-age=600", &sent))]);
    let overlay = overlay();
    let first = node(&overlay, "", origin.origin.address()).await;
    get(&first, "/x").await;
    on_disk(&first, 1000.0).await;
    let draft = overlay.node("second").document(crate::cache::lab::DOCUMENT).with("CACHE", "");
    let draft = draft.with("STATE", overlay.dir().join("state").display()).with("ORIGIN", origin.origin.address());
    let second = draft.start().await.unwrap();
    second.says("another process uses the cache directory").await;
    // It has its memory.
    for _ in 0..2 {
        get(&second, "/y").await;
    }
    assert!(get(&second, "/y").await.says().starts_with("second; hit"));
    assert!(get(&second, "/x").await.says().contains("fwd=uri-miss"));
    assert_eq!(files(&overlay).len(), 1);
    end(first).await;
    second.says("loaded cached responses from disk").await;
}

/// A successor has the directory as soon as it has the listeners, while the one before it finishes what it carries.
#[tokio::test]
async fn a_takeover_keeps_cached_responses() {
    let sent = body(1000);
    let mut origin = Scripted::new(move |request, _| match request.target() {
        "/slow" => vec![Step::Await(std::sync::Arc::default())],
        _ => vec![Step::Send(response(200, "cache-control: max-age=600", &sent))],
    });
    let overlay = overlay();
    let (state, socket) = (overlay.dir().join("state"), overlay.dir().join("takeover.sock"));
    // What is handed over is told by its address.
    let ports: Vec<_> = (0..3).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let document = ports.iter().fold(crate::cache::lab::DOCUMENT.to_owned(), |document, port| {
        document.replacen("127.0.0.1:0", &port.local_addr().unwrap().to_string(), 1)
    });
    drop(ports);
    let draft = |name: &str| {
        let draft = overlay.node("edge").called(name).document(&document).with("CACHE", "");
        let draft = draft.with("STATE", state.display()).with("ORIGIN", origin.origin.address());
        draft.args(&["--takeover", socket.to_str().unwrap()])
    };
    let first = draft("edge-1").start().await.unwrap();
    get(&first, "/x").await;
    on_disk(&first, 1000.0).await;
    let busy = crate::cache::lab::begin(&first, "in", "GET", "/slow", &[]).await.unwrap();
    let second = draft("edge-2").start().await.unwrap();
    second.says("loaded cached responses from disk").await;
    assert!(get(&second, "/x").await.is_hit());
    drop(busy);
    first.ended().await;
    origin.seen();
}

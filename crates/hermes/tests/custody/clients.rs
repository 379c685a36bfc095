//! Clients as they are: several at once, those that give up and come back, and programs that know nothing of all this.

use std::time::Duration;

use hermes_testkit::{
    origin::http::BYTES_SEED,
    patience::until,
    pattern::Pattern,
    skip::needs_root,
    unstable::{always, in_turns},
};

use crate::chain;

const SIZE: usize = 1 << 20;

#[tokio::test]
async fn who_comes_back_is_given_what_has_come_meanwhile() {
    if !needs_root("who_comes_back_is_given_what_has_come_meanwhile") {
        return;
    }
    let chain = chain(3, "h2", in_turns(3)).await;
    let (url, file) = (format!("{}/bytes/{SIZE}", chain.apps()), chain.dir().join("file").display().to_string());
    let within = |limit: &'static str| ["curl", "-sS", "--max-time", limit, "-o", &file, &url];
    // It begins with the first link; the first bytes are there after five seconds and a little.
    chain.phase(Duration::from_millis(100), Duration::from_secs(3)).await;
    assert!(chain.namespaces[0].output(&within("2")).await.is_err(), "nothing can be there yet");
    assert!(chain.namespaces[0].output(&within("4.2")).await.is_err(), "it cannot be whole yet");
    let some = std::fs::metadata(&file).map_or(0, |metadata| metadata.len());
    assert!(some > 0 && some < SIZE as u64, "{some}");
    chain.namespaces[0].output(&within("60")).await.unwrap();
    let bytes = std::fs::read(&file).unwrap();
    assert!(bytes.len() == SIZE && Pattern::new(BYTES_SEED).mismatch(0, &bytes).is_none());
    assert_eq!(chain.nodes[0].metric("hermes_custody_joins_total", "").await.unwrap(), 2.0);
    let of_origin = chain.nodes[3].records().iter().filter(|record| record["path"] == format!("/bytes/{SIZE}")).count();
    assert_eq!(of_origin, 1, "the origin was asked once");
}

#[tokio::test]
async fn wget_and_a_browser_s_connections_work() {
    if !needs_root("wget_and_a_browser_s_connections_work") {
        return;
    }
    let chain = chain(3, "h2", in_turns(3)).await;
    let proxy = chain.apps();
    let file = chain.dir().join("wget").display().to_string();
    let url = format!("{proxy}/bytes/{SIZE}");
    let wget = ["wget", "-q", "--tries=1", "-O", &file, &url];
    // Six connections, each with several requests one after the other, as a page's parts are asked for.
    let parts: Vec<_> = (0..24).map(|part| format!("{proxy}/bytes/{}?{part}", 4_000 + 3_000 * part)).collect();
    let form = "%{http_code}:%{size_download}:%{num_connects} ";
    let mut page = vec!["curl", "-sS", "-Z", "--parallel-max", "6", "--max-time", "120", "-w", form];
    parts.iter().for_each(|part| page.extend(["-o", "/dev/null", part]));
    let (wget, page) = tokio::join!(chain.namespaces[0].output(&wget), chain.namespaces[0].output(&page));
    wget.unwrap();
    let bytes = std::fs::read(&file).unwrap();
    assert!(bytes.len() == SIZE && Pattern::new(BYTES_SEED).mismatch(0, &bytes).is_none());
    let page = page.unwrap();
    let mut sizes: Vec<u64> =
        page.split_whitespace().map(|one| one.split(':').nth(1).unwrap().parse().unwrap()).collect();
    sizes.sort_unstable();
    assert!(page.split_whitespace().all(|one| one.starts_with("200:")), "{page}");
    assert_eq!(sizes, (0..24).map(|part| 4_000 + 3_000 * part).collect::<Vec<_>>());
}

/// A program that knows of no proxy, whose connection is taken as it is.
#[tokio::test]
async fn so_does_a_bare_tls_client() {
    if !needs_root("so_does_a_bare_tls_client") {
        return;
    }
    let chain = chain(2, "h2", always).await;
    let to = format!("SECURE:443:{}", chain.nodes[0].address("raw"));
    let file = chain.dir().join("raw").display().to_string();
    let url = format!("https://SECURE/bytes/{SIZE}");
    let words = ["curl", "-sS", "-k", "--connect-to", &to, "--max-time", "60", "-o", &file, &url];
    chain.namespaces[0].output(&words).await.unwrap();
    let bytes = std::fs::read(&file).unwrap();
    assert!(bytes.len() == SIZE && Pattern::new(BYTES_SEED).mismatch(0, &bytes).is_none());
    // Nothing is left of it, once both sides have closed.
    for node in &chain.nodes {
        let none = || async { node.metric("hermes_custody_exchanges", "").await.unwrap() == 0.0 };
        until(&format!("{} holds nothing", node.name()), none).await;
    }
}

//! Clients as they are: several at once, those that give up and come back, and programs that know nothing of all this.

use hermes_testkit::binary::hermes;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use hermes_testkit::{
    Result,
    origin::{Origin, http::BYTES_SEED},
    pattern::Pattern,
    poll::until,
    skip::needs_root,
    unstable::{Chain, HopSettings, always, in_turns},
};
use tokio::net::TcpListener;

use crate::custody::{chain, counting};

const SIZE: usize = 1 << 20;

#[tokio::test]
async fn a_returning_client_receives_the_stored_response() {
    if !needs_root("a_returning_client_receives_the_stored_response") {
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
    let head = chain.dir().join("head").display().to_string();
    let words = [&within("60")[..], &["-D", &head]].concat();
    chain.namespaces[0].output(&words).await.unwrap();
    let head = std::fs::read_to_string(&head).unwrap().to_ascii_lowercase();
    let age = head.lines().find_map(|line| line.strip_prefix("age: ")?.trim().parse::<u32>().ok());
    assert!(age.is_some_and(|age| (5..60).contains(&age)), "asked for more than six seconds ago: {head}");
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

/// An origin of an object that may be kept.
fn keepable(requests: &Arc<AtomicUsize>) -> impl FnOnce(TcpListener) -> Result<Origin> {
    let fields = "cache-control: max-age=600\r\netag: \"one\"\r\nconnection: close";
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {SIZE}\r\n{fields}\r\n\r\n");
    counting(requests, Duration::ZERO, [head.as_bytes(), &Pattern::new(BYTES_SEED).bytes(SIZE)].concat())
}

/// The second user's copy costs no link anything; and two at once cost one.
#[tokio::test]
async fn a_cached_response_costs_no_further_transfer() {
    if !needs_root("a_cached_response_costs_no_further_transfer") {
        return;
    }
    let requests = Arc::<AtomicUsize>::default();
    let hermes = hermes().as_ref();
    let between = HopSettings::custody_and_cache("h2");
    let chain = Chain::before(hermes, 3, between, in_turns(3), keepable(&requests)).await.unwrap();
    let url = format!("{}/kept", chain.apps());
    let file = |name: &str| chain.dir().join(name).display().to_string();
    let get = async |name: &str, agent: &str| {
        let to = file(name);
        let words = ["curl", "-sS", "-f", "-A", agent, "--max-time", "60", "-D", "-", "-o", &to, &url];
        let head = chain.namespaces[0].output(&words).await.unwrap();
        let bytes = std::fs::read(&to).unwrap();
        assert!(bytes.len() == SIZE && Pattern::new(BYTES_SEED).mismatch(0, &bytes).is_none(), "{head}");
        head
    };
    tokio::join!(get("first", "one"), get("second", "another"));
    let third = get("third", "a third").await;
    assert!(third.contains("n0; hit"), "{third}");
    assert_eq!(requests.load(Ordering::SeqCst), 1);
    assert_eq!(chain.nodes[1].metric("hermes_custody_exchanges", "").await.unwrap(), 0.0);
}

/// What was given whole is kept for nobody: that is a cache's to do, by a cache's rules.
#[tokio::test]
async fn a_repeated_request_reaches_the_origin() {
    if !needs_root("a_repeated_request_reaches_the_origin") {
        return;
    }
    let chain = chain(1, "h2", always).await;
    for path in ["/bytes/46080", "/bytes/1", "/drip/3/1000/1", "/bytes/0"] {
        for _ in 0..2 {
            assert_eq!(chain.curl(path).await.unwrap().status, 200);
        }
        let requests =
            || async { chain.nodes[1].records().iter().filter(|record| record["path"] == path).count() == 2 };
        until(&format!("{path} was asked for twice"), requests).await;
    }
    for node in &chain.nodes {
        let none = || async { node.metric("hermes_custody_exchanges", "").await.unwrap() == 0.0 };
        until(&format!("{} holds nothing", node.name()), none).await;
    }
    let gone = chain.nodes[0].records().iter().filter(|record| !record["error"].is_null()).count();
    assert_eq!((gone, chain.nodes[0].metric("hermes_custody_joins_total", "").await.unwrap()), (0, 0.0));
}

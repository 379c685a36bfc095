//! Nodes that are killed while they answer for what is under way.

use hermes_testkit::binary::hermes;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

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

const COUNT: usize = 100;
const SIZE: usize = 45 << 10;

/// Time between the death of a node and its restart.
const RESTART_PAUSE: Duration = Duration::from_millis(300);

/// True if one of these nodes has an exchange in custody.
async fn has_exchanges(chain: &Chain, numbers: &[usize]) -> bool {
    for number in numbers {
        if chain.nodes[*number].metric("hermes_custody_exchanges", "").await.unwrap() > 0.0 {
            return true;
        }
    }
    false
}

/// Kills these nodes amid a hundred transfers over links in turns.
async fn after_a_kill_all_arrive(test: &str, numbers: &[usize]) {
    if !needs_root(test) {
        return;
    }
    let mut chain = chain(3, "h2", in_turns(3)).await;
    let apps = chain.apps();
    let into = chain.dir().join("into");
    std::fs::create_dir(&into).unwrap();
    let url = format!("{apps}/bytes/{SIZE}?[1-{COUNT}]");
    let file = format!("{}/#1", into.display());
    let words =
        ["curl", "-sS", "-Z", "--parallel-immediate", "--parallel-max", "100", "-o", &file, "-w", "%{http_code} "];
    let words = [&words[..], &["--max-time", "120", &url]].concat();
    let namespace = chain.namespaces[0].clone();
    let transfers = namespace.output(&words);
    let kills = async {
        // First while the requests are on their way to the origin, then while the responses are on their way back.
        until("a node that will be killed has an exchange", || has_exchanges(&chain, numbers)).await;
        chain.kill_all(numbers, RESTART_PAUSE).await.unwrap();
        until("a response arrives", async || std::fs::read_dir(&into).unwrap().next().is_some()).await;
        chain.kill_all(numbers, RESTART_PAUSE).await.unwrap();
    };
    let (text, ()) = tokio::join!(transfers, kills);
    let text = text.unwrap();
    assert!(chain.resumed > 0, "nothing was under way at {numbers:?} when they were killed\n{}", chain.logs());
    let statuses: Vec<_> = text.split_whitespace().collect();
    assert_eq!(statuses, vec!["200"; COUNT], "{}", chain.logs());
    for number in 1..=COUNT {
        let bytes = std::fs::read(into.join(number.to_string())).unwrap();
        assert!(
            bytes.len() == SIZE && Pattern::new(BYTES_SEED).mismatch(0, &bytes).is_none(),
            "{number}: {}",
            bytes.len()
        );
    }
}

#[tokio::test]
async fn killing_a_middle_node_loses_no_transfer() {
    after_a_kill_all_arrive("killing_a_middle_node_loses_no_transfer", &[1]).await;
}

#[tokio::test]
async fn killing_the_second_node_loses_no_transfer() {
    after_a_kill_all_arrive("killing_the_second_node_loses_no_transfer", &[2]).await;
}

#[tokio::test]
async fn killing_the_last_node_loses_no_transfer() {
    after_a_kill_all_arrive("killing_the_last_node_loses_no_transfer", &[3]).await;
}

#[tokio::test]
async fn killing_two_neighbors_at_once_loses_no_transfer() {
    after_a_kill_all_arrive("killing_two_neighbors_at_once_loses_no_transfer", &[2, 3]).await;
}

#[tokio::test]
async fn killed_nodes_may_return_in_any_order() {
    after_a_kill_all_arrive("killed_nodes_may_return_in_any_order", &[3, 2, 1]).await;
}

/// Three nodes before this origin, to which the last one's route leads so.
async fn before(last: &'static str, origin: impl FnOnce(TcpListener) -> Result<Origin>) -> Chain {
    let between = HopSettings { last, ..HopSettings::custody("h2") };
    Chain::before(hermes().as_ref(), 2, between, always, origin).await.unwrap()
}

/// An origin that takes its time to answer.
fn slow(requests: &Arc<AtomicUsize>) -> impl FnOnce(TcpListener) -> Result<Origin> {
    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\ndone";
    counting(requests, Duration::from_secs(2), answer.to_vec())
}

/// What the client of this method is told where the last node is killed as its origin works; and how often that was asked.
async fn killed_as_the_origin_works(method: &str, field: &str, last: &'static str) -> (String, usize) {
    let requests = Arc::<AtomicUsize>::default();
    let mut chain = before(last, slow(&requests)).await;
    let url = format!("{}/order", chain.apps());
    let namespace = chain.namespaces[0].clone();
    let words = ["curl", "-sS", "-X", method, "-H", field, "-d", "one of these", "-w", " %{http_code}"];
    let words = [&words[..], &["--max-time", "30", &url]].concat();
    let client = namespace.output(&words);
    let kill = async {
        until("the origin is asked", || async { requests.load(Ordering::SeqCst) == 1 }).await;
        chain.kill(2, Duration::ZERO).await.unwrap();
    };
    let (text, ()) = tokio::join!(client, kill);
    (text.unwrap(), requests.load(Ordering::SeqCst))
}

#[tokio::test]
async fn a_post_reaches_its_origin_once_whichever_node_is_killed() {
    if !needs_root("a_post_reaches_its_origin_once_whichever_node_is_killed") {
        return;
    }
    // Whatever its client says of it, where the route does not say that its origin knows keys.
    let (output, requests) = killed_as_the_origin_works("POST", "idempotency-key: \"k\"", "").await;
    assert!(output.contains("outcome unknown") && output.ends_with(" 502"), "{output}");
    assert_eq!(requests, 1);
}

#[tokio::test]
async fn a_post_without_a_key_reaches_its_origin_once_even_if_the_route_trusts_keys() {
    if !needs_root("a_post_without_a_key_reaches_its_origin_once_even_if_the_route_trusts_keys") {
        return;
    }
    let (output, requests) = killed_as_the_origin_works("POST", "x: y", ", idempotency-key: true").await;
    assert!(output.contains("outcome unknown") && output.ends_with(" 502"), "{output}");
    assert_eq!(requests, 1);
}

#[tokio::test]
async fn a_post_with_a_trusted_key_is_repeated() {
    if !needs_root("a_post_with_a_trusted_key_is_repeated") {
        return;
    }
    let outcome = killed_as_the_origin_works("POST", "idempotency-key: \"k\"", ", idempotency-key: true").await;
    assert_eq!(outcome, ("done 200".to_owned(), 2));
}

#[tokio::test]
async fn an_idempotent_request_is_repeated() {
    if !needs_root("an_idempotent_request_is_repeated") {
        return;
    }
    assert_eq!(killed_as_the_origin_works("PUT", "x: y", "").await, ("done 200".to_owned(), 2));
}

/// Nothing is left of an exchange at any node when the one that its client was at is gone.
#[tokio::test]
async fn without_its_client_an_exchange_ends_everywhere() {
    if !needs_root("without_its_client_an_exchange_ends_everywhere") {
        return;
    }
    let requests = Arc::<AtomicUsize>::default();
    let mut chain = before("", slow(&requests)).await;
    let proxy = chain.apps();
    let namespace = chain.namespaces[0].clone();
    let (request, tunnel) = (format!("{proxy}/order"), "https://SECURE/drip/100/10/100");
    let first = ["curl", "-sS", "-d", "one of these", "--max-time", "30", &request];
    let second = ["curl", "-sS", "-k", "-p", "-x", &proxy, "-o", "/dev/null", "--max-time", "30", tunnel];
    let kill = async {
        until("the origin is asked", || async { requests.load(Ordering::SeqCst) == 1 }).await;
        chain.kill(0, Duration::ZERO).await.unwrap();
    };
    let (first, second, ()) = tokio::join!(namespace.output(&first), namespace.output(&second), kill);
    assert!(first.is_err() && second.is_err(), "{first:?} {second:?}");
    for node in &chain.nodes {
        let none = || async { node.metric("hermes_custody_exchanges", "").await.unwrap() == 0.0 };
        until(&format!("{} holds nothing", node.name()), none).await;
    }
}

/// What the first node had in custody for a client it goes on with; who asks again is given it, and the origin is not asked
/// again.
#[tokio::test]
async fn the_first_node_continues_and_its_client_returns() {
    if !needs_root("the_first_node_continues_and_its_client_returns") {
        return;
    }
    let mut chain = chain(3, "h2", in_turns(3)).await;
    let file = chain.dir().join("file").display().to_string();
    let namespace = chain.namespaces[0].clone();
    let get = async |apps: String| {
        let url = format!("{apps}/bytes/{}", 1 << 20);
        let words = ["curl", "-sS", "-f", "-H", "host: web", "--max-time", "60", "-o", &file, &url];
        namespace.output(&words).await
    };
    // Amid the response, some of which the client has.
    chain.phase(Duration::from_millis(100), Duration::from_secs(3)).await;
    let before = get(chain.apps());
    let kill = async {
        let length = || std::fs::metadata(&file).map_or(0, |file| file.len());
        until("the client has the first bytes", async || length() > 0).await;
        chain.kill(0, Duration::from_millis(200)).await.unwrap();
    };
    let (before, ()) = tokio::join!(before, kill);
    assert!(before.is_err());
    get(chain.apps()).await.unwrap();
    let bytes = std::fs::read(&file).unwrap();
    assert!(bytes.len() == 1 << 20 && Pattern::new(BYTES_SEED).mismatch(0, &bytes).is_none());
    assert_eq!(chain.nodes[0].metric("hermes_custody_joins_total", "").await.unwrap(), 1.0, "{}", chain.logs());
    let of_origin = |record: &serde_json::Value| record["path"] == format!("/bytes/{}", 1 << 20);
    assert_eq!(
        chain.nodes[3].records().iter().filter(|record| of_origin(record)).count(),
        1,
        "the origin is asked once"
    );
}

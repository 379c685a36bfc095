//! What is kept has an end.

use hermes_testkit::overlay::Node;

use crate::cache::lab::{Scripted, Step, ask, begin, body, get, node, overlay, response};

async fn bytes(node: &Node, tier: &str) -> f64 {
    node.metric("hermes_cache_bytes", &format!("route=\"all\",tier=\"{tier}\"")).await.unwrap()
}

#[tokio::test]
async fn the_least_recently_used_response_is_evicted_first() {
    let sent = body(100_000);
    let mut origin = Scripted::new(move |_, _| vec![Step::Send(response(200, "cache-control: max-age=600", &sent))]);
    let overlay = overlay();
    let node = node(&overlay, "memory: 1MiB, disk: 0B", origin.origin.address()).await;
    get(&node, "/often").await;
    for number in 0..40 {
        get(&node, &format!("/{number}")).await;
        assert!(get(&node, "/often").await.is_hit(), "{number}");
        assert!(bytes(&node, "memory").await <= f64::from(1 << 20));
    }
    assert_eq!(origin.seen().len(), 41);
    assert!(get(&node, "/39").await.is_hit() && !get(&node, "/0").await.is_hit());
    node.metric_reaches("hermes_cache_evictions_total", "route=\"all\",tier=\"memory\"", 30.0).await;
}

#[tokio::test]
async fn the_disk_has_an_end_as_well() {
    let sent = body(100_000);
    let origin = Scripted::new(move |_, _| vec![Step::Send(response(200, "cache-control: max-age=600", &sent))]);
    let overlay = overlay();
    let node = node(&overlay, "memory: 1MiB, disk: 2MiB", origin.origin.address()).await;
    for number in 0..40 {
        get(&node, &format!("/{number}")).await;
    }
    node.metric_reaches("hermes_cache_evictions_total", "route=\"all\",tier=\"disk\"", 3.0).await;
    assert!(bytes(&node, "disk").await <= f64::from(2 << 20));
}

#[tokio::test]
async fn the_number_of_variants_is_bounded() {
    let origin =
        Scripted::new(|_, _| vec![Step::Send(response(200, "cache-control: max-age=600\nvary: x", b"some bytes"))]);
    let overlay = overlay();
    let node = node(&overlay, "memory: 1MiB, disk: 0B", origin.origin.address()).await;
    for number in 0..200 {
        ask(&node, "GET", "/x", &[&format!("x: {number}")]).await;
    }
    assert!(ask(&node, "GET", "/x", &["x: 199"]).await.is_hit());
    assert!(!ask(&node, "GET", "/x", &["x: 1"]).await.is_hit());
    let kept = bytes(&node, "memory").await;
    assert!(kept < 33.0 * 1024.0, "{kept}");
}

#[tokio::test]
async fn clients_that_read_nothing_hold_bounded_memory() {
    let sent = body(250_000);
    let origin = Scripted::new(move |_, _| vec![Step::Send(response(200, "cache-control: max-age=600", &sent))]);
    let overlay = overlay();
    let node = node(&overlay, "memory: 1MiB, disk: 0B", origin.origin.address()).await;
    let mut sleepers = Vec::new();
    for number in 0..40 {
        let mut sleeper = begin(&node, "in", "GET", &format!("/{number}"), &[]).await.unwrap();
        sleeper.head().await.unwrap();
        sleepers.push(sleeper);
        assert!(bytes(&node, "memory").await <= f64::from(1 << 20));
    }
    // Who reads is served all the same.
    assert_eq!(get(&node, "/other").await.data.len(), 250_000);
    drop(sleepers);
}

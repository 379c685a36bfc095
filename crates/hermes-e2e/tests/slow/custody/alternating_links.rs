//! Links that are up in turns: no end-to-end path exists at any instant.

use std::time::Duration;

use hermes_testkit::skip::needs_root;
use hermes_testkit::unstable::{Download, SECOND, in_turns};

use crate::custody::chain;

/// The papers' second mode: the bytes of a TLS stream are in custody, and nobody between its ends reads them.
#[tokio::test]
async fn a_tls_stream_climbs_them_too() {
    if !needs_root("a_tls_stream_climbs_them_too") {
        return;
    }
    let chain = chain(3, "h2", in_turns(3)).await;
    for (size, phase) in [(46_080, 1), (1 << 20, 2)] {
        chain.phase(phase * SECOND + Duration::from_millis(500), 3 * SECOND).await;
        let Download { status, bytes, .. } = chain.curl_through(&format!("/bytes/{size}")).await.unwrap();
        assert_eq!((status, bytes), (200, size), "{}", chain.logs());
    }
    // It was open before anybody knew that nothing listens there.
    let proxy = chain.apps();
    let words = ["curl", "-sS", "-k", "-p", "-x", &proxy, "--max-time", "60", "https://CLOSED/"];
    let error = chain.namespaces[0].output(&words).await.unwrap_err().to_string();
    assert!(!error.contains("timed out"), "{error}");
    let record = chain.nodes[0].record(|record| record["authority"] == "closed:443").await;
    assert!(record["reason"].as_str().unwrap().contains("could not be reached: status 502"), "{record}");
}

#[tokio::test]
async fn an_object_climbs_links_that_are_up_in_turns() {
    if !needs_root("an_object_climbs_links_that_are_up_in_turns") {
        return;
    }
    let chain = chain(3, "h2", in_turns(3)).await;
    for (size, phase) in [(46_080, 0), (1 << 20, 1), (2 << 20, 2)] {
        chain.phase(phase * SECOND + Duration::from_millis(500), 3 * SECOND).await;
        let Download { status, bytes, .. } = chain.curl(&format!("/bytes/{size}")).await.unwrap();
        assert_eq!((status, bytes), (200, size), "{}", chain.logs());
    }
}

/// QUIC's connections outlive darkness, and are not slowed by what is lost in it.
#[tokio::test]
async fn over_quic_too() {
    if !needs_root("over_quic_too") {
        return;
    }
    let chain = chain(3, "h3", in_turns(3)).await;
    for (size, phase) in [(46_080, 2), (1 << 20, 0)] {
        chain.phase(phase * SECOND + Duration::from_millis(500), 3 * SECOND).await;
        let Download { status, bytes, .. } = chain.curl(&format!("/bytes/{size}")).await.unwrap();
        assert_eq!((status, bytes), (200, size), "{}", chain.logs());
    }
    for node in &chain.nodes[..3] {
        assert_eq!(node.metric("hermes_quic_fallbacks_total", "").await.unwrap(), 0.0, "{}", node.log());
    }
}

//! Links that are up in turns: no path exists from end to end at any instant.

use std::time::Duration;

use crate::lab::{Chain, SECOND, as_root, in_turns};

/// The papers' second mode: the bytes of a TLS stream are in custody, and nobody between its ends reads them.
#[tokio::test]
async fn a_tls_stream_climbs_them_too() {
    if !as_root("a_tls_stream_climbs_them_too") {
        return;
    }
    let chain = Chain::start(3, in_turns(3)).await;
    for (size, phase) in [(46_080, 1), (1 << 20, 2)] {
        chain.phase(phase * SECOND + Duration::from_millis(500), 3 * SECOND).await;
        let (status, bytes, _) = chain.curl_through(&format!("/bytes/{size}")).await;
        assert_eq!((status, bytes), (200, size), "{}", chain.logs());
    }
    // It was open before anybody knew that nothing listens there.
    let proxy = format!("http://{}", chain.nodes[0].address("apps"));
    let words = ["curl", "-sS", "-k", "-p", "-x", &proxy, "--max-time", "60", "https://CLOSED/"];
    let error = chain.namespaces[0].output(&words).await.unwrap_err().to_string();
    assert!(!error.contains("timed out"), "{error}");
    let record = chain.nodes[0].record(|record| record["authority"] == "closed:443").await;
    assert!(record["reason"].as_str().unwrap().contains("could not be reached: status 502"), "{record}");
}

#[tokio::test]
async fn an_object_climbs_links_that_are_up_in_turns() {
    if !as_root("an_object_climbs_links_that_are_up_in_turns") {
        return;
    }
    let chain = Chain::start(3, in_turns(3)).await;
    for (size, phase) in [(46_080, 0), (1 << 20, 1), (2 << 20, 2)] {
        chain.phase(phase * SECOND + Duration::from_millis(500), 3 * SECOND).await;
        let (status, bytes, _) = chain.curl(&format!("/bytes/{size}")).await;
        assert_eq!((status, bytes), (200, size), "{}", chain.logs());
    }
}

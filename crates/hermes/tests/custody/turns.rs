//! Links that are up in turns: no path exists from end to end at any instant.

use std::time::Duration;

use crate::lab::{Chain, SECOND, as_root, in_turns};

#[tokio::test]
async fn an_object_climbs_links_that_are_up_in_turns() {
    if !as_root("an_object_climbs_links_that_are_up_in_turns") {
        return;
    }
    let chain = Chain::start(3, in_turns(3)).await;
    for size in [46_080, 512_000, 1 << 20, 5 << 20] {
        for phase in 0..3_u32 {
        chain.phase(phase * SECOND + Duration::from_millis(333), 3 * SECOND).await;
        let (status, bytes, took) = chain.curl(&format!("/bytes/{size}")).await;
        println!("{size} {phase}: {status} {bytes} {took}");
        assert_eq!((status, bytes), (200, size), "{}", chain.logs());
        }
    }
}

//! Many clients before a service with a limit of twenty requests a second.

use std::sync::atomic::Ordering;

use crate::rate_limit::lab::{clients, limiting, node, overlay};

const LIMIT: usize = 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_see_no_refusal_and_the_service_makes_few() {
    let overlay = overlay();
    let (origin, tally) = limiting(LIMIT);
    let edge = node(&overlay, ", upstream-rate-limit: {}", origin.address()).await;
    let seen = clients(&edge, 40, 3).await;
    assert_eq!((seen.passed, seen.refused), (120, 0));
    // Those that were under way together at first, and what a probe costs.
    let refused = tally.refused.load(Ordering::SeqCst);
    assert!(refused < 60, "{refused}");
    assert!(tally.passed.load(Ordering::SeqCst) == 120);
    let released = edge.metric("hermes_upstream_rate_limit_requests_total", "event=\"released\"").await.unwrap();
    assert!(released >= 60.0, "{released}");
    let waited = edge.metric("hermes_upstream_rate_limit_wait_seconds_count", "route=\"service\"").await.unwrap();
    assert!((waited - released).abs() < 0.5, "{waited} {released}");
    let rate = edge.metric("hermes_upstream_rate_limit_per_second", "route=\"service\"").await.unwrap();
    assert!((10.0..80.0).contains(&rate), "{rate}");
    let counted = edge.metric("hermes_upstream_rate_limit_requests_total", "event=\"refused\"").await.unwrap();
    assert!((counted - refused as f64).abs() < 0.5, "{counted} {refused}");
}

#[tokio::test]
async fn requests_without_a_limit_do_not_wait() {
    let overlay = overlay();
    let (origin, tally) = limiting(10_000);
    let edge = node(&overlay, ", upstream-rate-limit: {}", origin.address()).await;
    let seen = clients(&edge, 20, 20).await;
    assert_eq!((seen.passed, seen.refused), (400, 0));
    assert_eq!(tally.refused.load(Ordering::SeqCst), 0);
    assert!(!edge.ask("/metrics").await.unwrap().1.contains("hermes_upstream_rate_limit_requests_total{"));
}

/// The case. It takes two minutes; its figures are printed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes two minutes; run it by its name with --ignored --nocapture"]
async fn a_hundred_clients_with_and_without() {
    let overlay = overlay();
    let (count, each) = (100, 10);
    let mut errors = Vec::new();
    for pace in ["", ", upstream-rate-limit: {}"] {
        let (origin, tally) = limiting(LIMIT);
        let edge = node(&overlay, pace, origin.address()).await;
        let seen = clients(&edge, count, each).await;
        let ideal = f64::from(count) * each as f64 / LIMIT as f64;
        let (took, refused) = (seen.took.as_secs_f64(), tally.refused.load(Ordering::SeqCst));
        println!(
            "{:10} {count} clients x {each}: {took:.1} s ({:+.1} % of {ideal:.0} s), errors seen {}, refused by the service {refused}",
            if pace.is_empty() { "without" } else { "with" },
            100.0 * (took / ideal - 1.0),
            seen.refused,
        );
        errors.push(seen.refused as f64);
        assert!(pace.is_empty() || took < 1.05 * ideal, "{took}");
    }
    assert!(errors[1] <= 0.03 * errors[0], "{errors:?}");
}

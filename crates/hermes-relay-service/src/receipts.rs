//! Counts the outcomes of publications, for metrics.

use std::sync::Arc;

use hermes_relay::Receipt;
use hermes_transport::metrics::{Metrics, ResultLabels, RouteLabels};

/// Counts a publication of a route.
pub(crate) fn count(metrics: &Metrics, route: &Arc<str>, receipt: &Receipt) {
    metrics.relay_publications.get_or_create(&RouteLabels { route: route.clone() }).inc();
    for (result, count) in [("queued", receipt.delivered), ("dropped", receipt.dropped)] {
        if count > 0 {
            metrics.relay_deliveries.get_or_create(&ResultLabels { result }).inc_by(count);
        }
    }
}

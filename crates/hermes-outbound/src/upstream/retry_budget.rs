//! The retry budget: the number of retries in flight is limited to a fraction of an upstream's active requests.
//!
//! In: requests and retries that begin and end. Out: whether a retry may begin. Never: the decision whether a request
//! may be sent again at all, which the caller makes.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::UpstreamState;

/// A guard that increments a gauge, and decrements it when it is dropped.
pub struct GaugeGuard<'a>(&'a AtomicUsize);

impl<'a> GaugeGuard<'a> {
    fn new(gauge: &'a AtomicUsize) -> Self {
        gauge.fetch_add(1, Ordering::Relaxed);
        Self(gauge)
    }
}

impl Drop for GaugeGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl UpstreamState {
    /// Counts an active request.
    pub fn begin_request(&self) -> GaugeGuard<'_> {
        GaugeGuard::new(&self.active)
    }

    /// Reserves a retry. Returns `None` if the budget is used up. `budget` is the permitted fraction of the active
    /// requests; `floor` is the number of retries that are always permitted. Callers reserve before they wait for the
    /// retry's delay, so that requests which fail at the same time do not all find the budget free.
    pub fn begin_retry(&self, budget: f64, floor: usize) -> Option<GaugeGuard<'_>> {
        let retry = GaugeGuard::new(&self.retrying);
        let allowed = (self.active.load(Ordering::Relaxed) as f64 * budget) as usize;
        (self.retrying.load(Ordering::Relaxed) <= allowed.max(floor)).then_some(retry)
    }
}

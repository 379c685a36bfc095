//! The retry budget: retries in flight are at most a share of an upstream's active requests.
//!
//! In: requests and retries that begin and end. Out: whether a retry may begin. Never: the decision whether a request may
//! be repeated at all; that is the caller's.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::UpstreamState;

/// Increments a gauge for its lifetime.
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

    /// Reserves a retry; `None` if the budget is used up. `budget` is a share of the active requests, `floor` the number
    /// of retries that are always allowed. The reservation comes before the pause, since requests that fail together
    /// must not all find the budget free.
    pub fn begin_retry(&self, budget: f64, floor: usize) -> Option<GaugeGuard<'_>> {
        let retry = GaugeGuard::new(&self.retrying);
        let allowed = (self.active.load(Ordering::Relaxed) as f64 * budget) as usize;
        (self.retrying.load(Ordering::Relaxed) <= allowed.max(floor)).then_some(retry)
    }
}

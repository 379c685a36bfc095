//! Metrics of a route's cache.

use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

/// Counters and gauges of one route.
pub struct CacheMetrics {
    /// Requests that were served from the store.
    pub hits: Counter,
    /// Requests whose response came from the origin.
    pub missed: Counter,
    /// Stored responses that the origin confirmed.
    pub revalidated: Counter,
    /// Stale responses that were served.
    pub stale: Counter,
    /// Requests that shared another request's fetch.
    pub collapsed: Counter,
    /// Requests that the cache does not handle.
    pub bypassed: Counter,
    /// Bytes in memory.
    pub memory: Gauge,
    /// Bytes on disk.
    pub disk: Gauge,
    /// Responses evicted from memory for lack of room.
    pub evictions_memory: Counter,
    /// Responses evicted from disk for lack of room.
    pub evictions_disk: Counter,
    /// Function that counts each time a limit is reached; its argument is the name of the limit.
    pub limit: Arc<dyn Fn(&'static str) + Send + Sync>,
}

#[cfg(test)]
impl Default for CacheMetrics {
    fn default() -> Self {
        Self {
            hits: Counter::default(),
            missed: Counter::default(),
            revalidated: Counter::default(),
            stale: Counter::default(),
            collapsed: Counter::default(),
            bypassed: Counter::default(),
            memory: Gauge::default(),
            disk: Gauge::default(),
            evictions_memory: Counter::default(),
            evictions_disk: Counter::default(),
            limit: Arc::new(|_| ()),
        }
    }
}

//! All metrics of a node and their names.
//!
//! In: ends of sessions, limits that were reached, connections, reloads. Out: Prometheus text. Values of labels come
//! from the node document (listener, route, upstream) or from fixed sets. They never come from client input, so that
//! clients cannot create series.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use hermes_cache::metrics::CacheMetrics;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Labels of a finished session.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct SessionLabels {
    pub listener: Arc<str>,
    pub route: Arc<str>,
    pub kind: &'static str,
    pub outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ListenerLabels {
    pub listener: Arc<str>,
}

/// Labels of an event that delayed a request, or made the node send it again.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct EventLabels {
    pub route: Arc<str>,
    pub event: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RouteLabels {
    pub route: Arc<str>,
}

/// Labels of a query to a DNS listener.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct QuestionLabels {
    pub listener: Arc<str>,
    pub outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ErrorLabels {
    pub error: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct LimitLabels {
    pub limit: &'static str,
}

/// Labels of a step against overload.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct OverloadLabels {
    pub signal: &'static str,
    pub step: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ReasonLabels {
    pub reason: &'static str,
}

/// The label of urgent bytes: `urgent` or `in-band`.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct UrgentLabels {
    pub carried: &'static str,
}

/// The label of bytes in custody: the storage tier, `memory` or `disk`.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct HeldLabels {
    pub tier: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct EndpointLabels {
    pub upstream: Arc<str>,
    pub endpoint: Arc<str>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct UpstreamLabels {
    pub upstream: Arc<str>,
}

/// The label of a certificate: the path of its file.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PathLabels {
    pub path: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ResultLabels {
    pub result: &'static str,
}

/// Labels of a request that was looked up in the cache of a route.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct CacheLabels {
    pub route: Arc<str>,
    pub outcome: &'static str,
}

/// Labels of the objects in a route's cache: the route, and the storage tier `memory` or `disk`.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct TierLabels {
    pub route: Arc<str>,
    pub tier: &'static str,
}

/// The counters of one combination of listener, route, kind and outcome. Each worker caches these handles, so that a
/// session takes no lock.
#[derive(Clone)]
pub struct SessionMetrics {
    pub total: Counter,
    pub received: Counter,
    pub sent: Counter,
    pub seconds: Histogram,
}

/// All metrics of a node.
pub struct Metrics {
    registry: Registry,
    sessions: Family<SessionLabels, Counter>,
    received: Family<SessionLabels, Counter>,
    sent: Family<SessionLabels, Counter>,
    seconds: Family<SessionLabels, Histogram, fn() -> Histogram>,
    pub errors: Family<ErrorLabels, Counter>,
    pub connections: Family<ListenerLabels, Counter>,
    pub connections_open: Gauge,
    pub reverse_connections: Family<ListenerLabels, Gauge>,
    pub sessions_open: Gauge,
    /// Counts all sessions that ended.
    pub ended: Counter,
    /// Counts connections that waited at a worker whose loop stood still, and that another one accepted.
    pub connections_relieved: Counter,
    /// Counts connections that a worker drained because its work waited too long.
    pub connections_parted: Counter,
    /// Counts times in which all workers stood still.
    pub standstills: Counter,
    /// Counts panics of workers.
    pub worker_breaks: Counter,
    pub listeners_confined: Counter,
    /// Counts sessions that failed because of an upstream or this node.
    pub failed: Counter,
    pub handshake_failures: Family<ListenerLabels, Counter>,
    pub limits: Family<LimitLabels, Counter>,
    /// The number of workers that take a step against overload.
    pub overload: Family<OverloadLabels, Gauge>,
    pub dns_questions: Family<QuestionLabels, Counter>,
    pub identities_removed: Counter,
    pub quic_fallbacks: Counter,
    pub quic_migrations: Counter,
    pub quic_forwarded: Counter,
    pub quic_sent: Counter,
    pub quic_lost: Counter,
    pub datagrams_dropped: Family<ReasonLabels, Counter>,
    tcp_urgent: Family<UrgentLabels, Counter>,
    pub retries: Counter,
    pub custody_replays: Counter,
    pub custody_joins: Counter,
    pub custody_exchanges: Gauge,
    pub custody_held: Family<HeldLabels, Gauge>,
    cache_requests: Family<CacheLabels, Counter>,
    cache_bytes: Family<TierLabels, Gauge>,
    cache_evictions: Family<TierLabels, Counter>,
    pub rate_limited: Family<EventLabels, Counter>,
    pub relay_channels: Gauge,
    pub relay_subscriptions: Gauge,
    pub relay_memory: Gauge,
    pub relay_upstream_subscriptions: Gauge,
    pub relay_roots: Gauge,
    pub relay_upstream_breaks: Counter,
    pub relay_publications: Family<RouteLabels, Counter>,
    pub relay_deliveries: Family<ResultLabels, Counter>,
    pub resumed: Family<EventLabels, Counter>,
    pub rate_limit_rate: Family<RouteLabels, Gauge<f64, AtomicU64>>,
    pub rate_limit_waits: Family<RouteLabels, Histogram, fn() -> Histogram>,
    pub upstream_connects: Family<EndpointLabels, Counter>,
    pub upstream_connect_failures: Family<EndpointLabels, Counter>,
    pub upstream_healthy: Family<EndpointLabels, Gauge>,
    pub upstream_backups: Family<UpstreamLabels, Counter>,
    pub reloads: Family<ResultLabels, Counter>,
    pub generation: Gauge,
    pub certificates: Family<PathLabels, Gauge>,
    pub records_lost: Counter,
    pub lines_lost: Counter,
}

/// The bucket bounds of durations in seconds: from a request over loopback to a tunnel that lasts an hour.
const SECONDS: [f64; 14] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 300.0, 3600.0];

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("hermes");
        let histogram: fn() -> Histogram = || Histogram::new(SECONDS);
        let metrics = Self {
            sessions: Family::default(),
            received: Family::default(),
            sent: Family::default(),
            seconds: Family::new_with_constructor(histogram),
            errors: Family::default(),
            connections: Family::default(),
            connections_open: Gauge::default(),
            reverse_connections: Family::default(),
            sessions_open: Gauge::default(),
            ended: Counter::default(),
            failed: Counter::default(),
            connections_relieved: Counter::default(),
            connections_parted: Counter::default(),
            standstills: Counter::default(),
            worker_breaks: Counter::default(),
            listeners_confined: Counter::default(),
            handshake_failures: Family::default(),
            limits: Family::default(),
            overload: Family::default(),
            dns_questions: Family::default(),
            identities_removed: Counter::default(),
            quic_fallbacks: Counter::default(),
            quic_migrations: Counter::default(),
            quic_forwarded: Counter::default(),
            quic_sent: Counter::default(),
            quic_lost: Counter::default(),
            datagrams_dropped: Family::default(),
            tcp_urgent: Family::default(),
            retries: Counter::default(),
            custody_replays: Counter::default(),
            custody_joins: Counter::default(),
            custody_exchanges: Gauge::default(),
            custody_held: Family::default(),
            cache_requests: Family::default(),
            cache_bytes: Family::default(),
            cache_evictions: Family::default(),
            rate_limited: Family::default(),
            relay_channels: Gauge::default(),
            relay_subscriptions: Gauge::default(),
            relay_memory: Gauge::default(),
            relay_upstream_subscriptions: Gauge::default(),
            relay_roots: Gauge::default(),
            relay_upstream_breaks: Counter::default(),
            relay_publications: Family::default(),
            relay_deliveries: Family::default(),
            resumed: Family::default(),
            rate_limit_rate: Family::default(),
            rate_limit_waits: Family::new_with_constructor(histogram),
            upstream_connects: Family::default(),
            upstream_connect_failures: Family::default(),
            upstream_healthy: Family::default(),
            upstream_backups: Family::default(),
            reloads: Family::default(),
            generation: Gauge::default(),
            certificates: Family::default(),
            records_lost: Counter::default(),
            lines_lost: Counter::default(),
            registry: Registry::default(),
        };
        metrics.register(&mut registry);
        Self { registry, ..metrics }
    }
}

impl Metrics {
    /// Creates the metrics of a node, with others that are computed when they are asked for.
    pub fn with(computed: impl Collector) -> Self {
        let mut metrics = Self::default();
        metrics.registry.register_collector(Box::new(computed));
        metrics
    }

    /// Registers the metrics of custody, caches, rate limits and resumption.
    fn register_treatments(&self, registry: &mut Registry) {
        registry.register("custody_exchanges", "Exchanges in custody of this node", self.custody_exchanges.clone());
        registry.register_with_unit(
            "custody_held",
            "Bytes in custody of this node, in memory and on disk",
            Unit::Bytes,
            self.custody_held.clone(),
        );
        registry.register(
            "custody_joins",
            "Clients that repeated a request and received the response already in custody",
            self.custody_joins.clone(),
        );
        registry.register(
            "custody_replays",
            "Requests in custody that were sent to the origin again after a restart",
            self.custody_replays.clone(),
        );
        registry.register("cache_requests", "Requests of routes with a cache, by outcome", self.cache_requests.clone());
        registry.register_with_unit("cache", "Bytes stored by caches", Unit::Bytes, self.cache_bytes.clone());
        registry.register("cache_evictions", "Objects evicted to make room", self.cache_evictions.clone());
        registry.register(
            "upstream_rate_limit_requests",
            "Rate-limited requests, by outcome",
            self.rate_limited.clone(),
        );
        registry.register("relay_channels", "Channels of the relays of this node", self.relay_channels.clone());
        registry.register("relay_subscriptions", "Subscriptions to channels", self.relay_subscriptions.clone());
        registry.register_with_unit(
            "relay_memory",
            "Bytes of the publications in queues and histories",
            Unit::Bytes,
            self.relay_memory.clone(),
        );
        registry.register(
            "relay_upstream_subscriptions",
            "Channels that this node shares with other relays",
            self.relay_upstream_subscriptions.clone(),
        );
        registry.register(
            "relay_roots",
            "Channels that this node shares with peers and of which it is the root",
            self.relay_roots.clone(),
        );
        registry.register(
            "relay_upstream_breaks",
            "Subscriptions of this node at the next relay that broke off and were begun again",
            self.relay_upstream_breaks.clone(),
        );
        registry.register("relay_publications", "Publications by route", self.relay_publications.clone());
        registry.register(
            "relay_deliveries",
            "Publications by subscriber: queued, or dropped because the queue was full",
            self.relay_deliveries.clone(),
        );
        registry.register(
            "resume_requests",
            "Requests of routes with resume: retried, resumed, expired",
            self.resumed.clone(),
        );
        registry.register(
            "upstream_rate_limit_per_second",
            "Estimated rate that the upstream accepts",
            self.rate_limit_rate.clone(),
        );
        registry.register_with_unit(
            "upstream_rate_limit_wait",
            "Time that requests waited at the rate limit",
            Unit::Seconds,
            self.rate_limit_waits.clone(),
        );
    }

    fn register(&self, registry: &mut Registry) {
        registry.register("sessions", "Sessions that ended", self.sessions.clone());
        registry.register_with_unit("session_received", "Bytes from clients", Unit::Bytes, self.received.clone());
        registry.register_with_unit("session_sent", "Bytes to clients", Unit::Bytes, self.sent.clone());
        registry.register_with_unit("session_duration", "Duration of sessions", Unit::Seconds, self.seconds.clone());
        registry.register("session_errors", "Sessions that failed, by RFC 9209 error type", self.errors.clone());
        registry.register("sessions_open", "Open sessions", self.sessions_open.clone());
        registry.register(
            "connections_relieved",
            "Connections accepted for a worker whose loop stood still",
            self.connections_relieved.clone(),
        );
        registry.register(
            "standstills",
            "Times in which the loops of all workers stood still",
            self.standstills.clone(),
        );
        registry.register(
            "connections_parted",
            "Connections that a worker drained because its work waited too long",
            self.connections_parted.clone(),
        );
        registry.register("worker_breaks", "Workers that broke and began anew", self.worker_breaks.clone());
        let help = "Times that a listener was confined to the sandbox";
        registry.register("listeners_confined", help, self.listeners_confined.clone());
        registry.register("connections", "Connections accepted", self.connections.clone());
        registry.register("connections_open", "Client connections open", self.connections_open.clone());
        registry.register("reverse_connections", "Open reverse connections", self.reverse_connections.clone());
        registry.register("tls_handshake_failures", "Handshakes that failed", self.handshake_failures.clone());
        registry.register("limit_hits", "Times that a limit was reached", self.limits.clone());
        registry.register("overload_workers", "Workers that take a step against overload", self.overload.clone());
        registry.register("dns_questions", "DNS queries, by outcome", self.dns_questions.clone());
        registry.register(
            "identities_removed",
            "User claims removed because the peer may not make them",
            self.identities_removed.clone(),
        );
        registry.register(
            "quic_fallbacks",
            "Upstreams reached over HTTP/2 instead of HTTP/3",
            self.quic_fallbacks.clone(),
        );
        registry.register("quic_migrations", "Clients whose address changed", self.quic_migrations.clone());
        registry.register("quic_packets_sent", "Packets to clients", self.quic_sent.clone());
        registry.register("quic_packets_lost", "Lost packets to clients", self.quic_lost.clone());
        registry.register(
            "quic_forwarded",
            "Datagrams received by another worker or process than the one with their connection",
            self.quic_forwarded.clone(),
        );
        registry.register("datagrams_dropped", "Datagrams dropped, by reason", self.datagrams_dropped.clone());
        registry.register("tcp_urgent", "Urgent bytes of TCP, by how they were forwarded", self.tcp_urgent.clone());
        registry.register("retries", "Retried requests", self.retries.clone());
        self.register_treatments(registry);
        registry.register("upstream_connects", "Connections opened", self.upstream_connects.clone());
        registry.register(
            "upstream_connect_failures",
            "Failed connection attempts",
            self.upstream_connect_failures.clone(),
        );
        registry.register("upstream_healthy", "1 if the endpoint accepts sessions", self.upstream_healthy.clone());
        registry.register("upstream_backups", "Sessions sent to a backup endpoint", self.upstream_backups.clone());
        registry.register("reloads", "Documents applied or rejected", self.reloads.clone());
        registry.register("generation", "Number of the running snapshot", self.generation.clone());
        registry.register_with_unit(
            "certificate_not_after",
            "Expiry of a certificate of this node, in Unix time",
            Unit::Seconds,
            self.certificates.clone(),
        );
        registry.register(
            "access_log_entries_lost",
            "Access-log entries lost because the log was slow",
            self.records_lost.clone(),
        );
        registry.register("log_lines_lost", "Lines of the log lost because stderr was slow", self.lines_lost.clone());
    }

    /// Returns the counters for one combination of labels.
    pub fn session(&self, labels: &SessionLabels) -> SessionMetrics {
        SessionMetrics {
            total: self.sessions.get_or_create(labels).clone(),
            received: self.received.get_or_create(labels).clone(),
            sent: self.sent.get_or_create(labels).clone(),
            seconds: self.seconds.get_or_create(labels).clone(),
        }
    }

    /// Counts that a limit was reached.
    pub fn limit(&self, limit: &'static str) {
        self.limit_by(limit, 1);
    }

    /// Counts that a limit was reached `times` times.
    pub fn limit_by(&self, limit: &'static str, times: u64) {
        if times > 0 {
            self.limits.get_or_create(&LimitLabels { limit }).inc_by(times);
        }
    }

    /// Sets the gauges of custody: exchanges, and their bytes in memory and on disk.
    pub fn set_custody(&self, (exchanges, memory, disk): (usize, u64, u64)) {
        self.custody_exchanges.set(i64::try_from(exchanges).unwrap_or(i64::MAX));
        for (tier, bytes) in [("memory", memory), ("disk", disk)] {
            self.custody_held.get_or_create(&HeldLabels { tier }).set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }

    /// Returns the metrics for the cache of a route.
    pub fn cache(&self, route: &Arc<str>) -> CacheMetrics {
        let requests =
            |outcome| self.cache_requests.get_or_create(&CacheLabels { route: route.clone(), outcome }).clone();
        // Each closure ends its statement before the next handle is fetched, because `get_or_create` returns a lock
        // guard of the table.
        let bytes = |tier| self.cache_bytes.get_or_create(&TierLabels { route: route.clone(), tier }).clone();
        let evictions = |tier| self.cache_evictions.get_or_create(&TierLabels { route: route.clone(), tier }).clone();
        CacheMetrics {
            hits: requests("hit"),
            missed: requests("miss"),
            revalidated: requests("revalidated"),
            stale: requests("stale"),
            collapsed: requests("collapsed"),
            bypassed: requests("bypass"),
            memory: bytes("memory"),
            disk: bytes("disk"),
            evictions_memory: evictions("memory"),
            evictions_disk: evictions("disk"),
            limit: {
                let limits = self.limits.clone();
                Arc::new(move |limit| {
                    limits.get_or_create(&LimitLabels { limit }).inc();
                })
            },
        }
    }

    /// Counts an event at the rate limit of a route.
    pub fn rate_limited(&self, route: &Arc<str>, event: &'static str) {
        self.rate_limited.get_or_create(&EventLabels { route: route.clone(), event }).inc();
    }

    /// Counts an event of the resumption of requests on a route.
    pub fn resumed(&self, route: &Arc<str>, event: &'static str) {
        self.resumed.get_or_create(&EventLabels { route: route.clone(), event }).inc();
    }

    /// Counts dropped datagrams.
    pub fn dropped(&self, reason: &'static str, count: u64) {
        self.datagrams_dropped.get_or_create(&ReasonLabels { reason }).inc_by(count);
    }

    /// Counts an urgent byte, which stays urgent or becomes an ordinary one.
    pub fn count_urgent(&self, stays_urgent: bool) {
        let carried = if stays_urgent { "urgent" } else { "in-band" };
        self.tcp_urgent.get_or_create(&UrgentLabels { carried }).inc();
    }

    /// Renders all metrics as Prometheus (OpenMetrics) text.
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

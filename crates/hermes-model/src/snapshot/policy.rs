//! Policies of a route: timeouts, retries, custody, cache, rate limit and resumption.

use std::time::Duration;

use http::StatusCode;

use crate::facts::Kind;

/// Timeouts of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Time for a new connection to become usable: dial, TLS, preface. Default 5 s.
    pub connect: Duration,
    /// Time without a byte in either direction of an open session. `None` is the default of the kind: `http` 5 min,
    /// `tcp` 1 h, `udp` 2 min (RFC 4787, REQ-5).
    pub idle: Option<Duration>,
    /// Time without progress while bytes are due: no response head, or a reader that reads nothing. Default 60 s.
    pub progress: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: Duration::from_secs(5), idle: None, progress: Duration::from_secs(60) }
    }
}

impl Timeouts {
    /// Idle timeout of a session of this kind: the route's, or the kind's default.
    pub fn idle_of(&self, kind: Kind) -> Duration {
        let default = match kind {
            Kind::Http => Duration::from_secs(5 * 60),
            Kind::Tcp => Duration::from_secs(60 * 60),
            Kind::Udp => Duration::from_secs(2 * 60),
            // An IP tunnel is a link, which may be idle for long.
            Kind::Ip => Duration::from_secs(24 * 60 * 60),
        };
        self.idle.unwrap_or(default)
    }
}

/// Effect of a changed route on live sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnChange {
    /// Sessions keep their old destination.
    #[default]
    Keep,
    /// Sessions move to the new destination (`udp`).
    Move,
}

/// Custody policy of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Custody {
    /// An exchange that is not delivered within this time fails.
    pub deadline: Duration,
    /// Bytes in memory, for all exchanges of the route.
    pub memory: u64,
    /// Bytes on disk; zero if the node has no `state`.
    pub disk: u64,
    /// Durability required before a byte is acknowledged.
    pub durable: Durable,
}

/// Adaptive rate limit of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpstreamRateLimit {
    /// Maximum time that a request waits, whatever `Retry-After` the service sends.
    pub deadline: Duration,
    /// Maximum number of waiting requests.
    pub queue: usize,
}

/// Resumable download of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resume {
    /// Maximum time without progress; each byte restarts it.
    pub deadline: Duration,
}

/// Failure that bytes in custody survive once they are acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durable {
    /// Loss of the process: bytes are written to the file.
    #[default]
    Process,
    /// Loss of power: bytes are synced to the disk.
    Fsync,
}

/// Cache policy of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Bytes in memory, including heads.
    pub memory: u64,
    /// Bytes on disk; zero if the node has no `state`.
    pub disk: u64,
    /// The cache is shared by all users; otherwise each user has a partition.
    pub shared: bool,
    /// Time that stale responses are served while the origin is unreachable (`stale-if-error`).
    pub stale_if_error: Duration,
}

/// Retry policy of a route.
#[derive(Clone, Debug, PartialEq)]
pub struct Retry {
    /// Retry if the connection could not be opened: nothing was sent.
    pub on_connect_failure: bool,
    /// Retry if the connection was reset before a response.
    pub on_reset: bool,
    /// Retry on any 5xx.
    pub on_5xx: bool,
    /// Retry on these statuses (429, 503, ...).
    pub on_status: Vec<StatusCode>,
    /// Total attempts, including the first; at least 1.
    pub attempts: u32,
    /// Delay before the second attempt; doubles, with full jitter.
    pub backoff_base: Duration,
    /// Maximum delay.
    pub backoff_max: Duration,
    /// Retries in flight may be at most this share of requests in flight (0.0 to 1.0). A small floor allows a single
    /// request to be retried.
    pub budget: f64,
}

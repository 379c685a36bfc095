//! Configuration of an IPC process: names, key, PDU size, bounds and timers.
//!
//! In: values of the caller. Out: a checked configuration. Never: a bound that is off by default.

use std::time::Duration;

use crate::message::MAX_DIF_NAME;

/// Smallest allowed PDU size in bytes: every management PDU fits.
pub const MIN_MTU: u16 = 1200;
/// Largest allowed PDU size in bytes: the largest UDP payload over IPv4.
pub const MAX_MTU: u16 = 65_507;
/// Maximum number of flows of an IPC process.
pub const MAX_FLOWS: usize = 1 << 16;

/// The configuration of an IPC process.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name of the DIF; neighbours must use the same.
    pub dif: String,
    /// The key that all members share. `None`: any node that knows the name may enrol.
    pub key: Option<Vec<u8>>,
    /// The largest UDP payload, in bytes; the smaller value of two neighbours counts.
    pub mtu: u16,
    /// The bounds.
    pub limits: Limits,
    /// The timers.
    pub timing: Timing,
}

/// Bounds of memory and tables.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Neighbours, enrolled or enrolling.
    pub neighbours: usize,
    /// Flows of one neighbour, including requests and flows that linger.
    pub flows_per_neighbour: usize,
    /// Flows in total; at most [`MAX_FLOWS`].
    pub flows: usize,
    /// Requests of one neighbour that the application has not decided.
    pub pending_per_neighbour: usize,
    /// Unacknowledged bytes of one flow.
    pub send_buffer: usize,
    /// Unread bytes of one flow: its receive window.
    pub receive_window: u32,
    /// Unacknowledged bytes of all flows.
    pub total_send: usize,
    /// Unread bytes of all flows.
    pub total_receive: usize,
    /// Out-of-order ranges of one flow.
    pub ranges: usize,
    /// Management PDUs and replies that wait for the socket.
    pub control_queue: usize,
}

/// Intervals and timeouts.
#[derive(Debug, Clone)]
pub struct Timing {
    /// Time limit of an enrolment.
    pub enrol: Duration,
    /// Time limit of a flow allocation, on both sides.
    pub allocate: Duration,
    /// First interval of the repetition of a management PDU; it doubles.
    pub retry: Duration,
    /// A flow is probed after this time without a PDU of the peer.
    pub keepalive: Duration,
    /// A flow is closed after this time without a PDU of the peer.
    pub dead: Duration,
    /// A flow is closed after this time without a byte in either direction.
    pub idle: Duration,
    /// An ended flow answers retransmissions for this time (delta-t).
    pub linger: Duration,
    /// A neighbour without flows is removed after this time.
    pub neighbour_idle: Duration,
}

impl Config {
    /// Returns the default configuration for a DIF.
    pub fn new(dif: impl Into<String>) -> Self {
        let (limits, timing) = (Limits::default(), Timing::default());
        Self { dif: dif.into(), key: None, mtu: 1400, limits, timing }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.dif.is_empty() || self.dif.len() > MAX_DIF_NAME {
            return Err(ConfigError::Name);
        }
        if !(MIN_MTU..=MAX_MTU).contains(&self.mtu) {
            return Err(ConfigError::Mtu(self.mtu));
        }
        let limits = &self.limits;
        let is_zero = [limits.neighbours, limits.send_buffer, limits.total_send, limits.ranges, limits.control_queue]
            .contains(&0);
        if is_zero || limits.receive_window == 0 || !(1..=MAX_FLOWS).contains(&limits.flows) {
            return Err(ConfigError::Limits);
        }
        Ok(())
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            neighbours: 1024,
            flows_per_neighbour: 16_384,
            flows: MAX_FLOWS,
            pending_per_neighbour: 1024,
            send_buffer: 4 << 20,
            receive_window: 4 << 20,
            total_send: 256 << 20,
            total_receive: 256 << 20,
            ranges: 256,
            control_queue: 4096,
        }
    }
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            enrol: Duration::from_secs(10),
            allocate: Duration::from_secs(30),
            retry: Duration::from_millis(250),
            keepalive: Duration::from_secs(10),
            dead: Duration::from_secs(30),
            idle: Duration::from_secs(3600),
            linger: Duration::from_secs(10),
            neighbour_idle: Duration::from_secs(300),
        }
    }
}

/// An error in a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The name is empty or too long.
    #[error("invalid DIF name; expected 1 to {MAX_DIF_NAME} bytes")]
    Name,
    /// The PDU size is out of range.
    #[error("invalid MTU {0}; expected {MIN_MTU} to {MAX_MTU}")]
    Mtu(u16),
    /// A limit is zero or too large.
    #[error("invalid limits; expected positive numbers and at most {MAX_FLOWS} flows")]
    Limits,
}

//! The path of a client's QUIC connection: the client's address and the lost packets.
//!
//! In: an accepted connection. Out: its current source address; migrations and losses as metrics. quinn signals no
//! migration to the application, so the address is read at each request and periodically.

use std::cell::Cell;
use std::net::SocketAddr;

use hermes_net::quic;
use hermes_wire::h3::Code;

use super::Connection;
use crate::runtime::WorkerContext;

/// A client's QUIC connection, with the packet counters that were last read.
pub struct QuicPath {
    quic: quic::Connection,
    sent: Cell<u64>,
    lost: Cell<u64>,
}

impl QuicPath {
    pub fn new(quic: quic::Connection) -> Self {
        Self { quic, sent: Cell::new(0), lost: Cell::new(0) }
    }

    /// Closes the connection with H3_NO_ERROR.
    pub fn close(&self, reason: &str) {
        // All codes fit 32 bits.
        let code = quic::VarInt::from_u32(Code::NoError.value() as u32);
        self.quic.close(code, reason.as_bytes());
    }
}

impl Connection {
    /// Returns the client's current address, and counts a migration if it has changed.
    pub fn follow(&self, worker: &WorkerContext) -> SocketAddr {
        let Some(path) = self.path.get() else { return self.source.get() };
        let now = path.quic.remote_address();
        let before = self.source.replace(now);
        if before != now {
            worker.shared.metrics.quic_migrations.inc();
            tracing::debug!(from = %before, to = %now, "a client has migrated");
        }
        now
    }

    /// Adds the packets that were sent and lost since the last call to the metrics.
    pub(super) fn watch_path(&self, worker: &WorkerContext) {
        let Some(path) = self.path.get() else { return };
        self.follow(worker);
        let stats = path.quic.stats().path;
        // After a migration, the connection has a new path, whose counters start at zero.
        let new = |seen: &Cell<u64>, now: u64| now.checked_sub(seen.replace(now)).unwrap_or(now);
        worker.shared.metrics.quic_sent.inc_by(new(&path.sent, stats.sent_packets));
        worker.shared.metrics.quic_lost.inc_by(new(&path.lost, stats.lost_packets));
    }
}

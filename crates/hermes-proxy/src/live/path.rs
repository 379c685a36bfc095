//! The path of a client's QUIC connection: where it leads, and what is lost on it.
//!
//! In: a connection that was accepted. Out: its source as it is now, moves and losses counted. QUIC calls
//! nobody when a client moves: this looks at each request, and now and then.

use std::cell::Cell;
use std::net::SocketAddr;

use hermes_net::quic;
use hermes_wire::h3::Code;

use super::Connection;
use crate::h3::link::number;
use crate::worker::Worker;

/// What was seen of a path so far.
pub(crate) struct Path {
    quic: quic::Connection,
    sent: Cell<u64>,
    lost: Cell<u64>,
}

impl Path {
    pub(crate) fn new(quic: quic::Connection) -> Self {
        Self { quic, sent: Cell::new(0), lost: Cell::new(0) }
    }

    /// Ends the connection, through no fault of the client's.
    pub(crate) fn close(&self, reason: &str) {
        self.quic.close(number(Code::NoError), reason.as_bytes());
    }
}

impl Connection {
    /// Where the client is now.
    pub(crate) fn follow(&self, worker: &Worker) -> SocketAddr {
        let Some(path) = self.path.get() else { return self.source.get() };
        let now = path.quic.remote_address();
        let before = self.source.replace(now);
        if before != now {
            worker.shared.metrics.quic_migrations.inc();
            tracing::debug!(from = %before, to = %now, "a client has moved");
        }
        now
    }

    /// Counts what happened on the path since the last time.
    pub(super) fn watch_path(&self, worker: &Worker) {
        let Some(path) = self.path.get() else { return };
        self.follow(worker);
        let stats = path.quic.stats().path;
        // A client that moves begins a new path, whose counts begin anew.
        let new = |seen: &Cell<u64>, now: u64| now.checked_sub(seen.replace(now)).unwrap_or(now);
        worker.shared.metrics.quic_sent.inc_by(new(&path.sent, stats.sent_packets));
        worker.shared.metrics.quic_lost.inc_by(new(&path.lost, stats.lost_packets));
    }
}

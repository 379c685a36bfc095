//! A read-only view of a running node, from the main thread.
//!
//! In: queries of the admin endpoint. Out: metrics, the document, sessions. Never: a change.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, oneshot};

use super::worker_loop::Command;
use crate::worker::Services;
use hermes_outbound::generation::Generation;
use hermes_transport::runtime::Shared;
use hermes_transport::runtime::session::SessionView;

/// The limit of sessions of one worker in `/sessions`.
const MAX_LISTED_SESSIONS: usize = 10_000;

/// A view of a running node for the admin endpoint.
#[derive(Clone)]
pub struct NodeView {
    pub(super) shared: Arc<Shared>,
    pub(super) services: Arc<Services>,
    pub(super) current: Arc<ArcSwap<Generation>>,
    pub(super) workers: Vec<mpsc::Sender<Command>>,
}

impl NodeView {
    /// All metrics, as Prometheus text.
    pub fn metrics(&self) -> String {
        let lines = &self.shared.metrics.lines_lost;
        let lost = self.shared.lost_lines.get().map_or(0, |lost| lost() as u64);
        lines.inc_by(lost.saturating_sub(lines.get()));
        self.shared.metrics.set_custody(self.services.custody.held());
        self.shared.metrics.limit_by("custody-exchanges", self.services.custody.take_refused());
        self.shared.metrics.render()
    }

    /// True if the loops of all workers stand still: nobody is served.
    pub fn stands_still(&self) -> bool {
        self.shared.status.stand_still(None)
    }

    /// True if no worker outside the sandbox accepts connections, because of overload.
    pub fn is_stopped(&self) -> bool {
        self.shared.status.are_stopped()
    }

    /// Adds the admin endpoint to the addresses that guarded routes must not dial.
    pub(crate) fn guard_admin(&self, address: Option<SocketAddr>) {
        self.shared.guard.admin(address);
    }

    /// The running document without its secrets, and its generation.
    pub fn config(&self) -> serde_json::Value {
        let generation = self.current.load();
        let document: serde_json::Value = serde_json::from_str(&generation.snapshot.redacted).unwrap_or_default();
        serde_json::json!({ "generation": generation.number, "document": document })
    }

    /// Open sessions on all workers.
    pub fn open_sessions(&self) -> usize {
        usize::try_from(self.shared.metrics.sessions_open.get()).unwrap_or_default()
    }

    /// The number of sessions that ended since the start, and of those that failed through a server or this node.
    pub fn ended_sessions(&self) -> (u64, u64) {
        (self.shared.metrics.ended.get(), self.shared.metrics.failed.get())
    }

    /// True if the document drains the node.
    pub fn is_draining(&self) -> bool {
        self.current.load().snapshot.draining
    }

    /// Client connections on all workers.
    pub fn open_connections(&self) -> usize {
        usize::try_from(self.shared.metrics.connections_open.get()).unwrap_or_default()
    }

    /// The status of each worker, and how connections are distributed.
    pub fn workers(&self) -> serde_json::Value {
        let status = &self.shared.status;
        let confined = status.sandbox.confined();
        serde_json::json!({ "dispatch": status.mode(), "confined": confined, "workers": status.view() })
    }

    /// Every session, up to a limit.
    pub async fn sessions(&self) -> Vec<SessionView> {
        let mut all = Vec::new();
        for worker in &self.workers {
            let (reply, answer) = oneshot::channel();
            if worker.send(Command::Sessions { most: MAX_LISTED_SESSIONS, reply }).await.is_ok() {
                all.extend(answer.await.unwrap_or_default());
            }
        }
        all
    }
}

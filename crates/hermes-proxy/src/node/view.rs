//! What can be seen of a running node, from the main thread.
//!
//! In: questions of the admin endpoint. Out: metrics, the document, sessions. Never: a change.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, oneshot};

use crate::generation::Generation;
use crate::live::SessionView;
use crate::worker::{Command, Shared};

/// Sessions that `/sessions` lists at most, of each worker.
const MOST_SESSIONS: usize = 10_000;

/// A view of a running node for the admin endpoint.
#[derive(Clone)]
pub struct NodeView {
    pub(super) shared: Arc<Shared>,
    pub(super) current: Arc<ArcSwap<Generation>>,
    pub(super) workers: Vec<mpsc::Sender<Command>>,
}

impl NodeView {
    /// All metrics, as Prometheus text.
    pub fn metrics(&self) -> String {
        let lines = &self.shared.metrics.lines_lost;
        let lost = self.shared.lost_lines.get().map_or(0, |lost| lost() as u64);
        lines.inc_by(lost.saturating_sub(lines.get()));
        self.shared.metrics.set_custody(self.shared.custody.held());
        self.shared.metrics.limit_by("custody-exchanges", self.shared.custody.take_refused());
        self.shared.metrics.render()
    }

    /// No guarded route dials the admin endpoint.
    pub(crate) fn guard_admin(&self, address: Option<SocketAddr>) {
        self.shared.guard.admin(address);
    }

    /// The running document with secrets left out, and its generation.
    pub fn config(&self) -> serde_json::Value {
        let generation = self.current.load();
        let document: serde_json::Value = serde_json::from_str(&generation.snapshot.redacted).unwrap_or_default();
        serde_json::json!({ "generation": generation.number, "document": document })
    }

    /// Sessions under way on all workers.
    pub fn open_sessions(&self) -> usize {
        usize::try_from(self.shared.metrics.sessions_open.get()).unwrap_or_default()
    }

    /// Sessions that ended since the node began, and how many of them failed for a server's or this node's fault.
    pub fn ended_sessions(&self) -> (u64, u64) {
        (self.shared.metrics.ended.get(), self.shared.metrics.failed.get())
    }

    /// Whether the document says that the node takes none.
    pub fn is_draining(&self) -> bool {
        self.current.load().snapshot.draining
    }

    /// Client connections on all workers.
    pub fn open_connections(&self) -> usize {
        usize::try_from(self.shared.metrics.connections_open.get()).unwrap_or_default()
    }

    /// Every session, up to a bound.
    pub async fn sessions(&self) -> Vec<SessionView> {
        let mut all = Vec::new();
        for worker in &self.workers {
            let (reply, answer) = oneshot::channel();
            if worker.send(Command::Sessions { most: MOST_SESSIONS, reply }).await.is_ok() {
                all.extend(answer.await.unwrap_or_default());
            }
        }
        all
    }
}

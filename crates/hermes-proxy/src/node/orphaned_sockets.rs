//! Inherited QUIC sockets without a listener in this process.
//!
//! In: socket groups from a takeover. Out: their datagrams, forwarded to connections of predecessor processes while one
//! of those lives, because predecessors no longer read sockets. Never: a new connection.

use std::sync::Arc;
use std::time::Duration;

use hermes_net::quic::{EndpointTasks, Group, Server};
use tokio::task::AbortHandle;

use super::Node;
use super::sockets::{Socket, UNIX, WAY, remove_unused, steer_quic};

/// The interval of checks for living predecessors.
const PREDECESSOR_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A group without a listener.
pub(super) struct OrphanedSocket {
    pub(super) label: String,
    pub(super) group: Arc<Group>,
    /// The reading task, once the predecessor has stopped reading.
    reading: Option<AbortHandle>,
}

impl Node {
    /// Adopts the inherited sockets that no listener took.
    pub(super) fn adopt_orphans(&mut self) {
        let is_quic = |label: &String| label.starts_with("quic/") && !label.contains(WAY);
        let labels: Vec<String> = self.inherited.keys().filter(|label| is_quic(label)).cloned().collect();
        for label in labels {
            let sockets = self.inherited.remove(&label).into_iter().flatten().map(Into::into).collect();
            match Group::open(sockets, self.ways_to(&label)) {
                Ok(group) => self.orphans.push(OrphanedSocket { label, group, reading: None }),
                Err(error) => tracing::warn!(%label, %error, "connections of the previous process will end"),
            }
        }
        // The file of a Unix socket belongs to the predecessor until that has handed over.
        self.inherited.retain(|label, _| label.starts_with(UNIX));
    }

    /// Closes the remaining inherited sockets, because the predecessor has handed over.
    pub(super) fn part_with_inherited(&mut self) {
        self.inherited.drain().for_each(|(label, sockets)| remove_unused(&label, sockets));
    }

    /// Starts reading, because the predecessor has handed over.
    pub(super) fn read_orphans(&mut self) {
        for orphan in self.orphans.iter_mut().filter(|orphan| orphan.reading.is_none()) {
            steer_quic(&orphan.group);
            tracing::info!(socket = orphan.label, "listener removed; connections of the previous process continue");
            orphan.reading = Some(self.background.spawn(read(orphan.group.clone())));
        }
    }

    /// Removes groups that have a listener now, and groups that no predecessor needs.
    pub(super) fn part_with_orphans(&mut self) {
        let sockets = &self.sockets;
        self.orphans.retain(|orphan| {
            let has_listener =
                sockets.values().flatten().filter_map(Socket::group).any(|group| Arc::ptr_eq(group, &orphan.group));
            if has_listener {
                orphan.stop();
            }
            !has_listener && !orphan.is_over()
        });
    }
}

impl OrphanedSocket {
    /// Stops reading, because a successor or a listener reads now.
    pub(super) fn stop(&self) {
        self.reading.iter().for_each(AbortHandle::abort);
    }

    fn is_over(&self) -> bool {
        self.reading.as_ref().is_some_and(AbortHandle::is_finished)
    }
}

async fn read(group: Arc<Group>) {
    let tasks = EndpointTasks::default();
    let open = |slot| Server::open(&group, slot, None, None, 0, &tasks);
    let servers: std::io::Result<Vec<Server>> = (0..=u8::MAX).take(group.len()).map(open).collect();
    if let Err(error) = &servers {
        tracing::warn!(%error, "connections of the previous process will end");
        return;
    }
    // The exit of another process signals no event here.
    let mut look = tokio::time::interval(PREDECESSOR_POLL_INTERVAL);
    while group.has_predecessors() {
        look.tick().await;
    }
}

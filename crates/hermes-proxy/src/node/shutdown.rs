//! The shutdown of a node: the handover to a successor, and the drain.
//!
//! In: a successor process, or none. Out: sockets, devices and address leases. Then the node accepts nothing, and its
//! sessions end by themselves or at the drain timeout. Until `close`, a handover can be undone.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use hermes_net::fd_passing::{LabelledFd, rewrite_text};

use super::sockets::Socket;
use super::worker_loop::Command;
use super::{Node, RESTING_LEASES_LABEL, STATE_POLL_INTERVAL};

impl Node {
    /// The listening sockets with their labels, for another process.
    ///
    /// # Errors
    /// No file descriptor is left to duplicate them.
    pub fn handover(&self) -> std::io::Result<Vec<LabelledFd>> {
        let mut all = Vec::new();
        for (key, sockets) in &self.sockets {
            for socket in sockets {
                socket.hand_over(&key.label(), &mut all)?;
            }
        }
        for orphan in &self.orphans {
            Socket::Quic(orphan.group.clone(), 0).hand_over(&orphan.label, &mut all)?;
        }
        for held in self.devices.values().filter(|held| held.is_there()) {
            held.hand_over(&mut all)?;
        }
        // Written once its content is final.
        let resting = LabelledFd::text(RESTING_LEASES_LABEL.to_owned(), "")?;
        let kept = resting.fd.try_clone()?;
        *self.resting_here.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept);
        all.push(resting);
        Ok(all)
    }

    /// Undoes [`Node::handover`] because the successor was rejected; this node continues. Called again when that
    /// process has exited.
    pub fn roll_back(&self) {
        self.resting_here.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.take_devices_back();
    }

    /// Stops accepting; sessions continue. With `handed`, a successor has the sockets, and serves their queues from the
    /// end of this call on.
    pub async fn close(&mut self, handed: bool) {
        self.closed = true;
        self.dispatchers.release();
        if !handed {
            self.sockets.values().flatten().for_each(Socket::make_way);
        }
        let mut passages = if handed { self.part_with_devices() } else { Vec::new() };
        let resting = self.resting_here.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(error)) = resting.filter(|_| handed).map(|fd| rewrite_text(&fd, &self.services.given.resting()))
        {
            tracing::warn!(%error, "cannot send the reserved addresses to the successor");
        }
        self.all_do(|done| Command::Close { handed, passages: passages.pop().unwrap_or_default(), done }).await;
        if handed {
            self.services.caches.hand_over();
            let custody = self.services.custody.clone();
            // Waits for pending writes.
            let _ = tokio::task::spawn_blocking(move || custody.stop()).await;
        }
        // A successor has interceptions of its own; without one, connections pass from now on.
        self.sockets.values().flatten().filter(|socket| socket.is_interception()).for_each(Socket::make_way);
        self.sockets.clear();
        // The drain comes last: drained clients reconnect at once, and another worker would still accept them.
        self.all_do(|done| Command::Drain { done }).await;
        self.orphans.drain(..).for_each(|orphan| orphan.stop());
        self.bound.clear();
        self.leave_devices();
    }

    /// Waits until no session, no connection and no predecessor process that depends on this one is left.
    pub async fn emptied(&self) {
        // Sessions end on other threads, so there is no single event to await.
        let mut every = tokio::time::interval(STATE_POLL_INTERVAL);
        let view = self.view();
        loop {
            every.tick().await;
            let predecessors = self.shared.predecessors.load(Ordering::Relaxed);
            if view.open_sessions() + view.open_connections() + predecessors == 0 {
                return;
            }
        }
    }

    /// Ends the remaining sessions, and returns their number.
    pub async fn end(mut self) -> usize {
        let left = self.view().open_sessions();
        self.stop().await;
        left
    }

    async fn stop(&mut self) {
        self.background.shutdown().await;
        for worker in &self.workers {
            let _ = worker.commands.send(Command::Stop).await;
        }
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                let _ = tokio::task::spawn_blocking(move || thread.join()).await;
            }
        }
    }
}

//! How a node goes: what it hands to the process after it, and what it waits for.
//!
//! In: another process that takes over, or none. Out: sockets, devices, and which addresses wait for their owners; then
//! nothing is accepted any more, and what runs comes to its end or is ended. Until it has closed, all can be taken back.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use hermes_net::handover::{Handed, rewrite_text};

use super::sockets::Socket;
use super::{LOOK_AGAIN, Node, RESTING};
use crate::worker::Command;

impl Node {
    /// The listening sockets with their labels, for another process.
    ///
    /// # Errors
    /// No descriptor is left to duplicate them.
    pub fn handover(&self) -> std::io::Result<Vec<Handed>> {
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
        // Written when nothing of it changes any more.
        let resting = Handed::text(RESTING.to_owned(), "")?;
        let kept = resting.fd.try_clone()?;
        *self.resting_here.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept);
        all.push(resting);
        Ok(all)
    }

    /// The process that got what [`Node::handover`] returned is refused: this one goes on as before. Once more when that
    /// one has ended.
    pub fn take_back(&self) {
        self.resting_here.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.take_devices_back();
    }

    /// Accepts no more; what runs goes on. With `handed` another process has the sockets: what
    /// waits in their queues is its to serve, from the moment at which this is done.
    pub async fn close(&mut self, handed: bool) {
        self.closed = true;
        if !handed {
            self.sockets.values().flatten().for_each(Socket::make_way);
        }
        let mut passages = if handed { self.part_with_devices() } else { Vec::new() };
        let resting = self.resting_here.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(error)) = resting.filter(|_| handed).map(|fd| rewrite_text(&fd, &self.shared.given.resting())) {
            tracing::warn!(%error, "the successor does not hear which addresses wait for their owners");
        }
        self.all_do(|done| Command::Close { handed, passages: passages.pop().unwrap_or_default(), done }).await;
        if handed {
            self.shared.caches.hand_over();
            let custody = self.shared.custody.clone();
            // Waits for what is being written.
            let _ = tokio::task::spawn_blocking(move || custody.stop()).await;
        }
        self.sockets.clear();
        // Only now: who is told to go comes back at once, and another worker would still take it.
        self.all_do(|done| Command::Drain { done }).await;
        self.orphans.drain(..).for_each(|orphan| orphan.stop());
        self.bound.clear();
        self.leave_devices();
    }

    /// Waits until no session and no connection is left, and no process before this one that gets packets by it.
    pub async fn emptied(&self) {
        // Sessions end on other threads; there is no single event to await.
        let mut every = tokio::time::interval(LOOK_AGAIN);
        let view = self.view();
        loop {
            every.tick().await;
            let elders = self.shared.elders.load(Ordering::Relaxed);
            if view.open_sessions() + view.open_connections() + elders == 0 {
                return;
            }
        }
    }

    /// Ends what is left, and tells how much that was.
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

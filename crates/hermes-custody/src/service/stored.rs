//! The journal of the custody service: state that outlives the process, and its recovery.
//!
//! In: the journal's directory, once it is free, and the reports of its thread. Out: restored exchanges, notices of
//! durable entries, and bytes read back. Never: a wait for the disk under the lock.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{Direction, ExchangeId};
use tokio::sync::oneshot;

use super::super::engine::Durability;
use super::super::journal_record::{Intent, JournalRecord};
use super::super::store::{Job, Reader, Safe, Store, is_full};
use super::super::stream_state::Progress;
use super::state::Storing;
use super::{CustodyService, Failure};

/// Minimum interval between log messages about a failing disk.
const DISK_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A restored exchange, for the task that resumes it.
pub struct RestoredExchange {
    /// Whether the exchange ends at this node.
    pub is_for_here: bool,
    /// Whether the exchange is forwarded to another node, and the head of its response had not arrived yet.
    pub awaits_head: bool,
    /// The certainty that the request was sent to an origin. `None`: no intent was recorded, so the request may be
    /// sent.
    pub intent: Option<Intent>,
    /// Progress of the response.
    pub response: Progress,
}

impl CustodyService {
    /// Lets journal entries wait until [`CustodyService::store_in`] opens the journal.
    pub fn will_store(&self) {
        self.act(|state, _| state.store = Storing::Awaited(Vec::new()));
    }

    /// Restores the exchanges of the journal in this directory, and writes the journal from now on.
    ///
    /// # Errors
    ///
    /// The journal cannot be opened; `WouldBlock` if another process has locked it.
    pub fn store_in(self: &Arc<Self>, directory: &Path) -> io::Result<()> {
        let opened = Store::open(directory)?;
        let reader: Arc<dyn Reader> = self.clone();
        self.act(|state, now| {
            let mut opened = opened;
            let (held, gone) = (std::mem::take(&mut opened.held), std::mem::take(&mut opened.gone));
            let store = opened.start(Arc::downgrade(&reader))?;
            if let Storing::Awaited(jobs) = std::mem::replace(&mut state.store, Storing::Journal(store)) {
                jobs.into_iter().for_each(|job| state.store.submit(job));
            }
            if !held.is_empty() {
                tracing::info!(exchanges = held.len(), "custody continues with the stored bytes");
            }
            held.into_iter().for_each(|(id, held)| state.restore(now, id, held));
            gone.into_iter().for_each(|(id, note)| state.restore_end(now, id, note));
            // Dialling tasks have waited for the journal.
            state.woken.extend(state.lines.values_mut().filter_map(|line| line.keeper.take()));
            Ok(())
        })
    }

    /// Stops the service because another process takes over: neighbours are no longer served, and waiting tasks receive
    /// an error.
    pub fn stop(&self) {
        let store = self.act(|state, _| {
            for line in state.lines.values_mut() {
                line.channel = 0;
                state.woken.extend(line.carrier.take());
            }
            let gone = Failure { status: 503, reason: Arc::from("another process of this node is taking over") };
            for end in state.ends.values_mut() {
                end.failure.get_or_insert_with(|| gone.clone());
                state.woken.extend(end.readers.iter_mut().filter_map(Option::take));
            }
            state.woken.extend(state.crowd.drain().map(|(_, waker)| waker));
            std::mem::replace(&mut state.store, Storing::Over)
        });
        // Dropping the store waits for its thread, which needs the lock.
        drop(store);
    }

    /// Stops accepting exchanges, because the journal cannot be opened.
    pub fn give_up(&self) {
        self.act(|state, _| state.store = Storing::Over);
    }

    /// Whether neighbours are served and dialled.
    pub fn is_ready(&self) -> bool {
        self.lock().is_ready()
    }

    /// Returns the state of a restored exchange. `None`: the exchange does not exist any more.
    pub fn resumed(&self, id: ExchangeId) -> Option<RestoredExchange> {
        let state = self.lock();
        Some(RestoredExchange {
            is_for_here: state.engine.is_for_here(id),
            awaits_head: state.engine.awaits_head(id),
            intent: state.intended.get(&id).copied(),
            response: state.engine.have(id, Direction::Response)?,
        })
    }

    /// Reads stored bytes of a direction again. Returns `None` if the read failed.
    pub async fn read_back(&self, id: ExchangeId, part: Direction, offset: u64, length: u64) -> Option<Bytes> {
        let (back, answer) = oneshot::channel();
        self.lock().store.submit(Job::Read { id, part, offset, length, back: Some(back) });
        answer.await.ok().flatten()
    }

    /// Ready once the intent to send the request is durable. The origin must not receive the request twice.
    pub fn poll_intent(&self, cx: &Context<'_>, id: ExchangeId) -> Poll<Result<(), Failure>> {
        self.act(|state, _| {
            state.engine.intend(id);
            let survives = state.engine.survives(id);
            if survives == Durability::Nothing || state.ends.get(&id).is_some_and(|end| end.is_intended) {
                return Poll::Ready(Ok(()));
            }
            if state.intended.insert(id, Intent::Certain) != Some(Intent::Certain) {
                let note = JournalRecord::Intent(Intent::Certain);
                state.store.submit(Job::Keep { id, note, is_synced: survives == Durability::Power });
            }
            state.wait(cx, id, Direction::Response)
        })
    }
}

impl Reader for CustodyService {
    fn are_safe(&self, safe: Vec<Safe>) {
        self.act(|state, _| {
            for safe in safe {
                match safe {
                    Safe::Upto { id, part, upto } => state.engine.is_safe(id, part, upto.offset, upto.is_whole),
                    Safe::Over(id) => state.engine.is_forgotten(id),
                    Safe::Intent(id) => {
                        if let Some(end) = state.ends.get_mut(&id) {
                            end.is_intended = true;
                            end.wake(Direction::Response, &mut state.woken);
                        }
                    }
                }
            }
        });
    }

    fn is_read(&self, id: ExchangeId, part: Direction, offset: u64, bytes: Option<Bytes>) {
        self.act(|state, _| match bytes {
            Some(bytes) => state.engine.load(id, part, offset, bytes),
            None => state.engine.is_unreadable(id, part, offset),
        });
    }

    fn is_stuck(&self, why: Option<&io::Error>) {
        self.act(|state, now| match why {
            Some(error) => {
                // A full disk fails repeatedly.
                if state.trouble.is_none_or(|said| now >= said + DISK_LOG_INTERVAL) {
                    tracing::error!(%error, "cannot write the custody journal; retrying");
                    (state.trouble, state.is_troubled) = (Some(now), true);
                }
                state.engine.set_stuck(is_full(error));
            }
            None => {
                state.engine.set_stuck(false);
                if std::mem::take(&mut state.is_troubled) {
                    tracing::info!("the custody journal is writable again");
                }
            }
        });
    }

    fn is_there(&self, bytes: u64) {
        self.act(|state, _| state.engine.set_disk(bytes));
    }
}

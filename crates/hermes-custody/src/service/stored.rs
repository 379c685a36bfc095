//! The office and its journal: what outlives this process, and what was there before it.
//!
//! In: a directory, once it is free; what its thread has written and read. Out: exchanges of before, that what was to be
//! safe is, and bytes that were read again. Never: a wait for the disk under the lock.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{ExchangeId, Part};
use tokio::sync::oneshot;

use super::super::engine::Survives;
use super::super::half::Upto;
use super::super::journal::{Intent, Note};
use super::super::store::{Job, Reader, Safe, Store, is_full};
use super::state::Storing;
use super::{Failure, Office};

/// That a disk takes nothing is said no oftener.
const SAID_AGAIN: Duration = Duration::from_secs(60);

/// An exchange of before this process, for who looks at it.
pub struct Resumed {
    /// It ends here.
    pub is_for_here: bool,
    /// It goes on, and the head of its response was not there yet.
    pub awaits_head: bool,
    /// Its request may have gone to an origin.
    pub intent: Option<Intent>,
    /// How far its response had come.
    pub response: Upto,
}

impl Office {
    /// What is held from now on is written to a journal in this directory, once it is free.
    pub fn will_store(&self) {
        self.act(|state, _| state.store = Storing::Awaited(Vec::new()));
    }

    /// Goes on with what the journal in this directory answers for, and writes it.
    ///
    /// # Errors
    /// It cannot be had: `WouldBlock`, where another process has it.
    pub fn store_in(self: &Arc<Self>, directory: &Path) -> io::Result<()> {
        let opened = Store::open(directory)?;
        let reader: Arc<dyn Reader> = self.clone();
        self.act(|state, now| {
            let mut opened = opened;
            let (held, gone) = (std::mem::take(&mut opened.held), std::mem::take(&mut opened.gone));
            let store = opened.start(Arc::downgrade(&reader))?;
            if let Storing::Awaited(jobs) = std::mem::replace(&mut state.store, Storing::Journal(store)) {
                jobs.into_iter().for_each(|job| state.store.ask(job));
            }
            if !held.is_empty() {
                tracing::info!(exchanges = held.len(), "custody goes on with what was held before");
            }
            held.into_iter().for_each(|(id, held)| state.restore(now, id, held));
            gone.into_iter().for_each(|(id, note)| state.restore_end(now, id, note));
            // Whoever dials has waited for that.
            state.woken.extend(state.lines.values_mut().filter_map(|line| line.keeper.take()));
            Ok(())
        })
    }

    /// Another process may have what is held: nobody is heard here any more, and whoever waits here hears that.
    pub fn stop(&self) {
        let store = self.act(|state, _| {
            for line in state.lines.values_mut() {
                line.channel = 0;
                state.woken.extend(line.carrier.take());
            }
            let gone =
                Failure { status: 503, reason: Arc::from("this node is being replaced by another process of it") };
            for end in state.ends.values_mut() {
                end.failure.get_or_insert_with(|| gone.clone());
                state.woken.extend(end.readers.iter_mut().filter_map(Option::take));
            }
            state.woken.extend(state.crowd.drain().map(|(_, waker)| waker));
            std::mem::replace(&mut state.store, Storing::Over)
        });
        // Waits for what is under way; not under the lock, which its thread needs.
        drop(store);
    }

    /// Its journal cannot be had: nothing is taken into custody.
    pub fn give_up(&self) {
        self.act(|state, _| state.store = Storing::Over);
    }

    /// Neighbours are heard, and dialled.
    pub fn is_ready(&self) -> bool {
        self.lock().is_ready()
    }

    /// What is to be known of an exchange of before this process.
    pub fn resumed(&self, id: ExchangeId) -> Option<Resumed> {
        let state = self.lock();
        Some(Resumed {
            is_for_here: state.engine.is_for_here(id),
            awaits_head: state.engine.awaits_head(id),
            intent: state.intended.get(&id).copied(),
            response: state.engine.have(id, Part::Response)?,
        })
    }

    /// Reads again what is safe of a half. `None`: it is not to be had.
    pub async fn read_back(&self, id: ExchangeId, part: Part, offset: u64, length: u64) -> Option<Bytes> {
        let (back, answer) = oneshot::channel();
        self.lock().store.ask(Job::Read { id, part, offset, length, back: Some(back) });
        answer.await.ok().flatten()
    }

    /// Ready when it is safe to know that the request goes to an origin that must not have it twice.
    pub fn poll_intent(&self, cx: &Context<'_>, id: ExchangeId) -> Poll<Result<(), Failure>> {
        self.act(|state, _| {
            state.engine.intend(id);
            let survives = state.engine.survives(id);
            if survives == Survives::Nothing || state.ends.get(&id).is_some_and(|end| end.is_intended) {
                return Poll::Ready(Ok(()));
            }
            if state.intended.insert(id, Intent::Certain) != Some(Intent::Certain) {
                let note = Note::Intent(Intent::Certain);
                state.store.ask(Job::Keep { id, note, is_synced: survives == Survives::Power });
            }
            state.wait(cx, id, Part::Response)
        })
    }
}

impl Reader for Office {
    fn are_safe(&self, safe: Vec<Safe>) {
        self.act(|state, _| {
            for safe in safe {
                match safe {
                    Safe::Upto { id, part, upto } => state.engine.is_safe(id, part, upto.offset, upto.is_whole),
                    Safe::Over(id) => state.engine.is_forgotten(id),
                    Safe::Intent(id) => {
                        if let Some(end) = state.ends.get_mut(&id) {
                            end.is_intended = true;
                            end.wake(Part::Response, &mut state.woken);
                        }
                    }
                }
            }
        });
    }

    fn is_read(&self, id: ExchangeId, part: Part, offset: u64, bytes: Option<Bytes>) {
        self.act(|state, _| match bytes {
            Some(bytes) => state.engine.load(id, part, offset, bytes),
            None => state.engine.is_unreadable(id, part, offset),
        });
    }

    fn is_stuck(&self, why: Option<&io::Error>) {
        self.act(|state, now| match why {
            Some(error) => {
                // A disk that is full is so again and again.
                if state.trouble.is_none_or(|said| now >= said + SAID_AGAIN) {
                    tracing::error!(%error, "the journal of custody cannot be written; trying again");
                    (state.trouble, state.is_troubled) = (Some(now), true);
                }
                state.engine.set_stuck(is_full(error));
            }
            None => {
                state.engine.set_stuck(false);
                if std::mem::take(&mut state.is_troubled) {
                    tracing::info!("the journal of custody is written again");
                }
            }
        });
    }

    fn is_there(&self, bytes: u64) {
        self.act(|state, _| state.engine.set_disk(bytes));
    }
}

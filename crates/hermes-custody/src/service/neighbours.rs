//! What channels to neighbours ask of the office.
//!
//! In: channels that begin and end, and what is said on them. Out: what is to be said next, and whether a channel is
//! wanted. Of the channels to one neighbour the last holds: what is heard on others is nobody's any more.

use std::sync::Arc;
use std::task::{Context, Poll};

use hermes_wire::custody::{ExchangeId, Record};

use super::Office;

impl Office {
    /// A channel to a neighbour begins; the one before is over. Its number, and exchanges of before this process that
    /// the neighbour began, for the caller to look at.
    pub fn open(&self, peer: &Arc<str>) -> (u64, Vec<ExchangeId>) {
        self.act(|state, _| {
            state.channels += 1;
            let number = state.channels;
            let line = state.lines.entry(peer.clone()).or_default();
            line.channel = number;
            state.woken.extend(line.carrier.take());
            state.engine.opened(peer);
            (number, state.resumed.remove(peer).unwrap_or_default())
        })
    }

    /// A channel is over.
    pub fn close(&self, peer: &Arc<str>, channel: u64) {
        self.act(|state, _| {
            if state.is_last(peer, channel) {
                state.engine.closed(peer);
                // Whom nobody dials is known by a name of its own choice.
                state.lines.retain(|name, line| name != peer || line.keeper.is_some());
            }
        });
    }

    /// A neighbour says this. The exchanges that it began with it are the caller's to look at.
    pub fn hear(&self, peer: &Arc<str>, channel: u64, record: Record) -> Vec<ExchangeId> {
        let begun = self.act(|state, now| {
            if state.is_last(peer, channel) {
                state.engine.hear(now, peer, record, &self.arrivals);
            }
            state.settle(now);
            std::mem::take(&mut state.begun)
        });
        begun.into_iter().map(|(id, _)| id).collect()
    }

    /// What a neighbour is to hear next; `None` where another channel has taken its place. `window`: so much may be under
    /// way to it, where that is known better than by what it says to hold.
    pub fn poll_record(
        &self,
        cx: &Context<'_>,
        peer: &Arc<str>,
        channel: u64,
        window: Option<u64>,
    ) -> Poll<Option<Record>> {
        self.act(|state, now| {
            if !state.is_last(peer, channel) {
                return Poll::Ready(None);
            }
            match state.engine.next_record(now, peer, window) {
                Some(record) => Poll::Ready(Some(record)),
                None => {
                    if let Some(line) = state.lines.get_mut(peer) {
                        line.carrier = Some(cx.waker().clone());
                    }
                    Poll::Pending
                }
            }
        })
    }

    /// There is none to this neighbour, for this reason.
    pub fn is_troubled(&self, peer: &str, why: &str) {
        self.lock().engine.is_troubled(peer, why);
    }

    /// Whether a channel to this neighbour is wanted now.
    pub fn is_wanted(&self, peer: &Arc<str>) -> bool {
        self.lock().engine.wants(peer)
    }

    /// Exchanges that have something to say to this neighbour, or to hear of it.
    pub fn waiting(&self, peer: &Arc<str>) -> usize {
        self.lock().engine.waiting(peer)
    }

    /// Ready when a channel to this neighbour is wanted.
    pub fn poll_wanted(&self, cx: &Context<'_>, peer: &Arc<str>) -> Poll<()> {
        let mut state = self.lock();
        if state.engine.wants(peer) && state.is_ready() {
            return Poll::Ready(());
        }
        state.lines.entry(peer.clone()).or_default().keeper = Some(cx.waker().clone());
        Poll::Pending
    }
}

//! Custody for channels to neighbours.
//!
//! In: channels that open and close, and the records that they receive. Out: records to send, and whether a channel is
//! wanted. Only the latest channel to a neighbour counts; records on older ones are ignored.

use std::sync::Arc;
use std::task::{Context, Poll};

use hermes_wire::custody::{ExchangeId, Record};

use super::CustodyService;

impl CustodyService {
    /// Opens a channel to a neighbour and replaces the previous one. Returns the channel's number and the restored
    /// exchanges that the neighbour began, which the caller must resume.
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

    /// Closes a channel.
    pub fn close(&self, peer: &Arc<str>, channel: u64) {
        self.act(|state, _| {
            if state.is_last(peer, channel) {
                state.engine.closed(peer);
                // A neighbour that this node does not dial chose its own name, so its entry is removed.
                state.lines.retain(|name, line| name != peer || line.keeper.is_some());
            }
        });
    }

    /// Handles a record of a neighbour. Returns the exchanges that it began, which the caller must route.
    pub fn receive(&self, peer: &Arc<str>, channel: u64, record: Record) -> Vec<ExchangeId> {
        let begun = self.act(|state, now| {
            if state.is_last(peer, channel) {
                state.engine.receive(now, peer, record, &self.arrivals);
            }
            state.settle(now);
            std::mem::take(&mut state.begun)
        });
        begun.into_iter().map(|(id, _)| id).collect()
    }

    /// Returns the next record for a neighbour. `None` once another channel has replaced this one. `window` limits the
    /// bytes in flight, if the caller knows the path's capacity better than the acknowledgements show.
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

    /// Records the reason why there is no channel to this neighbour.
    pub fn is_troubled(&self, peer: &str, why: &str) {
        self.lock().engine.is_troubled(peer, why);
    }

    /// Whether a channel to this neighbour is wanted now.
    pub fn is_wanted(&self, peer: &Arc<str>) -> bool {
        self.lock().engine.wants(peer)
    }

    /// Returns the number of exchanges in which this neighbour takes part.
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

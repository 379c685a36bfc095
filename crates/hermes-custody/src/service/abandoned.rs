//! Exchanges whose client is gone, and may come back and ask the same.
//!
//! In: what a client had asked that went before its response was over, and what clients ask now. Out: the exchange that
//! one goes on with. At most so many are kept, and none where their room is needed for who waits.

use std::sync::Arc;

use bytes::Bytes;
use hermes_wire::custody::{ExchangeId, Part};

use super::Office;
use super::state::{End, State, Storing};

/// Responses that are kept for clients that are gone.
pub(super) const MOST_LEFT: usize = 256;

impl Office {
    /// Its client is gone, and may come back and ask the same. Until its deadline it goes on.
    pub fn leave(&self, id: ExchangeId, asked: Bytes) {
        self.act(|state, _| {
            state.ends.remove(&id);
            match state.engine.have(id, Part::Request) {
                Some(request) if request.is_whole => state.left.push_back((asked, id)),
                // Nobody brings the rest of it.
                Some(_) => state.engine.fail(id, 499, "its client is gone"),
                None => {}
            }
            if state.left.len() > MOST_LEFT
                && let Some((_, oldest)) = state.left.pop_front()
            {
                state.engine.fail(oldest, 499, "its client is gone");
            }
        });
    }

    /// An exchange whose client is gone and that had asked this: it is the caller's from now on, who reads its response
    /// from the beginning.
    pub fn join(&self, asked: &Bytes) -> Option<ExchangeId> {
        self.act(|state, _| {
            if matches!(state.store, Storing::Over) {
                return None;
            }
            let place = state.left.iter().position(|(other, _)| other == asked)?;
            let (_, id) = state.left.remove(place)?;
            if !state.engine.reopen(id) {
                state.engine.fail(id, 499, "its client is gone");
                return None;
            }
            state.ends.insert(id, End::default());
            Some(id)
        })
    }
}

impl State {
    /// The oldest response whose client is gone, of those on this account, comes to nothing.
    pub(super) fn leave_for_good(&mut self, account: &Arc<str>) {
        let is_its = |(_, id): &(Bytes, ExchangeId)| self.engine.account(*id) == Some(account);
        if let Some((_, id)) = self.left.iter().position(is_its).and_then(|place| self.left.remove(place)) {
            self.engine.fail(id, 499, "its client is gone");
        }
    }
}

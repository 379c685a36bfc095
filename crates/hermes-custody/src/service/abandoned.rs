//! Exchanges whose client has disconnected, and may repeat its request.
//!
//! In: requests of clients that disconnected before the end of the response, and requests of present clients. Out: the
//! exchange that a repeated request joins. The number of these exchanges is limited, and they fail if exchanges with a
//! client need the room.

use std::sync::Arc;

use bytes::Bytes;
use hermes_wire::custody::{Direction, ExchangeId};

use super::CustodyService;
use super::state::{End, State, Storing};

/// Maximum number of exchanges that wait for their clients to return.
pub(super) const MAX_ABANDONED_RESPONSES: usize = 256;

impl CustodyService {
    /// Marks an exchange whose client has disconnected and may repeat its request. The exchange continues until its
    /// deadline.
    pub fn leave(&self, id: ExchangeId, asked: Bytes) {
        self.act(|state, _| {
            state.ends.remove(&id);
            match state.engine.have(id, Direction::Request) {
                Some(request) if request.is_whole => state.left.push_back((asked, id)),
                // A request without its end can never complete.
                Some(_) => state.engine.fail(id, 499, "the client has disconnected"),
                None => {}
            }
            if state.left.len() > MAX_ABANDONED_RESPONSES
                && let Some((_, oldest)) = state.left.pop_front()
            {
                state.engine.fail(oldest, 499, "the client has disconnected");
            }
        });
    }

    /// Finds an exchange whose disconnected client had sent the same request. The caller owns it from now on, and reads
    /// its response from the beginning.
    pub fn join(&self, asked: &Bytes) -> Option<ExchangeId> {
        self.act(|state, _| {
            if matches!(state.store, Storing::Over) {
                return None;
            }
            let place = state.left.iter().position(|(other, _)| other == asked)?;
            let (_, id) = state.left.remove(place)?;
            if !state.engine.reopen(id) {
                state.engine.fail(id, 499, "the client has disconnected");
                return None;
            }
            state.ends.insert(id, End::default());
            Some(id)
        })
    }
}

impl State {
    /// Fails the oldest exchange of this account whose client has disconnected.
    pub(super) fn leave_for_good(&mut self, account: &Arc<str>) {
        let is_its = |(_, id): &(Bytes, ExchangeId)| self.engine.account(*id) == Some(account);
        if let Some((_, id)) = self.left.iter().position(is_its).and_then(|place| self.left.remove(place)) {
            self.engine.fail(id, 499, "the client has disconnected");
        }
    }
}

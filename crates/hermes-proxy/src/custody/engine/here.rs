//! Clients and origins that are here: they bring bytes of one half, and read the other.
//!
//! In: bytes as they come, and who asks for more. Out: bytes as they stand in their string; what is read counts as held.

use bytes::Bytes;
use hermes_wire::custody::{ExchangeId, Part};

use super::super::half::{Next, Upto};
use super::index::Account;
use super::{Appended, Engine, Side};

/// While there is a channel to the next one, no more is taken of who is here than this beyond what was sent: what is brought
/// faster than the path takes it would cost time that its sending needs, and room. Where the path is dark, all is taken
/// that there is room for.
pub(super) const AHEAD: u64 = 1 << 20;

impl Engine {
    /// Bytes of a client or an origin that is here. What is not taken is to be brought again.
    pub(crate) fn append(&mut self, id: ExchangeId, part: Part, bytes: Bytes, is_last: bool) -> Appended {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return Appended::Gone };
        if exchange.source(part) != Some(&Side::Here) {
            return Appended::Gone;
        }
        let at = exchange.half(part).have().offset;
        if let Some(account) = self.accounts.get_mut(&exchange.account)
            && !account.takes(bytes.len())
        {
            account.has_refused = true;
            return Appended::Full;
        }
        if self.is_ahead(id, part, AHEAD) {
            if let Some(exchange) = self.exchanges.get_mut(&id) {
                exchange.indexed[part.index()].is_held_up = true;
            }
            return Appended::Full;
        }
        let Some(exchange) = self.exchanges.get_mut(&id) else { return Appended::Gone };
        // Who begins anew behind us, after us, must not find another head.
        if part == Part::Response {
            exchange.response.send_what_is_safe();
        }
        self.take(id, part, at, bytes, is_last);
        Appended::Taken
    }

    /// Who is here has brought that much more than was sent, to a neighbour that there is a channel to.
    pub(super) fn is_ahead(&self, id: ExchangeId, part: Part, bytes: u64) -> bool {
        let Some(exchange) = self.exchanges.get(&id) else { return false };
        let is_open = exchange.sink(part).and_then(Side::peer).and_then(|peer| self.peers.get(peer));
        let half = exchange.half_of(part);
        is_open.is_some_and(|peer| peer.is_open) && half.have().offset - half.sent() > bytes
    }

    /// The next bytes for who is here, at most so many; `None` where there are none yet.
    pub(crate) fn read(&mut self, id: ExchangeId, part: Part, most: usize) -> Option<(Bytes, bool)> {
        let exchange = self.exchanges.get_mut(&id).filter(|exchange| exchange.sink(part) == Some(&Side::Here))?;
        let half = exchange.half(part);
        let read = match half.send(most) {
            Some(Next::Bytes { offset, bytes, is_last }) => {
                half.set_held(Upto { offset: offset + bytes.len() as u64, is_whole: is_last });
                Some((bytes, is_last))
            }
            Some(Next::Away { offset, length }) => {
                self.have_read(id, part, offset, length);
                None
            }
            None => None,
        };
        if read.is_none()
            && let Some(exchange) = self.exchanges.get_mut(&id)
        {
            exchange.indexed[part.index()].is_ready_told = false;
        }
        self.reindex(id);
        self.end_if_over(id);
        read
    }

    /// Another one who is here reads a response anew. False where what was read of it is gone, or it is over.
    pub(crate) fn reopen(&mut self, id: ExchangeId) -> bool {
        let Some(exchange) = self.exchanges.get_mut(&id).filter(|exchange| exchange.from == Side::Here) else {
            return false;
        };
        let is_on_disk = self.accounts.get(&exchange.account).is_some_and(Account::is_on_disk);
        let is_there = exchange.response.reopen(is_on_disk);
        exchange.indexed[Part::Response.index()].is_ready_told = false;
        self.reindex(id);
        is_there
    }
}

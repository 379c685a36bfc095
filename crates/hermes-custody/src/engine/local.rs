//! Clients and origins that are here: they bring bytes of one half, and read the other.
//!
//! In: bytes as they come, and who asks for more. Out: bytes as they stand in their string; what is read counts as held.

use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{ExchangeId, Part};

use super::super::half::{Next, Upto};
use super::{Appended, Engine, Exchange, Output, PARTS, Side};

/// While there is a channel to the next one, no more is taken of who is here than this beyond what was sent: what is brought
/// faster than the path takes it would cost time that its sending needs, and room.
const AHEAD: u64 = 1 << 20;
/// Nobody waits longer for the path to take of that: it is slow, or dark, and all is taken that there is room for. An origin
/// may not have patience.
const LONG: Duration = Duration::from_secs(1);

/// Who is here has brought that much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeldUp {
    /// It waits, since then; `None`: nobody has looked at a clock yet.
    Waits(Option<Duration>),
    /// It has waited for long enough.
    GoesOn,
}

impl Engine {
    /// Bytes of a client or an origin that is here. What is not taken is to be brought again.
    pub(crate) fn append(&mut self, id: ExchangeId, part: Part, bytes: Bytes, is_last: bool) -> Appended {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return Appended::Gone };
        if exchange.source(part) != Some(&Side::Here) {
            return Appended::Gone;
        }
        let at = exchange.half(part).have().offset;
        if let Some(account) = self.accounts.get_mut(&exchange.account)
            && !account.takes(bytes.len(), part, &exchange.indexed[part.index()])
        {
            (account.has_refused, exchange.is_refused) = (true, true);
            return Appended::Full;
        }
        if self.is_ahead(id, part, AHEAD)
            && *self.held_up.entry((id, part)).or_insert(HeldUp::Waits(None)) != HeldUp::GoesOn
        {
            return Appended::Ahead;
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
    fn is_ahead(&self, id: ExchangeId, part: Part, bytes: u64) -> bool {
        let Some(exchange) = self.exchanges.get(&id) else { return false };
        let is_open = exchange.sink(part).and_then(Side::peer).and_then(|peer| self.peers.get(peer));
        let half = exchange.half_of(part);
        is_open.is_some_and(|peer| peer.is_open) && half.have().offset - half.sent() > bytes
    }

    /// Whoever waits for its path goes on once that has taken half of what there was, or is gone.
    pub(super) fn let_on(&mut self, id: ExchangeId) {
        if self.held_up.is_empty() {
            return;
        }
        for part in PARTS {
            if !self.is_ahead(id, part, AHEAD / 2)
                && let Some(HeldUp::Waits(_)) = self.held_up.remove(&(id, part))
            {
                self.out.push_back(Output::Onward { id });
            }
        }
    }

    /// Whoever has waited for long goes on.
    pub(super) fn let_on_late(&mut self, now: Duration) {
        for ((id, _), state) in &mut self.held_up {
            match *state {
                HeldUp::Waits(None) => *state = HeldUp::Waits(Some(now)),
                HeldUp::Waits(Some(since)) if now >= since + LONG => {
                    *state = HeldUp::GoesOn;
                    self.out.push_back(Output::Onward { id: *id });
                }
                HeldUp::Waits(_) | HeldUp::GoesOn => {}
            }
        }
    }

    /// The next bytes for who is here, at most so many; `None` where there are none yet.
    pub(crate) fn read(&mut self, id: ExchangeId, part: Part, most: usize) -> Option<(Bytes, bool)> {
        let is_here = |exchange: &&mut Exchange| exchange.sink(part) == Some(&Side::Here) && exchange.may_go_on(part);
        let exchange = self.exchanges.get_mut(&id).filter(is_here)?;
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
        let is_on_disk = exchange.is_on_disk();
        let is_there = exchange.response.reopen(is_on_disk);
        exchange.indexed[Part::Response.index()].is_ready_told = false;
        self.reindex(id);
        is_there
    }
}

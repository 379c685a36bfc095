//! Clients and origins at this node: they write one direction of an exchange and read the other.
//!
//! In: bytes as they arrive, and requests to read. Out: bytes in stream order. Bytes that were read count as
//! acknowledged.

use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{Direction, ExchangeId};

use super::super::stream_state::{Next, Progress};
use super::{Appended, Engine, Exchange, Output, PARTS, Side};

/// Maximum number of unsent bytes of a local producer while the next node has a channel. Data that arrives faster than
/// the path accepts it would use storage, and CPU time that sending needs.
const MAX_UNSENT_BYTES: u64 = 1 << 20;
/// Maximum wait of a producer for its path. After it the path counts as slow or down, and everything that fits is
/// accepted, because an origin may time out.
const LONG: Duration = Duration::from_secs(1);

/// A local producer that is ahead of its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeldUp {
    /// Waiting, since this time; `None` until the first sweep sees it.
    Waits(Option<Duration>),
    /// Has waited long enough and may continue.
    GoesOn,
}

impl Engine {
    /// Accepts bytes of a local client or origin. The caller keeps bytes that are not accepted, and retries.
    pub(crate) fn append(&mut self, id: ExchangeId, part: Direction, bytes: Bytes, is_last: bool) -> Appended {
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
        if self.is_ahead(id, part, MAX_UNSENT_BYTES)
            && *self.held_up.entry((id, part)).or_insert(HeldUp::Waits(None)) != HeldUp::GoesOn
        {
            return Appended::Ahead;
        }
        let Some(exchange) = self.exchanges.get_mut(&id) else { return Appended::Gone };
        // If this node restarts and sends the request again, the reader must not receive a different head.
        if part == Direction::Response {
            exchange.response.send_durable_only();
        }
        self.take(id, part, at, bytes, is_last);
        Appended::Taken
    }

    /// Whether a local producer is more than `bytes` ahead of what was sent over an open channel.
    fn is_ahead(&self, id: ExchangeId, part: Direction, bytes: u64) -> bool {
        let Some(exchange) = self.exchanges.get(&id) else { return false };
        let is_open = exchange.sink(part).and_then(Side::peer).and_then(|peer| self.peers.get(peer));
        let half = exchange.half_of(part);
        is_open.is_some_and(|peer| peer.is_open) && half.have().offset - half.sent() > bytes
    }

    /// Resumes a producer once its path has taken half of the surplus, or the channel is closed.
    pub(super) fn let_on(&mut self, id: ExchangeId) {
        if self.held_up.is_empty() {
            return;
        }
        for part in PARTS {
            if !self.is_ahead(id, part, MAX_UNSENT_BYTES / 2)
                && let Some(HeldUp::Waits(_)) = self.held_up.remove(&(id, part))
            {
                self.out.push_back(Output::Onward { id });
            }
        }
    }

    /// Resumes producers that have waited for the maximum time.
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

    /// Returns up to `most` bytes for a local reader, and whether they are the last. `None`: there are none yet.
    pub(crate) fn read(&mut self, id: ExchangeId, part: Direction, most: usize) -> Option<(Bytes, bool)> {
        let is_here = |exchange: &&mut Exchange| exchange.sink(part) == Some(&Side::Here) && exchange.may_go_on(part);
        let exchange = self.exchanges.get_mut(&id).filter(is_here)?;
        let half = exchange.half(part);
        let read = match half.send(most) {
            Some(Next::Bytes { offset, bytes, is_last }) => {
                half.set_held(Progress { offset: offset + bytes.len() as u64, is_whole: is_last });
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

    /// Lets another local client read a response from the beginning. Returns false if bytes of the response were
    /// deleted, or if the exchange has ended.
    pub(crate) fn reopen(&mut self, id: ExchangeId) -> bool {
        let Some(exchange) = self.exchanges.get_mut(&id).filter(|exchange| exchange.from == Side::Here) else {
            return false;
        };
        let is_on_disk = exchange.is_on_disk();
        let is_there = exchange.response.reopen(is_on_disk);
        exchange.indexed[Direction::Response.index()].is_ready_told = false;
        self.reindex(id);
        is_there
    }
}

//! What is asked of the disk, and what it answers.
//!
//! In: what is written by now, and what was read again. Out: what is to be read. Where memory is scarce, what is safe
//! leaves it.

use bytes::Bytes;
use hermes_wire::custody::{ExchangeId, Part, Record};

use super::super::half::Upto;
use super::quota::Account;
use super::{CHUNK, Engine, Output};

/// Bytes that are read from disk at once.
const LOAD: u64 = 256 << 10;

impl Engine {
    /// Has so many bytes of a half read that are on disk: where memory is scarce, no more than is sent next.
    pub(super) fn have_read(&mut self, id: ExchangeId, part: Part, offset: u64, length: u64) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        let is_tight = self.accounts.get(&exchange.account).is_some_and(Account::is_tight);
        let length = length.min(if is_tight { CHUNK as u64 } else { LOAD });
        exchange.half(part).ask(length);
        self.out.push_back(Output::Read { id, part, offset, length });
    }

    /// So much of a half survives this process.
    pub(crate) fn is_safe(&mut self, id: ExchangeId, part: Part, offset: u64, is_whole: bool) {
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            let is_tight = self.accounts.get(&exchange.account).is_some_and(Account::is_tight);
            let is_on_disk = exchange.is_on_disk();
            let half = exchange.half(part);
            half.set_safe(Upto { offset, is_whole });
            if is_tight && is_on_disk {
                half.evict();
            }
            self.reindex(id);
        }
    }

    /// That it is over is written.
    pub(crate) fn is_forgotten(&mut self, id: ExchangeId) {
        if let Some(peer) = self.farewells.remove(&id) {
            self.say(&peer, Record::Done { id });
        }
    }

    /// What was to be read is not to be had: it is on its way out, unless the next one has it by now.
    pub(crate) fn is_unreadable(&mut self, id: ExchangeId, part: Part, offset: u64) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        if exchange.half(part).held().offset > offset {
            return self.load(id, part, offset, Bytes::new());
        }
        self.fail(id, 500, "what was held of it cannot be read again");
    }

    /// What was to be read.
    pub(crate) fn load(&mut self, id: ExchangeId, part: Part, offset: u64, bytes: Bytes) {
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            exchange.half(part).load(offset, bytes);
            self.reindex(id);
        }
    }
}

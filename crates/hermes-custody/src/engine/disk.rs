//! Reads from the disk, and the engine's reaction to what became durable.
//!
//! In: offsets that are durable, and bytes read back. Out: read requests. If memory is scarce, durable bytes leave it.

use bytes::Bytes;
use hermes_wire::custody::{Direction, ExchangeId, Record};

use super::super::stream_state::Progress;
use super::quota::Account;
use super::{CHUNK, Engine, Output};

/// Maximum number of bytes of one read.
const LOAD: u64 = 256 << 10;

impl Engine {
    /// Requests a read of stored bytes. If memory is scarce, the read covers only the next record.
    pub(super) fn have_read(&mut self, id: ExchangeId, part: Direction, offset: u64, length: u64) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        let is_tight = self.accounts.get(&exchange.account).is_some_and(Account::is_tight);
        let length = length.min(if is_tight { CHUNK as u64 } else { LOAD });
        exchange.half(part).request_read(length);
        self.out.push_back(Output::Read { id, part, offset, length });
    }

    /// Reports that a direction is durable up to this offset.
    pub(crate) fn is_safe(&mut self, id: ExchangeId, part: Direction, offset: u64, is_whole: bool) {
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            let is_tight = self.accounts.get(&exchange.account).is_some_and(Account::is_tight);
            let is_on_disk = exchange.is_on_disk();
            let half = exchange.half(part);
            half.set_safe(Progress { offset, is_whole });
            if is_tight && is_on_disk {
                half.evict();
            }
            self.reindex(id);
        }
    }

    /// Reports that the end of an exchange is durable. A neighbour that waits for that may now forget the exchange.
    pub(crate) fn is_forgotten(&mut self, id: ExchangeId) {
        if let Some(peer) = self.farewells.remove(&id) {
            self.queue_record(&peer, Record::Done { id });
        }
    }

    /// Reports a failed read. The exchange fails, unless the next node has acknowledged these bytes meanwhile.
    pub(crate) fn is_unreadable(&mut self, id: ExchangeId, part: Direction, offset: u64) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        if exchange.half(part).held().offset > offset {
            return self.load(id, part, offset, Bytes::new());
        }
        self.fail(id, 500, "cannot read the stored bytes of the exchange");
    }

    /// Delivers bytes that were read from disk.
    pub(crate) fn load(&mut self, id: ExchangeId, part: Direction, offset: u64, bytes: Bytes) {
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            exchange.half(part).load(offset, bytes);
            self.reindex(id);
        }
    }
}

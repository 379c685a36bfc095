//! Memory that requests in flight hold on a worker: heads, and the fixed cost of each request.
//!
//! In: sessions that begin and end, and the heads of their requests and responses. Out: a sum. Beyond
//! `limits.request-memory`, sessions of the client that holds most end, starting with those that were silent for
//! longest. An HTTP/2 client pays one byte for a field that costs a hundred here, and may leave its response unread. So
//! neither streams nor bytes on the wire bound this memory. Never: a byte of a body; `limits.receive-buffer` covers those.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use hermes_model::facts::{Facts, Kind, Trust};
use hermes_net::client_address::network;
use http::HeaderMap;

use super::{SessionEntry, SessionTables};
use crate::error::Error;
use crate::runtime::WorkerContext;

/// The overhead of a line of a head, in two tables: the received and the forwarded head.
const LINE_OVERHEAD_BYTES: u64 = 224;
/// Names and values are in a read buffer and again in a write buffer; both grow by doubling.
const BUFFERED_COPIES: u64 = 4;
/// A stream without its head: its state in the node and in h2 or quinn, and its share of a read buffer.
const STREAM_OVERHEAD_BYTES: u64 = 8 << 10;
/// The part of the limit that is freed when sessions are ended, so that the next session does not end others at once.
const FREED_SHARE: u64 = 8;

/// The bytes that a session is charged for.
#[derive(Default)]
pub(super) struct Charge {
    bytes: Cell<u64>,
    /// The session has begun and not ended. Otherwise no drop would release the bytes.
    is_counted: Cell<bool>,
}

/// The holder of the memory.
#[derive(PartialEq, Eq, Hash)]
enum Holder {
    User(Arc<str>),
    Client(IpAddr),
}

impl Holder {
    fn of(facts: &Facts) -> Self {
        match &facts.user {
            Some(user) => Holder::User(user.clone()),
            None => Holder::Client(network(facts.source.ip())),
        }
    }
}

/// The cost of a head.
fn of_head(headers: &HeaderMap) -> u64 {
    headers
        .iter()
        .map(|(name, value)| LINE_OVERHEAD_BYTES + BUFFERED_COPIES * (name.as_str().len() + value.len()) as u64)
        .sum()
}

/// The cost of a request. Tunnels, flows and HTTP/1.1 connections have limits of their own, and a node forwards
/// requests of many clients: for these only the head counts.
fn of_request(facts: &Facts, is_only_one: bool) -> u64 {
    let is_of_many = match &facts.trust {
        Trust::Certified(peer) => peer.standalone,
        Trust::Address => true,
        Trust::Anonymous => false,
    };
    let is_stream = facts.kind == Kind::Http && !is_only_one && !is_of_many;
    let stream = if is_stream { STREAM_OVERHEAD_BYTES } else { 0 };
    stream + of_head(&facts.headers) + facts.path.as_str().len() as u64
}

impl SessionEntry {
    /// Charges the session for its request.
    pub(super) fn hold_request(&self, worker: &WorkerContext) {
        let is_only_one = self.connection.as_ref().is_some_and(|connection| !connection.is_shared.get());
        self.charge.is_counted.set(true);
        self.hold(worker, of_request(&self.facts, is_only_one));
    }

    /// Charges the session for another head: that of its response, or trailers.
    pub fn hold_head(&self, worker: &WorkerContext, headers: &HeaderMap) {
        self.hold(worker, of_head(headers));
        if let Some(connection) = &self.connection {
            connection.lines.set(connection.lines.get() + headers.len());
        }
    }

    /// Charges the session for more bytes.
    pub fn hold(&self, worker: &WorkerContext, bytes: u64) {
        if self.charge.is_counted.get() {
            let tables = &worker.tables;
            self.charge.bytes.set(self.charge.bytes.get() + bytes);
            tables.request_memory.set(tables.request_memory.get() + bytes);
        }
    }

    /// Charges bytes of an optional use. False: requests in flight hold half of the limit, and these bytes are not
    /// charged.
    pub fn may_hold(&self, worker: &WorkerContext, bytes: u64) -> bool {
        let tables = &worker.tables;
        let has_room = tables.request_memory.get() + bytes <= tables.request_limit.get() / 2;
        if has_room {
            self.hold(worker, bytes);
        }
        has_room
    }

    /// Releases charged bytes.
    pub fn release(&self, worker: &WorkerContext, bytes: u64) {
        let released = bytes.min(self.charge.bytes.get());
        self.charge.bytes.set(self.charge.bytes.get() - released);
        let tables = &worker.tables;
        tables.request_memory.set(tables.request_memory.get() - released);
    }

    /// Releases all bytes and charges none from now on.
    pub(super) fn release_all(&self, tables: &SessionTables) {
        self.charge.is_counted.set(false);
        tables.request_memory.set(tables.request_memory.get() - self.charge.bytes.take());
    }
}

impl SessionTables {
    /// Ends sessions while all of them together hold more than the limit.
    pub(super) fn bound_request_memory(&self, worker: &WorkerContext) {
        if self.request_memory.get() <= self.request_limit.get() {
            return;
        }
        let limit = worker.snapshot().limits.request_memory as u64;
        self.request_limit.set(limit);
        if self.request_memory.get() <= limit {
            return;
        }
        let sessions = self.sessions.borrow();
        let mut holding: Vec<&Rc<SessionEntry>> =
            sessions.iter().map(|(_, entry)| entry).filter(|entry| entry.charge.bytes.get() > 0).collect();
        let mut holders: HashMap<Holder, u64> = HashMap::new();
        for entry in &holding {
            *holders.entry(Holder::of(&entry.facts)).or_default() += entry.charge.bytes.get();
        }
        // A peer without a user forwards requests of many clients. Unknown clients, who may have many addresses, end
        // first.
        holding.sort_by_cached_key(|entry| {
            let is_peer = entry.facts.user.is_none() && entry.facts.trust.is_believed();
            let held = holders.get(&Holder::of(&entry.facts)).copied();
            (is_peer, Reverse(held), entry.touched.get(), entry.id)
        });
        for entry in holding {
            if self.request_memory.get() <= limit - limit / FREED_SHARE {
                break;
            }
            worker.shared.metrics.limit("request-memory");
            // The memory is freed at the next turn of the session's task.
            entry.release_all(self);
            entry.end_for_good(Error::Limit("memory of requests under way"));
        }
    }
}

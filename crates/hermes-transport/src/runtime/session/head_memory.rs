//! Bounds the memory that requests in flight occupy on a worker: heads, and the fixed cost of each request.
//!
//! In: sessions that begin and end, and the heads of their requests and responses. Out: the sum of their memory. If it
//! exceeds `limits.request-memory`, sessions end: those of the client with the most memory first, and among them the
//! longest silent. With HPACK, a field of one byte on the wire may occupy a hundred bytes of memory, and the client may
//! leave its response unread. So neither the number of streams nor the bytes on the wire bound this memory. Never:
//! unread bytes of a body, which `limits.receive-buffer` bounds.

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

/// The overhead of a header line in two header maps: that of the received head and that of the forwarded head.
const LINE_OVERHEAD_BYTES: u64 = 224;
/// The factor by which names and values are counted. They are in a read buffer and a write buffer, and the capacity of
/// each may be twice its length.
const BUFFERED_COPIES: u64 = 4;
/// The memory of a stream without its head: its state in the node and in h2 or quinn, and its part of a read buffer.
const STREAM_OVERHEAD_BYTES: u64 = 8 << 10;
/// The divisor of the limit that gives the memory freed when sessions are ended, so that the next session does not end
/// others at once.
const FREED_SHARE: u64 = 8;

/// The number of bytes that a session is charged for.
#[derive(Default)]
pub(super) struct Charge {
    bytes: Cell<u64>,
    /// True from the beginning of the session to its end. Before and after, nothing is charged, because nothing would
    /// release it.
    is_counted: Cell<bool>,
}

/// The user or client to which the memory of a session is counted.
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

/// Returns the memory of a head in bytes.
fn of_head(headers: &HeaderMap) -> u64 {
    headers
        .iter()
        .map(|(name, value)| LINE_OVERHEAD_BYTES + BUFFERED_COPIES * (name.as_str().len() + value.len()) as u64)
        .sum()
}

/// Returns the memory of a request in bytes.
fn of_request(facts: &Facts, is_only_one: bool) -> u64 {
    of_stream(facts, is_only_one) + of_head(&facts.headers) + facts.path.as_str().len() as u64
}

/// Returns the memory of a request's stream without its head. Tunnels, flows and HTTP/1.1 connections have limits of their
/// own, and a node forwards requests of many clients. For all of these, only the head is counted.
fn of_stream(facts: &Facts, is_only_one: bool) -> u64 {
    let is_of_many = match &facts.trust {
        Trust::Certified(peer) => peer.standalone,
        Trust::Address => true,
        Trust::Anonymous => false,
    };
    let is_stream = facts.kind == Kind::Http && !is_only_one && !is_of_many;
    if is_stream { STREAM_OVERHEAD_BYTES } else { 0 }
}

impl SessionEntry {
    /// Charges the session for its request, and begins to count its memory.
    pub(super) fn hold_request(&self, worker: &WorkerContext) {
        let is_only_one = self.connection.as_ref().is_some_and(|connection| !connection.is_shared.get());
        self.charge.is_counted.set(true);
        self.hold(worker, of_request(&self.facts, is_only_one));
    }

    /// Charges the session for the head of its response, or for trailers.
    pub fn hold_head(&self, worker: &WorkerContext, headers: &HeaderMap) {
        self.hold(worker, of_head(headers));
        if let Some(connection) = &self.connection {
            connection.lines.set(connection.lines.get() + headers.len());
        }
    }

    /// Charges the session for further bytes.
    pub fn hold(&self, worker: &WorkerContext, bytes: u64) {
        if self.charge.is_counted.get() {
            let tables = &worker.tables;
            self.charge.bytes.set(self.charge.bytes.get() + bytes);
            tables.request_memory.set(tables.request_memory.get() + bytes);
        }
    }

    /// Charges the session for bytes that it can do without. Returns false, without a charge, if the requests in flight
    /// would then occupy more than half of the limit.
    pub fn may_hold(&self, worker: &WorkerContext, bytes: u64) -> bool {
        let tables = &worker.tables;
        let has_room = tables.request_memory.get() + bytes <= tables.request_limit.get() / 2;
        if has_room {
            self.hold(worker, bytes);
        }
        has_room
    }

    /// The session has become a subscription, of which the relay bounds the number. From now on, it is charged for its heads
    /// alone, as tunnels are.
    pub fn release_stream(&self, worker: &WorkerContext) {
        let is_only_one = self.connection.as_ref().is_some_and(|connection| !connection.is_shared.get());
        self.release(worker, of_stream(&self.facts, is_only_one));
    }

    /// Releases bytes that the session was charged for.
    pub fn release(&self, worker: &WorkerContext, bytes: u64) {
        let released = bytes.min(self.charge.bytes.get());
        self.charge.bytes.set(self.charge.bytes.get() - released);
        let tables = &worker.tables;
        tables.request_memory.set(tables.request_memory.get() - released);
    }

    /// Releases all charged bytes. From now on, the session is not charged.
    pub(super) fn release_all(&self, tables: &SessionTables) {
        self.charge.is_counted.set(false);
        tables.request_memory.set(tables.request_memory.get() - self.charge.bytes.take());
    }
}

impl SessionTables {
    /// Ends sessions if all of them together occupy more memory than the limit.
    pub(super) fn bound_request_memory(&self, worker: &WorkerContext) {
        if self.request_memory.get() <= self.request_limit.get() {
            return;
        }
        let limit = worker.overload.bound(worker.snapshot().limits.request_memory) as u64;
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
        // A peer without a user forwards requests of many clients, so its sessions end last. Sessions of clients
        // without trust end first, because such a client may have many addresses.
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
            // The memory is freed when the session's task runs next.
            entry.release_all(self);
            entry.end_for_good(Error::Limit("memory of requests"));
        }
    }
}

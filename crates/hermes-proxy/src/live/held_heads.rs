//! Memory that the requests of a worker hold while they are under way: heads, and what each of them costs beside.
//!
//! In: sessions that begin and end, and the heads of their requests and answers. Out: a sum; beyond
//! `limits.request-memory` those sessions end that moved nothing for the longest, of whoever holds most. A client of
//! HTTP/2 pays a byte for a field of a head that costs a hundred here, and keeps its answer waiting as long as it
//! likes, so that neither streams nor bytes on the wire bound this. Never: a byte of a body; `limits.unread` is for
//! those.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use hermes_model::facts::{Facts, Kind, Trust};
use http::HeaderMap;

use super::{Entry, Live};
use crate::error::Error;
use crate::stream::unread::network;
use crate::worker::Worker;

/// A line of a head beside its name and value, in two tables: as it came, and as it goes on.
const LINE: u64 = 224;
/// Names and values lie in a buffer that was read into, and again in one that is written from: both grow by doubling.
const COPIES: u64 = 4;
/// A stream without its head: its state here and in the library, and what it keeps of a read buffer.
const STREAM: u64 = 8 << 10;
/// Of the limit so much is left once sessions have ended, so that the next one does not end others at once.
const SLACK: u64 = 8;

/// What a session counts for.
#[derive(Default)]
pub(super) struct Charge {
    bytes: Cell<u64>,
    /// The session has begun, and has not ended: only then there is somebody to give it back.
    is_counted: Cell<bool>,
}

/// Who holds it.
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

/// What a head costs.
fn of_head(headers: &HeaderMap) -> u64 {
    headers.iter().map(|(name, value)| LINE + COPIES * (name.as_str().len() + value.len()) as u64).sum()
}

/// What a request costs. Tunnels, flows and connections of HTTP/1.1 have limits of their own, and a node passes on the
/// requests of many: of those the head alone counts.
fn of_request(facts: &Facts, is_only_one: bool) -> u64 {
    let is_of_many = match &facts.trust {
        Trust::Certified(peer) => peer.standalone,
        Trust::Address => true,
        Trust::Anonymous => false,
    };
    let is_stream = facts.kind == Kind::Http && !is_only_one && !is_of_many;
    let stream = if is_stream { STREAM } else { 0 };
    stream + of_head(&facts.headers) + facts.path.as_str().len() as u64
}

impl Entry {
    /// Its request counts from now on.
    pub(super) fn hold_request(&self, worker: &Worker) {
        let is_only_one = self.connection.as_ref().is_some_and(|connection| !connection.is_shared.get());
        self.charge.is_counted.set(true);
        self.hold(worker, of_request(&self.facts, is_only_one));
    }

    /// A head that is kept for it counts too: of its answer, or trailers.
    pub(crate) fn hold_head(&self, worker: &Worker, headers: &HeaderMap) {
        self.hold(worker, of_head(headers));
    }

    /// So many bytes more.
    pub(crate) fn hold(&self, worker: &Worker, bytes: u64) {
        if self.charge.is_counted.get() {
            let live = &worker.live;
            self.charge.bytes.set(self.charge.bytes.get() + bytes);
            live.request_memory.set(live.request_memory.get() + bytes);
        }
    }

    /// So many bytes more, of what it can do without. False: requests under way hold half of what they may, and these
    /// bytes do not count.
    pub(crate) fn may_hold(&self, worker: &Worker, bytes: u64) -> bool {
        let live = &worker.live;
        let has_room = live.request_memory.get() + bytes <= live.request_limit.get() / 2;
        if has_room {
            self.hold(worker, bytes);
        }
        has_room
    }

    /// So many bytes less, of those that it holds.
    pub(crate) fn release(&self, worker: &Worker, bytes: u64) {
        let released = bytes.min(self.charge.bytes.get());
        self.charge.bytes.set(self.charge.bytes.get() - released);
        let live = &worker.live;
        live.request_memory.set(live.request_memory.get() - released);
    }

    /// It holds nothing more, now and from now on.
    pub(super) fn let_go(&self, live: &Live) {
        self.charge.is_counted.set(false);
        live.request_memory.set(live.request_memory.get() - self.charge.bytes.take());
    }
}

impl Live {
    /// Ends sessions where they hold more than they may, all together.
    pub(super) fn bound_request_memory(&self, worker: &Worker) {
        if self.request_memory.get() <= self.request_limit.get() {
            return;
        }
        let limit = worker.generation().snapshot.limits.request_memory as u64;
        self.request_limit.set(limit);
        if self.request_memory.get() <= limit {
            return;
        }
        let sessions = self.sessions.borrow();
        let mut holding: Vec<&Rc<Entry>> =
            sessions.iter().map(|(_, entry)| entry).filter(|entry| entry.charge.bytes.get() > 0).collect();
        let mut holders: HashMap<Holder, u64> = HashMap::new();
        for entry in &holding {
            *holders.entry(Holder::of(&entry.facts)).or_default() += entry.charge.bytes.get();
        }
        // A peer without a user passes on the requests of many: strangers, who may have many addresses, end before it.
        holding.sort_by_cached_key(|entry| {
            let is_peer = entry.facts.user.is_none() && entry.facts.trust.is_believed();
            let held = holders.get(&Holder::of(&entry.facts)).copied();
            (is_peer, Reverse(held), entry.touched.get(), entry.id)
        });
        for entry in holding {
            if self.request_memory.get() <= limit - limit / SLACK {
                break;
            }
            worker.shared.metrics.limit("request-memory");
            // What it holds is free as soon as its task has had its turn.
            entry.let_go(self);
            entry.end_for_good(Error::Limit("memory of requests under way"));
        }
    }
}

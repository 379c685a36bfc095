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
pub(super) struct Charge(Cell<u64>);

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
        self.hold(worker, of_request(&self.facts, is_only_one));
    }

    /// A head that is kept for it counts too: of its answer, or trailers.
    pub(crate) fn hold_head(&self, worker: &Worker, headers: &HeaderMap) {
        self.hold(worker, of_head(headers));
    }

    /// So many bytes more.
    pub(crate) fn hold(&self, worker: &Worker, bytes: u64) {
        let live = &worker.live;
        self.charge.0.set(self.charge.0.get() + bytes);
        live.request_memory.set(live.request_memory.get() + bytes);
    }

    /// It holds nothing more.
    pub(super) fn let_go(&self, live: &Live) {
        live.request_memory.set(live.request_memory.get() - self.charge.0.take());
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
            sessions.iter().map(|(_, entry)| entry).filter(|entry| entry.charge.0.get() > 0).collect();
        let mut holders: HashMap<Holder, u64> = HashMap::new();
        for entry in &holding {
            *holders.entry(Holder::of(&entry.facts)).or_default() += entry.charge.0.get();
        }
        holding.sort_by_cached_key(|entry| {
            (Reverse(holders.get(&Holder::of(&entry.facts)).copied()), entry.touched.get(), entry.id)
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

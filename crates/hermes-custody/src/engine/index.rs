//! Indexes of the exchanges: the work for each neighbour and the usage of each account, so that no step scans all
//! exchanges.
//!
//! In: an exchange that may have changed. Out: its positions in the queues of its neighbours, and its usage in its
//! account.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hermes_wire::custody::{Direction, ExchangeId, Record};

use super::super::send_window::SendWindow;
use super::quota::Account;
use super::{CHUNK, Engine, Exchange, Output, PARTS, Side};

/// The state of a neighbour.
#[derive(Debug, Default)]
pub(super) struct Peer {
    pub(super) is_open: bool,
    /// The channel was closed, and exchanges that the neighbour began without data may expire. The next sweep sets
    /// `closed_since`.
    pub(super) may_lapse: bool,
    pub(super) closed_since: Option<Duration>,
    /// The last call for a record found nothing to send.
    pub(super) is_quiet: bool,
    /// The reason for the missing channel, if it is known.
    pub(super) trouble: Option<Arc<str>>,
    pub(super) pace: SendWindow,
    /// Control records, sent before data.
    pub(super) words: VecDeque<Record>,
    /// Directions whose acknowledgement must be sent.
    pub(super) news: BTreeSet<(ExchangeId, Direction)>,
    /// Directions with data for the neighbour: ordered by bytes already sent, and by age.
    pub(super) least: BTreeSet<(u64, ExchangeId, Direction)>,
    pub(super) oldest: BTreeSet<(u64, ExchangeId, Direction)>,
    /// Bytes in flight to the neighbour, and bytes that are being read from disk for it.
    pub(super) in_flight: u64,
    pub(super) loading: u64,
    /// Chunks sent since the oldest exchange had its turn.
    pub(super) turns: u32,
    /// Exchanges in which the neighbour takes part, and ends of which it must be informed (`ended`), the oldest first.
    pub(super) exchanges: BTreeSet<ExchangeId>,
    pub(super) ended: BTreeMap<u64, ExchangeId>,
    /// Ends of which the neighbour is informed only if it sends a record about the exchange.
    pub(super) through: BTreeMap<u64, ExchangeId>,
}

impl Peer {
    /// Whether there is nothing to send to the neighbour or to expect from it.
    pub(super) fn is_idle(&self) -> bool {
        self.exchanges.is_empty() && self.ended.is_empty()
    }

    /// Drops an end of which the neighbour was informed, or no longer needs to be.
    pub(super) fn forget(&mut self, ended: u64) {
        self.ended.remove(&ended);
        self.through.remove(&ended);
    }

    /// Signals that there is something to send to the neighbour.
    pub(super) fn stir(&mut self, name: &Arc<str>, out: &mut VecDeque<Output>) {
        if std::mem::take(&mut self.is_quiet) {
            out.push_back(Output::Stir(name.clone()));
        }
    }
}

/// Position of one direction in the indexes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Indexed {
    /// Bytes already sent, if there is more to send to a neighbour.
    sent: Option<u64>,
    has_news: bool,
    in_flight: u64,
    loading: u64,
    pub(super) memory: u64,
    pub(super) disk: u64,
    spare: u64,
    pub(super) places: u64,
    /// Whether the local reader was woken, because there is data.
    pub(super) is_ready_told: bool,
}

impl Engine {
    /// Updates all indexes after a possible change of an exchange.
    pub(super) fn reindex(&mut self, id: ExchangeId) {
        self.put(id, false);
        self.let_on(id);
    }

    /// Removes an exchange from all indexes.
    pub(super) fn unindex(&mut self, id: ExchangeId) {
        self.put(id, true);
        if PARTS.map(|part| self.held_up.remove(&(id, part)).is_some()).contains(&true) {
            self.out.push_back(Output::Onward { id });
        }
    }

    /// Deletes bytes that are kept only for a possible second read, if the account needs their room.
    pub(super) fn make_room(&mut self, id: ExchangeId) {
        let Some(account) = self.exchanges.get(&id).map(|exchange| exchange.account.clone()) else { return };
        self.let_go_while(&account, |state| {
            state.disk + state.spare > state.disk_limit() || state.places > state.limits.memory / 4
        });
    }

    /// Sets the disk space available to each account.
    pub(crate) fn set_disk(&mut self, bytes: u64) {
        self.disk_there = bytes;
        self.accounts.values_mut().for_each(|account| account.disk_there = bytes);
        let accounts: Vec<_> = self.accounts.keys().cloned().collect();
        accounts.iter().for_each(|account| self.tell_room(account));
    }

    /// Records whether the disk is full. While it is, the engine keeps no bytes on disk for a second read, and local
    /// readers do not wait for the disk. Such bytes cannot be read again after a restart, but exchanges keep flowing.
    pub(crate) fn set_stuck(&mut self, is_stuck: bool) {
        let was_stuck = std::mem::replace(&mut self.is_stuck, is_stuck);
        self.accounts.values_mut().for_each(|account| account.is_stuck = is_stuck);
        if is_stuck && !was_stuck {
            let accounts: Vec<_> = self.accounts.keys().cloned().collect();
            accounts.iter().for_each(|account| self.let_go_while(account, |_| true));
            let all: Vec<_> = self.exchanges.keys().copied().collect();
            all.into_iter().for_each(|id| self.reindex(id));
        }
    }

    fn let_go_while(&mut self, account: &Arc<str>, is_needed: impl Fn(&Account) -> bool) {
        while let Some(state) = self.accounts.get(account)
            && is_needed(state)
            && let Some((_, id, part)) = state.spares.last().copied()
            && let Some(exchange) = self.exchanges.get_mut(&id)
        {
            let is_read_again = exchange.is_read_again(part);
            let upto = exchange.half(part).release_disk(is_read_again);
            self.out.push_back(Output::Release { id, part, upto });
            self.reindex(id);
        }
    }

    /// Wakes refused callers, and lets refused neighbours send again, because the account may have room now.
    pub(super) fn tell_room(&mut self, account: &Arc<str>) {
        let Some(state) = self.accounts.get_mut(account) else { return };
        if std::mem::take(&mut state.has_refused) {
            self.out.push_back(Output::Room);
        }
        let waiting: Vec<_> = state.lacking.iter().copied().collect();
        waiting.into_iter().for_each(|one| self.put(one, false));
    }

    fn put(&mut self, id: ExchangeId, goes: bool) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        let account = self.accounts.entry(exchange.account.clone()).or_default();
        for part in PARTS {
            let is_kept = !exchange.is_on_disk() || (exchange.is_read_again(part) && !account.is_stuck);
            let worth = if account.is_stuck { 1 } else { MIN_RELEASE_BYTES };
            if !is_kept && exchange.half(part).costs() >= worth && exchange.half(part).spare(false) > 0 {
                let upto = exchange.half(part).release_disk(false);
                self.out.push_back(Output::Release { id, part, upto });
            }
            let before = exchange.indexed[part.index()];
            let now = if goes { Indexed::default() } else { stand(exchange, part, account) };
            account.count(part, &before, &now);
            if now.spare != before.spare {
                account.spare = account.spare + now.spare - before.spare;
                account.spares.remove(&(before.spare, id, part));
                if now.spare > 0 {
                    account.spares.insert((now.spare, id, part));
                }
            }
            let number = exchange.number;
            if let Some(Side::Peer(name)) = exchange.sink(part)
                && let Some(peer) = self.peers.get_mut(name)
            {
                let frees = now.in_flight + now.loading < before.in_flight + before.loading;
                peer.in_flight = peer.in_flight + now.in_flight - before.in_flight;
                peer.loading = peer.loading + now.loading - before.loading;
                if now.sent != before.sent {
                    before.sent.map(|sent| peer.least.remove(&(sent, id, part)));
                    now.sent.map(|sent| peer.least.insert((sent, id, part)));
                }
                match (before.sent, now.sent) {
                    (None, Some(_)) => _ = peer.oldest.insert((number, id, part)),
                    (Some(_), None) => _ = peer.oldest.remove(&(number, id, part)),
                    _ => {}
                }
                if (now.sent.is_some() && before.sent.is_none()) || (frees && !peer.least.is_empty()) {
                    peer.stir(name, &mut self.out);
                }
            }
            if let Some(Side::Peer(name)) = exchange.source(part)
                && let Some(peer) = self.peers.get_mut(name)
            {
                match (before.has_news, now.has_news) {
                    (false, true) => {
                        peer.news.insert((id, part));
                        peer.stir(name, &mut self.out);
                    }
                    (true, false) => _ = peer.news.remove(&(id, part)),
                    _ => {}
                }
            }
            if now.is_ready_told && !before.is_ready_told {
                self.out.push_back(Output::Ready { id, part });
            }
            if exchange.is_refused && (now.memory < before.memory || now.disk < before.disk) {
                // This exchange uses less than before, so its producer may retry, whatever other exchanges use.
                exchange.is_refused = false;
                self.out.push_back(Output::Onward { id });
            }
            exchange.indexed[part.index()] = now;
        }
        let lacks = !goes && (exchange.request.has_gap() || exchange.response.has_gap());
        if lacks {
            account.lacking.insert(id);
        } else {
            account.lacking.remove(&id);
        }
        if account.is_freed(false) {
            // This recursion is at most one level deep: asking a neighbour to send again frees no room.
            let account = exchange.account.clone();
            self.tell_room(&account);
        }
    }
}

/// Minimum number of unneeded bytes that are deleted at once.
const MIN_RELEASE_BYTES: u64 = 256 << 10;
/// Overhead of a written chunk beside its data, in bytes: its position in memory, and its record header on disk.
const IN_MEMORY: u64 = 96;
const ON_DISK: u64 = 48;

/// Computes the positions that one direction should have.
fn stand(exchange: &mut Exchange, part: Direction, account: &Account) -> Indexed {
    let on_disk = exchange.is_on_disk();
    let before = exchange.indexed[part.index()];
    let is_answered = exchange.is_answered(part);
    // An exchange that the previous side has not confirmed acknowledges nothing.
    let may_speak = part == Direction::Request || (exchange.is_vouched && exchange.is_there());
    let (may_go_on, is_early) = (exchange.may_go_on(part), exchange.is_early(part, CHUNK));
    let sink = match exchange.sink(part) {
        Some(Side::Peer(_)) => Some(true),
        Some(Side::Here) => Some(false),
        None => None,
    };
    let comes_from_peer = matches!(exchange.source(part), Some(Side::Peer(_)));
    let is_read_again = exchange.is_read_again(part) && !account.is_stuck;
    let half = exchange.half(part);
    let is_written = on_disk && !half.awaits_head();
    let pieces = if is_written { half.pieces() } else { 0 };
    let may_go = half.is_sendable() && may_go_on && !is_answered;
    let mut now = Indexed {
        sent: (may_go && sink == Some(true)).then(|| half.sent()),
        has_news: false,
        in_flight: if sink == Some(true) { half.in_flight() } else { 0 },
        loading: if sink == Some(true) { half.loading() } else { 0 },
        memory: half.in_memory(is_written) + pieces * IN_MEMORY,
        places: pieces * IN_MEMORY,
        disk: if is_written { half.kept() + pieces * ON_DISK } else { 0 },
        spare: if is_written && is_read_again { half.spare(true) } else { 0 },
        is_ready_told: before.is_ready_told || (half.is_sendable() && may_go_on && sink == Some(false)),
    };
    let has_room = !is_early && account.has_room(part, &before, &now);
    now.has_news = comes_from_peer && may_speak && half.has_news(has_room, is_read_again && is_written);
    now
}

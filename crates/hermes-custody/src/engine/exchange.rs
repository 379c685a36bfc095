//! What an exchange is, and what is said of one within this node.
//!
//! In and out: values. Never: what becomes of them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{ExchangeId, Part};

use super::super::half::{Half, Upto};
use super::index::Indexed;

/// One side of an exchange.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    /// A client or an origin of this node.
    Here,
    /// A neighbour, by its name.
    Peer(Arc<str>),
}

impl Side {
    pub(super) fn peer(&self) -> Option<&Arc<str>> {
        match self {
            Side::Here => None,
            Side::Peer(peer) => Some(peer),
        }
    }
}

/// What is to be known again after this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    /// There is an exchange.
    Begin { from: Side, account: Arc<str>, deadline: Duration, life: Duration },
    /// It goes there.
    Lead { to: Side, account: Arc<str>, is_tunnel: bool },
    /// Its string begins with this head, where the one before had so many bytes of its own.
    Head { part: Part, theirs: u64, head: Bytes },
    /// Its string goes on there.
    Bytes { part: Part, offset: u64, bytes: Bytes, is_last: bool },
    /// It has come to nothing, and must not be done again for this neighbour before then.
    Gone { peer: Arc<str>, status: u16, reason: String, until: Duration },
    /// It is over.
    Forget,
}

/// A half as it was before this process.
#[derive(Debug, Default)]
pub(crate) struct Former {
    /// Its head: bytes of theirs, and of ours.
    pub(crate) head: Option<(u64, u64)>,
    /// Where pieces stand, and how long they are, from its beginning to its end. All are safe.
    pub(crate) pieces: Vec<(Upto, u64)>,
}

impl Former {
    pub(super) fn half(self, awaits_head: bool) -> Half {
        let mut half = if awaits_head && self.head.is_none() { Half::awaiting_head() } else { Half::default() };
        if let Some((theirs, length)) = self.head {
            half.restore_head(theirs, length);
        }
        self.pieces.into_iter().for_each(|(at, length)| half.restore(at, length));
        half
    }
}

/// What is to be done by others.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// A neighbour has begun an exchange that was not known: where it goes is to be said by [`Engine::lead`].
    Begun { id: ExchangeId, peer: Arc<str> },
    /// These bytes of a half whose head is awaited came next: [`Engine::settle`] ends that.
    Head { id: ExchangeId, part: Part, bytes: Bytes },
    /// This is to be made safe, in this order. Of heads and bytes [`Engine::is_safe`] is to be told.
    Keep { id: ExchangeId, entry: Entry, survives: Survives },
    /// Up to there nobody needs any more what is safe of it, but for its head and its end.
    Release { id: ExchangeId, part: Part, upto: u64 },
    /// This account has no room for what a neighbour brings.
    Scarce(Arc<str>),
    /// What stands there is to be read again, for [`Engine::load`].
    Read { id: ExchangeId, part: Part, offset: u64, length: u64 },
    /// There is something for who is here: [`Engine::read`].
    Ready { id: ExchangeId, part: Part },
    /// There is something for this neighbour: a channel, and [`Engine::next_record`].
    Stir(Arc<str>),
    /// Who was refused by [`Engine::append`] or [`Engine::lead`] may try again.
    Room,
    /// So may whoever brings this one.
    Onward { id: ExchangeId },
    /// It has come to nothing: its client is to be told.
    Failed { id: ExchangeId, status: u16, reason: String },
    /// There is nothing left to be done for it.
    Forget { id: ExchangeId },
}

/// What one account may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Exchanges at once.
    pub(crate) exchanges: usize,
    /// Bytes of all of them in memory.
    pub(crate) memory: u64,
    /// And on disk.
    pub(crate) disk: u64,
    /// What bytes survive that are safe.
    pub(crate) survives: Survives,
}

/// What bytes survive before anybody hears that they are held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Survives {
    /// Nothing: they are in memory, and nowhere else.
    #[default]
    Nothing,
    /// The end of the process.
    Process,
    /// A loss of power.
    Power,
}

/// What [`Engine::append`] came to, and [`Engine::lead`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Appended {
    Taken,
    /// There is no room: [`Output::Room`] tells when it is to be tried again.
    Full,
    /// It is far ahead of what its path takes: [`Output::Onward`] tells.
    Ahead,
    /// There is no such exchange any more.
    Gone,
}

/// Bytes of a request that are taken before it is known where it goes: as many as come until then over a fast link, and no
/// more than any route has room for.
const EARLY: u64 = 256 << 10;

#[derive(Debug)]
pub(super) struct Exchange {
    /// In the order in which they came.
    pub(super) number: u64,
    pub(super) from: Side,
    /// `None`: it is not known yet, or it has no more part in it.
    pub(super) to: Option<Side>,
    pub(super) request: Half,
    pub(super) response: Half,
    pub(super) deadline: Duration,
    pub(super) account: Arc<str>,
    /// The neighbour or user in whose share of the account the exchange counts.
    pub(super) owner: Arc<str>,
    /// Both its halves have to come to their end, whichever is first; and it has its time anew with each step.
    pub(super) is_tunnel: bool,
    /// The time that it was given.
    pub(super) life: Duration,
    /// The next one has heard of it, over the channel that is there.
    pub(super) is_begun: bool,
    /// It may have, over any.
    pub(super) is_known: bool,
    /// It was there before this process, which may have lost what it had last.
    pub(super) is_restored: bool,
    /// Whoever it came from knows it. Of one of before this process nobody can tell here whether it was over: its request
    /// goes nowhere until then, or it might be done twice.
    pub(super) is_vouched: bool,
    /// It has gone to an origin that must not have it twice, or may have.
    pub(super) is_intended: bool,
    /// As it was when it came, or was led anywhere: what is in memory alone cannot be read again, whatever is said later.
    pub(super) survives: Survives,
    /// Who is here was refused what it brought.
    pub(super) is_refused: bool,
    /// How its halves stand in the indexes, in the order of `PARTS`.
    pub(super) indexed: [Indexed; 2],
}

impl Exchange {
    pub(super) fn half(&mut self, part: Part) -> &mut Half {
        match part {
            Part::Request => &mut self.request,
            Part::Response => &mut self.response,
        }
    }

    pub(super) fn half_of(&self, part: Part) -> &Half {
        match part {
            Part::Request => &self.request,
            Part::Response => &self.response,
        }
    }

    /// What it holds is written.
    pub(super) fn is_on_disk(&self) -> bool {
        self.survives != Survives::Nothing
    }

    /// Where a half goes.
    pub(super) fn sink(&self, part: Part) -> Option<&Side> {
        match part {
            Part::Request => self.to.as_ref(),
            Part::Response => Some(&self.from),
        }
    }

    /// It is the request of a response that is here: the next one may have forgotten both, and must not do it again.
    pub(super) fn is_answered(&self, part: Part) -> bool {
        part == Part::Request && self.response.have().is_whole && !self.is_tunnel
    }

    /// More of a half than there is and these is not taken yet: where it goes is not known, nor who has room for it.
    pub(super) fn is_early(&self, part: Part, bytes: usize) -> bool {
        part == Part::Request && self.to.is_none() && self.request.kept() + bytes as u64 > EARLY
    }

    /// What is there of a half may go further than this.
    pub(super) fn may_go_on(&self, part: Part) -> bool {
        part == Part::Response || self.is_vouched
    }

    /// The next one knows of it: who is asked for a response before it has heard of the request says that it has lost it.
    pub(super) fn is_there(&self) -> bool {
        let nothing = Upto::default();
        self.is_begun || self.request.held() != nothing || self.response.have() != nothing
    }

    /// What was read of a half may be read again: by who asks its origin once more, compares what that says, or is a client
    /// that comes back. All else the next one answers for.
    pub(super) fn is_read_again(&self, part: Part) -> bool {
        let is_of_origin = part == Part::Response && self.source(part) == Some(&Side::Here);
        !self.is_tunnel && (is_of_origin || self.sink(part) == Some(&Side::Here))
    }

    /// Where it comes from.
    pub(super) fn source(&self, part: Part) -> Option<&Side> {
        match part {
            Part::Request => Some(&self.from),
            Part::Response => self.to.as_ref(),
        }
    }

    /// Who may begin an order anew that may have been done here, and until when.
    pub(super) fn order(&self) -> Option<(Arc<str>, Duration)> {
        let from = self.from.peer().filter(|_| self.is_intended)?;
        Some((from.clone(), self.deadline))
    }

    pub(super) fn is_with(&self, side: &Side) -> bool {
        self.from == *side || self.to.as_ref() == Some(side)
    }
}

pub(super) const PARTS: [Part; 2] = [Part::Request, Part::Response];

//! An exchange, and the values that the engine passes to the rest of the node.
//!
//! In and out: values. Never: transitions between states.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{Direction, ExchangeId};

use super::super::stream_state::{Progress, StreamState};
use super::index::Indexed;

/// A side of an exchange.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    /// The local side: a client or an origin of this node.
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

/// An entry for the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    /// The exchange exists.
    Begin { from: Side, account: Arc<str>, deadline: Duration, life: Duration },
    /// The exchange is assigned to this side, which receives its request.
    Lead { to: Side, account: Arc<str>, is_tunnel: bool },
    /// The stream begins with this head, which replaces the first `theirs` bytes of the previous node's stream.
    Head { part: Direction, theirs: u64, head: Bytes },
    /// More bytes of the stream, at this offset.
    Bytes { part: Direction, offset: u64, bytes: Bytes, is_last: bool },
    /// The exchange has failed and must not run again for this neighbour before `until`.
    Gone { peer: Arc<str>, status: u16, reason: String, until: Duration },
    /// The exchange has ended.
    Forget,
}

/// The journal's copy of one direction of an exchange, after a restart.
#[derive(Debug, Default)]
pub(crate) struct RestoredStream {
    /// Length of the head that was replaced, and of the head that this node wrote, in bytes. `None`: no head was
    /// written.
    pub(crate) head: Option<(u64, u64)>,
    /// Offset and length of each written chunk, in ascending order. All chunks are durable.
    pub(crate) pieces: Vec<(Progress, u64)>,
}

impl RestoredStream {
    pub(super) fn half(self, awaits_head: bool) -> StreamState {
        let mut half =
            if awaits_head && self.head.is_none() { StreamState::awaiting_head() } else { StreamState::default() };
        if let Some((theirs, length)) = self.head {
            half.restore_head(theirs, length);
        }
        self.pieces.into_iter().for_each(|(at, length)| half.restore(at, length));
        half
    }
}

/// An action for the caller of the engine.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// A neighbour began a new exchange. The caller assigns it by [`Engine::lead`] or [`Engine::take_in`].
    Begun { id: ExchangeId, peer: Arc<str> },
    /// The next bytes of a direction whose head is awaited. After [`Engine::settle`], no more follow.
    Head { id: ExchangeId, part: Direction, bytes: Bytes },
    /// An entry to append to the journal, in the order of these actions. The caller reports durable heads and bytes by
    /// [`Engine::is_safe`].
    Keep { id: ExchangeId, entry: Entry, survives: Durability },
    /// Stored bytes below this offset are no longer needed, except the head and the end of the stream.
    Release { id: ExchangeId, part: Direction, upto: u64 },
    /// The account has no room for data that a neighbour sent.
    Scarce(Arc<str>),
    /// Stored bytes to read, for [`Engine::load`].
    Read { id: ExchangeId, part: Direction, offset: u64, length: u64 },
    /// A local reader has something to read by [`Engine::read`].
    Ready { id: ExchangeId, part: Direction },
    /// Records wait for a neighbour, which needs a channel. The caller takes them from [`Engine::next_record`].
    Stir(Arc<str>),
    /// Callers that [`Engine::append`] or [`Engine::lead`] refused may retry.
    Room,
    /// The producer of this exchange may retry.
    Onward { id: ExchangeId },
    /// The exchange has failed. The caller informs its local client.
    Failed { id: ExchangeId, status: u16, reason: String },
    /// The exchange has ended on this node.
    Forget { id: ExchangeId },
}

/// Limits of one account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Maximum number of exchanges at a time.
    pub(crate) exchanges: usize,
    /// Maximum number of bytes of all exchanges in memory.
    pub(crate) memory: u64,
    /// Maximum number of bytes of all exchanges on disk.
    pub(crate) disk: u64,
    /// The failures that acknowledged bytes survive.
    pub(crate) survives: Durability,
}

/// The failures that bytes survive before the node acknowledges them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Durability {
    /// No failure: the bytes are only in memory.
    #[default]
    Nothing,
    /// The end of the process.
    Process,
    /// A loss of power.
    Power,
}

/// The result of [`Engine::append`] and [`Engine::lead`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Appended {
    Taken,
    /// The account has no room; [`Output::Room`] reports when to retry.
    Full,
    /// The producer is far ahead of its path; [`Output::Onward`] reports when to retry.
    Ahead,
    /// The exchange no longer exists.
    Gone,
}

/// Maximum number of bytes of a request that are accepted before its route is known: the data that a fast link delivers
/// until then. Any route has room for this amount.
const EARLY: u64 = 256 << 10;

#[derive(Debug)]
pub(super) struct Exchange {
    /// Sequence number in the order of arrival.
    pub(super) number: u64,
    pub(super) from: Side,
    /// The next side; `None` if it is not known yet, or no longer takes part.
    pub(super) to: Option<Side>,
    pub(super) request: StreamState,
    pub(super) response: StreamState,
    pub(super) deadline: Duration,
    pub(super) account: Arc<str>,
    /// The neighbour or user whose share of the account the exchange uses.
    pub(super) owner: Arc<str>,
    /// A tunnel ends when both directions have ended, in either order. Each step extends its deadline.
    pub(super) is_tunnel: bool,
    /// Time from the exchange's arrival to its deadline. For a tunnel, the time from its last progress.
    pub(super) life: Duration,
    /// Whether the exchange was announced to the next node over the present channel.
    pub(super) is_begun: bool,
    /// Whether the exchange may have been announced to the next node over any channel.
    pub(super) is_known: bool,
    /// Whether the exchange was restored from the journal, and may have lost its last bytes.
    pub(super) is_restored: bool,
    /// Whether the previous side has confirmed the exchange. After a restart, the node does not know whether a restored
    /// exchange had ended. Until the previous side sends a record about it, its request is not forwarded, because it
    /// might run twice.
    pub(super) is_vouched: bool,
    /// Whether the request went, or may have gone, to an origin that must not receive it twice.
    pub(super) is_intended: bool,
    /// The durability at arrival or assignment. A later change of the configuration has no effect, because bytes that
    /// are only in memory cannot be read again.
    pub(super) survives: Durability,
    /// Whether a local producer was refused bytes of this exchange.
    pub(super) is_refused: bool,
    /// Positions of both directions in the indexes, in the order of `PARTS`.
    pub(super) indexed: [Indexed; 2],
}

impl Exchange {
    pub(super) fn half(&mut self, part: Direction) -> &mut StreamState {
        match part {
            Direction::Request => &mut self.request,
            Direction::Response => &mut self.response,
        }
    }

    pub(super) fn half_of(&self, part: Direction) -> &StreamState {
        match part {
            Direction::Request => &self.request,
            Direction::Response => &self.response,
        }
    }

    /// Whether the exchange is in the journal.
    pub(super) fn is_on_disk(&self) -> bool {
        self.survives != Durability::Nothing
    }

    /// The side that reads a direction.
    pub(super) fn sink(&self, part: Direction) -> Option<&Side> {
        match part {
            Direction::Request => self.to.as_ref(),
            Direction::Response => Some(&self.from),
        }
    }

    /// Whether `part` is the request of a complete response. The next node may have forgotten both and must not run the
    /// request again.
    pub(super) fn is_answered(&self, part: Direction) -> bool {
        part == Direction::Request && self.response.have().is_whole && !self.is_tunnel
    }

    /// Whether a request without a route would exceed `EARLY` with these bytes. Neither its next side nor its account
    /// is known yet.
    pub(super) fn is_early(&self, part: Direction, bytes: usize) -> bool {
        part == Direction::Request && self.to.is_none() && self.request.kept() + bytes as u64 > EARLY
    }

    /// Whether the stored bytes of a direction may be forwarded.
    pub(super) fn may_go_on(&self, part: Direction) -> bool {
        part == Direction::Response || self.is_vouched
    }

    /// Whether the next node knows the exchange. A node that receives a record about the response before the request
    /// reports the exchange as lost.
    pub(super) fn is_there(&self) -> bool {
        let nothing = Progress::default();
        self.is_begun || self.request.held() != nothing || self.response.have() != nothing
    }

    /// Whether bytes may be read again after they were read: for an origin request that is replayed, for a comparison
    /// with the replayed response, or for a client that returns. In all other cases the next node is responsible for
    /// them.
    pub(super) fn is_read_again(&self, part: Direction) -> bool {
        let is_of_origin = part == Direction::Response && self.source(part) == Some(&Side::Here);
        !self.is_tunnel && (is_of_origin || self.sink(part) == Some(&Side::Here))
    }

    /// The side that writes a direction.
    pub(super) fn source(&self, part: Direction) -> Option<&Side> {
        match part {
            Direction::Request => Some(&self.from),
            Direction::Response => self.to.as_ref(),
        }
    }

    /// Returns the neighbour that may begin this order again after the order may have run on this node, and the
    /// deadline until which it must not run again. `None`: the exchange is no order, or began at a local client.
    pub(super) fn order(&self) -> Option<(Arc<str>, Duration)> {
        let from = self.from.peer().filter(|_| self.is_intended)?;
        Some((from.clone(), self.deadline))
    }

    pub(super) fn is_with(&self, side: &Side) -> bool {
        self.from == *side || self.to.as_ref() == Some(side)
    }
}

pub(super) const PARTS: [Direction; 2] = [Direction::Request, Direction::Response];

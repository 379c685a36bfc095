//! Index of the journal: the position of every live entry.
//!
//! In: entries as they were written, and their positions. Out: live entries of each exchange, their bytes, and the
//! number of live bytes in a segment.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use hermes_wire::custody::{Direction, ExchangeId};

use super::super::engine::Side;
use super::super::journal_record::{self, Intent, JournalRecord};
use super::super::stream_state::Progress;
use super::Segment;

/// Length of an end mark, and estimated length of the entries without data, which move along with any part of their
/// exchange.
const END: u64 = journal_record::FRAME as u64 + 17;
const BEGIN: u64 = 300;

/// A range of a stream.
#[derive(Debug, Clone, Copy)]
struct Extent {
    offset: u64,
    length: u64,
    /// For a head: the bytes of the previous node's stream that it replaces.
    theirs: Option<u64>,
    is_last: bool,
    segment: u64,
    at: u64,
    /// Length of the record.
    record: u64,
}

impl Extent {
    fn end(&self) -> u64 {
        self.offset + self.length
    }
}

/// The entries of an exchange.
#[derive(Debug, Default)]
struct Kept {
    /// Entries without data.
    begin: Option<JournalRecord>,
    lead: Option<JournalRecord>,
    intent: Option<Intent>,
    asked: Option<Bytes>,
    /// The exchange has failed; no other entry is live.
    gone: Option<JournalRecord>,
    /// Ranges of both streams, by offset. If two have the same offset, the first is empty, or was written again.
    halves: [BTreeMap<u64, Extent>; 2],
    /// Record bytes of the exchange, by segment.
    bytes: BTreeMap<u64, u64>,
}

/// An exchange found in the journal.
#[derive(Debug)]
pub(crate) struct StoredExchange {
    pub(crate) from: Side,
    pub(crate) to: Option<Side>,
    pub(crate) account: Arc<str>,
    /// Deadline in milliseconds since 1970, and the custody time before it.
    pub(crate) deadline: u64,
    pub(crate) life: u64,
    pub(crate) intent: Option<Intent>,
    pub(crate) is_tunnel: bool,
    /// The request of a local client, if another client may repeat it and join.
    pub(crate) asked: Option<Bytes>,
    pub(crate) halves: [StoredStream; 2],
}

/// A direction of an exchange found in the journal.
#[derive(Debug, Default)]
pub(crate) struct StoredStream {
    /// Length of the head that was replaced, and of the head that this node wrote, in bytes. `None`: no head was
    /// written.
    pub(crate) head: Option<(u64, u64)>,
    /// Offset and length of each written chunk, in ascending order.
    pub(crate) pieces: Vec<(Progress, u64)>,
}

/// The index of all segments.
#[derive(Default)]
pub(super) struct Index {
    pub(super) segments: VecDeque<Segment>,
    exchanges: HashMap<ExchangeId, Kept>,
    /// For each exchange of which older segments may still have entries, the segment of its end mark.
    pub(super) over: HashMap<ExchangeId, u64>,
    /// Live record bytes, by segment.
    live: HashMap<u64, u64>,
}

impl Index {
    /// Adds an entry that was written to, or found in, a segment. `at` is the position of its data.
    pub(super) fn add(&mut self, id: ExchangeId, note: &JournalRecord, segment: u64, at: u64, length: u64) {
        if *note == JournalRecord::Forget {
            self.forget(id);
            self.over.insert(id, segment);
            return;
        }
        if self.over.contains_key(&id) {
            return;
        }
        if matches!(note, JournalRecord::Gone { .. }) {
            self.forget(id);
        } else if self.exchanges.get(&id).is_some_and(|kept| kept.gone.is_some()) {
            return;
        }
        let kept = self.exchanges.entry(id).or_default();
        let data = match note {
            JournalRecord::Head { part, theirs, bytes } => Some((*part, 0, bytes.len(), Some(*theirs), false)),
            JournalRecord::Bytes { part, offset, is_last, bytes } => {
                Some((*part, *offset, bytes.len(), None, *is_last))
            }
            _ => None,
        };
        *kept.bytes.entry(segment).or_default() += length;
        *self.live.entry(segment).or_default() += length;
        match note {
            JournalRecord::Begin { .. } => kept.begin = Some(note.clone()),
            JournalRecord::Lead { .. } => kept.lead = Some(note.clone()),
            // Certainty replaces doubt, but not the reverse.
            JournalRecord::Intent(intent) if kept.intent != Some(Intent::Certain) => kept.intent = Some(*intent),
            JournalRecord::Asked { bytes } => kept.asked = Some(bytes.clone()),
            JournalRecord::Gone { .. } => kept.gone = Some(note.clone()),
            JournalRecord::Head { .. }
            | JournalRecord::Bytes { .. }
            | JournalRecord::Intent(_)
            | JournalRecord::Forget => {}
        }
        let Some((part, offset, of_data, theirs, is_last)) = data else { return };
        let extent = Extent { offset, length: of_data as u64, theirs, is_last, segment, at, record: length };
        if let Some(before) = kept.halves[part.index()].insert(offset, extent) {
            self.drop_record(id, &before);
        }
    }

    /// Drops entries of a stream below this offset, except its head and its end.
    pub(super) fn release(&mut self, id: ExchangeId, part: Direction, upto: u64) {
        let Some(kept) = self.exchanges.get_mut(&id) else { return };
        let is_over = |one: &Extent| one.end() <= upto && one.theirs.is_none() && !one.is_last;
        let gone: Vec<_> = kept.halves[part.index()].extract_if(..upto, |_, one| is_over(one)).collect();
        gone.iter().for_each(|(_, extent)| self.drop_record(id, extent));
    }

    /// Marks a record as obsolete.
    fn drop_record(&mut self, id: ExchangeId, extent: &Extent) {
        if let Some(kept) = self.exchanges.get_mut(&id)
            && let Some(bytes) = kept.bytes.get_mut(&extent.segment)
        {
            *bytes = bytes.saturating_sub(extent.record);
            if *bytes == 0 {
                kept.bytes.remove(&extent.segment);
            }
        }
        self.free(extent.segment, extent.record);
    }

    /// Whether any entry of the exchange was written.
    pub(super) fn has(&self, id: ExchangeId) -> bool {
        self.exchanges.contains_key(&id)
    }

    /// Drops an exchange that has ended.
    pub(super) fn forget(&mut self, id: ExchangeId) {
        for (segment, bytes) in self.exchanges.remove(&id).into_iter().flat_map(|kept| kept.bytes) {
            self.free(segment, bytes);
        }
    }

    fn free(&mut self, segment: u64, bytes: u64) {
        if let Some(live) = self.live.get_mut(&segment) {
            *live = live.saturating_sub(bytes);
            if *live == 0 {
                self.live.remove(&segment);
            }
        }
    }

    /// Returns the number of live bytes of a segment.
    pub(super) fn live(&mut self, segment: u64) -> u64 {
        // An end mark is obsolete once all older segments are removed.
        if let Some(oldest) = self.segments.front().map(|segment| segment.number) {
            self.over.retain(|_, said_in| *said_in >= oldest);
        }
        self.live.get(&segment).copied().unwrap_or_default()
    }

    /// Returns the segment that is cheapest to empty. `None`: more than half of each segment is live.
    pub(super) fn least(&self) -> Option<u64> {
        let mut ends: HashMap<u64, u64> = HashMap::new();
        self.over.values().for_each(|said_in| *ends.entry(*said_in).or_default() += END);
        let mut begins: HashMap<u64, u64> = HashMap::new();
        let parts = self.exchanges.values().flat_map(|kept| kept.bytes.keys());
        parts.for_each(|segment| *begins.entry(*segment).or_default() += BEGIN);
        let oldest = self.segments.front()?.number;
        let costs = self.segments.iter().map(|segment| {
            let number = segment.number;
            let of_ends = if number == oldest { 0 } else { ends.get(&number).copied().unwrap_or_default() };
            let of = |all: &HashMap<u64, u64>| all.get(&number).copied().unwrap_or_default();
            (of(&self.live) + of(&begins) + of_ends, segment)
        });
        let worth = costs.filter(|(cost, segment)| segment.length > 0 && 2 * cost <= segment.length);
        worth.min_by_key(|(cost, _)| *cost).map(|(_, segment)| segment.number)
    }

    pub(super) fn live_in_all(&self) -> u64 {
        self.live.values().sum()
    }

    /// Returns the exchanges to restore. Drops exchanges without a next side, because nothing of them was acknowledged.
    pub(super) fn held(&mut self) -> Vec<(ExchangeId, StoredExchange)> {
        let aimless: Vec<_> = self.exchanges.iter().filter(|(_, kept)| kept.is_aimless()).map(|(id, _)| *id).collect();
        aimless.into_iter().for_each(|id| self.forget(id));
        self.exchanges.iter().filter_map(|(id, kept)| Some((*id, kept.held()?))).collect()
    }

    /// Reads a range of a stream.
    pub(super) fn read(&self, id: ExchangeId, part: Direction, offset: u64, length: u64) -> io::Result<Bytes> {
        let gone = || io::Error::new(io::ErrorKind::NotFound, "the exchange is not in the journal");
        let kept = self.exchanges.get(&id).ok_or_else(gone)?;
        let extents = &kept.halves[part.index()];
        let first = extents.range(..=offset).next_back().map_or(offset, |(begin, _)| *begin);
        let mut out = BytesMut::with_capacity(usize::try_from(length).unwrap_or_default());
        let (mut at, end) = (offset, offset + length);
        for extent in extents.range(first..end).map(|(_, extent)| extent).filter(|extent| extent.end() > offset) {
            if extent.offset > at {
                return Err(gone());
            }
            let take = extent.end().min(end).saturating_sub(at);
            let file = &self.segments.iter().find(|one| one.number == extent.segment).ok_or_else(gone)?.file;
            let begin = out.len();
            out.resize(begin + take as usize, 0);
            file.read_exact_at(&mut out[begin..], extent.at + (at - extent.offset))?;
            at += take;
        }
        if at == end { Ok(out.freeze()) } else { Err(gone()) }
    }

    /// Returns the entries to write again before this segment is removed. They include an end mark if an older segment
    /// may have entries of its exchange.
    pub(super) fn moving(&self, segment: u64) -> io::Result<Vec<(ExchangeId, Vec<JournalRecord>)>> {
        let mut moving = Vec::new();
        for (id, kept) in &self.exchanges {
            if !kept.bytes.contains_key(&segment) {
                continue;
            }
            let mut notes: Vec<JournalRecord> =
                kept.begin.iter().chain(&kept.lead).chain(&kept.gone).cloned().collect();
            notes.extend(kept.intent.map(JournalRecord::Intent));
            notes.extend(kept.asked.clone().map(|bytes| JournalRecord::Asked { bytes }));
            for part in [Direction::Request, Direction::Response] {
                for extent in kept.halves[part.index()].values().filter(|one| one.segment == segment) {
                    let bytes = self.read(*id, part, extent.offset, extent.length)?;
                    notes.push(match extent.theirs {
                        Some(theirs) => JournalRecord::Head { part, theirs, bytes },
                        None => JournalRecord::Bytes { part, offset: extent.offset, is_last: extent.is_last, bytes },
                    });
                }
            }
            moving.push((*id, notes));
        }
        if self.segments.front().is_some_and(|oldest| oldest.number != segment) {
            let over = self.over.iter().filter(|(_, said_in)| **said_in == segment);
            moving.extend(over.map(|(id, _)| (*id, vec![JournalRecord::Forget])));
        }
        Ok(moving)
    }

    /// Drops the copies of an exchange's entries in a segment, after they were written elsewhere.
    pub(super) fn forget_in(&mut self, id: ExchangeId, segment: u64) {
        let Some(kept) = self.exchanges.get_mut(&id) else { return };
        kept.halves.iter_mut().for_each(|half| half.retain(|_, one| one.segment != segment));
        if let Some(bytes) = kept.bytes.remove(&segment) {
            self.free(segment, bytes);
        }
    }

    /// Returns the failed exchanges that must not run again.
    pub(super) fn gone(&self) -> Vec<(ExchangeId, JournalRecord)> {
        self.exchanges.iter().filter_map(|(id, kept)| Some((*id, kept.gone.clone()?))).collect()
    }
}

impl Kept {
    /// Whether the journal lacks the next side of the exchange, or the head that this node writes, because the process
    /// ended before it had written them.
    fn is_aimless(&self) -> bool {
        let is_peer = |side: &Side| matches!(side, Side::Peer(_));
        match (&self.begin, &self.lead) {
            (Some(JournalRecord::Begin { from, .. }), Some(JournalRecord::Lead { to, .. })) => {
                let has_head = self.halves[Direction::Request.index()].values().any(|one| one.theirs.is_some());
                is_peer(from) && is_peer(to) && !has_head
            }
            _ => self.gone.is_none(),
        }
    }

    fn held(&self) -> Option<StoredExchange> {
        let Some(JournalRecord::Begin { from, account, deadline, life }) = &self.begin else { return None };
        let (to, account, is_tunnel) = match &self.lead {
            Some(JournalRecord::Lead { to, account, is_tunnel }) => (Some(to.clone()), account.clone(), *is_tunnel),
            _ => (None, account.clone(), false),
        };
        let half = |extents: &BTreeMap<u64, Extent>| {
            let head = extents.values().find_map(|one| Some((one.theirs?, one.length)));
            let pieces = extents.values().filter(|one| one.theirs.is_none());
            let pieces = pieces.map(|one| (Progress { offset: one.offset, is_whole: one.is_last }, one.length));
            StoredStream { head, pieces: pieces.collect() }
        };
        let [request, response] = &self.halves;
        Some(StoredExchange {
            from: from.clone(),
            to,
            account,
            deadline: *deadline,
            life: *life,
            intent: self.intent,
            is_tunnel,
            asked: self.asked.clone(),
            halves: [half(request), half(response)],
        })
    }
}

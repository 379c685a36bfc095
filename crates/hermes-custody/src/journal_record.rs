//! Record format of the custody journal: append-only files with the exchanges for which a node is responsible.
//!
//! In: entries of exchanges. Out: bytes of records, and the entries of records that were written before. Pure. The
//! entries of an exchange may appear in any order and more than once. The reader merges all entries of an id, and
//! ignores them if one of them marks the exchange as ended. Ids are never reused.

use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use hermes_wire::custody::{Direction, ExchangeId};
use hermes_wire::varint;

use super::engine::Side;

/// Frame in front of a record's payload: length and CRC-32, four bytes each.
pub(super) const FRAME: usize = 8;
/// Maximum length of a record. A larger length field marks the record as damaged.
const MAX_RECORD_BYTES: usize = 16 << 20;

/// The certainty that a request was sent to its origin, which must not receive it twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// The journal records that the node was about to send the request.
    Certain,
    /// The journal has no record of that, but its damaged bytes may have contained the record.
    Possible,
}

/// An entry of an exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum JournalRecord {
    /// The exchange exists. The deadline is in milliseconds since 1970, because a restart resets all other clocks. The
    /// exchange arrived `life` milliseconds before its deadline.
    Begin { from: Side, account: Arc<str>, deadline: u64, life: u64 },
    /// The exchange is assigned to this side, which receives its request.
    Lead { to: Side, account: Arc<str>, is_tunnel: bool },
    /// The stream begins with this head, which replaces the first `theirs` bytes of the previous node's stream.
    Head { part: Direction, theirs: u64, bytes: Bytes },
    /// More bytes of the stream, at this offset.
    Bytes { part: Direction, offset: u64, is_last: bool, bytes: Bytes },
    /// The request goes to an origin that must not receive it twice.
    Intent(Intent),
    /// The exchange has a local client, which sent the request `bytes`. A client that repeats the request may read the
    /// response.
    Asked { bytes: Bytes },
    /// The exchange has failed and must not run again for this neighbour before the deadline. All other entries are
    /// void.
    Gone { peer: Arc<str>, status: u16, reason: Arc<str>, deadline: u64 },
    /// The exchange has ended.
    Forget,
}

const BEGIN: u8 = 0;
const LEAD: u8 = 1;
const HEAD: u8 = 2;
const BYTES: u8 = 3;
const INTENT: u8 = 4;
const FORGET: u8 = 5;
const LEAD_TUNNEL: u8 = 6;
const ASKED: u8 = 7;
const DOUBT: u8 = 8;
const GONE: u8 = 9;

const OF_RESPONSE: u8 = 1;
const LAST: u8 = 2;

/// Appends a record. Returns the offset of the entry's data within the record.
pub(super) fn put(id: ExchangeId, note: &JournalRecord, out: &mut BytesMut) -> usize {
    let start = out.len();
    out.put_bytes(0, FRAME);
    let mut data = None;
    match note {
        JournalRecord::Begin { from, account, deadline, life } => {
            head(BEGIN, id, out);
            varint::encode((*deadline).min(varint::MAX), out);
            varint::encode((*life).min(varint::MAX), out);
            put_side(from, out);
            put_text(account, out);
        }
        JournalRecord::Lead { to, account, is_tunnel } => {
            head(if *is_tunnel { LEAD_TUNNEL } else { LEAD }, id, out);
            put_side(to, out);
            put_text(account, out);
        }
        JournalRecord::Head { part, theirs, bytes } => {
            head(HEAD, id, out);
            out.put_u8(flags(*part, false));
            varint::encode(*theirs, out);
            data = Some(bytes);
        }
        JournalRecord::Bytes { part, offset, is_last, bytes } => {
            head(BYTES, id, out);
            out.put_u8(flags(*part, *is_last));
            varint::encode(*offset, out);
            data = Some(bytes);
        }
        JournalRecord::Intent(Intent::Certain) => head(INTENT, id, out),
        JournalRecord::Intent(Intent::Possible) => head(DOUBT, id, out),
        JournalRecord::Asked { bytes } => {
            head(ASKED, id, out);
            data = Some(bytes);
        }
        JournalRecord::Gone { peer, status, reason, deadline } => {
            head(GONE, id, out);
            out.put_u16(*status);
            varint::encode((*deadline).min(varint::MAX), out);
            put_text(peer, out);
            put_text(reason, out);
        }
        JournalRecord::Forget => head(FORGET, id, out),
    }
    let at = out.len() - start;
    if let Some(bytes) = data {
        out.put_slice(bytes);
    }
    let payload = &out[start + FRAME..];
    let (length, sum) = (payload.len() as u32, crc32fast::hash(payload));
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
    out[start + 4..start + FRAME].copy_from_slice(&sum.to_le_bytes());
    at
}

fn head(kind: u8, id: ExchangeId, out: &mut BytesMut) {
    out.put_u8(kind);
    out.put_slice(&id.0);
}

fn flags(part: Direction, is_last: bool) -> u8 {
    (if part == Direction::Response { OF_RESPONSE } else { 0 }) | if is_last { LAST } else { 0 }
}

fn put_text(text: &str, out: &mut BytesMut) {
    varint::encode(text.len() as u64, out);
    out.put_slice(text.as_bytes());
}

/// An empty name stands for the local side, since no neighbour has an empty name.
fn put_side(side: &Side, out: &mut BytesMut) {
    match side {
        Side::Here => put_text("", out),
        Side::Peer(peer) => put_text(peer, out),
    }
}

/// A record read from the journal.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) id: ExchangeId,
    pub(super) note: JournalRecord,
    /// Offset of the data within the record, and the record's length.
    pub(super) at: usize,
    pub(super) length: usize,
}

/// Parses the first record of these bytes. Returns `None` if there is no record, or an incomplete or damaged one.
/// Records after a damaged one are not trusted either.
pub(super) fn first(bytes: &Bytes) -> Option<Found> {
    let length = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let sum = u32::from_le_bytes(bytes.get(4..FRAME)?.try_into().ok()?);
    if length > MAX_RECORD_BYTES {
        return None;
    }
    let mut payload = bytes.get(FRAME..FRAME + length).map(|payload| bytes.slice_ref(payload))?;
    if crc32fast::hash(&payload) != sum {
        return None;
    }
    let whole = payload.len();
    let kind = *payload.first()?;
    let id = ExchangeId(payload.get(1..17)?.try_into().ok()?);
    payload.advance(17);
    let note = match kind {
        BEGIN => {
            let (deadline, life) = (number(&mut payload)?, number(&mut payload)?);
            JournalRecord::Begin { deadline, life, from: side(&mut payload)?, account: text(&mut payload)? }
        }
        LEAD | LEAD_TUNNEL => JournalRecord::Lead {
            to: side(&mut payload)?,
            account: text(&mut payload)?,
            is_tunnel: kind == LEAD_TUNNEL,
        },
        HEAD | BYTES if !payload.is_empty() => {
            let flags = payload.get_u8();
            let part = if flags & OF_RESPONSE == 0 { Direction::Request } else { Direction::Response };
            let number = number(&mut payload)?;
            let bytes = std::mem::take(&mut payload);
            if kind == HEAD {
                JournalRecord::Head { part, theirs: number, bytes }
            } else {
                JournalRecord::Bytes { part, offset: number, is_last: flags & LAST != 0, bytes }
            }
        }
        INTENT => JournalRecord::Intent(Intent::Certain),
        DOUBT => JournalRecord::Intent(Intent::Possible),
        // The entry is retained for long. A slice of the segment's buffer would retain the whole buffer.
        ASKED => JournalRecord::Asked { bytes: Bytes::copy_from_slice(&std::mem::take(&mut payload)) },
        GONE if payload.len() >= 2 => {
            let status = payload.get_u16();
            let deadline = number(&mut payload)?;
            JournalRecord::Gone { status, deadline, peer: text(&mut payload)?, reason: text(&mut payload)? }
        }
        FORGET => JournalRecord::Forget,
        _ => return None,
    };
    let data = match &note {
        JournalRecord::Head { bytes, .. } | JournalRecord::Bytes { bytes, .. } | JournalRecord::Asked { bytes } => {
            bytes.len()
        }
        _ => 0,
    };
    payload.is_empty().then_some(Found { id, note, at: FRAME + whole - data, length: FRAME + whole })
}

/// Whether bytes that [`first`] rejects are an incomplete record rather than a damaged one.
pub(super) fn is_unfinished(bytes: &[u8]) -> bool {
    let length = bytes.first_chunk().map(|length| u32::from_le_bytes(*length) as usize);
    length.is_none_or(|length| length <= MAX_RECORD_BYTES && bytes.len() < FRAME + length)
}

fn number(payload: &mut Bytes) -> Option<u64> {
    let (value, length) = varint::decode(payload)?;
    payload.advance(length);
    Some(value)
}

fn text(payload: &mut Bytes) -> Option<Arc<str>> {
    let length = usize::try_from(number(payload)?).ok().filter(|length| *length <= payload.len())?;
    let text = payload.split_to(length);
    std::str::from_utf8(&text).ok().map(Arc::from)
}

fn side(payload: &mut Bytes) -> Option<Side> {
    let name = text(payload)?;
    Some(if name.is_empty() { Side::Here } else { Side::Peer(name) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ID: ExchangeId = ExchangeId([9; 16]);

    fn all() -> Vec<JournalRecord> {
        let peer = || Side::Peer(Arc::from("next/10.0.0.1:443"));
        vec![
            JournalRecord::Begin {
                from: peer(),
                account: Arc::from("route"),
                deadline: 1_700_000_000_000,
                life: 900_000,
            },
            JournalRecord::Begin { from: Side::Here, account: Arc::from(""), deadline: 0, life: 0 },
            JournalRecord::Lead { to: peer(), account: Arc::from("route"), is_tunnel: false },
            JournalRecord::Lead { to: Side::Here, account: Arc::from(""), is_tunnel: true },
            JournalRecord::Head { part: Direction::Response, theirs: 70, bytes: Bytes::from_static(b"head") },
            JournalRecord::Bytes { part: Direction::Request, offset: 1 << 40, is_last: true, bytes: Bytes::new() },
            JournalRecord::Bytes {
                part: Direction::Response,
                offset: 4,
                is_last: false,
                bytes: Bytes::from(vec![5; 100_000]),
            },
            JournalRecord::Intent(Intent::Certain),
            JournalRecord::Intent(Intent::Possible),
            JournalRecord::Asked { bytes: Bytes::from_static(b"GET /") },
            JournalRecord::Gone { peer: Arc::from("n1"), status: 502, reason: Arc::from("so it is"), deadline: 7 },
            JournalRecord::Forget,
        ]
    }

    #[test]
    fn what_is_put_is_found() {
        let mut out = BytesMut::new();
        let places: Vec<_> = all().iter().map(|note| (out.len(), put(ID, note, &mut out))).collect();
        let mut rest = out.freeze();
        let mut begin = 0;
        for (note, (start, at)) in all().into_iter().zip(places) {
            let found = first(&rest).unwrap();
            assert_eq!((found.id, found.at, begin), (ID, at, start));
            assert_eq!(found.note, note);
            begin += found.length;
            rest.advance(found.length);
        }
        assert_eq!(first(&rest), None);
    }

    #[test]
    fn what_was_not_written_whole_or_is_damaged_is_none() {
        for note in all() {
            let mut out = BytesMut::new();
            put(ID, &note, &mut out);
            let whole = out.freeze();
            for end in [0, 3, 7, 8, 20, whole.len() - 1] {
                assert_eq!(first(&whole.slice(..end.min(whole.len() - 1))), None, "{note:?} cut at {end}");
            }
            for at in [0, 5, 9, whole.len() - 1] {
                let mut damaged = whole.to_vec();
                damaged[at] ^= 0x10;
                assert!(at == 0 || !is_unfinished(&damaged), "{note:?} damaged at {at}");
                assert_eq!(first(&damaged.into()), None, "{note:?} damaged at {at}");
                assert!(is_unfinished(&whole[..at]), "{note:?} cut at {at}");
            }
        }
    }

    proptest::proptest! {
        /// A well-framed record with arbitrary content parses to an entry of the framed length, or not at all.
        #[test]
        fn whatever_is_framed_is_an_entry_or_none(payload: Vec<u8>, kind in 0..10_u8, behind: Vec<u8>) {
            for payload in [payload.clone(), [&[kind][..], &[7; 16], &payload].concat()] {
                let mut record = (payload.len() as u32).to_le_bytes().to_vec();
                record.extend(crc32fast::hash(&payload).to_le_bytes());
                record.extend(&payload);
                let length = record.len();
                record.extend(&behind);
                if let Some(found) = first(&record.into()) {
                    proptest::prop_assert_eq!(found.length, length);
                    proptest::prop_assert!((FRAME..=length).contains(&found.at));
                }
            }
        }
    }
}

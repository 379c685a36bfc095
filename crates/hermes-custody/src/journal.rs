//! The journal of custody: what a node answers for, as records in files that are only ever appended to.
//!
//! In: entries of exchanges. Out: bytes of records; or the entries of records that were written before. Pure. An exchange's
//! entries may stand in any order and more than once: what is found for an id is put together, and nothing of it counts
//! where one of them says that it is over. Ids are never used again.

use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use hermes_wire::custody::{ExchangeId, Part};
use hermes_wire::varint;

use super::engine::Side;

/// Before a record's payload: its length and its checksum, of four bytes each.
pub(super) const FRAME: usize = 8;
/// No record is longer. What says so is none.
const MOST: usize = 16 << 20;

/// How sure it is that a request has gone to its origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// It was about to.
    Certain,
    /// Nothing says so, and what might is damaged.
    Possible,
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Note {
    /// There is an exchange. Its deadline is in milliseconds since 1970: a restart forgets all other clocks. So long before
    /// that it came.
    Begin { from: Side, account: Arc<str>, deadline: u64, life: u64 },
    /// It goes there.
    Lead { to: Side, account: Arc<str>, is_tunnel: bool },
    /// Its string begins with this, where the one before had so many bytes.
    Head { part: Part, theirs: u64, bytes: Bytes },
    /// Its string goes on with this.
    Bytes { part: Part, offset: u64, is_last: bool, bytes: Bytes },
    /// Its request goes to an origin that must not have it twice.
    Intent(Intent),
    /// Its client was here, and asked this: one that asks the same may have its response.
    Asked { bytes: Bytes },
    /// It has come to nothing, and must not be done again for this neighbour before that time: none of the rest counts any
    /// more.
    Gone { peer: Arc<str>, status: u16, reason: Arc<str>, deadline: u64 },
    /// It is over.
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

/// Adds a record. Where the entry's bytes begin, from its beginning.
pub(super) fn put(id: ExchangeId, note: &Note, out: &mut BytesMut) -> usize {
    let start = out.len();
    out.put_bytes(0, FRAME);
    let mut data = None;
    match note {
        Note::Begin { from, account, deadline, life } => {
            head(BEGIN, id, out);
            varint::encode((*deadline).min(varint::MAX), out);
            varint::encode((*life).min(varint::MAX), out);
            put_side(from, out);
            put_text(account, out);
        }
        Note::Lead { to, account, is_tunnel } => {
            head(if *is_tunnel { LEAD_TUNNEL } else { LEAD }, id, out);
            put_side(to, out);
            put_text(account, out);
        }
        Note::Head { part, theirs, bytes } => {
            head(HEAD, id, out);
            out.put_u8(flags(*part, false));
            varint::encode(*theirs, out);
            data = Some(bytes);
        }
        Note::Bytes { part, offset, is_last, bytes } => {
            head(BYTES, id, out);
            out.put_u8(flags(*part, *is_last));
            varint::encode(*offset, out);
            data = Some(bytes);
        }
        Note::Intent(Intent::Certain) => head(INTENT, id, out),
        Note::Intent(Intent::Possible) => head(DOUBT, id, out),
        Note::Asked { bytes } => {
            head(ASKED, id, out);
            data = Some(bytes);
        }
        Note::Gone { peer, status, reason, deadline } => {
            head(GONE, id, out);
            out.put_u16(*status);
            varint::encode((*deadline).min(varint::MAX), out);
            put_text(peer, out);
            put_text(reason, out);
        }
        Note::Forget => head(FORGET, id, out),
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

fn flags(part: Part, is_last: bool) -> u8 {
    (if part == Part::Response { OF_RESPONSE } else { 0 }) | if is_last { LAST } else { 0 }
}

fn put_text(text: &str, out: &mut BytesMut) {
    varint::encode(text.len() as u64, out);
    out.put_slice(text.as_bytes());
}

/// Nobody's name is empty.
fn put_side(side: &Side, out: &mut BytesMut) {
    match side {
        Side::Here => put_text("", out),
        Side::Peer(peer) => put_text(peer, out),
    }
}

/// A record that was found.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) id: ExchangeId,
    pub(super) note: Note,
    /// Where the entry's bytes begin, from the record's beginning; and how long the record is.
    pub(super) at: usize,
    pub(super) length: usize,
}

/// The first record of these bytes. `None`: there is none, or it was not written whole. What follows one that is damaged
/// is not believed either.
pub(super) fn first(bytes: &Bytes) -> Option<Found> {
    let length = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let sum = u32::from_le_bytes(bytes.get(4..FRAME)?.try_into().ok()?);
    if length > MOST {
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
            Note::Begin { deadline, life, from: side(&mut payload)?, account: text(&mut payload)? }
        }
        LEAD | LEAD_TUNNEL => {
            Note::Lead { to: side(&mut payload)?, account: text(&mut payload)?, is_tunnel: kind == LEAD_TUNNEL }
        }
        HEAD | BYTES if !payload.is_empty() => {
            let flags = payload.get_u8();
            let part = if flags & OF_RESPONSE == 0 { Part::Request } else { Part::Response };
            let number = number(&mut payload)?;
            let bytes = std::mem::take(&mut payload);
            if kind == HEAD {
                Note::Head { part, theirs: number, bytes }
            } else {
                Note::Bytes { part, offset: number, is_last: flags & LAST != 0, bytes }
            }
        }
        INTENT => Note::Intent(Intent::Certain),
        DOUBT => Note::Intent(Intent::Possible),
        // It is kept for long; part of a segment would keep all of it.
        ASKED => Note::Asked { bytes: Bytes::copy_from_slice(&std::mem::take(&mut payload)) },
        GONE if payload.len() >= 2 => {
            let status = payload.get_u16();
            let deadline = number(&mut payload)?;
            Note::Gone { status, deadline, peer: text(&mut payload)?, reason: text(&mut payload)? }
        }
        FORGET => Note::Forget,
        _ => return None,
    };
    let data = match &note {
        Note::Head { bytes, .. } | Note::Bytes { bytes, .. } | Note::Asked { bytes } => bytes.len(),
        _ => 0,
    };
    payload.is_empty().then_some(Found { id, note, at: FRAME + whole - data, length: FRAME + whole })
}

/// Whether these bytes, of which [`first`] makes nothing, are the beginning of a record: more of it was to come.
pub(super) fn is_unfinished(bytes: &[u8]) -> bool {
    let length = bytes.first_chunk().map(|length| u32::from_le_bytes(*length) as usize);
    length.is_none_or(|length| length <= MOST && bytes.len() < FRAME + length)
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

    fn all() -> Vec<Note> {
        let peer = || Side::Peer(Arc::from("next/10.0.0.1:443"));
        vec![
            Note::Begin { from: peer(), account: Arc::from("route"), deadline: 1_700_000_000_000, life: 900_000 },
            Note::Begin { from: Side::Here, account: Arc::from(""), deadline: 0, life: 0 },
            Note::Lead { to: peer(), account: Arc::from("route"), is_tunnel: false },
            Note::Lead { to: Side::Here, account: Arc::from(""), is_tunnel: true },
            Note::Head { part: Part::Response, theirs: 70, bytes: Bytes::from_static(b"head") },
            Note::Bytes { part: Part::Request, offset: 1 << 40, is_last: true, bytes: Bytes::new() },
            Note::Bytes { part: Part::Response, offset: 4, is_last: false, bytes: Bytes::from(vec![5; 100_000]) },
            Note::Intent(Intent::Certain),
            Note::Intent(Intent::Possible),
            Note::Asked { bytes: Bytes::from_static(b"GET /") },
            Note::Gone { peer: Arc::from("n1"), status: 502, reason: Arc::from("so it is"), deadline: 7 },
            Note::Forget,
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
        /// A record whose frame is right, whatever is in it: it is an entry as long as it says, or none.
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

//! Records of custody: what two nodes say to each other of exchanges that they hold, as capsules (RFC 9297) on one stream.
//!
//! In: records, or the payload of a capsule of these types. Out: bytes, or the record. An exchange is a request and its
//! response, each a string of bytes (a message of RFC 9292) that moves by offset: whoever receives says up to where it
//! holds the string, safely, and whoever sends goes on from there, over this stream or the next one. Never: what the
//! strings mean.
//!
//! A stream begins with nothing: both sides know from the one before where they were, and go on at once. Where a receiver
//! has less, or more, it says so and the sender follows.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::{capsule, varint};

/// The protocol's name, in an Upgrade or in `:protocol`.
pub const PROTOCOL: &str = "hermes-custody";
/// The path of such a request.
pub const PATH: &str = "/.well-known/hermes/custody";

/// Capsule types of our own, in the space that anybody may use (RFC 9297, section 5.4).
pub const BEGIN: u64 = 0x2d48_524d_5f43_0001;
/// See [`Record::Data`].
pub const DATA: u64 = 0x2d48_524d_5f43_0002;
/// See [`Record::Held`].
pub const HELD: u64 = 0x2d48_524d_5f43_0003;
/// See [`Record::Gone`].
pub const GONE: u64 = 0x2d48_524d_5f43_0004;
/// See [`Record::Done`].
pub const DONE: u64 = 0x2d48_524d_5f43_0005;

/// Says nothing, and makes the far end acknowledge that it came. No record: whoever reads skips it.
pub const PING: u64 = 0x2d48_524d_5f43_0006;

/// All records.
pub const KINDS: &[u64] = &[BEGIN, DATA, HELD, GONE, DONE];

/// Bytes of a string in one record, at most.
pub const MOST_DATA: usize = 64 << 10;
/// Bytes of a reason.
pub const MOST_REASON: usize = 512;
/// A payload is not longer.
pub const MAX_CAPSULE: usize = MOST_DATA + 16 + 1 + varint::MAX_LEN;

/// Which exchange: chosen at random by the node that took custody of it first, and the same all the way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExchangeId(pub [u8; 16]);

impl std::fmt::Debug for ExchangeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::fmt::Display for ExchangeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Which of an exchange's strings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// To the origin.
    Request,
    /// Back.
    Response,
}

impl Part {
    /// Where it stands in a pair of them.
    pub fn index(self) -> usize {
        usize::from(self == Part::Response)
    }
}

/// What becomes of bytes that were sent and are not held yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Behind {
    /// They will be.
    #[default]
    Taken,
    /// They found no room, and are lost: they wait with who sent them.
    NoRoom,
    /// There is room by now: they are to be sent again.
    Again,
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// The sender of a request has custody of an exchange that the receiver may not know.
    Begin {
        /// Which one.
        id: ExchangeId,
        /// Milliseconds that are left of its time. Not a date: clocks differ.
        left: u64,
    },
    /// Bytes of a string.
    Data {
        /// Of which exchange.
        id: ExchangeId,
        /// Of which of its strings.
        part: Part,
        /// Where they stand in it.
        offset: u64,
        /// It ends with them.
        is_last: bool,
        /// At most [`MOST_DATA`] of them; none where only the end is to be said.
        bytes: Bytes,
    },
    /// The receiver of a string holds it up to here, safely: what was before may be forgotten.
    Held {
        /// Of which exchange.
        id: ExchangeId,
        /// Of which of its strings.
        part: Part,
        /// So many bytes from its beginning.
        upto: u64,
        /// That is all of it, its end too.
        is_whole: bool,
        /// What becomes of what was sent behind that.
        behind: Behind,
    },
    /// The exchange comes to nothing, on either side of this stream.
    Gone {
        /// Which one.
        id: ExchangeId,
        /// The status that its client gets.
        status: u16,
        /// Why, for people; at most [`MOST_REASON`] bytes.
        reason: String,
    },
    /// Nothing more is wanted of it, and it may be forgotten.
    Done {
        /// Which one.
        id: ExchangeId,
    },
}

/// What is wrong with a record. The stream has to be aborted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CustodyError {
    /// It ends too early, or goes on behind its end.
    #[error("a record of custody of type {0:#x} has not the length that it should have")]
    Length(u64),
    /// No such flags.
    #[error("a record of custody has unknown flags: {0:#x}")]
    Flags(u8),
    /// No status of HTTP's.
    #[error("a record of custody says status {0}, which is none")]
    Status(u64),
    /// Its reason is no text.
    #[error("a record of custody has a reason that is no UTF-8")]
    Reason,
    /// A string would be longer than any.
    #[error("a record of custody has bytes beyond the longest string")]
    TooFar,
    /// Of another type.
    #[error("a capsule of type {0:#x} is no record of custody")]
    Kind(u64),
}

/// Flags of `Data` and `Held`.
const OF_RESPONSE: u8 = 1;
const WHOLE: u8 = 2;
/// Of `Held` alone, and not both.
const AGAIN: u8 = 4;
const NO_ROOM: u8 = 8;

impl Record {
    /// As a capsule.
    ///
    /// # Panics
    /// With more bytes than [`MOST_DATA`], or an offset beyond any varint: mistakes of the caller.
    pub fn put(&self, out: &mut BytesMut) {
        let flags = |part: Part, whole: bool| {
            (if part == Part::Response { OF_RESPONSE } else { 0 }) | if whole { WHOLE } else { 0 }
        };
        match self {
            Record::Begin { id, left } => {
                head(BEGIN, id, varint::len(*left), out);
                varint::encode(*left, out);
            }
            Record::Data { id, part, offset, is_last, bytes } => {
                assert!(bytes.len() <= MOST_DATA, "a record of {} bytes", bytes.len());
                head(DATA, id, 1 + varint::len(*offset) + bytes.len(), out);
                out.put_u8(flags(*part, *is_last));
                varint::encode(*offset, out);
                out.put_slice(bytes);
            }
            Record::Held { id, part, upto, is_whole, behind } => {
                head(HELD, id, 1 + varint::len(*upto), out);
                let behind = match behind {
                    Behind::Taken => 0,
                    Behind::NoRoom => NO_ROOM,
                    Behind::Again => AGAIN,
                };
                out.put_u8(flags(*part, *is_whole) | behind);
                varint::encode(*upto, out);
            }
            Record::Gone { id, status, reason } => {
                let reason = shortened(reason);
                head(GONE, id, varint::len(u64::from(*status)) + reason.len(), out);
                varint::encode(u64::from(*status), out);
                out.put_slice(reason.as_bytes());
            }
            Record::Done { id } => head(DONE, id, 0, out),
        }
    }

    /// The record in a capsule.
    ///
    /// # Errors
    /// It is malformed, or of another type.
    pub fn parse(kind: u64, mut payload: Bytes) -> Result<Self, CustodyError> {
        if !KINDS.contains(&kind) {
            return Err(CustodyError::Kind(kind));
        }
        let wrong = || CustodyError::Length(kind);
        let id = payload.get(..16).and_then(|id| id.try_into().ok()).map(ExchangeId).ok_or_else(wrong)?;
        payload.advance(16);
        let record = match kind {
            BEGIN => Record::Begin { id, left: number(&mut payload).ok_or_else(wrong)? },
            DATA => {
                let (part, is_last, behind) = flags(&mut payload, kind)?;
                if behind != 0 {
                    return Err(CustodyError::Flags(behind));
                }
                let offset = number(&mut payload).ok_or_else(wrong)?;
                let bytes = std::mem::take(&mut payload);
                if bytes.len() > MOST_DATA {
                    return Err(wrong());
                }
                if offset + bytes.len() as u64 > varint::MAX {
                    return Err(CustodyError::TooFar);
                }
                Record::Data { id, part, offset, is_last, bytes }
            }
            HELD => {
                let (part, is_whole, behind) = flags(&mut payload, kind)?;
                let behind = match behind {
                    0 => Behind::Taken,
                    NO_ROOM => Behind::NoRoom,
                    AGAIN => Behind::Again,
                    both => return Err(CustodyError::Flags(both)),
                };
                Record::Held { id, part, upto: number(&mut payload).ok_or_else(wrong)?, is_whole, behind }
            }
            GONE => {
                let status = number(&mut payload).ok_or_else(wrong)?;
                let known = u16::try_from(status).ok().filter(|status| (400..600).contains(status));
                let bytes = std::mem::take(&mut payload);
                if bytes.len() > MOST_REASON {
                    return Err(wrong());
                }
                let reason = String::from_utf8(bytes.to_vec()).map_err(|_| CustodyError::Reason)?;
                Record::Gone { id, status: known.ok_or(CustodyError::Status(status))?, reason }
            }
            _ => Record::Done { id },
        };
        if payload.is_empty() { Ok(record) } else { Err(wrong()) }
    }
}

fn head(kind: u64, id: &ExchangeId, rest: usize, out: &mut BytesMut) {
    let length = id.0.len() + rest;
    out.reserve(2 * varint::MAX_LEN + length);
    varint::encode(kind, out);
    varint::encode(length as u64, out);
    out.put_slice(&id.0);
}

/// At most [`MOST_REASON`] bytes of it, whole characters.
fn shortened(reason: &str) -> &str {
    let mut end = reason.len().min(MOST_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}

fn number(payload: &mut Bytes) -> Option<u64> {
    let (value, length) = varint::decode(payload)?;
    payload.advance(length);
    Some(value)
}

/// Which string, whether that is all, and what there is beside.
fn flags(payload: &mut Bytes, kind: u64) -> Result<(Part, bool, u8), CustodyError> {
    if payload.is_empty() {
        return Err(CustodyError::Length(kind));
    }
    let flags = payload.get_u8();
    if flags & !(OF_RESPONSE | WHOLE | AGAIN | NO_ROOM) != 0 {
        return Err(CustodyError::Flags(flags));
    }
    let part = if flags & OF_RESPONSE == 0 { Part::Request } else { Part::Response };
    Ok((part, flags & WHOLE != 0, flags & (AGAIN | NO_ROOM)))
}

/// Writes what says nothing.
pub fn put_ping(out: &mut BytesMut) {
    varint::encode(PING, out);
    varint::encode(0, out);
}

/// A decoder of streams of records: all else on them is skipped.
pub fn decoder() -> capsule::CapsuleDecoder {
    capsule::CapsuleDecoder::new(0).keeping(KINDS, MAX_CAPSULE)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::capsule::Capsule;

    const ID: ExchangeId = ExchangeId([7; 16]);

    fn all() -> Vec<Record> {
        let data = |offset, is_last, bytes: &'static [u8]| Record::Data {
            id: ID,
            part: Part::Response,
            offset,
            is_last,
            bytes: Bytes::from_static(bytes),
        };
        vec![
            Record::Begin { id: ID, left: 900_000 },
            data(0, false, b"hello"),
            data(1 << 40, true, b""),
            Record::Held { id: ID, part: Part::Request, upto: 5, is_whole: false, behind: Behind::Again },
            Record::Held { id: ID, part: Part::Request, upto: 5, is_whole: false, behind: Behind::NoRoom },
            Record::Held { id: ID, part: Part::Response, upto: varint::MAX, is_whole: true, behind: Behind::Taken },
            Record::Gone { id: ID, status: 504, reason: "its time is over".to_owned() },
            Record::Done { id: ID },
        ]
    }

    #[test]
    fn what_is_put_is_read_in_any_pieces() {
        let mut out = BytesMut::new();
        all().iter().for_each(|record| record.put(&mut out));
        let out = out.freeze();
        for size in [1, 3, 17, out.len()] {
            let (mut decoder, mut read) = (decoder(), Vec::new());
            for piece in out.chunks(size) {
                decoder.push(Bytes::copy_from_slice(piece));
                while let Some(capsule) = decoder.next().unwrap() {
                    let Capsule::Kept { kind, payload } = capsule else { panic!("{capsule:?}") };
                    read.push(Record::parse(kind, payload).unwrap());
                }
            }
            assert_eq!(read, all(), "pieces of {size}");
            decoder.finish().unwrap();
        }
    }

    #[test]
    fn what_is_malformed_is_an_error() {
        let id = |rest: &[u8]| Bytes::from([&[7; 16][..], rest].concat());
        for kind in KINDS {
            assert_eq!(Record::parse(*kind, Bytes::from_static(&[7; 15])), Err(CustodyError::Length(*kind)));
        }
        let long = [&[0, 0][..], &[0; MOST_DATA + 1]].concat();
        let far = [&[0][..], &[0xff; 8], &[1]].concat();
        let cases = [
            (BEGIN, id(&[]), CustodyError::Length(BEGIN)),
            (BEGIN, id(&[1, 1]), CustodyError::Length(BEGIN)),
            (DATA, id(&[4, 0]), CustodyError::Flags(4)),
            (DATA, id(&[0]), CustodyError::Length(DATA)),
            (DATA, id(&long), CustodyError::Length(DATA)),
            (DATA, id(&far), CustodyError::TooFar),
            (HELD, id(&[0, 1, 1]), CustodyError::Length(HELD)),
            (HELD, id(&[12, 1]), CustodyError::Flags(12)),
            (HELD, id(&[16, 1]), CustodyError::Flags(16)),
            (GONE, id(&[0x40, 200]), CustodyError::Status(200)),
            (GONE, id(&[0x41, 0xf8, 0xff]), CustodyError::Reason),
            (DONE, id(&[0]), CustodyError::Length(DONE)),
            (9, id(&[]), CustodyError::Kind(9)),
        ];
        for (kind, payload, error) in cases {
            assert_eq!(Record::parse(kind, payload.clone()), Err(error), "{kind:#x} {payload:?}");
        }
    }

    #[test]
    fn a_reason_is_cut_between_characters() {
        let reason = "ü".repeat(MOST_REASON);
        let mut out = BytesMut::new();
        Record::Gone { id: ID, status: 502, reason }.put(&mut out);
        let mut decoder = decoder();
        decoder.push(out.freeze());
        let Ok(Some(Capsule::Kept { kind, payload })) = decoder.next() else { panic!("no capsule") };
        let Ok(Record::Gone { reason, .. }) = Record::parse(kind, payload) else { panic!("no record") };
        assert_eq!(reason, "ü".repeat(MOST_REASON / 2));
    }
}

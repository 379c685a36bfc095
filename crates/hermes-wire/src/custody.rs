//! Records of the custody protocol: capsules (RFC 9297) on one stream by which two nodes transfer custody of exchanges.
//!
//! In: records, or the payload of a capsule of these types. Out: bytes, or a record. An exchange is a request and its
//! response. Each is a byte stream (a message of RFC 9292) with offsets. The receiver acknowledges the offset up to
//! which it has stored the bytes safely, and the sender continues from there, on this connection or the next. Never:
//! the contents of these byte streams.
//!
//! A connection has no handshake: both sides know their offsets from the previous one, and continue immediately. If a
//! receiver has stored less or more, it sends its offset and the sender follows.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::{capsule, varint};

/// The protocol's name, in `Upgrade` or in `:protocol`.
pub const PROTOCOL: &str = "hermes-custody";
/// The path of the request.
pub const PATH: &str = "/.well-known/hermes/custody";

/// Capsule types, from the range for private use (RFC 9297, section 5.4).
pub const BEGIN: u64 = 0x2d48_524d_5f43_0001;
/// The type of [`Record::Data`].
pub const DATA: u64 = 0x2d48_524d_5f43_0002;
/// The type of [`Record::Held`].
pub const HELD: u64 = 0x2d48_524d_5f43_0003;
/// The type of [`Record::Gone`].
pub const GONE: u64 = 0x2d48_524d_5f43_0004;
/// The type of [`Record::Done`].
pub const DONE: u64 = 0x2d48_524d_5f43_0005;

/// An empty capsule that makes the peer's kernel acknowledge it. No record: receivers skip it.
pub const PING: u64 = 0x2d48_524d_5f43_0006;

/// The types of all records.
pub const KINDS: &[u64] = &[BEGIN, DATA, HELD, GONE, DONE];

/// Maximum number of data bytes in one record.
pub const MAX_DATA: usize = 64 << 10;
/// Maximum number of bytes of a reason.
pub const MAX_REASON: usize = 512;
/// The longest payload of a record.
pub const MAX_CAPSULE: usize = MAX_DATA + 16 + 1 + varint::MAX_LEN;

/// The identifier of an exchange: a random number of the first node that took custody, the same on all hops.
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

/// The direction of a byte stream of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// The request, towards the origin.
    Request,
    /// The response.
    Response,
}

impl Direction {
    /// The index of the direction in a pair.
    pub fn index(self) -> usize {
        usize::from(self == Direction::Response)
    }
}

/// The state of bytes that were sent after the acknowledged offset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AckReason {
    /// The receiver will store them.
    #[default]
    Taken,
    /// The receiver had no room and dropped them: the sender waits.
    NoRoom,
    /// The receiver has room again: the sender must send them again.
    Again,
}

/// A record of the custody protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// The sender of a request has custody of an exchange that the receiver may not know.
    Begin {
        /// The exchange.
        id: ExchangeId,
        /// The remaining time in milliseconds, not a date: clocks differ.
        left: u64,
    },
    /// Bytes of a byte stream.
    Data {
        /// The exchange.
        id: ExchangeId,
        /// The direction.
        part: Direction,
        /// The offset of the first byte.
        offset: u64,
        /// The byte stream ends with these bytes (FIN).
        is_last: bool,
        /// At most [`MAX_DATA`] bytes; empty to send only the end.
        bytes: Bytes,
    },
    /// Acknowledgement: the receiver has safely stored all bytes before this offset, so the sender may delete them.
    Held {
        /// The exchange.
        id: ExchangeId,
        /// The direction.
        part: Direction,
        /// The offset up to which all bytes are stored.
        upto: u64,
        /// The whole byte stream is stored, including its end.
        is_whole: bool,
        /// The state of the bytes after the offset.
        behind: AckReason,
    },
    /// The exchange has failed, on either side of this connection.
    Gone {
        /// The exchange.
        id: ExchangeId,
        /// The status code of the client's response.
        status: u16,
        /// A readable reason; at most [`MAX_REASON`] bytes.
        reason: String,
    },
    /// The exchange is complete, and may be forgotten.
    Done {
        /// The exchange.
        id: ExchangeId,
    },
}

/// An error in a record. The stream must be aborted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CustodyError {
    /// The record ends too early, or has extra bytes.
    #[error("custody record of type {0:#x}: wrong length")]
    Length(u64),
    /// The flags are unknown.
    #[error("custody record: unknown flags {0:#x}")]
    Flags(u8),
    /// The status is not a valid HTTP error status.
    #[error("custody record: invalid status {0}")]
    Status(u64),
    /// The reason is not text.
    #[error("custody record: reason is not UTF-8")]
    Reason,
    /// The offset is beyond the longest byte stream.
    #[error("custody record: offset beyond the maximum")]
    TooFar,
    /// The capsule type is not that of a record.
    #[error("capsule type {0:#x} is not a custody record")]
    Kind(u64),
}

/// Flags of `Data` and `Held`.
const OF_RESPONSE: u8 = 1;
const WHOLE: u8 = 2;
/// Flags of `Held` alone; they exclude each other.
const RESEND: u8 = 4;
const NO_ROOM: u8 = 8;

impl Record {
    /// Encodes the record as a capsule.
    ///
    /// # Panics
    /// If there are more bytes than [`MAX_DATA`], or an offset exceeds the maximum of a varint: errors of the caller.
    pub fn put(&self, out: &mut BytesMut) {
        let flags = |part: Direction, whole: bool| {
            (if part == Direction::Response { OF_RESPONSE } else { 0 }) | if whole { WHOLE } else { 0 }
        };
        match self {
            Record::Begin { id, left } => {
                head(BEGIN, id, varint::len(*left), out);
                varint::encode(*left, out);
            }
            Record::Data { id, part, offset, is_last, bytes } => {
                assert!(bytes.len() <= MAX_DATA, "a record of {} bytes", bytes.len());
                head(DATA, id, 1 + varint::len(*offset) + bytes.len(), out);
                out.put_u8(flags(*part, *is_last));
                varint::encode(*offset, out);
                out.put_slice(bytes);
            }
            Record::Held { id, part, upto, is_whole, behind } => {
                head(HELD, id, 1 + varint::len(*upto), out);
                let behind = match behind {
                    AckReason::Taken => 0,
                    AckReason::NoRoom => NO_ROOM,
                    AckReason::Again => RESEND,
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

    /// Parses the payload of a capsule.
    ///
    /// # Errors
    /// The record is malformed, or of another type.
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
                if bytes.len() > MAX_DATA {
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
                    0 => AckReason::Taken,
                    NO_ROOM => AckReason::NoRoom,
                    RESEND => AckReason::Again,
                    both => return Err(CustodyError::Flags(both)),
                };
                Record::Held { id, part, upto: number(&mut payload).ok_or_else(wrong)?, is_whole, behind }
            }
            GONE => {
                let status = number(&mut payload).ok_or_else(wrong)?;
                let known = u16::try_from(status).ok().filter(|status| (400..600).contains(status));
                let bytes = std::mem::take(&mut payload);
                if bytes.len() > MAX_REASON {
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

/// At most [`MAX_REASON`] bytes of a reason, cut between characters.
fn shortened(reason: &str) -> &str {
    let mut end = reason.len().min(MAX_REASON);
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

/// The direction, whether the byte stream is complete, and the flags of `Held`.
fn flags(payload: &mut Bytes, kind: u64) -> Result<(Direction, bool, u8), CustodyError> {
    if payload.is_empty() {
        return Err(CustodyError::Length(kind));
    }
    let flags = payload.get_u8();
    if flags & !(OF_RESPONSE | WHOLE | RESEND | NO_ROOM) != 0 {
        return Err(CustodyError::Flags(flags));
    }
    let part = if flags & OF_RESPONSE == 0 { Direction::Request } else { Direction::Response };
    Ok((part, flags & WHOLE != 0, flags & (RESEND | NO_ROOM)))
}

/// Encodes a ping, which every receiver skips.
pub fn put_ping(out: &mut BytesMut) {
    varint::encode(PING, out);
    varint::encode(0, out);
}

/// A decoder for streams of records, which skips all other capsules.
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
            part: Direction::Response,
            offset,
            is_last,
            bytes: Bytes::from_static(bytes),
        };
        vec![
            Record::Begin { id: ID, left: 900_000 },
            data(0, false, b"hello"),
            data(1 << 40, true, b""),
            Record::Held { id: ID, part: Direction::Request, upto: 5, is_whole: false, behind: AckReason::Again },
            Record::Held { id: ID, part: Direction::Request, upto: 5, is_whole: false, behind: AckReason::NoRoom },
            Record::Held {
                id: ID,
                part: Direction::Response,
                upto: varint::MAX,
                is_whole: true,
                behind: AckReason::Taken,
            },
            Record::Gone { id: ID, status: 504, reason: "deadline exceeded".to_owned() },
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
        let long = [&[0, 0][..], &[0; MAX_DATA + 1]].concat();
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
        let reason = "ü".repeat(MAX_REASON);
        let mut out = BytesMut::new();
        Record::Gone { id: ID, status: 502, reason }.put(&mut out);
        let mut decoder = decoder();
        decoder.push(out.freeze());
        let Ok(Some(Capsule::Kept { kind, payload })) = decoder.next() else { panic!("no capsule") };
        let Ok(Record::Gone { reason, .. }) = Record::parse(kind, payload) else { panic!("no record") };
        assert_eq!(reason, "ü".repeat(MAX_REASON / 2));
    }
}

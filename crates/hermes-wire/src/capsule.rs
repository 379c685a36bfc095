//! The Capsule Protocol (RFC 9297), and the datagrams of CONNECT-UDP in it (RFC 9298).
//!
//! In: the bytes of a request stream's body, in pieces of any size. Out: HTTP Datagrams, without copying if a capsule
//! lies within one piece. Capsules of other types are skipped without buffering, regardless of their length. The caller
//! can request some types as whole capsules, or all others unchanged for forwarding. The decoder holds at most one
//! incomplete capsule and one piece. It never continues after an error, because the boundary between capsules is lost
//! then.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::varint;

/// Capsule type of an HTTP Datagram (RFC 9297, section 3.5).
pub const DATAGRAM: u64 = 0x00;

/// The longest payload of a UDP datagram that CONNECT-UDP may carry (RFC 9298, section 5).
pub const MAX_UDP_PAYLOAD: usize = 65_527;

/// The longest IP packet that CONNECT-IP carries: the maximum of IPv4; jumbograms are not carried.
pub const MAX_PACKET: usize = 65_535;

/// A limit for [`CapsuleDecoder::new`] that admits every datagram of CONNECT-UDP and CONNECT-IP: the longest packet
/// after the longest context identifier.
pub const MAX_HTTP_DATAGRAM: usize = MAX_PACKET + varint::MAX_LEN;

/// Maximum number of bytes that [`put_datagram`] adds to a payload: type, length, context identifier.
pub const MAX_DATAGRAM_OVERHEAD: usize = 1 + varint::len(MAX_PACKET as u64 + 1) + 1;

/// The longest type and length before a capsule's payload.
const MAX_HEADER: usize = 2 * varint::MAX_LEN;

/// The context identifier of UDP payloads (RFC 9298, section 5), and of IP packets (RFC 9484, section 6).
const UDP_CONTEXT: u64 = 0;

/// A decoded capsule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Capsule {
    /// The payload of a DATAGRAM capsule, with its context identifier: see [`udp_payload`].
    Datagram(Bytes),
    /// A capsule of another type. Receivers must skip it silently (RFC 9297, section 3.2). It is reported once its
    /// header is complete; its payload is dropped as it arrives.
    Unknown {
        /// The capsule type.
        kind: u64,
        /// The length of its payload in bytes.
        length: u64,
    },
    /// A whole capsule of a requested type: see [`CapsuleDecoder::keeping`].
    Kept {
        /// The capsule type.
        kind: u64,
        /// The payload.
        payload: Bytes,
    },
    /// A part of a capsule, unchanged: see [`CapsuleDecoder::passing`].
    Piece(Bytes),
}

/// The reason why a stream of capsules, or a datagram in it, is malformed. The stream must be aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CapsuleError {
    /// A capsule exceeds the decoder's limit.
    #[error("capsule of type {kind} with {length} bytes exceeds the limit of {limit} bytes")]
    TooLong {
        /// The capsule type.
        kind: u64,
        /// The length of the capsule, by its header.
        length: u64,
        /// The limit of the decoder.
        limit: usize,
    },
    /// The stream ended within a capsule's type or length.
    #[error("stream ended within a capsule header")]
    TruncatedHeader,
    /// The stream ended within a capsule's payload.
    #[error("stream ended within a capsule: {missing} bytes of its payload are missing")]
    TruncatedPayload {
        /// The number of missing bytes.
        missing: u64,
    },
    /// An HTTP Datagram is too short for its context identifier.
    #[error("HTTP Datagram of {length} bytes is too short for its context identifier")]
    NoContext {
        /// The length of the HTTP Datagram.
        length: usize,
    },
    /// A payload is too long for a UDP datagram.
    #[error("UDP payload of {length} bytes exceeds the maximum of {MAX_UDP_PAYLOAD}")]
    PayloadTooLong {
        /// The length of the payload.
        length: usize,
    },
}

/// Splits a byte stream into capsules.
///
/// Call [`push`](Self::push) with each piece that arrives, then [`next`](Self::next) until it returns `None`, and
/// [`finish`](Self::finish) at the end of the stream. Memory: one incomplete capsule (at most its limit) and the unread
/// rest of the last piece.
#[derive(Debug)]
pub struct CapsuleDecoder {
    max_datagram: usize,
    /// Types of the capsules that are returned whole, and their maximum length.
    kept: (&'static [u64], usize),
    /// All other capsules are returned in parts instead of skipped.
    passes: bool,
    /// The unread bytes of the last push.
    unread: Bytes,
    state: State,
}

/// The position of the first byte of `unread` within a capsule.
#[derive(Debug)]
enum State {
    /// At a boundary, or within a type and length that began in an earlier piece.
    Header { seen: [u8; MAX_HEADER], len: usize },
    /// Within the payload of a whole capsule that began in an earlier piece.
    Whole { kind: u64, seen: BytesMut, missing: usize },
    /// Within the payload of a skipped capsule.
    Skip { missing: u64 },
    /// Within the payload of a forwarded capsule.
    Pass { missing: u64 },
    /// After an error: the boundaries are lost.
    Failed(CapsuleError),
}

impl State {
    const BOUNDARY: Self = Self::Header { seen: [0; MAX_HEADER], len: 0 };
}

/// The type and the length before a capsule's payload.
#[derive(Clone, Copy)]
struct Header {
    kind: u64,
    length: u64,
    /// The number of bytes of both.
    size: usize,
}

impl Header {
    #[inline]
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (kind, kind_len) = varint::decode(bytes)?;
        let (length, length_len) = varint::decode(&bytes[kind_len..])?;
        Some(Self { kind, length, size: kind_len + length_len })
    }
}

impl CapsuleDecoder {
    /// A decoder that rejects DATAGRAM capsules whose payload, including the context identifier, is longer than
    /// `max_datagram` bytes. [`MAX_HTTP_DATAGRAM`] admits all of CONNECT-UDP.
    pub fn new(max_datagram: usize) -> Self {
        Self { max_datagram, kept: (&[], 0), passes: false, unread: Bytes::new(), state: State::BOUNDARY }
    }

    /// Returns capsules of these types whole. A longer one than `most` bytes is an error.
    #[must_use]
    pub fn keeping(self, kinds: &'static [u64], most: usize) -> Self {
        Self { kept: (kinds, most), ..self }
    }

    /// Returns all other capsules unchanged, in parts, for an intermediary to forward (RFC 9297, section 3.2). The
    /// parts of one capsule must stay adjacent: see [`is_between`](Self::is_between).
    #[must_use]
    pub fn passing(self) -> Self {
        Self { passes: true, ..self }
    }

    /// Whether the returned bytes so far end at the end of a capsule.
    pub fn is_between(&self) -> bool {
        !matches!(self.state, State::Pass { .. })
    }

    /// Adds the next piece.
    ///
    /// Call it when [`next`](Self::next) has returned `None`: the previous piece is then used up. An earlier call is
    /// correct, too, but copies both pieces.
    pub fn push(&mut self, bytes: Bytes) {
        if matches!(self.state, State::Failed(_)) {
            return;
        }
        if self.unread.is_empty() {
            self.unread = bytes;
            return;
        }
        let mut joined = BytesMut::with_capacity(self.unread.len() + bytes.len());
        joined.extend_from_slice(&self.unread);
        joined.extend_from_slice(&bytes);
        self.unread = joined.freeze();
    }

    /// Returns the next capsule; `None` if more bytes are needed.
    ///
    /// # Errors
    /// [`CapsuleError::TooLong`], also at every later call.
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "an iterator would end at the first None")]
    pub fn next(&mut self) -> Result<Option<Capsule>, CapsuleError> {
        // The usual case first: at a boundary, with a complete capsule.
        if let State::Header { len: 0, .. } = self.state
            && let Some(header) = Header::parse(&self.unread)
        {
            if self.passes(header.kind) {
                let raw = self.unread.split_to(header.size);
                return Ok(Some(self.pass_header(header, raw)));
            }
            self.unread.advance(header.size);
            return self.begin(header);
        }
        self.resume()
    }

    /// Checks that the stream may end here: only between two capsules. A capsule cut off by the end of its stream is
    /// malformed (RFC 9297, section 3.3).
    ///
    /// # Errors
    /// The missing part, or the error that [`next`](Self::next) returned.
    pub fn finish(&self) -> Result<(), CapsuleError> {
        let unread = self.unread.len() as u64;
        match &self.state {
            State::Failed(error) => Err(*error),
            State::Whole { missing, .. } => {
                Err(CapsuleError::TruncatedPayload { missing: (*missing as u64).saturating_sub(unread) })
            }
            State::Skip { missing } | State::Pass { missing } => {
                Err(CapsuleError::TruncatedPayload { missing: missing.saturating_sub(unread) })
            }
            State::Header { len: 0, .. } if unread == 0 => Ok(()),
            State::Header { .. } => Err(CapsuleError::TruncatedHeader),
        }
    }

    /// Starts the payload after a header that has just been consumed.
    #[inline]
    fn begin(&mut self, header: Header) -> Result<Option<Capsule>, CapsuleError> {
        let Header { kind, length, .. } = header;
        let (kept, most) = self.kept;
        let limit = if kind == DATAGRAM {
            self.max_datagram
        } else if kept.contains(&kind) {
            most
        } else {
            self.skip(length);
            return Ok(Some(Capsule::Unknown { kind, length }));
        };
        if length > limit as u64 {
            return Err(self.fail(CapsuleError::TooLong { kind, length, limit }));
        }
        // The cast is lossless: the length is at most `limit`, a usize.
        let length = length as usize;
        if self.unread.len() >= length {
            self.state = State::BOUNDARY;
            return Ok(Some(whole(kind, self.unread.split_to(length))));
        }
        let mut seen = BytesMut::with_capacity(length);
        seen.extend_from_slice(&self.unread);
        self.state = State::Whole { kind, missing: length - seen.len(), seen };
        self.unread = Bytes::new();
        Ok(None)
    }

    /// Continues a capsule that began in an earlier piece.
    fn resume(&mut self) -> Result<Option<Capsule>, CapsuleError> {
        if let State::Skip { missing } = self.state {
            self.skip(missing);
        }
        match &mut self.state {
            State::Failed(error) => Err(*error),
            State::Skip { .. } => Ok(None),
            State::Pass { missing } => {
                let here = (*missing).min(self.unread.len() as u64);
                if here == 0 {
                    return Ok(None);
                }
                self.state = Self::passing_on(*missing - here);
                Ok(Some(Capsule::Piece(self.unread.split_to(here as usize))))
            }
            State::Header { .. } => match self.gather_header() {
                Some(header) if self.passes(header.kind) => {
                    let raw = self.gathered();
                    Ok(Some(self.pass_header(header, raw)))
                }
                Some(header) => self.begin(header),
                None => Ok(None),
            },
            State::Whole { kind, seen, missing } => {
                let more = self.unread.split_to(self.unread.len().min(*missing));
                seen.extend_from_slice(&more);
                *missing -= more.len();
                if *missing > 0 {
                    return Ok(None);
                }
                let capsule = whole(*kind, seen.split().freeze());
                self.state = State::BOUNDARY;
                Ok(Some(capsule))
            }
        }
    }

    /// Moves bytes until they make a header, one by one since there are at most sixteen. The rest of the piece stays
    /// unread; an incomplete header does not keep the piece.
    fn gather_header(&mut self) -> Option<Header> {
        let State::Header { seen, len } = &mut self.state else {
            return None;
        };
        while self.unread.has_remaining() {
            // In bounds, since sixteen bytes always make a header.
            seen[*len] = self.unread.get_u8();
            *len += 1;
            if let Some(header) = Header::parse(&seen[..*len]) {
                return Some(header);
            }
        }
        self.unread = Bytes::new();
        None
    }

    /// Drops the available part of `missing` skipped bytes, and remembers the rest.
    fn skip(&mut self, missing: u64) {
        let here = missing.min(self.unread.len() as u64);
        // The cast is lossless: the value is at most the length of a slice.
        self.unread.advance(here as usize);
        self.state = match missing - here {
            0 => State::BOUNDARY,
            missing => State::Skip { missing },
        };
    }

    fn passes(&self, kind: u64) -> bool {
        self.passes && kind != DATAGRAM && !self.kept.0.contains(&kind)
    }

    fn gathered(&self) -> Bytes {
        match &self.state {
            State::Header { seen, len } => Bytes::copy_from_slice(&seen[..*len]),
            _ => Bytes::new(),
        }
    }

    fn pass_header(&mut self, header: Header, raw: Bytes) -> Capsule {
        self.state = Self::passing_on(header.length);
        Capsule::Piece(raw)
    }

    fn passing_on(missing: u64) -> State {
        if missing == 0 { State::BOUNDARY } else { State::Pass { missing } }
    }

    #[cold]
    fn fail(&mut self, error: CapsuleError) -> CapsuleError {
        self.unread = Bytes::new();
        self.state = State::Failed(error);
        error
    }
}

fn whole(kind: u64, payload: Bytes) -> Capsule {
    if kind == DATAGRAM { Capsule::Datagram(payload) } else { Capsule::Kept { kind, payload } }
}

/// Type and total length, including the header, of the capsule at the front of these bytes; `None` if its header is
/// incomplete.
pub fn first(bytes: &[u8]) -> Option<(u64, u64)> {
    let header = Header::parse(bytes)?;
    Some((header.kind, header.length.saturating_add(header.size as u64)))
}

/// Appends a capsule of any type.
pub fn put(out: &mut BytesMut, kind: u64, payload: &[u8]) {
    varint::encode(kind, out);
    varint::encode(payload.len() as u64, out);
    out.put_slice(payload);
}

/// Appends a DATAGRAM capsule with `payload` as a UDP payload, or as an IP packet: both have the context identifier 0.
///
/// Adds at most [`MAX_DATAGRAM_OVERHEAD`] bytes to a payload of at most [`MAX_PACKET`]. A longer payload is neither,
/// and the peer would have to abort the stream.
#[inline]
pub fn put_datagram(out: &mut BytesMut, payload: &[u8]) {
    debug_assert!(payload.len() <= MAX_PACKET, "{} bytes exceed the longest packet", payload.len());
    let length = varint::len(UDP_CONTEXT) + payload.len();
    out.reserve(payload.len() + MAX_DATAGRAM_OVERHEAD);
    varint::encode(DATAGRAM, out);
    varint::encode(length as u64, out);
    varint::encode(UDP_CONTEXT, out);
    out.put_slice(payload);
}

/// The UDP payload of an HTTP Datagram (RFC 9298, section 5).
///
/// `None`: a context other than 0. No other was agreed on, so the datagram is dropped.
///
/// # Errors
/// [`CapsuleError::NoContext`] if the context identifier is missing or cut off, [`CapsuleError::PayloadTooLong`] if the
/// payload is too long for a UDP datagram. The receiver must abort the stream in both cases (RFC 9298).
#[inline]
pub fn udp_payload(datagram: Bytes) -> Result<Option<Bytes>, CapsuleError> {
    match packet(datagram)? {
        Some(payload) if payload.len() > MAX_UDP_PAYLOAD => Err(CapsuleError::PayloadTooLong { length: payload.len() }),
        payload => Ok(payload),
    }
}

/// The IP packet of an HTTP Datagram (RFC 9484, section 6), not validated.
///
/// `None`: a context other than 0, as in [`udp_payload`].
///
/// # Errors
/// [`CapsuleError::NoContext`] if the context identifier is missing or cut off.
#[inline]
pub fn packet(mut datagram: Bytes) -> Result<Option<Bytes>, CapsuleError> {
    let Some((context, size)) = varint::decode(&datagram) else {
        return Err(CapsuleError::NoContext { length: datagram.len() });
    };
    datagram.advance(size);
    Ok((context == UDP_CONTEXT).then_some(datagram))
}

#[cfg(test)]
mod tests;

//! The Capsule Protocol (RFC 9297) and the datagrams of CONNECT-UDP inside it (RFC 9298).
//!
//! In: the bytes of a request stream's body, in whatever pieces they arrive. Out: HTTP Datagrams
//! without copying, wherever a capsule lies within one piece. Capsules of other types are
//! skipped without being held, whatever length they claim; who wants some of them whole, or has to
//! pass them on as they came, says so. The decoder holds at most one unfinished capsule and one
//! piece; it never resumes after an error, because the boundary between capsules is lost then.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::varint;

/// Capsule type of an HTTP Datagram (RFC 9297, section 3.5).
pub const DATAGRAM: u64 = 0x00;

/// The longest payload of a UDP datagram that CONNECT-UDP may carry (RFC 9298, section 5).
pub const MAX_UDP_PAYLOAD: usize = 65_527;

/// The longest IP packet that CONNECT-IP carries: of IPv4 none is longer, and jumbograms are not carried.
pub const MAX_PACKET: usize = 65_535;

/// A limit for [`CapsuleDecoder::new`] that admits every datagram of CONNECT-UDP and CONNECT-IP: the
/// longest of them behind the longest context identifier.
pub const MAX_HTTP_DATAGRAM: usize = MAX_PACKET + varint::MAX_LEN;

/// The most that [`put_datagram`] adds to a payload: type, length, context identifier.
pub const MAX_DATAGRAM_OVERHEAD: usize = 1 + varint::len(MAX_PACKET as u64 + 1) + 1;

/// The longest type and length in front of a capsule's payload.
const MAX_HEADER: usize = 2 * varint::MAX_LEN;

/// The context identifier of UDP payloads (RFC 9298, section 5), and of IP packets (RFC 9484, section 6).
const UDP_CONTEXT: u64 = 0;

/// One capsule, as the decoder hands it out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Capsule {
    /// The payload of a DATAGRAM capsule, its context identifier still in front:
    /// see [`udp_payload`].
    Datagram(Bytes),
    /// A capsule of another type. RFC 9297, section 3.2 has receivers skip it silently. It is
    /// reported as soon as its header is read; its payload is dropped as it arrives.
    Unknown {
        /// The capsule type.
        kind: u64,
        /// The length of its payload in bytes.
        length: u64,
    },
    /// A whole capsule of a type that was asked for: see [`CapsuleDecoder::keeping`].
    Kept {
        /// The capsule type.
        kind: u64,
        /// Its payload.
        payload: Bytes,
    },
    /// A piece of a capsule, as it came: see [`CapsuleDecoder::passing`].
    Piece(Bytes),
}

/// Why a stream of capsules, or a datagram in it, is malformed. The stream has to be aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CapsuleError {
    /// A DATAGRAM capsule longer than the decoder's limit.
    #[error("a capsule of type {kind} and of {length} bytes exceeds the limit of {limit} bytes")]
    TooLong {
        /// Its type.
        kind: u64,
        /// The length that the capsule claims.
        length: u64,
        /// The limit that the decoder was given.
        limit: usize,
    },
    /// The stream ended within a capsule's type or length.
    #[error("the stream ended within the header of a capsule")]
    TruncatedHeader,
    /// The stream ended within a capsule's payload.
    #[error("the stream ended within a capsule: {missing} bytes of its payload are missing")]
    TruncatedPayload {
        /// How many bytes should have followed.
        missing: u64,
    },
    /// An HTTP Datagram too short to hold its context identifier.
    #[error("an HTTP Datagram of {length} bytes is too short for its context identifier")]
    NoContext {
        /// The length of the HTTP Datagram.
        length: usize,
    },
    /// A UDP payload that no UDP datagram can hold.
    #[error("a UDP payload of {length} bytes exceeds the {MAX_UDP_PAYLOAD} bytes that UDP can carry")]
    PayloadTooLong {
        /// The length of the payload.
        length: usize,
    },
}

/// Cuts a stream of bytes into capsules.
///
/// Call [`push`](Self::push) with each piece that arrives, then [`next`](Self::next) until it
/// returns `None`, and [`finish`](Self::finish) at the end of the stream. Memory: one unfinished
/// capsule (at most its limit) and the unread rest of the pushed piece.
#[derive(Debug)]
pub struct CapsuleDecoder {
    max_datagram: usize,
    /// Capsules of these types are kept, of at most so many bytes.
    kept: (&'static [u64], usize),
    /// All others are handed on rather than skipped.
    passes: bool,
    /// What of the last push has not been looked at.
    unread: Bytes,
    state: State,
}

/// Where in a capsule the first byte of `unread` lies.
#[derive(Debug)]
enum State {
    /// At a boundary, or within a type and length that began in an earlier piece.
    Header { seen: [u8; MAX_HEADER], len: usize },
    /// Within a payload that is wanted whole and began in an earlier piece.
    Whole { kind: u64, seen: BytesMut, missing: usize },
    /// Within a payload that nobody wants.
    Skip { missing: u64 },
    /// Within a payload that goes on as it comes.
    Pass { missing: u64 },
    /// Behind an error: the boundaries are lost.
    Failed(CapsuleError),
}

impl State {
    const BOUNDARY: Self = Self::Header { seen: [0; MAX_HEADER], len: 0 };
}

/// The type and the length in front of a capsule's payload.
#[derive(Clone, Copy)]
struct Header {
    kind: u64,
    length: u64,
    /// How many bytes both took together.
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
    /// A decoder that refuses DATAGRAM capsules whose payload, context identifier included, is
    /// longer than `max_datagram` bytes. [`MAX_HTTP_DATAGRAM`] admits all of CONNECT-UDP.
    pub fn new(max_datagram: usize) -> Self {
        Self { max_datagram, kept: (&[], 0), passes: false, unread: Bytes::new(), state: State::BOUNDARY }
    }

    /// Hands out capsules of these types whole. One of them that is longer than `most` bytes is an error.
    #[must_use]
    pub fn keeping(self, kinds: &'static [u64], most: usize) -> Self {
        Self { kept: (kinds, most), ..self }
    }

    /// Hands out all other capsules that are not kept as they came, piece by piece, for an intermediary to pass on (RFC
    /// 9297, section 3.2). Nothing may stand between the pieces of one: [`is_between`](Self::is_between).
    #[must_use]
    pub fn passing(self) -> Self {
        Self { passes: true, ..self }
    }

    /// Whether all that was handed out so far ends with the end of a capsule.
    pub fn is_between(&self) -> bool {
        !matches!(self.state, State::Pass { .. })
    }

    /// Adds what arrived next.
    ///
    /// Meant to be called when [`next`](Self::next) has returned `None`: only then is the
    /// previous piece used up. Earlier is correct as well, but joins the two by copying.
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

    /// The next capsule; `None` if more bytes are needed.
    ///
    /// # Errors
    /// [`CapsuleError::TooLong`], then and at every later call.
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "an iterator would end at the first None")]
    pub fn next(&mut self) -> Result<Option<Capsule>, CapsuleError> {
        // The usual case first: at a boundary, and the whole capsule is here.
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

    /// Whether the stream may end here: `Ok` only between two capsules. A capsule cut off by the
    /// end of its stream is malformed (RFC 9297, section 3.3).
    ///
    /// # Errors
    /// What is missing, or the error that [`next`](Self::next) returned.
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

    /// Starts on the payload behind a header that has just been used up.
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
        // Fits: it is at most `limit`, which is a usize.
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

    /// Goes on with a capsule that an earlier piece began.
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

    /// Moves bytes, one by one since there are at most sixteen, until they make a header. The
    /// rest of the piece stays unread; an incomplete header lets go of the piece.
    fn gather_header(&mut self) -> Option<Header> {
        let State::Header { seen, len } = &mut self.state else {
            return None;
        };
        while self.unread.has_remaining() {
            // Never out of bounds: sixteen bytes always make a header.
            seen[*len] = self.unread.get_u8();
            *len += 1;
            if let Some(header) = Header::parse(&seen[..*len]) {
                return Some(header);
            }
        }
        self.unread = Bytes::new();
        None
    }

    /// Drops what is here of `missing` unwanted bytes and remembers the rest.
    fn skip(&mut self, missing: u64) {
        let here = missing.min(self.unread.len() as u64);
        // Fits: it is at most the length of a slice in memory.
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

/// Kind and whole length, header included, of the capsule that these bytes begin with; `None` while its header is
/// not there.
pub fn first(bytes: &[u8]) -> Option<(u64, u64)> {
    let header = Header::parse(bytes)?;
    Some((header.kind, header.length.saturating_add(header.size as u64)))
}

/// Appends a capsule of another type.
pub fn put(out: &mut BytesMut, kind: u64, payload: &[u8]) {
    varint::encode(kind, out);
    varint::encode(payload.len() as u64, out);
    out.put_slice(payload);
}

/// Appends a DATAGRAM capsule that holds `payload` as a UDP payload, or as an IP packet: both have the
/// context identifier 0.
///
/// Adds at most [`MAX_DATAGRAM_OVERHEAD`] bytes to a payload of at most [`MAX_PACKET`]; a longer one is
/// neither, and the peer would have to abort the stream.
#[inline]
pub fn put_datagram(out: &mut BytesMut, payload: &[u8]) {
    debug_assert!(payload.len() <= MAX_PACKET, "{} bytes are no packet", payload.len());
    let length = varint::len(UDP_CONTEXT) + payload.len();
    out.reserve(payload.len() + MAX_DATAGRAM_OVERHEAD);
    varint::encode(DATAGRAM, out);
    varint::encode(length as u64, out);
    varint::encode(UDP_CONTEXT, out);
    out.put_slice(payload);
}

/// The UDP payload of an HTTP Datagram (RFC 9298, section 5).
///
/// `None` means another context than 0: none was ever agreed on, so the datagram is dropped.
///
/// # Errors
/// [`CapsuleError::NoContext`] if the context identifier is missing or cut off,
/// [`CapsuleError::PayloadTooLong`] if no UDP datagram can hold the payload. RFC 9298 has the
/// receiver abort the stream for either.
#[inline]
pub fn udp_payload(datagram: Bytes) -> Result<Option<Bytes>, CapsuleError> {
    match packet(datagram)? {
        Some(payload) if payload.len() > MAX_UDP_PAYLOAD => Err(CapsuleError::PayloadTooLong { length: payload.len() }),
        payload => Ok(payload),
    }
}

/// The IP packet of an HTTP Datagram (RFC 9484, section 6), or what is said to be one.
///
/// `None` means another context than 0, as in [`udp_payload`].
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

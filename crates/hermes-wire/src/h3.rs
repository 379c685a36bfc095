//! Frames and settings of HTTP/3 (RFC 9114), whatever QUIC carries them.
//!
//! In: the bytes of one stream, in whatever pieces they arrive. Out: frames; the payload of DATA as it
//! comes, without copying, that of others whole and within a bound. Frames that nobody knows are
//! skipped without being held, whatever length they claim. Never: field sections (QPACK reads those),
//! or which frame may come when, but for what no stream may ever carry.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::varint;

/// DATA (section 7.2.1).
pub const DATA: u64 = 0x00;
/// HEADERS (section 7.2.2).
pub const HEADERS: u64 = 0x01;
/// CANCEL_PUSH (section 7.2.3).
pub const CANCEL_PUSH: u64 = 0x03;
/// SETTINGS (section 7.2.4).
pub const SETTINGS: u64 = 0x04;
/// PUSH_PROMISE (section 7.2.5).
pub const PUSH_PROMISE: u64 = 0x05;
/// GOAWAY (section 7.2.6).
pub const GOAWAY: u64 = 0x07;
/// MAX_PUSH_ID (section 7.2.7).
pub const MAX_PUSH_ID: u64 = 0x0d;

/// What a unidirectional stream begins with (section 6.2; RFC 9204, section 4.2).
pub mod stream {
    /// The control stream.
    pub const CONTROL: u64 = 0x00;
    /// A push stream, which only servers open.
    pub const PUSH: u64 = 0x01;
    /// The encoder stream of QPACK.
    pub const QPACK_ENCODER: u64 = 0x02;
    /// The decoder stream of QPACK.
    pub const QPACK_DECODER: u64 = 0x03;
}

/// Error codes of streams and connections (section 8.1; RFC 9204, section 6; RFC 9297, section 5.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Code {
    /// RFC 9297: an HTTP Datagram, or a capsule, is malformed.
    DatagramError = 0x33,
    /// Nothing is wrong.
    NoError = 0x100,
    /// The peer violates the protocol in some other way.
    GeneralProtocolError = 0x101,
    /// Something is wrong here.
    InternalError = 0x102,
    /// The peer opened a stream that it may not open.
    StreamCreationError = 0x103,
    /// A stream that has to live ended.
    ClosedCriticalStream = 0x104,
    /// A frame where it must not be.
    FrameUnexpected = 0x105,
    /// A frame of the wrong length or layout.
    FrameError = 0x106,
    /// The peer causes work without end.
    ExcessiveLoad = 0x107,
    /// An identifier that was, or can be, nobody's.
    IdError = 0x108,
    /// A malformed SETTINGS.
    SettingsError = 0x109,
    /// The control stream does not begin with SETTINGS.
    MissingSettings = 0x10a,
    /// The server did nothing with the request: it may be sent again.
    RequestRejected = 0x10b,
    /// The request, or its response, is wanted no more.
    RequestCancelled = 0x10c,
    /// The client's stream ended within the request.
    RequestIncomplete = 0x10d,
    /// A malformed message.
    MessageError = 0x10e,
    /// The connection that a CONNECT made was reset.
    ConnectError = 0x10f,
    /// The request has to come over another version.
    VersionFallback = 0x110,
    /// A field section that QPACK cannot read.
    DecompressionFailed = 0x200,
    /// An encoder stream that QPACK cannot read.
    EncoderStreamError = 0x201,
    /// A decoder stream that QPACK cannot read.
    DecoderStreamError = 0x202,
}

impl Code {
    /// The number on the wire.
    pub const fn value(self) -> u64 {
        self as u64
    }
}

/// The longest payload that is collected but for DATA and HEADERS. SETTINGS of all that there is have
/// some dozen bytes.
pub const MAX_CONTROL: usize = 4096;

/// The longest type and length in front of a payload.
const MAX_HEADER: usize = 2 * varint::MAX_LEN;

/// What a decoder hands out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// A piece of the payload of a DATA frame. Never empty.
    Data(Bytes),
    /// The whole field section of a HEADERS frame, as QPACK encoded it.
    Headers(Bytes),
    /// Any other frame of the RFC, whole.
    Control {
        /// Its type.
        kind: u64,
        /// Its payload.
        payload: Bytes,
    },
}

/// Why a stream's frames cannot be read. They end the connection, but for a field section that is too long: of
/// that one message nothing is known, and the others are sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A frame of HTTP/2 that HTTP/3 has no place for (section 11.2.1).
    #[error("a frame of type {0:#x}, which HTTP/3 does not have")]
    Reserved(u64),
    /// A frame other than DATA that is longer than what is collected.
    #[error("a frame of type {kind:#x} of {length} bytes, more than the {limit} that are taken")]
    TooLong {
        /// Its type.
        kind: u64,
        /// The length that it claims.
        length: u64,
        /// The bound.
        limit: usize,
    },
    /// The stream ended within a frame.
    #[error("the stream ended within a frame")]
    Truncated,
}

impl FrameError {
    /// What the peer is told.
    pub fn code(self) -> Code {
        match self {
            FrameError::Reserved(_) => Code::FrameUnexpected,
            FrameError::TooLong { .. } => Code::ExcessiveLoad,
            FrameError::Truncated => Code::FrameError,
        }
    }
}

/// Cuts a stream into frames.
///
/// Call [`push`](Self::push) with each piece, once [`next`](Self::next) has returned `None`. Memory: one
/// unfinished frame that is not DATA (at most its bound) and the unread rest of a piece.
#[derive(Debug)]
pub struct FrameDecoder {
    max_headers: usize,
    unread: Bytes,
    state: State,
    has_skipped: bool,
}

#[derive(Debug)]
enum State {
    Header { seen: [u8; MAX_HEADER], len: usize },
    Data { missing: u64 },
    Whole { kind: u64, seen: BytesMut, missing: usize },
    Skip { missing: u64 },
    Failed(FrameError),
}

impl State {
    const BOUNDARY: Self = Self::Header { seen: [0; MAX_HEADER], len: 0 };
}

impl FrameDecoder {
    /// A decoder that refuses field sections which are longer than this, encoded.
    pub fn new(max_headers: usize) -> Self {
        Self { max_headers, unread: Bytes::new(), state: State::BOUNDARY, has_skipped: false }
    }

    /// Bytes that are kept of a frame which has not come whole.
    pub fn held(&self) -> usize {
        match &self.state {
            State::Whole { seen, .. } => seen.len(),
            _ => 0,
        }
    }

    /// Adds what arrived next.
    pub fn push(&mut self, bytes: Bytes) {
        if self.unread.is_empty() {
            self.unread = bytes;
        } else {
            let mut joined = BytesMut::with_capacity(self.unread.len() + bytes.len());
            joined.extend_from_slice(&self.unread);
            joined.extend_from_slice(&bytes);
            self.unread = joined.freeze();
        }
    }

    /// The next frame, or piece of one; `None` if more bytes are needed.
    ///
    /// # Errors
    /// The stream cannot be read any further, at this and at every later call.
    #[expect(clippy::should_implement_trait, reason = "an iterator would end at the first None")]
    pub fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        loop {
            let is_empty = self.unread.is_empty();
            match &mut self.state {
                State::Failed(error) => return Err(*error),
                State::Header { .. } => {
                    let Some((kind, length)) = self.take_header() else { return Ok(None) };
                    self.begin(kind, length)?;
                }
                State::Data { missing } | State::Skip { missing } if *missing == 0 => self.state = State::BOUNDARY,
                State::Data { .. } | State::Skip { .. } if is_empty => return Ok(None),
                State::Whole { missing, .. } if is_empty && *missing > 0 => return Ok(None),
                State::Data { missing } => {
                    let here = (*missing).min(self.unread.len() as u64);
                    *missing -= here;
                    return Ok(Some(Frame::Data(self.unread.split_to(here as usize))));
                }
                State::Skip { missing } => {
                    let here = (*missing).min(self.unread.len() as u64);
                    *missing -= here;
                    self.unread.advance(here as usize);
                }
                State::Whole { kind, seen, missing } => {
                    let kind = *kind;
                    let payload = if seen.is_empty() && self.unread.len() >= *missing {
                        // It came in one piece: nothing is copied.
                        self.unread.split_to(*missing)
                    } else {
                        let here = self.unread.split_to(self.unread.len().min(*missing));
                        seen.extend_from_slice(&here);
                        *missing -= here.len();
                        if *missing > 0 {
                            return Ok(None);
                        }
                        seen.split().freeze()
                    };
                    self.state = State::BOUNDARY;
                    return Ok(Some(if kind == HEADERS {
                        Frame::Headers(payload)
                    } else {
                        Frame::Control { kind, payload }
                    }));
                }
            }
        }
    }

    /// A frame that nobody knows was begun, and is handed out by nobody.
    pub fn has_skipped(&self) -> bool {
        self.has_skipped
    }

    /// Whether the stream may end here: between two frames only (section 7.1).
    ///
    /// # Errors
    /// It is cut off, or failed before.
    pub fn finish(&self) -> Result<(), FrameError> {
        match &self.state {
            State::Failed(error) => Err(*error),
            State::Header { len: 0, .. } if self.unread.is_empty() => Ok(()),
            State::Data { missing: 0 } | State::Skip { missing: 0 } if self.unread.is_empty() => Ok(()),
            _ => Err(FrameError::Truncated),
        }
    }

    fn begin(&mut self, kind: u64, length: u64) -> Result<(), FrameError> {
        let limit = match kind {
            DATA => {
                self.state = State::Data { missing: length };
                return Ok(());
            }
            HEADERS => self.max_headers,
            CANCEL_PUSH | SETTINGS | PUSH_PROMISE | GOAWAY | MAX_PUSH_ID => MAX_CONTROL,
            0x02 | 0x06 | 0x08 | 0x09 => return Err(self.fail(FrameError::Reserved(kind))),
            _ => {
                self.state = State::Skip { missing: length };
                self.has_skipped = true;
                return Ok(());
            }
        };
        if length > limit as u64 {
            return Err(self.fail(FrameError::TooLong { kind, length, limit }));
        }
        self.state = State::Whole { kind, seen: BytesMut::new(), missing: length as usize };
        Ok(())
    }

    fn take_header(&mut self) -> Option<(u64, u64)> {
        let State::Header { seen, len } = &mut self.state else { return None };
        while self.unread.has_remaining() {
            // Never out of bounds: sixteen bytes always make a header.
            seen[*len] = self.unread.get_u8();
            *len += 1;
            if let Some((kind, size)) = varint::decode(&seen[..*len])
                && let Some((length, _)) = varint::decode(&seen[size..*len])
            {
                return Some((kind, length));
            }
        }
        self.unread = Bytes::new();
        None
    }

    #[cold]
    fn fail(&mut self, error: FrameError) -> FrameError {
        self.unread = Bytes::new();
        self.state = State::Failed(error);
        error
    }
}

/// The most that [`put_header`] writes.
pub const MAX_FRAME_HEADER: usize = 1 + varint::MAX_LEN;

/// Type and length of a frame whose payload follows.
pub fn put_header(kind: u64, length: usize, out: &mut impl BufMut) {
    varint::encode(kind, out);
    varint::encode(length as u64, out);
}

/// What a peer can do, by its SETTINGS. Absent settings are as the RFCs have them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The largest field section that it takes, as section 4.2.2 counts; `None`: any.
    pub max_field_section: Option<u64>,
    /// It takes extended CONNECT (RFC 9220).
    pub extended_connect: bool,
    /// It takes HTTP Datagrams in QUIC datagrams (RFC 9297).
    pub datagrams: bool,
}

const MAX_FIELD_SECTION_SIZE: u64 = 0x06;
const ENABLE_CONNECT_PROTOCOL: u64 = 0x08;
const H3_DATAGRAM: u64 = 0x33;

/// What is wrong with SETTINGS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// It ends within a setting.
    #[error("SETTINGS end within a setting")]
    Truncated,
    /// A setting of HTTP/2 (section 7.2.4.1).
    #[error("SETTINGS have {0:#x}, which HTTP/3 does not have")]
    Reserved(u64),
    /// A setting stands twice.
    #[error("SETTINGS have {0:#x} twice")]
    Twice(u64),
    /// A switch that is neither 0 nor 1.
    #[error("SETTINGS have {0:#x} neither 0 nor 1")]
    NoSwitch(u64),
}

impl SettingsError {
    /// What the peer is told: a frame that is cut off is a malformed frame first (section 7.1).
    pub fn code(self) -> Code {
        match self {
            SettingsError::Truncated => Code::FrameError,
            _ => Code::SettingsError,
        }
    }
}

/// Reads what a peer's QPACK says on its encoder or decoder stream where neither side has a dynamic table
/// (RFC 9204, section 4): next to nothing can be right.
#[derive(Debug)]
pub struct Instructions {
    is_encoder: bool,
    /// Within an integer of a cancellation.
    continues: bool,
}

impl Instructions {
    /// Of the stream of this type.
    pub fn of(kind: u64) -> Self {
        Self { is_encoder: kind == stream::QPACK_ENCODER, continues: false }
    }

    /// Reads on.
    ///
    /// # Errors
    /// An insertion, or a capacity, for which there is no room (sections 3.2.3 and 4.3.1); a word on an insertion or
    /// a section that never was (section 4.4).
    pub fn read(&mut self, bytes: &[u8]) -> Result<(), Code> {
        for byte in bytes {
            match (self.is_encoder, byte) {
                (false, byte) if self.continues => self.continues = byte & 0x80 != 0,
                // Its capacity is nothing.
                (true, 0x20) => {}
                (true, _) => return Err(Code::EncoderStreamError),
                (false, 0x40..0x80) => self.continues = byte & 0x3f == 0x3f,
                (false, _) => return Err(Code::DecoderStreamError),
            }
        }
        Ok(())
    }
}

impl Settings {
    /// Reads the payload of a SETTINGS frame.
    ///
    /// # Errors
    /// It is malformed.
    pub fn parse(mut payload: &[u8]) -> Result<Self, SettingsError> {
        let mut seen = Vec::new();
        let mut settings = Self { max_field_section: None, extended_connect: false, datagrams: false };
        while !payload.is_empty() {
            let (id, size) = varint::decode(payload).ok_or(SettingsError::Truncated)?;
            payload = &payload[size..];
            let (value, size) = varint::decode(payload).ok_or(SettingsError::Truncated)?;
            payload = &payload[size..];
            let switch = || if value > 1 { Err(SettingsError::NoSwitch(id)) } else { Ok(value == 1) };
            match id {
                0x02..=0x05 => return Err(SettingsError::Reserved(id)),
                MAX_FIELD_SECTION_SIZE => settings.max_field_section = Some(value),
                ENABLE_CONNECT_PROTOCOL => settings.extended_connect = switch()?,
                H3_DATAGRAM => settings.datagrams = switch()?,
                _ => {}
            }
            if seen.contains(&id) {
                return Err(SettingsError::Twice(id));
            }
            seen.push(id);
        }
        Ok(settings)
    }

    /// Appends a SETTINGS frame. QPACK's settings stay absent: field sections refer to no dynamic table.
    pub fn put(&self, out: &mut impl BufMut) {
        let mut payload = Vec::new();
        let mut set = |id: u64, value: u64| {
            varint::encode(id, &mut payload);
            varint::encode(value, &mut payload);
        };
        if let Some(most) = self.max_field_section {
            set(MAX_FIELD_SECTION_SIZE, most);
        }
        set(ENABLE_CONNECT_PROTOCOL, self.extended_connect.into());
        set(H3_DATAGRAM, self.datagrams.into());
        put_header(SETTINGS, payload.len(), out);
        out.put_slice(&payload);
    }
}

/// The identifier in the payload of GOAWAY, MAX_PUSH_ID or CANCEL_PUSH. `None`: it is malformed.
pub fn parse_id(payload: &[u8]) -> Option<u64> {
    varint::decode(payload).filter(|(_, size)| *size == payload.len()).map(|(id, _)| id)
}

/// The stream whose HTTP Datagrams begin like this, and the rest (RFC 9297, section 2.1). `None`: it is
/// malformed, which ends the connection.
pub fn parse_datagram(mut datagram: Bytes) -> Option<(u64, Bytes)> {
    let (quarter, size) = varint::decode(&datagram)?;
    datagram.advance(size);
    // Stream identifiers have 62 bits, and this is one of them without its lowest two.
    (quarter <= varint::MAX / 4).then_some((quarter * 4, datagram))
}

/// Begins an HTTP Datagram of the stream with this identifier.
pub fn put_datagram_stream(stream: u64, out: &mut impl BufMut) {
    varint::encode(stream / 4, out);
}

#[cfg(test)]
mod tests;

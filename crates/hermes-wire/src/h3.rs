//! Frames and settings of HTTP/3 (RFC 9114), independent of the QUIC implementation.
//!
//! In: the bytes of one stream, in pieces of any size. Out: frames; the payload of DATA in parts, without copying, and
//! that of other frames whole and bounded. Unknown frames are skipped without buffering, regardless of their length.
//! Never: the decoding of field sections (QPACK), or the order of frames, except for frames that no stream may contain.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::varint;

/// The frame type DATA (section 7.2.1).
pub const DATA: u64 = 0x00;
/// The frame type HEADERS (section 7.2.2).
pub const HEADERS: u64 = 0x01;
/// The frame type CANCEL_PUSH (section 7.2.3).
pub const CANCEL_PUSH: u64 = 0x03;
/// The frame type SETTINGS (section 7.2.4).
pub const SETTINGS: u64 = 0x04;
/// The frame type PUSH_PROMISE (section 7.2.5).
pub const PUSH_PROMISE: u64 = 0x05;
/// The frame type GOAWAY (section 7.2.6).
pub const GOAWAY: u64 = 0x07;
/// The frame type MAX_PUSH_ID (section 7.2.7).
pub const MAX_PUSH_ID: u64 = 0x0d;

/// The first byte of a unidirectional stream: its type (section 6.2; RFC 9204, section 4.2).
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
    /// A malformed HTTP Datagram or capsule (RFC 9297).
    DatagramError = 0x33,
    /// No error.
    NoError = 0x100,
    /// Another protocol violation of the peer.
    GeneralProtocolError = 0x101,
    /// An internal error of the sender.
    InternalError = 0x102,
    /// A stream of a type that the peer may not open.
    StreamCreationError = 0x103,
    /// A critical stream was closed.
    ClosedCriticalStream = 0x104,
    /// A frame that is not allowed at this point.
    FrameUnexpected = 0x105,
    /// A frame with a wrong length or layout.
    FrameError = 0x106,
    /// Excessive load caused by the peer.
    ExcessiveLoad = 0x107,
    /// A wrong use of a stream or push identifier.
    IdError = 0x108,
    /// An error in SETTINGS.
    SettingsError = 0x109,
    /// The control stream does not begin with SETTINGS.
    MissingSettings = 0x10a,
    /// The server did not process the request: a retry is safe.
    RequestRejected = 0x10b,
    /// The request, or its response, is cancelled.
    RequestCancelled = 0x10c,
    /// The client's stream ended within the request.
    RequestIncomplete = 0x10d,
    /// A malformed message.
    MessageError = 0x10e,
    /// The connection of a CONNECT request was reset.
    ConnectError = 0x10f,
    /// The request must be retried over another HTTP version.
    VersionFallback = 0x110,
    /// QPACK cannot decode a field section.
    DecompressionFailed = 0x200,
    /// QPACK cannot decode the encoder stream.
    EncoderStreamError = 0x201,
    /// QPACK cannot decode the decoder stream.
    DecoderStreamError = 0x202,
}

impl Code {
    /// The error code on the wire.
    pub const fn value(self) -> u64 {
        self as u64
    }
}

/// The longest buffered payload, except of DATA and HEADERS. All known settings together have a few dozen bytes.
pub const MAX_CONTROL: usize = 4096;

/// The longest type and length before a payload.
const MAX_HEADER: usize = 2 * varint::MAX_LEN;

/// A decoded frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// A part of the payload of a DATA frame. Never empty.
    Data(Bytes),
    /// The whole field section of a HEADERS frame, encoded by QPACK.
    Headers(Bytes),
    /// Any other frame of the RFC, whole.
    Control {
        /// The frame type.
        kind: u64,
        /// The payload.
        payload: Bytes,
    },
}

/// An error in a stream's frames. It ends the connection, except for a field section that is too long: only that
/// message is unknown, and the others are valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The frame type of HTTP/2 is reserved in HTTP/3 (section 11.2.1).
    #[error("frame type {0:#x} is reserved in HTTP/3")]
    Reserved(u64),
    /// A frame other than DATA exceeds the limit.
    #[error("frame of type {kind:#x} with {length} bytes exceeds the limit of {limit}")]
    TooLong {
        /// The frame type.
        kind: u64,
        /// The length of the frame, by its header.
        length: u64,
        /// The limit.
        limit: usize,
    },
    /// The stream ended within a frame.
    #[error("stream ended within a frame")]
    Truncated,
}

impl FrameError {
    /// The error code for the peer.
    pub fn code(self) -> Code {
        match self {
            FrameError::Reserved(_) => Code::FrameUnexpected,
            FrameError::TooLong { .. } => Code::ExcessiveLoad,
            FrameError::Truncated => Code::FrameError,
        }
    }
}

/// Splits a stream into frames.
///
/// Call [`push`](Self::push) with each piece, once [`next`](Self::next) has returned `None`. Memory: one incomplete
/// frame other than DATA (at most its limit) and the unread rest of a piece.
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
    /// A decoder that rejects longer encoded field sections.
    pub fn new(max_headers: usize) -> Self {
        Self { max_headers, unread: Bytes::new(), state: State::BOUNDARY, has_skipped: false }
    }

    /// Buffered bytes of an incomplete frame.
    pub fn held(&self) -> usize {
        match &self.state {
            State::Whole { seen, .. } => seen.len(),
            _ => 0,
        }
    }

    /// Adds the next piece.
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

    /// Returns the next frame, or a part of one; `None` if more bytes are needed.
    ///
    /// # Errors
    /// The stream cannot be decoded further, at this and at every later call.
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
                        // The frame came in one piece: no copy is needed.
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

    /// Whether an unknown frame was skipped.
    pub fn has_skipped(&self) -> bool {
        self.has_skipped
    }

    /// Checks that the stream may end here: only between two frames (section 7.1).
    ///
    /// # Errors
    /// The last frame is truncated, or an earlier error.
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
            // In bounds, since sixteen bytes always make a header.
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

/// Maximum number of bytes that [`put_header`] writes.
pub const MAX_FRAME_HEADER: usize = 1 + varint::MAX_LEN;

/// Writes the type and length of a frame, before its payload.
pub fn put_header(kind: u64, length: usize, out: &mut impl BufMut) {
    varint::encode(kind, out);
    varint::encode(length as u64, out);
}

/// The capabilities of a peer from its SETTINGS. Absent settings have the defaults of the RFCs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The largest field section that the peer accepts, as defined in section 4.2.2; `None`: unlimited.
    pub max_field_section: Option<u64>,
    /// The peer supports extended CONNECT (RFC 9220).
    pub extended_connect: bool,
    /// The peer supports HTTP Datagrams in QUIC datagrams (RFC 9297).
    pub datagrams: bool,
}

const MAX_FIELD_SECTION_SIZE: u64 = 0x06;
const ENABLE_CONNECT_PROTOCOL: u64 = 0x08;
const H3_DATAGRAM: u64 = 0x33;

/// An error in SETTINGS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The frame ends within a setting.
    #[error("SETTINGS truncated within a setting")]
    Truncated,
    /// A setting of HTTP/2 is reserved (section 7.2.4.1).
    #[error("setting {0:#x} is reserved in HTTP/3")]
    Reserved(u64),
    /// A setting is repeated.
    #[error("setting {0:#x} is repeated")]
    Twice(u64),
    /// A boolean setting is neither 0 nor 1.
    #[error("setting {0:#x} is neither 0 nor 1")]
    NoSwitch(u64),
}

impl SettingsError {
    /// The error code for the peer: a truncated frame is a frame error first (section 7.1).
    pub fn code(self) -> Code {
        match self {
            SettingsError::Truncated => Code::FrameError,
            _ => Code::SettingsError,
        }
    }
}

/// Validates the instructions on a QPACK encoder or decoder stream if neither side uses a dynamic table (RFC 9204,
/// section 4): almost no instruction is valid then.
#[derive(Debug)]
pub struct Instructions {
    is_encoder: bool,
    /// The next byte continues the integer of a cancellation.
    continues: bool,
}

impl Instructions {
    /// A validator for a stream of this type.
    pub fn of(kind: u64) -> Self {
        Self { is_encoder: kind == stream::QPACK_ENCODER, continues: false }
    }

    /// Validates the next bytes.
    ///
    /// # Errors
    /// An insertion, or a capacity above 0 (sections 3.2.3 and 4.3.1); an acknowledgement of an insertion or a section
    /// that does not exist (section 4.4).
    pub fn read(&mut self, bytes: &[u8]) -> Result<(), Code> {
        for byte in bytes {
            match (self.is_encoder, byte) {
                (false, byte) if self.continues => self.continues = byte & 0x80 != 0,
                // The instruction sets the capacity to 0.
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
    /// Parses the payload of a SETTINGS frame.
    ///
    /// # Errors
    /// The payload is malformed.
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

    /// Appends a SETTINGS frame. The settings of QPACK stay absent: field sections use no dynamic table.
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

/// Parses the identifier in a GOAWAY, MAX_PUSH_ID or CANCEL_PUSH frame. `None`: the payload is malformed.
pub fn parse_id(payload: &[u8]) -> Option<u64> {
    varint::decode(payload).filter(|(_, size)| *size == payload.len()).map(|(id, _)| id)
}

/// Parses an HTTP Datagram: its stream and the rest (RFC 9297, section 2.1). `None`: it is malformed, which ends the
/// connection.
pub fn parse_datagram(mut datagram: Bytes) -> Option<(u64, Bytes)> {
    let (quarter, size) = varint::decode(&datagram)?;
    datagram.advance(size);
    // Stream identifiers have 62 bits; the quarter omits the lowest two.
    (quarter <= varint::MAX / 4).then_some((quarter * 4, datagram))
}

/// Starts an HTTP Datagram of the stream with this identifier.
pub fn put_datagram_stream(stream: u64, out: &mut impl BufMut) {
    varint::encode(stream / 4, out);
}

#[cfg(test)]
mod tests;

//! Publications as parts of `multipart/mixed` (RFC 2046, section 5.1), and a parser of this form.
//!
//! In: deliveries; or bytes of such a response. Out: parts with `content-length`, so that a reader needs no search for the
//! boundary; or the parts. A gap is an empty part with `hermes-missed`, a heartbeat is an empty part without an
//! identifier. Never: more bytes in the parser than a part may have.

use bytes::{Buf as _, Bytes, BytesMut};
use http::HeaderMap;
use http::header::{CONTENT_LENGTH, HeaderName, HeaderValue};

use crate::Delivery;
use crate::fields::{ABORTED, CHANNEL, DELIVER, EVENT_ID, MISSED, RELAY};

/// The longest head of a part that the parser takes.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// The delimiter before the first part. Each part ends with the next delimiter, so that a reader has it at once.
pub(super) fn begin(boundary: &str) -> Bytes {
    format!("--{boundary}\r\n").into()
}

pub(super) fn write(out: &mut Vec<u8>, delivery: &Delivery, position: &str, names_channel: bool, boundary: &str) {
    let content = match delivery {
        Delivery::Publication(publication) if !publication.is_aborted() => Some(publication.content.body.whole()),
        Delivery::Publication(_) | Delivery::Gap { .. } => None,
    };
    write_head(out, delivery, position, names_channel, content.as_ref().map(Bytes::len));
    out.extend_from_slice(&content.unwrap_or_default());
    out.extend_from_slice(&tail(boundary));
}

/// The bytes after the content of a part.
pub(super) fn tail(boundary: &str) -> Bytes {
    format!("\r\n--{boundary}\r\n").into()
}

/// Writes the bytes before the content, which has this length. `None`: the publisher has broken off, or the
/// delivery is a gap.
pub(super) fn write_head(
    out: &mut Vec<u8>,
    delivery: &Delivery,
    position: &str,
    names_channel: bool,
    length: Option<usize>,
) {
    let field = |out: &mut Vec<u8>, name: &HeaderName, value: &[u8]| {
        out.extend_from_slice(name.as_str().as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(value);
        out.extend_from_slice(b"\r\n");
    };
    field(out, &EVENT_ID, position.as_bytes());
    let channel = match delivery {
        Delivery::Publication(publication) => {
            // A relaying node publishes it again by the same rules.
            if publication.is_reliable {
                field(out, &RELAY, b"reliable");
            }
            if publication.id.is_none() {
                field(out, &DELIVER, b"one");
            }
            if length.is_none() {
                field(out, &MISSED, b"1");
                field(out, &ABORTED, b"true");
            } else {
                for (name, value) in &publication.content.headers {
                    field(out, name, value.as_bytes());
                }
            }
            &publication.channel
        }
        Delivery::Gap { channel, missed, .. } => {
            field(out, &MISSED, super::missed_text(*missed).as_bytes());
            channel
        }
    };
    if names_channel {
        field(out, &CHANNEL, super::path_of(channel).as_bytes());
    }
    field(out, &CONTENT_LENGTH, length.unwrap_or_default().to_string().as_bytes());
    out.extend_from_slice(b"\r\n");
}

pub(super) fn heartbeat(boundary: &str) -> Bytes {
    format!("content-length: 0\r\n\r\n\r\n--{boundary}\r\n").into()
}

/// The last delimiter. The one before it began a part, which is empty.
pub(super) fn end(boundary: &str) -> Bytes {
    format!("content-length: 0\r\n\r\n\r\n--{boundary}--\r\n").into()
}

/// A part of a stream of publications.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its fields without `content-length`.
    pub headers: HeaderMap,
    /// Its content.
    pub body: Bytes,
    /// The length of content that was skipped, since it is longer than the reader allows.
    pub skipped: Option<usize>,
}

impl Part {
    /// Whether the part only keeps the connection open.
    pub fn is_heartbeat(&self) -> bool {
        self.body.is_empty()
            && self.skipped.is_none()
            && !self.headers.contains_key(EVENT_ID)
            && !self.headers.contains_key(MISSED)
    }
}

/// The bytes are not a stream of parts as a relay writes it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedPart {
    /// Other bytes between two parts.
    #[error("a part does not begin with its delimiter")]
    Delimiter,
    /// No length.
    #[error("a part has no valid content-length")]
    Length,
    /// No name, or characters that a field cannot have.
    #[error("a field of a part is malformed")]
    Field,
    /// A head that is too long.
    #[error("the head of a part is longer than {MAX_HEAD_BYTES} bytes")]
    LongHead,
}

/// Reads the parts of a response.
#[derive(Debug)]
pub struct Parser {
    /// Line feed and delimiter after a part.
    delimiter: Vec<u8>,
    buffer: BytesMut,
    /// The next bytes are the delimiter, and not a head.
    is_before_delimiter: bool,
    has_begun: bool,
    has_ended: bool,
    max_body: usize,
    /// Bytes of a part that are dropped as they arrive.
    to_skip: usize,
}

impl Parser {
    /// A parser that skips the content of parts with more than `max_body` bytes. `content_type` is that of the response. `None`: it names no boundary.
    pub fn new(content_type: &str, max_body: usize) -> Option<Self> {
        let (kind, parameters) = content_type.split_once(';')?;
        if !kind.trim().eq_ignore_ascii_case("multipart/mixed") {
            return None;
        }
        let boundary = parameters.split(';').find_map(|parameter| parameter.trim().strip_prefix("boundary="))?;
        let boundary = boundary.trim_matches('"');
        Some(Self {
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            buffer: BytesMut::new(),
            is_before_delimiter: true,
            has_begun: false,
            has_ended: false,
            max_body,
            to_skip: 0,
        })
    }

    /// Adds bytes of the response.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The number of bytes that wait for the rest of their part.
    pub fn buffered(&self) -> usize {
        self.buffer.len()
    }

    /// Whether the last delimiter has been read.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Returns the next part. `None`: more bytes are needed, or the stream has ended.
    ///
    /// # Errors
    /// The bytes are malformed.
    pub fn next_part(&mut self) -> Result<Option<Part>, MalformedPart> {
        let skipped = self.to_skip.min(self.buffer.len());
        self.buffer.advance(skipped);
        self.to_skip -= skipped;
        if self.to_skip > 0 {
            return Ok(None);
        }
        if self.has_ended || (self.is_before_delimiter && !self.take_delimiter()?) {
            return Ok(None);
        }
        let Some(head) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4) else {
            let is_long = self.buffer.len() > MAX_HEAD_BYTES;
            return if is_long { Err(MalformedPart::LongHead) } else { Ok(None) };
        };
        if head > MAX_HEAD_BYTES {
            return Err(MalformedPart::LongHead);
        }
        let mut headers = read_head(&self.buffer[..head])?;
        let length = headers.remove(CONTENT_LENGTH).ok_or(MalformedPart::Length)?;
        let length: usize = length.to_str().ok().and_then(|text| text.parse().ok()).ok_or(MalformedPart::Length)?;
        if length > self.max_body {
            self.buffer.advance(head);
            self.to_skip = length;
            self.is_before_delimiter = true;
            return Ok(Some(Part { headers, body: Bytes::new(), skipped: Some(length) }));
        }
        if self.buffer.len() < head + length {
            return Ok(None);
        }
        self.buffer.advance(head);
        let body = self.buffer.split_to(length).freeze();
        self.is_before_delimiter = true;
        // A part is whole before the delimiter after it has arrived.
        Ok(Some(Part { headers, body, skipped: None }))
    }

    /// Returns false if more bytes are needed, or the stream has ended.
    fn take_delimiter(&mut self) -> Result<bool, MalformedPart> {
        // The first delimiter has no line feed before it.
        let delimiter = if self.has_begun { &self.delimiter[..] } else { &self.delimiter[2..] };
        let known = self.buffer.len().min(delimiter.len());
        if self.buffer[..known] != delimiter[..known] {
            return Err(MalformedPart::Delimiter);
        }
        let Some(next) = self.buffer.get(delimiter.len()..delimiter.len() + 2) else { return Ok(false) };
        match next {
            b"\r\n" => {}
            b"--" => self.has_ended = true,
            _ => return Err(MalformedPart::Delimiter),
        }
        self.buffer.advance(delimiter.len() + 2);
        self.has_begun = true;
        self.is_before_delimiter = false;
        Ok(!self.has_ended)
    }
}

fn read_head(head: &[u8]) -> Result<HeaderMap, MalformedPart> {
    let mut headers = HeaderMap::new();
    for line in head.split(|byte| *byte == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            continue;
        }
        let colon = line.iter().position(|byte| *byte == b':').ok_or(MalformedPart::Field)?;
        let name = HeaderName::from_bytes(&line[..colon]).map_err(|_| MalformedPart::Field)?;
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).map_err(|_| MalformedPart::Field)?;
        headers.append(name, value);
    }
    Ok(headers)
}

//! Binary HTTP messages (RFC 9292), in the indeterminate-length form.
//!
//! In: the parts of a message, or the bytes of one in pieces of any size. Out: bytes, or the parts. A message can be
//! cut anywhere and continues there. Buffers one line of a head and the last pushed piece; a head is bounded, content
//! is not and is not copied. Never: the meaning of a field.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::varint;

/// Framing indicators (section 3.3).
const REQUEST: u64 = 2;
const RESPONSE: u64 = 3;

/// A field line: lowercase name, and value.
pub type Field = (Bytes, Bytes);

/// The control data of a head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Control {
    /// A request.
    Request {
        /// The method.
        method: Bytes,
        /// The scheme; empty for CONNECT.
        scheme: Bytes,
        /// The authority; may be empty.
        authority: Bytes,
        /// Path and query.
        path: Bytes,
    },
    /// A response; if the status is below 200, it is an interim response, and another head follows.
    Response {
        /// The status code, from 100 to 599.
        status: u16,
    },
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// The head.
    Head(Control, Vec<Field>),
    /// A part of the content, in the size in which it arrived.
    Content(Bytes),
    /// The end, with the trailers.
    End(Vec<Field>),
}

/// The reason why bytes are not a valid message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BinaryHttpError {
    /// The framing indicator is not supported.
    #[error("binary HTTP message: unknown framing indicator {0}; expected 2 or 3")]
    Indicator(u64),
    /// The status is not from 100 to 599.
    #[error("binary HTTP message: invalid status {0}")]
    Status(u64),
    /// A field name is empty or invalid.
    #[error("binary HTTP message: a field name is empty or not a lowercase token")]
    Name,
    /// A field value contains forbidden bytes.
    #[error("binary HTTP message: a field value contains CR, LF or NUL")]
    Value,
    /// A head or the trailers exceed the limit.
    #[error("binary HTTP message: head exceeds {0} bytes")]
    TooLong(usize),
    /// The bytes after the end are not padding.
    #[error("binary HTTP message: data after its end")]
    Behind,
    /// The message is truncated.
    #[error("binary HTTP message: truncated")]
    Truncated,
}

/// Encodes the head at the beginning of a message. A response must be a final one.
pub fn put_head<'a>(control: &Control, fields: impl IntoIterator<Item = (&'a [u8], &'a [u8])>, out: &mut BytesMut) {
    match control {
        Control::Request { method, scheme, authority, path } => {
            varint::encode(REQUEST, out);
            [method, scheme, authority, path].into_iter().for_each(|text| put_string(text, out));
        }
        Control::Response { status } => {
            varint::encode(RESPONSE, out);
            varint::encode(u64::from(*status), out);
        }
    }
    put_fields(fields, out);
}

fn put_fields<'a>(fields: impl IntoIterator<Item = (&'a [u8], &'a [u8])>, out: &mut BytesMut) {
    for (name, value) in fields {
        put_string(name, out);
        put_string(value, out);
    }
    varint::encode(0, out);
}

fn put_string(text: &[u8], out: &mut BytesMut) {
    varint::encode(text.len() as u64, out);
    out.put_slice(text);
}

/// Encodes the header of a content chunk. Writes nothing if it is empty: that would end the content.
pub fn put_chunk_head(length: usize, out: &mut BytesMut) {
    if length > 0 {
        varint::encode(length as u64, out);
    }
}

/// Encodes the end of the content, and of the message.
pub fn put_end<'a>(trailers: impl IntoIterator<Item = (&'a [u8], &'a [u8])>, out: &mut BytesMut) {
    varint::encode(0, out);
    put_fields(trailers, out);
}

/// The position of the next byte within a message.
#[derive(Debug)]
enum State {
    Indicator,
    /// Within the four strings of a request's control data.
    Request(Vec<Bytes>),
    Status,
    Fields {
        control: Option<Control>,
        fields: Vec<Field>,
        name: Option<Bytes>,
    },
    ChunkLength,
    Chunk {
        left: u64,
    },
    Padding,
    Failed(BinaryHttpError),
}

/// Splits a byte stream into the parts of a message.
#[derive(Debug)]
pub struct Decoder {
    most: usize,
    /// Bytes of the current head so far.
    taken: usize,
    is_response: bool,
    unread: BytesMut,
    state: State,
}

impl Decoder {
    /// A decoder with a limit for heads and trailers.
    pub fn new(most: usize) -> Self {
        Self { most, taken: 0, is_response: false, unread: BytesMut::new(), state: State::Indicator }
    }

    /// Adds the next piece.
    pub fn push(&mut self, bytes: Bytes) {
        if !matches!(self.state, State::Failed(_)) {
            if self.unread.is_empty() {
                // Without copying, if no other reference exists.
                self.unread = BytesMut::from(bytes);
            } else {
                self.unread.extend_from_slice(&bytes);
            }
        }
    }

    /// The number of unread bytes.
    pub fn unread(&self) -> usize {
        self.unread.len()
    }

    /// Returns the next part; `None` if more bytes are needed.
    ///
    /// # Errors
    /// The bytes are not a valid message, also at every later call.
    #[expect(clippy::should_implement_trait, reason = "an iterator would end at the first None")]
    pub fn next(&mut self) -> Result<Option<Part>, BinaryHttpError> {
        let part = self.step();
        if let Err(error) = part {
            self.state = State::Failed(error);
            self.unread = BytesMut::new();
        }
        part
    }

    /// Checks that the stream may end here.
    ///
    /// # Errors
    /// The message is incomplete or invalid.
    pub fn finish(&self) -> Result<(), BinaryHttpError> {
        match self.state {
            State::Padding => Ok(()),
            State::Failed(error) => Err(error),
            _ => Err(BinaryHttpError::Truncated),
        }
    }

    fn step(&mut self) -> Result<Option<Part>, BinaryHttpError> {
        loop {
            match &mut self.state {
                State::Failed(error) => return Err(*error),
                State::Indicator => {
                    let Some(indicator) = self.number() else { return Ok(None) };
                    self.is_response = indicator == RESPONSE;
                    self.state = match indicator {
                        REQUEST => State::Request(Vec::with_capacity(4)),
                        RESPONSE => State::Status,
                        other => return Err(BinaryHttpError::Indicator(other)),
                    };
                }
                State::Request(_) => {
                    let Some(string) = self.string()? else { return Ok(None) };
                    let State::Request(strings) = &mut self.state else { continue };
                    strings.push(string);
                    if let [method, scheme, authority, path] = &strings[..] {
                        let [method, scheme] = [method.clone(), scheme.clone()];
                        let (authority, path) = (authority.clone(), path.clone());
                        let control = Some(Control::Request { method, scheme, authority, path });
                        self.state = State::Fields { control, fields: Vec::new(), name: None };
                    }
                }
                State::Status => {
                    let Some(status) = self.number() else { return Ok(None) };
                    let known = u16::try_from(status).ok().filter(|status| (100..600).contains(status));
                    let status = known.ok_or(BinaryHttpError::Status(status))?;
                    let control = Some(Control::Response { status });
                    self.state = State::Fields { control, fields: Vec::new(), name: None };
                }
                State::Fields { .. } => {
                    let Some(string) = self.string()? else { return Ok(None) };
                    let State::Fields { control, fields, name } = &mut self.state else { continue };
                    match name.take() {
                        Some(name) if string.iter().any(|byte| b"\r\n\0".contains(byte)) => {
                            drop(name);
                            return Err(BinaryHttpError::Value);
                        }
                        Some(name) => fields.push((name, string)),
                        None if string.is_empty() => {
                            let (control, fields) = (control.take(), std::mem::take(fields));
                            self.taken = 0;
                            return Ok(Some(self.section(control, fields)));
                        }
                        None if !string.iter().copied().all(is_of_name) => return Err(BinaryHttpError::Name),
                        None => *name = Some(string),
                    }
                }
                State::ChunkLength => {
                    let Some(left) = self.number() else { return Ok(None) };
                    self.state = match left {
                        0 => State::Fields { control: None, fields: Vec::new(), name: None },
                        left => State::Chunk { left },
                    };
                }
                State::Chunk { left } => {
                    let here = usize::try_from(*left).unwrap_or(usize::MAX).min(self.unread.len());
                    if here == 0 {
                        return Ok(None);
                    }
                    *left -= here as u64;
                    if *left == 0 {
                        self.state = State::ChunkLength;
                    }
                    return Ok(Some(Part::Content(self.unread.split_to(here).freeze())));
                }
                State::Padding => {
                    if self.unread.iter().any(|byte| *byte != 0) {
                        return Err(BinaryHttpError::Behind);
                    }
                    self.unread.clear();
                    return Ok(None);
                }
            }
        }
    }

    /// Ends a field section.
    fn section(&mut self, control: Option<Control>, fields: Vec<Field>) -> Part {
        let Some(control) = control else {
            self.state = State::Padding;
            return Part::End(fields);
        };
        let is_interim = matches!(control, Control::Response { status } if status < 200);
        self.state = if is_interim { State::Status } else { State::ChunkLength };
        Part::Head(control, fields)
    }

    fn number(&mut self) -> Option<u64> {
        let (value, length) = varint::decode(&self.unread)?;
        self.unread.advance(length);
        Some(value)
    }

    fn string(&mut self) -> Result<Option<Bytes>, BinaryHttpError> {
        let Some((length, before)) = varint::decode(&self.unread) else { return Ok(None) };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if self.taken.saturating_add(before).saturating_add(length) > self.most {
            return Err(BinaryHttpError::TooLong(self.most));
        }
        if self.unread.len() < before + length {
            return Ok(None);
        }
        self.taken += before + length;
        self.unread.advance(before);
        Ok(Some(self.unread.split_to(length).freeze()))
    }
}

/// Token characters (RFC 9110, section 5.6.2) without capital letters, which HTTP/2 and HTTP/3 forbid.
fn is_of_name(byte: u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'0'..=b'9') || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn text(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }

    fn lines(fields: &[Field]) -> impl Iterator<Item = (&[u8], &[u8])> {
        fields.iter().map(|(name, value)| (&name[..], &value[..]))
    }

    fn request() -> Control {
        let [method, scheme] = [text("POST"), text("https")];
        Control::Request { method, scheme, authority: text("SHOP"), path: text("/a?b") }
    }

    fn put(parts: &[Part]) -> Bytes {
        let mut out = BytesMut::new();
        for part in parts {
            match part {
                Part::Head(control, fields) => put_head(control, lines(fields), &mut out),
                Part::Content(bytes) => {
                    put_chunk_head(bytes.len(), &mut out);
                    out.put_slice(bytes);
                }
                Part::End(fields) => put_end(lines(fields), &mut out),
            }
        }
        out.freeze()
    }

    /// Joins adjacent parts of the content.
    fn read(bytes: &[u8], size: usize) -> Result<Vec<Part>, BinaryHttpError> {
        let (mut decoder, mut parts) = (Decoder::new(1000), Vec::<Part>::new());
        for piece in bytes.chunks(size) {
            decoder.push(Bytes::copy_from_slice(piece));
            while let Some(part) = decoder.next()? {
                match (parts.last_mut(), part) {
                    (Some(Part::Content(before)), Part::Content(more)) => {
                        *before = [&before[..], &more].concat().into()
                    }
                    (_, part) => parts.push(part),
                }
            }
        }
        decoder.finish().map(|()| parts)
    }

    #[test]
    fn what_is_put_is_read_in_any_pieces() {
        let fields = vec![(text("hermes-user"), text("alice")), (text("x"), text(""))];
        let content = Part::Content(vec![7; 5000].into());
        let messages = [
            vec![Part::Head(request(), fields.clone()), content.clone(), Part::End(fields)],
            vec![Part::Head(Control::Response { status: 204 }, vec![]), Part::End(vec![])],
        ];
        for message in messages {
            let mut bytes = put(&message).to_vec();
            for _ in 0..3 {
                for size in [1, 7, bytes.len()] {
                    assert_eq!(read(&bytes, size).as_ref(), Ok(&message), "pieces of {size}");
                }
                // Padding has no meaning.
                bytes.push(0);
            }
            for end in 0..put(&message).len() {
                assert_eq!(read(&bytes[..end], 100), Err(BinaryHttpError::Truncated), "{end}");
            }
        }
    }

    #[test]
    fn interim_responses_come_before_the_final_one() {
        let bytes = [&[3, 0x40, 102][..], &[1, b'a', 1, b'b', 0], &[0x40, 200, 0], &[2, b'h', b'i', 0, 0]].concat();
        let interim = Part::Head(Control::Response { status: 102 }, vec![(text("a"), text("b"))]);
        let last = Part::Head(Control::Response { status: 200 }, vec![]);
        assert_eq!(read(&bytes, 1), Ok(vec![interim, last, Part::Content(text("hi")), Part::End(vec![])]));
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let cases: [(&[u8], BinaryHttpError); 7] = [
            (&[0, 1], BinaryHttpError::Indicator(0)),
            (&[3, 0x40, 99], BinaryHttpError::Status(99)),
            (&[3, 0x42, 0x58], BinaryHttpError::Status(600)),
            (&[3, 0x40, 200, 1, b'A', 0], BinaryHttpError::Name),
            (&[3, 0x40, 200, 1, b'a', 1, b'\n'], BinaryHttpError::Value),
            (&[3, 0x40, 200, 0x48, 0], BinaryHttpError::TooLong(1000)),
            (&[3, 0x40, 200, 0, 0, 0, 0, 1], BinaryHttpError::Behind),
        ];
        for (bytes, error) in cases {
            assert_eq!(read(bytes, 1), Err(error), "{bytes:?}");
        }
    }

    #[test]
    fn a_head_is_bounded_and_content_is_not() {
        let many = vec![(text("name"), text("value")); 200];
        let long = put(&[Part::Head(request(), many), Part::End(vec![])]);
        assert_eq!(read(&long, 10), Err(BinaryHttpError::TooLong(1000)));
        let content = Part::Content(vec![1; 100_000].into());
        let message = vec![Part::Head(request(), vec![]), content, Part::End(vec![])];
        assert_eq!(read(&put(&message), 4096).as_ref(), Ok(&message));
    }
}

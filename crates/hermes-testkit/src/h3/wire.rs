//! HTTP/3 on the wire, byte by byte, for valid messages and for those that no library sends.
//!
//! In: frames of any type and payload, field sections with any bytes in them, well formed or not. Out: their bytes.
//! Field sections are plain literals (RFC 9204, 4.5.6), so that any byte gets into any field; received ones are
//! decoded by the QPACK of the `http3` crate. Never: a rule about what may be sent.

use std::io;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};
use http3::qpack;

use crate::varint::{put_varint, varint};

/// Types of frames (RFC 9114, 7.2).
pub mod kind {
    /// DATA
    pub const DATA: u64 = 0x00;
    /// HEADERS
    pub const HEADERS: u64 = 0x01;
    /// CANCEL_PUSH
    pub const CANCEL_PUSH: u64 = 0x03;
    /// SETTINGS
    pub const SETTINGS: u64 = 0x04;
    /// PUSH_PROMISE
    pub const PUSH_PROMISE: u64 = 0x05;
    /// GOAWAY
    pub const GOAWAY: u64 = 0x07;
    /// MAX_PUSH_ID
    pub const MAX_PUSH_ID: u64 = 0x0d;
}

/// Error codes (RFC 9114, 8.1; RFC 9204, 6).
pub mod code {
    /// H3_NO_ERROR
    pub const NO_ERROR: u64 = 0x100;
    /// H3_STREAM_CREATION_ERROR
    pub const STREAM_CREATION_ERROR: u64 = 0x103;
    /// H3_CLOSED_CRITICAL_STREAM
    pub const CLOSED_CRITICAL_STREAM: u64 = 0x104;
    /// H3_FRAME_UNEXPECTED
    pub const FRAME_UNEXPECTED: u64 = 0x105;
    /// H3_FRAME_ERROR
    pub const FRAME_ERROR: u64 = 0x106;
    /// H3_EXCESSIVE_LOAD
    pub const EXCESSIVE_LOAD: u64 = 0x107;
    /// H3_ID_ERROR
    pub const ID_ERROR: u64 = 0x108;
    /// H3_SETTINGS_ERROR
    pub const SETTINGS_ERROR: u64 = 0x109;
    /// H3_MISSING_SETTINGS
    pub const MISSING_SETTINGS: u64 = 0x10a;
    /// H3_REQUEST_REJECTED
    pub const REQUEST_REJECTED: u64 = 0x10b;
    /// H3_REQUEST_CANCELLED
    pub const REQUEST_CANCELLED: u64 = 0x10c;
    /// H3_REQUEST_INCOMPLETE
    pub const REQUEST_INCOMPLETE: u64 = 0x10d;
    /// H3_MESSAGE_ERROR
    pub const MESSAGE_ERROR: u64 = 0x10e;
    /// H3_CONNECT_ERROR
    pub const CONNECT_ERROR: u64 = 0x10f;
    /// QPACK_DECOMPRESSION_FAILED
    pub const DECOMPRESSION_FAILED: u64 = 0x200;
}

/// SETTINGS_MAX_FIELD_SECTION_SIZE
pub const MAX_FIELD_SECTION_SIZE: u64 = 0x06;
/// SETTINGS_ENABLE_CONNECT_PROTOCOL (RFC 9220)
pub const ENABLE_CONNECT_PROTOCOL: u64 = 0x08;
/// SETTINGS_H3_DATAGRAM (RFC 9297)
pub const H3_DATAGRAM: u64 = 0x33;

/// A varint on its own.
pub fn integer(value: u64) -> Bytes {
    let mut out = BytesMut::new();
    put_varint(&mut out, value);
    out.freeze()
}

/// A frame.
pub fn frame(kind: u64, payload: &[u8]) -> Bytes {
    let mut out = BytesMut::new();
    put_varint(&mut out, kind);
    put_varint(&mut out, payload.len() as u64);
    out.extend_from_slice(payload);
    out.freeze()
}

/// SETTINGS.
pub fn settings(settings: &[(u64, u64)]) -> Bytes {
    let mut payload = BytesMut::new();
    for (id, value) in settings {
        put_varint(&mut payload, *id);
        put_varint(&mut payload, *value);
    }
    frame(kind::SETTINGS, &payload)
}

/// HEADERS with these lines, as they are.
pub fn headers(lines: &[(&str, &str)]) -> Bytes {
    frame(kind::HEADERS, &section(lines))
}

/// The lines of a GET that has nothing wrong with it.
pub fn get<'a>(authority: &'a str, path: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![(":method", "GET"), (":scheme", "https"), (":authority", authority), (":path", path)]
}

/// A field section of literals that refer to nothing.
pub fn section(lines: &[(&str, &str)]) -> Bytes {
    // No insert was needed, and the base is nothing (RFC 9204, 4.5.1).
    let mut out = BytesMut::from(&[0, 0][..]);
    for (name, value) in lines {
        put_text(&mut out, 0x20, 0x07, name.as_bytes());
        put_text(&mut out, 0x00, 0x7f, value.as_bytes());
    }
    out.freeze()
}

/// RFC 9204, 4.1: the length behind a prefix, then the bytes as they are.
fn put_text(out: &mut BytesMut, mark: u8, most: u8, text: &[u8]) {
    let mut length = text.len();
    if length < usize::from(most) {
        out.extend_from_slice(&[mark | length as u8]);
    } else {
        out.extend_from_slice(&[mark | most]);
        length -= usize::from(most);
        while length >= 128 {
            out.extend_from_slice(&[(length % 128 + 128) as u8]);
            length /= 128;
        }
        out.extend_from_slice(&[length as u8]);
    }
    out.extend_from_slice(text);
}

/// The lines of a received section: pseudo-header fields apart from the others.
///
/// # Errors
/// The field section cannot be decoded, or has invalid characters.
pub fn lines(section: Bytes) -> io::Result<(Vec<(String, String)>, HeaderMap)> {
    let (mut pseudo, mut fields) = (Vec::new(), HeaderMap::new());
    let mut section = section;
    let decoded = qpack::decode_stateless(&mut section, u64::MAX).map_err(io::Error::other)?;
    for line in decoded.fields {
        let (name, value) = line.into_inner();
        if name.starts_with(b":") {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            pseudo.push((text(&name), text(&value)));
        } else {
            let name = HeaderName::from_lowercase(&name).map_err(io::Error::other)?;
            fields.append(name, HeaderValue::from_bytes(&value).map_err(io::Error::other)?);
        }
    }
    Ok((pseudo, fields))
}

/// Takes the next whole frame off: its type and payload. `None` where more bytes are needed.
pub fn take_frame(unread: &mut BytesMut) -> Option<(u64, Bytes)> {
    let (kind, one) = varint(unread)?;
    let (length, other) = varint(&unread[one..])?;
    let (begin, length) = (one + other, usize::try_from(length).ok()?);
    if unread.len() < begin + length {
        return None;
    }
    let _ = unread.split_to(begin);
    Some((kind, unread.split_to(length).freeze()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_those_of_rfc_9114() {
        assert_eq!(settings(&[(ENABLE_CONNECT_PROTOCOL, 1)]), &[4, 2, 8, 1][..]);
        let mut unread = BytesMut::from(&[1, 2, 0, 0, 0][..]);
        assert_eq!(take_frame(&mut unread), Some((kind::HEADERS, Bytes::from_static(&[0, 0]))));
        assert_eq!((take_frame(&mut unread), unread.len()), (None, 1));
    }

    #[test]
    fn literals_are_those_of_rfc_9204() {
        // The example of appendix B.1 has a name of the table; with its name as a literal only that differs.
        assert_eq!(section(&[("a", "bc")]), &[0, 0, 0x21, b'a', 2, b'b', b'c'][..]);
        let long = "x".repeat(1337);
        // 1337 - 7 = 1330 = 10 * 128 + 50.
        assert_eq!(section(&[(&long, "")])[2..5], [0x27, 50 + 128, 10]);
        let (pseudo, fields) = lines(section(&[(":status", "200"), ("x", &long)])).unwrap_or_default();
        assert_eq!(pseudo, [(":status".to_owned(), "200".to_owned())]);
        assert_eq!(fields.get("x").map(HeaderValue::len), Some(1337));
    }
}

//! The type-length-value encoding of NDN (Packet Format 0.3, section "Type-Length-Value (TLV) Encoding").
//!
//! In: bytes of a packet, or the front of a byte stream. Out: elements as ranges of the same buffer, or encoded
//! elements. Decoding requires the shortest form of each number. It never copies, and never descends into an element
//! unless the caller asks for its reader.

use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};

/// The maximum length of an NDN packet (`MAX_NDN_PACKET_SIZE` of ndn-cxx), including its type and length.
pub const MAX_PACKET: usize = 8800;

/// The length of a SHA-256 digest in bytes.
pub const DIGEST_LEN: usize = 32;

/// The longest type and length before a value: five bytes for a 32-bit type, nine for a length.
pub const MAX_HEADER: usize = 5 + 9;

/// TLV-TYPE numbers of the Packet Format 0.3 and of the certificate format 2.
#[expect(missing_docs, reason = "the names are those of the specification")]
pub mod types {
    pub const IMPLICIT_SHA256_DIGEST: u32 = 1;
    pub const PARAMETERS_SHA256_DIGEST: u32 = 2;
    pub const INTEREST: u32 = 5;
    pub const DATA: u32 = 6;
    pub const NAME: u32 = 7;
    pub const GENERIC_COMPONENT: u32 = 8;
    pub const NONCE: u32 = 10;
    pub const INTEREST_LIFETIME: u32 = 12;
    pub const MUST_BE_FRESH: u32 = 18;
    pub const META_INFO: u32 = 20;
    pub const CONTENT: u32 = 21;
    pub const SIGNATURE_INFO: u32 = 22;
    pub const SIGNATURE_VALUE: u32 = 23;
    pub const CONTENT_TYPE: u32 = 24;
    pub const FRESHNESS_PERIOD: u32 = 25;
    pub const FINAL_BLOCK_ID: u32 = 26;
    pub const SIGNATURE_TYPE: u32 = 27;
    pub const KEY_LOCATOR: u32 = 28;
    pub const KEY_DIGEST: u32 = 29;
    pub const FORWARDING_HINT: u32 = 30;
    pub const CAN_BE_PREFIX: u32 = 33;
    pub const HOP_LIMIT: u32 = 34;
    pub const APPLICATION_PARAMETERS: u32 = 36;
    pub const SIGNATURE_NONCE: u32 = 38;
    pub const SIGNATURE_TIME: u32 = 40;
    pub const SIGNATURE_SEQ_NUM: u32 = 42;
    pub const INTEREST_SIGNATURE_INFO: u32 = 44;
    pub const INTEREST_SIGNATURE_VALUE: u32 = 46;
    pub const VALIDITY_PERIOD: u32 = 253;
    pub const NOT_BEFORE: u32 = 254;
    pub const NOT_AFTER: u32 = 255;
}

/// The reason why bytes are not valid TLV.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TlvError {
    /// An element ends after the end of its parent or of the packet.
    #[error("element is truncated")]
    Truncated,
    /// A number is not in its shortest form.
    #[error("number is not in its shortest form")]
    NotShortest,
    /// A type is 0 or exceeds 32 bits.
    #[error("type {0} is out of range")]
    TypeOutOfRange(u64),
    /// A packet exceeds the limit of the caller.
    #[error("packet of {length} bytes exceeds the limit of {limit} bytes")]
    TooLong {
        /// The length of the packet, including its header.
        length: u64,
        /// The limit.
        limit: usize,
    },
    /// A value has the wrong length for its type.
    #[error("element of type {kind} has an invalid length of {length} bytes")]
    BadLength {
        /// The type of the element.
        kind: u32,
        /// The length of its value.
        length: usize,
    },
    /// A critical element is unknown, repeated or out of order.
    #[error("critical element of type {0} is unknown or out of order")]
    Critical(u32),
    /// A required element is missing.
    #[error("element of type {0} is missing")]
    Missing(u32),
    /// Bytes follow the end of the packet.
    #[error("{0} bytes follow the packet")]
    Trailing(usize),
}

/// The type and the length of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The type, at least 1.
    pub kind: u32,
    /// The length of the value in bytes.
    pub length: u64,
    /// The number of bytes of type and length.
    pub size: usize,
}

/// Decodes the variable-size number at the front of `bytes`: its value and its length in bytes.
///
/// `None`: more bytes are needed.
///
/// # Errors
/// [`TlvError::NotShortest`].
#[inline]
pub fn decode_number(bytes: &[u8]) -> Result<Option<(u64, usize)>, TlvError> {
    let Some((&first, rest)) = bytes.split_first() else {
        return Ok(None);
    };
    let (value, size, least) = match first {
        0..253 => return Ok(Some((u64::from(first), 1))),
        253 => (rest.first_chunk().map(|bytes| u64::from(u16::from_be_bytes(*bytes))), 3, 253),
        254 => (rest.first_chunk().map(|bytes| u64::from(u32::from_be_bytes(*bytes))), 5, 0x1_0000),
        255 => (rest.first_chunk().map(|bytes| u64::from_be_bytes(*bytes)), 9, 0x1_0000_0000),
    };
    match value {
        None => Ok(None),
        Some(value) if value < least => Err(TlvError::NotShortest),
        Some(value) => Ok(Some((value, size))),
    }
}

/// Decodes the header at the front of `bytes`. `None`: more bytes are needed.
///
/// # Errors
/// [`TlvError::NotShortest`] or [`TlvError::TypeOutOfRange`].
#[inline]
pub fn decode_header(bytes: &[u8]) -> Result<Option<Header>, TlvError> {
    let Some((kind, kind_size)) = decode_number(bytes)? else {
        return Ok(None);
    };
    let kind = match u32::try_from(kind) {
        Ok(0) | Err(_) => return Err(TlvError::TypeOutOfRange(kind)),
        Ok(kind) => kind,
    };
    let Some((length, length_size)) = decode_number(bytes.get(kind_size..).unwrap_or_default())? else {
        return Ok(None);
    };
    Ok(Some(Header { kind, length, size: kind_size + length_size }))
}

/// The total length of the packet at the front of a byte stream; `None` while its header is incomplete.
///
/// # Errors
/// [`TlvError::TooLong`] if the packet exceeds `limit` bytes, or an error of the header. The stream must be closed in
/// both cases, since the boundary between packets is lost.
pub fn packet_length(bytes: &[u8], limit: usize) -> Result<Option<usize>, TlvError> {
    let Some(header) = decode_header(bytes)? else {
        return Ok(None);
    };
    let length = header.length.checked_add(header.size as u64);
    match length.map(usize::try_from) {
        Some(Ok(length)) if length <= limit => Ok(Some(length)),
        _ => Err(TlvError::TooLong { length: length.unwrap_or(u64::MAX), limit }),
    }
}

/// Whether a decoder must reject a packet that contains an element of this unknown type (Packet Format 0.3, section
/// "Considerations for Evolvability of TLV-Based Encoding").
pub const fn is_critical(kind: u32) -> bool {
    kind <= 31 || kind % 2 == 1
}

/// Accepts an unknown or misplaced element if it is not critical.
///
/// # Errors
/// [`TlvError::Critical`].
pub fn ignore(kind: u32) -> Result<(), TlvError> {
    if is_critical(kind) { Err(TlvError::Critical(kind)) } else { Ok(()) }
}

/// Reads adjacent elements from a part of a buffer.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    buffer: &'a Bytes,
    at: usize,
    end: usize,
}

/// An element within a buffer.
#[derive(Debug, Clone, Copy)]
pub struct Element<'a> {
    buffer: &'a Bytes,
    /// The type, at least 1.
    pub kind: u32,
    start: usize,
    value: usize,
    end: usize,
}

impl<'a> Reader<'a> {
    /// A reader of the whole buffer.
    pub fn new(buffer: &'a Bytes) -> Self {
        Self { buffer, at: 0, end: buffer.len() }
    }

    /// Returns the next element; `None` after the last one.
    ///
    /// # Errors
    /// [`TlvError::Truncated`], [`TlvError::NotShortest`] or [`TlvError::TypeOutOfRange`].
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "callers use ? on each element")]
    pub fn next(&mut self) -> Result<Option<Element<'a>>, TlvError> {
        if self.at >= self.end {
            return Ok(None);
        }
        let rest = self.buffer.get(self.at..self.end).unwrap_or_default();
        let header = decode_header(rest)?.ok_or(TlvError::Truncated)?;
        let available = rest.len() - header.size;
        let length = usize::try_from(header.length).map_err(|_| TlvError::Truncated)?;
        if length > available {
            return Err(TlvError::Truncated);
        }
        let value = self.at + header.size;
        let element = Element { buffer: self.buffer, kind: header.kind, start: self.at, value, end: value + length };
        self.at = element.end;
        Ok(Some(element))
    }

    /// The only element of the buffer, of type `kind`.
    ///
    /// # Errors
    /// [`TlvError::Missing`] if there is no such element, [`TlvError::Trailing`] if bytes follow it.
    pub fn only(mut self, kind: u32) -> Result<Element<'a>, TlvError> {
        match self.next()? {
            Some(element) if element.kind == kind => match self.end - self.at {
                0 => Ok(element),
                rest => Err(TlvError::Trailing(rest)),
            },
            Some(_) | None => Err(TlvError::Missing(kind)),
        }
    }
}

impl<'a> Element<'a> {
    /// The value.
    #[inline]
    pub fn value(&self) -> &'a [u8] {
        self.buffer.get(self.value..self.end).unwrap_or_default()
    }

    /// The value as a part of the shared buffer.
    #[inline]
    pub fn value_bytes(&self) -> Bytes {
        self.buffer.slice(self.value..self.end)
    }

    /// The range of the whole element within the buffer of the reader.
    #[inline]
    pub fn range(&self) -> Range<usize> {
        self.start..self.end
    }

    /// The range of the value within the buffer of the reader.
    #[inline]
    pub fn value_range(&self) -> Range<usize> {
        self.value..self.end
    }

    /// A reader of the elements within the value.
    #[inline]
    pub fn reader(&self) -> Reader<'a> {
        Reader { buffer: self.buffer, at: self.value, end: self.end }
    }

    /// The value as a non-negative integer of 1, 2, 4 or 8 bytes.
    ///
    /// # Errors
    /// [`TlvError::BadLength`].
    pub fn integer(&self) -> Result<u64, TlvError> {
        decode_integer(self.value()).ok_or_else(|| self.bad_length())
    }

    /// The value as an array of `N` bytes.
    ///
    /// # Errors
    /// [`TlvError::BadLength`].
    pub fn array<const N: usize>(&self) -> Result<[u8; N], TlvError> {
        self.value().try_into().map_err(|_| self.bad_length())
    }

    /// Checks that the value is empty.
    ///
    /// # Errors
    /// [`TlvError::BadLength`].
    pub fn empty(&self) -> Result<(), TlvError> {
        if self.value == self.end { Ok(()) } else { Err(self.bad_length()) }
    }

    /// The error of a value with the wrong length.
    pub fn bad_length(&self) -> TlvError {
        TlvError::BadLength { kind: self.kind, length: self.end - self.value }
    }
}

/// Decodes a non-negative integer of 1, 2, 4 or 8 bytes; `None` for other lengths.
pub fn decode_integer(bytes: &[u8]) -> Option<u64> {
    match bytes.len() {
        1 | 2 | 4 | 8 => Some(bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))),
        _ => None,
    }
}

/// The number of bytes of a variable-size number.
pub const fn number_len(number: u64) -> usize {
    match number {
        0..253 => 1,
        253..0x1_0000 => 3,
        0x1_0000..0x1_0000_0000 => 5,
        _ => 9,
    }
}

/// Appends a variable-size number in its shortest form.
pub fn put_number(out: &mut BytesMut, number: u64) {
    // The casts are lossless: `number_len` selects the form by the value.
    match number_len(number) {
        1 => out.put_u8(number as u8),
        3 => {
            out.put_u8(253);
            out.put_u16(number as u16);
        }
        5 => {
            out.put_u8(254);
            out.put_u32(number as u32);
        }
        _ => {
            out.put_u8(255);
            out.put_u64(number);
        }
    }
}

/// Appends the type and the length of an element.
pub fn put_header(out: &mut BytesMut, kind: u32, length: usize) {
    put_number(out, u64::from(kind));
    put_number(out, length as u64);
}

/// The total length of an element with a value of `length` bytes.
pub const fn element_len(kind: u32, length: usize) -> usize {
    number_len(kind as u64) + number_len(length as u64) + length
}

/// Appends an element.
pub fn put(out: &mut BytesMut, kind: u32, value: &[u8]) {
    out.reserve(element_len(kind, value.len()));
    put_header(out, kind, value.len());
    out.put_slice(value);
}

/// Appends an element whose value is a non-negative integer in its shortest form.
pub fn put_integer(out: &mut BytesMut, kind: u32, value: u64) {
    let bytes = value.to_be_bytes();
    put(out, kind, shortest(&bytes));
}

/// The shortest form of a non-negative integer (1, 2, 4 or 8 bytes) within its eight bytes.
pub(crate) fn shortest(bytes: &[u8; 8]) -> &[u8] {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    match zeros {
        7.. => &bytes[7..],
        6 => &bytes[6..],
        4..6 => &bytes[4..],
        _ => &bytes[..],
    }
}

/// An element of type `kind` with a value that `fill` appends.
pub(crate) fn wrap(kind: u32, fill: impl FnOnce(&mut BytesMut)) -> BytesMut {
    let mut value = BytesMut::new();
    fill(&mut value);
    let mut out = BytesMut::with_capacity(element_len(kind, value.len()));
    put_header(&mut out, kind, value.len());
    out.put_slice(&value);
    out
}

#[cfg(test)]
mod tests;

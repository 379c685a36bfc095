//! Type-length-value elements (packet format 0.3, "TLV encoding").
//!
//! In: bytes. Out: elements without a copy, in the order that a packet defines. Numbers must have their shortest form.
//! An unknown element is skipped unless its type is critical: odd, or at most 31. Never: recursion.

use bytes::Bytes;

/// The reason why bytes are no NDN packet. The peer is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NdnError {
    /// An element is longer than what contains it.
    #[error("an element is cut short")]
    Truncated,
    /// A number has leading zeros.
    #[error("a number is not in its shortest form")]
    NotShortest,
    /// A type is 0, or needs more than 32 bits.
    #[error("invalid type {0}")]
    Type(u64),
    /// The packet exceeds the limit, which is the second value.
    #[error("a packet of {0} bytes; the limit is {1}")]
    TooLong(u64, usize),
    /// An element of a critical type is unknown, or at the wrong place.
    #[error("element of type {0} is unknown or at the wrong place")]
    Unexpected(u32),
    /// An element is missing.
    #[error("missing element: {0}")]
    Missing(&'static str),
    /// The value of an element is invalid.
    #[error("invalid {0}")]
    Invalid(&'static str),
}

/// The result of decoding.
pub type Result<T> = std::result::Result<T, NdnError>;

/// Reads a number of one, three, five or nine bytes, and returns it with its length. `None`: more bytes are needed.
fn number(bytes: &[u8]) -> Result<Option<(u64, usize)>> {
    let Some(first) = bytes.first() else { return Ok(None) };
    let (least, length) = match first {
        0..=252 => return Ok(Some((u64::from(*first), 1))),
        253 => (253, 3),
        254 => (0x1_0000, 5),
        255 => (0x1_0000_0000, 9),
    };
    let Some(rest) = bytes.get(1..length) else { return Ok(None) };
    let value = rest.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
    if value < least { Err(NdnError::NotShortest) } else { Ok(Some((value, length))) }
}

/// Reads the header of an element: its type, the length of its value, and the length of the header. `None`: more bytes
/// are needed.
fn header(bytes: &[u8]) -> Result<Option<(u32, u64, usize)>> {
    let Some((kind, first)) = number(bytes)? else { return Ok(None) };
    let kind = u32::try_from(kind).ok().filter(|kind| *kind > 0).ok_or(NdnError::Type(kind))?;
    let Some((length, second)) = number(&bytes[first..])? else { return Ok(None) };
    Ok(Some((kind, length, first + second)))
}

/// The length of the first packet in a stream, once its header is complete. `None`: more bytes are needed.
///
/// # Errors
/// The packet is longer than `limit`, or its header is malformed. The stream cannot continue then.
pub fn packet_length(bytes: &[u8], limit: usize) -> Result<Option<usize>> {
    let Some((_, length, header)) = header(bytes)? else { return Ok(None) };
    let whole = length.saturating_add(header as u64);
    match usize::try_from(whole) {
        Ok(whole) if whole <= limit => Ok(Some(whole)),
        _ => Err(NdnError::TooLong(whole, limit)),
    }
}

/// An element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    /// The type of the element.
    pub kind: u32,
    /// The bytes after the header.
    pub value: Bytes,
    /// The element with its header.
    pub whole: Bytes,
}

impl Element {
    /// Splits the first element off. `None` at the end.
    ///
    /// # Errors
    /// The element is malformed or cut short.
    pub fn take(bytes: &mut Bytes) -> Result<Option<Self>> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let (kind, length, head) = header(bytes)?.ok_or(NdnError::Truncated)?;
        let length = usize::try_from(length).map_err(|_| NdnError::Truncated)?;
        if bytes.len() - head < length {
            return Err(NdnError::Truncated);
        }
        let whole = bytes.split_to(head + length);
        Ok(Some(Self { kind, value: whole.slice(head..), whole }))
    }

    /// The element that all bytes form.
    ///
    /// # Errors
    /// The bytes are empty, malformed, or more than one element.
    pub fn only(mut bytes: Bytes) -> Result<Self> {
        let element = Self::take(&mut bytes)?.ok_or(NdnError::Truncated)?;
        if bytes.is_empty() { Ok(element) } else { Err(NdnError::Invalid("end of the packet")) }
    }

    /// The value as a non-negative integer of one, two, four or eight bytes.
    ///
    /// # Errors
    /// The value has another length.
    pub fn integer(&self) -> Result<u64> {
        integer(&self.value)
    }
}

/// A non-negative integer of one, two, four or eight bytes.
///
/// # Errors
/// The value has another length.
pub fn integer(value: &[u8]) -> Result<u64> {
    match value.len() {
        1 | 2 | 4 | 8 => Ok(value.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))),
        _ => Err(NdnError::Invalid("length of an integer")),
    }
}

/// The elements inside another one, in a defined order.
pub struct Elements {
    rest: Bytes,
    /// Types of this version, in the order of the packet format.
    known: &'static [u32],
    next: Option<Element>,
}

impl Elements {
    /// Reads the elements of a value.
    ///
    /// # Errors
    /// The first element is malformed.
    pub fn new(value: Bytes, known: &'static [u32]) -> Result<Self> {
        let mut rest = value;
        let next = Element::take(&mut rest)?;
        Ok(Self { rest, known, next })
    }

    /// Takes the element of this type if it is the next known one.
    ///
    /// # Errors
    /// An unknown element before it is critical or malformed.
    pub fn take(&mut self, kind: u32) -> Result<Option<Element>> {
        while let Some(next) = &self.next {
            if next.kind == kind {
                let found = self.next.take();
                self.next = Element::take(&mut self.rest)?;
                return Ok(found);
            }
            if self.known.contains(&next.kind) {
                return Ok(None);
            }
            self.skip()?;
        }
        Ok(None)
    }

    fn skip(&mut self) -> Result<()> {
        if let Some(unknown) = self.next.take().filter(|unknown| is_critical(unknown.kind)) {
            return Err(NdnError::Unexpected(unknown.kind));
        }
        self.next = Element::take(&mut self.rest)?;
        Ok(())
    }

    /// Checks what is left.
    ///
    /// # Errors
    /// An element is critical and unknown, or at the wrong place.
    pub fn finish(mut self) -> Result<()> {
        while self.next.is_some() {
            self.skip()?;
        }
        Ok(())
    }
}

fn is_critical(kind: u32) -> bool {
    kind <= 31 || kind % 2 == 1
}

fn put_number(out: &mut Vec<u8>, number: u64) {
    let bytes = number.to_be_bytes();
    match number {
        0..=252 => out.push(bytes[7]),
        253..=0xffff => {
            out.push(253);
            out.extend_from_slice(&bytes[6..]);
        }
        0x1_0000..=0xffff_ffff => {
            out.push(254);
            out.extend_from_slice(&bytes[4..]);
        }
        _ => {
            out.push(255);
            out.extend_from_slice(&bytes);
        }
    }
}

/// Appends an element.
pub fn put(out: &mut Vec<u8>, kind: u32, value: &[u8]) {
    put_number(out, u64::from(kind));
    put_number(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// Appends an element whose value `fill` appends.
pub fn put_nested(out: &mut Vec<u8>, kind: u32, fill: impl FnOnce(&mut Vec<u8>)) {
    let mut value = Vec::new();
    fill(&mut value);
    put(out, kind, &value);
}

/// Appends a non-negative integer in its shortest form.
pub fn put_integer(out: &mut Vec<u8>, kind: u32, value: u64) {
    let (bytes, length) = shortest(value);
    put(out, kind, &bytes[8 - length..]);
}

/// The bytes of a non-negative integer, of which the last `length` are its shortest form.
pub(crate) fn shortest(value: u64) -> ([u8; 8], usize) {
    let length = match value {
        0..=0xff => 1,
        0x100..=0xffff => 2,
        0x1_0000..=0xffff_ffff => 4,
        _ => 8,
    };
    (value.to_be_bytes(), length)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_shortest_form() {
        for value in [0, 252, 253, 0xffff, 0x1_0000, 0xffff_ffff, 0x1_0000_0000, u64::MAX] {
            let mut out = Vec::new();
            put_number(&mut out, value);
            assert_eq!(number(&out), Ok(Some((value, out.len()))));
            for cut in 0..out.len() {
                assert_eq!(number(&out[..cut]), Ok(None));
            }
        }
        for long in [&[253, 0, 252][..], &[254, 0, 0, 255, 255], &[255, 0, 0, 0, 0, 255, 255, 255, 255]] {
            assert_eq!(number(long), Err(NdnError::NotShortest));
        }
    }

    #[test]
    fn a_stream_names_the_length_of_its_packet() {
        assert_eq!(packet_length(&[5], 100), Ok(None));
        assert_eq!(packet_length(&[5, 3], 100), Ok(Some(5)));
        assert_eq!(packet_length(&[5, 253, 1, 0], 100), Err(NdnError::TooLong(260, 100)));
        assert_eq!(packet_length(&[0, 0], 100), Err(NdnError::Type(0)));
    }

    #[test]
    fn unknown_elements_are_skipped_unless_they_are_critical() {
        let value = |kind: u8| Bytes::from(vec![kind, 1, 9, 7, 1, 5]);
        let mut elements = Elements::new(value(32), &[7]).unwrap();
        assert_eq!(elements.take(7).unwrap().unwrap().integer(), Ok(5));
        elements.finish().unwrap();
        assert_eq!(Elements::new(value(33), &[7]).unwrap().take(7), Err(NdnError::Unexpected(33)));
        assert_eq!(Elements::new(value(30), &[7]).unwrap().take(7), Err(NdnError::Unexpected(30)));
    }
}

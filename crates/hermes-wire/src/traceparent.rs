//! The `traceparent` header of W3C Trace Context.
//!
//! In: the header's value, or random numbers that the caller drew. Out: the identifiers in it,
//! and the value to send on. Strict: a value that breaks the specification is an error, upon
//! which the caller starts a new trace. Never draws random numbers, never reads `tracestate`,
//! never decides what is sampled.

use std::fmt;

/// The length of a `traceparent` of version 00, in bytes.
pub const LEN: usize = 55;

/// Flag: the caller may have recorded this trace.
const SAMPLED: u8 = 0x01;

/// Flag of Trace Context level 2, same version 00: the trace id is random. Passed on unchanged.
const RANDOM: u8 = 0x02;

/// A trace, and the span in it that the next hop shall call its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Traceparent {
    trace_id: u128,
    span_id: u64,
    flags: u8,
}

/// Why a `traceparent` is ignored and a new trace begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TraceparentError {
    /// Shorter than [`LEN`], or longer where the version does not allow it.
    #[error("a traceparent has {LEN} characters, this one {0}")]
    Length(usize),
    /// Not a lower-case hexadecimal digit, or not a dash, where one belongs.
    #[error("traceparent: unexpected character at byte {0} (lower-case hexadecimal and dashes only)")]
    Character(usize),
    /// Version ff is forbidden.
    #[error("traceparent: version ff is forbidden")]
    Version,
    /// A trace id of zeros means that there is none.
    #[error("traceparent: the trace id is all zeros")]
    ZeroTrace,
    /// A parent id of zeros means that there is none.
    #[error("traceparent: the parent id is all zeros")]
    ZeroParent,
}

impl Traceparent {
    /// Starts a trace from numbers that the caller drew at random. A zero, which the
    /// specification forbids, is taken as one.
    pub fn root(trace_id: u128, span_id: u64, sampled: bool) -> Self {
        let flags = RANDOM | if sampled { SAMPLED } else { 0 };
        Self { trace_id: trace_id.max(1), span_id: span_id.max(1), flags }
    }

    /// Reads a header's value.
    ///
    /// Of a version above 00 only the known fields are read, and the flag `sampled`; what
    /// follows them is ignored, and what is sent on is version 00 (section 4.3 of the
    /// specification, "Versioning of traceparent").
    ///
    /// # Errors
    /// Whatever the specification calls invalid.
    pub fn parse(value: &[u8]) -> Result<Self, TraceparentError> {
        let Some((known, rest)) = value.split_first_chunk::<LEN>() else {
            return Err(TraceparentError::Length(value.len()));
        };
        let version = hex(known, 0, 2)?;
        let known_flags = match (version, rest.first()) {
            (0xff, _) => return Err(TraceparentError::Version),
            (0, None) => SAMPLED | RANDOM,
            (0, Some(_)) => return Err(TraceparentError::Length(value.len())),
            (_, None | Some(b'-')) => SAMPLED,
            (_, Some(_)) => return Err(TraceparentError::Character(LEN)),
        };
        if let Some(at) = [2, 35, 52].into_iter().find(|at| known[*at] != b'-') {
            return Err(TraceparentError::Character(at));
        }
        // The casts keep all the digits there are: sixteen for the span, two for the flags.
        let trace_id = hex(known, 3, 32)?;
        let span_id = hex(known, 36, 16)? as u64;
        let flags = hex(known, 53, 2)? as u8 & known_flags;
        match (trace_id, span_id) {
            (0, _) => Err(TraceparentError::ZeroTrace),
            (_, 0) => Err(TraceparentError::ZeroParent),
            _ => Ok(Self { trace_id, span_id, flags }),
        }
    }

    /// The same trace with our own span in the parent's place: what we send on. `random` is the
    /// span's identifier; zero, which the specification forbids, is taken as one.
    #[must_use]
    pub fn child(self, random: u64) -> Self {
        Self { span_id: random.max(1), ..self }
    }

    /// The trace's identifier, never zero.
    pub fn trace_id(self) -> u128 {
        self.trace_id
    }

    /// The span's identifier, never zero.
    pub fn span_id(self) -> u64 {
        self.span_id
    }

    /// Whether the caller may have recorded this trace.
    pub fn sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// The header's value in version 00: lower-case ASCII, without allocation.
    pub fn render(self) -> [u8; LEN] {
        let mut out = *b"00-................................-................-..";
        put_hex(&mut out[3..35], &self.trace_id.to_be_bytes());
        put_hex(&mut out[36..52], &self.span_id.to_be_bytes());
        put_hex(&mut out[53..], &[self.flags]);
        out
    }
}

impl fmt::Display for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, self.flags)
    }
}

/// The number in `len` lower-case digits from `start`.
fn hex(bytes: &[u8; LEN], start: usize, len: usize) -> Result<u128, TraceparentError> {
    let mut value = 0;
    for (at, byte) in bytes.iter().enumerate().skip(start).take(len) {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            _ => return Err(TraceparentError::Character(at)),
        };
        value = value << 4 | u128::from(digit);
    }
    Ok(value)
}

/// Writes two digits a byte.
fn put_hex(out: &mut [u8], bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (places, byte) in out.chunks_exact_mut(2).zip(bytes) {
        places.copy_from_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 0xf)]]);
    }
}

#[cfg(test)]
mod tests;

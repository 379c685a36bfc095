//! The `traceparent` header of W3C Trace Context.
//!
//! In: the header's value, or random numbers of the caller. Out: its identifiers, and the value to forward. Strict: a
//! value that violates the specification is an error, after which the caller starts a new trace. Never: a random
//! number, `tracestate`, or a sampling decision.

use std::fmt;

/// The length of a `traceparent` of version 00, in bytes.
pub const LEN: usize = 55;

/// Flag: the caller may have recorded this trace.
const SAMPLED: u8 = 0x01;

/// Flag of Trace Context level 2, same version 00: the trace id is random. Passed on unchanged.
const RANDOM: u8 = 0x02;

/// A trace, and the span that the next hop uses as its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Traceparent {
    trace_id: u128,
    span_id: u64,
    flags: u8,
}

/// The reason why a `traceparent` is ignored and a new trace begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TraceparentError {
    /// The value is shorter than [`LEN`], or longer than its version allows.
    #[error("traceparent: {0} characters instead of {LEN}")]
    Length(usize),
    /// A character is not a lowercase hexadecimal digit or dash as expected.
    #[error("traceparent: unexpected character at byte {0} (lower-case hexadecimal and dashes only)")]
    Character(usize),
    /// The version ff is forbidden.
    #[error("traceparent: version ff is forbidden")]
    Version,
    /// The trace id is zero, which is invalid.
    #[error("traceparent: the trace id is all zeros")]
    ZeroTrace,
    /// The parent id is zero, which is invalid.
    #[error("traceparent: the parent id is all zeros")]
    ZeroParent,
}

impl Traceparent {
    /// Starts a trace from random numbers of the caller. A zero, which the specification forbids, becomes one.
    pub fn root(trace_id: u128, span_id: u64, sampled: bool) -> Self {
        let flags = RANDOM | if sampled { SAMPLED } else { 0 };
        Self { trace_id: trace_id.max(1), span_id: span_id.max(1), flags }
    }

    /// Parses a header's value.
    ///
    /// For a version above 00, only the known fields and the flag `sampled` are used. The rest is ignored, and the
    /// forwarded value has version 00 (section 4.3 of the specification, "Versioning of traceparent").
    ///
    /// # Errors
    /// The value is invalid by the specification.
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
        // The casts are lossless: the span has sixteen digits, the flags two.
        let trace_id = hex(known, 3, 32)?;
        let span_id = hex(known, 36, 16)? as u64;
        let flags = hex(known, 53, 2)? as u8 & known_flags;
        match (trace_id, span_id) {
            (0, _) => Err(TraceparentError::ZeroTrace),
            (_, 0) => Err(TraceparentError::ZeroParent),
            _ => Ok(Self { trace_id, span_id, flags }),
        }
    }

    /// The same trace with our own span as the parent, to forward. `random` is the span's identifier; zero, which the
    /// specification forbids, becomes one.
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

/// The number in `len` lowercase digits from `start`.
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

/// Writes two digits for each byte.
fn put_hex(out: &mut [u8], bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (places, byte) in out.chunks_exact_mut(2).zip(bytes) {
        places.copy_from_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 0xf)]]);
    }
}

#[cfg(test)]
mod tests;

//! The URI form of names (NDN URI Scheme; Naming Conventions revision 3).
//!
//! In: a URI, or a name. Out: the other one. A printed name always parses to the same name. Parsing never accepts an
//! empty component, a component of one or two periods, or an unknown `kind=` prefix.

use std::fmt::{self, Write};
use std::str::FromStr;

use bytes::Bytes;

use super::{
    BYTE_OFFSET, Component, GENERIC, IMPLICIT_DIGEST, Name, NameError, PARAMETERS_DIGEST, SEGMENT, SEQUENCE, TIMESTAMP,
    VERSION,
};
use crate::tlv;

/// Prefixes of components whose value is a number.
const NUMBERS: [(&str, u16); 5] =
    [("seg", SEGMENT), ("off", BYTE_OFFSET), ("v", VERSION), ("t", TIMESTAMP), ("seq", SEQUENCE)];

/// Prefixes of components whose value is printed in hexadecimal.
const DIGESTS: [(&str, u16); 2] = [("sha256digest", IMPLICIT_DIGEST), ("params-sha256", PARAMETERS_DIGEST)];

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_char('/');
        }
        self.components().try_for_each(|component| write!(f, "/{component}"))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Name {
    type Err = NameError;

    /// Parses `/a/b`, `ndn:/a/b` or `a/b`. A single slash at the end is ignored.
    fn from_str(text: &str) -> Result<Self, NameError> {
        let text = text.strip_prefix("ndn:").unwrap_or(text);
        let text = text.strip_prefix('/').unwrap_or(text);
        if text.is_empty() {
            return Ok(Self::new());
        }
        let text = text.strip_suffix('/').unwrap_or(text);
        let mut components = Vec::new();
        for (index, part) in text.split('/').enumerate() {
            if index == Self::MAX_COMPONENTS {
                return Err(NameError::TooManyComponents);
            }
            components.push(component(part).ok_or(NameError::Uri(index))?);
        }
        Self::from_components(&components)
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((prefix, _)) = DIGESTS.iter().find(|(_, kind)| *kind == self.kind) {
            write!(f, "{prefix}=")?;
            return self.value.iter().try_for_each(|byte| write!(f, "{byte:02x}"));
        }
        if let Some((prefix, _)) = NUMBERS.iter().find(|(_, kind)| *kind == self.kind)
            && let Some(number) = self.as_number()
            && tlv::shortest(&number.to_be_bytes()) == self.value
        {
            return write!(f, "{prefix}={number}");
        }
        if self.kind != GENERIC {
            write!(f, "{}=", self.kind)?;
        }
        if self.value.iter().all(|byte| *byte == b'.') {
            f.write_str("...")?;
        }
        self.value.iter().try_for_each(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => f.write_char(char::from(*byte)),
            _ => write!(f, "%{byte:02X}"),
        })
    }
}

impl FromStr for Component {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        component(text).ok_or(NameError::Uri(0))
    }
}

fn component(text: &str) -> Option<Component> {
    let Some((prefix, value)) = text.split_once('=') else {
        return Some(Component::generic(unescape(text)?));
    };
    if let Some((_, kind)) = DIGESTS.iter().find(|(name, _)| *name == prefix) {
        return Component::new(*kind, hexadecimal(value.as_bytes())?).ok();
    }
    if let Some((_, kind)) = NUMBERS.iter().find(|(name, _)| *name == prefix) {
        return is_decimal(value).then(|| value.parse().ok())?.map(|number| Component::number(*kind, number));
    }
    let kind = is_decimal(prefix).then(|| prefix.parse().ok())??;
    Component::new(kind, unescape(value)?).ok()
}

/// A decimal number without a sign or leading zeros, which `u64::from_str` would accept.
fn is_decimal(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'))
}

/// Decodes percent-encoding, and the three extra periods of a value of periods only.
fn unescape(text: &str) -> Option<Bytes> {
    let mut value = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, tail)) = rest.split_first() {
        rest = match (byte, tail) {
            (b'%', [high, low, tail @ ..]) => {
                value.push(digit(*high)? << 4 | digit(*low)?);
                tail
            }
            (b'%' | b'=', _) => return None,
            _ => {
                value.push(*byte);
                tail
            }
        };
    }
    if value.iter().all(|byte| *byte == b'.') {
        value.drain(..value.len().checked_sub(3).map(|_| 3)?);
    }
    Some(value.into())
}

fn hexadecimal(text: &[u8]) -> Option<Bytes> {
    let (pairs, []) = text.as_chunks::<2>() else {
        return None;
    };
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect()
}

fn digit(byte: u8) -> Option<u8> {
    // The cast is lossless: a hexadecimal digit is at most 15.
    char::from(byte).to_digit(16).map(|digit| digit as u8)
}

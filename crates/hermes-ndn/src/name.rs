//! Names (packet format 0.3, "Name"): a list of components, each with a type and a value.
//!
//! In: encoded components, or a URI. Out: names that are cheap to clone, cut and compare. Their order is the canonical
//! one, which is that of the encoded bytes, because numbers have their shortest form. Never: a component of type 0.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use bytes::Bytes;

use crate::tlv::{self, Element, NdnError, Result};

/// Types of components (registry "Name component types").
pub mod types {
    /// An arbitrary value.
    pub const GENERIC: u32 = 8;
    /// The SHA-256 digest of a Data packet.
    pub const IMPLICIT_DIGEST: u32 = 1;
    /// The SHA-256 digest of an Interest's parameters.
    pub const PARAMETERS_DIGEST: u32 = 2;
    /// A keyword of a naming convention.
    pub const KEYWORD: u32 = 32;
    /// A segment number.
    pub const SEGMENT: u32 = 50;
    /// A byte offset.
    pub const BYTE_OFFSET: u32 = 52;
    /// A version.
    pub const VERSION: u32 = 54;
    /// A timestamp in microseconds.
    pub const TIMESTAMP: u32 = 56;
    /// A sequence number.
    pub const SEQUENCE: u32 = 58;
}

/// The type of the element that contains a name.
pub(crate) const NAME: u32 = 7;
/// Types beyond this are invalid.
const MAX_TYPE: u32 = 65_535;
const DIGEST_BYTES: usize = 32;

/// Typed components of URIs whose value is a number.
const NUMBERED: [(&str, u32); 5] = [
    ("seg", types::SEGMENT),
    ("off", types::BYTE_OFFSET),
    ("v", types::VERSION),
    ("t", types::TIMESTAMP),
    ("seq", types::SEQUENCE),
];
const DIGESTS: [(&str, u32); 2] =
    [("sha256digest", types::IMPLICIT_DIGEST), ("params-sha256", types::PARAMETERS_DIGEST)];

/// A component of a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Component(Bytes);

impl Component {
    /// A component of this type.
    pub fn new(kind: u32, value: &[u8]) -> Self {
        let mut out = Vec::with_capacity(value.len() + 6);
        tlv::put(&mut out, kind, value);
        Self(out.into())
    }

    /// A component of this type whose value is a number.
    pub fn numbered(kind: u32, number: u64) -> Self {
        let (bytes, length) = tlv::shortest(number);
        Self::new(kind, &bytes[8 - length..])
    }

    /// A component from its element.
    ///
    /// # Errors
    /// The type is invalid, or a digest has not 32 bytes.
    pub fn from_element(element: &Element) -> Result<Self> {
        let is_digest = matches!(element.kind, types::IMPLICIT_DIGEST | types::PARAMETERS_DIGEST);
        if element.kind > MAX_TYPE {
            return Err(NdnError::Type(u64::from(element.kind)));
        }
        if is_digest && element.value.len() != DIGEST_BYTES {
            return Err(NdnError::Invalid("length of a digest"));
        }
        Ok(Self(element.whole.clone()))
    }

    fn element(&self) -> Element {
        // Each constructor encodes or checks exactly one element.
        Element::only(self.0.clone()).unwrap_or_else(|_| unreachable!("a component is one element"))
    }

    /// Returns the type.
    pub fn kind(&self) -> u32 {
        self.element().kind
    }

    /// Returns the value.
    pub fn value(&self) -> Bytes {
        self.element().value
    }

    /// Returns the number in its value, if it has this type.
    pub fn number(&self, kind: u32) -> Option<u64> {
        let element = self.element();
        (element.kind == kind).then(|| element.integer().ok()).flatten()
    }

    /// The encoded component.
    pub fn encoded(&self) -> &Bytes {
        &self.0
    }
}

/// A name. The default is the empty one, `/`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// The encoded components.
    encoded: Bytes,
    count: usize,
}

impl Name {
    /// A name from the value of its element.
    ///
    /// # Errors
    /// A component is malformed.
    pub fn decode(value: Bytes) -> Result<Self> {
        let (mut rest, mut count) = (value.clone(), 0);
        while let Some(element) = Element::take(&mut rest)? {
            Component::from_element(&element)?;
            count += 1;
        }
        Ok(Self { encoded: value, count })
    }

    /// The number of components.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it has no component.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the components, from the first on.
    pub fn components(&self) -> impl Iterator<Item = Component> + use<> {
        let mut rest = self.encoded.clone();
        std::iter::from_fn(move || Element::take(&mut rest).ok().flatten().map(|element| Component(element.whole)))
    }

    /// The last component.
    pub fn last(&self) -> Option<Component> {
        self.components().last()
    }

    /// The first `count` components, or the whole name if it has fewer.
    #[must_use]
    pub fn prefix(&self, count: usize) -> Self {
        if count >= self.count {
            return self.clone();
        }
        let bytes: usize = self.components().take(count).map(|component| component.0.len()).sum();
        Self { encoded: self.encoded.slice(..bytes), count }
    }

    /// All components but the last.
    #[must_use]
    pub fn parent(&self) -> Self {
        self.prefix(self.count.saturating_sub(1))
    }

    /// The name with one more component.
    #[must_use]
    pub fn child(&self, component: &Component) -> Self {
        let encoded = [&self.encoded[..], &component.0].concat().into();
        Self { encoded, count: self.count + 1 }
    }

    /// The name with all components of another one after its own.
    #[must_use]
    pub fn join(&self, other: &Self) -> Self {
        let encoded = [&self.encoded[..], &other.encoded].concat().into();
        Self { encoded, count: self.count + other.count }
    }

    /// Whether `other` begins with all components of this name.
    pub fn is_prefix_of(&self, other: &Self) -> bool {
        // Elements delimit themselves, so equal bytes are equal components.
        other.encoded.starts_with(&self.encoded)
    }

    /// Whether the last component is the digest of a packet.
    pub(crate) fn has_implicit_digest(&self) -> bool {
        self.last().is_some_and(|last| last.kind() == types::IMPLICIT_DIGEST)
    }

    /// The encoded components.
    pub fn encoded(&self) -> &Bytes {
        &self.encoded
    }

    /// Appends the element of the name.
    pub fn put(&self, out: &mut Vec<u8>) {
        tlv::put(out, NAME, &self.encoded);
    }
}

impl FromIterator<Component> for Name {
    fn from_iter<I: IntoIterator<Item = Component>>(components: I) -> Self {
        let (mut encoded, mut count) = (Vec::new(), 0);
        for component in components {
            encoded.extend_from_slice(&component.0);
            count += 1;
        }
        Self { encoded: encoded.into(), count }
    }
}

/// The URI of a name: `/org/dev/v=3/seg=0`.
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("/");
        }
        self.components().try_for_each(|component| write!(f, "/{component}"))
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Element { kind, value, .. } = self.element();
        if let Some((word, _)) = DIGESTS.iter().find(|(_, digest)| *digest == kind) {
            write!(f, "{word}=")?;
            return value.iter().try_for_each(|byte| write!(f, "{byte:02x}"));
        }
        let numbered = NUMBERED.iter().find(|(_, numbered)| *numbered == kind);
        if let (Some((word, _)), Ok(number)) = (numbered, tlv::integer(&value))
            && tlv::shortest(number).1 == value.len()
        {
            return write!(f, "{word}={number}");
        }
        if kind != types::GENERIC {
            write!(f, "{kind}=")?;
        }
        if value.iter().all(|byte| *byte == b'.') {
            f.write_str("...")?;
        }
        for byte in &value {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                    f.write_char(char::from(*byte))?
                }
                _ => write!(f, "%{byte:02X}")?,
            }
        }
        Ok(())
    }
}

impl FromStr for Name {
    type Err = String;

    /// Parses a URI, with or without the scheme `ndn:`. A segment that is empty, `.` or `..` is an error.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let path = text.strip_prefix("ndn:").unwrap_or(text);
        let path = path.strip_prefix('/').ok_or_else(|| format!("invalid name {text:?}: begin with /"))?;
        let path = path.strip_suffix('/').unwrap_or(path);
        if path.is_empty() {
            return Ok(Self::default());
        }
        path.split('/').map(str::parse::<Component>).collect()
    }
}

impl FromStr for Component {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let invalid = |why: &str| format!("invalid name component {text:?}: {why}");
        let Some((word, value)) = text.split_once('=') else {
            return generic(text).map(|value| Self::new(types::GENERIC, &value)).map_err(invalid);
        };
        if let Some((_, kind)) = NUMBERED.iter().find(|(numbered, _)| *numbered == word) {
            let number = value.parse().map_err(|_| invalid("not a number"))?;
            return Ok(Self::numbered(*kind, number));
        }
        if let Some((_, kind)) = DIGESTS.iter().find(|(digest, _)| *digest == word) {
            let digest = hex(value).filter(|digest| digest.len() == DIGEST_BYTES);
            return Ok(Self::new(*kind, &digest.ok_or_else(|| invalid("not 64 hexadecimal digits"))?));
        }
        match word.parse::<u32>() {
            Ok(kind @ 1..=MAX_TYPE) => {
                let value = generic(value).map_err(invalid)?;
                Component::from_element(&Self::new(kind, &value).element()).map_err(|error| invalid(&error.to_string()))
            }
            _ => Err(invalid("unknown type")),
        }
    }
}

fn hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let pairs = digits.chunks(2).map(|pair| {
        let [high, low] = pair else { return None };
        let digit = |digit: u8| char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok());
        Some(digit(*high)? << 4 | digit(*low)?)
    });
    pairs.collect()
}

/// The bytes of an escaped component. Three periods more stand for a component of periods alone.
fn generic(text: &str) -> std::result::Result<Vec<u8>, &'static str> {
    let mut value = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, others)) = rest.split_first() {
        rest = others;
        if *byte != b'%' {
            value.push(*byte);
            continue;
        }
        let escape = rest.get(..2).and_then(|digits| std::str::from_utf8(digits).ok()).and_then(hex);
        value.extend(escape.ok_or("a % without two hexadecimal digits")?);
        rest = &rest[2..];
    }
    if !text.contains('%') && value.iter().all(|byte| *byte == b'.') {
        if value.len() < 3 {
            return Err("empty, or a path segment of periods");
        }
        value.truncate(value.len() - 3);
    }
    Ok(value)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn uris_are_read_and_written() {
        let digest = format!("/a/sha256digest={}", "0f".repeat(32));
        let params = format!("/params-sha256={}", "ab".repeat(32));
        for text in [
            "/",
            "/a/b",
            "/%00%FF",
            "/...",
            "/.....",
            "/v=1/seg=256",
            "/off=0/t=70000/seq=9",
            "/32=metadata",
            &digest,
            &params,
        ] {
            assert_eq!(name(text).to_string(), *text);
        }
        assert_eq!(name("ndn:/a/b/"), name("/a/b"));
        assert_eq!(name("/8=a%2Fb").to_string(), "/a%2Fb");
        for bad in
            ["a", "/a//b", "/..", "/%4", "/%zz", "/x=1", "/0=a", "/65536=a", "/seg=x", "/sha256digest=00", "/1=a"]
        {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
    }

    /// Packet format 0.3, "Canonical order": by type, then length, then value; a prefix comes first.
    #[test]
    fn the_order_is_canonical() {
        let sorted = ["/", "/...", "/a", "/a/b", "/b", "/aa", "/32=a", "/seg=1", "/seg=2", "/seg=256", "/300=a"];
        for pair in sorted.windows(2) {
            assert!(name(pair[0]) < name(pair[1]), "{pair:?}");
        }
    }

    #[test]
    fn prefixes_are_whole_components() {
        assert!(name("/a").is_prefix_of(&name("/a/b")));
        assert!(!name("/a").is_prefix_of(&name("/ab")));
        assert!(name("/").is_prefix_of(&name("/a")));
        assert_eq!(name("/a/b/c").prefix(2), name("/a/b"));
        assert_eq!(name("/a/b/c").parent().child(&Component::numbered(types::SEGMENT, 7)), name("/a/b/seg=7"));
        assert_eq!(name("/a/seg=300").last().unwrap().number(types::SEGMENT), Some(300));
    }
}

//! Names and their components (Packet Format 0.3, section "Name"; Naming Conventions revision 3).
//!
//! In: the value of a Name element, components, or a URI. Out: a name that shares its bytes, its canonical order and its
//! URI. A name has at most [`Name::MAX_COMPONENTS`] components and [`Name::MAX_LEN`] bytes, and every component of it is
//! valid. Matching and comparison never allocate.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::hash::{Hash, Hasher};

use bytes::{Bytes, BytesMut};
use smallvec::SmallVec;

use crate::tlv::{self, DIGEST_LEN, TlvError, types};

mod uri;

/// The type of a GenericNameComponent.
pub const GENERIC: u16 = 8;
/// The type of an ImplicitSha256DigestComponent.
pub const IMPLICIT_DIGEST: u16 = 1;
/// The type of a ParametersSha256DigestComponent.
pub const PARAMETERS_DIGEST: u16 = 2;
/// The type of a KeywordNameComponent (Naming Conventions revision 3).
pub const KEYWORD: u16 = 32;
/// The type of a SegmentNameComponent (Naming Conventions revision 3).
pub const SEGMENT: u16 = 50;
/// The type of a ByteOffsetNameComponent (Naming Conventions revision 3).
pub const BYTE_OFFSET: u16 = 52;
/// The type of a VersionNameComponent (Naming Conventions revision 3).
pub const VERSION: u16 = 54;
/// The type of a TimestampNameComponent (Naming Conventions revision 3).
pub const TIMESTAMP: u16 = 56;
/// The type of a SequenceNumNameComponent (Naming Conventions revision 3).
pub const SEQUENCE: u16 = 58;

/// The reason why bytes or a URI are not a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The encoding is invalid.
    #[error(transparent)]
    Tlv(#[from] TlvError),
    /// A component type is 0 or exceeds 65535.
    #[error("component type {0} is out of range")]
    ComponentType(u64),
    /// A digest component does not have 32 bytes.
    #[error("digest component has {0} bytes instead of 32")]
    DigestLength(usize),
    /// The name has more than [`Name::MAX_COMPONENTS`] components.
    #[error("name exceeds {max} components", max = Name::MAX_COMPONENTS)]
    TooManyComponents,
    /// The name has more than [`Name::MAX_LEN`] bytes.
    #[error("name exceeds {max} bytes", max = Name::MAX_LEN)]
    TooLong,
    /// A URI has an invalid component. The number is its index.
    #[error("invalid URI component at position {0}")]
    Uri(usize),
}

/// A name component: a type and a value.
///
/// The order is the canonical order: by type, then by length, then by value.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Component {
    kind: u16,
    value: Bytes,
}

impl Component {
    /// A component of any type.
    ///
    /// # Errors
    /// [`NameError::ComponentType`] for type 0, [`NameError::DigestLength`] if a digest component does not have 32
    /// bytes.
    pub fn new(kind: u16, value: impl Into<Bytes>) -> Result<Self, NameError> {
        let value = value.into();
        check_component(u64::from(kind), value.len())?;
        Ok(Self { kind, value })
    }

    /// A GenericNameComponent.
    pub fn generic(value: impl Into<Bytes>) -> Self {
        Self { kind: GENERIC, value: value.into() }
    }

    /// A KeywordNameComponent.
    pub fn keyword(value: impl Into<Bytes>) -> Self {
        Self { kind: KEYWORD, value: value.into() }
    }

    /// An ImplicitSha256DigestComponent.
    pub fn implicit_digest(digest: [u8; DIGEST_LEN]) -> Self {
        Self { kind: IMPLICIT_DIGEST, value: Bytes::copy_from_slice(&digest) }
    }

    /// A ParametersSha256DigestComponent.
    pub fn parameters_digest(digest: [u8; DIGEST_LEN]) -> Self {
        Self { kind: PARAMETERS_DIGEST, value: Bytes::copy_from_slice(&digest) }
    }

    /// A SegmentNameComponent.
    pub fn segment(number: u64) -> Self {
        Self::number(SEGMENT, number)
    }

    /// A ByteOffsetNameComponent.
    pub fn byte_offset(number: u64) -> Self {
        Self::number(BYTE_OFFSET, number)
    }

    /// A VersionNameComponent.
    pub fn version(number: u64) -> Self {
        Self::number(VERSION, number)
    }

    /// A TimestampNameComponent, in microseconds since the Unix epoch.
    pub fn timestamp(microseconds: u64) -> Self {
        Self::number(TIMESTAMP, microseconds)
    }

    /// A SequenceNumNameComponent.
    pub fn sequence(number: u64) -> Self {
        Self::number(SEQUENCE, number)
    }

    fn number(kind: u16, number: u64) -> Self {
        Self { kind, value: Bytes::copy_from_slice(tlv::shortest(&number.to_be_bytes())) }
    }

    /// The type.
    pub fn kind(&self) -> u16 {
        self.kind
    }

    /// The value.
    pub fn value(&self) -> &Bytes {
        &self.value
    }

    /// The value as a non-negative integer, as in the naming conventions; `None` if it is not one.
    pub fn as_number(&self) -> Option<u64> {
        tlv::decode_integer(&self.value)
    }

    /// Appends the encoded component.
    pub fn encode(&self, out: &mut BytesMut) {
        tlv::put(out, u32::from(self.kind), &self.value);
    }

    /// Decodes one component from the value of another element, such as FinalBlockId.
    pub(crate) fn decode_only(element: &tlv::Element<'_>) -> Result<Self, NameError> {
        let mut reader = element.reader();
        let component = reader.next()?.ok_or(TlvError::Missing(types::GENERIC_COMPONENT))?;
        let rest = element.range().end - component.range().end;
        if rest > 0 {
            return Err(TlvError::Trailing(rest).into());
        }
        let kind = check_component(u64::from(component.kind), component.value().len())?;
        Ok(Self { kind, value: component.value_bytes() })
    }
}

impl Ord for Component {
    fn cmp(&self, other: &Self) -> Ordering {
        let key = |component: &Self| (component.kind, component.value.len());
        key(self).cmp(&key(other)).then_with(|| self.value.cmp(&other.value))
    }
}

impl PartialOrd for Component {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

fn check_component(kind: u64, length: usize) -> Result<u16, NameError> {
    match u16::try_from(kind) {
        Ok(0) | Err(_) => Err(NameError::ComponentType(kind)),
        Ok(IMPLICIT_DIGEST | PARAMETERS_DIGEST) if length != DIGEST_LEN => Err(NameError::DigestLength(length)),
        Ok(kind) => Ok(kind),
    }
}

/// A name: a sequence of components.
///
/// A clone shares the bytes. The encoding of a name is unique, and its bytewise order is the canonical order, because
/// every number has its shortest form. A map with names as keys can thus be queried with
/// [`prefix_bytes`](Self::prefix_bytes), without allocating.
#[derive(Clone, Default)]
pub struct Name {
    /// The encoded components, without the header of the Name element.
    bytes: Bytes,
    /// The end of each component within `bytes`.
    ends: SmallVec<[u16; 12]>,
}

impl Name {
    /// The maximum number of components.
    pub const MAX_COMPONENTS: usize = 256;

    /// The maximum number of bytes of all encoded components: those of the longest packet.
    pub const MAX_LEN: usize = tlv::MAX_PACKET;

    /// The empty name, `/`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Decodes the value of a Name element. The name shares these bytes.
    ///
    /// # Errors
    /// [`NameError`], before more than [`Self::MAX_COMPONENTS`] components are decoded.
    pub fn from_value(bytes: Bytes) -> Result<Self, NameError> {
        if bytes.len() > Self::MAX_LEN {
            return Err(NameError::TooLong);
        }
        let mut ends = SmallVec::new();
        let mut reader = tlv::Reader::new(&bytes);
        while let Some(component) = reader.next()? {
            check_component(u64::from(component.kind), component.value().len())?;
            if ends.len() == Self::MAX_COMPONENTS {
                return Err(NameError::TooManyComponents);
            }
            // The cast is lossless: MAX_LEN is less than 65536.
            ends.push(component.range().end as u16);
        }
        Ok(Self { bytes, ends })
    }

    /// A name of these components.
    ///
    /// # Errors
    /// [`NameError::TooManyComponents`] or [`NameError::TooLong`].
    pub fn from_components<'a>(components: impl IntoIterator<Item = &'a Component>) -> Result<Self, NameError> {
        let mut out = BytesMut::new();
        for component in components {
            if out.len() > Self::MAX_LEN {
                return Err(NameError::TooLong);
            }
            component.encode(&mut out);
        }
        Self::from_value(out.freeze())
    }

    /// This name with one more component.
    ///
    /// # Errors
    /// [`NameError::TooManyComponents`] or [`NameError::TooLong`].
    pub fn push(&self, component: &Component) -> Result<Self, NameError> {
        let mut out = BytesMut::with_capacity(self.bytes.len() + tlv::MAX_HEADER + component.value.len());
        out.extend_from_slice(&self.bytes);
        component.encode(&mut out);
        let (length, count) = (out.len(), self.len());
        if length > Self::MAX_LEN {
            return Err(NameError::TooLong);
        }
        if count == Self::MAX_COMPONENTS {
            return Err(NameError::TooManyComponents);
        }
        let mut ends = self.ends.clone();
        ends.push(length as u16);
        Ok(Self { bytes: out.freeze(), ends })
    }

    /// This name followed by the components of `suffix`.
    ///
    /// # Errors
    /// [`NameError::TooManyComponents`] or [`NameError::TooLong`].
    pub fn join(&self, suffix: &Self) -> Result<Self, NameError> {
        let mut out = BytesMut::with_capacity(self.bytes.len() + suffix.bytes.len());
        out.extend_from_slice(&self.bytes);
        out.extend_from_slice(&suffix.bytes);
        Self::from_value(out.freeze())
    }

    /// The number of components.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether this is the empty name.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The component at `index`.
    pub fn get(&self, index: usize) -> Option<Component> {
        let end = usize::from(*self.ends.get(index)?);
        let encoded = self.bytes.slice(self.end(index)..end);
        let header = tlv::decode_header(&encoded).ok()??;
        // The cast is lossless: every component of a name has been checked.
        Some(Component { kind: header.kind as u16, value: encoded.slice(header.size..) })
    }

    /// The last component.
    pub fn last(&self) -> Option<Component> {
        self.get(self.len().checked_sub(1)?)
    }

    /// The components, in order.
    pub fn components(&self) -> impl DoubleEndedIterator<Item = Component> + '_ {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// The first `count` components, or the whole name if it is shorter.
    pub fn prefix(&self, count: usize) -> Self {
        let count = count.min(self.len());
        Self { bytes: self.bytes.slice(..self.end(count)), ends: SmallVec::from_slice(&self.ends[..count]) }
    }

    /// The encoded components of [`prefix`](Self::prefix), for a query of a map.
    pub fn prefix_bytes(&self, count: usize) -> &[u8] {
        &self.bytes[..self.end(count.min(self.len()))]
    }

    /// The encoded components, without the header of the Name element.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether `other` begins with the components of this name.
    pub fn is_prefix_of(&self, other: &Self) -> bool {
        // A prefix of bytes ends at a boundary of components, since each component declares its length.
        other.bytes.starts_with(&self.bytes)
    }

    /// A copy with its own bytes, so that a long-lived name does not keep the packet in memory.
    #[must_use]
    pub fn detached(&self) -> Self {
        Self { bytes: Bytes::copy_from_slice(&self.bytes), ends: self.ends.clone() }
    }

    /// Appends the Name element.
    pub fn encode(&self, out: &mut BytesMut) {
        tlv::put(out, types::NAME, &self.bytes);
    }

    /// The indices of the components of this type. The search shares no bytes: a forwarder calls it for each Interest.
    pub(crate) fn positions(&self, kind: u16) -> impl Iterator<Item = usize> + '_ {
        (0..self.len()).filter(move |index| {
            let header = self.bytes.get(self.end(*index)..).map(tlv::decode_header);
            matches!(header, Some(Ok(Some(header))) if header.kind == u32::from(kind))
        })
    }

    /// The end of the first `count` components. The caller guarantees that the name has that many.
    fn end(&self, count: usize) -> usize {
        count.checked_sub(1).and_then(|last| self.ends.get(last)).map_or(0, |end| usize::from(*end))
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Name {}

impl Ord for Name {
    fn cmp(&self, other: &Self) -> Ordering {
        self.bytes.cmp(&other.bytes)
    }
}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes[..].hash(state);
    }
}

impl Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests;

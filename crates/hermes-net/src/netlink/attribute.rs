//! Netlink attributes of the netfilter subsystems, whose numbers are big-endian.
//!
//! In: types and values. Out: bytes, padded to four, with lengths filled in. The codec of routing messages does not
//! cover these subsystems.

/// The flag of an attribute that contains attributes (NLA_F_NESTED).
const NESTED: u16 = 0x8000;
/// Bytes of the header of an attribute.
const ATTRIBUTE_HEADER: usize = 4;
/// Bytes of `struct nlmsghdr` and `struct nfgenmsg`.
const MESSAGE_HEADER: usize = 20;

/// Appends a netlink header and `struct nfgenmsg`. `family` is its family and its resource. The length stays 0 until
/// [`set_length`].
pub(crate) fn push_header(bytes: &mut Vec<u8>, kind: u16, flags: u16, sequence: u32, family: (u8, u16)) {
    bytes.extend_from_slice(&0_u32.to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(&flags.to_ne_bytes());
    bytes.extend_from_slice(&sequence.to_ne_bytes());
    bytes.extend_from_slice(&0_u32.to_ne_bytes());
    bytes.extend_from_slice(&[family.0, 0]);
    bytes.extend_from_slice(&family.1.to_be_bytes());
}

/// Fills in the length of the last message, which begins at `start`.
pub(crate) fn set_length(bytes: &mut [u8], start: usize) {
    let length = u32::try_from(bytes.len() - start).unwrap_or(u32::MAX);
    if let Some(field) = bytes.get_mut(start..).and_then(|message| message.first_chunk_mut()) {
        *field = length.to_ne_bytes();
    }
}

/// Appends attributes to a message.
pub(crate) struct Attributes<'a>(&'a mut Vec<u8>);

impl<'a> Attributes<'a> {
    pub(crate) fn new(bytes: &'a mut Vec<u8>) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(&mut self, kind: u16, value: &[u8]) {
        let length = u16::try_from(value.len() + ATTRIBUTE_HEADER).unwrap_or(u16::MAX);
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    /// A string with its terminating zero.
    pub(crate) fn text(&mut self, kind: u16, text: &str) {
        self.bytes(kind, &[text.as_bytes(), &[0]].concat());
    }

    pub(crate) fn be32(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    pub(crate) fn be16(&mut self, kind: u16, value: u16) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// An attribute that contains what `fill` appends.
    pub(crate) fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Attributes<'_>)) {
        let start = self.0.len();
        self.bytes(kind | NESTED, &[]);
        fill(self);
        let length = u16::try_from(self.0.len() - start).unwrap_or(u16::MAX);
        if let Some(field) = self.0.get_mut(start..).and_then(|attribute| attribute.first_chunk_mut()) {
            *field = length.to_ne_bytes();
        }
    }
}

/// The attributes of a netfilter message, as pairs of type and value.
pub(crate) fn read(message: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = message.get(MESSAGE_HEADER..).unwrap_or_default();
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*rest.first_chunk()?));
        let kind = u16::from_ne_bytes(*rest.get(2..)?.first_chunk()?);
        let value = rest.get(ATTRIBUTE_HEADER..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & !NESTED, value))
    })
}

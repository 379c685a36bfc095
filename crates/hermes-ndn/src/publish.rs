//! Content that is published under a name, in segments with a version (naming conventions revision 3, and RDR).
//!
//! In: the name, the version and the bytes of the content, and Interests. Out: signed Data: segments, and the metadata
//! that names the newest version. Segments are signed when they are requested. Never: a decision how long content is
//! kept.

use std::time::Duration;

use bytes::Bytes;

use crate::name::{Component, Name, types};
use crate::packet::{APPLICATION_NACK, DataBuilder, Interest};
use crate::signature::{SignError, Signer};
use crate::{MAX_PACKET, tlv};

/// Bytes of a packet that are for its fields beside name and content. The longest signature has 512.
const FIELD_BYTES: usize = 1000;
/// The longest name of content in bytes, so that a segment carries at least as much content as name.
const MAX_NAME_BYTES: usize = 3800;
/// The keyword of metadata.
const METADATA: &[u8] = b"metadata";

/// Content with a name and a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedContent {
    name: Name,
    version: u64,
    bytes: Bytes,
    segment_bytes: usize,
}

/// Returns the name of the content that an Interest asks for: its name up to metadata, version or segment.
pub fn content_name(interest: &Name) -> Name {
    let is_convention = |part: &Component| {
        matches!(part.kind(), types::VERSION | types::SEGMENT | types::IMPLICIT_DIGEST) || is_metadata(part)
    };
    let count = interest.components().position(|part| is_convention(&part));
    count.map_or_else(|| interest.clone(), |count| interest.prefix(count))
}

/// Whether an answer to this Interest must tell the newest version, because its name has none.
pub fn asks_for_newest(interest: &Name) -> bool {
    !interest.components().any(|part| part.kind() == types::VERSION)
}

fn is_metadata(part: &Component) -> bool {
    part.kind() == types::KEYWORD && *part.value() == *METADATA
}

impl PublishedContent {
    /// Content under a name. `None` if the name is too long.
    pub fn new(name: Name, version: u64, bytes: Bytes) -> Option<Self> {
        let name_bytes = name.encoded().len();
        (name_bytes <= MAX_NAME_BYTES).then(|| Self {
            name,
            version,
            bytes,
            segment_bytes: MAX_PACKET - FIELD_BYTES - name_bytes,
        })
    }

    /// The version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Whether a name has this version.
    pub fn is_version_of(&self, name: &Name) -> bool {
        name.components().any(|part| part.number(types::VERSION) == Some(self.version))
    }

    /// The content bytes of a segment. The last segment may have fewer.
    pub fn segment_bytes(&self) -> usize {
        self.segment_bytes
    }

    /// The bytes of all segments.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    fn last_segment(&self) -> u64 {
        (self.bytes.len().max(1).div_ceil(self.segment_bytes) - 1) as u64
    }

    /// Makes the Data for an Interest. It is fresh for this time. `None` if no part of the content answers the
    /// Interest.
    ///
    /// # Errors
    /// The key cannot sign.
    pub fn answer(
        &self,
        interest: &Interest,
        freshness: Duration,
        signer: &Signer,
    ) -> Result<Option<Bytes>, SignError> {
        if !self.name.is_prefix_of(&interest.name) {
            return Ok(None);
        }
        let rest: Vec<Component> = interest.name.components().skip(self.name.len()).collect();
        let is_this = |part: &Component| part.number(types::VERSION) == Some(self.version);
        match rest.as_slice() {
            [] if interest.can_be_prefix => self.segment(0, freshness, signer),
            [] if self.last_segment() == 0 => {
                let whole =
                    DataBuilder { name: self.name.clone(), freshness: Some(freshness), ..DataBuilder::default() };
                whole.sign(&self.bytes, signer).map(Some)
            }
            [keyword] if interest.can_be_prefix && is_metadata(keyword) => self.metadata(freshness, signer).map(Some),
            [version] if interest.can_be_prefix && is_this(version) => self.segment(0, freshness, signer),
            [version, segment] if is_this(version) => match segment.number(types::SEGMENT) {
                Some(number) => self.segment(number, freshness, signer),
                None => Ok(None),
            },
            _ => Ok(None),
        }
    }

    fn versioned(&self, name: &Name) -> Name {
        name.child(&Component::numbered(types::VERSION, self.version))
    }

    fn segment(&self, number: u64, freshness: Duration, signer: &Signer) -> Result<Option<Bytes>, SignError> {
        let last = self.last_segment();
        let Some(index) = usize::try_from(number).ok().filter(|_| number <= last) else { return Ok(None) };
        let begin = index * self.segment_bytes;
        let end = (begin + self.segment_bytes).min(self.bytes.len());
        let builder = DataBuilder {
            name: self.versioned(&self.name).child(&Component::numbered(types::SEGMENT, number)),
            freshness: Some(freshness),
            final_block: Some(Component::numbered(types::SEGMENT, last)),
            content_type: 0,
        };
        builder.sign(&self.bytes[begin..end], signer).map(Some)
    }

    /// The metadata: the name of this version (RDR).
    fn metadata(&self, freshness: Duration, signer: &Signer) -> Result<Bytes, SignError> {
        let first = Component::numbered(types::SEGMENT, 0);
        let keyword = self.name.child(&Component::new(types::KEYWORD, METADATA));
        let builder = DataBuilder {
            name: self.versioned(&keyword).child(&first),
            freshness: Some(freshness),
            final_block: Some(first),
            content_type: 0,
        };
        let mut content = Vec::new();
        tlv::put(&mut content, crate::name::NAME, self.versioned(&self.name).encoded());
        builder.sign(&content, signer)
    }
}

/// Makes the Data that says that there is no content of this name.
///
/// # Errors
/// The key cannot sign.
pub fn no_content(interest: &Interest, freshness: Duration, signer: &Signer) -> Result<Bytes, SignError> {
    let builder = DataBuilder {
        name: interest.name.clone(),
        content_type: APPLICATION_NACK,
        freshness: Some(freshness),
        final_block: None,
    };
    builder.sign(&[], signer)
}

#[cfg(test)]
mod tests;

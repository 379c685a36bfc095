//! Publications: the units of data that a relay passes on.
//!
//! In: the body of a request, and its fields that describe the content. Out: a publication that all queues
//! share. Its bytes count towards the memory of the relay until the last queue has let go of it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use http::HeaderMap;

use crate::EventId;
use crate::arriving::ArrivingContent;
use crate::fields::ABORTED;
use crate::reserved::OVERHEAD_BYTES;

/// A publication before a channel has given it an identifier.
#[derive(Clone, Debug, Default)]
pub struct NewPublication {
    /// Fields that describe the content: `content-type`, `content-encoding` and the like.
    pub headers: HeaderMap,
    /// The content.
    pub body: Content,
}

/// The content of a publication.
#[derive(Clone, Debug)]
pub enum Content {
    /// It has arrived.
    Whole(Bytes),
    /// Subscribers get it as it arrives.
    Arriving(Arc<ArrivingContent>),
}

impl Content {
    /// The number of bytes, or the announced one.
    pub fn len(&self) -> usize {
        match self {
            Self::Whole(bytes) => bytes.len(),
            Self::Arriving(content) => content.length(),
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All bytes. Empty: they have not arrived.
    pub fn whole(&self) -> Bytes {
        match self {
            Self::Whole(bytes) => bytes.clone(),
            Self::Arriving(content) => content.whole(),
        }
    }

    /// Whether bytes are still to arrive.
    pub fn is_arriving(&self) -> bool {
        matches!(self, Self::Arriving(content) if content.is_arriving())
    }
}

impl Default for Content {
    fn default() -> Self {
        Self::Whole(Bytes::new())
    }
}

impl From<Bytes> for Content {
    fn from(bytes: Bytes) -> Self {
        Self::Whole(bytes)
    }
}

/// A publication of the other relay.
#[derive(Clone, Debug)]
pub struct FedPublication {
    /// Its fields and bytes.
    pub content: NewPublication,
    /// Its identifier. `None` for a publication for one subscriber of each group.
    pub id: Option<EventId>,
    /// Its publisher waits for slow subscribers.
    pub is_reliable: bool,
}

/// A publication of a channel.
#[derive(Debug)]
pub struct Publication {
    /// The name of its channel.
    pub channel: Arc<str>,
    /// Its place in the channel. `None` for a publication for one subscriber of each group: it has no place in the order that
    /// all subscribers share, and no history keeps it.
    pub id: Option<EventId>,
    /// Its fields and bytes.
    pub content: NewPublication,
    /// Its publisher waits for slow subscribers.
    pub is_reliable: bool,
    /// Bytes counted in `memory`: its encoded forms, and its content unless that counts itself.
    counted: AtomicU64,
    /// The content as framings write it, made once for all subscribers.
    encoded: [OnceLock<Encoded>; 2],
    memory: Arc<AtomicU64>,
}

/// A form of content that text framings write.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Form {
    /// A JSON string.
    Json,
    /// The lines of a server-sent event.
    EventStream,
}

/// Content in a form.
#[derive(Clone, Debug)]
pub(crate) struct Encoded {
    /// Whether the content is no text for this form, and so in base64.
    pub(crate) is_base64: bool,
    pub(crate) bytes: Bytes,
}

impl Publication {
    pub(crate) fn new(
        channel: Arc<str>,
        id: Option<EventId>,
        content: NewPublication,
        is_reliable: bool,
        memory: &Arc<AtomicU64>,
    ) -> Self {
        let counts_itself = matches!(&content.body, Content::Arriving(content) if content.is_counted());
        let counted = cost(&content) - if counts_itself { content.body.len() as u64 } else { 0 };
        memory.fetch_add(counted, Ordering::Relaxed);
        let counted = counted.into();
        Self { channel, id, content, is_reliable, counted, encoded: Default::default(), memory: memory.clone() }
    }

    /// The content in a form. The first subscriber has it encoded.
    pub(crate) fn encoded(&self, form: Form, encode: impl FnOnce(&[u8]) -> Encoded) -> &Encoded {
        self.encoded[form as usize].get_or_init(|| {
            let encoded = encode(&self.content.body.whole());
            let bytes = encoded.bytes.len() as u64;
            self.counted.fetch_add(bytes, Ordering::Relaxed);
            self.memory.fetch_add(bytes, Ordering::Relaxed);
            encoded
        })
    }

    /// Whether nobody will have its content, since the publisher has broken off. Its place in the channel remains.
    pub fn is_aborted(&self) -> bool {
        let is_broken_off = matches!(&self.content.body, Content::Arriving(content) if content.is_aborted());
        is_broken_off || self.content.headers.contains_key(ABORTED)
    }

    /// The bytes that it counts in a queue or history.
    pub fn bytes(&self) -> u64 {
        cost(&self.content)
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        self.memory.fetch_sub(*self.counted.get_mut(), Ordering::Relaxed);
    }
}

/// The bytes that content counts.
pub(crate) fn cost(content: &NewPublication) -> u64 {
    let fields: usize = content.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    (content.body.len() + fields) as u64 + OVERHEAD_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arriving::ContentWriter;
    use crate::reserved::Reserved;

    #[test]
    fn bytes_count_until_they_are_aborted_or_forgotten() {
        let memory = Arc::default();
        let counted = |memory: &Arc<AtomicU64>| memory.load(Ordering::Relaxed);
        let writer = ContentWriter::new(1000);
        let mut reserved = Reserved::new(&memory);
        reserved.add(1000);
        let before = counted(&memory);
        writer.content().count(reserved);
        let content = NewPublication { body: Content::Arriving(writer.content()), ..NewPublication::default() };
        let publication = Publication::new("a".into(), None, content, true, &memory);
        assert!((before..before + 1000).contains(&counted(&memory)), "its content does not count twice");
        drop(writer);
        assert!(counted(&memory) < 1000 + OVERHEAD_BYTES, "nobody holds the content any more");
        drop(publication);
        assert_eq!(counted(&memory), 0);
    }
}

//! The two halves of an HTTP/2 stream, for bodies and for tunnels.
//!
//! In: the halves of h2. Out: chunks, with bounds that flow control of HTTP/2 lacks: each frame costs memory whatever
//! its length, streams share the window of their connection, and sent frames may wait for a socket that takes nothing.
//! Never: the meaning of the bytes; a wait of its own.

mod end_stream;
mod receiver;
mod sender;

use bytes::{Bytes, BytesMut};

pub use self::end_stream::Scanned;
pub use self::receiver::{Receiver, Window};
pub use self::sender::{Backlog, Sender};

/// A shorter frame costs more than it carries; h2 uses the same threshold.
pub const SMALL: usize = 256;
/// Small frames are coalesced up to this size.
pub const GATHER: usize = 16 << 10;

/// Small chunks that are coalesced.
pub enum Coalesced {
    /// A single chunk, which is not copied.
    One(Bytes),
    /// Several chunks in one buffer.
    Several(BytesMut),
}

impl From<Bytes> for Coalesced {
    fn from(first: Bytes) -> Self {
        Coalesced::One(first)
    }
}

impl Coalesced {
    pub fn byte_len(&self) -> usize {
        match self {
            Coalesced::One(chunk) => chunk.len(),
            Coalesced::Several(chunks) => chunks.len(),
        }
    }

    pub fn add(&mut self, chunk: &Bytes) {
        match self {
            Coalesced::One(first) => {
                let mut chunks = BytesMut::with_capacity((first.len() + chunk.len()).max(2 * SMALL));
                chunks.extend_from_slice(first);
                chunks.extend_from_slice(chunk);
                *self = Coalesced::Several(chunks);
            }
            Coalesced::Several(chunks) => chunks.extend_from_slice(chunk),
        }
    }

    pub fn into_bytes(self) -> Bytes {
        match self {
            Coalesced::One(chunk) => chunk,
            Coalesced::Several(chunks) => chunks.freeze(),
        }
    }
}

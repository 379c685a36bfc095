//! The two halves of an HTTP/2 stream, for bodies and for tunnels.
//!
//! In: the stream halves of h2. Out: chunks, within bounds that HTTP/2 flow control does not set. Each frame occupies
//! memory whatever its length, streams share the window of their connection, and sent frames may wait for a socket
//! whose peer reads nothing. Never: the meaning of the bytes.

mod end_stream;
mod receiver;
mod sender;

use bytes::{Bytes, BytesMut};

pub use self::end_stream::Scanned;
pub use self::receiver::{Receiver, Window};
pub use self::sender::{Backlog, Sender};

/// The length in bytes below which a frame costs more memory than its payload. h2 uses the same threshold.
pub const SMALL: usize = 256;
/// The size in bytes up to which small frames are coalesced.
pub const GATHER: usize = 16 << 10;

/// A chunk that is built from one or several small ones.
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

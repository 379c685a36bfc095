//! The two halves of an HTTP/2 stream, for bodies and for tunnels.
//!
//! In: h2's halves. Out: chunks, with what HTTP/2's own flow control does not count: that a frame
//! costs memory whatever its length, that streams share their connection's window, and that what was
//! sent may wait for a socket that takes nothing.
//! Never: what the bytes mean; a wait of its own.

mod ends;
mod receiver;
mod sender;

use bytes::{Bytes, BytesMut};

pub(crate) use self::ends::Scanned;
pub(crate) use self::receiver::{Receiver, Window};
pub(crate) use self::sender::{Backlog, Sender};

/// A frame below this costs more than it carries; h2 draws the line there too.
pub(crate) const SMALL: usize = 256;
/// Small frames are put together up to this.
pub(crate) const GATHER: usize = 16 << 10;

/// Small chunks that become one.
pub(crate) enum Whole {
    /// There is one so far: it is not copied.
    One(Bytes),
    /// There are several.
    Several(BytesMut),
}

impl From<Bytes> for Whole {
    fn from(first: Bytes) -> Self {
        Whole::One(first)
    }
}

impl Whole {
    pub(crate) fn len(&self) -> usize {
        match self {
            Whole::One(chunk) => chunk.len(),
            Whole::Several(chunks) => chunks.len(),
        }
    }

    pub(crate) fn add(&mut self, chunk: &Bytes) {
        match self {
            Whole::One(first) => {
                let mut chunks = BytesMut::with_capacity((first.len() + chunk.len()).max(2 * SMALL));
                chunks.extend_from_slice(first);
                chunks.extend_from_slice(chunk);
                *self = Whole::Several(chunks);
            }
            Whole::Several(chunks) => chunks.extend_from_slice(chunk),
        }
    }

    pub(crate) fn into_bytes(self) -> Bytes {
        match self {
            Whole::One(chunk) => chunk,
            Whole::Several(chunks) => chunks.freeze(),
        }
    }
}

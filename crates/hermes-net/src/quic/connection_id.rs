//! Connection ids that name the reader of a datagram.
//!
//! In: a reader, a datagram. Out: connection ids that encode the reader, and the reader that an id encodes. The id
//! survives a peer's migration to another address and the takeover by a successor process. Never: a secret. Everybody
//! on the path can read the id, like the port.

use quinn::{ConnectionId, ConnectionIdGenerator};
use rand::Rng;
use std::time::Duration;

/// Length of the connection ids that this node issues, in bytes.
pub(super) const LENGTH: usize = 8;
/// Offset of the id in a long header, after the first byte, version and id length (RFC 8999, section 5.1).
const LONG_HEADER_ID_OFFSET: usize = 6;

/// Identifies the socket, and its process, that reads a connection's datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ReaderId {
    /// The process, by the random number that it chose for this address.
    pub(super) tag: u16,
    /// The socket's index in the group. It is the first byte of the id, the only byte that the kernel's filter reads.
    pub(super) slot: u8,
}

impl ReaderId {
    /// Returns the reader that a datagram's destination connection id encodes. `None` if this node does not issue ids
    /// of that length, so that any reader may process the datagram.
    pub(super) fn of(datagram: &[u8]) -> Option<Self> {
        let id = match datagram.first()? {
            first if first & 0x80 == 0 => datagram.get(1..=LENGTH)?,
            _ if usize::from(*datagram.get(LONG_HEADER_ID_OFFSET - 1)?) == LENGTH => {
                datagram.get(LONG_HEADER_ID_OFFSET..LONG_HEADER_ID_OFFSET + LENGTH)?
            }
            _ => return None,
        };
        Some(Self { slot: id[0], tag: u16::from_be_bytes([id[1], id[2]]) })
    }

    fn new_id(self) -> ConnectionId {
        let mut id: [u8; LENGTH] = rand::rng().random();
        id[0] = self.slot;
        id[1..3].copy_from_slice(&self.tag.to_be_bytes());
        ConnectionId::new(&id)
    }
}

/// Generates the connection ids of one reader.
pub(super) struct ReaderIdGenerator(pub(super) ReaderId);

impl ConnectionIdGenerator for ReaderIdGenerator {
    fn generate_cid(&mut self) -> ConnectionId {
        self.0.new_id()
    }

    fn cid_len(&self) -> usize {
        LENGTH
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_from_short_and_long_headers() {
        let place = ReaderId { tag: 0x1234, slot: 7 };
        let id = ReaderIdGenerator(place).generate_cid();
        let short = [&[0x40], &id[..], &[1, 2, 3]].concat();
        let long = [&[0xc0, 0, 0, 0, 1, 8], &id[..], &[0]].concat();
        assert_eq!((ReaderId::of(&short), ReaderId::of(&long)), (Some(place), Some(place)));
    }

    #[test]
    fn what_is_too_short_or_has_another_id_is_nobodys() {
        let longer = [&[0xc0, 0, 0, 0, 1, 9], &[1; 9][..]].concat();
        let cut = [&[0xc0, 0, 0, 0, 1, 8], &[1; 7][..]].concat();
        for datagram in [&[][..], &[0x40, 1, 2, 3, 4, 5, 6, 7], &[0xc0], &[0xc0, 0, 0, 0, 1], &longer, &cut] {
            assert_eq!(ReaderId::of(datagram), None, "{datagram:?}");
        }
    }
}

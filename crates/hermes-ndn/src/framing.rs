//! Packets in a stream of bytes: stream faces, and tunnels that carry packets of a face.
//!
//! In: bytes in any pieces. Out: whole packets or frames, one after the other. Never: more than one incomplete packet.

use bytes::{Bytes, BytesMut};

use crate::tlv::{self, Result};

/// Splits a stream into packets.
#[derive(Debug)]
pub struct PacketSplitter {
    buffer: BytesMut,
    limit: usize,
}

impl PacketSplitter {
    /// A splitter at the start of a stream. A packet has at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { buffer: BytesMut::new(), limit }
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next whole packet. `None`: more bytes are needed.
    ///
    /// # Errors
    /// The stream is no sequence of packets, or a packet is too long. It cannot continue.
    pub fn next_packet(&mut self) -> Result<Option<Bytes>> {
        match tlv::packet_length(&self.buffer, self.limit)? {
            Some(length) if length <= self.buffer.len() => Ok(Some(self.buffer.split_to(length).freeze())),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn packets_come_out_whole_whatever_the_pieces() {
        let mut stream = Vec::new();
        for length in [0, 1, 252, 253, 4000] {
            tlv::put(&mut stream, 6, &vec![1; length]);
        }
        for piece in [1, 2, 7, 300, 10_000] {
            let mut splitter = PacketSplitter::new(8800);
            let mut lengths = Vec::new();
            for bytes in stream.chunks(piece) {
                splitter.push(bytes);
                while let Some(packet) = splitter.next_packet().unwrap() {
                    lengths.push(packet.len());
                }
            }
            assert_eq!(lengths, [2, 3, 254, 257, 4004]);
        }
        let mut splitter = PacketSplitter::new(100);
        splitter.push(&[6, 253, 1, 0]);
        assert!(splitter.next_packet().is_err());
    }
}

//! Splits a packet of a TUN queue into the packets that it represents (TSO, USO), and completes checksums.
//!
//! In: a packet of up to 64 KiB, and its offload request. Out: whole IP packets with valid checksums; those of one GSO
//! packet share one allocation. Never: a packet longer than the requested segment size.

use bytes::Bytes;

use super::checksum::{fold, of_header, pseudo, store, sum};
use super::offload::{Offload, Segments};

/// FIN and PSH: set in the last segment only.
const LAST_SEGMENT_FLAGS: u8 = 0x01 | 0x08;
/// CWR: set in the first segment only.
const FIRST_SEGMENT_FLAGS: u8 = 0x80;

/// Passes the packets that `packet` represents to `each`; returns their number. `None`: the offload request is invalid.
pub(super) fn split(offload: Offload, packet: &mut [u8], each: &mut impl FnMut(Bytes)) -> Option<usize> {
    if packet.is_empty() {
        return None;
    }
    match offload {
        Offload::Whole => {}
        Offload::Checksum { start, offset } => complete(packet, start, offset)?,
        Offload::Split { segments, size, start } => return Cut::new(packet, segments, size, start)?.all(each),
    }
    // The packet is copied, so that it does not retain the 64 KiB buffer into which it was read.
    each(Bytes::copy_from_slice(packet));
    Some(1)
}

/// Completes a missing checksum. The kernel has stored the sum of the pseudo header in the checksum field.
fn complete(packet: &mut [u8], start: usize, offset: usize) -> Option<()> {
    let transport = packet.get_mut(start..)?;
    let sum = sum(transport);
    let field = transport.get_mut(offset..offset + 2)?;
    store(field, sum);
    // In UDP, a stored 0 means that the datagram has no checksum, so 0xffff is stored instead. In TCP, both count as
    // zero.
    if field == [0, 0] {
        field.fill(0xff);
    }
    Some(())
}

struct Cut<'a> {
    segments: Segments,
    is_v4: bool,
    start: usize,
    size: usize,
    header: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Cut<'a> {
    fn new(packet: &'a [u8], segments: Segments, size: usize, start: usize) -> Option<Self> {
        let is_v4 = match packet[0] >> 4 {
            4 => true,
            6 => false,
            _ => return None,
        };
        if size == 0 || start < if is_v4 { 20 } else { 40 } {
            return None;
        }
        let length = match segments {
            Segments::Tcp => usize::from(*packet.get(start + 12)? >> 4) * 4,
            Segments::Udp => 8,
        };
        if segments == Segments::Tcp && length < 20 {
            return None;
        }
        let (header, payload) = packet.split_at_checked(start + length)?;
        let packets = payload.len().div_ceil(size);
        // An IP packet has at most 65,535 bytes, so the kernel sends no longer one.
        (packet.len() <= 0xffff && packets > 0).then_some(Self { segments, is_v4, start, size, header, payload })
    }

    fn all(&self, each: &mut impl FnMut(Bytes)) -> Option<usize> {
        let count = self.payload.len().div_ceil(self.size);
        let mut room = Vec::with_capacity(self.payload.len() + count * self.header.len());
        for (index, chunk) in self.payload.chunks(self.size).enumerate() {
            let at = room.len();
            room.extend_from_slice(self.header);
            room.extend_from_slice(chunk);
            self.correct(&mut room[at..], index, index + 1 == count);
        }
        let room = Bytes::from(room);
        let full = self.header.len() + self.size;
        for at in (0..room.len()).step_by(full) {
            each(room.slice(at..room.len().min(at + full)));
        }
        Some(count)
    }

    /// Adjusts the copied header to its segment: lengths, identification, sequence number, flags and checksums.
    fn correct(&self, packet: &mut [u8], index: usize, is_last: bool) {
        let length = packet.len() as u16;
        if self.is_v4 {
            packet[2..4].copy_from_slice(&length.to_be_bytes());
            let first = u16::from_be_bytes([packet[4], packet[5]]);
            packet[4..6].copy_from_slice(&first.wrapping_add(index as u16).to_be_bytes());
            of_header(&mut packet[..self.start]);
        } else {
            packet[4..6].copy_from_slice(&(length - 40).to_be_bytes());
        }
        let transport_length = packet.len() - self.start;
        let pseudo = pseudo(packet, self.segments.protocol(), transport_length);
        let transport = &mut packet[self.start..];
        match self.segments {
            Segments::Tcp => {
                let first = u32::from_be_bytes([transport[4], transport[5], transport[6], transport[7]]);
                let sequence = first.wrapping_add((index * self.size) as u32);
                transport[4..8].copy_from_slice(&sequence.to_be_bytes());
                let cleared =
                    if is_last { 0 } else { LAST_SEGMENT_FLAGS } | if index == 0 { 0 } else { FIRST_SEGMENT_FLAGS };
                transport[13] &= !cleared;
            }
            Segments::Udp => transport[4..6].copy_from_slice(&(transport_length as u16).to_be_bytes()),
        }
        let checksum = self.segments.checksum();
        transport[checksum..checksum + 2].fill(0);
        let sum = pseudo + sum(transport);
        store(&mut transport[checksum..], sum);
        if self.segments == Segments::Udp && fold(sum) == 0xffff {
            transport[checksum..checksum + 2].fill(0xff);
        }
    }
}

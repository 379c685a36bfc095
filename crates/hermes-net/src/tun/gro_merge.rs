//! Merges adjacent segments of one flow into a GSO packet (GRO), without moving their payloads.
//!
//! In: whole IP packets in their order. Out: the number of packets at the front that can be merged, and their common
//! header. Never: a merge that the kernel could not undo (except for IPv4 identifications that no receiver reads), or a
//! merge of packets with invalid checksums, since the merged packet would get a valid one.

use bytes::Bytes;

use super::checksum::{fold, of_header, pseudo, sum};
use super::offload::{self, Segments};

/// Maximum number of packets in one merge: the kernel's limit for UDP. Fewer packets of usual size fit into 64 KiB.
pub(super) const MAX_PACKETS: usize = 64;
/// Bytes of the longest headers: IPv6 without extensions, and TCP with all options.
const MAX_HEADER: usize = 40 + 60;

const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
/// Merged segments may have ECE, which is constant during congestion. A segment with any other flag is not merged.
const ECE: u8 = 0x40;
const DONT_FRAGMENT: u8 = 0x40;

/// A packet that may be merged with others.
#[derive(Clone, Copy)]
struct Segment<'a> {
    packet: &'a [u8],
    kind: Segments,
    is_v4: bool,
    /// Length of the IP and transport headers, in bytes.
    header: usize,
}

impl<'a> Segment<'a> {
    /// Parses a packet. `None`: the packet cannot be merged.
    fn parse(packet: &'a [u8], with_udp: bool) -> Option<Self> {
        let length = u16::try_from(packet.len()).ok()?;
        let field = |at: usize| Some(u16::from_be_bytes([*packet.get(at)?, *packet.get(at + 1)?]));
        let (is_v4, start, protocol) = match packet.first()? >> 4 {
            // Without options, and not a fragment.
            4 if packet[0] == 0x45 && field(2)? == length && field(6)? & 0x3fff == 0 => (true, 20, *packet.get(9)?),
            6 if field(4)?.checked_add(40)? == length => (false, 40, *packet.get(6)?),
            _ => return None,
        };
        let (kind, header) = match protocol {
            6 => {
                let allowed = *packet.get(start + 13)? & !(PSH | ECE) == ACK;
                let header = usize::from(packet[start + 12] >> 4) * 4;
                (allowed && header >= 20).then_some((Segments::Tcp, start + header))?
            }
            17 if with_udp => {
                let whole = field(start + 4)? == length - start as u16 && field(start + 6)? != 0;
                whole.then_some((Segments::Udp, start + 8))?
            }
            _ => return None,
        };
        (packet.len() > header).then_some(Self { packet, kind, is_v4, header })
    }

    fn start(&self) -> usize {
        if self.is_v4 { 20 } else { 40 }
    }

    fn payload(&self) -> usize {
        self.packet.len() - self.header
    }

    fn sequence(&self) -> u32 {
        let at = self.start() + 4;
        u32::from_be_bytes([self.packet[at], self.packet[at + 1], self.packet[at + 2], self.packet[at + 3]])
    }

    fn pushes(&self) -> bool {
        self.kind == Segments::Tcp && self.packet[self.start() + 13] & PSH != 0
    }

    /// Whether the checksums are valid.
    fn is_sound(&self) -> bool {
        if self.is_v4 && fold(sum(&self.packet[..20])) != 0xffff {
            return false;
        }
        let transport = &self.packet[self.start()..];
        fold(pseudo(self.packet, self.kind.protocol(), transport.len()) + sum(transport)) == 0xffff
    }

    /// Whether the kernel would create `next` when it splits a GSO packet in which the payload of `next` follows that
    /// of `self`.
    fn continues(&self, next: &Self) -> bool {
        let same = |from: usize, to: usize| self.packet[from..to] == next.packet[from..to];
        if self.kind != next.kind || self.is_v4 != next.is_v4 || self.header != next.header || self.pushes() {
            return false;
        }
        let network = if self.is_v4 {
            let identification = |segment: &Self| u16::from_be_bytes([segment.packet[4], segment.packet[5]]);
            // The identification of a packet that is never fragmented is not used (RFC 6864).
            let in_order =
                self.packet[6] & DONT_FRAGMENT != 0 || identification(next) == identification(self).wrapping_add(1);
            same(0, 2) && same(6, 10) && same(12, 20) && in_order
        } else {
            same(0, 4) && same(6, 40)
        };
        let at = self.start();
        network && same(at, at + 4) && (self.kind == Segments::Udp || self.continues_tcp(next, &same))
    }

    fn continues_tcp(&self, next: &Self, same: &impl Fn(usize, usize) -> bool) -> bool {
        let at = self.start();
        let flags = |segment: &Self| segment.packet[at + 13] & !PSH;
        // Acknowledgement and data offset; window; urgent pointer and options.
        next.sequence() == self.sequence().wrapping_add(self.payload() as u32)
            && flags(self) == flags(next)
            && same(at + 8, at + 13)
            && same(at + 14, at + 16)
            && same(at + 18, self.header)
    }
}

/// A run of packets, from the first one on, that can be merged.
pub(super) struct MergeRun {
    /// Number of packets in the run, at least one.
    pub(super) count: usize,
    /// Bytes of each packet's headers, which [`MergeRun::header`] replaces. 0 if the run is one packet, sent unchanged.
    pub(super) skipped: usize,
    header: [u8; offload::LENGTH + MAX_HEADER],
}

impl MergeRun {
    /// Finds the run at the front; `packets` must not be empty.
    pub(super) fn of(packets: &[Bytes], with_udp: bool) -> Self {
        Self::merged(packets, with_udp).unwrap_or_else(Self::single)
    }

    /// A run of one packet.
    pub(super) fn single() -> Self {
        Self { count: 1, skipped: 0, header: [0; offload::LENGTH + MAX_HEADER] }
    }

    fn merged(packets: &[Bytes], with_udp: bool) -> Option<Self> {
        let (first, rest) = packets.split_first()?;
        let first = Segment::parse(first, with_udp)?;
        let size = first.payload();
        let (mut last, mut count, mut length) = (first, 1, first.packet.len());
        for packet in rest.iter().take(MAX_PACKETS - 1) {
            let Some(next) = Segment::parse(packet, with_udp) else { break };
            length += next.payload();
            let fits = last.payload() == size && next.payload() <= size && length <= 0xffff;
            // Checksums are verified last: that reads the whole packet, and most packets have no neighbour to merge
            // with.
            if !fits || !last.continues(&next) || (count == 1 && !first.is_sound()) || !next.is_sound() {
                length -= next.payload();
                break;
            }
            (last, count) = (next, count + 1);
        }
        (count > 1).then(|| Self { count, skipped: first.header, header: shared(&first, &last, length) })
    }

    /// The bytes to write before the payloads.
    pub(super) fn header(&self) -> &[u8] {
        &self.header[..offload::LENGTH + self.skipped]
    }
}

/// Returns the virtio header and the protocol headers of a GSO packet of `length` bytes.
fn shared(first: &Segment<'_>, last: &Segment<'_>, length: usize) -> [u8; offload::LENGTH + MAX_HEADER] {
    let mut bytes = [0; offload::LENGTH + MAX_HEADER];
    let (start, payload) = (first.start(), first.payload() as u16);
    let offload = offload::to_split(first.kind, !first.is_v4, first.header as u16, payload, start as u16);
    bytes[..offload::LENGTH].copy_from_slice(&offload);
    let header = &mut bytes[offload::LENGTH..][..first.header];
    header.copy_from_slice(&first.packet[..first.header]);
    if first.is_v4 {
        header[2..4].copy_from_slice(&(length as u16).to_be_bytes());
        of_header(&mut header[..20]);
    } else {
        header[4..6].copy_from_slice(&((length - 40) as u16).to_be_bytes());
    }
    if first.kind == Segments::Udp {
        header[start + 4..start + 6].copy_from_slice(&((length - start) as u16).to_be_bytes());
    } else if last.pushes() {
        header[start + 13] |= PSH;
    }
    let pseudo = fold(pseudo(header, first.kind.protocol(), length - start));
    header[start + first.kind.checksum()..][..2].copy_from_slice(&pseudo.to_ne_bytes());
    bytes
}

//! The header before each packet of a TUN queue (`struct virtio_net_hdr`), which states the work left to do on the
//! packet.
//!
//! In and out: ten bytes, numbers in host byte order. Never: a packet.

/// Bytes of the header.
pub(super) const LENGTH: usize = 10;

const NEEDS_CHECKSUM: u8 = 1;
const NONE: u8 = 0;
const TCP_V4: u8 = 1;
const TCP_V6: u8 = 4;
const UDP: u8 = 5;
/// Flag that may be added to a TCP kind: the first segment has CWR.
const WITH_ECN: u8 = 0x80;

/// The transport protocol of a GSO packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segments {
    Tcp,
    Udp,
}

impl Segments {
    /// The protocol number in IP headers.
    pub(super) fn protocol(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    /// The offset of the checksum field in the transport header.
    pub(super) fn checksum(self) -> usize {
        match self {
            Self::Tcp => 16,
            Self::Udp => 6,
        }
    }
}

/// The work that is left to do on one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offload {
    /// The packet is complete.
    Whole,
    /// The checksum of the bytes from `start` on is missing. Its field is `offset` bytes after `start`.
    Checksum { start: usize, offset: usize },
    /// A GSO packet: each segment gets `size` bytes of the payload, and a copy of the header. The transport header
    /// begins at `start`.
    Split { segments: Segments, size: usize, start: usize },
}

impl Offload {
    /// Parses a header. `None`: the header states a kind of GSO that this process never requested.
    pub(super) fn parse(header: &[u8; LENGTH]) -> Option<Self> {
        let number = |at: usize| usize::from(u16::from_ne_bytes([header[at], header[at + 1]]));
        let segments = match header[1] & !WITH_ECN {
            NONE if header[0] & NEEDS_CHECKSUM == 0 => return Some(Self::Whole),
            NONE => return Some(Self::Checksum { start: number(6), offset: number(8) }),
            TCP_V4 | TCP_V6 => Segments::Tcp,
            UDP => Segments::Udp,
            _ => return None,
        };
        Some(Self::Split { segments, size: number(4), start: number(6) })
    }
}

/// Returns the header for a GSO packet whose segments have `size` bytes of payload each. The packet's IP and transport
/// headers have `header` bytes together, and its transport header begins at `start`. The packet's checksum field must
/// contain the sum of the pseudo header.
pub(super) fn to_split(segments: Segments, is_v6: bool, header: u16, size: u16, start: u16) -> [u8; LENGTH] {
    let kind = match segments {
        Segments::Udp => UDP,
        Segments::Tcp if is_v6 => TCP_V6,
        Segments::Tcp => TCP_V4,
    };
    let mut bytes = [0; LENGTH];
    bytes[..2].copy_from_slice(&[NEEDS_CHECKSUM, kind]);
    bytes[2..4].copy_from_slice(&header.to_ne_bytes());
    bytes[4..6].copy_from_slice(&size.to_ne_bytes());
    bytes[6..8].copy_from_slice(&start.to_ne_bytes());
    bytes[8..].copy_from_slice(&(segments.checksum() as u16).to_ne_bytes());
    bytes
}

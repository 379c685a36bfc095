//! What stands before each packet of a TUN queue (`struct virtio_net_hdr`): what is left to do to it.
//!
//! In and out: ten bytes, numbers in the order of the host. Never: a packet.

/// Bytes of it.
pub(super) const LENGTH: usize = 10;

const NEEDS_CHECKSUM: u8 = 1;
const NONE: u8 = 0;
const TCP_V4: u8 = 1;
const TCP_V6: u8 = 4;
const UDP: u8 = 5;
/// May be set with those of TCP: the first segment has CWR.
const WITH_ECN: u8 = 0x80;

/// Of what a super packet is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segments {
    Tcp,
    Udp,
}

impl Segments {
    /// The protocol's number in IP headers.
    pub(super) fn protocol(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    /// Where in the header of the transport its checksum stands.
    pub(super) fn checksum(self) -> usize {
        match self {
            Self::Tcp => 16,
            Self::Udp => 6,
        }
    }
}

/// What is left to do to one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offload {
    /// Nothing.
    Whole,
    /// The checksum from `start` on is missing; it belongs `offset` bytes behind that.
    Checksum { start: usize, offset: usize },
    /// It is many: each gets `size` bytes of the payload, and a header as this. The transport's header is
    /// at `start`.
    Split { segments: Segments, size: usize, start: usize },
}

impl Offload {
    /// `None`: a kind that was never asked for.
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

/// The bytes for a packet of `segments`, of `size` bytes each, whose headers have `header` bytes altogether,
/// that of the transport from `start` on. Its checksum is to hold the sum of the pseudo header.
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

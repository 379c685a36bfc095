//! Fragmentation of network-layer packets (NDNLPv2, section "Indexed Fragmentation").
//!
//! In: a frame with a whole packet, and the MTU of the link. Out: frames that fit, with consecutive Sequence numbers.
//! The first frame alone carries the network-layer fields. A frame never exceeds the MTU.

use bytes::Bytes;

use super::{FRAG_COUNT, FRAG_INDEX, FRAGMENT, LP_PACKET, LpPacket, SEQUENCE};
use crate::tlv;

/// The reason why a packet cannot be sent over a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FragmentError {
    /// The MTU leaves no space for a payload.
    #[error("MTU of {mtu} bytes leaves no space for a fragment")]
    MtuTooSmall {
        /// The MTU.
        mtu: usize,
    },
    /// The packet needs more fragments than the maximum.
    #[error("packet needs {count} fragments, more than the maximum of {max}", max = Fragmenter::MAX_FRAGMENTS)]
    TooManyFragments {
        /// The number of fragments.
        count: usize,
    },
}

/// Splits packets into frames.
#[derive(Debug, Clone)]
pub struct Fragmenter {
    next: u64,
}

impl Fragmenter {
    /// The maximum number of fragments of a packet, as in NFD.
    pub const MAX_FRAGMENTS: usize = 400;

    /// Bytes around the payload of a fragment, without network-layer fields: the headers of LpPacket and Fragment
    /// below 64 KiB, Sequence, and FragIndex and FragCount of two bytes each.
    const OVERHEAD: usize = tlv::element_len(LP_PACKET, 0xffff) - 0xffff + tlv::element_len(FRAGMENT, 0xffff) - 0xffff
        + tlv::element_len(SEQUENCE, 8)
        + tlv::element_len(FRAG_INDEX, 2)
        + tlv::element_len(FRAG_COUNT, 2);

    /// A fragmenter whose first Sequence is `first`, which should be random.
    pub fn new(first: u64) -> Self {
        Self { next: first }
    }

    /// Splits a packet into frames of at most `mtu - reserve` bytes. `reserve` leaves space for fields that the caller
    /// adds later, such as TxSequence. A packet that fits stays whole, with a Sequence only if `numbered`.
    ///
    /// # Errors
    /// [`FragmentError`]. No Sequence is consumed then.
    pub fn split(
        &mut self,
        packet: LpPacket,
        mtu: usize,
        reserve: usize,
        numbered: bool,
    ) -> Result<Vec<LpPacket>, FragmentError> {
        let limit = mtu.min(0xffff).checked_sub(reserve).ok_or(FragmentError::MtuTooSmall { mtu })?;
        let whole = LpPacket { sequence: numbered.then_some(self.next), ..packet };
        if whole.encoded_len() <= limit {
            self.next = self.next.wrapping_add(u64::from(numbered));
            return Ok(vec![whole]);
        }
        let too_small = FragmentError::MtuTooSmall { mtu };
        let payload = whole.payload.clone().filter(|payload| !payload.is_empty()).ok_or(too_small)?;
        let header = LpPacket { sequence: None, payload: None, ..whole };
        let rest = limit.checked_sub(Self::OVERHEAD).filter(|rest| *rest > 0).ok_or(too_small)?;
        let first = rest.checked_sub(header.header_len()).filter(|first| *first > 0).ok_or(too_small)?;
        let count = 1 + payload.len().saturating_sub(first).div_ceil(rest);
        if count > Self::MAX_FRAGMENTS {
            return Err(FragmentError::TooManyFragments { count });
        }
        Ok(self.cut(header, payload, first, rest, count))
    }

    fn cut(&mut self, header: LpPacket, mut payload: Bytes, first: usize, rest: usize, count: usize) -> Vec<LpPacket> {
        let mut header = Some(header);
        let mut frames = Vec::with_capacity(count);
        for index in 0..count {
            let most = if index == 0 { first } else { rest };
            let part = payload.split_to(most.min(payload.len()));
            frames.push(LpPacket {
                sequence: Some(self.next),
                frag_index: index as u64,
                frag_count: count as u64,
                payload: Some(part),
                ..header.take().unwrap_or_default()
            });
            self.next = self.next.wrapping_add(1);
        }
        frames
    }
}

//! Link frames of NDNLPv2 (NDN Link Protocol version 2).
//!
//! In: the bytes of one frame, or the fields of a new one. Out: the fields, with the payload as a part of the same
//! buffer, or an encoded frame. A bare Interest or Data is a frame without header fields. Decoding never looks into the
//! payload of an LpPacket, which may be one fragment of a packet.

use bytes::{Bytes, BytesMut};
use smallvec::SmallVec;

use crate::tlv::{self, Element, Reader, TlvError, types};

mod fragmenter;
mod reassembler;
mod reliability;
mod rtt;

pub use fragmenter::{FragmentError, Fragmenter};
pub use reassembler::{Reassembler, ReassemblerConfig, ReassemblerStats};
pub use reliability::{Reliability, ReliabilityConfig, ReliabilityStats};

/// The type of an LpPacket.
pub const LP_PACKET: u32 = 100;

const FRAGMENT: u32 = 80;
const SEQUENCE: u32 = 81;
const FRAG_INDEX: u32 = 82;
const FRAG_COUNT: u32 = 83;
const PIT_TOKEN: u32 = 98;
const NACK: u32 = 800;
const NACK_REASON: u32 = 801;
const CONGESTION_MARK: u32 = 832;
const ACK: u32 = 836;
const TX_SEQUENCE: u32 = 840;
const NON_DISCOVERY: u32 = 844;

/// The number of bytes that an Ack or a TxSequence field adds to a frame.
pub(crate) const SEQUENCE_FIELD: usize = tlv::element_len(ACK, 8);

/// The longest PitToken (NDNLPv2, section "PIT Token").
pub const MAX_PIT_TOKEN: usize = 32;

/// The reason why bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LpError {
    /// The encoding is invalid.
    #[error(transparent)]
    Tlv(#[from] TlvError),
    /// The frame is neither an LpPacket nor an Interest nor a Data.
    #[error("frame of unknown type {0}")]
    UnknownFrame(u32),
    /// A field is unknown and must not be ignored.
    #[error("unknown field of type {0}")]
    UnknownField(u32),
    /// A field is repeated, or follows the payload.
    #[error("field of type {0} is repeated or follows the payload")]
    Order(u32),
    /// FragIndex is not below FragCount, or the frame of a fragmented packet has no Sequence or no payload.
    #[error("fragment index, fragment count, sequence and payload contradict each other")]
    Fragmentation,
}

/// A NackReason number (NDNLPv2, section "Network Nack").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NackReason(pub u64);

impl NackReason {
    /// No reason is given.
    pub const NONE: Self = Self(0);
    /// The next hop is congested.
    pub const CONGESTION: Self = Self(50);
    /// The Interest has a nonce that the next hop has seen.
    pub const DUPLICATE: Self = Self(100);
    /// The next hop has no route for the name.
    pub const NO_ROUTE: Self = Self(150);
}

/// A link frame: header fields, and a network-layer packet or a fragment of one.
///
/// The default is the IDLE packet: no field and no payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LpPacket {
    /// The Sequence of the frame.
    pub sequence: Option<u64>,
    /// FragIndex; 0 if absent.
    pub frag_index: u64,
    /// FragCount; 1 if absent.
    pub frag_count: u64,
    /// The PitToken, 1 to 32 bytes, to copy from an Interest to its Data or Nack.
    pub pit_token: Option<Bytes>,
    /// The reason of a Nack; the payload is the rejected Interest.
    pub nack: Option<NackReason>,
    /// CongestionMark; 0 means no congestion.
    pub congestion_mark: Option<u64>,
    /// The TxSequence numbers that the sender acknowledges.
    pub acks: SmallVec<[u64; 4]>,
    /// The TxSequence, which asks the receiver for an Ack.
    pub tx_sequence: Option<u64>,
    /// NonDiscovery: the Interest must not be flooded for self-learning.
    pub non_discovery: bool,
    /// The payload (the Fragment field): a packet or a fragment of one.
    pub payload: Option<Bytes>,
}

impl Default for LpPacket {
    fn default() -> Self {
        Self {
            sequence: None,
            frag_index: 0,
            frag_count: 1,
            pit_token: None,
            nack: None,
            congestion_mark: None,
            acks: SmallVec::new(),
            tx_sequence: None,
            non_discovery: false,
            payload: None,
        }
    }
}

impl LpPacket {
    /// A frame with a network-layer packet as its payload and no header field.
    pub fn bare(packet: Bytes) -> Self {
        Self { payload: Some(packet), ..Self::default() }
    }

    /// A Nack for this Interest.
    pub fn nack(interest: Bytes, reason: NackReason) -> Self {
        Self { nack: Some(reason), ..Self::bare(interest) }
    }

    /// Decodes exactly one frame: an LpPacket, or a bare Interest or Data.
    ///
    /// # Errors
    /// [`LpError`] if the frame is malformed, or followed by more bytes.
    pub fn decode(frame: Bytes) -> Result<Self, LpError> {
        match Reader::new(&frame).next()?.map(|element| element.kind) {
            Some(LP_PACKET) => Self::decode_fields(&Reader::new(&frame).only(LP_PACKET)?),
            Some(kind @ (types::INTEREST | types::DATA)) => {
                Reader::new(&frame).only(kind)?;
                Ok(Self::bare(frame))
            }
            Some(kind) => Err(LpError::UnknownFrame(kind)),
            None => Err(TlvError::Truncated.into()),
        }
    }

    fn decode_fields(frame: &Element<'_>) -> Result<Self, LpError> {
        let mut packet = Self::default();
        let (mut index, mut count) = (None, None);
        let mut reader = frame.reader();
        while let Some(field) = reader.next()? {
            let once = |seen: bool| if seen { Err(LpError::Order(field.kind)) } else { Ok(()) };
            once(packet.payload.is_some())?;
            match field.kind {
                FRAGMENT => packet.payload = Some(field.value_bytes()),
                SEQUENCE => once(packet.sequence.replace(number(&field)?).is_some())?,
                FRAG_INDEX => once(index.replace(field.integer()?).is_some())?,
                FRAG_COUNT => once(count.replace(field.integer()?).is_some())?,
                PIT_TOKEN if !(1..=MAX_PIT_TOKEN).contains(&field.value().len()) => {
                    return Err(field.bad_length().into());
                }
                PIT_TOKEN => once(packet.pit_token.replace(field.value_bytes()).is_some())?,
                NACK => once(packet.nack.replace(nack_reason(&field)?).is_some())?,
                CONGESTION_MARK => once(packet.congestion_mark.replace(field.integer()?).is_some())?,
                ACK => packet.acks.push(number(&field)?),
                TX_SEQUENCE => once(packet.tx_sequence.replace(number(&field)?).is_some())?,
                NON_DISCOVERY => {
                    field.empty()?;
                    once(packet.non_discovery)?;
                    packet.non_discovery = true;
                }
                kind => ignore(kind)?,
            }
        }
        packet.frag_index = index.unwrap_or(0);
        packet.frag_count = count.unwrap_or(1);
        packet.check()?;
        Ok(packet)
    }

    fn check(&self) -> Result<(), LpError> {
        let fragmented = self.frag_count > 1;
        if self.frag_index >= self.frag_count || fragmented && (self.sequence.is_none() || self.payload.is_none()) {
            return Err(LpError::Fragmentation);
        }
        Ok(())
    }

    /// Encodes the frame. A packet without header fields is encoded bare.
    pub fn encode(&self) -> Bytes {
        if let Some(payload) = self.as_bare() {
            return payload.clone();
        }
        let mut fields = BytesMut::with_capacity(64 + self.payload.as_ref().map_or(0, Bytes::len));
        self.encode_header(&mut fields);
        if let Some(payload) = &self.payload {
            tlv::put(&mut fields, FRAGMENT, payload);
        }
        let mut out = BytesMut::with_capacity(tlv::element_len(LP_PACKET, fields.len()));
        tlv::put(&mut out, LP_PACKET, &fields);
        out.freeze()
    }

    /// The payload, if it is a whole Interest or Data and the frame has no header field.
    fn as_bare(&self) -> Option<&Bytes> {
        let payload = self.payload.as_ref().filter(|_| !self.has_header())?;
        let reader = Reader::new(payload);
        let whole = [types::INTEREST, types::DATA].into_iter().any(|kind| reader.clone().only(kind).is_ok());
        whole.then_some(payload)
    }

    fn has_header(&self) -> bool {
        let network = self.pit_token.is_some() || self.nack.is_some() || self.congestion_mark.is_some();
        let link =
            self.sequence.is_some() || self.frag_count > 1 || !self.acks.is_empty() || self.tx_sequence.is_some();
        network || link || self.non_discovery
    }

    /// Appends the header fields, in the order of their types.
    fn encode_header(&self, out: &mut BytesMut) {
        if let Some(sequence) = self.sequence {
            tlv::put(out, SEQUENCE, &sequence.to_be_bytes());
        }
        if self.frag_index > 0 {
            tlv::put_integer(out, FRAG_INDEX, self.frag_index);
        }
        if self.frag_count > 1 {
            tlv::put_integer(out, FRAG_COUNT, self.frag_count);
        }
        if let Some(token) = &self.pit_token {
            tlv::put(out, PIT_TOKEN, token);
        }
        if let Some(reason) = self.nack {
            let reason = tlv::wrap(NACK, |out| {
                if reason != NackReason::NONE {
                    tlv::put_integer(out, NACK_REASON, reason.0);
                }
            });
            out.extend_from_slice(&reason);
        }
        if let Some(mark) = self.congestion_mark {
            tlv::put_integer(out, CONGESTION_MARK, mark);
        }
        for ack in &self.acks {
            tlv::put(out, ACK, &ack.to_be_bytes());
        }
        if let Some(sequence) = self.tx_sequence {
            tlv::put(out, TX_SEQUENCE, &sequence.to_be_bytes());
        }
        if self.non_discovery {
            tlv::put(out, NON_DISCOVERY, &[]);
        }
    }

    /// The length of the encoded frame.
    pub fn encoded_len(&self) -> usize {
        if let Some(payload) = self.as_bare() {
            return payload.len();
        }
        let payload = self.payload.as_ref().map_or(0, |payload| tlv::element_len(FRAGMENT, payload.len()));
        tlv::element_len(LP_PACKET, self.header_len() + payload)
    }

    fn header_len(&self) -> usize {
        let mut header = BytesMut::new();
        self.encode_header(&mut header);
        header.len()
    }
}

/// A Sequence, TxSequence or Ack: always eight bytes.
fn number(field: &Element<'_>) -> Result<u64, TlvError> {
    field.array().map(u64::from_be_bytes)
}

fn nack_reason(field: &Element<'_>) -> Result<NackReason, LpError> {
    let mut reason = None;
    let mut reader = field.reader();
    while let Some(inner) = reader.next()? {
        match inner.kind {
            NACK_REASON if reason.is_none() => reason = Some(NackReason(inner.integer()?)),
            kind => ignore(kind)?,
        }
    }
    Ok(reason.unwrap_or(NackReason::NONE))
}

/// Accepts an unknown field if its type allows this: 800 to 959, with zeros as the last two bits (NDNLPv2, section
/// "Ignorable Fields").
fn ignore(kind: u32) -> Result<(), LpError> {
    if (800..960).contains(&kind) && kind.is_multiple_of(4) { Ok(()) } else { Err(LpError::UnknownField(kind)) }
}

#[cfg(test)]
mod tests;

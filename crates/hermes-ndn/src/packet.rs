//! Interest and Data packets (Packet Format 0.3).
//!
//! In: the bytes of one packet, or the fields of a new one. Out: a packet whose parts share the bytes, or a signed
//! packet. A packet always holds its own encoding, so that forwarding and digests use the received bytes. Packets are
//! immutable; a change of a hop-by-hop field makes a new packet.

use bytes::Bytes;

use crate::name::NameError;
use crate::signature::{KeyError, SignatureError};
use crate::tlv::{Reader, TlvError, types};

mod data;
mod interest;

pub use data::{ContentType, Data, DataBuilder};
pub use interest::{Interest, InterestBuilder};

/// The reason why bytes are not a packet, or why a packet cannot be built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// An element is invalid.
    #[error(transparent)]
    Tlv(#[from] TlvError),
    /// A name is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A SignatureInfo is invalid.
    #[error("signature info: {0}")]
    Signature(#[from] SignatureError),
    /// A key failed to sign.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The packet is neither an Interest nor a Data.
    #[error("packet of unknown type {0}")]
    UnknownPacket(u32),
    /// The name of an Interest is empty.
    #[error("name of an interest is empty")]
    EmptyName,
    /// The ParametersSha256DigestComponent is missing, repeated, not expected, or wrong.
    #[error("parameters digest component is missing, unexpected or wrong")]
    ParametersDigest,
    /// A signed Interest has only one of InterestSignatureInfo and InterestSignatureValue.
    #[error("interest signature is incomplete")]
    IncompleteSignature,
    /// A new packet is longer than the maximum.
    #[error("packet of {0} bytes exceeds the maximum of {max} bytes", max = crate::tlv::MAX_PACKET)]
    TooLong(usize),
}

/// A network-layer packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Packet {
    /// An Interest.
    Interest(Interest),
    /// A Data.
    Data(Data),
}

impl Packet {
    /// Decodes exactly one packet. Its parts share `bytes`.
    ///
    /// # Errors
    /// [`PacketError`] if the packet is malformed, of another type, or followed by more bytes.
    pub fn decode(bytes: Bytes) -> Result<Self, PacketError> {
        match Reader::new(&bytes).next()?.map(|element| element.kind) {
            Some(types::INTEREST) => Interest::decode(bytes).map(Self::Interest),
            Some(types::DATA) => Data::decode(bytes).map(Self::Data),
            Some(kind) => Err(PacketError::UnknownPacket(kind)),
            None => Err(TlvError::Truncated.into()),
        }
    }

    /// The encoded packet.
    pub fn wire(&self) -> &Bytes {
        match self {
            Self::Interest(interest) => interest.wire(),
            Self::Data(data) => data.wire(),
        }
    }
}

#[cfg(test)]
mod tests;

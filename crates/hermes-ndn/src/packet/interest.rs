//! Interest packets (Packet Format 0.3, sections "Interest Packet" and "Signed Interest").
//!
//! In: an encoded Interest, or the fields of a new one. Out: an Interest whose parts share its bytes. Decoding always
//! verifies the parameters digest, and never the signature: [`Interest::verify`] does.

use std::ops::Range;
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use super::data::{Data, packet, sha256};
use super::{PacketError, TlvError};
use crate::name::{self, Name};
use crate::signature::{SignatureError, SignatureInfo, VerifyingKey};
use crate::tlv::{self, Element, Reader, types};

mod builder;

pub use builder::InterestBuilder;

/// An Interest packet.
#[derive(Debug, Clone)]
pub struct Interest {
    name: Name,
    fields: Fields,
    /// The value of the packet within `wire`.
    value: Range<usize>,
    /// The place of the Nonce element, or where it belongs.
    nonce: Range<usize>,
    /// The place of the hop limit's byte.
    hop_limit: Option<usize>,
    /// The elements from ApplicationParameters to the end.
    parameters: Option<Range<usize>>,
    application_parameters: Option<Bytes>,
    signature: Option<Signature>,
    wire: Bytes,
}

/// The fields between the name and ApplicationParameters.
#[derive(Debug, Clone, Default)]
struct Fields {
    can_be_prefix: bool,
    must_be_fresh: bool,
    forwarding_hint: Vec<Name>,
    nonce: Option<[u8; 4]>,
    lifetime: Option<Duration>,
    hop_limit: Option<u8>,
}

#[derive(Debug, Clone)]
struct Signature {
    info: SignatureInfo,
    value: Bytes,
    /// The place of the InterestSignatureValue element.
    start: usize,
}

/// The order of the elements after the name.
const ORDER: [u32; 9] = [
    types::CAN_BE_PREFIX,
    types::MUST_BE_FRESH,
    types::FORWARDING_HINT,
    types::NONCE,
    types::INTEREST_LIFETIME,
    types::HOP_LIMIT,
    types::APPLICATION_PARAMETERS,
    types::INTEREST_SIGNATURE_INFO,
    types::INTEREST_SIGNATURE_VALUE,
];

impl Interest {
    /// The lifetime of an Interest without the InterestLifetime element.
    pub const DEFAULT_LIFETIME: Duration = Duration::from_secs(4);

    /// The maximum number of names in a forwarding hint.
    pub const MAX_FORWARDING_HINT: usize = 16;

    /// Decodes exactly one Interest. Its parts share `wire`.
    ///
    /// # Errors
    /// [`PacketError`] if it is malformed, followed by more bytes, or has a wrong parameters digest.
    pub fn decode(wire: Bytes) -> Result<Self, PacketError> {
        let packet = Reader::new(&wire).only(types::INTEREST)?;
        let mut reader = packet.reader();
        let Some(first) = reader.next()?.filter(|first| first.kind == types::NAME) else {
            return Err(TlvError::Missing(types::NAME).into());
        };
        let name = Name::from_value(first.value_bytes())?;
        if name.is_empty() {
            return Err(PacketError::EmptyName);
        }
        let value = packet.value_range();
        let insertion = first.range().end;
        let mut interest = Self {
            name,
            fields: Fields::default(),
            nonce: insertion..insertion,
            hop_limit: None,
            parameters: None,
            application_parameters: None,
            signature: None,
            value,
            wire: wire.clone(),
        };
        let mut info = None;
        let mut next = 0;
        while let Some(element) = reader.next()? {
            let place = ORDER.iter().position(|kind| *kind == element.kind);
            match place.filter(|place| *place >= next) {
                // Without parameters, a signature is out of place.
                Some(place) if place > 6 && interest.parameters.is_none() => tlv::ignore(element.kind)?,
                Some(place) => {
                    interest.field(&element, &mut info)?;
                    next = place + 1;
                }
                None => tlv::ignore(element.kind)?,
            }
        }
        if info.is_some() {
            return Err(PacketError::IncompleteSignature);
        }
        interest.check_parameters()?;
        Ok(interest)
    }

    /// Stores an element that is in order. A complete signature consumes `info`.
    fn field(&mut self, element: &Element<'_>, info: &mut Option<SignatureInfo>) -> Result<(), PacketError> {
        let range = element.range();
        match element.kind {
            types::CAN_BE_PREFIX => {
                element.empty()?;
                self.fields.can_be_prefix = true;
                self.nonce = range.end..range.end;
            }
            types::MUST_BE_FRESH => {
                element.empty()?;
                self.fields.must_be_fresh = true;
                self.nonce = range.end..range.end;
            }
            types::FORWARDING_HINT => {
                self.fields.forwarding_hint = forwarding_hint(element)?;
                self.nonce = range.end..range.end;
            }
            types::NONCE => {
                self.fields.nonce = Some(element.array()?);
                self.nonce = range;
            }
            types::INTEREST_LIFETIME => self.fields.lifetime = Some(Duration::from_millis(element.integer()?)),
            types::HOP_LIMIT => {
                let [limit] = element.array()?;
                self.fields.hop_limit = Some(limit);
                self.hop_limit = Some(element.value_range().start);
            }
            types::APPLICATION_PARAMETERS => {
                self.application_parameters = Some(element.value_bytes());
                self.parameters = Some(range.start..self.value.end);
            }
            types::INTEREST_SIGNATURE_INFO => *info = Some(SignatureInfo::decode(element)?),
            _ => {
                let info = info.take().ok_or(PacketError::IncompleteSignature)?;
                self.signature = Some(Signature { info, value: element.value_bytes(), start: range.start });
            }
        }
        Ok(())
    }

    /// Checks the ParametersSha256DigestComponent (section "ParametersSha256DigestComponent").
    fn check_parameters(&self) -> Result<(), PacketError> {
        let mut digests = self.name.positions(name::PARAMETERS_DIGEST);
        let valid = match (digests.next(), digests.next(), &self.parameters) {
            (None, None, None) => true,
            (Some(index), None, Some(range)) => {
                let digest = self.name.get(index);
                digest.is_some_and(|digest| sha256(&self.wire[range.clone()])[..] == digest.value()[..])
            }
            _ => false,
        };
        if valid { Ok(()) } else { Err(PacketError::ParametersDigest) }
    }

    /// The name.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Whether the name may be a prefix of the Data's name.
    pub fn can_be_prefix(&self) -> bool {
        self.fields.can_be_prefix
    }

    /// Whether a cache must not answer with stale Data.
    pub fn must_be_fresh(&self) -> bool {
        self.fields.must_be_fresh
    }

    /// The names of the forwarding hint.
    pub fn forwarding_hint(&self) -> &[Name] {
        &self.fields.forwarding_hint
    }

    /// The nonce.
    pub fn nonce(&self) -> Option<[u8; 4]> {
        self.fields.nonce
    }

    /// The InterestLifetime; `None` if absent.
    pub fn lifetime(&self) -> Option<Duration> {
        self.fields.lifetime
    }

    /// The InterestLifetime, or [`Self::DEFAULT_LIFETIME`].
    pub fn lifetime_or_default(&self) -> Duration {
        self.fields.lifetime.unwrap_or(Self::DEFAULT_LIFETIME)
    }

    /// The HopLimit.
    pub fn hop_limit(&self) -> Option<u8> {
        self.fields.hop_limit
    }

    /// The value of ApplicationParameters.
    pub fn application_parameters(&self) -> Option<&Bytes> {
        self.application_parameters.as_ref()
    }

    /// The InterestSignatureInfo of a signed Interest.
    pub fn signature_info(&self) -> Option<&SignatureInfo> {
        self.signature.as_ref().map(|signature| &signature.info)
    }

    /// The InterestSignatureValue of a signed Interest.
    pub fn signature_value(&self) -> Option<&Bytes> {
        self.signature.as_ref().map(|signature| &signature.value)
    }

    /// The encoded packet.
    pub fn wire(&self) -> &Bytes {
        &self.wire
    }

    /// The signed portion: all components but the parameters digest, then the elements from ApplicationParameters up to
    /// InterestSignatureValue. `None` if the Interest is not signed, or its digest is not the last component.
    pub fn signed_portion(&self) -> Option<Bytes> {
        let signature = self.signature.as_ref()?;
        let parameters = self.parameters.as_ref()?;
        let components = self.name.len().checked_sub(1)?;
        if self.name.get(components)?.kind() != name::PARAMETERS_DIGEST {
            return None;
        }
        let mut out = BytesMut::from(self.name.prefix_bytes(components));
        out.extend_from_slice(self.wire.get(parameters.start..signature.start)?);
        Some(out.freeze())
    }

    /// Verifies the signature. The caller checks nonce, time and sequence number against replays.
    ///
    /// # Errors
    /// [`SignatureError::Unsigned`], [`SignatureError::Mismatch`] or [`SignatureError::Invalid`].
    pub fn verify(&self, key: &VerifyingKey) -> Result<(), SignatureError> {
        match (self.signed_portion(), &self.signature) {
            (Some(portion), Some(signature)) => key.verify(signature.info.kind, &portion, &signature.value),
            _ => Err(SignatureError::Unsigned),
        }
    }

    /// Whether a Data satisfies this Interest by its name, CanBePrefix and implicit digest. Freshness is not checked: it
    /// depends on the time that the Data has spent in a cache.
    pub fn matches(&self, data: &Data) -> bool {
        let components = self.name.len();
        match components.cmp(&data.name().len()) {
            std::cmp::Ordering::Equal => &self.name == data.name(),
            std::cmp::Ordering::Less => self.fields.can_be_prefix && self.name.is_prefix_of(data.name()),
            std::cmp::Ordering::Greater => {
                components == data.name().len() + 1
                    && data.name().is_prefix_of(&self.name)
                    && self.name.last().is_some_and(|last| {
                        last.kind() == name::IMPLICIT_DIGEST && last.value()[..] == data.digest()[..]
                    })
            }
        }
    }

    /// A copy whose hop limit is one less; an Interest without a hop limit is returned unchanged. `None`: the hop limit
    /// is 0 and the Interest must be dropped (section "HopLimit").
    #[must_use]
    pub fn decremented(&self) -> Option<Self> {
        let (Some(limit), Some(at)) = (self.fields.hop_limit, self.hop_limit) else {
            return Some(self.clone());
        };
        let limit = limit.checked_sub(1)?;
        let mut wire = BytesMut::from(&self.wire[..]);
        *wire.get_mut(at)? = limit;
        let mut copy = Self { wire: wire.freeze(), ..self.clone() };
        copy.fields.hop_limit = Some(limit);
        Some(copy)
    }

    /// A copy with this nonce. A forwarder adds one before it forwards an Interest without a nonce (section "Nonce").
    ///
    /// # Errors
    /// [`PacketError::TooLong`] if the packet has no space left for a nonce.
    pub fn with_nonce(&self, nonce: [u8; 4]) -> Result<Self, PacketError> {
        let mut value = BytesMut::with_capacity(self.value.len() + 6);
        value.extend_from_slice(&self.wire[self.value.start..self.nonce.start]);
        tlv::put(&mut value, types::NONCE, &nonce);
        value.extend_from_slice(&self.wire[self.nonce.end..self.value.end]);
        Self::decode(packet(types::INTEREST, &value)?)
    }
}

fn forwarding_hint(element: &Element<'_>) -> Result<Vec<Name>, PacketError> {
    let mut names = Vec::new();
    let mut reader = element.reader();
    while let Some(inner) = reader.next()? {
        match inner.kind {
            types::NAME if names.len() == Interest::MAX_FORWARDING_HINT => return Err(element.bad_length().into()),
            types::NAME => names.push(Name::from_value(inner.value_bytes())?),
            kind => tlv::ignore(kind)?,
        }
    }
    if names.is_empty() { Err(TlvError::Missing(types::NAME).into()) } else { Ok(names) }
}

impl PartialEq for Interest {
    fn eq(&self, other: &Self) -> bool {
        self.wire == other.wire
    }
}

impl Eq for Interest {}

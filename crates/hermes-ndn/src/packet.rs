//! Interest and Data packets (packet format 0.3).
//!
//! In: the bytes of one packet. Out: its fields, as slices of these bytes; or packets from fields. Content and signatures
//! are not copied. Never: a check of a signature; see [`crate::signature`].

use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;

use crate::name::{Component, NAME, Name, types};
use crate::signature::{SignError, Signature, SignatureInfo, Signer};
use crate::tlv::{Element, Elements, NdnError, Result, put, put_integer, put_nested};

/// The type of an Interest.
pub const INTEREST: u32 = 5;
/// The type of a Data packet.
pub const DATA: u32 = 6;

const META_INFO: u32 = 0x14;
const CONTENT: u32 = 0x15;
const SIGNATURE_INFO: u32 = 0x16;
const SIGNATURE_VALUE: u32 = 0x17;
const CONTENT_TYPE: u32 = 0x18;
const FRESHNESS_PERIOD: u32 = 0x19;
const FINAL_BLOCK_ID: u32 = 0x1a;
const CAN_BE_PREFIX: u32 = 0x21;
const MUST_BE_FRESH: u32 = 0x12;
const FORWARDING_HINT: u32 = 0x1e;
const NONCE: u32 = 0x0a;
const LIFETIME: u32 = 0x0c;
const HOP_LIMIT: u32 = 0x22;
const PARAMETERS: u32 = 0x24;
const INTEREST_SIGNATURE_INFO: u32 = 0x2c;
const INTEREST_SIGNATURE_VALUE: u32 = 0x2e;

const INTEREST_ELEMENTS: &[u32] = &[
    NAME,
    CAN_BE_PREFIX,
    MUST_BE_FRESH,
    FORWARDING_HINT,
    NONCE,
    LIFETIME,
    HOP_LIMIT,
    PARAMETERS,
    INTEREST_SIGNATURE_INFO,
    INTEREST_SIGNATURE_VALUE,
];
const DATA_ELEMENTS: &[u32] = &[NAME, META_INFO, CONTENT, SIGNATURE_INFO, SIGNATURE_VALUE];
const META_ELEMENTS: &[u32] = &[CONTENT_TYPE, FRESHNESS_PERIOD, FINAL_BLOCK_ID];

/// The lifetime of an Interest that names none.
pub const DEFAULT_LIFETIME: Duration = Duration::from_secs(4);

/// A packet of the network layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packet {
    /// A request for Data.
    Interest(Interest),
    /// A named, signed piece of content.
    Data(Data),
}

impl Packet {
    /// Decodes a packet.
    ///
    /// # Errors
    /// The bytes are no Interest and no Data, or malformed.
    pub fn decode(bytes: Bytes) -> Result<Self> {
        let element = Element::only(bytes)?;
        match element.kind {
            INTEREST => Interest::from_element(&element).map(Self::Interest),
            DATA => Data::from_element(element).map(Self::Data),
            other => Err(NdnError::Unexpected(other)),
        }
    }

    /// Returns the name.
    pub fn name(&self) -> &Name {
        match self {
            Self::Interest(interest) => &interest.name,
            Self::Data(data) => &data.name,
        }
    }
}

/// The name of an encoded packet, without its other fields. A forwarder needs no more.
///
/// # Errors
/// The bytes are no packet that begins with a name.
pub fn name_of(packet: Bytes) -> Result<(u32, Name)> {
    let element = Element::only(packet)?;
    if !matches!(element.kind, INTEREST | DATA) {
        return Err(NdnError::Unexpected(element.kind));
    }
    let known = if element.kind == INTEREST { INTEREST_ELEMENTS } else { DATA_ELEMENTS };
    let name = Elements::new(element.value, known)?.take(NAME)?.ok_or(NdnError::Missing("name"))?;
    Ok((element.kind, Name::decode(name.value)?))
}

/// A request for Data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// The name, or the prefix, of the requested Data.
    pub name: Name,
    /// Data whose name only begins with `name` is an answer, too.
    pub can_be_prefix: bool,
    /// Data from a cache must be fresh.
    pub must_be_fresh: bool,
    /// Names towards which the Interest is forwarded instead.
    pub forwarding_hint: Vec<Name>,
    /// Distinguishes Interests that loop from those that are repeated.
    pub nonce: Option<[u8; 4]>,
    /// The time that the sender waits; `None` means [`DEFAULT_LIFETIME`].
    pub lifetime: Option<Duration>,
    /// The number of further hops; `None` means no limit.
    pub hop_limit: Option<u8>,
    /// Parameters of the application. The name then has a component with their digest.
    pub parameters: Option<Bytes>,
    /// The signature of a signed Interest.
    pub signature: Option<Signature>,
}

impl Interest {
    /// An Interest for exactly this name.
    pub fn new(name: Name) -> Self {
        Self { name, ..Self::default() }
    }

    /// Returns the time that the sender waits.
    pub fn wait(&self) -> Duration {
        self.lifetime.unwrap_or(DEFAULT_LIFETIME)
    }

    fn from_element(element: &Element) -> Result<Self> {
        let mut elements = Elements::new(element.value.clone(), INTEREST_ELEMENTS)?;
        let name = Name::decode(elements.take(NAME)?.ok_or(NdnError::Missing("name"))?.value)?;
        if name.is_empty() {
            return Err(NdnError::Invalid("name of an Interest: it has no component"));
        }
        let mut interest = Self { name, ..Self::default() };
        interest.can_be_prefix = elements.take(CAN_BE_PREFIX)?.is_some();
        interest.must_be_fresh = elements.take(MUST_BE_FRESH)?.is_some();
        if let Some(hint) = elements.take(FORWARDING_HINT)? {
            let mut names = Elements::new(hint.value, &[NAME])?;
            while let Some(name) = names.take(NAME)? {
                interest.forwarding_hint.push(Name::decode(name.value)?);
            }
            names.finish()?;
        }
        let nonce = elements.take(NONCE)?;
        interest.nonce =
            nonce.map(|nonce| nonce.value[..].try_into().map_err(|_| NdnError::Invalid("nonce"))).transpose()?;
        let lifetime = elements.take(LIFETIME)?;
        interest.lifetime = lifetime.map(|lifetime| lifetime.integer().map(Duration::from_millis)).transpose()?;
        let hop_limit = elements.take(HOP_LIMIT)?;
        interest.hop_limit = hop_limit
            .map(|limit| {
                limit.value.first().copied().filter(|_| limit.value.len() == 1).ok_or(NdnError::Invalid("hop limit"))
            })
            .transpose()?;
        let Some(parameters) = elements.take(PARAMETERS)? else {
            elements.finish()?;
            if interest.name.components().any(|part| part.kind() == types::PARAMETERS_DIGEST) {
                return Err(NdnError::Missing("parameters of the digest in the name"));
            }
            return Ok(interest);
        };
        // The digest covers all elements from the parameters on.
        let tail = element.value.slice(offset_of(&element.value, &parameters.whole)..);
        interest.parameters = Some(parameters.value);
        check_digest(&interest.name, &tail)?;
        if let Some(info) = elements.take(INTEREST_SIGNATURE_INFO)? {
            let value = elements.take(INTEREST_SIGNATURE_VALUE)?.ok_or(NdnError::Missing("signature"))?;
            let signed = tail.slice(..offset_of(&tail, &value.whole));
            let unsigned = |part: &Component| part.kind() == types::PARAMETERS_DIGEST;
            let names: Name = interest.name.components().filter(|part| !unsigned(part)).collect();
            let covered = vec![names.encoded().clone(), signed];
            interest.signature =
                Some(Signature { info: SignatureInfo::decode(info.value)?, value: value.value, covered });
        }
        elements.finish()?;
        Ok(interest)
    }

    /// Encodes the Interest, which has no parameters.
    pub fn encode(&self) -> Bytes {
        self.encode_with(&self.name, |_| {})
    }

    /// Encodes the Interest with parameters. The digest component is added to the end of the name.
    pub fn encode_parameters(&self, parameters: &[u8]) -> Bytes {
        let mut tail = Vec::new();
        put(&mut tail, PARAMETERS, parameters);
        let name = self.name.child(&Component::new(types::PARAMETERS_DIGEST, digest(&SHA256, &tail).as_ref()));
        self.encode_with(&name, |out| out.extend_from_slice(&tail))
    }

    /// Encodes the Interest with parameters, and signs it.
    ///
    /// # Errors
    /// The key cannot sign.
    pub fn encode_signed(&self, parameters: &[u8], signer: &Signer) -> std::result::Result<Bytes, SignError> {
        let mut tail = Vec::new();
        put(&mut tail, PARAMETERS, parameters);
        put_nested(&mut tail, INTEREST_SIGNATURE_INFO, |out| signer.info().put(out));
        let signature = signer.sign(&[self.name.encoded(), &tail])?;
        put(&mut tail, INTEREST_SIGNATURE_VALUE, &signature);
        let name = self.name.child(&Component::new(types::PARAMETERS_DIGEST, digest(&SHA256, &tail).as_ref()));
        Ok(self.encode_with(&name, |out| out.extend_from_slice(&tail)))
    }

    fn encode_with(&self, name: &Name, tail: impl FnOnce(&mut Vec<u8>)) -> Bytes {
        let mut packet = Vec::with_capacity(name.encoded().len() + 64);
        put_nested(&mut packet, INTEREST, |out| {
            name.put(out);
            if self.can_be_prefix {
                put(out, CAN_BE_PREFIX, &[]);
            }
            if self.must_be_fresh {
                put(out, MUST_BE_FRESH, &[]);
            }
            if !self.forwarding_hint.is_empty() {
                put_nested(out, FORWARDING_HINT, |out| self.forwarding_hint.iter().for_each(|name| name.put(out)));
            }
            if let Some(nonce) = &self.nonce {
                put(out, NONCE, nonce);
            }
            if let Some(lifetime) = self.lifetime {
                put_integer(out, LIFETIME, u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX));
            }
            if let Some(limit) = self.hop_limit {
                put(out, HOP_LIMIT, &[limit]);
            }
            tail(out);
        });
        packet.into()
    }
}

/// The offset of a slice in the bytes that contain it.
fn offset_of(all: &Bytes, part: &Bytes) -> usize {
    (part.as_ptr() as usize).saturating_sub(all.as_ptr() as usize).min(all.len())
}

fn check_digest(name: &Name, tail: &[u8]) -> Result<()> {
    let mut digests = name.components().filter(|part| part.kind() == types::PARAMETERS_DIGEST);
    let (Some(written), None) = (digests.next(), digests.next()) else {
        return Err(NdnError::Invalid("name of an Interest with parameters: it needs one digest of them"));
    };
    if written.value() == digest(&SHA256, tail).as_ref() {
        Ok(())
    } else {
        Err(NdnError::Invalid("digest of the parameters"))
    }
}

/// A named, signed piece of content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Data {
    /// The name of the content.
    pub name: Name,
    /// The kind of its content: 0 is a blob, 1 a link, 2 a key, 3 a negative answer of the application.
    pub content_type: u64,
    /// The time after its arrival in which it is fresh; `None` means that it never is.
    pub freshness: Option<Duration>,
    /// The last component of the name of the last segment.
    pub final_block: Option<Component>,
    /// The bytes of the content.
    pub content: Bytes,
    /// The signature of the packet.
    pub signature: Signature,
    /// The whole packet.
    pub packet: Bytes,
}

/// The most components of a name after the prefix that asks for it: version, segment, and those of metadata.
pub(crate) const MAX_CONVENTION_COMPONENTS: usize = 4;
/// The content type of a certificate.
pub const CERTIFICATE: u64 = 2;
/// The content type of a negative answer of the application.
pub const APPLICATION_NACK: u64 = 3;

impl Data {
    /// Decodes a Data packet.
    ///
    /// # Errors
    /// The bytes are no Data packet.
    pub fn decode(packet: Bytes) -> Result<Self> {
        let element = Element::only(packet)?;
        if element.kind == DATA { Self::from_element(element) } else { Err(NdnError::Unexpected(element.kind)) }
    }

    fn from_element(element: Element) -> Result<Self> {
        let mut elements = Elements::new(element.value.clone(), DATA_ELEMENTS)?;
        let name = Name::decode(elements.take(NAME)?.ok_or(NdnError::Missing("name"))?.value)?;
        let (mut content_type, mut freshness, mut final_block) = (0, None, None);
        if let Some(meta) = elements.take(META_INFO)? {
            let mut meta = Elements::new(meta.value, META_ELEMENTS)?;
            if let Some(kind) = meta.take(CONTENT_TYPE)? {
                content_type = kind.integer()?;
            }
            if let Some(period) = meta.take(FRESHNESS_PERIOD)? {
                freshness = Some(Duration::from_millis(period.integer()?));
            }
            if let Some(last) = meta.take(FINAL_BLOCK_ID)? {
                final_block = Some(Component::from_element(&Element::only(last.value)?)?);
            }
            meta.finish()?;
        }
        let content = elements.take(CONTENT)?.map(|content| content.value).unwrap_or_default();
        let info = elements.take(SIGNATURE_INFO)?.ok_or(NdnError::Missing("signature info"))?;
        let value = elements.take(SIGNATURE_VALUE)?.ok_or(NdnError::Missing("signature"))?;
        elements.finish()?;
        let covered = vec![element.value.slice(..offset_of(&element.value, &value.whole))];
        let signature = Signature { info: SignatureInfo::decode(info.value)?, value: value.value, covered };
        Ok(Self { name, content_type, freshness, final_block, content, signature, packet: element.whole })
    }

    /// The SHA-256 digest of the packet: the value of its implicit digest component.
    pub fn digest(&self) -> [u8; 32] {
        let mut out = [0; 32];
        out.copy_from_slice(digest(&SHA256, &self.packet).as_ref());
        out
    }

    /// The names by which an Interest with a prefix may ask for this packet: those that only conventions follow, such as
    /// a version and a segment. Content of a longer name is other content. A refusal is for its own name alone.
    pub fn content_prefixes(&self) -> impl Iterator<Item = Name> + use<> {
        let most = if self.content_type == APPLICATION_NACK { 0 } else { MAX_CONVENTION_COMPONENTS };
        let shorter = |name: &Name| name.last().filter(|last| last.kind() != types::GENERIC).map(|_| name.parent());
        std::iter::successors(Some(self.name.clone()), shorter).take(most + 1)
    }

    /// Whether the packet answers an Interest, apart from its freshness.
    pub fn answers(&self, interest: &Interest) -> bool {
        let wanted = &interest.name;
        if wanted.last().is_some_and(|last| last.kind() == types::IMPLICIT_DIGEST) {
            let full = self.name.child(&Component::new(types::IMPLICIT_DIGEST, &self.digest()));
            return *wanted == full;
        }
        if interest.can_be_prefix { wanted.is_prefix_of(&self.name) } else { *wanted == self.name }
    }
}

/// The fields of a Data packet to be made.
#[derive(Clone, Debug, Default)]
pub struct DataBuilder {
    /// See [`Data::name`].
    pub name: Name,
    /// See [`Data::content_type`].
    pub content_type: u64,
    /// See [`Data::freshness`].
    pub freshness: Option<Duration>,
    /// See [`Data::final_block`].
    pub final_block: Option<Component>,
}

impl DataBuilder {
    /// Makes and signs the packet.
    ///
    /// # Errors
    /// The key cannot sign.
    pub fn sign(&self, content: &[u8], signer: &Signer) -> std::result::Result<Bytes, SignError> {
        let mut inner = Vec::with_capacity(content.len() + self.name.encoded().len() + 256);
        self.name.put(&mut inner);
        if self.content_type > 0 || self.freshness.is_some() || self.final_block.is_some() {
            put_nested(&mut inner, META_INFO, |out| {
                if self.content_type > 0 {
                    put_integer(out, CONTENT_TYPE, self.content_type);
                }
                if let Some(period) = self.freshness {
                    put_integer(out, FRESHNESS_PERIOD, u64::try_from(period.as_millis()).unwrap_or(u64::MAX));
                }
                if let Some(last) = &self.final_block {
                    put(out, FINAL_BLOCK_ID, last.encoded());
                }
            });
        }
        put(&mut inner, CONTENT, content);
        put_nested(&mut inner, SIGNATURE_INFO, |out| signer.info().put(out));
        let signature = signer.sign(&[&inner])?;
        put(&mut inner, SIGNATURE_VALUE, &signature);
        let mut packet = Vec::with_capacity(inner.len() + 4);
        put(&mut packet, DATA, &inner);
        Ok(packet.into())
    }
}

#[cfg(test)]
mod tests;

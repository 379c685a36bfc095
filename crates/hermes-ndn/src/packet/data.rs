//! Data packets (Packet Format 0.3, section "Data Packet").
//!
//! In: encoded Data, or the fields of a new one and a key. Out: a Data whose parts share its bytes. Decoding checks the
//! structure alone; [`Data::verify`] checks the signature.

use std::ops::Range;
use std::time::Duration;

use aws_lc_rs::digest::{self, SHA256};
use bytes::{Bytes, BytesMut};

use super::PacketError;
use crate::name::{Component, Name, NameError};
use crate::signature::{SignatureError, SignatureInfo, SigningKey, ValidityPeriod, VerifyingKey};
use crate::tlv::{self, DIGEST_LEN, Element, Reader, TlvError, types};

/// A ContentType number (Packet Format 0.3, section "ContentType").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ContentType(pub u64);

impl ContentType {
    /// BLOB: the payload of an application.
    pub const BLOB: Self = Self(0);
    /// LINK: a list of names, for forwarding hints.
    pub const LINK: Self = Self(1);
    /// KEY: a certificate.
    pub const KEY: Self = Self(2);
    /// NACK: an application-level negative response.
    pub const NACK: Self = Self(3);
    /// MANIFEST: a list of digests.
    pub const MANIFEST: Self = Self(4);
    /// PREFIX-ANN: a prefix announcement.
    pub const PREFIX_ANNOUNCEMENT: Self = Self(5);
}

/// A Data packet.
#[derive(Debug, Clone)]
pub struct Data {
    name: Name,
    meta: MetaInfo,
    content: Bytes,
    signature_info: SignatureInfo,
    signature_value: Bytes,
    wire: Bytes,
    signed: Range<usize>,
}

#[derive(Debug, Clone, Default)]
struct MetaInfo {
    content_type: ContentType,
    freshness_period: Option<Duration>,
    final_block_id: Option<Component>,
}

impl MetaInfo {
    fn decode(element: &Element<'_>) -> Result<Self, PacketError> {
        let mut meta = Self::default();
        let mut last = 0;
        let mut reader = element.reader();
        while let Some(inner) = reader.next()? {
            match inner.kind {
                // The order of the grammar is the order of the types.
                kind if kind <= last => tlv::ignore(kind)?,
                types::CONTENT_TYPE => meta.content_type = ContentType(inner.integer()?),
                types::FRESHNESS_PERIOD => meta.freshness_period = Some(Duration::from_millis(inner.integer()?)),
                types::FINAL_BLOCK_ID => meta.final_block_id = Some(Component::decode_only(&inner)?),
                kind => {
                    tlv::ignore(kind)?;
                    continue;
                }
            }
            last = inner.kind;
        }
        Ok(meta)
    }

    fn encode(&self, out: &mut BytesMut) {
        let element = tlv::wrap(types::META_INFO, |out| {
            if self.content_type != ContentType::BLOB {
                tlv::put_integer(out, types::CONTENT_TYPE, self.content_type.0);
            }
            if let Some(period) = self.freshness_period {
                tlv::put_integer(out, types::FRESHNESS_PERIOD, milliseconds(period));
            }
            if let Some(component) = &self.final_block_id {
                let mut value = BytesMut::new();
                component.encode(&mut value);
                tlv::put(out, types::FINAL_BLOCK_ID, &value);
            }
        });
        out.extend_from_slice(&element);
    }

    fn is_empty(&self) -> bool {
        self.content_type == ContentType::BLOB && self.freshness_period.is_none() && self.final_block_id.is_none()
    }
}

/// Whole milliseconds of a duration, at most 2^64 - 1.
pub(super) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Data {
    /// Decodes exactly one Data. Its parts share `wire`.
    ///
    /// # Errors
    /// [`PacketError`] if it is malformed, or followed by more bytes.
    pub fn decode(wire: Bytes) -> Result<Self, PacketError> {
        let packet = Reader::new(&wire).only(types::DATA)?;
        let mut reader = packet.reader();
        let name = match reader.next()? {
            Some(first) if first.kind == types::NAME => Name::from_value(first.value_bytes())?,
            Some(_) | None => return Err(TlvError::Missing(types::NAME).into()),
        };
        let (mut meta, mut content, mut info, mut value) = (None, None, None, None);
        while let Some(element) = reader.next()? {
            match element.kind {
                types::META_INFO if meta.is_none() && content.is_none() && info.is_none() => {
                    meta = Some(MetaInfo::decode(&element)?);
                }
                types::CONTENT if content.is_none() && info.is_none() => content = Some(element.value_bytes()),
                types::SIGNATURE_INFO if info.is_none() => info = Some(SignatureInfo::decode(&element)?),
                types::SIGNATURE_VALUE if info.is_some() && value.is_none() => value = Some(element),
                kind => tlv::ignore(kind)?,
            }
        }
        let signature_info = info.ok_or(TlvError::Missing(types::SIGNATURE_INFO))?;
        let value = value.ok_or(TlvError::Missing(types::SIGNATURE_VALUE))?;
        Ok(Self {
            name,
            meta: meta.unwrap_or_default(),
            content: content.unwrap_or_default(),
            signature_info,
            signature_value: value.value_bytes(),
            signed: packet.value_range().start..value.range().start,
            wire,
        })
    }

    /// The name.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// The ContentType; [`ContentType::BLOB`] if absent.
    pub fn content_type(&self) -> ContentType {
        self.meta.content_type
    }

    /// The FreshnessPeriod; `None` if absent, which means that the Data is never fresh.
    pub fn freshness_period(&self) -> Option<Duration> {
        self.meta.freshness_period
    }

    /// The component of FinalBlockId.
    pub fn final_block_id(&self) -> Option<&Component> {
        self.meta.final_block_id.as_ref()
    }

    /// The content; empty if absent.
    pub fn content(&self) -> &Bytes {
        &self.content
    }

    /// The SignatureInfo.
    pub fn signature_info(&self) -> &SignatureInfo {
        &self.signature_info
    }

    /// The SignatureValue.
    pub fn signature_value(&self) -> &Bytes {
        &self.signature_value
    }

    /// The encoded packet.
    pub fn wire(&self) -> &Bytes {
        &self.wire
    }

    /// The signed portion: all elements before SignatureValue.
    pub fn signed_portion(&self) -> &[u8] {
        self.wire.get(self.signed.clone()).unwrap_or_default()
    }

    /// The implicit digest: SHA-256 of the whole packet (section "Implicit Digest Component"). Each call hashes the
    /// packet.
    pub fn digest(&self) -> [u8; DIGEST_LEN] {
        sha256(&self.wire)
    }

    /// The full name: the name and the implicit digest.
    ///
    /// # Errors
    /// [`NameError`] if the name has no space left.
    pub fn full_name(&self) -> Result<Name, NameError> {
        self.name.push(&Component::implicit_digest(self.digest()))
    }

    /// Verifies the signature.
    ///
    /// # Errors
    /// [`SignatureError::Mismatch`] or [`SignatureError::Invalid`].
    pub fn verify(&self, key: &VerifyingKey) -> Result<(), SignatureError> {
        key.verify(self.signature_info.kind, self.signed_portion(), &self.signature_value)
    }

    /// A copy that does not keep a larger receive buffer in memory.
    ///
    /// # Errors
    /// The decoding cannot fail in practice, since these bytes have been decoded before.
    pub fn detached(&self) -> Result<Self, PacketError> {
        Self::decode(Bytes::copy_from_slice(&self.wire))
    }
}

impl PartialEq for Data {
    fn eq(&self, other: &Self) -> bool {
        self.wire == other.wire
    }
}

impl Eq for Data {}

/// The SHA-256 digest of `bytes`.
pub(super) fn sha256(bytes: &[u8]) -> [u8; DIGEST_LEN] {
    let mut out = [0; DIGEST_LEN];
    out.copy_from_slice(digest::digest(&SHA256, bytes).as_ref());
    out
}

/// The fields of a new Data.
#[derive(Debug, Clone)]
pub struct DataBuilder {
    name: Name,
    meta: MetaInfo,
    content: Option<Bytes>,
    validity: Option<ValidityPeriod>,
}

impl DataBuilder {
    /// A Data of this name, without content.
    pub fn new(name: Name) -> Self {
        Self { name, meta: MetaInfo::default(), content: None, validity: None }
    }

    /// Sets the ContentType.
    #[must_use]
    pub fn content_type(mut self, content_type: ContentType) -> Self {
        self.meta.content_type = content_type;
        self
    }

    /// Sets the FreshnessPeriod, in whole milliseconds.
    #[must_use]
    pub fn freshness_period(mut self, period: Duration) -> Self {
        self.meta.freshness_period = Some(period);
        self
    }

    /// Sets FinalBlockId.
    #[must_use]
    pub fn final_block_id(mut self, component: Component) -> Self {
        self.meta.final_block_id = Some(component);
        self
    }

    /// Sets the content.
    #[must_use]
    pub fn content(mut self, content: impl Into<Bytes>) -> Self {
        self.content = Some(content.into());
        self
    }

    /// Sets the ValidityPeriod of a certificate.
    #[must_use]
    pub fn validity(mut self, validity: ValidityPeriod) -> Self {
        self.validity = Some(validity);
        self
    }

    /// Encodes and signs the Data.
    ///
    /// # Errors
    /// [`PacketError::TooLong`], or [`PacketError::Key`] if the key fails to sign.
    pub fn sign(&self, key: &SigningKey) -> Result<Data, PacketError> {
        let mut value = BytesMut::with_capacity(512 + self.content.as_ref().map_or(0, Bytes::len));
        self.name.encode(&mut value);
        if !self.meta.is_empty() {
            self.meta.encode(&mut value);
        }
        if let Some(content) = &self.content {
            tlv::put(&mut value, types::CONTENT, content);
        }
        let info = SignatureInfo {
            key_locator: key.locator().cloned(),
            validity: self.validity,
            ..SignatureInfo::new(key.signature_type())
        };
        info.encode(types::SIGNATURE_INFO, &mut value);
        let signature = key.sign(&value)?;
        tlv::put(&mut value, types::SIGNATURE_VALUE, &signature);
        Data::decode(packet(types::DATA, &value)?)
    }
}

/// A whole packet with this value.
pub(super) fn packet(kind: u32, value: &[u8]) -> Result<Bytes, PacketError> {
    let length = tlv::element_len(kind, value.len());
    if length > tlv::MAX_PACKET {
        return Err(PacketError::TooLong(length));
    }
    let mut out = BytesMut::with_capacity(length);
    tlv::put(&mut out, kind, value);
    Ok(out.freeze())
}

//! NDN certificates (Certificate Format 2).
//!
//! In: a Data, or the parts of a new certificate. Out: identity, key name, public key and validity. Parsing checks the
//! structure alone. This module never decides whether an issuer is trusted; the caller walks the chain.

use std::time::Duration;

use bytes::Bytes;

use crate::name::{Component, Name, NameError};
use crate::packet::{ContentType, Data, DataBuilder, PacketError};
use crate::signature::{KeyError, KeyLocator, SignatureError, SigningKey, ValidityPeriod, VerifyingKey};

/// The component between the identity and the key identifier.
const KEY: &[u8] = b"KEY";

/// Components after the identity: `KEY`, key identifier, issuer identifier, version.
const SUFFIX: usize = 4;

/// The reason why a Data is not a usable certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// The name is not `/IDENTITY/KEY/KEYID/ISSUER/VERSION`.
    #[error("certificate name is not of the form /identity/KEY/key-id/issuer/version")]
    Name,
    /// The ContentType is not KEY.
    #[error("content type {0} is not KEY")]
    ContentType(u64),
    /// The certificate has no ValidityPeriod.
    #[error("certificate has no validity period")]
    NoValidity,
    /// The content is not a supported public key.
    #[error("public key of the certificate: {0}")]
    Key(#[from] KeyError),
    /// The current time is outside the ValidityPeriod.
    #[error("certificate is not valid at this time")]
    OutsideValidity,
    /// The signature is invalid.
    #[error(transparent)]
    Signature(#[from] SignatureError),
}

/// A certificate: a Data that binds a public key to a name.
#[derive(Debug, Clone)]
pub struct Certificate {
    data: Data,
    key_name: Name,
    validity: ValidityPeriod,
    key: VerifyingKey,
}

/// The parts of a new certificate.
#[derive(Debug, Clone)]
pub struct CertificateRequest {
    /// The name of the key, `/IDENTITY/KEY/KEYID`.
    pub key_name: Name,
    /// The public key as SubjectPublicKeyInfo.
    pub public_key: Bytes,
    /// The issuer identifier, such as `self`.
    pub issuer: Component,
    /// The version, by convention milliseconds since the Unix epoch.
    pub version: u64,
    /// The validity period.
    pub validity: ValidityPeriod,
    /// The FreshnessPeriod of the Data; an hour by convention.
    pub freshness_period: Duration,
}

impl Certificate {
    /// Parses a Data as a certificate.
    ///
    /// # Errors
    /// [`CertificateError`] if the name, the content type, the public key or the validity period is missing or invalid.
    pub fn parse(data: Data) -> Result<Self, CertificateError> {
        let identity = data.name().len().checked_sub(SUFFIX).ok_or(CertificateError::Name)?;
        if data.name().get(identity) != Some(Component::generic(KEY)) {
            return Err(CertificateError::Name);
        }
        if data.content_type() != ContentType::KEY {
            return Err(CertificateError::ContentType(data.content_type().0));
        }
        let validity = data.signature_info().validity.ok_or(CertificateError::NoValidity)?;
        let key = VerifyingKey::from_spki(data.content())?;
        Ok(Self { key_name: data.name().prefix(identity + 2), validity, key, data })
    }

    /// Issues a certificate, signed by the issuer's key.
    ///
    /// # Errors
    /// [`PacketError`] if the name is too long or the key fails to sign.
    pub fn issue(request: &CertificateRequest, issuer: &SigningKey) -> Result<Data, PacketError> {
        let name = request.key_name.push(&request.issuer)?.push(&Component::version(request.version))?;
        DataBuilder::new(name)
            .content_type(ContentType::KEY)
            .freshness_period(request.freshness_period)
            .content(request.public_key.clone())
            .validity(request.validity)
            .sign(issuer)
    }

    /// The Data.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// The name of the certificate.
    pub fn name(&self) -> &Name {
        self.data.name()
    }

    /// The name of the key, `/IDENTITY/KEY/KEYID`.
    pub fn key_name(&self) -> &Name {
        &self.key_name
    }

    /// The identity to which the certificate binds the key.
    pub fn identity(&self) -> Name {
        self.key_name.prefix(self.key_name.len().saturating_sub(2))
    }

    /// The validity period.
    pub fn validity(&self) -> ValidityPeriod {
        self.validity
    }

    /// The public key.
    pub fn key(&self) -> &VerifyingKey {
        &self.key
    }

    /// The KeyLocator of the issuer.
    pub fn issuer(&self) -> Option<&KeyLocator> {
        self.data.signature_info().key_locator.as_ref()
    }

    /// Whether the KeyLocator names the certificate's own key.
    pub fn is_self_signed(&self) -> bool {
        matches!(self.issuer(), Some(KeyLocator::Name(name)) if self.key_name.is_prefix_of(name))
    }

    /// Checks the validity period and the issuer's signature.
    ///
    /// # Errors
    /// [`CertificateError::OutsideValidity`] or [`CertificateError::Signature`].
    pub fn check(&self, issuer: &VerifyingKey, unix_seconds: u64) -> Result<(), CertificateError> {
        if !self.validity.contains(unix_seconds) {
            return Err(CertificateError::OutsideValidity);
        }
        Ok(self.data.verify(issuer)?)
    }
}

/// The name of a key: `/IDENTITY/KEY/KEYID`.
///
/// # Errors
/// [`NameError`] if the identity has no space left.
pub fn key_name(identity: &Name, key_id: &Component) -> Result<Name, NameError> {
    identity.push(&Component::generic(KEY))?.push(key_id)
}

#[cfg(test)]
mod tests;

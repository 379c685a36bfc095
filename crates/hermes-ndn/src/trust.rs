//! Decides whose packets may be used: by anchors, and by certificates that lead to an anchor.
//!
//! In: packets, certificates, and the time. Out: a verdict for each packet. An anchor is a key with the prefix of the
//! names that it may sign. A certificate (NDN certificate format 2) lets its key sign names under its identity, within
//! its validity period. Never: I/O, a clock, or a key that signs names outside its identity.

use std::collections::HashMap;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;

use crate::name::{Component, Name, types};
use crate::packet::{CERTIFICATE, Data};
use crate::signature::{KeyLocator, SignatureInfo, VerifyingKey, digest_matches};

/// The component between the identity and the rest of a key's name.
const KEY: &[u8] = b"KEY";
/// The components of a certificate's name after the identity: `KEY`, the key, the issuer and the version.
const CERTIFICATE_SUFFIX: usize = 4;
/// Certificates that are remembered. Beyond, all are forgotten and requested again.
const MAX_CERTIFICATES: usize = 1024;

/// The reason why a packet may not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Distrust {
    /// No anchor may sign the name, or its signature is wrong.
    #[error(
        "{0} has no valid signature of an anchor for its name, nor of a certificate that leads to one; \
         see `anchors` of the route"
    )]
    NoAnchor(Name),
    /// The certificate of the key does not allow this name, or the signature is wrong.
    #[error("{0} has no valid signature of the key of certificate {1}")]
    Signature(Name, Name),
    /// The certificate is not valid at this time.
    #[error("certificate {0} is not valid now: its period is {1} to {2} (UTC)")]
    OutsideValidity(Name, String, String),
    /// The packet that was requested as a certificate has another form.
    #[error("{0} is no certificate: {1}")]
    NoCertificate(Name, &'static str),
    /// Nobody sent the certificate.
    #[error("certificate {0}, which would lead to an anchor, did not arrive")]
    Missing(Name),
    /// The certificate leads to others without an end.
    #[error("certificate {0} is too far from an anchor: more than {1} certificates lead to it")]
    ChainTooLong(Name, usize),
}

/// The result of a judgement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The packet may be used.
    Trusted,
    /// The packet may not be used.
    Untrusted(Distrust),
    /// The certificate with this name, or with a name that begins with it, decides.
    NeedsCertificate(Name),
}

struct Certificate {
    name: Name,
    identity: Name,
    key: VerifyingKey,
    validity: (Bytes, Bytes),
}

/// The anchors of a route, and the certificates that they vouch for.
#[derive(Default)]
pub struct TrustSchema {
    anchors: Vec<(Name, VerifyingKey)>,
    accept_digest: bool,
    /// By the name of the key, `/IDENTITY/KEY/ID`.
    certificates: HashMap<Name, Certificate>,
    /// The names that anchors have in packets that they have signed, each with the index of its anchor. A packet of
    /// that key with a wrong signature needs no certificate to be refused.
    anchored: HashMap<Name, usize>,
}

impl TrustSchema {
    /// Trusts each key for names under its prefix. `accept_digest` also accepts packets with a digest, which anybody can
    /// make.
    pub fn new(anchors: Vec<(Name, VerifyingKey)>, accept_digest: bool) -> Self {
        Self { anchors, accept_digest, ..Self::default() }
    }

    /// Judges a packet. `now` is the time since 1970.
    pub fn judge(&mut self, data: &Data, now: Duration) -> Verdict {
        if self.accept_digest && digest_matches(&data.signature) {
            return Verdict::Trusted;
        }
        let locator = data.signature.info.key_name();
        // A certificate that has expired may have a successor.
        if let Some(certificate) = self.valid_certificate(locator.as_ref(), now) {
            return certificate.judge(data);
        }
        let distrust = || Verdict::Untrusted(Distrust::NoAnchor(data.name.clone()));
        let signs =
            |(prefix, key): &(Name, VerifyingKey)| prefix.is_prefix_of(&data.name) && key.verifies(&data.signature);
        if let Some(anchor) = locator.as_ref().and_then(|key| self.anchors.get(*self.anchored.get(key)?)) {
            // Another anchor may be the same key, with another prefix.
            let is_signed = signs(anchor) || self.anchors.iter().any(signs);
            return if is_signed { Verdict::Trusted } else { distrust() };
        }
        // A key of another identity, or one under no anchor, has no certificate that would help.
        let key = locator.filter(|key| {
            let is_under = |(prefix, _): &(Name, _)| prefix.is_prefix_of(&identity(key));
            identity(key).is_prefix_of(&data.name) && self.anchors.iter().any(is_under)
        });
        if let Some(anchor) = self.anchors.iter().position(signs) {
            if let Some(key) = key.filter(|key| self.anchors[anchor].0.is_prefix_of(&identity(key))) {
                if self.anchored.len() >= MAX_CERTIFICATES {
                    self.anchored.clear();
                }
                self.anchored.insert(key, anchor);
            }
            return Verdict::Trusted;
        }
        match key {
            // A certificate cannot vouch for itself.
            Some(key) if !key.is_prefix_of(&data.name) => Verdict::NeedsCertificate(key),
            _ => distrust(),
        }
    }

    /// Remembers a certificate if it may be used, so that packets of its key may be, too.
    pub fn take_certificate(&mut self, data: &Data, now: Duration) -> Verdict {
        let mut certificate = match Certificate::read(data) {
            Ok(certificate) => certificate,
            Err(reason) => return Verdict::Untrusted(Distrust::NoCertificate(data.name.clone(), reason)),
        };
        if let Some(distrust) = certificate.outside_validity(now) {
            return Verdict::Untrusted(distrust);
        }
        let verdict = self.judge(data, now);
        if verdict == Verdict::Trusted {
            // It counts no longer than the one that vouches for it.
            if let Some(issuer) = self.valid_certificate(data.signature.info.key_name().as_ref(), now) {
                certificate.validity.1 = certificate.validity.1.min(issuer.validity.1.clone());
            }
            if self.certificates.len() >= MAX_CERTIFICATES {
                self.certificates.clear();
            }
            let key = certificate.name.prefix(certificate.name.len() - (CERTIFICATE_SUFFIX - 2));
            self.certificates.insert(key, certificate);
        }
        verdict
    }

    /// The time for which the signature of a trusted packet still counts. `None`: it has no end.
    pub fn valid_for(&self, data: &Data, now: Duration) -> Option<Duration> {
        let certificate = self.valid_certificate(data.signature.info.key_name().as_ref(), now)?;
        // The last second belongs to the period.
        Some((instant(&certificate.validity.1)? + Duration::from_secs(1)).saturating_sub(now))
    }

    fn valid_certificate(&self, key: Option<&Name>, now: Duration) -> Option<&Certificate> {
        let certificate = self.certificates.get(key?)?;
        certificate.outside_validity(now).is_none().then_some(certificate)
    }
}

impl SignatureInfo {
    /// The name of the key, `/IDENTITY/KEY/ID`, in a locator with the name of the key or of its certificate.
    fn key_name(&self) -> Option<Name> {
        let Some(KeyLocator::Name(locator)) = &self.key else { return None };
        let key = Component::new(types::GENERIC, KEY);
        let parts: Vec<Component> = locator.components().collect();
        let position = parts.iter().rposition(|part| *part == key)?;
        (parts.len() >= position + 2).then(|| locator.prefix(position + 2))
    }
}

impl Certificate {
    fn read(data: &Data) -> Result<Self, &'static str> {
        if data.content_type != CERTIFICATE {
            return Err("its content type is not KEY");
        }
        let Some(identity) = data.name.len().checked_sub(CERTIFICATE_SUFFIX) else {
            return Err("its name is too short");
        };
        if data.name.components().nth(identity) != Some(Component::new(types::GENERIC, KEY)) {
            return Err("its name is not /IDENTITY/KEY/ID/ISSUER/VERSION");
        }
        let Some(validity) = data.signature.info.validity.clone() else { return Err("it has no validity period") };
        Ok(Self {
            name: data.name.clone(),
            identity: data.name.prefix(identity),
            key: VerifyingKey::Public(data.content.clone()),
            validity,
        })
    }

    fn judge(&self, data: &Data) -> Verdict {
        if self.identity.is_prefix_of(&data.name) && self.key.verifies(&data.signature) {
            Verdict::Trusted
        } else {
            Verdict::Untrusted(Distrust::Signature(data.name.clone(), self.name.clone()))
        }
    }

    fn outside_validity(&self, now: Duration) -> Option<Distrust> {
        let now = timestamp(now);
        let (begin, end) = &self.validity;
        // Timestamps of equal length compare like the times that they name.
        let is_valid = begin.len() == now.len() && end.len() == now.len() && **begin <= *now && *now <= **end;
        let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
        (!is_valid).then(|| Distrust::OutsideValidity(self.name.clone(), text(begin), text(end)))
    }
}

/// The identity of a key, `/IDENTITY` of `/IDENTITY/KEY/ID`.
fn identity(key: &Name) -> Name {
    key.prefix(key.len().saturating_sub(2))
}

/// The time since 1970 of a timestamp.
fn instant(timestamp: &[u8]) -> Option<Duration> {
    let text = std::str::from_utf8(timestamp).ok().filter(|text| text.len() == 15 && text.is_ascii())?;
    let (date, time) = (text.get(..8)?, text.get(9..)?);
    let parts = [date.get(..4)?, date.get(4..6)?, date.get(6..)?, time.get(..2)?, time.get(2..4)?, time.get(4..)?];
    let [year, month, day, hour, minute, second] = parts;
    let written = format!("{year}-{month}-{day}T{hour}:{minute}:{second}Z");
    humantime::parse_rfc3339(&written).ok()?.duration_since(UNIX_EPOCH).ok()
}

/// The time as certificates write it: `YYYYMMDDThhmmss`.
fn timestamp(now: Duration) -> Vec<u8> {
    // The library panics beyond the year 9999.
    let now = now.min(Duration::from_secs(253_402_300_799));
    let text = humantime::format_rfc3339_seconds(UNIX_EPOCH + now).to_string();
    text.bytes().filter(|byte| !matches!(byte, b'-' | b':' | b'Z')).collect()
}

#[cfg(test)]
pub(crate) mod tests;

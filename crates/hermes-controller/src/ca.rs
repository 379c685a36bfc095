//! The overlay's certificate authority: it certifies nodes, operators and controllers.
//!
//! In: certificate signing requests, each signed with its own key. Out: certificates whose names come from the overlay,
//! not from the request.
//! Never: another party's private key. Each party generates and keeps its own.

mod chain;
mod seal;

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use hermes_model::snapshot::Role;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertificateSigningRequestParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, PublicKeyData, RevokedCertParams,
    SanType, SerialNumber,
};
use serde::{Deserialize, Serialize};

#[cfg(test)]
pub(crate) use self::chain::blocks;
pub use self::chain::{CertificateInfo, facts};
pub use self::seal::{Seal, SealError};
use crate::digest::{from_hex, hex, key_digest, sha256};
use crate::document::Name;

/// The lifetime of a node's certificate, unless the overlay sets another.
pub const CERTIFICATE_LIFE: Duration = Duration::from_secs(24 * 3600);
/// The maximum lifetime of an operator's certificate.
pub const OPERATOR_LIFE: Duration = Duration::from_secs(365 * 24 * 3600);
/// The lifetime of a generated CA certificate.
const CA_LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// The path length constraint of a generated CA (RFC 5280, section 4.2.1.9). This many CAs may succeed one another
/// while a node is offline.
const MAX_PATH_LENGTH: u8 = 4;
/// The tolerated clock difference: certificates are valid from this long before they are issued.
const CLOCK_SKEW: Duration = Duration::from_secs(300);

/// A CA of the overlay.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Ca {
    /// The certificate (PEM).
    pub certificate: String,
    /// The certificates of its issuers (PEM), up to the root, which nodes trust. Empty if the certificate is the root.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub chain: String,
    /// The private key: PKCS #8 (PEM), or sealed ([`Seal`]).
    pub key: String,
}

/// Leaves the private key out of logs.
impl std::fmt::Debug for Ca {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ca").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

/// The reason why a certificate is not issued.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// The request is not a PKCS #10 request, or is not signed with its own key.
    #[error("invalid certificate request (expected PKCS #10, DER, signed with its own key): {0}")]
    Request(String),
    /// The CA's own certificate or key is unusable.
    #[error("the CA cannot sign: {0}")]
    Ca(String),
    /// The imported CA is unusable.
    #[error("{0}")]
    Import(String),
}

/// The subject of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject<'a> {
    /// A node of an overlay.
    Node {
        /// The trust domain.
        overlay: &'a Name,
        /// The node's name.
        node: &'a Name,
        /// The node's role: a standalone node may forward the user claims of other nodes.
        role: Role,
    },
    /// A controller, at these host names and addresses.
    Controller {
        /// Host names and addresses, for clients that verify names only.
        hosts: &'a [String],
    },
    /// An operator of all documents, or an administrator of one provider.
    Operator {
        /// The provider whose documents the subject may change; `None` if the subject may change all documents.
        provider: Option<&'a Name>,
        /// The subject's name in the audit log.
        name: &'a Name,
    },
}

/// The role that a certificate's URI gives to a controller or an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CertificateRole {
    /// A controller.
    Controller,
    /// An operator, or an administrator of a provider.
    Operator {
        /// The provider whose documents the subject may change; `None` if the subject may change all documents.
        provider: Option<Name>,
        /// The subject's name.
        name: Name,
    },
}

/// The scheme of the URIs of controllers and operators. Nodes have `spiffe://` and a trust domain, which may not exist
/// yet when a controller starts.
const SCHEME: &str = "hermes:";

impl CertificateRole {
    /// Reads the role from the URIs of a verified certificate.
    pub fn of<'u>(uris: impl IntoIterator<Item = &'u str>) -> Option<Self> {
        uris.into_iter().find_map(|uri| {
            let parts: Vec<_> = uri.strip_prefix(SCHEME)?.split('/').collect();
            match parts[..] {
                ["controller"] => Some(CertificateRole::Controller),
                ["operator", name] => Some(CertificateRole::Operator { provider: None, name: name.parse().ok()? }),
                ["provider", provider, name] => {
                    Some(CertificateRole::Operator { provider: Some(provider.parse().ok()?), name: name.parse().ok()? })
                }
                _ => None,
            }
        })
    }
}

/// A CA that is ready to sign.
pub struct Signer {
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    /// Generates a CA with a new key.
    ///
    /// # Errors
    /// The system has no randomness.
    pub fn generate(now: SystemTime) -> Result<Self, IssueError> {
        let key = KeyPair::generate().map_err(sign_error)?;
        let mut params = CertificateParams::default();
        // The CA signs no other CA, except for the cross-certificate of its successor (`proof_of`).
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(MAX_PATH_LENGTH));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        // The names of CAs that follow each other must differ: certificates name their issuer.
        let mark = hex(&sha256(key.public_key_raw())[..4]);
        params.distinguished_name.push(DnType::CommonName, format!("Hermes overlay CA {mark}"));
        (params.not_before, params.not_after) = ((now - CLOCK_SKEW).into(), (now + CA_LIFE).into());
        let certificate = params.self_signed(&key).map_err(sign_error)?;
        Ok(Self { certificate: certificate.pem(), chain: String::new(), key: key.serialize_pem() })
    }

    /// Prepares the CA to sign.
    ///
    /// # Errors
    /// The certificate or the key is invalid.
    pub fn signer(&self) -> Result<Signer, IssueError> {
        let key = KeyPair::from_pem(&self.key).map_err(sign_error)?;
        Ok(Signer { issuer: Issuer::from_ca_cert_pem(&self.certificate, key).map_err(sign_error)? })
    }
}

impl Signer {
    /// Issues a certificate (PEM) for the key of a request, valid from now for `life`. Also returns the digest of the
    /// key.
    ///
    /// # Errors
    /// The request is invalid.
    pub fn sign(
        &self,
        request: &[u8],
        subject: &Subject<'_>,
        now: SystemTime,
        life: Duration,
    ) -> Result<(String, String), IssueError> {
        let asked = CertificateSigningRequestParams::from_der(&request.into());
        let key = asked.map_err(|error| IssueError::Request(error.to_string()))?.public_key;
        let digest = key_digest(&key.subject_public_key_info());
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match subject {
            Subject::Node { .. } => vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
            Subject::Controller { .. } => vec![ExtendedKeyUsagePurpose::ServerAuth],
            Subject::Operator { .. } => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        params.distinguished_name.push(DnType::CommonName, subject.common_name());
        params.subject_alt_names = subject.names().map_err(sign_error)?;
        // A node reports this identifier to the controller, which thus knows the issuer of the node's certificate.
        params.use_authority_key_identifier_extension = true;
        // A revocation list names all certificates of a key by one serial number.
        params.serial_number = Some(serial(&digest));
        (params.not_before, params.not_after) = ((now - CLOCK_SKEW.min(life / 10)).into(), (now + life).into());
        let certificate = params.signed_by(&key, &self.issuer).map_err(sign_error)?;
        Ok((certificate.pem(), digest))
    }

    /// Issues a revocation list (PEM; RFC 5280, section 5) for the keys with these digests
    /// ([`crate::digest::key_digest`]). Only Envoys need lists, because they cannot reject certificates by key. The
    /// caller must send a new list after each revocation, because `nextUpdate` is years away.
    ///
    /// # Errors
    /// The CA may not sign lists.
    pub fn revoke<'k>(&self, keys: impl Iterator<Item = &'k str>, now: SystemTime) -> Result<String, IssueError> {
        let this_update = (now - CLOCK_SKEW).into();
        let one = |key| RevokedCertParams {
            serial_number: serial(key),
            revocation_time: this_update,
            reason_code: None,
            invalidity_date: None,
        };
        let second = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let list = CertificateRevocationListParams {
            this_update,
            next_update: (now + CA_LIFE).into(),
            crl_number: second.into(),
            issuing_distribution_point: None,
            revoked_certs: keys.map(one).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).and_then(|list| list.pem()).map_err(sign_error)
    }
}

impl Subject<'_> {
    fn common_name(&self) -> String {
        match self {
            Subject::Node { node, .. } => node.to_string(),
            Subject::Controller { .. } => "controller".to_owned(),
            Subject::Operator { name, .. } => name.to_string(),
        }
    }

    fn names(&self) -> Result<Vec<SanType>, rcgen::Error> {
        let uri = |text: String| Ok(SanType::URI(Ia5String::try_from(text)?));
        match self {
            Subject::Node { overlay, node, role } => {
                let domain = format!("spiffe://{overlay}");
                let role = (*role == Role::Standalone).then(|| format!("{domain}/role/standalone"));
                std::iter::once(format!("{domain}/node/{node}")).chain(role).map(uri).collect()
            }
            Subject::Controller { hosts } => {
                let host = |host: &String| match host.parse::<IpAddr>() {
                    Ok(address) => Ok(SanType::IpAddress(address)),
                    Err(_) => Ok(SanType::DnsName(Ia5String::try_from(host.as_str())?)),
                };
                std::iter::once(uri(format!("{SCHEME}controller"))).chain(hosts.iter().map(host)).collect()
            }
            Subject::Operator { provider: None, name } => Ok(vec![uri(format!("{SCHEME}operator/{name}"))?]),
            Subject::Operator { provider: Some(provider), name } => {
                Ok(vec![uri(format!("{SCHEME}provider/{provider}/{name}"))?])
            }
        }
    }
}

/// Returns the serial number of all certificates for a key. A key never has valid certificates for two subjects at a
/// time. The number has 20 bytes and is not negative (RFC 5280, section 4.1.2.2).
fn serial(digest: &str) -> SerialNumber {
    let mut bytes = from_hex(digest);
    bytes.truncate(20);
    bytes.iter_mut().take(1).for_each(|first| *first &= 0x7f);
    bytes.into()
}

fn sign_error(error: rcgen::Error) -> IssueError {
    IssueError::Ca(error.to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::{Duration, SystemTime};

    use hermes_model::snapshot::Role;
    use rcgen::{CertificateParams, KeyPair, SanType};

    use super::{Ca, CertificateRole, Subject};

    fn uris(pem: &str) -> Vec<String> {
        let (_, pem) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap();
        hermes_net::tls::uris(&pem.contents.into())
    }

    #[test]
    fn a_certificate_says_what_the_overlay_knows_and_not_what_was_asked() {
        let (now, life) = (SystemTime::now(), Duration::from_secs(60));
        let signer = Ca::generate(now).unwrap().signer().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut wish = CertificateParams::default();
        wish.subject_alt_names = vec![SanType::URI("spiffe://x/node/other".try_into().unwrap())];
        let request = wish.serialize_request(&key).unwrap();
        let (overlay, node) = ("x".parse().unwrap(), "a".parse().unwrap());
        let subject = Subject::Node { overlay: &overlay, node: &node, role: Role::Standalone };
        let (pem, digest) = signer.sign(request.der(), &subject, now, life).unwrap();
        assert_eq!(uris(&pem), ["spiffe://x/node/a", "spiffe://x/role/standalone"]);
        let (again, same) = signer.sign(request.der(), &subject, now, life).unwrap();
        assert!(again != pem && same == digest, "another certificate for the same key");
        let operator = Subject::Operator { provider: Some(&overlay), name: &node };
        let (pem, _) = signer.sign(request.der(), &operator, now, life).unwrap();
        let office = CertificateRole::of(uris(&pem).iter().map(String::as_str));
        assert_eq!(office, Some(CertificateRole::Operator { provider: Some(overlay.clone()), name: node.clone() }));
        assert_eq!(CertificateRole::of(["spiffe://x/node/a", "hermes:operator/a/b", "hermes:controller/x"]), None);
    }

    #[test]
    fn a_request_that_its_key_has_not_signed_is_refused() {
        let now = SystemTime::now();
        let signer = Ca::generate(now).unwrap().signer().unwrap();
        let request = CertificateParams::default().serialize_request(&KeyPair::generate().unwrap()).unwrap();
        let mut forged = request.der().to_vec();
        let last = forged.len() - 1;
        forged[last] ^= 1;
        let subject = Subject::Controller { hosts: &[] };
        for wrong in [&forged[..], &forged[..20], b""] {
            assert!(signer.sign(wrong, &subject, now, Duration::from_secs(60)).is_err());
        }
    }
}

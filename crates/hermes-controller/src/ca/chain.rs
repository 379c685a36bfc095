//! Certificates of CAs: their contents, imported CAs, and cross-certificates.
//!
//! In: PEM. Out: CAs whose certificates nodes accept, or the reason why nodes would reject them.
//! Never: an untested CA. A CA whose certificates nodes would reject is refused at once.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD as BASE64;
use hermes_model::snapshot::Role;
use hermes_net::tls::{CertificateDer, Roots, chains_to, serves};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, DnValue, IsCa, KeyIdMethod, KeyPair,
    KeyUsagePurpose, SubjectPublicKeyInfo,
};
use x509_parser::asn1_rs::Tag;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::ParsedExtension;
use x509_parser::pem::Pem;
use x509_parser::x509::X509Name;

use super::{Ca, IssueError, Subject, sign_error};
use crate::digest::{hex, sha256};

/// The maximum number of certificates in a chain, as in webpki.
const MAX_CHAIN: usize = 5;
/// The lifetime of a certificate that only tests a CA.
const TRIAL_LIFE: Duration = Duration::from_secs(60);

/// The fields of a certificate that the controller and the command line use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateInfo {
    /// SHA-256 of the certificate (DER), in hex.
    pub fingerprint: String,
    /// The subject's distinguished name, for display.
    pub subject: String,
    /// The subject key identifier, in hex. Certificates that this CA issues contain it.
    pub key: String,
    /// The start of validity, in seconds since 1970.
    pub from: i64,
    /// The end of validity, in seconds since 1970.
    pub until: i64,
}

impl CertificateInfo {
    pub(crate) fn of(der: &[u8]) -> Result<Self, String> {
        let parsed = parsed(der)?;
        Ok(Self {
            fingerprint: hex(&sha256(der)),
            subject: parsed.subject().to_string(),
            key: subject_key(&parsed).map(hex).unwrap_or_default(),
            from: parsed.validity().not_before.timestamp(),
            until: parsed.validity().not_after.timestamp(),
        })
    }
}

/// Reads the first certificate of a PEM text.
///
/// # Errors
/// The text has no valid certificate.
pub fn facts(pem: &str) -> Result<CertificateInfo, String> {
    CertificateInfo::of(blocks(pem)?.first().ok_or("no certificate found")?)
}

/// All certificates of a PEM text (DER).
pub(crate) fn blocks(pem: &str) -> Result<Vec<Vec<u8>>, String> {
    let read = Pem::iter_from_buffer(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
    let read = read.map_err(|error| format!("invalid PEM: {error}"))?;
    Ok(read.into_iter().filter(|block| block.label == "CERTIFICATE").map(|block| block.contents).collect())
}

fn parsed(der: &[u8]) -> Result<X509Certificate<'_>, String> {
    let parsed = x509_parser::parse_x509_certificate(der);
    parsed.map(|(_, parsed)| parsed).map_err(|error| format!("invalid certificate: {error}"))
}

fn subject_key<'a>(parsed: &'a X509Certificate<'_>) -> Option<&'a [u8]> {
    parsed.extensions().iter().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(key) => Some(key.0),
        _ => None,
    })
}

/// A certificate as PEM.
fn pem(der: &[u8]) -> String {
    let text = BASE64.encode(der);
    // A line has 64 characters (RFC 7468, section 2); base64 is ASCII, so no character is cut.
    let lines: Vec<String> =
        text.as_bytes().chunks(64).map(|line| String::from_utf8_lossy(line).into_owned()).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

impl Ca {
    /// Imports a CA from PEM: its certificate, then those of its issuers up to the root, and the private key of the
    /// first.
    ///
    /// # Errors
    /// Nodes would reject what the CA signs; the error says why.
    pub fn import(certificates: &str, key: &str, now: SystemTime) -> Result<Self, IssueError> {
        let refuse = |why: String| IssueError::Import(why);
        let ders = blocks(certificates).map_err(|why| refuse(format!("the certificates: {why}")))?;
        if ders.is_empty() || ders.len() > MAX_CHAIN {
            return Err(refuse(format!(
                "found {} certificates; expected the CA's first, then those above it up to the root, at most \
                 {MAX_CHAIN}",
                ders.len()
            )));
        }
        let chain = ders.iter().map(|der| parsed(der)).collect::<Result<Vec<_>, _>>().map_err(refuse)?;
        for certificate in &chain {
            must_be_authority(certificate, now).map_err(refuse)?;
        }
        must_be_chain(&chain).map_err(refuse)?;
        let pair = KeyPair::from_pem(key).map_err(|error| {
            refuse(format!("invalid key ({error}); expected PEM without a password: `openssl pkcs8 -topk8 -nocrypt`"))
        })?;
        if pair.public_key_raw() != &*chain[0].public_key().subject_public_key.data {
            return Err(refuse(format!("the key does not match the first certificate, {}", chain[0].subject())));
        }
        must_have_name(chain[0].subject()).map_err(refuse)?;
        if subject_key(&chain[0]).is_none() {
            return Err(refuse(format!("{} has no subject key identifier (RFC 5280, 4.2.1.2)", chain[0].subject())));
        }
        let above = ders[1..].iter().map(|der| pem(der)).collect();
        let this = Self { certificate: pem(&ders[0]), chain: above, key: pair.serialize_pem() };
        this.try_it(now)?;
        Ok(this)
    }

    /// Issues test certificates and verifies them as a node does.
    fn try_it(&self, now: SystemTime) -> Result<(), IssueError> {
        let refuse = |why: String| IssueError::Import(format!("nodes would reject certificates of this CA: {why}"));
        let name = |name: &str| name.parse().map_err(IssueError::Import);
        let (overlay, node, host) = (name("overlay")?, name("node")?, "localhost".to_owned());
        let roots = Roots::from_pem(self.root().as_bytes()).map_err(|error| refuse(error.to_string()))?;
        let node = Subject::Node { overlay: &overlay, node: &node, role: Role::Dependent };
        chains_to(&roots, &self.shown(&node, &self.intermediates(), now)?).map_err(refuse)?;
        // A controller's certificate must also verify as a server certificate for a host name.
        let controller = Subject::Controller { hosts: std::slice::from_ref(&host) };
        serves(&roots, &self.shown(&controller, &self.intermediates(), now)?, &host).map_err(refuse)
    }

    /// Issues a test certificate, and returns it with the chain that is sent with it.
    fn shown(
        &self,
        subject: &Subject<'_>,
        above: &str,
        now: SystemTime,
    ) -> Result<Vec<CertificateDer<'static>>, IssueError> {
        let request = CertificateParams::default().serialize_request(&KeyPair::generate().map_err(sign_error)?);
        let (leaf, _) = self.signer()?.sign(request.map_err(sign_error)?.der(), subject, now, TRIAL_LIFE)?;
        let shown = blocks(&(leaf + above)).map_err(IssueError::Import)?;
        Ok(shown.into_iter().map(Into::into).collect())
    }

    /// Checks that a peer that trusts only the older CA accepts this CA's certificates with this cross-certificate.
    ///
    /// # Errors
    /// The peer would reject them, for example because of the path length of the older CA.
    pub fn is_believed_by(&self, proof: &str, older: &Self, now: SystemTime) -> Result<(), IssueError> {
        let refuse = |why: String| IssueError::Ca(why);
        let (overlay, node) = ("overlay".parse().map_err(refuse)?, "node".parse().map_err(refuse)?);
        let roots = Roots::from_pem(older.root().as_bytes()).map_err(|error| refuse(error.to_string()))?;
        let subject = Subject::Node { overlay: &overlay, node: &node, role: Role::Dependent };
        let above = proof.to_owned() + &older.intermediates();
        chains_to(&roots, &self.shown(&subject, &above, now)?).map_err(refuse)
    }

    /// The root certificate, which nodes trust (PEM).
    pub fn root(&self) -> String {
        let last = blocks(&self.chain).ok().and_then(|all| all.last().map(|der| pem(der)));
        last.unwrap_or_else(|| self.certificate.clone())
    }

    /// Returns the chain sent with each certificate that the CA issues (PEM): the CA and its issuers, without the root.
    pub fn intermediates(&self) -> String {
        let Ok(above) = blocks(&self.chain) else { return String::new() };
        match above.split_last() {
            None => String::new(),
            Some((_, between)) => self.certificate.clone() + &between.iter().map(|der| pem(der)).collect::<String>(),
        }
    }

    /// Issues a cross-certificate for another CA (PEM): a peer that trusts only this CA then accepts the other CA's
    /// certificates.
    ///
    /// # Errors
    /// This CA cannot sign, or the other certificate is invalid.
    pub fn proof_of(&self, other: &Self, now: SystemTime) -> Result<String, IssueError> {
        let refuse = |why: String| IssueError::Ca(why);
        let ders = blocks(&other.certificate).map_err(refuse)?;
        let der = ders.first().ok_or_else(|| refuse("no certificate".to_owned()))?;
        let other = parsed(der).map_err(refuse)?;
        let mut params = CertificateParams::default();
        // The other CA's own root limits the path length.
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name = name_of(other.subject()).map_err(refuse)?;
        let key = subject_key(&other).ok_or_else(|| refuse("no subject key identifier".to_owned()))?;
        params.key_identifier_method = KeyIdMethod::PreSpecified(key.to_vec());
        params.use_authority_key_identifier_extension = true;
        let end = other.validity().not_after.timestamp();
        let end = UNIX_EPOCH + Duration::from_secs(u64::try_from(end).unwrap_or_default());
        (params.not_before, params.not_after) = ((now - super::CLOCK_SKEW).into(), end.into());
        let public = SubjectPublicKeyInfo::from_der(other.public_key().raw).map_err(sign_error)?;
        let proof = params.signed_by(&public, &self.signer()?.issuer).map_err(sign_error)?;
        Ok(proof.pem())
    }
}

/// Checks that the certificate is a CA that is valid now.
fn must_be_authority(certificate: &X509Certificate<'_>, now: SystemTime) -> Result<(), String> {
    let subject = certificate.subject();
    let is_ca = certificate.basic_constraints().ok().flatten().is_some_and(|constraints| constraints.value.ca);
    if !is_ca {
        return Err(format!("{subject} is not a CA certificate (no CA in its basic constraints)"));
    }
    let may_sign = certificate.key_usage().ok().flatten().is_none_or(|usage| usage.value.key_cert_sign());
    if !may_sign {
        return Err(format!("{subject} may not sign certificates (no keyCertSign in its key usage)"));
    }
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX));
    let validity = certificate.validity();
    if validity.not_after.timestamp() <= seconds {
        return Err(format!("{subject} has expired: it was valid until {}", validity.not_after));
    }
    if validity.not_before.timestamp() > seconds {
        return Err(format!("{subject} is not valid before {}", validity.not_before));
    }
    Ok(())
}

/// Checks that each certificate is signed by the next one, and the last one by itself.
fn must_be_chain(chain: &[X509Certificate<'_>]) -> Result<(), String> {
    for (at, certificate) in chain.iter().enumerate() {
        let limit = certificate.basic_constraints().ok().flatten().and_then(|limit| limit.value.path_len_constraint);
        // `at` counts the CAs below this certificate.
        if limit.is_some_and(|limit| usize::try_from(limit).is_ok_and(|limit| limit < at)) {
            return Err(format!(
                "{} may not have these CAs below it (its path length is limited)",
                certificate.subject()
            ));
        }
        let above = chain.get(at + 1);
        let signer = above.unwrap_or(certificate);
        let is_signed = certificate.issuer().as_raw() == signer.subject().as_raw()
            && certificate.verify_signature(Some(signer.public_key())).is_ok();
        if is_signed {
            continue;
        }
        let (subject, issuer) = (certificate.subject(), certificate.issuer());
        return Err(match above {
            Some(above) => format!("{subject} is not signed by the next certificate, {}", above.subject()),
            None => {
                format!(
                    "incomplete chain: {subject} is signed by {issuer}; add the certificates above it, up to the \
                         root"
                )
            }
        });
    }
    Ok(())
}

/// Checks that the library can encode the CA's name as an issuer.
fn must_have_name(name: &X509Name<'_>) -> Result<(), String> {
    let mut kinds: Vec<_> = name.iter_attributes().map(|attribute| attribute.attr_type().to_id_string()).collect();
    let count = kinds.len();
    kinds.sort();
    kinds.dedup();
    if kinds.len() == count && name.iter_rdn().count() == count {
        return name_of(name).map(drop);
    }
    Err(format!(
        "unsupported CA name {name}: an attribute occurs twice, or two share one part; issue the CA with another name"
    ))
}

/// Converts a name without a change of its encoding, because verifiers find an issuer by its encoded name.
fn name_of(name: &X509Name<'_>) -> Result<DistinguishedName, String> {
    let mut same = DistinguishedName::new();
    for attribute in name.iter_attributes() {
        let wrong = || format!("unsupported name {name}");
        let oid: Vec<u64> = attribute.attr_type().iter().ok_or_else(wrong)?.collect();
        let value = attribute.attr_value();
        let text = std::str::from_utf8(value.data).map_err(|_| wrong())?;
        let value = match value.header.tag() {
            Tag::Utf8String => DnValue::Utf8String(text.to_owned()),
            Tag::PrintableString => DnValue::PrintableString(text.try_into().map_err(|_| wrong())?),
            Tag::Ia5String => DnValue::Ia5String(text.try_into().map_err(|_| wrong())?),
            _ => return Err(wrong()),
        };
        same.push(DnType::from_oid(&oid), value);
    }
    Ok(same)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::{Duration, SystemTime};

    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};

    use super::super::Ca;
    use super::{blocks, facts, parsed};

    fn params(name: &str, limit: Option<u8>) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(limit.map_or(BasicConstraints::Unconstrained, BasicConstraints::Constrained));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CountryName, "EX");
        params.distinguished_name.push(DnType::CommonName, name);
        params
    }

    /// A chain of three certificates (PEM), and the last one's key.
    fn chain(root: Option<u8>) -> (String, String) {
        let root = CertifiedIssuer::self_signed(params("root", root), KeyPair::generate().unwrap()).unwrap();
        let middle = CertifiedIssuer::signed_by(params("middle", None), KeyPair::generate().unwrap(), &root).unwrap();
        let key = KeyPair::generate().unwrap();
        let last = params("last", Some(0)).signed_by(&key, &middle).unwrap();
        (last.pem() + &middle.pem() + &root.pem(), key.serialize_pem())
    }

    #[test]
    fn an_authority_that_somebody_brings_is_the_first_of_a_chain() {
        let now = SystemTime::now();
        let (certificates, key) = chain(None);
        // Text between the blocks is ignored.
        let noisy = format!("some words\n{}", certificates.replace("-----BEGIN", "a bag\n-----BEGIN"));
        let authority = Ca::import(&noisy, &key, now).unwrap();
        assert!(facts(&authority.root()).unwrap().subject.contains("CN=root"));
        assert_eq!(blocks(&authority.intermediates()).unwrap().len(), 2);
        assert_eq!(facts(&authority.intermediates()).unwrap(), facts(&authority.certificate).unwrap());
        let limited = chain(Some(1));
        let refused = Ca::import(&limited.0, &limited.1, now).unwrap_err().to_string();
        assert!(refused.contains("path length is limited"), "{refused}");
        let later = now + Duration::from_secs(3000 * 365 * 24 * 3600);
        assert!(Ca::import(&certificates, &key, later).unwrap_err().to_string().contains("has expired"));
    }

    #[test]
    fn a_proof_is_of_the_same_name_and_key() {
        let now = SystemTime::now();
        let (certificates, key) = chain(None);
        let (older, newer) = (Ca::generate(now).unwrap(), Ca::import(&certificates, &key, now).unwrap());
        for (one, other) in [(&older, &newer), (&newer, &older)] {
            let proof = blocks(&one.proof_of(other, now).unwrap()).unwrap();
            let ders = [&one.certificate, &other.certificate].map(|pem| blocks(pem).unwrap());
            let [proof, one, other] = [&proof[0], &ders[0][0], &ders[1][0]].map(|der| parsed(der).unwrap());
            assert_eq!(proof.subject().as_raw(), other.subject().as_raw());
            assert_eq!(proof.issuer().as_raw(), one.subject().as_raw());
            assert_eq!(proof.public_key().raw, other.public_key().raw);
            assert_eq!(super::subject_key(&proof), super::subject_key(&other));
        }
    }
}

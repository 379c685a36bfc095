//! Short-lived certificates: a CA for an overlay that exists only while the demo runs.
//!
//! In: names of nodes and users. Out: PEM files in the demo's directory, with the URI SANs by which nodes identify each
//! other (`spiffe://OVERLAY/node/NAME`, `.../user/NAME`, `.../role/standalone`). Never: a key outside that directory.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};

/// The CA of the TLS service, which nodes do not know.
pub(crate) const BANK_CA: &str = "bank-ca";

/// A certificate authority whose certificate is stored in a file.
pub(crate) struct Authority {
    directory: PathBuf,
    /// The CA's certificate (PEM).
    pub(crate) certificate: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

/// The identity that a certificate asserts.
pub(crate) enum Proof<'a> {
    /// A node of `overlay`, and the users that it may speak for.
    Node {
        /// The trust domain.
        overlay: &'a str,
        /// Users bound to the node.
        users: &'a [&'a str],
        /// The node may forward identities that other nodes asserted.
        standalone: bool,
    },
    /// A server of this DNS name, outside of any overlay.
    Server,
}

/// A certificate and its key, as files (PEM).
pub(crate) struct Identity {
    /// The certificate.
    pub(crate) cert: PathBuf,
    /// The certificate's private key.
    pub(crate) key: PathBuf,
}

impl Authority {
    /// Makes a CA and writes `NAME.pem` into `directory`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn new(directory: &Path, name: &str) -> anyhow::Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, format!("{name} of a Hermes demo"));
        let key = KeyPair::generate()?;
        let certificate = directory.join(format!("{name}.pem"));
        write_private(&certificate, &params.self_signed(&key)?.pem())?;
        Ok(Self { directory: directory.to_owned(), certificate, issuer: Issuer::new(params, key) })
    }

    /// Makes a certificate and writes `NAME.pem` and `NAME.key`.
    ///
    /// # Errors
    /// The name is invalid in a certificate, or a file cannot be written.
    pub(crate) fn issue(&self, name: &str, proof: &Proof<'_>) -> anyhow::Result<Identity> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.subject_alt_names = names(name, proof).with_context(|| format!("certificate of {name}"))?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let identity = Identity {
            cert: self.directory.join(format!("{name}.pem")),
            key: self.directory.join(format!("{name}.key")),
        };
        write_private(&identity.cert, &params.signed_by(&key, &self.issuer)?.pem())?;
        write_private(&identity.key, &key.serialize_pem())?;
        Ok(identity)
    }
}

fn names(name: &str, proof: &Proof<'_>) -> Result<Vec<SanType>, rcgen::Error> {
    let Proof::Node { overlay, users, standalone } = proof else {
        return Ok(vec![SanType::DnsName(Ia5String::try_from(name)?)]);
    };
    let uri = |rest: String| Ok(SanType::URI(Ia5String::try_from(format!("spiffe://{overlay}/{rest}"))?));
    let node = std::iter::once(format!("node/{name}"));
    let users = users.iter().map(|user| format!("user/{user}"));
    let role = standalone.then(|| "role/standalone".to_owned());
    node.chain(users).chain(role).map(uri).collect()
}

/// Creates a file that only its owner can read.
///
/// # Errors
/// The file exists, or cannot be written.
pub(super) fn write_private(path: &Path, text: &str) -> anyhow::Result<()> {
    let written = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    written
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

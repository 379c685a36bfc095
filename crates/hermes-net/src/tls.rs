//! TLS configurations, and the identities that certificates prove.
//!
//! In: PEM files, a finished handshake. Out: rustls configurations for listeners and upstreams; after a handshake, the
//! URI SANs of the peer. Never: an authorization decision, or a key in a log.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64_URL;
use quinn::ConnectionError;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, InconsistentKeys, RootCertStore, ServerConfig,
    SignatureScheme,
};

use x509_parser::extensions::ParsedExtension;

use crate::file;

/// An error of a certificate, a key or a configuration.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read, or has no PEM of the expected kind.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The private key is not that of the certificate.
    #[error("{key} is not the private key of {cert}; use the key that the certificate was issued for, or issue a new certificate",
            key = key.display(), cert = cert.display())]
    Mismatch {
        /// The certificate file.
        cert: PathBuf,
        /// The key file.
        key: PathBuf,
    },
    /// rustls rejects the configuration.
    #[error("{what}: {reason}")]
    Configuration {
        /// The configuration that was built.
        what: &'static str,
        /// The error of rustls.
        reason: String,
    },
}

/// A certificate chain and its private key.
#[derive(Debug)]
pub struct CertifiedKey {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Clone for CertifiedKey {
    fn clone(&self) -> Self {
        Self { chain: self.chain.clone(), key: self.key.clone_key() }
    }
}

impl CertifiedKey {
    /// Reads a certificate chain (the leaf first) and its private key.
    ///
    /// # Errors
    /// `TlsError` with the file and the cause.
    pub fn load(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let chain = load_certificates(cert)?;
        let fault = |reason: String| TlsError::File { path: key.to_owned(), reason };
        let pem = file::read(key, file::MAX_FILE_BYTES).map_err(|error| fault(format!("cannot read: {error}")))?;
        let private = PrivateKeyDer::from_pem_slice(bare(&pem))
            .map_err(|error| fault(format!("no readable private key: {error}")))?;
        // Other errors are reported when a TLS configuration is built from the key.
        let fits = rustls::sign::CertifiedKey::from_der(chain.clone(), private.clone_key(), &provider());
        if matches!(fits, Err(rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch))) {
            return Err(TlsError::Mismatch { cert: cert.to_owned(), key: key.to_owned() });
        }
        Ok(Self { chain, key: private })
    }

    /// Parses a certificate chain and its key from memory.
    ///
    /// # Errors
    /// The certificate or the key is not PEM of its kind.
    pub fn from_pem(cert: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let fault = |reason: String| TlsError::Configuration { what: "a certificate and its key", reason };
        let key =
            PrivateKeyDer::from_pem_slice(bare(key)).map_err(|error| fault(format!("no private key: {error}")))?;
        Ok(Self { chain: certificates(cert).map_err(fault)?, key })
    }

    /// The private key, in the encoding of its file.
    pub(crate) fn secret(&self) -> &[u8] {
        self.key.secret_der()
    }

    /// Returns the earliest expiry of a certificate in the chain, in seconds since 1970. `None` if no certificate is
    /// readable.
    pub fn not_after(&self) -> Option<i64> {
        let end = |certificate: &CertificateDer<'_>| {
            let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
            Some(parsed.validity().not_after.timestamp())
        };
        self.chain.iter().filter_map(end).min()
    }

    /// Returns the expiry of the leaf, in seconds since 1970. The rest of the chain may be irrelevant, because a peer
    /// may have another path to the root. `None` if the leaf is not readable.
    pub fn leaf_not_after(&self) -> Option<i64> {
        let (_, parsed) = x509_parser::parse_x509_certificate(self.chain.first()?).ok()?;
        Some(parsed.validity().not_after.timestamp())
    }

    /// Returns the leaf's public key (SubjectPublicKeyInfo, DER). `None` if the leaf is not readable.
    pub fn public_key(&self) -> Option<Vec<u8>> {
        let (_, parsed) = x509_parser::parse_x509_certificate(self.chain.first()?).ok()?;
        Some(parsed.public_key().raw.to_vec())
    }

    /// Returns the start of the leaf's validity, in seconds since 1970. `None` if the leaf is not readable.
    pub fn not_before(&self) -> Option<i64> {
        let (_, parsed) = x509_parser::parse_x509_certificate(self.chain.first()?).ok()?;
        Some(parsed.validity().not_before.timestamp())
    }

    /// Returns the authority key identifier of the leaf. `None` if the leaf has none.
    pub fn issuer_key(&self) -> Option<Vec<u8>> {
        let (_, parsed) = x509_parser::parse_x509_certificate(self.chain.first()?).ok()?;
        parsed.extensions().iter().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::AuthorityKeyIdentifier(key) => Some(key.key_identifier.as_ref()?.0.to_vec()),
            _ => None,
        })
    }

    /// The URI SANs of the leaf.
    pub fn uris(&self) -> Vec<String> {
        self.chain.first().map(|leaf| uris(leaf)).unwrap_or_default()
    }
}

/// Returns the latest expiry of the certificates in a PEM file, in seconds since 1970. `None` if the file has no
/// readable certificate.
pub fn last_not_after(path: &Path) -> Option<i64> {
    let end = |certificate: CertificateDer<'_>| {
        let (_, parsed) = x509_parser::parse_x509_certificate(&certificate).ok()?;
        Some(parsed.validity().not_after.timestamp())
    };
    load_certificates(path).ok()?.into_iter().filter_map(end).max()
}

/// CA certificates to which a peer's chain may lead.
#[derive(Clone, Debug)]
pub struct Roots(Arc<RootCertStore>);

impl PartialEq for Roots {
    fn eq(&self, other: &Self) -> bool {
        self.0.roots == other.0.roots
    }
}

impl Roots {
    /// Reads one or more CA certificates.
    ///
    /// # Errors
    /// `TlsError` with the file and the cause.
    pub fn load(path: &Path) -> Result<Self, TlsError> {
        let mut store = RootCertStore::empty();
        for certificate in load_certificates(path)? {
            store.add(certificate).map_err(|error| TlsError::File {
                path: path.to_owned(),
                reason: format!("not a CA certificate: {error}"),
            })?;
        }
        Ok(Self(Arc::new(store)))
    }

    /// Parses one or more CA certificates from memory.
    ///
    /// # Errors
    /// The text is not PEM, or has no CA certificate.
    pub fn from_pem(pem: &[u8]) -> Result<Self, TlsError> {
        let fault = |reason: String| TlsError::Configuration { what: "CA certificates", reason };
        let mut store = RootCertStore::empty();
        for certificate in certificates(pem).map_err(fault)? {
            store.add(certificate).map_err(|error| fault(format!("not a CA certificate: {error}")))?;
        }
        Ok(Self(Arc::new(store)))
    }

    /// Returns the CA certificates that this machine trusts for servers: its package of CA certificates, or the files
    /// named by `SSL_CERT_FILE` and `SSL_CERT_DIR`.
    ///
    /// # Errors
    /// The machine has no usable CA certificate.
    pub fn system() -> Result<Self, TlsError> {
        let found = rustls_native_certs::load_native_certs();
        let mut store = RootCertStore::empty();
        // A machine has hundreds of CA certificates. If rustls rejects one of them, the others are still trusted.
        let (taken, _) = store.add_parsable_certificates(found.certs);
        if taken == 0 {
            let reasons: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
            let why = if reasons.is_empty() { "none found".to_owned() } else { reasons.join("; ") };
            return Err(TlsError::Configuration { what: "CA certificates of this machine", reason: why });
        }
        Ok(Self(Arc::new(store)))
    }
}

/// Verifies that a client's certificate chain (the leaf first) leads to one of these roots.
///
/// # Errors
/// The reason for the failure.
pub fn chains_to(roots: &Roots, chain: &[CertificateDer<'static>]) -> Result<(), String> {
    let (leaf, intermediates) = chain.split_first().ok_or("no certificate")?;
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.0.clone(), provider()).build();
    let verifier = verifier.map_err(|error| error.to_string())?;
    let verified = verifier.verify_client_cert(leaf, intermediates, UnixTime::now());
    verified.map(drop).map_err(|error| error.to_string())
}

/// Verifies that a server's certificate chain (the leaf first) leads to one of these roots, and that its leaf is valid
/// for this DNS name or IP address.
///
/// # Errors
/// The reason for the failure.
pub fn serves(roots: &Roots, chain: &[CertificateDer<'static>], name: &str) -> Result<(), String> {
    let (leaf, intermediates) = chain.split_first().ok_or("no certificate")?;
    let name = ServerName::try_from(name).map_err(|error| error.to_string())?;
    let verifier = WebPkiServerVerifier::builder_with_provider(roots.0.clone(), provider()).build();
    let verifier = verifier.map_err(|error| error.to_string())?;
    let verified = verifier.verify_server_cert(leaf, intermediates, &name, &[], UnixTime::now());
    verified.map(drop).map_err(|error| error.to_string())
}

/// Returns the SHA-256 fingerprint, over the DER encoding, of each certificate in a PEM text.
///
/// # Errors
/// The text is not PEM, or has no certificate.
pub fn fingerprints(pem: &[u8]) -> Result<Vec<[u8; 32]>, String> {
    let digest = |certificate: &CertificateDer<'_>| {
        let digest = ::aws_lc_rs::digest::digest(&::aws_lc_rs::digest::SHA256, certificate);
        digest.as_ref().try_into().map_err(|_| "SHA-256 has 32 bytes".to_owned())
    };
    certificates(pem)?.iter().map(digest).collect()
}

fn load_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let fault = |reason: String| TlsError::File { path: path.to_owned(), reason };
    let pem = file::read(path, file::MAX_FILE_BYTES).map_err(|error| fault(format!("cannot read: {error}")))?;
    certificates(&pem).map_err(fault)
}

/// Strips the byte order mark that some editors write, and that would hide the first line from the PEM parser.
fn bare(pem: &[u8]) -> &[u8] {
    pem.strip_prefix("\u{feff}".as_bytes()).unwrap_or(pem)
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_slice_iter(bare(pem)).collect::<Result<Vec<_>, _>>();
    let certificates = read.map_err(|error| format!("not PEM: {error}"))?;
    if certificates.is_empty() { Err("holds no certificate".to_owned()) } else { Ok(certificates) }
}

/// Whether a listener requests client certificates.
#[derive(Clone, Debug)]
pub enum ClientCertificates {
    /// Client certificates are not requested.
    None,
    /// A client certificate is requested, and verified if sent.
    Optional(Roots),
    /// A client certificate is required: handshakes without one fail.
    Required(Roots),
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// Seeds the random number generator of this thread. Otherwise the thread's first handshake seeds it and takes 50 ms
/// longer, because the library gathers CPU jitter for each thread.
pub fn warm_up() {
    // A failure occurs again in the handshake, which reports it.
    let _ = aws_lc_rs::default_provider().secure_random.fill(&mut [0; 1]);
}

/// Returns the TLS configuration of a listener.
///
/// # Errors
/// rustls refuses the key, the chain or the CA.
pub fn server_config(
    own: &CertifiedKey,
    clients: &ClientCertificates,
    alpn: &[&[u8]],
) -> Result<Arc<ServerConfig>, TlsError> {
    let fault = |reason: String| TlsError::Configuration { what: "TLS of a listener", reason };
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| fault(error.to_string()))?;
    let verifier = |roots: &Roots| WebPkiClientVerifier::builder_with_provider(roots.0.clone(), provider());
    let builder = match clients {
        ClientCertificates::None => builder.with_no_client_auth(),
        ClientCertificates::Optional(roots) => builder.with_client_cert_verifier(
            verifier(roots).allow_unauthenticated().build().map_err(|error| fault(error.to_string()))?,
        ),
        ClientCertificates::Required(roots) => {
            builder.with_client_cert_verifier(verifier(roots).build().map_err(|error| fault(error.to_string()))?)
        }
    };
    let mut config =
        builder.with_single_cert(own.chain.clone(), own.key.clone_key()).map_err(|error| fault(error.to_string()))?;
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    config.max_fragment_size = None;
    Ok(Arc::new(config))
}

/// The server identity that the TLS client of an upstream accepts.
#[derive(Clone)]
pub enum ServerIdentity {
    /// A node of this overlay: a chain to the roots, and a URI SAN that the predicate accepts.
    Node(Roots, NodePredicate),
    /// A node whose root certificate is known only by its SHA-256. The server must include the root in its chain.
    Pinned([u8; 32], NodePredicate),
    /// A server whose chain leads to the roots, and whose certificate has the DNS name or address passed to
    /// [`connect`].
    Name(Roots),
}

/// Accepts or rejects a server by the [`names`] of its certificate. The error is the reason for the rejection.
pub type NodePredicate = Arc<dyn Fn(&[String]) -> Result<(), String> + Send + Sync>;

/// Returns the TLS configuration of an upstream.
///
/// # Errors
/// rustls refuses the key, the chain or the CA.
pub fn client_config(
    own: Option<&CertifiedKey>,
    server: ServerIdentity,
    alpn: &[&[u8]],
) -> Result<Arc<ClientConfig>, TlsError> {
    let fault = |reason: String| TlsError::Configuration { what: "TLS of an upstream", reason };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| fault(error.to_string()))?;
    let builder = match server {
        ServerIdentity::Name(roots) => {
            let verifier = WebPkiServerVerifier::builder_with_provider(roots.0, provider())
                .build()
                .map_err(|error| fault(error.to_string()))?;
            builder.dangerous().with_custom_certificate_verifier(verifier)
        }
        ServerIdentity::Node(roots, accepts) => {
            let verifier = NodeVerifier { anchor: Anchor::Roots(roots), accepts, provider: provider() };
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        }
        ServerIdentity::Pinned(digest, accepts) => {
            let verifier = NodeVerifier { anchor: Anchor::Pin(digest), accepts, provider: provider() };
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        }
    };
    let mut config = match own {
        Some(own) => builder
            .with_client_auth_cert(own.chain.clone(), own.key.clone_key())
            .map_err(|error| fault(error.to_string()))?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Arc::new(config))
}

/// Verifies a node by its URI SAN instead of a host name: nodes change their addresses, and an address proves nothing.
struct NodeVerifier {
    anchor: Anchor,
    accepts: NodePredicate,
    provider: Arc<CryptoProvider>,
}

/// The trust anchor of a chain.
enum Anchor {
    /// Any of these roots.
    Roots(Roots),
    /// The certificate with this SHA-256.
    Pin([u8; 32]),
}

impl Anchor {
    /// Returns the trusted roots. A pinned root is taken from the certificates that the server sent.
    fn roots(&self, shown: &[CertificateDer<'_>]) -> Result<Roots, rustls::Error> {
        let pin = match self {
            Anchor::Roots(roots) => return Ok(roots.clone()),
            Anchor::Pin(pin) => pin,
        };
        let is_pinned = |certificate: &&CertificateDer<'_>| {
            ::aws_lc_rs::digest::digest(&::aws_lc_rs::digest::SHA256, certificate).as_ref() == pin
        };
        let mut store = RootCertStore::empty();
        store.add(shown.iter().find(is_pinned).ok_or(CertificateError::UnknownIssuer)?.clone().into_owned())?;
        Ok(Roots(Arc::new(store)))
    }
}

impl std::fmt::Debug for NodeVerifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NodeVerifier")
    }
}

impl ServerCertVerifier for NodeVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &self.anchor.roots(intermediates)?.0,
            intermediates,
            now,
            self.provider.signature_verification_algorithms.all,
        )?;
        (self.accepts)(&names(end_entity)).map_err(rustls::Error::General)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Copies a configuration, and offers only the protocol `alpn` in the copy.
pub fn with_alpn(config: &ClientConfig, alpn: &[u8]) -> Arc<ClientConfig> {
    let mut config = config.clone();
    config.alpn_protocols = vec![alpn.to_vec()];
    Arc::new(config)
}

/// Returns the URI SANs of a certificate, in its order. Empty if the certificate cannot be parsed.
pub fn uris(certificate: &CertificateDer<'_>) -> Vec<String> {
    use x509_parser::extensions::GeneralName;
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(certificate) else {
        return Vec::new();
    };
    let Ok(Some(names)) = parsed.subject_alternative_name() else {
        return Vec::new();
    };
    names
        .value
        .general_names
        .iter()
        .filter_map(|name| match name {
            GeneralName::URI(uri) => Some((*uri).to_owned()),
            _ => None,
        })
        .collect()
}

/// Returns the URI SANs of a certificate, followed by the name of its key: `ni:///sha-256;` and the digest of its
/// SubjectPublicKeyInfo in base64url (RFC 6920, sections 2 and 3).
pub fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let mut names = uris(certificate);
    if let Ok((_, parsed)) = x509_parser::parse_x509_certificate(certificate) {
        names.push(key_name(parsed.public_key().raw));
    }
    names
}

/// Returns the name of the key with this SubjectPublicKeyInfo (DER), as in [`names`].
pub fn key_name(public_key_info: &[u8]) -> String {
    let digest = ::aws_lc_rs::digest::digest(&::aws_lc_rs::digest::SHA256, public_key_info);
    format!("ni:///sha-256;{}", BASE64_URL.encode(digest))
}

/// Returns the [`names`] of the peer's certificate after a handshake. `None` if the peer sent no certificate.
pub fn peer_uris(io: &crate::Io) -> Option<Vec<String>> {
    let crate::Io::Tls(tls) = io else { return None };
    let leaf = tls.get_ref().1.peer_certificates()?.first()?;
    Some(names(leaf))
}

/// Returns the certificate chain that the peer sent in a handshake, the leaf first. Empty if the peer sent none.
pub fn peer_chain(io: &crate::Io) -> Vec<CertificateDer<'static>> {
    let crate::Io::Tls(tls) = io else { return Vec::new() };
    let shown = tls.get_ref().1.peer_certificates().unwrap_or_default();
    shown.iter().map(|certificate| certificate.clone().into_owned()).collect()
}

/// Returns the peer's public key after a handshake: its SubjectPublicKeyInfo (DER). `None` if the peer sent no
/// certificate.
pub fn peer_public_key(io: &crate::Io) -> Option<Vec<u8>> {
    let crate::Io::Tls(tls) = io else { return None };
    let leaf = tls.get_ref().1.peer_certificates()?.first()?;
    let (_, parsed) = x509_parser::parse_x509_certificate(leaf).ok()?;
    Some(parsed.public_key().raw.to_vec())
}

/// Performs a TLS handshake as the server.
///
/// # Errors
/// The handshake failed: a missing or untrusted certificate, no common version, or invalid data.
pub async fn accept(config: Arc<ServerConfig>, tcp: tokio::net::TcpStream) -> io::Result<crate::Io> {
    let tls = tokio_rustls::TlsAcceptor::from(config).accept(tcp).await?;
    Ok(crate::Io::Tls(Box::new(tls.into())))
}

/// Performs a TLS handshake as the client. `name` is the server name (SNI).
///
/// # Errors
/// The handshake failed, or the name is not valid for TLS.
pub async fn connect(config: Arc<ClientConfig>, name: &str, tcp: tokio::net::TcpStream) -> io::Result<crate::Io> {
    let name =
        ServerName::try_from(name.to_owned()).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let tls = tokio_rustls::TlsConnector::from(config).connect(name, tcp).await?;
    Ok(crate::Io::Tls(Box::new(tls.into())))
}

/// The kind of a handshake failure, in the terms of RFC 9209, section 2.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeFault {
    /// The peer's certificate is not valid for its purpose.
    Certificate,
    /// Any other TLS error.
    Protocol,
}

impl HandshakeFault {
    /// Returns the kind of TLS failure that ended an attempt to connect, over TCP or QUIC. `None` if the failure was
    /// not TLS's.
    pub fn of(error: &io::Error) -> Option<Self> {
        let inner = error.get_ref()?;
        match inner.downcast_ref::<rustls::Error>() {
            // `General` is the error of our own verifier if it rejects the names of a certificate.
            Some(rustls::Error::InvalidCertificate(_) | rustls::Error::General(_)) => Some(Self::Certificate),
            Some(_) => Some(Self::Protocol),
            None => quic_fault(inner.downcast_ref()?),
        }
    }
}

/// Returns the TLS fault of a failed QUIC handshake. `None` if the cause was not TLS. QUIC reports only the text of
/// rustls and an alert, and the alert is not the same for every certificate error (RFC 9001, section 4.8).
fn quic_fault(error: &ConnectionError) -> Option<HandshakeFault> {
    let (code, is_certificate) = match error {
        ConnectionError::TransportError(ours) => {
            (ours.code, CERTIFICATE_ERROR_PREFIXES.iter().any(|words| ours.reason.starts_with(words)))
        }
        ConnectionError::ConnectionClosed(theirs) => (theirs.error_code, false),
        _ => return None,
    };
    let is_tls = (CRYPTO_ERROR..=CRYPTO_ERROR + 0xff).contains(&u64::from(code));
    is_tls.then_some(if is_certificate { HandshakeFault::Certificate } else { HandshakeFault::Protocol })
}

/// Prefixes of the texts of rustls for an invalid certificate, and for one that our own verifier rejected.
const CERTIFICATE_ERROR_PREFIXES: [&str; 2] = ["invalid peer certificate: ", "unexpected error: "];
/// CRYPTO_ERROR; the TLS alert is added to it (RFC 9000, section 20.1).
const CRYPTO_ERROR: u64 = 0x100;

pub use rustls::pki_types::CertificateDer;
pub use rustls::{ClientConfig as RustlsClientConfig, ServerConfig as RustlsServerConfig};
/// The private key (PKCS#8, DER) in a PEM text.
///
/// # Errors
/// The text has no such key; the reason says what it must have.
pub fn private_key(pem: &[u8]) -> Result<PrivatePkcs8KeyDer<'static>, String> {
    PrivatePkcs8KeyDer::from_pem_slice(bare(pem)).map_err(|error| format!("no PEM with a PRIVATE KEY: {error}"))
}

/// The public key (SubjectPublicKeyInfo, DER) in a PEM text.
///
/// # Errors
/// The text has no such key; the reason says what it must have.
pub fn public_key(pem: &[u8]) -> Result<Vec<u8>, String> {
    let key = SubjectPublicKeyInfoDer::from_pem_slice(pem);
    key.map(|key| key.to_vec()).map_err(|error| format!("no PEM with a PUBLIC KEY: {error}"))
}

//! rustls configurations for the origins and clients of the testkit.
//!
//! In: PEM of [`crate::ca`]. Out: server and client configurations on aws-lc-rs. Clients always verify the chain and
//! never resume: each measured client is new.

use std::sync::Arc;

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme,
    client::{
        Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::aws_lc_rs,
    server::WebPkiClientVerifier,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject};

use crate::{Error, Result, ca::Identity};

/// A server with this identity; with `client_ca` (PEM) it requires a certificate of that CA.
///
/// # Errors
/// The PEM is invalid.
pub fn server(identity: &Identity, client_ca: Option<&str>, alpn: &[&str]) -> Result<Arc<ServerConfig>> {
    let builder = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(refused)?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let provider = Arc::new(aws_lc_rs::default_provider());
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca)?), provider);
            builder.with_client_cert_verifier(verifier.build().map_err(refused)?)
        }
    };
    let mut config = builder.with_single_cert(chain(identity)?, key(identity)?).map_err(refused)?;
    config.alpn_protocols = protocols(alpn);
    // Tickets would be wasted, since no client of ours resumes.
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// A client that trusts `ca` (PEM) and, with `identity`, sends a certificate if requested.
///
/// # Errors
/// The PEM is invalid.
pub fn client(ca: &str, identity: Option<&Identity>, alpn: &[&str]) -> Result<Arc<ClientConfig>> {
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(refused)?
        .with_root_certificates(roots(ca)?);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some(identity) => builder.with_client_auth_cert(chain(identity)?, key(identity)?).map_err(refused)?,
    };
    config.alpn_protocols = protocols(alpn);
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// A client that verifies the chain of the server's certificate but not its name. A controller is identified by
/// its SPIFFE identity, which contains no address.
///
/// # Errors
/// The PEM is invalid.
pub fn client_of_any_name(ca: &str, identity: &Identity, alpn: &[&str]) -> Result<Arc<ClientConfig>> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = WebPkiServerVerifier::builder_with_provider(Arc::new(roots(ca)?), provider);
    let verifier = AnyName(builder.build().map_err(refused)?);
    let mut config = Arc::unwrap_or_clone(client(ca, Some(identity), alpn)?);
    config.dangerous().set_certificate_verifier(Arc::new(verifier));
    Ok(Arc::new(config))
}

#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        // The chain is checked before the name.
        match self.0.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, cert, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

fn roots(pem: &str) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for cert in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        roots.add(cert.map_err(refused)?).map_err(refused)?;
    }
    Ok(roots)
}

fn chain(identity: &Identity) -> Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_slice_iter(identity.cert_pem.as_bytes()).map(|c| c.map_err(refused)).collect()
}

fn key(identity: &Identity) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes()).map_err(refused)
}

fn protocols(alpn: &[&str]) -> Vec<Vec<u8>> {
    alpn.iter().map(|name| name.as_bytes().to_vec()).collect()
}

fn refused(error: impl std::fmt::Display) -> Error {
    Error::Tls(error.to_string())
}

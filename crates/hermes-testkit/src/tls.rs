//! rustls configurations for the origins and clients of the testkit.
//!
//! In: PEM of [`crate::ca`]. Out: server and client configurations on aws-lc-rs. Clients always verify the chain and
//! never resume: each measured client is new.

use std::sync::Arc;

use rustls::{
    ClientConfig, RootCertStore, ServerConfig, client::Resumption, crypto::aws_lc_rs, server::WebPkiClientVerifier,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};

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

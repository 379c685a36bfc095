//! Trust during a CA rotation: the chains that nodes and controllers send, and the CAs that they accept.
//!
//! In: the state. Out: the chain for each kind of certificate, the CAs that nodes must trust, and those that a
//! controller accepts.
//! Never: two members that reject each other. Certificates of the new CA are sent with its cross-certificate by the old
//! one, as long as a peer may need it.

use std::collections::BTreeSet;

use crate::ca::{CertificateInfo, facts};
use crate::digest::{hex, sha256};
use crate::state::{RetiredCa, Rotation, State};

/// The trusted CAs, and the CA that signs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    /// The roots that nodes must trust (PEM).
    pub authorities: String,
    /// SHA-256 of each of these roots (DER), in hex.
    pub fingerprints: BTreeSet<String>,
    /// The key identifier of the CA that signs, in hex.
    pub issuer: String,
    /// The chain of a certificate of a node or an operator (PEM).
    pub chain: String,
    /// The chain of a controller's certificate (PEM): the CA, its complete chain, and the cross-certificates by earlier
    /// CAs. It is complete so that a client with only a pin finds the pinned CA.
    pub shown: String,
    /// The CAs whose client certificates a controller accepts (PEM): the trusted CAs without their roots, and retired
    /// CAs. The controller also checks each key.
    pub issuers: String,
}

impl State {
    /// Computes the trust from the state.
    ///
    /// # Errors
    /// A certificate in the store is invalid.
    pub fn trust(&self) -> Result<Trust, String> {
        let Some(authority) = &self.authority else { return Ok(Trust::default()) };
        let rotation = self.rotation.as_deref();
        let leaving = rotation.filter(|rotation| rotation.is_leaving);
        let both = std::iter::once(authority).chain(rotation.map(|rotation| &rotation.other));
        let mut trust = Trust { issuer: facts(&authority.certificate)?.key, ..Trust::default() };
        for authority in both {
            let root = authority.root();
            // A root that two CAs share is added once.
            if trust.fingerprints.insert(facts(&root)?.fingerprint) {
                trust.authorities += &root;
            }
            trust.issuers += &authority.certificate;
        }
        trust.chain = authority.intermediates();
        trust.shown = authority.certificate.clone() + &authority.chain;
        if let Some(Rotation { other, proof, .. }) = leaving {
            trust.chain.extend([&**proof, &other.intermediates()]);
            trust.shown.extend([&**proof, &other.certificate, &other.chain]);
        }
        for RetiredCa { certificate, chain, proof, .. } in self.retired.iter().rev() {
            trust.shown.extend([&**proof, certificate, chain]);
            trust.issuers += certificate;
        }
        Ok(trust)
    }

    /// The certificate of the CA that signs.
    ///
    /// # Errors
    /// The overlay has no CA yet, or its certificate is invalid.
    pub fn signing(&self) -> Result<CertificateInfo, String> {
        facts(&self.authority.as_ref().ok_or("no CA yet")?.certificate)
    }
}

impl Trust {
    /// A digest of the trust. Clients compare it to determine whether they need new CA certificates.
    pub fn mark(&self) -> String {
        let all = format!("{}{}{}", self.authorities, self.issuer, self.chain);
        hex(&sha256(all.as_bytes())[..8])
    }
}

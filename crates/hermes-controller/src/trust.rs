//! Whom an overlay trusts: what nodes and controllers show and believe while one authority follows another.
//!
//! In: the state. Out: what is sent with each certificate, what nodes are to trust, and what a controller takes.
//! Never: a moment at which two members do not believe each other. What the newer authority signs goes with a certificate of
//! that by the older one, until nobody needs it any more.

use std::collections::BTreeSet;

use crate::ca::{Facts, facts};
use crate::digest::{hex, sha256};
use crate::state::{Retired, Rotation, State};

/// What is to be trusted, and who signs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    /// What nodes are to trust (PEM): the roots.
    pub authorities: String,
    /// SHA-256 of each of these (DER), in hex.
    pub fingerprints: BTreeSet<String>,
    /// The key identifier of the authority that signs, in hex.
    pub issuer: String,
    /// What goes with a node's or operator's certificate (PEM).
    pub chain: String,
    /// What goes with a controller's certificate (PEM): all of the authority, so that who knows only its digest finds it, and
    /// what leads there from those before it.
    pub shown: String,
    /// Whose certificates a controller takes (PEM), of those whose keys it knows: the authorities themselves, whatever else
    /// their roots have signed, and those before them.
    pub issuers: String,
}

impl State {
    /// Whom the overlay trusts now.
    ///
    /// # Errors
    /// A certificate in the store is none.
    pub fn trust(&self) -> Result<Trust, String> {
        let Some(authority) = &self.authority else { return Ok(Trust::default()) };
        let rotation = self.rotation.as_deref();
        let leaving = rotation.filter(|rotation| rotation.is_leaving);
        let both = std::iter::once(authority).chain(rotation.map(|rotation| &rotation.other));
        let mut trust = Trust { issuer: facts(&authority.certificate)?.key, ..Trust::default() };
        for authority in both {
            let root = authority.root();
            // Two of one root are one.
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
        for Retired { certificate, chain, proof, .. } in self.retired.iter().rev() {
            trust.shown.extend([&**proof, certificate, chain]);
            trust.issuers += certificate;
        }
        Ok(trust)
    }

    /// What is known of the authority that signs.
    ///
    /// # Errors
    /// There is none, or it is none.
    pub fn signing(&self) -> Result<Facts, String> {
        facts(&self.authority.as_ref().ok_or("there is no authority yet")?.certificate)
    }
}

impl Trust {
    /// What tells one of these from another, for who has what is sent of it.
    pub fn mark(&self) -> String {
        let all = format!("{}{}{}", self.authorities, self.issuer, self.chain);
        hex(&sha256(all.as_bytes())[..8])
    }
}

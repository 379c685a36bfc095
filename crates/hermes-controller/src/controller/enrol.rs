//! Enrolment of nodes and their certificates.
//!
//! In: requests of operators for tokens, and requests of nodes that have one. Out: certificates, and log entries that
//! record which node enrolled, how and when.
//! Never: two nodes enrolled by one token, at any number of controllers.

use std::time::{Duration, SystemTime};

use x509_parser::prelude::FromDer as _;

use super::{ApplyError, Controller, HELD, StateView, now};
use crate::ca::{Ca, IssueError, Subject};
use crate::digest::key_digest;
use crate::document::{Key, Name};
use crate::state::{Change, EnrolledNode, Token};
use crate::token::EnrolmentToken;
use crate::trust::Trust;

/// The maximum lifetime of a token.
const MAX_TOKEN_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
/// The time within which a node may repeat an enrolment whose answer was lost, in milliseconds.
const REPLAY_WINDOW: u64 = 10 * 60 * 1000;
/// The maximum number of unused tokens.
const MAX_TOKENS: usize = 100_000;

/// An issued certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The certificate and its intermediates (PEM).
    pub certificate: String,
    /// The CA certificates that the holder must trust (PEM).
    pub authorities: String,
}

impl Controller {
    /// The overlay's CA, which is generated on the first call.
    ///
    /// # Errors
    /// The CA cannot be generated, or the store cannot be written.
    pub async fn authority(&self) -> Result<Ca, ApplyError> {
        let made = self.sealed(Ca::generate(SystemTime::now()).map_err(unissued)?)?;
        let judge = |view: &StateView| match &view.state.authority {
            Some(there) => Ok((Vec::new(), there.clone())),
            None => Ok((vec![Change::Ca(made.clone())], made.clone())),
        };
        Ok(self.transact("controller", judge).await?.1)
    }

    /// Creates an enrolment token for a node, valid for this time.
    ///
    /// # Errors
    /// The node does not exist, or the store cannot be written.
    pub async fn create_token(&self, by: &str, node: &Name, life: Duration) -> Result<EnrolmentToken, ApplyError> {
        let authority = self.authority().await?;
        let ticket = EnrolmentToken::generate(pin(&authority)?).map_err(ApplyError::Denied)?;
        let life = u64::try_from(life.min(MAX_TOKEN_LIFE).as_millis()).unwrap_or(u64::MAX);
        let judge = |view: &StateView| {
            if view.state.catalog.node(node).is_none() {
                return Err(ApplyError::Absent(Box::new(Key::node(node))));
            }
            let now = now();
            if view.state.tokens.values().filter(|token| token.expires > now).count() >= MAX_TOKENS {
                return Err(ApplyError::Denied(format!(
                    "too many unused tokens: {MAX_TOKENS}; wait until some expire"
                )));
            }
            let over = view.state.tokens.values().filter(|token| token.expires <= now);
            let mut changes: Vec<_> = over.map(|token| Change::Spent { token: token.id.clone() }).collect();
            let token = Token {
                id: ticket.id.clone(),
                digest: ticket.digest(),
                node: node.clone(),
                expires: now.saturating_add(life),
            };
            changes.push(Change::Token(token));
            Ok((changes, ()))
        };
        self.transact(by, judge).await?;
        Ok(ticket)
    }

    /// Enrols a node by its token, and issues its first certificate. Repeating the request returns the same answer, in
    /// case the first one was lost.
    ///
    /// # Errors
    /// The token is used, expired or unknown; or the request is invalid.
    pub async fn enrol(&self, ticket: &EnrolmentToken, request: &[u8]) -> Result<(Name, Certificate), ApplyError> {
        let key = key_of(request)?;
        // A request with an invalid token is rejected below, before a certificate is signed.
        let digest = ticket.digest();
        let judge = |view: &StateView| {
            let again = view.state.members.values().find(|member| member.token == digest && member.key == key);
            if let Some(member) = again.filter(|member| now() < member.since.saturating_add(REPLAY_WINDOW)) {
                return Ok((Vec::new(), member.node.clone()));
            }
            let token = view.state.tokens.get(&ticket.id).filter(|token| ticket.proves(&token.digest));
            if view.is_held() {
                return Err(ApplyError::NotReady(HELD.to_owned()));
            }
            let Some(token) = token else {
                // The error does not disclose whether the id exists.
                return Err(ApplyError::Denied(
                    "this token is used, revoked, or of another overlay; ask for another one".to_owned(),
                ));
            };
            if token.expires <= now() {
                return Err(ApplyError::Denied("this token has expired; ask for another one".to_owned()));
            }
            if view.state.catalog.node(&token.node).is_none() {
                return Err(ApplyError::Denied(format!("node {} was removed from the overlay", token.node)));
            }
            let member =
                EnrolledNode { node: token.node.clone(), key: key.clone(), since: now(), token: token.digest.clone() };
            let mut changes = vec![Change::Spent { token: token.id.clone() }];
            // The node's earlier key is revoked, because it may have leaked or moved to another machine.
            let other = view.state.members.get(&token.node).filter(|before| before.key != key);
            changes.extend(other.map(|before| Change::Revoked(view.state.revoked(before, now()))));
            match view.state.catalog.revoked().find(|revoked| revoked.key == key) {
                Some(revoked) if revoked.node == token.node => {
                    changes.push(Change::Readmitted { node: token.node.clone(), key: key.clone() });
                }
                // Readmitting the key would make the other node's certificates valid again.
                Some(_) => {
                    return Err(ApplyError::Denied(
                        "this key belonged to another node and is revoked; enrol with an empty --state directory"
                            .to_owned(),
                    ));
                }
                None => {}
            }
            changes.push(Change::Enrolled(member));
            Ok((changes, token.node.clone()))
        };
        let (_, node) = self.transact(&format!("token/{}", ticket.id), judge).await?;
        let certificate = self.issue(&node, request)?;
        Ok((node, certificate))
    }

    /// Renews the certificate of a node that has authenticated with its current one.
    ///
    /// # Errors
    /// The node is not enrolled, or the request is for another key.
    pub fn renew(&self, node: &Name, request: &[u8]) -> Result<Certificate, ApplyError> {
        let key = key_of(request)?;
        let view = self.view();
        if view.state.members.get(node).is_none_or(|member| member.key != key) {
            return Err(ApplyError::Denied(format!(
                "{node} has enrolled with another key; enrol it again with a token"
            )));
        }
        self.issue(node, request)
    }

    /// Revokes all certificates of a node.
    ///
    /// # Errors
    /// The node is not enrolled, or the store cannot be written.
    pub async fn expel(&self, by: &str, node: &Name) -> Result<(), ApplyError> {
        let judge = |view: &StateView| match view.state.members.get(node) {
            Some(member) => {
                let revoked = Change::Revoked(view.state.revoked(member, now()));
                Ok((vec![Change::Expelled { node: node.clone() }, revoked], ()))
            }
            None => Err(ApplyError::Denied(format!("{node} has not enrolled"))),
        };
        self.transact(by, judge).await.map(drop)
    }

    fn issue(&self, node: &Name, request: &[u8]) -> Result<Certificate, ApplyError> {
        let view = self.view();
        let catalog = &view.state.catalog;
        let (overlay, document) = catalog
            .overlay()
            .zip(catalog.node(node))
            .ok_or_else(|| ApplyError::Denied(format!("node {node} was removed from the overlay")))?;
        let subject = Subject::Node { overlay: overlay.0, node, role: document.role };
        let life = view.state.certificate_lifetime();
        self.sign(request, &subject, life)
    }

    /// Issues a certificate for a subject that this controller has authenticated.
    ///
    /// # Errors
    /// The overlay has no CA yet, or the request is invalid.
    pub fn sign(&self, request: &[u8], subject: &Subject<'_>, life: Duration) -> Result<Certificate, ApplyError> {
        let (certificate, trust) = self.sign_alone(request, subject, life)?;
        Ok(Certificate { certificate: certificate + &trust.chain, authorities: trust.authorities })
    }

    /// Issues a certificate. Returns it without its chain, and the CAs that are trusted at that moment.
    pub(crate) fn sign_alone(
        &self,
        request: &[u8],
        subject: &Subject<'_>,
        life: Duration,
    ) -> Result<(String, Trust), ApplyError> {
        let view = self.view();
        let authority = view.state.authority.as_ref();
        let authority = authority.ok_or_else(|| ApplyError::Denied("no CA yet".to_owned()))?;
        let signer = self.opened(authority)?.signer().map_err(unissued)?;
        let (certificate, _) = signer.sign(request, subject, SystemTime::now(), life).map_err(unissued)?;
        Ok((certificate, view.state.trust().map_err(ApplyError::Denied)?))
    }

    /// Revocation lists of each trusted CA (PEM). Empty if no key is revoked. Also empty if one CA may not sign lists,
    /// because a client that has one list demands a list of every CA.
    pub(crate) fn revocations(&self, view: &StateView) -> String {
        let mut keys = view.state.catalog.revoked().map(|one| &*one.key).peekable();
        if keys.peek().is_none() {
            return String::new();
        }
        let keys: Vec<_> = keys.collect();
        let lists = view.state.authorities().map(|authority| {
            let signer = self.opened(authority)?.signer().map_err(unissued)?;
            signer.revoke(keys.iter().copied(), SystemTime::now()).map_err(unissued)
        });
        lists.collect::<Result<String, ApplyError>>().unwrap_or_else(|error| {
            tracing::warn!("cannot issue revocation lists for Envoys: {error}");
            String::new()
        })
    }
}

pub(super) fn unissued(error: IssueError) -> ApplyError {
    match error {
        IssueError::Import(why) => ApplyError::Unusable(why),
        error => ApplyError::Denied(error.to_string()),
    }
}

/// Returns the digest of the request's key, in the encoding that the certificate will have. It is computed before the
/// store is written, so that an invalid request changes nothing.
pub(super) fn key_of(request: &[u8]) -> Result<String, ApplyError> {
    let parsed = x509_parser::certification_request::X509CertificationRequest::from_der(request);
    let (_, parsed) = parsed.map_err(|error| {
        ApplyError::Denied(format!("invalid certificate request (expected PKCS #10, DER): {error}"))
    })?;
    let asked = rcgen::CertificateSigningRequestParams::from_der(&request.into())
        .map_err(|error| ApplyError::Denied(format!("certificate request not signed with its own key: {error}")))?;
    let issued = rcgen::PublicKeyData::subject_public_key_info(&asked.public_key);
    // If the certificate encoded the key in another way, a revocation would not match it.
    if issued != parsed.certification_request_info.subject_pki.raw {
        return Err(ApplyError::Denied(
            "unsupported key encoding (RFC 5280, section 4.1.2.7) or signature scheme in the request; make a new \
             one, for example with P-256"
                .to_owned(),
        ));
    }
    Ok(key_digest(&issued))
}

/// The pin of a token: SHA-256 of the CA's certificate (DER).
///
/// # Errors
/// The certificate is invalid.
pub fn pin(authority: &Ca) -> Result<[u8; 32], ApplyError> {
    let parsed = x509_parser::pem::parse_x509_pem(authority.certificate.as_bytes());
    let (_, pem) = parsed.map_err(|error| ApplyError::Denied(format!("invalid CA certificate: {error}")))?;
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &pem.contents);
    digest.as_ref().try_into().map_err(|_| ApplyError::Denied("SHA-256 has 32 bytes".to_owned()))
}

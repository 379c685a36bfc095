//! Recovery of a store that has lost changes, because it was restored from a backup. Nodes may also prove that they
//! have run a later revision.
//!
//! In: revocations and revisions that nodes stored, each with a proof that a controller of this overlay made. Out:
//! recovered revocations, and whether documents are withheld from nodes.
//! Never: a report accepted without proof. Otherwise any node could revoke all others, or make the controller withhold
//! documents.
//!
//! Nodes keep their documents until an operator confirms the content of the store, or each enrolled node has reported
//! the revocations that it stores. Otherwise, a key that was revoked after the backup would be accepted again.

use std::collections::BTreeSet;

use aws_lc_rs::hmac;
use bytes::Bytes;

use super::{ApplyError, Controller, StateView, now};
use crate::audit::Event;
use crate::catalog::Revoked;
use crate::control::{Order, Readmission, Report, Revocation};
use crate::digest::key_name;
use crate::document::Name;
use crate::state::Change;
use crate::store::Revision;

/// The message to nodes and operators while documents are withheld from nodes.
pub(crate) const HELD: &str = "store restored, or behind what nodes have run: nodes keep their documents until all \
                               have reconnected, or until `hermes restore --confirm`";
/// The maximum number of revocations taken from one report.
const MAX_RETURNED: usize = 512;

/// Returns the text whose HMAC is the proof of a revocation.
fn of_key(node: &str, key: &str, until: u64) -> String {
    format!("revoked\n{node}\n{key}\n{until}")
}

fn of_revision(revision: Revision) -> String {
    format!("revision\n{revision}")
}

impl Controller {
    /// Returns the HMAC keys for proofs, one for each CA whose key this controller has. The first one makes new proofs.
    fn proof_keys(&self, view: &StateView) -> Vec<hmac::Key> {
        // The label has the overlay's name, because several overlays may share one CA.
        let name = view.state.catalog.overlay().map(|(name, _)| name.as_str()).unwrap_or_default();
        let label = format!("hermes history of {name}");
        let opened = view.state.authorities().filter_map(|authority| self.opened(authority).ok());
        opened
            .map(|authority| {
                let secret = hmac::Key::new(hmac::HMAC_SHA256, authority.key.as_bytes());
                hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&secret, label.as_bytes()).as_ref())
            })
            .collect()
    }

    /// Returns the order with the revocations and the proofs that the node must store.
    pub(crate) fn with_history(&self, order: Order) -> Order {
        let view = self.view();
        let Some(key) = self.proof_keys(&view).into_iter().next() else { return order };
        let prove = |text: String| Bytes::copy_from_slice(hmac::sign(&key, text.as_bytes()).as_ref());
        let told = String::from_utf8_lossy(&order.document);
        let is_told = |one: &&Revoked| told.contains(&key_name(&one.key));
        let revoked = view.state.catalog.revoked().filter(is_told).map(|Revoked { node, key, until }| Revocation {
            node: node.to_string(),
            key: key.clone(),
            until: *until,
            proof: prove(of_key(node.as_str(), key, *until)),
        });
        let revoked = revoked.collect();
        let readmitted = view.state.readmitted.iter();
        let readmitted = readmitted.map(|(key, until)| Readmission { key: key.clone(), until: *until }).collect();
        let proof = prove(of_revision(order.revision));
        Order { revoked, readmitted, proof, ..order }
    }

    /// Recovers revocations and the revision that a node reports with proofs and that this store has lost. Returns the
    /// events for the audit log. `member` is the enrolled node with its key. If it is `None`, only revocations are
    /// recovered, so that a node that is not enrolled cannot make the controller withhold documents.
    ///
    /// # Errors
    /// The store cannot be written.
    pub(crate) async fn recall(
        &self,
        member: Option<(&Name, &str)>,
        report: &Report,
    ) -> Result<Vec<Event<'static>>, ApplyError> {
        let node = member.map_or("-", |(node, _)| node.as_str());
        let view = self.view();
        let is_any = !report.revoked.is_empty();
        let revoked: BTreeSet<&str> =
            view.state.catalog.revoked().filter(|_| is_any).map(|one| one.key.as_str()).collect();
        let is_news = |state: &crate::state::State, one: &Revocation| {
            let is_known = revoked.contains(one.key.as_str());
            one.until > now() && !is_known && state.readmitted.get(&one.key).is_none_or(|until| one.until > *until)
        };
        let is_later = member.is_some() && report.latest > view.state.revision.max(view.state.behind);
        let returned: Vec<_> =
            report.revoked.iter().filter(|one| is_news(&view.state, one)).take(MAX_RETURNED).collect();
        if returned.is_empty() && !is_later {
            return Ok(Vec::new());
        }
        let keys = self.proof_keys(&view);
        let is_proven =
            |text: &str, proof: &[u8]| keys.iter().any(|key| hmac::verify(key, text.as_bytes(), proof).is_ok());
        let returned: Vec<Revoked> = returned
            .into_iter()
            .filter(|one| is_proven(&of_key(&one.node, &one.key, one.until), &one.proof))
            .filter_map(|one| Some(Revoked { node: one.node.parse().ok()?, key: one.key.clone(), until: one.until }))
            .collect();
        let latest = Some(report.latest).filter(|latest| is_later && is_proven(&of_revision(*latest), &report.proof));
        let judge = |view: &StateView| {
            let state = &view.state;
            let mut changes = Vec::new();
            for revoked in returned.iter().filter(|one| !state.catalog.revoked().any(|view| view.key == one.key)) {
                if state.members.get(&revoked.node).is_some_and(|member| member.key == revoked.key) {
                    changes.push(Change::Expelled { node: revoked.node.clone() });
                }
                changes.push(Change::Revoked(revoked.clone()));
            }
            // The reported revocations may include the key of this node.
            let is_member = member.is_some_and(|(node, key)| {
                let is_current = state.members.get(node).is_some_and(|member| member.key == key);
                is_current && !returned.iter().any(|one| one.key == key)
            });
            let latest = latest.filter(|latest| is_member && *latest > state.revision.max(state.behind));
            changes.extend(latest.map(|revision| Change::Behind { revision }));
            Ok((changes, latest))
        };
        let (_, latest) = self.transact("controller", judge).await?;
        let event =
            |about: String| Event { what: "recall", by: Some("controller"), about: Some(about), ..Event::default() };
        let revoked =
            returned.iter().map(|one| event(format!("node {} is revoked, as reported by node {node}", one.node)));
        let mut events: Vec<_> = revoked.collect();
        if let Some(latest) = latest {
            let (own, why) = (view.state.revision, "the store has lost the revisions after its last one");
            tracing::error!(revision = own, "node {node} has run revision {latest}: {why}. {HELD}");
            events.push(event(format!("node {node} has run revision {latest}: {why} ({own})")));
        }
        Ok(events)
    }

    /// Confirms the content of the store, so that nodes receive documents from now on. Returns the revision of the
    /// confirmation.
    ///
    /// # Errors
    /// The store cannot be written.
    pub async fn confirm(&self, by: &str) -> Result<Revision, ApplyError> {
        let judge =
            |view: &StateView| Ok((view.state.is_unconfirmed.then_some(Change::Confirmed).into_iter().collect(), ()));
        Ok(self.transact(by, judge).await?.0)
    }
}

impl StateView {
    /// True while documents are withheld from nodes, because the store may have lost recent revocations.
    pub fn is_held(&self) -> bool {
        self.state.is_unconfirmed
    }

    /// Returns the enrolled nodes that have not reported the revocations that they store.
    pub(crate) fn missing<'a>(&'a self, is_there: impl Fn(&Name) -> bool + 'a) -> impl Iterator<Item = &'a Name> + 'a {
        self.state.members.keys().filter(move |node| !is_there(node))
    }
}

//! One authority follows another: how far nodes are, and the moment at which the newer one signs.
//!
//! In: what nodes say of whom they trust and who issued their certificates. Out: who is not there yet, and the next step of the
//! rotation when all that are connected are.
//! Never: the last step. That the older authority is trusted no more is for an operator to say.

use std::time::Duration;

use serde::Serialize;

use super::{Push, RETRY_INTERVAL};
use crate::audit::Event;
use crate::controller::{StateView, now};
use crate::document::Name;

/// A controller that has just begun waits so long for nodes to come before it takes their silence for agreement.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(10);

/// Words of nodes within this are counted together.
const BATCH_DELAY: Duration = Duration::from_millis(50);

/// How far a node is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Progress {
    /// Which one.
    pub name: Name,
    /// It is there.
    pub connected: bool,
    /// It trusts all that it is to trust.
    pub trusts: bool,
    /// The authority that signs has issued its certificate.
    pub current: bool,
    /// Why the next step has to wait for it; empty: it has not.
    pub lacks: Lacking,
}

/// Why the next step has to wait for a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Lacking(pub String);

impl Push {
    /// How far each node that has enrolled is.
    pub fn progress(&self, view: &StateView) -> Vec<Progress> {
        let trust = view.state.trust().unwrap_or_default();
        let is_leaving = view.state.rotation.as_ref().map(|rotation| rotation.is_leaving);
        let since = view.state.rotation.as_ref().map_or(0, |rotation| rotation.since);
        // Those that were issued before that are over by then.
        let over = since.saturating_add(view.state.longest_life());
        let of = |name: &Name| {
            let status = self.look(|statuses| statuses.trusting(name).cloned()).unwrap_or_default();
            let (connected, says) = (status.is_there(), !status.authorities.is_empty());
            let trusts = says && trust.fingerprints.is_subset(&status.authorities);
            let current = status.issuer == trust.issuer;
            let lacks = match (is_leaving, connected) {
                (None, _) | (Some(false), false) => "",
                (Some(_), true) if !says => {
                    "does not say whom it trusts: an older program, or an Envoy without its `hermes envoy`"
                }
                (Some(_), true) if !trusts => "does not trust the new authority yet",
                (Some(true), true) if !current => "still has a certificate of the authority that goes",
                (Some(true), false) if !current && now() < over => {
                    "is away, and its certificate may be of the authority that goes"
                }
                _ => "",
            };
            Progress { name: name.clone(), connected, trusts, current, lacks: Lacking(lacks.to_owned()) }
        };
        let nodes = view.state.members.keys().filter(|name| view.state.catalog.node(name).is_some());
        nodes.map(of).collect()
    }

    /// Has the newer authority sign as soon as all that are connected trust it, for as long as it is polled.
    pub(crate) async fn rotate(&self) {
        let (mut trust, mut said) = (self.controller.trust(), self.said());
        let arrival = tokio::time::Instant::now() + ARRIVAL_TIMEOUT;
        loop {
            trust.borrow_and_update();
            said.borrow_and_update();
            let view = self.controller.view();
            let is_wanted = view.state.rotation.as_ref().is_some_and(|rotation| !rotation.is_leaving);
            let since = view.state.rotation.as_ref().map_or(0, |rotation| rotation.since);
            let progress = if is_wanted { self.progress(&view) } else { Vec::new() };
            let is_ready = progress.iter().all(|node| node.lacks.0.is_empty());
            let is_early = tokio::time::Instant::now() < arrival && progress.iter().any(|node| !node.connected);
            if is_wanted && is_ready && !is_early {
                match self.controller.switch("controller", since).await {
                    Ok(revision) => {
                        let event = Event { what: "authority-switch", by: Some("controller"), ..Event::default() };
                        self.audit.tell(Event { revision: Some(revision), ..event });
                        continue;
                    }
                    Err(error) => {
                        tracing::warn!(again_in = ?RETRY_INTERVAL, "the new authority signs nothing yet: {error}")
                    }
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
                continue;
            }
            let pause = async {
                match is_early {
                    true => tokio::time::sleep_until(arrival).await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = trust.changed() => if changed.is_err() { return },
                changed = said.changed(), if is_wanted => {
                    if changed.is_err() {
                        return;
                    }
                    // What others say at the same time is counted with it: all nodes do.
                    tokio::time::sleep(BATCH_DELAY).await;
                }
                () = pause => {}
            }
        }
    }
}

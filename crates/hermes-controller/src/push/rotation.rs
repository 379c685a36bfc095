//! CA rotation: the progress of each node, and the moment at which the new CA signs.
//!
//! In: the trusted CAs and the issuer that each node reports. Out: the nodes that are not ready, and the next phase
//! once all connected nodes are.
//! Never: the last phase. An operator decides when the old CA is no longer trusted.

use std::time::Duration;

use serde::Serialize;

use super::{Push, RETRY_INTERVAL};
use crate::audit::Event;
use crate::controller::{StateView, now};
use crate::document::Name;

/// The time that nodes have to connect after the controller has started, before disconnected nodes are ignored.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(10);

/// Reports within this time are evaluated together.
const BATCH_DELAY: Duration = Duration::from_millis(50);

/// The progress of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Progress {
    /// The name of the node.
    pub name: Name,
    /// True if the node is connected.
    pub connected: bool,
    /// True if the node trusts all CAs that it must trust.
    pub trusts: bool,
    /// True if the CA that signs issued the node's certificate.
    pub current: bool,
    /// The reason why the next phase waits for the node; empty if it does not.
    pub lacks: Blocker,
}

/// The reason why the next phase waits for a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Blocker(pub String);

impl Push {
    /// The progress of each enrolled node.
    pub fn progress(&self, view: &StateView) -> Vec<Progress> {
        let trust = view.state.trust().unwrap_or_default();
        let is_leaving = view.state.rotation.as_ref().map(|rotation| rotation.is_leaving);
        let since = view.state.rotation.as_ref().map_or(0, |rotation| rotation.since);
        // Certificates issued before this phase of the rotation have expired by then.
        let over = since.saturating_add(view.state.longest_life());
        let of = |name: &Name| {
            let status = self.with_statuses(|statuses| statuses.trusting(name).cloned()).unwrap_or_default();
            let (connected, says) = (status.is_there(), !status.authorities.is_empty());
            let trusts = says && trust.fingerprints.is_subset(&status.authorities);
            let current = status.issuer == trust.issuer;
            let lacks = match (is_leaving, connected) {
                (None, _) | (Some(false), false) => "",
                (Some(_), true) if !says => {
                    "does not report its trusted CAs: an older program, or an Envoy without its `hermes envoy`"
                }
                (Some(_), true) if !trusts => "does not trust the new CA yet",
                (Some(true), true) if !current => "still has a certificate of the old CA",
                (Some(true), false) if !current && now() < over => {
                    "is disconnected, and may have a certificate of the old CA"
                }
                _ => "",
            };
            Progress { name: name.clone(), connected, trusts, current, lacks: Blocker(lacks.to_owned()) }
        };
        let nodes = view.state.members.keys().filter(|name| view.state.catalog.node(name).is_some());
        nodes.map(of).collect()
    }

    /// Makes the new CA sign once all connected nodes trust it. Runs for as long as it is polled.
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
                        let event = Event { what: "ca-switch", by: Some("controller"), ..Event::default() };
                        self.audit.record(Event { revision: Some(revision), ..event });
                        continue;
                    }
                    Err(error) => {
                        tracing::warn!(again_in = ?RETRY_INTERVAL, "cannot switch to the new CA: {error}")
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
                    // All nodes report at about the same time; one evaluation is enough.
                    tokio::time::sleep(BATCH_DELAY).await;
                }
                () = pause => {}
            }
        }
    }
}

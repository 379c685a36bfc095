//! What a node does beside its workers, on the main thread.
//!
//! In: generations, changes of the network, time. Out: endpoints that are well or not, certificates that end soon, our own
//! addresses as they are now, custody that goes on once its journal is free. Ends with the node. Never: a session.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hermes_model::snapshot::Snapshot;
use hermes_net::host::watch::Watch;
use tokio::task::AbortHandle;

use super::{LOOK_AGAIN, Node};
use crate::generation::Generation;
use crate::metrics::PathLabels;
use crate::upstream::{UpstreamState, health};

/// Changes of the network come in swarms, and each swarm is looked at once.
const CHANGES_APART: Duration = Duration::from_millis(20);
/// The machine's addresses are read again so often.
const ADDRESSES_EVERY: Duration = Duration::from_secs(5);

/// The health checks of one upstream.
pub(super) struct Probers {
    state: Arc<UpstreamState>,
    tasks: Vec<AbortHandle>,
}

impl Node {
    /// What was in custody before goes on. A process before this one may have its journal until it stops to listen.
    pub(super) fn begin_custody(&mut self, snapshot: &Snapshot) -> std::io::Result<()> {
        let Some(state) = &snapshot.state else { return Ok(()) };
        let (custody, directory) = (self.shared.custody.clone(), state.join("custody"));
        custody.will_store();
        custody.follow(snapshot);
        match custody.store_in(&directory) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => {
                let text =
                    format!("{}: {error}; name a directory that this node can make and write", directory.display());
                return Err(std::io::Error::new(error.kind(), text));
            }
            Ok(()) => return Ok(()),
        }
        let shown = directory.display();
        if self.inherited.is_empty() {
            tracing::warn!(
                directory = %shown,
                "another process has the journal of custody, and nothing is taken into custody until it has gone; a node that \
                 is to run beside it needs another `state`"
            );
        } else {
            tracing::info!(directory = %shown, "another process has the journal of custody; waiting for it to go");
        }
        self.background.spawn(async move {
            // Nothing tells of a lock that is free.
            let mut again = tokio::time::interval(LOOK_AGAIN);
            loop {
                again.tick().await;
                match custody.store_in(&directory) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => {
                        tracing::error!(
                            directory = %directory.display(), %error,
                            "the journal of custody cannot be read, and nothing is taken into custody; see to that directory, \
                             and start the node again"
                        );
                        return custody.give_up();
                    }
                    Ok(()) => return,
                }
            }
        });
        Ok(())
    }

    /// Checks the health of this generation's upstreams. Checks of those that are kept go on: to begin
    /// anew with every reload would be to never come to a result.
    pub(super) fn watch_health(&mut self, generation: &Generation) {
        let current: HashSet<u64> = generation.upstreams().map(|state| state.id).collect();
        let gone: Vec<u64> = self.probers.keys().filter(|id| !current.contains(id)).copied().collect();
        for probers in gone.iter().filter_map(|id| self.probers.remove(id)) {
            probers.tasks.iter().for_each(AbortHandle::abort);
            health::forget(&self.shared.metrics, &probers.state);
        }
        for state in generation.upstreams() {
            let Some(check) = state.config.health.as_ref().filter(|_| !self.probers.contains_key(&state.id)) else {
                continue;
            };
            let probe = |index| health::probe_forever(state.clone(), index, check.clone(), self.shared.clone());
            let tasks = (0..state.endpoints.len()).map(|index| self.background.spawn(probe(index))).collect();
            self.probers.insert(state.id, Probers { state: state.clone(), tasks });
        }
        // Those that were aborted before.
        while self.background.try_join_next().is_some() {}
    }

    /// In the metrics until when each is good, in the log those that are not for long.
    pub(super) fn tell_certificates(&self, generation: &Generation) {
        let ends = &self.shared.metrics.certificates;
        ends.clear();
        for certificate in generation.certificates() {
            ends.get_or_create(&PathLabels { path: certificate.path.clone() }).set(certificate.not_after);
            if let Some(warning) = certificate.warning(SystemTime::now()) {
                tracing::warn!("{}: {warning}", certificate.path);
            }
        }
    }

    /// Looks at our own addresses whenever the network changes, and now and then.
    pub(super) fn watch_addresses(&mut self) {
        let shared = self.shared.clone();
        self.background.spawn(async move {
            let mut every = tokio::time::interval(ADDRESSES_EVERY);
            let mut changes = Watch::new().inspect_err(|error| {
                tracing::warn!(%error, "changes of the network are seen only now and then");
            });
            loop {
                // Where nothing tells, or it broke, the clock does.
                let heard = async {
                    let Ok(changes) = &mut changes else { return std::future::pending().await };
                    if changes.next().await.is_err() {
                        std::future::pending::<()>().await;
                    }
                };
                tokio::select! {
                    _ = every.tick() => {}
                    () = heard => {}
                }
                shared.refresh_own_addresses();
                shared.network.send_replace(());
                tokio::time::sleep(CHANGES_APART).await;
            }
        });
    }
}

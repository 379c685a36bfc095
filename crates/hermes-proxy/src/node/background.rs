//! Background tasks of a node, on the main thread.
//!
//! In: generations, network changes, time. Out: endpoint health, warnings about expiring certificates, the host's
//! current addresses, and custody once its journal is free. Ends with the node. Never: a session.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hermes_model::snapshot::Snapshot;
use hermes_net::host::watch::HostWatch;
use tokio::task::AbortHandle;

use super::{Node, STATE_POLL_INTERVAL};
use hermes_outbound::generation::Generation;
use hermes_outbound::outbound::health;
use hermes_outbound::upstream::UpstreamState;
use hermes_transport::metrics::PathLabels;

/// The pause that collects a burst of network changes into one.
const CHANGES_APART: Duration = Duration::from_millis(20);
/// The interval at which the host's addresses are read again.
const ADDRESSES_EVERY: Duration = Duration::from_secs(5);

/// The health checks of one upstream.
pub(super) struct Probers {
    state: Arc<UpstreamState>,
    tasks: Vec<AbortHandle>,
}

impl Node {
    /// Resumes stored custody. A predecessor may hold the journal until it stops listening.
    pub(super) fn begin_custody(&mut self, snapshot: &Snapshot) -> std::io::Result<()> {
        let Some(state) = &snapshot.state else { return Ok(()) };
        let (custody, directory) = (self.services.custody.clone(), state.join("custody"));
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
                "another process uses the custody journal; this node accepts no custody until that process exits. Give each node its own `state`"
            );
        } else {
            tracing::info!(directory = %shown, "another process uses the custody journal; waiting until it exits");
        }
        self.background.spawn(async move {
            // The release of a file lock signals no event.
            let mut again = tokio::time::interval(STATE_POLL_INTERVAL);
            loop {
                again.tick().await;
                match custody.store_in(&directory) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => {
                        tracing::error!(
                            directory = %directory.display(), %error,
                            "cannot read the custody journal; this node accepts no custody. Repair or remove the directory, and restart the node"
                        );
                        return custody.give_up();
                    }
                    Ok(()) => return,
                }
            }
        });
        Ok(())
    }

    /// Starts the health checks of new upstreams. Checks of unchanged upstreams continue: a restart with every reload
    /// might never reach a result.
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
            let probe = |index| {
                health::probe_forever(state.clone(), index, check.clone(), self.shared.clone(), self.channels.clone())
            };
            let tasks = (0..state.endpoints.len()).map(|index| self.background.spawn(probe(index))).collect();
            self.probers.insert(state.id, Probers { state: state.clone(), tasks });
        }
        // Reaps the tasks that were aborted.
        while self.background.try_join_next().is_some() {}
    }

    /// Sets the expiry metrics of all certificates, and logs those that expire soon.
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

    /// Reads the host's addresses at each network change, and periodically.
    pub(super) fn watch_addresses(&mut self) {
        let shared = self.shared.clone();
        self.background.spawn(async move {
            let mut every = tokio::time::interval(ADDRESSES_EVERY);
            let mut changes = HostWatch::new().inspect_err(|error| {
                tracing::warn!(%error, "changes of the network are seen only now and then");
            });
            loop {
                // Without events, or after an error, only the interval remains.
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

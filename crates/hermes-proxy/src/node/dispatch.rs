//! How new connections come to workers, in the mode of the document (paper 003).
//!
//! In: the mode and its settings, and the sockets of all listeners. Out: the table of workers, and what the kernel chooses sockets by.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hermes_model::snapshot::{Dispatch, DispatchMode, Role, Snapshot};
use hermes_net::dispatch::listeners::{Listeners, Sockets};
use hermes_net::dispatch::scheduler::Parameters;
use hermes_net::dispatch::{Groups, Mode};
use hermes_net::host::cores;
use hermes_transport::runtime::sandbox;
use hermes_transport::runtime::workers::Workers;

use super::sockets::{Socket, SocketKey};
use crate::listener::Transport;

/// The way in which the kernel chooses sockets.
#[derive(Default)]
pub(super) struct Dispatchers {
    listeners: Listeners<SocketKey>,
    /// The log has it that the kernel hashes instead.
    is_reported: bool,
}

impl Dispatchers {
    /// Leaves all sockets to a successor.
    pub(super) fn release(&mut self) {
        self.listeners.release();
    }

    /// Applies the document to all listeners, whose sockets `bound` names. A predecessor still reads the sockets of `held_back`.
    pub(super) fn follow(
        &mut self,
        dispatch: &Dispatch,
        workers: &Workers,
        bound: &HashMap<(Arc<str>, Transport), SocketKey>,
        sockets: &HashMap<SocketKey, Vec<Socket>>,
        held_back: &HashSet<SocketKey>,
    ) {
        let table = &workers.table;
        self.listeners.retain(|key| sockets.contains_key(key));
        // New listeners may get the bits of those that have gone.
        table.confine(table.confined() & self.listeners.bits());
        let mode = match dispatch.mode {
            DispatchMode::Reuseport => Mode::Hash,
            DispatchMode::Directed => Mode::Directed,
            DispatchMode::RoundRobin => Mode::RoundRobin,
            DispatchMode::Exclusive => Mode::First,
        };
        table.set_parameters(&parameters(dispatch));
        let mut is_applied = true;
        for (key, sockets) in sockets.iter().filter(|(key, sockets)| sockets.len() > 1 && !held_back.contains(key)) {
            let group: Vec<_> = sockets.iter().filter_map(Socket::tcp).collect();
            let sockets = match &sockets[0] {
                Socket::Tcp(_) => Sockets::Tcp(&group),
                Socket::Quic(group, _) => {
                    let (sockets, tag) = group.sockets();
                    Sockets::Quic(sockets, tag)
                }
                _ => continue,
            };
            let applied = self.listeners.apply(mode, table, key, sockets);
            if let Err(error) = applied {
                is_applied = false;
                if !std::mem::replace(&mut self.is_reported, true) {
                    tracing::warn!(
                        address = %key,
                        %error,
                        "the kernel hashes connections onto workers; this mode of `dispatch` needs CAP_BPF and CAP_NET_ADMIN"
                    );
                }
            }
        }
        self.is_reported &= !is_applied;
        table.set_mode(if is_applied { mode } else { Mode::Hash });
        let programs = self.programs(bound);
        // Also without privileges: the kernel hashes, and idle workers help.
        workers.relieves.store(mode == Mode::Directed, Ordering::Relaxed);
        let is_directed = is_applied && mode == Mode::Directed;
        let sandbox = if is_directed { sandbox(dispatch) } else { sandbox::Settings::default() };
        workers.sandbox.follow(table, sandbox, programs.into_iter());
    }

    /// The bits of each listener; 0 if one of its sockets has no bit, so that it cannot be confined.
    fn programs(&self, bound: &HashMap<(Arc<str>, Transport), SocketKey>) -> HashMap<Arc<str>, u64> {
        let mut programs: HashMap<Arc<str>, Option<u64>> = HashMap::new();
        for ((listener, transport), key) in bound {
            if matches!(transport, Transport::Tcp | Transport::Quic) {
                let bit = Some(self.listeners.bit(key)).filter(|bit| *bit != 0);
                let bits = programs.entry(listener.clone()).or_insert(Some(0));
                *bits = bits.zip(bit).map(|(bits, bit)| bits | bit);
            }
        }
        programs.into_iter().map(|(listener, bits)| (listener, bits.unwrap_or_default())).collect()
    }
}

/// How the workers of a node form groups, for its whole life.
pub(super) fn groups(dispatch: &Dispatch, workers: usize) -> Groups {
    dispatch.locality.map_or_else(|| Groups::of(workers), |size| Groups::by_destination(workers, size.into()))
}

/// True if each worker stays on a core of its own. A router has its machine for itself; a node on a device shares it with the programs
/// that it serves, and a pinned worker would wait for them.
pub(super) fn pins(snapshot: &Snapshot, workers: usize) -> bool {
    let asked = snapshot.dispatch.pin;
    let is_wanted = asked.unwrap_or(snapshot.role == Role::Standalone);
    let has_cores = cores::count().is_ok_and(|cores| cores == workers);
    if asked == Some(true) && !has_cores {
        tracing::warn!(
            workers,
            "`dispatch.pin` needs as many workers as cores that this process may use; set `workers: auto`"
        );
    }
    is_wanted && has_cores
}

fn sandbox(dispatch: &Dispatch) -> sandbox::Settings {
    sandbox::Settings { workers: dispatch.sandbox_workers, after: dispatch.sandbox_after }
}

fn parameters(dispatch: &Dispatch) -> Parameters {
    let share = |percent: u16| f64::from(percent) / 100.0;
    Parameters {
        hung_after: dispatch.hung_after,
        session_weight: share(dispatch.session_weight),
        connections_offset: share(dispatch.connections_offset),
        pending_offset: share(dispatch.pending_offset),
    }
}

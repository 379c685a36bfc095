//! Addresses that guarded routes must not dial: what this node itself listens on, its controllers, metadata services.
//!
//! In: where listeners, the admin endpoint and controllers are. Out: why an address is refused.
//! Never: a name that is trusted: addresses are checked after they were resolved, right before they are dialled.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use hermes_model::Snapshot;
use hermes_model::guard;

use crate::node::Bound;
use crate::worker::Worker;

const LISTENER: &str = "is where this node itself listens, and the route is guarded";
const ADMIN: &str = "is this node's admin endpoint, and the route is guarded";
const CONTROLLER: &str = "is this node's controller, and the route is guarded";

/// What is known of them.
#[derive(Default)]
pub(crate) struct Guard {
    /// Of this node: of the document, and where it really listens.
    listening: ArcSwap<Vec<(SocketAddr, &'static str)>>,
    /// Where the admin endpoint really listens.
    admin: ArcSwap<Option<SocketAddr>>,
    /// Host and port of each controller.
    controllers: OnceLock<Vec<(String, u16)>>,
}

impl Guard {
    /// The node listens there, or is about to.
    pub(crate) fn listen(&self, snapshot: &Snapshot, bound: Vec<Bound>) {
        let named = snapshot.listeners.iter().filter_map(|listener| listener.bind);
        let all = named.chain(bound.into_iter().map(|bound| bound.address)).map(|address| (address, LISTENER));
        self.listening.store(Arc::new(all.chain(snapshot.admin.map(|address| (address, ADMIN))).collect()));
    }

    /// The admin endpoint listens there.
    pub(crate) fn admin(&self, address: Option<SocketAddr>) {
        self.admin.store(Arc::new(address));
    }

    /// These are the node's controllers.
    pub(crate) fn controlled_by(&self, controllers: Vec<(String, u16)>) {
        // Once a process: they are options of its command line.
        let _ = self.controllers.set(controllers);
    }

    /// Addresses of controllers with this port, as they are resolved now.
    pub(crate) async fn controllers(&self, worker: &Worker, port: u16) -> Vec<SocketAddr> {
        let mut all = Vec::new();
        for (host, _) in self.controllers.get().into_iter().flatten().filter(|(_, theirs)| *theirs == port) {
            // One without an address cannot be dialled by it either.
            let Ok(found) = worker.resolver.resolve(host.trim_matches(['[', ']'])).await else { continue };
            let late = found.late().await;
            let addresses = found.now().iter().copied().chain(late);
            all.extend(addresses.map(|address| SocketAddr::from((address, port))));
        }
        all
    }

    /// Why a guarded route may not dial this.
    pub(crate) fn forbids(
        &self,
        to: SocketAddr,
        controllers: &[SocketAddr],
        own: &dyn Fn(IpAddr) -> bool,
    ) -> Option<&'static str> {
        let listening = self.listening.load();
        let admin = (**self.admin.load()).map(|address| (address, ADMIN));
        // One on this machine may listen on all of its addresses.
        let everywhere = |address: SocketAddr| {
            let is_here = address.ip().is_loopback() || own(address.ip());
            if is_here { SocketAddr::from(([0; 8], address.port())) } else { address }
        };
        let controllers = controllers.iter().map(|address| (everywhere(*address), CONTROLLER));
        guard::forbids(to, listening.iter().copied().chain(admin).chain(controllers), own)
    }
}

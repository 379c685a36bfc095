//! Addresses that guarded routes must not dial: this node's own listeners, its controllers, metadata services.
//!
//! In: the addresses of listeners, of the admin endpoint and of controllers. Out: the reason why an address must not be
//! dialled. Never: a check of a host name instead of its addresses. They are checked after resolution, right before the
//! dial.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use hermes_model::Snapshot;
use hermes_model::ssrf_guard;
use hermes_net::resolve::Resolver;

const LISTENER: &str = "is where this node itself listens, and the route is guarded";
const ADMIN: &str = "is this node's admin endpoint, and the route is guarded";
const CONTROLLER: &str = "is this node's controller, and the route is guarded";

/// The addresses that guarded routes must not dial.
#[derive(Default)]
pub struct DialGuard {
    /// The addresses of the node's listeners and of the admin endpoint, each with the reason for an error message. They
    /// are the configured addresses and the bound ones.
    listening: ArcSwap<Vec<(SocketAddr, &'static str)>>,
    /// The bound address of the admin endpoint; `None` if it has none.
    admin: ArcSwap<Option<SocketAddr>>,
    /// Host and port of each controller.
    controllers: OnceLock<Vec<(String, u16)>>,
}

impl DialGuard {
    /// Sets the addresses on which the node listens (`bound`), or will listen by its configuration (`snapshot`).
    pub fn listen(&self, snapshot: &Snapshot, bound: impl Iterator<Item = SocketAddr>) {
        let named = snapshot.listeners.iter().filter_map(|listener| listener.bind);
        let all = named.chain(bound).map(|address| (address, LISTENER));
        self.listening.store(Arc::new(all.chain(snapshot.admin.map(|address| (address, ADMIN))).collect()));
    }

    /// Sets the bound address of the admin endpoint; `None` if it has none.
    pub fn admin(&self, address: Option<SocketAddr>) {
        self.admin.store(Arc::new(address));
    }

    /// Sets host and port of each controller of the node.
    pub fn controlled_by(&self, controllers: Vec<(String, u16)>) {
        // Only the first call has an effect. Controllers are command-line options, so they never change.
        let _ = self.controllers.set(controllers);
    }

    /// Resolves and returns the addresses of those controllers that listen on this port.
    pub async fn controllers(&self, resolver: &Resolver, port: u16) -> Vec<SocketAddr> {
        let mut all = Vec::new();
        for (host, _) in self.controllers.get().into_iter().flatten().filter(|(_, theirs)| *theirs == port) {
            // If the name of a controller does not resolve, a route cannot dial it by that name either.
            let Ok(found) = resolver.resolve(host.trim_matches(['[', ']'])).await else { continue };
            let late = found.late().await;
            let addresses = found.now().iter().copied().chain(late);
            all.extend(addresses.map(|address| SocketAddr::from((address, port))));
        }
        all
    }

    /// Returns the reason why a guarded route must not dial this address, or `None` if it may.
    pub fn forbids(
        &self,
        to: SocketAddr,
        controllers: &[SocketAddr],
        own: &dyn Fn(IpAddr) -> bool,
    ) -> Option<&'static str> {
        let listening = self.listening.load();
        let admin = (**self.admin.load()).map(|address| (address, ADMIN));
        // A controller on this host may listen on all of its addresses, so all of them count as the controller's.
        let everywhere = |address: SocketAddr| {
            let is_here = address.ip().is_loopback() || own(address.ip());
            if is_here { SocketAddr::from(([0; 8], address.port())) } else { address }
        };
        let controllers = controllers.iter().map(|address| (everywhere(*address), CONTROLLER));
        ssrf_guard::forbids(to, listening.iter().copied().chain(admin).chain(controllers), own)
    }
}

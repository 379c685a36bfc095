//! Addresses that guarded routes must not dial: this node's own listeners, its controllers, metadata services.
//!
//! In: the addresses of listeners, of the admin endpoint and of controllers. Out: the reason why an address is refused.
//! Never: trust in a name. Addresses are checked after resolution, right before the dial.

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
    /// The node's listeners: addresses of the document, and the bound ones.
    listening: ArcSwap<Vec<(SocketAddr, &'static str)>>,
    /// The bound address of the admin endpoint.
    admin: ArcSwap<Option<SocketAddr>>,
    /// Host and port of each controller.
    controllers: OnceLock<Vec<(String, u16)>>,
}

impl DialGuard {
    /// Sets the addresses on which the node listens or will listen.
    pub fn listen(&self, snapshot: &Snapshot, bound: impl Iterator<Item = SocketAddr>) {
        let named = snapshot.listeners.iter().filter_map(|listener| listener.bind);
        let all = named.chain(bound).map(|address| (address, LISTENER));
        self.listening.store(Arc::new(all.chain(snapshot.admin.map(|address| (address, ADMIN))).collect()));
    }

    /// Sets the address of the admin endpoint.
    pub fn admin(&self, address: Option<SocketAddr>) {
        self.admin.store(Arc::new(address));
    }

    /// Sets the node's controllers.
    pub fn controlled_by(&self, controllers: Vec<(String, u16)>) {
        // Set once in a process: controllers are options of the command line.
        let _ = self.controllers.set(controllers);
    }

    /// Resolves the addresses of controllers with this port.
    pub async fn controllers(&self, resolver: &Resolver, port: u16) -> Vec<SocketAddr> {
        let mut all = Vec::new();
        for (host, _) in self.controllers.get().into_iter().flatten().filter(|(_, theirs)| *theirs == port) {
            // A controller that does not resolve cannot be dialled by name either.
            let Ok(found) = resolver.resolve(host.trim_matches(['[', ']'])).await else { continue };
            let late = found.late().await;
            let addresses = found.now().iter().copied().chain(late);
            all.extend(addresses.map(|address| SocketAddr::from((address, port))));
        }
        all
    }

    /// The reason why a guarded route must not dial this address.
    pub fn forbids(
        &self,
        to: SocketAddr,
        controllers: &[SocketAddr],
        own: &dyn Fn(IpAddr) -> bool,
    ) -> Option<&'static str> {
        let listening = self.listening.load();
        let admin = (**self.admin.load()).map(|address| (address, ADMIN));
        // A controller on this host may listen on all addresses.
        let everywhere = |address: SocketAddr| {
            let is_here = address.ip().is_loopback() || own(address.ip());
            if is_here { SocketAddr::from(([0; 8], address.port())) } else { address }
        };
        let controllers = controllers.iter().map(|address| (everywhere(*address), CONTROLLER));
        ssrf_guard::forbids(to, listening.iter().copied().chain(admin).chain(controllers), own)
    }
}

//! A worker's state, for the tasks that serve its sessions.
//!
//! In: the running generation. Out: the sending side ([`Outbound`]), the services of the node that filters use, and the
//! devices. Never: the loop that runs it (`node/worker_loop.rs`).

use std::cell::{Cell, RefCell};
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use hermes_architecture::Environment;
use hermes_architecture::ndn::forwarder::Forwarders;
use hermes_architecture::ndn::waiting_interest::{STORE_LIMITS, WaitingInterest};
use hermes_architecture::race::Standings;
use hermes_architecture::rina::IpcProcesses;
use hermes_cache::registry::CacheRegistry;
use hermes_custody::service::CustodyService;
use hermes_ndn::content_store::ContentStore;
use hermes_relay_service::Relays;

use crate::ip::{AddressLeases, Devices};
use hermes_outbound::outbound::Outbound;
use hermes_outbound::rate_limit::RateLimiters;
use hermes_transport::runtime::fair_shares::Shares;

/// The services of a node, which all workers share.
pub(crate) struct Services {
    /// The response caches of routes.
    pub(crate) caches: CacheRegistry,
    /// The custody service.
    pub(crate) custody: Arc<CustodyService>,
    /// The learnt rates of services.
    pub(crate) rate_limiters: RateLimiters,
    /// The relays of routes.
    pub(crate) relays: Relays,
    /// The address leases of devices' clients.
    pub(crate) given: Arc<AddressLeases>,
}

impl Default for Services {
    fn default() -> Self {
        Self {
            caches: CacheRegistry::default(),
            custody: Arc::new(CustodyService::new()),
            rate_limiters: RateLimiters::default(),
            relays: Relays::default(),
            given: Arc::default(),
        }
    }
}

/// A worker's state.
pub(crate) struct Worker {
    pub(crate) outbound: Rc<Outbound>,
    pub(crate) services: Arc<Services>,
    pub(crate) devices: Rc<Devices>,
    /// Pending handshakes of clients over QUIC.
    pub(crate) quic_handshakes: Cell<usize>,
    /// The content that `ndn` listeners publish.
    pub(crate) ndn_content: RefCell<ContentStore<WaitingInterest>>,
    /// The IPC processes through which routes request flows of RINA.
    pub(crate) ipc_processes: IpcProcesses,
    /// The forwarders of routes that translate requests to NDN.
    pub(crate) ndn_forwarders: Forwarders,
    /// The results of races.
    pub(crate) standings: Standings,
    /// Requests of routes with `resume` that wait for a retry.
    pub(crate) resume_pending: Arc<Shares>,
}

impl Deref for Worker {
    type Target = Rc<Outbound>;

    fn deref(&self) -> &Rc<Outbound> {
        &self.outbound
    }
}

impl Worker {
    pub(crate) fn new(outbound: Rc<Outbound>, services: Arc<Services>) -> Self {
        Self {
            outbound,
            services,
            devices: Rc::default(),
            quic_handshakes: Cell::default(),
            ndn_content: RefCell::new(ContentStore::new(STORE_LIMITS)),
            ipc_processes: IpcProcesses::default(),
            ndn_forwarders: Forwarders::default(),
            standings: Standings::default(),
            resume_pending: Arc::default(),
        }
    }

    /// The state that architectures beyond this node share.
    pub(crate) fn environment(&self) -> Environment<'_> {
        Environment { outbound: &self.outbound, processes: &self.ipc_processes, standings: &self.standings }
    }
}

//! The sending side of a worker: the running generation, and the connections to endpoints.
//!
//! In: requests and tunnels for an upstream, an origin or a node. Out: exchanges and streams on pooled connections.
//! Never: the choice of a route, or a listener.

pub mod client_stream;
pub mod connect;
pub mod exchange;
pub mod health;
pub mod pool;
pub mod post_tunnel;
pub mod read_quota;
pub mod reverse_acceptor;
pub mod targets;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::IpAddr;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use hermes_net::quic::{self, Endpoint};

use self::pool::idle::{self, Idle};
use self::pool::{Pool, PoolKey};
use crate::generation::Generation;
use crate::reverse::channels::Channels;
use hermes_transport::runtime::WorkerContext;

/// The generation, with a reference count of this worker alone. Requests on two workers would contend for the cache
/// line of a shared atomic count.
#[allow(clippy::redundant_allocation)] // See above.
pub type Current = Rc<Arc<Generation>>;

/// The sending side of a worker.
pub struct Outbound {
    context: Rc<WorkerContext>,
    generation: RefCell<Current>,
    pools: RefCell<HashMap<PoolKey, Rc<Pool>, foldhash::fast::RandomState>>,
    /// Idle connections of all pools.
    idle: Idle,
    quic_clients: RefCell<[Option<Endpoint>; 2]>,
    /// The time at which they were last told of a network change.
    migrated_at: Cell<u64>,
    /// Passes reverse connections and queries to the workers that they belong to.
    channels: Arc<Channels>,
}

/// The time within which notices of a network change count as one, in milliseconds. Several connections notice each
/// change.
const MIGRATION_INTERVAL: u64 = 20;

impl Deref for Outbound {
    type Target = Rc<WorkerContext>;

    fn deref(&self) -> &Rc<WorkerContext> {
        &self.context
    }
}

impl Outbound {
    pub fn new(context: Rc<WorkerContext>, generation: Arc<Generation>, channels: Arc<Channels>) -> Self {
        Self {
            context,
            generation: RefCell::new(Rc::new(generation)),
            pools: RefCell::default(),
            idle: Idle::default(),
            quic_clients: RefCell::default(),
            migrated_at: Cell::new(0),
            channels,
        }
    }

    /// The running generation. Hold it for one decision, not for a session.
    pub fn generation(&self) -> Current {
        self.generation.borrow().clone()
    }

    /// Runs another generation from now on. Returns the previous one.
    pub fn set_generation(&self, generation: &Arc<Generation>) -> Current {
        self.set_snapshot(generation.snapshot.clone(), generation.listener_shares().cloned().collect());
        self.generation.replace(Rc::new(generation.clone()))
    }

    /// The name behind a virtual address, if a DNS listener assigned it. Holding the name reserves the address for it;
    /// a session does so in its authority.
    pub fn name_of(&self, address: IpAddr) -> Option<Arc<str>> {
        self.generation().name_tables().iter().find_map(|table| table.name_of(address, self.now()))
    }

    /// The endpoint for outgoing HTTP/3 connections.
    ///
    /// # Errors
    /// No socket can be opened.
    pub fn quic_client(&self, is_v4: bool) -> std::io::Result<Endpoint> {
        let mut clients = self.quic_clients.borrow_mut();
        let client = &mut clients[usize::from(is_v4)];
        match client {
            Some(endpoint) => Ok(endpoint.clone()),
            None => {
                let largest = self.snapshot().limits.quic_max_mtu;
                Ok(client.insert(quic::client_endpoint(is_v4, largest, &self.quic)?).clone())
            }
        }
    }

    /// Migrates outgoing QUIC connections after a network change, once for all of them.
    pub fn migrate_quic_clients(&self) {
        let now = self.shared.now();
        if now < self.migrated_at.replace(now) + MIGRATION_INTERVAL {
            return;
        }
        for client in self.quic_clients.borrow().iter().flatten() {
            if let Err(error) = quic::move_client(client) {
                tracing::warn!(%error, "outgoing QUIC connections could not migrate after a network change");
            }
        }
    }

    /// The pool of an endpoint.
    pub fn pool(&self, key: PoolKey) -> Rc<Pool> {
        self.pools.borrow_mut().entry(key).or_default().clone()
    }

    /// Closes the upstream connections that were idle for longest, if the limit is reached.
    fn make_room_for_idle(&self) {
        let limit = self.snapshot().limits.upstream_idle_connections;
        if !self.idle.is_full(limit) {
            return;
        }
        let pools = self.pools.borrow();
        let mut turns = Vec::new();
        pools.values().for_each(|pool| pool.idle_turns(&mut turns));
        let closed =
            idle::last_to_go(turns, limit).map_or(0, |last| pools.values().map(|pool| pool.close_idle(last)).sum());
        for _ in 0..closed {
            self.shared.metrics.limit("upstream-idle-connections");
        }
    }

    /// Closes connections that were idle for too long. Called a few times a second.
    pub fn sweep_pools(&self) {
        let idle = self.snapshot().limits.upstream_idle;
        self.pools.borrow_mut().retain(|_, pool| !pool.sweep(self, idle));
    }

    /// Retires the pools of upstreams, routes and nodes that the running document no longer has.
    pub fn retire_pools(&self) {
        let generation = self.generation();
        let owners = generation.owners();
        self.pools.borrow_mut().retain(|key, pool| {
            let kept = match key.node() {
                Some(node) => generation.node(node).is_some(),
                None => owners.contains(&key.owner),
            };
            if !kept {
                pool.retire();
            }
            kept
        });
    }

    /// Closes all connections. Dropping the handles closes them, so that peers need not wait for an idle timeout.
    pub async fn end(&self) {
        self.pools.borrow_mut().clear();
        self.quic_clients.take();
        self.quic.finish().await;
    }
}

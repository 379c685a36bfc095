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
use std::time::Duration;

use hermes_model::snapshot::Step;
use hermes_net::quic::{self, Endpoint};
use tokio::sync::Notify;

use self::pool::idle::{self, Idle};
use self::pool::{Pool, PoolKey};
use crate::generation::Generation;
use crate::reverse::channels::Channels;
use hermes_transport::runtime::WorkerContext;

/// The running generation. The outer `Rc` has a reference count that only this worker changes: workers would contend
/// for the cache line of the inner, atomic count.
#[allow(clippy::redundant_allocation)] // The comment above gives the reason.
pub type Current = Rc<Arc<Generation>>;

/// The sending side of a worker.
pub struct Outbound {
    context: Rc<WorkerContext>,
    generation: RefCell<Current>,
    pools: RefCell<HashMap<PoolKey, Rc<Pool>, foldhash::fast::RandomState>>,
    /// The number of idle connections in all pools.
    idle: Idle,
    /// The QUIC endpoints for outgoing connections, over IPv6 and IPv4; `None` until the first use.
    quic_clients: RefCell<[Option<Endpoint>; 2]>,
    /// The time at which the QUIC endpoints last migrated, in milliseconds of the node's clock.
    migrated_at: Cell<u64>,
    /// The channels that pass reverse connections and queries to other workers.
    channels: Arc<Channels>,
    /// Wakes tasks that follow the running generation.
    pub generation_set: Notify,
}

/// The minimum time between two migrations, in milliseconds. Several connections notice each network change, but only
/// the first notice causes a migration.
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
            generation_set: Notify::new(),
        }
    }

    /// Returns the running generation. Callers should keep it for one decision, not for a session: it would stay in
    /// memory after a reload.
    pub fn generation(&self) -> Current {
        self.generation.borrow().clone()
    }

    /// Replaces the running generation, and returns the previous one.
    pub fn set_generation(&self, generation: &Arc<Generation>) -> Current {
        self.set_snapshot(generation.snapshot.clone(), generation.listener_shares());
        let previous = self.generation.replace(Rc::new(generation.clone()));
        self.generation_set.notify_waiters();
        previous
    }

    /// Returns the name to which a DNS listener assigned this virtual address, or `None`. As long as a clone of the
    /// returned name exists, the address stays assigned. A session stores a clone in its authority.
    pub fn name_of(&self, address: IpAddr) -> Option<Arc<str>> {
        self.generation().name_tables().iter().find_map(|table| table.name_of(address, self.now()))
    }

    /// Returns the QUIC endpoint for outgoing HTTP/3 connections, and opens it at the first call.
    ///
    /// # Errors
    /// The socket cannot be opened.
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

    /// Migrates all outgoing QUIC connections to a new local address after a network change. Further calls for the same
    /// change have no effect.
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

    /// Returns the connection pool of an endpoint.
    pub fn pool(&self, key: PoolKey) -> Rc<Pool> {
        self.pools.borrow_mut().entry(key).or_default().clone()
    }

    /// Closes the longest idle upstream connections if the limit of idle connections is reached.
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

    /// Closes connections that were idle for too long. Called several times a second.
    pub fn sweep_pools(&self) {
        let shrinks = self.overload.takes(Step::Shrink);
        let idle = if shrinks { Duration::ZERO } else { self.snapshot().limits.upstream_idle };
        self.pools.borrow_mut().retain(|_, pool| !pool.sweep(self, idle));
    }

    /// Retires the pools of upstreams, routes and nodes that the running generation no longer has.
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

    /// Closes all connections when the worker ends. An explicit close spares the peers the wait for an idle timeout.
    pub async fn end(&self) {
        self.pools.borrow_mut().clear();
        self.quic_clients.take();
        self.quic.finish().await;
    }
}

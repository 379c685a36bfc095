//! A generation: one snapshot made ready to run.
//!
//! In: a checked snapshot, and the previous generation. Out: TLS configurations loaded from files, upstreams with their
//! state (kept if nothing about them changed), IDs for pools. All steps that can fail are here, before anything running
//! changes.

mod builder;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use hermes_model::facts::Peer;
use hermes_model::limits::Limits;
use hermes_model::pattern::HostPattern;
use hermes_model::snapshot::{
    Action, ClientAuth, Endpoint, Listener, ListenerProtocol, Route, Snapshot, Terminate, Upstream, VirtualIpPools,
};
use hermes_model::trust;
use hermes_net::keyed_hash::KeyedHash;
use hermes_net::quic;
use hermes_net::tls::{CertifiedKey, Roots, RustlsClientConfig, RustlsServerConfig};

use self::builder::Builder;
use crate::reverse::ReversePeer;
use crate::upstream::{ClientTls, UpstreamState};
use crate::virtual_ip::VirtualIpPool;
use hermes_transport::error::Error;
use hermes_transport::headers::Via;
use hermes_transport::runtime::fair_shares::Shares;

/// A map by name in the document. Requests look names up but do not choose them, so a fast hash without DoS protection
/// is enough.
type ByName<T> = HashMap<Arc<str>, T, foldhash::fast::RandomState>;

/// A snapshot, ready to run.
pub struct Generation {
    /// Counter from 1 in this process.
    pub number: u64,
    /// Snapshot of the node's document.
    pub snapshot: Arc<Snapshot>,
    /// The overlay's name; empty without an identity.
    pub overlay: Arc<str>,
    pub via: Via,
    listeners: ByName<ListenerState>,
    upstreams: ByName<Arc<UpstreamState>>,
    /// Nodes that may dial this one, by name: those that an upstream names.
    nodes: HashMap<Arc<str>, Arc<ReversePeer>>,
    route_owners: HashMap<Arc<str>, u64>,
    origins: Origins,
    /// The name tables of the DNS listeners' prefixes. They outlive generations.
    names: Vec<Arc<VirtualIpPool>>,
    /// The node's own certificates.
    certificates: Vec<Certificate>,
    /// The content of all files that were loaded: unchanged files need no new connections.
    files: HashMap<PathBuf, Vec<u8>>,
}

/// A certificate that this node presents.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// Path in the document: `identity.cert`, `listeners[0].tls.cert`.
    pub path: String,
    /// Expiry of the certificate or its chain, whichever is first, in Unix time.
    pub not_after: i64,
    /// The lifetime.
    pub life: Duration,
}

/// The time before expiry at which a warning starts. For short-lived certificates, it is a third of their lifetime, at
/// which they should have been renewed.
const EXPIRY_WARNING: Duration = Duration::from_secs(7 * 24 * 3600);

impl Certificate {
    /// A warning for the operator, if one is due.
    pub fn warning(&self, now: SystemTime) -> Option<String> {
        match self.left(now) {
            Ok(left) if left >= EXPIRY_WARNING.min(self.life / 3) => None,
            Ok(left) => Some(format!("the certificate expires in {} h; renew it", left.as_secs() / 3600)),
            Err(since) => {
                Some(format!("the certificate expired {} h ago, and peers refuse it; renew it", since.as_secs() / 3600))
            }
        }
    }

    /// The remaining lifetime.
    ///
    /// # Errors
    /// The time since expiry.
    pub fn left(&self, now: SystemTime) -> Result<Duration, Duration> {
        let end = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(self.not_after).unwrap_or_default());
        end.duration_since(now).map_err(|past| past.duration())
    }
}

/// A listener, ready to run. Listener and TLS stay together: a removed listener must not look like one without TLS.
#[derive(Clone)]
pub struct ListenerState {
    pub listener: Arc<Listener>,
    pub tls: Option<Arc<RustlsServerConfig>>,
    /// The QUIC configuration, if the listener has HTTP/3.
    pub quic: Option<QuicState>,
    /// Live flows of a UDP or SOCKS listener, or pending queries of a DNS listener, on all workers.
    pub flows: Arc<Shares>,
}

/// HTTP/3 of a listener.
#[derive(Clone)]
pub struct QuicState {
    pub config: quic::ServerConfig,
    pub bounds: quic::ConnectionLimits,
    /// The key of stateless resets, which end connections of a predecessor that crashed.
    pub reset: quic::ResetKey,
}

/// The reason why a snapshot cannot run on this host.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct BuildError {
    /// Path in the document.
    pub path: String,
    /// The problem, and the file that has it.
    pub reason: String,
}

/// The next ID of an upstream state, unique in this process.
static NEXT_OWNER: AtomicU64 = AtomicU64::new(1);

fn next_owner() -> u64 {
    NEXT_OWNER.fetch_add(1, Ordering::Relaxed)
}

/// The limit of queued datagrams in a QUIC connection, in bytes for each direction.
const DATAGRAMS: usize = 1 << 20;
/// The initial RTT between neighbours: a lost first packet is retransmitted after 300 ms rather than a second.
const FIRST_RTT: Duration = Duration::from_millis(100);

impl Generation {
    /// Makes a snapshot ready to run.
    ///
    /// # Errors
    /// Every file that cannot be used, with its path in the document.
    pub fn build(snapshot: Arc<Snapshot>, previous: Option<&Generation>) -> Result<Self, Vec<BuildError>> {
        let built = Builder::new(&snapshot, previous).build()?;
        let route_owners = route_owners(&snapshot, previous, &built.origins);
        Ok(Self {
            number: previous.map_or(1, |previous| previous.number + 1),
            via: Via::new(&snapshot.node),
            overlay: built.overlay,
            listeners: built.listeners,
            upstreams: built.upstreams,
            nodes: built.nodes,
            names: name_tables(&snapshot, previous, built.key.as_ref()),
            route_owners,
            origins: built.origins,
            certificates: built.certificates,
            files: built.files,
            snapshot,
        })
    }

    /// The name table of this prefix.
    pub fn name_table(&self, reserved: &VirtualIpPools) -> Option<&Arc<VirtualIpPool>> {
        self.names.iter().find(|table| table.reserved() == reserved)
    }

    /// The name tables of all prefixes.
    pub fn name_tables(&self) -> &[Arc<VirtualIpPool>] {
        &self.names
    }

    pub fn listener(&self, name: &str) -> Option<&Arc<Listener>> {
        self.listeners.get(name).map(|state| &state.listener)
    }

    /// The tables of flows of its listeners.
    pub fn listener_shares(&self) -> impl Iterator<Item = &Arc<Shares>> {
        self.listeners.values().map(|state| &state.flows)
    }

    pub fn listening(&self, name: &str) -> Option<&ListenerState> {
        self.listeners.get(name)
    }

    /// The CA certificates for the clients of a listener, as bytes of the file.
    pub fn client_roots(&self, listener: &Listener) -> Option<&[u8]> {
        let tls = listener.tls.as_ref()?;
        let own = self.snapshot.identity.as_ref().map(|identity| &identity.ca);
        let file = tls.client_ca.as_ref().or(own).filter(|_| tls.client != ClientAuth::None)?;
        self.files.get(file).map(Vec::as_slice)
    }

    pub fn upstream(&self, name: &str) -> Option<&Arc<UpstreamState>> {
        self.upstreams.get(name)
    }

    /// The state of a route's upstream.
    ///
    /// # Errors
    /// An internal error: the route belongs to another document.
    pub fn state_of(&self, upstream: &Upstream) -> Result<&Arc<UpstreamState>, Error> {
        self.upstream(&upstream.name).ok_or_else(|| Error::Internal(format!("upstream {} has no state", upstream.name)))
    }

    pub fn upstreams(&self) -> impl Iterator<Item = &Arc<UpstreamState>> {
        self.upstreams.values()
    }

    /// A node that may dial this one.
    pub fn node(&self, name: &str) -> Option<&Arc<ReversePeer>> {
        self.nodes.get(name)
    }

    /// The pool ID of a terminating route.
    pub fn route_owner(&self, route: &Route) -> u64 {
        self.route_owners.get(&route.name).copied().unwrap_or_default()
    }

    /// The TLS configuration for the origin of an `https` request.
    ///
    /// # Errors
    /// The host has no CA certificates to verify the origin with.
    pub fn origin_tls(&self, terminate: &Terminate, host: &Arc<str>) -> Result<ClientTls, String> {
        let config = self.origins.get(&terminate.origin_ca).ok_or("the route is of another document")?;
        Ok(ClientTls { config: config.as_ref()?.config.clone(), quic: None, name: host.clone(), proves_node: false })
    }

    /// The pool IDs in use.
    pub fn owners(&self) -> HashSet<u64> {
        self.upstreams.values().map(|state| state.id).chain(self.route_owners.values().copied()).collect()
    }

    /// Files whose change requires a reload.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.keys().map(PathBuf::as_path)
    }

    /// The node's own certificates, the identity's first.
    pub fn certificates(&self) -> &[Certificate] {
        &self.certificates
    }

    /// The identity that a certificate's URIs prove in this overlay.
    ///
    /// # Errors
    /// The certificate belongs to another overlay, or names no identity.
    pub fn identify(&self, uris: &[String]) -> Result<Peer, String> {
        let peer = trust::peer(uris.iter().map(String::as_str), &self.overlay)?;
        if trust::is_revoked(&peer, &self.snapshot) { Err(trust::REVOKED.to_owned()) } else { Ok(peer) }
    }
}

/// The name table of each prefix: the existing one, so that names keep their addresses, or a new one.
fn name_tables(
    snapshot: &Snapshot,
    previous: Option<&Generation>,
    own: Option<&CertifiedKey>,
) -> Vec<Arc<VirtualIpPool>> {
    let mut tables: Vec<Arc<VirtualIpPool>> = Vec::new();
    let dns = || {
        snapshot.listeners.iter().filter_map(|listener| match &listener.protocol {
            ListenerProtocol::Dns(dns) => Some(dns),
            _ => None,
        })
    };
    for addresses in dns().map(|dns| dns.addresses) {
        if tables.iter().any(|table| *table.reserved() == addresses) {
            continue;
        }
        let known = previous.and_then(|previous| previous.name_table(&addresses)).cloned();
        let table =
            known.unwrap_or_else(|| Arc::new(VirtualIpPool::new(addresses, KeyedHash::of(own, "names of a prefix"))));
        let names = dns().filter(|dns| dns.addresses == addresses).flat_map(|dns| &dns.names);
        let spelt = |pattern: &HostPattern| match pattern {
            HostPattern::Exact(name) => Some(name.clone()),
            HostPattern::Any | HostPattern::Suffix(_) => None,
        };
        table.fix(names.filter_map(spelt).collect());
        tables.push(table);
    }
    tables
}

/// The limits of a QUIC connection.
pub fn quic_bounds(limits: &Limits) -> quic::ConnectionLimits {
    quic::ConnectionLimits {
        streams: limits.streams,
        stream_window: limits.stream_window,
        connection_window: limits.connection_window,
        datagrams: DATAGRAMS,
        idle: limits.quic_idle,
        keep_alive: Some(limits.quic_keep_alive),
        first_rtt: None,
        mtu: (limits.quic_initial_mtu, limits.quic_max_mtu),
    }
}

/// As [`quic_bounds`], for a long-lived connection to a neighbour.
pub fn kept_bounds(limits: &Limits, idle: Duration, keep_alive: Option<Duration>) -> quic::ConnectionLimits {
    quic::ConnectionLimits { idle, keep_alive, first_rtt: Some(FIRST_RTT), ..quic_bounds(limits) }
}

/// The limits for a listener. A client that cannot authenticate gets the windows for anonymous clients. If it could,
/// its connection window shrinks once it has not.
pub fn server_bounds(limits: &Limits, listener: &Listener) -> quic::ConnectionLimits {
    let bounds = quic_bounds(limits);
    if listener.authenticates() {
        return bounds;
    }
    quic::ConnectionLimits {
        stream_window: limits.anonymous_stream_window,
        connection_window: limits.anonymous_connection_window,
        ..bounds
    }
}

/// The nodes that upstreams name. The state of a node stays, whichever upstream names it.
fn nodes(snapshot: &Snapshot, previous: Option<&Generation>) -> HashMap<Arc<str>, Arc<ReversePeer>> {
    let named = snapshot.upstreams.iter().flat_map(|upstream| upstream.all()).filter_map(Endpoint::node);
    let known = |name: &Arc<str>| previous.and_then(|previous| previous.nodes.get(name)).cloned();
    named.map(|name| (name.clone(), known(name).unwrap_or_else(|| Arc::new(ReversePeer::new(name))))).collect()
}

/// TLS configurations for origins, by the file of CA certificates; `None`: the host's. A host without CA certificates
/// is not an error of the document, because only `https` requests need them.
type Origins = HashMap<Option<PathBuf>, Result<OriginTls, String>>;

/// TLS to origins.
#[derive(Clone)]
struct OriginTls {
    roots: Roots,
    config: Arc<RustlsClientConfig>,
}

/// The pool IDs of routes. An unchanged route keeps its ID and thereby its connections. A change of its action or of
/// the CA certificates needs a new ID, because an old connection must not outlive it.
fn route_owners(snapshot: &Snapshot, previous: Option<&Generation>, origins: &Origins) -> HashMap<Arc<str>, u64> {
    let before: HashMap<&str, (&Route, u64)> = previous
        .into_iter()
        .flat_map(|previous| previous.snapshot.routes.iter().map(|route| (&**route, previous.route_owner(route))))
        .map(|(route, owner)| (&*route.name, (route, owner)))
        .collect();
    let verifies_alike = |route: &Route| match &route.action {
        Action::Terminate(terminate) if terminate.speaks_tls() => {
            let config =
                |origins: &Origins| origins.get(&terminate.origin_ca)?.as_ref().ok().map(|tls| tls.config.clone());
            match (config(origins), previous.and_then(|previous| config(&previous.origins))) {
                (Some(now), Some(before)) => Arc::ptr_eq(&now, &before),
                (now, before) => now.is_none() && before.is_none(),
            }
        }
        _ => true,
    };
    let owner = |route: &Route| match before.get(&*route.name) {
        Some((known, owner)) if known.action == route.action && verifies_alike(route) => *owner,
        _ => next_owner(),
    };
    snapshot.routes.iter().map(|route| (route.name.clone(), owner(route))).collect()
}

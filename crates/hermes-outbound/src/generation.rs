//! A generation: one snapshot made ready to run.
//!
//! In: a checked snapshot, and the previous generation. Out: TLS configurations loaded from files, upstreams with their
//! state (reused if the upstream is unchanged), IDs for pools. All steps that can fail are done here, before the
//! running generation is replaced.

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
use hermes_transport::runtime::fair_shares::ListenerShares;

/// A map whose keys are names in the node document. Clients cannot add keys, so a fast hash without protection against
/// collisions suffices.
type ByName<T> = HashMap<Arc<str>, T, foldhash::fast::RandomState>;

/// A snapshot, ready to run.
pub struct Generation {
    /// The number of this generation in the process, from 1.
    pub number: u64,
    /// The snapshot of the node document.
    pub snapshot: Arc<Snapshot>,
    /// The name of the overlay; empty if the node has no identity.
    pub overlay: Arc<str>,
    pub via: Via,
    listeners: ByName<ListenerState>,
    upstreams: ByName<Arc<UpstreamState>>,
    /// The nodes that may dial this node, by name. These are the nodes that upstreams name as endpoints.
    nodes: HashMap<Arc<str>, Arc<ReversePeer>>,
    /// The pool IDs of routes, by name.
    route_owners: HashMap<Arc<str>, u64>,
    origins: Origins,
    /// The pools of virtual addresses of the DNS listeners. The next generation reuses them.
    names: Vec<Arc<VirtualIpPool>>,
    /// The node's own certificates.
    certificates: Vec<Certificate>,
    /// The content of all loaded files, by path. If it is unchanged in the next generation, connections are reused.
    files: HashMap<PathBuf, Vec<u8>>,
}

/// A certificate that this node presents.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The path of its key in the node document, such as `identity.cert` or `listeners[0].tls.cert`.
    pub path: String,
    /// The expiry of the certificate or of another one in its chain, whichever is first, in Unix time (seconds).
    pub not_after: i64,
    /// The time from the beginning to the end of its validity.
    pub life: Duration,
}

/// The maximum time before expiry at which a warning starts. For short-lived certificates, the warning starts when a
/// third of their lifetime remains, because they should have been renewed by then.
const EXPIRY_WARNING: Duration = Duration::from_secs(7 * 24 * 3600);

impl Certificate {
    /// Returns a warning for the operator if the certificate expires soon or has expired, otherwise `None`.
    pub fn warning(&self, now: SystemTime) -> Option<String> {
        match self.left(now) {
            Ok(left) if left >= EXPIRY_WARNING.min(self.life / 3) => None,
            Ok(left) => Some(format!("the certificate expires in {} h; renew it", left.as_secs() / 3600)),
            Err(since) => {
                Some(format!("the certificate expired {} h ago, and peers refuse it; renew it", since.as_secs() / 3600))
            }
        }
    }

    /// Returns the time until expiry.
    ///
    /// # Errors
    /// The certificate has expired. The error is the time since expiry.
    pub fn left(&self, now: SystemTime) -> Result<Duration, Duration> {
        let end = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(self.not_after).unwrap_or_default());
        end.duration_since(now).map_err(|past| past.duration())
    }
}

/// A listener, ready to run. Its TLS configuration is stored with it, so that a removed listener cannot be mistaken for
/// one without TLS.
#[derive(Clone)]
pub struct ListenerState {
    pub listener: Arc<Listener>,
    pub tls: Option<Arc<RustlsServerConfig>>,
    /// The QUIC configuration; `None` if the listener has no HTTP/3.
    pub quic: Option<QuicState>,
    /// The tables of the listener on all workers.
    pub shares: ListenerShares,
}

/// The QUIC configuration of a listener with HTTP/3.
#[derive(Clone)]
pub struct QuicState {
    pub config: quic::ServerConfig,
    pub bounds: quic::ConnectionLimits,
    /// The key of stateless resets (RFC 9000, section 10.3). They end connections of a previous process that crashed.
    pub reset: quic::ResetKey,
}

/// The reason why a snapshot cannot run on this host.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct BuildError {
    /// The path of the key in the node document.
    pub path: String,
    /// The problem, with the name of the file.
    pub reason: String,
}

/// The next pool ID of an upstream or a route, which is unique in this process.
static NEXT_OWNER: AtomicU64 = AtomicU64::new(1);

fn next_owner() -> u64 {
    NEXT_OWNER.fetch_add(1, Ordering::Relaxed)
}

/// The maximum number of bytes of queued datagrams in a QUIC connection, for each direction.
const DATAGRAMS: usize = 1 << 20;
/// The initial estimate of the RTT between neighbours. With it, a lost first packet is retransmitted after 300 ms
/// instead of a second.
const FIRST_RTT: Duration = Duration::from_millis(100);

impl Generation {
    /// Makes a snapshot ready to run.
    ///
    /// # Errors
    /// Some files cannot be used. Each of them has an error, with the path of its key in the node document.
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

    /// Returns the pool of virtual addresses for these prefixes, or `None` if no DNS listener uses them.
    pub fn name_table(&self, reserved: &VirtualIpPools) -> Option<&Arc<VirtualIpPool>> {
        self.names.iter().find(|table| table.reserved() == reserved)
    }

    /// Returns the pools of virtual addresses of all DNS listeners.
    pub fn name_tables(&self) -> &[Arc<VirtualIpPool>] {
        &self.names
    }

    pub fn listener(&self, name: &str) -> Option<&Arc<Listener>> {
        self.listeners.get(name).map(|state| &state.listener)
    }

    /// Returns the tables of all listeners by their names.
    pub fn listener_shares(&self) -> HashMap<Arc<str>, ListenerShares> {
        self.listeners.iter().map(|(name, state)| (name.clone(), state.shares.clone())).collect()
    }

    pub fn listening(&self, name: &str) -> Option<&ListenerState> {
        self.listeners.get(name)
    }

    /// Returns the content of the file with the CA certificates that verify clients of a listener. Returns `None` if
    /// the listener requests no client certificates.
    pub fn client_roots(&self, listener: &Listener) -> Option<&[u8]> {
        let tls = listener.tls.as_ref()?;
        let own = self.snapshot.identity.as_ref().map(|identity| &identity.ca);
        let file = tls.client_ca.as_ref().or(own).filter(|_| tls.client != ClientAuth::None)?;
        self.files.get(file).map(Vec::as_slice)
    }

    pub fn upstream(&self, name: &str) -> Option<&Arc<UpstreamState>> {
        self.upstreams.get(name)
    }

    /// Returns the state of a route's upstream.
    ///
    /// # Errors
    /// An internal error, because the upstream is not part of this generation.
    pub fn state_of(&self, upstream: &Upstream) -> Result<&Arc<UpstreamState>, Error> {
        self.upstream(&upstream.name).ok_or_else(|| Error::Internal(format!("upstream {} has no state", upstream.name)))
    }

    pub fn upstreams(&self) -> impl Iterator<Item = &Arc<UpstreamState>> {
        self.upstreams.values()
    }

    /// Returns the state of a node that may dial this node, or `None` if no upstream names it.
    pub fn node(&self, name: &str) -> Option<&Arc<ReversePeer>> {
        self.nodes.get(name)
    }

    /// Returns the pool ID of a route that terminates.
    pub fn route_owner(&self, route: &Route) -> u64 {
        self.route_owners.get(&route.name).copied().unwrap_or_default()
    }

    /// Returns the TLS configuration for a connection to an `https` origin.
    ///
    /// # Errors
    /// The host has no CA certificates that could verify the origin, or the route is not part of this generation.
    pub fn origin_tls(&self, terminate: &Terminate, host: &Arc<str>) -> Result<ClientTls, String> {
        let config = self.origins.get(&terminate.origin_ca).ok_or("the route is of another document")?;
        Ok(ClientTls { config: config.as_ref()?.config.clone(), quic: None, name: host.clone(), proves_node: false })
    }

    /// Returns all pool IDs of upstreams and routes.
    pub fn owners(&self) -> HashSet<u64> {
        self.upstreams.values().map(|state| state.id).chain(self.route_owners.values().copied()).collect()
    }

    /// Returns the content of a loaded file.
    pub fn file(&self, path: &Path) -> Option<&[u8]> {
        self.files.get(path).map(Vec::as_slice)
    }

    /// Returns the paths of all loaded files. A change of one of them requires a reload.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.keys().map(PathBuf::as_path)
    }

    /// Returns the node's own certificates. The certificate of its identity comes first.
    pub fn certificates(&self) -> &[Certificate] {
        &self.certificates
    }

    /// Returns the identity that the URIs of a peer's certificate prove in this overlay.
    ///
    /// # Errors
    /// The certificate belongs to another overlay, names no identity, or is revoked.
    pub fn identify(&self, uris: &[String]) -> Result<Peer, String> {
        let peer = trust::peer(uris.iter().map(String::as_str), &self.overlay)?;
        if trust::is_revoked(&peer, &self.snapshot) { Err(trust::REVOKED.to_owned()) } else { Ok(peer) }
    }
}

/// Returns the pools of virtual addresses of the DNS listeners. A pool of the previous generation is reused, so that
/// names retain their addresses.
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

/// Returns the limits of a QUIC connection.
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

/// Returns the limits of a long-lived QUIC connection to a neighbour, with these idle and keepalive intervals.
pub fn kept_bounds(limits: &Limits, idle: Duration, keep_alive: Option<Duration>) -> quic::ConnectionLimits {
    quic::ConnectionLimits { idle, keep_alive, first_rtt: Some(FIRST_RTT), ..quic_bounds(limits) }
}

/// Returns the limits of QUIC connections to a listener. If clients cannot authenticate there, the windows are those
/// for anonymous clients. Otherwise the connection window of a client shrinks when its handshake ends without
/// authentication.
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

/// Returns the nodes that upstreams name as endpoints. The state of a node is reused from the previous generation, even
/// if another upstream names it now.
fn nodes(snapshot: &Snapshot, previous: Option<&Generation>) -> HashMap<Arc<str>, Arc<ReversePeer>> {
    let named = snapshot.upstreams.iter().flat_map(|upstream| upstream.all()).filter_map(Endpoint::node);
    let known = |name: &Arc<str>| previous.and_then(|previous| previous.nodes.get(name)).cloned();
    named.map(|name| (name.clone(), known(name).unwrap_or_else(|| Arc::new(ReversePeer::new(name))))).collect()
}

/// TLS configurations for origins. The key is the file of CA certificates, or `None` for those of the host. A host
/// without CA certificates is not an error of the document, because only `https` requests need them.
type Origins = HashMap<Option<PathBuf>, Result<OriginTls, String>>;

/// A TLS configuration for origins, with its CA certificates.
#[derive(Clone)]
struct OriginTls {
    roots: Roots,
    config: Arc<RustlsClientConfig>,
}

/// Returns the pool IDs of routes. An unchanged route retains its ID and thereby its connections. If its action or the
/// CA certificates change, the route receives a new ID, because its connections must not be reused.
fn route_owners(snapshot: &Snapshot, previous: Option<&Generation>, origins: &Origins) -> HashMap<Arc<str>, u64> {
    let before: HashMap<&str, (&Route, u64)> = previous
        .into_iter()
        .flat_map(|previous| previous.snapshot.routes.iter().map(|route| (&**route, previous.route_owner(route))))
        .map(|(route, owner)| (&*route.name, (route, owner)))
        .collect();
    let verifies_alike = |action: &Action| match action {
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
        Some((known, owner))
            if known.action == route.action && route.action.alternatives().iter().all(verifies_alike) =>
        {
            *owner
        }
        _ => next_owner(),
    };
    snapshot.routes.iter().map(|route| (route.name.clone(), owner(route))).collect()
}

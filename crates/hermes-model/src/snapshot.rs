//! The snapshot: one complete, validated, immutable configuration of a node.
//!
//! In: a `Document` in which `check` found no problem.
//! Out: parsed types, resolved references, compiled matchers. The types cannot express an invalid state.
//! Never: a partial snapshot, a change after the build, or knowledge of sockets, health or time.

mod index;
mod listener;
mod overload;
mod policy;
mod relay;
mod route;
mod upstream;

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::limits::Limits;

pub use crate::scalar::{FaceUri, HostPort};
pub use index::RouteIndex;
pub use listener::{
    Capture, CarryNames, ClientAuth, Dns, IpListener, Listener, ListenerProtocol, ListenerTls, Ndn, Peer, PortKind,
    Transparent, Tun, VirtualIpPools,
};
pub use overload::{Importance, Overload, Signal, Step};
pub use policy::{Cache, Custody, Durable, OnChange, Resume, Retry, Timeouts, UpstreamRateLimit};
pub use relay::{ChannelRanking, Relay, RelayMode, RelayPeer, RelayPeers, RelayTree, RootChoice};
pub use route::{
    Action, DifMembership, Face, Gateway, Redirect, Respond, RinaNeighbour, Route, Target, Terminate, TerminateKind,
};
pub use upstream::{
    Balance, Contact, Endpoint, Health, Outlier, TunnelMethod, Upstream, UpstreamProtocol, UpstreamTls,
};

/// A complete, validated configuration.
#[derive(Debug)]
pub struct Snapshot {
    /// This node's name, as it appears in `Via` and in the node's certificate.
    pub node: Arc<str>,
    /// Address of the admin endpoint; `None` disables it.
    pub admin: Option<SocketAddr>,
    /// Maximum time that a drain waits for sessions before it closes them.
    pub drain: Duration,
    /// The node reports that it accepts no sessions.
    pub draining: bool,
    /// Number of worker threads. `None`: one for each core.
    pub workers: Option<usize>,
    /// Whether this node may pass on identities that other nodes asserted.
    pub role: Role,
    /// Files of this node's certificate and key, and of the overlay's CA.
    pub identity: Option<IdentityFiles>,
    /// Names of revoked keys.
    pub revoked: BTreeSet<Arc<str>>,
    /// Users that this document binds to other nodes. `*` stands for any user.
    pub users: HashMap<Arc<str>, Vec<Arc<str>>>,
    /// Every limit; a limit that the document leaves out has its default.
    pub limits: Limits,
    /// Distribution of connections to workers.
    pub dispatch: Dispatch,
    /// Steps of the node when memory, file descriptors or time run short.
    pub overload: Overload,
    /// Destination of the access log.
    pub access_log: AccessLog,
    /// Directory for state that outlives the process.
    pub state: Option<PathBuf>,
    /// All listeners, in the document's order; names are unique.
    pub listeners: Vec<Arc<Listener>>,
    /// All routes, in the document's order; the first match wins.
    pub routes: Vec<Arc<Route>>,
    /// All upstreams, in the document's order; names are unique.
    pub upstreams: Vec<Arc<Upstream>>,
    /// Finds the routes that may match without testing all of them.
    pub(crate) index: RouteIndex,
    /// The document without secrets, for `/config`. JSON text takes a fraction of the memory of a tree.
    pub redacted: String,
}

impl Snapshot {
    /// Names of all devices: those that listeners read, and those that routes write to. A name may occur more than
    /// once.
    pub fn devices(&self) -> impl Iterator<Item = &Arc<str>> {
        let read = self.listeners.iter().filter_map(|listener| match &listener.protocol {
            ListenerProtocol::Tun(tun) => Some(&tun.device),
            _ => None,
        });
        let written = self.routes.iter().filter_map(|route| match &route.action {
            Action::Device(gateway) => Some(&gateway.device),
            _ => None,
        });
        read.chain(written)
    }

    /// The listener of this name.
    pub fn listener(&self, name: &str) -> Option<&Arc<Listener>> {
        self.listeners.iter().find(|listener| &*listener.name == name)
    }

    /// True if any listener can authenticate clients, by certificate or by address.
    pub fn authenticates(&self) -> bool {
        self.listeners.iter().any(|listener| listener.authenticates())
    }
}

/// `role` of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Applications or devices connect to the node.
    #[default]
    Dependent,
    /// Only other nodes connect to it; it may pass on the identities that they asserted.
    Standalone,
}

/// Files of the node's identity (PEM).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityFiles {
    /// Certificate chain, the leaf first.
    pub cert: PathBuf,
    /// Private key.
    pub key: PathBuf,
    /// CA certificates of the overlay.
    pub ca: PathBuf,
}

/// Distribution of connections to workers, with the settings of the mode `directed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatch {
    /// How a worker is chosen.
    pub mode: DispatchMode,
    /// Time without a turn of its loop after which a worker gets no connection.
    pub hung_after: Duration,
    /// How many connections a session counts for, in percent.
    pub session_weight: u16,
    /// How far above the average of connections a worker may be, in percent of the average.
    pub connections_offset: u16,
    /// The same for pending tasks.
    pub pending_offset: u16,
    /// Number of workers that share the connections to a destination. `None`: all of them, in groups of 64.
    pub locality: Option<u16>,
    /// Whether each worker stays on a core of its own. `None`: as the role has it.
    pub pin: Option<bool>,
    /// Number of workers for listeners that hold up the others. 0: all workers serve all listeners.
    pub sandbox_workers: u16,
    /// Time that a listener may hold up its workers within ten seconds.
    pub sandbox_after: Duration,
}

/// How a worker is chosen for a new connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DispatchMode {
    /// The kernel's reuseport hash.
    #[default]
    Reuseport,
    /// The hash, among the workers that have the least to do.
    Directed,
    /// One worker after the other.
    RoundRobin,
    /// All workers wait on one socket; the first one to wake accepts the connection.
    Exclusive,
}

/// Destination of the access log, one JSON object per line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    /// Standard output.
    #[default]
    Stdout,
    /// Standard error.
    Stderr,
    /// Append to this file; a reload opens it again, so that it can be rotated.
    File(PathBuf),
    /// No access log.
    Off,
}

//! The listening sockets of a node.
//!
//! In: listeners, and sockets of the predecessor. Out: a socket for each listener and worker, bound before anything
//! running changes, and distributed so that each has a reader. Never: accepting or reading; the workers do that.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use hermes_model::limits::Limits;
use hermes_model::snapshot::{Action, DispatchMode, Listener, ListenerProtocol, Route, Snapshot, Transparent};
use hermes_net::fd_passing::LabelledFd;
use hermes_net::quic::{self, ForwardSocket, Group};
use hermes_net::transparent::{self, Diversion, Interception, Plan};
use hermes_net::unix::{self, PathListener};
use hermes_net::{host, reuseport, tcp, udp};

use super::Node;
use crate::listener::{BoundSocket, ListeningSocket, Transport};
use hermes_outbound::generation::BuildError;

/// The identity of a socket: transport and address, and the listener's name if the system chose the port. The name of a
/// Unix socket is its path.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SocketKey {
    pub(super) transport: Transport,
    pub(super) bind: SocketAddr,
    pub(super) name: Option<Arc<str>>,
}

impl SocketKey {
    /// All sockets of a listener, in the order of binding.
    pub(super) fn all_of(listener: &Listener, dispatch: DispatchMode) -> impl Iterator<Item = Self> {
        Transport::all_of(listener, dispatch).filter_map(|transport| {
            let named = |name| Self { transport, bind: SocketAddr::from(([0; 4], 0)), name: Some(name) };
            match transport {
                Transport::Transparent => Some(named(listener.name.clone())),
                Transport::Unix => Some(named(listener.unix.as_ref()?.to_str()?.into())),
                _ => {
                    let bind = listener.bind?;
                    let name = (bind.port() == 0).then(|| listener.name.clone());
                    Some(Self { transport, bind, name })
                }
            }
        })
    }

    /// The path of a Unix socket.
    pub(super) fn path(&self) -> Option<&Arc<str>> {
        self.name.as_ref().filter(|_| self.transport == Transport::Unix)
    }

    fn is_tcp(&self) -> bool {
        matches!(self.transport, Transport::Tcp | Transport::SharedTcp)
    }

    /// The label in a handover.
    pub(super) fn label(&self) -> String {
        let protocol = match self.transport {
            Transport::Tcp | Transport::SharedTcp => "tcp",
            Transport::Udp => "udp",
            Transport::Quic => "quic",
            Transport::Dns => "dns",
            Transport::Ndn => "ndn",
            Transport::Rina => "rina",
            Transport::Transparent => "transparent",
            Transport::Unix => return format!("{UNIX}{}", self.name.as_deref().unwrap_or_default()),
        };
        match &self.name {
            Some(name) => format!("{protocol}/{}/{name}", self.bind),
            None => format!("{protocol}/{}", self.bind),
        }
    }
}

/// The form for messages.
impl fmt::Display for SocketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let over = match self.transport {
            Transport::Tcp | Transport::SharedTcp => "TCP",
            Transport::Udp => "UDP",
            Transport::Quic => "UDP (HTTP/3)",
            Transport::Dns => "UDP (DNS)",
            Transport::Ndn => "UDP (NDN)",
            Transport::Rina => "UDP (RINA)",
            Transport::Transparent => return f.write_str("an interception (TPROXY, NFQUEUE)"),
            Transport::Unix => return f.write_str(self.name.as_deref().unwrap_or_default()),
        };
        write!(f, "{} over {over}", self.bind)
    }
}

pub(super) enum Socket {
    Tcp(Arc<std::net::TcpListener>),
    /// The first of the listener's TCP sockets, for all workers.
    SharedTcp(std::net::TcpListener),
    Udp(std::net::UdpSocket),
    /// A reader's slot of a group; a process has all slots or none.
    Quic(Arc<Group>, u8),
    Dns(std::net::UdpSocket),
    Ndn(std::net::UdpSocket),
    Rina(std::net::UdpSocket),
    /// One for all workers.
    Unix(PathListener),
    /// A worker's slot of an interception.
    Transparent(Arc<Interception>, usize),
}

impl Socket {
    /// Opens a socket. Not for QUIC and interceptions, whose sockets form a group, nor for Unix sockets.
    fn open(transport: Transport, address: SocketAddr) -> std::io::Result<Self> {
        Ok(match transport {
            Transport::Tcp | Transport::SharedTcp => Socket::Tcp(tcp::listen(address)?.into()),
            Transport::Dns => Socket::Dns(udp::listen(address)?),
            Transport::Ndn => Socket::Ndn(udp::listen(address)?),
            Transport::Rina => Socket::Rina(udp::listen(address)?),
            Transport::Udp | Transport::Quic | Transport::Transparent | Transport::Unix => {
                Socket::Udp(udp::listen(address)?)
            }
        })
    }

    /// Wraps an inherited socket. Not for QUIC, interceptions and Unix sockets.
    fn from_fd(transport: Transport, fd: OwnedFd) -> Self {
        match transport {
            Transport::Tcp | Transport::SharedTcp => Socket::Tcp(Arc::new(fd.into())),
            Transport::Dns => Socket::Dns(fd.into()),
            Transport::Ndn => Socket::Ndn(fd.into()),
            Transport::Rina => Socket::Rina(fd.into()),
            Transport::Udp | Transport::Quic | Transport::Transparent | Transport::Unix => Socket::Udp(fd.into()),
        }
    }

    /// A slot for each reader of a group.
    fn all_of(group: &Arc<Group>) -> Vec<Self> {
        (0..=u8::MAX).take(group.len()).map(|slot| Socket::Quic(group.clone(), slot)).collect()
    }

    pub(super) fn group(&self) -> Option<&Arc<Group>> {
        match self {
            Socket::Quic(group, _) => Some(group),
            _ => None,
        }
    }

    pub(super) fn tcp(&self) -> Option<&Arc<std::net::TcpListener>> {
        match self {
            Socket::Tcp(socket) => Some(socket),
            _ => None,
        }
    }

    pub(super) fn is_interception(&self) -> bool {
        matches!(self, Socket::Transparent(..))
    }

    pub(super) fn local_addr(&self) -> std::io::Result<SocketAddr> {
        match self {
            Socket::Tcp(socket) => socket.local_addr(),
            Socket::SharedTcp(socket) => socket.local_addr(),
            Socket::Udp(socket) | Socket::Dns(socket) | Socket::Ndn(socket) | Socket::Rina(socket) => {
                socket.local_addr()
            }
            Socket::Quic(group, _) => Ok(group.address()),
            Socket::Unix(..) | Socket::Transparent(..) => Err(std::io::ErrorKind::AddrNotAvailable.into()),
        }
    }

    /// Duplicates the socket for a worker.
    fn share(&self) -> std::io::Result<BoundSocket> {
        Ok(match self {
            Socket::Tcp(socket) => BoundSocket::Tcp(socket.try_clone()?),
            Socket::SharedTcp(socket) => BoundSocket::SharedTcp(socket.try_clone()?),
            Socket::Udp(socket) => BoundSocket::Udp(socket.try_clone()?),
            Socket::Quic(group, slot) => BoundSocket::Quic(group.clone(), *slot),
            Socket::Dns(socket) => BoundSocket::Dns(socket.try_clone()?),
            Socket::Ndn(socket) => BoundSocket::Ndn(socket.try_clone()?),
            Socket::Rina(socket) => BoundSocket::Rina(socket.try_clone()?),
            Socket::Unix(listener) => BoundSocket::Unix(listener.socket().try_clone()?),
            Socket::Transparent(interception, slot) => BoundSocket::Transparent(interception.clone(), *slot),
        })
    }

    /// Prepares the close: flows of a UDP listener continue on sockets of their own. An interception takes no more
    /// connections. Removes the
    /// file of a Unix socket.
    pub(super) fn make_way(&self) {
        if let Socket::Transparent(interception, 0) = self
            && let Err(error) = interception.change(&Plan::default())
        {
            tracing::warn!(%error, "an interception continues until its connections have ended");
        }
        if let Socket::Unix(listener) = self {
            listener.remove();
        }
        if let Socket::Udp(socket) = self
            && let Err(error) = udp::let_others_bind(socket)
        {
            tracing::warn!(%error, "UDP flows will end with their listener");
        }
    }

    /// The socket is in use from now on.
    pub(super) fn keep(&mut self) {
        if let Socket::Unix(listener) = self {
            listener.keep();
        }
    }

    /// Adds the socket to a handover; the first slot adds its whole group.
    pub(super) fn hand_over(&self, label: &str, all: &mut Vec<LabelledFd>) -> std::io::Result<()> {
        let mut add = |label: String, fd: OwnedFd| all.push(LabelledFd { label, fd });
        match self {
            Socket::Tcp(socket) => add(label.to_owned(), socket.try_clone()?.into()),
            Socket::Udp(socket) | Socket::Dns(socket) | Socket::Ndn(socket) | Socket::Rina(socket) => {
                add(label.to_owned(), socket.try_clone()?.into())
            }
            Socket::Unix(listener) => add(label.to_owned(), listener.socket().try_clone()?.into()),
            Socket::Quic(group, 0) => {
                group.duplicate()?.into_iter().for_each(|fd| add(label.to_owned(), fd));
                group
                    .forward_sockets()?
                    .into_iter()
                    .for_each(|ForwardSocket { reader, fd }| add(format!("{label}{WAY}{reader}"), fd));
            }
            // It is among the sockets of TCP.
            Socket::SharedTcp(_) => {}
            // The next process makes an interception of its own, before this one ends.
            Socket::Quic(..) | Socket::Transparent(..) => {}
        }
        Ok(())
    }
}

/// The limit of system-chosen ports to try before one is used that may be in use over UDP.
const MAX_PORT_ATTEMPTS: u32 = 16;
/// The beginning of the label of a Unix socket, before its path.
pub(super) const UNIX: &str = "unix/";
/// The separator between the label of QUIC sockets and the destination of a forward socket.
pub(super) const WAY: &str = " to ";

/// Removes the file of an inherited Unix socket that no listener uses any more.
pub(super) fn remove_unused(label: &str, sockets: Vec<OwnedFd>) {
    if let (Some(path), Some(socket)) = (label.strip_prefix(UNIX), sockets.into_iter().next()) {
        PathListener::inherit(socket, Path::new(path)).remove();
    }
}

impl Node {
    /// Closes sockets without a listener; the workers keep theirs until they have served the queue.
    pub(super) fn part_with_unused(&mut self) {
        let used: HashSet<&SocketKey> = self.bound.values().chain(&self.held_back).collect();
        let unused: Vec<SocketKey> = self.sockets.keys().filter(|key| !used.contains(key)).cloned().collect();
        self.lingering.retain(|(_, group)| group.strong_count() > 0);
        for key in unused {
            let sockets = self.sockets.remove(&key).unwrap_or_default();
            if let Some(group) = sockets.first().and_then(Socket::group) {
                self.lingering.push((key, Arc::downgrade(group)));
                continue;
            }
            sockets.iter().for_each(Socket::make_way);
            self.parted.insert(key);
        }
    }

    pub(super) fn open_sockets(
        &mut self,
        snapshot: &Snapshot,
    ) -> Result<HashMap<SocketKey, Vec<Socket>>, Vec<BuildError>> {
        let mut opened = HashMap::new();
        let mut faults: Vec<BuildError> = self.divert_for_routes(snapshot).err().into_iter().collect();
        // Sockets that may fail come first: further sockets of a running listener receive connections at once.
        let is_inherited = |node: &Self, key: &SocketKey| node.inherited.contains_key(&key.label());
        let listeners = snapshot.listeners.iter().enumerate();
        let keys = listeners.flat_map(|(index, listener)| {
            SocketKey::all_of(listener, snapshot.dispatch.mode).map(move |key| (index, key))
        });
        let (running, new): (Vec<_>, Vec<_>) = keys.partition(|(_, key)| is_inherited(self, key));
        for (index, key) in new.into_iter().chain(running) {
            if self.sockets.contains_key(&key) || (!faults.is_empty() && is_inherited(self, &key)) {
                continue;
            }
            let sockets = match &snapshot.listeners[index].protocol {
                ListenerProtocol::Transparent(transparent) => self.intercept(&plan(transparent, &snapshot.limits)),
                _ if key.transport == Transport::Unix => self.open_unix(&key),
                _ if key.transport == Transport::SharedTcp => self.share_first(&key, &opened),
                _ => self.open(&key, &opened),
            };
            match sockets {
                Ok(sockets) => drop(opened.insert(key, sockets)),
                Err(error) if key.transport == Transport::Transparent => faults.push(BuildError {
                    path: format!("listeners[{index}]"),
                    reason: format!("{key}: {error}. {}", transparent::remedy(&error)),
                }),
                Err(error) if key.transport == Transport::Unix => faults.push(BuildError {
                    path: format!("listeners[{index}].unix"),
                    reason: format!("listening on {key}: {error}. {}", unix::remedy(&error)),
                }),
                Err(error) => faults.push(BuildError {
                    path: format!("listeners[{index}].bind"),
                    reason: format!("listening on {key}: {error}. {}", host::bind_remedy(&error)),
                }),
            }
        }
        if faults.is_empty() { Ok(opened) } else { Err(faults) }
    }

    /// Opens an interception with a slot for each worker.
    fn intercept(&mut self, plan: &Plan) -> std::io::Result<Vec<Socket>> {
        let diversion = self.divert()?;
        let interception = Arc::new(Interception::open(self.workers.len(), plan, diversion)?);
        let slots = 0..interception.workers();
        Ok(slots.map(|slot| Socket::Transparent(interception.clone(), slot)).collect())
    }

    /// Opens a Unix socket, or takes the inherited one.
    fn open_unix(&mut self, key: &SocketKey) -> std::io::Result<Vec<Socket>> {
        let inherited = self.inherited.remove(&key.label()).into_iter().flatten().next();
        let path = Path::new(&**key.path().ok_or(std::io::ErrorKind::InvalidInput)?);
        let listener = match inherited {
            Some(socket) => PathListener::inherit(socket, path),
            None => PathListener::open(path)?,
        };
        Ok(vec![Socket::Unix(listener)])
    }

    fn divert(&mut self) -> std::io::Result<Arc<Diversion>> {
        if let Some(diversion) = &self.diversion {
            return Ok(diversion.clone());
        }
        let diversion = Arc::new(Diversion::open()?);
        self.diversion = Some(diversion.clone());
        Ok(diversion)
    }

    /// Prepares for routes that connect with the address of a client.
    fn divert_for_routes(&mut self, snapshot: &Snapshot) -> Result<(), BuildError> {
        let is_such = |action: &Action| matches!(action, Action::Terminate(terminate) if terminate.from_client);
        let is_such = |route: &Arc<Route>| route.action.alternatives().iter().any(is_such);
        let Some(index) = snapshot.routes.iter().position(is_such) else { return Ok(()) };
        self.divert().map(drop).map_err(|error| BuildError {
            path: format!("routes[{index}].terminate.source"),
            reason: format!("connecting with the address of a client: {error}. {}", transparent::remedy(&error)),
        })
    }

    /// Applies the destinations of the running document to the interceptions. A new one has them already.
    pub(super) fn follow_captures(&self, snapshot: &Snapshot) {
        for listener in &snapshot.listeners {
            let ListenerProtocol::Transparent(transparent) = &listener.protocol else { continue };
            let key = SocketKey::all_of(listener, snapshot.dispatch.mode).next();
            if let Some(Socket::Transparent(interception, _)) = key.and_then(|key| self.sockets.get(&key)?.first())
                && let Err(error) = interception.change(&plan(transparent, &snapshot.limits))
            {
                tracing::error!(listener = %listener.name, %error, "an interception keeps its old destinations");
            }
        }
    }

    /// Takes the first TCP socket of the listener for all workers.
    fn share_first(&self, key: &SocketKey, opened: &HashMap<SocketKey, Vec<Socket>>) -> std::io::Result<Vec<Socket>> {
        let first = self.tcp_sockets(key, opened).and_then(|sockets| sockets.first()?.tcp());
        let first = first.ok_or(std::io::ErrorKind::AddrNotAvailable)?;
        Ok(vec![Socket::SharedTcp(first.try_clone()?)])
    }

    /// Opens a socket for each worker; inherited sockets come first.
    fn open(&mut self, key: &SocketKey, opened: &HashMap<SocketKey, Vec<Socket>>) -> std::io::Result<Vec<Socket>> {
        let wanted = self.workers.len();
        if key.transport == Transport::Quic {
            return self.open_group(key, wanted.min(quic::MAX_READERS), opened);
        }
        let inherited = self.inherited.remove(&key.label()).into_iter().flatten();
        let mut sockets: Vec<Socket> = inherited.map(|fd| Socket::from_fd(key.transport, fd)).collect();
        // Sources of live flows are hashed over the existing UDP sockets, so none is added.
        if !key.is_tcp() && !sockets.is_empty() {
            self.held_back.insert(key.clone());
            return Ok(sockets);
        }
        let mut address = match sockets.first() {
            Some(first) => first.local_addr()?,
            None => self.beside(key, opened)?,
        };
        if sockets.is_empty() {
            self.probe(key, address)?;
        }
        let mut tried = 0;
        while sockets.len() < wanted {
            let socket = Socket::open(key.transport, address)?;
            let bound = socket.local_addr()?;
            tried += 1;
            // HTTP/3 and DNS use the same port over UDP, so a system-chosen port must be free there too.
            if key.is_tcp() && address.port() == 0 && tried < MAX_PORT_ATTEMPTS && udp::probe_unused(bound).is_err() {
                continue;
            }
            address = bound;
            sockets.push(socket);
        }
        self.steer(key, &sockets);
        Ok(sockets)
    }

    /// Checks that the address is free. Addresses of this node itself are not probed.
    fn probe(&self, key: &SocketKey, address: SocketAddr) -> std::io::Result<()> {
        if address.port() == 0 || self.holds_port(key) || self.parted.contains(key) {
            return Ok(());
        }
        if key.is_tcp() { tcp::probe_unused(address) } else { udp::probe_unused(address) }
    }

    /// Opens the QUIC sockets of a listener: inherited ones, with more if there are too few. If connections of a closed
    /// listener live on such sockets, in this process or a predecessor, these are used.
    fn open_group(
        &mut self,
        key: &SocketKey,
        wanted: usize,
        opened: &HashMap<SocketKey, Vec<Socket>>,
    ) -> std::io::Result<Vec<Socket>> {
        let label = key.label();
        let inherited = self.inherited.remove(&label).into_iter().flatten();
        let mut sockets: Vec<std::net::UdpSocket> = inherited.map(Into::into).collect();
        let is_inherited = !sockets.is_empty();
        let mut address = match sockets.first() {
            Some(first) => first.local_addr()?,
            None => self.beside(key, opened)?,
        };
        let orphans = self.orphans.iter().map(|orphan| orphan.group.clone());
        let mut kept = self.lingering.iter().filter_map(|(_, group)| group.upgrade()).chain(orphans);
        if let Some(group) = kept.find(|group| !is_inherited && group.address() == address) {
            return Ok(Socket::all_of(&group));
        }
        if !is_inherited {
            self.probe(key, address)?;
        }
        while sockets.len() < wanted {
            let socket = udp::listen(address)?;
            address = socket.local_addr()?;
            sockets.push(socket);
        }
        let group = Group::open(sockets, self.ways_to(&label))?;
        if is_inherited {
            // The predecessor receives its datagrams and steers them until it has handed over.
            self.held_back.insert(key.clone());
        } else {
            steer_quic(&group);
        }
        Ok(Socket::all_of(&group))
    }

    /// The forward sockets to connections of predecessors, for sockets with this label.
    pub(super) fn ways_to(&mut self, label: &str) -> Vec<ForwardSocket> {
        let prefix = format!("{label}{WAY}");
        let (ways, others): (HashMap<_, _>, HashMap<_, _>) =
            std::mem::take(&mut self.inherited).into_iter().partition(|(name, _)| name.starts_with(&prefix));
        self.inherited = others;
        let named = ways.into_iter().flat_map(|(name, fds)| fds.into_iter().map(move |fd| (name.clone(), fd)));
        named.map(|(name, fd)| ForwardSocket { reader: name[prefix.len()..].to_owned(), fd }).collect()
    }

    /// Steers the sources of UDP flows to fixed sockets, so that a flow that leaves a socket moves no other one.
    fn steer(&self, key: &SocketKey, sockets: &[Socket]) {
        let Some(Socket::Udp(first)) = sockets.first() else { return };
        if self.parted.contains(key) {
            // Sockets of flows may precede the listener's in the reuseport group.
            reuseport::by_kernel(first);
        } else if let Err(error) = reuseport::by_source(first, sockets.len()) {
            tracing::debug!(%error, "UDP sources are spread by the kernel");
        }
    }

    /// True if this node has a socket on that port; a probe would find that one.
    fn holds_port(&self, key: &SocketKey) -> bool {
        self.sockets.keys().any(|held| held.is_tcp() == key.is_tcp() && held.bind.port() == key.bind.port())
    }

    /// The address of the same listener's TCP sockets, if it has some.
    fn beside(&self, key: &SocketKey, opened: &HashMap<SocketKey, Vec<Socket>>) -> std::io::Result<SocketAddr> {
        let first = self.tcp_sockets(key, opened).and_then(|sockets| sockets.first());
        first.map_or(Ok(key.bind), Socket::local_addr)
    }

    /// The TCP sockets of the same listener.
    fn tcp_sockets<'s>(
        &'s self,
        key: &SocketKey,
        opened: &'s HashMap<SocketKey, Vec<Socket>>,
    ) -> Option<&'s Vec<Socket>> {
        let tcp = SocketKey { transport: Transport::Tcp, ..key.clone() };
        opened.get(&tcp).or_else(|| self.sockets.get(&tcp))
    }
}

/// SYNs beyond `limits.held-syns` that wait until a worker lets them pass.
const QUEUE_HEADROOM: u32 = 1024;

/// Returns the selection of an interception.
fn plan(transparent: &Transparent, limits: &Limits) -> Plan {
    Plan {
        prefixes: transparent.captures.clone(),
        ports: transparent.ports.clone(),
        hold: transparent.hold_syn,
        udp: transparent.udp,
        // Workers count the SYNs beyond the limit; the kernel counts none that it lets pass.
        queue_length: u32::try_from(limits.held_syns).unwrap_or(u32::MAX).saturating_add(QUEUE_HEADROOM),
    }
}

/// Steers QUIC connections to sockets.
pub(super) fn steer_quic(group: &Group) {
    if let Err(error) = group.steer() {
        tracing::warn!(%error, "QUIC connections are spread by the kernel: datagrams go from worker to worker");
    }
}

/// Distributes a listener's sockets over the workers that need one. Each socket has a reader, because the kernel queues connections
/// on every socket.
pub(super) fn deal(
    sockets: &[Socket],
    name: &Arc<str>,
    transport: Transport,
    for_worker: &mut [Vec<ListeningSocket>],
    needs_it: impl Fn(usize) -> bool,
) -> Result<(), Vec<BuildError>> {
    let workers = for_worker.len();
    let is_shared = matches!(transport, Transport::Unix | Transport::SharedTcp);
    let deals = if is_shared { workers.max(sockets.len()) } else { sockets.len() };
    let dealt = sockets.iter().cycle().take(deals).enumerate().filter(|(number, _)| needs_it(number % workers));
    for (number, socket) in dealt {
        let socket = socket
            .share()
            .map_err(|error| vec![BuildError { path: format!("listener {name}"), reason: error.to_string() }])?;
        for_worker[number % workers].push(ListeningSocket { name: name.clone(), socket });
    }
    Ok(())
}

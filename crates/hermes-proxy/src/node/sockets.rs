//! The listening sockets of a node.
//!
//! In: listeners, and sockets of the process before us. Out: a socket a worker for each listener, bound before
//! anything running was touched, and dealt out so that none is without a reader.
//! Never: accepts or reads; that is the workers' part.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use hermes_model::snapshot::{Dispatch, Listener, ListenerProtocol, Snapshot};
use hermes_net::{steer, tcp, udp};

use super::Node;
use crate::generation::Unready;
use crate::listener::{BoundSocket, ListeningSocket, Transport};

/// What a socket is for: its protocol and address, and the listener's name where the port is the
/// system's choice.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SocketKey {
    pub(super) transport: Transport,
    pub(super) bind: SocketAddr,
    pub(super) name: Option<Arc<str>>,
}

impl SocketKey {
    /// All that a listener has: QUIC's comes last, since its port may be the one that TCP's was given.
    pub(super) fn all_of(listener: &Listener) -> impl Iterator<Item = Self> {
        let first = match listener.protocol {
            ListenerProtocol::Udp { .. } => Some(Transport::Udp),
            ListenerProtocol::Http | ListenerProtocol::Tcp { .. } | ListenerProtocol::Socks5 => Some(Transport::Tcp),
            ListenerProtocol::Tun(_) => None,
        };
        let http3 = listener.http3.then_some(Transport::Quic);
        [first, http3].into_iter().flatten().filter_map(|transport| {
            let bind = listener.bind?;
            Some(Self { transport, bind, name: (bind.port() == 0).then(|| listener.name.clone()) })
        })
    }

    fn is_tcp(&self) -> bool {
        self.transport == Transport::Tcp
    }

    /// In words that another process understands.
    pub(super) fn label(&self) -> String {
        let protocol = match self.transport {
            Transport::Tcp => "tcp",
            Transport::Udp => "udp",
            Transport::Quic => "quic",
        };
        match &self.name {
            Some(name) => format!("{protocol}/{}/{name}", self.bind),
            None => format!("{protocol}/{}", self.bind),
        }
    }
}

pub(super) enum Socket {
    Tcp(std::net::TcpListener),
    Udp(std::net::UdpSocket),
    Quic(std::net::UdpSocket),
}

impl Socket {
    fn open(transport: Transport, address: SocketAddr) -> std::io::Result<Self> {
        Ok(match transport {
            Transport::Tcp => Socket::Tcp(tcp::listen(address)?),
            Transport::Udp => Socket::Udp(udp::listen(address)?),
            Transport::Quic => Socket::Quic(udp::listen(address)?),
        })
    }

    fn from_fd(transport: Transport, fd: OwnedFd) -> Self {
        match transport {
            Transport::Tcp => Socket::Tcp(fd.into()),
            Transport::Udp => Socket::Udp(fd.into()),
            Transport::Quic => Socket::Quic(fd.into()),
        }
    }

    pub(super) fn local_addr(&self) -> std::io::Result<SocketAddr> {
        match self {
            Socket::Tcp(socket) => socket.local_addr(),
            Socket::Udp(socket) | Socket::Quic(socket) => socket.local_addr(),
        }
    }

    /// The same socket once more, for a worker.
    fn share(&self) -> std::io::Result<BoundSocket> {
        Ok(match self {
            Socket::Tcp(socket) => BoundSocket::Tcp(socket.try_clone()?),
            Socket::Udp(socket) => BoundSocket::Udp(socket.try_clone()?),
            Socket::Quic(socket) => BoundSocket::Quic(socket.try_clone()?),
        })
    }

    /// Before it closes: flows of a UDP listener go on, each on a socket of its own.
    pub(super) fn make_way(&self) {
        if let Socket::Udp(socket) = self
            && let Err(error) = udp::let_others_bind(socket)
        {
            tracing::warn!(%error, "UDP flows will end with their listener");
        }
    }

    pub(super) fn duplicate(&self) -> std::io::Result<OwnedFd> {
        match self {
            Socket::Tcp(socket) => socket.try_clone().map(OwnedFd::from),
            Socket::Udp(socket) | Socket::Quic(socket) => socket.try_clone().map(OwnedFd::from),
        }
    }
}

impl Node {
    /// Forgets sockets that no listener has any more; the workers hold theirs until they have
    /// served what waits.
    pub(super) fn part_with_unused(&mut self) {
        let used: HashSet<&SocketKey> = self.bound.values().chain(&self.held_back).collect();
        let unused: Vec<SocketKey> = self.sockets.keys().filter(|key| !used.contains(key)).cloned().collect();
        for key in unused {
            self.sockets.remove(&key).into_iter().flatten().for_each(|socket| socket.make_way());
            self.parted.insert(key);
        }
    }

    pub(super) fn open_sockets(
        &mut self,
        snapshot: &Snapshot,
    ) -> Result<HashMap<SocketKey, Vec<Socket>>, Vec<Unready>> {
        let mut opened = HashMap::new();
        let mut faults = Vec::new();
        // What may fail comes first: connections come to further sockets of a running listener at once.
        let is_inherited = |node: &Self, key: &SocketKey| node.inherited.contains_key(&key.label());
        let listeners = snapshot.listeners.iter().enumerate();
        let keys = listeners.flat_map(|(index, listener)| SocketKey::all_of(listener).map(move |key| (index, key)));
        let (running, new): (Vec<_>, Vec<_>) = keys.partition(|(_, key)| is_inherited(self, key));
        for (index, key) in new.into_iter().chain(running) {
            if self.sockets.contains_key(&key) || (!faults.is_empty() && is_inherited(self, &key)) {
                continue;
            }
            match self.open(&key, snapshot.dispatch, &opened) {
                Ok(sockets) => drop(opened.insert(key, sockets)),
                Err(error) => faults.push(Unready {
                    path: format!("listeners[{index}].bind"),
                    reason: format!("{} cannot be bound: {error}", key.bind),
                }),
            }
        }
        if faults.is_empty() { Ok(opened) } else { Err(faults) }
    }

    /// A socket a worker (or one for all), those of the process before us first.
    fn open(
        &mut self,
        key: &SocketKey,
        dispatch: Dispatch,
        opened: &HashMap<SocketKey, Vec<Socket>>,
    ) -> std::io::Result<Vec<Socket>> {
        let inherited = self.inherited.remove(&key.label()).into_iter().flatten();
        let mut sockets: Vec<Socket> = inherited.map(|fd| Socket::from_fd(key.transport, fd)).collect();
        // The sources of live flows are spread over the UDP sockets that there are: none is added.
        if !key.is_tcp() && !sockets.is_empty() {
            self.held_back.insert(key.clone());
            return Ok(sockets);
        }
        let wanted = if dispatch == Dispatch::Exclusive { 1 } else { self.workers.len() };
        let mut address = match sockets.first() {
            Some(first) => first.local_addr()?,
            None if key.transport == Transport::Quic => self.beside(key, opened)?,
            None => key.bind,
        };
        if sockets.is_empty() && address.port() != 0 && !self.holds_port(key) && !self.parted.contains(key) {
            if key.is_tcp() { tcp::probe_unused(address)? } else { udp::probe_unused(address)? }
        }
        while sockets.len() < wanted {
            let socket = Socket::open(key.transport, address)?;
            address = socket.local_addr()?;
            sockets.push(socket);
        }
        self.steer(key, &sockets);
        Ok(sockets)
    }

    /// Ties the sources of UDP flows to sockets, so that flows that part from them move nobody else.
    fn steer(&self, key: &SocketKey, sockets: &[Socket]) {
        if let Some(Socket::Quic(first)) = sockets.first() {
            if let Err(error) = steer::by_connection_id(first, sockets.len()) {
                tracing::warn!(%error, "QUIC connections whose clients move are lost");
            }
            return;
        }
        let Some(Socket::Udp(first)) = sockets.first() else { return };
        if self.parted.contains(key) {
            // Sockets of flows may stand before ours in the group.
            steer::by_kernel(first);
        } else if let Err(error) = steer::by_source(first, sockets.len()) {
            tracing::debug!(%error, "UDP sources are spread by the kernel");
        }
    }

    /// Is a socket of our own on that port? Then a probe of the port would meet ourselves.
    fn holds_port(&self, key: &SocketKey) -> bool {
        self.sockets.keys().any(|held| held.is_tcp() == key.is_tcp() && held.bind.port() == key.bind.port())
    }

    /// The address of the same listener's TCP sockets.
    fn beside(&self, key: &SocketKey, opened: &HashMap<SocketKey, Vec<Socket>>) -> std::io::Result<SocketAddr> {
        let tcp = SocketKey { transport: Transport::Tcp, ..key.clone() };
        let sockets = opened.get(&tcp).or_else(|| self.sockets.get(&tcp));
        sockets.and_then(|sockets| sockets.first()).map_or(Ok(key.bind), Socket::local_addr)
    }
}

/// Deals a listener's sockets out to the workers; none is left without a reader, since the kernel
/// would queue connections on it.
pub(super) fn deal(
    sockets: &[Socket],
    name: &Arc<str>,
    transport: Transport,
    dispatch: Dispatch,
    for_worker: &mut [Vec<ListeningSocket>],
) -> Result<(), Vec<Unready>> {
    let workers = for_worker.len();
    let deals = if dispatch == Dispatch::Exclusive && transport == Transport::Tcp {
        workers.max(sockets.len())
    } else {
        sockets.len()
    };
    for (number, socket) in sockets.iter().cycle().take(deals).enumerate() {
        let socket = socket
            .share()
            .map_err(|error| vec![Unready { path: format!("listener {name}"), reason: error.to_string() }])?;
        for_worker[number % workers].push(ListeningSocket { name: name.clone(), socket });
    }
    Ok(())
}

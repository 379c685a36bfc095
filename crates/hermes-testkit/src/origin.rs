//! Origins: small real servers at the end of a path.
//!
//! In: an address to bind, and a handler. Out: a running server with its address, which ends when it is dropped. Simple
//! enough not to dominate a measurement: one task per connection, no logging. The memory of one peer is bounded: bodies
//! are streamed, never collected.

use std::{
    future::Future,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use tokio::{
    net::{TcpListener, UdpSocket},
    task::JoinSet,
};

use crate::{Error, Result};

pub mod datagram;
pub mod http;
pub mod ledger;
pub mod scripted;
pub mod services;
pub mod slow;
pub mod stream;

/// A server that runs until it is dropped.
#[derive(Debug)]
pub struct Origin {
    address: SocketAddr,
    /// Aborted when dropped; never joined, since a server does not end by itself.
    _tasks: JoinSet<()>,
}

/// Backlog of the accept queue: a thousand clients at one instant must fit.
const BACKLOG: i32 = 4096;
/// Receive buffer of a UDP origin: a thousand datagrams at one instant.
const UDP_BUFFER: usize = 4 << 20;
/// Maximum number of ports to try for one that is free over TCP and UDP.
const MAX_BIND_ATTEMPTS: usize = 100;

impl Origin {
    /// The address of the server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts on `listener` and runs `serve` for each connection, on the current runtime.
    ///
    /// # Errors
    /// The listener has no address.
    pub fn accepting<F, S>(listener: TcpListener, serve: S) -> Result<Self>
    where
        F: Future<Output = ()> + Send + 'static,
        S: Fn(tokio::net::TcpStream) -> F + Send + 'static,
    {
        let address = listener.local_addr().map_err(Error::io("address of a listener"))?;
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        // The client notices a connection that failed before it was accepted.
                        if let Ok((stream, _)) = accepted {
                            let _ = stream.set_nodelay(true);
                            connections.spawn(serve(stream));
                        }
                    }
                    Some(_) = connections.join_next() => {}
                }
            }
        });
        Ok(Self { address, _tasks: tasks })
    }

    /// Echoes every datagram to its source.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn udp_echo(bind: SocketAddr) -> Result<Self> {
        let socket = bind_udp(bind)?;
        let socket = UdpSocket::from_std(socket).map_err(Error::io("UDP origin"))?;
        let address = socket.local_addr().map_err(Error::io("UDP origin"))?;
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut buffer = vec![0; 65_536];
            loop {
                if let Ok((length, peer)) = socket.recv_from(&mut buffer).await {
                    // A datagram that does not fit is lost, as in a network, and the client counts it.
                    let _ = socket.send_to(&buffer[..length], peer).await;
                }
            }
        });
        Ok(Self { address, _tasks: tasks })
    }
}

/// A listener with a deep accept queue.
///
/// # Errors
/// The address cannot be bound.
pub fn listen(bind: SocketAddr) -> Result<TcpListener> {
    let failed = || format!("listening on {bind}");
    let socket = socket2::Socket::new(socket2::Domain::for_address(bind), socket2::Type::STREAM, None)
        .map_err(Error::io(failed()))?;
    socket.set_reuse_address(true).map_err(Error::io(failed()))?;
    socket.set_nonblocking(true).map_err(Error::io(failed()))?;
    socket.bind(&bind.into()).map_err(Error::io(failed()))?;
    socket.listen(BACKLOG).map_err(Error::io(failed()))?;
    TcpListener::from_std(socket.into()).map_err(Error::io(failed()))
}

/// Binds TCP and UDP to one port, which the system selects if `bind` has port 0. A port that is free over one of them
/// may be in use over the other.
///
/// # Errors
/// No port is free over both.
pub fn twins(bind: SocketAddr) -> Result<(TcpListener, std::net::UdpSocket)> {
    let mut tried = 0;
    loop {
        let listener = listen(bind)?;
        let address = listener.local_addr().map_err(Error::io("a listener's address"))?;
        tried += 1;
        match bind_udp(address) {
            Err(_) if bind.port() == 0 && tried < MAX_BIND_ATTEMPTS => {}
            bound => return Ok((listener, bound?)),
        }
    }
}

/// A non-blocking UDP socket with a large receive buffer.
///
/// # Errors
/// The address cannot be bound.
pub fn bind_udp(bind: SocketAddr) -> Result<std::net::UdpSocket> {
    let failed = || format!("binding UDP {bind}");
    let socket = socket2::Socket::new(socket2::Domain::for_address(bind), socket2::Type::DGRAM, None)
        .map_err(Error::io(failed()))?;
    socket.set_nonblocking(true).map_err(Error::io(failed()))?;
    socket.set_recv_buffer_size(UDP_BUFFER).map_err(Error::io(failed()))?;
    // Root may exceed the system's limit, so that losses happen only in the path. Other users work without.
    let _ = nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::RcvBufForce, &UDP_BUFFER);
    socket.bind(&bind.into()).map_err(Error::io(failed()))?;
    Ok(socket.into())
}

/// Works like [`bind_udp`], on any free port, connected to one peer.
///
/// # Errors
/// No port is left, or no route leads to the peer.
pub fn connect_udp(peer: SocketAddr) -> Result<std::net::UdpSocket> {
    let any: IpAddr = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = bind_udp((any, 0).into())?;
    socket.connect(peer).map_err(Error::io(format!("directing UDP to {peer}")))?;
    // Discard datagrams that arrived before the socket was connected.
    while socket.recv(&mut []).is_ok() {}
    Ok(socket)
}

//! TCP sockets: how they listen and how they are tuned.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::TcpStream;

/// Connections that the kernel holds for us until we accept them. Bounded by `somaxconn` too.
const BACKLOG: i32 = 4096;
/// Dead peers behind silent networks are noticed after about two minutes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Opens a listening socket. Each worker opens one of its own for the same address: SO_REUSEPORT
/// spreads connections over them.
///
/// # Errors
/// The address is taken by somebody else, is not ours, or needs privileges.
pub fn listen(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if address.is_ipv6() {
        // `[::]` and `0.0.0.0` are two addresses in a document, so they are two here.
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    // Those that are accepted inherit it: replies go back by the way on which their question came.
    crate::mark::apply(SockRef::from(&socket));
    socket.bind(&address.into())?;
    // Linux gives them to each socket that is accepted here: four calls saved a connection.
    tune(SockRef::from(&socket));
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Sets what every connected socket has: no Nagle delay, keep-alive probes.
///
/// Failures are ignored: a socket whose peer is gone already refuses options, and the next read says so.
pub(crate) fn tune(socket: SockRef<'_>) {
    let _ = socket.set_tcp_nodelay(true);
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
    let _ = socket.set_tcp_keepalive(&keepalive);
}

/// Makes the close of this socket a reset: the peer learns that its bytes were not all taken,
/// where an orderly end would tell it that they were.
pub fn reset_on_close(stream: &TcpStream) {
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// Is the port of this address in use by somebody else? Reuseport would let two of our own
/// processes bind it both, each getting half of the connections: a mistake, not a wish.
///
/// # Errors
/// The address cannot be bound alone, for the reason that the error has.
pub fn probe_unused(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    // Without reuseport on it, listening next to a listening socket fails.
    socket.listen(1)
}

//! TCP sockets: how they listen, how they are tuned, and what the kernel knows of the far end.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
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

/// Opens a listening socket that is bound to a device: it receives packets from the device alone and sends into it
/// alone, whatever the routes are. Its connections do not carry the node's mark, so that a capture routes their packets
/// back into the device.
///
/// # Errors
/// The address does not belong to the device, or no device has that name.
pub fn listen_on_device(address: SocketAddr, device: &str) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.bind_device(Some(device.as_bytes()))?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
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

/// A connection whose peer takes nothing of what is sent to it for this long ends, though its machine answers.
pub fn bound_unread(stream: &TcpStream, within: Duration) {
    let _ = SockRef::from(stream).set_tcp_user_timeout(Some(within));
}

/// Of Linux 6.15.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// What is lost is sent again after a second at the latest, however often it was lost. Kernels before Linux 6.15 do not
/// know that, and go on with their own bound of two minutes.
#[allow(unsafe_code)] // Neither socket2 nor nix has the option.
pub fn bound_backoff(stream: &TcpStream) {
    let most: libc::c_int = 1000;
    let (value, length) = ((&raw const most).cast(), size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the descriptor is open for the call, and the address and size of what is read are given.
    unsafe { libc::setsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, TCP_RTO_MAX_MS, value, length) };
}

/// Looks at the acknowledgements that come to a socket, whoever reads and writes it. Keeps the connection from being
/// closed as long as it lives.
#[derive(Debug)]
pub struct Acks(OwnedFd);

/// What the kernel says of them.
#[derive(Clone, Copy, Debug)]
pub struct Acknowledged {
    /// A round trip, smoothed.
    pub rtt: Duration,
    /// Something that was sent is not acknowledged, or cannot be sent since there is no route any more or a filter drops it;
    /// and nothing was heard of the far end's kernel for so long.
    pub owed_for: Option<Duration>,
    /// The same also where the far end's window is closed.
    pub waiting_for: Option<Duration>,
    /// Bytes that the far end has acknowledged in all.
    pub acknowledged: u64,
}

impl Acks {
    /// # Errors
    /// No descriptor is left.
    pub fn of(stream: &TcpStream) -> io::Result<Self> {
        stream.as_fd().try_clone_to_owned().map(Self)
    }

    /// What is known now.
    ///
    /// # Errors
    /// The kernel does not say.
    #[allow(unsafe_code)] // Neither socket2 nor nix has the option, or the call.
    pub fn look(&self) -> io::Result<Acknowledged> {
        // SAFETY: it has numbers alone, for which zeros are values.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
        let into = (&raw mut info).cast();
        // SAFETY: the descriptor is open for the life of `self`, and the address and size of what is written to are given.
        let result =
            unsafe { libc::getsockopt(self.0.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, into, &raw mut length) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut queued: libc::c_int = 0;
        // SAFETY: the descriptor is open for the life of `self`, and what is written to is of the size that the call has.
        if unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TIOCOUTQ, &raw mut queued) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // A window that is all but closed has less room than what is sent at once.
        let takes = u32::try_from(queued).unwrap_or(u32::MAX).min(info.tcpi_snd_mss).max(1);
        let silence = Duration::from_millis(info.tcpi_last_ack_recv.into());
        Ok(Acknowledged {
            rtt: Duration::from_micros(info.tcpi_rtt.into()),
            // A kernel that does not say how much the far end takes says zero.
            owed_for: (info.tcpi_unacked > 0 || (queued > 0 && info.tcpi_snd_wnd >= takes)).then_some(silence),
            waiting_for: (queued > 0).then_some(silence),
            acknowledged: info.tcpi_bytes_acked,
        })
    }
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use socket2::SockFilter;
    use tokio::io::AsyncWriteExt as _;

    /// Whoever reads nothing acknowledges all the same; a dark path is told from that.
    #[tokio::test]
    async fn what_is_not_acknowledged_is_seen_and_that_it_is_at_last() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (far, _) = listener.accept().await.unwrap();
        let acks = Acks::of(&near).unwrap();
        let becomes = async |fits: &dyn Fn(Option<Duration>) -> bool| {
            let looks = async {
                while !fits(acks.look().unwrap().owed_for) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(60), looks).await.unwrap();
        };
        near.write_all(b"hello").await.unwrap();
        becomes(&|owed_for| owed_for.is_none()).await;
        // Everything that comes to it is dropped before TCP sees it.
        SockRef::from(&far).attach_filter(&[SockFilter::new(libc::BPF_RET as u16, 0, 0, 0)]).unwrap();
        near.write_all(b"hello").await.unwrap();
        becomes(&|owed_for| owed_for.is_some_and(|owed_for| owed_for >= Duration::from_millis(20))).await;
        SockRef::from(&far).detach_filter().unwrap();
        becomes(&|owed_for| owed_for.is_none()).await;
        // What stays here is owed too; a cork stands for a route that is gone.
        SockRef::from(&near).set_tcp_cork(true).unwrap();
        near.write_all(b"hello").await.unwrap();
        becomes(&|owed_for| owed_for.is_some()).await;
        SockRef::from(&near).set_tcp_cork(false).unwrap();
        becomes(&|owed_for| owed_for.is_none()).await;
        assert!(acks.look().unwrap().rtt > Duration::ZERO);
    }
}

//! TCP sockets: listening, socket options, and the kernel's view of the peer's acknowledgements.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Maximum number of connections that the kernel queues until they are accepted. Also limited by `somaxconn`.
pub(crate) const BACKLOG: i32 = 4096;
/// Idle time before the first keep-alive probe. With the kernel's default of nine probes, a dead peer is detected after
/// about three minutes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Opens a listening socket. Each worker opens its own socket for the same address, and SO_REUSEPORT distributes
/// connections over these sockets.
///
/// # Errors
/// The address is used by another program, does not belong to this host, or needs privileges.
pub fn listen(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if address.is_ipv6() {
        // A document lists `[::]` and `0.0.0.0` as separate addresses, so a socket for `[::]` must not accept IPv4.
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    // Accepted sockets inherit the mark, so a TUN device of Hermes does not capture their replies.
    crate::socket_mark::apply(SockRef::from(&socket));
    socket.bind(&address.into())?;
    // Accepted sockets inherit the options on Linux, which saves four system calls for each connection.
    tune(SockRef::from(&socket));
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Accepts a connection that waits in the queue of a socket that does not block.
///
/// # Errors
/// As of accept(2); `WouldBlock`: none waits.
pub fn accept_waiting(listener: &std::net::TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    let (stream, source) = listener.accept()?;
    stream.set_nonblocking(true)?;
    Ok((TcpStream::from_std(stream)?, source))
}

/// Opens a listening socket that is bound to a device: it receives packets only from the device and sends only into it,
/// regardless of routes. Its connections do not carry the node's mark, so that a capture routes their packets back into
/// the device.
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

/// Sets the options of every connected socket: no Nagle delay, keep-alive probes, and urgent data (RFC 6093) in the stream,
/// of which a read otherwise skips the byte. To be called before the connection stands: urgent data may come first.
///
/// Failures are ignored: without an option, the connection works, too.
pub(crate) fn tune(socket: SockRef<'_>) {
    let _ = socket.set_tcp_nodelay(true);
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
    let _ = socket.set_tcp_keepalive(&keepalive);
    let _ = socket.set_out_of_band_inline(true);
}

/// Makes closing this socket send a reset, which shows the peer that not all its bytes were processed. After a FIN, the
/// peer would assume that they were.
pub fn reset_on_close(stream: &TcpStream) {
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// Ends the effect of [`reset_on_close`].
pub fn end_on_close(stream: &TcpStream) {
    let _ = SockRef::from(stream).set_linger(None);
}

/// The request of ioctl(2) that sockatmark(3) makes (asm-generic/sockios.h), which the libc crate lacks.
const SIOCATMARK: libc::c_ulong = 0x8905;

/// True if the read position is at the urgent mark, even before the urgent byte has arrived. Reads stop there.
#[allow(unsafe_code)]
pub fn is_at_urgent(stream: &TcpStream) -> bool {
    let mut at_mark: libc::c_int = 0;
    // SAFETY: the call writes one int, to which the pointer leads.
    unsafe { libc::ioctl(stream.as_raw_fd(), SIOCATMARK as _, &raw mut at_mark) == 0 && at_mark != 0 }
}

/// Reads at most `most` bytes from the socket directly. A read that stops at the urgent mark clears the readiness that
/// tokio knows, although more bytes may wait. `None`: no byte has arrived. Empty: the peer has ended its direction.
///
/// # Errors
/// The connection is broken.
pub fn read_arrived(stream: &TcpStream, most: usize) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::with_capacity(most);
    let room = bytes.spare_capacity_mut();
    let most = most.min(room.len());
    match SockRef::from(stream).recv(&mut room[..most]) {
        Ok(count) => {
            // SAFETY: the call has written that many bytes.
            #[allow(unsafe_code)]
            unsafe {
                bytes.set_len(count);
            }
            Ok(Some(bytes))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sends one byte as urgent data.
///
/// # Errors
/// The connection is broken.
pub fn poll_send_urgent(stream: &TcpStream, byte: u8, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
    loop {
        ready!(stream.poll_write_ready(cx))?;
        match stream.try_io(Interest::WRITABLE, || SockRef::from(stream).send_out_of_band(&[byte])) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return Poll::Ready(other.map(drop)),
        }
    }
}

/// Maximum unsent bytes in the send buffer. A smaller number would cost throughput: the kernel wakes the writer when half of them
/// are left.
const MAX_UNSENT_BYTES: u32 = 256 << 10;

/// Bounds the unsent bytes in the send buffer of a connection (`TCP_NOTSENT_LOWAT`). Frames of high priority queue after them.
pub fn bound_unsent(stream: &TcpStream) {
    // Without the option, the connection works, too.
    let _ = SockRef::from(stream).set_tcp_notsent_lowat(MAX_UNSENT_BYTES);
}

/// Closes a connection whose peer accepts no data for this long, although it acknowledges probes (TCP_USER_TIMEOUT).
pub fn bound_unread(stream: &TcpStream, within: Duration) {
    let _ = SockRef::from(stream).set_tcp_user_timeout(Some(within));
}

/// Sets the congestion control of a connection; `None` leaves the kernel's default. An algorithm that the kernel does not
/// have, or allows only with CAP_NET_ADMIN, is reported once, and the default remains.
pub fn set_congestion(stream: &TcpStream, name: Option<&str>) {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    let Some(name) = name else { return };
    if let Err(error) = SockRef::from(stream).set_tcp_congestion(name.as_bytes())
        && error.raw_os_error() != Some(libc::EINVAL)
        && !REPORTED.swap(true, Ordering::Relaxed)
    {
        tracing::warn!(congestion = name, %error, "the kernel refuses the congestion control; see \
            net.ipv4.tcp_available_congestion_control");
    }
}

/// linux/tcp.h, from Linux 6.15 on.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// Limits the retransmission timeout to one second. Kernels before Linux 6.15 do not support this and keep their limit
/// of two minutes.
#[allow(unsafe_code)] // Neither socket2 nor nix has the option.
pub fn bound_backoff(stream: &TcpStream) {
    let most: libc::c_int = 1000;
    let (value, length) = ((&raw const most).cast(), size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the descriptor is open for the call, and the address and size of the option's value are given.
    unsafe { libc::setsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, TCP_RTO_MAX_MS, value, length) };
}

/// Observes the acknowledgements of a socket that other code reads and writes. The connection stays open as long as
/// this value lives.
#[derive(Debug)]
pub struct AckMonitor(OwnedFd);

/// The kernel's data about acknowledgements.
#[derive(Clone, Copy, Debug)]
pub struct AckState {
    /// The smoothed round-trip time.
    pub rtt: Duration,
    /// The time since the peer's kernel last acknowledged data. `None` unless sent data is unacknowledged, or data
    /// cannot be sent although the peer's window is open, because a route is missing or a filter drops it.
    pub owed_for: Option<Duration>,
    /// The time since the peer's kernel last acknowledged data. `None` if no data is queued. Unlike `owed_for`, this
    /// also covers data that waits because the peer's window is closed.
    pub waiting_for: Option<Duration>,
    /// Total number of bytes that the peer has acknowledged.
    pub acknowledged: u64,
}

impl AckMonitor {
    /// Creates a monitor of this connection.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn of(stream: &TcpStream) -> io::Result<Self> {
        stream.as_fd().try_clone_to_owned().map(Self)
    }

    /// Queries the kernel for the current state.
    ///
    /// # Errors
    /// The kernel refuses the query.
    #[allow(unsafe_code)] // Neither socket2 nor nix has the option, or the call.
    pub fn state(&self) -> io::Result<AckState> {
        // SAFETY: the structure has only numbers, for which zeros are valid.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
        let into = (&raw mut info).cast();
        // SAFETY: the descriptor is open for the life of `self`, and the address and size of the result are given.
        let result =
            unsafe { libc::getsockopt(self.0.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, into, &raw mut length) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut queued: libc::c_int = 0;
        // SAFETY: the descriptor is open for the life of `self`, and the result has the size that the call writes.
        if unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TIOCOUTQ, &raw mut queued) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // The window counts as open if it has room for a whole segment, or for all queued bytes if these are fewer.
        let takes = u32::try_from(queued).unwrap_or(u32::MAX).min(info.tcpi_snd_mss).max(1);
        let silence = Duration::from_millis(info.tcpi_last_ack_recv.into());
        Ok(AckState {
            rtt: Duration::from_micros(info.tcpi_rtt.into()),
            // A kernel that does not report the peer's window sets `tcpi_snd_wnd` to 0, which counts as closed.
            owed_for: (info.tcpi_unacked > 0 || (queued > 0 && info.tcpi_snd_wnd >= takes)).then_some(silence),
            waiting_for: (queued > 0).then_some(silence),
            acknowledged: info.tcpi_bytes_acked,
        })
    }
}

/// Checks that no other process uses the port of this address. With SO_REUSEPORT, two processes of one user could both
/// bind it, and each would receive half of the connections, which is always a mistake.
///
/// # Errors
/// The address cannot be bound exclusively; the error names the cause.
pub fn probe_unused(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    // Without SO_REUSEPORT, listening on the port of a listening socket fails.
    socket.listen(1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use socket2::SockFilter;
    use tokio::io::AsyncWriteExt as _;

    /// A peer that reads nothing still acknowledges; an unreachable peer does not.
    #[tokio::test]
    async fn what_is_not_acknowledged_is_seen_and_that_it_is_at_last() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (far, _) = listener.accept().await.unwrap();
        let acks = AckMonitor::of(&near).unwrap();
        let becomes = async |fits: &dyn Fn(Option<Duration>) -> bool| {
            let looks = async {
                while !fits(acks.state().unwrap().owed_for) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(60), looks).await.unwrap();
        };
        near.write_all(b"hello").await.unwrap();
        becomes(&|owed_for| owed_for.is_none()).await;
        // The filter drops all segments before TCP sees them.
        SockRef::from(&far).attach_filter(&[SockFilter::new(libc::BPF_RET as u16, 0, 0, 0)]).unwrap();
        near.write_all(b"hello").await.unwrap();
        becomes(&|owed_for| owed_for.is_some_and(|owed_for| owed_for >= Duration::from_millis(20))).await;
        SockRef::from(&far).detach_filter().unwrap();
        becomes(&|owed_for| owed_for.is_none()).await;
        // Unsent data counts as unacknowledged, too; a cork stands for a missing route.
        SockRef::from(&near).set_tcp_cork(true).unwrap();
        near.write_all(b"hello").await.unwrap();
        becomes(&|owed_for| owed_for.is_some()).await;
        SockRef::from(&near).set_tcp_cork(false).unwrap();
        becomes(&|owed_for| owed_for.is_none()).await;
        assert!(acks.state().unwrap().rtt > Duration::ZERO);
    }
}

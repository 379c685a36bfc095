//! UDP sockets that send and receive many datagrams in one call (GSO, GRO, recvmmsg).
//!
//! In: datagrams, alone or in batches of equal length. Out: the same datagrams, with their source when received. Never:
//! a silently truncated datagram.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use nix::sys::socket::{setsockopt, sockopt};
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Bytes of the buffer for one message. The kernel merges at most 64 KiB of one flow into a message.
const MESSAGE_ROOM: usize = 65_536;
/// Maximum number of messages that one call receives. Each may contain dozens of datagrams.
const MESSAGES: usize = 16;
/// Size of a socket's send buffer and of its receive buffer in the kernel, in bytes, so that bursts survive a
/// scheduling delay of some milliseconds.
static SOCKET_BUFFER: AtomicUsize = AtomicUsize::new(4 << 20);
/// The largest payload of a UDP datagram over IPv4.
pub const MAX_PAYLOAD: usize = 65_507;

/// A UDP socket on the runtime of one worker.
///
/// The runtime watches it for datagrams alone. The kernel reports a UDP socket as writable after each datagram that has
/// left, so a socket that is watched for both wakes its thread for each datagram that it sends.
pub struct UdpSocket {
    io: AsyncFd<std::net::UdpSocket>,
    /// Watches a socket whose buffer was full, through a descriptor of its own; `None` otherwise.
    writable: RefCell<Option<Rc<AsyncFd<OwnedFd>>>>,
    /// A task has polled `writable` and waits.
    is_awaited: Cell<bool>,
    state: &'static UdpSocketState,
    /// GSO failed once, for example on a device without checksum offload. Since then, datagrams are sent one by one.
    no_segmentation: Cell<bool>,
}

/// The buffer for received bytes: one allocation for all messages of a call, reused by the next call. Only pages that
/// messages have reached use memory.
#[derive(Default)]
pub struct ReceiveBuffer {
    room: BytesMut,
}

/// Opens a UDP socket for a listener, shared with other sockets by SO_REUSEPORT.
///
/// # Errors
/// The address is in use, does not belong to this host, or needs privileges.
pub fn listen(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = open(address)?;
    socket.set_reuse_port(true)?;
    // `bind` needs the option beside the sockets of [`listen_for_peer`]. If it stayed set, any user of the machine
    // could bind the port as well.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.set_reuse_address(false)?;
    Ok(socket.into())
}

/// Opens a UDP socket that is bound to a device: it receives packets only from the device and sends only into it,
/// regardless of routes. It does not carry the node's mark, so that a capture routes its packets back into the device.
///
/// # Errors
/// The address does not belong to the device, or no device has that name.
pub fn listen_on_device(address: SocketAddr, device: &str) -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    socket.bind_device(Some(device.as_bytes()))?;
    socket.set_nonblocking(true)?;
    set_buffers(&socket);
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Checks that no other process uses the port, which SO_REUSEPORT would allow for processes of the same user.
///
/// # Errors
/// The address cannot be bound exclusively.
pub fn probe_unused(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())
}

/// Opens a UDP socket that is connected to one peer.
///
/// # Errors
/// The host has no route to the peer, or no file descriptor is left.
pub fn connect(peer: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = open(peer)?;
    socket.connect(&peer.into())?;
    Ok(socket.into())
}

/// Waits until the kernel, or an ICMP error, reports an address as unreachable, and returns the error. Never returns
/// otherwise. QUIC does not receive such errors, because its socket is not connected. Sends an empty datagram to the
/// peer, which ignores it.
pub async fn refusal(peer: SocketAddr) -> io::Error {
    use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable, PermissionDenied};
    match knock(peer).await {
        Err(error)
            if matches!(error.kind(), ConnectionRefused | HostUnreachable | NetworkUnreachable | PermissionDenied) =>
        {
            error
        }
        // The QUIC handshake reports other errors.
        _ => std::future::pending().await,
    }
}

async fn knock(peer: SocketAddr) -> io::Result<()> {
    let socket = connect(peer)?;
    // Receive ICMP errors of routers, too, as TCP does while it connects.
    match peer {
        SocketAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?,
        SocketAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6RecvErr, &true)?,
    }
    let socket = tokio::net::UdpSocket::from_std(socket)?;
    socket.send(&[]).await?;
    socket.recv(&mut [0]).await.map(drop)
}

/// Returns the largest payload, in bytes, that reaches a peer unfragmented, according to the path MTU that the kernel
/// knows. Sends no packet.
///
/// # Errors
/// The host has no route to the peer, or no file descriptor is left.
pub fn whole_payload(peer: SocketAddr) -> io::Result<usize> {
    let (level, option, headers) = match peer {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU, 20 + 8),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU, 40 + 8),
    };
    let mtu = option_of(&connect(peer)?, level, option)?;
    let mtu = usize::try_from(mtu).map_err(io::Error::other)?;
    Ok(mtu.saturating_sub(headers).min(MAX_PAYLOAD))
}

#[allow(unsafe_code)] // nix has only the option of IPv4.
fn option_of(socket: &std::net::UdpSocket, level: i32, option: i32) -> io::Result<i32> {
    let mut value: i32 = 0;
    let mut length = size_of::<i32>() as libc::socklen_t;
    let into = (&raw mut value).cast();
    // SAFETY: the descriptor is open for the life of `socket`, and the value is an int whose address and size are
    // given.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, into, &raw mut length) };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// Opens a UDP socket at an address that no other socket may bind. Port 0 selects a free port.
///
/// # Errors
/// The address does not belong to this host, or no port or socket is left.
pub fn bind(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = open(address)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Opens a socket for one peer at a listener's address, beside the listener's own sockets. The kernel prefers this
/// socket for that peer's datagrams, so a flow keeps its packets when another process takes over the listener. If
/// [`reuseport`](crate::reuseport) steers the listener's group, the socket receives no datagram of another peer.
///
/// # Errors
/// The errors of `listen`.
pub fn listen_for_peer(local: SocketAddr, peer: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = open(local)?;
    socket.set_reuse_port(true)?;
    // Further sockets for single peers can bind the address, although this socket leaves the reuseport group below.
    socket.set_reuse_address(true)?;
    socket.bind(&local.into())?;
    socket.connect(&peer.into())?;
    // Linux 6.13 and later remove the socket from its group here. The next socket must join the listener's group, and
    // not form a new one with this socket, which would receive every datagram.
    socket.set_reuse_port(false)?;
    Ok(socket.into())
}

/// Opens a socket for one peer at a listener's address, for a listener whose own sockets are about to close and were
/// passed to [`let_others_bind`]. The socket belongs to no reuseport group, so a new listener at the address neither
/// receives its packets nor loses any.
///
/// # Errors
/// The errors of `listen`.
pub fn remain_for_peer(local: SocketAddr, peer: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = open(local)?;
    socket.set_reuse_address(true)?;
    socket.bind(&local.into())?;
    socket.connect(&peer.into())?;
    Ok(socket.into())
}

/// Lets `remain_for_peer` bind the address of a listener that is about to close.
///
/// # Errors
/// The socket refuses the option.
pub fn let_others_bind(socket: &std::net::UdpSocket) -> io::Result<()> {
    SockRef::from(socket).set_reuse_address(true)
}

fn open(like: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(like), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    crate::socket_mark::apply(SockRef::from(&socket));
    set_buffers(&socket);
    if like.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    Ok(socket)
}

/// Sets the size, in bytes, of the kernel's send and receive buffer of each socket that this process opens from now on.
pub fn keep_in_kernel(bytes: usize) {
    SOCKET_BUFFER.store(bytes, Ordering::Relaxed);
}

/// Sets both buffer sizes. Without CAP_NET_ADMIN the kernel limits them, and smaller buffers still work.
fn set_buffers(socket: &Socket) {
    let bytes = SOCKET_BUFFER.load(Ordering::Relaxed);
    if setsockopt(socket, sockopt::RcvBufForce, &bytes).is_err() {
        let _ = socket.set_recv_buffer_size(bytes);
    }
    if setsockopt(socket, sockopt::SndBufForce, &bytes).is_err() {
        let _ = socket.set_send_buffer_size(bytes);
    }
}

/// Registers a socket with the runtime, for one event.
#[allow(unsafe_code)] // The registered descriptor must stay open and must not change.
fn watch<T: AsRawFd + Into<OwnedFd>>(socket: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: a value that converts into an owned descriptor owns one, which stays open until it is dropped. Sockets and
    // descriptors of std cannot be exchanged for others through a shared reference.
    unsafe { AsyncFd::register_with_interest(socket, interest) }.map_err(io::Error::from)
}

impl UdpSocket {
    /// Registers a socket with the runtime of this thread.
    ///
    /// # Errors
    /// The thread has no runtime, or the socket refuses its options.
    pub fn from_std(socket: std::net::UdpSocket) -> io::Result<Self> {
        let state = abilities()?;
        receive_merged(&socket);
        socket.set_nonblocking(true)?;
        let io = watch(socket, Interest::READABLE)?;
        Ok(Self {
            io,
            writable: RefCell::default(),
            is_awaited: Cell::new(false),
            state,
            no_segmentation: Cell::new(false),
        })
    }

    /// The local address.
    ///
    /// # Errors
    /// The socket is closed.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.io.get_ref().local_addr()
    }

    /// The file descriptor, for the handover to another process.
    pub fn as_raw_fd(&self) -> RawFd {
        self.io.as_raw_fd()
    }

    /// Receives the waiting datagrams and passes each with its source to `each`. Returns their number.
    ///
    /// # Errors
    /// The socket's error. A connected socket may also report ECONNREFUSED after an ICMP error, which does not affect
    /// the next datagram.
    pub fn poll_receive(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut ReceiveBuffer,
        mut each: impl FnMut(SocketAddr, Bytes),
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = std::task::ready!(self.io.poll_read_ready(cx))?;
            match self.receive(buffer, &mut each) {
                Ok((messages, datagrams)) => {
                    // The kernel has no more messages: skip the call that would return `WouldBlock`.
                    if messages < MESSAGES {
                        ready.clear_ready();
                    }
                    return Poll::Ready(Ok(datagrams));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// Receives without waiting for readiness, in case the runtime has not noticed new datagrams yet.
    ///
    /// # Errors
    /// `WouldBlock` if no datagram is waiting. Otherwise the errors of `poll_receive`.
    pub fn receive_now(
        &self,
        buffer: &mut ReceiveBuffer,
        each: &mut (impl FnMut(SocketAddr, Bytes) + ?Sized),
    ) -> io::Result<usize> {
        self.receive(buffer, each).map(|(_, datagrams)| datagrams)
    }

    /// Returns the number of received messages, and the number of datagrams in them.
    fn receive(
        &self,
        buffer: &mut ReceiveBuffer,
        each: &mut (impl FnMut(SocketAddr, Bytes) + ?Sized),
    ) -> io::Result<(usize, usize)> {
        let mut metas = [RecvMeta::default(); MESSAGES];
        if buffer.room.is_empty() {
            buffer.room = BytesMut::zeroed(MESSAGE_ROOM * MESSAGES);
        }
        let mut chunks = buffer.room.chunks_exact_mut(MESSAGE_ROOM);
        let mut slices: [IoSliceMut<'_>; MESSAGES] =
            std::array::from_fn(|_| IoSliceMut::new(chunks.next().unwrap_or_default()));
        let messages = self.state.recv(UdpSockRef::from(self.io.get_ref()), &mut slices, &mut metas)?;
        Ok((messages, deliver(&buffer.room, &metas[..messages], each)))
    }

    /// Polls until a send may succeed.
    ///
    /// # Errors
    /// The errors of the socket.
    pub fn poll_send_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.writable()?.poll_write_ready(cx).map_ok(drop);
        self.is_awaited.set(polled.is_pending());
        polled
    }

    /// Sends one datagram, and waits while the socket buffer is full. Several tasks may send. Cancel safe.
    ///
    /// # Errors
    /// The errors of the socket.
    pub async fn send(&self, peer: SocketAddr, datagram: &[u8]) -> io::Result<()> {
        loop {
            match self.try_send(peer, datagram, datagram.len()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => drop(self.writable()?.writable().await?),
                sent => return sent,
            }
        }
    }

    /// Sends `contents` as datagrams of `segment` bytes each (the last may be shorter).
    ///
    /// # Errors
    /// `WouldBlock` if the socket buffer is full. Then no datagram was sent, or without GSO perhaps the first ones.
    /// Other errors are those of the socket.
    pub fn try_send(&self, peer: SocketAddr, contents: &[u8], segment: usize) -> io::Result<()> {
        if contents.len() <= segment {
            return self.send_segments(peer, contents, None);
        }
        if self.no_segmentation.get() {
            return contents.chunks(segment).try_for_each(|one| self.send_segments(peer, one, None));
        }
        match self.send_segments(peer, contents, Some(segment)) {
            // EIO and EINVAL: the device or the kernel cannot segment.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL)) => {
                self.no_segmentation.set(true);
                contents.chunks(segment).try_for_each(|one| self.send_segments(peer, one, None))
            }
            other => other,
        }
    }

    fn send_segments(&self, destination: SocketAddr, contents: &[u8], segment_size: Option<usize>) -> io::Result<()> {
        let transmit = Transmit { destination, ecn: None, contents, segment_size, src_ip: None };
        let send = || self.state.try_send(UdpSockRef::from(self.io.get_ref()), &transmit);
        let watched = self.writable.borrow().clone();
        // A registration learns here that the buffer is full again.
        let sent = watched.map_or_else(send, |watched| watched.try_io(Interest::WRITABLE, |_| send()));
        if sent.is_ok() && !self.is_awaited.get() {
            self.writable.replace(None);
        }
        sent
    }

    /// Returns what watches the socket for space in its buffer.
    fn writable(&self) -> io::Result<Rc<AsyncFd<OwnedFd>>> {
        let mut watched = self.writable.borrow_mut();
        if let Some(watched) = &*watched {
            return Ok(watched.clone());
        }
        let descriptor = self.io.get_ref().as_fd().try_clone_to_owned()?;
        Ok(watched.insert(Rc::new(watch(descriptor, Interest::WRITABLE)?)).clone())
    }

    /// Returns the maximum number of datagrams of one `try_send`.
    pub fn max_segments(&self) -> usize {
        self.state.max_gso_segments().max(1)
    }
}

fn deliver(room: &[u8], metas: &[RecvMeta], each: &mut (impl FnMut(SocketAddr, Bytes) + ?Sized)) -> usize {
    let mut count = 0;
    for (meta, message) in metas.iter().zip(room.chunks_exact(MESSAGE_ROOM)) {
        // Each message is copied out of the shared buffer, which is reused immediately. A flow that retains a datagram
        // then retains only the message that contained it.
        let message = Bytes::copy_from_slice(&message[..meta.len]);
        let stride = meta.stride.max(1);
        // A slice of the message would need another allocation, for its reference count.
        if message.len() <= stride {
            each(meta.addr, message);
            count += 1;
            continue;
        }
        for start in (0..message.len()).step_by(stride) {
            each(meta.addr, message.slice(start..message.len().min(start + stride)));
            count += 1;
        }
    }
    count
}

/// Detects the kernel's UDP features once in a process, on a socket that stays open. A probe for each flow would cost a
/// dozen system calls. When the last socket with UDP_GRO closes, the kernel patches its own code on all processors,
/// which took longer than all other work for a flow.
fn abilities() -> io::Result<&'static UdpSocketState> {
    static PROBED: OnceLock<(std::net::UdpSocket, UdpSocketState)> = OnceLock::new();
    if let Some((_, state)) = PROBED.get() {
        return Ok(state);
    }
    let socket: std::net::UdpSocket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?.into();
    let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
    Ok(&PROBED.get_or_init(|| (socket, state)).1)
}

/// Makes the kernel merge datagrams of one flow into one message (UDP_GRO). Without support they arrive one by one.
#[allow(unsafe_code)] // Neither socket2 nor nix can set only this option.
fn receive_merged(socket: &std::net::UdpSocket) {
    let on: i32 = 1;
    // SAFETY: the descriptor is open for the life of `socket`, and the option's value is an int whose address and size
    // are given.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_GRO,
            (&raw const on).cast(),
            size_of::<i32>() as libc::socklen_t,
        );
    }
}

//! Transparent interception of TCP and UDP (TPROXY): neither end is configured.
//!
//! In: prefixes and ports to intercept. Out: for each worker, listening sockets that accept connections to any address
//! of them, and a queue with their SYNs if these are held. Also: sockets that connect with the address of a client.
//! Uses an nftables table that the kernel removes with this process, one rule of policy routing for each IP version,
//! and a route in a table of their own. Never: a change of other programs' rules, or of packets.
//!
//! | hook, priority | packets | effect |
//! |---|---|---|
//! | prerouting, -300 (raw) | to sockets that use a client's address | no connection tracking |
//! | output, -300 (raw) | of such sockets | no connection tracking |
//! | prerouting, -150 (mangle) | to transparent sockets | delivered to this machine |
//! | prerouting, -149 | SYNs to the prefixes | held, or delivered to a worker's socket |
//!
//! The connection of a client and the one that uses its address have the same tuple, and connection tracking would
//! confuse them; so it does not see the second one. Priority -150 is after the defragmentation and tracking of the
//! kernel, and before the destination NAT of containers (-100).

mod routing;
mod rules;

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use ipnet::IpNet;
use nix::sys::socket::sockopt::{Ipv4OrigDstAddr, Ipv6OrigDstAddr};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrIn, SockaddrIn6, SockaddrStorage, recvmsg, setsockopt};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::io::Interest;
use tokio::net::{TcpSocket, TcpStream};

use self::rules::Layout;
use crate::nfqueue::{PacketQueue, PacketVerdict};
use crate::nftables::OwnedTable;
use crate::tcp;

/// The packet mark of sockets that use a client's address. It differs from that of Hermes's other sockets, so that rules
/// can select them.
const SPOOF_MARK: u32 = crate::socket_mark::MARK + 1;
/// The most tables of all processes in a network namespace.
const MAX_TABLES: u8 = 255;
/// The first number of queues (NFQUEUE), which other programs rarely use; and attempts at a free range of numbers.
const FIRST_QUEUE: u16 = 0x4800;
const MAX_QUEUE_ATTEMPTS: usize = 256;

/// The packets to intercept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Destinations. Addresses of this machine are excluded, unless a prefix of one address names them.
    pub prefixes: Vec<IpNet>,
    /// Destination ports; all if empty.
    pub ports: Vec<u16>,
    /// Hold SYNs until a worker decides on them.
    pub hold: bool,
    /// Intercept UDP, too.
    pub udp: bool,
    /// The most SYNs that wait in the queue of a worker. Others pass.
    pub queue_length: u32,
}

/// The sockets of one worker.
#[derive(Debug)]
pub struct WorkerSockets {
    /// For IPv4, and for IPv6 if the kernel supports it.
    pub listeners: Vec<std::net::TcpListener>,
    /// Held SYNs.
    pub queue: PacketQueue,
    /// UDP sockets, likewise.
    pub udp: Vec<std::net::UdpSocket>,
}

/// Delivers the packets of transparent sockets to this machine. One for a process is enough. It ends when it is dropped,
/// and connections over such sockets stall then.
#[derive(Debug)]
pub struct Diversion {
    id: u8,
    _table: OwnedTable,
}

impl Diversion {
    /// Begins to divert, in the network namespace of the caller.
    ///
    /// # Errors
    /// The errors of [`Interception::open`].
    pub fn open() -> io::Result<Self> {
        routing::remove_stale();
        let create = |id| OwnedTable::create(rules::diversion_name(id), &rules::diversion(rules::divert_mark(id)));
        let (id, table) = first_free(create)?;
        routing::add(rules::divert_mark(id))?;
        Ok(Self { id, _table: table })
    }

    fn mark(&self) -> u32 {
        rules::divert_mark(self.id)
    }
}

impl Drop for Diversion {
    fn drop(&mut self) {
        routing::remove(self.mark());
    }
}

/// An interception of this process. Ends when it is dropped; its connections need the diversion alone.
#[derive(Debug)]
pub struct Interception {
    id: u8,
    table: OwnedTable,
    diversion: Arc<Diversion>,
    /// The addresses of the listeners and UDP sockets of each worker.
    addresses: Vec<Addresses>,
    first_queue: u16,
    has_queue_expression: bool,
    plan: Mutex<Plan>,
    workers: Vec<WorkerSockets>,
}

/// The addresses of the sockets of one worker.
#[derive(Clone, Debug, Default)]
struct Addresses {
    tcp: Vec<SocketAddr>,
    udp: Vec<SocketAddr>,
}

impl Interception {
    /// Opens the sockets of `workers` workers, and then intercepts. Uses the network namespace of the caller.
    ///
    /// # Errors
    /// No privilege (CAP_NET_ADMIN), or a kernel without TPROXY, NFQUEUE or owned tables (Linux 5.12).
    pub fn open(workers: usize, plan: &Plan, diversion: Arc<Diversion>) -> io::Result<Self> {
        let count = u16::try_from(workers.clamp(1, rules::MAX_WORKERS)).unwrap_or(u16::MAX);
        let queues = bind_queues(count, plan.queue_length)?;
        let first_queue = queues.first().map_or(0, PacketQueue::number);
        let (mut addresses, mut workers) = (Vec::new(), Vec::new());
        for queue in queues {
            let (sockets, at) = WorkerSockets::open(queue)?;
            addresses.push(at);
            workers.push(sockets);
        }
        let divert = diversion.mark();
        let create = |id| {
            let with = |has_queue_expression| -> io::Result<(OwnedTable, bool)> {
                let layout = Layout { id, divert, addresses: &addresses, first_queue, has_queue_expression };
                let table = OwnedTable::create(rules::table_name(id), &rules::interception(&layout, plan))?;
                Ok((table, has_queue_expression))
            };
            match with(true) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => with(false),
                created => created,
            }
        };
        let (id, (table, has_queue_expression)) = first_free(create)?;
        let plan = Mutex::new(plan.clone());
        Ok(Self { id, table, diversion, addresses, first_queue, has_queue_expression, plan, workers })
    }

    /// Changes what is intercepted. Live connections stay.
    ///
    /// # Errors
    /// The kernel's error; the old rules stay then.
    pub fn change(&self, plan: &Plan) -> io::Result<()> {
        let mut current = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        if *current == *plan {
            return Ok(());
        }
        let layout = Layout {
            id: self.id,
            divert: self.diversion.mark(),
            addresses: &self.addresses,
            first_queue: self.first_queue,
            has_queue_expression: self.has_queue_expression,
        };
        self.table.replace_rules(&rules::interception(&layout, plan))?;
        *current = plan.clone();
        Ok(())
    }

    /// Duplicates the sockets of a worker.
    ///
    /// # Errors
    /// No file descriptor is left, or there is no such worker.
    pub fn sockets(&self, worker: usize) -> io::Result<WorkerSockets> {
        let sockets = self.workers.get(worker).ok_or(io::ErrorKind::NotFound)?;
        Ok(WorkerSockets {
            listeners: sockets.listeners.iter().map(std::net::TcpListener::try_clone).collect::<io::Result<_>>()?,
            queue: sockets.queue.duplicate()?,
            udp: sockets.udp.iter().map(std::net::UdpSocket::try_clone).collect::<io::Result<_>>()?,
        })
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Delivers a held SYN to the listening socket of a worker.
    pub fn release(&self, worker: usize) -> PacketVerdict {
        PacketVerdict::Repeat(rules::release_mark(self.id, worker))
    }

    /// Answers a held SYN with a reset.
    pub fn refuse(&self) -> PacketVerdict {
        PacketVerdict::Repeat(rules::refuse_mark(self.id))
    }

    /// Answers a held SYN with ICMP: host unreachable.
    pub fn unreachable(&self) -> PacketVerdict {
        PacketVerdict::Repeat(rules::unreachable_mark(self.id))
    }
}

/// Creates a table with the first number that no process uses. For the table of another process the kernel says EPERM,
/// as it does without the privilege.
fn first_free<T>(create: impl Fn(u8) -> io::Result<T>) -> io::Result<(u8, T)> {
    let mut last = io::Error::from_raw_os_error(libc::EPERM);
    for id in 0..MAX_TABLES {
        match create(id) {
            Ok(table) => return Ok((id, table)),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EEXIST | libc::EPERM)) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Binds queues with consecutive numbers. The kernel says EPERM for a queue of another process, and without the
/// privilege.
fn bind_queues(count: u16, length: u32) -> io::Result<Vec<PacketQueue>> {
    let mut last = io::Error::from_raw_os_error(libc::EPERM);
    for first in (FIRST_QUEUE..u16::MAX - count).step_by(usize::from(count)).take(MAX_QUEUE_ATTEMPTS) {
        match (0..count).map(|index| PacketQueue::bind(first + index, length)).collect() {
            Ok(queues) => return Ok(queues),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EBUSY)) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

impl WorkerSockets {
    fn open(queue: PacketQueue) -> io::Result<(Self, Addresses)> {
        let mut sockets = Self { listeners: Vec::new(), queue, udp: Vec::new() };
        let mut addresses = Addresses::default();
        for loopback in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
            // A machine without IPv6 has no such address.
            let (listener, udp) = match listen(loopback).and_then(|listener| Ok((listener, bind_udp(loopback)?))) {
                Ok(opened) => opened,
                Err(error) if loopback.is_ipv6() && is_unsupported(&error) => continue,
                Err(error) => return Err(error),
            };
            addresses.tcp.push(listener.local_addr()?);
            addresses.udp.push(udp.local_addr()?);
            sockets.listeners.push(listener);
            sockets.udp.push(udp);
        }
        Ok((sockets, addresses))
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL | libc::ENOPROTOOPT))
}

/// Returns the remedy for an error of [`Interception::open`].
pub fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "Run as root, or give the program CAP_NET_ADMIN: AmbientCapabilities=CAP_NET_ADMIN in systemd, \
             `--cap-add NET_ADMIN` for a container"
        }
        _ => {
            "The kernel must be Linux 5.12 or later, with nf_tables, NFT_SOCKET, NFT_TPROXY, and NFT_QUEUE or \
             NETFILTER_XT_TARGET_NFQUEUE"
        }
    }
}

fn set_transparent(socket: &Socket, address: IpAddr) -> io::Result<()> {
    if address.is_ipv4() { socket.set_ip_transparent_v4(true) } else { socket.set_ip_transparent_v6(true) }
}

/// Opens a transparent listening socket. It is bound to the loopback address, so that only the rules reach it.
fn listen(loopback: IpAddr) -> io::Result<std::net::TcpListener> {
    let address = SocketAddr::new(loopback, 0);
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    set_transparent(&socket, loopback)?;
    socket.set_nonblocking(true)?;
    socket.set_mark(crate::socket_mark::MARK)?;
    socket.bind(&address.into())?;
    tcp::tune(SockRef::from(&socket));
    socket.listen(tcp::BACKLOG)?;
    Ok(socket.into())
}

/// Opens a transparent UDP socket that reports the original destination of each datagram.
fn bind_udp(loopback: IpAddr) -> io::Result<std::net::UdpSocket> {
    let address = SocketAddr::new(loopback, 0);
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    set_transparent(&socket, loopback)?;
    if loopback.is_ipv4() {
        setsockopt(&socket, Ipv4OrigDstAddr, &true)?;
    } else {
        setsockopt(&socket, Ipv6OrigDstAddr, &true)?;
    }
    socket.set_nonblocking(true)?;
    socket.set_mark(crate::socket_mark::MARK)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Connects with the address and port of a client, which need not belong to this machine.
///
/// # Errors
/// `EPERM` without CAP_NET_ADMIN; `EADDRNOTAVAIL` if a recent connection of the same client to the same server is still
/// in the kernel's TIME_WAIT; and the errors of a connection.
pub async fn connect_from(
    source: SocketAddr,
    to: SocketAddr,
    may_have: impl FnOnce(&TcpSocket) -> io::Result<()>,
) -> io::Result<TcpStream> {
    let socket = transparent_socket(Type::STREAM, Protocol::TCP, source, SPOOF_MARK)?;
    let socket = TcpSocket::from_std_stream(socket.into());
    may_have(&socket)?;
    tcp::tune(SockRef::from(&socket));
    socket.connect(to).await
}

/// Receives the first datagram of an intercepted flow: its payload, source and destination. Cancel safe.
///
/// # Errors
/// The errors of the socket, or a datagram without its destination.
pub async fn receive(socket: &tokio::net::UdpSocket) -> io::Result<(Bytes, SocketAddr, SocketAddr)> {
    socket.async_io(Interest::READABLE, || receive_now(socket)).await
}

fn receive_now(socket: &tokio::net::UdpSocket) -> io::Result<(Bytes, SocketAddr, SocketAddr)> {
    let mut payload = vec![0; crate::udp::MAX_PAYLOAD];
    let mut control = nix::cmsg_space!(libc::sockaddr_in6);
    let mut parts = [IoSliceMut::new(&mut payload)];
    let received =
        recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::MSG_DONTWAIT)?;
    let source = received.address.as_ref().and_then(socket_address);
    let destination = received.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::Ipv4OrigDstAddr(address) => Some(SocketAddrV4::from(SockaddrIn::from(address)).into()),
        ControlMessageOwned::Ipv6OrigDstAddr(address) => Some(SocketAddrV6::from(SockaddrIn6::from(address)).into()),
        _ => None,
    });
    let length = received.bytes;
    let (Some(source), Some(destination)) = (source, destination) else {
        return Err(io::Error::other("a datagram without its destination"));
    };
    payload.truncate(length);
    Ok((payload.into(), source, destination))
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = || address.as_sockaddr_in().map(|v4| SocketAddrV4::from(*v4).into());
    v4().or_else(|| address.as_sockaddr_in6().map(|v6| SocketAddrV6::from(*v6).into()))
}

/// A UDP socket with the address of the destination of an intercepted flow, connected to its client. The kernel
/// delivers the client's next datagrams to it.
///
/// # Errors
/// `EPERM` without CAP_NET_ADMIN, and the errors of the kernel.
pub fn udp_at(destination: SocketAddr, client: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = transparent_socket(Type::DGRAM, Protocol::UDP, destination, crate::socket_mark::MARK)?;
    crate::host::spare(&socket)?;
    socket.connect(&client.into())?;
    Ok(socket.into())
}

/// A UDP socket with the address and port of a client, connected to `to`.
///
/// # Errors
/// `EPERM` without CAP_NET_ADMIN, and the errors of the kernel.
pub fn udp_from(source: SocketAddr, to: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = transparent_socket(Type::DGRAM, Protocol::UDP, source, SPOOF_MARK)?;
    socket.connect(&to.into())?;
    Ok(socket.into())
}

/// A socket with an address that need not belong to this machine.
fn transparent_socket(kind: Type, protocol: Protocol, address: SocketAddr, mark: u32) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), kind.nonblocking(), Some(protocol))?;
    set_transparent(&socket, address.ip())?;
    socket.set_reuse_address(true)?;
    socket.set_mark(mark)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

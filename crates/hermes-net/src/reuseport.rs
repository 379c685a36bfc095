//! Steers the datagrams of a reuseport group to a socket by source, or by QUIC connection id.
//!
//! By default, the kernel distributes sources over *all* sockets of the group, connected ones included. A socket that
//! joins or leaves then moves sources between workers in the middle of their flows. A new socket also receives
//! datagrams of other peers between `bind` and `connect`. A BPF filter on the group selects by the source alone, among
//! the listener's own sockets, which are the first of the group. QUIC connections outlive their source address: for
//! them the filter selects by the connection id, which contains the worker's number.
//!
//! In: one socket of the group. Out: a filter on the whole group. Needs no privilege.

use std::io;
use std::mem::size_of;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

use libc::{
    BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_H, BPF_IND, BPF_JA, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_LSH, BPF_MEM,
    BPF_MISC, BPF_MOD, BPF_MUL, BPF_RET, BPF_RSH, BPF_ST, BPF_TAX, BPF_W, BPF_X, BPF_XOR, sock_filter, sock_fprog,
};

/// Offsets from this value on are relative to the network header (linux/filter.h: SKF_NET_OFF).
const NETWORK: u32 = (-0x10_0000_i32).cast_unsigned();
/// The operand of `ret a`, which returns the accumulator (linux/bpf_common.h: BPF_A).
const BPF_A: u32 = 0x10;
/// Knuth's multiplicative hash, which maps adjacent ports and addresses to distant values.
const HASH_MULTIPLIER: u32 = 0x9e37_79b1;
/// linux/socket.h (asm-generic): SO_DETACH_REUSEPORT_BPF.
const SO_DETACH_REUSEPORT_BPF: libc::c_int = 68;

/// Delivers each source's datagrams to one of the first `sockets` of the group, always to the same one.
///
/// # Errors
/// The kernel does not support the filter (before Linux 4.5), or the socket is in no group.
pub fn by_source(socket: &UdpSocket, sockets: usize) -> io::Result<()> {
    let count = u32::try_from(sockets.max(1)).map_err(io::Error::other)?;
    let is_v4 = socket.local_addr()?.is_ipv4();
    let mut filter = if is_v4 { source_of_v4() } else { source_of_v6() };
    filter.extend([
        op(BPF_ALU | BPF_MUL | BPF_K, HASH_MULTIPLIER),
        op(BPF_ALU | BPF_RSH | BPF_K, 16),
        op(BPF_ALU | BPF_MOD | BPF_K, count),
        op(BPF_RET | BPF_A, 0),
    ]);
    attach(socket, &mut filter)
}

/// Delivers each QUIC connection's datagrams to one of the first `sockets` of the group, also after the peer's address
/// changes. The number of that socket is the first byte of the connection id that this node issued. (The peer chooses
/// the id of a first packet, and any socket may handle it. RFC 8999 defines the position of the ids for all versions.)
///
/// # Errors
/// The kernel does not support the filter (before Linux 4.5), or the socket is in no group.
pub fn by_connection_id(socket: &UdpSocket, sockets: usize) -> io::Result<()> {
    let count = u32::try_from(sockets.max(1)).map_err(io::Error::other)?;
    let mut filter = [
        op(BPF_LD | BPF_B | BPF_ABS, 0),
        // The top bit marks a long header, in which the version and the id's length precede the id.
        sock_filter { jt: 0, jf: 2, ..op(BPF_JMP | BPF_JSET | BPF_K, 0x80) },
        op(BPF_LD | BPF_B | BPF_ABS, 6),
        sock_filter { k: 1, ..op(BPF_JMP | BPF_JA, 0) },
        op(BPF_LD | BPF_B | BPF_ABS, 1),
        op(BPF_ALU | BPF_MOD | BPF_K, count),
        // A load beyond the end returns 0, so a datagram too short for an id goes to the first socket.
        op(BPF_RET | BPF_A, 0),
    ];
    attach(socket, &mut filter)
}

fn attach(socket: &impl AsRawFd, filter: &mut [sock_filter]) -> io::Result<()> {
    let length = u16::try_from(filter.len()).map_err(io::Error::other)?;
    let program = sock_fprog { len: length, filter: filter.as_mut_ptr() };
    set(socket, libc::SO_ATTACH_REUSEPORT_CBPF, &program)
}

/// Delivers everything to the first socket of the group.
///
/// # Errors
/// The kernel does not support the filter (before Linux 4.6), or the socket is in no group.
pub fn to_first(socket: &impl AsRawFd) -> io::Result<()> {
    attach(socket, &mut [op(BPF_RET | BPF_K, 0)])
}

/// Detaches the filter, so that the kernel distributes sources again. Needed for a group whose first sockets are not
/// the listener's. A group without a filter stays as it is.
pub fn by_kernel(socket: &impl AsRawFd) {
    let _ = set(socket, SO_DETACH_REUSEPORT_BPF, &0_i32);
}

/// Combines the source port and address of IPv4 by XOR. The IPv4 header has a variable length.
fn source_of_v4() -> Vec<sock_filter> {
    vec![
        op(BPF_LD | BPF_B | BPF_ABS, NETWORK),
        op(BPF_ALU | BPF_AND | BPF_K, 0xf),
        op(BPF_ALU | BPF_LSH | BPF_K, 2),
        op(BPF_MISC | BPF_TAX, 0),
        op(BPF_LD | BPF_H | BPF_IND, NETWORK),
        op(BPF_ST, 0),
        op(BPF_LD | BPF_W | BPF_ABS, NETWORK + 12),
        op(BPF_MISC | BPF_TAX, 0),
        op(BPF_LD | BPF_MEM, 0),
        op(BPF_ALU | BPF_XOR | BPF_X, 0),
    ]
}

/// Combines the source port and two words of the source address of IPv6 by XOR; the other words vary less. With
/// extension headers the filter reads other bytes than the port, but these still depend on the source.
fn source_of_v6() -> Vec<sock_filter> {
    vec![
        op(BPF_LD | BPF_H | BPF_ABS, NETWORK + 40),
        op(BPF_ST, 0),
        op(BPF_LD | BPF_W | BPF_ABS, NETWORK + 20),
        op(BPF_MISC | BPF_TAX, 0),
        op(BPF_LD | BPF_MEM, 0),
        op(BPF_ALU | BPF_XOR | BPF_X, 0),
        op(BPF_ST, 0),
        op(BPF_LD | BPF_W | BPF_ABS, NETWORK + 12),
        op(BPF_MISC | BPF_TAX, 0),
        op(BPF_LD | BPF_MEM, 0),
        op(BPF_ALU | BPF_XOR | BPF_X, 0),
    ]
}

fn op(code: u32, k: u32) -> sock_filter {
    // Every opcode of classic BPF fits into 16 bits.
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

#[allow(unsafe_code)] // neither socket2 nor nix attaches classic filters to a group.
fn set<T>(socket: &impl AsRawFd, option: libc::c_int, value: &T) -> io::Result<()> {
    let length = libc::socklen_t::try_from(size_of::<T>()).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open for the life of `socket`; `value` and the memory that it points to live until the
    // call returns, and the kernel copies both.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, std::ptr::from_ref(value).cast(), length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::udp::{listen, listen_for_peer};
    use std::collections::HashMap;
    use std::net::SocketAddr;

    /// The socket that received the datagram of each source.
    fn owners(group: &[UdpSocket], sources: &[UdpSocket]) -> HashMap<SocketAddr, usize> {
        let to = group[0].local_addr().unwrap();
        let mut owners = HashMap::new();
        for source in sources {
            source.send_to(b"x", to).unwrap();
        }
        for (index, socket) in group.iter().enumerate() {
            while let Ok((_, source)) = socket.recv_from(&mut [0; 8]) {
                assert!(owners.insert(source, index).is_none(), "one datagram came twice");
            }
        }
        owners
    }

    fn a_source_stays_with_its_socket(loopback: &str) {
        let first = listen(loopback.parse().unwrap()).unwrap();
        let address = first.local_addr().unwrap();
        let group = [first, listen(address).unwrap(), listen(address).unwrap()];
        by_source(&group[0], group.len()).unwrap();
        let sources: Vec<UdpSocket> = (0..60).map(|_| UdpSocket::bind(loopback).unwrap()).collect();
        let before = owners(&group, &sources);
        assert_eq!(before.len(), sources.len());
        for index in 0..group.len() {
            let share = before.values().filter(|owner| **owner == index).count();
            assert!((5..=40).contains(&share), "socket {index} has {share} of {} sources", sources.len());
        }
        // Flows get sockets of their own and close them again, in any order.
        let (own, others) = sources.split_at(20);
        let mut held: Vec<UdpSocket> =
            own.iter().map(|source| listen_for_peer(address, source.local_addr().unwrap()).unwrap()).collect();
        let expected: HashMap<SocketAddr, usize> = {
            let of = |source: &UdpSocket| source.local_addr().unwrap();
            others.iter().map(|source| (of(source), before[&of(source)])).collect()
        };
        // Kernels before 6.13 keep connected sockets in the group; all kernels keep those that are bound and not
        // connected yet.
        let joining = [listen(address).unwrap(), listen(address).unwrap()];
        assert_eq!(owners(&group, others), expected);
        drop(joining);
        assert!(owners(&group, own).is_empty(), "a worker with its own socket does not share another one");
        for (socket, source) in held.iter().zip(own) {
            assert_eq!(socket.recv_from(&mut [0; 8]).unwrap().1, source.local_addr().unwrap());
        }
        held.retain(|socket| socket.peer_addr().unwrap().port() % 2 == 0);
        assert_eq!(owners(&group, others), expected);
        held.clear();
        assert_eq!(owners(&group, &sources), before);
    }

    #[test]
    fn a_connection_id_leads_to_its_socket_from_wherever_it_comes() {
        let first = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = first.local_addr().unwrap();
        let group = [first, listen(address).unwrap(), listen(address).unwrap()];
        by_connection_id(&group[0], group.len()).unwrap();
        let heard_by = |datagram: &[u8]| {
            let source = UdpSocket::bind("127.0.0.1:0").unwrap();
            source.send_to(datagram, address).unwrap();
            let heard: Vec<usize> = (0..3).filter(|index| group[*index].recv_from(&mut [0; 64]).is_ok()).collect();
            assert_eq!(heard.len(), 1);
            heard[0]
        };
        for (byte, socket) in [(0, 0), (1, 1), (2, 2), (3, 0), (254, 2)] {
            for _ in 0..4 {
                assert_eq!(heard_by(&[0x40, byte, 1, 1, 1, 1, 1, 1, 9]), socket, "a short header");
                assert_eq!(heard_by(&[0xc0, 0, 0, 0, 1, 8, byte, 1, 1, 1, 1, 1, 1, 1]), socket, "a long one");
            }
        }
        assert_eq!((heard_by(&[]), heard_by(&[0x40]), heard_by(&[0xc0, 0, 0, 0, 1, 8])), (0, 0, 0));
    }

    #[test]
    fn a_source_stays_with_its_socket_v4() {
        a_source_stays_with_its_socket("127.0.0.1:0");
    }

    #[test]
    fn a_source_stays_with_its_socket_v6() {
        a_source_stays_with_its_socket("[::1]:0");
    }
}

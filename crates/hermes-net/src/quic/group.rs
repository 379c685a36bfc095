//! The UDP sockets of one QUIC listening address, one for each reader.
//!
//! In: sockets that share a port, in the order in which they joined its reuseport group; sockets to predecessor
//! processes. Out: each datagram at the reader that its connection id names. Mostly the kernel selects that socket (see
//! [`reuseport`](crate::reuseport)). A datagram still arrives at the wrong socket if the filter cannot be attached, or
//! if its connection belongs to a predecessor; then it is forwarded. The sockets close together: if one closed alone,
//! the kernel would renumber the others.

use std::collections::HashMap;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use quinn_udp::RecvMeta;
use rand::Rng;

use super::connection_id::ReaderId;
use super::forwarder::{self, DatagramForwarder, ForwardError};
use crate::reuseport;

/// Maximum number of readers that a connection id can distinguish.
pub const MAX_READERS: usize = 256;
/// Maximum number of readers of predecessor processes. Each process runs until its longest connection ends.
const MAX_PREDECESSORS: usize = 64 * MAX_READERS;

/// The socket to a reader of an earlier process that still has connections.
#[derive(Debug)]
struct Predecessor {
    socket: UnixDatagram,
    is_gone: AtomicBool,
}

/// A socket that forwards the datagrams of one reader to another process.
#[derive(Debug)]
pub struct ForwardSocket {
    /// The process and reader, in the form that [`Group::open`] parses.
    pub reader: String,
    /// The socket whose datagrams arrive at that reader.
    pub fd: OwnedFd,
}

/// The sockets of one address. They stay open as long as the group exists.
#[derive(Debug)]
pub struct Group {
    address: SocketAddr,
    tag: u16,
    sockets: Vec<UdpSocket>,
    forwarders: Vec<DatagramForwarder>,
    predecessors: HashMap<ReaderId, Predecessor>,
}

/// Counters of the datagrams that one reader received but that belong to other readers.
#[derive(Debug, Default)]
pub(super) struct ForwardCounters {
    /// Number of datagrams that the reader forwarded or dropped (`passed`), and number of those dropped because a
    /// socket was full (`lost`).
    pub(super) passed: AtomicU64,
    pub(super) lost: AtomicU64,
}

impl Group {
    /// Creates a group of these sockets, in the order in which they were bound. The sockets of `others` lead to
    /// predecessor processes.
    ///
    /// # Errors
    /// The list of sockets is empty or longer than [`MAX_READERS`], or no file descriptor is left.
    pub fn open(sockets: Vec<UdpSocket>, others: Vec<ForwardSocket>) -> io::Result<Arc<Self>> {
        let first = sockets.first().ok_or(io::ErrorKind::InvalidInput)?;
        if sockets.len() > MAX_READERS {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "QUIC has at most 256 sockets at an address"));
        }
        let address = first.local_addr()?;
        let predecessor = |socket: ForwardSocket| {
            let predecessor = Predecessor { socket: forwarder::adopt(socket.fd), is_gone: AtomicBool::new(false) };
            Some((read_reader(&socket.reader)?, predecessor))
        };
        let predecessors: HashMap<ReaderId, Predecessor> =
            others.into_iter().filter_map(predecessor).take(MAX_PREDECESSORS).collect();
        let mut tag: u16 = rand::rng().random();
        while predecessors.keys().any(|reader| reader.tag == tag) {
            tag = tag.wrapping_add(1);
        }
        let forwarders = sockets.iter().map(|_| DatagramForwarder::open()).collect::<io::Result<_>>()?;
        Ok(Arc::new(Self { address, tag, sockets, forwarders, predecessors }))
    }

    /// Attaches a filter to the sockets, so that the kernel selects the socket by the connection id.
    ///
    /// # Errors
    /// The errors of [`reuseport::by_connection_id`]. Without the filter, datagrams are forwarded in user space.
    pub fn steer(&self) -> io::Result<()> {
        match self.sockets.first() {
            Some(first) => reuseport::by_connection_id(first, self.sockets.len()),
            None => Ok(()),
        }
    }

    /// The sockets in the order of their readers, and the tag in the connection ids of this process.
    pub fn sockets(&self) -> (&[UdpSocket], u16) {
        (&self.sockets, self.tag)
    }

    /// The address of all sockets.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The number of readers.
    pub fn len(&self) -> usize {
        self.sockets.len()
    }

    /// Always false: [`Group::open`] refuses an empty group.
    pub fn is_empty(&self) -> bool {
        self.sockets.is_empty()
    }

    /// Duplicates the sockets, in their order, for another process.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn duplicate(&self) -> io::Result<Vec<OwnedFd>> {
        self.sockets.iter().map(|socket| socket.try_clone().map(OwnedFd::from)).collect()
    }

    /// Returns sockets that lead to the readers of this process, and to those of predecessors that still run.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn forward_sockets(&self) -> io::Result<Vec<ForwardSocket>> {
        let own = self
            .forwarders
            .iter()
            .zip(0..)
            .map(|(forwarder, slot)| (ReaderId { tag: self.tag, slot }, &forwarder.sender));
        let live = self.predecessors.iter().filter(|(_, predecessor)| !predecessor.is_gone.load(Ordering::Relaxed));
        let all = own.chain(live.map(|(reader, predecessor)| (*reader, &predecessor.socket)));
        all.map(|(reader, socket)| Ok(ForwardSocket { reader: write_reader(reader), fd: socket.try_clone()?.into() }))
            .collect()
    }

    /// Whether a predecessor process may still have connections at this address.
    pub fn has_predecessors(&self) -> bool {
        // The receiver ignores an empty message. Sending it shows whether the receiving end is open.
        let nothing = RecvMeta { len: 0, stride: 0, addr: self.address, ecn: None, dst_ip: None };
        let is_there = |predecessor: &Predecessor| {
            let is_gone = predecessor.is_gone.load(Ordering::Relaxed)
                || matches!(forwarder::send(&predecessor.socket, &nothing, &[]), Err(ForwardError::Closed));
            predecessor.is_gone.store(is_gone, Ordering::Relaxed);
            !is_gone
        };
        self.predecessors.values().any(is_there)
    }

    pub(super) fn reader(&self, slot: u8) -> ReaderId {
        ReaderId { tag: self.tag, slot }
    }

    pub(super) fn socket(&self, slot: u8) -> io::Result<UdpSocket> {
        self.sockets.get(usize::from(slot)).ok_or(io::ErrorKind::InvalidInput)?.try_clone()
    }

    pub(super) fn inbox(&self, slot: u8) -> io::Result<UnixDatagram> {
        self.forwarders.get(usize::from(slot)).ok_or(io::ErrorKind::InvalidInput)?.receiver.try_clone()
    }

    /// Whether only one reader exists, so that no datagram can arrive at the wrong socket.
    fn is_alone(&self) -> bool {
        self.sockets.len() == 1 && self.predecessors.is_empty()
    }

    /// Forwards the datagrams of other readers, and moves the remaining datagrams to the start of `room`.
    pub(super) fn sort(&self, slot: u8, room: &mut IoSliceMut<'_>, meta: &mut RecvMeta, counts: &ForwardCounters) {
        if self.is_alone() || meta.len == 0 {
            return;
        }
        let stride = meta.stride.max(1);
        let mut kept = 0;
        for start in (0..meta.len).step_by(stride) {
            let end = (start + stride).min(meta.len);
            if !self.pass_on(slot, meta, &room[start..end], counts) {
                if kept != start {
                    room.copy_within(start..end, kept);
                }
                kept += end - start;
            }
        }
        meta.len = kept;
    }

    /// Forwards a datagram to its reader. Returns false if the datagram is this reader's own, or if its reader is
    /// unknown.
    fn pass_on(&self, slot: u8, meta: &RecvMeta, datagram: &[u8], counts: &ForwardCounters) -> bool {
        let Some(reader) = ReaderId::of(datagram) else { return false };
        let predecessor = if reader.tag == self.tag { None } else { self.predecessors.get(&reader) };
        let socket = match predecessor {
            Some(predecessor) if predecessor.is_gone.load(Ordering::Relaxed) => return false,
            Some(predecessor) => &predecessor.socket,
            None if reader.tag != self.tag || reader.slot == slot => return false,
            None => match self.forwarders.get(usize::from(reader.slot)) {
                Some(forwarder) => &forwarder.sender,
                None => return false,
            },
        };
        counts.passed.fetch_add(1, Ordering::Relaxed);
        let mut alone = *meta;
        alone.stride = datagram.len();
        match forwarder::send(socket, &alone, datagram) {
            Ok(()) => true,
            Err(ForwardError::Full) => {
                counts.lost.fetch_add(1, Ordering::Relaxed);
                true
            }
            Err(ForwardError::Closed) => {
                // The predecessor has ended, and its connections with it. quinn answers the datagram with a stateless
                // reset.
                if let Some(predecessor) = predecessor {
                    predecessor.is_gone.store(true, Ordering::Relaxed);
                }
                false
            }
        }
    }
}

fn write_reader(reader: ReaderId) -> String {
    format!("{:04x}.{}", reader.tag, reader.slot)
}

fn read_reader(text: &str) -> Option<ReaderId> {
    let (tag, slot) = text.split_once('.')?;
    Some(ReaderId { tag: u16::from_str_radix(tag, 16).ok()?, slot: slot.parse().ok()? })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn group(sockets: usize, others: Vec<ForwardSocket>) -> Arc<Group> {
        let first = crate::udp::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = first.local_addr().unwrap();
        let more = (1..sockets).map(|_| crate::udp::listen(address).unwrap());
        Group::open([first].into_iter().chain(more).collect(), others).unwrap()
    }

    fn datagram(reader: ReaderId, contents: &[u8]) -> Vec<u8> {
        let [high, low] = reader.tag.to_be_bytes();
        [&[0x40, reader.slot, high, low, 1, 1, 1, 1, 1], contents].concat()
    }

    /// Returns the datagrams of a message that remain at this reader.
    fn sorted(group: &Group, slot: u8, datagrams: &[Vec<u8>], counts: &ForwardCounters) -> Vec<u8> {
        let mut room = datagrams.concat();
        let (len, stride) = (room.len(), datagrams[0].len());
        let mut meta = RecvMeta { addr: "192.0.2.1:7".parse().unwrap(), len, stride, ..RecvMeta::default() };
        group.sort(slot, &mut IoSliceMut::new(&mut room), &mut meta, counts);
        room.truncate(meta.len);
        room
    }

    fn arrived(from: &UnixDatagram) -> Vec<Vec<u8>> {
        let mut room = vec![0; 2048];
        std::iter::from_fn(|| {
            let meta = forwarder::receive(from, &mut IoSliceMut::new(&mut room)).ok()?;
            assert_eq!(meta.addr, "192.0.2.1:7".parse().unwrap());
            Some(room[..meta.len].to_vec())
        })
        .collect()
    }

    #[test]
    fn each_datagram_of_a_message_finds_its_reader() {
        let predecessor = group(2, Vec::new());
        let young = group(3, predecessor.forward_sockets().unwrap());
        let reader = |group: &Group, slot| group.reader(slot);
        let unknown = ReaderId { tag: young.tag ^ predecessor.tag ^ 0xffff, slot: 1 };
        let message = [
            datagram(reader(&young, 0), b"own one "),
            datagram(reader(&young, 2), b"sibling "),
            datagram(reader(&predecessor, 1), b"the old "),
            datagram(reader(&young, 0), b"own two "),
            datagram(unknown, b"nobody's"),
            datagram(reader(&young, 7), b"nowhere "),
            datagram(reader(&predecessor, 0), b"last"),
        ];
        let counts = ForwardCounters::default();
        let kept = sorted(&young, 0, &message, &counts);
        assert_eq!(kept, [&message[0][..], &message[3], &message[4], &message[5]].concat());
        assert_eq!(arrived(&young.inbox(2).unwrap()), [&message[1][..]]);
        assert_eq!(arrived(&predecessor.inbox(1).unwrap()), [&message[2][..]]);
        assert_eq!(arrived(&predecessor.inbox(0).unwrap()), [&message[6][..]]);
        assert_eq!(arrived(&young.inbox(0).unwrap()), [[0; 0]; 0]);
        assert_eq!((counts.passed.into_inner(), counts.lost.into_inner()), (3, 0));
    }

    #[test]
    fn a_third_process_reaches_the_first_and_forgets_it_once_it_is_gone() {
        let first = group(1, Vec::new());
        let second = group(1, first.forward_sockets().unwrap());
        let third = group(1, second.forward_sockets().unwrap());
        assert_eq!(third.forward_sockets().unwrap().len(), 3);
        drop(second);
        let (counts, to) = (ForwardCounters::default(), datagram(first.reader(0), b"still"));
        assert!(sorted(&third, 0, std::slice::from_ref(&to), &counts).is_empty());
        assert_eq!(arrived(&first.inbox(0).unwrap()), [&to[..]]);
        assert!(third.has_predecessors());
        drop(first);
        assert_eq!(
            sorted(&third, 0, std::slice::from_ref(&to), &counts),
            to,
            "it is left to quinn, which answers with a reset"
        );
        assert!(!third.has_predecessors());
        assert_eq!(third.forward_sockets().unwrap().len(), 1);
    }

    #[test]
    fn too_many_sockets_are_refused() {
        let first = crate::udp::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let sockets = (0..=MAX_READERS).map(|_| first.try_clone().unwrap()).collect();
        assert!(Group::open(sockets, Vec::new()).is_err() && Group::open(Vec::new(), Vec::new()).is_err());
    }
}

//! The UDP sockets of one QUIC listening address, one for each reader.
//!
//! In: sockets that share a port, in the order in which they joined its reuseport group; sockets to predecessor
//! processes. Out: each datagram at the reader that its connection id names. Mostly the kernel selects that socket (see
//! [`steer`](crate::steer)). A datagram still arrives at the wrong socket if the filter cannot be attached, or if its
//! connection belongs to a predecessor; then it is forwarded. The sockets close together: if one closed alone, the
//! kernel would renumber the others.

use std::collections::HashMap;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use quinn_udp::RecvMeta;
use rand::Rng;

use super::id::Place;
use super::passage::{self, Lost, Passage};
use crate::steer;

/// Readers that a connection id can distinguish.
pub const MOST: usize = 256;
/// Predecessor processes whose connections are still served. Each lives as long as its longest connection.
const MOST_ELDERS: usize = 64 * MOST;

/// The socket to an earlier process that still has connections.
#[derive(Debug)]
struct Elder {
    way: UnixDatagram,
    is_gone: AtomicBool,
}

/// A socket that forwards the datagrams of one reader to another process.
#[derive(Debug)]
pub struct Way {
    /// The process and reader, in the form that [`Group::open`] parses.
    pub place: String,
    /// Datagrams sent here arrive at that reader.
    pub fd: OwnedFd,
}

/// The sockets of one address. The group keeps all of them open.
#[derive(Debug)]
pub struct Group {
    address: SocketAddr,
    tag: u16,
    sockets: Vec<UdpSocket>,
    passages: Vec<Passage>,
    elders: HashMap<Place, Elder>,
}

/// Counters of one reader for datagrams of other readers.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Datagrams that it forwarded, and those of them that were dropped for lack of room.
    pub(super) passed: AtomicU64,
    pub(super) lost: AtomicU64,
}

impl Group {
    /// A group of these sockets, in the order in which they were bound. `ways` lead to predecessor processes.
    ///
    /// # Errors
    /// The list of sockets is empty or longer than [`MAX_READERS`], or no file descriptor is left.
    pub fn open(sockets: Vec<UdpSocket>, ways: Vec<Way>) -> io::Result<Arc<Self>> {
        let first = sockets.first().ok_or(io::ErrorKind::InvalidInput)?;
        if sockets.len() > MOST {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "QUIC has at most 256 sockets at an address"));
        }
        let address = first.local_addr()?;
        let place = |way: Way| {
            let elder = Elder { way: passage::adopt(way.fd), is_gone: AtomicBool::new(false) };
            Some((read_place(&way.place)?, elder))
        };
        let elders: HashMap<Place, Elder> = ways.into_iter().filter_map(place).take(MOST_ELDERS).collect();
        let mut tag: u16 = rand::rng().random();
        while elders.keys().any(|place| place.tag == tag) {
            tag = tag.wrapping_add(1);
        }
        let passages = sockets.iter().map(|_| Passage::open()).collect::<io::Result<_>>()?;
        Ok(Arc::new(Self { address, tag, sockets, passages, elders }))
    }

    /// Makes the kernel select the socket by the connection id.
    ///
    /// # Errors
    /// The errors of [`steer::by_connection_id`]. Without the filter, datagrams are forwarded in user space.
    pub fn steer(&self) -> io::Result<()> {
        match self.sockets.first() {
            Some(first) => steer::by_connection_id(first, self.sockets.len()),
            None => Ok(()),
        }
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

    /// Returns sockets to our own connections, and to those of predecessors that still run.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn ways(&self) -> io::Result<Vec<Way>> {
        let own = self.passages.iter().zip(0..).map(|(passage, slot)| (Place { tag: self.tag, slot }, &passage.far));
        let live = self.elders.iter().filter(|(_, elder)| !elder.is_gone.load(Ordering::Relaxed));
        let all = own.chain(live.map(|(place, elder)| (*place, &elder.way)));
        all.map(|(place, way)| Ok(Way { place: write_place(place), fd: way.try_clone()?.into() })).collect()
    }

    /// Whether a predecessor process may still have connections here.
    pub fn has_elders(&self) -> bool {
        // An empty message is no datagram; sending it shows whether the other end is open.
        let nothing = RecvMeta { len: 0, stride: 0, addr: self.address, ecn: None, dst_ip: None };
        let is_there = |elder: &Elder| {
            let is_gone = elder.is_gone.load(Ordering::Relaxed)
                || matches!(passage::send(&elder.way, &nothing, &[]), Err(Lost::Gone));
            elder.is_gone.store(is_gone, Ordering::Relaxed);
            !is_gone
        };
        self.elders.values().any(is_there)
    }

    pub(super) fn place(&self, slot: u8) -> Place {
        Place { tag: self.tag, slot }
    }

    pub(super) fn socket(&self, slot: u8) -> io::Result<UdpSocket> {
        self.sockets.get(usize::from(slot)).ok_or(io::ErrorKind::InvalidInput)?.try_clone()
    }

    pub(super) fn inbox(&self, slot: u8) -> io::Result<UnixDatagram> {
        self.passages.get(usize::from(slot)).ok_or(io::ErrorKind::InvalidInput)?.near.try_clone()
    }

    /// No datagram can arrive at the wrong socket.
    fn is_alone(&self) -> bool {
        self.sockets.len() == 1 && self.elders.is_empty()
    }

    /// Forwards the datagrams of other readers, and leaves the rest of the message in `room`.
    pub(super) fn sort(&self, slot: u8, room: &mut IoSliceMut<'_>, meta: &mut RecvMeta, counts: &Counts) {
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

    /// Returns false if the datagram is this reader's own, or of no known reader.
    fn pass_on(&self, slot: u8, meta: &RecvMeta, datagram: &[u8], counts: &Counts) -> bool {
        let Some(place) = Place::of(datagram) else { return false };
        let elder = if place.tag == self.tag { None } else { self.elders.get(&place) };
        let way = match elder {
            Some(elder) if elder.is_gone.load(Ordering::Relaxed) => return false,
            Some(elder) => &elder.way,
            None if place.tag != self.tag || place.slot == slot => return false,
            None => match self.passages.get(usize::from(place.slot)) {
                Some(passage) => &passage.far,
                None => return false,
            },
        };
        counts.passed.fetch_add(1, Ordering::Relaxed);
        let mut alone = *meta;
        alone.stride = datagram.len();
        match passage::send(way, &alone, datagram) {
            Ok(()) => true,
            Err(Lost::Full) => {
                counts.lost.fetch_add(1, Ordering::Relaxed);
                true
            }
            Err(Lost::Gone) => {
                // The process has ended with its connection: quinn answers with a stateless reset.
                if let Some(elder) = elder {
                    elder.is_gone.store(true, Ordering::Relaxed);
                }
                false
            }
        }
    }
}

fn write_place(place: Place) -> String {
    format!("{:04x}.{}", place.tag, place.slot)
}

fn read_place(text: &str) -> Option<Place> {
    let (tag, slot) = text.split_once('.')?;
    Some(Place { tag: u16::from_str_radix(tag, 16).ok()?, slot: slot.parse().ok()? })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn group(sockets: usize, ways: Vec<Way>) -> Arc<Group> {
        let first = crate::udp::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = first.local_addr().unwrap();
        let more = (1..sockets).map(|_| crate::udp::listen(address).unwrap());
        Group::open([first].into_iter().chain(more).collect(), ways).unwrap()
    }

    fn datagram(place: Place, contents: &[u8]) -> Vec<u8> {
        let [high, low] = place.tag.to_be_bytes();
        [&[0x40, place.slot, high, low, 1, 1, 1, 1, 1], contents].concat()
    }

    /// Returns the rest of a message at this reader.
    fn sorted(group: &Group, slot: u8, datagrams: &[Vec<u8>], counts: &Counts) -> Vec<u8> {
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
            let meta = passage::receive(from, &mut IoSliceMut::new(&mut room)).ok()?;
            assert_eq!(meta.addr, "192.0.2.1:7".parse().unwrap());
            Some(room[..meta.len].to_vec())
        })
        .collect()
    }

    #[test]
    fn each_datagram_of_a_message_finds_its_reader() {
        let elder = group(2, Vec::new());
        let young = group(3, elder.ways().unwrap());
        let place = |group: &Group, slot| group.place(slot);
        let unknown = Place { tag: young.tag ^ elder.tag ^ 0xffff, slot: 1 };
        let message = [
            datagram(place(&young, 0), b"own one "),
            datagram(place(&young, 2), b"sibling "),
            datagram(place(&elder, 1), b"elder's "),
            datagram(place(&young, 0), b"own two "),
            datagram(unknown, b"nobody's"),
            datagram(place(&young, 7), b"nowhere "),
            datagram(place(&elder, 0), b"last"),
        ];
        let counts = Counts::default();
        let kept = sorted(&young, 0, &message, &counts);
        assert_eq!(kept, [&message[0][..], &message[3], &message[4], &message[5]].concat());
        assert_eq!(arrived(&young.inbox(2).unwrap()), [&message[1][..]]);
        assert_eq!(arrived(&elder.inbox(1).unwrap()), [&message[2][..]]);
        assert_eq!(arrived(&elder.inbox(0).unwrap()), [&message[6][..]]);
        assert_eq!(arrived(&young.inbox(0).unwrap()), [[0; 0]; 0]);
        assert_eq!((counts.passed.into_inner(), counts.lost.into_inner()), (3, 0));
    }

    #[test]
    fn a_third_process_reaches_the_first_and_forgets_it_once_it_is_gone() {
        let first = group(1, Vec::new());
        let second = group(1, first.ways().unwrap());
        let third = group(1, second.ways().unwrap());
        assert_eq!(third.ways().unwrap().len(), 3);
        drop(second);
        let (counts, to) = (Counts::default(), datagram(first.place(0), b"still"));
        assert!(sorted(&third, 0, std::slice::from_ref(&to), &counts).is_empty());
        assert_eq!(arrived(&first.inbox(0).unwrap()), [&to[..]]);
        assert!(third.has_elders());
        drop(first);
        assert_eq!(
            sorted(&third, 0, std::slice::from_ref(&to), &counts),
            to,
            "it is left to quinn, which answers with a reset"
        );
        assert!(!third.has_elders());
        assert_eq!(third.ways().unwrap().len(), 1);
    }

    #[test]
    fn too_many_sockets_are_refused() {
        let first = crate::udp::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let sockets = (0..=MOST).map(|_| first.try_clone().unwrap()).collect();
        assert!(Group::open(sockets, Vec::new()).is_err() && Group::open(Vec::new(), Vec::new()).is_err());
    }
}

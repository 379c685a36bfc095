//! The UDP sockets of one address at which QUIC is accepted, one for each reader.
//!
//! In: sockets that share their port, in the order in which they joined it; ways to processes that were
//! taken over here. Out: each datagram at the reader whose place its connection id says. The kernel
//! mostly sees to that (see [`steer`](crate::steer)); what comes to the wrong socket all the same is
//! passed on: since no filter is to be had, or since the connection is an older process's.
//! The sockets close together: were one to close alone, the places of the others would change.

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

/// Readers that an id can tell apart.
pub const MOST: usize = 256;
/// Earlier processes whose connections are still served. Each is as old as its longest connection.
const MOST_ELDERS: usize = 64 * MOST;

/// The way to the connections of an earlier process.
#[derive(Debug)]
struct Elder {
    way: UnixDatagram,
    is_gone: AtomicBool,
}

/// A way for the datagrams of one place, for another process.
#[derive(Debug)]
pub struct Way {
    /// Process and reader, as [`Group::open`] reads them.
    pub place: String,
    /// What is sent here arrives there.
    pub fd: OwnedFd,
}

/// The sockets of one address. Whoever holds it keeps all of them open.
#[derive(Debug)]
pub struct Group {
    address: SocketAddr,
    tag: u16,
    sockets: Vec<UdpSocket>,
    passages: Vec<Passage>,
    elders: HashMap<Place, Elder>,
}

/// What one reader found to be others'.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Datagrams that it passed on, and those of them for which there was no room.
    pub(super) passed: AtomicU64,
    pub(super) lost: AtomicU64,
}

impl Group {
    /// A group of these sockets, in the order in which they were bound. `ways` lead to the processes
    /// before this one.
    ///
    /// # Errors
    /// There is no socket, or more than [`MOST`]; no descriptor is left.
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

    /// Has the kernel choose the socket by the connection id from now on.
    ///
    /// # Errors
    /// As [`steer::by_connection_id`]. Everything works without, at the price of passing on.
    pub fn steer(&self) -> io::Result<()> {
        match self.sockets.first() {
            Some(first) => steer::by_connection_id(first, self.sockets.len()),
            None => Ok(()),
        }
    }

    /// Where all of them are bound.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many readers there are.
    pub fn len(&self) -> usize {
        self.sockets.len()
    }

    /// There are none, which [`Group::open`] does not allow.
    pub fn is_empty(&self) -> bool {
        self.sockets.is_empty()
    }

    /// The sockets once more, in their order, for another process.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn duplicate(&self) -> io::Result<Vec<OwnedFd>> {
        self.sockets.iter().map(|socket| socket.try_clone().map(OwnedFd::from)).collect()
    }

    /// The ways to our own connections, and to those of earlier processes that live on.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn ways(&self) -> io::Result<Vec<Way>> {
        let own = self.passages.iter().zip(0..).map(|(passage, slot)| (Place { tag: self.tag, slot }, &passage.far));
        let live = self.elders.iter().filter(|(_, elder)| !elder.is_gone.load(Ordering::Relaxed));
        let all = own.chain(live.map(|(place, elder)| (*place, &elder.way)));
        all.map(|(place, way)| Ok(Way { place: write_place(place), fd: way.try_clone()?.into() })).collect()
    }

    /// Whether a process before this one may still have connections here.
    pub fn has_elders(&self) -> bool {
        // Nothing is sent but what is no datagram: it tells whether somebody is there.
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

    /// Nothing can arrive at the wrong socket.
    fn is_alone(&self) -> bool {
        self.sockets.len() == 1 && self.elders.is_empty()
    }

    /// Passes on what is not the reader's at `slot`, and leaves the rest of the message in `room`.
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

    /// False where it is the reader's own, or nobody's.
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
                // Its process has ended, and with it the connection: whoever asks is told so.
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

    /// What is left of a message at this place.
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
        assert_eq!(sorted(&third, 0, std::slice::from_ref(&to), &counts), to, "whoever asks is told that it is gone");
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

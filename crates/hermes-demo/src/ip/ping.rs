//! Echo requests, one every ten milliseconds, and what became of each.
//!
//! In: a place, an address. Out: for each request when it was sent, its round trip and its reply's TTL, or that none
//! came. A thread and a raw ICMP socket of its own: neither an overlay nor the demo itself slows it.
//! Never: a request that is repeated.

use std::io::{self, Read as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use socket2::{Domain, Protocol, Socket, Type};

use crate::place::Place;

/// A request so often.
pub(super) const EVERY: Duration = Duration::from_millis(10);
/// Bytes of a request's IP packet: `ping` sends as many.
pub(super) const PACKET: usize = IP_HEADER + MESSAGE;
/// A request without a reply for so long after the last one was sent is lost. The paper's pings waited as long.
const PATIENCE: Duration = Duration::from_secs(3);
/// Requests of one pinger: hours.
const MOST: usize = 1 << 21;
const IP_HEADER: usize = 20;
const MESSAGE: usize = 64;
const REQUEST: u8 = 8;
const REPLY: u8 = 0;

/// A request, and its reply.
#[derive(Debug, Clone, Copy)]
pub(super) struct Echo {
    /// When it was sent.
    pub(super) sent: Instant,
    pub(super) reply: Option<Reply>,
}

/// A reply.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reply {
    /// How long it took.
    pub(super) after: Duration,
    /// As it came.
    pub(super) ttl: u8,
}

/// A running pinger; ends with this value.
#[derive(Debug)]
pub(super) struct Pinger {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    ending: AtomicBool,
    /// Ends without waiting for replies.
    gone: AtomicBool,
    record: Mutex<Record>,
}

#[derive(Debug, Default)]
struct Record {
    echoes: Vec<Echo>,
    replies: usize,
    last: Option<Reply>,
}

impl Shared {
    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pinger {
    /// Begins to ask `address`.
    ///
    /// # Errors
    /// There is no raw socket without root.
    pub(super) fn begin(place: &Place, address: Ipv4Addr) -> anyhow::Result<Self> {
        let socket = place.inside(|| {
            let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?;
            socket.connect(&SocketAddr::from((address, 0)).into())?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        })?;
        let shared = Arc::new(Shared::default());
        let thread = thread::spawn({
            let shared = shared.clone();
            move || ask_on(&socket, &shared)
        });
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Requests and replies so far, and the last reply.
    pub(super) fn so_far(&self) -> (usize, usize, Option<Reply>) {
        let record = self.shared.record();
        (record.echoes.len(), record.replies, record.last)
    }

    /// Asks no more, waits for what is under way, and gives the record.
    pub(super) async fn finish(mut self) -> Vec<Echo> {
        self.shared.ending.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
        std::mem::take(&mut self.shared.record().echoes)
    }
}

impl Drop for Pinger {
    fn drop(&mut self) {
        self.shared.gone.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn ask_on(mut socket: &Socket, shared: &Shared) {
    // Replies to others in this place come here as well.
    let identifier: u16 = rand::random();
    let mut next = Instant::now();
    let mut until = None;
    let mut room = [0; 2048];
    while !shared.gone.load(Ordering::Relaxed) {
        let now = Instant::now();
        if until.is_none() && now >= next {
            ask(socket, identifier, shared, now);
            // What a busy machine did not send in time is not made up for: that would be a burst.
            next = (next + EVERY).max(now);
            if shared.ending.load(Ordering::Relaxed) {
                until = Some(now + PATIENCE);
            }
        }
        while let Ok(length) = socket.read(&mut room) {
            note(&room[..length], identifier, shared);
        }
        if let Some(until) = until {
            let record = shared.record();
            if record.replies == record.echoes.len() || now >= until {
                return;
            }
        }
        wait_for(socket, if until.is_some() { EVERY } else { next.saturating_duration_since(Instant::now()) });
    }
}

fn wait_for(socket: &Socket, most: Duration) {
    // Woken by a packet, by the time or by a signal: the caller looks in each case.
    let _ = ppoll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)], Some(TimeSpec::from(most)), None);
}

fn ask(socket: &Socket, identifier: u16, shared: &Shared, now: Instant) {
    let number = {
        let mut record = shared.record();
        if record.echoes.len() >= MOST {
            return;
        }
        record.echoes.push(Echo { sent: now, reply: None });
        record.echoes.len() - 1
    };
    // What cannot be sent has no reply: it is lost.
    let _: io::Result<usize> = socket.send(&request(identifier, number as u64));
}

fn request(identifier: u16, number: u64) -> [u8; MESSAGE] {
    let mut message = [0; MESSAGE];
    message[0] = REQUEST;
    message[4..6].copy_from_slice(&identifier.to_be_bytes());
    message[6..8].copy_from_slice(&(number as u16).to_be_bytes());
    message[8..16].copy_from_slice(&number.to_be_bytes());
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    message
}

/// RFC 1071.
fn checksum(message: &[u8]) -> u16 {
    let words = message.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn note(packet: &[u8], identifier: u16, shared: &Shared) {
    let now = Instant::now();
    let Some((ttl, number)) = read_reply(packet, identifier) else { return };
    let mut record = shared.record();
    let Record { echoes, replies, last } = &mut *record;
    let Some(echo) = usize::try_from(number).ok().and_then(|number| echoes.get_mut(number)) else { return };
    if echo.reply.is_none() {
        let reply = Reply { after: now.duration_since(echo.sent), ttl };
        echo.reply = Some(reply);
        *last = Some(reply);
        *replies += 1;
    }
}

/// TTL and number of a reply to one of our requests.
fn read_reply(packet: &[u8], identifier: u16) -> Option<(u8, u64)> {
    let header = usize::from(packet.first()? & 0x0f) * 4;
    let ttl = *packet.get(8)?;
    let message: &[u8; MESSAGE] = packet.get(header..)?.try_into().ok()?;
    let is_ours = message[0] == REPLY && message[4..6] == identifier.to_be_bytes() && checksum(message) == 0;
    is_ours.then_some((ttl, u64::from_be_bytes(message[8..16].try_into().ok()?)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn reply_to(request: [u8; MESSAGE], ttl: u8) -> Vec<u8> {
        let mut header = [0; IP_HEADER];
        (header[0], header[8]) = (0x45, ttl);
        let mut message = request;
        message[0] = REPLY;
        message[2..4].fill(0);
        let sum = checksum(&message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        [&header[..], &message].concat()
    }

    #[test]
    fn a_reply_is_known_by_identifier_and_whole_number() {
        let packet = reply_to(request(7, 70_000), 61);
        assert_eq!(packet.len(), PACKET);
        assert_eq!(read_reply(&packet, 7), Some((61, 70_000)));
        assert_eq!(read_reply(&packet, 8), None);
        assert_eq!(read_reply(&packet[..PACKET - 1], 7), None);
        let mut broken = packet.clone();
        broken[40] ^= 1;
        assert_eq!(read_reply(&broken, 7), None);
        // Our own request, as a raw socket on the same machine sees it.
        let mut request = packet;
        request[IP_HEADER] = REQUEST;
        assert_eq!(read_reply(&request, 7), None);
    }

    #[test]
    fn what_came_twice_counts_once() {
        let shared = Shared::default();
        shared.record().echoes.push(Echo { sent: Instant::now(), reply: None });
        for _ in 0..2 {
            note(&reply_to(request(1, 0), 64), 1, &shared);
        }
        // A number that was never sent is nobody's.
        note(&reply_to(request(1, 9), 64), 1, &shared);
        assert_eq!(shared.record().replies, 1);
    }
}

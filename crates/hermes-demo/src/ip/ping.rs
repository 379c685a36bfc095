//! Echo requests, one every ten milliseconds, and the outcome of each.
//!
//! In: a namespace and an address. Out: for each request its send time, its round trip and its reply's TTL, or a loss.
//! Each pinger has its own thread and raw ICMP socket, so that neither the overlay nor the demo slows it. Never: a
//! repeated request.

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

use crate::namespace::Namespace;

/// The interval between requests.
pub(super) const EVERY: Duration = Duration::from_millis(10);
/// Bytes of a request's IP packet, the same number that `ping` sends.
pub(super) const PACKET: usize = IP_HEADER + MESSAGE;
/// A request is lost if no reply arrived within this time after the last one was sent. The paper's pings waited as
/// long.
const REPLY_TIMEOUT: Duration = Duration::from_secs(3);
/// The maximum number of requests of one pinger: enough for hours.
const MAX_REQUESTS: usize = 1 << 21;
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
    /// The round-trip time.
    pub(super) after: Duration,
    /// The TTL of the received packet.
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
    /// The pinger ends without waiting for replies.
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
    /// Starts to send requests to `address`.
    ///
    /// # Errors
    /// No raw socket is available without root.
    pub(super) fn begin(place: &Namespace, address: Ipv4Addr) -> anyhow::Result<Self> {
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

    /// The number of requests and replies so far, and the last reply.
    pub(super) fn so_far(&self) -> (usize, usize, Option<Reply>) {
        let record = self.shared.record();
        (record.echoes.len(), record.replies, record.last)
    }

    /// Stops sending, waits for outstanding replies, and returns the record.
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
    // Replies to other processes in this namespace also arrive on the socket; the identifier tells them apart.
    let identifier: u16 = rand::random();
    let mut next = Instant::now();
    let mut until = None;
    let mut room = [0; 2048];
    while !shared.gone.load(Ordering::Relaxed) {
        let now = Instant::now();
        if until.is_none() && now >= next {
            send_echo(socket, identifier, shared, now);
            // Requests that a busy machine did not send in time are skipped: to catch up would create a burst.
            next = (next + EVERY).max(now);
            if shared.ending.load(Ordering::Relaxed) {
                until = Some(now + REPLY_TIMEOUT);
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
    // A packet, the timeout or a signal ends the wait: the caller checks the state in each case.
    let _ = ppoll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)], Some(TimeSpec::from(most)), None);
}

fn send_echo(socket: &Socket, identifier: u16, shared: &Shared, now: Instant) {
    let number = {
        let mut record = shared.record();
        if record.echoes.len() >= MAX_REQUESTS {
            return;
        }
        record.echoes.push(Echo { sent: now, reply: None });
        record.echoes.len() - 1
    };
    // A request that cannot be sent gets no reply and counts as lost.
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

/// The Internet checksum (RFC 1071).
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

/// The TTL and number of a reply to one of our requests.
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
        // The socket also receives our own request, since both ends share a machine.
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
        // A reply with a number that was never sent is ignored.
        note(&reply_to(request(1, 9), 64), 1, &shared);
        assert_eq!(shared.record().replies, 1);
    }
}

//! A link between two network namespaces: a TAP device in each, and a thread per direction that carries Ethernet
//! frames.
//!
//! In: the names of two namespaces, and the conditions of each direction. Out: frames, after their delay; counters. The
//! link carries handshakes, acknowledgements and datagrams like a real path. The number of frames in flight is limited.
//! Never: an address. An outage does not set the devices down.

#![allow(clippy::disallowed_methods, reason = "a thread of its own waits until a frame is due")]

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::os::fd::AsFd as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use crate::netem::{Conditions, Dropped, LinkEmulator};

/// Maximum number of frames in flight in one direction. At 20 ms and full frames this is 4.9 Gbit/s, far more than a
/// TAP moves.
const MAX_FRAMES_IN_FLIGHT: usize = 8192;
/// Length of the largest frame, in bytes: an MTU of 1500 with its Ethernet header and a VLAN tag.
const MAX_FRAME_BYTES: usize = 1522;
/// Interval at which a thread checks whether the link still exists.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of frames that a thread reads before it delivers those that are due.
const BURST: usize = 64;
/// Length of a TAP's transmit queue, in frames. Packets that a thousand clients send at one instant fit.
const TAP_QUEUE: u32 = 8192;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// An end of a link.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// The name of the network namespace, as in `ip netns`.
    pub namespace: &'a str,
    /// The name of the device in the namespace.
    pub device: &'a str,
}

/// Counters of the frames of one direction.
#[derive(Debug, Default)]
pub struct Counters {
    /// Frames that arrived.
    pub arrived: AtomicU64,
    /// Bytes of the frames that arrived.
    pub bytes: AtomicU64,
    /// Frames dropped in an outage.
    pub dark: AtomicU64,
    /// Frames dropped by a full queue.
    pub full: AtomicU64,
    /// Frames lost at random.
    pub lost: AtomicU64,
}

/// A link, which exists until it is dropped.
#[derive(Debug)]
pub struct Link {
    number: u32,
    wanted: Arc<AtomicBool>,
    counters: [Arc<Counters>; 2],
    threads: Vec<JoinHandle<()>>,
}

impl Link {
    /// Creates a link. `conditions` are those from the first end to the second, and those back; their times count from
    /// `epoch`. The devices have no address, and are down.
    ///
    /// # Errors
    /// Root privileges are missing, or a TAP cannot be created or moved.
    pub fn new(ends: [End<'_>; 2], conditions: [Conditions; 2], epoch: Instant) -> io::Result<Self> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let [a, b] = [Arc::new(tap(ends[0], number, "a")?), Arc::new(tap(ends[1], number, "b")?)];
        let wanted = Arc::new(AtomicBool::new(true));
        let counters = [Arc::<Counters>::default(), Arc::default()];
        let [there, back] = conditions;
        let directions = [(a.clone(), b.clone(), there), (b, a, back)];
        let threads =
            directions.into_iter().zip(&counters).enumerate().map(|(direction, ((from, to, conditions), counters))| {
                let emulator = LinkEmulator::new(conditions, u64::from(number) << 1 | direction as u64);
                let (wanted, counters) = (wanted.clone(), counters.clone());
                thread::spawn(move || {
                    LinkThread { from, to, emulator, epoch, counters, in_flight: BinaryHeap::new() }.run(&wanted)
                })
            });
        Ok(Self { number, threads: threads.collect(), wanted, counters })
    }

    /// Returns the Ethernet addresses of both ends, for static neighbour entries: address resolution would fail during
    /// an outage.
    pub fn ethernet(&self) -> [String; 2] {
        ["a", "b"].map(|side| ethernet(self.number, side))
    }

    /// Returns the counters of both directions.
    pub fn counters(&self) -> [&Counters; 2] {
        self.counters.each_ref().map(|counters| &**counters)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.wanted.store(false, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Creates a TAP in this process's namespace, and moves its interface to the namespace of `end`. This process still
/// reads and writes its frames.
fn tap(end: End<'_>, number: u32, side: &str) -> io::Result<SyncDevice> {
    let name = format!("hl{}-{number}{side}", std::process::id());
    let builder = DeviceBuilder::new().name(&name).layer(Layer::L2).tx_queue_len(TAP_QUEUE).enable(false);
    let device = builder.build_sync()?;
    device.set_nonblocking(true)?;
    ip(&["link", "set", &name, "netns", end.namespace])?;
    ip(&["-n", end.namespace, "link", "set", &name, "name", end.device, "address", &ethernet(number, side)])?;
    Ok(device)
}

/// Returns an Ethernet address that is unique in a lab: locally administered, with the link's number.
fn ethernet(number: u32, side: &str) -> String {
    let [_, high, middle, low] = number.to_be_bytes();
    format!("02:4c:{high:02x}:{middle:02x}:{low:02x}:0{side}")
}

fn ip(arguments: &[&str]) -> io::Result<()> {
    let output = Command::new("ip").args(arguments).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("`ip {}`: {}", arguments.join(" "), said.trim())))
}

/// A frame in flight, ordered by its arrival and then by its number.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Frame {
    at: Duration,
    number: u64,
    bytes: Vec<u8>,
}

/// The thread of one direction.
struct LinkThread {
    from: Arc<SyncDevice>,
    to: Arc<SyncDevice>,
    emulator: LinkEmulator,
    epoch: Instant,
    counters: Arc<Counters>,
    in_flight: BinaryHeap<Reverse<Frame>>,
}

impl LinkThread {
    fn run(mut self, wanted: &AtomicBool) {
        let mut buffer = [0; MAX_FRAME_BYTES];
        let mut number = 0;
        while wanted.load(Ordering::Relaxed) {
            if !self.read_frames(&mut buffer, &mut number) {
                return;
            }
            self.deliver_due();
            let due = self.in_flight.peek().map(|Reverse(frame)| frame.at.saturating_sub(self.epoch.elapsed()));
            let timeout = due.unwrap_or(STOP_CHECK_INTERVAL).min(STOP_CHECK_INTERVAL);
            if !timeout.is_zero() {
                // A frame, the timeout or a signal ends the wait; the loop checks all of them.
                let mut readable = [PollFd::new(self.from.as_fd(), PollFlags::POLLIN)];
                let _ = ppoll(&mut readable, Some(TimeSpec::from_duration(timeout)), None);
            }
        }
    }

    /// Reads the waiting frames. Returns false if the namespace was removed, and the TAP with it.
    fn read_frames(&mut self, buffer: &mut [u8], number: &mut u64) -> bool {
        for _ in 0..BURST {
            let length = match self.from.recv(buffer) {
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(_) => return false,
            };
            let counter = match self.emulator.take(self.epoch.elapsed(), length) {
                Ok(arrival) if self.in_flight.len() < MAX_FRAMES_IN_FLIGHT => {
                    for _ in 0..1 + u8::from(arrival.is_double) {
                        *number += 1;
                        let bytes = buffer[..length].to_vec();
                        self.in_flight.push(Reverse(Frame { at: arrival.at, number: *number, bytes }));
                    }
                    continue;
                }
                Ok(_) | Err(Dropped::Full) => &self.counters.full,
                Err(Dropped::Dark) => &self.counters.dark,
                Err(Dropped::Lost) => &self.counters.lost,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    fn deliver_due(&mut self) {
        while let Some(Reverse(frame)) = self.in_flight.peek()
            && frame.at <= self.epoch.elapsed()
            && let Some(Reverse(frame)) = self.in_flight.pop()
        {
            if self.to.send(&frame.bytes).is_ok() {
                self.counters.arrived.fetch_add(1, Ordering::Relaxed);
                self.counters.bytes.fetch_add(frame.bytes.len() as u64, Ordering::Relaxed);
            } else {
                self.counters.full.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

//! A link with delay, where the kernel has no netem.
//!
//! In: two namespaces, an address for each, a delay one way. Out: a tap in each namespace and two threads a
//! direction that carry Ethernet frames from one to the other, each frame after its delay and in order. A real path
//! in all that matters here: handshakes, acknowledgements and datagrams cross it like anything else. It never drops
//! a frame on purpose; what its bounded queue cannot hold is dropped and counted.

#![allow(clippy::disallowed_methods, reason = "a thread of its own sleeps until a frame is due")]

use std::{
    io,
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use crate::{
    Error, Result,
    netns::{Namespace, ip},
};

/// Frames under way in one direction: at 20 ms and full frames this is 4.9 Gbit/s, far more than a tap moves.
const FRAMES_UNDER_WAY: usize = 8192;
/// Largest frame: an MTU of 1500 with its Ethernet header, and room for a VLAN tag.
const FRAME: usize = 1522;
/// How long a reader waits for a frame before it looks whether the link is still wanted.
const LOOK_MS: u16 = 50;
/// Ethernet queue of a tap, in frames: a thousand clients at one instant fit.
const TAP_QUEUE: u32 = 8192;

/// A delayed link between two namespaces, there until it is dropped.
#[derive(Debug)]
pub struct DelayedLink {
    wanted: Arc<AtomicBool>,
    counters: Arc<Counters>,
    threads: Vec<JoinHandle<()>>,
}

/// What went over a link.
#[derive(Debug, Default)]
pub struct Counters {
    /// Frames delivered.
    pub delivered: AtomicU64,
    /// Frames dropped because the queue was full or the tap refused them.
    pub dropped: AtomicU64,
}

struct Frame {
    due: Instant,
    bytes: Box<[u8]>,
}

impl DelayedLink {
    /// Joins `a` and `b`; every frame takes `one_way`. Their addresses are in one `/24`.
    ///
    /// # Errors
    /// Without root, or when a tap cannot be made or moved.
    pub fn new(a: (&Namespace, Ipv4Addr), b: (&Namespace, Ipv4Addr), one_way: Duration) -> Result<Self> {
        let wanted = Arc::new(AtomicBool::new(true));
        let counters = Arc::new(Counters::default());
        let (tap_a, tap_b) = (tap(a.0, a.1, "a")?, tap(b.0, b.1, "b")?);
        let mut threads = Vec::new();
        for (from, to) in [(&tap_a, &tap_b), (&tap_b, &tap_a)] {
            let (sender, receiver) = sync_channel(FRAMES_UNDER_WAY);
            let (from, to) = (Arc::clone(from), Arc::clone(to));
            let (still, counted) = (Arc::clone(&wanted), Arc::clone(&counters));
            threads.push(thread::spawn(move || take_in(&from, &sender, one_way, &still, &counted)));
            let counted = Arc::clone(&counters);
            threads.push(thread::spawn(move || give_out(&to, &receiver, &counted)));
        }
        Ok(Self { wanted, counters, threads })
    }

    /// What went over it so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }
}

impl Drop for DelayedLink {
    fn drop(&mut self) {
        self.wanted.store(false, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Made here and then moved, so that we hold its frames while its network end is in the namespace.
fn tap(namespace: &Namespace, address: Ipv4Addr, end: &str) -> Result<Arc<SyncDevice>> {
    let name = format!("hd{}{end}", std::process::id());
    let device = DeviceBuilder::new()
        .name(&name)
        .layer(Layer::L2)
        .tx_queue_len(TAP_QUEUE)
        .enable(false)
        .build_sync()
        .map_err(Error::io(format!("making the tap {name}")))?;
    device.set_nonblocking(true).map_err(Error::io(format!("tap {name}")))?;
    ip(&["link", "set", &name, "netns", namespace.name()])?;
    namespace.ip(&["link", "set", &name, "name", "delayed"])?;
    namespace.address("delayed", address)?;
    Ok(Arc::new(device))
}

fn take_in(tap: &SyncDevice, queue: &SyncSender<Frame>, one_way: Duration, wanted: &AtomicBool, counters: &Counters) {
    let mut buffer = [0; FRAME];
    while wanted.load(Ordering::Relaxed) {
        match tap.recv(&mut buffer) {
            Ok(length) => {
                let frame = Frame { due: Instant::now() + one_way, bytes: buffer[..length].into() };
                if queue.try_send(frame).is_err() {
                    counters.dropped.fetch_add(1, Ordering::Relaxed);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => readable(tap),
            // The namespace, and our tap with it, is gone.
            Err(_) => return,
        }
    }
}

/// Ends when the reader has ended and the queue is empty.
fn give_out(tap: &SyncDevice, queue: &Receiver<Frame>, counters: &Counters) {
    while let Ok(frame) = queue.recv() {
        if let Some(wait) = frame.due.checked_duration_since(Instant::now()) {
            thread::sleep(wait);
        }
        let counter = if tap.send(&frame.bytes).is_ok() { &counters.delivered } else { &counters.dropped };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

fn readable(tap: &SyncDevice) {
    use std::os::fd::AsFd as _;
    // Woken by a frame, by the time-out, or by a signal: the caller looks again in each case.
    let _ = poll(&mut [PollFd::new(tap.as_fd(), PollFlags::POLLIN)], PollTimeout::from(LOOK_MS));
}

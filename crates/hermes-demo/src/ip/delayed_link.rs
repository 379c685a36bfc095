//! A long wire: packets between two namespaces, each delivered after a delay, in order.
//!
//! In: two namespaces, the name of a device in each, and a one-way delay. Out: a device in each, and threads that carry
//! packets between them. Kernels without netem offer no other delay. No packet is lost on purpose; packets that exceed
//! the bounded queues are dropped and counted. Dropping the value stops the threads and removes the devices.

use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use hermes_net::tun::{Device, IdleQueue, Queue, ReceiveBuffer};
use tokio::sync::Notify;

use crate::namespace::Namespace;

/// The usual MTU of the Internet.
const MTU: u32 = 1500;
/// Packets in flight in one direction: with 1,500 bytes each and 55 ms this is 1.8 Gbit/s.
const MAX_PACKETS_IN_FLIGHT: usize = 8192;

/// Two namespaces far from each other.
#[derive(Debug)]
pub(super) struct DelayedLink {
    ended: Arc<Notify>,
    dropped: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// A packet, and its delivery time.
type Packet = (Instant, Bytes);

impl DelayedLink {
    /// Creates a wire. The devices have no addresses yet.
    ///
    /// # Errors
    /// No TUN device can be created.
    pub(super) fn lay(a: (&Namespace, &str), b: (&Namespace, &str), one_way: Duration) -> anyhow::Result<Self> {
        let ends = [end(a.0, a.1)?, end(b.0, b.1)?];
        let ended = Arc::new(Notify::new());
        let dropped = Arc::new(AtomicU64::new(0));
        let (tell, told) = mpsc::channel();
        let (stop, counter) = (ended.clone(), dropped.clone());
        let thread = thread::spawn(move || carry(ends, one_way, &stop, &counter, &tell));
        let this = Self { ended, dropped, thread: Some(thread) };
        told.recv().unwrap_or_else(|_| Err(io::Error::other("its thread ended"))).context("a long wire")?;
        Ok(this)
    }

    /// Packets that exceeded the queues.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

impl Drop for DelayedLink {
    fn drop(&mut self) {
        self.ended.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn end(place: &Namespace, device: &str) -> anyhow::Result<IdleQueue> {
    let make =
        || Device::create(device, 1, MTU).map_err(|error| io::Error::other(format!("{error}. {}", error.remedy())));
    let (_, mut queues) = place.inside(make)?;
    queues.pop().context("a TUN device without a queue")
}

/// Reads both ends; a thread for each direction writes.
fn carry(
    ends: [IdleQueue; 2],
    one_way: Duration,
    ended: &Notify,
    dropped: &Arc<AtomicU64>,
    tell: &mpsc::Sender<io::Result<()>>,
) {
    let started = tokio::runtime::Builder::new_current_thread().enable_io().build().and_then(|runtime| {
        let _inside = runtime.enter();
        let [a, b] = ends;
        let queues = (Arc::new(a.start()?), Arc::new(b.start()?));
        Ok((runtime, queues))
    });
    let (runtime, (a, b)) = match started {
        Ok(started) => started,
        Err(error) => return drop(tell.send(Err(error))),
    };
    let _ = tell.send(Ok(()));
    thread::scope(|scope| {
        let writer = |to: &Arc<Queue>| {
            let (send, packets) = sync_channel(MAX_PACKETS_IN_FLIGHT);
            let (to, dropped) = (to.clone(), dropped.clone());
            scope.spawn(move || give_out(&to, &packets, &dropped));
            send
        };
        let (to_a, to_b) = (writer(&a), writer(&b));
        runtime.block_on(async {
            tokio::select! {
                () = ended.notified() => {}
                () = receive(&a, &to_b, one_way, dropped) => {}
                () = receive(&b, &to_a, one_way, dropped) => {}
            }
        });
        // The writers end once all senders are dropped.
        drop((to_a, to_b));
    });
}

async fn receive(from: &Queue, to: &SyncSender<Packet>, one_way: Duration, dropped: &AtomicU64) {
    let mut buffer = ReceiveBuffer::default();
    let each = |packet| {
        if to.try_send((Instant::now() + one_way, packet)).is_err() {
            dropped.fetch_add(1, Ordering::Relaxed);
        }
    };
    // An error means that the device and its namespace were removed.
    while poll_fn(|cx| from.poll_receive(cx, &mut buffer, each)).await.is_ok() {}
}

#[allow(clippy::disallowed_methods, reason = "a thread of its own sleeps until a packet is due")]
fn give_out(to: &Queue, packets: &Receiver<Packet>, dropped: &AtomicU64) {
    while let Ok((due, packet)) = packets.recv() {
        if let Some(wait) = due.checked_duration_since(Instant::now()) {
            thread::sleep(wait);
        }
        if !to.try_send(&[packet]).is_ok_and(|moved| moved.packets == 1) {
            dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

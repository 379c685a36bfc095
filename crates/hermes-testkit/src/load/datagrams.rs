//! Datagrams in one direction: the rate that a path carries, and its losses.
//!
//! In: the target, the address of the sink, sizes, flows and the window. Out: the datagrams that reached the sink
//! intact within the measured time, and every loss over the whole run as a failure. The sender respects a window (sent
//! minus received), so that losses are the path's and not those of an overflowing socket buffer. A window that does not
//! move for `STALL` counts as lost.

#![allow(clippy::disallowed_methods, reason = "blocking threads; no worker sleeps")]

use std::{
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use super::{
    Load, Outcome,
    outcome::{Failure, Recorder},
    window::Window,
};
use crate::{
    Result,
    netns::inside,
    origin::{bind_udp, connect_udp},
    pattern::Pattern,
};

use batch::{Receiver, Sender};

mod batch;

/// Flow and sequence number, each eight bytes, at the head of a datagram.
const HEADER: usize = 16;
/// Datagrams in flight count as lost if none of their flow arrives for this time.
const STALL: Duration = Duration::from_millis(100);
/// Time for the last datagrams to arrive.
const DRAIN: Duration = Duration::from_millis(300);
/// Timeout of the first datagram of a path.
const FIRST: Duration = Duration::from_secs(5);

/// The datagrams of one flow in flight, as the sender sees them.
struct Credit {
    sent: u64,
    /// Datagrams that count as lost, so that the flow continues.
    forgiven: u64,
    received: u64,
    moved: Instant,
}

/// State of one flow that sender and sink share.
#[derive(Default)]
struct Flow {
    received: AtomicU64,
    /// Sequence number after the highest received: a lower one was reordered.
    next: AtomicU64,
    reordered: AtomicU64,
}

struct Shared {
    flows: Vec<Flow>,
    wrong: AtomicU64,
    stop: AtomicBool,
    /// The sum of `received`, for the measured time.
    total: AtomicU64,
}

pub(super) fn run(load: &Load, watch: &[u32]) -> Result<Outcome> {
    let Load::Datagrams { address, sink, sink_in, length, flows, in_flight, warmup, window } = load else {
        unreachable!("dispatched by kind");
    };
    let length = (*length).max(HEADER);
    let shared = Arc::new(Shared::new(*flows));
    let sink = inside(sink_in.as_deref(), || bind_udp(*sink))?;
    let sockets = (0..*flows).map(|_| connect_udp(*address)).collect::<Result<Vec<_>>>()?;
    let (sender_shared, in_flight) = (Arc::clone(&shared), *in_flight as u64);
    let sender = thread::spawn(move || send(&sockets, &sender_shared, length, in_flight));
    let (sink_shared, wake) = (Arc::clone(&shared), sender.thread().clone());
    let receiver = thread::spawn(move || receive(&sink, &sink_shared, length, &wake));

    thread::sleep(Duration::from_millis(*warmup));
    let (clocks, before) = (Window::open(watch), shared.total.load(Ordering::Relaxed));
    thread::sleep(Duration::from_millis(*window));
    let counted = shared.total.load(Ordering::Relaxed) - before;
    let mut outcome = Outcome { completed: counted, bytes: counted * length as u64, ..Outcome::default() };
    clocks.close(&mut outcome);
    shared.stop.store(true, Ordering::Relaxed);
    sender.thread().unpark();
    let sent = sender.join();
    let received = receiver.join();
    Ok(match (sent, received) {
        (Ok(sent), Ok(())) => shared.judge(&sent, outcome),
        _ => broken(outcome),
    })
}

/// Returns the number of sent datagrams of each flow. First sends one datagram per flow and waits for it: opening a
/// flow takes longer than any window allows for.
fn send(sockets: &[UdpSocket], shared: &Shared, length: usize, in_flight: u64) -> Vec<u64> {
    let mut senders: Vec<_> =
        sockets.iter().enumerate().map(|(flow, socket)| Sender::new(socket, flow, template(length))).collect();
    let mut windows: Vec<_> = open(&mut senders, shared).into_iter().map(Credit::new).collect();
    while !shared.stop.load(Ordering::Relaxed) {
        let mut any = false;
        for ((sender, window), flow) in senders.iter_mut().zip(&mut windows).zip(&shared.flows) {
            let room = in_flight.saturating_sub(window.under_way(flow.received.load(Ordering::Relaxed)));
            // Half a window at a time: single datagrams would limit the sender.
            if room >= in_flight.div_ceil(2) {
                let gone = sender.send(window.sent, room);
                window.sent += gone;
                any |= gone > 0;
            }
        }
        if !any {
            thread::park_timeout(Duration::from_millis(1));
        }
    }
    windows.into_iter().map(|window| window.sent).collect()
}

/// Repeats first datagrams until one arrives, as a program would do.
fn open(senders: &mut [Sender<'_>], shared: &Shared) -> Vec<u64> {
    let deadline = Instant::now() + FIRST;
    let mut sent = vec![0; senders.len()];
    for (i, sender) in senders.iter_mut().enumerate() {
        let flow = &shared.flows[i];
        while flow.received.load(Ordering::Relaxed) == 0 && Instant::now() < deadline {
            sent[i] += sender.send(sent[i], 1);
            let again = Instant::now() + STALL;
            while flow.received.load(Ordering::Relaxed) == 0 && Instant::now() < again {
                thread::park_timeout(Duration::from_millis(1));
            }
        }
    }
    sent
}

/// Receives datagrams until told to stop, and for [`DRAIN`] after that.
fn receive(sink: &UdpSocket, shared: &Shared, length: usize, wake: &Thread) {
    let template = template(length);
    let mut receiver = Receiver::new(sink, length);
    let mut last = None;
    loop {
        let received = receiver.receive(|datagram| shared.take(datagram, &template));
        if received > 0 {
            wake.unpark();
        }
        if shared.stop.load(Ordering::Relaxed) {
            let since = *last.get_or_insert_with(Instant::now);
            if since.elapsed() > DRAIN {
                return;
            }
        }
    }
}

fn template(length: usize) -> Vec<u8> {
    Pattern::new(length as u64).bytes(length)
}

fn broken(outcome: Outcome) -> Outcome {
    let mut recorder = Recorder::default();
    recorder.failure(&Failure::Malformed("a thread broke"));
    let Outcome { failed, failures, .. } = recorder.outcome();
    Outcome { failed, failures, ..outcome }
}

impl Credit {
    fn new(sent: u64) -> Self {
        Self { sent, forgiven: 0, received: 0, moved: Instant::now() }
    }

    /// Counts datagrams as lost that are in flight for too long. If they arrive later, the window is only smaller.
    fn under_way(&mut self, received: u64) -> u64 {
        if received != self.received || received >= self.sent - self.forgiven {
            (self.received, self.moved) = (received, Instant::now());
        } else if self.moved.elapsed() > STALL {
            self.forgiven = self.sent.saturating_sub(received);
            self.moved = Instant::now();
        }
        (self.sent - self.forgiven).saturating_sub(received)
    }
}

impl Shared {
    fn new(flows: usize) -> Self {
        Self {
            flows: (0..flows).map(|_| Flow::default()).collect(),
            wrong: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            total: AtomicU64::new(0),
        }
    }

    /// Checks one datagram; a wrong one counts as lost and as wrong.
    fn take(&self, datagram: &[u8], template: &[u8]) {
        let number = |at: usize| {
            let bytes = datagram.get(at..at + 8).and_then(|b| b.try_into().ok());
            bytes.map(u64::from_le_bytes)
        };
        let flow = number(0).and_then(|f| self.flows.get(usize::try_from(f).ok()?));
        let (Some(flow), Some(sequence)) = (flow, number(8)) else {
            self.wrong.fetch_add(1, Ordering::Relaxed);
            return;
        };
        if datagram[HEADER..] != template[HEADER..] {
            self.wrong.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let next = flow.next.fetch_max(sequence + 1, Ordering::Relaxed);
        if sequence < next {
            flow.reordered.fetch_add(1, Ordering::Relaxed);
        }
        flow.received.fetch_add(1, Ordering::Relaxed);
        self.total.fetch_add(1, Ordering::Relaxed);
    }

    /// Compares sent and received datagrams over the whole run.
    fn judge(&self, sent: &[u64], mut outcome: Outcome) -> Outcome {
        let received = self.flows.iter().map(|f| f.received.load(Ordering::Relaxed));
        let lost: u64 = sent.iter().zip(received).map(|(sent, received)| sent.saturating_sub(received)).sum();
        let reordered = self.flows.iter().map(|f| f.reordered.load(Ordering::Relaxed)).sum();
        let kinds = [("lost", lost), ("wrong bytes", self.wrong.load(Ordering::Relaxed)), ("out of order", reordered)];
        for (kind, count) in kinds.into_iter().filter(|(_, count)| *count > 0) {
            outcome.failures.insert(kind.to_owned(), count);
            outcome.failed += count;
        }
        outcome
    }
}

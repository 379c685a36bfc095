//! Bulk TCP in one direction: gigabits per second through a path.
//!
//! In: the target, the address of the sink, the number of connections. Out: the bytes that reached the sink within the
//! measured time. Every chunk carries its position in the stream, and one in `VERIFY_EVERY` is compared whole; at the
//! end, the numbers of sent and received bytes must match. Blocking threads: one per direction is the fastest client.

#![allow(clippy::disallowed_methods, reason = "blocking threads; no worker sleeps")]

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    Load, Outcome,
    exchange::RESPONSE_TIMEOUT,
    outcome::{Failure, Recorder},
    window::Window,
};
use crate::{Error, Result, netns::inside, pattern::Pattern};

/// Bytes of one write: large enough that system calls do not limit, small enough for the cache.
const CHUNK: usize = 256 << 10;
/// Comparing every byte would cost more than receiving it.
const VERIFY_EVERY: u64 = 16;

type Verdict = std::result::Result<u64, Failure>;

pub(super) fn run(load: &Load, watch: &[u32]) -> Result<Outcome> {
    let Load::Bulk { address, sink, sink_in, connections, warmup, window } = load else {
        unreachable!("dispatched by kind");
    };
    let open = || TcpListener::bind(sink).map_err(Error::io(format!("opening the sink {sink}")));
    let listener = inside(sink_in.as_deref(), open)?;
    let (received, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let senders = connect(*address, *connections, &stop);
    let receivers = accept(&listener, *connections, &received)?;
    thread::sleep(Duration::from_millis(*warmup));
    let (clocks, before) = (Window::open(watch), received.load(Ordering::Relaxed));
    thread::sleep(Duration::from_millis(*window));
    let mut outcome = Outcome { bytes: received.load(Ordering::Relaxed) - before, ..Outcome::default() };
    clocks.close(&mut outcome);
    stop.store(true, Ordering::Relaxed);
    let verdicts = finish(senders, receivers, *connections);
    Ok(Outcome { completed: verdicts.completed, failed: verdicts.failed, failures: verdicts.failures, ..outcome })
}

fn connect(address: SocketAddr, connections: usize, stop: &Arc<AtomicBool>) -> Vec<JoinHandle<Verdict>> {
    let sender = |_| {
        let stop = Arc::clone(stop);
        thread::spawn(move || send(address, &stop))
    };
    (0..connections).map(sender).collect()
}

/// Stops waiting when connections do not come: a path that fails must not hang the benchmark.
fn accept(listener: &TcpListener, connections: usize, received: &Arc<AtomicU64>) -> Result<Vec<JoinHandle<Verdict>>> {
    listener.set_nonblocking(true).map_err(Error::io("sink"))?;
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut receivers = Vec::new();
    while receivers.len() < connections && Instant::now() < deadline {
        match listener.accept() {
            Ok((stream, _)) => {
                let received = Arc::clone(received);
                receivers.push(thread::spawn(move || receive(stream, &received)));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(1)),
            Err(error) => return Err(Error::io("accepting at the sink")(error)),
        }
    }
    Ok(receivers)
}

/// Returns the bytes sent.
fn send(address: SocketAddr, stop: &AtomicBool) -> Verdict {
    let mut stream = TcpStream::connect(address).map_err(|e| Failure::Connect(e.kind()))?;
    // A stalled path ends the sender; the shortfall at the sink is counted.
    stream.set_write_timeout(Some(RESPONSE_TIMEOUT))?;
    let mut chunk = template();
    let mut sent = 0u64;
    while !stop.load(Ordering::Relaxed) {
        chunk[..8].copy_from_slice(&sent.to_le_bytes());
        stream.write_all(&chunk)?;
        sent += CHUNK as u64;
    }
    stream.shutdown(Shutdown::Write)?;
    // Wait for the sink's end to come back: closing first could cut off data in flight.
    stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    match stream.read(&mut [0; 1])? {
        0 => Ok(sent),
        _ => Err(Failure::WrongBytes),
    }
}

/// Returns the bytes received if each is at its right position.
fn receive(mut stream: TcpStream, received: &AtomicU64) -> Verdict {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    let template = template();
    let mut chunk = vec![0; CHUNK];
    let mut total = 0u64;
    loop {
        let mut filled = 0;
        while filled < CHUNK {
            match stream.read(&mut chunk[filled..])? {
                0 if filled == 0 => return Ok(total),
                0 => return Err(Failure::Closed),
                length => {
                    filled += length;
                    received.fetch_add(length as u64, Ordering::Relaxed);
                }
            }
        }
        let whole = (total / CHUNK as u64).is_multiple_of(VERIFY_EVERY);
        if chunk[..8] != total.to_le_bytes() || (whole && chunk[8..] != template[8..]) {
            return Err(Failure::WrongBytes);
        }
        total += CHUNK as u64;
    }
}

fn template() -> Vec<u8> {
    Pattern::new(CHUNK as u64).bytes(CHUNK)
}

/// A connection has succeeded when its sender and a receiver ended well and the sums agree.
fn finish(senders: Vec<JoinHandle<Verdict>>, receivers: Vec<JoinHandle<Verdict>>, expected: usize) -> Outcome {
    let mut recorder = Recorder::default();
    let mut sums = [0u64; 2];
    for (side, threads) in [senders, receivers].into_iter().enumerate() {
        for _ in threads.len()..expected {
            recorder.failure(&Failure::Malformed("a connection never reached the sink"));
        }
        for thread in threads {
            match thread.join() {
                Ok(Ok(bytes)) => sums[side] += bytes,
                Ok(Err(failure)) => recorder.failure(&failure),
                Err(_) => recorder.failure(&Failure::Malformed("a thread broke")),
            }
        }
    }
    if sums[0] != sums[1] {
        recorder.failure(&Failure::Malformed("the sink got another number of bytes than were sent"));
    }
    let outcome = recorder.outcome();
    Outcome { completed: (expected as u64).saturating_sub(outcome.failed), ..outcome }
}

//! A voice-like stream over a relay beside the same stream over UDP, at the same time (HTTP-RS, Figure 7b).
//!
//! In: two clients, the relay between them, an address of the receiver. Out: the gaps between arrivals at the receiver, and what was
//! lost. Never: a stream that waits for the other one.

use std::io::Write as _;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::Result;
use hermes_testkit::netns::Namespace;
use serde::Serialize;

use super::client::{Publication, TIMEOUT, await_bytes, connect, ended, ending, subscribe};
use crate::pep::mean_and_median;

/// The stream of a G.711 client: a packet of 160 bytes every 20 ms.
const BYTES: usize = 160;
const INTERVAL: Duration = Duration::from_millis(20);
/// The gaps that count as regular, in milliseconds.
const REGULAR: std::ops::RangeInclusive<f64> = 10.0..=30.0;
const CHANNEL: &str = "/voice";

/// How a stream arrived.
#[derive(Debug, Serialize)]
pub(super) struct Stream {
    over: &'static str,
    sent: usize,
    lost: usize,
    /// Gaps shorter than 10 ms or longer than 30 ms.
    irregular: usize,
    median_gap_ms: f64,
    /// The 99th percentile of the difference from 20 ms.
    jitter_ms: f64,
    longest_gap_ms: f64,
}

impl Stream {
    fn new(over: &'static str, sent: usize, arrivals: &[Instant]) -> Self {
        let gaps: Vec<f64> = arrivals.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect();
        let interval = INTERVAL.as_secs_f64() * 1e3;
        let mut differences: Vec<f64> = gaps.iter().map(|gap| (gap - interval).abs()).collect();
        differences.sort_by(f64::total_cmp);
        Self {
            over,
            sent,
            lost: sent - arrivals.len(),
            irregular: gaps.iter().filter(|gap| !REGULAR.contains(gap)).count(),
            median_gap_ms: mean_and_median(&gaps).1,
            jitter_ms: differences.get(differences.len() * 99 / 100).copied().unwrap_or_default(),
            longest_gap_ms: gaps.iter().copied().fold(0.0, f64::max),
        }
    }
}

/// Sends a packet at each interval.
#[expect(clippy::disallowed_methods, reason = "the thread has nothing else to do")]
fn pace(count: usize, mut send: impl FnMut(usize) -> Result<()>) -> Result<()> {
    let begun = Instant::now();
    for number in 0..count {
        let due = INTERVAL * u32::try_from(number)?;
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
        send(number)?;
    }
    Ok(())
}

/// Sends both streams for some seconds. The relay has an address for each of the two clients.
pub(super) fn measure(
    sender: &Namespace,
    receiver: &Namespace,
    relay: [SocketAddr; 2],
    direct: SocketAddr,
    seconds: u64,
) -> Result<[Stream; 2]> {
    let count = usize::try_from(seconds * 1000 / u64::try_from(INTERVAL.as_millis())?)?;
    let (ready, is_ready) = std::sync::mpsc::channel();
    let (by_relay_ready, by_udp_ready) = (ready.clone(), ready);
    let by_relay = receiver.spawn_thread(move || -> Result<_> {
        let mut stream = subscribe(relay[1], CHANNEL)?;
        by_relay_ready.send(())?;
        let (mut buffer, mut arrivals) = (Vec::new(), Vec::new());
        for number in 0..count {
            await_bytes(&mut stream, &mut buffer, &ending(number))?;
            arrivals.push(Instant::now());
        }
        Ok(arrivals)
    })?;
    let by_udp = receiver.spawn_thread(move || -> Result<_> {
        let socket = UdpSocket::bind(direct)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        by_udp_ready.send(())?;
        let mut packet = [0; BYTES];
        socket.recv(&mut packet)?;
        let mut arrivals = vec![Instant::now()];
        // Later packets do not come: the others are lost.
        socket.set_read_timeout(Some(Duration::from_secs(2)))?;
        while arrivals.len() < count && socket.recv(&mut packet).is_ok() {
            arrivals.push(Instant::now());
        }
        Ok(arrivals)
    })?;
    is_ready.recv_timeout(TIMEOUT)?;
    is_ready.recv_timeout(TIMEOUT)?;
    let to_relay = sender.spawn_thread(move || -> Result<_> {
        let mut stream = connect(relay[0])?;
        let mut publication = Publication::new(CHANNEL, "realtime", BYTES);
        let mut responses = Vec::new();
        pace(count, |number| {
            stream.write_all(publication.numbered(number))?;
            await_bytes(&mut stream, &mut responses, b"\r\n\r\n")
        })
    })?;
    let to_udp = sender.spawn_thread(move || -> Result<_> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        pace(count, |_| Ok(socket.send_to(&[b'x'; BYTES], direct).map(drop)?))
    })?;
    ended(to_relay)?;
    ended(to_udp)?;
    Ok([Stream::new("hermes", count, &ended(by_relay)?), Stream::new("udp", count, &ended(by_udp)?)])
}

pub(super) fn print(streams: &[Stream]) {
    println!("voice   sent  lost  irregular gaps  median gap ms  jitter ms (p99)  longest gap ms");
    for Stream { over, sent, lost, irregular, median_gap_ms, jitter_ms, longest_gap_ms } in streams {
        println!(
            "{over:7} {sent:4} {lost:5} {irregular:15} {median_gap_ms:14.2} {jitter_ms:16.2} {longest_gap_ms:15.2}"
        );
    }
}

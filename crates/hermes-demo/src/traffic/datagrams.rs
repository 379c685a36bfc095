//! UDP: a program that sends datagrams to an address of the laptop.
//!
//! In: the laptop's UDP listener. Out: datagrams that all came back, first one by one, then many in flight at once. UDP
//! guarantees no delivery. But on one machine, with no more in flight than any buffer on the path holds, a lost
//! datagram is a bug: it fails the demo.

use std::collections::HashMap;
use std::net::SocketAddr;

use anyhow::{Context, ensure};
use bytes::Bytes;
use tokio::net::UdpSocket;
use tokio::time::{Instant, timeout};

use super::Tally;
use crate::client::RESPONSE_TIMEOUT;
use crate::content::content;
use crate::ports::loopback;

/// The number of datagrams sent one by one.
const ALONE: u64 = 150;
/// The number of datagrams sent afterwards with a window.
const WINDOWED_DATAGRAMS: u64 = 1000;
/// Datagrams in flight at once, of each client: all of them fit into the smallest buffer on the path.
const WINDOW: usize = 8;
const BYTES: usize = 1200;

/// Sends datagrams and compares what comes back.
pub(super) async fn echo(call: SocketAddr, number: u64) -> anyhow::Result<Tally> {
    let socket = UdpSocket::bind(loopback(0)).await?;
    socket.connect(call).await?;
    let mut tally = Tally::default();
    let first = number * (ALONE + WINDOWED_DATAGRAMS);
    for seed in first..first + ALONE {
        let begun = Instant::now();
        rally(&socket, seed..seed + 1, &mut tally).await?;
        tally.times.push(begun.elapsed());
    }
    rally(&socket, first + ALONE..first + ALONE + WINDOWED_DATAGRAMS, &mut tally).await?;
    Ok(tally)
}

/// Keeps a window of datagrams in flight until each came back once.
async fn rally(socket: &UdpSocket, mut seeds: std::ops::Range<u64>, tally: &mut Tally) -> anyhow::Result<()> {
    let mut under_way: HashMap<u64, Bytes> = HashMap::new();
    let mut room = [0; BYTES + 1];
    loop {
        while under_way.len() < WINDOW {
            let Some(seed) = seeds.next() else { break };
            let datagram = numbered(seed);
            socket.send(&datagram).await?;
            under_way.insert(seed, datagram);
        }
        if under_way.is_empty() {
            return Ok(());
        }
        let received = timeout(RESPONSE_TIMEOUT, socket.recv(&mut room)).await;
        let received = received.with_context(|| format!("{} datagrams did not come back", under_way.len()))??;
        let came = &room[..received];
        let known = came.first_chunk().and_then(|number| under_way.remove(&u64::from_be_bytes(*number)));
        ensure!(known.is_some_and(|sent| sent == came), "a datagram came back changed, or twice");
        tally.add(2 * BYTES);
    }
}

fn numbered(seed: u64) -> Bytes {
    [&seed.to_be_bytes()[..], &content(seed, BYTES - 8)].concat().into()
}

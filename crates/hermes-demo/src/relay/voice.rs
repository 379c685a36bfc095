//! The voice-like stream: 50 packets of 160 bytes a second, as G.711 sends them.
//!
//! In: the nodes, and a length. Out: the delay of each packet from hall to yard, over the relays and, in the same seconds,
//! over UDP on loopback. A packet has its number; sender and receiver are one process, so their clock is one.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use hermes_relay_client::{Client, ClientOptions, Event, PublishOptions, SubscribeOptions};
use serde::Serialize;
use tokio::net::UdpSocket;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::nodes::Tree;
use crate::ports::loopback;

const PACKET: usize = 160;
const INTERVAL: Duration = Duration::from_millis(20);
/// The wait for the last packet.
const LAST_PACKET_TIMEOUT: Duration = Duration::from_secs(5);

/// The packets of a way.
#[derive(Debug, Default, Serialize)]
pub(super) struct Stream {
    pub(super) sent: usize,
    /// Milliseconds from the sending to the arrival, by packet; `None` if it did not arrive.
    pub(super) delay_ms: Vec<Option<f64>>,
    /// Milliseconds between the arrivals of two packets.
    pub(super) gap_ms: Vec<f64>,
}

/// Both ways.
#[derive(Debug, Serialize)]
pub(super) struct Voice {
    pub(super) relay: Stream,
    pub(super) udp: Stream,
}

/// The number and time of each arrival.
type Arrivals = Vec<(usize, Instant)>;

impl Stream {
    fn new(sent: &[Instant], arrivals: &Arrivals) -> Self {
        let mut delay_ms = vec![None; sent.len()];
        for (number, at) in arrivals {
            if let (Some(sent), Some(delay)) = (sent.get(*number), delay_ms.get_mut(*number)) {
                *delay = Some((*at - *sent).as_secs_f64() * 1e3);
            }
        }
        let gaps = arrivals.windows(2).map(|pair| (pair[1].1 - pair[0].1).as_secs_f64() * 1e3);
        Self { sent: sent.len(), delay_ms, gap_ms: gaps.collect() }
    }
}

fn packet(number: usize) -> Bytes {
    let mut packet = vec![0; PACKET];
    packet[..8].copy_from_slice(&(number as u64).to_be_bytes());
    packet.into()
}

fn number(packet: &[u8]) -> Option<usize> {
    usize::try_from(u64::from_be_bytes(*packet.first_chunk()?)).ok()
}

/// Sends a packet every 20 ms, and returns the times.
async fn pace<F: Future<Output = anyhow::Result<()>>>(
    count: usize,
    mut send: impl FnMut(Bytes) -> F,
) -> anyhow::Result<Vec<Instant>> {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut sent = Vec::with_capacity(count);
    for number in 0..count {
        ticks.tick().await;
        sent.push(Instant::now());
        send(packet(number)).await?;
    }
    Ok(sent)
}

async fn over_relays(tree: &Tree, count: usize) -> anyhow::Result<Stream> {
    let url: http::Uri = Tree::channel("voice").parse()?;
    let at = |node: std::net::SocketAddr| -> anyhow::Result<Arc<Client>> {
        let options = ClientOptions { proxy: Some(format!("http://{node}").parse()?), ..ClientOptions::default() };
        Ok(Client::new(url.clone(), options)?)
    };
    let (near, far) = (at(tree.hall())?, at(tree.yard())?);
    let mut subscriber = far.subscribe(&SubscribeOptions::default()).await?;
    let options = PublishOptions { is_reliable: Some(false), ..PublishOptions::default() };
    let publisher = tokio::sync::Mutex::new(near.publisher(options));
    let sending = pace(count, |packet| async {
        publisher.lock().await.publish(packet).await?;
        Ok(())
    });
    let receiving = async {
        let mut arrivals = Arrivals::new();
        while arrivals.len() < count {
            let Ok(event) = tokio::time::timeout(LAST_PACKET_TIMEOUT, subscriber.next()).await else { break };
            match event? {
                Some(Event::Publication { body, .. }) => {
                    arrivals.push((number(&body).context("a packet without a number")?, Instant::now()));
                }
                Some(Event::Unreadable { .. } | Event::Missed { .. }) => {}
                None => break,
            }
        }
        anyhow::Ok(arrivals)
    };
    let (sent, arrivals) = tokio::try_join!(sending, receiving)?;
    let is_in_order = arrivals.windows(2).all(|pair| pair[0].0 < pair[1].0);
    ensure!(is_in_order, "packets arrived twice or out of order");
    Ok(Stream::new(&sent, &arrivals))
}

async fn over_udp(count: usize) -> anyhow::Result<Stream> {
    let (near, far) = (UdpSocket::bind(loopback(0)).await?, UdpSocket::bind(loopback(0)).await?);
    near.connect(far.local_addr()?).await?;
    let sending = pace(count, |packet| {
        let near = &near;
        async move { near.send(&packet).await.map(drop).context("UDP on loopback") }
    });
    let receiving = async {
        let (mut arrivals, mut buffer) = (Arrivals::new(), [0; 2 * PACKET]);
        while arrivals.len() < count {
            let Ok(received) = tokio::time::timeout(LAST_PACKET_TIMEOUT, far.recv(&mut buffer)).await else { break };
            arrivals.push((number(&buffer[..received?]).context("a packet without a number")?, Instant::now()));
        }
        anyhow::Ok(arrivals)
    };
    let (sent, arrivals) = tokio::try_join!(sending, receiving)?;
    Ok(Stream::new(&sent, &arrivals))
}

/// Sends the stream on both ways at the same time.
///
/// # Errors
/// A node refuses it, or packets arrive out of order.
pub(super) async fn play(tree: &Tree, length: Duration) -> anyhow::Result<Voice> {
    let count = (length.as_millis() / INTERVAL.as_millis()) as usize;
    let (relay, udp) = tokio::try_join!(over_relays(tree, count), over_udp(count))?;
    Ok(Voice { relay, udp })
}

//! The producers of the case, one for each replica.
//!
//! In: Interests over UDP and TCP. Out: Data of any file, `/NAMESPACE/BYTES/NONCE`, always fresh and signed by digest.
//! Each producer has other bytes, so that a consumer knows who answered. They end with the value.

use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use hermes_ndn::framing::PacketSplitter;
use hermes_ndn::lp::LpPacket;
use hermes_ndn::packet::Packet;
use hermes_ndn::publish::{PublishedContent, content_name};
use hermes_ndn::signature::Signer;
use hermes_ndn::{MAX_FRAME, Name};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::task::JoinSet;

use super::lab::{Lab, REPLICAS, producer};
use super::way::SIZES;
use crate::origins;

/// The version of all files. Consumers know it, so that no discovery takes a round trip.
pub(super) const VERSION: u64 = 1;
const FRESHNESS: Duration = Duration::from_secs(1);
const BUFFER: usize = 64 << 10;

/// The bytes of all files: each producer begins at another position.
#[derive(Debug, Clone)]
pub(super) struct Contents(Bytes);

impl Contents {
    pub(super) fn new() -> Self {
        let longest = SIZES.iter().copied().max().unwrap_or_default() + REPLICAS;
        Self((0..longest).map(|at| (at * 31 % 251) as u8).collect::<Vec<_>>().into())
    }

    /// The bytes of a file of one producer. A longer file than the longest has the bytes of that.
    pub(super) fn of(&self, replica: usize, size: usize) -> Bytes {
        self.0.slice(replica..(replica + size).min(self.0.len()))
    }

    fn answer(&self, replica: usize, frame: Bytes) -> Option<Bytes> {
        let frame = LpPacket::decode(frame).ok()?;
        let Ok(Packet::Interest(interest)) = Packet::decode(frame.fragment?) else { return None };
        let name: Name = content_name(&interest.name);
        let size = name.components().nth(1)?;
        let size: usize = std::str::from_utf8(&size.value()).ok()?.parse().ok()?;
        let content = PublishedContent::new(name, VERSION, self.of(replica, size))?;
        let data = content.answer(&interest, FRESHNESS, &Signer::digest()).ok()??;
        Some(LpPacket { pit_token: frame.pit_token, ..LpPacket::bare(data) }.encode())
    }
}

/// Starts all producers on the server.
///
/// # Errors
/// A port is taken.
pub(super) fn start(lab: &Lab, contents: &Contents) -> anyhow::Result<JoinSet<()>> {
    let mut tasks = JoinSet::new();
    for replica in 0..REPLICAS {
        let address = producer(replica);
        let failed = || format!("a producer at {address}");
        let socket = lab.server().udp(address).with_context(failed)?;
        let listener = lab.server().listen(address).with_context(failed)?;
        tasks.spawn(serve_datagrams(socket, contents.clone(), replica));
        let contents = contents.clone();
        tasks.spawn(origins::accept(listener, move |stream| serve_stream(stream, contents.clone(), replica)));
    }
    Ok(tasks)
}

async fn serve_datagrams(socket: UdpSocket, contents: Contents, replica: usize) {
    let mut buffer = vec![0; BUFFER];
    loop {
        // An error here refers to an earlier datagram, whose sender has closed its socket.
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else { continue };
        let Some(received) = buffer.get(..length) else { continue };
        if let Some(data) = contents.answer(replica, Bytes::copy_from_slice(received)) {
            let _ = socket.send_to(&data, from).await;
        }
    }
}

async fn serve_stream(mut stream: TcpStream, contents: Contents, replica: usize) {
    let mut splitter = PacketSplitter::new(MAX_FRAME);
    let mut buffer = vec![0; BUFFER];
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        splitter.push(buffer.get(..length).unwrap_or_default());
        while let Ok(Some(packet)) = splitter.next_packet() {
            let Some(data) = contents.answer(replica, packet) else { continue };
            if stream.write_all(&data).await.is_err() {
                return;
            }
        }
    }
}

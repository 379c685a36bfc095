//! The consumer of the case: fetches files over one face.
//!
//! In: an address, the name and the size of a file. Out: seconds, and Interests that were sent again. Never: a byte that
//! is not compared, or a segment whose digest is wrong.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bytes::Bytes;
use hermes_ndn::fetch::{Fetch, FetchLimits};
use hermes_ndn::framing::PacketSplitter;
use hermes_ndn::lp::LpPacket;
use hermes_ndn::name::types;
use hermes_ndn::packet::{Data, Interest};
use hermes_ndn::signature::digest_matches;
use hermes_ndn::{Component, MAX_FRAME, Name};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

use super::producer::VERSION;
use super::way::PIPELINE;
use crate::namespace::Namespace;

const BUFFER: usize = 64 << 10;

/// A face, and the number of files that were fetched over it.
pub(super) struct Consumer {
    face: Face,
    buffer: Vec<u8>,
}

enum Face {
    Udp(UdpSocket),
    Tcp(TcpStream, PacketSplitter),
}

/// A completed fetch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fetched {
    pub(super) seconds: f64,
    /// Interests that were sent again.
    pub(super) repeated: u64,
}

impl Consumer {
    /// Opens a UDP face.
    ///
    /// # Errors
    /// No socket is left.
    pub(super) async fn udp(place: &Namespace, to: SocketAddr) -> anyhow::Result<Self> {
        let socket = place.udp((std::net::Ipv4Addr::UNSPECIFIED, 0).into())?;
        socket.connect(to).await?;
        Ok(Self { face: Face::Udp(socket), buffer: vec![0; BUFFER] })
    }

    /// Opens a TCP face.
    ///
    /// # Errors
    /// Nobody listens.
    pub(super) async fn tcp(place: &Namespace, to: SocketAddr) -> anyhow::Result<Self> {
        let stream = place.tcp()?.connect(to).await.with_context(|| format!("cannot connect to {to}"))?;
        Ok(Self { face: Face::Tcp(stream, PacketSplitter::new(MAX_FRAME)), buffer: vec![0; BUFFER] })
    }

    /// Fetches a file and compares it.
    ///
    /// # Errors
    /// The content does not arrive, or is not what was expected.
    pub(super) async fn fetch(&mut self, name: &Name, expected: &[u8]) -> anyhow::Result<Fetched> {
        // The paper has a pipeline of one for the empty file.
        let max_window = if expected.is_empty() { 1 } else { PIPELINE };
        let limits = FetchLimits { max_window, ..FetchLimits::default() };
        let versioned = name.child(&Component::numbered(types::VERSION, VERSION));
        let begun = Instant::now();
        let mut fetch = Fetch::new(versioned, limits, rand::random());
        let (mut sent, mut segments, mut rest) = (0u64, 0u64, expected);
        while !fetch.is_complete() {
            while let Some(interest) = fetch.next_interest(begun.elapsed()) {
                self.face.send(&interest).await?;
                sent += 1;
            }
            let now = begun.elapsed();
            let timeout = fetch.next_timeout().unwrap_or(now).saturating_sub(now);
            let Some(packet) = self.face.receive(timeout, &mut self.buffer).await? else {
                fetch.handle_timeout(begun.elapsed())?;
                continue;
            };
            let frame = LpPacket::decode(packet)?;
            ensure!(frame.nack.is_none(), "an Interest for {name} came back: {:?}", frame.nack);
            let Some(fragment) = frame.fragment else { continue };
            let data = Data::decode(fragment)?;
            ensure!(digest_matches(&data.signature), "{} has another digest", data.name);
            fetch.take_data(data, frame.congestion.is_some(), begun.elapsed())?;
            while let Some(content) = fetch.next_content() {
                let (head, tail) = rest.split_at_checked(content.len()).context("more bytes than the file has")?;
                ensure!(content == head, "{name} has other bytes: another replica has answered");
                rest = tail;
                segments += 1;
            }
        }
        ensure!(rest.is_empty(), "{} bytes of {name} are missing", rest.len());
        Ok(Fetched { seconds: begun.elapsed().as_secs_f64(), repeated: sent - segments })
    }
}

impl Face {
    async fn send(&mut self, interest: &Interest) -> anyhow::Result<()> {
        let packet = interest.encode();
        match self {
            Self::Udp(socket) => drop(socket.send(&packet).await?),
            Self::Tcp(stream, _) => stream.write_all(&packet).await?,
        }
        Ok(())
    }

    /// Waits for a packet; `None` if none comes in time.
    async fn receive(&mut self, timeout: Duration, buffer: &mut [u8]) -> anyhow::Result<Option<Bytes>> {
        match self {
            Self::Udp(socket) => {
                let Ok(received) = tokio::time::timeout(timeout, socket.recv(buffer)).await else { return Ok(None) };
                Ok(buffer.get(..received?).map(Bytes::copy_from_slice))
            }
            Self::Tcp(stream, splitter) => {
                if let Some(packet) = splitter.next_packet()? {
                    return Ok(Some(packet));
                }
                let Ok(received) = tokio::time::timeout(timeout, stream.read(buffer)).await else { return Ok(None) };
                let length = received?;
                ensure!(length > 0, "the face has closed");
                splitter.push(buffer.get(..length).unwrap_or_default());
                Ok(splitter.next_packet()?)
            }
        }
    }
}

//! The transports of a face: datagrams, or a stream.
//!
//! In: a socket, and queues of packets in both directions. Out: frames of NDNLPv2. Over datagrams, a packet that does
//! not fit the path is fragmented, and fragments are joined. A neighbour that asks for acknowledgements gets them.
//! Never: a meaning of a name.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_ndn::MAX_FRAME;
use hermes_ndn::framing::PacketSplitter;
use hermes_ndn::lp::{Fragmenter, LpPacket, Reassembler, ReassemblyLimits};
use hermes_ndn::tlv::NdnError;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

/// Bytes of one read from a stream.
const READ_BYTES: usize = 64 << 10;

/// The frames of a face over datagrams.
pub struct FrameJoiner {
    reassembler: Reassembler,
}

/// The contents of a received datagram.
pub struct ReceivedFrame {
    /// A whole packet with the fields of the network layer.
    pub packet: Option<LpPacket>,
    /// The frame to answer with, because the neighbour asked for an acknowledgement.
    pub answer: Option<Bytes>,
}

impl Default for FrameJoiner {
    fn default() -> Self {
        Self::new()
    }
}

impl FrameJoiner {
    /// Returns a joiner without fragments.
    pub fn new() -> Self {
        Self { reassembler: Reassembler::new(ReassemblyLimits::default()) }
    }

    /// Takes a datagram. `now` is the time since any fixed moment.
    ///
    /// # Errors
    /// The datagram is no frame.
    pub fn take(&mut self, datagram: Bytes, now: Duration) -> Result<ReceivedFrame, NdnError> {
        let mut frame = LpPacket::decode(datagram)?;
        let tx_sequence = frame.tx_sequence.take();
        let answer = tx_sequence.map(|number| LpPacket { acks: vec![number], ..LpPacket::default() }.encode());
        frame.acks.clear();
        let packet = self.reassembler.take(frame, now).filter(|whole| whole.fragment.is_some());
        Ok(ReceivedFrame { packet: packet.map(|whole| LpPacket { sequence: None, ..whole }), answer })
    }
}

/// Splits packets into frames of at most `mtu` bytes.
pub fn frames(fragmenter: &mut Fragmenter, packet: Bytes, mtu: usize) -> Vec<Bytes> {
    if packet.len() <= mtu {
        return vec![packet];
    }
    let frame = LpPacket::decode(packet);
    frame.ok().and_then(|frame| fragmenter.split(&frame, mtu)).unwrap_or_default()
}

/// Reads packets from a stream until it ends, and gives each to `deliver`, which waits while there is no room.
pub async fn read_packets(
    stream: &mut (impl AsyncRead + Unpin),
    mut deliver: impl AsyncFnMut(Bytes),
) -> io::Result<()> {
    let mut splitter = PacketSplitter::new(MAX_FRAME);
    let mut buffer = BytesMut::with_capacity(READ_BYTES);
    loop {
        buffer.clear();
        if stream.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
        splitter.push(&buffer);
        let malformed = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        while let Some(packet) = splitter.next_packet().map_err(malformed)? {
            deliver(packet).await;
        }
    }
}

/// Writes packets to a stream until the queue ends. Packets that wait together leave together.
pub async fn write_packets(
    stream: &mut (impl AsyncWrite + Unpin),
    queue: &mut mpsc::Receiver<Bytes>,
) -> io::Result<()> {
    let mut packets = Vec::new();
    while queue.recv_many(&mut packets, super::packet_stream::QUEUE_PACKETS).await > 0 {
        match packets.as_slice() {
            [only] => stream.write_all(only).await?,
            many => stream.write_all(&many.concat()).await?,
        }
        packets.clear();
        stream.flush().await?;
    }
    Ok(())
}

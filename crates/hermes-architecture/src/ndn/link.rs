//! The transports of a face: datagrams, or a stream.
//!
//! In: a socket, and queues of packets in both directions. Out: frames of NDNLPv2. Over datagrams, a packet that does
//! not fit the path is fragmented, and fragments are joined. A neighbour that asks for acknowledgements gets them, and
//! frames that it does not acknowledge are sent again.
//! Never: a meaning of a name.

use std::cell::RefCell;
use std::io;

use bytes::{Bytes, BytesMut};
use hermes_ndn::MAX_FRAME;
use hermes_ndn::framing::PacketSplitter;
use hermes_ndn::lp::{Fragmenter, LpPacket, NUMBER_OVERHEAD, Reassembler, ReassemblyLimits, Retransmitter};
use hermes_ndn::tlv::NdnError;
use hermes_outbound::outbound::Outbound;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Bytes of one read from a stream.
const READ_BYTES: usize = 64 << 10;

/// The frames of a face over datagrams, in both directions.
pub struct DatagramLink {
    reassembler: Reassembler,
    fragmenter: Fragmenter,
    /// `None`: frames are not numbered for acknowledgement.
    retransmitter: Option<Retransmitter>,
    /// The longest frame, in bytes.
    mtu: usize,
    began: Instant,
}

/// The contents of a received datagram.
pub struct ReceivedFrame {
    /// A whole packet with the fields of the network layer.
    pub packet: Option<LpPacket>,
    /// Frames to send: an acknowledgement that the neighbour asked for, and frames that it has not acknowledged.
    pub answers: Vec<Bytes>,
}

impl DatagramLink {
    /// Returns a link whose frames have at most `mtu` bytes. `first` is a random number.
    pub fn new(mtu: usize, is_reliable: bool, first: u64) -> Self {
        Self {
            reassembler: Reassembler::new(ReassemblyLimits::default()),
            fragmenter: Fragmenter::new(first),
            retransmitter: is_reliable.then(|| Retransmitter::new(first)),
            mtu,
            began: Instant::now(),
        }
    }

    /// Takes a datagram. A neighbour that numbers its frames gets numbered frames, too.
    ///
    /// # Errors
    /// The datagram is no frame.
    pub fn take(&mut self, datagram: Bytes) -> Result<ReceivedFrame, NdnError> {
        let mut frame = LpPacket::decode(datagram)?;
        let now = self.began.elapsed();
        let mut answers = Vec::new();
        if let Some(number) = frame.tx_sequence.take() {
            answers.push(LpPacket { acks: vec![number], ..LpPacket::default() }.encode());
            self.retransmitter.get_or_insert_with(|| Retransmitter::new(number));
        }
        let acks = std::mem::take(&mut frame.acks);
        if let Some(retransmitter) = &mut self.retransmitter {
            answers.extend(retransmitter.take_acks(&acks, now));
        }
        let packet = self.reassembler.take(frame, now).filter(|whole| whole.fragment.is_some());
        Ok(ReceivedFrame { packet: packet.map(|whole| LpPacket { sequence: None, ..whole }), answers })
    }

    /// Returns the frames of a packet.
    pub fn frames(&mut self, packet: Bytes) -> Vec<Bytes> {
        if self.retransmitter.is_none() && packet.len() <= self.mtu {
            return vec![packet];
        }
        let Ok(frame) = LpPacket::decode(packet.clone()) else { return Vec::new() };
        // Answers of `take` are frames already.
        if frame.fragment.is_none() || frame.tx_sequence.is_some() {
            return vec![packet];
        }
        let Some(retransmitter) = &mut self.retransmitter else {
            return self.fragmenter.split(&frame, self.mtu).unwrap_or_default();
        };
        let parts = self.fragmenter.parts(&frame, self.mtu.saturating_sub(NUMBER_OVERHEAD)).unwrap_or_default();
        let now = self.began.elapsed();
        parts.into_iter().map(|part| retransmitter.send(part, now)).collect()
    }

    /// The time at which frames may have to be sent again; `None` if none waits for an acknowledgement.
    pub fn next_timeout(&self) -> Option<Instant> {
        Some(self.began + self.retransmitter.as_ref()?.next_timeout()?)
    }

    /// Returns the frames to send again.
    pub fn handle_timeout(&mut self) -> Vec<Bytes> {
        let now = self.began.elapsed();
        self.retransmitter.as_mut().map_or_else(Vec::new, |retransmitter| retransmitter.handle_timeout(now))
    }
}

/// Counts the frames of a link that were lost in spite of all repetitions.
pub fn count_lost(worker: &Outbound, link: &RefCell<DatagramLink>) {
    if let Some(retransmitter) = &mut link.borrow_mut().retransmitter {
        let lost = std::mem::take(&mut retransmitter.counters.lost);
        if lost > 0 {
            worker.shared.metrics.dropped("ndn-unacknowledged", lost);
        }
    }
}

/// Waits for the next packet of a link, which `mark` may change, and returns its frames, or frames to send again. `None`:
/// the queue has ended.
pub async fn next_frames(
    link: &RefCell<DatagramLink>,
    packets: &mut mpsc::Receiver<Bytes>,
    mark: impl FnOnce(Bytes) -> Bytes,
) -> Option<Vec<Bytes>> {
    let timeout = link.borrow().next_timeout();
    let late = async {
        match timeout {
            Some(timeout) => tokio::time::sleep_until(timeout).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        packet = packets.recv() => {
            let packet = mark(packet?);
            Some(link.borrow_mut().frames(packet))
        }
        () = late => Some(link.borrow_mut().handle_timeout()),
    }
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

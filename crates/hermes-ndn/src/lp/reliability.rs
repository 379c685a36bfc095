//! Acknowledgements and retransmission on a link (NDNLPv2, section "Reliability").
//!
//! In: frames to send, received frames, and the current time. Out: encoded frames with TxSequence and Acks,
//! retransmissions, and IDLE packets with Acks. Every queue is bounded. A packet is dropped after the configured number
//! of retransmissions of one of its frames, and counted. The order of packets is not preserved.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use smallvec::SmallVec;

use super::rtt::RttEstimator;
use super::{LpPacket, SEQUENCE_FIELD};

/// A frame is lost after this number of Acks for later frames, as in TCP (RFC 5681, section 3.2).
const LOSS_THRESHOLD: u8 = 3;

/// The settings of [`Reliability`].
#[derive(Debug, Clone, Copy)]
pub struct ReliabilityConfig {
    /// The maximum number of frames that wait for an Ack.
    pub max_unacked: usize,
    /// The maximum number of Acks that wait for a frame, and of received Sequences that are remembered.
    pub max_received: usize,
    /// The maximum number of retransmissions of a frame.
    pub max_retries: u8,
    /// The retransmission timeout before the first round-trip time is known (RFC 6298, section 2.1).
    pub initial_rto: Duration,
    /// The minimum retransmission timeout.
    pub min_rto: Duration,
    /// The maximum retransmission timeout.
    pub max_rto: Duration,
    /// The time until Acks are sent in an IDLE packet.
    pub ack_delay: Duration,
}

impl Default for ReliabilityConfig {
    fn default() -> Self {
        Self {
            max_unacked: 4096,
            max_received: 4096,
            max_retries: 3,
            initial_rto: Duration::from_secs(1),
            min_rto: Duration::from_millis(200),
            max_rto: Duration::from_secs(10),
            ack_delay: Duration::from_millis(5),
        }
    }
}

/// Counts of what [`Reliability`] has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReliabilityStats {
    /// Frames that the peer acknowledged.
    pub acked: u64,
    /// Frames that were sent again.
    pub retransmitted: u64,
    /// Packets that were dropped after the maximum number of retransmissions.
    pub given_up: u64,
    /// Frames that were sent without TxSequence because too many frames wait for an Ack.
    pub unprotected: u64,
    /// Received frames whose Sequence had been received before.
    pub duplicate: u64,
    /// Acks that were dropped because too many wait for a frame.
    pub acks_dropped: u64,
}

/// The two sides of a reliable link to one peer.
#[derive(Debug)]
pub struct Reliability {
    config: ReliabilityConfig,
    rtt: RttEstimator,
    /// The first TxSequence. Keys are distances to it, so that their order survives the wrap of TxSequence.
    first: u64,
    next_key: u64,
    next_packet: u64,
    /// Frames that wait for an Ack, by key.
    unacked: BTreeMap<u64, Unacked>,
    /// Retransmission deadlines and keys.
    deadlines: BTreeSet<(Duration, u64)>,
    /// Lost frames in the order of their retransmission.
    lost: VecDeque<Unacked>,
    /// TxSequences to acknowledge.
    acks: VecDeque<u64>,
    /// The time at which an IDLE packet must carry the Acks.
    ack_deadline: Option<Duration>,
    /// Sequences of received frames, and their order of arrival.
    received: (HashSet<u64>, VecDeque<u64>),
    stats: ReliabilityStats,
}

#[derive(Debug)]
struct Unacked {
    frame: LpPacket,
    /// The network-layer packet to which the frame belongs.
    packet: u64,
    sent: Duration,
    deadline: Duration,
    retries: u8,
    /// The number of Acks for later frames.
    later_acks: u8,
}

impl Reliability {
    /// The number of bytes that the fragmenter must reserve in each numbered frame: TxSequence, and a longer form of the
    /// frame's length.
    pub const RESERVE: usize = SEQUENCE_FIELD + 2;

    /// A reliable link whose first TxSequence is `first`, which should be random.
    pub fn new(config: ReliabilityConfig, first: u64) -> Self {
        Self {
            config,
            rtt: RttEstimator::new(config.initial_rto, config.min_rto, config.max_rto),
            first,
            next_key: 0,
            next_packet: 0,
            unacked: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            lost: VecDeque::new(),
            acks: VecDeque::new(),
            ack_deadline: None,
            received: (HashSet::new(), VecDeque::new()),
            stats: ReliabilityStats::default(),
        }
    }

    /// Encodes the frames of one packet, and remembers them until they are acknowledged. Frames should have a Sequence
    /// (`numbered` of [`Fragmenter::split`](super::Fragmenter::split)), so that the peer can detect duplicates. Acks
    /// are added while a frame is shorter than `mtu`.
    pub fn send(&mut self, frames: Vec<LpPacket>, mtu: usize, now: Duration) -> Vec<Bytes> {
        let packet = self.next_packet;
        self.next_packet = packet.wrapping_add(1);
        let frames = frames.into_iter().map(|frame| {
            if self.unacked.len() + self.lost.len() >= self.config.max_unacked {
                self.stats.unprotected += 1;
                return self.with_acks(frame, mtu).encode();
            }
            self.transmit(Unacked { frame, packet, sent: now, deadline: now, retries: 0, later_acks: 0 }, mtu, now)
        });
        frames.collect()
    }

    /// Processes the Acks and the TxSequence of a received frame. Returns whether the frame should be processed
    /// further: `false` if its Sequence has been received before.
    pub fn receive(&mut self, frame: &LpPacket, now: Duration) -> bool {
        for ack in &frame.acks {
            self.acknowledge(ack.wrapping_sub(self.first), now);
        }
        let Some(tx_sequence) = frame.tx_sequence else {
            return true;
        };
        self.queue_ack(tx_sequence, now);
        let Some(sequence) = frame.sequence else {
            return true;
        };
        let (set, order) = &mut self.received;
        if !set.insert(sequence) {
            self.stats.duplicate += 1;
            return false;
        }
        order.push_back(sequence);
        if order.len() > self.config.max_received
            && let Some(oldest) = order.pop_front()
        {
            set.remove(&oldest);
        }
        true
    }

    /// Returns the next frame that is due: a retransmission, or an IDLE packet with Acks. Call it until it returns
    /// `None`, after each received frame and at [`next_timeout`](Self::next_timeout).
    pub fn poll(&mut self, mtu: usize, now: Duration) -> Option<Bytes> {
        while let Some((deadline, key)) = self.deadlines.first().copied()
            && deadline <= now
        {
            if let Some(frame) = self.take(key) {
                self.rtt.back_off(frame.sent, now);
                self.lose(frame);
            }
        }
        if let Some(frame) = self.lost.pop_front() {
            self.stats.retransmitted += 1;
            return Some(self.transmit(frame, mtu, now));
        }
        if self.ack_deadline.is_some_and(|deadline| deadline <= now) {
            let idle = self.with_acks(LpPacket::default(), mtu);
            // An MTU without space for an Ack must not make the caller send empty frames forever.
            if idle.acks.is_empty() {
                self.ack_deadline = None;
                return None;
            }
            return Some(idle.encode());
        }
        None
    }

    /// The next time at which [`poll`](Self::poll) returns a frame; 0 if a retransmission is due now.
    pub fn next_timeout(&self) -> Option<Duration> {
        if !self.lost.is_empty() {
            return Some(Duration::ZERO);
        }
        let retransmission = self.deadlines.first().map(|(deadline, _)| *deadline);
        retransmission.into_iter().chain(self.ack_deadline).min()
    }

    /// The current retransmission timeout.
    pub fn rto(&self) -> Duration {
        self.rtt.timeout()
    }

    /// The number of frames that wait for an Ack or for their retransmission.
    pub fn outstanding(&self) -> usize {
        self.unacked.len() + self.lost.len()
    }

    /// The counts so far.
    pub fn stats(&self) -> ReliabilityStats {
        self.stats
    }

    /// Encodes a frame with a new TxSequence, and starts its timer.
    fn transmit(&mut self, mut unacked: Unacked, mtu: usize, now: Duration) -> Bytes {
        let key = self.next_key;
        self.next_key = key.wrapping_add(1);
        unacked.sent = now;
        unacked.deadline = now.saturating_add(self.rtt.timeout());
        unacked.later_acks = 0;
        unacked.frame.tx_sequence = Some(self.first.wrapping_add(key));
        let wire = self.with_acks(unacked.frame.clone(), mtu).encode();
        self.deadlines.insert((unacked.deadline, key));
        self.unacked.insert(key, unacked);
        wire
    }

    /// Adds waiting Acks to a frame while it fits the MTU.
    fn with_acks(&mut self, mut frame: LpPacket, mtu: usize) -> LpPacket {
        // The payload needs three more bytes if the length of the frame needs a longer form.
        let space = mtu.saturating_sub(frame.encoded_len() + 4);
        let count = (space / SEQUENCE_FIELD).min(self.acks.len());
        frame.acks.extend(self.acks.drain(..count));
        if self.acks.is_empty() {
            self.ack_deadline = None;
        }
        frame
    }

    fn queue_ack(&mut self, tx_sequence: u64, now: Duration) {
        if self.acks.len() >= self.config.max_received {
            self.acks.pop_front();
            self.stats.acks_dropped += 1;
        }
        self.acks.push_back(tx_sequence);
        self.ack_deadline.get_or_insert(now.saturating_add(self.config.ack_delay));
    }

    /// Removes an acknowledged frame, and detects earlier frames that are lost. Each frame is counted at most
    /// [`LOSS_THRESHOLD`] times, so that a hostile order of Acks is as cheap as an honest one.
    fn acknowledge(&mut self, key: u64, now: Duration) {
        let Some(frame) = self.take(key) else {
            return;
        };
        self.stats.acked += 1;
        if frame.retries == 0 {
            self.rtt.sample(now.saturating_sub(frame.sent));
        }
        let mut lost: SmallVec<[u64; 8]> = SmallVec::new();
        for (earlier, frame) in self.unacked.range_mut(..key) {
            frame.later_acks += 1;
            if frame.later_acks >= LOSS_THRESHOLD {
                lost.push(*earlier);
            }
        }
        for earlier in lost {
            if let Some(frame) = self.take(earlier) {
                self.lose(frame);
            }
        }
    }

    fn take(&mut self, key: u64) -> Option<Unacked> {
        let frame = self.unacked.remove(&key)?;
        self.deadlines.remove(&(frame.deadline, key));
        Some(frame)
    }

    /// Queues a lost frame for retransmission, or drops its packet after the last attempt.
    fn lose(&mut self, mut frame: Unacked) {
        if frame.retries < self.config.max_retries {
            frame.retries += 1;
            self.lost.push_back(frame);
            return;
        }
        self.stats.given_up += 1;
        let packet = frame.packet;
        // The other frames are useless without this one.
        self.lost.retain(|other| other.packet != packet);
        let others: Vec<u64> =
            self.unacked.iter().filter(|(_, other)| other.packet == packet).map(|(key, _)| *key).collect();
        for key in others {
            self.take(key);
        }
    }
}

//! A tap on an RTP stream: forwards every datagram and records its identity.
//!
//! In: datagrams at an address of a namespace. Out: the same datagrams, at once, to another address; and the sequence
//! number and a hash of each packet, so that two taps can be compared. The optional record file holds the payloads,
//! which for MPEG-TS are the file itself. Never: a datagram delayed, changed or dropped.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use tokio::net::UdpSocket;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::namespace::Namespace;

/// The payload type of MPEG-TS (RFC 3551, 6).
const MPEG_TS: u8 = 33;
/// The maximum number of recorded packets: hours of video. Later ones are forwarded but not counted.
const MAX_RECORDED_PACKETS: usize = 1 << 22;

/// A running tap; ends with this value.
pub(super) struct Tap {
    /// The address of the tap.
    pub(super) address: SocketAddr,
    notes: Arc<Mutex<Notes>>,
    tasks: JoinSet<anyhow::Result<()>>,
}

/// The recorded packets.
#[derive(Debug, Clone, Default)]
pub(super) struct Notes {
    /// A hash of each packet by extended sequence number (RFC 3550, A.1).
    packets: HashMap<u64, u64>,
    highest: Option<u64>,
    last_at: Option<Instant>,
}

/// The difference between two taps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Difference {
    /// Packets at the first tap.
    pub(super) sent: u64,
    /// Packets of the first tap that the second tap recorded.
    pub(super) received: u64,
    /// Packets that both recorded with different content.
    pub(super) altered: u64,
}

impl Tap {
    /// Starts to forward datagrams from `listen`; writes payloads to `record`, if given.
    ///
    /// # Errors
    /// The address is in use, or the record cannot be written.
    pub(super) fn open(
        place: &Namespace,
        listen: SocketAddr,
        to: SocketAddr,
        record: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let socket = place.udp(listen)?;
        let address = socket.local_addr()?;
        let create = |path: &Path| File::create(path).with_context(|| format!("cannot write {}", path.display()));
        let record = record.map(create).transpose()?;
        let notes = Arc::new(Mutex::new(Notes::default()));
        let mut tasks = JoinSet::new();
        tasks.spawn(pass_on(socket, to, record, notes.clone()));
        Ok(Self { address, notes, tasks })
    }

    /// The number of packets so far, and the time of the last one.
    pub(super) fn so_far(&self) -> (usize, Option<Instant>) {
        let notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        (notes.packets.len(), notes.last_at)
    }

    /// Ends the tap and returns its packets.
    ///
    /// # Errors
    /// Returns the error that ended the tap earlier.
    pub(super) async fn close(mut self) -> anyhow::Result<Notes> {
        self.tasks.abort_all();
        while let Some(ended) = self.tasks.join_next().await {
            if let Ok(ended) = ended {
                ended?;
            }
        }
        Ok(std::mem::take(&mut *self.notes.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

async fn pass_on(
    socket: UdpSocket,
    to: SocketAddr,
    mut record: Option<File>,
    notes: Arc<Mutex<Notes>>,
) -> anyhow::Result<()> {
    let mut room = vec![0; 65_535];
    loop {
        // An error refers to an earlier datagram, sent before the receiver listened.
        let Ok(length) = socket.recv(&mut room).await else { continue };
        let datagram = &room[..length];
        let _ = socket.send_to(datagram, to).await;
        let Some(packet) = Packet::read(datagram) else { continue };
        notes.lock().unwrap_or_else(PoisonError::into_inner).add(packet.sequence, datagram);
        if let Some(file) = &mut record {
            // Writes of about a kilobyte go to the page cache and do not block.
            file.write_all(packet.payload)?;
        }
    }
}

/// An RTP packet of MPEG-TS.
struct Packet<'a> {
    sequence: u16,
    payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Parses RFC 3550's fixed header; `None` for anything but MPEG-TS in RTP.
    fn read(datagram: &'a [u8]) -> Option<Self> {
        let (head, rest) = datagram.split_first_chunk::<12>()?;
        let [first, second, high, low, ..] = *head;
        let plain = first & 0b1111_0000 == 0b1000_0000;
        let payload = rest.get(4 * usize::from(first & 0x0f)..)?;
        (plain && second & 0x7f == MPEG_TS).then_some(Self { sequence: u16::from_be_bytes([high, low]), payload })
    }
}

impl Notes {
    /// The number of recorded packets.
    pub(super) fn len(&self) -> usize {
        self.packets.len()
    }

    fn add(&mut self, sequence: u16, datagram: &[u8]) {
        self.last_at = Some(Instant::now());
        if self.packets.len() >= MAX_RECORDED_PACKETS {
            return;
        }
        let extended = self.highest.map_or(u64::from(sequence) + (1 << 16), |highest| extend(highest, sequence));
        self.highest = self.highest.max(Some(extended));
        let mut hasher = DefaultHasher::new();
        datagram.hash(&mut hasher);
        self.packets.insert(extended, hasher.finish());
    }

    /// Compares these packets with those that arrived at `other`. ffmpeg's first sequence number is below 4,096, so
    /// both taps start in the same cycle even if the first packets were lost.
    pub(super) fn compare(&self, other: &Self) -> Difference {
        let mut difference = Difference { sent: self.packets.len() as u64, ..Difference::default() };
        for (sequence, hash) in &self.packets {
            let Some(found) = other.packets.get(sequence) else { continue };
            difference.received += 1;
            difference.altered += u64::from(found != hash);
        }
        difference
    }
}

/// The number nearest to `highest` whose lower 16 bits are `sequence`.
fn extend(highest: u64, sequence: u16) -> u64 {
    let ahead = sequence.wrapping_sub(highest as u16);
    if ahead < 0x8000 { highest + u64::from(ahead) } else { highest - u64::from(0u16.wrapping_sub(ahead)) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn packet(sequence: u16, payload: &[u8]) -> Vec<u8> {
        let [high, low] = sequence.to_be_bytes();
        [&[0x80, MPEG_TS, high, low, 0, 0, 0, 0, 0, 0, 0, 0], payload].concat()
    }

    fn notes(sequences: &[u16]) -> Notes {
        let mut notes = Notes::default();
        for sequence in sequences {
            notes.add(*sequence, &packet(*sequence, b"x"));
        }
        notes
    }

    #[test]
    fn sequence_numbers_go_on_over_their_end_and_back() {
        assert_eq!(extend(70_000, 4464), 70_000);
        assert_eq!(extend(0x1_ffff, 0), 0x2_0000);
        assert_eq!(extend(0x2_0000, 0xffff), 0x1_ffff);
    }

    #[test]
    fn what_is_missing_is_missed_wherever_it_is() {
        let sent = notes(&[65_534, 65_535, 0, 1, 2]);
        let difference = sent.compare(&notes(&[65_534, 65_535, 1, 0]));
        assert_eq!(difference, Difference { sent: 5, received: 4, altered: 0 });
        assert_eq!(sent.compare(&notes(&[])).received, 0);
        // Twice the same is one.
        assert_eq!(sent.compare(&notes(&[65_535, 65_535])).received, 1);
    }

    #[test]
    fn what_was_changed_is_told() {
        let mut other = Notes::default();
        other.add(7, &packet(7, b"y"));
        assert_eq!(notes(&[7]).compare(&other), Difference { sent: 1, received: 1, altered: 1 });
    }

    #[test]
    fn only_mpeg_ts_in_rtp_is_a_packet() {
        assert_eq!(Packet::read(&packet(3, b"ts")).unwrap().payload, b"ts");
        let mut with_source = packet(3, &[0, 0, 0, 0, b't', b's']);
        with_source[0] |= 1;
        assert_eq!(Packet::read(&with_source).unwrap().payload, b"ts");
        assert!(Packet::read(&[0x80, 200, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_none());
        assert!(Packet::read(b"short").is_none());
    }
}

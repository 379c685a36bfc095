//! Packets on their way through an end of a CONNECT-IP tunnel.
//!
//! In: packets of the link and of the tunnel. Out: those that may pass, with the addresses that the other side knows,
//! and no longer than what is behind takes; for others an answer to who sent them, at a bounded rate. What is dropped
//! is counted by its reason.

use std::collections::VecDeque;
use std::net::IpAddr;

use bytes::Bytes;
use hermes_wire::{capsule, ip};

use super::{End, Side};
use crate::datagram::Batch;
use crate::worker::Worker;
use hermes_ip::packet_filter::{Verdict, Way};

/// Packets that came before their addresses.
const MOST_AHEAD: usize = 64;
/// Answers to packets that wait for the tunnel.
const MOST_ANSWERS: usize = 64;
/// Answers of one session in a second.
const MOST_TOLD: u32 = 50;

impl End {
    pub(super) fn send_out(&self, worker: &Worker, packet: Bytes, batch: &mut Batch) {
        let Ok(header) = ip::parse(&packet) else {
            return worker.shared.metrics.dropped("malformed-packet", 1);
        };
        let (packet, header) = match self.inner.iter().find(|inner| header.source == inner.inner) {
            Some(inner) => inner.outwards(packet, header),
            None => (self.cited_outwards(packet, &header), header),
        };
        match self.rules.judge(Way::Out, &packet, &header, self.mtu) {
            Verdict::Pass => batch.datagrams.push_back(clamped(packet, &header, self.mtu)),
            Verdict::Cut(mtu) => {
                let fragments = ip::fragment(&packet, &header, mtu);
                if fragments.is_empty() {
                    worker.shared.metrics.dropped("malformed-packet", 1);
                }
                batch.datagrams.extend(fragments.into_iter().map(Bytes::from));
            }
            Verdict::Drop(reason, trouble) => {
                worker.shared.metrics.dropped(reason, 1);
                let answer = trouble.and_then(|trouble| self.answer(worker, &packet, &header, trouble));
                answer.into_iter().for_each(|answer| self.link.answer(answer));
            }
        }
    }

    /// A router behind the device speaks of a packet to the inner address: its sender knows another one.
    fn cited_outwards(&self, packet: Bytes, header: &ip::Header) -> Bytes {
        if self.inner.is_empty() {
            return packet;
        }
        let about = ip::cited(&packet, header).map(|(_, to)| to);
        match self.inner.iter().find(|inner| Some(inner.inner) == about) {
            Some(inner) => inner.cited_outwards(&packet, header),
            None => packet,
        }
    }

    /// What a packet's sender is told, at a bounded rate.
    fn answer(&self, worker: &Worker, packet: &[u8], header: &ip::Header, trouble: ip::IcmpError) -> Option<Bytes> {
        let own = self.own_address(header);
        let error = ip::icmp_error(packet, header, trouble, own)?;
        // Each session has its own share: whoever floods is told of little, and takes nothing from others.
        (self.told.takes(worker.now(), MOST_TOLD) && worker.takes_answer()).then(|| error.into())
    }

    /// An address of ours on the packet's way: of the device, else the one that it was sent to.
    fn own_address(&self, header: &ip::Header) -> IpAddr {
        let of_device = match &self.side {
            Side::Gives { gateway, .. } => gateway.addresses.as_slice(),
            Side::Asks { .. } => &[],
        };
        let fits = |address: &&IpAddr| address.is_ipv4() == header.source.is_ipv4();
        of_device.iter().find(fits).copied().unwrap_or(header.destination)
    }

    /// A datagram of QUIC may overtake the capsule with the addresses, by which it is judged.
    pub(super) fn order_ahead(&mut self, worker: &Worker, packets: &mut VecDeque<Bytes>) {
        if !matches!(self.side, Side::Asks { answered: false, .. }) {
            if !self.ahead.is_empty() {
                self.ahead.append(packets);
                std::mem::swap(&mut self.ahead, packets);
            }
            return;
        }
        self.ahead.append(packets);
        let excess = self.ahead.len().saturating_sub(MOST_AHEAD);
        if excess > 0 {
            self.ahead.drain(..excess);
            worker.shared.metrics.dropped("queue-full", excess as u64);
        }
    }

    pub(super) fn let_in(&mut self, worker: &Worker, packet: &Bytes) -> bool {
        let Ok(header) = ip::parse(packet) else {
            worker.shared.metrics.dropped("malformed-packet", 1);
            return false;
        };
        let Verdict::Drop(reason, trouble) = self.rules.judge(Way::In, packet, &header, capsule::MAX_PACKET) else {
            return true;
        };
        worker.shared.metrics.dropped(reason, 1);
        let answer = trouble.and_then(|trouble| self.answer(worker, packet, &header, trouble));
        if self.answers.len() < MOST_ANSWERS {
            self.answers.extend(answer);
        }
        false
    }
}

/// A TCP connection that begins through here learns at once how long its segments may be.
fn clamped(packet: Bytes, header: &ip::Header, mtu: usize) -> Bytes {
    let is_syn = header.protocol == ip::TCP
        && !header.is_later_fragment
        && packet.get(header.transport + 13).is_some_and(|flags| flags & 0x02 != 0);
    if !is_syn || mtu >= capsule::MAX_PACKET {
        return packet;
    }
    let mut changed = packet.to_vec();
    if ip::clamp_mss(&mut changed, header, mtu) { changed.into() } else { packet }
}

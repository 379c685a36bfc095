//! Packets through an end of a CONNECT-IP tunnel.
//!
//! In: packets of the link and of the tunnel. Out: the permitted ones, with the addresses of the other side, and within
//! the MTU after this end. Senders of others get an ICMP error, at a bounded rate. Dropped packets are counted by
//! reason.

use std::collections::VecDeque;
use std::net::IpAddr;

use bytes::Bytes;
use hermes_wire::{capsule, ip};

use super::{End, Side};
use hermes_ip::packet_filter::{Direction, Verdict};
use hermes_transport::datagram::Batch;
use hermes_transport::runtime::WorkerContext;

/// The limit of packets that came before their addresses.
const MAX_EARLY_PACKETS: usize = 64;
/// The limit of ICMP errors that wait for the tunnel.
const MAX_WAITING_ICMP_ERRORS: usize = 64;
/// The limit of ICMP errors for one session in a second.
const MAX_ICMP_ERRORS_PER_SECOND: u32 = 50;

impl End {
    pub(super) fn send_out(&self, worker: &WorkerContext, packet: Bytes, batch: &mut Batch) {
        let Ok(header) = ip::parse(&packet) else {
            return worker.shared.metrics.dropped("malformed-packet", 1);
        };
        let (packet, header) = match self.inner.iter().find(|inner| header.source == inner.inner) {
            Some(inner) => inner.outwards(packet, header),
            None => (self.cited_outwards(packet, &header), header),
        };
        match self.rules.verdict(Direction::Out, &packet, &header, self.mtu) {
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

    /// Translates the packet that an ICMP error quotes. A router behind the device quotes the inner address, but the
    /// sender knows the outer one.
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

    /// An ICMP error for the sender of a packet, at a bounded rate.
    fn answer(
        &self,
        worker: &WorkerContext,
        packet: &[u8],
        header: &ip::Header,
        trouble: ip::IcmpError,
    ) -> Option<Bytes> {
        let own = self.own_address(header);
        let error = ip::icmp_error(packet, header, trouble, own)?;
        // Each session has its own budget: a flood gets few answers and costs other sessions none.
        (self.told.takes(worker.now(), MAX_ICMP_ERRORS_PER_SECOND) && worker.may_send_icmp_error())
            .then(|| error.into())
    }

    /// The source of an ICMP error: an address of the device, else the destination of the packet.
    fn own_address(&self, header: &ip::Header) -> IpAddr {
        let of_device = match &self.side {
            Side::Gives { gateway, .. } => gateway.addresses.as_slice(),
            Side::Asks { .. } => &[],
        };
        let fits = |address: &&IpAddr| address.is_ipv4() == header.source.is_ipv4();
        of_device.iter().find(fits).copied().unwrap_or(header.destination)
    }

    /// Holds back packets until the addresses are known: a QUIC datagram may overtake the capsule that assigns them.
    pub(super) fn order_ahead(&mut self, worker: &WorkerContext, packets: &mut VecDeque<Bytes>) {
        if !matches!(self.side, Side::Asks { answered: false, .. }) {
            if !self.ahead.is_empty() {
                self.ahead.append(packets);
                std::mem::swap(&mut self.ahead, packets);
            }
            return;
        }
        self.ahead.append(packets);
        let excess = self.ahead.len().saturating_sub(MAX_EARLY_PACKETS);
        if excess > 0 {
            self.ahead.drain(..excess);
            worker.shared.metrics.dropped("queue-full", excess as u64);
        }
    }

    pub(super) fn let_in(&mut self, worker: &WorkerContext, packet: &Bytes) -> bool {
        let Ok(header) = ip::parse(packet) else {
            worker.shared.metrics.dropped("malformed-packet", 1);
            return false;
        };
        let Verdict::Drop(reason, trouble) = self.rules.verdict(Direction::In, packet, &header, capsule::MAX_PACKET)
        else {
            return true;
        };
        worker.shared.metrics.dropped(reason, 1);
        let answer = trouble.and_then(|trouble| self.answer(worker, packet, &header, trouble));
        if self.answers.len() < MAX_WAITING_ICMP_ERRORS {
            self.answers.extend(answer);
        }
        false
    }
}

/// Clamps the MSS of a TCP SYN to the MTU.
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

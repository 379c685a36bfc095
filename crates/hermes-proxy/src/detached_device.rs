//! A device without a node: its packets go to nodes as UDP datagrams, one in each, and return the same way.
//!
//! In: the device's name and addresses, and for each prefix the `ip` listener of a node, on this host or another. Out:
//! packets in both directions, filtered as at any device of Hermes: from its addresses, to the prefix of that listener.
//! Dropped packets are counted by reason. The device, its routes and rules are removed with it. Never: HTTP, or another
//! path for a captured prefix: while the node is unreachable, packets are lost.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hermes_net::tun::{self, IdleQueue, LARGEST_MTU, Queue, TunError};
use hermes_net::udp::{self, UdpSocket};
use hermes_wire::connect_ip::{Prefix, Route};
use hermes_wire::{capsule, ip};
use ipnet::IpNet;

use crate::ip::{Direction, Rules, Table, Verdict, poll_send_into};
use hermes_transport::datagram::Outgoing;

/// The keepalive interval to a node; shorter than NAT mappings (RFC 4787, REQ-5) and the node's timeout.
const PRESENCE: Duration = Duration::from_secs(25);
/// The limit of reads before other work runs.
const ROUNDS: usize = 16;
/// The maximum number of packets that wait for a node's socket. One read of the device yields fewer.
const MAX_WAITING_PACKETS: usize = 4096;
/// The limit of ICMP errors in a second.
const MAX_ICMP_ERRORS_PER_SECOND: u32 = 200;

/// The node for packets to a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Destination prefix of the packets.
    pub network: IpNet,
    /// The `ip` listener of a node.
    pub node: SocketAddr,
}

/// A device, and the nodes for its packets. Dropping it removes the device.
pub struct DetachedDevice {
    device: tun::Device,
    queue: IdleQueue,
    addresses: Vec<IpAddr>,
    targets: Vec<Target>,
}

/// The packet counters.
#[derive(Debug, Default)]
pub struct PacketCounts {
    /// Packets sent to nodes.
    pub sent: u64,
    /// Packets received from nodes.
    pub received: u64,
    /// Packets dropped, by reason, as in the metrics of a node.
    pub dropped: BTreeMap<&'static str, u64>,
}

impl DetachedDevice {
    /// Creates the device with its addresses and captures. Requires the privilege to do so.
    ///
    /// # Errors
    /// `TunError`: the missing permission or part, with a remedy.
    pub fn open(name: &str, addresses: Vec<IpAddr>, targets: Vec<Target>) -> Result<Self, TunError> {
        let (device, mut queues) = tun::Device::create(name, 1, LARGEST_MTU)?;
        let Some(queue) = queues.pop() else {
            return Err(TunError::Name { name: name.to_owned() });
        };
        for address in &addresses {
            device.add_address((*address).into())?;
        }
        for target in &targets {
            let source = addresses.iter().find(|address| address.is_ipv4() == target.network.addr().is_ipv4());
            let mtu = u32::try_from(payload_to(target.node)).ok();
            device.capture(target.network, tun::Route { mtu, source: source.copied() })?;
        }
        Ok(Self { device, queue, addresses, targets })
    }

    /// Carries packets until `stop`; then removes the device.
    ///
    /// # Errors
    /// No socket can be opened, or the device was deleted.
    pub async fn run(self, stop: impl Future<Output = ()>) -> io::Result<PacketCounts> {
        let Self { device, queue, addresses, targets } = self;
        let mut carrier = PacketForwarder::new(queue.start()?, &addresses, &targets)?;
        let mut reverse_peer = tokio::time::interval(PRESENCE);
        let mut guard = std::pin::pin!(tun::reconcile());
        let mut stop = std::pin::pin!(stop);
        let result = loop {
            tokio::select! {
                biased;
                () = &mut stop => break Ok(()),
                _ = reverse_peer.tick() => carrier.show_presence(),
                Err(error) = &mut guard => break Err(error),
                Err(error) = std::future::poll_fn(|cx| carrier.poll(cx)) => break Err(error),
            }
        };
        // The drop removes the device and its rules, while this process may still do so.
        drop(device);
        result.map(|()| carrier.ledger.into_inner())
    }
}

/// The longest packet that reaches a node unfragmented. If the kernel does not report it, it fragments longer packets.
fn payload_to(node: SocketAddr) -> usize {
    udp::whole_payload(node).unwrap_or(udp::MAX_PAYLOAD).max(ip::MIN_MTU_V6)
}

/// A node, and the packets that wait for it and from it.
struct Link {
    socket: UdpSocket,
    node: SocketAddr,
    rules: Rules,
    capacity: usize,
    up: VecDeque<Bytes>,
    /// Packets that passed the filter already.
    down: VecDeque<Bytes>,
    /// The node is unreachable (ICMP), which was logged.
    is_away: bool,
}

struct PacketForwarder {
    queue: Queue,
    from_device: tun::ReceiveBuffer,
    from_node: udp::ReceiveBuffer,
    run: RefCell<Vec<u8>>,
    links: Vec<Link>,
    /// The index of the link for a destination.
    places: Table<usize>,
    ledger: RefCell<PacketCounts>,
    /// The number of ICMP errors since the time beside it.
    answers: (u32, tokio::time::Instant),
}

impl PacketForwarder {
    fn new(queue: Queue, addresses: &[IpAddr], targets: &[Target]) -> io::Result<Self> {
        let here: Vec<Route> = addresses.iter().map(|address| Route::to(Prefix::of(*address))).collect();
        let mut places = Table::default();
        let mut links = Vec::new();
        for target in targets {
            let there = Prefix::new(target.network.addr(), target.network.prefix_len()).map_err(io::Error::other)?;
            let socket = UdpSocket::from_std(udp::connect(target.node)?)?;
            places.insert(target.network, links.len());
            links.push(Link {
                socket,
                node: target.node,
                rules: Rules { here: here.clone(), there: vec![Route::to(there)], protocol: None },
                capacity: payload_to(target.node),
                up: VecDeque::new(),
                down: VecDeque::new(),
                is_away: false,
            });
        }
        Ok(Self {
            queue,
            from_device: tun::ReceiveBuffer::default(),
            from_node: udp::ReceiveBuffer::default(),
            run: RefCell::default(),
            links,
            places,
            ledger: RefCell::default(),
            answers: (0, tokio::time::Instant::now()),
        })
    }

    /// Sends an empty datagram to each node, which opens its session and keeps it alive.
    fn show_presence(&self) {
        for link in &self.links {
            if let Err(error) = link.socket.try_send(link.node, &[], 1) {
                tracing::debug!(node = %link.node, %error, "cannot send the keepalive to a node");
            }
        }
    }

    /// Carries packets. Ready only with an error of the device.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        for _ in 0..ROUNDS {
            let up = self.poll_up(cx)?;
            let down = self.poll_down(cx)?;
            if up.is_pending() && down.is_pending() {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Moves packets from the device to the nodes. Ready if some moved.
    fn poll_up(&mut self, cx: &mut Context<'_>) -> io::Result<Poll<()>> {
        let mut came = Vec::new();
        let received = self.queue.poll_receive(cx, &mut self.from_device, |packet| came.push(packet));
        if let Poll::Ready(Err(error)) = received {
            return Err(error);
        }
        came.into_iter().for_each(|packet| self.send_out(packet));
        for link in &mut self.links {
            let refused = Cell::new(false);
            let dropped = |reason, count| {
                // An ICMP error for an earlier packet: either reading or sending reports it, not both.
                refused.set(refused.get() || reason == "icmp");
                note(&self.ledger, reason, count);
            };
            let outgoing = Outgoing { run: &self.run, dropped: &dropped };
            // Unsent packets are only counted: there is no sender on this host to notify.
            let _ = outgoing.poll_send(&link.socket, link.node, cx, &mut link.up);
            if refused.get() {
                link.note_away();
            }
        }
        Ok(received.map(|_| ()))
    }

    fn send_out(&mut self, packet: Bytes) {
        let Ok(header) = ip::parse(&packet) else { return note(&self.ledger, "malformed-packet", 1) };
        let Some(link) = self.places.find(header.destination).and_then(|place| self.links.get_mut(*place)) else {
            return note(&self.ledger, "no-session", 1);
        };
        match link.rules.verdict(Direction::Out, &packet, &header, link.capacity) {
            Verdict::Pass | Verdict::Cut(_) if link.up.len() >= MAX_WAITING_PACKETS => {
                note(&self.ledger, "queue-full", 1)
            }
            Verdict::Pass => {
                self.ledger.borrow_mut().sent += 1;
                link.up.push_back(packet);
            }
            Verdict::Cut(mtu) => {
                self.ledger.borrow_mut().sent += 1;
                link.up.extend(ip::fragment(&packet, &header, mtu).into_iter().map(Bytes::from));
            }
            Verdict::Drop(reason, trouble) => {
                note(&self.ledger, reason, 1);
                let answer = trouble.and_then(|trouble| ip::icmp_error(&packet, &header, trouble, header.destination));
                if let Some(answer) = answer.filter(|_| self.may_answer()) {
                    let _ = self.queue.try_send(&[answer.into()]);
                }
            }
        }
    }

    /// Limits the rate of ICMP errors (RFC 1812, section 4.3.2.8).
    fn may_answer(&mut self) -> bool {
        let (count, since) = &mut self.answers;
        if since.elapsed() >= Duration::from_secs(1) {
            (*count, *since) = (0, tokio::time::Instant::now());
        }
        *count += 1;
        *count <= MAX_ICMP_ERRORS_PER_SECOND
    }

    /// Moves packets from the nodes to the device. Ready if some moved.
    fn poll_down(&mut self, cx: &mut Context<'_>) -> io::Result<Poll<()>> {
        let dropped = |reason, count| note(&self.ledger, reason, count);
        let mut moved = Poll::Pending;
        for link in &mut self.links {
            if poll_send_into(&self.queue, cx, &mut link.down, &dropped)?.is_pending() {
                continue;
            }
            let Link { socket, rules, down, .. } = link;
            let received = socket.poll_receive(cx, &mut self.from_node, |_, packet| match let_in(rules, &packet) {
                Ok(()) => down.push_back(packet),
                Err(reason) => dropped(reason, 1),
            });
            match received {
                Poll::Pending => continue,
                Poll::Ready(Ok(_)) => link.is_away = false,
                Poll::Ready(Err(_)) => link.note_away(),
            }
            self.ledger.borrow_mut().received += link.down.len() as u64;
            moved = Poll::Ready(());
            let _ = poll_send_into(&self.queue, cx, &mut link.down, &dropped)?;
        }
        Ok(moved)
    }
}

impl Link {
    /// Logs that the node is unreachable, once until it answers again.
    fn note_away(&mut self) {
        if !std::mem::replace(&mut self.is_away, true) {
            tracing::warn!(node = %self.node, "the node does not listen there; dropping packets until it does");
        }
    }
}

/// # Errors
/// The reason why a packet of a node is dropped.
fn let_in(rules: &Rules, packet: &[u8]) -> Result<(), &'static str> {
    let header = ip::parse(packet).map_err(|_| "malformed-packet")?;
    match rules.verdict(Direction::In, packet, &header, capsule::MAX_PACKET) {
        Verdict::Pass | Verdict::Cut(_) => Ok(()),
        Verdict::Drop(reason, _) => Err(reason),
    }
}

fn note(ledger: &RefCell<PacketCounts>, reason: &'static str, count: u64) {
    *ledger.borrow_mut().dropped.entry(reason).or_default() += count;
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Without a reader, cut packets must not exceed the queue.
    #[tokio::test]
    async fn packets_that_are_cut_wait_no_more_than_others() {
        let [own, there] = [[10, 20, 0, 2], [10, 0, 0, 1]].map(IpAddr::from);
        let target = Target { network: there.into(), node: ([127, 0, 0, 1], 9).into() };
        let (queue, _device) = IdleQueue::pair().unwrap();
        let mut carrier = PacketForwarder::new(queue.start().unwrap(), &[own], &[target]).unwrap();
        carrier.links[0].capacity = 576;
        // 1,000 bytes of UDP that may be fragmented in two.
        let mut packet = vec![0; 1000];
        packet[..12].copy_from_slice(&[0x45, 0, 0x03, 0xe8, 0, 1, 0, 0, 64, 17, 0x62, 0xee]);
        packet[12..20].copy_from_slice(&[10, 20, 0, 2, 10, 0, 0, 1]);
        for _ in 0..MAX_WAITING_PACKETS {
            carrier.send_out(packet.clone().into());
        }
        let carried = carrier.ledger.borrow();
        assert_eq!(carrier.links[0].up.len(), MAX_WAITING_PACKETS, "{carried:?}");
        assert_eq!((carried.sent, carried.dropped.get("queue-full")), (2048, Some(&2048)));
    }
}

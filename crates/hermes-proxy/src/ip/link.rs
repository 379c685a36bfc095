//! The packet source of a tunnel's end: a device of this host, or a peer that sends packets as UDP datagrams.
//!
//! In and out: whole packets. Never: filtering; the end does that.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hermes_net::tun::Queue;
use hermes_net::udp;
use hermes_wire::capsule;

use super::device::{DeviceGuard, LocalDevice};
use hermes_ip::mailbox::Mailbox;
use hermes_transport::datagram::Flow;
use hermes_transport::runtime::WorkerContext;

/// The packet source of an end.
pub(crate) enum Link {
    Device {
        local: Rc<LocalDevice>,
        mailbox: Arc<Mailbox>,
        /// `None`: the device was closing when this was created.
        _hold: Option<Arc<DeviceGuard>>,
    },
    Peer {
        flow: Flow,
        /// The longest packet that reaches the peer unfragmented.
        capacity: usize,
    },
}

impl Link {
    pub(crate) fn device(local: &Rc<LocalDevice>) -> Self {
        Self::by(local, Arc::default())
    }

    /// A device whose packets come through an existing mailbox.
    pub(crate) fn by(local: &Rc<LocalDevice>, mailbox: Arc<Mailbox>) -> Self {
        Link::Device { local: local.clone(), mailbox, _hold: local.device.hold() }
    }

    pub(crate) fn peer(flow: Flow) -> Self {
        // If the kernel does not report it, it fragments longer packets.
        let capacity = udp::whole_payload(flow.peer).unwrap_or(udp::MAX_PAYLOAD);
        Link::Peer { flow, capacity }
    }

    /// The device or the peer, for logs.
    pub(super) fn name(&self) -> String {
        match self {
            Link::Device { local, .. } => local.device.name.to_string(),
            Link::Peer { flow, .. } => flow.peer.to_string(),
        }
    }

    /// The longest packet that it carries without fragmentation, in bytes.
    pub(super) fn capacity(&self) -> usize {
        match self {
            Link::Device { .. } => capsule::MAX_PACKET,
            Link::Peer { capacity, .. } => *capacity,
        }
    }

    /// Takes packets into an empty batch. False after the last one.
    pub(super) fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<bool> {
        match self {
            Link::Device { mailbox, .. } => mailbox.poll_take(cx, batch),
            Link::Peer { flow, .. } => {
                let more = ready!(flow.queue.poll_take(cx, batch));
                // An empty datagram is a keepalive of the peer.
                batch.retain(|datagram| !datagram.is_empty());
                Poll::Ready(more)
            }
        }
    }

    /// Ready once no packet can follow. Removes no packet.
    pub(super) fn poll_finished(&self, cx: &Context<'_>) -> Poll<()> {
        match self {
            Link::Device { mailbox, .. } => mailbox.poll_finished(cx),
            Link::Peer { flow, .. } => flow.queue.poll_finished(cx),
        }
    }

    /// Sends packets that passed the filter. Ready when the batch is empty.
    pub(super) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        packets: &mut VecDeque<Bytes>,
    ) -> Poll<io::Result<()>> {
        match self {
            Link::Device { local, .. } => {
                let dropped = |reason, count| worker.shared.metrics.dropped(reason, count);
                poll_send_into(&local.queue, cx, packets, &dropped)
            }
            Link::Peer { flow, .. } => flow.poll_send(cx, worker, packets),
        }
    }

    /// Sends an ICMP error to the sender of a packet, now or never.
    pub(super) fn answer(&self, packet: Bytes) {
        match self {
            Link::Device { local, .. } => drop(local.queue.try_send(&[packet])),
            Link::Peer { flow, .. } => flow.try_send(&packet),
        }
    }
}

/// Sends packets into a device. Ready when the batch is empty: packets that cannot be sent are dropped, as on a link
/// that is down.
pub(crate) fn poll_send_into(
    queue: &Queue,
    cx: &mut Context<'_>,
    packets: &mut VecDeque<Bytes>,
    dropped: &dyn Fn(&'static str, u64),
) -> Poll<io::Result<()>> {
    while !packets.is_empty() {
        match queue.try_send(packets.make_contiguous()) {
            Ok(moved) => {
                if moved.refused > 0 {
                    dropped("device-refused", moved.refused as u64);
                }
                drop(packets.drain(..moved.taken()));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready!(queue.poll_send_ready(cx))?,
            Err(error) => {
                tracing::debug!(%error, "packets could not be sent into a device");
                dropped("device-failed", packets.len() as u64);
                packets.clear();
            }
        }
    }
    Poll::Ready(Ok(()))
}

//! Where an end of a tunnel has its packets from: a device of this machine, or a peer that brings them in datagrams.
//!
//! In and out: whole packets. Never: what a packet may do; its end judges that.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hermes_net::tun::Queue;
use hermes_net::udp;
use hermes_wire::capsule;

use super::device::{Hold, LocalDevice};
use crate::datagram::Flow;
use crate::worker::Worker;
use hermes_ip::mailbox::Mailbox;

/// Where packets come from and go to.
pub(crate) enum Link {
    Device {
        local: Rc<LocalDevice>,
        mailbox: Arc<Mailbox>,
        /// `None`: this came while it went.
        _hold: Option<Arc<Hold>>,
    },
    Peer {
        flow: Flow,
        /// The longest packet that reaches the peer in one piece.
        capacity: usize,
    },
}

impl Link {
    pub(crate) fn device(local: &Rc<LocalDevice>) -> Self {
        Self::by(local, Arc::default())
    }

    /// A device whose packets come by a mailbox that is there already.
    pub(crate) fn by(local: &Rc<LocalDevice>, mailbox: Arc<Mailbox>) -> Self {
        Link::Device { local: local.clone(), mailbox, _hold: local.device.hold() }
    }

    pub(crate) fn peer(flow: Flow) -> Self {
        // Where the kernel does not say, it cuts what is too long.
        let capacity = udp::whole_payload(flow.peer).unwrap_or(udp::MAX_PAYLOAD);
        Link::Peer { flow, capacity }
    }

    /// Whose it is, for people.
    pub(super) fn name(&self) -> String {
        match self {
            Link::Device { local, .. } => local.device.name.to_string(),
            Link::Peer { flow, .. } => flow.peer.to_string(),
        }
    }

    /// The longest packet that it takes well.
    pub(super) fn capacity(&self) -> usize {
        match self {
            Link::Device { .. } => capsule::MAX_PACKET,
            Link::Peer { capacity, .. } => *capacity,
        }
    }

    /// Takes packets into an empty batch. False where none will come any more.
    pub(super) fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<bool> {
        match self {
            Link::Device { mailbox, .. } => mailbox.poll_take(cx, batch),
            Link::Peer { flow, .. } => {
                let more = ready!(flow.queue.poll_take(cx, batch));
                // An empty datagram says that the peer is there, and carries nothing.
                batch.retain(|datagram| !datagram.is_empty());
                Poll::Ready(more)
            }
        }
    }

    /// Waits until none will come any more, and takes none.
    pub(super) fn poll_finished(&self, cx: &Context<'_>) -> Poll<()> {
        match self {
            Link::Device { mailbox, .. } => mailbox.poll_finished(cx),
            Link::Peer { flow, .. } => flow.queue.poll_finished(cx),
        }
    }

    /// Sends packets that were judged. Ready when the batch is empty.
    pub(super) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
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

    /// Tells whoever sent a packet here about it, now or not at all.
    pub(super) fn answer(&self, packet: Bytes) {
        match self {
            Link::Device { local, .. } => drop(local.queue.try_send(&[packet])),
            Link::Peer { flow, .. } => flow.try_send(&packet),
        }
    }
}

/// Sends packets into a device. Ready when the batch is empty: as with a link that is down, what cannot be sent is lost.
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

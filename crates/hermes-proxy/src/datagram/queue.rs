//! What one source of a listener sent, on its way from the listener to the flow's task.
//!
//! In: datagrams, from whoever reads the listener's socket. Out: the same, in batches; the flow's end, for
//! whoever feeds it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use hermes_net::udp::UdpSocket;

use super::inbox::Inbox;
use crate::signal::Signal;

/// One flow of a listener: what its client sent waits here.
pub(crate) struct Flow {
    pub(crate) queue: Rc<FlowQueue>,
    pub(crate) peer: SocketAddr,
    /// Stands before each datagram to the client.
    header: Bytes,
    /// Those that have it, and are not sent yet.
    pub(super) out: VecDeque<Bytes>,
}

impl Flow {
    pub(crate) fn new(queue: Rc<FlowQueue>, peer: SocketAddr) -> Self {
        Self::with_header(queue, peer, Bytes::new())
    }

    /// A flow whose client wants a header before each datagram.
    pub(crate) fn with_header(queue: Rc<FlowQueue>, peer: SocketAddr, header: Bytes) -> Self {
        Self { queue, peer, header, out: VecDeque::new() }
    }

    /// Takes the batch as it has to be sent. What was taken before is sent first.
    pub(super) fn dress<'a>(&'a mut self, batch: &'a mut VecDeque<Bytes>) -> &'a mut VecDeque<Bytes> {
        if self.header.is_empty() {
            return batch;
        }
        let mut room = BytesMut::with_capacity(batch.iter().map(|one| self.header.len() + one.len()).sum());
        for datagram in batch.drain(..) {
            room.extend_from_slice(&self.header);
            room.extend_from_slice(&datagram);
            self.out.push_back(room.split().freeze());
        }
        &mut self.out
    }
}

/// Datagrams of one source, from the listener to the flow's task.
pub(crate) struct FlowQueue {
    /// Where answers go out: the listener's, or after that is gone the flow's own.
    pub(super) socket: RefCell<Rc<UdpSocket>>,
    pub(crate) inbox: Inbox,
    ended: Signal<()>,
    finished: Cell<bool>,
    in_order: Cell<bool>,
}

impl FlowQueue {
    pub(crate) fn new(socket: Rc<UdpSocket>) -> Self {
        Self {
            socket: RefCell::new(socket),
            inbox: Inbox::default(),
            ended: Signal::default(),
            finished: Cell::new(false),
            in_order: Cell::new(false),
        }
    }

    /// From now on the flow has a socket of its own.
    pub(crate) fn part(&self, own: Rc<UdpSocket>) {
        *self.socket.borrow_mut() = own;
        // Who waited to send waited for the other one.
        self.inbox.wake();
    }

    /// Its client sends no more: what waits is the last of it.
    pub(crate) fn finish(&self) {
        self.finished.set(true);
        self.inbox.wake();
    }

    /// The flow is over.
    pub(crate) fn close(&self) {
        self.ended.set(());
    }

    /// The flow is over and nothing went wrong: its source may begin another at once.
    pub(crate) fn close_in_order(&self) {
        self.in_order.set(true);
        self.close();
    }

    pub(crate) fn is_in_order(&self) -> bool {
        self.in_order.get()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.ended.get().is_some()
    }

    /// Waits for the flow's end.
    pub(crate) fn poll_closed(&self, cx: &Context<'_>) -> Poll<()> {
        self.ended.poll(cx)
    }

    /// Takes what waits. False where that was all.
    pub(super) fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<bool> {
        match self.inbox.poll_take(cx, batch) {
            Poll::Pending if self.finished.get() => Poll::Ready(false),
            taken => taken.map(|()| true),
        }
    }
}

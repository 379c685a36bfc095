//! The queue of datagrams that a listener received from one source address, for the task of the flow.
//!
//! In: datagrams, from the task that reads the listener's socket. Out: the same datagrams in batches, for the task of
//! the flow; the end of the flow, for the task that reads the socket.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_net::udp::UdpSocket;

use super::outgoing::poll_send_for;
use crate::h3::Inbox;
use crate::oneshot::Oneshot;
use crate::runtime::WorkerContext;
use crate::runtime::fair_shares::Holder;

/// The time without a datagram of the client after which a flow counts as idle, in milliseconds.
const IDLE_AFTER: u64 = 1000;

/// A flow between a listener and one client address. Datagrams of the client wait in the queue.
pub struct Flow {
    pub queue: Rc<FlowQueue>,
    pub peer: SocketAddr,
    /// The header before each datagram to the client.
    header: Bytes,
    /// Datagrams to the client, with their header, that are not sent yet.
    pub(super) out: VecDeque<Bytes>,
}

impl Flow {
    pub fn new(queue: Rc<FlowQueue>, peer: SocketAddr) -> Self {
        Self::with_header(queue, peer, Bytes::new())
    }

    /// Creates a flow whose client expects a header before each datagram.
    pub fn with_header(queue: Rc<FlowQueue>, peer: SocketAddr, header: Bytes) -> Self {
        Self { queue, peer, header, out: VecDeque::new() }
    }

    /// Sends the batch to the client. Ready when all of its datagrams are sent or dropped.
    pub fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        batch: &mut VecDeque<Bytes>,
    ) -> Poll<io::Result<()>> {
        let (socket, peer) = (self.queue.socket.borrow().clone(), self.peer);
        ready!(poll_send_for(worker, &socket, peer, cx, &mut self.out))?;
        self.queue.answered.set(self.queue.answered.get() || !batch.is_empty());
        poll_send_for(worker, &socket, peer, cx, self.rewriter(batch))
    }

    /// Sends one datagram now, or drops it.
    pub fn try_send(&self, datagram: &[u8]) {
        self.queue.answered.set(true);
        let socket = self.queue.socket.borrow();
        if let Err(error) = socket.try_send(self.peer, datagram, datagram.len().max(1)) {
            tracing::debug!(peer = %self.peer, %error, "a datagram could not be sent");
        }
    }

    /// Moves the batch to `out`, with a header before each datagram, and returns `out`. Returns the batch itself if the
    /// flow has no header.
    fn rewriter<'a>(&'a mut self, batch: &'a mut VecDeque<Bytes>) -> &'a mut VecDeque<Bytes> {
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

/// The queue of datagrams from one source address, with the state that the listener and the flow's task share.
pub struct FlowQueue {
    /// The socket for replies: the listener's socket, or a socket of this flow alone after the listener was removed.
    pub(super) socket: RefCell<Rc<UdpSocket>>,
    pub inbox: Inbox,
    ended: Oneshot<()>,
    finished: Cell<bool>,
    in_order: Cell<bool>,
    displaced: Oneshot<()>,
    /// The time of the client's last datagram, in milliseconds of the node's clock.
    heard_at: Cell<u64>,
    /// True once a datagram was sent to the client.
    answered: Cell<bool>,
    /// True if the client sent a datagram after the node had sent one. Its address is then not forged.
    confirmed: Cell<bool>,
}

impl FlowQueue {
    pub fn new(socket: Rc<UdpSocket>) -> Self {
        Self {
            socket: RefCell::new(socket),
            inbox: Inbox::default(),
            ended: Oneshot::default(),
            finished: Cell::new(false),
            in_order: Cell::new(false),
            displaced: Oneshot::default(),
            heard_at: Cell::new(0),
            answered: Cell::new(false),
            confirmed: Cell::new(false),
        }
    }

    /// Replaces the listener's socket by a socket of this flow alone.
    pub fn replace_socket(&self, own: Rc<UdpSocket>) {
        *self.socket.borrow_mut() = own;
        // The flow's task may wait until the previous socket is writable.
        self.inbox.wake();
    }

    /// Records that the client sent a datagram at `now`, in milliseconds of the node's clock.
    pub fn heard(&self, now: u64) {
        self.heard_at.set(now);
        self.confirmed.set(self.answered.get());
    }

    /// Returns the time of the client's last datagram, in milliseconds of the node's clock.
    pub fn heard_at(&self) -> u64 {
        self.heard_at.get()
    }

    /// True if the client sent a datagram after the node had sent one. Its address is then not forged.
    pub fn is_answered(&self) -> bool {
        self.confirmed.get()
    }

    /// Ends the input: no further datagram of the client will be queued. The flow still receives the queued ones.
    pub fn finish(&self) {
        self.finished.set(true);
        self.inbox.wake();
    }

    /// Ends the flow because another client's flow displaces it.
    pub fn displace(&self) {
        self.displaced.set(());
        self.finish();
    }

    pub fn is_displaced(&self) -> bool {
        self.displaced.get().is_some()
    }

    /// Waits until another client's flow displaces this one. Used only while the session opens: an open session notices
    /// the end of its input instead, and ends cleanly.
    pub async fn wait_displaced(&self) {
        self.displaced.wait().await;
    }

    /// Marks the flow as ended. A displaced flow has not failed, so its source may begin another flow at once.
    pub fn close(&self) {
        if self.is_displaced() {
            self.in_order.set(true);
        }
        self.ended.set(());
    }

    /// Marks the flow as ended without an error, so that its source may begin another flow at once.
    pub fn close_in_order(&self) {
        self.in_order.set(true);
        self.close();
    }

    pub fn is_in_order(&self) -> bool {
        self.in_order.get()
    }

    pub fn is_closed(&self) -> bool {
        self.ended.get().is_some()
    }

    /// Ready when the flow has ended.
    pub fn poll_closed(&self, cx: &Context<'_>) -> Poll<()> {
        self.ended.poll(cx)
    }

    /// Ready when no further datagram of the client will be queued. Removes no datagram from the queue.
    pub fn poll_finished(&self, cx: &Context<'_>) -> Poll<()> {
        self.inbox.watch(cx);
        if self.finished.get() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Moves queued datagrams to the batch. Returns false when the input has ended and the queue is empty.
    pub fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<bool> {
        match self.inbox.poll_take(cx, batch) {
            Poll::Pending if self.finished.get() => Poll::Ready(false),
            taken => taken.map(|()| true),
        }
    }
}
impl Holder for FlowQueue {
    fn is_idle(&self, now: u64) -> bool {
        now >= self.heard_at() + IDLE_AFTER
    }

    fn is_answered(&self) -> bool {
        FlowQueue::is_answered(self)
    }

    fn used_at(&self) -> u64 {
        self.heard_at()
    }

    fn is_ending(&self) -> bool {
        self.is_closed() || self.is_displaced()
    }

    fn displace(&self) {
        FlowQueue::displace(self);
    }
}

//! What one source of a listener sent, on its way from the listener to the flow's task.
//!
//! In: datagrams, from whoever reads the listener's socket. Out: the same, in batches. Bounded in
//! bytes: the oldest make room for what comes, since of a live stream the newest are wanted.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use hermes_net::udp::UdpSocket;

use super::BATCH;
use crate::signal::Signal;

/// What a datagram that waits costs beside its bytes: empty ones are not free.
const PLACE: usize = 64;

fn weight(datagram: &Bytes) -> usize {
    datagram.len() + PLACE
}

/// One source of a listener: what it sent waits here.
pub(crate) struct Flow {
    pub(crate) queue: Rc<FlowQueue>,
    pub(crate) peer: SocketAddr,
}

/// Datagrams of one source, from the listener to the flow's task. Bounded in bytes.
pub(crate) struct FlowQueue {
    /// Where answers go out: the listener's, or after that is gone the flow's own.
    pub(super) socket: RefCell<Rc<UdpSocket>>,
    datagrams: RefCell<VecDeque<Bytes>>,
    bytes: Cell<usize>,
    waker: Cell<Option<Waker>>,
    ended: Signal<()>,
    in_order: Cell<bool>,
}

impl FlowQueue {
    pub(crate) fn new(socket: Rc<UdpSocket>) -> Self {
        Self {
            socket: RefCell::new(socket),
            datagrams: RefCell::default(),
            bytes: Cell::new(0),
            waker: Cell::default(),
            ended: Signal::default(),
            in_order: Cell::new(false),
        }
    }

    /// From now on the flow has a socket of its own.
    pub(crate) fn part(&self, own: Rc<UdpSocket>) {
        *self.socket.borrow_mut() = own;
        // Who waited to send waited for the other one.
        self.wake();
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

    /// Queues a datagram; the oldest make room for it. Returns how many of them were dropped.
    pub(crate) fn push(&self, datagram: Bytes, most: usize) -> u64 {
        let mut datagrams = self.datagrams.borrow_mut();
        let mut bytes = self.bytes.get() + weight(&datagram);
        let mut dropped = 0;
        while bytes > most
            && let Some(oldest) = datagrams.pop_front()
        {
            bytes -= weight(&oldest);
            dropped += 1;
        }
        datagrams.push_back(datagram);
        self.bytes.set(bytes);
        dropped
    }

    /// Tells the flow's task that something came.
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    pub(super) fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<()> {
        let mut datagrams = self.datagrams.borrow_mut();
        if datagrams.is_empty() {
            self.waker.set(Some(cx.waker().clone()));
            return Poll::Pending;
        }
        if datagrams.len() <= BATCH {
            std::mem::swap(&mut *datagrams, batch);
            self.bytes.set(0);
        } else {
            batch.extend(datagrams.drain(..BATCH));
            self.bytes.set(self.bytes.get() - batch.iter().map(weight).sum::<usize>());
        }
        Poll::Ready(())
    }
}

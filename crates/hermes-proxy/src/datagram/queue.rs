//! What one source of a listener sent, on its way from the listener to the flow's task.
//!
//! In: datagrams, from whoever reads the listener's socket. Out: the same, in batches; the flow's end, for
//! whoever feeds it.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll};

use hermes_net::udp::UdpSocket;

use super::inbox::Inbox;
use crate::signal::Signal;

/// One source of a listener: what it sent waits here.
pub(crate) struct Flow {
    pub(crate) queue: Rc<FlowQueue>,
    pub(crate) peer: SocketAddr,
}

/// Datagrams of one source, from the listener to the flow's task.
pub(crate) struct FlowQueue {
    /// Where answers go out: the listener's, or after that is gone the flow's own.
    pub(super) socket: RefCell<Rc<UdpSocket>>,
    pub(crate) inbox: Inbox,
    ended: Signal<()>,
    in_order: Cell<bool>,
}

impl FlowQueue {
    pub(crate) fn new(socket: Rc<UdpSocket>) -> Self {
        Self {
            socket: RefCell::new(socket),
            inbox: Inbox::default(),
            ended: Signal::default(),
            in_order: Cell::new(false),
        }
    }

    /// From now on the flow has a socket of its own.
    pub(crate) fn part(&self, own: Rc<UdpSocket>) {
        *self.socket.borrow_mut() = own;
        // Who waited to send waited for the other one.
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
}

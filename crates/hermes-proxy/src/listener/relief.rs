//! Relief for workers whose loops stand still: one that has nothing to do accepts a connection that waits for them.
//!
//! In: the listening sockets of all workers, and which workers stand still. Out: their connections, served by this worker, one each time.
//! The kernel gives a connection to a busy worker if none is idle, and it passes over a worker only after that has stood still for some
//! milliseconds. What arrived before waits in the queue of that worker. Never: a connection that is accepted already; it stays with its
//! worker. Nor one of a listener that is confined to other workers than this one.

use std::cell::Cell;
use std::net::TcpListener;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use hermes_net::dispatch::now;
use hermes_net::tcp::accept_waiting;

use super::{CurrentListener, begin_tcp, is_about_one_connection};
use crate::worker::Worker;

/// The TCP sockets of a listener, in the order of the workers that read them.
pub(crate) struct AcceptQueues {
    /// The listener's name.
    pub(crate) listener: Arc<str>,
    /// A worker reads each socket whose index leaves its number, divided by the number of workers.
    pub(crate) sockets: Vec<Weak<TcpListener>>,
}

/// The most queues that are looked at in a row: an idle worker must be ready for its own connections.
const MAX_LOOKS: usize = 16;
/// The most empty queues that a worker looks at before it waits for events. Its next search goes on from there.
const MAX_SEARCH: usize = 64;

/// The result of a search in the accept queues of other workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Connection,
    /// Nothing so far; more queues are left.
    NothingYet,
    /// Nothing in as many queues as one search may look at.
    Nothing,
}

/// Looks at the queues of others.
#[derive(Default)]
pub(crate) struct Relief {
    /// The index at which the next search begins, so that each queue has its turn.
    next: Cell<usize>,
    /// Queues that were looked at since the last connection.
    looks: Cell<usize>,
}

impl Relief {
    /// Accepts a connection that waits for a worker whose loop stands still.
    pub(crate) fn relieve(&self, worker: &Rc<Worker>, queues: &[AcceptQueues]) -> Found {
        let status = &worker.shared.status;
        if !status.table.is_selected(worker.number) {
            return Found::Nothing;
        }
        let standing: Vec<usize> = status.standing(worker.number, now().unwrap_or_default()).collect();
        let all = queues.len() * standing.len();
        for _ in 0..all.min(MAX_LOOKS) {
            let place = self.next.get() % all;
            self.next.set(place + 1);
            let (queue, standing) = (&queues[place / standing.len()], standing[place % standing.len()]);
            if worker.serves(&queue.listener) && accept_one(worker, queue, standing) {
                self.looks.set(0);
                return Found::Connection;
            }
        }
        self.looks.set(self.looks.get() + MAX_LOOKS);
        if self.looks.get() < all.min(MAX_SEARCH) {
            return Found::NothingYet;
        }
        self.looks.set(0);
        Found::Nothing
    }
}

/// Accepts a connection that waits for the worker `standing`. Returns false if none waits.
fn accept_one(worker: &Rc<Worker>, queue: &AcceptQueues, standing: usize) -> bool {
    for socket in queue.sockets.iter().skip(standing).step_by(worker.shared.workers) {
        let Some(socket) = socket.upgrade() else { continue };
        match accept_waiting(&socket) {
            Ok((stream, source)) => {
                worker.shared.metrics.connections_relieved.inc();
                begin_tcp(worker, &mut CurrentListener::new(worker, queue.listener.clone()), stream, source);
                return true;
            }
            // The client has gone. Others may wait behind it.
            Err(error) if is_about_one_connection(&error) => return true,
            // None waits, or no descriptor is left.
            Err(_) => {}
        }
    }
    false
}

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

/// Looks at the queues of others.
#[derive(Default)]
pub(crate) struct Relief {
    /// Where the next look begins, so that each listener has its turn.
    next: Cell<usize>,
}

impl Relief {
    /// Accepts a connection that waits for a worker whose loop stands still. Returns false if there is none.
    pub(crate) fn relieve(&self, worker: &Rc<Worker>, queues: &[AcceptQueues]) -> bool {
        let status = &worker.shared.status;
        if !status.table.is_selected(worker.number) || queues.is_empty() {
            return false;
        }
        let standing: Vec<usize> = status.standing(worker.number, now().unwrap_or_default()).collect();
        let places = (0..queues.len()).flat_map(|step| standing.iter().map(move |standing| (step, *standing)));
        let begin = self.next.get();
        for (step, standing) in places.take(MAX_LOOKS) {
            let place = (begin + step) % queues.len();
            // The next look begins with another listener, also if something waits here.
            self.next.set((place + 1) % queues.len());
            if worker.serves(&queues[place].listener) && accept_one(worker, &queues[place], standing) {
                return true;
            }
        }
        false
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

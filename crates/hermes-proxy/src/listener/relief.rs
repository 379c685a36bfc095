//! Relief for workers that stand still: another one accepts the connections that wait for them.
//!
//! In: the listening sockets of all workers, and which workers stand still. Out: their connections, served by this worker. The kernel
//! passes over a worker only after it has stood still for some milliseconds. Connections that arrived within that time wait in its
//! queue. Never: a connection that is accepted already; it stays with its worker.

use std::net::TcpListener;
use std::rc::Rc;
use std::sync::{Arc, Weak};

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

/// Connections that a worker accepts for others in a tick. More would make it stand still itself.
const MAX_RELIEVED: usize = 8;

/// Accepts what waits for workers that stand still.
pub(crate) fn relieve(worker: &Rc<Worker>, queues: &[AcceptQueues]) {
    let (status, mut left) = (&worker.shared.status, MAX_RELIEVED);
    for hung in status.hung().into_iter().filter(|hung| *hung != worker.number) {
        for queue in queues {
            for socket in queue.sockets.iter().skip(hung).step_by(worker.shared.workers) {
                let Some(socket) = socket.upgrade() else { continue };
                left -= accept(worker, &queue.listener, &socket, left);
                if left == 0 {
                    return;
                }
            }
        }
    }
}

/// Accepts connections, `most` of them at most, and returns their number.
fn accept(worker: &Rc<Worker>, listener: &Arc<str>, socket: &TcpListener, most: usize) -> usize {
    let mut known = None;
    for number in 0..most {
        let (stream, source) = match accept_waiting(socket) {
            Ok(accepted) => accepted,
            Err(error) if is_about_one_connection(&error) => continue,
            // None waits, or no descriptor is left.
            Err(_) => return number,
        };
        let known = known.get_or_insert_with(|| CurrentListener::new(worker, listener.clone()));
        worker.shared.metrics.connections_relieved.inc();
        begin_tcp(worker, known, stream, source);
    }
    most
}

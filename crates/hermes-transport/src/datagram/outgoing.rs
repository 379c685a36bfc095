//! Sends datagrams from a socket, many in one system call (GSO).
//!
//! In: a batch of datagrams for one peer. Out: runs of datagrams of equal length, each sent in one call. The last
//! datagram of a run may be shorter. Like a router, the node drops and counts datagrams that it cannot send. Never: a
//! wait for anything but the socket.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hermes_net::udp::{MAX_PAYLOAD, UdpSocket};
use hermes_wire::capsule;

use super::is_icmp;
use crate::runtime::WorkerContext;

/// Sends datagrams with a buffer and a drop counter that the caller supplies.
pub struct Outgoing<'a> {
    /// The buffer in which several datagrams are assembled for one system call.
    pub run: &'a RefCell<Vec<u8>>,
    /// Adds to the number of dropped datagrams. The arguments are the reason and the count.
    pub dropped: &'a dyn Fn(&'static str, u64),
}

impl Outgoing<'_> {
    /// Sends the batch. Ready when it is empty.
    pub fn poll_send(
        &self,
        socket: &UdpSocket,
        peer: SocketAddr,
        cx: &mut Context<'_>,
        batch: &mut VecDeque<Bytes>,
    ) -> Poll<io::Result<()>> {
        let mut told = false;
        let most = if peer.is_ipv4() { MAX_PAYLOAD } else { capsule::MAX_UDP_PAYLOAD };
        while let Some(first) = batch.front() {
            let segment = first.len();
            if segment > most {
                (self.dropped)("too-large", 1);
                batch.pop_front();
                continue;
            }
            let run = run_length(batch, segment, socket.max_segments());
            match self.send_run(socket, peer, batch, run) {
                Ok(()) => {
                    told = false;
                    drop(batch.drain(..run));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready!(socket.poll_send_ready(cx))?,
                // The socket reports an ICMP error for an earlier datagram, which is lost. The current one was not sent
                // yet, so the loop tries again.
                Err(error) if is_icmp(&error) && !std::mem::replace(&mut told, true) => (self.dropped)("icmp", 1),
                // Like a router, the node drops datagrams that it cannot send. The flow continues.
                Err(error) => {
                    tracing::debug!(%peer, %error, "a datagram could not be sent");
                    (self.dropped)(if is_icmp(&error) { "icmp" } else { "send-failed" }, run as u64);
                    drop(batch.drain(..run));
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    fn send_run(&self, socket: &UdpSocket, peer: SocketAddr, batch: &VecDeque<Bytes>, run: usize) -> io::Result<()> {
        let Some(first) = batch.front() else { return Ok(()) };
        if run == 1 {
            return socket.try_send(peer, first, first.len().max(1));
        }
        let mut contents = self.run.borrow_mut();
        contents.clear();
        batch.iter().take(run).for_each(|datagram| contents.extend_from_slice(datagram));
        socket.try_send(peer, &contents, first.len())
    }
}

/// Sends a batch with the buffer and the metrics of a worker. Ready when the batch is empty.
pub(super) fn poll_send_for(
    worker: &WorkerContext,
    socket: &UdpSocket,
    peer: SocketAddr,
    cx: &mut Context<'_>,
    batch: &mut VecDeque<Bytes>,
) -> Poll<io::Result<()>> {
    let dropped = |reason, count| worker.shared.metrics.dropped(reason, count);
    Outgoing { run: &worker.udp_run, dropped: &dropped }.poll_send(socket, peer, cx, batch)
}

fn run_length(batch: &VecDeque<Bytes>, segment: usize, most: usize) -> usize {
    if segment == 0 {
        return 1;
    }
    let most = most.min(MAX_PAYLOAD / segment).max(1);
    let equal = batch.iter().take(most).take_while(|datagram| datagram.len() == segment).count();
    match batch.get(equal) {
        Some(last) if equal < most && !last.is_empty() && last.len() < segment => equal + 1,
        _ => equal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(lengths: &[usize]) -> VecDeque<Bytes> {
        lengths.iter().map(|length| Bytes::from(vec![0; *length])).collect()
    }

    #[test]
    fn runs_are_of_equal_length_but_for_the_last() {
        assert_eq!(run_length(&batch(&[1200, 1200, 700, 1200]), 1200, 64), 3);
        assert_eq!(run_length(&batch(&[1200, 1300]), 1200, 64), 1);
        assert_eq!(run_length(&batch(&[1200; 100]), 1200, 64), 54);
        assert_eq!(run_length(&batch(&[10; 100]), 10, 64), 64);
        assert_eq!(run_length(&batch(&[0, 0]), 0, 64), 1);
        assert_eq!(run_length(&batch(&[5, 0]), 5, 64), 1);
    }
}

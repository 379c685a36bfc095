//! Many datagrams with one system call, in both directions.
//!
//! In: a socket. Out: [`Sender`] and [`Receiver`] on `sendmmsg` and `recvmmsg`. Without segmentation offload, so that a
//! proxy receives the datagrams of ordinary programs.

use std::{
    io::{IoSlice, IoSliceMut},
    net::UdpSocket,
    os::fd::AsRawFd as _,
    time::Duration,
};

use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg, sendmmsg};

use super::HEADER;

/// Datagrams in one system call.
const BATCH: usize = 64;
/// Interval at which the receiver checks whether it should stop.
const READ_TIMEOUT: Duration = Duration::from_millis(20);

/// Sends numbered datagrams of one flow.
pub(super) struct Sender<'a> {
    socket: &'a UdpSocket,
    datagrams: Vec<Vec<u8>>,
    headers: MultiHeaders<SockaddrStorage>,
}

/// Receives datagrams of all flows.
pub(super) struct Receiver<'a> {
    socket: &'a UdpSocket,
    datagrams: Vec<Vec<u8>>,
    headers: MultiHeaders<SockaddrStorage>,
}

impl<'a> Sender<'a> {
    /// `template` is what every datagram holds behind its numbers.
    pub(super) fn new(socket: &'a UdpSocket, flow: usize, mut template: Vec<u8>) -> Self {
        template[..8].copy_from_slice(&(flow as u64).to_le_bytes());
        Self { socket, datagrams: vec![template; BATCH], headers: MultiHeaders::preallocate(BATCH, None) }
    }

    /// Sends up to `room` datagrams numbered from `sequence`; returns how many went.
    pub(super) fn send(&mut self, sequence: u64, room: u64) -> u64 {
        let count = usize::try_from(room).unwrap_or(BATCH).min(BATCH);
        for (datagram, number) in self.datagrams[..count].iter_mut().zip(sequence..) {
            datagram[8..HEADER].copy_from_slice(&number.to_le_bytes());
        }
        let slices: Vec<_> = self.datagrams[..count].iter().map(|d| [IoSlice::new(d)]).collect();
        let to = vec![None; count];
        let sent = sendmmsg(self.socket.as_raw_fd(), &mut self.headers, &slices, to, [], MsgFlags::MSG_DONTWAIT);
        // A full buffer sends nothing now; an error that an earlier datagram caused shows as its loss.
        sent.map_or(0, |results| results.count() as u64)
    }
}

impl<'a> Receiver<'a> {
    /// For datagrams of at most `length` bytes; a longer one comes one byte too long, and so is noticed.
    pub(super) fn new(socket: &'a UdpSocket, length: usize) -> Self {
        // A blocking socket with a time-out, so that the thread sleeps in the system call.
        let _ = socket.set_nonblocking(false);
        let _ = socket.set_read_timeout(Some(READ_TIMEOUT));
        Self { socket, datagrams: vec![vec![0; length + 1]; BATCH], headers: MultiHeaders::preallocate(BATCH, None) }
    }

    /// Waits for at least one datagram, or a while, and gives all that are there to `take`.
    pub(super) fn receive(&mut self, mut take: impl FnMut(&[u8])) -> usize {
        let lengths: Vec<usize> = {
            let mut slices: Vec<_> = self.datagrams.iter_mut().map(|d| [IoSliceMut::new(d)]).collect();
            let wait = MsgFlags::MSG_WAITFORONE;
            let received = recvmmsg(self.socket.as_raw_fd(), &mut self.headers, slices.iter_mut(), wait, None);
            received.map(|results| results.map(|r| r.bytes).collect()).unwrap_or_default()
        };
        for (datagram, length) in self.datagrams.iter().zip(&lengths) {
            take(&datagram[..*length]);
        }
        lengths.len()
    }
}

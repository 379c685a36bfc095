//! The HTTP datagrams of one HTTP/3 request, sent as QUIC datagrams (RFC 9297, section 2.1).
//!
//! In: a request's stream. Out: datagrams with their context ID, in both directions, within the limits of the peer and
//! the path. Received datagrams wait in a bounded queue. Never: the meaning of their payload.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_net::quic;
use hermes_wire::{capsule, h3, varint};

use super::Link;
use crate::h3::Inbox;

/// A future that sends one datagram as soon as quinn's send buffer has space for it.
type Waiting = Pin<Box<dyn Future<Output = Result<(), quic::SendDatagramError>>>>;

/// The outcome of sending a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// The datagram was accepted: QUIC sends it, or it waits for space in the send buffer.
    Taken,
    /// The datagram is too long for a packet on this path, or the peer does not support datagrams.
    TooLarge,
}

/// Returns the length in bytes of the longest IP packet that fits a datagram of the connection now, for any stream ID.
/// A peer without datagrams receives packets of any length as capsules.
pub fn packet_capacity(link: &Link) -> usize {
    let most = link.settings().filter(|settings| settings.datagrams).and_then(|_| link.max_datagram_size());
    most.map_or(capsule::MAX_PACKET, |most| most.saturating_sub(varint::MAX_LEN + 1))
}

/// Sends and receives the HTTP datagrams of one request stream.
pub struct Datagrams {
    link: Rc<Link>,
    stream: u64,
    inbox: Rc<Inbox>,
    waiting: Option<Waiting>,
}

impl Datagrams {
    /// Registers a queue for the datagrams of this stream. Dropping the value removes the queue.
    pub fn of(link: &Rc<Link>, stream: u64) -> Self {
        let inbox = Rc::new(link.inbox());
        link.deliver_to(stream, Some(inbox.clone()));
        Self { link: link.clone(), stream, inbox, waiting: None }
    }

    /// Moves received datagrams from the queue into an empty batch. Pending if the queue is empty.
    pub fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<()> {
        self.inbox.poll_take(cx, batch)
    }

    /// Returns the number of received datagrams in the queue.
    pub fn waiting(&self) -> usize {
        self.inbox.count()
    }

    /// Returns the length in bytes of the longest HTTP datagram that can be sent now. Returns `None` if the peer does
    /// not support datagrams, or its SETTINGS have not arrived yet.
    pub fn most(&self) -> Option<usize> {
        if !self.link.settings()?.datagrams {
            return None;
        }
        self.link.max_datagram_size()?.checked_sub(varint::len(self.stream / 4))
    }

    /// Sends the waiting datagram, if there is one. Ready when another datagram may be sent.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(waiting) = &mut self.waiting else { return Poll::Ready(Ok(())) };
        let sent = ready!(waiting.as_mut().poll(cx));
        self.waiting = None;
        self.link.forget_room();
        Poll::Ready(taken(sent).map(|_| ()))
    }

    /// Sends a datagram that consists of `context` and `payload`. Pending if an earlier datagram still waits for space
    /// in the send buffer; this one was then not accepted.
    pub fn poll_send(&mut self, cx: &mut Context<'_>, context: &[u8], payload: &[u8]) -> Poll<io::Result<SendOutcome>> {
        ready!(self.poll_room(cx))?;
        let length = context.len() + payload.len();
        if self.most().is_none_or(|most| length > most) {
            return Poll::Ready(Ok(SendOutcome::TooLarge));
        }
        let mut out = BytesMut::with_capacity(varint::MAX_LEN + length);
        h3::put_datagram_stream(self.stream, &mut out);
        out.extend_from_slice(context);
        out.extend_from_slice(payload);
        let connection = &self.link.connection;
        if self.link.take_room(out.len()) {
            return Poll::Ready(taken(connection.send_datagram(out.freeze())));
        }
        // In a full send buffer, quinn would drop the oldest datagram. So this datagram waits for space instead.
        let connection = connection.clone();
        let mut waiting: Waiting = Box::pin(async move { connection.send_datagram_wait(out.freeze()).await });
        match waiting.as_mut().poll(cx) {
            Poll::Ready(sent) => Poll::Ready(taken(sent)),
            Poll::Pending => {
                self.waiting = Some(waiting);
                Poll::Ready(Ok(SendOutcome::Taken))
            }
        }
    }

    /// True if an accepted datagram waits for space in the send buffer.
    pub fn holds_unsent(&self) -> bool {
        self.waiting.is_some()
    }

    /// Sends the datagram that waits for space in the send buffer. Ready when no datagram waits.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_room(cx)
    }
}

fn taken(sent: Result<(), quic::SendDatagramError>) -> io::Result<SendOutcome> {
    match sent {
        Ok(()) => Ok(SendOutcome::Taken),
        Err(quic::SendDatagramError::ConnectionLost(error)) => Err(io::Error::other(error)),
        // The path MTU has shrunk since the length was checked.
        Err(_) => Ok(SendOutcome::TooLarge),
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.link.deliver_to(self.stream, None);
    }
}

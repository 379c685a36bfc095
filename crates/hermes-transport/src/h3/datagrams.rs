//! The HTTP datagrams of one HTTP/3 request, sent as QUIC datagrams (RFC 9297, section 2.1).
//!
//! In: a request's stream. Out: datagrams with their context ID, in both directions, within the limits of the peer and
//! the path. Received ones wait in a bounded queue. Never: the meaning of their payload.

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

/// A datagram that waits for room in the send buffer.
type Waiting = Pin<Box<dyn Future<Output = Result<(), quic::SendDatagramError>>>>;

/// The outcome of sending a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// QUIC accepted the datagram.
    Taken,
    /// The datagram does not fit a packet of the path, or the peer does not accept datagrams.
    TooLarge,
}

/// The longest IP packet that fits a datagram of the connection now, for any stream ID.
pub fn packet_capacity(link: &Link) -> usize {
    let most = link.settings().filter(|settings| settings.datagrams).and_then(|_| link.max_datagram_size());
    most.map_or(capsule::MAX_PACKET, |most| most.saturating_sub(varint::MAX_LEN + 1))
}

/// The datagrams of one stream.
pub struct Datagrams {
    link: Rc<Link>,
    stream: u64,
    inbox: Rc<Inbox>,
    waiting: Option<Waiting>,
}

impl Datagrams {
    /// Registers a queue for the datagrams of this stream.
    pub fn of(link: &Rc<Link>, stream: u64) -> Self {
        let inbox = Rc::new(link.inbox());
        link.deliver_to(stream, Some(inbox.clone()));
        Self { link: link.clone(), stream, inbox, waiting: None }
    }

    /// Takes the received datagrams, into an empty batch.
    pub fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<()> {
        self.inbox.poll_take(cx, batch)
    }

    /// The number of received datagrams in the queue.
    pub fn waiting(&self) -> usize {
        self.inbox.count()
    }

    /// The longest HTTP datagram that can be sent now. `None`: the peer accepts none, or its SETTINGS have not come.
    pub fn most(&self) -> Option<usize> {
        if !self.link.settings()?.datagrams {
            return None;
        }
        self.link.max_datagram_size()?.checked_sub(varint::len(self.stream / 4))
    }

    /// Ready when another one may be sent.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(waiting) = &mut self.waiting else { return Poll::Ready(Ok(())) };
        let sent = ready!(waiting.as_mut().poll(cx));
        self.waiting = None;
        self.link.forget_room();
        Poll::Ready(taken(sent).map(|_| ()))
    }

    /// Sends a datagram, given in two parts. Pending: nothing was sent.
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
        // quinn would drop the oldest datagram; here the sender waits instead.
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

    /// True if a datagram waits for room.
    pub fn holds_unsent(&self) -> bool {
        self.waiting.is_some()
    }

    /// Sends the datagram that waits.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_room(cx)
    }
}

fn taken(sent: Result<(), quic::SendDatagramError>) -> io::Result<SendOutcome> {
    match sent {
        Ok(()) => Ok(SendOutcome::Taken),
        Err(quic::SendDatagramError::ConnectionLost(error)) => Err(io::Error::other(error)),
        // The path MTU shrank meanwhile.
        Err(_) => Ok(SendOutcome::TooLarge),
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.link.deliver_to(self.stream, None);
    }
}

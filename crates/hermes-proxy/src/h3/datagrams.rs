//! The HTTP Datagrams of one request over HTTP/3, as QUIC has them (RFC 9297, section 2.1).
//!
//! In: a request's stream. Out: datagrams with their context in front, both ways, as far as the peer takes
//! them and the path lets them through. What comes waits in a bounded queue. Never: what they mean.

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
use crate::datagram::Inbox;

/// A datagram that waits for room.
type Waiting = Pin<Box<dyn Future<Output = Result<(), quic::SendDatagramError>>>>;

/// What became of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    /// QUIC has it.
    Taken,
    /// It fits no packet of the path, or the peer wants none.
    Unfit,
}

/// The longest IP packet that fits a datagram of the connection now, whatever the stream's number.
pub(crate) fn packet_capacity(link: &Link) -> usize {
    let most = link.settings().filter(|settings| settings.datagrams).and_then(|_| link.max_datagram_size());
    most.map_or(capsule::MAX_PACKET, |most| most.saturating_sub(varint::MAX_LEN + 1))
}

/// The datagrams of one stream.
pub(crate) struct Datagrams {
    link: Rc<Link>,
    stream: u64,
    inbox: Rc<Inbox>,
    waiting: Option<Waiting>,
}

impl Datagrams {
    /// From now on those of this stream are kept for it.
    pub(crate) fn of(link: &Rc<Link>, stream: u64) -> Self {
        let inbox = Rc::new(link.inbox());
        link.deliver_to(stream, Some(inbox.clone()));
        Self { link: link.clone(), stream, inbox, waiting: None }
    }

    /// Takes what came, into an empty batch.
    pub(crate) fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<()> {
        self.inbox.poll_take(cx, batch)
    }

    /// So many have come that nobody has taken.
    pub(crate) fn waiting(&self) -> usize {
        self.inbox.len()
    }

    /// The longest HTTP Datagram that can be sent now. `None`: the peer takes none, or has not said so yet.
    pub(crate) fn most(&self) -> Option<usize> {
        if !self.link.settings()?.datagrams {
            return None;
        }
        self.link.max_datagram_size()?.checked_sub(varint::len(self.stream / 4))
    }

    /// Ready where another one may be sent.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(waiting) = &mut self.waiting else { return Poll::Ready(Ok(())) };
        let sent = ready!(waiting.as_mut().poll(cx));
        self.waiting = None;
        self.link.forget_room();
        Poll::Ready(taken(sent).map(|_| ()))
    }

    /// Sends a datagram, of two parts. Pending where nothing was taken.
    pub(crate) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        context: &[u8],
        payload: &[u8],
    ) -> Poll<io::Result<Given>> {
        ready!(self.poll_room(cx))?;
        let length = context.len() + payload.len();
        if self.most().is_none_or(|most| length > most) {
            return Poll::Ready(Ok(Given::Unfit));
        }
        let mut out = BytesMut::with_capacity(varint::MAX_LEN + length);
        h3::put_datagram_stream(self.stream, &mut out);
        out.extend_from_slice(context);
        out.extend_from_slice(payload);
        let connection = &self.link.connection;
        if self.link.take_room(out.len()) {
            return Poll::Ready(taken(connection.send_datagram(out.freeze())));
        }
        // quinn would drop the oldest: here the source waits instead.
        let connection = connection.clone();
        let mut waiting: Waiting = Box::pin(async move { connection.send_datagram_wait(out.freeze()).await });
        match waiting.as_mut().poll(cx) {
            Poll::Ready(sent) => Poll::Ready(taken(sent)),
            Poll::Pending => {
                self.waiting = Some(waiting);
                Poll::Ready(Ok(Given::Taken))
            }
        }
    }

    /// One waits for room.
    pub(crate) fn holds_unsent(&self) -> bool {
        self.waiting.is_some()
    }

    /// Sends what waits.
    pub(crate) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_room(cx)
    }
}

fn taken(sent: Result<(), quic::SendDatagramError>) -> io::Result<Given> {
    match sent {
        Ok(()) => Ok(Given::Taken),
        Err(quic::SendDatagramError::ConnectionLost(error)) => Err(io::Error::other(error)),
        // The path has shrunk meanwhile.
        Err(_) => Ok(Given::Unfit),
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.link.deliver_to(self.stream, None);
    }
}

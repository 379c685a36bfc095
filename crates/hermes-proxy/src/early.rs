//! What a client sends before its tunnel is open.
//!
//! In: the client's side of a tunnel that is being opened. Out: its first bytes, in DATA frames right
//! behind the request, so that no round trip passes before them (for UDP RFC 9298, section 5, says that
//! one may; TCP is no different, since the stream is the tunnel's own). What was sent is kept until
//! the next node has answered: if that refused the stream unseen, another endpoint gets it again.
//! Only nodes are sent anything early. Never: more than `MOST` bytes and one chunk.

use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use hermes_wire::{capsule, connect_ip};

use crate::error::Error;
use crate::live::Entry;
use crate::stream::{self, ByteStream, Receiver, Sender, StreamError};

/// No chunk is read once so many bytes are under way.
const MOST: usize = 16 << 10;

/// A client's side, as far as it can be read before its tunnel is open.
pub(crate) trait Source {
    /// It is this session's, which ends where too much of it lies unread.
    fn bind(&self, session: &Rc<Entry>);

    /// The next chunk as the tunnel's stream has it, of at most so many bytes where it can be cut, and
    /// how many bytes of it are payload; `None` is the end, which is said again to whoever relays.
    fn poll_early(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<io::Result<Option<(Bytes, usize)>>>;

    /// Each chunk ends with a capsule. Else the rest of one may come later, for whoever then reads the source.
    fn has_whole_capsules(&self) -> bool {
        false
    }
}

impl Source for ByteStream {
    fn bind(&self, session: &Rc<Entry>) {
        ByteStream::bind(self, session);
    }

    fn poll_early(&mut self, cx: &mut Context<'_>, _: usize) -> Poll<io::Result<Option<(Bytes, usize)>>> {
        self.poll_read(cx).map_ok(|chunk| chunk.map(counted))
    }
}

impl Source for Receiver {
    fn bind(&self, session: &Rc<Entry>) {
        Receiver::bind(self, session);
    }

    fn poll_early(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<io::Result<Option<(Bytes, usize)>>> {
        stream::poll_read_half(self, cx, most).map_ok(|chunk| chunk.map(counted))
    }
}

/// Something that we have to say ourselves, in whole capsules; `None` once it was taken.
pub(crate) struct Words(pub(crate) Option<Bytes>);

impl Source for Words {
    fn bind(&self, _: &Rc<Entry>) {}

    fn poll_early(&mut self, _: &mut Context<'_>, _: usize) -> Poll<io::Result<Option<(Bytes, usize)>>> {
        // There is never more of it: only the answer wakes whoever asks.
        self.0.take().map_or(Poll::Pending, |words| Poll::Ready(Ok(Some(counted(words)))))
    }

    fn has_whole_capsules(&self) -> bool {
        true
    }
}

fn counted(chunk: Bytes) -> (Bytes, usize) {
    let length = chunk.len();
    (chunk, length)
}

/// The early bytes of one tunnel.
pub(crate) struct Early<'a> {
    source: &'a mut dyn Source,
    sent: Vec<Bytes>,
    bytes: usize,
    payload: usize,
    ended: bool,
    /// Where only whole capsules go: the beginning of those that did not.
    held: Option<BytesMut>,
}

/// What a client sent to a tunnel whose capsules are read, before somebody read them.
#[derive(Debug)]
pub(crate) struct Ahead {
    /// Went on already, in whole capsules.
    pub(crate) sent: Bytes,
    /// Came behind that, and went nowhere.
    pub(crate) held: Bytes,
}

/// Of CONNECT-IP's capsules these pass every node as they are; what is told from hop to hop does not.
const END_TO_END: [u64; 4] =
    [capsule::DATAGRAM, connect_ip::ADDRESS_ASSIGN, connect_ip::ADDRESS_REQUEST, connect_ip::ROUTE_ADVERTISEMENT];

/// How much of this may go ahead, and whether more may, once it is there.
fn may_go_ahead(bytes: &[u8]) -> (usize, bool) {
    let mut length = 0;
    while let Some((kind, whole)) = capsule::first(&bytes[length..]) {
        if !END_TO_END.contains(&kind) || whole > MOST as u64 {
            return (length, false);
        }
        if whole > (bytes.len() - length) as u64 {
            break;
        }
        length += whole as usize;
    }
    (length, true)
}

impl<'a> Early<'a> {
    pub(crate) fn new(source: &'a mut dyn Source) -> Self {
        Self { source, sent: Vec::new(), bytes: 0, payload: 0, ended: false, held: None }
    }

    /// It is this session's.
    pub(crate) fn bind(&self, session: &Rc<Entry>) {
        self.source.bind(session);
    }

    /// It may go before a tunnel whose capsules are opened here, as they are where one side has datagrams of QUIC:
    /// who opens them must not begin in the midst of one.
    pub(crate) fn has_whole_capsules(&self) -> bool {
        self.held.is_some() || self.source.has_whole_capsules()
    }

    /// From here on only whole capsules of CONNECT-IP go ahead.
    pub(crate) fn by_capsules(&mut self) {
        if !self.has_whole_capsules() && !self.has_sent() {
            self.held = Some(BytesMut::new());
        }
    }

    /// What whoever reads the capsules from now on has to know; `None` where they went as they came.
    pub(crate) fn into_ahead(self) -> Option<Ahead> {
        let held = self.held?.freeze();
        Some(Ahead { sent: self.sent.concat().into(), held })
    }

    /// Some of it was sent: whoever gets the tunnel now must be sent that first.
    pub(crate) fn has_sent(&self) -> bool {
        !self.sent.is_empty()
    }

    /// Sends again what an earlier endpoint was sent for nothing.
    ///
    /// # Errors
    /// The stream is broken.
    pub(crate) fn repeat(&self, sink: &mut Sender) -> Result<(), StreamError> {
        sink.send(self.sent.concat().into(), false)
    }

    /// Sends what there is. The window is not waited for: the sink holds the little that this can be.
    ///
    /// # Errors
    /// The client is gone. A broken sink is none: the response says why.
    pub(crate) fn send(&mut self, cx: &mut Context<'_>, sink: &mut Sender) -> Result<(), Error> {
        while !self.ended && self.bytes < MOST && sink.poll_backlog(cx).is_ready() {
            match self.source.poll_early(cx, MOST - self.bytes) {
                Poll::Ready(Ok(Some((chunk, payload)))) => {
                    self.bytes += chunk.len();
                    let chunk = match &mut self.held {
                        None => {
                            self.payload += payload;
                            chunk
                        }
                        Some(held) => {
                            held.extend_from_slice(&chunk);
                            let (length, goes_on) = may_go_ahead(held);
                            self.ended = !goes_on;
                            self.payload += length;
                            held.split_to(length).freeze()
                        }
                    };
                    if !chunk.is_empty() {
                        self.sent.push(chunk.clone());
                        self.ended |= sink.send(chunk, false).is_err();
                    }
                }
                Poll::Ready(Ok(None)) => self.ended = true,
                Poll::Ready(Err(error)) => return Err(Error::ClientGone(error.to_string())),
                Poll::Pending => break,
            }
        }
        Ok(())
    }

    /// Bytes of payload since this was asked last.
    pub(crate) fn take_received(&mut self) -> usize {
        std::mem::take(&mut self.payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_capsules_go_ahead_as_far_as_they_are_for_the_far_end() {
        let mut bytes = BytesMut::new();
        capsule::put(&mut bytes, connect_ip::ADDRESS_REQUEST, b"request");
        let request = bytes.len();
        assert_eq!(may_go_ahead(&bytes), (request, true));
        capsule::put(&mut bytes, capsule::DATAGRAM, b"packet");
        let both = bytes.len();
        // The second is not whole, then whole.
        assert_eq!(may_go_ahead(&bytes[..both - 1]), (request, true));
        assert_eq!(may_go_ahead(&bytes[..=request]), (request, true));
        assert_eq!(may_go_ahead(&bytes), (both, true));
        // What is told to this hop stays here, and all that comes behind it.
        capsule::put(&mut bytes, connect_ip::MTU, b"12");
        capsule::put(&mut bytes, capsule::DATAGRAM, b"packet");
        assert_eq!(may_go_ahead(&bytes), (both, false));
    }

    #[test]
    fn what_will_never_be_whole_is_not_waited_for() {
        let mut bytes = BytesMut::new();
        capsule::put(&mut bytes, capsule::DATAGRAM, &[0; MOST]);
        assert_eq!(may_go_ahead(&bytes[..9]), (0, false));
    }
}

//! Early payload: bytes that a client sends before its tunnel is open.
//!
//! In: the client's side of a tunnel that is being opened. Out: its first bytes, in DATA frames directly after the
//! request, which saves a round trip. RFC 9298, section 5, permits this for UDP. For TCP it is equally safe, because
//! the stream belongs to the tunnel alone. The bytes are buffered until the next node has answered: if that node
//! refuses the stream unprocessed, they are sent to another endpoint. Early payload is only sent to Hermes nodes.
//! Never: more than `MAX_EARLY_BYTES` bytes plus one chunk.

use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use hermes_net::tcp;
use hermes_wire::{capsule, connect_ip};

use crate::error::Error;
use crate::runtime::session::{Prefetched, SessionEntry};
use crate::stream::{self, ByteStream, Receiver, Sender, StreamError};

/// The number of bytes of early payload from which on no further chunk is read.
const MAX_EARLY_BYTES: usize = 16 << 10;

/// The client's side of a tunnel, which can be read before the tunnel is open.
pub trait EarlyReader {
    /// Charges the unread bytes of the client to a session. The session may end if `limits.receive-buffer` is exceeded.
    fn bind(&self, session: &Rc<SessionEntry>);

    /// Returns the next chunk in the encoding of the tunnel's stream, and the number of its payload bytes. Readers that
    /// can split a chunk return at most `most` bytes. `None` means that the client has ended its side. A later read
    /// then returns the end again.
    fn poll_early(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<io::Result<Option<(Bytes, usize)>>>;

    /// True if each chunk consists of complete capsules. Otherwise a chunk may end within a capsule.
    fn has_whole_capsules(&self) -> bool {
        false
    }
}

impl EarlyReader for ByteStream {
    fn bind(&self, session: &Rc<SessionEntry>) {
        ByteStream::bind(self, session);
    }

    fn poll_early(&mut self, cx: &mut Context<'_>, _: usize) -> Poll<io::Result<Option<(Bytes, usize)>>> {
        // Urgent data is left to the relay, which counts it. The caller waits for the response as well, so no waker is
        // registered.
        if self.plain_tcp().is_some_and(tcp::is_at_urgent) {
            return Poll::Pending;
        }
        self.poll_read(cx).map_ok(|chunk| chunk.map(counted))
    }
}

impl EarlyReader for Receiver {
    fn bind(&self, session: &Rc<SessionEntry>) {
        Receiver::bind(self, session);
    }

    fn poll_early(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<io::Result<Option<(Bytes, usize)>>> {
        stream::poll_read_half(self, cx, most).map_ok(|chunk| chunk.map(counted))
    }
}

/// Capsules that this node itself sends first on a tunnel. `None` once they were returned by `poll_early`.
pub struct InitialCapsules(pub Option<Bytes>);

impl EarlyReader for InitialCapsules {
    fn bind(&self, _: &Rc<SessionEntry>) {}

    fn poll_early(&mut self, _: &mut Context<'_>, _: usize) -> Poll<io::Result<Option<(Bytes, usize)>>> {
        // No further capsules follow. No waker is registered, because the caller waits for the response as well.
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

/// The early payload of one tunnel.
pub struct EarlyPayload<'a> {
    source: &'a mut dyn EarlyReader,
    sent: Vec<Bytes>,
    bytes: usize,
    payload: usize,
    ended: bool,
    /// The bytes that were read and not sent, if only complete capsules may be sent early. `None` if bytes are sent
    /// unparsed.
    held: Option<BytesMut>,
}

/// The types of CONNECT-IP capsules that every node forwards unchanged. All other types are hop-by-hop.
const END_TO_END: [u64; 4] =
    [capsule::DATAGRAM, connect_ip::ADDRESS_ASSIGN, connect_ip::ADDRESS_REQUEST, connect_ip::ROUTE_ADVERTISEMENT];

/// Returns the total length of the leading capsules that may be sent early, and whether later ones may be sent early.
fn may_go_ahead(bytes: &[u8]) -> (usize, bool) {
    let mut length = 0;
    while let Some((kind, whole)) = capsule::first(&bytes[length..]) {
        if !END_TO_END.contains(&kind) || whole > MAX_EARLY_BYTES as u64 {
            return (length, false);
        }
        if whole > (bytes.len() - length) as u64 {
            break;
        }
        length += whole as usize;
    }
    (length, true)
}

impl<'a> EarlyPayload<'a> {
    pub fn new(source: &'a mut dyn EarlyReader) -> Self {
        Self { source, sent: Vec::new(), bytes: 0, payload: 0, ended: false, held: None }
    }

    /// Charges the unread bytes of the client to a session. The session may end if `limits.receive-buffer` is exceeded.
    pub fn bind(&self, session: &Rc<SessionEntry>) {
        self.source.bind(session);
    }

    /// True if the early payload consists of complete capsules. This node parses the capsules of a tunnel if one side
    /// supports QUIC datagrams, and the parser must begin at the start of a capsule.
    pub fn has_whole_capsules(&self) -> bool {
        self.held.is_some() || self.source.has_whole_capsules()
    }

    /// Restricts early payload to complete CONNECT-IP capsules. Has no effect once bytes were sent.
    pub fn by_capsules(&mut self) {
        if !self.has_whole_capsules() && !self.has_sent() {
            self.held = Some(BytesMut::new());
        }
    }

    /// Returns the sent and the unsent bytes, for the parser of the capsules. `None` if bytes were sent unparsed.
    pub fn into_prefetched(self) -> Option<Prefetched> {
        let held = self.held?.freeze();
        Some(Prefetched { sent: self.sent.concat().into(), held })
    }

    /// True if bytes were sent. They must then be sent to another endpoint as well if the request is retried there.
    pub fn has_sent(&self) -> bool {
        !self.sent.is_empty()
    }

    /// Sends the early payload again, to another endpoint.
    ///
    /// # Errors
    /// The stream is broken.
    pub fn repeat(&self, sink: &mut Sender) -> Result<(), StreamError> {
        sink.send(self.sent.concat().into(), false)
    }

    /// Sends the available bytes without waiting for the flow-control window. The sink buffers them.
    ///
    /// # Errors
    /// The client failed. A failure of the sink is not reported here, because the response carries its reason.
    pub fn send(&mut self, cx: &mut Context<'_>, sink: &mut Sender) -> Result<(), Error> {
        while !self.ended && self.bytes < MAX_EARLY_BYTES && sink.poll_backlog(cx).is_ready() {
            match self.source.poll_early(cx, MAX_EARLY_BYTES - self.bytes) {
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

    /// Returns the number of payload bytes that were sent since the last call.
    pub fn take_received(&mut self) -> usize {
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
        // The second capsule is incomplete at first, then complete.
        assert_eq!(may_go_ahead(&bytes[..both - 1]), (request, true));
        assert_eq!(may_go_ahead(&bytes[..=request]), (request, true));
        assert_eq!(may_go_ahead(&bytes), (both, true));
        // A hop-by-hop capsule stays here, and so does everything after it.
        capsule::put(&mut bytes, connect_ip::MTU, b"12");
        capsule::put(&mut bytes, capsule::DATAGRAM, b"packet");
        assert_eq!(may_go_ahead(&bytes), (both, false));
    }

    #[test]
    fn what_will_never_be_whole_is_not_waited_for() {
        let mut bytes = BytesMut::new();
        capsule::put(&mut bytes, capsule::DATAGRAM, &[0; MAX_EARLY_BYTES]);
        assert_eq!(may_go_ahead(&bytes[..9]), (0, false));
    }
}

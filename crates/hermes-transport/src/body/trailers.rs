//! Sends the trailers of a chunked body over HTTP/1.1, even if the head has no `Trailer` field.
//!
//! In: the trailers of a body. Out: the last chunk of the body with a trailer section. hyper sends only trailers that
//! the head names in `Trailer`, which senders over HTTP/2 and HTTP/3 rarely write. So a body withholds its trailers
//! from hyper, which then writes a last chunk without trailers. The connection replaces that chunk by one with the
//! trailer section. Never: a field that framing, routing or trust depend on (RFC 9110, section 6.5.1).

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use http::HeaderMap;
use tokio::io::AsyncWrite;

use crate::headers;

/// The last chunk of a body without trailers. hyper writes it as a separate buffer.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// The encoded trailer section of the message that is sent on a connection. The body sets it; the socket writes it.
#[derive(Clone, Default)]
pub struct TrailerSlot(Rc<RefCell<Bytes>>);

impl TrailerSlot {
    /// Encodes the trailers of a chunked body that has just ended. Has no effect if none of them may be sent.
    pub fn set(&self, mut trailers: HeaderMap) {
        headers::strip_trailers(&mut trailers);
        if trailers.is_empty() {
            return;
        }
        let mut section = b"0\r\n".to_vec();
        for (name, value) in &trailers {
            for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
                section.extend_from_slice(part);
            }
        }
        section.extend_from_slice(b"\r\n");
        *self.0.borrow_mut() = section.into();
    }

    /// True while a trailer section waits for the last chunk.
    pub fn is_set(&self) -> bool {
        !self.0.borrow().is_empty()
    }

    /// Writes hyper's buffers. If the last one is the last chunk, the trailer section replaces it.
    pub fn poll_write<W: AsyncWrite + Unpin>(
        &self,
        io: &mut W,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Some((last, before)) = bufs.split_last() else { return Poll::Ready(Ok(0)) };
        if before.iter().any(|buf| !buf.is_empty()) {
            return Pin::new(io).poll_write_vectored(cx, before);
        }
        let mut section = self.0.borrow_mut();
        if **last != *LAST_CHUNK {
            // The body is not chunked, so HTTP/1.1 cannot send its trailers.
            *section = Bytes::new();
            return Pin::new(io).poll_write(cx, last);
        }
        while !section.is_empty() {
            let written = ready!(Pin::new(&mut *io).poll_write(cx, &section))?;
            if written == 0 {
                return Poll::Ready(Ok(0));
            }
            section.advance(written);
        }
        Poll::Ready(Ok(LAST_CHUNK.len()))
    }
}

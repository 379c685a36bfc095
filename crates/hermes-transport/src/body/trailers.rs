//! Trailers of a chunked body over HTTP/1.1, announced or not.
//!
//! In: the trailers that end a body. Out: its last chunk with all trailers that may be sent. hyper sends only those
//! that the head names in `Trailer`, which senders over HTTP/2 and HTTP/3 rarely write. So a body withholds its
//! trailers from hyper, which then writes a bare last chunk, and the connection below writes the trailer section
//! instead. Never: a field that framing, routing or trust depend on (RFC 9110, section 6.5.1).

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use http::HeaderMap;
use tokio::io::AsyncWrite;

use crate::headers;

/// The last chunk of a body without trailers, which hyper writes as one buffer of its own.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// The trailers of the message that is sent on a connection; shared by its body and its socket.
#[derive(Clone, Default)]
pub struct TrailerSlot(Rc<RefCell<Bytes>>);

impl TrailerSlot {
    /// Stores the trailers of a chunked body, which ends now.
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

    /// Writes hyper's buffer, with the trailer section in place of the last chunk that ends it.
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
            // The body is not chunked after all, so it has no trailers.
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

//! Inspects the frames of an HTTP/2 connection for streams that the peer ended before it reset them, and for GOAWAY.
//!
//! In: the bytes of a connection, as they are read. Out: the same bytes, the streams that received END_STREAM and then
//! RST_STREAM with NO_ERROR, and whether GOAWAY was received. With this sequence, a server signals that its response is
//! complete and that it needs no more of the request (RFC 9113, section 8.1). Other servers send NO_ERROR on streams
//! that they abort, and h2 does not distinguish the two cases. h2 does not report GOAWAY to streams that continue (RFC
//! 9113, section 6.8) either. Only the latest streams are recorded.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use hermes_net::Io;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The maximum number of recorded streams of a connection. It suffices because the reset follows END_STREAM closely.
const REMEMBERED: usize = 1024;
/// The length of a frame header in bytes (RFC 9113, section 4.1).
const HEAD: usize = 9;
/// The length of a RST_STREAM frame in bytes: its header and an error code (RFC 9113, section 6.4).
const RESET: usize = HEAD + 4;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;

/// The state of a connection's streams, as its received frames show it.
#[derive(Default)]
pub struct EndedStreams {
    /// The IDs of streams with a received END_STREAM.
    ended: RefCell<VecDeque<u32>>,
    /// The IDs of streams with a received END_STREAM and then RST_STREAM with NO_ERROR.
    parted: RefCell<VecDeque<u32>>,
    /// The number of reads from the connection.
    reads: Cell<u64>,
    /// True once GOAWAY was received.
    is_going: Cell<bool>,
}

fn remember(streams: &RefCell<VecDeque<u32>>, stream: u32) {
    let mut streams = streams.borrow_mut();
    if streams.len() == REMEMBERED {
        streams.pop_front();
    }
    streams.push_back(stream);
}

impl EndedStreams {
    /// Returns the number of reads from the connection.
    pub fn reads(&self) -> u64 {
        self.reads.get()
    }

    /// True if the peer has sent GOAWAY.
    pub fn is_going(&self) -> bool {
        self.is_going.get()
    }

    /// True if the message on this stream is complete: the peer sent END_STREAM before it reset the stream with
    /// NO_ERROR.
    pub fn is_whole(&self, stream: u32) -> bool {
        self.parted.borrow().contains(&stream)
    }
}

/// A parser of frame headers and of RST_STREAM frames.
#[derive(Default)]
struct Scan {
    head: [u8; RESET],
    /// The number of bytes in `head`.
    have: usize,
    /// The number of payload bytes of the current frame that are still to be skipped.
    skip: usize,
}

impl Scan {
    fn read(&mut self, mut bytes: &[u8], ends: &EndedStreams) {
        while !bytes.is_empty() {
            let passed = self.skip.min(bytes.len());
            self.skip -= passed;
            bytes = &bytes[passed..];
            let taken = (self.needs() - self.have).min(bytes.len());
            self.head[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            if self.have == self.needs() {
                self.note(ends);
                self.have = 0;
            }
        }
    }

    fn needs(&self) -> usize {
        if self.have >= HEAD && self.is_reset() { RESET } else { HEAD }
    }

    fn is_reset(&self) -> bool {
        self.head[3] == RST_STREAM && self.length() == RESET - HEAD
    }

    fn length(&self) -> usize {
        u32::from_be_bytes([0, self.head[0], self.head[1], self.head[2]]) as usize
    }

    fn note(&mut self, ends: &EndedStreams) {
        let [_, _, _, kind, flags, a, b, c, d, code @ ..] = self.head;
        let stream = u32::from_be_bytes([a & 0x7f, b, c, d]);
        if self.have == RESET {
            if code == [0; 4] && ends.ended.borrow().contains(&stream) {
                remember(&ends.parted, stream);
            }
            return;
        }
        if matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0 {
            remember(&ends.ended, stream);
        }
        if kind == GOAWAY {
            ends.is_going.set(true);
        }
        self.skip = self.length();
    }
}

/// A connection whose frames are inspected as they are read. A failed write is not reported to h2, because frames that
/// the peer sent before it closed may still be unread. A later read reports how the connection ended.
pub struct Scanned {
    io: Io,
    scan: Scan,
    ends: Rc<EndedStreams>,
    /// True once a write has failed. Further writes of h2 are discarded.
    write_failed: bool,
}

impl Scanned {
    pub fn new(io: Io, ends: &Rc<EndedStreams>) -> Self {
        Self { io, scan: Scan::default(), ends: ends.clone(), write_failed: false }
    }

    /// Returns the outcome of a write, or `dropped` if the write failed.
    fn written<T>(&mut self, polled: Poll<io::Result<T>>, dropped: T) -> Poll<io::Result<T>> {
        let Poll::Ready(Err(error)) = &polled else { return polled };
        tracing::debug!(%error, "the upstream stopped reading; reading what it has sent");
        self.write_failed = true;
        Poll::Ready(Ok(dropped))
    }
}

impl AsyncRead for Scanned {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        this.ends.reads.set(this.ends.reads.get() + 1);
        this.scan.read(&buf.filled()[before..], &this.ends);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Scanned {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.write_failed {
            return Poll::Ready(Ok(buf.len()));
        }
        let polled = Pin::new(&mut self.io).poll_write(cx, buf);
        self.written(polled, buf.len())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.write_failed {
            return Poll::Ready(Ok(()));
        }
        let polled = Pin::new(&mut self.io).poll_flush(cx);
        self.written(polled, ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let length = bufs.iter().map(|buf| buf.len()).sum();
        if self.write_failed {
            return Poll::Ready(Ok(length));
        }
        let polled = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.written(polled, length)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap_or_default().to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    #[test]
    fn only_what_was_ended_before_it_was_reset_in_order_is_whole() {
        let frames = [
            frame(4, 0, 0, &[0; 12]),
            frame(HEADERS, 4, 1, b"head"),
            frame(HEADERS, 4, 3, b"head"),
            frame(HEADERS, 4 | END_STREAM, 5, b"head"),
            frame(DATA, 0, 1, &[7; 300]),
            frame(DATA, END_STREAM, 1, &[7; 20]),
            frame(RST_STREAM, 0, 1, &[0; 4]),
            frame(RST_STREAM, 0, 3, &[0; 4]),
            frame(RST_STREAM, 0, 5, &[0, 0, 0, 8]),
            frame(DATA, END_STREAM, 7, b""),
            frame(RST_STREAM, 0, 7, &[0; 4]),
        ]
        .concat();
        for size in [1, 2, 9, 13, 100, frames.len()] {
            let (mut scan, ends) = (Scan::default(), EndedStreams::default());
            frames.chunks(size).for_each(|bytes| scan.read(bytes, &ends));
            let whole: Vec<u32> = (0..10).filter(|stream| ends.is_whole(*stream)).collect();
            assert_eq!(whole, [1, 7], "by {size} bytes");
            assert!(!ends.is_going(), "by {size} bytes");
            let goaway = frame(GOAWAY, 0, 0, &[0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
            goaway.chunks(size).for_each(|bytes| scan.read(bytes, &ends));
            assert!(ends.is_going(), "by {size} bytes");
        }
    }
}

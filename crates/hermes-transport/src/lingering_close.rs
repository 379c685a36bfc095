//! Closes a client's connection without a reset that overtakes the last response.
//!
//! In: a connection whose responses were all sent. Out: the end of the connection, once the client has closed its
//! direction too. The kernel resets a connection that closes with unread bytes. The reset discards bytes that the
//! client has not read yet, such as the response to an upload that was refused early (RFC 9112, section 9.6). Therefore
//! the node first half-closes the connection and discards incoming bytes. Never: waits longer than the limits below, or
//! decrypts a byte.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hermes_net::Io;
use tokio::io::AsyncWrite as _;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::runtime::WorkerContext;

/// A client that is silent for this long has received its response, or is unreachable.
const LINGER_SILENCE: Duration = Duration::from_secs(2);
/// A client that never stops sending is disconnected after this time.
const LINGER_TOTAL: Duration = Duration::from_secs(30);
/// Buffer size of one discarding read, in bytes.
const DISCARD_BUFFER: usize = 8 << 10;
/// Number of reads before other tasks of the worker run.
const READS_A_TURN: usize = 32;

/// The phase of a close.
#[derive(Default)]
pub enum LingeringClose {
    /// This node's direction is open.
    #[default]
    Open,
    /// This node's direction is closed; bytes of the client are discarded.
    Reading { ends: Instant, silence: Option<Pin<Box<Sleep>>> },
    /// The connection may be closed.
    Done,
}

impl LingeringClose {
    /// Closes this node's direction. With `waits`, it completes only when the client has closed its direction or a
    /// limit is reached.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        io: &mut Io,
        waits: bool,
    ) -> Poll<io::Result<()>> {
        if let LingeringClose::Open = self {
            ready!(Pin::new(&mut *io).poll_shutdown(cx))?;
            *self = match waits {
                true => LingeringClose::Reading { ends: Instant::now() + LINGER_TOTAL, silence: None },
                false => LingeringClose::Done,
            };
        }
        if let LingeringClose::Reading { ends, silence } = self {
            if !ready!(poll_discard(cx, io, *ends, silence)) {
                worker.shared.metrics.limit("linger");
            }
            *self = LingeringClose::Done;
        }
        Poll::Ready(Ok(()))
    }
}

/// Discards incoming bytes, below TLS. Returns true when the client has closed its direction, and false if a limit was
/// reached.
fn poll_discard(cx: &mut Context<'_>, io: &Io, ends: Instant, silence: &mut Option<Pin<Box<Sleep>>>) -> Poll<bool> {
    let mut buffer = [0; DISCARD_BUFFER];
    for _ in 0..READS_A_TURN {
        let Poll::Ready(readable) = io.tcp().poll_read_ready(cx) else {
            let bound = || Box::pin(sleep_until((Instant::now() + LINGER_SILENCE).min(ends)));
            return silence.get_or_insert_with(bound).as_mut().poll(cx).map(|()| false);
        };
        match readable.and_then(|()| io.tcp().try_read(&mut buffer)) {
            Ok(0) => return Poll::Ready(true),
            Ok(_) if Instant::now() >= ends => return Poll::Ready(false),
            Ok(_) => *silence = None,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return Poll::Ready(true),
        }
    }
    cx.waker().wake_by_ref();
    Poll::Pending
}

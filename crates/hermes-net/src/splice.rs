//! Moves bytes from one TCP socket to another inside the kernel (splice(2)).
//!
//! In: two sockets of the worker's runtime. Out: bytes moved, in order. They wait in a pipe, which the caller holds only
//! while bytes are under way. A few empty pipes are kept for each worker. Never: a copy to user space.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Context, Poll, ready};

use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice};
use nix::unistd::pipe2;
use tokio::io::Interest;
use tokio::net::TcpStream;

/// The capacity of a pipe in bytes. A socket fills a page slot with up to 32 KiB, so the kernel limits a move first.
const PIPE_BYTES: i32 = 256 << 10;
/// The most bytes of one move.
const MAX_MOVE: usize = 256 << 10;
/// The most empty pipes that a worker keeps.
const MAX_SPARE: usize = 16;

thread_local! {
    static SPARE: RefCell<Vec<(OwnedFd, OwnedFd)>> = const { RefCell::new(Vec::new()) };
}

/// A pipe, and the number of bytes that wait in it.
#[derive(Debug)]
pub struct Pipe {
    /// The ends to read from and to write to; `None` only while it is dropped.
    ends: Option<(OwnedFd, OwnedFd)>,
    waiting: usize,
}

/// The side of a move that failed.
#[derive(Debug)]
pub enum MoveError {
    /// The socket that sends.
    Source(io::Error),
    /// The socket that receives.
    Sink(io::Error),
}

impl Pipe {
    /// Takes a spare pipe of this thread, or makes one.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn take() -> io::Result<Self> {
        if let Some(ends) = SPARE.with_borrow_mut(Vec::pop) {
            return Ok(Self { ends: Some(ends), waiting: 0 });
        }
        let ends = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        crate::host::spare(&ends.0)?;
        // An unprivileged process may be over its limit for large pipes; then the default capacity remains.
        let _ = fcntl(&ends.1, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
        Ok(Self { ends: Some(ends), waiting: 0 })
    }

    /// Whether no bytes wait.
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Moves bytes from `source` into the empty pipe. `Ok(0)`: the source has ended.
    ///
    /// # Errors
    /// The errors of the source.
    pub fn poll_fill(&mut self, cx: &mut Context<'_>, source: &TcpStream) -> Poll<io::Result<usize>> {
        let Some((_, into)) = &self.ends else { return Poll::Ready(Ok(0)) };
        loop {
            ready!(source.poll_read_ready(cx))?;
            let moved = source.try_io(Interest::READABLE, || Ok(splice_some(source, into, MAX_MOVE)?));
            match moved {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(moved) => {
                    self.waiting += moved;
                    return Poll::Ready(Ok(moved));
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// Moves waiting bytes to `sink`. Ready when none wait; the value is the number moved in this call, which is also
    /// reported while the sink is blocked: see `moved`.
    ///
    /// # Errors
    /// The errors of the sink.
    pub fn poll_drain(&mut self, cx: &mut Context<'_>, sink: &TcpStream, moved: &mut usize) -> Poll<io::Result<()>> {
        let Some((from, _)) = &self.ends else { return Poll::Ready(Ok(())) };
        while self.waiting > 0 {
            ready!(sink.poll_write_ready(cx))?;
            match sink.try_io(Interest::WRITABLE, || Ok(splice_some(from, sink, self.waiting)?)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(count) => {
                    self.waiting -= count;
                    *moved += count;
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(()))
    }
}

fn splice_some(from: &impl AsFd, to: &impl AsFd, most: usize) -> nix::Result<usize> {
    splice(from, None, to, None, most, SpliceFFlags::SPLICE_F_NONBLOCK | SpliceFFlags::SPLICE_F_MOVE)
}

impl Drop for Pipe {
    fn drop(&mut self) {
        if self.waiting > 0 {
            return;
        }
        let ends = self.ends.take();
        // While the thread ends, its spare pipes may be gone already.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < MAX_SPARE {
                spare.extend(ends);
            }
        });
    }
}

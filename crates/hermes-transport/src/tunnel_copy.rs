//! Copies the bytes of a tunnel in both directions until both have ended.
//!
//! In: two byte streams and their session. Out: bytes in order. A clean end of one stream's receiving direction cleanly
//! ends the sending direction of the other stream (half-close). A failure of one stream resets both. Both directions
//! are polled together, so that a tunnel is one future with one owner. At most one chunk is buffered in each direction.
//! Between two plain TCP sockets, bulk data does not leave the kernel (`hermes_net::splice`), and urgent data stays
//! urgent. In an HTTP tunnel, urgent data becomes an ordinary byte of the stream.

use std::future::Future as _;
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hermes_model::facts::Kind;
use hermes_net::splice::{MoveError, Pipe};
use hermes_net::tcp;

use crate::datagram::CLOSE_TIMEOUT;
use crate::error::Error;
use crate::runtime::session::{Phase, Session};
use crate::stream::{ByteStream, CHUNK, Received, has_parted};

/// The maximum number of steps of one direction before other tasks of the worker run.
const CHUNKS_A_TURN: usize = 32;
/// The number of steps for which a spliced move counts, which has up to 256 KiB.
const SPLICE_CHUNKS: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Reading,
    /// The kernel moves the bytes from socket to socket.
    Splicing,
    Writing,
    WritingUrgent(u8),
    Flushing,
    Finishing,
    /// The sink wants no more bytes, which is no error. The source is still read, because closing a socket with unread
    /// bytes resets the connection and loses bytes that are still to be sent on it.
    Discarding,
    Done,
}

/// The time within which a client must end its direction after the other direction has ended and the upstream wants no
/// more bytes.
const LINGER: Duration = Duration::from_secs(30);

struct Direction {
    state: State,
    chunk: Bytes,
    from_client: bool,
    /// Only while bytes are spliced.
    pipe: Option<Pipe>,
    /// The last read filled its buffer, so that more bytes are likely.
    is_bulk: bool,
}

/// The side of a tunnel that failed, and its error.
enum Failure {
    Client(io::Error),
    UpstreamEnd(io::Error),
}

/// Copies bytes until both directions have ended. Stores a failure for the access log.
pub async fn relay(mut downstream: ByteStream, mut upstream: ByteStream, session: &Session) {
    let entry = &session.entry;
    entry.set_phase(&session.worker, Phase::Open);
    let mut up = Direction::new(true);
    let mut down = Direction::new(false);
    let mut linger = None;
    let failed = std::future::poll_fn(|cx| {
        if let Poll::Ready(error) = entry.end.poll(cx) {
            return Poll::Ready(Some(error));
        }
        let carried = [downstream.poll_carrier(cx), upstream.poll_carrier(cx)];
        let first = up.poll(cx, &mut downstream, &mut upstream, session, down.state == State::Done);
        let second = down.poll(cx, &mut upstream, &mut downstream, session, up.state == State::Done);
        if let Poll::Ready(failure) = poll_broken_off(cx, &mut downstream, &mut upstream, &mut up, &down) {
            return Poll::Ready(Some(named(failure, session)));
        }
        if down.state == State::Done
            && up.state == State::Discarding
            && linger.get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER))).as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(None);
        }
        let blocked = up.is_blocked() || down.is_blocked();
        entry.set_phase(&session.worker, if blocked { Phase::Blocked } else { Phase::Open });
        match (first, second) {
            (Poll::Ready(Err(failure)), _) | (_, Poll::Ready(Err(failure))) => {
                Poll::Ready(Some(named(failure, session)))
            }
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => match carried {
                [Poll::Ready(Err(error)), _] => Poll::Ready(Some(named(Failure::Client(error), session))),
                [_, Poll::Ready(Err(error))] => Poll::Ready(Some(named(Failure::UpstreamEnd(error), session))),
                [Poll::Ready(Ok(())), Poll::Ready(Ok(()))] => Poll::Ready(None),
                // A stream still sends its last bytes, and wakes this task when they are sent.
                _ => Poll::Pending,
            },
            _ => Poll::Pending,
        }
    })
    .await;
    match failed {
        None => {}
        // Most UDP flows end by their idle timeout, which is no failure, so both streams are closed cleanly.
        Some(Error::Idle(_)) if entry.facts.kind == Kind::Udp => {
            let closed = std::future::poll_fn(|cx| {
                let open = downstream.poll_close(cx).is_pending() | upstream.poll_close(cx).is_pending();
                if open { Poll::Pending } else { Poll::Ready(()) }
            });
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, closed).await;
        }
        Some(error) => {
            downstream.abort();
            upstream.abort();
            entry.fail(&error);
        }
    }
}

/// Ready if a stream that is currently not read was reset: its own direction has ended, or its last chunk waits for the
/// sink. The upstream is checked only after its direction has ended, because bytes that it sent before the reset may
/// still arrive.
fn poll_broken_off(
    cx: &mut Context<'_>,
    downstream: &mut ByteStream,
    upstream: &mut ByteStream,
    up: &mut Direction,
    down: &Direction,
) -> Poll<Failure> {
    if matches!(up.state, State::Done | State::Writing | State::WritingUrgent(_))
        && let Poll::Ready(error) = downstream.poll_reset(cx)
    {
        return Poll::Ready(Failure::Client(error));
    }
    if down.state == State::Done
        && !matches!(up.state, State::Discarding | State::Done)
        && let Poll::Ready(error) = upstream.poll_reset(cx)
    {
        if !has_parted(&error) {
            return Poll::Ready(Failure::UpstreamEnd(error));
        }
        up.state = State::Discarding;
        cx.waker().wake_by_ref();
    }
    Poll::Pending
}

fn named(failure: Failure, session: &Session) -> Error {
    match failure {
        Failure::Client(error) => Error::ClientGone(error.to_string()),
        Failure::UpstreamEnd(error) => Error::Broken {
            peer: session.entry.peer.borrow().clone().unwrap_or_else(|| "the far end".into()),
            reason: error.to_string(),
            unprocessed: false,
        },
    }
}

impl Direction {
    fn new(from_client: bool) -> Self {
        Self { state: State::Reading, chunk: Bytes::new(), from_client, pipe: None, is_bulk: false }
    }

    /// Bytes wait for the sink.
    fn is_blocked(&self) -> bool {
        matches!(self.state, State::Writing | State::WritingUrgent(_))
            || self.pipe.as_ref().is_some_and(|pipe| !pipe.is_empty())
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut ByteStream,
        sink: &mut ByteStream,
        session: &Session,
        is_last: bool,
    ) -> Poll<Result<(), Failure>> {
        let client_at = |here: bool| if here { Failure::Client } else { Failure::UpstreamEnd };
        let (from_source, from_sink) = (client_at(self.from_client), client_at(!self.from_client));
        let mut turn = 0;
        while turn < CHUNKS_A_TURN {
            turn += 1;
            match self.state {
                State::WritingUrgent(byte) => {
                    ready!(self.poll_write_urgent(byte, cx, sink, session).map_err(from_sink))?;
                }
                State::Reading => match source.poll_receive(cx) {
                    Poll::Ready(Ok(Some(received))) => self.state = self.take(received, sink, session),
                    Poll::Ready(Ok(None)) => self.state = State::Finishing,
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(from_source(error))),
                    Poll::Pending => return Poll::Pending,
                },
                State::Writing => {
                    let before = self.chunk.len();
                    let written = sink.poll_write(cx, &mut self.chunk);
                    self.count(before - self.chunk.len(), session);
                    self.state = match written {
                        Poll::Ready(Err(error)) if self.from_client && has_parted(&error) => {
                            self.chunk = Bytes::new();
                            State::Discarding
                        }
                        Poll::Ready(written) => {
                            written.map_err(from_sink)?;
                            // An empty chunk would keep its buffer while the tunnel is idle.
                            self.chunk = Bytes::new();
                            State::Flushing
                        }
                        Poll::Pending => return Poll::Pending,
                    };
                }
                State::Flushing => match sink.poll_flush(cx).map_err(from_sink)? {
                    Poll::Ready(()) => self.state = if self.is_bulk { State::Splicing } else { State::Reading },
                    Poll::Pending => return Poll::Pending,
                },
                State::Splicing => {
                    let mut moved = 0;
                    let spliced = self.splice(cx, source, sink, &mut moved);
                    self.count(moved, session);
                    match spliced {
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(MoveError::Source(error))) => return Poll::Ready(Err(from_source(error))),
                        Poll::Ready(Err(MoveError::Sink(error))) => return Poll::Ready(Err(from_sink(error))),
                        Poll::Pending => return Poll::Pending,
                    }
                    turn += SPLICE_CHUNKS;
                }
                State::Finishing if is_last && sink.ends_by_drop() => self.state = State::Done,
                State::Finishing => match sink.poll_finish(cx) {
                    Poll::Ready(Err(error)) if !(self.from_client && has_parted(&error)) => {
                        return Poll::Ready(Err(from_sink(error)));
                    }
                    Poll::Ready(_) => self.state = State::Done,
                    Poll::Pending => return Poll::Pending,
                },
                State::Discarding => match source.poll_read(cx) {
                    Poll::Ready(Ok(Some(_))) => {}
                    Poll::Ready(_) => self.state = State::Done,
                    Poll::Pending => return Poll::Pending,
                },
                State::Done => return Poll::Ready(Ok(())),
            }
        }
        if self.state == State::Done {
            return Poll::Ready(Ok(()));
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Returns the state in which received bytes are sent.
    fn take(&mut self, received: Received, sink: &ByteStream, session: &Session) -> State {
        match received {
            Received::Chunk(chunk) => {
                self.is_bulk = chunk.len() >= CHUNK;
                self.chunk = chunk;
                State::Writing
            }
            Received::Urgent(byte) => {
                let stays_urgent = sink.urgent_sink().is_some();
                session.worker.shared.metrics.count_urgent(stays_urgent);
                self.is_bulk = false;
                self.chunk = Bytes::copy_from_slice(&[byte]);
                if stays_urgent { State::WritingUrgent(byte) } else { State::Writing }
            }
        }
    }

    /// Sends the chunk, which is one byte, as urgent data.
    fn poll_write_urgent(
        &mut self,
        byte: u8,
        cx: &mut Context<'_>,
        sink: &ByteStream,
        session: &Session,
    ) -> Poll<io::Result<()>> {
        if let Some(to) = sink.urgent_sink() {
            ready!(tcp::poll_send_urgent(to, byte, cx))?;
            self.count(1, session);
        }
        self.chunk = Bytes::new();
        self.state = State::Reading;
        Poll::Ready(Ok(()))
    }

    /// Moves bytes from socket to socket, and sets the next state. An idle direction holds no pipe.
    fn splice(
        &mut self,
        cx: &mut Context<'_>,
        source: &ByteStream,
        sink: &ByteStream,
        moved: &mut usize,
    ) -> Poll<Result<(), MoveError>> {
        let (Some(from), Some(to)) = (source.plain_tcp(), sink.plain_tcp()) else {
            self.state = State::Reading;
            return Poll::Ready(Ok(()));
        };
        let mut pipe = match self.pipe.take().map_or_else(Pipe::take, Ok) {
            Ok(pipe) => pipe,
            // Without a descriptor for a pipe, the bytes are copied.
            Err(_) => {
                (self.state, self.is_bulk) = (State::Reading, false);
                return Poll::Ready(Ok(()));
            }
        };
        if pipe.is_empty() {
            match pipe.poll_fill(cx, from) {
                // At the urgent mark, nothing is moved. After the peer's FIN, that looks like the end.
                Poll::Ready(Ok(0)) => {
                    self.state = if tcp::is_at_urgent(from) { State::Reading } else { State::Finishing };
                    return Poll::Ready(Ok(()));
                }
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(MoveError::Source(error))),
                Poll::Pending => {
                    self.state = State::Reading;
                    // Urgent data ends a move, too.
                    return if tcp::is_at_urgent(from) { Poll::Ready(Ok(())) } else { Poll::Pending };
                }
            }
        }
        let drained = pipe.poll_drain(cx, to, moved);
        if !pipe.is_empty() {
            self.pipe = Some(pipe);
        }
        drained.map_err(MoveError::Sink)
    }

    fn count(&self, bytes: usize, session: &Session) {
        if bytes == 0 {
        } else if self.from_client {
            session.entry.add_received(&session.worker, bytes);
        } else {
            session.entry.add_sent(&session.worker, bytes);
        }
    }
}

//! A response body that another alternative of a race continues when the first one breaks off.
//!
//! In: a body, and a request that may be sent again. Out: the bytes of one content. The repeated ones are compared by
//! SHA-256 with those that the client has. Never: a continuation whose first bytes or whose length differ.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use aws_lc_rs::digest;
use bytes::Bytes;
use hermes_transport::body::{Body, BoxedBody};
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, HeaderValue};
use http::response::Parts;
use http::{Response, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

/// The bytes of a repeated content that must arrive within the patience. A slower alternative is given up.
const MIN_REPEATED_BYTES: u64 = 1 << 20;
/// Frames that are handled before other tasks run.
const FRAMES_A_TURN: usize = 32;

/// The parts of a head that must agree before two bodies are joined.
pub struct Head {
    status: StatusCode,
    encoding: Option<HeaderValue>,
    range: Option<HeaderValue>,
    /// `None`: the sender knows no length, as a gateway of NDN.
    length: Option<u64>,
}

impl Head {
    /// Reads them.
    pub fn of(parts: &Parts) -> Self {
        let field = |name| parts.headers.get(name).cloned();
        let length = parts.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        Self { status: parts.status, encoding: field(CONTENT_ENCODING), range: field(CONTENT_RANGE), length }
    }

    /// Why a second body cannot continue the first one; `None` if it can.
    fn contradicts(&self, second: &Self) -> Option<&'static str> {
        let lengths_differ = self.length.zip(second.length).is_some_and(|(first, second)| first != second);
        match () {
            () if self.encoding != second.encoding => Some("its Content-Encoding differs"),
            () if self.range != second.range => Some("its Content-Range differs"),
            () if lengths_differ => Some("its Content-Length differs"),
            () => None,
        }
    }
}

/// The response of an alternative, and the alternative's name for the log.
pub struct Answer {
    /// The name.
    pub peer: Arc<str>,
    /// The response.
    pub response: Response<Body>,
}

/// A request that is being sent again.
pub type Attempt = Pin<Box<dyn Future<Output = Result<Answer, Error>>>>;

/// A request that may be sent to several alternatives.
pub trait Repeatable {
    /// The session of the request.
    fn entry(&self) -> &Rc<SessionEntry>;

    /// Sends the request to this alternative.
    fn send_again(&self, at: usize) -> Attempt;

    /// Another alternative has taken the place of the one that broke off.
    fn is_replaced(&self, by: usize);
}

enum State {
    Reading(Body),
    /// The request was sent to the next alternative.
    Asking(Attempt),
    Done,
}

/// Compares the bytes of a repeated content with those that the client has.
struct PrefixCheck {
    hash: digest::Context,
    remaining: u64,
    /// Bytes since the timer was reset.
    since_reset: u64,
}

/// A body that another alternative continues when the first one breaks off.
pub struct RepeatableBody<R> {
    request: R,
    /// The longest silence of an alternative.
    patience: Duration,
    /// The alternative that sends, and its name.
    current: usize,
    peer: Arc<str>,
    /// Alternatives that may still be asked.
    untried: Vec<usize>,
    head: Head,
    state: State,
    /// The hash and the number of the bytes that the client has.
    hash: digest::Context,
    sent: u64,
    prefix_check: Option<PrefixCheck>,
    /// The error of the first alternative, once that has failed.
    failure: Option<Error>,
    /// The last bytes of a joined content. They are withheld until its end confirms the announced length, so that no client
    /// takes another content for complete.
    withheld: Option<Bytes>,
    session: RefCell<Option<Rc<SessionEntry>>>,
    /// Ends the wait for an alternative that is silent.
    timer: Pin<Box<Sleep>>,
    /// The last poll returned a frame, so the client may be reading.
    has_yielded: bool,
}

impl<R: Repeatable> RepeatableBody<R> {
    /// Returns the body of a response. `current` is the alternative that sends it, one of `count`.
    pub fn new(
        (request, patience): (R, Duration),
        (current, count): (usize, usize),
        peer: Arc<str>,
        head: Head,
        body: Body,
    ) -> Self {
        let timer = Box::pin(tokio::time::sleep(patience));
        Self {
            request,
            patience,
            current,
            peer,
            untried: (0..count).filter(|other| *other != current).rev().collect(),
            head,
            state: State::Reading(body),
            hash: digest::Context::new(&digest::SHA256),
            sent: 0,
            prefix_check: None,
            failure: None,
            withheld: None,
            session: RefCell::new(None),
            timer,
            has_yielded: false,
        }
    }

    fn reset_timer(&mut self) {
        self.timer.as_mut().reset(Instant::now() + self.patience);
    }

    fn broken(&self, reason: String) -> Error {
        Error::Broken { peer: self.peer.clone(), reason, unprocessed: false }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        for _ in 0..FRAMES_A_TURN {
            match &mut self.state {
                State::Done => return Poll::Ready(None),
                State::Reading(body) => {
                    let frame = match Pin::new(body).poll_frame(cx) {
                        Poll::Ready(frame) => frame,
                        Poll::Pending => {
                            ready!(self.timer.as_mut().poll(cx));
                            Some(Err(Error::NoProgress(self.patience)))
                        }
                    };
                    match frame {
                        Some(Ok(frame)) => {
                            if let Some(frame) = self.take(frame)? {
                                return Poll::Ready(Some(Ok(frame)));
                            }
                        }
                        Some(Err(error)) => self.try_next(error)?,
                        None => {
                            if let Some(last) = self.end()? {
                                return Poll::Ready(Some(Ok(Frame::data(last))));
                            }
                        }
                    }
                }
                State::Asking(attempt) => {
                    let answer = match attempt.as_mut().poll(cx) {
                        Poll::Ready(answer) => answer,
                        Poll::Pending => {
                            ready!(self.timer.as_mut().poll(cx));
                            Err(Error::NoProgress(self.patience))
                        }
                    };
                    self.continue_with(answer)?;
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Handles a frame. `None`: the client has all of it, or must wait for it.
    fn take(&mut self, frame: Frame<Bytes>) -> Result<Option<Frame<Bytes>>, Error> {
        let mut data = match frame.into_data() {
            Ok(data) => data,
            Err(trailers) => return Ok(self.failure.is_none().then_some(trailers)),
        };
        if self.prefix_check.is_some() && !self.compare(&mut data)? || data.is_empty() {
            return Ok(None);
        }
        self.reset_timer();
        let total = self.sent + data.len() as u64;
        if self.failure.is_some() && self.head.length.is_some_and(|length| total > length) {
            return Err(self.broken("it is longer than the first one".to_owned()));
        }
        self.hash.update(&data);
        self.sent = total;
        if self.failure.is_some() && self.head.length == Some(total) {
            self.withheld = Some(data);
            return Ok(None);
        }
        Ok(Some(Frame::data(data)))
    }

    /// Removes and compares bytes that the client has already. False if more of them are to come, or another alternative was
    /// asked because they differ.
    fn compare(&mut self, data: &mut Bytes) -> Result<bool, Error> {
        let Some(mut check) = self.prefix_check.take() else { return Ok(true) };
        let known = usize::try_from(check.remaining).unwrap_or(usize::MAX).min(data.len());
        check.hash.update(&data.split_to(known));
        check.remaining -= known as u64;
        check.since_reset += known as u64;
        if check.since_reset >= MIN_REPEATED_BYTES {
            check.since_reset = 0;
            self.reset_timer();
        }
        if check.remaining > 0 {
            self.prefix_check = Some(check);
            return Ok(false);
        }
        if check.hash.finish().as_ref() != self.hash.clone().finish().as_ref() {
            self.try_next(self.broken(format!("its first {} bytes differ from those already sent", self.sent)))?;
            return Ok(false);
        }
        self.request.is_replaced(self.current);
        Ok(true)
    }

    /// Handles the end of a body. Returns the last bytes, if they were withheld.
    fn end(&mut self) -> Result<Option<Bytes>, Error> {
        let is_short = self.failure.is_some() && self.head.length.is_some_and(|length| length != self.sent);
        if self.prefix_check.is_some() || is_short {
            self.try_next(self.broken(format!("it ended early, after less than {} bytes", self.sent.max(1))))?;
            return Ok(None);
        }
        self.state = State::Done;
        Ok(self.withheld.take())
    }

    /// Asks the next alternative. Fails with both errors if all have failed, or if the client has no byte by which the
    /// contents could be compared.
    fn try_next(&mut self, error: Error) -> Result<(), Error> {
        tracing::debug!(peer = %self.peer, %error, "response body failed");
        let Some(next) = self.untried.pop().filter(|_| self.sent > 0 && self.withheld.is_none()) else {
            return Err(match self.failure.take() {
                Some(first) => self.broken(format!("{error}; before that: {first}")),
                None => error,
            });
        };
        let error = self.failure.take().unwrap_or(error);
        (self.current, self.failure, self.prefix_check) = (next, Some(error), None);
        self.state = State::Asking(self.request.send_again(next));
        self.reset_timer();
        Ok(())
    }

    fn continue_with(&mut self, answer: Result<Answer, Error>) -> Result<(), Error> {
        let Answer { peer, response } = match answer {
            Ok(answer) => answer,
            Err(error) => return self.try_next(error),
        };
        *self.request.entry().peer.borrow_mut() = Some(peer.clone());
        self.peer = peer;
        let (parts, body) = response.into_parts();
        if parts.status != self.head.status {
            return self.try_next(Error::Refused { peer: self.peer.clone(), status: parts.status });
        }
        if let Some(reason) = self.head.contradicts(&Head::of(&parts)) {
            return self.try_next(self.broken(reason.to_owned()));
        }
        if let Some(session) = &*self.session.borrow() {
            body.bind(session);
        }
        let hash = digest::Context::new(&digest::SHA256);
        self.prefix_check = Some(PrefixCheck { hash, remaining: self.sent, since_reset: 0 });
        self.state = State::Reading(body);
        self.reset_timer();
        Ok(())
    }
}

impl<R: Repeatable> BoxedBody for RepeatableBody<R> {
    fn bind(&self, session: &Rc<SessionEntry>) {
        if let State::Reading(body) = &self.state {
            body.bind(session);
        }
        *self.session.borrow_mut() = Some(session.clone());
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if std::mem::take(&mut self.has_yielded) {
            // Time that the client spends on reading does not count.
            self.reset_timer();
        }
        let polled = self.poll(cx);
        self.has_yielded = polled.is_ready();
        self.request.entry().set_held(polled.is_pending());
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.state = State::Done;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Done)
    }

    fn size_hint(&self) -> SizeHint {
        let withheld = self.withheld.as_ref().map_or(0, Bytes::len) as u64;
        let left = |length: u64| (length + withheld).saturating_sub(self.sent);
        self.head.length.map_or_else(SizeHint::default, |length| SizeHint::with_exact(left(length)))
    }
}

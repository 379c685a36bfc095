//! A request body that may be sent in several attempts.
//!
//! In: a body, which the client sends once. Out: attempts to send it. A further attempt replays the bytes of the first,
//! provided that all of them are buffered. The body is not polled before an upstream wants it: the first poll makes the
//! server send `100 Continue` to a client that waits for it. Never: more of a body in memory than the replay limit.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame, SizeHint};

use super::{Body, Interim, TrailerSlot};
use crate::error::Error;
use crate::runtime::WorkerContext;
use crate::runtime::session::SessionEntry;

/// The maximum time for which a body waits for `100 Continue` of the upstream (RFC 9110, section 10.1.1).
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum length, in bytes, of a body that is read and discarded so that its connection can be reused.
const SHORT_BODY: u64 = 4 << 10;

/// A request body that may be sent in several attempts.
#[derive(Clone)]
pub enum RequestBody {
    /// No body. The request can be sent in any number of attempts.
    Empty,
    /// A body that the client sends once.
    Once(Rc<RefCell<ReplayBuffer>>),
}

/// A client's body, and its bytes that are buffered for further attempts.
pub struct ReplayBuffer {
    body: Body,
    worker: Rc<WorkerContext>,
    entry: Option<Rc<SessionEntry>>,
    /// The chunks that were read from `body`, for another attempt.
    kept: Vec<Bytes>,
    trailers: Option<HeaderMap>,
    kept_bytes: usize,
    /// Bytes of `kept` that are charged to the session.
    charged: u64,
    keep_at_most: usize,
    /// True if the buffered bytes are released when the response arrives.
    until_answered: bool,
    /// True once an attempt began that replays buffered bytes. They are then needed until that attempt has sent them.
    is_replayed: bool,
    /// True if some bytes that were read are not buffered, so that no further attempt is possible.
    lost: bool,
    ended: bool,
    /// Set if the body must wait for `100 Continue` of the upstream.
    gate: Option<Arc<Interim>>,
    /// The timer of [`CONTINUE_TIMEOUT`], because an upstream need not send `100 Continue`.
    patience: Option<Pin<Box<tokio::time::Sleep>>>,
    /// True if the last poll found no bytes, because the client has not sent any yet.
    waits: bool,
    /// The error with which reading from the client failed.
    failed: Option<Error>,
    /// True once the body was polled. The HTTP/2 server then sends `100 Continue`.
    pub wanted: bool,
}

impl RequestBody {
    pub fn new(worker: &Rc<WorkerContext>, body: Body) -> Self {
        if body.is_end_stream() || matches!(body, Body::Empty) {
            return RequestBody::Empty;
        }
        RequestBody::Once(Rc::new(RefCell::new(ReplayBuffer {
            body,
            worker: worker.clone(),
            entry: None,
            kept: Vec::new(),
            trailers: None,
            kept_bytes: 0,
            charged: 0,
            keep_at_most: 0,
            until_answered: false,
            is_replayed: false,
            lost: false,
            ended: false,
            gate: None,
            patience: None,
            waits: false,
            failed: None,
            wanted: false,
        })))
    }

    /// Charges the unread bytes of the body to a session. The session may end if `limits.receive-buffer` is exceeded.
    pub fn bind(&self, session: &Rc<SessionEntry>) {
        if let RequestBody::Once(source) = self {
            source.borrow().body.bind(session);
        }
    }

    /// Sets the session of the body and the replay limit in bytes. With a `gate`, the body waits for `100 Continue` of
    /// the upstream.
    pub fn prepare(&self, entry: &Rc<SessionEntry>, keep_at_most: usize, gate: Option<Arc<Interim>>) {
        if let RequestBody::Once(source) = self {
            let mut source = source.borrow_mut();
            source.entry = Some(entry.clone());
            source.keep_at_most = keep_at_most;
            source.gate = gate;
        }
    }

    /// Buffers at most this many bytes until the response arrives, in case the peer refuses the stream. A refused
    /// request may be sent again even if its method is not idempotent (RFC 9113, section 8.7). Has no effect if a
    /// replay limit is already set, or if the body was polled.
    pub fn keep_until_answered(&self, keep_at_most: usize) {
        if let RequestBody::Once(source) = self {
            let mut source = source.borrow_mut();
            if source.keep_at_most == 0 && !source.wanted {
                (source.keep_at_most, source.until_answered) = (keep_at_most, true);
            }
        }
    }

    /// Releases the bytes that [`Self::keep_until_answered`] buffered. Called when the response has arrived.
    pub fn answered(&self) {
        if let RequestBody::Once(source) = self {
            let mut source = source.borrow_mut();
            if source.until_answered && !source.is_replayed {
                source.keep_at_most = 0;
                source.lost |= !source.kept.is_empty();
                source.forget();
            }
        }
    }

    /// True if an attempt can send the whole body, from its first byte.
    pub fn can_be_sent(&self) -> bool {
        match self {
            RequestBody::Empty => true,
            RequestBody::Once(source) => !source.borrow().lost,
        }
    }

    /// Returns the error with which reading from the client failed, or `None`.
    pub fn failure(&self) -> Option<Error> {
        match self {
            RequestBody::Empty => None,
            RequestBody::Once(source) => source.borrow().failed.clone(),
        }
    }

    /// True if the whole body was read from the client, or reading failed.
    pub fn is_taken(&self) -> bool {
        match self {
            RequestBody::Empty => true,
            RequestBody::Once(source) => {
                let source = source.borrow();
                source.ended || source.failed.is_some() || source.body.is_end_stream()
            }
        }
    }

    /// True if no attempt reads the rest of the body, and the rest is too long to be read and discarded. The HTTP/1.1
    /// connection must then close, because the rest of the body precedes the next request.
    pub fn is_abandoned(&self) -> bool {
        let RequestBody::Once(source) = self else { return false };
        let is_long = || source.borrow().body.size_hint().exact().is_none_or(|length| length > SHORT_BODY);
        Rc::strong_count(source) == 1 && !self.is_taken() && is_long()
    }

    /// True if the body is incomplete and the last poll found no further bytes from the client.
    pub fn waits_for_client(&self) -> bool {
        match self {
            RequestBody::Empty => false,
            RequestBody::Once(source) => source.borrow().waits,
        }
    }

    /// True if an attempt has polled the body. The HTTP/2 server then sends `100 Continue`.
    pub fn is_wanted(&self) -> bool {
        match self {
            RequestBody::Empty => false,
            RequestBody::Once(source) => source.borrow().wanted,
        }
    }

    /// Begins an attempt that sends the body from its first byte.
    pub fn attempt(&self) -> Attempt {
        match self {
            RequestBody::Empty => Attempt { source: None, position: 0, done: false, trailers: None },
            RequestBody::Once(source) => {
                let is_replayed = !source.borrow().kept.is_empty();
                source.borrow_mut().is_replayed |= is_replayed;
                Attempt { source: Some(source.clone()), position: 0, done: false, trailers: None }
            }
        }
    }

    /// Unwraps the body, for a tunnel by POST. Returns `None` if an attempt shares the body.
    pub fn into_body(self) -> Option<Body> {
        match self {
            RequestBody::Empty => Some(Body::Empty),
            RequestBody::Once(source) => Some(Rc::try_unwrap(source).ok()?.into_inner().body),
        }
    }
}

/// An attempt to send a request's body.
pub struct Attempt {
    source: Option<Rc<RefCell<ReplayBuffer>>>,
    position: usize,
    done: bool,
    /// Receives the trailers if the attempt sends the body chunked over HTTP/1.1. `None` otherwise: the trailers are
    /// then the last frame of the body.
    trailers: Option<TrailerSlot>,
}

impl Attempt {
    /// Returns the request body that this attempt sends.
    pub fn request(&self) -> RequestBody {
        self.source.clone().map_or(RequestBody::Empty, RequestBody::Once)
    }

    /// Sets the slot through which the HTTP/1.1 connection receives the trailers, to send them after the last chunk.
    pub fn give_trailers_to(&mut self, slot: TrailerSlot) {
        self.trailers = Some(slot);
    }

    fn end_with(&self, trailers: HeaderMap) -> Option<Result<Frame<Bytes>, Error>> {
        match &self.trailers {
            Some(slot) => {
                slot.set(trailers);
                None
            }
            None => Some(Ok(Frame::trailers(trailers))),
        }
    }
}

impl HttpBody for Attempt {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = self.get_mut();
        let Some(source) = this.source.as_ref().filter(|_| !this.done) else { return Poll::Ready(None) };
        let mut source = source.borrow_mut();
        if let Some(kept) = source.kept.get(this.position) {
            this.position += 1;
            return Poll::Ready(Some(Ok(Frame::data(kept.clone()))));
        }
        if source.ended {
            this.done = true;
            let trailers = source.trailers.clone();
            drop(source);
            return Poll::Ready(trailers.and_then(|trailers| this.end_with(trailers)));
        }
        ready!(source.poll_gate(cx));
        let frame = ready!(source.poll_source(cx));
        if matches!(&frame, Some(Ok(frame)) if frame.is_data()) && !source.lost {
            this.position += 1;
        }
        drop(source);
        this.done = !matches!(&frame, Some(Ok(frame)) if frame.is_data());
        match frame.map(|frame| frame.map(Frame::into_trailers)) {
            Some(Ok(Ok(trailers))) => Poll::Ready(this.end_with(trailers)),
            Some(Ok(Err(data))) => Poll::Ready(Some(Ok(data))),
            Some(Err(error)) => Poll::Ready(Some(Err(error))),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.source.as_ref().is_none_or(|source| {
            let source = source.borrow();
            self.position >= source.kept.len() && source.body.is_end_stream() && source.trailers.is_none()
        })
    }

    fn size_hint(&self) -> SizeHint {
        let Some(source) = &self.source else { return SizeHint::with_exact(0) };
        let source = source.borrow();
        let kept: u64 = source.kept.iter().skip(self.position).map(|bytes| bytes.len() as u64).sum();
        match source.body.size_hint().exact() {
            Some(rest) => SizeHint::with_exact(rest + kept),
            None => SizeHint::default(),
        }
    }
}

impl ReplayBuffer {
    /// Ready when the upstream has permitted the body, or [`CONTINUE_TIMEOUT`] has passed.
    fn poll_gate(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(gate) = &self.gate else { return Poll::Ready(()) };
        if gate.poll_allowed(cx).is_pending() {
            let patience = self.patience.get_or_insert_with(|| Box::pin(tokio::time::sleep(CONTINUE_TIMEOUT)));
            ready!(patience.as_mut().poll(cx));
        }
        (self.gate, self.patience) = (None, None);
        Poll::Ready(())
    }

    fn poll_source(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        self.wanted = true;
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.waits = polled.is_pending();
        let mut frame = ready!(polled);
        match &mut frame {
            Some(Ok(frame)) => {
                if let (Some(trailers), Some(entry)) = (frame.trailers_mut(), &self.entry) {
                    entry.strip_request_trailers(&self.worker, trailers);
                }
                if let Some(data) = frame.data_ref() {
                    self.keep(data);
                    if let Some(entry) = &self.entry {
                        entry.add_received(&self.worker, data.len());
                    }
                }
                if let Some(trailers) = frame.trailers_ref() {
                    self.ended = true;
                    if !self.lost {
                        self.trailers = Some(trailers.clone());
                    }
                }
            }
            Some(Err(error)) => {
                self.lost = true;
                self.failed = Some(error.clone());
                if let Some(entry) = &self.entry {
                    entry.fail(error);
                }
            }
            None => self.ended = true,
        }
        Poll::Ready(frame)
    }

    fn keep(&mut self, data: &Bytes) {
        if self.lost {
            return;
        }
        self.kept_bytes += data.len();
        let bytes = data.len() as u64;
        let has_room = self.entry.as_ref().is_none_or(|entry| entry.may_hold(&self.worker, bytes));
        if self.kept_bytes <= self.keep_at_most && has_room {
            self.charged += bytes;
            self.kept.push(data.clone());
        } else {
            self.lost = true;
            self.forget();
        }
    }

    /// Drops the buffered chunks and releases their charge to the session.
    fn forget(&mut self) {
        self.kept = Vec::new();
        let charged = std::mem::take(&mut self.charged);
        if let Some(entry) = &self.entry {
            entry.release(&self.worker, charged);
        }
    }
}

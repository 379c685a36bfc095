//! Bodies of HTTP messages, in both directions, of either version.
//!
//! In: what hyper or h2 received. Out: `http_body::Body` for hyper, frames for h2.
//! A request's body can be sent again as long as everything that was taken from it is still held;
//! it is not touched before somebody upstream asks for it, since the first touch tells a client
//! that waits for `100 Continue` to go on.
//! Never: a whole body in memory, beyond the bound for replay.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;

use crate::error::Error;
use crate::live::{Entry, Phase, Session};
use crate::stream::h2::Receiver;
use crate::upstream::exchange::ExchangeBody;
use crate::worker::Worker;

/// A received or made body.
pub(crate) enum Body {
    /// Nothing.
    Empty,
    /// Bytes made here.
    Full(Bytes),
    /// From hyper's h1 server.
    H1(Incoming),
    /// From an h2 stream, of either side.
    H2(H2Body),
    /// A response that still drives the exchange that it came from.
    Exchange(Box<ExchangeBody>),
    /// Fed by a tunnel that is carried in bodies (POST).
    Channel(ChannelBody),
}

impl Body {
    /// It is this session's, which ends where too much of it lies unread.
    pub(crate) fn bind(&self, session: &Rc<Entry>) {
        match self {
            Body::H2(body) => body.bind(session),
            Body::Exchange(body) => body.bind(session),
            Body::Empty | Body::Full(_) | Body::H1(_) | Body::Channel(_) => {}
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self.get_mut() {
            Body::Empty => Poll::Ready(None),
            Body::Full(bytes) if bytes.is_empty() => Poll::Ready(None),
            Body::Full(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Body::H1(incoming) => {
                Pin::new(incoming).poll_frame(cx).map_err(|error| Error::ClientGone(error.to_string()))
            }
            Body::H2(body) => Pin::new(body).poll_frame(cx),
            Body::Exchange(body) => Pin::new(&mut **body).poll_frame(cx),
            Body::Channel(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Body::Empty => true,
            Body::Full(bytes) => bytes.is_empty(),
            Body::H1(incoming) => incoming.is_end_stream(),
            Body::H2(body) => body.is_end_stream(),
            Body::Exchange(body) => body.is_end_stream(),
            Body::Channel(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Empty => SizeHint::with_exact(0),
            Body::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Body::H1(incoming) => incoming.size_hint(),
            Body::H2(body) => body.size_hint(),
            Body::Exchange(body) => body.size_hint(),
            Body::Channel(_) => SizeHint::default(),
        }
    }
}

/// The receiving half of an h2 stream.
pub(crate) struct H2Body {
    recv: Receiver,
    remaining: Option<u64>,
    trailers: bool,
    /// A reset with NO_ERROR may stand behind the end of the message: the peer answered in full
    /// while it was still being sent the request (RFC 9113, 8.1). h2 does not tell whether it did.
    pub(crate) may_be_cut: bool,
}

impl H2Body {
    /// `length` is the message's `content-length`.
    pub(crate) fn new(recv: Receiver, length: Option<u64>) -> Self {
        Self { recv, remaining: length, trailers: false, may_be_cut: false }
    }

    /// It is this session's.
    pub(crate) fn bind(&self, session: &Rc<Entry>) {
        self.recv.bind(session);
    }

    /// The stream, for a tunnel.
    pub(crate) fn into_stream(self) -> Receiver {
        self.recv
    }
}

/// A body that a tunnel writes: one chunk at a time, so that it is bounded by its reader.
#[derive(Default)]
struct Channel {
    chunk: Option<Bytes>,
    ended: bool,
    /// The writer gave up: what was sent is not the whole.
    broken: bool,
    reader_gone: bool,
    reader: Option<std::task::Waker>,
    writer: Option<std::task::Waker>,
}

/// The reading end: a body.
pub(crate) struct ChannelBody(Rc<RefCell<Channel>>);

/// The writing end.
pub(crate) struct ChannelSender(Rc<RefCell<Channel>>);

/// A body and its writer.
pub(crate) fn channel() -> (ChannelSender, ChannelBody) {
    let shared = Rc::new(RefCell::new(Channel::default()));
    (ChannelSender(shared.clone()), ChannelBody(shared))
}

impl ChannelBody {
    fn poll_frame(&self, cx: &Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let mut channel = self.0.borrow_mut();
        if let Some(chunk) = channel.chunk.take() {
            if let Some(writer) = channel.writer.take() {
                writer.wake();
            }
            return Poll::Ready(Some(Ok(Frame::data(chunk))));
        }
        if channel.broken {
            return Poll::Ready(Some(Err(Error::ClientGone("the tunnel broke".to_owned()))));
        }
        if channel.ended {
            return Poll::Ready(None);
        }
        channel.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for ChannelBody {
    fn drop(&mut self) {
        let mut channel = self.0.borrow_mut();
        channel.reader_gone = true;
        if let Some(writer) = channel.writer.take() {
            writer.wake();
        }
    }
}

impl ChannelSender {
    /// Ready where a chunk may be sent; an error where nobody reads any more.
    pub(crate) fn poll_ready(&self, cx: &Context<'_>) -> Poll<std::io::Result<()>> {
        let mut channel = self.0.borrow_mut();
        if channel.reader_gone {
            return Poll::Ready(Err(std::io::ErrorKind::BrokenPipe.into()));
        }
        if channel.chunk.is_none() {
            return Poll::Ready(Ok(()));
        }
        channel.writer = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Sends a chunk. Only after `poll_ready` said so.
    pub(crate) fn send(&self, chunk: Bytes) {
        let mut channel = self.0.borrow_mut();
        channel.chunk = Some(chunk);
        if let Some(reader) = channel.reader.take() {
            reader.wake();
        }
    }
}

impl ChannelSender {
    /// An orderly end.
    pub(crate) fn finish(self) {
        self.0.borrow_mut().ended = true;
    }
}

impl Drop for ChannelSender {
    /// Without an orderly end the reader must not take what it has for the whole.
    fn drop(&mut self) {
        let mut channel = self.0.borrow_mut();
        channel.broken = !channel.ended;
        if let Some(reader) = channel.reader.take() {
            reader.wake();
        }
    }
}

/// `content-length` of an h2 message; `None` where absent. h2 has checked that it is a number, and
/// the same one where it stands twice: once is kept, since an h1 peer may refuse two, or take one
/// for a second body (RFC 9110, 8.6).
pub(crate) fn settle_length(headers: &mut HeaderMap) -> Option<u64> {
    let mut lines = headers.get_all(CONTENT_LENGTH).iter();
    let first = lines.next()?;
    let length = first.to_str().ok()?.parse().ok();
    if lines.next().is_some() {
        let first = first.clone();
        headers.insert(CONTENT_LENGTH, first);
    }
    length
}

impl HttpBody for H2Body {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let broken = |error: h2::Error| Error::ClientGone(error.to_string());
        if !self.trailers {
            match ready!(self.recv.poll_chunk(cx, usize::MAX)) {
                Some(Ok(bytes)) => {
                    if let Some(remaining) = &mut self.remaining {
                        *remaining = remaining.saturating_sub(bytes.len() as u64);
                    }
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Some(Err(error))
                    if error.reason() == Some(h2::Reason::NO_ERROR)
                        && (self.remaining == Some(0) || (self.remaining.is_none() && self.may_be_cut)) =>
                {
                    return Poll::Ready(None);
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(broken(error)))),
                None => self.trailers = true,
            }
        }
        match ready!(self.recv.poll_trailers(cx)) {
            Ok(Some(trailers)) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
            Ok(None) => Poll::Ready(None),
            Err(error) => Poll::Ready(Some(Err(broken(error)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.recv.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match self.remaining {
            Some(remaining) => SizeHint::with_exact(remaining),
            None if self.recv.is_end_stream() => SizeHint::with_exact(0),
            None => SizeHint::default(),
        }
    }
}

/// A response on its way to the client. It carries the session: its drop is the session's end.
pub(crate) struct ResponseBody {
    pub(crate) body: Body,
    session: Session,
    ended: bool,
}

impl ResponseBody {
    pub(crate) fn new(body: Body, session: Session) -> Self {
        session.entry.set_phase(&session.worker, Phase::Open);
        body.bind(&session.entry);
        Self { body, session, ended: false }
    }

    /// The session's worker.
    pub(crate) fn worker(&self) -> &Rc<Worker> {
        &self.session.worker
    }

    /// The session, to note a failure of the client's side.
    pub(crate) fn entry(&self) -> &Rc<Entry> {
        &self.session.entry
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        let frame = match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(frame) => frame,
            Poll::Pending => match this.session.entry.end.poll(cx) {
                Poll::Ready(error) => Some(Err(error)),
                Poll::Pending => return Poll::Pending,
            },
        };
        match &frame {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    this.session.entry.add_sent(&this.session.worker, data.len());
                }
            }
            Some(Err(error)) => this.session.entry.fail(error),
            None => this.ended = true,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        // A response to HEAD, or one without a body, is never polled; what is left of another was
        // not wanted any more.
        if !self.ended && !self.body.is_end_stream() && self.session.entry.end.get().is_none() {
            let head_only = self.session.entry.facts.method == http::Method::HEAD;
            if !head_only && self.body.size_hint().exact() != Some(0) {
                self.session.entry.fail(&Error::ClientGone("before the whole response was sent".to_owned()));
            }
        }
    }
}

/// Responses before the final one, and the permission to send a body that waits for `100 Continue`.
/// Shared with a callback of hyper's, hence atomics though one worker uses it.
#[derive(Default)]
pub(crate) struct Interim {
    responses: std::sync::Mutex<Vec<Response<()>>>,
    continued: AtomicBool,
    waker: AtomicWaker,
}

/// A body is sent without upstream's 100 after so long.
const PATIENCE_FOR_100: Duration = Duration::from_secs(1);
/// Interim responses that wait for a slow client; more are dropped, they are only hints.
const MAX_INTERIM: usize = 16;

impl Interim {
    /// An interim response came from upstream.
    pub(crate) fn push(&self, response: Response<()>) {
        if response.status() == http::StatusCode::CONTINUE {
            self.allow_body();
            return;
        }
        if let Ok(mut responses) = self.responses.lock()
            && responses.len() < MAX_INTERIM
        {
            responses.push(response);
        }
        self.waker.wake();
    }

    /// The body may be sent: 100, or a final status.
    pub(crate) fn allow_body(&self) {
        self.continued.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Takes what has come.
    pub(crate) fn take(&self) -> Vec<Response<()>> {
        self.responses.lock().map(|mut responses| std::mem::take(&mut *responses)).unwrap_or_default()
    }

    fn poll_allowed(&self, cx: &Context<'_>) -> Poll<()> {
        if self.continued.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        self.waker.register(cx.waker());
        if self.continued.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// A request's body, of which several attempts may be made.
#[derive(Clone)]
pub(crate) enum RequestBody {
    /// Nothing to send: any number of attempts.
    Empty,
    /// A body that is taken from its source once.
    Once(Rc<RefCell<Source>>),
}

pub(crate) struct Source {
    body: Body,
    worker: Rc<Worker>,
    entry: Option<Rc<Entry>>,
    /// Frames that were taken, for another attempt.
    kept: Vec<Bytes>,
    trailers: Option<HeaderMap>,
    kept_bytes: usize,
    keep_at_most: usize,
    /// Something was taken that is not kept: there is no other attempt.
    lost: bool,
    ended: bool,
    /// The client waits for 100 before it sends.
    gate: Option<Arc<Interim>>,
    /// No longer than this: an upstream need not send any (RFC 9110, 10.1.1).
    patience: Option<Pin<Box<tokio::time::Sleep>>>,
    /// More was wanted than the client has sent.
    waits: bool,
    /// How the client's side of it failed.
    failed: Option<Error>,
    /// Set when the body is first wanted, so that the h2 server sends 100.
    pub(crate) wanted: bool,
}

impl RequestBody {
    pub(crate) fn new(worker: &Rc<Worker>, body: Body) -> Self {
        if body.is_end_stream() || matches!(body, Body::Empty) {
            return RequestBody::Empty;
        }
        RequestBody::Once(Rc::new(RefCell::new(Source {
            body,
            worker: worker.clone(),
            entry: None,
            kept: Vec::new(),
            trailers: None,
            kept_bytes: 0,
            keep_at_most: 0,
            lost: false,
            ended: false,
            gate: None,
            patience: None,
            waits: false,
            failed: None,
            wanted: false,
        })))
    }

    /// Binds the body to its session, says how much of it is kept for another attempt, and
    /// whether it waits for a 100 from upstream.
    pub(crate) fn prepare(&self, entry: &Rc<Entry>, keep_at_most: usize, gate: Option<Arc<Interim>>) {
        if let RequestBody::Once(source) = self {
            let mut source = source.borrow_mut();
            source.body.bind(entry);
            source.entry = Some(entry.clone());
            source.keep_at_most = keep_at_most;
            source.gate = gate;
        }
    }

    /// Can the whole body be sent (again)?
    pub(crate) fn can_be_sent(&self) -> bool {
        match self {
            RequestBody::Empty => true,
            RequestBody::Once(source) => !source.borrow().lost,
        }
    }

    /// How the client's side of it failed, if it did.
    pub(crate) fn failure(&self) -> Option<Error> {
        match self {
            RequestBody::Empty => None,
            RequestBody::Once(source) => source.borrow().failed.clone(),
        }
    }

    /// Was all of it taken from its source?
    pub(crate) fn is_taken(&self) -> bool {
        match self {
            RequestBody::Empty => true,
            RequestBody::Once(source) => {
                let source = source.borrow();
                source.ended || source.failed.is_some() || source.body.is_end_stream()
            }
        }
    }

    /// Is it the client that owes more of it?
    pub(crate) fn waits_for_client(&self) -> bool {
        match self {
            RequestBody::Empty => false,
            RequestBody::Once(source) => source.borrow().waits,
        }
    }

    /// Did upstream ask for it? (The h2 server then sends 100.)
    pub(crate) fn is_wanted(&self) -> bool {
        match self {
            RequestBody::Empty => false,
            RequestBody::Once(source) => source.borrow().wanted,
        }
    }

    /// One attempt, from the beginning.
    pub(crate) fn attempt(&self) -> Attempt {
        match self {
            RequestBody::Empty => Attempt { source: None, position: 0, done: false },
            RequestBody::Once(source) => Attempt { source: Some(source.clone()), position: 0, done: false },
        }
    }

    /// The bare body, for a tunnel by POST. `None` once it was touched.
    pub(crate) fn into_body(self) -> Option<Body> {
        match self {
            RequestBody::Empty => Some(Body::Empty),
            RequestBody::Once(source) => Some(Rc::try_unwrap(source).ok()?.into_inner().body),
        }
    }
}

/// One attempt to send a request's body.
pub(crate) struct Attempt {
    source: Option<Rc<RefCell<Source>>>,
    position: usize,
    done: bool,
}

impl Attempt {
    /// What it is an attempt of.
    pub(crate) fn request(&self) -> RequestBody {
        self.source.clone().map_or(RequestBody::Empty, RequestBody::Once)
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
            return Poll::Ready(source.trailers.clone().map(|trailers| Ok(Frame::trailers(trailers))));
        }
        ready!(source.poll_gate(cx));
        let frame = ready!(source.poll_source(cx));
        if matches!(&frame, Some(Ok(frame)) if frame.is_data()) && !source.lost {
            this.position += 1;
        }
        this.done = !matches!(&frame, Some(Ok(frame)) if frame.is_data());
        Poll::Ready(frame)
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

impl Source {
    /// Ready when the body may be sent.
    fn poll_gate(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(gate) = &self.gate else { return Poll::Ready(()) };
        if gate.poll_allowed(cx).is_pending() {
            let patience = self.patience.get_or_insert_with(|| Box::pin(tokio::time::sleep(PATIENCE_FOR_100)));
            ready!(patience.as_mut().poll(cx));
        }
        (self.gate, self.patience) = (None, None);
        Poll::Ready(())
    }

    fn poll_source(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        self.wanted = true;
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.waits = polled.is_pending();
        let frame = ready!(polled);
        match &frame {
            Some(Ok(frame)) => {
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
        if self.kept_bytes <= self.keep_at_most {
            self.kept.push(data.clone());
        } else {
            self.lost = true;
            self.kept = Vec::new();
        }
    }
}

//! Bodies of HTTP messages, in both directions, of either version.
//!
//! In: what hyper or h2 received. Out: `http_body::Body` for hyper, frames for h2.
//! Never: a whole body in memory, beyond the bound for replay.

mod channel;
mod interim;
mod request;
mod small;
mod trailers;

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_LENGTH;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;

pub(crate) use self::channel::{ChannelBody, ChannelSender, channel};
pub(crate) use self::interim::Interim;
pub(crate) use self::request::{Attempt, RequestBody};
pub(crate) use self::trailers::TrailerSlot;
use crate::custody::CustodyBody;
use crate::error::Error;
use crate::filters::cache::body::CachedBody;
use crate::filters::resume::RetrievedBody;
use crate::live::{Entry, Phase, Session};
use crate::stream::{Receiver, StreamError};
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
    /// From a multiplexed stream, of either side.
    Stream(StreamBody),
    /// A response that still drives the exchange that it came from.
    Exchange(Box<ExchangeBody>),
    /// Fed by a tunnel that is carried in bodies (POST).
    Channel(ChannelBody),
    /// From others who had it in custody.
    Custody(Box<CustodyBody>),
    /// Of a cache.
    Cached(Box<CachedBody>),
    /// One that goes on where it broke off.
    Retrieved(Box<RetrievedBody>),
    /// Behind a head of so many bytes it goes on in custody, by itself: nothing of it comes by.
    Led { theirs: u64 },
}

impl Body {
    /// It is this session's, which ends where too much of it lies unread.
    pub(crate) fn bind(&self, session: &Rc<Entry>) {
        match self {
            Body::Retrieved(body) => body.bind(session),
            Body::Stream(body) => body.bind(session),
            Body::Exchange(body) => body.bind(session),
            Body::Custody(body) => body.bind(session),
            Body::Empty | Body::Full(_) | Body::H1(_) | Body::Channel(_) | Body::Cached(_) | Body::Led { .. } => {}
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self.get_mut() {
            Body::Empty | Body::Led { .. } => Poll::Ready(None),
            Body::Custody(body) => body.poll_frame(cx),
            Body::Cached(body) => body.poll_frame(cx),
            Body::Retrieved(body) => body.poll_frame(cx),
            Body::Full(bytes) if bytes.is_empty() => Poll::Ready(None),
            Body::Full(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Body::H1(incoming) => {
                Pin::new(incoming).poll_frame(cx).map_err(|error| Error::ClientGone(error.to_string()))
            }
            Body::Stream(body) => Pin::new(body).poll_frame(cx),
            Body::Exchange(body) => Pin::new(&mut **body).poll_frame(cx),
            Body::Channel(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Body::Empty | Body::Led { .. } => true,
            Body::Custody(body) => body.is_done(),
            Body::Cached(body) => body.is_end_stream(),
            Body::Retrieved(body) => body.is_end_stream(),
            Body::Full(bytes) => bytes.is_empty(),
            Body::H1(incoming) => incoming.is_end_stream(),
            Body::Stream(body) => body.is_end_stream(),
            Body::Exchange(body) => body.is_end_stream(),
            Body::Channel(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Empty | Body::Led { .. } => SizeHint::with_exact(0),
            Body::Custody(body) => body.size_hint(),
            Body::Cached(body) => body.size_hint(),
            Body::Retrieved(body) => body.size_hint(),
            Body::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Body::H1(incoming) => incoming.size_hint(),
            Body::Stream(body) => body.size_hint(),
            Body::Exchange(body) => body.size_hint(),
            Body::Channel(_) => SizeHint::default(),
        }
    }
}

/// The receiving half of a multiplexed stream.
pub(crate) struct StreamBody {
    recv: Receiver,
    remaining: Option<u64>,
    trailers: bool,
}

impl StreamBody {
    /// `length` is the message's `content-length`.
    pub(crate) fn new(recv: Receiver, length: Option<u64>) -> Self {
        Self { recv, remaining: length, trailers: false }
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

impl HttpBody for StreamBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let broken = |error: StreamError| Error::ClientGone(error.to_string());
        if !self.trailers {
            match ready!(self.recv.poll_chunk(cx, usize::MAX)) {
                Some(Ok(bytes)) => {
                    if let Some(remaining) = &mut self.remaining {
                        *remaining = remaining.saturating_sub(bytes.len() as u64);
                    }
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                // Its length says that it is whole.
                Some(Err(error)) if self.remaining == Some(0) && (error.has_parted() || error.is_unprocessed()) => {
                    return Poll::Ready(None);
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(broken(error)))),
                None => self.trailers = true,
            }
        }
        match ready!(self.recv.poll_trailers(cx)) {
            Ok(Some(trailers)) => {
                // h2 bounds them by their size alone.
                let most = self.recv.most_lines();
                let bounded = if trailers.len() <= most {
                    Ok(Frame::trailers(trailers))
                } else {
                    Err(Error::ClientGone(format!("trailers of more than {most} lines (`limits.header-count`)")))
                };
                Poll::Ready(Some(bounded))
            }
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
        let mut frame = match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(frame) => frame,
            Poll::Pending => match this.session.entry.end.poll(cx) {
                Poll::Ready(error) => Some(Err(error)),
                Poll::Pending => return Poll::Pending,
            },
        };
        match &mut frame {
            Some(Ok(frame)) => {
                if let Some(trailers) = frame.trailers_mut() {
                    this.session.entry.strip_response_trailers(trailers);
                }
                if let Some(data) = frame.data_ref() {
                    this.session.entry.add_sent(&this.session.worker, data.len());
                }
                // Trailers are the last frame; nobody polls again.
                this.ended |= frame.is_trailers();
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

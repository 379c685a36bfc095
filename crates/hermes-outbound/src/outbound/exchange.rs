//! Performs one request and its response on a leased connection, in any HTTP version.
//!
//! In: a request head, an attempt to send the body, a connection. Out: a response whose body owns the rest of the
//! exchange, and finally returns the connection to the pool. On a shared connection, a task sends the rest of the
//! request body, because a client may still send while it does not read the response. The response body owns that
//! task: dropping the body ends the exchange.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::task::AbortHandle;

use super::pool::{H1Connection, Lease, Pool};
use crate::outbound::Outbound;
use crate::outbound::client_stream::{Answer, Head, send_request};
use crate::upstream::InFlight;
use hermes_transport::body::{Attempt, Body, BoxedBody, Interim, RequestBody, StreamBody, settle_length};
use hermes_transport::body_writer::{BodyWriteError, BodyWriter};
use hermes_transport::early_payload::EarlyPayload;
use hermes_transport::error::Error;
use hermes_transport::h3::Datagrams;
use hermes_transport::headers;
use hermes_transport::runtime::session::{Connection, SessionEntry};
use hermes_transport::stream::{Receiver, Sender, StreamError};

/// The maximum number of interim responses before the final one, over HTTP/2 or HTTP/3. Over HTTP/1.1, their total
/// length is limited instead.
const MAX_INTERIM_RESPONSES: usize = 100;

/// The data that an exchange needs to report errors and to return its connection to the pool.
pub struct ExchangeContext {
    pub worker: Rc<Outbound>,
    pub pool: Rc<Pool>,
    pub peer: Arc<str>,
    /// True if the connection may be returned to the pool after the exchange.
    pub shareable: bool,
    /// The session of the exchange, to whose client a connection may be bound. `None` if the node itself sends the
    /// request.
    pub session: Option<Rc<SessionEntry>>,
    /// The guard that counts the exchange as in flight at its endpoint.
    pub in_flight: Option<InFlight>,
}

impl ExchangeContext {
    /// Returns the error for a failure of the peer.
    pub fn broken(&self, reason: impl ToString, unprocessed: bool) -> Error {
        Error::Broken { peer: self.peer.clone(), reason: reason.to_string(), unprocessed }
    }

    /// Returns the client connection to which an upstream connection may be bound, and records that one is bound.
    fn client(&self) -> Option<&Rc<Connection>> {
        self.session.as_ref()?.bind_to_client()
    }

    /// Returns the error of a failed stream. If the whole connection failed, it is closed.
    fn stream_failed(&self, lease: &Lease, error: &StreamError) -> Error {
        if error.is_of_connection {
            lease.connection.close();
        }
        self.broken(error, error.is_unprocessed())
    }

    /// Returns the error of a request whose head could not be sent: the stream did not open, or the head exceeds the
    /// peer's limit.
    fn not_sent(&self, lease: &Lease, error: &StreamError) -> Error {
        if let Some(oversize) = error.oversize() {
            return Error::TooLarge(oversize);
        }
        lease.connection.close();
        self.broken(error, true)
    }
}

/// A response body that owns the rest of its exchange.
pub enum ExchangeBody {
    H1 { incoming: Incoming, carrier: ConnectionDriver, request: RequestBody, context: ExchangeContext },
    Shared { body: StreamBody, upload: Option<Upload>, context: ExchangeContext, _lease: Lease },
}

/// The driver of an exchange's HTTP/1.1 connection.
pub enum ConnectionDriver {
    /// The reader of the response drives the connection. `None` once the connection was returned to the pool.
    Reader(Option<Box<H1Connection>>),
    /// A task drives the connection, since the request was incomplete when the response began.
    Task { connection: Rc<RefCell<Option<Box<H1Connection>>>>, task: AbortHandle },
}

impl ConnectionDriver {
    fn take(&mut self) -> Option<Box<H1Connection>> {
        match self {
            ConnectionDriver::Reader(connection) => connection.take(),
            ConnectionDriver::Task { connection, .. } => connection.borrow_mut().take(),
        }
    }

    /// Moves the connection to a task, which drives it from now on.
    fn hand_over(&mut self, worker: &Outbound) {
        let ConnectionDriver::Reader(connection) = self else { return };
        let connection = Rc::new(RefCell::new(connection.take()));
        let moved = connection.clone();
        let task = worker.spawn(std::future::poll_fn(move |cx| {
            let mut moved = moved.borrow_mut();
            let Some(connection) = &mut *moved else { return Poll::Ready(()) };
            // An error of the connection is ignored here, because the response body reports it.
            let _ = connection.poll(cx);
            if connection.finished { Poll::Ready(()) } else { Poll::Pending }
        }));
        *self = ConnectionDriver::Task { connection, task };
    }
}

impl Drop for ConnectionDriver {
    fn drop(&mut self) {
        if let ConnectionDriver::Task { task, .. } = self {
            task.abort();
        }
    }
}

/// A task that sends the rest of a request body on a shared connection. Dropping this value aborts the task.
pub struct Upload(AbortHandle);

impl Upload {
    fn spawn(worker: &Outbound, mut pipe: BodyWriter<Attempt>) -> Self {
        Self(worker.spawn(async move {
            // The request body records a failure of the client, and the response reports a failure of the upstream.
            let _ = std::future::poll_fn(|cx| pipe.poll(cx)).await;
        }))
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Sends a request on an HTTP/1.1 connection, and returns the response when its head has arrived. After `101`, or 2xx
/// to CONNECT, the caller takes the connection with [`ExchangeBody::take_h1_connection`].
///
/// # Errors
/// The connection failed, or the response is not valid HTTP.
pub async fn over_h1(
    mut connection: Box<H1Connection>,
    mut request: Request<Attempt>,
    context: ExchangeContext,
    entry: &SessionEntry,
    interim: Option<Arc<Interim>>,
) -> Result<Response<ExchangeBody>, Error> {
    let is_head = request.method() == Method::HEAD;
    if let Some(interim) = &interim {
        let interim = interim.clone();
        hyper::ext::on_informational(&mut request, move |response| {
            let mut copy = Response::new(());
            *copy.status_mut() = response.status();
            *copy.headers_mut() = response.headers().clone();
            interim.push(copy);
        });
    }
    let body = request.body().request();
    if headers::authenticates_connection(request.headers()) {
        connection.bind(context.client());
    }
    if goes_in_chunks(&request) {
        request.headers_mut().insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        request.body_mut().give_trailers_to(connection.trailers().clone());
    }
    connection.meter().expect_head(context.worker.snapshot().limits.header_bytes);
    let mut response = std::pin::pin!(connection.sender.try_send_request(request));
    let outcome = std::future::poll_fn(|cx| {
        if let Poll::Ready(outcome) = response.as_mut().poll(cx) {
            return Poll::Ready(Ok(outcome));
        }
        let before = connection.meter().left();
        let driven = connection.poll(cx);
        if connection.meter().left() != before {
            // Interim responses such as 102 show that the origin is working.
            entry.touch(&context.worker);
        }
        // The call of `connection.poll` may have completed the response.
        match response.as_mut().poll(cx) {
            Poll::Ready(outcome) => Poll::Ready(Ok(outcome)),
            Poll::Pending if connection.finished => Poll::Ready(Err(driven.err())),
            Poll::Pending => Poll::Pending,
        }
    })
    .await;
    match outcome {
        Ok(Ok(mut response)) => {
            settle_h1_head(&mut response, is_head).map_err(|reason| context.broken(reason, false))?;
            connection.meter().has_head();
            // Any other response continues an authentication only if its request did, which was checked above.
            let is_challenge =
                matches!(response.status(), StatusCode::UNAUTHORIZED | StatusCode::PROXY_AUTHENTICATION_REQUIRED);
            if is_challenge && headers::authenticates_connection(response.headers()) {
                connection.bind(context.client());
            }
            let carrier = ConnectionDriver::Reader(Some(connection));
            Ok(response.map(|incoming| ExchangeBody::H1 { incoming, carrier, request: body, context }))
        }
        Ok(Err(mut failed)) => {
            let unprocessed = failed.take_message().is_some();
            Err(context.broken(chain(&failed.into_error()), unprocessed))
        }
        Err(error) => {
            Err(context
                .broken(error.map_or_else(|| "closed before a response".to_owned(), |error| chain(&error)), false))
        }
    }
}

/// True if the request has a body of unknown length and so must be sent chunked. hyper would silently drop such a body
/// of a GET or HEAD request.
fn goes_in_chunks(request: &Request<Attempt>) -> bool {
    let body = request.body();
    !body.is_end_stream() && body.size_hint().exact().is_none() && !request.headers().contains_key(CONTENT_LENGTH)
}

/// Checks `Transfer-Encoding` and `Content-Length` of a response, so that all later recipients delimit its body in the
/// same way. hyper accepts further codings before `chunked`, and removes only `chunked`. It ignores `Content-Length` of
/// a response without a body, but HTTP/2 peers reject an invalid one.
///
/// # Errors
/// The transfer coding is unsupported (RFC 9112, section 6.1), or the lengths conflict.
fn settle_h1_head(response: &mut Response<Incoming>, is_head: bool) -> Result<(), &'static str> {
    let has_no_body = is_head || matches!(response.status(), StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    let headers = response.headers_mut();
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next()
        && (codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
    {
        return Err("unsupported transfer coding: the response has another one than chunked");
    }
    let mut lengths =
        headers.get_all(CONTENT_LENGTH).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    let Some(first) = lengths.next().map(<[u8]>::trim_ascii) else { return Ok(()) };
    let is_number = !first.is_empty() && first.iter().all(u8::is_ascii_digit);
    if is_number && lengths.all(|length| length.trim_ascii() == first) {
        let length = HeaderValue::from_bytes(first).map_err(|_| "content-length is not a number")?;
        headers.insert(CONTENT_LENGTH, length);
    } else if has_no_body {
        headers.remove(CONTENT_LENGTH);
    } else {
        return Err("several content-length fields with different or no values");
    }
    Ok(())
}

/// Returns the text of an error with all its causes, because hyper's errors do not print their cause.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// Sends a request on a stream of a shared connection, and returns the response when its head has arrived.
///
/// # Errors
/// The stream or the connection failed.
pub async fn over_shared(
    lease: Lease,
    request: Request<()>,
    body: Attempt,
    context: ExchangeContext,
    entry: &SessionEntry,
    interim: Option<Arc<Interim>>,
) -> Result<Response<ExchangeBody>, Error> {
    let (ends, is_head) = (body.is_end_stream(), request.method() == Method::HEAD);
    let asked = send_request(&context.worker, &lease, request, ends).await;
    let (mut answer, stream) = asked.map_err(|error| context.not_sent(&lease, &error))?;
    let mut upload = if ends { None } else { Some(BodyWriter::new(body, stream)) };
    let mut hints = 0..MAX_INTERIM_RESPONSES;
    let outcome = std::future::poll_fn(|cx| {
        loop {
            if let Some(pipe) = &mut upload {
                match pipe.poll(cx) {
                    Poll::Ready(Ok(())) => upload = None,
                    // The client aborted its request, so the response is no longer needed.
                    Poll::Ready(Err(BodyWriteError::Source(error))) => return Poll::Ready(Err(error)),
                    // The response explains the failure, except for a request that exceeds the peer's limit.
                    Poll::Ready(Err(BodyWriteError::Sink(error))) => match error.oversize() {
                        Some(oversize) => return Poll::Ready(Err(Error::TooLarge(oversize))),
                        None => upload = None,
                    },
                    Poll::Pending => {}
                }
            }
            match ready!(answer.poll(cx)).map_err(|error| context.stream_failed(&lease, &error))? {
                Head::Interim(_) if hints.next().is_none() => {
                    return Poll::Ready(Err(context.broken("interim responses without end", false)));
                }
                Head::Interim(head) => {
                    entry.touch(&context.worker);
                    if let Some(interim) = &interim {
                        interim.push(head);
                    }
                }
                Head::Final(response) => return Poll::Ready(Ok(response)),
            }
        }
    })
    .await;
    let response = outcome?;
    let rest = upload.map(|pipe| Upload::spawn(&context.worker, pipe));
    let mut response = response_of(response, is_head, lease, context);
    if let ExchangeBody::Shared { upload, .. } = response.body_mut() {
        *upload = rest;
    }
    Ok(response)
}

/// Returns a response received on a stream, with a body that owns the rest of the exchange.
pub fn response_of(
    mut response: Response<Receiver>,
    is_head: bool,
    lease: Lease,
    context: ExchangeContext,
) -> Response<ExchangeBody> {
    let length = settle_length(response.headers_mut());
    let has_body = !is_head && !matches!(response.status(), StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    response.map(|mut recv| {
        if has_body {
            recv.expect(length);
        }
        ExchangeBody::Shared { body: StreamBody::new(recv, length), upload: None, context, _lease: lease }
    })
}

/// An opened tunnel stream: the response with the receiving half, the sending half, the lease of the connection, and
/// the HTTP datagrams (`None` if the tunnel has none).
pub type Opened = (Response<Receiver>, Sender, Lease, Option<Datagrams>);

/// Opens a stream for a tunnel, and returns it when the final response head has arrived. `early` is client data that is
/// sent before the response. `has_datagrams` is true if the tunnel carries datagrams.
///
/// # Errors
/// The stream or the connection failed before a response, or the client failed.
pub async fn open(
    lease: Lease,
    request: Request<()>,
    context: &ExchangeContext,
    mut early: Option<&mut EarlyPayload<'_>>,
    has_datagrams: bool,
) -> Result<Opened, Error> {
    let is_connect = request.method() == Method::CONNECT;
    let asked = send_request(&context.worker, &lease, request, false).await;
    let (mut answer, mut stream) = asked.map_err(|error| context.not_sent(&lease, &error))?;
    let datagrams = has_datagrams.then(|| answer.datagrams()).flatten();
    let failed = |error: StreamError| context.stream_failed(&lease, &error);
    if let Some(early) = &early {
        early.repeat(&mut stream).map_err(failed)?;
    }
    let response = std::future::poll_fn(|cx| {
        loop {
            if let Some(early) = &mut early {
                early.send(cx, &mut stream)?;
            }
            match ready!(poll_answer(&mut answer, &mut stream, cx)).map_err(failed)? {
                Head::Interim(_) => {}
                Head::Final(response) => return Poll::Ready(Ok::<_, Error>(response)),
            }
        }
    });
    let mut response = response.await?;
    if is_connect
        && response.status().is_success()
        && let Receiver::H3(recv) = response.body_mut()
    {
        // Without this, trailers could be mistaken for the clean end of a truncated tunnel.
        recv.expect_tunnel();
    }
    Ok((response, stream, lease, datagrams))
}

/// Polls for the next response head. Also sends the queued bytes of the stream, which nothing else polls.
fn poll_answer(answer: &mut Answer, stream: &mut Sender, cx: &mut Context<'_>) -> Poll<Result<Head, StreamError>> {
    // An error is ignored here, because the response reports the same failure.
    let _ = stream.poll_settled(cx);
    answer.poll(cx)
}

impl ExchangeBody {
    /// Returns the context of the exchange.
    pub fn context(&self) -> &ExchangeContext {
        match self {
            ExchangeBody::H1 { context, .. } | ExchangeBody::Shared { context, .. } => context,
        }
    }

    /// Takes the HTTP/1.1 connection after the peer has accepted a tunnel. The caller drives it from now on. In a
    /// tunnel by POST, this also drives the request body and the response body.
    pub fn take_h1_connection(&mut self) -> Option<Box<H1Connection>> {
        match self {
            ExchangeBody::H1 { carrier, .. } => carrier.take(),
            ExchangeBody::Shared { .. } => None,
        }
    }

    /// Takes the guard that counts the request as in flight at its endpoint, for a tunnel that outlives this body.
    pub fn take_in_flight(&mut self) -> Option<InFlight> {
        match self {
            ExchangeBody::H1 { context, .. } | ExchangeBody::Shared { context, .. } => context.in_flight.take(),
        }
    }

    /// Returns the connection to the pool if the response has no body. If the request body over HTTP/1.1 is incomplete,
    /// a task drives the connection from now on. Returns the body for the client.
    pub fn settle(mut self) -> Body {
        let ended = self.is_end_stream();
        match &mut self {
            ExchangeBody::H1 { carrier, context, .. } if ended => {
                release(carrier, context);
                return Body::Empty;
            }
            ExchangeBody::Shared { upload: None, .. } if ended => return Body::Empty,
            ExchangeBody::H1 { carrier, request, context, .. } if !request.is_taken() => {
                carrier.hand_over(&context.worker);
            }
            _ => {}
        }
        Body::boxed(self)
    }
}

/// Returns an HTTP/1.1 connection to the pool. The poll before it makes hyper notice that both messages are complete.
fn release(carrier: &mut ConnectionDriver, context: &ExchangeContext) {
    if let Some(mut connection) = carrier.take() {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        if connection.poll(&mut cx).is_ok() {
            context.pool.give_back(&context.worker, connection, context.shareable);
        }
    }
}

impl BoxedBody for ExchangeBody {
    /// Charges the unread bytes of the body to a session. The session may end if `limits.receive-buffer` is exceeded.
    fn bind(&self, session: &Rc<SessionEntry>) {
        if let ExchangeBody::Shared { body, .. } = self {
            body.bind(session);
        }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self {
            ExchangeBody::H1 { incoming, carrier, context, .. } => {
                let frame = ready!(poll_h1(incoming, carrier, cx))
                    .map(|frame| frame.map_err(|error| context.broken(error, false)));
                let is_last = |frame: &Result<Frame<_>, _>| matches!(frame, Ok(frame) if frame.is_trailers());
                if frame.as_ref().is_none_or(is_last) || incoming.is_end_stream() {
                    release(carrier, context);
                }
                Poll::Ready(frame)
            }
            ExchangeBody::Shared { body, context, .. } => {
                Pin::new(body).poll_frame(cx).map_err(|error| match error {
                    // `StreamBody` reports every failure as one of the client. Here its peer is the upstream.
                    Error::ClientGone(reason) => context.broken(reason, false),
                    other => other,
                })
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            ExchangeBody::H1 { incoming, .. } => incoming.is_end_stream(),
            ExchangeBody::Shared { body, .. } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ExchangeBody::H1 { incoming, .. } => incoming.size_hint(),
            ExchangeBody::Shared { body, .. } => body.size_hint(),
        }
    }
}

/// Polls hyper's response body together with its connection: the body requests data, the connection reads it, and the
/// body returns it.
fn poll_h1(
    incoming: &mut Incoming,
    carrier: &mut ConnectionDriver,
    cx: &mut Context<'_>,
) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
    if let Poll::Ready(frame) = Pin::new(&mut *incoming).poll_frame(cx) {
        return Poll::Ready(frame);
    }
    if let ConnectionDriver::Reader(Some(connection)) = carrier {
        // An error of the connection is ignored here, because the body reports it too.
        let _ = connection.poll(cx);
    }
    Pin::new(incoming).poll_frame(cx)
}

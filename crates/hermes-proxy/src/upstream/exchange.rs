//! One request and its response on a leased connection, of either version.
//!
//! In: a head, an attempt to send the body, a connection. Out: a response whose body owns the rest
//! of the exchange: it gives the connection back at its end. What is left of the request is sent by
//! a task, since a client that does not read its response may still be sending. The response's body
//! owns that task: dropping it ends the exchange; nothing runs detached.

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

use super::InFlight;
use super::pool::{H1Connection, Lease, Pool};
use crate::body::{Attempt, Body, Interim, RequestBody, StreamBody, settle_length};
use crate::early::Early;
use crate::error::Error;
use crate::h3::Datagrams;
use crate::headers;
use crate::live::{Connection, Entry};
use crate::pipe::{Pipe, PipeError};
use crate::stream::asked::{Answer, Head, ask};
use crate::stream::{Receiver, Sender, StreamError};
use crate::worker::Worker;

/// Interim responses before a final one over h2 or h3; over h1 their bytes are measured.
const MOST_HINTS: usize = 100;

/// Where the exchange happens, for errors and for giving back.
pub(crate) struct Place {
    pub(crate) worker: Rc<Worker>,
    pub(crate) pool: Rc<Pool>,
    pub(crate) peer: Arc<str>,
    /// The connection may serve others afterwards.
    pub(crate) shareable: bool,
    /// The session of the exchange, if a connection may be bound to its client.
    pub(crate) session: Option<Rc<Entry>>,
    /// Counts the exchange on its endpoint until its body is through.
    pub(crate) in_flight: Option<InFlight>,
}

impl Place {
    /// The peer failed, in these words.
    pub(crate) fn broken(&self, reason: impl ToString, unprocessed: bool) -> Error {
        Error::Broken { peer: self.peer.clone(), reason: reason.to_string(), unprocessed }
    }

    /// The client's connection that a connection may be bound to.
    fn client(&self) -> Option<&Rc<Connection>> {
        self.session.as_ref()?.bind_to_client()
    }

    /// A stream failed. Where its connection did, that is not used again.
    fn stream_failed(&self, lease: &Lease, error: &StreamError) -> Error {
        if error.is_of_connection {
            lease.connection.close();
        }
        self.broken(error, error.is_unprocessed())
    }

    /// The connection took no stream any more, or its peer does not take the head.
    fn not_sent(&self, lease: &Lease, error: &StreamError) -> Error {
        if let Some(oversize) = error.oversize() {
            return Error::TooLarge(oversize);
        }
        lease.connection.close();
        self.broken(error, true)
    }
}

/// A response's body, and what is left of its exchange.
pub(crate) enum ExchangeBody {
    H1 { incoming: Incoming, carrier: Carrier, request: RequestBody, place: Place },
    Shared { body: StreamBody, upload: Option<Upload>, place: Place, _lease: Lease },
}

/// The h1 connection under an exchange.
pub(crate) enum Carrier {
    /// Whoever reads the response moves it. `None` once it was given back.
    Reader(Option<Box<H1Connection>>),
    /// A task moves it: the request was not through when the response began.
    Task { connection: Rc<RefCell<Option<Box<H1Connection>>>>, task: AbortHandle },
}

impl Carrier {
    fn take(&mut self) -> Option<Box<H1Connection>> {
        match self {
            Carrier::Reader(connection) => connection.take(),
            Carrier::Task { connection, .. } => connection.borrow_mut().take(),
        }
    }

    /// From now on a task moves it.
    fn hand_over(&mut self, worker: &Worker) {
        let Carrier::Reader(connection) = self else { return };
        let connection = Rc::new(RefCell::new(connection.take()));
        let moved = connection.clone();
        let task = worker.spawn(std::future::poll_fn(move |cx| {
            let mut moved = moved.borrow_mut();
            let Some(connection) = &mut *moved else { return Poll::Ready(()) };
            // An error of the connection reaches the response's body.
            let _ = connection.poll(cx);
            if connection.finished { Poll::Ready(()) } else { Poll::Pending }
        }));
        *self = Carrier::Task { connection, task };
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        if let Carrier::Task { task, .. } = self {
            task.abort();
        }
    }
}

/// A task that sends what is left of a request on a shared connection.
pub(crate) struct Upload(AbortHandle);

impl Upload {
    fn spawn(worker: &Worker, mut pipe: Pipe<Attempt>) -> Self {
        Self(worker.spawn(async move {
            // How the client failed stands with its body; of the upstream the response tells.
            let _ = std::future::poll_fn(|cx| pipe.poll(cx)).await;
        }))
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An h1 exchange. After `101`, or 2xx to CONNECT, the caller takes the connection with
/// `take_h1_connection`.
///
/// # Errors
/// The connection broke, or what came is no HTTP.
pub(crate) async fn over_h1(
    mut connection: Box<H1Connection>,
    mut request: Request<Attempt>,
    place: Place,
    entry: &Entry,
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
        connection.bind(place.client());
    }
    if goes_in_chunks(&request) {
        request.headers_mut().insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        request.body_mut().give_trailers_to(connection.trailers().clone());
    }
    connection.meter().expect_head(place.worker.generation().snapshot.limits.header_bytes);
    let mut response = std::pin::pin!(connection.sender.try_send_request(request));
    let outcome = std::future::poll_fn(|cx| {
        if let Poll::Ready(outcome) = response.as_mut().poll(cx) {
            return Poll::Ready(Ok(outcome));
        }
        let before = connection.meter().left();
        let driven = connection.poll(cx);
        if connection.meter().left() != before {
            // Interim responses such as 102 show that the origin is working.
            entry.touch(&place.worker);
        }
        // What the connection did may have been the response.
        match response.as_mut().poll(cx) {
            Poll::Ready(outcome) => Poll::Ready(Ok(outcome)),
            Poll::Pending if connection.finished => Poll::Ready(Err(driven.err())),
            Poll::Pending => Poll::Pending,
        }
    })
    .await;
    match outcome {
        Ok(Ok(mut response)) => {
            settle_h1_head(&mut response, is_head).map_err(|reason| place.broken(reason, false))?;
            connection.meter().has_head();
            // Other responses continue an authentication only if their request did, which was checked above.
            let is_challenge =
                matches!(response.status(), StatusCode::UNAUTHORIZED | StatusCode::PROXY_AUTHENTICATION_REQUIRED);
            if is_challenge && headers::authenticates_connection(response.headers()) {
                connection.bind(place.client());
            }
            let carrier = Carrier::Reader(Some(connection));
            Ok(response.map(|incoming| ExchangeBody::H1 { incoming, carrier, request: body, place }))
        }
        Ok(Err(mut failed)) => {
            let unprocessed = failed.take_message().is_some();
            Err(place.broken(chain(&failed.into_error()), unprocessed))
        }
        Err(error) => {
            Err(place.broken(error.map_or_else(|| "closed before a response".to_owned(), |error| chain(&error)), false))
        }
    }
}

/// True if the request has a body of unknown length, which hyper would silently drop for GET or HEAD.
fn goes_in_chunks(request: &Request<Attempt>) -> bool {
    let body = request.body();
    !body.is_end_stream() && body.size_hint().exact().is_none() && !request.headers().contains_key(CONTENT_LENGTH)
}

/// One reading for whoever comes next: hyper takes another coding under chunks, and takes the chunks off;
/// it looks at no length where there is no body, and HTTP/2 peers refuse what is no number.
///
/// # Errors
/// A coding that is not understood (RFC 9112, 6.1), or lengths that differ.
fn settle_h1_head(response: &mut Response<Incoming>, is_head: bool) -> Result<(), &'static str> {
    let has_no_body = is_head || matches!(response.status(), StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    let headers = response.headers_mut();
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next()
        && (codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
    {
        return Err("its transfer coding is not chunked alone: nobody behind could read it");
    }
    let mut lengths =
        headers.get_all(CONTENT_LENGTH).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    let Some(first) = lengths.next().map(<[u8]>::trim_ascii) else { return Ok(()) };
    let is_number = !first.is_empty() && first.iter().all(u8::is_ascii_digit);
    if is_number && lengths.all(|length| length.trim_ascii() == first) {
        let length = HeaderValue::from_bytes(first).map_err(|_| "its length is no number")?;
        headers.insert(CONTENT_LENGTH, length);
    } else if has_no_body {
        headers.remove(CONTENT_LENGTH);
    } else {
        return Err("its lengths differ, or are none");
    }
    Ok(())
}

/// hyper's errors hide their cause one level down.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// An exchange on a stream of a shared connection.
///
/// # Errors
/// The stream or the connection broke.
pub(crate) async fn over_shared(
    lease: Lease,
    request: Request<()>,
    body: Attempt,
    place: Place,
    entry: &Entry,
    interim: Option<Arc<Interim>>,
) -> Result<Response<ExchangeBody>, Error> {
    let (ends, is_head) = (body.is_end_stream(), request.method() == Method::HEAD);
    let asked = ask(&place.worker, &lease, request, ends).await;
    let (mut answer, stream) = asked.map_err(|error| place.not_sent(&lease, &error))?;
    let mut upload = if ends { None } else { Some(Pipe::new(body, stream)) };
    let mut hints = 0..MOST_HINTS;
    let outcome = std::future::poll_fn(|cx| {
        loop {
            if let Some(pipe) = &mut upload {
                match pipe.poll(cx) {
                    Poll::Ready(Ok(())) => upload = None,
                    // The client broke its request: nothing to wait for.
                    Poll::Ready(Err(PipeError::Source(error))) => return Poll::Ready(Err(error)),
                    // The response says why, if there is one; what was not sent it cannot know of.
                    Poll::Ready(Err(PipeError::Sink(error))) => match error.oversize() {
                        Some(oversize) => return Poll::Ready(Err(Error::TooLarge(oversize))),
                        None => upload = None,
                    },
                    Poll::Pending => {}
                }
            }
            match ready!(answer.poll(cx)).map_err(|error| place.stream_failed(&lease, &error))? {
                Head::Interim(_) if hints.next().is_none() => {
                    return Poll::Ready(Err(place.broken("interim responses without end", false)));
                }
                Head::Interim(head) => {
                    entry.touch(&place.worker);
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
    let rest = upload.map(|pipe| Upload::spawn(&place.worker, pipe));
    let mut response = response_of(response, is_head, lease, place);
    if let ExchangeBody::Shared { upload, .. } = response.body_mut() {
        *upload = rest;
    }
    Ok(response)
}

/// A response on a stream as an exchange's.
pub(crate) fn response_of(
    mut response: Response<Receiver>,
    is_head: bool,
    lease: Lease,
    place: Place,
) -> Response<ExchangeBody> {
    let length = settle_length(response.headers_mut());
    let has_body = !is_head && !matches!(response.status(), StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    response.map(|mut recv| {
        if has_body {
            recv.expect(length);
        }
        ExchangeBody::Shared { body: StreamBody::new(recv, length), upload: None, place, _lease: lease }
    })
}

/// The response's head with what the peer sends, what we send, and the place on the connection.
pub(crate) type Opened = (Response<Receiver>, Sender, Lease, Option<Datagrams>);

/// Opens a stream as a tunnel: the request has no body that ends. What the client sends before the
/// response goes along, where `early` is given; `has_datagrams` where it carries some.
///
/// # Errors
/// The stream or the connection broke before a response, or the client is gone.
pub(crate) async fn open(
    lease: Lease,
    request: Request<()>,
    place: &Place,
    mut early: Option<&mut Early<'_>>,
    has_datagrams: bool,
) -> Result<Opened, Error> {
    let is_connect = request.method() == Method::CONNECT;
    let asked = ask(&place.worker, &lease, request, false).await;
    let (mut answer, mut stream) = asked.map_err(|error| place.not_sent(&lease, &error))?;
    let datagrams = has_datagrams.then(|| answer.datagrams()).flatten();
    let failed = |error: StreamError| place.stream_failed(&lease, &error);
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
        // Trailers would be taken for the end in order of a tunnel that was cut.
        recv.expect_tunnel();
    }
    Ok((response, stream, lease, datagrams))
}

/// Meanwhile sends what waits: nobody else does.
fn poll_answer(answer: &mut Answer, stream: &mut Sender, cx: &mut Context<'_>) -> Poll<Result<Head, StreamError>> {
    // How it fails the answer says too.
    let _ = stream.poll_settled(cx);
    answer.poll(cx)
}

impl ExchangeBody {
    /// Where it happens.
    pub(crate) fn place(&self) -> &Place {
        match self {
            ExchangeBody::H1 { place, .. } | ExchangeBody::Shared { place, .. } => place,
        }
    }

    /// It is this session's.
    pub(crate) fn bind(&self, session: &Rc<Entry>) {
        if let ExchangeBody::Shared { body, .. } = self {
            body.bind(session);
        }
    }

    /// Takes the h1 connection out, after the peer agreed to a tunnel: from now on its taker moves it,
    /// for both bodies where the tunnel is in bodies.
    pub(crate) fn take_h1_connection(&mut self) -> Option<Box<H1Connection>> {
        match self {
            ExchangeBody::H1 { carrier, .. } => carrier.take(),
            ExchangeBody::Shared { .. } => None,
        }
    }

    /// What counts it on its endpoint, for a tunnel that goes on without its bodies.
    pub(crate) fn take_in_flight(&mut self) -> Option<InFlight> {
        match self {
            ExchangeBody::H1 { place, .. } | ExchangeBody::Shared { place, .. } => place.in_flight.take(),
        }
    }

    /// Gives the connection back where the response has no body. Where it has one, what is left of
    /// the request goes its own way.
    pub(crate) fn settle(mut self) -> Body {
        let ended = self.is_end_stream();
        match &mut self {
            ExchangeBody::H1 { carrier, place, .. } if ended => {
                release(carrier, place);
                return Body::Empty;
            }
            ExchangeBody::Shared { upload: None, .. } if ended => return Body::Empty,
            ExchangeBody::H1 { carrier, request, place, .. } if !request.is_taken() => {
                carrier.hand_over(&place.worker);
            }
            _ => {}
        }
        Body::Exchange(Box::new(self))
    }
}

/// Gives an h1 connection back once hyper has noticed that both messages are whole.
fn release(carrier: &mut Carrier, place: &Place) {
    if let Some(mut connection) = carrier.take() {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        if connection.poll(&mut cx).is_ok() {
            place.pool.give_back(&place.worker, connection, place.shareable);
        }
    }
}

impl HttpBody for ExchangeBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self.get_mut() {
            ExchangeBody::H1 { incoming, carrier, place, .. } => {
                let frame = ready!(poll_h1(incoming, carrier, cx))
                    .map(|frame| frame.map_err(|error| place.broken(error, false)));
                let is_last = |frame: &Result<Frame<_>, _>| matches!(frame, Ok(frame) if frame.is_trailers());
                if frame.as_ref().is_none_or(is_last) || incoming.is_end_stream() {
                    release(carrier, place);
                }
                Poll::Ready(frame)
            }
            ExchangeBody::Shared { body, place, .. } => {
                Pin::new(body).poll_frame(cx).map_err(|error| match error {
                    // StreamBody serves both sides; here its peer is the upstream.
                    Error::ClientGone(reason) => place.broken(reason, false),
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

/// hyper's body and its connection, both moved here: the body first says that it wants, the
/// connection then reads, and the body has it.
fn poll_h1(
    incoming: &mut Incoming,
    carrier: &mut Carrier,
    cx: &mut Context<'_>,
) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
    if let Poll::Ready(frame) = Pin::new(&mut *incoming).poll_frame(cx) {
        return Poll::Ready(frame);
    }
    if let Carrier::Reader(Some(connection)) = carrier {
        // An error of the connection reaches the body too.
        let _ = connection.poll(cx);
    }
    Pin::new(incoming).poll_frame(cx)
}

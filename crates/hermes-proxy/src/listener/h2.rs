//! HTTP/2 of a client, on the h2 library.
//!
//! In: a connection. Out: its streams. All streams are futures in the one task of the connection: they end with it, and
//! no task is spawned for a request. Concurrent streams, resets, header sizes and windows are limited (rapid reset,
//! CONTINUATION flood: CVE-2023-44487, CVE-2024-24549 and similar).

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, Stream};
use h2::Reason;
use h2::server::SendResponse;
use hermes_model::limits::Limits;
use http::{HeaderMap, Method, Request as HttpRequest, Response, StatusCode};
use http_body::Body as HttpBody;

use super::http::{Client, WatchedIo};
use super::interim::{Answers, Wait, sent_by_client};
use super::stream_limits::{Bounds, RapidResetGuard, StreamOutcome};
use crate::request::{Origin, from_head};
use crate::session::{self, DownstreamEnd, SessionOutcome, Tunnel};
use crate::worker::Worker;
use hermes_outbound::outbound::pool::{FRAME_BUDGET, MAX_FRAME, SEND_BUFFER};
use hermes_outbound::reverse::Probe;
use hermes_transport::body::{Body, Interim, RequestBody, ResponseBody, StreamBody, settle_length};
use hermes_transport::body_writer;
use hermes_transport::early_payload::EarlyPayload;
use hermes_transport::error::Error;
use hermes_transport::pinned::pinned;
use hermes_transport::runtime::session::{Connection, Stage};
use hermes_transport::stream::h2::{self as halves, Backlog, Window};
use hermes_transport::stream::{ByteStream, Receiver, Sender};

/// The number of bytes that a connection may read before other tasks of the worker run. The quota adapts to the work
/// that the bytes caused, since a byte of a header block can cost a hundred times as much as a byte of data.
struct ReadQuota {
    bytes: usize,
    /// Header lines that were read within the quota. Each header block itself counts as several lines.
    lines: usize,
}

impl ReadQuota {
    const MIN_BYTES: usize = 128;
    const FIRST_BYTES: usize = 512;
    const MAX_BYTES: usize = 64 << 10;
    const MIN_LINES: usize = 128;
    const MAX_LINES: usize = 1024;
    /// Header lines of all connections of a worker in one round. A new client waits for at most one such round.
    const LINES_PER_ROUND: usize = 16 << 10;
    const LINES_PER_HEAD: usize = 16;

    fn new() -> Self {
        Self { bytes: Self::FIRST_BYTES, lines: 0 }
    }

    fn count(&mut self, headers: &HeaderMap) {
        self.lines += Self::LINES_PER_HEAD + headers.len();
    }

    /// Sets the next quota, for a worker with this number of connections. The quota grows only if it was used up and if
    /// twice the lines would stay within the limit.
    fn adapt(&mut self, is_used_up: bool, connections: usize) {
        let limit = (Self::LINES_PER_ROUND / connections.max(1)).clamp(Self::MIN_LINES, Self::MAX_LINES);
        let lines = std::mem::take(&mut self.lines);
        let bytes = if lines > limit {
            self.bytes * limit / lines
        } else if is_used_up && 2 * lines <= limit {
            2 * self.bytes
        } else {
            self.bytes
        };
        self.bytes = bytes.clamp(Self::MIN_BYTES, Self::MAX_BYTES);
    }
}

/// Serves a connection until it ends.
pub(crate) async fn serve(worker: &Rc<Worker>, connection: &Rc<Connection>, io: WatchedIo, client: Client) {
    connection.is_shared.set(true);
    let limits = worker.generation().snapshot.limits.clone();
    let bounds = Bounds::of(&client, &limits);
    let (allowance, mut quota) = (io.turn(), ReadQuota::new());
    let connection_window = bounds.connection_window;
    let mut http = match begin(io, &bounds, &limits).await {
        Ok(http) => http,
        Err(error) => {
            tracing::debug!(source = %client.source, %error, "HTTP/2 handshake failed");
            return;
        }
    };
    connection.set_stage(worker, Stage::Idle);
    let client = Rc::new(client);
    if let Some(uplink) = &client.uplink {
        uplink.begin(http.ping_pong().map(Probe::Ping));
    }
    let (window, backlog) = (Window::new(connection_window), Backlog::default());
    let mut widened_to = connection_window;
    let mut streams = FuturesUnordered::new();
    let mut draining = false;
    let mut cancels = RapidResetGuard::new(&bounds);
    std::future::poll_fn(|cx| {
        allowance.set(quota.bytes);
        if !draining && connection.drain.poll(cx).is_ready() {
            draining = true;
            http.graceful_shutdown();
        }
        if client.uplink.as_ref().is_some_and(|uplink| uplink.poll_dead(cx, connection.heard.get()).is_ready()) {
            return Poll::Ready(());
        }
        let target = window.poll_target(cx);
        if std::mem::replace(&mut widened_to, target) != target {
            http.set_target_window_size(target);
        }
        loop {
            match http.poll_accept(cx) {
                Poll::Ready(Some(Ok((_, mut respond)))) if connection.takes_no_more(worker) => {
                    respond.send_reset(Reason::REFUSED_STREAM);
                }
                Poll::Ready(Some(Ok((request, respond)))) => {
                    cancels.began += 1;
                    quota.count(request.headers());
                    let request = request.map(|recv| Receiver::H2(halves::Receiver::new(worker, recv, &window)));
                    let respond = Respond { respond, backlog: backlog.clone() };
                    streams.push(serve_stream(worker.clone(), connection.clone(), client.clone(), request, respond));
                }
                Poll::Ready(Some(Err(error))) => {
                    if error.is_library() && error.reason() == Some(Reason::ENHANCE_YOUR_CALM) {
                        worker.shared.metrics.limit("rapid-reset");
                    }
                    tracing::debug!(source = %client.source, %error, "an HTTP/2 connection ended");
                    return Poll::Ready(());
                }
                Poll::Ready(None) => return Poll::Ready(()),
                Poll::Pending => break,
            }
        }
        quota.lines += connection.lines.take();
        quota.adapt(allowance.get() == 0, worker.tables.connections.borrow().len());
        // Output of the streams wakes the connection task, which then sends it.
        while let Poll::Ready(Some(fate)) = Pin::new(&mut streams).poll_next(cx) {
            if cancels.count(fate) {
                worker.shared.metrics.limit("rapid-reset");
                http.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                cx.waker().wake_by_ref();
            }
        }
        Poll::Pending
    })
    .await;
}

async fn begin(
    io: WatchedIo,
    bounds: &Bounds,
    limits: &Limits,
) -> Result<h2::server::Connection<WatchedIo, Bytes>, h2::Error> {
    h2::server::Builder::new()
        .initial_window_size(bounds.stream_window)
        .initial_connection_window_size(bounds.connection_window)
        .max_concurrent_streams(limits.streams)
        .max_header_list_size(limits.header_bytes as u32)
        .max_pending_accept_reset_streams(bounds.resets)
        .max_local_error_reset_streams(Some(bounds.error_resets))
        .max_concurrent_reset_streams(bounds.resets_remembered)
        .max_frame_size(MAX_FRAME)
        .max_send_buffer_size(SEND_BUFFER)
        .data_frame_budget(FRAME_BUDGET)
        .enable_connect_protocol()
        .handshake::<_, Bytes>(io)
        .await
}

/// The response side of a stream.
struct Respond {
    respond: SendResponse<Bytes>,
    backlog: Backlog,
}

async fn serve_stream(
    worker: Rc<Worker>,
    connection: Rc<Connection>,
    client: Rc<Client>,
    request: HttpRequest<Receiver>,
    mut respond: Respond,
) -> StreamOutcome {
    let (mut parts, recv) = request.into_parts();
    if let Some(answer) = client.uplink.as_ref().and_then(|uplink| uplink.answer(&parts)) {
        // The connection reports a failure by itself.
        let _ = respond.respond.send_response(answer, true);
        return StreamOutcome::Answered;
    }
    let _used = client.uplink.as_ref().and_then(|uplink| uplink.used_for(&parts));
    let expects = parts
        .headers
        .get(http::header::EXPECT)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    let is_connect = parts.method == Method::CONNECT;
    let length = settle_length(&mut parts.headers);
    let (body, mut tunnelled) = if is_connect {
        (RequestBody::Empty, Some(recv))
    } else {
        (RequestBody::new(&worker, Body::Stream(StreamBody::new(recv, length))), None)
    };
    let listener = connection.current_listener(&worker);
    let origin = Origin {
        worker: &worker,
        listener: &listener,
        source: client.source,
        trust: &client.trust,
        secure: client.secure,
    };
    let served = match from_head(&origin, parts, body.clone()) {
        Ok(mut request) => {
            request.came_by(&connection);
            let interim = Arc::new(Interim::default());
            request.interim = Some(interim.clone());
            request.early = tunnelled.as_mut().map(|recv| EarlyPayload::new(recv));
            let mut to = Waiting { respond: &mut respond.respond, connection: &connection };
            let wait = Wait::new(&mut to, interim, (expects && !is_connect).then(|| body.clone()));
            drop(body);
            // Boxed: a stream that only sends its response needs half the memory.
            match wait.for_served(pinned(|| session::serve(&worker, request)).as_mut()).await {
                Some(served) => served,
                None => return StreamOutcome::Cancelled,
            }
        }
        Err(rejected) => {
            // The body is dropped first: nobody reads it, and the receive budget could not attribute its unread bytes.
            drop((body, tunnelled.take()));
            SessionOutcome::Response(session::reject(&worker, *rejected))
        }
    };
    match served {
        SessionOutcome::Response(response) => send(response, &mut respond).await,
        SessionOutcome::Tunnel(open) => Box::pin(tunnel(open, respond, tunnelled)).await,
    }
    StreamOutcome::Answered
}

/// The response side of a stream while its request is being served, with its connection.
struct Waiting<'a> {
    respond: &'a mut SendResponse<Bytes>,
    connection: &'a Connection,
}

impl Answers for Waiting<'_> {
    fn inform(&mut self, status: StatusCode, headers: HeaderMap) {
        let mut response = Response::new(());
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        let _ = self.respond.send_informational(response);
    }

    fn takes_hints(&self) -> bool {
        !self.connection.is_blocked.get()
    }

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.respond.poll_reset(cx).map(|_| ())
    }
}

async fn send(response: Response<ResponseBody>, to: &mut Respond) {
    let (parts, body) = response.into_parts();
    let ends = body.is_end_stream() || body.entry().facts.method == Method::HEAD;
    let head = Response::from_parts(parts, ());
    let stream = match to.respond.send_response(head, ends) {
        Ok(stream) => stream,
        Err(error) => {
            body.entry().fail(&Error::ClientGone(error.to_string()));
            return;
        }
    };
    if ends {
        return;
    }
    body_writer::pass(body, Sender::H2(halves::Sender::new(stream, &to.backlog))).await;
}

async fn tunnel(mut open: Box<Tunnel>, to: Respond, tunnelled: Option<Receiver>) {
    let Respond { mut respond, backlog } = to;
    let Some(recv) = sent_by_client(&mut open, tunnelled) else {
        respond.send_reset(Reason::PROTOCOL_ERROR);
        open.session.entry.fail(&Error::Malformed("a tunnel whose request has ended".to_owned()));
        return;
    };
    match respond.send_response(open.head_parts(), false) {
        Ok(send) => {
            session::relay(
                DownstreamEnd::Stream(ByteStream::multiplexed(
                    recv,
                    Sender::H2(halves::Sender::new(send, &backlog)),
                    None,
                )),
                *open,
            )
            .await
        }
        Err(error) => open.session.entry.fail(&Error::ClientGone(error.to_string())),
    }
}

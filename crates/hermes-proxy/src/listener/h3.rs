//! HTTP/3 of a client.
//!
//! In: a QUIC connection. Out: its streams. All streams are futures in the one task of the connection: they end with
//! it, and no task is spawned for a request. QUIC and this node limit concurrent streams, field sections and windows. A
//! client that repeatedly cancels its requests loses the connection, as over HTTP/2.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::stream::{FuturesUnordered, StreamExt};
use hermes_model::facts::{Kind, Trust};
use hermes_model::limits::Limits;
use hermes_net::quic;
use hermes_wire::h3::{Code, Settings};
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use http_body::Body as HttpBody;

use super::http::Client;
use super::interim::{Answers, Wait, sent_by_client};
use super::quic::Begun;
use super::stream_limits::{self, RapidResetGuard, StreamOutcome};
use super::trust_by_address;
use crate::request::{Origin, from_head};
use crate::service::respond;
use crate::session::{self, DownstreamEnd, SessionOutcome, Tunnel};
use crate::worker::Worker;
use hermes_outbound::generation;
use hermes_outbound::reverse::{Probe, UplinkConnection};
use hermes_transport::body::{Body, Interim, RequestBody, ResponseBody, StreamBody, settle_length};
use hermes_transport::body_writer;
use hermes_transport::early_payload::EarlyPayload;
use hermes_transport::error::Error;
use hermes_transport::error::Oversize;
use hermes_transport::h3::fields::{self, Bounds, FieldError};
use hermes_transport::h3::{Datagrams, Link, Windows, connection::number};
use hermes_transport::headers::EARLY_DATA;
use hermes_transport::runtime::WorkerContext;
use hermes_transport::runtime::session::{Connection, SessionEntry, Stage};
use hermes_transport::stream::h3::{self as halves, Fault};
use hermes_transport::stream::{ByteStream, Receiver, Sender, StreamError};

/// Stream ID of a GOAWAY that revokes no request in transit (RFC 9114, section 5.2). The client sends no further
/// requests, the node serves those that still arrive, and the sweep ends the connection once it is idle.
const ANY_STREAM: u64 = (1 << 62) - 4;

/// The SETTINGS of this node.
pub(super) fn ours(limits: &Limits) -> Settings {
    Settings { max_field_section: Some(limits.header_bytes as u64), extended_connect: true, datagrams: true }
}

/// Serves a connection until it ends.
pub(crate) async fn serve(worker: &Rc<Worker>, connection: &Rc<Connection>, quic: quic::Connection, client: Client) {
    serve_begun(worker, connection, Begun::whole(quic), client).await;
}

/// Serves a connection as `serve` does, perhaps before the end of its handshake.
pub(super) async fn serve_begun(worker: &Rc<Worker>, connection: &Rc<Connection>, begun: Begun, client: Client) {
    let Begun { quic, mut confirming, control } = begun;
    connection.is_shared.set(true);
    let limits = worker.generation().snapshot.limits.clone();
    let allowed = stream_limits::Bounds::of(&client, &limits);
    let mut cancels = RapidResetGuard::new(&allowed);
    quic.set_send_window(allowed.connection_window.into());
    let bounds = Bounds { bytes: limits.header_bytes, lines: limits.header_count };
    let believed = generation::server_bounds(&limits, &connection.current_listener(worker));
    let windows = Windows { stream: believed.stream_window, connection: allowed.connection_window };
    let link = Link::new(quic, true, windows);
    let is_confirmed = || {
        link.confirm();
        if connection.stage() == Stage::Handshake {
            connection.set_stage(worker, Stage::Idle);
        }
    };
    if confirming.is_none() {
        is_confirmed();
    }
    let mut client = Rc::new(client);
    if let Some(uplink) = &client.uplink {
        uplink.begin(Some(Probe::Quic(link.connection.clone())));
    }
    let mut driver = pin!(link.drive(worker, ours(&limits), control));
    let mut accepting = pin!(link.connection.accept_bi());
    let mut streams = FuturesUnordered::new();
    let mut has_said_goaway = false;
    std::future::poll_fn(|cx| {
        if driver.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        if client.uplink.as_ref().is_some_and(|uplink| is_silent(uplink, &link, cx)) {
            link.close(Code::NoError, "silent");
            return Poll::Ready(());
        }
        match confirming.as_mut().map(|confirming| confirming.as_mut().poll(cx)) {
            Some(Poll::Ready(true)) => {
                confirming = None;
                is_confirmed();
            }
            // The handshake failed, so no client is at the other end.
            Some(Poll::Ready(false)) => return Poll::Ready(()),
            Some(Poll::Pending) | None => {}
        }
        if !has_said_goaway && connection.drain.poll(cx).is_ready() {
            has_said_goaway = true;
            link.say_goaway(ANY_STREAM + link.first_request());
        }
        while let Poll::Ready(accepted) = accepting.as_mut().poll(cx) {
            let Ok((mut send, mut recv)) = accepted else { return Poll::Ready(()) };
            accepting.set(link.connection.accept_bi());
            follow(worker, connection, &mut client);
            cancels.began += 1;
            if connection.takes_no_more(worker) {
                let _ = send.reset(number(Code::RequestRejected));
                let _ = recv.stop(number(Code::RequestRejected));
                continue;
            }
            // The rest of a request is not needed after the response (RFC 9114, 4.1).
            let recv = halves::Receiver::new(worker, recv, link.clone(), bounds, Code::NoError);
            let send = halves::Sender::new(send, link.clone());
            streams.push(serve_stream(worker.clone(), connection.clone(), client.clone(), recv, send));
        }
        while let Poll::Ready(Some(fate)) = streams.poll_next_unpin(cx) {
            if cancels.count(fate) {
                worker.shared.metrics.limit("rapid-reset");
                link.close(Code::ExcessiveLoad, "requests that are begun only to be broken off");
                return Poll::Ready(());
            }
        }
        Poll::Pending
    })
    .await;
}

/// True if a peer that this node dialled was silent for too long.
fn is_silent(uplink: &UplinkConnection, link: &Link, cx: &mut Context<'_>) -> bool {
    let stats = link.connection.stats();
    uplink.note_challenges(stats.frame_rx.path_challenge);
    uplink.poll_dead(cx, stats.udp_rx.datagrams).is_ready()
}

/// Follows a client that migrated to another address. Trust in the old address ends at once. The new address earns no
/// trust: QUIC follows the first packet from a new address, though its source may be forged, and validates the path
/// afterwards. A migration can therefore lose trust and never gains it. A client without certificate keeps the address
/// that its handshake validated.
fn follow(worker: &Worker, connection: &Connection, client: &mut Rc<Client>) {
    let now = connection.follow(worker);
    if now == client.source {
        return;
    }
    let (source, trust) = match &client.trust {
        Trust::Certified(peer) => (now, Trust::Certified(peer.clone())),
        Trust::Address => (client.source, trust_by_address(&connection.current_listener(worker), now)),
        Trust::Anonymous => return,
    };
    *client = Rc::new(Client { source, trust, secure: true, uplink: client.uplink.clone() });
}

async fn serve_stream(
    worker: Rc<Worker>,
    connection: Rc<Connection>,
    client: Rc<Client>,
    recv: halves::Receiver,
    send: halves::Sender,
) -> StreamOutcome {
    let delivered = send.delivered();
    let fate = serve_request(worker, connection, client, recv, send).await;
    // quinn discards pending data when the connection closes. The connection closes once all its streams have ended, so
    // the stream waits for delivery.
    delivered.await;
    fate
}

async fn serve_request(
    worker: Rc<Worker>,
    connection: Rc<Connection>,
    client: Rc<Client>,
    mut recv: halves::Receiver,
    send: halves::Sender,
) -> StreamOutcome {
    let within = worker.generation().snapshot.limits.header_timeout;
    let head = tokio::time::timeout(within, take_head(&mut recv)).await;
    match head.unwrap_or(Err(NoRequest::Late)) {
        // Boxed: a stream whose head never arrives then costs a tenth of the memory of a served one, and no limit
        // counts it.
        Ok(head) => Box::pin(serve_head(worker, connection, client, (recv, send), head)).await,
        Err(why) => turn_away(&worker, &client, recv, send, why).await,
    }
}

async fn serve_head(
    worker: Rc<Worker>,
    connection: Rc<Connection>,
    client: Rc<Client>,
    (recv, mut send): (halves::Receiver, halves::Sender),
    (mut parts, length): (Parts, Option<u64>),
) -> StreamOutcome {
    let fault = recv.fault();
    let as_it_came = settle_early(&recv, &mut parts).await;
    if let Some(answer) = client.uplink.as_ref().and_then(|uplink| uplink.answer(&parts)) {
        // The connection reports a failure by itself; a stream without a response is reset.
        let _ = send.send_head(fields::put_response(answer.status(), answer.headers()), true);
        let _ = std::future::poll_fn(|cx| send.poll_settled(cx)).await;
        return StreamOutcome::Answered;
    }
    let _used = client.uplink.as_ref().and_then(|uplink| uplink.used_for(&parts));
    let is_connect = parts.method == Method::CONNECT;
    let expects = parts
        .headers
        .get(http::header::EXPECT)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    // Datagrams register before the decision, since a client may send them along with its request (RFC 9298, 5).
    let datagrams = carries_datagrams(&parts).then(|| recv.datagrams());
    let recv = Receiver::H3(Box::new(recv));
    let (body, mut tunnelled) = if is_connect {
        (RequestBody::Empty, Some(recv))
    } else {
        (RequestBody::new(&worker, Body::Stream(StreamBody::new(recv, length))), None)
    };
    let listener = connection.current_listener(&worker);
    let origin =
        Origin { worker: &worker, listener: &listener, source: client.source, trust: &client.trust, secure: true };
    let served = match from_head(&origin, parts, body.clone()) {
        Ok(mut request) => {
            request.came_by(&connection);
            let interim = Arc::new(Interim::default());
            request.interim = Some(interim.clone());
            // With datagrams, capsules are parsed here from the first one on (see `EarlyPayload::has_whole_capsules`). Only
            // CONNECT-IP may send its first capsules ahead, because they are complete.
            let may_go = datagrams.is_none() || request.facts.kind == Kind::Ip;
            request.early = tunnelled.as_mut().filter(|_| may_go).map(|recv| EarlyPayload::new(recv));
            let wait = Wait::new(&mut send, interim, (expects && !is_connect).then(|| body.clone()));
            drop(body);
            // Boxed: a stream that only sends its response needs half the memory.
            match wait.for_served(Box::pin(session::serve(&worker, request)).as_mut()).await {
                Some(served) => served,
                None => return StreamOutcome::Cancelled,
            }
        }
        Err(rejected) => {
            drop((body, tunnelled.take()));
            SessionOutcome::Response(session::reject(&worker, *rejected))
        }
    };
    let served = match (served, as_it_came) {
        (SessionOutcome::Response(response), Some(parts)) if response.status() == StatusCode::TOO_EARLY => {
            drop(response);
            match Box::pin(serve_confirmed(&origin, &worker, &connection, parts, &mut send)).await {
                Some(served) => served,
                None => return StreamOutcome::Cancelled,
            }
        }
        (served, _) => served,
    };
    // A stream that breaks after this point counts as answered: it costs the node only what it costs the client.
    let fate = fate_of(fault.get()).unwrap_or(StreamOutcome::Answered);
    match served {
        SessionOutcome::Response(response) => answer(response, send).await,
        SessionOutcome::Tunnel(open) => Box::pin(tunnel(open, send, tunnelled, datagrams)).await,
    }
    fate
}

/// Ends a stream that carried no request.
async fn turn_away(
    worker: &Rc<Worker>,
    client: &Client,
    recv: halves::Receiver,
    mut send: halves::Sender,
    why: NoRequest,
) -> StreamOutcome {
    match why {
        NoRequest::Late => {
            worker.shared.metrics.limit("slow-client");
            send.reset_with(Code::RequestIncomplete);
            StreamOutcome::Malformed
        }
        NoRequest::Incomplete => {
            send.reset_with(Code::RequestIncomplete);
            StreamOutcome::Malformed
        }
        NoRequest::Refused(error) => refuse(worker, recv, send, &error).await,
        NoRequest::Broken(error) => {
            tracing::debug!(source = %client.source, %error, "an HTTP/3 stream brought no request");
            fate_of(recv.fault().get()).unwrap_or(StreamOutcome::Malformed)
        }
    }
}

/// The reason why a stream has no request.
enum NoRequest {
    /// The stream ended before its head.
    Incomplete,
    /// The head took longer than the header timeout.
    Late,
    /// The head is malformed or too large.
    Refused(FieldError),
    /// The stream or its connection failed.
    Broken(StreamError),
}

/// Reads the head of a request and the length of its body from `content-length`. Afterwards the receiver knows which
/// frames may follow.
async fn take_head(recv: &mut halves::Receiver) -> Result<(Parts, Option<u64>), NoRequest> {
    let head = std::future::poll_fn(|cx| {
        let head = ready!(recv.poll_head(cx));
        recv.peek(cx);
        Poll::Ready(head)
    });
    let block = match head.await {
        Ok(block) => block.ok_or(NoRequest::Incomplete)?,
        Err(_) if recv.fault().get() == Some(Fault::TooLarge) => {
            return Err(NoRequest::Refused(FieldError::TooLarge(recv.bounds())));
        }
        Err(error) => return Err(NoRequest::Broken(error)),
    };
    let mut parts = fields::read_request(block, recv.bounds()).map_err(NoRequest::Refused)?;
    lengths(&parts.headers).map_err(NoRequest::Refused)?;
    let length = settle_length(&mut parts.headers);
    if parts.method == Method::CONNECT {
        recv.expect_tunnel();
        return Ok((parts, length));
    }
    recv.expect(length);
    // A body of length zero is never read, so a violation in it must be detected here.
    if length == Some(0)
        && let Some(Err(error)) = std::future::poll_fn(|cx| recv.poll_chunk(cx, usize::MAX)).await
    {
        return Err(match recv.fault().get() {
            Some(Fault::Malformed) => NoRequest::Refused(FieldError::Malformed(error.to_string())),
            _ => NoRequest::Broken(error),
        });
    }
    Ok((parts, length))
}

/// Handles a request in early data, which may be a replay. Only a safe request without a body is served at once, with
/// `EarlyPayload-Data: 1` for the next node (RFC 8470, sections 3 and 5.2). Any other request waits for the handshake.
///
/// Returns the original head of a request that is served at once, so that it can be served again if the upstream
/// answers 425.
async fn settle_early(recv: &halves::Receiver, parts: &mut Parts) -> Option<Parts> {
    if !recv.is_early() {
        return None;
    }
    if [Method::GET, Method::HEAD, Method::OPTIONS].contains(&parts.method) && recv.is_end_stream() {
        let as_it_came = parts.clone();
        parts.headers.insert(EARLY_DATA, HeaderValue::from_static("1"));
        return Some(as_it_came);
    }
    recv.link().confirmed().await;
    None
}

/// Serves a request again after the upstream answered 425 (RFC 8470, section 5.2). The client did not mark its request
/// as early and might not understand 425.
async fn serve_confirmed(
    origin: &Origin<'_>,
    worker: &Rc<Worker>,
    connection: &Rc<Connection>,
    parts: Parts,
    send: &mut halves::Sender,
) -> Option<SessionOutcome> {
    let link = send.link().clone();
    link.confirmed().await;
    let mut request = match from_head(origin, parts, RequestBody::Empty) {
        Ok(request) => request,
        Err(rejected) => return Some(SessionOutcome::Response(session::reject(worker, *rejected))),
    };
    request.came_by(connection);
    let interim = Arc::new(Interim::default());
    request.interim = Some(interim.clone());
    let wait = Wait::new(send, interim, None);
    wait.for_served(Box::pin(session::serve(worker, request)).as_mut()).await
}

fn fate_of(fault: Option<Fault>) -> Option<StreamOutcome> {
    fault.map(|fault| match fault {
        Fault::Reset => StreamOutcome::Cancelled,
        Fault::Malformed | Fault::TooLarge => StreamOutcome::Malformed,
    })
}

fn carries_datagrams(parts: &Parts) -> bool {
    let protocol = parts.extensions.get::<::h2::ext::Protocol>();
    protocol.is_some_and(|protocol| {
        ["connect-udp", "connect-ip", hermes_wire::custody::PROTOCOL].contains(&protocol.as_str())
    })
}

/// Checks that the request has at most one distinct `content-length`. Over HTTP/2, the h2 library checks this.
fn lengths(headers: &HeaderMap) -> Result<(), FieldError> {
    let mut lines = headers.get_all(http::header::CONTENT_LENGTH).iter();
    let Some(first) = lines.next() else { return Ok(()) };
    let is_number = !first.is_empty() && first.as_bytes().iter().all(u8::is_ascii_digit);
    if is_number && lines.all(|uplink| uplink == first) {
        return Ok(());
    }
    Err(FieldError::Malformed("content-length is not a number, or differs between fields".to_owned()))
}

/// Rejects an invalid request: with 431 if it is too large, otherwise with a stream reset.
async fn refuse(
    worker: &Worker,
    mut recv: halves::Receiver,
    mut send: halves::Sender,
    error: &FieldError,
) -> StreamOutcome {
    tracing::debug!(peer = %send.link().connection.remote_address(), %error, "a request was refused");
    let _ = recv.field_error(error);
    if matches!(error, FieldError::TooLarge(_)) {
        worker.shared.metrics.limit("headers");
        let head = fields::put_response(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, &HeaderMap::new());
        // A client that accepts no header block receives no response.
        let _ = send.send_head(head, true);
        let _ = std::future::poll_fn(|cx| send.poll_settled(cx)).await;
    } else {
        send.reset_with(Code::MessageError);
    }
    StreamOutcome::Malformed
}

impl Answers for halves::Sender {
    fn inform(&mut self, status: StatusCode, headers: HeaderMap) {
        // An interim response that exceeds the client's limit is omitted.
        let _ = self.send_head(fields::put_response(status, &headers), false);
    }

    fn takes_hints(&self) -> bool {
        true
    }

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // The final response meets the same error.
        let _ = self.poll_room(cx);
        self.poll_reset(cx).map(|_| ())
    }
}

async fn answer(response: Response<ResponseBody>, mut send: halves::Sender) {
    let (parts, body) = response.into_parts();
    let ends = body.is_end_stream() || body.entry().facts.method == Method::HEAD;
    let entry = body.entry().clone();
    if let Err(oversize) = send.send_head(fields::put_response(parts.status, &parts.headers), ends) {
        return excuse(body.worker(), &entry, send, oversize).await;
    }
    if ends {
        if let Err(error) = std::future::poll_fn(|cx| send.poll_settled(cx)).await {
            entry.fail(&Error::ClientGone(error.to_string()));
        }
        return;
    }
    body_writer::pass(body, Sender::H3(Box::new(send))).await;
}

/// Sends a smaller response head to a client whose limit the original head exceeds.
async fn excuse(worker: &WorkerContext, entry: &SessionEntry, mut send: halves::Sender, oversize: Oversize) {
    let error = Error::AnswerTooLarge(oversize);
    entry.fail(&error);
    let failure = respond::failure(&error, &worker.snapshot().node, entry.facts.trust.is_believed());
    let (mut parts, _) = failure.into_parts();
    parts.headers.remove(CONTENT_TYPE);
    entry.status.set(parts.status.as_u16());
    for headers in [&parts.headers, &HeaderMap::new()] {
        if send.send_head(fields::put_response(parts.status, headers), true).is_ok() {
            break;
        }
    }
    // If not even an empty head fits, the stream is reset.
    let _ = std::future::poll_fn(|cx| send.poll_settled(cx)).await;
}

async fn tunnel(
    mut open: Box<Tunnel>,
    mut send: halves::Sender,
    tunnelled: Option<Receiver>,
    datagrams: Option<Datagrams>,
) {
    let Some(recv) = sent_by_client(&mut open, tunnelled) else {
        send.reset_with(Code::MessageError);
        open.session.entry.fail(&Error::Malformed("a tunnel whose request has ended".to_owned()));
        return;
    };
    let (parts, ()) = open.head_parts().into_parts();
    if let Err(oversize) = send.send_head(fields::put_response(parts.status, &parts.headers), false) {
        return excuse(&open.session.worker, &open.session.entry, send, oversize).await;
    }
    match std::future::poll_fn(|cx| send.poll_room(cx)).await {
        Ok(()) => {
            let stream = ByteStream::multiplexed(recv, Sender::H3(Box::new(send)), None);
            let stream = stream.with_datagrams(datagrams);
            session::relay(DownstreamEnd::Stream(stream), *open).await;
        }
        Err(error) => open.session.entry.fail(&Error::ClientGone(error.to_string())),
    }
}

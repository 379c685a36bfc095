//! An exchange that a neighbour sent: a session like any other, whose request and response are in custody.
//!
//! In: the head of its request. Out: its response, into custody; or its forwarding to the next node. An exchange of an
//! earlier process is resumed. If its request may be repeated, it is sent to the origin again, and the response
//! continues where it broke off.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;

use hermes_model::rewrite::TemplateValues;
use hermes_wire::binary_http::Part as Piece;
use hermes_wire::custody::{Direction, ExchangeId};
use http::StatusCode;
use http_body::Body as _;

use super::custody_channel::InboundChannel;
use super::origin_replay::{self, ReplayMismatch};
use crate::custody::message::{CustodyBody, Reading, WriteError, Writing, request, response_head, with_end};
use crate::custody::tunnel::CustodyStream;
use crate::custody::{OUTCOME_UNKNOWN, error_of, forward};
use crate::request::{InboundExchange, Origin, Rejected, Request, from_head};
use crate::service::forward::head::clean_response;
use crate::session::{self, DownstreamEnd, SessionOutcome, Tunnel};
use crate::worker::Worker;
use hermes_custody::Intent;
use hermes_custody::service::{CustodyService, RestoredExchange};
use hermes_transport::body::{Body, RequestBody, settle_length};
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::ByteStream;

/// A guard: when dropped, no task of this process serves the exchange any more.
struct Parting<'a>(&'a CustodyService, ExchangeId);

impl Drop for Parting<'_> {
    fn drop(&mut self) {
        self.0.detach(self.1);
    }
}

/// Serves an exchange.
pub(super) async fn serve(worker: &Rc<Worker>, way: &InboundChannel, id: ExchangeId, is_resumed: bool) {
    let office = &worker.services.custody;
    let _parting = Parting(office, id);
    let resumed = if is_resumed { office.resumed(id) } else { None };
    match &resumed {
        Some(resumed) if resumed.awaits_head => return Box::pin(lead_on(worker, way, id)).await,
        // From here on, the custody engine forwards the exchange.
        Some(resumed) if !resumed.is_for_here || resumed.response.is_whole => return,
        None if is_resumed => return,
        _ => {}
    }
    let Some((request, theirs)) = Box::pin(read_head(worker, way, id, resumed.is_some())).await else { return };
    let served = match request {
        Ok(mut request) => {
            if let Some(resumed) = &resumed {
                if let Some(why) = may_be_done(resumed.intent, &request) {
                    let facts = &request.facts;
                    tracing::warn!(
                        %id, method = %facts.method, authority = %facts.authority, path = facts.path.path(), peer = %way.peer,
                        "{OUTCOME_UNKNOWN}: {why}"
                    );
                    return office.fail(id, 502, &format!("{OUTCOME_UNKNOWN}: {why}"));
                }
                worker.shared.metrics.custody_replays.inc();
            }
            request.arrived = Some(InboundExchange { id, head_bytes: theirs });
            Box::pin(session::serve(worker, request)).await
        }
        Err(rejected) => SessionOutcome::Response(session::reject(worker, *rejected)),
    };
    let response = match served {
        SessionOutcome::Response(response) => response,
        SessionOutcome::Tunnel(tunnel) => return Box::pin(join(worker, way, id, *tunnel)).await,
    };
    let (parts, mut body) = response.into_parts();
    let entry = body.entry().clone();
    if !matches!(body.body, Body::Led { .. }) && office.is_led(id) {
        // The session ended before a response. A process that drains leaves the exchange to its successor.
        let is_going = matches!(entry.end.get(), Some(Error::Draining));
        if !is_going {
            let why = entry.failure().map_or_else(|| "it was ended".to_owned(), |error| error.to_string());
            office.fail(id, parts.status.as_u16(), &why);
        }
        return;
    }
    if let Body::Led { head_bytes: theirs } = body.body {
        office.settle_response(id, theirs, response_head(parts.status, &parts.headers));
        return until_over(office, way, id, &entry).await;
    }
    office.accept_local(id, false);
    let head = response_head(parts.status, &parts.headers);
    let (first, is_last) = if let Some(RestoredExchange { response, .. }) =
        resumed.filter(|resumed| resumed.response.offset > 0)
    {
        match origin_replay::prove(worker, id, response.offset, &parts, &mut body).await {
            Ok(behind) => behind,
            Err(ReplayMismatch::Differs(what)) => {
                let reason =
                    format!("the response of the origin differs from the one before this node was restarted: {what}");
                return office.fail(id, 502, &reason);
            }
            Err(ReplayMismatch::Broken(error)) => {
                return office.fail(id, 502, &format!("the response was interrupted: {error}"));
            }
        }
    } else if body.is_end_stream() {
        (with_end(&head), true)
    } else {
        (head, false)
    };
    if is_last {
        // After the end no reader waits for it.
        let _ = poll_fn(|cx| office.poll_append(cx, id, Direction::Response, &first, true)).await;
        return;
    }
    let mut writing = Writing::new(office.clone(), id, Direction::Response, first, body).bound(&entry);
    if let Err(WriteError::Body(error)) = poll_fn(|cx| writing.poll(cx)).await {
        office.fail(id, 502, &format!("the response was interrupted: {error}"));
    }
}

/// The reason why a resumed request may already have been processed, although it must not be processed twice.
fn may_be_done(intent: Option<Intent>, request: &Request<'_>) -> Option<&'static str> {
    match intent? {
        Intent::Certain => Some("this node was restarted after it had sent the request to the origin"),
        Intent::Possible if request.facts.method.is_idempotent() => None,
        Intent::Possible => Some("this node was restarted, and its custody journal is damaged"),
    }
}

/// Relays a stream that ends at this node. The server receives no byte before the journal has recorded the start. So a
/// neighbour that restarts the stream after a crash of this node cannot open a second one, which would deliver the
/// bytes twice.
async fn join(worker: &Rc<Worker>, way: &InboundChannel, id: ExchangeId, mut tunnel: Tunnel) {
    let office = &worker.services.custody;
    office.accept_local(id, true);
    tunnel.session.entry.set_held(true);
    if let Err(failure) = poll_fn(|cx| office.poll_intent(cx, id)).await {
        return tunnel.session.entry.fail(&error_of(&way.peer, &failure));
    }
    let head = tunnel.head_parts();
    // A proxy may have answered with another success status; for the previous node the tunnel is open.
    let head = response_head(StatusCode::OK, head.headers());
    let reads = CustodyBody::new(office.clone(), id, Direction::Request, Reading::new(worker), way.peer.clone());
    let stream = CustodyStream::new(office.clone(), id, Direction::Response, head, reads.taken_in());
    session::relay(DownstreamEnd::Stream(ByteStream::Boxed(Box::new(stream))), tunnel).await;
}

/// Keeps the session until the exchange ends.
async fn until_over(office: &CustodyService, way: &InboundChannel, id: ExchangeId, entry: &Rc<SessionEntry>) {
    let mut over = pin!(poll_fn(|cx| office.poll_over(cx, id)));
    tokio::select! {
        ended = &mut over => if let Err(failure) = ended {
            entry.fail(&error_of(&way.peer, &failure));
        },
        error = entry.end.wait() => if !matches!(error, Error::Draining) {
            office.fail(id, error.status().as_u16(), &error.to_string());
        },
    }
}

/// The request of an exchange or its rejection, and the length of the head in its stream.
type ReadHead = (Result<Request<'static>, Box<Rejected>>, u64);

/// Reads the head of a new exchange as a request. `None`: the exchange failed.
async fn read_head(worker: &Rc<Worker>, way: &InboundChannel, id: ExchangeId, is_resumed: bool) -> Option<ReadHead> {
    let office = &worker.services.custody;
    let mut reading = Reading::new(worker);
    let mut is_read = false;
    let (control, fields) = loop {
        match reading.next() {
            Ok(Some(Piece::Head(control, fields))) => break (control, fields),
            Ok(Some(_)) => {}
            Ok(None) if is_resumed => {
                let read = poll_fn(|cx| office.poll_read(cx, id, Direction::Request, usize::MAX)).await;
                let (bytes, is_last) = read.ok()?;
                is_read = is_last;
                reading.push(bytes);
            }
            Ok(None) => {
                let bytes = poll_fn(|cx| office.poll_head(cx, id, Direction::Request)).await;
                reading.push(bytes.ok()?);
            }
            Err(error) => {
                office.fail(id, 400, &format!("invalid request: {error}"));
                return None;
            }
        }
    };
    office.has_head(id, Direction::Request);
    let theirs = reading.read();
    let next = reading.next();
    let is_bare = matches!(next, Ok(Some(Piece::End(_))));
    let mut parts = match request(control, fields) {
        Ok(parts) => parts,
        Err(why) => {
            office.fail(id, 400, &format!("invalid request: {why}"));
            return None;
        }
    };
    let length = settle_length(&mut parts.headers);
    if is_bare && length.is_some_and(|length| length > 0) {
        office.fail(id, 400, "invalid request: shorter than its declared length");
        return None;
    }
    let generation = worker.generation();
    let Some(listener) = generation.listener(&way.listener) else {
        office.fail(id, 503, "the listener of the exchange was removed");
        return None;
    };
    let body = if is_bare {
        RequestBody::Empty
    } else {
        // Peeked bytes were not consumed; read bytes were.
        let reading = if is_resumed { reading } else { Reading::new(worker) };
        let content = CustodyBody::new(office.clone(), id, Direction::Request, reading, way.peer.clone());
        let ahead = next.ok().flatten().filter(|_| is_resumed);
        let mut content = content.having_read_all(is_read).behind(ahead);
        content.expect(length);
        RequestBody::new(worker, Body::boxed(content))
    };
    let origin = Origin { worker, listener, source: way.source, trust: &way.trust, secure: true };
    Some((from_head(&origin, parts, body), theirs))
}

/// Settles the head of a response that arrives at a process which did not forward the request itself. The head is
/// rewritten by the route of the same name, if it still exists, and otherwise by the general rules.
async fn lead_on(worker: &Rc<Worker>, way: &InboundChannel, id: ExchangeId) {
    let office = &worker.services.custody;
    let known = match forward::await_head(worker, id, &way.peer).await {
        Ok(known) => known,
        Err(error) => return tracing::debug!(%id, %error, "an exchange of the previous process failed"),
    };
    let (response, theirs) = known;
    let (mut parts, ()) = response.into_parts();
    let generation = worker.generation();
    let route = office.account(id).and_then(|name| generation.snapshot.routes.iter().find(|route| route.name == name));
    let request = own_request(worker, way, id).await;
    let cleaned = match request {
        Some(request) => {
            let vars = TemplateValues { facts: &request.facts, node: &generation.snapshot.node };
            clean_response(&mut parts, &generation.via, route.and_then(|route| route.rewrite.as_ref()), &vars)
        }
        None => Err(Error::Internal("the head of the request is no longer available".to_owned())),
    };
    match cleaned {
        Ok(()) => office.settle_response(id, theirs, response_head(parts.status, &parts.headers)),
        Err(error) => office.fail(id, 502, &error.to_string()),
    }
}

/// The request of an exchange, as this node forwarded it.
async fn own_request(worker: &Rc<Worker>, way: &InboundChannel, id: ExchangeId) -> Option<Request<'static>> {
    let office = &worker.services.custody;
    let length = office.head_length(id, Direction::Request)?;
    let mut reading = Reading::new(worker);
    reading.push(office.read_back(id, Direction::Request, 0, length).await?);
    let Ok(Some(Piece::Head(control, fields))) = reading.next() else { return None };
    let parts = request(control, fields).ok()?;
    let generation = worker.generation();
    let listener = generation.listener(&way.listener)?;
    let origin = Origin { worker, listener, source: way.source, trust: &way.trust, secure: true };
    from_head(&origin, parts, RequestBody::Empty).ok()
}

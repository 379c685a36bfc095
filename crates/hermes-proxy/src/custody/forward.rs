//! The custody filter: sends the exchange of a session, from here or onward.
//!
//! In: a decided request. Out: the response, once it arrives. The route's `deadline` bounds the wait, instead of the
//! timeouts of a session. The content of a request that itself arrived by custody does not pass here: the engine
//! forwards it internally, after the head that this node writes.

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_model::facts::Kind;
use hermes_model::snapshot::{Custody, Route};
use hermes_wire::custody::{Direction, ExchangeId};
use http::header::AGE;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use http_body::Body as _;

use super::message::{CustodyBody, Reading, Uploading, WriteError, Writing, request_head, response, with_end};
use super::tunnel::CustodyStream;
use crate::request::{InboundExchange, Request, UpgradeKind};
use crate::service::forward::head::Outgoing;
use crate::service::forward::{Forward, is_idempotent};
use crate::worker::Worker;
use hermes_custody::service::{CustodyService, Failure};
use hermes_outbound::upstream::UpstreamState;
use hermes_transport::body::{Body, BoxedBody, settle_length};
use hermes_transport::error::Error;
use hermes_transport::headers;
use hermes_transport::runtime::fair_shares::Owner;
use hermes_transport::runtime::session::SessionEntry;

/// An exchange whose client waits at this node. If the client leaves, the exchange fails, or waits for a client that
/// sends the same request.
struct Awaited {
    office: Arc<CustodyService>,
    id: ExchangeId,
    asked: Option<Bytes>,
    is_done: bool,
}

impl Drop for Awaited {
    fn drop(&mut self) {
        match self.asked.take() {
            _ if self.is_done => {}
            Some(asked) => self.office.leave(self.id, asked),
            None => {
                self.office.fail(self.id, 499, "its client is gone");
                self.office.detach(self.id);
            }
        }
    }
}

/// The key of a request that a client may repeat for the same response: everything that the next hop receives, except
/// fields that differ between tries, plus the identity of the client.
fn asked(forward: &Forward<'_>) -> Option<Bytes> {
    let facts = &forward.entry.facts;
    // A cache's own amended request is not the same request.
    let is_amended = forward.rewriter.amend.is_some();
    if facts.method != Method::GET || is_amended || !forward.body.attempt().is_end_stream() {
        return None;
    }
    let mut lines: Vec<_> = facts
        .headers
        .iter()
        .filter(|(name, _)| **name != headers::TRACEPARENT && name.as_str() != "tracestate")
        .map(|(name, value)| [name.as_str().as_bytes(), b":", value.as_bytes(), b"\n"].concat())
        .collect();
    lines.sort_unstable();
    let (user, source) = (facts.user.as_deref().unwrap_or_default(), facts.source.ip());
    let route = &forward.route.name;
    let scheme = forward.rewriter.scheme;
    let who = format!("{route}\n{user}\n{source}\n{scheme}\n{}\n{}\n", facts.authority, facts.path);
    Some([who.into_bytes(), lines.concat()].concat().into())
}

/// The custody filter: sends the exchange to one endpoint of the upstream, under the custody deadline.
///
/// # Errors
/// This node's custody storage is full, or the exchange failed here or at a later node.
pub(crate) async fn handle(
    custody: &Custody,
    upstream: &UpstreamState,
    arrived: Option<InboundExchange>,
    forward: &Forward<'_>,
) -> Result<Response<Body>, Error> {
    let (worker, entry) = (forward.worker, forward.entry);
    let office = &worker.services.custody;
    let (peer, head) = towards(forward, upstream)?;
    if let Some(InboundExchange { id, head_bytes: theirs }) = arrived {
        let is_tunnel = entry.facts.kind == Kind::Tcp;
        let account = &forward.route.name;
        let led = poll_fn(|cx| office.poll_lead(cx, id, (&peer, is_tunnel), account, theirs, &head)).await;
        led.map_err(|failure| super::error_of(&peer, &failure))?;
        return onward(forward, id, &peer).await;
    }
    let asked = asked(forward);
    let joined = asked.as_ref().and_then(|asked| office.join(asked));
    let id = match joined {
        Some(id) => id,
        None => begin(forward, &peer, custody, false, asked.as_ref())?,
    };
    let mut awaited = Awaited { office: office.clone(), id, asked: asked.clone(), is_done: false };
    let body = forward.body.attempt();
    let uploading = if joined.is_some() {
        worker.shared.metrics.custody_joins.inc();
        None
    } else if body.is_end_stream() {
        let whole = with_end(&head);
        let brought = poll_fn(|cx| office.poll_append(cx, id, Direction::Request, &whole, true)).await;
        brought.map_err(|failure| super::error_of(&peer, &failure))?;
        None
    } else {
        let mut writing = Writing::new(office.clone(), id, Direction::Request, head, body);
        let office = office.clone();
        Some(Uploading(worker.spawn(async move {
            if let Err(WriteError::Body(error)) = poll_fn(|cx| writing.poll(cx)).await {
                office.fail(id, 400, &format!("the client broke off the request: {error}"));
            }
        })))
    };
    let mut reading = Reading::new(worker);
    let mut is_read = false;
    let known = loop {
        let piece = reading.next().map_err(|error| broken(office, id, &peer, &error.to_string()))?;
        let is_more_wanted = piece.is_none();
        match response(piece, &reading).map_err(|why| broken(office, id, &peer, &why))? {
            Some(known) => break known,
            None if is_more_wanted && is_read => return Err(broken(office, id, &peer, "truncated message")),
            None if is_more_wanted => {
                let read = poll_fn(|cx| office.poll_read(cx, id, Direction::Response, usize::MAX)).await;
                let (bytes, is_last) = read.map_err(|failure| failed(forward, &peer, &failure))?;
                is_read = is_last;
                reading.push(bytes);
            }
            None => {}
        }
    };
    entry.set_held(false);
    awaited.is_done = true;
    let mut body = CustodyBody::new(office.clone(), id, Direction::Response, reading, peer)
        .having_read_all(is_read)
        .owed(asked, uploading);
    let mut response = known.response;
    if let Some(age) = joined.and_then(|id| office.age(id)) {
        grow_older(response.headers_mut(), age);
    }
    let length = settle_length(response.headers_mut());
    let status = response.status();
    let has_none = entry.facts.method == Method::HEAD
        || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
        || length == Some(0);
    if has_none {
        // The end of the stream is acknowledged like its bytes. The acknowledgement tells earlier nodes that the stream
        // is complete.
        while let Some(frame) = poll_fn(|cx| body.poll_frame(cx)).await {
            frame?;
        }
        return Ok(response.map(|()| Body::Empty));
    }
    body.expect(length);
    Ok(response.map(|()| Body::boxed(body)))
}

/// Opens a stream whose bytes go by custody to one endpoint of the upstream. It is open at once.
///
/// # Errors
/// This node's custody storage is full.
pub(crate) fn tunnel(
    forward: &Forward<'_>,
    upstream: &UpstreamState,
    custody: &Custody,
) -> Result<CustodyStream, Error> {
    let (peer, head) = towards(forward, upstream)?;
    let id = begin(forward, &peer, custody, true, None)?;
    let office = &forward.worker.services.custody;
    let reads = CustodyBody::new(office.clone(), id, Direction::Response, Reading::new(forward.worker), peer);
    Ok(CustodyStream::new(office.clone(), id, Direction::Request, head, reads))
}

/// Chooses the endpoint, and encodes the request's head for it.
fn towards(forward: &Forward<'_>, upstream: &UpstreamState) -> Result<(Arc<str>, Bytes), Error> {
    let (worker, entry) = (forward.worker, forward.entry);
    // The current state of an endpoint says little about future paths.
    let chosen = upstream.choose(&entry.facts, worker.shared.now(), worker.random().1, &[]);
    let peer = upstream.endpoints[chosen.unwrap_or_default()].label.clone();
    *entry.peer.borrow_mut() = Some(peer.clone());
    entry.tries.set(1);
    let mut outgoing = Outgoing::new(entry, &forward.rewriter, true)?;
    if entry.facts.kind == Kind::Tcp {
        // CONNECT, regardless of the method of the client.
        outgoing.method = Method::CONNECT;
    }
    entry.set_held(true);
    Ok((peer, request_head(outgoing)))
}

/// Adds the time in custody to `age` (RFC 9111, section 5.1).
fn grow_older(headers: &mut HeaderMap, by: Duration) {
    let theirs: u64 = headers.get(AGE).and_then(|age| age.to_str().ok()?.parse().ok()).unwrap_or_default();
    headers.insert(AGE, HeaderValue::from(theirs.saturating_add(by.as_secs())));
}

fn begin(
    forward: &Forward<'_>,
    peer: &Arc<str>,
    custody: &Custody,
    is_tunnel: bool,
    asked: Option<&Bytes>,
) -> Result<ExchangeId, Error> {
    let (random, _) = forward.worker.random();
    let id = ExchangeId(random.to_be_bytes());
    let worker = forward.worker;
    let owner: Arc<str> = Arc::from(Owner::of_session(&forward.entry.facts).to_string());
    let begun =
        worker.services.custody.begin(id, peer, custody.deadline, (&forward.route.name, &owner), is_tunnel, asked);
    begun.map_err(|_| {
        worker.shared.metrics.limit("custody-exchanges");
        Error::Limit("exchanges in custody")
    })?;
    Ok(id)
}

/// Records in the journal that a non-repeatable request is about to be sent to its origin, so that this node knows it
/// after a restart.
///
/// # Errors
/// The exchange failed meanwhile.
pub(crate) async fn intend(
    worker: &Worker,
    entry: &Rc<SessionEntry>,
    route: &Route,
    request: &Request<'_>,
    InboundExchange { id, .. }: InboundExchange,
) -> Result<(), Error> {
    if request.upgrade != UpgradeKind::None || is_idempotent(entry, route) {
        return Ok(());
    }
    let office = &worker.services.custody;
    entry.set_held(true);
    office.accept_local(id, false);
    let intended = poll_fn(|cx| office.poll_intent(cx, id)).await;
    entry.set_held(false);
    intended.map_err(|failure| Error::ClientGone(failure.reason.to_string()))
}

/// Waits for the head of a response whose content the engine forwards.
async fn onward(forward: &Forward<'_>, id: ExchangeId, peer: &Arc<str>) -> Result<Response<Body>, Error> {
    let known = await_head(forward.worker, id, peer).await;
    let (response, theirs) = known.map_err(|error| forward.body.failure().unwrap_or(error))?;
    Ok(response.map(|()| Body::Led { head_bytes: theirs }))
}

/// The head of a response that this node must rewrite, and its length.
///
/// # Errors
/// The exchange failed.
pub(crate) async fn await_head(worker: &Worker, id: ExchangeId, peer: &Arc<str>) -> Result<(Response<()>, u64), Error> {
    let office = &worker.services.custody;
    let mut reading = Reading::new(worker);
    loop {
        let piece = reading.next().map_err(|error| broken(office, id, peer, &error.to_string()))?;
        let is_more_wanted = piece.is_none();
        if let Some(known) = response(piece, &reading).map_err(|why| broken(office, id, peer, &why))? {
            office.has_head(id, Direction::Response);
            return Ok((known.response, known.length));
        }
        if is_more_wanted {
            let bytes = poll_fn(|cx| office.poll_head(cx, id, Direction::Response)).await;
            reading.push(bytes.map_err(|failure| super::error_of(peer, &failure))?);
        }
    }
}

/// The error for the client. If the client itself broke the request, that error is reported.
fn failed(forward: &Forward<'_>, peer: &Arc<str>, failure: &Failure) -> Error {
    forward.body.failure().unwrap_or_else(|| super::error_of(peer, failure))
}

fn broken(office: &Arc<CustodyService>, id: ExchangeId, peer: &Arc<str>, why: &str) -> Error {
    let reason = format!("{peer} has no valid response: {why}");
    office.fail(id, 502, &reason);
    super::error_of(peer, &Failure { status: 502, reason: Arc::from(reason) })
}

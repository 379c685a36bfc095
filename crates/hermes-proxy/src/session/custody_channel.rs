//! The accepting side of a custody channel.
//!
//! In: a neighbour's request for a channel. Out: a tunnel whose far end is the custody service; each exchange that the
//! neighbour begins becomes a session of the channel's worker, which outlives the channel. Never: a record; the channel
//! itself reads and writes those.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use hermes_custody::{BY, contact_plan};
use hermes_model::facts::Trust;
use hermes_model::snapshot::Contact as Plan;
use hermes_wire::custody::{self as wire, ExchangeId};
use http::StatusCode;

use super::{SessionOutcome, Tunnel, UpstreamEnd, custody_exchange, fail};
use crate::custody::channel::{Channel, PATH_NAME};
use crate::custody::link::Link;
use crate::request::Request;
use crate::upgrade;
use crate::worker::Worker;
use hermes_transport::error::Error;
use hermes_transport::runtime::session::{OwnTimeoutGuard, Phase, Session};
use hermes_transport::stream::ByteStream;

/// The longest value of the header that names a neighbour's path.
const MAX_PATH_NAME_BYTES: usize = 256;

/// True if a request opens a channel.
pub(crate) fn is_asked_for(request: &Request<'_>) -> bool {
    request.upgrade.is_to(wire::PROTOCOL) && request.facts.path.as_str() == wire::PATH
}

/// Accepts a channel from an authenticated node or a trusted address.
pub(crate) fn accept(worker: &Rc<Worker>, request: &Request<'_>) -> SessionOutcome {
    let generation = worker.generation();
    let facts = &request.facts;
    let session = Session::begin(worker, facts.clone(), request.connection.clone(), request.trace);
    let Some(peer) = name_of(request) else {
        if worker.services.custody.refuses(facts.source.ip()) {
            tracing::warn!(
                neighbour = %facts.source.ip(), listener = %facts.listener,
                "custody refused: the neighbour is not authenticated. Give it an `identity` and request it at this listener (tls: {{client: required}}), or list its address in `trust` of the listener"
            );
        }
        let reason = "only nodes of the overlay may send exchanges into custody".to_owned();
        let (status, label) = (StatusCode::FORBIDDEN, "http_request_denied");
        return fail(session, &Error::Denied { status, reason, label });
    };
    if !worker.services.custody.is_ready() {
        return fail(session, &Error::Limit("another process of this node still uses the custody journal"));
    }
    if !session.take_tunnel(generation.snapshot.limits.tunnels) {
        return fail(session, &Error::Limit("tunnels of this node"));
    }
    *session.entry.peer.borrow_mut() = Some(peer.clone());
    let head = upgrade::accepted(&request.upgrade, request.version, facts, None);
    session.entry.status.set(head.status().as_u16());
    let way = InboundChannel {
        listener: facts.listener.clone(),
        source: facts.source,
        trust: facts.trust.clone(),
        peer,
        plan: contact_plan::read_header(&facts.headers),
    };
    SessionOutcome::Tunnel(Box::new(Tunnel {
        head,
        worker: worker.clone(),
        far: UpstreamEnd::Custody(Rc::new(way)),
        session,
        body: None,
    }))
}

/// The name of a dialling neighbour in the engine: its identity and its path.
fn name_of(request: &Request<'_>) -> Option<Arc<str>> {
    let facts = &request.facts;
    if !facts.trust.is_believed() {
        return None;
    }
    let line = facts
        .headers
        .get(PATH_NAME)
        .and_then(|line| line.to_str().ok())
        .filter(|line| line.len() <= MAX_PATH_NAME_BYTES)?;
    let node = facts.trust.peer().and_then(|peer| peer.node.clone());
    let who = node.unwrap_or_else(|| Arc::from(facts.source.ip().to_string()));
    Some(Arc::from(format!("{who}{BY}{line}")))
}

/// The properties of a channel that apply to its exchanges.
pub(crate) struct InboundChannel {
    pub(super) listener: Arc<str>,
    pub(super) source: SocketAddr,
    pub(super) trust: Trust,
    pub(super) peer: Arc<str>,
    /// The neighbour's contact plan for the link.
    plan: Option<Plan>,
}

/// Runs an accepted channel until it closes or a newer one replaces it.
pub(crate) async fn carry_accepted(
    worker: &Rc<Worker>,
    session: &Session,
    mut stream: ByteStream,
    way: &Rc<InboundChannel>,
) {
    session.entry.set_phase(worker, Phase::Open);
    let _watched = OwnTimeoutGuard::begin(&session.entry);
    let link = Link::accepted(&mut stream, way.plan);
    let (mut channel, resumed) = Channel::begin(worker.services.custody.clone(), way.peer.clone(), link);
    resumed.into_iter().for_each(|id| begin(worker, way, id, true));
    let carried = poll_fn(|cx| channel.poll(cx, &mut stream, |id| begin(worker, way, id, false)));
    tokio::select! {
        over = carried => tracing::debug!(peer = %way.peer, why = over, "a custody channel was closed"),
        _ = session.entry.end.wait() => {}
    }
    drop(channel);
    stream.abort();
    // The connection carried nothing else, and unsent records are useless.
    session.entry.close_connection("the custody channel was closed");
}

/// Starts a session for an exchange of a neighbour.
fn begin(worker: &Rc<Worker>, way: &Rc<InboundChannel>, id: ExchangeId, is_resumed: bool) {
    let (here, way) = (worker.clone(), way.clone());
    worker.spawn(async move { custody_exchange::serve(&here, &way, id, is_resumed).await });
}

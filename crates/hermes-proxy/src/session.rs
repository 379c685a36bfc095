//! A session: decides a request, and acts on the decision with one `match`.
//!
//! In: a `Request` of any protocol. Out: a response, or an open tunnel with its far end. The listener sends the
//! response or relays the tunnel. The decision is a value first; only then does the node act on it.

mod custody_channel;
mod custody_exchange;
mod origin_replay;

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use hermes_model::decide::{Decision, decide};
use hermes_model::facts::Kind;
use hermes_model::rewrite::TemplateValues;
use hermes_model::snapshot::{Action, OnChange, Relay, Route, Terminate, TerminateKind, Upstream};
use http::header::{ALT_SVC, ORIGIN};
use http::uri::Scheme;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Version};

use self::custody_channel::InboundChannel;
use crate::filters::NextHop;
use crate::request::{Rejected, Request, UpgradeKind};
use crate::service::content_race::{self, ContentRace};
use crate::service::forward::Forward;
use crate::service::forward::head::{HeadOverrides, RequestForm, clean_response};
use crate::service::forward::tunnel::Opened;
use crate::service::next_relay::ToNextRelay;
use crate::service::{device_end, respond};
use crate::worker::Worker;
use crate::{custody, filters, upgrade};
use hermes_architecture::dial_target;
use hermes_outbound::generation::Generation;
use hermes_relay_service::{ForNext, NextRelay, RelayRequest, SUBSCRIPTION, SocketOutcome};
use hermes_transport::body::{Body, Interim, RequestBody, ResponseBody};
use hermes_transport::datagram::{self, Opening, Port, Reopened};
use hermes_transport::early_payload::{EarlyPayload, EarlyReader, InitialCapsules};
use hermes_transport::error::{Error, LOOP};
use hermes_transport::runtime::session::{Delivery, Session, SessionEntry};
use hermes_transport::stream::ByteStream;
use hermes_transport::{headers, max_forwards, tunnel_copy};

/// The outcome of a request.
pub(crate) enum SessionOutcome {
    /// Send this response.
    Response(Response<ResponseBody>),
    /// Send the head, then relay.
    Tunnel(Box<Tunnel>),
}

/// An open tunnel, before the client's side joins it.
pub(crate) struct Tunnel {
    /// The head for the client: 200 or 101.
    pub(crate) head: Response<()>,
    pub(crate) worker: Rc<Worker>,
    pub(crate) far: UpstreamEnd,
    pub(crate) session: Session,
    /// The request's body, if the tunnel is carried in bodies.
    pub(crate) body: Option<RequestBody>,
}

impl Tunnel {
    /// Takes the head, for sending.
    pub(crate) fn head_parts(&mut self) -> Response<()> {
        std::mem::take(&mut self.head)
    }
}

/// The far end of a tunnel.
pub(crate) enum UpstreamEnd {
    /// Uninterpreted bytes.
    Stream(ByteStream),
    /// Datagrams or packets, unpacked at this node.
    Datagrams(Port),
    /// The custody channel of a neighbour.
    Custody(Rc<InboundChannel>),
}

/// The client's side of a tunnel, from the listener.
pub(crate) enum DownstreamEnd {
    Stream(ByteStream),
    Datagrams(Port),
}

/// Serves a request.
pub(crate) async fn serve(worker: &Rc<Worker>, mut request: Request<'_>) -> SessionOutcome {
    if custody_channel::is_asked_for(&request) {
        return custody_channel::accept(worker, &request);
    }
    let generation = worker.generation();
    let decision = decide_request(&generation, &mut request);
    let session = Session::begin(worker, request.facts.clone(), request.connection.clone(), request.trace);
    request.body.bind(&session.entry);
    if let Some(early) = &request.early {
        early.bind(&session.entry);
    }
    let route = match decision {
        Decision::Act(route) => route,
        Decision::Deny(deny) => {
            let label = if deny.status == StatusCode::LOOP_DETECTED { LOOP } else { "http_request_denied" };
            let error = Error::Denied { status: deny.status, reason: deny.reason.to_string(), label };
            return fail(session, &error);
        }
    };
    session.entry.set_ends_half_closed(route.custody.is_some());
    *session.entry.route.borrow_mut() = Some(route.clone());
    if may_be_refused(&request) && worker.overload.refuses(route.importance, &request.facts.headers) {
        worker.shared.metrics.limit("overload");
        return fail(session, &Error::Overloaded);
    }
    if !route.early_data && headers::is_early(&request.facts.headers) {
        let reason = format!("route {} serves no request before the handshake of its client is complete", route.name);
        let (status, label) = (StatusCode::TOO_EARLY, "http_request_denied");
        return fail(session, &Error::Denied { status, reason, label });
    }
    // WebSockets and other upgrades count as exchanges until the switch, and as tunnels afterwards.
    if request.upgrade != UpgradeKind::None && !session.take_tunnel(generation.snapshot.limits.tunnels) {
        return fail(session, &Error::Limit("tunnels of this node"));
    }
    let alternative = alternative(&request).filter(|_| !leads_to_others(&route.action));
    let body = request.body.clone();
    // The sweep, a reload or the client may end the session meanwhile.
    let acted = {
        let end = session.entry.end.wait();
        // Pinned where it is: to move its state takes as long as a system call.
        let act = std::pin::pin!(act(worker, &generation, &session, &route, request));
        tokio::select! {
            biased;
            outcome = act => outcome,
            error = end => Err(error),
        }
    };
    match acted {
        Ok(ActionOutcome::Response(mut response)) => {
            if let Some(alternative) = alternative {
                // A value that the route sets takes precedence.
                response.headers_mut().entry(ALT_SVC).or_insert(alternative);
            }
            finish(session, response)
        }
        Ok(ActionOutcome::Tunnel { head, far, body }) => {
            session.entry.status.set(head.status().as_u16());
            SessionOutcome::Tunnel(Box::new(Tunnel { head, worker: worker.clone(), far, session, body }))
        }
        Err(Error::NoProgress(limit)) if body.waits_for_client() => fail(session, &Error::ClientStalled(limit)),
        Err(error) => fail(session, &error),
    }
}

/// True if overload may refuse the request. An exchange in custody was accepted before. A refused flow of datagrams would begin again
/// with the next datagram, which costs more than the flow.
fn may_be_refused(request: &Request<'_>) -> bool {
    request.arrived.is_none() && (request.connection.is_some() || !request.facts.kind.is_datagrams())
}

/// True if the origins of requests are elsewhere: the action is a forward proxy.
fn leads_to_others(action: &Action) -> bool {
    match action {
        Action::Terminate(terminate) => terminate.speaks_tls(),
        Action::Upstream(upstream) => upstream.forward_proxy,
        _ => false,
    }
}

/// The `Alt-Svc` value for HTTP/3 at the same port, for origins that the client reaches here over TLS.
fn alternative(request: &Request<'_>) -> Option<HeaderValue> {
    let is_ours = request.upgrade == UpgradeKind::None && request.scheme == Scheme::HTTPS;
    request.connection.as_ref().filter(|_| is_ours)?.alternative.get().cloned()
}

/// Answers a request that was rejected before the decision.
pub(crate) fn reject(worker: &Rc<Worker>, rejected: Rejected) -> Response<ResponseBody> {
    let session = Session::begin(worker, Rc::new(rejected.facts), None, rejected.trace);
    match fail(session, &rejected.error) {
        SessionOutcome::Response(response) => response,
        SessionOutcome::Tunnel(_) => unreachable!("a failure is a response"),
    }
}

/// Decides, and classifies a POST first. On a listener that accepts tunnels by POST, the request is a tunnel if the
/// first route that matches it as one names its `kind`.
fn decide_request(generation: &Generation, request: &mut Request<'_>) -> Decision {
    let accepts = |request: &Request<'_>| {
        generation.listener(&request.facts.listener).is_some_and(|listener| listener.accept_post)
    };
    if request.facts.method == Method::POST
        && accepts(request)
        && let Some((facts, host)) = request.as_post_tunnel()
        && let Decision::Act(route) = decide(&facts, &generation.snapshot)
        && route.matcher.kinds.contains(&facts.kind)
    {
        request.facts = Rc::new(facts);
        request.host = host;
        request.upgrade = UpgradeKind::Post;
        return Decision::Act(route);
    }
    decide(&request.facts, &generation.snapshot)
}

/// The outcome of an action.
enum ActionOutcome {
    Response(Response<Body>),
    Tunnel { head: Response<()>, far: UpstreamEnd, body: Option<RequestBody> },
}

async fn act(
    worker: &Rc<Worker>,
    generation: &Generation,
    session: &Session,
    route: &Arc<Route>,
    mut request: Request<'_>,
) -> Result<ActionOutcome, Error> {
    let entry = &session.entry;
    let kind = entry.facts.kind;
    let node = &*generation.snapshot.node;
    let forwards = matches!(route.action, Action::Upstream(_) | Action::Terminate(_) | Action::Race(_))
        && request.upgrade == UpgradeKind::None;
    if forwards && max_forwards::is_used_up(&entry.facts)? {
        let listener = generation.listener(&entry.facts.listener).map(|listener| &**listener);
        let answer = max_forwards::answer(&entry.facts, request.version, &request.host, listener, node);
        return Ok(ActionOutcome::Response(answer));
    }
    match (&route.action, kind) {
        (Action::Respond(answer), _) => Ok(ActionOutcome::Response(respond::respond(answer))),
        (Action::Redirect(redirect), Kind::Http) => {
            respond::redirect(redirect, &TemplateValues { facts: &entry.facts, node }).map(ActionOutcome::Response)
        }
        (Action::Terminate(terminate @ Terminate { kind: TerminateKind::Udp, .. }), Kind::Udp) => {
            let port = Box::pin(hermes_architecture::udp(worker, entry, terminate, route)).await?;
            Ok(tunnel(&mut request, UpstreamEnd::Datagrams(port)))
        }
        (Action::Face(face), Kind::Http) if request.upgrade == UpgradeKind::None => {
            let response = Box::pin(hermes_architecture::ndn::gateway::serve(
                worker,
                &worker.ndn_forwarders,
                generation,
                entry,
                face,
                route,
            ))
            .await?;
            respond_with(generation, session, route, response)
        }
        (Action::Relay(settings), Kind::Http) => {
            Box::pin(to_relay(worker, generation, session, route, settings, request)).await
        }
        (Action::Race(_), Kind::Http) if content_race::is_raced(&request) => {
            let (worker, entry, route) = (worker.clone(), entry.clone(), route.clone());
            let race = ContentRace { worker, entry, form: RequestForm::new(&request), route: route.clone() };
            let response = Box::pin(race.serve()).await?;
            respond_with(generation, session, &route, response)
        }
        (Action::Race(_), Kind::Http) => {
            let origin = content_race::origin(route).ok_or_else(|| unsuitable(route, kind))?;
            Box::pin(to_origin(worker, generation, session, route, origin, request)).await
        }
        (Action::Device(gateway), Kind::Ip) => {
            let end = Box::pin(device_end::open(worker, entry, gateway, route)).await?;
            Ok(tunnel(&mut request, UpstreamEnd::Datagrams(end)))
        }
        (Action::Terminate(terminate @ Terminate { kind: TerminateKind::Http, .. }), Kind::Http) => {
            Box::pin(to_origin(worker, generation, session, route, terminate, request)).await
        }
        (Action::Upstream(upstream), _) => to_upstream(worker, generation, session, route, upstream, request).await,
        (_, Kind::Tcp) => {
            let architecture = hermes_architecture::of_route(&worker.environment(), route);
            let architecture = architecture.ok_or_else(|| unsuitable(route, kind))?;
            let stream = architecture.open(entry).await?;
            Ok(tunnel(&mut request, UpstreamEnd::Stream(stream)))
        }
        _ => Err(unsuitable(route, kind)),
    }
}

fn unsuitable(route: &Route, kind: Kind) -> Error {
    Error::Unsuitable { route: route.name.clone(), kind: kind.as_str() }
}

/// Accepts a tunnel that ends at this node, in the version of the client.
fn tunnel(request: &mut Request<'_>, far: UpstreamEnd) -> ActionOutcome {
    let head = upgrade::accepted(&request.upgrade, request.version, &request.facts, None);
    let body = (request.upgrade == UpgradeKind::Post).then(|| std::mem::replace(&mut request.body, RequestBody::Empty));
    ActionOutcome::Tunnel { head, far, body }
}

/// Applies the route's changes to the head of a response that this node makes.
fn rewrite_response(
    generation: &Generation,
    session: &Session,
    route: &Route,
    headers: &mut HeaderMap,
) -> Result<(), Error> {
    let Some(rewrite) = &route.rewrite else { return Ok(()) };
    let vars = TemplateValues { facts: &session.entry.facts, node: &generation.snapshot.node };
    rewrite.response(headers, &vars).map_err(|error| Error::Malformed(error.to_string()))
}

/// Serves a request at the relay of its route, or passes it on to the next relay.
async fn to_relay(
    worker: &Rc<Worker>,
    generation: &Generation,
    session: &Session,
    route: &Arc<Route>,
    settings: &Relay,
    mut request: Request<'_>,
) -> Result<ActionOutcome, Error> {
    let (entry, relays) = (&session.entry, &worker.services.relays);
    let next: Rc<dyn NextRelay> = Rc::new(ToNextRelay { worker: worker.clone(), route: route.name.clone() });
    let of_relay = RelayRequest { worker, relays, next, entry, route, settings };
    hermes_relay_service::check(&of_relay)?;
    let for_next = ForNext::of(&of_relay, request.upgrade != UpgradeKind::None)?;
    let of_next =
        |next: ForNext| Some((settings.tree.upstreams().find(|upstream| upstream.name == next.upstream)?, next));
    let for_next = for_next.and_then(of_next);
    if request.upgrade.is_to(hermes_relay_service::WEBSOCKET) {
        return Ok(match hermes_relay_service::serve_websocket(&of_relay).await? {
            SocketOutcome::Tunnel(stream) => tunnel(&mut request, UpstreamEnd::Stream(stream)),
            SocketOutcome::Refused(response) => ActionOutcome::Response(response),
        });
    }
    if request.upgrade != UpgradeKind::None {
        return Err(unsuitable(route, entry.facts.kind));
    }
    if let Some((upstream, for_next)) = for_next {
        let state = generation.state_of(upstream)?;
        let interim = interim(&mut request);
        let forward = Forward::new(worker, generation, entry, route, &request, interim);
        let mut response = forward.amended(HeadOverrides::removing([ORIGIN])).to_upstream(state).await?;
        for_next.admit(response.headers_mut());
        return respond_with(generation, session, route, response);
    }
    let body = std::mem::replace(&mut request.body, RequestBody::Empty);
    let mut response = hermes_relay_service::serve(&of_relay, body).await?;
    rewrite_response(generation, session, route, response.headers_mut())?;
    Ok(ActionOutcome::Response(response))
}

async fn to_upstream(
    worker: &Rc<Worker>,
    generation: &Generation,
    session: &Session,
    route: &Arc<Route>,
    upstream: &Upstream,
    mut request: Request<'_>,
) -> Result<ActionOutcome, Error> {
    let state = generation.state_of(upstream)?;
    let interim = interim(&mut request);
    let early = request.early.take();
    if let (None, Some(arrived)) = (&route.custody, request.arrived) {
        Box::pin(custody::forward::intend(worker, &session.entry, route, &request, arrived)).await?;
    }
    let forward = Forward::new(worker, generation, &session.entry, route, &request, interim);
    if request.upgrade == UpgradeKind::None {
        let mut response = filters::send(&forward, NextHop::Upstream(state), request.arrived).await?;
        // For its clients, this node is the origin (RFC 9110, 3.7). An upstream's `Alt-Svc` would send clients to ports
        // that this node does not serve, or around it (RFC 7838, 2: only the origin may advertise alternatives).
        if !leads_to_others(&route.action) {
            response.headers_mut().remove(ALT_SVC);
        }
        return respond_with(generation, session, route, response);
    }
    if let (Some(custody), Kind::Tcp) = (&route.custody, session.entry.facts.kind) {
        if request.arrived.is_some() {
            let response = Box::pin(custody::forward::handle(custody, state, request.arrived, &forward)).await?;
            return respond_with(generation, session, route, response);
        }
        // Data that the client sent early is read from its stream, which is in custody from here on.
        let stream = custody::forward::tunnel(&forward, state, custody)?;
        drop(forward);
        return Ok(tunnel(&mut request, UpstreamEnd::Stream(ByteStream::Boxed(Box::new(stream)))));
    }
    let opened = Box::pin(forward.tunnel(state, &request.upgrade, early)).await?;
    drop(forward);
    tunnel_on(generation, session, route, request, opened)
}

/// Converts the response to a tunnel request into the session's outcome.
fn tunnel_on(
    generation: &Generation,
    session: &Session,
    route: &Route,
    mut request: Request<'_>,
    opened: Opened,
) -> Result<ActionOutcome, Error> {
    let (stream, head) = match opened {
        Opened::Tunnel { stream, head } => (stream, head),
        Opened::Answer(response) => {
            // The client receives the response unchanged; the access log names the peer that sent it.
            let peer = session.entry.peer.borrow().clone().unwrap_or_default();
            session.entry.fail(&Error::Refused { peer, status: response.status() });
            return respond_with(generation, session, route, response);
        }
    };
    let mut head = upgrade::accepted(&request.upgrade, request.version, &request.facts, head);
    rewrite_response(generation, session, route, head.headers_mut())?;
    let body = (request.upgrade == UpgradeKind::Post).then(|| std::mem::replace(&mut request.body, RequestBody::Empty));
    Ok(ActionOutcome::Tunnel { head, far: UpstreamEnd::Stream(stream), body })
}

async fn to_origin(
    worker: &Rc<Worker>,
    generation: &Generation,
    session: &Session,
    route: &Arc<Route>,
    terminate: &Terminate,
    mut request: Request<'_>,
) -> Result<ActionOutcome, Error> {
    let place = dial_target::origin(generation, terminate, &session.entry.facts, route, &request.scheme)?;
    if let Some(arrived) = request.arrived {
        custody::forward::intend(worker, &session.entry, route, &request, arrived).await?;
    }
    let interim = interim(&mut request);
    let forward = Forward::new(worker, generation, &session.entry, route, &request, interim);
    let destination = place.destination(terminate, None);
    if request.upgrade != UpgradeKind::None {
        let owner = generation.route_owner(route);
        let opened = Box::pin(forward.tunnel_to_origin(&destination, owner, &request.upgrade)).await?;
        drop(forward);
        return tunnel_on(generation, session, route, request, opened);
    }
    let hop = NextHop::Origin { destination: &destination, owner: generation.route_owner(route) };
    let response = filters::send(&forward, hop, None).await?;
    respond_with(generation, session, route, response)
}

/// The receiver of interim responses, for clients that can receive them or wait for `100 Continue`.
fn interim(request: &mut Request<'_>) -> Option<Arc<Interim>> {
    request.interim.take().or_else(|| request.expects_continue().then(Arc::default))
}

fn respond_with(
    generation: &Generation,
    session: &Session,
    route: &Route,
    response: Response<Body>,
) -> Result<ActionOutcome, Error> {
    let (mut parts, body) = response.into_parts();
    // A subscriber that half-closes counts as gone, as it does at the relay itself. Only this node sees the half-close,
    // and publications for one of a group must not go to a client that has left.
    if parts.headers.contains_key(SUBSCRIPTION) {
        session.entry.set_ends_half_closed(true);
    }
    let vars = TemplateValues { facts: &session.entry.facts, node: &generation.snapshot.node };
    // The route may have changed since the first decision.
    let led = session.entry.route.borrow().clone();
    let rewrite = led.as_deref().unwrap_or(route).rewrite.as_ref();
    clean_response(&mut parts, &generation.via, rewrite, &vars)?;
    if session.entry.delivery.get() == Delivery::ReportedUnsent {
        say_unsent(&session.entry, &mut parts.headers);
    }
    Ok(ActionOutcome::Response(Response::from_parts(parts, body)))
}

fn finish(session: Session, mut response: Response<Body>) -> SessionOutcome {
    session.entry.status.set(response.status().as_u16());
    session.entry.hold_head(&session.worker, response.headers());
    *response.version_mut() = Version::HTTP_11;
    SessionOutcome::Response(response.map(|body| ResponseBody::new(body, session)))
}

/// Tells a previous node that nothing of the request was sent on, so that it may try another path.
fn say_unsent(entry: &SessionEntry, headers: &mut HeaderMap) {
    if entry.facts.trust.is_believed() {
        headers.insert(headers::UNSENT, HeaderValue::from_static("1"));
    }
}

pub(crate) fn fail(session: Session, error: &Error) -> SessionOutcome {
    session.entry.fail(error);
    let node = session.worker.snapshot().node.clone();
    let mut response = respond::failure(error, &node, session.entry.facts.trust.is_believed());
    if error.is_unsent() && !session.entry.may_be_sent() {
        say_unsent(&session.entry, response.headers_mut());
    }
    finish(session, response)
}

/// Relays a tunnel whose head was sent, until it ends.
pub(crate) async fn relay(near: DownstreamEnd, tunnel: Tunnel) {
    let Tunnel { worker, far, session, .. } = tunnel;
    let entry = &session.entry;
    let reopening = |route: Arc<Route>, said: Bytes| -> Opening {
        let (worker, entry) = (worker.clone(), entry.clone());
        Box::pin(async move {
            let opened = reopen(&worker, &entry, &route, said).await;
            opened.inspect(|reopened| reopened.port.bind(&entry))
        })
    };
    if let UpstreamEnd::Stream(far) = &far {
        far.bind(entry);
    }
    let kind = entry.facts.kind;
    let near_tunnel = |stream| Port::tunnel(stream, kind).carrying(told_mtu(entry));
    match (near, far) {
        (DownstreamEnd::Stream(near), UpstreamEnd::Stream(far)) if passes_datagrams(entry, &near, &far) => {
            datagram::relay(near_tunnel(near), Port::far_tunnel(far, kind), &session, &reopening).await;
        }
        (DownstreamEnd::Stream(near), UpstreamEnd::Stream(far)) => tunnel_copy::relay(near, far, &session).await,
        (DownstreamEnd::Stream(near), UpstreamEnd::Datagrams(far)) => {
            datagram::relay(near_tunnel(near), far, &session, &reopening).await;
        }
        (DownstreamEnd::Datagrams(near), UpstreamEnd::Stream(far)) => {
            datagram::relay(near, Port::far_tunnel(far, kind), &session, &reopening).await;
        }
        (DownstreamEnd::Datagrams(near), UpstreamEnd::Datagrams(far)) => {
            datagram::relay(near, far, &session, &reopening).await
        }
        (DownstreamEnd::Stream(near), UpstreamEnd::Custody(way)) => {
            custody_channel::carry_accepted(&worker, &session, near, &way).await
        }
        // Custody channels are requested by name, so a flow of datagrams never has one.
        (DownstreamEnd::Datagrams(_), UpstreamEnd::Custody(_)) => {}
    }
}

/// The maximum size of packets towards the client, as the previous nodes reported it.
fn told_mtu(entry: &SessionEntry) -> Option<usize> {
    entry.facts.trust.is_believed().then(|| headers::mtu(&entry.facts.headers)).flatten()
}

/// True if the relay must handle single datagrams. QUIC datagrams are not part of the stream, and a flow that moves to
/// another tunnel must not stop within a capsule.
fn passes_datagrams(entry: &SessionEntry, near: &ByteStream, far: &ByteStream) -> bool {
    let moves = || entry.route.borrow().as_ref().is_some_and(|route| route.on_change == OnChange::Move);
    match entry.facts.kind {
        Kind::Ip => true,
        Kind::Udp => near.has_datagrams() || far.has_datagrams() || moves(),
        Kind::Http | Kind::Tcp => false,
    }
}

/// Opens a new far port for a flow whose route changed. The capsules in `said` travel with the request, which saves a
/// round trip along the whole path.
async fn reopen(
    worker: &Rc<Worker>,
    entry: &Rc<SessionEntry>,
    route: &Arc<Route>,
    said: Bytes,
) -> Result<Reopened, Error> {
    let generation = worker.generation();
    let within = route.timeout.connect;
    match &route.action {
        Action::Terminate(terminate @ Terminate { kind: TerminateKind::Udp, .. }) => {
            let port = hermes_architecture::udp(worker, entry, terminate, route).await?;
            Ok(Reopened { port, told: false })
        }
        Action::Device(gateway) => {
            let port = device_end::open(worker, entry, gateway, route).await?;
            Ok(Reopened { port, told: false })
        }
        Action::Upstream(upstream) => {
            let state = generation.state_of(upstream)?;
            let request = Request::again(entry);
            let forward = Forward::new(worker, &generation, entry, route, &request, None);
            let has_words = !said.is_empty();
            let mut words = InitialCapsules(has_words.then_some(said));
            let early = has_words.then(|| EarlyPayload::new(&mut words));
            let opened = tokio::time::timeout(within, forward.tunnel(state, &request.upgrade, early)).await.map_err(
                |_| Error::ConnectTimeout {
                    peer: upstream.name.clone(),
                    missing: "open the tunnel again",
                    after: within,
                },
            )??;
            match opened {
                Opened::Tunnel { stream, .. } => Ok(Reopened {
                    port: Port::far_tunnel(stream, entry.facts.kind),
                    told: has_words && words.0.is_none(),
                }),
                Opened::Answer(response) => {
                    Err(Error::Refused { peer: upstream.name.clone(), status: response.status() })
                }
            }
        }
        _ => Err(Error::Unsuitable { route: route.name.clone(), kind: entry.facts.kind.as_str() }),
    }
}

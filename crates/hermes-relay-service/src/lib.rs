//! The relay as an action of a route (`relay:`).
//!
//! In: requests of a route, on any worker. Out: a response that streams publications to a subscriber, or one that tells a
//! publisher how many subscribers it reached. The rules are those of `hermes-relay`; this crate adds HTTP, time and
//! waiting. Never: a queue or a table of its own.

mod backfill;
mod certified;
mod deliveries;
mod directory;
mod feeder;
mod feeds;
mod follow;
mod history_copy;
mod lead;
mod locate;
mod moves;
mod new_channel;
mod next_channel;
mod next_relay;
mod origin;
mod publish;
mod receipts;
mod registry;
mod seen_signatures;
mod siblings;
mod stand_by;
mod subscribe;
mod upstream;
mod url_token;
mod websocket;

use std::rc::Rc;
use std::sync::Arc;

use hermes_model::decode_unreserved;
use hermes_model::facts::{Facts, Kind};
use hermes_model::snapshot::{Relay as RelaySettings, Route};
use hermes_model::trust::{LOCATE, STAND_BY};
use hermes_relay::EventId;
pub use hermes_relay::fields::SUBSCRIPTION;
use hermes_relay::fields::{EPOCHS, GROUP, NEW, ROOT};
use hermes_transport::body::{Body, RequestBody};
use hermes_transport::error::Error;
use hermes_transport::runtime::WorkerContext;
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::ByteStream;
use http::header::{ALLOW, HeaderName, LOCATION};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};

pub use self::next_relay::{NextRelay, NextResponse};
use self::origin::Page;
pub use self::registry::Relays;
use self::siblings::Siblings;

/// A proxy should pass the body on as it arrives (RFC 10036).
const INCREMENTAL: HeaderName = HeaderName::from_static("incremental");

/// A request to a relay.
pub struct RelayRequest<'a> {
    /// The worker that serves it.
    pub worker: &'a Rc<WorkerContext>,
    /// The relays of the node.
    pub relays: &'a Relays,
    /// The way to the other relays of the route.
    pub next: Rc<dyn NextRelay>,
    /// Its session.
    pub entry: &'a Rc<SessionEntry>,
    /// Its route.
    pub route: &'a Arc<Route>,
    /// The action of the route.
    pub settings: &'a RelaySettings,
}

/// Checks a request of a route with `relay` before anything else is done for it.
///
/// # Errors
/// Another route has the channel under its own authority, `relay.authority`: what that one denies must not be had by the authority
/// of a peer.
pub fn check(request: &RelayRequest<'_>) -> Result<(), Error> {
    let facts = &request.entry.facts;
    if channel_authority(request) == authority(facts) {
        return Ok(());
    }
    let (route, snapshot) = (&request.route.name, request.worker.snapshot());
    if deliveries::would_lead_to(route, request.entry, &snapshot, |_| {}) {
        return Ok(());
    }
    let reason = format!("another route than {route} has the channel as {}", channel_authority(request));
    Err(Error::Denied { status: StatusCode::FORBIDDEN, reason, label: "http_request_denied" })
}

/// Serves a request of a route with `relay`.
///
/// # Errors
/// The request is malformed, a limit is reached, or the client went away.
pub async fn serve(request: &RelayRequest<'_>, body: RequestBody) -> Result<Response<Body>, Error> {
    let facts = &request.entry.facts;
    let page = Page::of(facts, &request.settings.origins)?;
    if let Some(response) = origin::preflight(facts, &page) {
        return Ok(response);
    }
    let mut response = match facts.method {
        Method::GET if facts.headers.contains_key(STAND_BY) => stand_by::serve(request)?,
        Method::GET if facts.headers.contains_key(LOCATE) => moves::serve(request).await?,
        Method::GET => subscribe::serve(request).await?,
        Method::POST if facts.headers.contains_key(NEW) => new_channel::serve(request)?,
        Method::PUT | Method::POST => publish::serve(request, body).await?,
        _ => {
            let text = "a channel has no such method; GET subscribes, PUT and POST publish\n";
            let mut response = refusal(StatusCode::METHOD_NOT_ALLOWED, text.to_owned());
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, PUT, POST"));
            response
        }
    };
    page.admit(response.headers_mut());
    Ok(response)
}

/// A request that the next relay serves, and not this node: a member of a group, and the refresh of a subscription that
/// began there. It must be sent without `Origin`, since this node has judged its page.
pub struct ForNext {
    /// The upstream of the next relay.
    pub upstream: Arc<str>,
    page: Page,
}

impl ForNext {
    /// The same request, if it is one. `is_tunnel`: it opens a WebSocket.
    ///
    /// # Errors
    /// Its page may not use the relay, or the request may not be forwarded.
    pub fn of(request: &RelayRequest<'_>, is_tunnel: bool) -> Result<Option<Self>, Error> {
        let facts = &request.entry.facts;
        if facts.method != Method::GET || !subscribe::is_for_next(request, is_tunnel) {
            return Ok(None);
        }
        let Some(upstream) = Siblings::of(request).next_of(&channel(request, None)) else { return Ok(None) };
        subscribe::check_forwarded(request, is_tunnel)?;
        Ok(Some(Self { upstream, page: Page::of(facts, &request.settings.origins)? }))
    }

    /// Lets the page read the response.
    pub fn admit(&self, headers: &mut HeaderMap) {
        self.page.admit(headers);
    }
}

/// The protocol of tunnels that a relay serves.
pub const WEBSOCKET: &str = "websocket";

/// A tunnel of a WebSocket, or the response that refuses it.
pub enum SocketOutcome {
    /// The far end of the tunnel.
    Tunnel(ByteStream),
    /// A bound of the relay is reached.
    Refused(Response<Body>),
}

/// Serves a request of a route with `relay` that opens a WebSocket.
///
/// # Errors
/// The request is malformed, or its page may not use the relay.
pub async fn serve_websocket(request: &RelayRequest<'_>) -> Result<SocketOutcome, Error> {
    Page::of(&request.entry.facts, &request.settings.origins)?;
    // Otherwise, a client that may only publish would subscribe (RFC 6455, section 4.1).
    if request.entry.facts.method != Method::GET {
        let mut response = refusal(StatusCode::METHOD_NOT_ALLOWED, "a WebSocket is opened by GET\n".to_owned());
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
        return Ok(SocketOutcome::Refused(response));
    }
    Ok(match subscribe::begin(request).await? {
        Ok(begun) => SocketOutcome::Tunnel(websocket::stream(request, begun)),
        Err(error) => SocketOutcome::Refused(subscribe::not_begun(request, error)),
    })
}

/// The peer that the client asks for as the root of a channel without one.
fn wish(request: &RelayRequest<'_>) -> Result<Option<Arc<str>>, Error> {
    let wish = text(&request.entry.facts.headers, &ROOT)?.map(Arc::<str>::from);
    let is_peer = |node: &Arc<str>| Siblings::of(request).is_peer(node);
    if let Some(other) = wish.as_ref().filter(|node| !is_peer(node)) {
        return Err(Error::Malformed(format!("{ROOT}: {other} is no peer of this relay")));
    }
    Ok(wish)
}

/// Whether the client may be sent to the root of its channel: it is no node, which has its own way there.
fn may_redirect(request: &RelayRequest<'_>) -> bool {
    let facts = &request.entry.facts;
    !facts.trust.is_proxy() && facts.kind == Kind::Http && !facts.headers.contains_key(GROUP)
}

/// Sends a client to the root of its channel, which is elsewhere.
fn redirect(request: &RelayRequest<'_>, origin: &str) -> Response<Body> {
    let location = format!("{origin}{}", request.entry.facts.path);
    let mut response = refusal(StatusCode::TEMPORARY_REDIRECT, format!("the root of the channel is at {location}\n"));
    // The origin is valid, and the path was one.
    response.headers_mut().extend(HeaderValue::try_from(location).ok().map(|location| (LOCATION, location)));
    response
}

/// Tells a relay the epochs of a channel.
fn set_epochs(headers: &mut HeaderMap, epochs: &[EventId]) {
    let text = epochs.iter().map(EventId::to_string).collect::<Vec<_>>().join(",");
    // Digits, hyphens and commas.
    headers.extend(HeaderValue::try_from(text).ok().map(|value| (EPOCHS, value)));
}

/// A response with a reason, and no more.
fn refusal(status: StatusCode, reason: String) -> Response<Body> {
    let mut response = Response::new(Body::Full(reason.into()));
    *response.status_mut() = status;
    response
}

/// The value of a field as text, without space around it. `None` if the field is absent.
fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Error> {
    let mut lines = lines(headers, name);
    let first = lines.next().transpose()?;
    if lines.next().is_some() {
        return Err(Error::Malformed(format!("{name} must not be repeated")));
    }
    Ok(first)
}

/// The values of a field that may be repeated.
fn lines<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = Result<&'a str, Error>> {
    let not_text = move || Error::Malformed(format!("{name} is not text"));
    headers.get_all(name).iter().map(move |value| value.to_str().map(str::trim).map_err(|_| not_text()))
}

/// The user of a session, or the client's address without a user. Bounds of clients count for it.
fn subject(entry: &SessionEntry) -> Arc<str> {
    client_of(&entry.facts)
}

/// The client of a request: `user/NAME`, or `address/IP` without a user.
fn client_of(facts: &Facts) -> Arc<str> {
    let address = || format!("address/{}", facts.client_address());
    Arc::from(facts.user.as_ref().map_or_else(address, |user| format!("user/{user}")))
}

/// The name of the channel of a session at its path, or at another path of the same authority. Spellings of one URI have
/// one name (RFC 3986, section 6.2): without the default port, and with an escape only where one is needed.
fn channel(request: &RelayRequest<'_>, path: Option<&str>) -> Arc<str> {
    let path = decode_unreserved(path.unwrap_or_else(|| request.entry.facts.path.path()));
    Arc::from(format!("{}{path}", channel_authority(request)))
}

/// The authority of the channels that a request means.
fn channel_authority(request: &RelayRequest<'_>) -> String {
    authority_of_channels(request.settings, &authority(&request.entry.facts)).to_owned()
}

/// The authority of the channels that a request with this authority means.
fn authority_of_channels<'a>(settings: &'a RelaySettings, authority: &'a str) -> &'a str {
    settings.tree.peers().map_or(authority, |peers| peers.authority_of(authority))
}

/// The authority without the default port.
fn authority(facts: &Facts) -> String {
    let authority = &facts.authority;
    if authority.has_default_port() { authority.uri_host().to_string() } else { authority.to_string() }
}

//! Opens a tunnel through the next proxy: by CONNECT, extended CONNECT, Upgrade or POST, or as a plain TCP connection
//! if the upstream's protocol is `tcp`.
//!
//! In: a request for a tunnel. Out: a byte stream, and the next proxy's response head. This file does not interpret the
//! payload: capsules pass as bytes (RFC 9297, 3.2).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_model::facts::Kind;
use hermes_model::snapshot::{OnChange, TunnelMethod, UpstreamProtocol};
use hermes_wire::connect_udp;
use http::header::{CONNECTION, CONTENT_LENGTH, HOST, HeaderValue, UPGRADE};
use http::response::Parts;
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderMap, Method, Request as HttpRequest, Response, StatusCode, Uri, Version};

use super::head::{self, Outgoing};
use super::{Forward, OutcomeGuard, is_round};
use crate::request::UpgradeKind;
use crate::upgrade::{self, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY};
use hermes_outbound::outbound::connect::{Destination, connect};
use hermes_outbound::outbound::exchange::{self, ExchangeBody, ExchangeContext};
use hermes_outbound::outbound::pool::{ConnectSpec, Failed, H1Connection, Lease, Leased, Pool, PoolKey};
use hermes_outbound::outbound::pool::{TunnelLease, TunnelPermit};
use hermes_outbound::outbound::post_tunnel::PostTunnel;
use hermes_outbound::upstream::{Endpoint, InFlight, UpstreamState};
use hermes_transport::body::{Body, RequestBody, channel};
use hermes_transport::early_payload::EarlyPayload;
use hermes_transport::error::{Error, NO_CONNECTION};
use hermes_transport::headers::{self, CAPSULE_PROTOCOL, UNSENT};
use hermes_transport::stream::ByteStream;

/// The outcome of a tunnel request.
pub(crate) enum Opened {
    /// The tunnel is open. `head` is the response of the next proxy; `None` for plain TCP.
    Tunnel { stream: ByteStream, head: Option<Parts> },
    /// The next proxy or the origin sent another response, which the client receives.
    Answer(Response<Body>),
}

/// The parameters of one attempt.
#[derive(Clone, Copy)]
struct Attempt {
    /// Use a new connection.
    fresh: bool,
    /// Timeout of the connection; `None`: the route's.
    within: Option<Duration>,
    /// The endpoint receives a WebSocket key over HTTP/2 and HTTP/3 too.
    gives_key: bool,
}

/// The way in which a stream of a shared connection becomes a tunnel.
#[derive(Clone, Copy)]
struct TunnelForm {
    by_post: bool,
    /// A WebSocket request carries a key, although RFC 8441, section 5, requires none.
    gives_key: bool,
}

/// Facts about an attempt that the retry decision needs.
#[derive(Default)]
struct AttemptInfo {
    /// The connection was idle before, or its peer was closing.
    is_stale: bool,
    /// True if the failed dial belonged to another request that shared it.
    was_others: bool,
    /// The endpoint is a node, and reports that its own path is dead.
    is_unsent: bool,
    /// The WebSocket request carried no key.
    lacks_key: bool,
}

/// Timeout for an endpoint that was shutting down, if there are other endpoints. Over HTTP/3, a closed port may be
/// silent, and the flow's current tunnel ends soon. The time suffices for a lost first packet that is retransmitted
/// after a second (RFC 6298, section 2; RFC 9002, section 6.2.2), also over TCP after QUIC's head start.
const RETRY_WINDOW: Duration = Duration::from_secs(2);

impl Forward<'_> {
    /// Opens a tunnel to one of the endpoints. If an endpoint is unreachable, the next one is tried: no payload was
    /// sent yet.
    ///
    /// # Errors
    /// The error of the last attempt.
    pub(crate) async fn tunnel(
        &self,
        upstream: &Arc<UpstreamState>,
        upgrade: &UpgradeKind,
        mut early: Option<EarlyPayload<'_>>,
    ) -> Result<Opened, Error> {
        let attempts = self.route.retry.as_ref().map_or(2, |retry| retry.attempts).max(upstream.failovers() as u32);
        let mut avoid = Vec::new();
        let (mut fresh, mut went_back, mut gives_key, mut dead) = (false, false, false, None);
        // A reopened flow stays with its endpoint, where a new process may run by now. Through another endpoint its
        // public address could change.
        let mut before = self.entry.peer.borrow().clone();
        loop {
            let now = self.worker.shared.now();
            let again = before.take().and_then(|peer| upstream.takes_again(&peer, now));
            let index = again
                .or_else(|| upstream.choose(&self.entry.facts, now, self.worker.random().1, &avoid))
                .ok_or_else(|| Error::NoEndpoint { upstream: upstream.config.name.clone() })?;
            self.is_at(upstream, index);
            self.entry.tries.set(avoid.len() as u32 + 1);
            let mut told = AttemptInfo::default();
            let is_doubtful = again.is_some() && upstream.endpoints.len() > 1;
            // A reopening takes at most half of the connect timeout, so that other endpoints still get a try.
            let again_within = RETRY_WINDOW.min(self.route.timeout.connect / 2);
            let attempt = Attempt { fresh, within: is_doubtful.then_some(again_within), gives_key };
            let opened = self.open_at(upstream, index, upgrade, early.as_mut(), attempt, &mut told).await;
            // The old process may accept the new connection just before it exits. The next connection reaches its
            // successor.
            if again.is_some() && !fresh && is_put_off(&opened) {
                (fresh, before) = (true, Some(upstream.endpoints[index].label.clone()));
                continue;
            }
            match opened {
                // nghttpx rejects a key over HTTP/2. Envoy adds none for its origin, which requires one.
                Ok(Opened::Answer(answer)) if told.lacks_key && answer.status() == StatusCode::BAD_REQUEST => {
                    (gives_key, before) = (true, Some(upstream.endpoints[index].label.clone()));
                }
                Ok(Opened::Answer(answer)) if told.is_unsent => {
                    avoid.push(index);
                    if !went_back && upstream.has_another(&avoid, now) {
                        (went_back, fresh) = (true, false);
                        self.worker.shared.metrics.retries.inc();
                        continue;
                    }
                    let why =
                        is_round(answer.status(), answer.headers()).then(|| Self::without_way(upstream, index, dead));
                    self.entry.reported_unsent();
                    return why.flatten().map_or(Ok(Opened::Answer(answer)), Err);
                }
                Ok(opened) => {
                    upstream.succeeded(index);
                    self.entry.prefetched.set(early.and_then(EarlyPayload::into_prefetched));
                    return Ok(opened);
                }
                // This repeat does not count as a retry: the peer closed the connection, or accepted it just before it
                // shut down.
                Err(error) if told.is_stale && !fresh && super::is_untouched(&error) && self.body.can_be_sent() => {
                    fresh = true;
                }
                Err(error) => {
                    let connects = super::is_untouched(&error)
                        || matches!(error, Error::Connect { .. } | Error::ConnectTimeout { .. });
                    if connects && !told.was_others {
                        self.blame(upstream, index);
                    }
                    // The endpoint is not ejected: its next reverse connection shows that it has returned.
                    let connects = connects || matches!(error, Error::NotConnected { .. });
                    avoid.push(index);
                    fresh = false;
                    // Another endpoint may succeed. A single endpoint gets a second try only if the route has `retry`.
                    let others = upstream.endpoints.len() > avoid.len() || self.route.retry.is_some();
                    if !connects || !others || avoid.len() as u32 >= attempts || !self.body.can_be_sent() {
                        return Err(error);
                    }
                    dead = Some(error);
                    self.worker.shared.metrics.retries.inc();
                    tokio::time::sleep(self.backoff(avoid.len() as u32)).await;
                }
            }
        }
    }

    /// Opens a tunnel to the origin that the request or its route names: an upgrade, on a dedicated connection.
    ///
    /// # Errors
    /// No address within `reach`, no connection, or no response.
    pub(crate) async fn tunnel_to_origin(
        &self,
        to: &Destination<'_>,
        owner: u64,
        upgrade: &UpgradeKind,
    ) -> Result<Opened, Error> {
        *self.entry.peer.borrow_mut() = Some(to.label.clone());
        let pool = self.worker.pool(PoolKey { owner, endpoint: to.label.clone() });
        let spec = self.origin_wish(to, true);
        let Leased::H1(connection) = pool.lease(self.worker, &spec).await? else {
            return Err(Error::Internal("an origin was not asked by HTTP/1.1".to_owned()));
        };
        let (worker, peer) = (self.worker.outbound.clone(), to.label.clone());
        let context = ExchangeContext { worker, pool, peer, shareable: false, session: None, in_flight: None };
        self.over_h1(connection, context, upgrade, Outgoing::new(self.entry, &self.rewriter, false)?, false).await
    }

    async fn open_at(
        &self,
        upstream: &Arc<UpstreamState>,
        index: usize,
        upgrade: &UpgradeKind,
        mut early: Option<&mut EarlyPayload<'_>>,
        attempt: Attempt,
        told: &mut AttemptInfo,
    ) -> Result<Opened, Error> {
        let endpoint = &upstream.endpoints[index];
        let spec = upstream.spec(index, self.entry.facts.source, self.route.timeout.connect, attempt.fresh);
        let spec = ConnectSpec { client: self.entry.binding_connection(), session: Some(self.entry), ..spec };
        let in_flight = InFlight::begin(upstream, index);
        let pool = self.worker.pool(upstream.pool_key(index));
        if upstream.config.protocol == UpstreamProtocol::Tcp {
            unsent(early.as_deref(), &endpoint.label)?;
            let permit = TunnelPermit::new(Some(in_flight), pool.permit(self.worker, spec.session).await?);
            let io = connect(self.worker, &spec.destination, spec.connect_within).await?;
            return Ok(Opened::Tunnel {
                stream: ByteStream::leased_io(io, Bytes::new(), Box::new(permit)),
                head: None,
            });
        }
        let kind = self.entry.facts.kind;
        let by_post = !matches!(kind, Kind::Http | Kind::Ip) && upstream.config.tunnel_method == TunnelMethod::Post;
        // UDP and IP flows are upgrades, unless they are tunnels by POST, which any connection carries.
        let flow = match kind {
            Kind::Udp => Some(UpgradeKind::Upgrade(Arc::from("connect-udp"))),
            Kind::Ip => Some(UpgradeKind::Upgrade(Arc::from("connect-ip"))),
            Kind::Http | Kind::Tcp => None,
        };
        let upgrade = flow.as_ref().unwrap_or(upgrade);
        let mut leased = self.lease(&pool, &spec, attempt, told).await?;
        if matches!(upgrade, UpgradeKind::Upgrade(_)) && !by_post {
            leased = self.suit_upgrade(upstream, &pool, &spec, leased).await?;
        }
        let connection = match &leased {
            Leased::H1(connection) => {
                told.is_stale = connection.reused;
                None
            }
            Leased::Shared(lease) => {
                told.is_stale = lease.reused;
                Some(lease.connection.clone())
            }
        };
        let is_node = head::is_node(upstream, &leased);
        let mut outgoing = self.outgoing(upstream, endpoint, &leased, is_node)?;
        let opens = self.opens_capsules(matches!(&leased, Leased::Shared(lease) if lease.connection.has_datagrams()));
        if kind == Kind::Ip {
            early.as_deref_mut().into_iter().for_each(EarlyPayload::by_capsules);
        }
        let early = early.filter(|early| (is_node && (!opens || early.has_whole_capsules())) || early.has_sent());
        if matches!(leased, Leased::H1(_)) {
            unsent(early.as_deref(), &endpoint.label)?;
        }
        let context = ExchangeContext {
            worker: self.worker.outbound.clone(),
            pool,
            peer: endpoint.label.clone(),
            shareable: false,
            session: None,
            in_flight: Some(in_flight),
        };
        let debt = OutcomeGuard::new(self, upstream, index);
        let opened = match (leased, by_post) {
            (Leased::Shared(lease), _) if !self.fits_extended_connect(&mut outgoing, is_node) => {
                self.as_exchange(lease, context, outgoing).await
            }
            (Leased::Shared(lease), _) => {
                let manner = TunnelForm { by_post, gives_key: is_node || attempt.gives_key };
                self.over_shared(lease, context, upgrade, manner, outgoing, early).await
            }
            (Leased::H1(connection), false) => self.over_h1(connection, context, upgrade, outgoing, is_node).await,
            (Leased::H1(connection), true) => self.post_over_h1(connection, context, outgoing).await,
        };
        debt.settle();
        told.lacks_key = connection.is_some()
            && matches!(upgrade, UpgradeKind::Upgrade(name) if &**name == "websocket")
            && !(is_node || attempt.gives_key);
        // Other endpoints are tried before the same one is repeated.
        let repeats = || upstream.endpoints.len() == 1 && opened.as_ref().is_err_and(super::is_untouched);
        told.is_stale |= connection.is_some_and(|connection| connection.is_closed() || repeats());
        if let Ok(Opened::Answer(response)) = &opened {
            told.is_unsent = is_node && response.headers().contains_key(UNSENT);
        }
        opened
    }

    /// Replaces a shared connection that cannot carry the upgrade by one of HTTP/1.1. Most HTTP/2 origins accept
    /// WebSockets only there, and only there can an upgrade have a body before the switch.
    ///
    /// # Errors
    /// The endpoint cannot be dialled, and the request is useless without its upgrade.
    async fn suit_upgrade(
        &self,
        upstream: &UpstreamState,
        pool: &Rc<Pool>,
        spec: &ConnectSpec<'_>,
        leased: Leased,
    ) -> Result<Leased, Error> {
        let Leased::Shared(lease) = &leased else { return Ok(leased) };
        let takes_upgrades = takes_upgrades(upstream, lease);
        if lease.connection.is_kept() || !self.needs_h1(upstream, &leased, takes_upgrades) {
            return Ok(leased);
        }
        match Box::pin(pool.dial_h1_instead(self.worker, spec)).await {
            Ok(connection) => Ok(Leased::H1(connection)),
            // A peer without HTTP/1.1 receives the request without its upgrade.
            Err(_) if !self.is_extended_connect(head::is_node(upstream, &leased)) => Ok(leased),
            Err(error) => Err(error),
        }
    }

    /// True if the upgrade should use HTTP/1.1, because extended CONNECT cannot carry it. A body is sent so only if the
    /// peer speaks HTTP/1.1: nodes do, and over TLS the handshake tells.
    fn needs_h1(&self, upstream: &UpstreamState, leased: &Leased, takes_upgrades: bool) -> bool {
        let is_node = head::is_node(upstream, leased);
        if self.is_extended_connect(is_node) {
            return !takes_upgrades;
        }
        is_node || upstream.tls.is_some()
    }

    /// True if extended CONNECT can carry the upgrade. There must be no body before the tunnel, and the method must be
    /// GET, unless the peer is a node, which learns the method from a header (RFC 8441, section 4).
    fn is_extended_connect(&self, is_node: bool) -> bool {
        self.entry.facts.kind != Kind::Http
            || matches!(self.body, RequestBody::Empty) && (is_node || self.entry.facts.method == Method::GET)
    }

    /// Like [`Self::is_extended_connect`], and also tells a node the method. An upgrade that does not fit becomes an
    /// ordinary request if the peer cannot be dialled: a server may ignore upgrades (RFC 9110, section 7.8).
    fn fits_extended_connect(&self, outgoing: &mut Outgoing, is_node: bool) -> bool {
        if self.entry.facts.kind != Kind::Http {
            return true;
        }
        if outgoing.method != Method::GET
            && is_node
            && let Ok(method) = HeaderValue::try_from(outgoing.method.as_str())
        {
            outgoing.fields.insert(headers::METHOD, method);
        }
        self.is_extended_connect(is_node)
    }

    /// Sends the request without its upgrade.
    async fn as_exchange(
        &self,
        lease: Lease,
        context: ExchangeContext,
        mut outgoing: Outgoing,
    ) -> Result<Opened, Error> {
        outgoing.fields.remove(headers::METHOD);
        let (request, body) = (outgoing.into_h2(), self.body.attempt());
        let response = exchange::over_shared(lease, request, body, context, self.entry, self.interim.clone()).await?;
        Ok(Opened::Answer(response.map(ExchangeBody::settle)))
    }

    /// Leases a connection to an endpoint.
    async fn lease(
        &self,
        pool: &Rc<Pool>,
        spec: &ConnectSpec<'_>,
        attempt: Attempt,
        told: &mut AttemptInfo,
    ) -> Result<Leased, Error> {
        let leasing = pool.lease(self.worker, spec);
        let leased = match attempt.within {
            None => leasing.await,
            // The timeout is not part of the spec: other requests may share the dial, which continues for the route's
            // timeout.
            Some(within) => tokio::time::timeout(within, leasing).await.unwrap_or_else(|_| {
                // Many flows may share one dial or wait for a slot, so a timeout here is not the dial's failure.
                let (peer, missing) = (spec.destination.label.clone(), NO_CONNECTION);
                Err(Failed { error: Error::ConnectTimeout { peer, missing, after: within }, was_others: true })
            }),
        };
        let leased = leased.inspect_err(|failed| {
            (told.was_others, told.is_stale) = (failed.was_others, super::is_untouched(&failed.error));
        })?;
        Ok(leased)
    }

    /// Builds the request head for an endpoint.
    fn outgoing(
        &self,
        upstream: &UpstreamState,
        endpoint: &Endpoint,
        leased: &Leased,
        is_node: bool,
    ) -> Result<Outgoing, Error> {
        let mut outgoing = Outgoing::new(self.entry, &self.rewriter, is_node)?;
        let kind = self.entry.facts.kind;
        if kind.is_datagrams() {
            // The authority and scheme are those of the next proxy; the target is in the path (RFC 9298, section 3; RFC
            // 9484, section 4).
            outgoing.host = HeaderValue::try_from(&*endpoint.authority)
                .map_err(|error| Error::Internal(format!("the authority of {}: {error}", endpoint.label)))?;
            outgoing.scheme = if is_secure(upstream, leased) { Scheme::HTTPS } else { Scheme::HTTP };
        }
        if is_node && kind == Kind::Ip {
            headers::lower_mtu(&mut outgoing.fields, leased.packet_capacity());
        }
        Ok(outgoing)
    }

    /// True if the session will read the tunnel capsule by capsule. Early data must then end at a capsule boundary.
    fn opens_capsules(&self, far_has_datagrams: bool) -> bool {
        match self.entry.facts.kind {
            Kind::Ip => true,
            Kind::Udp => {
                let moves = self.route.on_change == OnChange::Move;
                far_has_datagrams || moves || self.rewriter.version == Version::HTTP_3
            }
            Kind::Http | Kind::Tcp => false,
        }
    }

    async fn over_shared(
        &self,
        lease: Lease,
        context: ExchangeContext,
        upgrade: &UpgradeKind,
        TunnelForm { by_post, gives_key }: TunnelForm,
        mut outgoing: Outgoing,
        mut early: Option<&mut EarlyPayload<'_>>,
    ) -> Result<Opened, Error> {
        let mut request = self.bare_request(&mut outgoing);
        *request.method_mut() = if by_post { Method::POST } else { Method::CONNECT };
        match upgrade {
            _ if by_post => *request.uri_mut() = self.template_uri(&outgoing)?,
            UpgradeKind::Connect | UpgradeKind::Post => *request.uri_mut() = authority_form(&outgoing)?,
            UpgradeKind::Upgrade(protocol) => {
                if !lease.connection.takes_extended_connect() {
                    return Err(Error::Incapable {
                        peer: context.peer,
                        reason: "does not offer extended CONNECT (RFC 8441)",
                    });
                }
                if gives_key {
                    self.give_websocket_key(protocol, request.headers_mut())?;
                } else {
                    request.headers_mut().remove(SEC_WEBSOCKET_KEY);
                }
                request.extensions_mut().insert(::h2::ext::Protocol::from(&**protocol));
                *request.uri_mut() = self.template_uri(&outgoing)?;
            }
            UpgradeKind::None => return Err(Error::Internal("an exchange was taken for a tunnel".to_owned())),
        }
        let has_datagrams = self.entry.facts.kind.is_datagrams() && !by_post;
        let opened = exchange::open(lease, request, &context, early.as_deref_mut(), has_datagrams).await;
        if let Some(early) = early {
            self.entry.add_received(self.worker, early.take_received());
        }
        let (response, mut send, lease, datagrams) = opened?;
        self.check_head(&context.peer, response.headers(), true)?;
        if !response.status().is_success() {
            // The tunnel sends nothing. The stream ends gracefully, since resets count against this node.
            let _ = send.send(Bytes::new(), true);
            return Ok(Opened::Answer(
                exchange::response_of(response, false, lease, context).map(ExchangeBody::settle),
            ));
        }
        let (parts, recv) = response.into_parts();
        let stream = ByteStream::multiplexed(recv, send, Some(Box::new(TunnelLease::new(lease, context.in_flight))));
        let stream = stream.with_datagrams(datagrams);
        Ok(Opened::Tunnel { stream, head: Some(parts) })
    }

    async fn over_h1(
        &self,
        connection: Box<H1Connection>,
        context: ExchangeContext,
        upgrade: &UpgradeKind,
        mut outgoing: Outgoing,
        is_node: bool,
    ) -> Result<Opened, Error> {
        let mut request = self.bare_request(&mut outgoing).map(|()| self.body.attempt());
        let wanted = match upgrade {
            UpgradeKind::Connect | UpgradeKind::Post => {
                *request.method_mut() = Method::CONNECT;
                *request.uri_mut() = authority_form(&outgoing)?;
                request.headers_mut().insert(HOST, outgoing.host.clone());
                StatusCode::OK
            }
            UpgradeKind::Upgrade(protocol) => {
                let target = match self.entry.facts.kind {
                    Kind::Http => outgoing.h1_target(&connection, is_node),
                    _ => Uri::from(self.path(&outgoing)?),
                };
                *request.uri_mut() = target;
                self.ask_for_upgrade(&outgoing, &mut request, protocol)?;
                StatusCode::SWITCHING_PROTOCOLS
            }
            UpgradeKind::None => return Err(Error::Internal("an exchange was taken for a tunnel".to_owned())),
        };
        let peer = context.peer.clone();
        let key = request.headers().get(SEC_WEBSOCKET_KEY).cloned();
        let response = exchange::over_h1(connection, request, context, self.entry, None).await?;
        let status = response.status();
        if status == StatusCode::SWITCHING_PROTOCOLS
            && let Err(reason) = check_switch(upgrade, key.as_ref(), response.headers())
        {
            return Err(Error::Broken { peer, reason: reason.to_owned(), unprocessed: false });
        }
        if status != wanted && !(wanted == StatusCode::OK && status.is_success()) {
            // For an HTTP/1.1 client, 200 means that nothing was switched (RFC 9110, 7.8). For an HTTP/2 client it
            // would mean that the tunnel is open (RFC 8441, 5), and a flow can be nothing but a tunnel.
            let misleads = self.entry.facts.kind.is_datagrams() || self.rewriter.version >= Version::HTTP_2;
            if status.is_success() && misleads {
                return Err(Error::Refused { peer, status });
            }
            return Ok(Opened::Answer(response.map(ExchangeBody::settle)));
        }
        let (parts, mut body) = response.into_parts();
        let connection = body.take_h1_connection().ok_or(Error::Refused { peer, status })?;
        let (io, ahead, permit) = connection.into_io().await;
        let permit = TunnelPermit::new(body.take_in_flight(), permit);
        Ok(Opened::Tunnel { stream: ByteStream::http_tunnel(io, ahead, Some(Box::new(permit))), head: Some(parts) })
    }

    async fn post_over_h1(
        &self,
        connection: Box<H1Connection>,
        context: ExchangeContext,
        mut outgoing: Outgoing,
    ) -> Result<Opened, Error> {
        let (send, body) = channel();
        let body = RequestBody::new(self.worker, Body::Channel(body));
        let mut request = self.bare_request(&mut outgoing).map(|()| body.attempt());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from(self.path(&outgoing)?);
        request.headers_mut().insert(HOST, outgoing.host);
        let response = exchange::over_h1(connection, request, context, self.entry, None).await?;
        if !response.status().is_success() {
            // The tunnel sends nothing. Dropping the body would abort the exchange and lose the response.
            send.finish();
            return Ok(Opened::Answer(response.map(ExchangeBody::settle)));
        }
        let (parts, mut body) = response.into_parts();
        let carrier = body.take_h1_connection();
        let stream = PostTunnel::stream(Body::boxed(body), send, carrier);
        Ok(Opened::Tunnel { stream, head: Some(parts) })
    }

    fn bare_request(&self, outgoing: &mut Outgoing) -> HttpRequest<()> {
        let mut request = HttpRequest::new(());
        let mut fields = std::mem::take(&mut outgoing.fields);
        fields.remove(CONTENT_LENGTH);
        if self.entry.facts.kind.is_datagrams() {
            fields.insert(CAPSULE_PROTOCOL, HeaderValue::from_static("?1"));
        }
        *request.headers_mut() = fields;
        request
    }

    /// The path of a tunnel request. For UDP and IP it contains the target.
    fn path(&self, outgoing: &Outgoing) -> Result<PathAndQuery, Error> {
        if self.entry.facts.kind == Kind::Udp { udp_path(outgoing) } else { Ok(outgoing.path.clone()) }
    }

    /// The URI of an extended CONNECT or a POST.
    fn template_uri(&self, outgoing: &Outgoing) -> Result<Uri, Error> {
        Uri::builder()
            .scheme(outgoing.scheme.clone())
            .authority(outgoing.host.as_bytes())
            .path_and_query(self.path(outgoing)?)
            .build()
            .map_err(|error| Error::Internal(format!("a tunnel's URI: {error}")))
    }

    fn ask_for_upgrade<B>(
        &self,
        outgoing: &Outgoing,
        request: &mut HttpRequest<B>,
        protocol: &str,
    ) -> Result<(), Error> {
        let is_http = self.entry.facts.kind == Kind::Http;
        *request.method_mut() = if is_http { outgoing.method.clone() } else { Method::GET };
        let headers = request.headers_mut();
        headers.insert(HOST, outgoing.host.clone());
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::try_from(protocol).map_err(|error| Error::Malformed(error.to_string()))?);
        self.give_websocket_key(protocol, headers)
    }

    /// Adds a missing WebSocket key. An HTTP/2 client sends none, since the stream proves the same (RFC 8441, 5). An
    /// HTTP/1.1 origin requires one, and so does an origin after a proxy that converts HTTP/2 to HTTP/1.1 without
    /// adding a key: Envoy.
    fn give_websocket_key(&self, protocol: &str, headers: &mut HeaderMap) -> Result<(), Error> {
        if protocol == "websocket" && !headers.contains_key(SEC_WEBSOCKET_KEY) {
            let key = HeaderValue::try_from(websocket_key(self.worker.random().0));
            headers.insert(SEC_WEBSOCKET_KEY, key.map_err(|error| Error::Internal(error.to_string()))?);
        }
        Ok(())
    }
}

/// True if an endpoint processed nothing because it is shutting down.
fn is_put_off(opened: &Result<Opened, Error>) -> bool {
    match opened {
        Ok(Opened::Answer(response)) => response.status() == StatusCode::SERVICE_UNAVAILABLE,
        Ok(Opened::Tunnel { .. }) => false,
        Err(error) => super::is_untouched(error),
    }
}

/// Fails if early data was already sent. HTTP/1.1 carries tunnel data only after the response, so data that went early
/// over HTTP/2, to an endpoint that refused it, cannot be sent again.
fn unsent(early: Option<&EarlyPayload<'_>>, peer: &Arc<str>) -> Result<(), Error> {
    if early.is_some_and(EarlyPayload::has_sent) {
        return Err(Error::Incapable {
            peer: peer.clone(),
            reason: "does not support HTTP/2, unlike the previous endpoint",
        });
    }
    Ok(())
}

/// Checks a 101 response: it must answer an upgrade to this protocol. For WebSocket it must also prove that the key was
/// understood, since the client receives a proof that this node computes.
fn check_switch(upgrade: &UpgradeKind, key: Option<&HeaderValue>, headers: &HeaderMap) -> Result<(), &'static str> {
    let named = headers.get(UPGRADE).and_then(|value| value.to_str().ok());
    match (upgrade, named) {
        (UpgradeKind::Upgrade(wanted), Some(named)) if named.trim().eq_ignore_ascii_case(wanted) => {}
        _ => return Err("the response switched to a protocol that was not requested (RFC 9110, 7.8)"),
    }
    let proof = headers.get(SEC_WEBSOCKET_ACCEPT);
    match key.and_then(upgrade::websocket_accept) {
        Some(wanted)
            if matches!(upgrade, UpgradeKind::Upgrade(name) if &**name == "websocket") && proof != Some(&wanted) =>
        {
            Err("wrong Sec-WebSocket-Accept for the key (RFC 6455, 4.1)")
        }
        _ => Ok(()),
    }
}

/// True if the next proxy is reached over TLS. A reverse connection was authenticated over TLS.
fn is_secure(upstream: &UpstreamState, leased: &Leased) -> bool {
    upstream.tls.is_some() || matches!(leased, Leased::Shared(lease) if lease.connection.is_kept())
}

/// True if this connection carries the upgrade: the peer supports it, or cannot be dialled (reverse connection).
fn takes_upgrades(upstream: &UpstreamState, lease: &Lease) -> bool {
    let is_node = upstream.config.overlay == Some(true) || lease.connection.is_kept();
    is_node || lease.connection.takes_extended_connect()
}

/// The target in authority form, `host:port`, for CONNECT.
fn authority_form(outgoing: &Outgoing) -> Result<Uri, Error> {
    let authority = http::uri::Authority::try_from(outgoing.host.as_bytes())
        .map_err(|error| Error::Malformed(format!("tunnel target: {error}")))?;
    Ok(Uri::from(authority))
}

fn udp_path(outgoing: &Outgoing) -> Result<PathAndQuery, Error> {
    let target = &outgoing.authority;
    let port = target.port().ok_or_else(|| Error::Malformed("the UDP target has no port".to_owned()))?;
    connect_udp::path(target.host(), port)
        .parse()
        .map_err(|error| Error::Internal(format!("CONNECT-UDP path: {error}")))
}

fn websocket_key(random: u128) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(random.to_be_bytes())
}

//! The request type that all flows share, whatever protocol they arrived in.
//!
//! In: a request head that hyper or h2 parsed, or a TCP connection or UDP flow that a listener represents as a request.
//! Out: a `Request` whose identity claims are checked and whose headers are ready for the decision. Never: a decision,
//! or a byte of the body.

mod capture;
mod target;

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use hermes_model::authority::Authority;
use hermes_model::facts::{Facts, Kind, Trust};
use hermes_model::snapshot::Listener;
use hermes_model::trust::settle;
use hermes_wire::connect_udp;
use hermes_wire::custody::ExchangeId;
use hermes_wire::traceparent::Traceparent;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Version};
use ipnet::IpNet;

pub(crate) use self::capture::from_capture;
use self::target::{count_lines, excerpt, target, udp_target};
use crate::worker::Worker;
use hermes_transport::body::{Interim, RequestBody};
use hermes_transport::early_payload::EarlyPayload;
use hermes_transport::error::Error;
use hermes_transport::headers;
use hermes_transport::runtime::session::{Connection, SessionEntry};

/// The kind of exchange that the client requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UpgradeKind {
    /// An ordinary HTTP exchange.
    None,
    /// CONNECT (or a TCP connection accepted by a listener).
    Connect,
    /// A tunnel by POST: the two bodies are the two directions. For UDP they carry capsules.
    Post,
    /// HTTP/1.1 Upgrade or extended CONNECT to this protocol.
    Upgrade(Arc<str>),
}

impl UpgradeKind {
    /// True for an upgrade to this protocol.
    pub(crate) fn is_to(&self, protocol: &str) -> bool {
        matches!(self, Self::Upgrade(requested) if **requested == *protocol)
    }
}

/// An exchange from a neighbour in custody, as its session refers to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InboundExchange {
    pub(crate) id: ExchangeId,
    /// The length of its received head.
    pub(crate) head_bytes: u64,
}

/// A flow, represented as a request.
pub(crate) struct Request<'a> {
    pub(crate) facts: Rc<Facts>,
    pub(crate) upgrade: UpgradeKind,
    /// The HTTP version of the request.
    pub(crate) version: Version,
    /// `http` or `https`, as the client sent it.
    pub(crate) scheme: http::uri::Scheme,
    /// The authority in the client's spelling. Comparisons ignore case, but the spelling is forwarded unchanged.
    pub(crate) host: HeaderValue,
    pub(crate) body: RequestBody,
    pub(crate) trace: Traceparent,
    /// Receives interim responses; `None` if the client cannot receive any.
    pub(crate) interim: Option<Arc<Interim>>,
    pub(crate) connection: Option<Rc<Connection>>,
    /// Data that the client sends before its tunnel is open, if it can be read.
    pub(crate) early: Option<EarlyPayload<'a>>,
    /// Set if the request arrived in custody.
    pub(crate) arrived: Option<InboundExchange>,
    /// A hash of what an untrusted client claimed in `X-Forwarded-For` and the like; 0 if nothing.
    pub(crate) claimed: u64,
}

impl Request<'_> {
    /// Records the connection on which the request arrived.
    pub(crate) fn came_by(&mut self, connection: &Rc<Connection>) {
        connection.claimed.set(self.claimed);
        if self.claimed != 0 && connection.is_shared.get() {
            connection.is_pooled.set(true);
        }
        self.connection = Some(connection.clone());
    }

    /// True if the client sends its body only after `100 Continue`.
    pub(crate) fn expects_continue(&self) -> bool {
        let expect = self.facts.headers.get(http::header::EXPECT);
        expect.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
    }

    /// The request as a tunnel by POST: to `/` for TCP, or to the CONNECT-UDP path for UDP. `None` for an ordinary
    /// POST, such as one with a declared length or content type.
    pub(crate) fn as_post_tunnel(&self) -> Option<(Facts, HeaderValue)> {
        let facts = &*self.facts;
        let is_bare = facts.method == Method::POST
            && self.upgrade == UpgradeKind::None
            && facts.trust.is_believed()
            && !facts.headers.contains_key(CONTENT_LENGTH)
            && !facts.headers.contains_key(CONTENT_TYPE);
        if !is_bare {
            return None;
        }
        if facts.path.as_str() == "/" {
            return Some((Facts { kind: Kind::Tcp, ..facts.clone() }, self.host.clone()));
        }
        let (authority, host) = udp_target(&facts.path).ok()??;
        Some((Facts { kind: Kind::Udp, authority, ..facts.clone() }, host))
    }

    /// Recreates the request of a live session, to open its tunnel again. The result is complete for a flow of
    /// datagrams; for other kinds, the caller sets body and kind of exchange.
    pub(crate) fn again(entry: &SessionEntry) -> Self {
        let protocol = if entry.facts.kind == Kind::Ip { "connect-ip" } else { "connect-udp" };
        Self {
            facts: entry.facts.clone(),
            upgrade: UpgradeKind::Upgrade(Arc::from(protocol)),
            version: Version::HTTP_11,
            scheme: http::uri::Scheme::HTTP,
            host: host_value(&entry.facts.authority, ""),
            body: RequestBody::Empty,
            trace: entry.trace,
            interim: None,
            connection: None,
            early: None,
            arrived: None,
            claimed: 0,
        }
    }
}

/// The origin of a request: connection, peer and trust.
pub(crate) struct Origin<'a> {
    pub(crate) worker: &'a Worker,
    pub(crate) listener: &'a Listener,
    pub(crate) source: SocketAddr,
    pub(crate) trust: &'a Trust,
    /// The connection is TLS.
    pub(crate) secure: bool,
}

/// The readable parts of a request that is rejected before the decision.
pub(crate) struct Rejected {
    pub(crate) error: Error,
    pub(crate) facts: Facts,
    pub(crate) trace: Traceparent,
}

/// Builds a request from a parsed head.
///
/// # Errors
/// The request is malformed, or claims an identity that it may not claim.
pub(crate) fn from_head<'a>(
    origin: &Origin<'_>,
    mut parts: Parts,
    body: RequestBody,
) -> Result<Request<'a>, Box<Rejected>> {
    let trace = headers::trace(&parts.headers, origin.worker.random());
    headers::join_cookies(&mut parts.headers);
    let target = match count_lines(origin.worker, &parts.headers).and_then(|()| target(&parts, origin.secure)) {
        Ok(target) => target.named(origin.worker),
        Err(error) => {
            let kind = if parts.method == Method::CONNECT { Kind::Tcp } else { Kind::Http };
            if matches!(error, Error::TooManyLines(_)) {
                // Frees the fields at once; the client may read its rejection slowly.
                parts.headers = HeaderMap::new();
            }
            return Err(Box::new(Rejected { error, facts: unknown_facts(origin, kind, parts), trace }));
        }
    };
    // The hop-by-hop fields go first: a client's `Connection` header must not remove fields that this node sets.
    headers::strip_hop_by_hop(&mut parts.headers);
    // With it, the last node sends from an address of the peer's choice, so the peer must be a standalone node.
    if !origin.trust.is_proxy() {
        parts.headers.remove(headers::SOURCE);
    }
    let mut claimed = 0;
    if !origin.trust.is_proxy() {
        // The connection decides, not the scheme that the client names. A node may report that its own client used no
        // TLS: a claim of less protection is harmless.
        let is_plain_before = origin.trust.is_believed()
            && (target.scheme == http::uri::Scheme::HTTP || headers::is_plain_before(&parts.headers));
        let is_secure = origin.secure && !is_plain_before;
        claimed = headers::replace_claims(&mut parts.headers, origin.source, &target.host, &target.scheme, is_secure);
    }
    let version = parts.version;
    // The address of a name is known only to the node that captured the packets. A trusted node may report any address.
    let told = (target.kind == Kind::Ip && origin.trust.is_believed())
        .then(|| parts.headers.get(headers::NETWORK)?.to_str().ok()?.parse::<IpNet>().ok())
        .flatten();
    if target.kind == Kind::Ip {
        // Routes can match on this field, so it must agree with the path.
        match target.network.and_then(|network| HeaderValue::from_str(&network.to_string()).ok()) {
            Some(network) => drop(parts.headers.insert(headers::NETWORK, network)),
            None => drop(parts.headers.remove(headers::NETWORK)),
        }
    }
    // An upgrade keeps its method for the decision and on HTTP/1.1 hops. Over extended CONNECT, only a node may name a
    // method other than GET.
    let told_method = origin.trust.is_believed().then(|| parts.headers.remove(headers::METHOD)).flatten();
    let method = match (&target.upgrade, target.kind) {
        (UpgradeKind::Upgrade(_), Kind::Http) if parts.method == Method::CONNECT => {
            let told = told_method.and_then(|method| Method::from_bytes(method.as_bytes()).ok());
            // CONNECT is not a valid method for an upgrade.
            told.filter(|method| *method != Method::CONNECT).unwrap_or(Method::GET)
        }
        _ => parts.method,
    };
    let facts = Facts {
        listener: origin.listener.name.clone(),
        kind: target.kind,
        source: origin.source,
        trust: origin.trust.clone(),
        user: None,
        method,
        authority: target.authority,
        path: target.path,
        headers: parts.headers,
        announced_network: told.filter(|_| target.network.is_none()),
        network: target.network,
        protocol: target.protocol,
    };
    complete(origin, facts, trace).map(|facts| Request {
        upgrade: target.upgrade,
        version,
        scheme: target.scheme,
        host: target.host,
        facts: Rc::new(facts),
        body,
        trace,
        interim: None,
        connection: None,
        early: None,
        arrived: None,
        claimed,
    })
}

/// Builds a request from a raw TCP connection or UDP flow. `spelled` is the authority in the client's spelling, or
/// empty.
///
/// # Errors
/// The listener's own header set claims an identity that its peers may not claim.
pub(crate) fn from_flow<'a>(
    origin: &Origin<'_>,
    kind: Kind,
    authority: &Authority,
    spelled: &str,
) -> Result<Request<'a>, Box<Rejected>> {
    let named = named(origin.worker, authority);
    let (authority, spelled) = named.as_ref().map_or((authority, spelled), |named| (named, ""));
    let path = if kind == Kind::Udp { udp_path(authority) } else { PathAndQuery::from_static("/") };
    let facts = Facts {
        listener: origin.listener.name.clone(),
        kind,
        source: origin.source,
        trust: origin.trust.clone(),
        user: None,
        method: Method::CONNECT,
        authority: authority.clone(),
        path,
        headers: HeaderMap::new(),
        network: None,
        announced_network: None,
        protocol: None,
    };
    let trace = headers::trace(&facts.headers, origin.worker.random());
    let upgrade = if kind == Kind::Udp { UpgradeKind::Upgrade(Arc::from("connect-udp")) } else { UpgradeKind::Connect };
    complete(origin, facts, trace).map(|facts| Request {
        upgrade,
        version: Version::HTTP_11,
        scheme: http::uri::Scheme::HTTP,
        host: host_value(authority, spelled),
        facts: Rc::new(facts),
        body: RequestBody::Empty,
        trace,
        interim: None,
        connection: None,
        early: None,
        arrived: None,
        claimed: 0,
    })
}

/// Builds a request from a flow whose client names its target as HOST:PORT.
///
/// # Errors
/// The text is not a valid authority, or an error of [`from_flow`].
pub(crate) fn from_target<'a>(origin: &Origin<'_>, kind: Kind, text: &str) -> Result<Request<'a>, Box<Rejected>> {
    match Authority::parse(text, None) {
        Ok(authority) => from_flow(origin, kind, &authority, text),
        Err(error) => {
            let (mut parts, ()) = http::Request::new(()).into_parts();
            parts.method = Method::CONNECT;
            let trace = headers::trace(&parts.headers, origin.worker.random());
            let error = Error::Malformed(format!("target {}: {error}", excerpt(text)));
            Err(Box::new(Rejected { error, facts: unknown_facts(origin, kind, parts), trace }))
        }
    }
}

/// The authority with its virtual address replaced by the name. `None` if the address is not virtual.
fn named(worker: &Worker, authority: &Authority) -> Option<Authority> {
    if worker.generation().name_tables().is_empty() {
        return None;
    }
    let name = worker.name_of(authority.host().parse().ok()?)?;
    Some(authority.with_host(name))
}

fn udp_path(authority: &Authority) -> PathAndQuery {
    let path = connect_udp::path(authority.host(), authority.port().unwrap_or_default());
    path.parse().unwrap_or_else(|_| PathAndQuery::from_static("/"))
}

/// Checks the claimed identity, and applies the listener's headers.
fn complete(origin: &Origin<'_>, mut facts: Facts, trace: Traceparent) -> Result<Facts, Box<Rejected>> {
    let generation = origin.worker.generation();
    match settle(&mut facts, origin.listener, &generation.snapshot) {
        Ok(dropped) => {
            if dropped.is_some() && facts.trust.is_believed() {
                origin.worker.shared.metrics.identities_removed.inc();
                tracing::warn!(
                    source = %facts.source,
                    node = facts.trust.peer().and_then(|peer| peer.node.as_deref()),
                    "a claim to be a user was removed: no user is bound to this node (certificate or `users`)"
                );
            }
            Ok(facts)
        }
        Err(refusal) => {
            let (status, reason) = (refusal.status(), refusal.to_string());
            let error = Error::Denied { status, reason, label: "http_request_denied" };
            Err(Box::new(Rejected { error, facts, trace }))
        }
    }
}

/// The authority as a header value: `text` if it differs only in case, otherwise the canonical spelling.
fn host_value(authority: &Authority, text: &str) -> HeaderValue {
    let canonical = authority.to_string();
    let spelled = if text.eq_ignore_ascii_case(&canonical) { text } else { &canonical };
    // `Authority::parse` accepts only bytes that are valid in a header value.
    HeaderValue::from_str(spelled).unwrap_or(HeaderValue::from_static("unknown"))
}

/// A placeholder authority. "unknown" is a valid host, so parsing cannot fail.
fn unknown_authority() -> Authority {
    Authority::parse("unknown", None).unwrap_or_else(|_| unreachable!("a constant that parses"))
}

/// Facts for the access log, of a request whose target is invalid.
fn unknown_facts(origin: &Origin<'_>, kind: Kind, parts: Parts) -> Facts {
    Facts {
        listener: origin.listener.name.clone(),
        kind,
        source: origin.source,
        trust: origin.trust.clone(),
        user: None,
        method: parts.method,
        authority: unknown_authority(),
        path: parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/")),
        headers: parts.headers,
        network: None,
        announced_network: None,
        protocol: None,
    }
}

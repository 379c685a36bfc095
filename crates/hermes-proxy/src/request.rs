//! Every flow is a request: what came in, as one type, whatever it came as.
//!
//! In: a request's head as hyper or h2 parsed it, or a TCP connection or UDP flow that a listener
//! makes a request of. Out: `Request`, with its facts judged and its fields ready to be decided.
//! Never: a decision, or a byte of the body.

mod capture;

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use hermes_model::authority::Authority;
use hermes_model::facts::{Facts, Kind, Trust};
use hermes_model::snapshot::Listener;
use hermes_model::trust::settle;
use hermes_wire::connect_ip;
use hermes_wire::connect_udp;
use hermes_wire::traceparent::Traceparent;
use http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, HOST, TRANSFER_ENCODING, UPGRADE};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Version};
use ipnet::IpNet;

pub(crate) use self::capture::from_capture;
use crate::body::{Interim, RequestBody};
use crate::early::Early;
use crate::error::Error;
use crate::headers;
use crate::live::{Connection, Entry};
use crate::worker::Worker;

/// How the client asked for something other than an HTTP response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// An ordinary exchange.
    Response,
    /// CONNECT (or a TCP connection accepted by a listener).
    Connect,
    /// A tunnel by POST: bodies are the two directions. For UDP they carry capsules.
    Post,
    /// h1 Upgrade or h2 extended CONNECT to this protocol.
    Upgrade(Arc<str>),
}

/// A flow, as a request.
pub(crate) struct Request<'a> {
    pub(crate) facts: Rc<Facts>,
    pub(crate) ask: Ask,
    /// Version it was received in.
    pub(crate) version: Version,
    /// `http` or `https`, as the client said.
    pub(crate) scheme: http::uri::Scheme,
    /// The authority in the client's own spelling: names compare without regard to case, but they
    /// are passed on as they came.
    pub(crate) host: HeaderValue,
    pub(crate) body: RequestBody,
    pub(crate) trace: Traceparent,
    /// Where interim responses go; only for clients that can be sent any.
    pub(crate) interim: Option<Arc<Interim>>,
    pub(crate) connection: Option<Rc<Connection>>,
    /// What the client sends before its tunnel is open, where that can be read.
    pub(crate) early: Option<Early<'a>>,
}

impl Request<'_> {
    /// The client sends its body only after a 100.
    pub(crate) fn expects_continue(&self) -> bool {
        let expect = self.facts.headers.get(http::header::EXPECT);
        expect.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
    }

    /// What the request would be as a tunnel by POST: to `/` for TCP, to the path of CONNECT-UDP
    /// for UDP. `None` where it is none: a POST that says what it brings is what it looks like.
    pub(crate) fn as_post_tunnel(&self) -> Option<(Facts, HeaderValue)> {
        let facts = &*self.facts;
        let is_bare = facts.method == Method::POST
            && self.ask == Ask::Response
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

    /// The request of a live flow of datagrams, to open its tunnel anew.
    pub(crate) fn again(entry: &Entry) -> Self {
        let protocol = if entry.facts.kind == Kind::Ip { "connect-ip" } else { "connect-udp" };
        Self {
            facts: entry.facts.clone(),
            ask: Ask::Upgrade(Arc::from(protocol)),
            version: Version::HTTP_11,
            scheme: http::uri::Scheme::HTTP,
            host: host_value(&entry.facts.authority, ""),
            body: RequestBody::Empty,
            trace: entry.trace,
            interim: None,
            connection: None,
            early: None,
        }
    }
}

/// Where a request came from.
pub(crate) struct Origin<'a> {
    pub(crate) worker: &'a Worker,
    pub(crate) listener: &'a Listener,
    pub(crate) source: SocketAddr,
    pub(crate) trust: &'a Trust,
    /// The connection is TLS.
    pub(crate) secure: bool,
}

/// What could be read of a request that is refused before it is decided.
pub(crate) struct Rejected {
    pub(crate) error: Error,
    pub(crate) facts: Facts,
    pub(crate) trace: Traceparent,
}

/// Makes a request of a parsed head.
///
/// # Errors
/// The request is malformed, or claims an identity that it may not claim.
pub(crate) fn from_head<'a>(
    origin: &Origin<'_>,
    mut parts: Parts,
    body: RequestBody,
) -> Result<Request<'a>, Box<Rejected>> {
    let trace = headers::trace(&parts.headers, origin.worker.random());
    let target = match count_lines(origin.worker, &parts.headers).and_then(|()| target(&parts, origin.secure)) {
        Ok(target) => target.named(origin.worker),
        Err(error) => {
            let kind = if parts.method == Method::CONNECT { Kind::Tcp } else { Kind::Http };
            return Err(Box::new(Rejected { error, facts: unknown_facts(origin, kind, parts), trace }));
        }
    };
    // Before anything is set or judged: a client's `Connection` ends what the client sent, and nothing else.
    headers::strip_hop_by_hop(&mut parts.headers);
    let version = parts.version;
    // A name has an address only where it is captured: the node there tells which.
    let told = (target.kind == Kind::Ip && origin.trust.is_believed())
        .then(|| parts.headers.get(headers::NETWORK)?.to_str().ok()?.parse::<IpNet>().ok())
        .flatten();
    if target.kind == Kind::Ip {
        // Routes match on it: it says what the path says, or what was told of a name, and nothing else.
        match target.network.or(told).and_then(|network| HeaderValue::from_str(&network.to_string()).ok()) {
            Some(network) => drop(parts.headers.insert(headers::NETWORK, network)),
            None => drop(parts.headers.remove(headers::NETWORK)),
        }
    }
    let facts = Facts {
        listener: origin.listener.name.clone(),
        kind: target.kind,
        source: origin.source,
        trust: origin.trust.clone(),
        user: None,
        // An upgrade is a GET in whichever version it was asked for; so it is decided, and sent on over h1.
        method: if matches!(target.ask, Ask::Upgrade(_)) && target.kind == Kind::Http {
            Method::GET
        } else {
            parts.method
        },
        authority: target.authority,
        path: target.path,
        headers: parts.headers,
        network: target.network.or(told),
        protocol: target.protocol,
    };
    complete(origin, facts, trace).map(|facts| Request {
        ask: target.ask,
        version,
        scheme: target.scheme,
        host: target.host,
        facts: Rc::new(facts),
        body,
        trace,
        interim: None,
        connection: None,
        early: None,
    })
}

/// Makes a request of a raw TCP connection or UDP flow. `spelled` is the authority in the client's own
/// spelling, where a client wrote it.
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
        protocol: None,
    };
    let trace = headers::trace(&facts.headers, origin.worker.random());
    let ask = if kind == Kind::Udp { Ask::Upgrade(Arc::from("connect-udp")) } else { Ask::Connect };
    complete(origin, facts, trace).map(|facts| Request {
        ask,
        version: Version::HTTP_11,
        scheme: http::uri::Scheme::HTTP,
        host: host_value(authority, spelled),
        facts: Rc::new(facts),
        body: RequestBody::Empty,
        trace,
        interim: None,
        connection: None,
        early: None,
    })
}

/// Makes a request of a flow whose client says whom it is for: HOST:PORT, in its own spelling.
///
/// # Errors
/// That is no authority, or as [`from_flow`].
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

/// The authority with the name in it that its address stands for, if it does.
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

/// Judges the claimed identity, and sets the listener's headers over it.
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

/// The authority as a field value: `text` if it is the same but for case, else the one spelling.
fn host_value(authority: &Authority, text: &str) -> HeaderValue {
    let canonical = authority.to_string();
    let spelled = if text.eq_ignore_ascii_case(&canonical) { text } else { &canonical };
    // `Authority::parse` lets only such bytes pass as a field value may have.
    HeaderValue::from_str(spelled).unwrap_or(HeaderValue::from_static("unknown"))
}

/// "unknown" is a legal host: this cannot fail.
fn unknown_authority() -> Authority {
    Authority::parse("unknown", None).unwrap_or_else(|_| unreachable!("a constant that parses"))
}

struct Target {
    kind: Kind,
    host: HeaderValue,
    ask: Ask,
    authority: Authority,
    path: PathAndQuery,
    scheme: http::uri::Scheme,
    network: Option<IpNet>,
    protocol: Option<u8>,
}

impl Target {
    /// The same for the name that its address stands for, if it does: what a program was told by DNS.
    fn named(mut self, worker: &Worker) -> Self {
        if self.kind != Kind::Ip
            && let Some(authority) = named(worker, &self.authority)
        {
            self.host = host_value(&authority, "");
            if self.kind == Kind::Udp {
                self.path = udp_path(&authority);
            }
            self.authority = authority;
        }
        self
    }
}

fn target(parts: &Parts, secure: bool) -> Result<Target, Error> {
    check_coding(&parts.headers)?;
    let protocol = upgrade_protocol(parts)?;
    let is_connect = parts.method == Method::CONNECT;
    if is_connect && protocol.is_none() {
        return connect_target(parts);
    }
    check_form(parts)?;
    let scheme = scheme(parts, secure);
    let default_port = if scheme == http::uri::Scheme::HTTPS { 443 } else { 80 };
    let (authority, host) = request_authority(parts, default_port)?;
    let path = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let Some(protocol) = protocol else {
        return Ok(Target {
            kind: Kind::Http,
            host,
            ask: Ask::Response,
            authority,
            path,
            scheme,
            network: None,
            protocol: None,
        });
    };
    if protocol.eq_ignore_ascii_case("connect-ip") {
        check_capsules(&parts.headers)?;
        return ip_target(&path, authority, host, scheme);
    }
    if !protocol.eq_ignore_ascii_case("connect-udp") {
        return Ok(Target {
            kind: Kind::Http,
            host,
            ask: Ask::Upgrade(protocol),
            authority,
            path,
            scheme,
            network: None,
            protocol: None,
        });
    }
    check_capsules(&parts.headers)?;
    let (authority, host) = udp_target(&path)?.ok_or_else(|| {
        Error::Malformed("CONNECT-UDP without the path /.well-known/masque/udp/HOST/PORT/".to_owned())
    })?;
    Ok(Target {
        kind: Kind::Udp,
        host,
        ask: Ask::Upgrade(protocol),
        authority,
        path,
        scheme,
        network: None,
        protocol: None,
    })
}

/// Capsules are no content, and nothing may say that they were (RFC 9297, section 3.2).
fn check_capsules(headers: &HeaderMap) -> Result<(), Error> {
    let of_content = [CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING];
    match of_content.iter().find(|name| headers.contains_key(*name)) {
        Some(name) => {
            Err(Error::Malformed(format!("{name} in a request for a tunnel of capsules, which has no content")))
        }
        None => Ok(()),
    }
}

/// The target of a UDP flow, which is in the path (RFC 9298, 2), and its spelling. `None` where the
/// path is another.
fn udp_target(path: &PathAndQuery) -> Result<Option<(Authority, HeaderValue)>, Error> {
    let parsed = connect_udp::parse_path(path.path())
        .map_err(|error| Error::Malformed(format!("CONNECT-UDP target: {error}")))?;
    let Some((host, port)) = parsed else { return Ok(None) };
    let text = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let authority = Authority::parse(&text, None)
        .map_err(|error| Error::Malformed(format!("CONNECT-UDP target {}: {error}", excerpt(&text))))?;
    let host = host_value(&authority, &text);
    Ok(Some((authority, host)))
}

/// The forms of a request target that are no CONNECT's (RFC 9112, 3.2). A bare authority would be
/// taken for the origin of a request whose path nobody named.
fn check_form(parts: &Parts) -> Result<(), Error> {
    let is_carried = |scheme: &http::uri::Scheme| ["http", "https"].contains(&scheme.as_str());
    if let Some(scheme) = parts.uri.scheme().filter(|scheme| !is_carried(scheme)) {
        return Err(Error::Malformed(format!(
            "scheme {} is not carried; ask for http or https",
            excerpt(scheme.as_str())
        )));
    }
    match parts.uri.path_and_query().map(PathAndQuery::as_str) {
        None => {
            Err(Error::Malformed(format!("target {} is neither a path nor a URI", excerpt(&parts.uri.to_string()))))
        }
        Some("*") if parts.method != Method::OPTIONS => {
            Err(Error::Malformed("the target * is for OPTIONS alone".to_owned()))
        }
        Some(_) => Ok(()),
    }
}

fn connect_target(parts: &Parts) -> Result<Target, Error> {
    if parts.uri.scheme().is_some() || parts.uri.path_and_query().is_some_and(|path| path != "") {
        return Err(Error::Malformed(format!(
            "CONNECT to {}, which is not HOST:PORT",
            excerpt(&parts.uri.to_string())
        )));
    }
    let text = parts.uri.authority().map(http::uri::Authority::as_str).unwrap_or_default();
    let authority = Authority::parse(text, None)
        .map_err(|error| Error::Malformed(format!("CONNECT target {}: {error}", excerpt(text))))?;
    if authority.explicit_port().is_none() {
        return Err(Error::Malformed(format!("CONNECT target {} has no port", excerpt(text))));
    }
    Ok(Target {
        kind: Kind::Tcp,
        host: host_value(&authority, text),
        ask: Ask::Connect,
        authority,
        path: PathAndQuery::from_static("/"),
        scheme: http::uri::Scheme::HTTP,
        network: None,
        protocol: None,
    })
}

/// The target of CONNECT-IP, which is in the path (RFC 9484, section 3). Where it is everything, the request's
/// authority stands for it.
fn ip_target(
    path: &PathAndQuery,
    authority: Authority,
    host: HeaderValue,
    scheme: http::uri::Scheme,
) -> Result<Target, Error> {
    let malformed = |what: &dyn std::fmt::Display| Error::Malformed(format!("CONNECT-IP target: {what}"));
    let scope = connect_ip::parse_path(path.path())
        .map_err(|error| malformed(&error))?
        .ok_or_else(|| malformed(&"the path is not /.well-known/masque/ip/TARGET/PROTOCOL/"))?;
    let network = match &scope.target {
        connect_ip::Target::Prefix(prefix) => IpNet::new(prefix.address(), prefix.length()).ok(),
        connect_ip::Target::Any | connect_ip::Target::Name(_) => None,
    };
    let authority = match &scope.target {
        connect_ip::Target::Any => authority,
        connect_ip::Target::Prefix(prefix) => Authority::of_address(prefix.address()),
        connect_ip::Target::Name(name) => Authority::parse(name, None).map_err(|error| malformed(&error))?,
    };
    let host = if scope.target == connect_ip::Target::Any { host } else { host_value(&authority, "") };
    Ok(Target {
        kind: Kind::Ip,
        host,
        ask: Ask::Upgrade(Arc::from("connect-ip")),
        authority,
        path: path.clone(),
        scheme,
        network,
        protocol: scope.protocol,
    })
}

/// The scheme that the client named: h2's `:scheme`, or an absolute-form URI. Else the connection's.
fn scheme(parts: &Parts, secure: bool) -> http::uri::Scheme {
    match parts.uri.scheme() {
        Some(scheme) => scheme.clone(),
        None if secure => http::uri::Scheme::HTTPS,
        None => http::uri::Scheme::HTTP,
    }
}

/// Whom the request is for (RFC 9112, 3.2; RFC 9113, 8.3.1): the URI's authority, else `Host`.
fn request_authority(parts: &Parts, default_port: u16) -> Result<(Authority, HeaderValue), Error> {
    let mut hosts = parts.headers.get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(Error::Malformed("more than one Host".to_owned()));
    }
    let host = match host.map(HeaderValue::to_str) {
        Some(Ok(host)) => Some(host),
        Some(Err(_)) => return Err(Error::Malformed("Host is not text".to_owned())),
        None => None,
    };
    let text = match (parts.uri.authority(), host) {
        (Some(authority), None) => authority.as_str(),
        (Some(authority), Some(host)) => {
            // In h1 the absolute form overrides Host; in h2 two different authorities are a smuggler's.
            if parts.version >= Version::HTTP_2 && !authority.as_str().eq_ignore_ascii_case(host) {
                return Err(Error::Malformed(":authority and Host differ".to_owned()));
            }
            authority.as_str()
        }
        (None, Some(host)) => host,
        (None, None) => return Err(Error::Malformed("no Host".to_owned())),
    };
    let authority = Authority::parse(text, Some(default_port))
        .map_err(|error| Error::Malformed(format!("authority {}: {error}", excerpt(text))))?;
    let host = host_value(&authority, text);
    Ok((authority, host))
}

/// As much of a client's text as a message or a log may show: short, and without what stands before
/// an `@`, where passwords are.
fn excerpt(text: &str) -> String {
    let shown: String = text.rsplit('@').next().unwrap_or_default().chars().take(100).collect();
    format!("{shown:?}")
}

/// hyper counts by itself, h2 only bytes. The crumbs of a cookie are one line: h2 clients split it as
/// they like.
fn count_lines(worker: &Worker, headers: &HeaderMap) -> Result<(), Error> {
    let most = worker.generation().snapshot.limits.header_count;
    if headers.len() <= most {
        return Ok(());
    }
    let crumbs = headers.get_all(COOKIE).iter().count();
    if headers.len() - crumbs.saturating_sub(1) <= most {
        return Ok(());
    }
    worker.shared.metrics.limit("headers");
    Err(Error::TooManyLines(most))
}

/// Chunks are the only coding that is understood (RFC 9112, 6.1). hyper also takes another one under
/// them, and takes the codings off: whoever comes next could not read the body.
fn check_coding(headers: &HeaderMap) -> Result<(), Error> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        (Some(coding), _) => Err(Error::Coding(excerpt(&String::from_utf8_lossy(coding.as_bytes())))),
    }
}

/// RFC 9110, 5.6.2.
fn is_token(text: &str) -> bool {
    let is_tchar = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_tchar)
}

/// The protocol that h1 `Upgrade` or h2 `:protocol` names. `h2c` is not one: it is ignored, as
/// RFC 9113 deprecated it, and so is an upgrade with a body before it, or by another method than
/// GET, which would not reach the origin as what it is. CONNECT-UDP and CONNECT-IP are never ignored.
fn upgrade_protocol(parts: &Parts) -> Result<Option<Arc<str>>, Error> {
    if let Some(protocol) = parts.extensions.get::<h2::ext::Protocol>() {
        let protocol = protocol.as_str();
        if protocol.eq_ignore_ascii_case("h2c") || !is_token(protocol) {
            return Err(Error::Malformed(format!("no tunnel is opened to the protocol {}", excerpt(protocol))));
        }
        return Ok(Some(Arc::from(protocol)));
    }
    if parts.version != Version::HTTP_11 || !connection_says_upgrade(&parts.headers) {
        return Ok(None);
    }
    let Some(value) = parts.headers.get(UPGRADE) else { return Ok(None) };
    let value = value.to_str().map_err(|_| Error::Malformed("Upgrade is not text".to_owned()))?.trim();
    let is_plain_get = parts.method == Method::GET
        && !parts.headers.contains_key(TRANSFER_ENCODING)
        && parts.headers.get(CONTENT_LENGTH).is_none_or(|length| length == "0");
    if value.eq_ignore_ascii_case("connect-udp") || value.eq_ignore_ascii_case("connect-ip") {
        if !is_plain_get {
            return Err(Error::Malformed(
                "CONNECT-UDP and CONNECT-IP by Upgrade are a GET without a body (RFC 9298, 3.2; RFC 9484, 4.4)"
                    .to_owned(),
            ));
        }
    } else if !is_plain_get || value.eq_ignore_ascii_case("h2c") || value.contains(',') {
        return Ok(None);
    }
    Ok(Some(Arc::from(value.to_ascii_lowercase())))
}

fn connection_says_upgrade(headers: &HeaderMap) -> bool {
    headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|token| token.trim().eq_ignore_ascii_case("upgrade"))
}

/// Facts of a request whose target could not be read, for its record.
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
        protocol: None,
    }
}

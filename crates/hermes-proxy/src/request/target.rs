//! The target of a request: the authority, the kind of flow, and the validity of both.
//!
//! In: a request head from hyper, h2 or HTTP/3. Out: its target, or the error in it. Never: the identity of the client.

use std::sync::Arc;

use hermes_model::authority::Authority;
use hermes_model::facts::Kind;
use hermes_wire::{connect_ip, connect_udp};
use http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, TRANSFER_ENCODING, UPGRADE};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Version};
use ipnet::IpNet;

use super::{UpgradeKind, host_value, named, udp_path};
use crate::worker::Worker;
use hermes_transport::error::Error;

/// The target of a request head.
pub(super) struct Target {
    pub(super) kind: Kind,
    pub(super) host: HeaderValue,
    pub(super) upgrade: UpgradeKind,
    pub(super) authority: Authority,
    pub(super) path: PathAndQuery,
    pub(super) scheme: http::uri::Scheme,
    pub(super) network: Option<IpNet>,
    pub(super) protocol: Option<u8>,
}

impl Target {
    /// Replaces a virtual address, which the program received from DNS, by its name.
    pub(super) fn named(mut self, worker: &Worker) -> Self {
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

pub(super) fn target(parts: &Parts, secure: bool) -> Result<Target, Error> {
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
    let path = resolved(path(parts.uri.path_and_query()))?;
    let (kind, upgrade) = (Kind::Http, UpgradeKind::None);
    let exchange = Target { kind, host, upgrade, authority, path, scheme, network: None, protocol: None };
    let Some(protocol) = protocol else { return Ok(exchange) };
    let (is_udp, is_ip) = (protocol.eq_ignore_ascii_case("connect-udp"), protocol.eq_ignore_ascii_case("connect-ip"));
    if is_udp || is_ip {
        check_capsules(&parts.headers)?;
    }
    let upgrade = Target { upgrade: UpgradeKind::Upgrade(protocol), ..exchange };
    if is_ip {
        return ip_target(upgrade);
    }
    if !is_udp {
        return Ok(upgrade);
    }
    let (authority, host) = udp_target(&upgrade.path)?.ok_or_else(|| {
        Error::Malformed("CONNECT-UDP without the path /.well-known/masque/udp/HOST/PORT/".to_owned())
    })?;
    Ok(Target { kind: Kind::Udp, host, authority, ..upgrade })
}

/// Removes `/./`, which apt sends for flat repositories: it has no meaning, and the decision must apply to the path
/// that is forwarded.
fn resolved(path: PathAndQuery) -> Result<PathAndQuery, Error> {
    let Some(bare) = hermes_model::without_single_dots(path.path()) else { return Ok(path) };
    let query = path.query().map_or_else(String::new, |query| format!("?{query}"));
    PathAndQuery::try_from(format!("{bare}{query}")).map_err(|error| Error::Malformed(format!("the path: {error}")))
}

/// Rejects content headers: capsules are not content (RFC 9297, section 3.2).
fn check_capsules(headers: &HeaderMap) -> Result<(), Error> {
    let of_content = [CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING];
    match of_content.iter().find(|name| headers.contains_key(*name)) {
        Some(name) => {
            Err(Error::Malformed(format!("{name} in a request for a tunnel of capsules, which has no content")))
        }
        None => Ok(()),
    }
}

/// The target of a UDP flow, which is in the path (RFC 9298, 2), with its spelling. `None` for any other path.
pub(super) fn udp_target(path: &PathAndQuery) -> Result<Option<(Authority, HeaderValue)>, Error> {
    let parsed = connect_udp::parse_path(path.path())
        .map_err(|error| Error::Malformed(format!("CONNECT-UDP target: {error}")))?;
    let Some((host, port)) = parsed else { return Ok(None) };
    let text = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let authority = Authority::parse(&text, None)
        .map_err(|error| Error::Malformed(format!("CONNECT-UDP target {}: {error}", excerpt(&text))))?;
    let host = host_value(&authority, &text);
    Ok(Some((authority, host)))
}

/// Checks the form of a request target other than CONNECT's (RFC 9112, 3.2). A bare authority is rejected, since it
/// names no path.
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
        upgrade: UpgradeKind::Connect,
        authority,
        path: PathAndQuery::from_static("/"),
        scheme: http::uri::Scheme::HTTP,
        network: None,
        protocol: None,
    })
}

/// The target of CONNECT-IP, which is in the path (RFC 9484, section 3). If the path selects all targets, the request's
/// authority is used.
fn ip_target(asked: Target) -> Result<Target, Error> {
    let malformed = |what: &dyn std::fmt::Display| Error::Malformed(format!("CONNECT-IP target: {what}"));
    let scope = connect_ip::parse_path(asked.path.path())
        .map_err(|error| malformed(&error))?
        .ok_or_else(|| malformed(&"the path is not /.well-known/masque/ip/TARGET/PROTOCOL/"))?;
    let (upgrade, protocol) = (UpgradeKind::Upgrade(Arc::from("connect-ip")), scope.protocol);
    let network = match &scope.target {
        connect_ip::Target::Prefix(prefix) => IpNet::new(prefix.address(), prefix.length()).ok(),
        connect_ip::Target::Any | connect_ip::Target::Name(_) => None,
    };
    let authority = match &scope.target {
        connect_ip::Target::Any => return Ok(Target { kind: Kind::Ip, upgrade, protocol, ..asked }),
        connect_ip::Target::Prefix(prefix) => Authority::of_address(prefix.address()),
        connect_ip::Target::Name(name) => Authority::parse(name, None).map_err(|error| malformed(&error))?,
    };
    let host = host_value(&authority, "");
    Ok(Target { kind: Kind::Ip, host, upgrade, authority, network, protocol, ..asked })
}

/// The path and query of the request. A target without a path (`http://HOST#x`, `?q`) means `/` (RFC 9110, section
/// 4.2.3) and is forwarded so: the crate `http` would write nothing, or only a query.
fn path(asked: Option<&PathAndQuery>) -> PathAndQuery {
    match asked.map(PathAndQuery::as_str) {
        // The crate returns `/` for an empty path, too.
        None | Some("/") => PathAndQuery::from_static("/"),
        Some(query) if query.starts_with('?') => {
            PathAndQuery::try_from(format!("/{query}")).unwrap_or(PathAndQuery::from_static("/"))
        }
        Some(_) => asked.cloned().unwrap_or(PathAndQuery::from_static("/")),
    }
}

/// The scheme from `:scheme` or an absolute-form URI, otherwise that of the connection.
fn scheme(parts: &Parts, secure: bool) -> http::uri::Scheme {
    match parts.uri.scheme() {
        Some(scheme) => scheme.clone(),
        None if secure => http::uri::Scheme::HTTPS,
        None => http::uri::Scheme::HTTP,
    }
}

/// The authority of the request (RFC 9112, 3.2; RFC 9113, 8.3.1): the URI's, otherwise `Host`.
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
            // In HTTP/1.1 the absolute form overrides Host. In HTTP/2, two different authorities indicate request
            // smuggling.
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

/// A short excerpt of a client's text for a message or log, without the part before an `@`, which may hold a password.
pub(super) fn excerpt(text: &str) -> String {
    let shown: String = text.rsplit('@').next().unwrap_or_default().chars().take(100).collect();
    format!("{shown:?}")
}

/// Limits the number of header lines. hyper limits them itself; h2 limits only bytes. Split cookies are joined already.
pub(super) fn count_lines(worker: &Worker, headers: &HeaderMap) -> Result<(), Error> {
    let most = worker.generation().snapshot.limits.header_count;
    if headers.len() <= most {
        return Ok(());
    }
    worker.shared.metrics.limit("headers");
    Err(Error::TooManyLines(most))
}

/// Accepts only the chunked coding (RFC 9112, 6.1). hyper also accepts other codings below it and removes the header,
/// so the next hop could not decode the body.
fn check_coding(headers: &HeaderMap) -> Result<(), Error> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        (Some(coding), _) => Err(Error::Coding(excerpt(&String::from_utf8_lossy(coding.as_bytes())))),
    }
}

/// True for a token (RFC 9110, 5.6.2).
fn is_token(text: &str) -> bool {
    let is_tchar = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_tchar)
}

/// True for a protocol name with an optional version: `websocket`, `SPDY/3.1` (RFC 9110, section 7.8).
fn is_protocol(text: &str) -> bool {
    let (name, version) = text.split_once('/').map_or((text, None), |(name, version)| (name, Some(version)));
    is_token(name) && version.is_none_or(is_token)
}

/// The protocol in HTTP/1.1 `Upgrade` or in `:protocol`, for any method (RFC 9110, 7.8). `h2c` is ignored, since RFC
/// 9113 deprecated it. CONNECT-UDP and CONNECT-IP are never ignored.
fn upgrade_protocol(parts: &Parts) -> Result<Option<Arc<str>>, Error> {
    if let Some(protocol) = parts.extensions.get::<h2::ext::Protocol>() {
        let protocol = protocol.as_str();
        if protocol.eq_ignore_ascii_case("h2c") || !is_protocol(protocol) {
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
    } else if parts.method == Method::CONNECT || value.eq_ignore_ascii_case("h2c") || value.contains(',') {
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

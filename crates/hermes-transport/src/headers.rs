//! Header processing of a proxy: hop-by-hop fields, `Via`, tracing, and the overlay's own fields.
//!
//! In: the fields of a message to forward. Out: the fields for the next hop. Never: a route's `rewrite`, which
//! `hermes-model` applies.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use bytes::Bytes;
use hermes_model::field_collision::{begins_alike, is_alike, remove_where};
pub use hermes_model::trust::{is_claim, is_overlay};
use hermes_wire::traceparent::Traceparent;
use http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, COOKIE,
    EXPECT, HOST, HeaderName, HeaderValue, LOCATION, MAX_FORWARDS, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, SET_COOKIE,
    TE, TRAILER, TRANSFER_ENCODING, UPGRADE, VIA, WWW_AUTHENTICATE,
};
use http::uri::Scheme;
use http::{HeaderMap, Version};
use smallvec::SmallVec;

/// The destination prefix of an IP session.
pub const NETWORK: HeaderName = HeaderName::from_static("hermes-network");
/// The maximum size in bytes of an IP packet on the hops between the client and the sender of the request.
pub const MTU: HeaderName = HeaderName::from_static("hermes-mtu");
/// The method of a request with `Upgrade` that a node forwards as extended CONNECT. Absent if the method is GET.
pub const METHOD: HeaderName = HeaderName::from_static("hermes-method");
/// A field of a node's error response: the node has forwarded nothing of the request, so the previous node may try
/// another path.
pub const UNSENT: HeaderName = HeaderName::from_static("hermes-unsent");
/// A key of the client (draft-ietf-httpapi-idempotency-key-header). The origin processes requests with the same key
/// only once.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub const CAPSULE_PROTOCOL: HeaderName = HeaderName::from_static("capsule-protocol");
pub const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
pub const FORWARDED: HeaderName = HeaderName::from_static("forwarded");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");
/// The address and port of the client of an intercepted connection, with which the last node may connect.
pub const SOURCE: HeaderName = HeaderName::from_static("hermes-source");
/// The prefix of the fields `X-Forwarded-*`, in which proxies describe the client's request.
const X_FORWARDED: &str = "x-forwarded-";
/// The field of a request that arrived as TLS early data (RFC 8470, section 5.1).
pub const EARLY_DATA: HeaderName = HeaderName::from_static("early-data");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// hyper's default limit of header lines. If the limit is set explicitly, hyper allocates memory for each request.
pub const HYPER_HEADERS: usize = 100;

/// The hop-by-hop fields except `Proxy-Authorization`. The forwarding code decides whether that field is meant for the
/// next proxy (RFC 9110, section 11.7.2).
const HOP_BY_HOP: [HeaderName; 7] =
    [CONNECTION, KEEP_ALIVE, PROXY_CONNECTION, HTTP2_SETTINGS, TRANSFER_ENCODING, UPGRADE, TE];

/// True if this node or an earlier one received the request as TLS early data, so that it may be a replay.
pub fn is_early(headers: &HeaderMap) -> bool {
    headers.get_all(EARLY_DATA).iter().any(|value| value == "1")
}

/// Returns the value of the header `hermes-mtu` in bytes, or `None` if it is absent or invalid.
pub fn mtu(headers: &HeaderMap) -> Option<usize> {
    headers.get(MTU)?.to_str().ok()?.parse().ok()
}

/// Lowers the header `hermes-mtu` to `own`, the longest packet of this hop in bytes. Adds the header if it is absent.
pub fn lower_mtu(headers: &mut HeaderMap, own: usize) {
    let mtu = mtu(headers).map_or(own, |said| said.min(own));
    headers.insert(MTU, HeaderValue::from(mtu));
}

/// Joins the `Cookie` lines into which clients of HTTP/2 and HTTP/3 may split a cookie (RFC 9113, section 8.2.3; RFC
/// 9114, section 4.2.1). A line of one byte would occupy a hundred bytes of memory.
pub fn join_cookies(fields: &mut HeaderMap) {
    if fields.len() == fields.keys_len() {
        return;
    }
    let mut crumbs = fields.get_all(COOKIE).iter();
    let (Some(first), Some(second)) = (crumbs.next(), crumbs.next()) else { return };
    let mut joined = first.as_bytes().to_vec();
    for crumb in std::iter::once(second).chain(crumbs) {
        joined.extend_from_slice(b"; ");
        joined.extend_from_slice(crumb.as_bytes());
    }
    let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(joined)) else { return };
    if fields.len() - fields.keys_len() <= FEW_LINES {
        fields.insert(COOKIE, value);
        return;
    }
    // Removing lines from the map would not reduce its capacity.
    let mut fresh = HeaderMap::with_capacity(fields.keys_len());
    let others = fields.iter().filter(|(name, _)| *name != COOKIE);
    others.for_each(|(name, value)| drop(fresh.try_append(name.clone(), value.clone())));
    fresh.insert(COOKIE, value);
    *fields = fresh;
}

/// The number of repeated lines up to which [`join_cookies`] changes the map in place instead of rebuilding it.
const FEW_LINES: usize = 16;

/// Removes hop-by-hop fields (RFC 9110, section 7.6.1): the standard ones and those that `Connection` names. `TE:
/// trailers` is retained, because gRPC needs it and this node forwards trailers.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // A single pass over the names costs less than seven lookups of fields that are mostly absent.
    let mut ends = SmallVec::<[HeaderName; 8]>::new();
    ends.extend(headers.keys().filter(|name| HOP_BY_HOP.contains(name)).cloned());
    if ends.is_empty() {
        return;
    }
    if ends.contains(&TRANSFER_ENCODING) {
        // `Transfer-Encoding` overrides `Content-Length`, which must not be forwarded (RFC 9112, section 6.3).
        ends.push(CONTENT_LENGTH);
    }
    let tokens = |headers: &HeaderMap, field: &HeaderName, wanted: &mut dyn FnMut(&str)| {
        let values = headers.get_all(field).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).map(str::trim).for_each(wanted);
    };
    tokens(headers, &CONNECTION, &mut |token| {
        let name = HeaderName::from_bytes(token.as_bytes()).ok();
        // A client must not remove fields that framing, routing, loop detection or trust depend on.
        let is_ours = |name: &HeaderName| [HOST, CONTENT_LENGTH, VIA].contains(name) || is_overlay(name);
        ends.extend(name.filter(|name| !is_ours(name)));
    });
    let mut trailers = false;
    tokens(headers, &TE, &mut |token| {
        trailers |= token.split(';').next().is_some_and(|coding| coding.trim().eq_ignore_ascii_case("trailers"));
    });
    for name in ends {
        headers.remove(name);
    }
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

/// True if the request contains `TE: trailers`: its sender accepts trailers (RFC 9110, section 10.1.4).
pub fn takes_trailers(headers: &HeaderMap) -> bool {
    let is_trailers = |coding: &str| {
        let name = coding.split(';').next().unwrap_or_default();
        name.trim().eq_ignore_ascii_case("trailers")
    };
    let values = headers.get_all(TE).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(is_trailers)
}

/// Fields that must not be trailers, because framing, routing, trust or the processing of a body depend on them (RFC
/// 9110, section 6.5.1).
const NEVER_TRAILERS: [HeaderName; 27] = [
    AUTHORIZATION,
    CACHE_CONTROL,
    CONNECTION,
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    CONTENT_RANGE,
    CONTENT_TYPE,
    COOKIE,
    EARLY_DATA,
    EXPECT,
    FORWARDED,
    HOST,
    HTTP2_SETTINGS,
    KEEP_ALIVE,
    LOCATION,
    MAX_FORWARDS,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    PROXY_CONNECTION,
    REAL_IP,
    SET_COOKIE,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    VIA,
    WWW_AUTHENTICATE,
];

/// Removes trailer fields that must not be forwarded, because a recipient that merges trailers into the head would
/// trust them. This includes names that some origins treat as equal, such as `x_forwarded_for`.
pub fn strip_trailers(trailers: &mut HeaderMap) {
    strip_hop_by_hop(trailers);
    remove_where(trailers, |name| {
        is_overlay(name)
            || begins_alike(name.as_str(), X_FORWARDED)
            || NEVER_TRAILERS.iter().any(|never| is_alike(name.as_str(), never.as_str()))
    });
}

/// Adds a `Trailer` field to the head of a gRPC response (RFC 9110, section 6.6.2). gRPC servers, which use HTTP/2, do
/// not send this field, and hyper's HTTP/1.1 server sends only trailers that it names.
pub fn announce_trailers(headers: &mut HeaderMap) {
    let is_grpc = |value: &HeaderValue| value.as_bytes().starts_with(b"application/grpc");
    if headers.get(CONTENT_TYPE).is_some_and(is_grpc) && !headers.contains_key(TRAILER) {
        headers.insert(TRAILER, HeaderValue::from_static("grpc-status, grpc-message, grpc-status-details-bin"));
    }
}

/// True if a field shows that a proxy forwarded the request.
pub fn is_forwarded(headers: &HeaderMap) -> bool {
    [VIA, FORWARDED, FORWARDED_FOR].iter().any(|name| headers.contains_key(name))
}

/// True if a request or response begins or continues an authentication of the connection instead of the request: NTLM,
/// or Negotiate, which may contain NTLM. Fields for origins and for proxies are examined.
pub fn authenticates_connection(headers: &HeaderMap) -> bool {
    // A single pass over the fields costs less than four lookups.
    let is_field =
        |name: &HeaderName| [AUTHORIZATION, WWW_AUTHENTICATE, PROXY_AUTHORIZATION, PROXY_AUTHENTICATE].contains(name);
    let is_scheme = |text: &[u8]| {
        let scheme = text.trim_ascii().split(|byte| *byte == b' ').next().unwrap_or_default();
        scheme.eq_ignore_ascii_case(b"ntlm") || scheme.eq_ignore_ascii_case(b"negotiate")
    };
    // A line may contain several challenges. A comma within a quoted string may split a challenge: the second piece
    // could only cause a false positive, which is harmless.
    let names_one = |value: &HeaderValue| value.as_bytes().split(|byte| *byte == b',').any(is_scheme);
    headers.iter().any(|(name, value)| is_field(name) && names_one(value))
}

/// Removes the fields `hermes-*`, so that an origin receives neither the user nor the path of the request. Those of relays
/// stay.
pub fn strip_overlay(headers: &mut HeaderMap) {
    remove_where(headers, is_claim);
}

/// The precomputed `Via` entries of this node, one for each HTTP version.
#[derive(Clone, Debug)]
pub struct Via {
    h1: HeaderValue,
    h2: HeaderValue,
    h3: HeaderValue,
}

impl Via {
    /// Creates the entries. `node` is the node's name, which `check` has verified to be a token.
    pub fn new(node: &str) -> Self {
        let member = |version: &str| {
            HeaderValue::from_str(&format!("{version} {node}")).unwrap_or(HeaderValue::from_static("1.1 hermes"))
        };
        Self { h1: member("1.1"), h2: member("2"), h3: member("3") }
    }

    /// Appends this node's `Via` entry. `version` is the HTTP version of the received message.
    pub fn append(&self, headers: &mut HeaderMap, version: Version) {
        let member = match version {
            Version::HTTP_3 => &self.h3,
            Version::HTTP_2 => &self.h2,
            _ => &self.h1,
        };
        headers.append(VIA, member.clone());
    }
}

/// Returns the trace context of this hop: a child of the request's valid `traceparent`, otherwise a new trace.
pub fn trace(headers: &HeaderMap, random: (u128, u64)) -> Traceparent {
    match headers.get(TRACEPARENT).map(|value| Traceparent::parse(value.as_bytes())) {
        Some(Ok(parent)) => parent.child(random.1),
        _ => Traceparent::root(random.0, random.1, true),
    }
}

/// Sets `traceparent` in the fields for the next hop.
pub fn set_trace(headers: &mut HeaderMap, trace: Traceparent) {
    if let Ok(value) = HeaderValue::from_bytes(&trace.render()) {
        headers.insert(TRACEPARENT, value);
    }
}

/// True if the previous node reported, by `X-Forwarded-Proto: http`, that its client connected without TLS.
pub fn is_plain_before(headers: &HeaderMap) -> bool {
    headers.get(FORWARDED_PROTO).is_some_and(|protocol| protocol == "http")
}

/// Replaces a client's values of `X-Forwarded-*` and `X-Real-IP`. An application may trust any of these fields, so they
/// must contain only an address, host and scheme that this node has observed. `scheme` is the scheme of the request.
/// `is_secure` is true if the client used TLS. Returns a hash of the replaced values, or 0 if there were none.
pub fn replace_claims(
    headers: &mut HeaderMap,
    source: SocketAddr,
    host: &HeaderValue,
    scheme: &Scheme,
    is_secure: bool,
) -> u64 {
    let mut hash = 0;
    let is_claim = |name: &HeaderName| {
        let name = name.as_str();
        begins_alike(name, X_FORWARDED)
            || (name.len() == REAL_IP.as_str().len() && begins_alike(name, REAL_IP.as_str()))
    };
    if headers.keys().any(is_claim) {
        hash = hash_of(headers.iter().filter(|(name, _)| is_claim(name)).map(|(_, value)| value.as_bytes()));
        let claimed = [REAL_IP, FORWARDED_HOST].map(|name| headers.contains_key(&name).then_some(name));
        remove_where(headers, is_claim);
        for (name, value) in claimed.into_iter().zip([&address_value(source.ip()), host]) {
            name.map(|name| headers.insert(name, value.clone()));
        }
    }
    if is_secure != (*scheme == Scheme::HTTPS) {
        headers.insert(FORWARDED_PROTO, protocol(is_secure));
    }
    hash
}

fn hash_of<'a>(values: impl Iterator<Item = &'a [u8]>) -> u64 {
    let mut hasher = DefaultHasher::new();
    values.for_each(|value| value.hash(&mut hasher));
    hasher.finish()
}

/// Returns a hash of the client that a request names. It covers the user and the addresses that proxies have recorded.
pub fn named_client(user: Option<&str>, headers: &HeaderMap) -> u64 {
    let fields = [FORWARDED, FORWARDED_FOR, REAL_IP];
    let lines = fields.iter().flat_map(|name| headers.get_all(name)).map(HeaderValue::as_bytes);
    hash_of(user.map(str::as_bytes).into_iter().chain(lines))
}

/// Sets `Forwarded` (RFC 7239) to the address of the client. An existing value is retained if a trusted proxy sent the
/// request (`is_from_proxy`), and replaced otherwise.
pub fn set_forwarded(headers: &mut HeaderMap, source: IpAddr, is_from_proxy: bool) {
    if is_from_proxy && headers.contains_key(FORWARDED) {
        return;
    }
    let value = match source.to_canonical() {
        IpAddr::V4(v4) => {
            let mut text = *b"for=255.255.255.255";
            let mut rest = &mut text[4..];
            write_ipv4(&mut rest, v4);
            let unused = rest.len();
            HeaderValue::from_bytes(&text[..text.len() - unused])
        }
        IpAddr::V6(v6) => HeaderValue::try_from(format!("for=\"[{v6}]\"")),
    };
    headers.insert(FORWARDED, value.unwrap_or(HeaderValue::from_static("for=unknown")));
}

/// Appends an IPv4 address. Each request causes several calls, and the standard formatter takes five times as long.
pub fn write_ipv4(out: &mut impl Write, address: Ipv4Addr) {
    let mut digits = itoa::Buffer::new();
    for (index, octet) in address.octets().into_iter().enumerate() {
        // Writing into memory cannot fail.
        let _ = if index > 0 { out.write_all(b".") } else { Ok(()) };
        let _ = out.write_all(digits.format(octet).as_bytes());
    }
}

/// Adds `X-Forwarded-*` fields, which describe the client's request to an application. Existing fields are retained,
/// because they were checked when the request arrived. `host` is `None` if `Host` has the same value.
pub fn describe_request(
    headers: &mut HeaderMap,
    client: impl FnOnce() -> IpAddr,
    scheme: &Scheme,
    host: Option<&HeaderValue>,
) {
    if !headers.contains_key(FORWARDED_FOR) {
        let value = bare_forwarded(headers).unwrap_or_else(|| address_value(client()));
        headers.insert(FORWARDED_FOR, value);
    }
    headers.entry(FORWARDED_PROTO).or_insert_with(|| protocol(*scheme == Scheme::HTTPS));
    if let Some(host) = host {
        headers.entry(FORWARDED_HOST).or_insert_with(|| host.clone());
    }
}

/// Returns the address of a `Forwarded` value that consists of one IPv4 address only, as nodes write it. Returns `None`
/// for any other value. Copying the text avoids parsing and formatting the address.
fn bare_forwarded(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut values = headers.get_all(FORWARDED).iter();
    let address = values.next()?.as_bytes().strip_prefix(b"for=")?;
    let is_bare = values.next().is_none() && address.iter().all(|byte| byte.is_ascii_digit() || *byte == b'.');
    is_bare.then(|| HeaderValue::from_bytes(address).ok()).flatten()
}

fn protocol(is_secure: bool) -> HeaderValue {
    HeaderValue::from_static(if is_secure { "https" } else { "http" })
}

fn address_value(address: IpAddr) -> HeaderValue {
    HeaderValue::try_from(address.to_canonical().to_string()).unwrap_or(HeaderValue::from_static("unknown"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in fields {
            map.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn named_and_known_fields_end_here() {
        let mut headers = map(&[
            ("connection", "close, X-Secret"),
            ("x-secret", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "gzip, trailers"),
            ("transfer-encoding", "chunked"),
            ("accept", "*/*"),
        ]);
        strip_hop_by_hop(&mut headers);
        let names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["accept", "te"]);
        assert_eq!(headers["te"], "trailers");
    }

    #[test]
    fn a_client_cannot_take_framing_routing_or_trust_away() {
        let ours = ["host", "content-length", "via", "hermes-user"];
        let mut headers = map(&[("connection", "host, content-length, via, Hermes-User, x-mine"), ("x-mine", "1")]);
        ours.iter().for_each(|name| drop(headers.insert(*name, HeaderValue::from_static("1"))));
        strip_hop_by_hop(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<std::collections::BTreeSet<_>>(), ours.into());
    }

    #[test]
    fn a_length_beside_a_coding_is_not_passed_on() {
        let mut headers = map(&[("transfer-encoding", "chunked"), ("content-length", "50"), ("accept", "*/*")]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["accept"]);
    }

    #[test]
    fn schemes_that_authenticate_connections_are_known() {
        for (name, value, wanted) in [
            ("authorization", "NTLM TlRMTVNTUAAB", true),
            ("authorization", "negotiate YII=", true),
            ("authorization", "Bearer NTLM", false),
            ("www-authenticate", "Basic realm=\"a\", Negotiate", true),
            ("www-authenticate", "Basic realm=\"ntlm\"", false),
            ("proxy-authenticate", "NTLM", true),
            ("proxy-authorization", "Negotiate YII=", true),
            ("x-authorization", "NTLM", false),
        ] {
            assert_eq!(authenticates_connection(&map(&[(name, value)])), wanted, "{name}: {value}");
        }
        let several = map(&[("www-authenticate", "Basic realm=\"a\""), ("www-authenticate", "NTLM")]);
        assert!(authenticates_connection(&several));
    }

    #[test]
    fn overlay_fields_are_stripped_and_others_stay() {
        let mut headers = map(&[("hermes-user", "alice"), ("hermes-anything", "x"), ("hermeneutics", "y")]);
        strip_overlay(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["hermeneutics"]);
    }

    #[test]
    fn the_claims_of_a_client_are_replaced() {
        let host = HeaderValue::from_static("WEB");
        let source: SocketAddr = "[2001:db8::1]:5".parse().unwrap();
        let mut headers = map(&[("forwarded", "for=1.2.3.4"), ("x_forwarded_for", "1"), ("x-forwarded-host", "evil")]);
        replace_claims(&mut headers, source, &host, &Scheme::HTTPS, false);
        set_forwarded(&mut headers, source.ip(), false);
        describe_request(&mut headers, || source.ip(), &Scheme::HTTPS, None);
        let names = ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"];
        assert_eq!(headers.keys_len(), names.len(), "{headers:?}");
        assert_eq!(
            names.map(|name| headers[name].to_str().unwrap()),
            ["for=\"[2001:db8::1]\"", "2001:db8::1", "WEB", "http"],
            "the scheme of a connection in plaintext is http, whatever its client says"
        );
    }
}

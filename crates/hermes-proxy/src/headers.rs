//! What proxies do to headers: hop-by-hop fields, `Via`, tracing, the overlay's own fields.
//!
//! In: the fields of a message that is to be forwarded. Out: the fields that the next hop gets.
//! Never: what a route's `rewrite` says; that is the model's.

use std::net::SocketAddr;

use hermes_wire::traceparent::Traceparent;
use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, HOST, HeaderName, HeaderValue, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION,
    TE, TRAILER, TRANSFER_ENCODING, UPGRADE, VIA, WWW_AUTHENTICATE,
};
use http::{HeaderMap, Version};
use smallvec::SmallVec;

/// The user that an overlay's request belongs to.
/// The destination prefix of an IP session.
pub(crate) const NETWORK: HeaderName = HeaderName::from_static("hermes-network");
/// The longest IP packet that a tunnel carries, as far as it is open.
pub(crate) const MTU: HeaderName = HeaderName::from_static("hermes-mtu");
/// Of a failure that a node tells the one before it: nothing of the request went on from here. Another way may be taken.
pub(crate) const UNSENT: HeaderName = HeaderName::from_static("hermes-unsent");
/// draft-ietf-httpapi-idempotency-key-header: the origin does once what comes twice with one.
pub(crate) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub(crate) const CAPSULE_PROTOCOL: HeaderName = HeaderName::from_static("capsule-protocol");
pub(crate) const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
pub(crate) const FORWARDED: HeaderName = HeaderName::from_static("forwarded");
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// It came before its client's handshake was over (RFC 8470, section 5.1).
pub(crate) const EARLY_DATA: HeaderName = HeaderName::from_static("early-data");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// All but `Proxy-Authorization`: only who sends a request on knows whether it is for the next one (RFC 9110, 11.7.2).
const HOP_BY_HOP: [HeaderName; 7] =
    [CONNECTION, KEEP_ALIVE, PROXY_CONNECTION, HTTP2_SETTINGS, TRANSFER_ENCODING, UPGRADE, TE];

/// Somebody before us, or we, took it before its client's handshake was over: it may be a replay.
pub(crate) fn is_early(headers: &HeaderMap) -> bool {
    headers.get_all(EARLY_DATA).iter().any(|value| value == "1")
}

/// Prefix of the overlay's own fields.
const OVERLAY: &str = "hermes-";

/// What the hops so far carried of IP packets when they were opened, as their header says.
pub(crate) fn mtu(headers: &HeaderMap) -> Option<usize> {
    headers.get(MTU)?.to_str().ok()?.parse().ok()
}

/// Says what the hops so far carry, where this one carries less.
pub(crate) fn lower_mtu(headers: &mut HeaderMap, own: usize) {
    let mtu = mtu(headers).map_or(own, |said| said.min(own));
    headers.insert(MTU, HeaderValue::from(mtu));
}

/// Removes the fields that end at this hop (RFC 9110, 7.6.1): those that `Connection` names and
/// those known to. `TE: trailers` is kept where it was: gRPC needs it, and it holds for us too,
/// since we carry trailers.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // One look at the names tells which of the rare ones are there at all.
    let mut ends = SmallVec::<[HeaderName; 8]>::new();
    ends.extend(headers.keys().filter(|name| HOP_BY_HOP.contains(name)).cloned());
    if ends.is_empty() {
        return;
    }
    if ends.contains(&TRANSFER_ENCODING) {
        // It overruled the length, which must not be passed on (RFC 9112, 6.3).
        ends.push(CONTENT_LENGTH);
    }
    let tokens = |headers: &HeaderMap, field: &HeaderName, wanted: &mut dyn FnMut(&str)| {
        let values = headers.get_all(field).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).map(str::trim).for_each(wanted);
    };
    tokens(headers, &CONNECTION, &mut |token| {
        let name = HeaderName::from_bytes(token.as_bytes()).ok();
        // Who names these would take from us what framing, routing, loop detection or trust needs.
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

/// Trailer fields that may be passed on: none that framing, routing or trust depend on
/// (RFC 9110, 6.5.1).
pub(crate) fn strip_trailers(trailers: &mut HeaderMap) {
    strip_hop_by_hop(trailers);
    for name in [CONTENT_LENGTH, HOST, TRAILER, AUTHORIZATION, PROXY_AUTHORIZATION] {
        trailers.remove(name);
    }
    strip_overlay(trailers);
}

/// Names the trailers of a gRPC response in its head, as HTTP/1.1 wants it (RFC 9110, 6.6.2): its
/// server, which speaks HTTP/2, did not, and what is not named is not sent.
pub(crate) fn announce_trailers(headers: &mut HeaderMap) {
    let is_grpc = |value: &HeaderValue| value.as_bytes().starts_with(b"application/grpc");
    if headers.get(http::header::CONTENT_TYPE).is_some_and(is_grpc) && !headers.contains_key(TRAILER) {
        headers.insert(TRAILER, HeaderValue::from_static("grpc-status, grpc-message, grpc-status-details-bin"));
    }
}

/// Whether a proxy passed the request on, as far as it says so.
pub(crate) fn is_forwarded(headers: &HeaderMap) -> bool {
    [VIA, FORWARDED, X_FORWARDED_FOR].iter().any(|name| headers.contains_key(name))
}

/// Whether a message begins, or goes on with, an authentication of its connection instead of its request: NTLM, and Negotiate,
/// which may be NTLM inside. Of a request or of a response, to an origin or to a proxy.
pub(crate) fn authenticates_connection(headers: &HeaderMap) -> bool {
    let fields = [AUTHORIZATION, WWW_AUTHENTICATE, PROXY_AUTHORIZATION, PROXY_AUTHENTICATE];
    let is_scheme = |text: &[u8]| {
        let scheme = text.trim_ascii().split(|byte| *byte == b' ').next().unwrap_or_default();
        scheme.eq_ignore_ascii_case(b"ntlm") || scheme.eq_ignore_ascii_case(b"negotiate")
    };
    // One line may have several challenges. A comma within a quoted text may pass for the end of one, which does no harm.
    let names_one = |value: &HeaderValue| value.as_bytes().split(|byte| *byte == b',').any(is_scheme);
    fields.iter().any(|name| headers.get_all(name).iter().any(names_one))
}

/// Removes the overlay's own fields: an origin is not told who asked, nor by which way.
pub(crate) fn strip_overlay(headers: &mut HeaderMap) {
    if headers.keys().any(is_overlay) {
        let names: Vec<HeaderName> = headers.keys().filter(|name| is_overlay(name)).cloned().collect();
        for name in names {
            headers.remove(name);
        }
    }
}

pub(crate) fn is_overlay(name: &HeaderName) -> bool {
    name.as_str().starts_with(OVERLAY)
}

/// The `Via` members that this node adds, made once.
#[derive(Clone, Debug)]
pub(crate) struct Via {
    h1: HeaderValue,
    h2: HeaderValue,
    h3: HeaderValue,
}

impl Via {
    /// `node` is the pseudonym; `check` made sure that it is a token.
    pub(crate) fn new(node: &str) -> Self {
        let member = |version: &str| {
            HeaderValue::from_str(&format!("{version} {node}")).unwrap_or(HeaderValue::from_static("1.1 hermes"))
        };
        Self { h1: member("1.1"), h2: member("2"), h3: member("3") }
    }

    /// Adds this node: `version` is the version that the message was received in.
    pub(crate) fn append(&self, headers: &mut HeaderMap, version: Version) {
        let member = match version {
            Version::HTTP_3 => &self.h3,
            Version::HTTP_2 => &self.h2,
            _ => &self.h1,
        };
        headers.append(VIA, member.clone());
    }
}

/// Continues the trace of the request, or begins one. Returns it as this hop's span.
pub(crate) fn trace(headers: &HeaderMap, random: (u128, u64)) -> Traceparent {
    match headers.get(TRACEPARENT).map(|value| Traceparent::parse(value.as_bytes())) {
        Some(Ok(parent)) => parent.child(random.1),
        _ => Traceparent::root(random.0, random.1, true),
    }
}

/// Writes the trace into the fields of the next hop.
pub(crate) fn set_trace(headers: &mut HeaderMap, trace: Traceparent) {
    if let Ok(value) = HeaderValue::from_bytes(&trace.render()) {
        headers.insert(TRACEPARENT, value);
    }
}

/// `Forwarded` (RFC 7239): the first node says for whom; later ones leave it, an untrusted
/// client's own claims are dropped.
pub(crate) fn set_forwarded(headers: &mut HeaderMap, source: SocketAddr, believed: bool) {
    if believed && headers.contains_key(FORWARDED) {
        return;
    }
    let value = match source {
        SocketAddr::V4(v4) => format!("for={}", v4.ip()),
        SocketAddr::V6(v6) => format!("for=\"[{}]\"", v6.ip()),
    };
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert(FORWARDED, value);
    }
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
    fn an_untrusted_forwarded_is_replaced() {
        let mut headers = map(&[("forwarded", "for=1.2.3.4")]);
        set_forwarded(&mut headers, "[2001:db8::1]:5".parse().unwrap(), false);
        assert_eq!(headers["forwarded"], "for=\"[2001:db8::1]\"");
    }
}

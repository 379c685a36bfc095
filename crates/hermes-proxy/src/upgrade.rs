//! The response heads that open a tunnel, for each HTTP version.
//!
//! In: the client's request, and the response of the next proxy. Out: 200 or 101 with its fields. WebSocket is
//! translated between versions here: HTTP/1.1 has a key and its proof (RFC 6455, section 4.2.2), HTTP/2 needs neither
//! (RFC 8441, section 5).

use base64::Engine as _;
use hermes_model::facts::Facts;
use http::header::{CONNECTION, HeaderName, HeaderValue, UPGRADE};
use http::response::Parts;
use http::{Method, Response, StatusCode, Version};

use crate::request::UpgradeKind;
use hermes_transport::headers::{self, CAPSULE_PROTOCOL};

pub(crate) const SEC_WEBSOCKET_KEY: HeaderName = HeaderName::from_static("sec-websocket-key");
pub(crate) const SEC_WEBSOCKET_ACCEPT: HeaderName = HeaderName::from_static("sec-websocket-accept");
/// RFC 6455, section 1.3.
const WEBSOCKET_GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// The response head for a client whose tunnel is open; also the head in the access log. A flow that came without HTTP
/// is handled as an extended CONNECT.
pub(crate) fn accepted(
    upgrade: &UpgradeKind,
    version: Version,
    facts: &Facts,
    upstream: Option<Parts>,
) -> Response<()> {
    let mut response = Response::new(());
    let mut fields = upstream.map(|parts| parts.headers).unwrap_or_default();
    headers::strip_hop_by_hop(&mut fields);
    headers::strip_overlay(&mut fields);
    for name in [http::header::CONTENT_LENGTH, SEC_WEBSOCKET_ACCEPT] {
        fields.remove(name);
    }
    if let UpgradeKind::Upgrade(protocol) = upgrade
        && version < Version::HTTP_2
        && facts.method != Method::CONNECT
    {
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        fields.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        if let Ok(value) = HeaderValue::try_from(&**protocol) {
            fields.insert(UPGRADE, value);
        }
    }
    // The `Sec-WebSocket-Accept` field is also sent over HTTP/2, if the client sent a key although HTTP/2 needs none.
    // Envoy sends one on behalf of its own HTTP/1.1 client, and has no other source for the field.
    if let Some(proof) = facts.headers.get(SEC_WEBSOCKET_KEY).and_then(websocket_accept) {
        fields.insert(SEC_WEBSOCKET_ACCEPT, proof);
    }
    if facts.kind.is_datagrams() {
        fields.insert(CAPSULE_PROTOCOL, HeaderValue::from_static("?1"));
    }
    *response.headers_mut() = fields;
    response
}

/// The proof that the server understood the key.
pub(crate) fn websocket_accept(key: &HeaderValue) -> Option<HeaderValue> {
    let mut hash = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA1_FOR_LEGACY_USE_ONLY);
    hash.update(key.as_bytes());
    hash.update(WEBSOCKET_GUID);
    HeaderValue::try_from(base64::engine::general_purpose::STANDARD.encode(hash.finish())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proof_of_rfc_6455() {
        // The example of RFC 6455, section 1.3.
        let key = HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ==");
        assert_eq!(websocket_accept(&key), Some(HeaderValue::from_static("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")));
    }
}

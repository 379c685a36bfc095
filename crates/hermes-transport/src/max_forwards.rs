//! `Max-Forwards` (RFC 9110, 7.6.2): limits the hops of TRACE and OPTIONS.
//!
//! In: a request that would be forwarded. Out: the decremented field for the next hop, or the response of this node as
//! the final recipient. For TRACE, the response reflects the request (9.3.8). Other methods are not affected. Never in
//! a response: a field that may hold a secret, an overlay field, or a field that the listener sets.

use bytes::Bytes;
use hermes_model::document::redact;
use hermes_model::facts::Facts;
use hermes_model::snapshot::Listener;
use http::header::{CONTENT_TYPE, HOST, HeaderValue, MAX_FORWARDS};
use http::{HeaderMap, Method, Response, Version};

use crate::body::Body;
use crate::error::Error;
use crate::headers::{self, PROXY_STATUS};

/// True if the request must not be forwarded.
///
/// # Errors
/// The field is present and not a number.
pub fn is_used_up(facts: &Facts) -> Result<bool, Error> {
    if !is_bounded(&facts.method) {
        return Ok(false);
    }
    match read(&facts.headers) {
        Ok(hops) => Ok(hops == Some(0)),
        Err(()) => Err(Error::Malformed("Max-Forwards is one number (RFC 9110, 7.6.2)".to_owned())),
    }
}

/// Decrements the field for this hop.
pub fn count_down(fields: &mut HeaderMap, method: &Method) {
    if is_bounded(method)
        && let Ok(Some(hops)) = read(fields)
    {
        fields.insert(MAX_FORWARDS, HeaderValue::from(hops.saturating_sub(1)));
    }
}

fn is_bounded(method: &Method) -> bool {
    matches!(*method, Method::TRACE | Method::OPTIONS)
}

/// The maximum value that this node forwards; a longer path is a loop.
const MAX_VALUE: u64 = 255;

fn read(fields: &HeaderMap) -> Result<Option<u64>, ()> {
    let mut values = fields.get_all(MAX_FORWARDS).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return if fields.contains_key(MAX_FORWARDS) { Err(()) } else { Ok(None) };
    };
    let digits = value.to_str().map_err(|_| ())?;
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(());
    }
    // The digits are valid, so only overflow can fail here.
    Ok(Some(digits.parse().unwrap_or(u64::MAX).min(MAX_VALUE + 1)))
}

/// The response of this node as the final recipient.
pub fn answer(
    facts: &Facts,
    version: Version,
    host: &HeaderValue,
    listener: Option<&Listener>,
    node: &str,
) -> Response<Body> {
    let mut response = Response::new(Body::Empty);
    let status = format!("{node}; details=\"Max-Forwards is 0\"");
    if let Ok(status) = HeaderValue::try_from(status) {
        response.headers_mut().insert(PROXY_STATUS, status);
    }
    if facts.method == Method::TRACE {
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("message/http"));
        *response.body_mut() = Body::Full(reflected(facts, version, host, listener));
    }
    response
}

fn reflected(facts: &Facts, version: Version, host: &HeaderValue, listener: Option<&Listener>) -> Bytes {
    let mut text = format!("{} {} {version:?}\r\n", facts.method, facts.path).into_bytes();
    let mut add = |name: &str, value: &HeaderValue| {
        text.extend_from_slice(name.as_bytes());
        text.extend_from_slice(b": ");
        text.extend_from_slice(value.as_bytes());
        text.extend_from_slice(b"\r\n");
    };
    add("host", host);
    let is_ours = |name| listener.is_some_and(|listener| listener.set_headers.iter().any(|(own, _)| own == name));
    for (name, value) in &facts.headers {
        if *name != HOST && !headers::is_overlay(name) && !redact::is_secret(name.as_str()) && !is_ours(name) {
            add(name.as_str(), value);
        }
    }
    text.extend_from_slice(b"\r\n");
    Bytes::from(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn after_a_hop(method: Method, value: &str) -> String {
        let mut fields = HeaderMap::new();
        fields.insert(MAX_FORWARDS, value.parse().unwrap());
        count_down(&mut fields, &method);
        fields[MAX_FORWARDS].to_str().unwrap().to_owned()
    }

    #[test]
    fn each_hop_takes_one_off_what_bounds_it() {
        assert_eq!(after_a_hop(Method::TRACE, "3"), "2");
        assert_eq!(after_a_hop(Method::OPTIONS, "001"), "0");
        assert_eq!(after_a_hop(Method::GET, "3"), "3");
        assert_eq!(after_a_hop(Method::TRACE, "99999999999999999999999"), MAX_VALUE.to_string());
        assert_eq!(after_a_hop(Method::TRACE, "1, 2"), "1, 2");
    }
}

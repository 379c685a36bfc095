//! Answers made here: `respond`, `redirect`, and every failure.
//!
//! In: a route's answer, or an error. Out: a response. The one place where an error becomes a
//! status and a `Proxy-Status` (RFC 9209).

use bytes::Bytes;
use hermes_model::rewrite::Vars;
use hermes_model::snapshot::{Redirect, Respond};
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue, LOCATION, RETRY_AFTER};
use http::{Response, StatusCode};

use crate::body::Body;
use crate::error::{Error, Side};
use crate::headers::PROXY_STATUS;

/// The answer that a route carries.
pub(crate) fn respond(answer: &Respond) -> Response<Body> {
    let mut response = Response::new(Body::Full(Bytes::from_owner(answer.body.clone())));
    *response.status_mut() = answer.status;
    for (name, value) in &answer.headers {
        response.headers_mut().append(name.clone(), value.clone());
    }
    response
}

/// A redirection.
///
/// # Errors
/// The location that comes out is no URI.
pub(crate) fn redirect(redirect: &Redirect, vars: &Vars<'_>) -> Result<Response<Body>, Error> {
    let location = redirect.location.render_location(vars).map_err(|error| Error::Malformed(error.to_string()))?;
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = redirect.status;
    response.headers_mut().insert(LOCATION, location);
    Ok(response)
}

/// What a client is told of a failure. Policy and client errors are told in full, since they say
/// what to do; of the network behind this node a stranger learns only the kind of failure.
pub(crate) fn failure(error: &Error, node: &str, tell_all: bool) -> Response<Body> {
    let status = error.status();
    let details = tell_all || matches!(error.side(), Side::Client | Side::Policy);
    let kind = || error.public().map_or_else(|| error.label().replace('_', " "), str::to_owned);
    let text = if details { error.to_string() } else { kind() };
    let mut response = Response::new(Body::Full(Bytes::from(format!("{node}: {text}\n"))));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    let quoted: String =
        text.chars().filter(|c| c.is_ascii() && !c.is_ascii_control() && *c != '"' && *c != '\\').collect();
    if let Ok(value) = HeaderValue::try_from(format!("{node}; error={}; details=\"{quoted}\"", error.label())) {
        headers.insert(PROXY_STATUS, value);
    }
    match status {
        StatusCode::SERVICE_UNAVAILABLE => drop(headers.insert(RETRY_AFTER, HeaderValue::from_static("1"))),
        StatusCode::METHOD_NOT_ALLOWED => drop(headers.insert(ALLOW, HeaderValue::from_static("CONNECT"))),
        _ => {}
    }
    response
}

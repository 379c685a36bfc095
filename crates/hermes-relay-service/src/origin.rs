//! Requests of web pages: which pages may use a relay (the Fetch Standard, section 3.2).
//!
//! In: the `Origin` of a request and the origins that the route allows. Out: the fields that let a browser give the
//! response to the page, or a refusal. A page of the relay's own authority is always allowed. A browser would only hide a
//! response from other pages, and not at all the messages of a WebSocket, so a relay refuses them before it acts.
//! Never: a refusal of a client without `Origin`, which is no page of another site.

use hermes_model::facts::Facts;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, HeaderName, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};

use hermes_transport::body::Body;
use hermes_transport::error::Error;

/// The fields that pages may set beside those that any page may set.
const ALLOWED_FIELDS: HeaderValue = HeaderValue::from_static(
    "content-digest, content-type, hermes-channels, hermes-deliver, hermes-group, hermes-new, hermes-relay, \
     hermes-subscribe, hermes-subscription, hermes-timeout, last-event-id, signature, signature-input, subscribe",
);
/// The fields of responses that pages may read.
const EXPOSED_FIELDS: HeaderValue = HeaderValue::from_static(
    "hermes-delivered, hermes-event-id, hermes-max-timeout, hermes-subscribers, hermes-subscription, hermes-timeout, \
     location",
);
const METHODS: HeaderValue = HeaderValue::from_static("GET, PUT, POST");
/// Seconds for which a browser may remember the answer to a preflight request.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// The page that sent a request.
pub(crate) enum Page {
    /// No page, or one of the relay's own authority.
    Own,
    /// A page of an origin that the route allows.
    Allowed(HeaderValue),
}

impl Page {
    /// The page of a request.
    ///
    /// # Errors
    /// The route does not allow its origin.
    pub(crate) fn of(facts: &Facts, allowed: &[Box<str>]) -> Result<Self, Error> {
        let Some(origin) = facts.headers.get(ORIGIN) else { return Ok(Self::Own) };
        let text = origin.to_str().unwrap_or_default();
        if is_own(text, facts) {
            return Ok(Self::Own);
        }
        if allowed.iter().any(|allowed| **allowed == *"*" || allowed.eq_ignore_ascii_case(text)) {
            return Ok(Self::Allowed(origin.clone()));
        }
        let reason = format!("pages of {text:?} may not use this relay (`relay.origins`)");
        Err(Error::Denied { status: StatusCode::FORBIDDEN, reason, label: "http_request_denied" })
    }

    /// Adds the fields that let a browser give the response to the page.
    pub(crate) fn admit(&self, response: &mut HeaderMap) {
        // A cache must not give the response for one page to another one.
        response.append(VARY, HeaderValue::from_static("origin"));
        if let Self::Allowed(origin) = self {
            response.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
            response.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED_FIELDS);
        }
    }
}

fn is_own(origin: &str, facts: &Facts) -> bool {
    let Some((scheme, authority)) = origin.split_once("://") else { return false };
    let authority = authority.to_ascii_lowercase();
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host.to_owned(), port.parse().ok()),
        _ => (authority, None),
    };
    let default = if scheme.eq_ignore_ascii_case("https") { 443 } else { 80 };
    *facts.authority.uri_host() == *host && facts.authority.port() == port.or(Some(default))
}

/// The answer to the question of a browser whether a page may send a request. `None`: the request is another one.
pub(crate) fn preflight(facts: &Facts, page: &Page) -> Option<Response<Body>> {
    let is_asked = facts.method == Method::OPTIONS && facts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    is_asked.then(|| {
        let mut response = Response::new(Body::Empty);
        *response.status_mut() = StatusCode::NO_CONTENT;
        let fields: [(HeaderName, HeaderValue); 3] = [
            (ACCESS_CONTROL_ALLOW_METHODS, METHODS),
            (ACCESS_CONTROL_ALLOW_HEADERS, ALLOWED_FIELDS),
            (ACCESS_CONTROL_MAX_AGE, MAX_AGE),
        ];
        response.headers_mut().extend(fields.map(|(name, value)| (Some(name), value)));
        page.admit(response.headers_mut());
        response
    })
}

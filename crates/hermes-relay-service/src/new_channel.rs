//! POST with `hermes-new`: a URI that nobody can guess (HTTP-RS, section 7.2.1).
//!
//! In: the request of a client that may publish. Out: a channel below the path of the request, with 128 random bits in its name.
//! Never: state. The channel begins with its first subscriber or publication, as each one does.

use hermes_model::facts::PathAndQuery;
use hermes_signature::Right;
use hermes_transport::body::Body;
use hermes_transport::error::Error;
use http::header::LOCATION;
use http::{HeaderValue, Response, StatusCode};

use crate::deliveries::leads_to;
use crate::{RelayRequest, refusal, url_token};

/// Names a new channel.
///
/// # Errors
/// The client may not publish here, or the route does not serve the paths below this one.
pub(crate) fn serve(request: &RelayRequest<'_>) -> Result<Response<Body>, Error> {
    let facts = &request.entry.facts;
    url_token::check(facts, request.settings, Right::Publish)?;
    let location = format!("{}/{:032x}", facts.path.path().trim_end_matches('/'), rand::random::<u128>());
    let path = PathAndQuery::try_from(location.as_str());
    let is_served =
        path.is_ok_and(|path| leads_to(&request.route.name, request.entry, &path, &request.worker.snapshot()));
    if !is_served {
        let reason = format!("route {} does not serve the paths below {}", request.route.name, facts.path.path());
        return Err(Error::Denied { status: StatusCode::NOT_FOUND, reason, label: "http_request_denied" });
    }
    let mut response = refusal(StatusCode::CREATED, format!("{location}\n"));
    // A path of ASCII, as it was received.
    response.headers_mut().extend(HeaderValue::try_from(location).ok().map(|location| (LOCATION, location)));
    Ok(response)
}

//! Tokens in URLs: an application server lets a client use channels, for a time (HTTP-RS, section 4).
//!
//! In: requests of a route with `relay.tokens`, whose query or cookie has a token. Out: its grant, or a refusal. Never: a token
//! that counts for another client, channel or action, or a request without one.

use std::time::Duration;

use hermes_model::decode_unreserved;
use hermes_model::facts::Facts;
use hermes_model::snapshot::Relay as RelaySettings;
use hermes_model::trust::SUBSCRIBERS_BEHIND;
use hermes_relay::SubscribeError;
use hermes_signature::{Grant, PublicKey, Right};
use hermes_transport::error::Error;
use http::StatusCode;
use http::header::COOKIE;

use crate::{authority, certified, client_of};

/// The name of the token in queries and cookies.
const TOKEN: &str = "hermes-token";

/// The grant of a client's token. `None`: the route asks for none.
///
/// # Errors
/// The token is missing or invalid, or is for another client, channel or action.
pub(crate) fn check(facts: &Facts, settings: &RelaySettings, right: Right) -> Result<Option<Grant>, Error> {
    if settings.tokens.is_empty() {
        return Ok(None);
    }
    let keys: Vec<_> = settings.tokens.iter().copied().map(PublicKey::from_bytes).collect();
    let token = of_query(facts).or_else(|| of_cookie(facts)).ok_or_else(|| {
        denied(StatusCode::UNAUTHORIZED, format!("the route needs a token in the query or a cookie ({TOKEN})"))
    })?;
    let grant = Grant::verify(token, &keys, certified::now());
    let grant = grant.map_err(|error| denied(StatusCode::FORBIDDEN, error.to_string()))?;
    let client = client_of(facts);
    if *grant.sub != *client {
        let reason = format!("the token is for {}, and not for {client}", grant.sub);
        return Err(denied(StatusCode::FORBIDDEN, reason));
    }
    if grant.aud != authority(facts) {
        return Err(denied(StatusCode::FORBIDDEN, format!("the token is for the authority {}", grant.aud)));
    }
    if !grant.rights.contains(&right) {
        let what = if right == Right::Publish { "publish" } else { "subscribe" };
        return Err(denied(StatusCode::FORBIDDEN, format!("the token does not have the right to {what}")));
    }
    check_channel(&grant, facts.path.path())?;
    Ok(Some(grant))
}

/// The grant of a subscriber's token. `None`: the route asks for none, or a node subscribes for its clients, whose tokens it has
/// checked.
///
/// # Errors
/// See [`check`].
pub(crate) fn check_subscriber(facts: &Facts, settings: &RelaySettings) -> Result<Option<Grant>, Error> {
    if facts.trust.is_proxy() && facts.headers.contains_key(SUBSCRIBERS_BEHIND) {
        return Ok(None);
    }
    check(facts, settings, Right::Subscribe)
}

/// Checks that a grant is for the channel at this path.
///
/// # Errors
/// It is not.
pub(crate) fn check_channel(grant: &Grant, path: &str) -> Result<(), Error> {
    if grant.has_channel(&decode_unreserved(path)) {
        return Ok(());
    }
    Err(denied(StatusCode::FORBIDDEN, format!("the token is not for the channel {path}")))
}

/// The longest timeout of a subscription with this grant. It does not outlive its token.
pub(crate) fn max_timeout(grant: Option<&Grant>, max: Duration) -> Duration {
    let left = grant.map_or(u64::MAX, |grant| grant.exp.saturating_sub(certified::now()));
    // The token was valid a moment ago.
    max.min(Duration::from_secs(left.max(1)))
}

/// Whether the time of a grant has passed.
pub(crate) fn is_over(grant: &Grant) -> bool {
    grant.exp <= certified::now()
}

/// Whether a grant allows a publication now.
pub(crate) fn may_publish(grant: &Grant) -> bool {
    !is_over(grant) && grant.rights.contains(&Right::Publish)
}

/// Checks the timeout of a subscription with this grant.
///
/// # Errors
/// It is longer than the token is valid.
pub(crate) fn check_timeout(grant: Option<&Grant>, timeout: Duration) -> Result<(), SubscribeError> {
    let max = max_timeout(grant, Duration::MAX);
    if timeout > max { Err(SubscribeError::TimeoutTooLong(max)) } else { Ok(()) }
}

fn of_query(facts: &Facts) -> Option<&str> {
    let query = facts.path.query()?;
    query.split('&').find_map(|pair| pair.strip_prefix(TOKEN)?.strip_prefix('='))
}

fn of_cookie(facts: &Facts) -> Option<&str> {
    let lines = facts.headers.get_all(COOKIE).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(';')).find_map(|pair| pair.trim().strip_prefix(TOKEN)?.strip_prefix('='))
}

fn denied(status: StatusCode, reason: String) -> Error {
    Error::Denied { status, reason, label: "http_request_denied" }
}

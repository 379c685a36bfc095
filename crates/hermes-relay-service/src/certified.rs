//! Self-certifying channels: the URI names the key of those who may publish or subscribe (HTTP-RS, section 7.2.1).
//!
//! In: requests to `/pk/NAME/from/...`, where only the holder of the key publishes, and to `/pk/NAME/to/...`, where only
//! its holder subscribes and anyone publishes. Out: a refusal of requests that the key has not signed. Never: a signature
//! that counts twice, or one that is older than a minute.

use std::time::{SystemTime, UNIX_EPOCH};

use hermes_model::decode_unreserved;
use hermes_model::facts::Facts;
use hermes_signature::{Signed, SignedRequest, is_content_of, verify};
use hermes_transport::error::Error;
use http::StatusCode;

use crate::seen_signatures::NotTaken;
use crate::{RelayRequest, authority, subject};

/// The path under which all channels are self-certifying.
const CERTIFIED: &str = "/pk/";
/// The length of the name of a key.
const NAME: usize = 43;
/// Seconds by which the time of a signature may be before that of this node, and after it.
const MAX_AGE: u64 = 60;
const MAX_AHEAD: u64 = 5;

/// The key in the URI of a channel, and what it certifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Certified<'p> {
    /// Its holder publishes.
    From(&'p str),
    /// Its holder subscribes.
    To(&'p str),
}

impl<'p> Certified<'p> {
    /// The key of a path. `None`: the channel is not self-certifying.
    fn of(path: &'p str) -> Result<Option<Self>, Error> {
        let Some(rest) = path.strip_prefix(CERTIFIED) else { return Ok(None) };
        let mut parts = rest.splitn(3, '/');
        match (parts.next(), parts.next(), parts.next()) {
            (Some(name), Some("from"), Some(_)) if name.len() == NAME => Ok(Some(Self::From(name))),
            (Some(name), Some("to"), Some(_)) if name.len() == NAME => Ok(Some(Self::To(name))),
            _ => Err(Error::Malformed("a self-certifying channel is /pk/NAME/from/... or /pk/NAME/to/...".to_owned())),
        }
    }
}

/// Checks that the client may publish to the channel of its request. `None`: anyone may.
///
/// # Errors
/// The key of the channel has not signed the request.
pub(crate) fn check_publisher(request: &RelayRequest<'_>) -> Result<Option<Signed>, Error> {
    let path = decode_unreserved(request.entry.facts.path.path());
    let Some(Certified::From(name)) = Certified::of(&path)? else { return Ok(None) };
    check_signature(request, name, "publishes to").map(Some)
}

/// Checks the content of a signed request, after which the signature no longer counts.
///
/// # Errors
/// Another content was signed, or the signature has been used.
pub(crate) fn take_content(request: &RelayRequest<'_>, signed: Signed, content: &[u8]) -> Result<(), Error> {
    if !is_content_of(&request.entry.facts.headers, content) {
        return Err(denied("content-digest does not fit the content; use sha-256 (RFC 9530)".to_owned()));
    }
    take(request, signed)
}

/// Checks that the client may subscribe to the channel of its request. The relay trusts nodes to have checked the clients
/// for which they subscribe.
///
/// # Errors
/// The key of the channel has not signed the request.
pub(crate) fn check_subscriber(request: &RelayRequest<'_>, is_node: bool) -> Result<(), Error> {
    let path = decode_unreserved(request.entry.facts.path.path());
    match Certified::of(&path)? {
        Some(Certified::To(name)) if !is_node => take(request, check_signature(request, name, "subscribes to")?),
        _ => Ok(()),
    }
}

/// Whether a request to this path must be signed to subscribe. Other requests than its own cannot prove that.
pub(crate) fn is_for_holder(path: &str) -> bool {
    decode_unreserved(path).starts_with(CERTIFIED)
}

/// Whether messages of a WebSocket, which have no signature, may be published to the channel of its request.
pub(crate) fn takes_unsigned(facts: &Facts) -> bool {
    !matches!(Certified::of(&decode_unreserved(facts.path.path())), Ok(Some(Certified::From(_))) | Err(_))
}

fn denied(reason: String) -> Error {
    Error::Denied { status: StatusCode::FORBIDDEN, reason, label: "http_request_denied" }
}

fn check_signature(request: &RelayRequest<'_>, name: &str, does: &str) -> Result<Signed, Error> {
    let facts = &request.entry.facts;
    let authority = authority(facts);
    let signed = SignedRequest {
        method: &facts.method,
        authority: &authority,
        path: facts.path.path(),
        query: facts.path.query(),
        headers: &facts.headers,
    };
    let signed =
        verify(&signed).map_err(|error| denied(format!("only the holder of a key {does} this channel: {error}")))?;
    if signed.key.name() != name {
        return Err(denied(format!("only the holder of the key {name} {does} this channel")));
    }
    let now = now();
    let is_past = signed.created + MAX_AGE < now || signed.expires.is_some_and(|expires| expires < now);
    if is_past || signed.created > now + MAX_AHEAD {
        return Err(denied(format!(
            "the signature is of another time; its created must be at most {MAX_AGE} s before this node's clock, and \
             {MAX_AHEAD} s after it"
        )));
    }
    Ok(signed)
}

/// Lets a signature count, and no second time.
fn take(request: &RelayRequest<'_>, signed: Signed) -> Result<(), Error> {
    let until = signed.created + MAX_AGE;
    match request.relays.signatures.add(signed.signature, signed.created, until, &subject(request.entry), now()) {
        Ok(()) => Ok(()),
        Err(error @ NotTaken::Used) => Err(denied(format!("{error}; add another nonce to each request"))),
        Err(error @ NotTaken::BeforeStart) => Err(denied(format!("{error}; sign the request again"))),
        Err(NotTaken::TooMany) => {
            request.worker.shared.metrics.limit("relay-signatures");
            Err(Error::Limit("signatures of this node, or of this client"))
        }
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_path_says_what_its_key_certifies() {
        let name = "A".repeat(NAME);
        assert_eq!(Certified::of(&format!("/pk/{name}/from/a/b")).unwrap(), Some(Certified::From(&name)));
        assert_eq!(Certified::of(&format!("/pk/{name}/to/")).unwrap(), Some(Certified::To(&name)));
        for other in ["/pk", "/rooms/pk/", "/PK/x/from/a", "/"] {
            assert_eq!(Certified::of(other).unwrap(), None, "{other}");
        }
        for malformed in ["/pk/", "/pk/x/from/a", &format!("/pk/{name}/from"), &format!("/pk/{name}/of/a")] {
            assert!(Certified::of(malformed).is_err(), "{malformed}");
        }
    }
}

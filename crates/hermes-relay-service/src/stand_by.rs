//! The request of a root among peers that this node keep a copy of a channel.
//!
//! In: a request of a peer, with the position up to which it has the channel. Out: what this node has after that, once, and a
//! feed that keeps a copy for the time that the peer names. If this node was the root, it no longer is. Never: a copy for
//! anyone but a node that may pass on assertions of others.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_model::snapshot::RootChoice;
use hermes_model::trust::{ROOT_BEFORE, STAND_BY};
use hermes_relay::fields::{LAST_EVENT_ID, ROOT};
use hermes_relay::framing::Framing;
use hermes_relay::{Delivery, HandOver};
use hermes_transport::body::Body;
use hermes_transport::error::Error;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};

use crate::directory::NotRegistered;
use crate::registry::RouteRelay;
use crate::siblings::Siblings;
use crate::{RelayRequest, channel, refusal, set_epochs, text, upstream};

/// The longest time for which a copy is kept without another request.
const MAX_TIME: Duration = Duration::from_secs(600);

pub(crate) fn serve(request: &RelayRequest<'_>) -> Result<Response<Body>, Error> {
    let facts = &request.entry.facts;
    let siblings = Siblings::of(request);
    let is_known = |peer: &Arc<str>| siblings.choice() == Some(RootChoice::Hash) || siblings.is_peer(peer);
    let Some(peer) = siblings.peer_of(facts).filter(|peer| siblings.are_peers() && is_known(peer)) else {
        let reason =
            format!("only peers of this relay may send {STAND_BY}; add the node to `relay.peers`, and trust it\n");
        return Ok(refusal(StatusCode::FORBIDDEN, reason));
    };
    let malformed = |name| Error::Malformed(format!("{name} of a peer is missing or malformed"));
    let seconds = text(&facts.headers, &STAND_BY)?.and_then(|text| text.parse().ok());
    let time = Duration::from_secs(seconds.ok_or_else(|| malformed(STAND_BY))?).min(MAX_TIME);
    let after = text(&facts.headers, &LAST_EVENT_ID)?.and_then(|text| text.parse().ok());
    let after = after.ok_or_else(|| malformed(LAST_EVENT_ID))?;
    let name = channel(request, None);
    let is_moved = text(&facts.headers, &ROOT_BEFORE)? == Some(&*siblings.node());
    if let Err(error) = admit(&siblings, &name, &peer, time, is_moved) {
        return Ok(match error {
            NotRegistered::Full => refusal(StatusCode::SERVICE_UNAVAILABLE, "too many channels\n".to_owned()),
            NotRegistered::Root(root) => {
                let mut response = refusal(StatusCode::CONFLICT, format!("{root} is the root of the channel\n"));
                response.headers_mut().extend(HeaderValue::from_str(&root).ok().map(|root| (ROOT, root)));
                response
            }
        });
    }
    // Copies of channels that somebody invents must not take the place of others.
    let RouteRelay { relay, feeds, .. } = &*siblings.of_route;
    if relay.is_crowded() && !feeds.contains(&name) {
        return Ok(refusal(StatusCode::SERVICE_UNAVAILABLE, "no room for copies of more channels\n".to_owned()));
    }
    let requests = siblings.requests(facts, &facts.path);
    let feed = match upstream::feed(&siblings, &requests, &name, None) {
        Ok(feed) => feed,
        Err(error) => return Ok(refusal(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n"))),
    };
    // Before the peer learns the position: nothing may be published here after that.
    let handed_over = siblings.of_route.relay.hand_over(&name, after).filter(|_| !feed.is_own());
    if is_moved {
        siblings.of_route.relay.end_relays(&name);
    }
    feed.duties.stand_by(time, siblings.upstream_of(&peer));
    let Some(handed_over) = handed_over else {
        let mut response = Response::new(Body::Empty);
        *response.status_mut() = StatusCode::NO_CONTENT;
        return Ok(response);
    };
    Ok(parts(&handed_over))
}

/// Whether a peer may be the root of a channel.
fn admit(
    siblings: &Siblings,
    channel: &Arc<str>,
    peer: &Arc<str>,
    time: Duration,
    is_moved: bool,
) -> Result<(), NotRegistered> {
    let leads = siblings.leads(channel);
    let is_after_this = || {
        let ranking = siblings.ranking(channel, None);
        siblings.upstream_of(peer).is_some_and(|upstream| ranking.below.contains(&upstream))
    };
    let is_assigned = || siblings.of_route.directory.root(channel).is_some_and(|root| root.node == *peer);
    let keeps = match siblings.choice() {
        Some(RootChoice::First) => leads && !is_moved && !is_assigned(),
        _ => leads && is_after_this(),
    };
    if keeps {
        return Err(NotRegistered::Root(siblings.node()));
    }
    match siblings.choice() {
        Some(RootChoice::First) => siblings.of_route.directory.register(channel, peer, time),
        _ => Ok(()),
    }
}

/// The deliveries as a whole body.
fn parts(HandOver { lacking, epochs }: &HandOver) -> Response<Body> {
    let framing = Framing::Multipart { boundary: format!("hermes-{:032x}", rand::random::<u128>()) };
    let mut out = framing.begin("").to_vec();
    for delivery in lacking {
        let position = match delivery {
            Delivery::Publication(publication) => publication.id,
            Delivery::Gap { until, .. } => Some(*until),
        };
        let position = position.map(|position| position.to_string()).unwrap_or_default();
        framing.write(&mut out, delivery, &position, false);
    }
    out.extend_from_slice(&framing.end());
    let mut response = Response::new(Body::Full(Bytes::from(out)));
    response.headers_mut().insert(CONTENT_TYPE, framing.content_type());
    set_epochs(response.headers_mut(), epochs);
    response
}

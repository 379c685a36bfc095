//! Questions of peers for the root of a channel, and the move of a root to another peer.
//!
//! In: a question of a peer, or the wish of a client that the root of its channel move. Out: the root; or a peer that takes
//! over the channel from the root before. The home of the channel decides. Never: a move to a node that is no peer, or one
//! while another one is under way.

use std::sync::Arc;
use std::time::Duration;

use hermes_model::snapshot::RootChoice;
use hermes_model::trust::{LOCATE, ROOT_BEFORE};
use hermes_relay::SubscribeError;
use hermes_relay::fields::{MOVE, ROOT};
use hermes_transport::body::Body;
use hermes_transport::error::Error;
use http::{HeaderMap, HeaderValue, Response, StatusCode};

use crate::directory::Root;
use crate::feeds::Refused;
use crate::locate::{Question, assigned};
use crate::next_channel::{ChannelRequests, LOCATE_HERE};
use crate::siblings::Siblings;
use crate::{RelayRequest, channel, refusal, text, upstream};

/// The lease of a root that has not moved.
const LEASE: Duration = Duration::from_secs(60);

/// Moves the root of a channel if its client asks for it, which may publish or subscribe. Returns the response that refuses it.
pub(crate) async fn serve_client(request: &RelayRequest<'_>) -> Result<Option<Response<Body>>, Error> {
    let facts = &request.entry.facts;
    let Some(to) = text(&facts.headers, &MOVE)?.map(Arc::<str>::from) else { return Ok(None) };
    let siblings = Siblings::of(request);
    let requests = siblings.requests(facts, &facts.path);
    let moved = Box::pin(move_to(&siblings, &requests, &channel(request, None), &to)).await;
    Ok(moved.err().map(|Refused { status, reason, .. }| refusal(status, format!("{reason}\n"))))
}

/// Moves the root of a channel to a peer.
///
/// # Errors
/// The peer is none, or it cannot be reached.
async fn move_to(
    siblings: &Siblings,
    requests: &ChannelRequests,
    channel: &Arc<str>,
    to: &Arc<str>,
) -> Result<(), Refused> {
    if siblings.choice() != Some(RootChoice::First) || !siblings.is_peer(to) {
        let reason = format!("{to} is no peer to which channels of this route move (`relay.root: first`)");
        return Err(Refused::new(StatusCode::BAD_REQUEST, reason));
    }
    let ranking = siblings.ranking(channel, None);
    let feeds = &siblings.of_route.feeds;
    for upstream in ranking.above.iter().filter(|upstream| !feeds.is_away(upstream)) {
        match requests.at(upstream).locate(None, Some(to)).await {
            Ok(_) => return Ok(()),
            Err(error) if !error.is_unreachable => return Err(error),
            Err(_) => feeds.set_away(upstream),
        }
    }
    if !ranking.may_lead {
        return Err(Refused::new(StatusCode::BAD_GATEWAY, "no peer can be reached"));
    }
    move_from_home(siblings, requests, channel, to).await
}

async fn move_from_home(
    siblings: &Siblings,
    requests: &ChannelRequests,
    channel: &Arc<str>,
    to: &Arc<str>,
) -> Result<(), Refused> {
    let own = siblings.node();
    let peer = siblings.own_name();
    let current = assigned(siblings, requests, channel, Question { peer, wish: Some(to) }).await;
    if current.node == *to {
        return Ok(());
    }
    if current.before.is_some() {
        return Err(Refused::new(StatusCode::CONFLICT, "the channel moves already; try again in a moment"));
    }
    let (directory, before) = (&siblings.of_route.directory, Some(current.node.clone()));
    if *to != own && !siblings.reaches(to) {
        return Err(Refused::new(StatusCode::BAD_GATEWAY, format!("{to} cannot be reached")));
    }
    if !directory.move_to(channel, Root { node: to.clone(), before }) {
        return Err(Refused::new(StatusCode::TOO_MANY_REQUESTS, "the channel has just moved; try again in a second"));
    }
    let begun = if *to == own {
        begin(siblings, requests, channel)
    } else {
        match siblings.upstream_of(to) {
            Some(upstream) => requests.at(&upstream).locate(None, Some(to)).await.map(drop),
            None => Ok(()),
        }
    };
    if begun.is_err() {
        directory.move_back(channel, to, current, LEASE);
    }
    begun
}

/// Has the feed of this node look for the root again. It begins, if there is none.
fn begin(siblings: &Siblings, requests: &ChannelRequests, channel: &Arc<str>) -> Result<(), Refused> {
    let feed = upstream::feed(siblings, requests, channel, None);
    let unavailable = |error: SubscribeError| Refused::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string());
    feed.map(|feed| feed.duties.look_again()).map_err(unavailable)
}

/// Answers a peer that asks for the root, or that moves it.
pub(crate) async fn serve(request: &RelayRequest<'_>) -> Result<Response<Body>, Error> {
    let facts = &request.entry.facts;
    let siblings = Siblings::of(request);
    if !siblings.are_peers() || !facts.trust.is_proxy() {
        let reason = format!("only nodes with the same `relay.peers` may send {LOCATE}; check `trust`, too\n");
        return Ok(refusal(StatusCode::FORBIDDEN, reason));
    }
    let name = |name| text(&facts.headers, name).map(|text| text.map(Arc::<str>::from));
    let (wish, to) = (name(&ROOT)?, name(&MOVE)?);
    let peer = siblings.peer_of(facts).filter(|peer| siblings.is_peer(peer));
    let channel = channel(request, None);
    if text(&facts.headers, &LOCATE)? == Some(LOCATE_HERE) {
        let root = siblings.leads(&channel).then(|| Root { node: siblings.node(), before: None });
        return Ok(located(root.as_ref()));
    }
    if siblings.choice() != Some(RootChoice::First) {
        return Ok(refusal(
            StatusCode::CONFLICT,
            "this relay has `root: hash`; use the same at all peers\n".to_owned(),
        ));
    }
    let requests = siblings.requests(facts, &facts.path);
    let moved = match &to {
        // The home of the channel has decided.
        Some(to) if *to == siblings.node() && !siblings.is_home(&channel) => begin(&siblings, &requests, &channel),
        Some(to) => Box::pin(move_from_home(&siblings, &requests, &channel, to)).await,
        None => Ok(()),
    };
    if let Err(Refused { status, reason, .. }) = moved {
        return Ok(refusal(status, format!("{reason}\n")));
    }
    let root = match to {
        Some(node) => Root { node, before: None },
        None => assigned(&siblings, &requests, &channel, Question { peer, wish: wish.as_ref() }).await,
    };
    Ok(located(Some(&root)))
}

/// The answer to a question for a root.
fn located(root: Option<&Root>) -> Response<Body> {
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = StatusCode::NO_CONTENT;
    root.into_iter().for_each(|root| write(response.headers_mut(), root));
    response
}

fn write(headers: &mut HeaderMap, root: &Root) {
    // Names of nodes have no control characters.
    let value = |name: &Arc<str>| HeaderValue::from_str(name).ok();
    headers.extend(value(&root.node).map(|node| (ROOT, node)));
    headers.extend(root.before.as_ref().and_then(value).map(|before| (ROOT_BEFORE, before)));
}

//! A channel at the next relay: the requests of this node's subscriptions to it, and what their responses deliver.
//!
//! In: the client that causes a subscription, and the position to resume after. Out: publications and gaps, with the
//! identifiers of the next relay. Never: the identity of that client, since a subscription may serve others, too.

use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hermes_model::facts::{Facts, Kind, PathAndQuery, Trust};
use hermes_model::trust::{CONFIRMED, HERMES_USER, LOCATE, PEER, ROOT_BEFORE, STAND_BY, SUBSCRIBERS_BEHIND};
use hermes_relay::fields::{
    ABORTED, DELIVER, EPOCHS, EVENT_ID, HEARTBEAT, LAST_EVENT_ID, MAX_TIMEOUT, MISSED, MOVE, RELAY, ROOT, SUBSCRIBE,
    SUBSCRIPTION, TIMEOUT,
};
use hermes_relay::framing::multipart::{MalformedPart, Parser, Part};
use hermes_relay::{EventId, FedPublication, MAX_EPOCHS, NewPublication, Relay, Reserved};
use hermes_transport::body::Body;
use hermes_transport::error::Error;
use http::header::{ACCEPT, CONTENT_TYPE, HeaderName, VIA};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use http_body_util::{BodyExt as _, Limited};

use crate::directory::Root;
use crate::feeds::Refused;
use crate::next_relay::{NextRelay, NextResponse};

/// The bytes of the reason of a refusal, and the time for them.
const MAX_REASON: usize = 1 << 10;
const REASON_TIMEOUT: Duration = Duration::from_secs(5);
/// The time for an answer of a relay that waits for nobody else.
const MAX_ANSWER: Duration = Duration::from_secs(3);
/// The value of the field that asks only whether the relay itself is the root.
pub(crate) const LOCATE_HERE: &str = "here";
/// The time for which a question for a root stands.
const TIMEOUT_TO_LOCATE: Duration = Duration::from_secs(10);
/// The longest time between heartbeats that a document allows.
const MAX_HEARTBEAT: Duration = Duration::from_secs(3600);

/// A channel at another relay.
#[derive(Clone)]
pub(crate) struct NextChannel {
    next: Rc<dyn NextRelay>,
    /// The upstream of that relay.
    upstream: Arc<str>,
    facts: Facts,
}

/// A channel as this node asks other relays about it.
#[derive(Clone)]
pub(crate) struct ChannelRequests {
    next: Rc<dyn NextRelay>,
    facts: Facts,
}

/// The state of a subscription that a request tells the next relay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    pub(crate) timeout: Duration,
    /// The subscribers that it stands for.
    pub(crate) subscribers: u64,
    /// This node keeps a copy of the channel, and has it up to this position.
    pub(crate) confirmed: Option<EventId>,
}

impl ChannelRequests {
    /// The channel at this path, for a client. The node subscribes as `user`, or without a user. Requests have the `Via` of the
    /// client, so that nodes that are each other's next relay notice the loop. Among peers, they have the name of this node (`peer`)
    /// instead.
    pub(crate) fn new(
        next: Rc<dyn NextRelay>,
        of: &Facts,
        path: &PathAndQuery,
        user: Option<Arc<str>>,
        peer: Option<Arc<str>>,
    ) -> Self {
        let mut headers = HeaderMap::new();
        for via in of.headers.get_all(VIA).iter().filter(|_| peer.is_none()) {
            headers.append(VIA, via.clone());
        }
        headers.extend(peer.and_then(|peer| Some((PEER, HeaderValue::from_str(&peer).ok()?))));
        // As `settle` of `hermes_model::trust` has it for a client.
        headers.extend(user.as_ref().and_then(|user| Some((HERMES_USER, HeaderValue::from_str(user).ok()?))));
        // The query may have the position or the timeout of the client.
        let path = PathAndQuery::try_from(path.path()).unwrap_or_else(|_| path.clone());
        let facts = Facts {
            listener: of.listener.clone(),
            kind: Kind::Http,
            // The node itself.
            source: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            trust: Trust::Anonymous,
            user,
            method: Method::GET,
            authority: of.authority.clone(),
            path,
            headers,
            network: None,
            announced_network: None,
            protocol: None,
        };
        Self { next, facts }
    }

    /// The channel at the relay of an upstream.
    pub(crate) fn at(&self, upstream: &Arc<str>) -> NextChannel {
        NextChannel { next: self.next.clone(), upstream: upstream.clone(), facts: self.facts.clone() }
    }
}

impl NextChannel {
    /// The upstream of the relay.
    pub(crate) fn upstream(&self) -> &Arc<str> {
        &self.upstream
    }

    fn send(&self, standing: Standing, fields: impl IntoIterator<Item = (HeaderName, HeaderValue)>) -> NextResponse {
        let mut facts = self.facts.clone();
        let behind = u32::try_from(standing.subscribers).unwrap_or(u32::MAX);
        facts.headers.insert(TIMEOUT, standing.timeout.as_secs().into());
        facts.headers.insert(SUBSCRIBERS_BEHIND, behind.into());
        if let Some(confirmed) = standing.confirmed.and_then(value) {
            facts.headers.insert(CONFIRMED, confirmed);
        }
        facts.headers.extend(fields);
        self.next.send(self.upstream.clone(), facts, Bytes::new())
    }

    /// Sends a question that a relay answers by itself.
    async fn soon(
        &self,
        standing: Standing,
        fields: impl IntoIterator<Item = (HeaderName, HeaderValue)>,
    ) -> Result<Response<Body>, Refused> {
        let response = tokio::time::timeout(MAX_ANSWER, self.send(standing, fields)).await;
        response.unwrap_or(Err(Error::NoProgress(MAX_ANSWER))).map_err(unreachable)
    }

    /// Subscribes after a position, or to later publications alone. If the timeout is too long for the next relay, it is
    /// the longest that it allows.
    ///
    /// # Errors
    /// The next relay refuses it.
    pub(crate) async fn subscribe(
        self,
        mut standing: Standing,
        after: Option<EventId>,
        relay: Arc<Relay>,
        max_bytes: usize,
    ) -> Result<Accepted, Refused> {
        let mut response = self.ask(standing, after).await;
        let longest = response.as_ref().ok().and_then(|response| response.headers().get(MAX_TIMEOUT)).and_then(number);
        if let Some(longest) = longest.filter(|longest| *longest > 0) {
            standing.timeout = standing.timeout.min(Duration::from_secs(longest));
            response = self.ask(standing, after).await;
        }
        accepted(response, standing, relay, max_bytes).await
    }

    fn ask(&self, standing: Standing, after: Option<EventId>) -> NextResponse {
        let is_true = (SUBSCRIBE, HeaderValue::from_static("true"));
        let accept = (ACCEPT, HeaderValue::from_static("multipart/mixed"));
        let position = after.and_then(value).map(|position| (LAST_EVENT_ID, position));
        self.send(standing, [is_true, accept].into_iter().chain(position))
    }

    /// Whether the relay is the root of the channel.
    ///
    /// # Errors
    /// The relay cannot be reached, or refuses.
    pub(crate) async fn leads(&self) -> Result<bool, Refused> {
        let standing = Standing { timeout: TIMEOUT_TO_LOCATE, subscribers: 0, confirmed: None };
        let fields = [(LOCATE, HeaderValue::from_static(LOCATE_HERE))];
        let response = self.soon(standing, fields).await?;
        match response.status() {
            StatusCode::NO_CONTENT => Ok(response.headers().contains_key(ROOT)),
            _ => Err(refused(response).await),
        }
    }

    /// Asks the relay, as the home of the channel, for the root. `wish` is a peer that a client asks for, `to` one to which the
    /// root moves.
    ///
    /// # Errors
    /// The relay cannot be reached, or refuses.
    pub(crate) async fn locate(&self, wish: Option<&Arc<str>>, to: Option<&Arc<str>>) -> Result<Root, Refused> {
        let standing = Standing { timeout: TIMEOUT_TO_LOCATE, subscribers: 0, confirmed: None };
        let named = |field, name: Option<&Arc<str>>| Some((field, HeaderValue::from_str(name?).ok()?));
        let fields = [Some((LOCATE, HeaderValue::from_static("true"))), named(ROOT, wish), named(MOVE, to)];
        let response = self.soon(standing, fields.into_iter().flatten()).await?;
        if response.status() != StatusCode::NO_CONTENT {
            return Err(refused(response).await);
        }
        let headers = response.headers();
        Ok(Root { node: name(headers, &ROOT).ok_or_else(no_relay)?, before: name(headers, &ROOT_BEFORE) })
    }

    /// Asks the relay to keep a copy for some time, and to hand over what it has after a position.
    ///
    /// # Errors
    /// The relay cannot be reached, or refuses.
    pub(crate) async fn stand_by(
        &self,
        time: Duration,
        after: EventId,
        before: Option<&Arc<str>>,
        relay: &Arc<Relay>,
        max_bytes: usize,
    ) -> Result<StandBy, Refused> {
        let standing = Standing { timeout: time, subscribers: 0, confirmed: None };
        let position = value(after).map(|position| (LAST_EVENT_ID, position));
        let before = before.and_then(|before| Some((ROOT_BEFORE, HeaderValue::from_str(before).ok()?)));
        let fields = [(STAND_BY, time.as_secs().into())].into_iter().chain(position).chain(before);
        let response = self.soon(standing, fields).await?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::NO_CONTENT => return Ok(StandBy::KnowsNothing),
            StatusCode::CONFLICT if response.headers().contains_key(ROOT) => {
                return name(response.headers(), &ROOT).map(StandBy::Root).ok_or_else(no_relay);
            }
            _ => return Err(refused(response).await),
        }
        let (head, body) = response.into_parts();
        let content_type = head.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let parser = content_type.and_then(|content_type| Parser::new(content_type, max_bytes)).ok_or_else(no_relay)?;
        let deliveries = NextDeliveries { body, parser, relay: relay.clone(), reserved: relay.reserve() };
        Ok(StandBy::HandsOver(HandedOver { deliveries, epochs: epochs(&head.headers) }))
    }

    /// Extends a subscription.
    pub(crate) fn refresh(&self, standing: Standing, id: HeaderValue) -> NextResponse {
        self.send(standing, [(SUBSCRIPTION, id)])
    }
}

/// A subscription that the next relay has accepted.
pub(crate) struct Accepted {
    pub(crate) id: HeaderValue,
    /// The position after which it delivers.
    pub(crate) position: EventId,
    pub(crate) timeout: Duration,
    /// The ends of the epochs at the next relay; the last one is its position.
    pub(crate) epochs: Vec<EventId>,
    /// This node keeps a copy, and has told the next relay that it has it up to this position.
    pub(crate) confirmed: Option<EventId>,
    /// The time between heartbeats, if the next relay tells it.
    pub(crate) heartbeat: Option<Duration>,
    pub(crate) deliveries: NextDeliveries,
}

/// The answer of a relay that was asked to keep a copy.
pub(crate) enum StandBy {
    /// It has known the channel.
    HandsOver(HandedOver),
    /// It has not known the channel.
    KnowsNothing,
    /// It keeps none, since this node is the root.
    Root(Arc<str>),
}

/// The publications that another relay hands over.
pub(crate) struct HandedOver {
    pub(crate) deliveries: NextDeliveries,
    /// The ends of the epochs that it knows.
    pub(crate) epochs: Vec<EventId>,
}

/// The epochs that a relay tells. None, if they are malformed.
fn epochs(headers: &HeaderMap) -> Vec<EventId> {
    let text = headers.get(EPOCHS).and_then(|epochs| epochs.to_str().ok()).unwrap_or_default();
    let epochs: Result<Vec<EventId>, _> = text.split(',').take(MAX_EPOCHS + 1).map(str::parse).collect();
    epochs.unwrap_or_default()
}

/// Reads the response to a subscription. Publications of more than `max_bytes` count as missed.
async fn accepted(
    response: Result<Response<Body>, Error>,
    standing: Standing,
    relay: Arc<Relay>,
    max_bytes: usize,
) -> Result<Accepted, Refused> {
    let response = response.map_err(unreachable)?;
    if response.status() != StatusCode::OK {
        return Err(refused(response).await);
    }
    let (head, body) = response.into_parts();
    let of_relay = || {
        let parser = Parser::new(head.headers.get(CONTENT_TYPE)?.to_str().ok()?, max_bytes)?;
        let position = head.headers.get(EVENT_ID)?.to_str().ok()?.parse().ok()?;
        Some((head.headers.get(SUBSCRIPTION)?.clone(), position, parser))
    };
    let (id, position, parser) = of_relay().ok_or_else(no_relay)?;
    let heartbeat = head.headers.get(HEARTBEAT).and_then(number);
    let heartbeat = heartbeat.map(|seconds| Duration::from_secs(seconds).min(MAX_HEARTBEAT));
    let reserved = relay.reserve();
    let timeout = standing.timeout;
    let (epochs, confirmed) = (epochs(&head.headers), standing.confirmed);
    Ok(Accepted {
        id,
        position,
        timeout,
        epochs,
        confirmed,
        heartbeat,
        deliveries: NextDeliveries { body, parser, relay, reserved },
    })
}

fn unreachable(error: Error) -> Refused {
    let reason = format!("the next relay cannot be reached: {error}");
    Refused { is_unreachable: true, ..Refused::new(error.status(), reason) }
}

fn no_relay() -> Refused {
    let reason = "the response of the next relay is not that of a relay; check the upstreams of `relay`";
    Refused::new(StatusCode::BAD_GATEWAY, reason)
}

/// A refusal of the next relay, with the reason that it gives.
pub(crate) async fn refused(response: Response<Body>) -> Refused {
    let status = response.status();
    if !status.is_client_error() && !status.is_server_error() {
        let reason = format!("the next relay responded {status}, as no relay does; check the upstreams of `relay`");
        return Refused::new(StatusCode::BAD_GATEWAY, reason);
    }
    let text = Limited::new(response.into_body(), MAX_REASON).collect();
    let text = tokio::time::timeout(REASON_TIMEOUT, text).await.ok().and_then(Result::ok);
    let text = text.map(|text| String::from_utf8_lossy(&text.to_bytes()).trim().to_owned()).unwrap_or_default();
    let colon = if text.is_empty() { "" } else { ": " };
    Refused::new(status, format!("the next relay responded {status}{colon}{text}"))
}

/// The name of a node in a field.
fn name(headers: &HeaderMap, field: &HeaderName) -> Option<Arc<str>> {
    headers.get(field)?.to_str().ok().map(Arc::from)
}

fn value(position: EventId) -> Option<HeaderValue> {
    // Digits and a hyphen.
    HeaderValue::try_from(position.to_string()).ok()
}

fn number(value: &HeaderValue) -> Option<u64> {
    value.to_str().ok()?.parse().ok()
}

/// A delivery of the next relay.
#[derive(Debug)]
pub(crate) enum NextDelivery {
    Publication(FedPublication),
    /// Publications that the next relay does not deliver.
    Gap {
        missed: Option<u64>,
        until: EventId,
    },
    /// Bytes without a whole delivery, such as a heartbeat.
    Nothing,
}

/// The deliveries of a subscription at the next relay.
pub(crate) struct NextDeliveries {
    body: Body,
    parser: Parser,
    relay: Arc<Relay>,
    /// The memory of what waits for the rest of its part.
    reserved: Reserved,
}

impl NextDeliveries {
    /// Whether the relay has ended them by itself.
    pub(crate) fn has_ended(&self) -> bool {
        self.parser.has_ended()
    }

    /// Takes the next delivery. The error tells why the subscription has ended.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<NextDelivery, String>> {
        if let Some(delivery) = self.take_part().map_err(|error| format!("malformed publication: {error}"))? {
            self.reserve();
            return Poll::Ready(Ok(delivery));
        }
        if self.parser.has_ended() {
            return Poll::Ready(Err("the next relay ended the subscription".to_owned()));
        }
        match ready!(std::pin::pin!(self.body.frame()).poll(cx)) {
            Some(Ok(frame)) => {
                self.parser.push(frame.data_ref().map_or(&[][..], |data| data));
                self.reserve();
                Poll::Ready(Ok(NextDelivery::Nothing))
            }
            Some(Err(error)) => Poll::Ready(Err(error.to_string())),
            None => Poll::Ready(Err("the next relay ended the subscription".to_owned())),
        }
    }

    /// Counts what waits for the rest of its part. A part that was taken counts as a publication.
    fn reserve(&mut self) {
        self.reserved = self.relay.reserve();
        // Without memory, publications are refused; these bytes have arrived already.
        let _ = self.relay.reserve_more(&mut self.reserved, self.parser.buffered() as u64);
    }

    fn take_part(&mut self) -> Result<Option<NextDelivery>, MalformedPart> {
        let Some(part) = self.parser.next_part()? else { return Ok(None) };
        let Part { mut headers, body, skipped } = part;
        let position = headers.remove(EVENT_ID).and_then(|id| id.to_str().ok()?.parse::<EventId>().ok());
        let Some(position) = position else { return Ok(Some(NextDelivery::Nothing)) };
        // A publication without content keeps its place, so that the history has no hole.
        let is_aborted = headers.contains_key(ABORTED);
        if let Some(missed) = headers.remove(MISSED).filter(|_| !is_aborted) {
            let missed = missed.to_str().ok().and_then(|text| text.parse().ok());
            return Ok(Some(NextDelivery::Gap { missed, until: position }));
        }
        if skipped.is_some() {
            return Ok(Some(NextDelivery::Gap { missed: Some(1), until: position }));
        }
        let mut is = |name: &HeaderName, value: &str| headers.remove(name).is_some_and(|field| field == value);
        let is_reliable = is(&RELAY, "reliable");
        let id = Some(position).filter(|_| !is(&DELIVER, "one"));
        // A copy: the body is a part of a larger buffer.
        let content = NewPublication { headers, body: Bytes::copy_from_slice(&body).into() };
        Ok(Some(NextDelivery::Publication(FedPublication { content, id, is_reliable })))
    }
}

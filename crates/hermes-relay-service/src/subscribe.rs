//! GET: a subscription, or the refresh of one.
//!
//! In: a request that asks for a subscription, by a field or by a form that only a subscription has. Out: a response whose
//! body has one publication after the other, until the timeout has passed or the client leaves. Never: more of the
//! queue in the body than one write to the client.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hermes_model::facts::{Facts, PathAndQuery};
use hermes_model::trust::{CONFIRMED, SUBSCRIBERS_BEHIND};
use hermes_relay::fields::{
    BRAID_SUBSCRIBE, CHANNELS, EVENT_ID, GROUP, HEARTBEAT, LAST_EVENT_ID, MAX_TIMEOUT, SUBSCRIBE, SUBSCRIPTION, TIMEOUT,
};
use hermes_relay::framing::Framing;
use hermes_relay::{
    Content, ContentReader, Delivery, End, EventId, NextPart, Publication, SubscribeError, SubscribeRequest,
    Subscription, SubscriptionId,
};
use hermes_signature::Grant;
use hermes_transport::body::{Body, BoxedBody};
use hermes_transport::error::Error;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode};
use http_body::{Frame, SizeHint};

use crate::backfill::Backfill;
use crate::deliveries::{Deliveries, DeliveryScope, Ended, leads_to};
use crate::feeds::{FeedHandle, Outcome, Refused};
use crate::moves;
use crate::next_channel::{ChannelRequests, NextChannel, Standing};
use crate::siblings::Siblings;
use crate::{
    INCREMENTAL, RelayRequest, certified, channel, channel_authority, lines, may_redirect, redirect, refusal,
    set_epochs, subject, text, upstream, url_token, wish,
};

/// Bytes of publications after which a frame of the body is full.
const FRAME_BYTES: usize = 64 << 10;
/// Content of this size is not copied, but has a frame of its own.
const MIN_OWN_FRAME_BYTES: usize = 16 << 10;
/// The channels that one subscription may name.
const MAX_CHANNELS: usize = 64;
/// The timeout of a subscription that only shows whether the next relay accepts it.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause before a channel whose feed has ended is fed again.
const FEED_PAUSE: Duration = Duration::from_millis(100);
/// Characters of the name of a group.
const MAX_GROUP: usize = 64;

pub(crate) async fn serve(request: &RelayRequest<'_>) -> Result<Response<Body>, Error> {
    let headers = &request.entry.facts.headers;
    if let Some(id) = text(headers, &SUBSCRIPTION)? {
        let grant = url_token::check_subscriber(&request.entry.facts, request.settings)?;
        let refreshed = refresh(request, id, timeout(request)?, grant.as_ref())?;
        if !refreshed.status().is_success() {
            return Ok(refreshed);
        }
        return Ok(moves::serve_client(request).await?.unwrap_or(refreshed));
    }
    let accept = text(headers, &ACCEPT)?;
    let is_event_source = accept.is_some_and(|accept| accept.to_ascii_lowercase().contains("text/event-stream"));
    let is_asked_for = [SUBSCRIBE, BRAID_SUBSCRIBE]
        .iter()
        .any(|name| headers.get(name).is_some_and(|value| value.as_bytes() == b"true" || value.as_bytes() == b"?1"));
    if !is_asked_for && !is_event_source {
        let reason = format!(
            "a channel has no content of its own; subscribe to it with `{SUBSCRIBE}: true`, or publish with PUT or POST"
        );
        return Err(Error::Malformed(reason));
    }
    let Some(framing) = Framing::select(accept, rand::random()) else {
        let reason = "a subscription is text/event-stream, multipart/mixed or application/x-ndjson\n".to_owned();
        return Ok(refusal(StatusCode::NOT_ACCEPTABLE, reason));
    };
    match begin(request).await? {
        Ok(begun) => Ok(stream(request, begun, framing, behind(&request.entry.facts)?.is_some())),
        Err(error) => Ok(not_begun(request, error)),
    }
}

/// Whether the next relay serves the request: a member of a group, since only one relay knows all members; or the refresh
/// of a subscription that this node does not have.
pub(crate) fn is_for_next(request: &RelayRequest<'_>, is_tunnel: bool) -> bool {
    let headers = &request.entry.facts.headers;
    let relay = &request.relays.of(&request.route.name, request.settings).relay;
    // A WebSocket refreshes nothing.
    let id = headers.get(SUBSCRIPTION).filter(|_| !is_tunnel);
    let id = id.and_then(|id| id.to_str().ok()?.trim().parse().ok());
    headers.contains_key(GROUP) || id.is_some_and(|id| !relay.has(id))
}

/// A subscription that has begun, and its timeout.
pub(crate) struct Begun {
    pub(crate) deliveries: Deliveries,
    pub(crate) timeout: Duration,
    /// The grant of the client's token, if the route asks for one.
    pub(crate) grant: Option<Grant>,
}

/// The reason why a subscription does not begin.
pub(crate) enum NotBegun {
    /// A bound of this relay.
    Here(SubscribeError),
    /// The next relay refuses one of its channels.
    AtNext(Refused),
    /// The root of the channel, to which the client is sent.
    Elsewhere(Box<str>),
    /// The root of the channel does not move.
    NotMoved(Response<Body>),
}

/// Begins the subscription that a request describes.
pub(crate) async fn begin(request: &RelayRequest<'_>) -> Result<Result<Begun, NotBegun>, Error> {
    let headers = &request.entry.facts.headers;
    let grant = url_token::check_subscriber(&request.entry.facts, request.settings)?;
    certified::check_subscriber(request, behind(&request.entry.facts)?.is_some())?;
    if let Some(refused) = moves::serve_client(request).await? {
        return Ok(Err(NotBegun::NotMoved(refused)));
    }
    let Channels { names, paths } = channels(request)?;
    if let Some(grant) = &grant {
        paths.iter().try_for_each(|path| url_token::check_channel(grant, path.path()))?;
    }
    let after = match text(headers, &LAST_EVENT_ID)?.or(Query::of(&request.entry.facts.path).last_event_id) {
        Some(position) => read_position(position, names.len())?,
        None => vec![None; names.len()],
    };
    let group = text(headers, &GROUP)?.map(Arc::<str>::from);
    if group.as_ref().is_some_and(|group| group.is_empty() || group.len() > MAX_GROUP) {
        return Err(Error::Malformed(format!("{GROUP} must have 1 to {MAX_GROUP} characters")));
    }
    let max_timeout = url_token::max_timeout(grant.as_ref(), request.settings.max_timeout);
    let timeout = timeout(request)?.unwrap_or(max_timeout);
    if let Err(error) = url_token::check_timeout(grant.as_ref(), timeout) {
        return Ok(Err(NotBegun::Here(error)));
    }
    let wanted = SubscribeRequest {
        id: SubscriptionId(rand::random()),
        subject: subject(request.entry),
        channels: names.into_iter().zip(after).collect(),
        group,
        timeout,
        behind: behind(&request.entry.facts)?,
        is_stand_by: confirmed(request)?.is_some(),
        epoch: rand::random(),
    };
    let clock = request.relays.clock();
    let wish = wish(request)?;
    Ok(join(request, &wanted, &paths, wish.as_ref()).await.map(|(subscription, nexts)| {
        let relay = &request.relays.of(&request.route.name, request.settings).relay;
        let max_bytes = usize::try_from(request.settings.unit).unwrap_or(usize::MAX);
        let lacking = subscription.channels().zip(subscription.lacks()).zip(&nexts);
        let backfills = lacking.filter_map(|(((channel, start), until), next)| {
            Some(Backfill::new(next.as_ref()?, channel.clone(), start, until?, relay.clone(), max_bytes))
        });
        let backfills = backfills.collect();
        let scope = DeliveryScope {
            route: request.route.name.clone(),
            paths,
            heartbeat: request.settings.heartbeat,
            clock,
            worker: request.worker.clone(),
            entry: request.entry.clone(),
        };
        Begun { deliveries: Deliveries::new(subscription, backfills, scope), timeout, grant }
    }))
}

/// Subscribes at this relay. Returns the channels at the next relay, too, if there is one; it feeds them before they are
/// joined.
async fn join(
    request: &RelayRequest<'_>,
    wanted: &SubscribeRequest,
    paths: &[PathAndQuery],
    wish: Option<&Arc<str>>,
) -> Result<(Subscription, Vec<Option<NextChannel>>), NotBegun> {
    let siblings = Siblings::of(request);
    let (may_redirect, peer) = (may_redirect(request), siblings.peer_of(&request.entry.facts));
    let (of_route, clock) = (&siblings.of_route, siblings.clock);
    if !siblings.exist() {
        let subscription = of_route.relay.subscribe(wanted.clone(), clock.now()).map_err(NotBegun::Here)?;
        return Ok((subscription, Vec::new()));
    }
    let requests: Vec<ChannelRequests> =
        paths.iter().map(|path| siblings.requests(&request.entry.facts, path)).collect();
    // A client that may not subscribe must not make this node subscribe.
    of_route.relay.may_subscribe(wanted).map_err(NotBegun::Here)?;
    // The channel went because nobody used it. Its copy, which nobody uses either, must not bring it back.
    let is_known = |(channel, _): &(Arc<str>, _)| of_route.feeds.contains(channel);
    if wanted.is_stand_by
        && wanted.behind == Some(0)
        && of_route.relay.is_crowded()
        && !wanted.channels.iter().all(is_known)
    {
        return Err(NotBegun::AtNext(Refused::new(StatusCode::GONE, "no room for a channel that nobody uses")));
    }
    'attempts: loop {
        let mut feeds = Vec::new();
        for ((channel, _), requests) in wanted.channels.iter().zip(&requests) {
            feeds.push(upstream::feed(&siblings, requests, channel, wish.cloned()).map_err(NotBegun::Here)?);
        }
        let mut nexts = Vec::new();
        for ((feed, requests), (channel, _)) in feeds.iter_mut().zip(&requests).zip(&wanted.channels) {
            // In a loop of relays, each would wait for the feed that a client of the next one has begun.
            if feed.is_begun_by_another() && wanted.behind.is_some() && !siblings.are_peers() {
                let probe = Standing { timeout: PROBE_TIMEOUT, subscribers: 0, confirmed: None };
                let ranking = siblings.ranking(channel, None);
                for next in ranking.above.iter().map(|upstream| requests.at(upstream)) {
                    next.subscribe(probe, None, of_route.relay.clone(), 0).await.map_err(NotBegun::AtNext)?;
                }
            }
            match feed.outcome().await {
                // A peer that this node follows must not follow it.
                Outcome::Follows(upstream)
                    if wanted.behind.is_some()
                        && peer.as_ref().and_then(|peer| siblings.upstream_of(peer)) == Some(upstream.clone()) =>
                {
                    let reason = "this relay follows the one that asks";
                    return Err(NotBegun::AtNext(Refused::new(StatusCode::LOOP_DETECTED, reason)));
                }
                Outcome::Follows(upstream) => match siblings.url_of(&upstream).filter(|_| may_redirect) {
                    Some(url) => return Err(NotBegun::Elsewhere(url)),
                    None => nexts.push(Some(requests.at(&upstream))),
                },
                Outcome::Leads => nexts.push(None),
                Outcome::Refused(refused) => return Err(NotBegun::AtNext(refused)),
                Outcome::Gone => {
                    tokio::time::sleep(FEED_PAUSE).await;
                    continue 'attempts;
                }
            }
        }
        let subscription = of_route.relay.subscribe(wanted.clone(), clock.now()).map_err(NotBegun::Here)?;
        let is_fed = |(channel, feed): (&(Arc<str>, _), &FeedHandle)| of_route.feeds.has(&channel.0, feed);
        // A feed that had no subscriber may have ended meanwhile. The attempts end by the timeouts of the route.
        if wanted.channels.iter().zip(&feeds).all(is_fed) {
            return Ok((subscription, nexts));
        }
        drop(subscription);
        tokio::time::sleep(FEED_PAUSE).await;
    }
}

/// Checks a request that the next relay serves. That relay knows neither the routes of this node nor its tokens. So the request has
/// one channel, for which this node has decided; it publishes nothing; and it shows that it does not exceed its grant.
pub(crate) fn check_forwarded(request: &RelayRequest<'_>, is_tunnel: bool) -> Result<(), Error> {
    let facts = &request.entry.facts;
    if is_tunnel {
        let reason = format!(
            "only the root of a channel has members of a group by WebSocket; write {ACCEPT}: text/event-stream, or leave out {GROUP}"
        );
        return Err(Error::Malformed(reason));
    }
    if facts.headers.contains_key(CHANNELS) {
        let reason =
            format!("only the root of a channel takes {CHANNELS} of members of a group and of refreshes; leave it out");
        return Err(Error::Malformed(reason));
    }
    let Some(grant) = url_token::check_subscriber(facts, request.settings)? else { return Ok(()) };
    let max = url_token::max_timeout(Some(&grant), Duration::MAX);
    if timeout(request)?.is_none_or(|timeout| timeout > max) {
        let max = max.as_secs();
        return Err(Error::Malformed(format!("the token is valid for {max} s; write a {TIMEOUT} that is not longer")));
    }
    Ok(())
}

/// The number of subscribers behind a relaying node. `None` for other clients: their claim is ignored.
fn behind(facts: &Facts) -> Result<Option<u64>, Error> {
    let Some(number) = text(&facts.headers, &SUBSCRIBERS_BEHIND)?.filter(|_| facts.trust.is_proxy()) else {
        return Ok(None);
    };
    let malformed = || Error::Malformed(format!("{SUBSCRIBERS_BEHIND} must be a number"));
    number.parse::<u32>().map(|number| Some(number.into())).map_err(|_| malformed())
}

/// The position up to which a relaying node keeps a copy. `None` for other clients: their claim is ignored.
fn confirmed(request: &RelayRequest<'_>) -> Result<Option<EventId>, Error> {
    let facts = &request.entry.facts;
    let text = text(&facts.headers, &CONFIRMED)?.filter(|_| facts.trust.is_proxy());
    let malformed = |_| Error::Malformed(format!("{CONFIRMED} must be a position"));
    text.map(str::parse).transpose().map_err(malformed)
}

/// The timeout that a request asks for.
fn timeout(request: &RelayRequest<'_>) -> Result<Option<Duration>, Error> {
    let facts = &request.entry.facts;
    text(&facts.headers, &TIMEOUT)?.or(Query::of(&facts.path).timeout).map(seconds).transpose()
}

/// The fields that a client can only write into the query: EventSource sends none of its own.
#[derive(Default)]
struct Query<'a> {
    timeout: Option<&'a str>,
    last_event_id: Option<&'a str>,
}

impl<'a> Query<'a> {
    fn of(path: &'a PathAndQuery) -> Self {
        let mut query = Self::default();
        let pairs = path.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
        for (name, value) in pairs {
            match name {
                "hermes-timeout" => query.timeout = Some(value),
                "last-event-id" => query.last_event_id = Some(value),
                _ => {}
            }
        }
        query
    }
}

fn seconds(text: &str) -> Result<Duration, Error> {
    let seconds = text.parse::<u32>().ok().filter(|seconds| *seconds > 0 && text.bytes().all(|b| b.is_ascii_digit()));
    let seconds = seconds.ok_or_else(|| Error::Malformed(format!("{TIMEOUT} must be a number of seconds above 0")))?;
    Ok(Duration::from_secs(seconds.into()))
}

fn refresh(
    request: &RelayRequest<'_>,
    id: &str,
    timeout: Option<Duration>,
    grant: Option<&Grant>,
) -> Result<Response<Body>, Error> {
    let relay = &request.relays.of(&request.route.name, request.settings).relay;
    let timeout = timeout.unwrap_or_else(|| url_token::max_timeout(grant, request.settings.max_timeout));
    let (subject, behind, now) = (subject(request.entry), behind(&request.entry.facts)?, request.relays.clock().now());
    let confirmed = confirmed(request)?;
    let id: Result<SubscriptionId, _> = id.parse();
    if let (Some(grant), Ok(id)) = (grant, &id) {
        // A token for one channel must not extend a subscription to another one.
        let authority = channel_authority(request);
        for channel in relay.channels_of(*id, &subject) {
            url_token::check_channel(grant, channel.strip_prefix(&*authority).unwrap_or_default())?;
        }
    }
    let refreshed = id.and_then(|id| {
        url_token::check_timeout(grant, timeout)?;
        relay.refresh(id, &subject, timeout, behind, now)?;
        if behind.is_some() {
            relay.confirm(id, confirmed);
        }
        Ok(())
    });
    if let Err(error) = refreshed {
        return Ok(refused(request, &error));
    }
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = StatusCode::NO_CONTENT;
    response.headers_mut().insert(TIMEOUT, timeout.as_secs().into());
    Ok(response)
}

/// The response to a subscription that does not begin.
pub(crate) fn not_begun(request: &RelayRequest<'_>, error: NotBegun) -> Response<Body> {
    match error {
        NotBegun::Here(error) => refused(request, &error),
        NotBegun::Elsewhere(origin) => redirect(request, &origin),
        NotBegun::NotMoved(response) => response,
        NotBegun::AtNext(refused) => refusal(refused.status, format!("{}\n", refused.reason)),
    }
}

fn refused(request: &RelayRequest<'_>, error: &SubscribeError) -> Response<Body> {
    let metrics = &request.worker.shared.metrics;
    let status = match error {
        SubscribeError::TimeoutTooLong(_) => StatusCode::BAD_REQUEST,
        SubscribeError::Unknown => StatusCode::NOT_FOUND,
        SubscribeError::Closed => StatusCode::SERVICE_UNAVAILABLE,
        SubscribeError::TooManyOfSubject(_) => {
            metrics.limit("relay-subscriptions-per-client");
            StatusCode::TOO_MANY_REQUESTS
        }
        SubscribeError::TooManyChannels(_) => {
            metrics.limit("relay-channels");
            StatusCode::SERVICE_UNAVAILABLE
        }
        SubscribeError::TooManySubscriptions(_) => {
            metrics.limit("relay-subscriptions");
            StatusCode::SERVICE_UNAVAILABLE
        }
    };
    let mut response = refusal(status, format!("{error}\n"));
    if let SubscribeError::TimeoutTooLong(longest) = error {
        response.headers_mut().insert(MAX_TIMEOUT, longest.as_secs().into());
    }
    response
}

/// The channels of a subscription.
struct Channels {
    names: Vec<Arc<str>>,
    paths: Vec<PathAndQuery>,
}

/// The channels of a subscription: that of the URI, and others of the same authority that the same route serves.
fn channels(request: &RelayRequest<'_>) -> Result<Channels, Error> {
    let facts = &request.entry.facts;
    let mut all = Channels { names: vec![channel(request, None)], paths: vec![facts.path.clone()] };
    let lists: Vec<&str> = lines(&facts.headers, &CHANNELS).collect::<Result<_, _>>()?;
    for path in lists.iter().flat_map(|list| list.split(',')).map(str::trim).filter(|path| !path.is_empty()) {
        let malformed = || Error::Malformed(format!("{CHANNELS} must be paths such as /a, /b, not {path:?}"));
        let parsed: PathAndQuery = path.parse().map_err(|_| malformed())?;
        // A fragment is no part of what a server is asked for.
        if !path.starts_with('/') || path.contains('#') || parsed.query().is_some() {
            return Err(malformed());
        }
        if certified::is_for_holder(path) {
            return Err(Error::Malformed(format!(
                "{path} is self-certifying; subscribe to it by a request of its own"
            )));
        }
        let name = channel(request, Some(path));
        if all.names.contains(&name) {
            continue;
        }
        if all.names.len() >= MAX_CHANNELS {
            return Err(Error::Malformed(format!("a subscription has at most {MAX_CHANNELS} channels")));
        }
        if !leads_to(&request.route.name, request.entry, &parsed, &request.worker.snapshot()) {
            let reason = format!("{path} is no channel of route {} for this client", request.route.name);
            let (status, label) = (StatusCode::FORBIDDEN, "http_request_denied");
            return Err(Error::Denied { status, reason, label });
        }
        all.names.push(name);
        all.paths.push(parsed);
    }
    Ok(all)
}

/// Reads a position: the latest publication of each channel, or `-` for a channel without one.
fn read_position(text: &str, channels: usize) -> Result<Vec<Option<EventId>>, Error> {
    let one = |part: &str| if part.trim() == "-" { Ok(None) } else { part.parse().map(Some) };
    let ids: Result<Vec<_>, _> = text.split(',').map(one).collect();
    let ids = ids.map_err(|error| Error::Malformed(format!("{LAST_EVENT_ID}: {error}")))?;
    if ids.len() != channels {
        let reason = format!("{LAST_EVENT_ID} names {} channels, the subscription {channels}", ids.len());
        return Err(Error::Malformed(reason));
    }
    Ok(ids)
}

fn stream(request: &RelayRequest<'_>, begun: Begun, framing: Framing, is_node: bool) -> Response<Body> {
    let Begun { mut deliveries, timeout, .. } = begun;
    // A node gets whole publications, so that a publisher that breaks off does not end the subscription of all behind it.
    if !is_node && matches!(framing, Framing::Multipart { .. }) {
        deliveries.cut_through();
    }
    let (content_type, start) = (framing.content_type(), deliveries.position());
    let epochs = deliveries.subscription.epochs().to_vec();
    let id = deliveries.subscription.id().to_string();
    let mut response = Response::new(Body::boxed(SubscriptionBody {
        first: Some(framing.begin(&start)).filter(|first| !first.is_empty()),
        rest: None,
        deliveries,
        framing,
        has_ended: false,
    }));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, content_type);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(INCREMENTAL, HeaderValue::from_static("?1"));
    headers.insert(TIMEOUT, timeout.as_secs().into());
    headers.insert(HEARTBEAT, request.settings.heartbeat.as_secs().max(1).into());
    // Hexadecimal digits, hyphens and commas.
    for (name, value) in [(SUBSCRIPTION, id), (EVENT_ID, start)] {
        headers.extend(HeaderValue::try_from(value).ok().map(|value| (name, value)));
    }
    if is_node {
        set_epochs(headers, &epochs);
    }
    response
}

/// The body of a subscription.
struct SubscriptionBody {
    /// Bytes before all deliveries.
    first: Option<Bytes>,
    /// The rest of a delivery.
    rest: Option<Rest>,
    deliveries: Deliveries,
    framing: Framing,
    has_ended: bool,
}

/// The content of a publication whose head has been sent, and the bytes after it. The publication counts its memory as long.
struct Rest {
    of: RestOf,
    _publication: Arc<Publication>,
}

enum RestOf {
    /// The content from this byte on.
    Whole(Bytes, usize, Bytes),
    Arriving(ContentReader, Bytes),
}

impl Rest {
    fn new(content: &Content, tail: Bytes, publication: Arc<Publication>) -> Self {
        let of = match content {
            Content::Whole(bytes) => RestOf::Whole(bytes.clone(), 0, tail),
            Content::Arriving(content) => RestOf::Arriving(ContentReader::new(content), tail),
        };
        Self { of, _publication: publication }
    }

    /// Returns the next bytes. `None`: those were all.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Error>>> {
        let tail = match &mut self.of {
            RestOf::Whole(bytes, from, _) if *from < bytes.len() => {
                let frame = bytes.slice(*from..bytes.len().min(*from + FRAME_BYTES));
                *from += frame.len();
                return Poll::Ready(Some(Ok(frame)));
            }
            RestOf::Whole(_, _, tail) => tail,
            RestOf::Arriving(reader, tail) => match ready!(reader.poll_part(cx)) {
                NextPart::Bytes(bytes) => return Poll::Ready(Some(Ok(bytes))),
                NextPart::End => tail,
                NextPart::Aborted => {
                    let reason = "it broke off a publication whose beginning was sent".to_owned();
                    return Poll::Ready(Some(Err(Error::Broken {
                        peer: "the publisher".into(),
                        reason,
                        unprocessed: false,
                    })));
                }
            },
        };
        Poll::Ready(Some(std::mem::take(tail)).filter(|tail| !tail.is_empty()).map(Ok))
    }
}

impl SubscriptionBody {
    fn end(&mut self, ended: Ended) -> Option<Result<Frame<Bytes>, Error>> {
        self.has_ended = true;
        match ended {
            Ended::ByRelay(End::Expired) => {
                Some(self.framing.end()).filter(|end| !end.is_empty()).map(|end| Ok(Frame::data(end)))
            }
            // A client that reads nothing at all loses its connection by the timeout `progress`.
            Ended::ByRelay(End::Stalled) => Some(Err(Error::ClientGone(ended.to_string()))),
            Ended::ByRelay(End::Closed) | Ended::Denied => Some(Err(Error::Reconfigured(ended.to_string()))),
        }
    }
}

impl BoxedBody for SubscriptionBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        if let Some(rest) = &mut self.rest {
            if let Some(next) = ready!(rest.poll_next(cx)) {
                self.has_ended = next.is_err();
                return Poll::Ready(Some(next.map(Frame::data)));
            }
            self.rest = None;
        }
        let mut out = Vec::new();
        loop {
            match self.deliveries.poll_delivery(cx) {
                Poll::Ready(Ok(delivery)) => {
                    let names_channel = self.deliveries.has_several_channels();
                    let position = self.deliveries.position();
                    let rest =
                        self.framing.write_around(&mut out, &delivery, &position, names_channel, MIN_OWN_FRAME_BYTES);
                    if let (Some((content, tail)), Delivery::Publication(publication)) = (rest, delivery) {
                        self.rest = Some(Rest::new(&content, tail, publication));
                    }
                    if self.rest.is_some() || out.len() >= FRAME_BYTES {
                        return Poll::Ready(Some(Ok(Frame::data(out.into()))));
                    }
                }
                // The next poll reports the end.
                Poll::Ready(Err(_)) | Poll::Pending if !out.is_empty() => {
                    self.deliveries.delay_heartbeat();
                    return Poll::Ready(Some(Ok(Frame::data(out.into()))));
                }
                Poll::Ready(Err(ended)) => return Poll::Ready(self.end(ended)),
                Poll::Pending => {
                    ready!(self.deliveries.poll_idle(cx));
                    if self.deliveries.is_live() {
                        return Poll::Ready(Some(Ok(Frame::data(self.framing.heartbeat()))));
                    }
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

//! PUT and POST: a publication.
//!
//! In: a request with a body, which is read whole, or cut through. Out: the number of subscribers and of deliveries. A reliable
//! publication waits while a queue is full; publications of one channel that wait are served in the order of their arrival.
//! Never: a write to a subscriber's connection.

mod cut_through;

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_model::facts::Facts;
use hermes_model::snapshot::{RelayMode, RootChoice};
use hermes_relay::fields::{COPIES, DELIVER, DELIVERED, EVENT_ID, GROUP, LAST_EVENT_ID, MOVE, RELAY, SUBSCRIBERS};
use hermes_relay::{
    Audience, Content, Copies, EventId, NewPublication, PublishError, PublishProgress, Receipt, Relay, Reserved,
};
use hermes_signature::{Right, SIGNATURE, SIGNATURE_INPUT};
use hermes_transport::body::{Body, RequestBody};
use hermes_transport::error::{Error, Retry};
use hermes_transport::runtime::session::WaitGuard;
use http::header::{CONTENT_LENGTH, EXPECT, HeaderName, ORIGIN};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tokio::time::Instant;

use crate::directory::Root;
use crate::feeds::{Outcome, Refused};
use crate::next_channel::{ChannelRequests, refused as refused_by_next};
use crate::receipts::count;
use crate::siblings::Siblings;
use crate::{RelayRequest, certified, channel, may_redirect, redirect, refusal, text, upstream, url_token, wish};
use crate::{locate, moves};

/// The fields that describe the content of a publication all begin so.
const CONTENT_FIELDS: &str = "content-";
/// The time for which a reliable publication waits for another copy when the last one is lost.
const GRACE: Duration = Duration::from_secs(4);
/// The time for which a publication waits until this node has found the root of its channel.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// The attempts to find the root of a channel whose root moves, and the pause between two of them.
const MAX_ATTEMPTS: usize = 20;
const FEED_PAUSE: Duration = Duration::from_millis(100);
/// Bytes of these fields. Readers of parts accept 16 KiB (`hermes_relay::framing::multipart`).
const MAX_FIELD_BYTES: usize = 8 << 10;

pub(crate) async fn serve(request: &RelayRequest<'_>, body: RequestBody) -> Result<Response<Body>, Error> {
    let facts = &request.entry.facts;
    let mode = match text(&facts.headers, &RELAY)? {
        None => request.settings.mode,
        Some("realtime") => RelayMode::Realtime,
        Some("reliable") => RelayMode::Reliable,
        Some(_) => return Err(Error::Malformed(format!("{RELAY} must be realtime or reliable"))),
    };
    let audience = match text(&facts.headers, &DELIVER)? {
        None | Some("all") => Audience::All,
        Some("one") => Audience::OneOfEachGroup,
        Some(_) => return Err(Error::Malformed(format!("{DELIVER} must be all or one"))),
    };
    // Before anything of the body takes memory.
    url_token::check(facts, request.settings, Right::Publish)?;
    let signed = certified::check_publisher(request)?;
    let mut outlet = Outlet::new(request, channel(request, None), mode, audience);
    outlet.wish = wish(request)?;
    let relay = outlet.relay().clone();
    let headers = content_fields(&facts.headers);
    let length: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if length > MAX_FIELD_BYTES {
        let reason = format!("the content-* fields of a publication have at most {MAX_FIELD_BYTES} bytes\n");
        return Ok(refusal(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, reason));
    }
    // Before the content is sent: the client is to send it to the root.
    if !facts.headers.contains_key(MOVE) {
        match outlet.redirect_target().await {
            Ok(Some(origin)) => return Ok(redirect(request, &origin)),
            Ok(None) => {}
            Err(error) => return response(request, Err(error)),
        }
    }
    body.prepare(request.entry, 0, None);
    let mut arriving = pin!(body.attempt());
    // A signature covers the whole content.
    if signed.is_none() && cut_through::is_for(request, &outlet, arriving.size_hint().exact()) {
        match cut_through::serve(request, &outlet, &headers, arriving.as_mut()).await? {
            Ok(Some(published)) => return response(request, Ok(published)),
            Ok(None) => {}
            Err(error) => return response(request, Err(error)),
        }
    }
    // Publications that wait for room count, too.
    let mut reserved = relay.reserve();
    let body = match read(request, &relay, &mut reserved, arriving).await? {
        Ok(body) => body,
        Err(BodyError::TooLong) => {
            let most = request.settings.unit;
            let reason = format!("a publication of this route has at most {most} bytes (`relay.unit`)\n");
            return Ok(refusal(StatusCode::PAYLOAD_TOO_LARGE, reason));
        }
        Err(BodyError::Refused(error)) => return Ok(refused(&error)),
    };
    if let Some(signed) = signed {
        certified::take_content(request, signed, &body.whole())?;
    }
    if let Some(refused) = moves::serve_client(request).await? {
        return Ok(refused);
    }
    let content = NewPublication { headers, body };
    let published = {
        // A slow subscriber may take longer than the timeouts of the route.
        let _waits = WaitGuard::begin(request.entry);
        outlet.publish(without_page((**facts).clone()), content).await
    };
    response(request, published)
}

fn response(request: &RelayRequest<'_>, published: Result<Published, NotPublished>) -> Result<Response<Body>, Error> {
    match published {
        Ok(published) => Ok(answer(published)),
        Err(NotPublished::Here(error)) => Ok(refused(&error)),
        Err(NotPublished::AtNext(refused)) => Ok(refusal(refused.status, format!("{}\n", refused.reason))),
        Err(NotPublished::Elsewhere(origin)) => Ok(redirect(request, &origin)),
        Err(NotPublished::Unreachable(error)) => Err(error),
    }
}

/// The request of a publication for the next relay. The page was judged here, and the body has arrived.
fn without_page(mut facts: Facts) -> Facts {
    for name in [ORIGIN, EXPECT, MOVE] {
        facts.headers.remove(name);
    }
    facts
}

/// The request of a publication through a WebSocket that this request opened. It is decided like a POST, whose other
/// fields are those of the route.
pub(crate) fn of_socket(facts: &Facts, content: &NewPublication) -> Facts {
    let mut facts = without_page(facts.clone());
    facts.method = Method::POST;
    let is_of_socket = |name: &HeaderName| {
        name.as_str().starts_with("sec-websocket-") || [LAST_EVENT_ID, DELIVER, GROUP, RELAY].contains(name)
    };
    let names: Vec<HeaderName> = facts.headers.keys().filter(|name| is_of_socket(name)).cloned().collect();
    for name in names {
        facts.headers.remove(name);
    }
    facts.headers.extend(content.headers.clone());
    facts
}

/// A channel to publish to, in one mode.
#[derive(Clone)]
pub(crate) struct Outlet {
    channel: Arc<str>,
    mode: RelayMode,
    audience: Audience,
    siblings: Siblings,
    /// Requests about the channel to other relays.
    requests: ChannelRequests,
    stall: Duration,
    /// The peer that the client asks for as the root.
    wish: Option<Arc<str>>,
    may_redirect: bool,
}

/// The outcome of a publication.
pub(crate) struct Published {
    pub(crate) receipt: Receipt,
    /// The other relays that have it, too.
    copies: u64,
}

/// The reason why nothing was published.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotPublished {
    /// A bound of this relay.
    #[error("{0}")]
    Here(#[from] PublishError),
    /// The next relay refuses it.
    #[error("{}", .0.reason)]
    AtNext(Refused),
    /// The client is to publish at the root.
    #[error("the root of the channel is at {0}")]
    Elsewhere(Box<str>),
    /// It may have been published, if the next relay broke off before it responded.
    #[error("the next relay cannot be reached: {0}")]
    Unreachable(Error),
}

impl Outlet {
    pub(crate) fn new(request: &RelayRequest<'_>, channel: Arc<str>, mode: RelayMode, audience: Audience) -> Self {
        let siblings = Siblings::of(request);
        let requests = siblings.requests(&request.entry.facts, &request.entry.facts.path);
        let may_redirect = may_redirect(request);
        Self { channel, mode, audience, siblings, requests, stall: request.settings.stall, wish: None, may_redirect }
    }

    pub(crate) fn route(&self) -> &Arc<str> {
        &self.siblings.route
    }

    pub(crate) fn audience(&self) -> Audience {
        self.audience
    }

    pub(crate) fn relay(&self) -> &Arc<Relay> {
        &self.siblings.of_route.relay
    }

    /// Publishes at the root of the channel, as the client of `facts`.
    pub(crate) async fn publish(&self, facts: Facts, content: NewPublication) -> Result<Published, NotPublished> {
        if !self.siblings.exist() {
            return Ok(self.publish_here(content).await?);
        }
        let feeds = &self.siblings.of_route.feeds;
        // Otherwise each node on the way would try again for each attempt of the one before.
        let is_first = !facts.trust.is_proxy();
        let mut attempts = 0;
        loop {
            attempts += 1;
            let is_last = attempts == MAX_ATTEMPTS;
            let upstream = match self.place().await? {
                Outcome::Follows(upstream) => upstream,
                Outcome::Leads => match self.publish_here(content.clone()).await {
                    // A peer has just taken over.
                    Err(PublishError::NotRoot) if !is_last => {
                        tokio::time::sleep(FEED_PAUSE).await;
                        continue;
                    }
                    published => return Ok(published?),
                },
                Outcome::Refused(refused) => return Err(NotPublished::AtNext(refused)),
                Outcome::Gone if is_last => return Err(PublishError::NotRoot.into()),
                Outcome::Gone => {
                    tokio::time::sleep(FEED_PAUSE).await;
                    continue;
                }
            };
            if let Some(origin) = self.siblings.url_of(&upstream).filter(|_| self.may_redirect) {
                return Err(NotPublished::Elsewhere(origin));
            }
            let sent = self.siblings.next.send(upstream.clone(), facts.clone(), content.body.whole()).await;
            return match sent {
                // The root has just moved, or it is to begin.
                Ok(response)
                    if is_first
                        && response.status() == StatusCode::LOOP_DETECTED
                        && self.siblings.are_peers()
                        && !is_last =>
                {
                    tokio::time::sleep(FEED_PAUSE).await;
                    continue;
                }
                Ok(response) => of_next(response).await,
                // The peers after it do without it. A second failure of the only one is final.
                Err(error) if error.retry() == Retry::Always && self.siblings.are_peers() && !is_last => {
                    if feeds.is_away(&upstream) {
                        tokio::time::sleep(FEED_PAUSE).await;
                    }
                    feeds.set_away(&upstream);
                    continue;
                }
                Err(error) => Err(NotPublished::Unreachable(error)),
            };
        }
    }

    /// The way to the root. A node that only publishes has no feed, so that it need not subscribe.
    async fn place(&self) -> Result<Outcome, NotPublished> {
        let of_route = &self.siblings.of_route;
        let is_first = self.siblings.choice() == Some(RootChoice::First);
        // While the feed looks for the root, another relay would look for it here.
        if is_first && of_route.feeds.progress(&self.channel).is_some() {
            return self.outcome().await;
        }
        // The answer holds for a few seconds, so that not each publication asks.
        if is_first && of_route.directory.root(&self.channel).is_none() {
            let root = locate::root(&self.siblings, &self.requests, &self.channel, self.wish.as_ref()).await;
            if let Some(Root { node, .. }) = root {
                of_route.directory.assign(&self.channel, Root { node, before: None });
            }
        }
        match self.siblings.next_of(&self.channel) {
            Some(upstream) => Ok(Outcome::Follows(upstream)),
            None => self.outcome().await,
        }
    }

    /// Waits until this node has its place in the tree of the channel.
    async fn outcome(&self) -> Result<Outcome, NotPublished> {
        let feed = upstream::feed(&self.siblings, &self.requests, &self.channel, self.wish.clone());
        let mut feed = feed
            .map_err(|error| NotPublished::AtNext(Refused::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())))?;
        let outcome = tokio::time::timeout(MAX_WAIT, feed.outcome()).await;
        outcome.map_err(|_| {
            let reason = "this node has not found the root of the channel; try again";
            NotPublished::AtNext(Refused::new(StatusCode::SERVICE_UNAVAILABLE, reason))
        })
    }

    /// Publishes at this relay. A reliable publication waits until the relays that keep a copy have it.
    async fn publish_here(&self, content: NewPublication) -> Result<Published, PublishError> {
        let receipt = self.queue_here(content).await?;
        self.await_copies(receipt).await
    }

    /// Puts a publication into the queues of this relay, and counts. A reliable one waits until all queues have room, and until
    /// reliable publications before it are in them.
    async fn queue_here(&self, content: NewPublication) -> Result<Receipt, PublishError> {
        let queued = match self.mode {
            RelayMode::Realtime => {
                let (epoch, now) = (rand::random(), self.siblings.clock.now());
                self.relay().publish_realtime(&self.channel, content, self.audience, epoch, now)
            }
            RelayMode::Reliable => self.publish_reliable(&content).await,
        };
        let metrics = &self.siblings.worker.shared.metrics;
        match &queued {
            Ok(receipt) => count(metrics, self.route(), receipt),
            Err(PublishError::TooManyChannels(_)) => metrics.limit("relay-channels"),
            Err(PublishError::Memory(_)) => metrics.limit("relay-memory"),
            Err(PublishError::Closed | PublishError::NotRoot) => {}
        }
        queued
    }

    /// Waits until the relays that keep a copy have a publication, if it is reliable.
    async fn await_copies(&self, receipt: Receipt) -> Result<Published, PublishError> {
        let has_copies = self.mode == RelayMode::Reliable && self.siblings.are_peers() && self.relay().keeps_history();
        let copies = match receipt.id.filter(|_| has_copies) {
            Some(id) => self.copies(id).await?,
            None => 0,
        };
        Ok(Published { receipt, copies })
    }

    /// The origin of the root, to which the client is redirected. `None`: it is this node, or is not known, or the client stays.
    async fn redirect_target(&self) -> Result<Option<Box<str>>, NotPublished> {
        if !self.may_redirect || !self.siblings.have_urls() {
            return Ok(None);
        }
        Ok(match self.place().await? {
            Outcome::Follows(upstream) => self.siblings.url_of(&upstream),
            // The publication itself tells why not.
            Outcome::Leads | Outcome::Refused(_) | Outcome::Gone => None,
        })
    }

    /// Whether this node is the root of the channel.
    async fn leads(&self) -> Result<bool, NotPublished> {
        Ok(!self.siblings.exist() || matches!(self.place().await?, Outcome::Leads))
    }

    /// Waits until all relays that keep a copy have a publication, and returns their number. One that does not confirm it
    /// for as long as a subscriber may read nothing keeps no copy any more. If the last copy has just been lost, another relay
    /// may keep one in a moment; and the one that has lost its connection counts its copy as complete until then.
    ///
    /// # Errors
    /// Another relay has become the root without taking over.
    async fn copies(&self, id: EventId) -> Result<u64, PublishError> {
        let Some(mut copies) = self.relay().copies(&self.channel) else { return Ok(0) };
        let mut stalls_at = Instant::now() + self.stall;
        loop {
            let Copies { stand_bys, until, lost, is_root, is_handed_over } = *copies.borrow_and_update();
            if is_handed_over {
                return Ok(1);
            }
            if !is_root {
                return Err(PublishError::NotRoot);
            }
            if stand_bys > 0 && until >= id.sequence {
                return Ok(stand_bys as u64);
            }
            let patience = match lost {
                Some(lost) if stand_bys == 0 => (lost + GRACE).saturating_sub(self.siblings.clock.now()),
                None if stand_bys == 0 => Duration::ZERO,
                _ => stalls_at.saturating_duration_since(Instant::now()),
            };
            if patience.is_zero() && stand_bys == 0 {
                return Ok(0);
            }
            if tokio::time::timeout(patience, copies.changed()).await.is_err() && stand_bys > 0 {
                let ended = self.relay().end_stand_bys(&self.channel, id);
                self.siblings.worker.shared.metrics.limit_by("relay-stalled", ended);
                stalls_at = Instant::now() + self.stall;
            }
        }
    }

    async fn publish_reliable(&self, content: &NewPublication) -> Result<Receipt, PublishError> {
        let turn = self.relay().turn(&self.channel);
        let _turn = match &turn {
            // The semaphore is never closed.
            Some(turn) => turn.acquire().await.ok(),
            None => None,
        };
        let epoch = rand::random();
        let mut timer = pin!(tokio::time::sleep(Duration::ZERO));
        std::future::poll_fn(|cx| {
            loop {
                let (now, waker) = (self.siblings.clock.now(), cx.waker());
                match self.relay().poll_publish_reliable(&self.channel, content, self.audience, epoch, waker, now) {
                    Ok(PublishProgress::Done(receipt)) => return Poll::Ready(Ok(receipt)),
                    Ok(PublishProgress::Waiting { until }) => {
                        timer.as_mut().reset(Instant::now() + until.saturating_sub(now));
                        ready!(timer.as_mut().poll(cx));
                    }
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
        })
        .await
    }
}

/// The outcome at the root, from the response of the next relay.
async fn of_next(response: Response<Body>) -> Result<Published, NotPublished> {
    if !response.status().is_success() {
        return Err(NotPublished::AtNext(refused_by_next(response).await));
    }
    let text = |name: &HeaderName| response.headers().get(name).and_then(|value| value.to_str().ok());
    let number = |name: &HeaderName| text(name).and_then(|text| text.parse().ok()).unwrap_or_default();
    let (subscribers, delivered) = (number(&SUBSCRIBERS), number(&DELIVERED));
    let id = text(&EVENT_ID).and_then(|id| id.parse().ok());
    let receipt = Receipt { id, subscribers, delivered, dropped: subscribers.saturating_sub(delivered) };
    Ok(Published { receipt, copies: number(&COPIES) })
}
fn refused(error: &PublishError) -> Response<Body> {
    refusal(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n"))
}

/// The reason why a body was not read to its end.
enum BodyError {
    TooLong,
    Refused(PublishError),
}

/// Reads the body.
async fn read<B>(
    request: &RelayRequest<'_>,
    relay: &Relay,
    reserved: &mut Reserved,
    mut body: Pin<&mut B>,
) -> Result<Result<Content, BodyError>, Error>
where
    B: http_body::Body<Data = Bytes, Error = Error>,
{
    let most = usize::try_from(request.settings.unit).unwrap_or(usize::MAX);
    if body.size_hint().lower() > most as u64 {
        return Ok(Err(BodyError::TooLong));
    }
    // A publication outlives its connection, so it must not keep a read buffer of the connection that is hardly used.
    let announced = body.size_hint().exact().filter(|length| *length >= cut_through::MIN_BYTES);
    let parts = announced.and_then(|length| usize::try_from(length).ok());
    let mut parts = parts.map(|length| cut_through::writer(request, length));
    let content = parts.as_ref().map(|parts| Content::Arriving(parts.content()));
    let mut whole = BytesMut::new();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        length += data.len();
        if length > most {
            return Ok(Err(BodyError::TooLong));
        }
        if let Err(error) = relay.reserve_more(reserved, data.len() as u64) {
            request.worker.shared.metrics.limit("relay-memory");
            return Ok(Err(BodyError::Refused(error)));
        }
        match &mut parts {
            Some(parts) => parts.push(data).map_err(|error| Error::Malformed(error.to_string()))?,
            None => whole.extend_from_slice(&data),
        }
    }
    match parts {
        Some(parts) => {
            parts.content().count(std::mem::replace(reserved, relay.reserve()));
            parts.finish().map_err(|error| Error::Malformed(error.to_string()))?;
        }
        // Without spare capacity.
        None => return Ok(Ok(Bytes::from(whole.freeze().to_vec().into_boxed_slice()).into())),
    }
    Ok(Ok(content.unwrap_or_default()))
}

fn content_fields(headers: &HeaderMap) -> HeaderMap {
    // Subscribers may verify a signature, whatever relays are between.
    let is_signature = |name: &HeaderName| [SIGNATURE, SIGNATURE_INPUT].contains(name);
    let is_content =
        |name: &HeaderName| name.as_str().starts_with(CONTENT_FIELDS) && *name != CONTENT_LENGTH || is_signature(name);
    let fields = headers.iter().filter(|(name, _)| is_content(name));
    // A clone of a value would keep the buffer of the whole head.
    let copied = |value: &HeaderValue| HeaderValue::from_bytes(value.as_bytes()).ok();
    fields.filter_map(|(name, value)| Some((name.clone(), copied(value)?))).collect()
}

fn answer(published: Published) -> Response<Body> {
    let Published { receipt, copies } = published;
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(SUBSCRIBERS, receipt.subscribers.into());
    headers.insert(DELIVERED, receipt.delivered.into());
    if copies > 0 {
        headers.insert(COPIES, copies.into());
    }
    // Digits and hyphens.
    let id = receipt.id.and_then(|id| HeaderValue::try_from(id.to_string()).ok());
    headers.extend(id.map(|id| (EVENT_ID, id)));
    response
}

//! PUT and POST: a publication.
//!
//! In: a request with a body, which is read whole. Out: the number of subscribers and of deliveries. A reliable
//! publication waits while a queue is full; publications of one channel that wait are served in the order of their arrival.
//! Never: a write to a subscriber's connection.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_model::facts::Facts;
use hermes_model::snapshot::RelayMode;
use hermes_relay::fields::{DELIVER, DELIVERED, EVENT_ID, GROUP, LAST_EVENT_ID, RELAY, SUBSCRIBERS};
use hermes_relay::{Audience, NewPublication, PublishError, PublishProgress, Receipt, Relay, Reserved};
use hermes_signature::{SIGNATURE, SIGNATURE_INPUT};
use hermes_transport::body::{Body, RequestBody};
use hermes_transport::error::Error;
use hermes_transport::metrics::{Metrics, ResultLabels, RouteLabels};
use hermes_transport::runtime::Shared;
use http::header::{CONTENT_LENGTH, EXPECT, HeaderName, ORIGIN};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tokio::time::Instant;

use crate::feeds::Refused;
use crate::next_channel::refused as refused_by_next;
use crate::next_relay::NextRelay;
use crate::registry::RelayClock;
use crate::{RelayRequest, certified, channel, refusal, text};

/// The fields that describe the content of a publication all begin so.
const CONTENT_FIELDS: &str = "content-";
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
    let signed = certified::check_publisher(request)?;
    let outlet = Outlet::new(request, channel(request.entry, None), mode, audience);
    // Publications that wait for room count, too.
    let mut reserved = outlet.relay.reserve();
    let body = match read(request, &outlet.relay, &mut reserved, body).await? {
        Ok(body) => body,
        Err(Unread::TooLong) => {
            let most = request.settings.unit;
            let reason = format!("a publication of this route has at most {most} bytes (`relay.unit`)\n");
            return Ok(refusal(StatusCode::PAYLOAD_TOO_LARGE, reason));
        }
        Err(Unread::Refused(error)) => return Ok(refused(&error)),
    };
    let headers = content_fields(&facts.headers);
    let length: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if length > MAX_FIELD_BYTES {
        let reason = format!("the content-* fields of a publication have at most {MAX_FIELD_BYTES} bytes\n");
        return Ok(refusal(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, reason));
    }
    if let Some(signed) = signed {
        certified::take_content(request, signed, &body)?;
    }
    let content = NewPublication { headers, body };
    // A slow subscriber may take longer than the timeouts of the route.
    request.entry.set_held(true);
    let published = outlet.publish(without_page((**facts).clone()), content).await;
    request.entry.set_held(false);
    match published {
        Ok(receipt) => Ok(answer(receipt)),
        Err(NotPublished::Here(error)) => Ok(refused(&error)),
        Err(NotPublished::AtNext(refused)) => Ok(refusal(refused.status, format!("{}\n", refused.reason))),
        Err(NotPublished::Unreachable(error)) => Err(error),
    }
}

/// The request of a publication for the next relay. The page was judged here, and the body has arrived.
fn without_page(mut facts: Facts) -> Facts {
    for name in [ORIGIN, EXPECT] {
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
    pub(crate) relay: Arc<Relay>,
    channel: Arc<str>,
    mode: RelayMode,
    audience: Audience,
    route: Arc<str>,
    clock: RelayClock,
    shared: Arc<Shared>,
    /// The way to the next relay, if this one is not the root.
    next: Option<Rc<dyn NextRelay>>,
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
    /// It may have been published, if the next relay broke off before it responded.
    #[error("the next relay cannot be reached: {0}")]
    Unreachable(Error),
}

impl Outlet {
    pub(crate) fn new(request: &RelayRequest<'_>, channel: Arc<str>, mode: RelayMode, audience: Audience) -> Self {
        Self {
            relay: request.relays.of(&request.route.name, request.settings).relay.clone(),
            channel,
            mode,
            audience,
            route: request.route.name.clone(),
            clock: request.relays.clock(),
            shared: request.worker.shared.clone(),
            next: request.next.clone(),
        }
    }

    pub(crate) fn route(&self) -> &Arc<str> {
        &self.route
    }

    /// Publishes at the root of the tree, as the client of `facts`.
    pub(crate) async fn publish(&self, facts: Facts, content: NewPublication) -> Result<Receipt, NotPublished> {
        let Some(next) = &self.next else { return Ok(self.publish_here(content).await?) };
        let response = next.send(facts, content.body).await.map_err(NotPublished::Unreachable)?;
        if !response.status().is_success() {
            return Err(NotPublished::AtNext(refused_by_next(response).await));
        }
        let text = |name: &HeaderName| response.headers().get(name).and_then(|value| value.to_str().ok());
        let number = |name: &HeaderName| text(name).and_then(|text| text.parse().ok()).unwrap_or_default();
        let (subscribers, delivered) = (number(&SUBSCRIBERS), number(&DELIVERED));
        let id = text(&EVENT_ID).and_then(|id| id.parse().ok());
        Ok(Receipt { id, subscribers, delivered, dropped: subscribers.saturating_sub(delivered) })
    }

    /// Publishes at this relay, and counts. A reliable publication waits until all queues have room, and until reliable
    /// publications before it are in them.
    async fn publish_here(&self, content: NewPublication) -> Result<Receipt, PublishError> {
        let published = match self.mode {
            RelayMode::Realtime => {
                let (epoch, now) = (rand::random(), self.clock.now());
                self.relay.publish_realtime(&self.channel, content, self.audience, epoch, now)
            }
            RelayMode::Reliable => self.publish_reliable(&content).await,
        };
        match &published {
            Ok(receipt) => count(&self.shared.metrics, &self.route, receipt),
            Err(PublishError::TooManyChannels(_)) => self.shared.metrics.limit("relay-channels"),
            Err(PublishError::Memory(_)) => self.shared.metrics.limit("relay-memory"),
            Err(PublishError::Closed) => {}
        }
        published
    }

    async fn publish_reliable(&self, content: &NewPublication) -> Result<Receipt, PublishError> {
        let turn = self.relay.turn(&self.channel);
        let _turn = match &turn {
            // The semaphore is never closed.
            Some(turn) => turn.acquire().await.ok(),
            None => None,
        };
        let epoch = rand::random();
        let mut timer = pin!(tokio::time::sleep(Duration::ZERO));
        std::future::poll_fn(|cx| {
            loop {
                let (now, waker) = (self.clock.now(), cx.waker());
                match self.relay.poll_publish_reliable(&self.channel, content, self.audience, epoch, waker, now) {
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

/// Counts a publication of a route.
pub(crate) fn count(metrics: &Metrics, route: &Arc<str>, receipt: &Receipt) {
    metrics.relay_publications.get_or_create(&RouteLabels { route: route.clone() }).inc();
    for (result, count) in [("queued", receipt.delivered), ("dropped", receipt.dropped)] {
        if count > 0 {
            metrics.relay_deliveries.get_or_create(&ResultLabels { result }).inc_by(count);
        }
    }
}

fn refused(error: &PublishError) -> Response<Body> {
    refusal(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n"))
}

/// The reason why a body was not read to its end.
enum Unread {
    TooLong,
    Refused(PublishError),
}

/// Reads the body.
async fn read(
    request: &RelayRequest<'_>,
    relay: &Relay,
    reserved: &mut Reserved,
    body: RequestBody,
) -> Result<Result<Bytes, Unread>, Error> {
    body.prepare(request.entry, 0, None);
    let most = usize::try_from(request.settings.unit).unwrap_or(usize::MAX);
    let mut attempt = pin!(body.attempt());
    if attempt.size_hint().lower() > most as u64 {
        return Ok(Err(Unread::TooLong));
    }
    // A publication outlives its connection, so it must not keep a read buffer of the connection.
    let mut whole = BytesMut::new();
    while let Some(frame) = attempt.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        if whole.len() + data.len() > most {
            return Ok(Err(Unread::TooLong));
        }
        if let Err(error) = relay.reserve_more(reserved, data.len() as u64) {
            request.worker.shared.metrics.limit("relay-memory");
            return Ok(Err(Unread::Refused(error)));
        }
        whole.extend_from_slice(&data);
    }
    // Without spare capacity.
    Ok(Ok(Bytes::from(whole.freeze().to_vec().into_boxed_slice())))
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

fn answer(receipt: Receipt) -> Response<Body> {
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(SUBSCRIBERS, receipt.subscribers.into());
    headers.insert(DELIVERED, receipt.delivered.into());
    // Digits and hyphens.
    let id = receipt.id.and_then(|id| HeaderValue::try_from(id.to_string()).ok());
    headers.extend(id.map(|id| (EVENT_ID, id)));
    response
}

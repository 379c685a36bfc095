//! PUT and POST: a publication.
//!
//! In: a request with a body, which is read whole. Out: the number of subscribers and of deliveries. A reliable
//! publication waits while a queue is full; publications of one channel that wait are served in the order of their arrival.
//! Never: a write to a subscriber's connection.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_model::snapshot::RelayMode;
use hermes_relay::framing::EVENT_ID;
use hermes_relay::{Audience, NewPublication, PublishError, PublishProgress, Receipt, Relay, Reserved};
use hermes_transport::body::{Body, RequestBody};
use hermes_transport::error::Error;
use hermes_transport::metrics::{ResultLabels, RouteLabels};
use http::header::{CONTENT_LENGTH, HeaderName};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tokio::time::Instant;

use crate::{DELIVER, DELIVERED, RELAY, RelayRequest, SUBSCRIBERS, channel, refusal, text};

/// The fields that describe the content of a publication all begin so.
const CONTENT_FIELDS: &str = "content-";

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
    let relay = request.relays.of(&request.route.name, request.settings);
    // Publications that wait for room count, too.
    let mut reserved = relay.reserve();
    let body = match read(request, &relay, &mut reserved, body).await? {
        Ok(body) => body,
        Err(Unread::TooLong) => {
            let most = request.settings.unit;
            let reason = format!("a publication of this route has at most {most} bytes (`relay.unit`)\n");
            return Ok(refusal(StatusCode::PAYLOAD_TOO_LARGE, reason));
        }
        Err(Unread::Refused(error)) => return Ok(refused(request, &error)),
    };
    let content = NewPublication { headers: content_fields(&facts.headers), body };
    let name = channel(request.entry, None);
    let published = match mode {
        RelayMode::Realtime => relay.publish_realtime(&name, content, audience, rand::random(), request.relays.now()),
        RelayMode::Reliable => reliable(request, &relay, &name, &content, audience).await,
    };
    match published {
        Ok(receipt) => {
            count(request, &receipt);
            Ok(answer(receipt))
        }
        Err(error) => Ok(refused(request, &error)),
    }
}

fn refused(request: &RelayRequest<'_>, error: &PublishError) -> Response<Body> {
    request.worker.shared.metrics.limit(match error {
        PublishError::TooManyChannels(_) => "relay-channels",
        PublishError::Memory(_) => "relay-memory",
        PublishError::Closed => return refusal(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
    });
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
            return Ok(Err(Unread::Refused(error)));
        }
        whole.extend_from_slice(&data);
    }
    // Without spare capacity.
    Ok(Ok(Bytes::from(whole.freeze().to_vec().into_boxed_slice())))
}

fn content_fields(headers: &HeaderMap) -> HeaderMap {
    let is_content = |name: &HeaderName| name.as_str().starts_with(CONTENT_FIELDS) && *name != CONTENT_LENGTH;
    let fields = headers.iter().filter(|(name, _)| is_content(name));
    // A clone of a value would keep the buffer of the whole head.
    let copied = |value: &HeaderValue| HeaderValue::from_bytes(value.as_bytes()).ok();
    fields.filter_map(|(name, value)| Some((name.clone(), copied(value)?))).collect()
}

/// Publishes as soon as all queues have room, and reliable publications before this one are in them.
async fn reliable(
    request: &RelayRequest<'_>,
    relay: &Relay,
    name: &str,
    content: &NewPublication,
    audience: Audience,
) -> Result<Receipt, PublishError> {
    let (epoch, relays) = (rand::random(), request.relays);
    // A slow subscriber may take longer than the timeouts of the route.
    request.entry.set_held(true);
    let turn = relay.turn(name);
    let _turn = match &turn {
        // The semaphore is never closed.
        Some(turn) => turn.acquire().await.ok(),
        None => None,
    };
    let mut timer = pin!(tokio::time::sleep(Duration::ZERO));
    let published = std::future::poll_fn(|cx| {
        loop {
            let now = relays.now();
            match relay.poll_publish_reliable(name, content, audience, epoch, cx.waker(), now) {
                Ok(PublishProgress::Done(receipt)) => return Poll::Ready(Ok(receipt)),
                Ok(PublishProgress::Waiting { until }) => {
                    timer.as_mut().reset(Instant::now() + until.saturating_sub(now));
                    if timer.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    })
    .await;
    request.entry.set_held(false);
    published
}

fn count(request: &RelayRequest<'_>, receipt: &Receipt) {
    let metrics = &request.worker.shared.metrics;
    metrics.relay_publications.get_or_create(&RouteLabels { route: request.route.name.clone() }).inc();
    for (result, count) in [("queued", receipt.delivered), ("dropped", receipt.dropped)] {
        if count > 0 {
            metrics.relay_deliveries.get_or_create(&ResultLabels { result }).inc_by(count);
        }
    }
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

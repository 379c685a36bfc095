//! Publications that subscribers get while they arrive, for routes with `cut-through`.
//!
//! In: a request with a long body, whose length it announces. Out: the same as for other publications, but the content is in
//! the queues of the subscribers before it has arrived. Only clients of `multipart/mixed` receive it early; for all others, and for
//! other relays, it waits there. Never: a publisher that keeps its subscribers waiting for longer than half of `stall`, or than
//! `heartbeat`.

use std::pin::Pin;
use std::task::Poll;

use bytes::Bytes;
use hermes_relay::fields::MOVE;
use hermes_relay::{Audience, Content, ContentError, ContentWriter, NewPublication, PublishError};
use hermes_transport::error::Error;
use hermes_transport::runtime::session::WaitGuard;
use http::{HeaderMap, StatusCode};
use http_body::Body;

use super::{NotPublished, Outlet, Published, without_page};
use crate::RelayRequest;

/// Shorter content arrives at once, more or less.
pub(super) const MIN_BYTES: u64 = 64 << 10;
/// The bytes that have arrived before subscribers get the beginning.
const MIN_BEGINNING: usize = 16 << 10;

/// Whether a publication of this length is to reach subscribers while it arrives. `None`: the length is not announced.
pub(super) fn is_for(request: &RelayRequest<'_>, outlet: &Outlet, length: Option<u64>) -> bool {
    let settings = request.settings;
    let is_long = length.is_some_and(|length| (MIN_BYTES..=settings.unit).contains(&length));
    let moves = request.entry.facts.headers.contains_key(MOVE);
    settings.cut_through && is_long && outlet.audience() == Audience::All && !moves
}

/// Publishes while the content arrives. `None`: nothing of it was read, and it is published when it has arrived.
pub(super) async fn serve<B>(
    request: &RelayRequest<'_>,
    outlet: &Outlet,
    headers: &HeaderMap,
    mut body: Pin<&mut B>,
) -> Result<Result<Option<Published>, NotPublished>, Error>
where
    B: Body<Data = Bytes, Error = Error>,
{
    let length = body.size_hint().lower();
    let Some(reserved) = outlet.relay().reserve_announced(length) else {
        request.worker.shared.metrics.limit("relay-cut-through");
        return Ok(Ok(None));
    };
    match outlet.leads().await {
        Ok(true) => {}
        Ok(false) => return Ok(Ok(None)),
        Err(error) => return Ok(Err(error)),
    }
    let mut writer = writer(request, usize::try_from(length).unwrap_or(usize::MAX));
    writer.content().count(reserved);
    // A publisher that sends nothing must not reach anybody.
    while writer.arrived() < MIN_BEGINNING {
        let Some(data) = next_data(body.as_mut(), &mut writer).await? else { break };
        writer.push(data).map_err(|error| Error::Malformed(error.to_string()))?;
    }
    let content = NewPublication { headers: headers.clone(), body: Content::Arriving(writer.content()) };
    let queued = {
        // A slow subscriber may take longer than the timeouts of the route.
        let _waits = WaitGuard::begin(request.entry);
        outlet.queue_here(content.clone()).await
    };
    let receipt = match queued {
        Ok(receipt) => receipt,
        // It goes to the root as a whole.
        Err(PublishError::NotRoot) => {
            read(body, writer).await?;
            let facts = without_page((*request.entry.facts).clone());
            let _waits = WaitGuard::begin(request.entry);
            return Ok(outlet.publish(facts, content).await.map(Some));
        }
        Err(error) => return Ok(Err(error.into())),
    };
    // A subscriber that waits for the rest takes nothing else, and gets no heartbeat. It must not be ended for that.
    let time = (request.settings.stall / 2).min(request.settings.heartbeat);
    match tokio::time::timeout(time, read(body, writer)).await {
        Err(_) => Err(Error::Denied {
            status: StatusCode::REQUEST_TIMEOUT,
            reason: format!(
                "the content took longer than {time:?}; send it faster, or publish it to a route without `relay.cut-through`"
            ),
            label: "http_request_error",
        }),
        Ok(Err(error)) => Err(error),
        Ok(Ok(true)) => {
            let _waits = WaitGuard::begin(request.entry);
            Ok(outlet.await_copies(receipt).await.map(Some).map_err(NotPublished::from))
        }
        // Another relay became the root, and could not get what was still to arrive.
        Ok(Ok(false)) => Ok(Err(PublishError::NotRoot.into())),
    }
}

/// The writer of content of this length.
pub(super) fn writer(request: &RelayRequest<'_>, length: usize) -> ContentWriter {
    // Buffers of connections are as long as the longest head.
    ContentWriter::new(length).with_buffers_of(request.worker.snapshot().limits.header_bytes)
}

/// Reads the rest of the content. Returns false if it was aborted meanwhile.
async fn read<B>(mut body: Pin<&mut B>, mut writer: ContentWriter) -> Result<bool, Error>
where
    B: Body<Data = Bytes, Error = Error>,
{
    let malformed = |error: ContentError| Error::Malformed(error.to_string());
    while let Some(data) = next_data(body.as_mut(), &mut writer).await? {
        match writer.push(data) {
            Err(ContentError::Aborted) => return Ok(false),
            pushed => pushed.map_err(malformed)?,
        }
    }
    match writer.finish() {
        Err(ContentError::Aborted) => Ok(false),
        finished => finished.map(|()| true).map_err(malformed),
    }
}

/// Reads the next bytes of a body. Passes on those before if there are none so far.
async fn next_data<B>(mut body: Pin<&mut B>, writer: &mut ContentWriter) -> Result<Option<Bytes>, Error>
where
    B: Body<Data = Bytes, Error = Error>,
{
    std::future::poll_fn(|cx| {
        loop {
            match body.as_mut().poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => return Poll::Ready(Ok(Some(data))),
                    // Trailers.
                    Err(_) => continue,
                },
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(error)),
                Poll::Ready(None) => return Poll::Ready(Ok(None)),
                Poll::Pending => {
                    writer.flush();
                    return Poll::Pending;
                }
            }
        }
    })
    .await
}

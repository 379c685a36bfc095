//! Publications that subscribers get while they arrive, for routes with `cut-through`.
//!
//! In: a request with a long body, whose length it announces. Out: the same as for other publications, but the content is in
//! the queues of the subscribers before it has arrived. Only clients whose form has any bytes get it so early; for all others,
//! and for other relays, it waits there. Never: content whose publisher holds up its subscribers for longer than they may hold up
//! others.

use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use hermes_relay::fields::MOVE;
use hermes_relay::{Audience, Content, ContentWriter, NewPublication, NotArrived, PublishError, Receipt};
use hermes_transport::error::Error;
use http::HeaderMap;
use http_body::Body;

use crate::RelayRequest;
use crate::publish::{NotPublished, Outlet, Published};

/// Shorter content arrives at once, more or less.
pub(crate) const MIN_BYTES: u64 = 64 << 10;

/// A publication that is in the queues, and whose content arrives.
pub(crate) struct Arrival<'o> {
    outlet: &'o Outlet,
    writer: ContentWriter,
    receipt: Receipt,
    /// The time for all of its content.
    time: Duration,
}

/// Begins a publication of `length` bytes. `None`: it is to be published when it has arrived.
pub(crate) async fn begin<'o>(
    request: &RelayRequest<'_>,
    outlet: &'o Outlet,
    headers: &HeaderMap,
    length: Option<u64>,
) -> Result<Option<Arrival<'o>>, NotPublished> {
    let settings = request.settings;
    let length = length.filter(|length| (MIN_BYTES..=settings.unit).contains(length));
    let moves = request.entry.facts.headers.contains_key(MOVE);
    let Some(length) = length.filter(|_| settings.cut_through && outlet.audience() == Audience::All && !moves) else {
        return Ok(None);
    };
    // Announced bytes count although they have not arrived, so they may not take the memory of others.
    if !outlet.relay().has_room(length) || !outlet.leads().await? {
        return Ok(None);
    }
    let writer = ContentWriter::new(usize::try_from(length).unwrap_or(usize::MAX));
    let content = NewPublication { headers: headers.clone(), body: Content::Arriving(writer.content()) };
    // A slow subscriber may take longer than the timeouts of the route.
    request.entry.set_held(true);
    let placed = outlet.queue_here(content).await;
    request.entry.set_held(false);
    match placed {
        // A subscriber that waits for the rest takes nothing else, and must not be ended for that.
        Ok(receipt) => Ok(Some(Arrival { outlet, writer, receipt, time: settings.stall / 2 })),
        Err(PublishError::NotRoot) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Arrival<'_> {
    /// Reads the content. If it is not whole in time, or is dropped before, the publication remains without content.
    pub(crate) async fn complete<B>(self, mut body: Pin<&mut B>) -> Result<Result<Published, PublishError>, Error>
    where
        B: Body<Data = Bytes, Error = Error>,
    {
        let Self { outlet, mut writer, receipt, time } = self;
        let read = async {
            while let Some(data) = next_data(body.as_mut(), &mut writer).await? {
                writer.push(data).map_err(|error| Error::Malformed(error.to_string()))?;
            }
            match writer.finish() {
                Err(error @ NotArrived::WrongLength(_)) => Err(Error::Malformed(error.to_string())),
                arrived => Ok(arrived.is_ok()),
            }
        };
        match tokio::time::timeout(time, read).await {
            Err(_) => Err(Error::ClientStalled(time)),
            Ok(Err(error)) => Err(error),
            Ok(Ok(true)) => Ok(outlet.copied(receipt).await),
            // Another relay became the root, and could not get what was still to arrive.
            Ok(Ok(false)) => Ok(Err(PublishError::NotRoot)),
        }
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

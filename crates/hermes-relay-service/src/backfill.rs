//! The publications that a subscriber lacks when it resumes at this node: the next relay has them.
//!
//! In: the position of the subscriber, and the one that its channel has here. Out: the publications between, once, before
//! the deliveries of the channel. Those that the next relay no longer has are a gap. Never: more than one delivery in memory.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hermes_relay::{BackfillRange, BackfillStep, Delivery, EventId, MissedRange, Relay, Subscription};
use tokio::time::{Instant, Sleep};

use crate::feeds::Refused;
use crate::next_channel::{Accepted, NextChannel, NextDeliveries, NextDelivery, Standing};

/// The time for which the next relay may be silent: it has what is asked for.
const MAX_SILENCE: Duration = Duration::from_secs(10);

/// The publications that a subscriber lacks of a channel.
pub(crate) struct Backfill {
    channel: Arc<str>,
    range: BackfillRange,
    source: Source,
    silent_at: Pin<Box<Sleep>>,
}

enum Source {
    /// It begins when the backfills before it have ended.
    Waiting(Box<NextChannel>, Arc<Relay>, usize),
    Opening(Pin<Box<dyn Future<Output = Result<Accepted, Refused>>>>),
    Open(NextDeliveries),
}

impl Backfill {
    /// The publications between the positions. Publications of more than `max_bytes` count as missed.
    pub(crate) fn new(
        next: &NextChannel,
        channel: Arc<str>,
        position: EventId,
        until: EventId,
        relay: Arc<Relay>,
        max_bytes: usize,
    ) -> Self {
        let source = Source::Waiting(Box::new(next.clone()), relay, max_bytes);
        let silent_at = Box::pin(tokio::time::sleep(MAX_SILENCE));
        Self { channel, range: BackfillRange::new(position, until), source, silent_at }
    }

    /// Takes the next delivery. `None`: the subscriber has what the channel has here.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>, of: &Subscription) -> Poll<Option<Delivery>> {
        while !self.range.is_filled() {
            let next = match self.poll_source(cx) {
                Poll::Ready(next) => next,
                Poll::Pending if self.silent_at.as_mut().poll(cx).is_ready() => None,
                Poll::Pending => return Poll::Pending,
            };
            let gap = match next {
                Some(NextDelivery::Nothing) => continue,
                Some(NextDelivery::Publication(publication)) => {
                    // A publication for one of a group has no place in the channel.
                    let Some(id) = publication.id else { continue };
                    match self.range.publication(id) {
                        BackfillStep::Skip => continue,
                        BackfillStep::Deliver => {
                            let publication = of.of_feed(&self.channel, publication);
                            return Poll::Ready(Some(Delivery::Publication(publication)));
                        }
                        BackfillStep::Gap(gap) => gap,
                    }
                }
                Some(NextDelivery::Gap { missed, until }) => self.range.gap(missed, until),
                None => self.range.give_up(),
            };
            let MissedRange { missed, until } = gap;
            return Poll::Ready(Some(Delivery::Gap { channel: self.channel.clone(), missed, until }));
        }
        Poll::Ready(None)
    }

    /// `None`: the next relay delivers no more.
    fn poll_source(&mut self, cx: &mut Context<'_>) -> Poll<Option<NextDelivery>> {
        loop {
            match &mut self.source {
                Source::Waiting(next, relay, max_bytes) => {
                    // It stands for no subscriber: that of the channel does.
                    let standing = Standing { timeout: MAX_SILENCE, subscribers: 0, confirmed: None };
                    let (next, relay, max_bytes) = ((**next).clone(), relay.clone(), *max_bytes);
                    self.silent_at.as_mut().reset(Instant::now() + MAX_SILENCE);
                    let opening = next.subscribe(standing, Some(self.range.position()), relay, max_bytes);
                    self.source = Source::Opening(Box::pin(opening));
                }
                Source::Opening(accepted) => match ready!(accepted.as_mut().poll(cx)) {
                    Ok(accepted) => {
                        self.range.begin_at(accepted.position);
                        self.source = Source::Open(accepted.deliveries);
                        if self.range.is_filled() {
                            return Poll::Ready(Some(NextDelivery::Nothing));
                        }
                    }
                    Err(refused) => {
                        tracing::debug!(
                            channel = &*self.channel,
                            reason = &*refused.reason,
                            "a subscriber resumes with a gap"
                        );
                        return Poll::Ready(None);
                    }
                },
                Source::Open(deliveries) => {
                    let delivery = ready!(deliveries.poll_next(cx)).ok();
                    self.silent_at.as_mut().reset(Instant::now() + MAX_SILENCE);
                    return Poll::Ready(delivery);
                }
            }
        }
    }
}

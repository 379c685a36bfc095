//! The subscription of this node at the next relay, while it stands.
//!
//! In: deliveries of the next relay, and changes of this node's subscribers. Out: the deliveries in their queues, refreshes, and
//! confirmations if this node keeps a copy. Never: another delivery while one waits for room.

use std::pin::Pin;
use std::time::Duration;

use hermes_relay::{EventId, FedPublication, PublishError};
use hermes_transport::body::Body;
use hermes_transport::error::Error;
use http::{Response, StatusCode};
use tokio::time::Instant;

use crate::history_copy;
use crate::next_channel::{Accepted, NextChannel, Standing};
use crate::next_relay::NextResponse;
use crate::siblings::Siblings;
use crate::upstream::{FeedEnd, FeedTask, LINGER, TIMEOUT_AT_NEXT, asked};

/// The heartbeats of the next relay that may be missing before the subscription counts as broken.
const MISSING_HEARTBEATS: u32 = 4;
/// The time for which a copy counts as complete after the connection to the root has broken. The root confirms nothing
/// without it for a longer time (`publish::GRACE`).
const COMPLETE_FOR: Duration = Duration::from_secs(2);

/// The pause before a confirmation that failed is sent again.
const CONFIRM_PAUSE: Duration = Duration::from_millis(200);

impl FeedTask {
    /// Passes publications on until the subscription ends.
    pub(crate) async fn follow(&self, next: &NextChannel, accepted: Accepted) -> FeedEnd {
        let Accepted { id, position: start, timeout, heartbeat, epochs, confirmed, mut deliveries } = accepted;
        let keeps_copy = confirmed.is_some();
        let max_silence = heartbeat.map_or(TIMEOUT_AT_NEXT, |heartbeat| heartbeat * MISSING_HEARTBEATS);
        let (mut audience, mut tree) = (self.audience.clone(), self.tree.clone());
        audience.mark_unchanged();
        let mut copy = CopyState::new(confirmed, start);
        let mut copying = keeps_copy.then(|| self.copy_history(next));
        let mut refresh_at = Instant::now() + timeout / 3;
        let mut silent_at = Instant::now() + max_silence;
        // A client that waits for the feed joins at once.
        let mut idle_at = Instant::now();
        let mut refreshing: Option<NextResponse> = None;
        let mut pending: Option<FedPublication> = None;
        loop {
            let has_pending = pending.is_some();
            let is_idle = self.is_unused();
            let position = self.feeder.feed.position();
            // One confirmation at a time; the next one covers all publications since.
            copy.reaches(position, &epochs);
            if refreshing.is_none() && copy.confirms(position) {
                refresh_at = Instant::now();
            }
            tokio::select! {
                published = self.feeder.publish(pending.as_ref()), if has_pending => {
                    pending = None;
                    silent_at = Instant::now() + max_silence;
                    if self.is_closed(&published) {
                        return FeedEnd::Idle;
                    }
                }
                // A publication that waits for room holds up the next relay.
                delivery = std::future::poll_fn(|cx| deliveries.poll_next(cx)), if !has_pending => {
                    silent_at = Instant::now() + max_silence;
                    match delivery {
                        Ok(delivery) => pending = self.feeder.take(delivery),
                        Err(reason) => {
                            self.complete_until.set(copy.is_complete().then(|| Instant::now() + COMPLETE_FOR));
                            return FeedEnd::Broken(reason);
                        }
                    }
                }
                has_history = asked(&mut copying), if copying.is_some() => {
                    copying = None;
                    copy.history_ended(has_history);
                }
                refreshed = asked(&mut refreshing), if refreshing.is_some() => {
                    refreshing = None;
                    let Some(pause) = pause_after(&refreshed, timeout, keeps_copy) else {
                        return FeedEnd::Broken("the next relay forgot the subscription".to_owned());
                    };
                    refresh_at = Instant::now() + pause;
                }
                () = tokio::time::sleep_until(refresh_at), if refreshing.is_none() => {
                    refreshing = Some(next.refresh(Standing { timeout, ..copy.told(self.standing()) }, id.clone()));
                }
                // Another number of subscribers is told at once, but never by two requests at a time.
                changed = audience.changed(), if refreshing.is_none() => {
                    if changed.is_err() {
                        return FeedEnd::Idle;
                    }
                    idle_at = Instant::now() + LINGER;
                    refresh_at = Instant::now();
                }
                () = tokio::time::sleep_until(idle_at), if is_idle => {
                    if self.retire() {
                        return FeedEnd::Idle;
                    }
                    idle_at = self.duties.stands_by_until().max(Instant::now() + LINGER);
                }
                // The relays move, or this one is to keep a copy.
                _ = tree.changed() => return FeedEnd::Moved,
                () = self.duties.asked() => {
                    if !keeps_copy || !self.duties.keeps_for(next.upstream()) {
                        return FeedEnd::Moved;
                    }
                }
                () = self.duties.moved() => return FeedEnd::Moved,
                () = tokio::time::sleep_until(silent_at), if !has_pending => {
                    return FeedEnd::Broken("the next relay is silent".to_owned());
                }
            }
        }
    }

    /// Counts a publication without memory, of which the subscribers have learned. Returns true if the relay is closed.
    fn is_closed(&self, published: &Result<(), PublishError>) -> bool {
        if let Err(PublishError::Memory(_)) = published {
            self.siblings.worker.shared.metrics.limit("relay-memory");
            return false;
        }
        published.is_err()
    }

    /// Copies the history from before the subscription, beside its deliveries.
    fn copy_history(&self, next: &NextChannel) -> Copying<'_> {
        let Siblings { of_route, max_bytes, .. } = &self.siblings;
        Box::pin(history_copy::copy(next.clone(), &self.feeder.feed, of_route.relay.clone(), *max_bytes))
    }
}

/// The pause before the next refresh. `None`: the next relay does not know the subscription.
fn pause_after(refreshed: &Result<Response<Body>, Error>, timeout: Duration, keeps_copy: bool) -> Option<Duration> {
    match refreshed.as_ref().map(Response::status) {
        Ok(status) if status.is_success() => Some(timeout / 3),
        Ok(StatusCode::NOT_FOUND) => None,
        // It was to confirm something.
        _ if keeps_copy => Some(CONFIRM_PAUSE),
        // Tried again before the timeout.
        _ => Some(timeout / 8),
    }
}

/// A request for the history from before the subscription.
type Copying<'f> = Pin<Box<dyn Future<Output = bool> + 'f>>;

/// The parts of a copy that are complete, and the position that this node has confirmed.
struct CopyState {
    /// `None`: this node keeps no copy.
    confirmed: Option<EventId>,
    /// Nothing is confirmed before the history. A publisher may wait for a publication from before the subscription, which
    /// comes with the history alone.
    awaits_history: bool,
    /// All from before the subscription.
    has_history: bool,
    /// All that the root had when the subscription began.
    has_latest: bool,
}

impl CopyState {
    /// The copy of a subscription that begins at `start`. One that resumes delivers all that is not confirmed yet.
    fn new(confirmed: Option<EventId>, start: EventId) -> Self {
        Self { confirmed, awaits_history: confirmed != Some(start), has_history: false, has_latest: false }
    }

    /// Whether this position has to be confirmed, which counts as done then.
    fn confirms(&mut self, position: EventId) -> bool {
        let is_due = !self.awaits_history && self.confirmed.is_some_and(|confirmed| confirmed != position);
        if is_due {
            self.confirmed = Some(position);
        }
        is_due
    }

    /// A refresh for another reason confirms nothing new.
    fn told(&self, standing: Standing) -> Standing {
        Standing { confirmed: standing.confirmed.and(self.confirmed), ..standing }
    }

    /// The history was copied, or cannot be.
    fn history_ended(&mut self, has_history: bool) {
        (self.awaits_history, self.has_history) = (false, has_history);
    }

    /// This node has a position; the last epoch is that of the root when the subscription began.
    fn reaches(&mut self, position: EventId, epochs: &[EventId]) {
        let is_latest = |latest: &EventId| position >= *latest && position.epoch == latest.epoch;
        self.has_latest |= epochs.last().is_some_and(is_latest);
    }

    /// Whether it has everything whose publisher has a response.
    fn is_complete(&self) -> bool {
        self.has_history && self.has_latest
    }
}

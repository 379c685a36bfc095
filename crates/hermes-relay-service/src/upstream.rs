//! The tree of relays: the subscription of this node at the next relay, one for each channel.
//!
//! In: channels to which clients of this node subscribe. Out: a feed of each, as long as it has subscribers. The
//! subscription is refreshed, tells how many subscribers are behind it, and resumes after a break. Publications of clients
//! do not pass here: the node forwards them to the next relay, and they return by the feed. Never: two subscriptions of
//! this node for one channel of a route.

use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use hermes_net::backoff::Backoff;
use hermes_relay::{EventId, FedPublication, Feed, PublishError, PublishProgress, SubscribeError};
use hermes_transport::body::Body;
use hermes_transport::error::Error;
use hermes_transport::runtime::WorkerContext;
use http::{Response, StatusCode};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::RelayRequest;
use crate::feeds::{FeedHandle, Progress, Refused};
use crate::next_channel::{Accepted, NextChannel, NextDelivery, Standing};
use crate::next_relay::NextResponse;
use crate::publish::count;
use crate::registry::{RelayClock, RouteRelay};

/// The timeout of the subscription. A node that vanishes is forgotten after it.
const TIMEOUT_AT_NEXT: Duration = Duration::from_secs(60);
/// The time for which a feed stays without subscribers, so that a client that reconnects finds it.
const LINGER: Duration = Duration::from_secs(5);
/// The heartbeats of the next relay that may be missing before the subscription counts as broken.
const MISSING_HEARTBEATS: u32 = 4;
/// The pause after which a publication is tried again for which the relay had no memory.
const MEMORY_PAUSE: Duration = Duration::from_millis(100);
/// Shortest and longest pause between two attempts to subscribe again.
const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// The feed of a channel. It begins for the first subscriber.
///
/// # Errors
/// A bound of the relay is reached.
pub(crate) fn feed(
    request: &RelayRequest<'_>,
    of_route: &Arc<RouteRelay>,
    next: NextChannel,
    channel: &Arc<str>,
) -> Result<FeedHandle, SubscribeError> {
    of_route.feeds.of(channel, |progress| {
        let clock = request.relays.clock();
        let feed = of_route.relay.feed(channel, rand::random(), clock.now())?;
        let task = FeedTask {
            next,
            worker: request.worker.clone(),
            route: request.route.name.clone(),
            of_route: of_route.clone(),
            channel: channel.clone(),
            audience: feed.audience(),
            feed,
            progress,
            clock,
            max_bytes: usize::try_from(request.settings.unit).unwrap_or(usize::MAX),
        };
        request.worker.spawn(task.run());
        Ok(())
    })
}

/// The task of a feed.
struct FeedTask {
    next: NextChannel,
    worker: Rc<WorkerContext>,
    route: Arc<str>,
    of_route: Arc<RouteRelay>,
    channel: Arc<str>,
    feed: Feed,
    /// The number of subscribers of the channel.
    audience: watch::Receiver<u64>,
    progress: watch::Sender<Progress>,
    clock: RelayClock,
    max_bytes: usize,
}

/// The reason why a subscription at the next relay ends.
enum FeedEnd {
    /// The channel has no subscriber.
    Idle,
    /// The next relay refuses it.
    Refused(Refused),
    /// It broke off.
    Broken(String),
}

impl Drop for FeedTask {
    fn drop(&mut self) {
        // Otherwise it was idle, and the channel may have another feed.
        if self.of_route.feeds.remove_if(&self.channel, &self.progress, || true) {
            // Clients that still subscribe must not wait for publications that nobody passes on.
            self.feed.close();
        }
        self.worker.shared.metrics.relay_upstream_subscriptions.dec();
    }
}

impl FeedTask {
    async fn run(self) {
        let mut after = None;
        self.worker.shared.metrics.relay_upstream_subscriptions.inc();
        let mut attempts = Backoff::new(MIN_PAUSE, MAX_PAUSE);
        let mut has_followed = false;
        loop {
            let end = match self.subscribe(after).await {
                Ok(accepted) => {
                    has_followed = true;
                    self.progress.send_replace(Progress::Following);
                    self.follow(accepted).await
                }
                Err(refused) => FeedEnd::Refused(refused),
            };
            let reason = match end {
                FeedEnd::Idle => return,
                FeedEnd::Refused(refused) if !has_followed || is_final(refused.status) => {
                    self.progress.send_replace(Progress::Refused(refused));
                    return;
                }
                FeedEnd::Refused(refused) => refused.reason,
                FeedEnd::Broken(reason) => reason.into(),
            };
            let pause = attempts.begin();
            self.worker.shared.metrics.relay_upstream_breaks.inc();
            if let Some(suppressed) = self.of_route.breaks.happened(self.worker.now()) {
                tracing::info!(
                    channel = &*self.channel, %reason, next_attempt_in_secs = pause.as_secs_f64(), suppressed,
                    "the subscription at the next relay broke off"
                );
            }
            self.progress.send_replace(Progress::Connecting);
            if self.retire() {
                return;
            }
            attempts.due().await;
            after = Some(self.feed.position());
        }
    }

    /// Removes the feed if the channel has no subscriber. A client that has found it meanwhile looks for it again.
    fn retire(&self) -> bool {
        self.of_route.feeds.remove_if(&self.channel, &self.progress, || self.is_unused())
    }

    /// Whether nobody subscribes to the channel, and no client waits for the feed.
    fn is_unused(&self) -> bool {
        // The table of feeds has one receiver.
        *self.audience.borrow() == 0 && self.progress.receiver_count() <= 1
    }

    fn standing(&self) -> Standing {
        // A client that waits for the feed joins when it stands.
        let subscribers = (*self.audience.borrow()).max(u64::from(!self.is_unused()));
        Standing { timeout: TIMEOUT_AT_NEXT, subscribers }
    }

    /// Begins the subscription.
    async fn subscribe(&self, after: Option<EventId>) -> Result<Accepted, Refused> {
        let relay = self.of_route.relay.clone();
        let accepted = self.next.clone().subscribe(self.standing(), after, relay, self.max_bytes).await?;
        self.feed.begin_at(accepted.position, self.clock.now());
        Ok(accepted)
    }

    /// Passes publications on until the subscription ends.
    async fn follow(&self, accepted: Accepted) -> FeedEnd {
        let Accepted { id, timeout, heartbeat, mut deliveries, .. } = accepted;
        let max_silence = heartbeat.map_or(TIMEOUT_AT_NEXT, |heartbeat| heartbeat * MISSING_HEARTBEATS);
        let standing = || Standing { timeout, ..self.standing() };
        let mut audience = self.audience.clone();
        audience.mark_unchanged();
        let mut refresh_at = Instant::now() + timeout / 3;
        let mut silent_at = Instant::now() + max_silence;
        // A client that waits for the feed joins at once.
        let mut idle_at = Instant::now();
        let mut refreshing: Option<NextResponse> = None;
        let mut pending: Option<FedPublication> = None;
        loop {
            let has_pending = pending.is_some();
            let is_idle = self.is_unused();
            tokio::select! {
                published = self.publish(pending.as_ref()), if has_pending => {
                    pending = None;
                    silent_at = Instant::now() + max_silence;
                    match published {
                        // The subscribers have learned of a gap.
                        Err(PublishError::Memory(_)) => self.worker.shared.metrics.limit("relay-memory"),
                        Err(_closed) => return FeedEnd::Idle,
                        Ok(()) => {}
                    }
                }
                // A publication that waits for room holds up the next relay.
                delivery = std::future::poll_fn(|cx| deliveries.poll_next(cx)), if !has_pending => {
                    silent_at = Instant::now() + max_silence;
                    match delivery {
                        Ok(NextDelivery::Publication(publication)) => pending = Some(publication),
                        Ok(NextDelivery::Gap { missed, until }) => self.feed.gap(missed, until, self.clock.now()),
                        Ok(NextDelivery::Nothing) => {}
                        Err(reason) => return FeedEnd::Broken(reason),
                    }
                }
                refreshed = refreshed(&mut refreshing), if refreshing.is_some() => {
                    refreshing = None;
                    match refreshed.as_ref().map(Response::status) {
                        Ok(status) if status.is_success() => refresh_at = Instant::now() + timeout / 3,
                        Ok(StatusCode::NOT_FOUND) => {
                            return FeedEnd::Broken("the next relay forgot the subscription".to_owned());
                        }
                        // Tried again before the timeout.
                        _ => refresh_at = Instant::now() + timeout / 8,
                    }
                }
                () = tokio::time::sleep_until(refresh_at), if refreshing.is_none() => {
                    refreshing = Some(self.next.refresh(standing(), id.clone()));
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
                }
                () = tokio::time::sleep_until(silent_at), if !has_pending => {
                    return FeedEnd::Broken("the next relay is silent".to_owned());
                }
            }
        }
    }

    async fn publish(&self, publication: Option<&FedPublication>) -> Result<(), PublishError> {
        let Some(publication) = publication else { return Ok(()) };
        let mut timer = std::pin::pin!(tokio::time::sleep(Duration::ZERO));
        std::future::poll_fn(|cx| {
            loop {
                let now = self.clock.now();
                match self.feed.poll_publish(publication, cx.waker(), now) {
                    Ok(PublishProgress::Done(receipt)) => {
                        count(&self.worker.shared.metrics, &self.route, &receipt);
                        return Poll::Ready(Ok(()));
                    }
                    Ok(PublishProgress::Waiting { until }) => {
                        timer.as_mut().reset(Instant::now() + until.saturating_sub(now));
                        ready!(timer.as_mut().poll(cx));
                    }
                    // The subscribers have not learned of a gap, so that it is published once there is memory.
                    Err(PublishError::Memory(_)) if publication.is_reliable || publication.id.is_none() => {
                        self.worker.shared.metrics.limit("relay-memory");
                        timer.as_mut().reset(Instant::now() + MEMORY_PAUSE);
                        ready!(timer.as_mut().poll(cx));
                    }
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
        })
        .await
    }
}

/// The outcome of a refresh; never ready without one.
async fn refreshed(refreshing: &mut Option<NextResponse>) -> Result<Response<Body>, Error> {
    match refreshing {
        Some(refreshing) => refreshing.await,
        None => std::future::pending().await,
    }
}

/// Whether another attempt would be refused, too.
fn is_final(status: StatusCode) -> bool {
    let is_temporary =
        matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS);
    status == StatusCode::LOOP_DETECTED || status.is_client_error() && !is_temporary
}

//! The place of this node in the tree of a channel: a subscription at the next relay, or the lead among peers.
//!
//! In: channels to which clients of this node subscribe, or of which it keeps a copy. Out: a feed of each, for as long as one
//! of these holds. The subscription is refreshed, tells how many subscribers are behind it, and resumes after a break; among
//! peers, the feed goes to the next one that can be reached, and leads if that is this node. Publications of clients do not
//! pass here: the node forwards them to the next relay, and they return by the feed. Never: two subscriptions of this node
//! for one channel of a route.

use std::cell::Cell;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::snapshot::{ChannelRanking, RelayTree};
use hermes_net::backoff::Backoff;
use hermes_relay::{Copies, FedPublication, PublishError, SubscribeError};
use hermes_transport::runtime::Shared;
use http::{Response, StatusCode};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::directory::Root;
use crate::feeder::Feeder;
use crate::feeds::{Duties, FeedHandle, Progress, Refused};
use crate::history_copy;
use crate::lead::{Found, Kept, Lead, STAND_BY_INTERVAL};
use crate::locate;
use crate::next_channel::{Accepted, ChannelRequests, NextChannel, Standing};
use crate::next_relay::NextResponse;
use crate::siblings::Siblings;

/// The timeout of the subscription. A node that vanishes is forgotten after it.
const TIMEOUT_AT_NEXT: Duration = Duration::from_secs(60);
/// The time for which a feed stays without subscribers, so that a client that reconnects finds it.
const LINGER: Duration = Duration::from_secs(5);
/// The heartbeats of the next relay that may be missing before the subscription counts as broken.
const MISSING_HEARTBEATS: u32 = 4;
/// Shortest and longest pause between two attempts to subscribe again.
const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// The time for which a copy counts as complete after the connection to the root has broken. Later, the root may have
/// confirmed publications without it.
const COMPLETE_FOR: Duration = Duration::from_secs(5);
/// The pause before another peer is asked for a copy.
const COPY_PAUSE: Duration = Duration::from_millis(200);
/// The time after which a root looks again for the peers before it, which could not be reached.
const RETURN_INTERVAL: Duration = Duration::from_secs(2);

/// The feed of a channel. It begins for the first subscriber, which may wish for a peer as the root.
///
/// # Errors
/// A bound of the relay is reached.
pub(crate) fn feed(
    siblings: &Siblings,
    requests: &ChannelRequests,
    channel: &Arc<str>,
    wish: Option<Arc<str>>,
) -> Result<FeedHandle, SubscribeError> {
    siblings.of_route.feeds.of(channel, |progress, duties| {
        let feed = siblings.of_route.relay.feed(channel, rand::random(), siblings.clock.now())?;
        let task = FeedTask {
            requests: requests.clone(),
            wish,
            channel: channel.clone(),
            audience: feed.audience(),
            tree: siblings.of_route.tree.subscribe(),
            feeder: Feeder {
                feed,
                clock: siblings.clock,
                worker: siblings.worker.clone(),
                route: siblings.route.clone(),
            },
            siblings: siblings.clone(),
            progress,
            duties,
            has_followed: false,
            has_led: false,
            idle_at: Instant::now(),
            complete_until: Cell::new(None),
        };
        siblings.worker.spawn(task.run());
        Ok(())
    })
}

/// The task of a feed.
struct FeedTask {
    siblings: Siblings,
    requests: ChannelRequests,
    /// The peer that the client asks for that began it.
    wish: Option<Arc<str>>,
    channel: Arc<str>,
    feeder: Feeder,
    /// The number of subscribers of the channel.
    audience: watch::Receiver<u64>,
    /// The other relays.
    tree: watch::Receiver<RelayTree>,
    progress: watch::Sender<Progress>,
    duties: Arc<Duties>,
    /// It has had a subscription at the next relay, and resumes it.
    has_followed: bool,
    /// It has been the root.
    has_led: bool,
    /// The time at which a root without subscribers looks whether it is of use.
    idle_at: Instant,
    /// The time until which its copy counts as complete, although the root has gone.
    complete_until: Cell<Option<Instant>>,
}

/// The reason why a subscription at the next relay, or the lead, ends.
enum FeedEnd {
    /// The channel has no subscriber.
    Idle,
    /// The next relay refuses it.
    Refused(Refused),
    /// It broke off.
    Broken(String),
    /// Another relay may be the next one, or the root.
    Moved,
}

impl Drop for FeedTask {
    fn drop(&mut self) {
        // Otherwise it was idle, and the channel may have another feed.
        if self.siblings.of_route.feeds.remove_if(&self.channel, &self.progress, || true) {
            // Clients that still subscribe must not wait for publications that nobody passes on.
            self.feeder.feed.close();
        }
        self.siblings.worker.shared.metrics.relay_upstream_subscriptions.dec();
    }
}

impl FeedTask {
    async fn run(mut self) {
        let metrics = &self.siblings.worker.shared.clone().metrics;
        metrics.relay_upstream_subscriptions.inc();
        let mut attempts = Backoff::new(MIN_PAUSE, MAX_PAUSE);
        loop {
            self.tree.mark_unchanged();
            let root = locate::root(&self.siblings, &self.requests, &self.channel, self.wish.as_ref()).await;
            let ranking = self.siblings.ranking(&self.channel, root.as_ref().map(|root| &*root.node));
            let before = root.and_then(|root| root.before);
            let reason = match self.serve(&ranking, before.as_ref()).await {
                FeedEnd::Idle => return,
                FeedEnd::Moved => continue,
                FeedEnd::Refused(refused) if !self.has_followed || is_final(refused.status) => {
                    self.progress.send_replace(Progress::Refused(refused));
                    return;
                }
                FeedEnd::Refused(refused) => refused.reason,
                FeedEnd::Broken(reason) => reason.into(),
            };
            let pause = attempts.begin();
            metrics.relay_upstream_breaks.inc();
            if let Some(suppressed) = self.siblings.of_route.breaks.happened(self.siblings.worker.now()) {
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
        }
    }

    /// Follows the best relay before this one that can be reached, or leads without any.
    async fn serve(&mut self, ranking: &ChannelRanking, before: Option<&Arc<str>>) -> FeedEnd {
        let feeds = &self.siblings.of_route.feeds;
        // A root that looks for the peers before it stays the root meanwhile, unless one has asked it to hand over.
        let leads = matches!(*self.progress.borrow(), Progress::Leading) && self.feeder.feed.leads();
        if !leads {
            self.progress.send_replace(Progress::Connecting);
        }
        let mut last = None;
        for (index, upstream) in ranking.above.iter().enumerate() {
            let has_other = ranking.may_lead || index + 1 < ranking.above.len();
            if has_other && !leads && feeds.is_away(upstream) {
                continue;
            }
            let next = self.requests.at(upstream);
            match self.subscribe(&next).await {
                Ok(accepted) => {
                    self.has_followed = true;
                    self.progress.send_replace(Progress::Following(upstream.clone()));
                    return self.follow(&next, accepted).await;
                }
                Err(refused)
                    if !has_other || is_final(refused.status) && refused.status != StatusCode::LOOP_DETECTED =>
                {
                    return FeedEnd::Refused(refused);
                }
                Err(refused) => {
                    feeds.set_away(upstream);
                    last = Some(refused);
                }
            }
        }
        if ranking.may_lead {
            return self.lead(ranking, before).await;
        }
        let none = || Refused { status: StatusCode::BAD_GATEWAY, reason: Arc::from("no peer can be reached") };
        FeedEnd::Refused(last.unwrap_or_else(none))
    }

    /// Removes the feed if the channel has no subscriber. A client that has found it meanwhile looks for it again.
    fn retire(&self) -> bool {
        let is_over = || self.is_unused() && !self.duties.stands_by();
        self.siblings.of_route.feeds.remove_if(&self.channel, &self.progress, is_over)
    }

    /// Whether nobody subscribes to the channel, and no client waits for the feed.
    fn is_unused(&self) -> bool {
        // The table of feeds has one receiver.
        *self.audience.borrow() == 0 && self.progress.receiver_count() <= 1
    }

    fn standing(&self) -> Standing {
        // A client that waits for the feed joins when it stands.
        let subscribers = (*self.audience.borrow()).max(u64::from(!self.is_unused()));
        let confirmed = self.duties.stands_by().then(|| self.feeder.feed.position());
        Standing { timeout: TIMEOUT_AT_NEXT, subscribers, confirmed }
    }

    /// Begins the subscription.
    async fn subscribe(&self, next: &NextChannel) -> Result<Accepted, Refused> {
        let (relay, standing) = (self.siblings.of_route.relay.clone(), self.standing());
        let feed = &self.feeder.feed;
        let after = (self.has_followed || self.has_led).then(|| feed.position());
        let accepted = next.clone().subscribe(standing, after, relay, self.siblings.max_bytes).await?;
        feed.follow();
        feed.begin_at(accepted.position, self.siblings.clock.now());
        feed.learn(&accepted.epochs);
        Ok(accepted)
    }

    /// Passes publications on until the subscription ends.
    async fn follow(&self, next: &NextChannel, accepted: Accepted) -> FeedEnd {
        let Accepted { id, timeout, heartbeat, epochs, keeps_copy, mut deliveries, .. } = accepted;
        let max_silence = heartbeat.map_or(TIMEOUT_AT_NEXT, |heartbeat| heartbeat * MISSING_HEARTBEATS);
        let standing = || Standing { timeout, ..self.standing() };
        let (mut audience, mut tree) = (self.audience.clone(), self.tree.clone());
        audience.mark_unchanged();
        let mut confirmed = self.feeder.feed.position();
        let mut copy = CopyState::default();
        let mut copying: Option<Copying<'_>> = keeps_copy.then(|| {
            let relay = self.siblings.of_route.relay.clone();
            let copying: Copying<'_> =
                Box::pin(history_copy::copy(next.clone(), &self.feeder.feed, relay, self.siblings.max_bytes));
            copying
        });
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
            // What arrives meanwhile is confirmed together.
            copy.has_latest |=
                epochs.last().is_some_and(|latest| position >= *latest && position.epoch == latest.epoch);
            if keeps_copy && confirmed != position && refreshing.is_none() {
                confirmed = position;
                refresh_at = Instant::now();
            }
            tokio::select! {
                published = self.feeder.publish(pending.as_ref()), if has_pending => {
                    pending = None;
                    silent_at = Instant::now() + max_silence;
                    match published {
                        // The subscribers have learned of a gap.
                        Err(PublishError::Memory(_)) => self.siblings.worker.shared.metrics.limit("relay-memory"),
                        Err(_closed) => return FeedEnd::Idle,
                        Ok(()) => {}
                    }
                }
                // A publication that waits for room holds up the next relay.
                delivery = std::future::poll_fn(|cx| deliveries.poll_next(cx)), if !has_pending => {
                    silent_at = Instant::now() + max_silence;
                    match delivery {
                        Ok(delivery) => pending = self.feeder.take(delivery),
                        Err(reason) => {
                            let is_complete = copy.has_history && copy.has_latest;
                            self.complete_until.set(is_complete.then(|| Instant::now() + COMPLETE_FOR));
                            return FeedEnd::Broken(reason);
                        }
                    }
                }
                has_history = asked(&mut copying), if copying.is_some() => {
                    copying = None;
                    copy.has_history = has_history;
                }
                refreshed = asked(&mut refreshing), if refreshing.is_some() => {
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
                    refreshing = Some(next.refresh(standing(), id.clone()));
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
                () = self.duties.asked(), if !keeps_copy => return FeedEnd::Moved,
                () = self.duties.moved() => return FeedEnd::Moved,
                () = tokio::time::sleep_until(silent_at), if !has_pending => {
                    return FeedEnd::Broken("the next relay is silent".to_owned());
                }
            }
        }
    }

    /// Another peer is the root already.
    fn lost_to(&self, root: &Arc<str>) -> FeedEnd {
        let known = Root { node: root.clone(), before: None };
        // Counts if this node is the home of the channel.
        self.siblings.of_route.directory.assign(&self.channel, known);
        FeedEnd::Broken(format!("{root} is the root of the channel"))
    }

    /// Is the root of the channel, until a peer before this one takes over.
    async fn lead(&mut self, ranking: &ChannelRanking, before: Option<&Arc<str>>) -> FeedEnd {
        let (mut idle_at, clock) = (self.idle_at, self.siblings.clock);
        let feeder = &self.feeder;
        let lead = Lead { siblings: &self.siblings, below: &ranking.below, requests: &self.requests, feeder };
        if !feeder.feed.leads() {
            let is_new = !self.has_followed && !self.has_led;
            let found = lead.take_over(before, is_new).await;
            if let Found::Root(root) = &found {
                return self.lost_to(root);
            }
            self.siblings.of_route.directory.forget(&self.channel);
            // It has all whose publishers have a response if it has kept a copy.
            let has_copy = self.complete_until.take().is_some_and(|until| Instant::now() < until);
            let has_all = has_copy && feeder.feed.is_reliable();
            feeder.feed.lead(rand::random(), found == Found::All || has_all, clock.now());
        }
        self.progress.send_replace(Progress::Leading);
        let _counted = CountedRoot::new(&self.siblings.worker.shared);
        let mut tree = self.tree.clone();
        // The home of the channel has to know of a move.
        let mut keep_at = Instant::now() + if before.is_some() { Duration::ZERO } else { STAND_BY_INTERVAL };
        let mut keeping: Option<Pin<Box<dyn Future<Output = Kept> + '_>>> = None;
        let mut copies = CopyWatch { copies: self.siblings.of_route.relay.copies(&self.channel), before: 0 };
        let return_at = Instant::now() + RETURN_INTERVAL;
        let mut audience = self.audience.clone();
        let end = loop {
            let is_unused = self.is_unused();
            if !is_unused {
                idle_at = Instant::now() + LINGER;
            }
            tokio::select! {
                () = self.duties.asked() => break FeedEnd::Moved,
                () = self.duties.moved() => break FeedEnd::Moved,
                _ = tree.changed() => break FeedEnd::Moved,
                () = tokio::time::sleep_until(return_at), if !ranking.above.is_empty() => break FeedEnd::Moved,
                () = tokio::time::sleep_until(keep_at), if keeping.is_none() && feeder.feed.keeps_history() => {
                    keeping = Some(Box::pin(lead.keep_copy()));
                }
                kept = asked(&mut keeping), if keeping.is_some() => {
                    keeping = None;
                    match kept {
                        Kept::Until(until) => keep_at = until,
                        Kept::Root(root) => break self.lost_to(&root),
                    }
                }
                changed = audience.changed() => {
                    if changed.is_err() {
                        break FeedEnd::Idle;
                    }
                }
                // Another peer has to keep the copy, and may be the home of the channel now.
                () = copies.lost() => keep_at = keep_at.min(Instant::now() + COPY_PAUSE),
                () = tokio::time::sleep_until(idle_at), if is_unused => {
                    if feeder.feed.is_idle(clock.now()) && self.retire() {
                        break FeedEnd::Idle;
                    }
                    idle_at = Instant::now() + LINGER;
                }
            }
        };
        drop(keeping);
        self.has_led = true;
        self.idle_at = idle_at;
        end
    }
}

/// The copies of a channel, as its root watches them.
struct CopyWatch {
    copies: Option<watch::Receiver<Copies>>,
    /// Their number when it was looked at last.
    before: usize,
}

impl CopyWatch {
    /// Waits until a peer no longer keeps a copy. Cancelled, it loses no change.
    async fn lost(&mut self) {
        let Some(copies) = &mut self.copies else { return std::future::pending().await };
        loop {
            let now = copies.borrow_and_update().stand_bys;
            if std::mem::replace(&mut self.before, now) > now {
                return;
            }
            if copies.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

/// The history from before a subscription, which arrives beside it.
type Copying<'f> = Pin<Box<dyn Future<Output = bool> + 'f>>;

/// What a copy has of its channel.
#[derive(Default)]
struct CopyState {
    /// All from before the subscription.
    has_history: bool,
    /// All that the root had when the subscription began.
    has_latest: bool,
}

/// A channel of which this node is the root, for metrics.
struct CountedRoot(Arc<Shared>);

impl CountedRoot {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.metrics.relay_roots.inc();
        Self(shared.clone())
    }
}

impl Drop for CountedRoot {
    fn drop(&mut self) {
        self.0.metrics.relay_roots.dec();
    }
}

/// The answer to a question; never ready without one.
async fn asked<F: Future + Unpin>(question: &mut Option<F>) -> F::Output {
    match question {
        Some(question) => question.await,
        None => std::future::pending().await,
    }
}

/// Whether another attempt would be refused, too.
fn is_final(status: StatusCode) -> bool {
    let is_temporary =
        matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS);
    status == StatusCode::LOOP_DETECTED || status.is_client_error() && !is_temporary
}

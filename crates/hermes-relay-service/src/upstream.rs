//! The place of this node in the tree of a channel: a subscription at the next relay, or the lead among peers.
//!
//! In: channels to which clients of this node subscribe, or of which it keeps a copy. Out: a feed of each, for as long as one
//! of these holds. The subscription is refreshed, tells how many subscribers are behind it, and resumes after a break. Among
//! peers, the feed goes to the next one that can be reached, and leads if that is this node. Publications of clients do not
//! pass here: the node forwards them to the next relay, and they return by the feed. Never: two subscriptions of this node
//! for one channel of a route.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::snapshot::{ChannelRanking, RelayTree};
use hermes_net::backoff::Backoff;
use hermes_relay::SubscribeError;
use http::StatusCode;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::feeder::Feeder;
use crate::feeds::{Duties, FeedHandle, Progress, Refused};
use crate::locate;
use crate::next_channel::{Accepted, ChannelRequests, NextChannel, Standing};
use crate::siblings::Siblings;

/// The timeout of the subscription. A node that vanishes is forgotten after it.
pub(crate) const TIMEOUT_AT_NEXT: Duration = Duration::from_secs(60);
/// The time for which a feed stays without subscribers, so that a client that reconnects finds it.
pub(crate) const LINGER: Duration = Duration::from_secs(5);
/// The time for a relay to accept the subscription, which may look for the root itself.
const MAX_FIND: Duration = Duration::from_secs(20);
/// Shortest and longest pause between two attempts to subscribe again.
const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

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
pub(crate) struct FeedTask {
    pub(crate) siblings: Siblings,
    pub(crate) requests: ChannelRequests,
    /// The peer that the client asks for that began it.
    pub(crate) wish: Option<Arc<str>>,
    pub(crate) channel: Arc<str>,
    pub(crate) feeder: Feeder,
    /// The number of subscribers of the channel.
    pub(crate) audience: watch::Receiver<u64>,
    /// The other relays.
    pub(crate) tree: watch::Receiver<RelayTree>,
    pub(crate) progress: watch::Sender<Progress>,
    pub(crate) duties: Arc<Duties>,
    /// It has had a subscription at the next relay, and resumes it.
    pub(crate) has_followed: bool,
    /// It has been the root.
    pub(crate) has_led: bool,
    /// The time at which a root without subscribers looks whether it is of use.
    pub(crate) idle_at: Instant,
    /// The time until which its copy counts as complete after the root has left.
    pub(crate) complete_until: Cell<Option<Instant>>,
}

/// The reason why a subscription at the next relay, or the lead, ends.
pub(crate) enum FeedEnd {
    /// The channel has no subscriber.
    Idle,
    /// The next relay refuses it.
    Refused(Refused),
    /// It broke off.
    Broken(String),
    /// Another relay may be the next one, or the root.
    Moved,
    /// A relay has accepted the subscription.
    Found(Box<Better>),
}

/// A relay before this one that has accepted the subscription.
pub(crate) struct Better {
    next: NextChannel,
    accepted: Accepted,
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
        let mut found: Option<Box<Better>> = None;
        loop {
            let end = match found.take() {
                Some(better) => self.follow_found(*better).await,
                None => {
                    self.tree.mark_unchanged();
                    let root = locate::root(&self.siblings, &self.requests, &self.channel, self.wish.as_ref()).await;
                    let ranking = self.siblings.ranking(&self.channel, root.as_ref().map(|root| &*root.node));
                    let before = root.and_then(|root| root.before);
                    self.serve(&ranking, before.as_ref()).await
                }
            };
            let reason = match end {
                FeedEnd::Idle => return,
                FeedEnd::Moved => continue,
                FeedEnd::Found(better) => {
                    found = Some(better);
                    continue;
                }
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
        if !self.feeder.feed.leads() {
            self.progress.send_replace(Progress::Connecting);
        }
        let others = usize::from(ranking.may_lead) + ranking.above.len();
        let refused = match self.find(&ranking.above, others > 1).await {
            Ok(better) => return FeedEnd::Found(Box::new(better)),
            Err(refused) => refused,
        };
        if ranking.may_lead {
            return self.lead(ranking, before).await;
        }
        FeedEnd::Refused(refused.unwrap_or_else(|| Refused::new(StatusCode::BAD_GATEWAY, "no peer can be reached")))
    }

    /// Subscribes at the first relay that accepts it. One that refuses does so for this channel alone. `has_other`: a relay that could not
    /// be reached a moment ago is passed over.
    ///
    /// # Errors
    /// All refuse; with the reason of the last one that was asked.
    pub(crate) async fn find(&self, upstreams: &[Arc<str>], has_other: bool) -> Result<Better, Option<Refused>> {
        let feeds = &self.siblings.of_route.feeds;
        let mut last = None;
        for upstream in upstreams.iter().filter(|upstream| !has_other || !feeds.is_away(upstream)) {
            let next = self.requests.at(upstream);
            let accepted = tokio::time::timeout(MAX_FIND, self.subscribe(&next)).await;
            let silent = || Refused::new(StatusCode::GATEWAY_TIMEOUT, "the next relay is silent");
            match accepted.unwrap_or_else(|_| Err(silent())) {
                Ok(accepted) => return Ok(Better { next, accepted }),
                Err(refused) => {
                    if refused.is_unreachable && has_other {
                        feeds.set_away(upstream);
                    }
                    last = Some(refused);
                }
            }
        }
        Err(last)
    }

    /// Follows a relay that has accepted the subscription.
    async fn follow_found(&mut self, Better { next, accepted }: Better) -> FeedEnd {
        let feed = &self.feeder.feed;
        feed.follow();
        feed.begin_at(accepted.position, self.siblings.clock.now());
        feed.learn(&accepted.epochs);
        self.has_followed = true;
        self.progress.send_replace(Progress::Following(next.upstream().clone()));
        let end = self.follow(&next, accepted).await;
        if matches!(end, FeedEnd::Broken(_)) {
            // If it is still the root, it registers again.
            self.siblings.forget_root(&self.channel, next.upstream());
        }
        end
    }

    /// Removes the feed if the channel has no subscriber. A client that has found it meanwhile looks for it again.
    pub(crate) fn retire(&self) -> bool {
        let is_over = || self.is_unused() && !self.duties.stands_by();
        self.siblings.of_route.feeds.remove_if(&self.channel, &self.progress, is_over)
    }

    /// The same for the root of a channel, which keeps a copy for nobody.
    pub(crate) fn retire_root(&self) -> bool {
        let is_over = self.siblings.of_route.feeds.remove_if(&self.channel, &self.progress, || self.is_unused());
        if is_over {
            // Otherwise the subscription of the peer that keeps the copy would hold the channel.
            self.feeder.feed.close();
        }
        is_over
    }

    /// Whether nobody subscribes to the channel, and no client waits for the feed.
    pub(crate) fn is_unused(&self) -> bool {
        // The table of feeds has one receiver.
        *self.audience.borrow() == 0 && self.progress.receiver_count() <= 1
    }

    pub(crate) fn standing(&self) -> Standing {
        // A client that waits for the feed does not count before it has joined: it misses what is published meanwhile.
        let subscribers = *self.audience.borrow();
        let confirmed = self.duties.stands_by().then(|| self.feeder.feed.position());
        Standing { timeout: TIMEOUT_AT_NEXT, subscribers, confirmed }
    }

    /// Begins the subscription.
    async fn subscribe(&self, next: &NextChannel) -> Result<Accepted, Refused> {
        let (relay, standing) = (self.siblings.of_route.relay.clone(), self.standing());
        let feed = &self.feeder.feed;
        let after = (self.has_followed || self.has_led).then(|| feed.position());
        next.clone().subscribe(standing, after, relay, self.siblings.max_bytes).await
    }
}

/// The answer to a question; never ready without one.
pub(crate) async fn asked<F: Future + Unpin>(question: &mut Option<F>) -> F::Output {
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

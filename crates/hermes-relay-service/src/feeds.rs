//! The feeds of a route: one for each channel that this node shares with other relays.
//!
//! In: the progress of each feed, from the task that has it, and the relays that cannot be reached. Out: the same to clients
//! and tasks on any worker. Never: two feeds of one channel.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// The time for which a relay that could not be reached is passed over.
const AWAY: Duration = Duration::from_secs(2);

/// A subscription that the next relay refuses.
#[derive(Clone, Debug)]
pub(crate) struct Refused {
    pub(crate) status: StatusCode,
    pub(crate) reason: Arc<str>,
    /// The relay could not be reached.
    pub(crate) is_unreachable: bool,
}

impl Refused {
    pub(crate) fn new(status: StatusCode, reason: impl Into<Arc<str>>) -> Self {
        Self { status, reason: reason.into(), is_unreachable: false }
    }
}

/// The progress of a feed.
#[derive(Clone, Debug)]
pub(crate) enum Progress {
    /// The next relay has not answered yet.
    Connecting,
    /// The channel gets what is published at the relay of this upstream.
    Following(Arc<str>),
    /// This node is the root of the channel.
    Leading,
    /// The next relay refuses the subscription.
    Refused(Refused),
}

/// The duties of a feed towards the root of its channel.
#[derive(Debug)]
pub(crate) struct Duties {
    /// It keeps a copy of the channel until then, with or without subscribers.
    stands_by_until: watch::Sender<Instant>,
    /// The upstream of the relay that has asked for a copy last. It is the root.
    copy_for: Mutex<Option<Arc<str>>>,
    copy_asked: Notify,
    /// The home of the channel has another root for it.
    moved: Notify,
}

impl Duties {
    /// The relay of an upstream is the root now. This one keeps a copy for some time.
    pub(crate) fn stand_by(&self, time: Duration, root: Option<Arc<str>>) {
        self.stands_by_until.send_replace(Instant::now() + time);
        *self.copy_for.lock().unwrap_or_else(PoisonError::into_inner) = root;
        self.copy_asked.notify_one();
    }

    /// Whether the relay of an upstream has asked for a copy last.
    pub(crate) fn keeps_for(&self, upstream: &Arc<str>) -> bool {
        self.copy_for.lock().unwrap_or_else(PoisonError::into_inner).as_ref() == Some(upstream)
    }

    /// The root may be another one.
    pub(crate) fn look_again(&self) {
        self.moved.notify_one();
    }

    /// The end of the time for which it keeps a copy.
    pub(crate) fn stands_by_until(&self) -> Instant {
        *self.stands_by_until.borrow()
    }

    /// Whether it keeps a copy now.
    pub(crate) fn stands_by(&self) -> bool {
        self.stands_by_until() > Instant::now()
    }

    /// Waits until the root moves.
    pub(crate) async fn moved(&self) {
        self.moved.notified().await;
    }

    /// Waits until a relay asks for a copy.
    pub(crate) async fn asked(&self) {
        self.copy_asked.notified().await;
    }
}

/// A feed that other tasks may look for.
#[derive(Debug)]
struct FeedEntry {
    progress: watch::Receiver<Progress>,
    duties: Arc<Duties>,
}

/// The feeds of a route by channel.
#[derive(Debug, Default)]
pub(crate) struct Feeds {
    by_channel: Mutex<HashMap<Arc<str>, FeedEntry>>,
    /// The upstreams of relays that could not be reached, and the time until which they are passed over.
    away: Mutex<HashMap<Arc<str>, Instant>>,
}

impl Feeds {
    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, FeedEntry>> {
        self.by_channel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The feed of a channel. For a channel without a feed, `begin` gets the sending end and the duties of a new one.
    ///
    /// # Errors
    /// The error of `begin`.
    pub(crate) fn of<E>(
        &self,
        channel: &Arc<str>,
        begin: impl FnOnce(watch::Sender<Progress>, Arc<Duties>) -> Result<(), E>,
    ) -> Result<FeedHandle, E> {
        let mut feeds = self.lock();
        if let Some(FeedEntry { progress, duties }) = feeds.get(channel) {
            return Ok(FeedHandle { progress: progress.clone(), duties: duties.clone(), is_own: false });
        }
        let (sender, progress) = watch::channel(Progress::Connecting);
        let stands_by_until = watch::Sender::new(Instant::now());
        let duties = Arc::new(Duties {
            stands_by_until,
            copy_for: Mutex::default(),
            copy_asked: Notify::new(),
            moved: Notify::new(),
        });
        begin(sender, duties.clone())?;
        feeds.insert(channel.clone(), FeedEntry { progress: progress.clone(), duties: duties.clone() });
        Ok(FeedHandle { progress, duties, is_own: true })
    }

    /// The progress of the feed of a channel. `None`: it has none.
    pub(crate) fn progress(&self, channel: &str) -> Option<Progress> {
        self.lock().get(channel).map(|entry| entry.progress.borrow().clone())
    }

    /// Whether the channel still has this feed. If so, the feed notices a subscriber that has joined before the call.
    pub(crate) fn has(&self, channel: &str, feed: &FeedHandle) -> bool {
        self.lock().get(channel).is_some_and(|other| other.progress.same_channel(&feed.progress))
    }

    /// Whether the channel has a feed.
    pub(crate) fn contains(&self, channel: &str) -> bool {
        self.lock().contains_key(channel)
    }

    /// Removes the feed with this sending end, if `is_over` holds while no client can find it. Returns true if it did.
    pub(crate) fn remove_if(
        &self,
        channel: &str,
        feed: &watch::Sender<Progress>,
        is_over: impl FnOnce() -> bool,
    ) -> bool {
        let mut feeds = self.lock();
        let is_this = feeds.get(channel).is_some_and(|other| other.progress.same_channel(&feed.subscribe()));
        let is_removed = is_this && is_over();
        if is_removed {
            feeds.remove(channel);
        }
        is_removed
    }

    /// The relay of an upstream could not be reached.
    pub(crate) fn set_away(&self, upstream: &Arc<str>) {
        let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        away.retain(|_, until| *until > now);
        away.insert(upstream.clone(), now + AWAY);
    }

    /// Whether the relay of an upstream could not be reached a moment ago.
    pub(crate) fn is_away(&self, upstream: &str) -> bool {
        let away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
        away.get(upstream).is_some_and(|until| *until > Instant::now())
    }
}

/// A feed, as a subscriber of its channel knows it.
pub(crate) struct FeedHandle {
    progress: watch::Receiver<Progress>,
    pub(crate) duties: Arc<Duties>,
    /// This subscriber began it.
    is_own: bool,
}

/// The outcome of a feed for a subscriber.
pub(crate) enum Outcome {
    /// The channel gets what is published at the relay of this upstream.
    Follows(Arc<str>),
    /// This node is the root of the channel.
    Leads,
    /// The next relay refuses the subscription of this client.
    Refused(Refused),
    /// Another client began it, and came by a loop; or it has ended.
    Gone,
}

impl FeedHandle {
    /// Whether this subscriber began it.
    pub(crate) fn is_own(&self) -> bool {
        self.is_own
    }

    /// Whether another client has begun it, and the next relay has not answered yet.
    pub(crate) fn is_begun_by_another(&self) -> bool {
        !self.is_own && matches!(*self.progress.borrow(), Progress::Connecting)
    }

    /// Waits until the next relay has answered.
    pub(crate) async fn outcome(&mut self) -> Outcome {
        match self.progress.wait_for(|progress| !matches!(progress, Progress::Connecting)).await.as_deref() {
            // Only the loop depends on the client that began the feed, since the request has its `Via`.
            Ok(Progress::Refused(refused)) if self.is_own || refused.status != StatusCode::LOOP_DETECTED => {
                Outcome::Refused(refused.clone())
            }
            Ok(Progress::Following(upstream)) => Outcome::Follows(upstream.clone()),
            Ok(Progress::Leading) => Outcome::Leads,
            Ok(Progress::Refused(_) | Progress::Connecting) | Err(_) => Outcome::Gone,
        }
    }
}

//! The feeds of a route: the channels to which this node subscribes at the next relay.
//!
//! In: the progress of each subscription, from the task that has it. Out: the same to the clients that wait for it, on any
//! worker. Never: two feeds of one channel.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::StatusCode;
use tokio::sync::watch;

/// A subscription that the next relay refuses.
#[derive(Clone, Debug)]
pub(crate) struct Refused {
    pub(crate) status: StatusCode,
    pub(crate) reason: Arc<str>,
}

/// The progress of a feed.
#[derive(Clone, Debug)]
pub(crate) enum Progress {
    /// The next relay has not answered yet.
    Connecting,
    /// The channel gets what is published at the next relay.
    Following,
    /// The next relay refuses the subscription.
    Refused(Refused),
}

/// The feeds of a route by channel.
#[derive(Debug, Default)]
pub(crate) struct Feeds(Mutex<HashMap<Arc<str>, watch::Receiver<Progress>>>);

impl Feeds {
    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, watch::Receiver<Progress>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The feed of a channel. For a channel without a feed, `begin` gets the sending end of a new one.
    ///
    /// # Errors
    /// The error of `begin`.
    pub(crate) fn of<E>(
        &self,
        channel: &Arc<str>,
        begin: impl FnOnce(watch::Sender<Progress>) -> Result<(), E>,
    ) -> Result<FeedHandle, E> {
        let mut feeds = self.lock();
        if let Some(progress) = feeds.get(channel) {
            return Ok(FeedHandle { progress: progress.clone(), is_own: false });
        }
        let (sender, receiver) = watch::channel(Progress::Connecting);
        begin(sender)?;
        feeds.insert(channel.clone(), receiver.clone());
        Ok(FeedHandle { progress: receiver, is_own: true })
    }

    /// Whether the channel still has this feed. If so, the feed notices a subscriber that has joined before the call.
    pub(crate) fn has(&self, channel: &str, feed: &FeedHandle) -> bool {
        self.lock().get(channel).is_some_and(|other| other.same_channel(&feed.progress))
    }

    /// Removes the feed with this sending end, if `is_over` holds while no client can find it. Returns true if it did.
    pub(crate) fn remove_if(
        &self,
        channel: &str,
        feed: &watch::Sender<Progress>,
        is_over: impl FnOnce() -> bool,
    ) -> bool {
        let mut feeds = self.lock();
        let is_this = feeds.get(channel).is_some_and(|other| other.same_channel(&feed.subscribe()));
        let is_removed = is_this && is_over();
        if is_removed {
            feeds.remove(channel);
        }
        is_removed
    }
}

/// A feed, as a subscriber of its channel knows it.
pub(crate) struct FeedHandle {
    progress: watch::Receiver<Progress>,
    /// This subscriber began it.
    is_own: bool,
}

/// The outcome of a feed for a subscriber.
pub(crate) enum Outcome {
    /// The channel gets what is published at the next relay.
    Follows,
    /// The next relay refuses the subscription of this client.
    Refused(Refused),
    /// Another client began it, and came by a loop; or it has ended.
    Gone,
}

impl FeedHandle {
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
            Ok(Progress::Refused(_)) | Err(_) => Outcome::Gone,
            Ok(_) => Outcome::Follows,
        }
    }
}

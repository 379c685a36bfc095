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

    /// The feed of a channel. If there is none, `begin` gets the sending end of a new one.
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
            return Ok(FeedHandle(progress.clone()));
        }
        let (sender, receiver) = watch::channel(Progress::Connecting);
        begin(sender)?;
        feeds.insert(channel.clone(), receiver.clone());
        Ok(FeedHandle(receiver))
    }

    /// Whether the channel still has this feed. If so, the feed notices a subscriber that has joined before the call.
    pub(crate) fn has(&self, channel: &str, feed: &FeedHandle) -> bool {
        self.lock().get(channel).is_some_and(|other| other.same_channel(&feed.0))
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
pub(crate) struct FeedHandle(watch::Receiver<Progress>);

impl FeedHandle {
    /// Waits until the next relay has answered.
    ///
    /// # Errors
    /// It refuses the subscription.
    pub(crate) async fn follows(&mut self) -> Result<(), Refused> {
        match self.0.wait_for(|progress| !matches!(progress, Progress::Connecting)).await.as_deref() {
            Ok(Progress::Refused(refused)) => Err(refused.clone()),
            Ok(_) => Ok(()),
            Err(_ended) => Err(Refused {
                status: StatusCode::SERVICE_UNAVAILABLE,
                reason: Arc::from("this node has ended its subscription at the next relay"),
            }),
        }
    }
}

//! A channel that another relay feeds: a relaying node publishes again what its own subscription delivers.
//!
//! In: publications with the identifiers of the other relay, and the gaps between them. Out: the same identifiers in the
//! queues of this channel's subscribers. So a subscriber may resume at any node of the tree. Never: a publication twice, or
//! a hole that the subscribers do not learn of.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use tokio::sync::watch;

use crate::EventId;
use crate::channel::Channel;
use crate::publication::FedPublication;
use crate::publishing::{PublishProgress, Receipt};
use crate::relay::Relay;
use crate::request::{PublishError, SubscribeError};

/// The feeding end of a channel. The channel exists as long as this value.
#[derive(Debug)]
pub struct Feed {
    relay: Arc<Relay>,
    channel: Arc<Channel>,
}

impl Relay {
    /// Begins to feed a channel from another relay, which numbers its publications. The channel exists as long as the
    /// feed. `epoch` is a random number, for a channel that begins now.
    ///
    /// # Errors
    /// A bound is reached, or the relay has been closed.
    pub fn feed(self: &Arc<Self>, channel: &str, epoch: u64, now: Duration) -> Result<Feed, SubscribeError> {
        let channel = self.fed_channel(channel, epoch, now)?;
        Ok(Feed { relay: self.clone(), channel })
    }
}

impl Feed {
    /// The position after the latest publication, to resume from.
    pub fn position(&self) -> EventId {
        self.channel.position()
    }

    /// The number of subscribers of the channel, and its changes.
    pub fn audience(&self) -> watch::Receiver<u64> {
        self.channel.audience()
    }

    /// Continues at the position from which the other relay delivers.
    pub fn begin_at(&self, position: EventId, now: Duration) {
        let ours = self.position();
        let is_same_epoch = position.epoch == ours.epoch;
        // What this relay has published as the root, since it asked, comes once more.
        if is_same_epoch && position.sequence <= ours.sequence {
            return;
        }
        let missed = is_same_epoch.then(|| position.sequence - ours.sequence);
        self.channel.continue_after(missed, position, now);
    }

    /// Learns the epochs of the other relay before the current one.
    pub fn learn(&self, epochs: &[EventId]) {
        self.channel.learn(epochs);
    }

    /// Tells the subscribers of publications that the other relay no longer has. `missed` is `None` if their number is
    /// unknown.
    pub fn gap(&self, missed: Option<u64>, until: EventId, now: Duration) {
        self.channel.continue_after(missed, until, now);
    }

    /// Publishes. A reliable publication waits until all queues have room; `publisher` is woken when that may be so.
    ///
    /// # Errors
    /// The relay has no memory, or it has been closed. Without memory, the subscribers learn that they miss a realtime
    /// publication; the caller is to try again with other ones.
    pub fn poll_publish(
        &self,
        publication: &FedPublication,
        publisher: &Waker,
        now: Duration,
    ) -> Result<PublishProgress, PublishError> {
        if let Some(id) = publication.id {
            let ours = self.position();
            let is_same_epoch = id.epoch == ours.epoch;
            if is_same_epoch && id.sequence <= ours.sequence {
                let nobody = Receipt { id: Some(id), subscribers: 0, delivered: 0, dropped: 0 };
                return Ok(PublishProgress::Done(nobody));
            }
            if !is_same_epoch || id.sequence > ours.sequence.saturating_add(1) {
                let before = EventId { sequence: id.sequence.saturating_sub(1), ..id };
                let missed = is_same_epoch.then(|| before.sequence - ours.sequence);
                self.channel.continue_after(missed, before, now);
            }
        }
        let published = self.relay.poll_publish_fed(&self.channel, publication, publisher, now);
        if let (Err(PublishError::Memory(_)), Some(id), false) = (&published, publication.id, publication.is_reliable) {
            self.channel.continue_after(Some(1), id, now);
        }
        published
    }

    /// Numbers the publications from now on: this relay is the root. It counts on from [`Self::position`], in a new epoch.
    /// `is_complete`: nothing is missing that another root has published. Otherwise subscribers learn that they may miss
    /// something. Returns false, and does nothing, if another relay has become the root since `hand_overs` were counted.
    pub fn lead(&self, epoch: u64, is_complete: bool, hand_overs: u64, now: Duration) -> bool {
        self.channel.lead(epoch, is_complete, hand_overs, now)
    }

    /// Another relay is about to keep a copy. Its subscription may take a moment.
    pub fn expect_copy(&self, now: Duration) {
        self.channel.expect_copy(now);
    }

    /// The times that another relay has become the root by asking this one.
    pub fn hand_overs(&self) -> u64 {
        self.channel.hand_overs()
    }

    /// Lets another relay number the publications again.
    pub fn follow(&self) {
        self.channel.begin_feed();
    }

    /// The position before the oldest publication that the history has.
    pub fn before_history(&self) -> EventId {
        self.channel.before_history()
    }

    /// Adds older publications of the relay that feeds this channel to the history, in their order. Nothing is added if there
    /// is a hole between them and the history, or no room.
    pub fn prepend(&self, older: Vec<FedPublication>) {
        self.relay.prepend(&self.channel, older);
    }

    /// Whether this relay numbers the publications.
    pub fn leads(&self) -> bool {
        self.channel.leads()
    }

    /// Whether a stand-by that has confirmed all has everything: a publisher gets the response to a realtime publication
    /// before any stand-by has it.
    pub fn is_reliable(&self) -> bool {
        self.channel.is_reliable()
    }

    /// Whether the relay has little room for other channels.
    pub fn is_crowded(&self) -> bool {
        self.relay.is_crowded()
    }

    /// Whether the relay keeps histories.
    pub fn keeps_history(&self) -> bool {
        self.relay.keeps_history()
    }

    /// Whether nobody subscribes to the channel, and what it keeps is too old.
    pub fn is_idle(&self, now: Duration) -> bool {
        self.channel.is_idle(now, self.relay.history_age())
    }

    /// Ends the subscriptions of the channel after what waits in their queues.
    pub fn close(&self) {
        self.channel.close();
    }
}

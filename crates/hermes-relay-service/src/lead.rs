//! The root of a channel among peers: takes over what another root has published, and has a peer keep a copy.
//!
//! In: the peers after this node, best first. Out: what the first one that can be reached has of the channel; from then on,
//! that peer keeps a copy, and is the next root. Never: a publication at a node that was asked to hand over.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::feeder::Feeder;
use crate::feeds::Refused;
use crate::next_channel::{ChannelRequests, HandedOver, NextDelivery, StandBy};
use crate::siblings::Siblings;

/// The time for which a peer keeps a copy without being asked again, and the time after which it is asked again.
const STAND_BY: Duration = Duration::from_secs(60);
pub(crate) const STAND_BY_INTERVAL: Duration = Duration::from_secs(20);
/// The time after which a peer is asked again that could not be reached.
const RETURN_INTERVAL: Duration = Duration::from_secs(5);

/// What other peers have had of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// A peer has handed over all that it has.
    All,
    /// The first peer that can be reached does not know the channel, or not what this node has of it.
    Nothing,
    /// No peer can be reached, or it broke off.
    Nobody,
    /// Another peer is the root.
    Root(Arc<str>),
}

/// A root that asks the peers after it, best first.
pub(crate) struct Lead<'l> {
    pub(crate) siblings: &'l Siblings,
    pub(crate) below: &'l [Arc<str>],
    pub(crate) requests: &'l ChannelRequests,
    pub(crate) feeder: &'l Feeder,
}

impl Lead<'_> {
    /// Takes over what the peers after this node have, or the node that was the root before. The first peer that can be
    /// reached keeps a copy from now on.
    ///
    /// `is_new`: this node has nothing of the channel. Otherwise, what a peer has counts only if it goes on from there: the
    /// peer may have fallen behind.
    pub(crate) async fn take_over(&self, before: Option<&Arc<str>>, is_new: bool) -> Found {
        let upstream = before.and_then(|before| self.siblings.upstream_of(before));
        let from_before = match &upstream {
            Some(upstream) => self.take_from(std::slice::from_ref(upstream), before, is_new).await,
            None => Found::Nobody,
        };
        match from_before {
            Found::Nobody => self.take_from(self.below, None, is_new).await,
            found => found,
        }
    }

    async fn take_from(&self, peers: &[Arc<str>], before: Option<&Arc<str>>, is_new: bool) -> Found {
        match self.ask(peers, before).await {
            Some((_, StandBy::HandsOver(handed_over))) => import(handed_over, self.feeder, is_new).await,
            Some((_, StandBy::KnowsNothing)) => Found::Nothing,
            Some((_, StandBy::Root(root))) => Found::Root(root),
            None => Found::Nobody,
        }
    }

    /// Has the first peer that can be reached keep a copy, or keep it for longer. What it has, it has from this node.
    pub(crate) async fn keep_copy(&self) -> Kept {
        match self.ask(self.below, None).await {
            Some((_, StandBy::Root(root))) => Kept::Root(root),
            // It is the home of the channel, too.
            Some((0, _)) => Kept::Until(Instant::now() + STAND_BY_INTERVAL),
            Some(_) | None => Kept::Until(Instant::now() + RETURN_INTERVAL),
        }
    }

    /// Asks the first peer that can be reached, and returns its place among them and its answer.
    async fn ask(&self, peers: &[Arc<str>], before: Option<&Arc<str>>) -> Option<(usize, StandBy)> {
        let of_route = &self.siblings.of_route;
        for (index, upstream) in peers.iter().enumerate() {
            if of_route.feeds.is_away(upstream) {
                continue;
            }
            let (asked, position) = (self.requests.at(upstream), self.feeder.feed.position());
            match asked.stand_by(STAND_BY, position, before, &of_route.relay, self.siblings.max_bytes).await {
                Ok(answer) => return Some((index, answer)),
                Err(Refused { reason, .. }) => {
                    of_route.feeds.set_away(upstream);
                    tracing::debug!(upstream = &**upstream, %reason, "a peer keeps no copy of a channel");
                }
            }
        }
        None
    }
}

/// A copy at another peer.
pub(crate) enum Kept {
    /// The time at which to ask again.
    Until(Instant),
    /// Another peer is the root.
    Root(Arc<str>),
}

async fn import(HandedOver { mut deliveries, epochs }: HandedOver, feeder: &Feeder, is_new: bool) -> Found {
    loop {
        match std::future::poll_fn(|cx| deliveries.poll_next(cx)).await {
            Ok(NextDelivery::Gap { missed, .. }) if !is_new && missed != Some(0) => return Found::Nothing,
            Ok(delivery) => {
                let publication = feeder.take(delivery);
                if feeder.publish(publication.as_ref()).await.is_err() {
                    return Found::Nobody;
                }
            }
            Err(_) if deliveries.has_ended() => {
                feeder.feed.learn(&epochs);
                return Found::All;
            }
            Err(_) => return Found::Nobody,
        }
    }
}

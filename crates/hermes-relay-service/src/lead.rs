//! The root of a channel among peers: takes over what another root has published, and has a peer keep a copy.
//!
//! In: the peers after this node, best first. Out: what the first one that can be reached has of the channel; from then on,
//! that peer keeps a copy, and is the next root. Never: a publication at a node that was asked to hand over.

use std::sync::Arc;
use std::time::Duration;

use crate::feeder::Feeder;
use crate::next_channel::{ChannelRequests, HandedOver, NextDelivery};
use crate::siblings::Siblings;

/// The time for which a peer keeps a copy without being asked again, and the time after which it is asked again.
const STAND_BY: Duration = Duration::from_secs(60);
pub(crate) const STAND_BY_INTERVAL: Duration = Duration::from_secs(20);

/// What the peers after this node have had of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// A peer has handed over all that it has.
    All,
    /// The first peer that can be reached does not know the channel, or not what this node has of it.
    Nothing,
    /// No peer can be reached, or it broke off.
    Nobody,
}

/// Takes over what the peers after this node have, and has the first one that can be reached keep a copy.
///
/// `is_new`: this node has nothing of the channel. Otherwise, what a peer has counts only if it goes on from there: the peer may have
/// fallen behind.
pub(crate) async fn take_over(
    siblings: &Siblings,
    below: &[Arc<str>],
    of: &ChannelRequests,
    feeder: &Feeder,
    is_new: bool,
) -> Found {
    match ask(siblings, below, of, feeder).await {
        Some(Some(handed_over)) => import(handed_over, feeder, is_new).await,
        Some(None) => Found::Nothing,
        None => Found::Nobody,
    }
}

/// Has the first peer that can be reached keep a copy, or keep it for longer.
pub(crate) async fn keep_copy(siblings: &Siblings, below: &[Arc<str>], of: &ChannelRequests, feeder: &Feeder) {
    // What it has, it has from this node.
    drop(ask(siblings, below, of, feeder).await);
}

async fn ask(
    siblings: &Siblings,
    below: &[Arc<str>],
    of: &ChannelRequests,
    feeder: &Feeder,
) -> Option<Option<HandedOver>> {
    let feeds = &siblings.of_route.feeds;
    for upstream in below.iter().filter(|upstream| !feeds.is_away(upstream)) {
        let asked = of.at(upstream);
        let position = feeder.feed.position();
        match asked.stand_by(STAND_BY, position, &siblings.of_route.relay, siblings.max_bytes).await {
            Ok(has) => return Some(has),
            Err(refused) => {
                feeds.set_away(upstream);
                tracing::debug!(upstream = &**upstream, reason = &*refused.reason, "a peer keeps no copy of a channel");
            }
        }
    }
    None
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

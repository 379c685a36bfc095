//! The history of a channel from before this node followed its root, for a node that keeps a copy.
//!
//! In: the relay that is the root. Out: its publications right before the history of this node, in that history. Never: a
//! publication for a subscriber.

use std::sync::Arc;
use std::time::Duration;

use hermes_relay::{EventId, Feed, Relay};

use crate::next_channel::{NextChannel, NextDelivery, Standing};

/// The time for which the root may be silent: it has what is asked for.
const MAX_SILENCE: Duration = Duration::from_secs(10);

/// Copies the history. Returns true if this node has all then that the root had.
pub(crate) async fn copy(next: NextChannel, feed: &Feed, relay: Arc<Relay>, max_bytes: usize) -> bool {
    let until = feed.before_history().sequence;
    let standing = Standing { timeout: MAX_SILENCE, subscribers: 0, confirmed: None };
    let Ok(mut accepted) = next.subscribe(standing, Some(EventId::OLDEST), relay, max_bytes).await else {
        return false;
    };
    let mut older = Vec::new();
    let mut position = accepted.position.sequence;
    while position < until {
        let next = std::future::poll_fn(|cx| accepted.deliveries.poll_next(cx));
        match tokio::time::timeout(MAX_SILENCE, next).await {
            Ok(Ok(NextDelivery::Publication(publication))) => {
                // One for one of a group has no place in the channel.
                let Some(id) = publication.id else { continue };
                position = id.sequence;
                older.push(publication);
            }
            // The epoch changes.
            Ok(Ok(NextDelivery::Gap { missed: Some(0), .. } | NextDelivery::Nothing)) => {}
            Ok(Ok(NextDelivery::Gap { .. }) | Err(_)) | Err(_) => return false,
        }
    }
    feed.prepend(older);
    true
}

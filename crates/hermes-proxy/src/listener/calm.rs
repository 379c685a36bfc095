//! What a client's connection of many streams may ask of us, over HTTP/2 and HTTP/3.
//!
//! In: who the client is, the node's limits, how its streams ended. Out: windows and counts; the word that it
//! begins too much only to break it off (rapid reset, CVE-2023-44487). Never: a close; the connection does that.

use hermes_model::limits::Limits;

use super::http::Client;
use crate::upstream::pool::{ERROR_RESETS, RESETS_REMEMBERED};

/// What a connection may ask of us.
pub(super) struct Bounds {
    pub(super) stream_window: u32,
    pub(super) connection_window: u32,
    pub(super) resets: usize,
    pub(super) error_resets: usize,
    pub(super) resets_remembered: usize,
    pub(super) cancels: usize,
}

impl Bounds {
    /// Connections of nodes carry the requests of many, who break off as they like and send what we
    /// reset: none of them may end it for all the others. What came and went unseen cannot be more
    /// than there may be streams.
    pub(super) fn of(client: &Client, limits: &Limits) -> Self {
        if client.trust.is_believed() {
            return Self {
                stream_window: limits.stream_window,
                connection_window: limits.connection_window,
                resets: (limits.streams as usize).max(limits.resets),
                error_resets: limits.error_resets.max(ERROR_RESETS),
                resets_remembered: RESETS_REMEMBERED,
                cancels: usize::MAX,
            };
        }
        Self {
            stream_window: limits.anonymous_stream_window,
            connection_window: limits.anonymous_connection_window,
            resets: limits.resets,
            error_resets: limits.error_resets,
            // h2's own: a stranger shall not make us remember more.
            resets_remembered: 50,
            cancels: limits.cancels,
        }
    }
}

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Answered,
    /// The client broke it off before its answer began.
    Cancelled,
    /// It brought no request, or a malformed one.
    Malformed,
}

/// Requests that a client began and broke off, and those that were none. Over HTTP/2 h2 counts those
/// that were never taken up; the others cost a request to an upstream each.
pub(super) struct Cancels {
    most: usize,
    most_malformed: usize,
    pub(super) began: usize,
    cancelled: usize,
    malformed: usize,
}

impl Cancels {
    pub(super) fn new(bounds: &Bounds) -> Self {
        Self { most: bounds.cancels, most_malformed: bounds.error_resets, began: 0, cancelled: 0, malformed: 0 }
    }

    /// True once, when those that were cancelled are too many, and the most of all, or the malformed too many.
    pub(super) fn count(&mut self, fate: Fate) -> bool {
        match fate {
            Fate::Answered => return false,
            Fate::Cancelled => self.cancelled += 1,
            Fate::Malformed => self.malformed += 1,
        }
        let are_many =
            (self.cancelled > self.most && self.cancelled > self.began / 2) || self.malformed > self.most_malformed;
        if are_many {
            (self.most, self.most_malformed) = (usize::MAX, usize::MAX);
        }
        are_many
    }
}

//! Limits on a client's multiplexed connection, over HTTP/2 and HTTP/3.
//!
//! In: the client's trust, the node's limits, and the outcome of each stream. Out: windows and limits; and the verdict
//! that a client cancels too many requests (rapid reset, CVE-2023-44487). Never: closes the connection; its owner does.

use hermes_model::limits::Limits;

use super::http::Client;
use hermes_outbound::outbound::pool::{ERROR_RESETS, RESETS_REMEMBERED};

/// The limits of one connection.
pub(super) struct Bounds {
    pub(super) stream_window: u32,
    pub(super) connection_window: u32,
    pub(super) resets: usize,
    pub(super) error_resets: usize,
    pub(super) resets_remembered: usize,
    pub(super) cancels: usize,
}

impl Bounds {
    /// The limits for this client. A connection from a trusted node carries the requests of many users, who cancel
    /// requests and send data on streams that this node has reset. No single user may end the connection for the
    /// others. The number of streams that were reset before they were accepted cannot exceed the stream limit.
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
            // h2's default: an untrusted client must not make the node remember more.
            resets_remembered: 50,
            cancels: limits.cancels,
        }
    }
}

/// The outcome of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamOutcome {
    Answered,
    /// The client cancelled the request before its response began.
    Cancelled,
    /// The stream carried no request, or a malformed one.
    Malformed,
}

/// Counts cancelled and malformed requests. Over HTTP/2, the h2 library counts the resets of streams that were never
/// accepted. Each of the cancelled requests here cost a request to an upstream.
pub(super) struct RapidResetGuard {
    most: usize,
    most_malformed: usize,
    pub(super) began: usize,
    cancelled: usize,
    malformed: usize,
}

impl RapidResetGuard {
    pub(super) fn new(bounds: &Bounds) -> Self {
        Self { most: bounds.cancels, most_malformed: bounds.error_resets, began: 0, cancelled: 0, malformed: 0 }
    }

    /// True once, when too many requests were malformed, or when the cancelled requests exceed both their limit and
    /// half of all requests.
    pub(super) fn count(&mut self, fate: StreamOutcome) -> bool {
        match fate {
            StreamOutcome::Answered => return false,
            StreamOutcome::Cancelled => self.cancelled += 1,
            StreamOutcome::Malformed => self.malformed += 1,
        }
        let are_many =
            (self.cancelled > self.most && self.cancelled > self.began / 2) || self.malformed > self.most_malformed;
        if are_many {
            (self.most, self.most_malformed) = (usize::MAX, usize::MAX);
        }
        are_many
    }
}

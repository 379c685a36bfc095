//! Resumable downloads for clients that cannot resume: retries a request until its response is complete.
//!
//! In: a decided request of a route with `resume`, and the rest of the chain. Out: the first usable response. If its
//! body breaks off, the filter requests the rest from the exact byte, over the route that matches then. Never: parts of
//! two representations in one response, or a retry of a request that must not be sent twice.

mod attempts;
mod body;
mod retry;

use std::rc::Rc;
use std::time::Duration;

pub(crate) use self::attempts::handle;
use crate::worker::Worker;
use hermes_transport::error::Error;
use hermes_transport::runtime::fair_shares::{Bound, Owner, Share};
use hermes_transport::runtime::session::SessionEntry;

/// The maximum back-off if nothing reached the origin: it is not overloaded, and a path may exist only for a second.
const UNREACHED: Duration = Duration::from_secs(1);
/// The maximum back-off if the origin reported that it is unavailable.
const REFUSED: Duration = Duration::from_secs(30);

/// The maximum back-off after this error; `None` if a retry cannot help.
fn rests(error: &Error) -> Option<Duration> {
    let is_passing = match error {
        // The request did not get its turn within the rate limit's deadline.
        Error::RateLimited { .. } => return Some(REFUSED),
        Error::NoProgress(_) | Error::Connect { .. } | Error::ConnectTimeout { .. } => true,
        Error::NotConnected { .. } | Error::Broken { .. } => true,
        _ => !is_sent(error),
    };
    is_passing.then_some(UNREACHED)
}

/// True if the origin may have received part of a request that failed so.
fn is_sent(error: &Error) -> bool {
    let is_unreached =
        matches!(error, Error::NoEndpoint { .. } | Error::Resolve(_) | Error::Limit(_) | Error::RateLimited { .. });
    let is_unconnected =
        matches!(error, Error::Connect { .. } | Error::ConnectTimeout { .. } | Error::NotConnected { .. });
    !is_unreached && !is_unconnected && !matches!(error, Error::Broken { unprocessed: true, .. })
}

/// A session that waits for a retry. Its drop ends the wait.
struct Waiting(#[expect(dead_code, reason = "held for its drop")] Share);

impl Waiting {
    /// Begins a wait. `None` if the limit of waiting sessions is reached and no other client has more of them than this
    /// session's client.
    fn begin(worker: &Rc<Worker>, entry: &Rc<SessionEntry>) -> Option<Self> {
        let limit = worker.generation().snapshot.limits.resume_pending;
        let bound = Bound { name: "resume-pending", limit, reserve: 0, bounds_closing: false };
        let share = Share::take(worker, &worker.resume_pending, Owner::of_session(&entry.facts), bound)?;
        share.is_held_by(entry);
        Some(Self(share))
    }
}

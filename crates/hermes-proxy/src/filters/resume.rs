//! Resumable downloads for clients that cannot resume: a request is tried again until its response is complete.
//!
//! In: a decided request of a route with `retrieve`, and how its origin is asked. Out: its response, once there is one that
//! is worth giving. If its body breaks off, the rest is requested from the very byte, over the route that holds then.
//! Never: parts of two representations in one response, or a second try of a request that must not be sent twice.

mod body;
mod forward;
mod retry;

use std::rc::Rc;
use std::time::Duration;

pub(crate) use self::body::RetrievedBody;
pub(crate) use self::forward::handle;
use crate::error::Error;
use crate::live::Entry;
use crate::shares::{Bound, Owner, Share};
use crate::worker::Worker;

/// The longest pause where nothing reached the origin: it has no trouble with it, and a path may be there for a second.
const UNREACHED: Duration = Duration::from_secs(1);
/// The longest one where the origin said that it cannot.
const REFUSED: Duration = Duration::from_secs(30);

/// How long to leave it alone at the most after this error; `None` where no other try can help.
fn rests(error: &Error) -> Option<Duration> {
    let is_passing = match error {
        // It was not its turn in time.
        Error::Paced { .. } => return Some(REFUSED),
        Error::NoProgress(_) | Error::Connect { .. } | Error::ConnectTimeout { .. } => true,
        Error::NotConnected { .. } | Error::Broken { .. } => true,
        _ => !is_sent(error),
    };
    is_passing.then_some(UNREACHED)
}

/// Whether its origin may have had something of the request that ended so.
fn is_sent(error: &Error) -> bool {
    let is_unreached =
        matches!(error, Error::NoEndpoint { .. } | Error::Resolve(_) | Error::Limit(_) | Error::Paced { .. });
    let is_unconnected =
        matches!(error, Error::Connect { .. } | Error::ConnectTimeout { .. } | Error::NotConnected { .. });
    !is_unreached && !is_unconnected && !matches!(error, Error::Broken { unprocessed: true, .. })
}

/// A session that waits for another try. Its drop ends the wait.
struct Waiting(#[expect(dead_code, reason = "held for its drop")] Share);

impl Waiting {
    /// `None`: as many sessions wait as may, and this one's client has no fewer of them than any other.
    fn begin(worker: &Rc<Worker>, entry: &Rc<Entry>) -> Option<Self> {
        let limit = worker.generation().snapshot.limits.retrievals;
        let bound = Bound { name: "retrievals", limit, reserve: 0 };
        let share = Share::take(worker, &worker.retrievals, Owner::of_session(&entry.facts), bound)?;
        share.is_held_by(entry);
        Some(Self(share))
    }
}

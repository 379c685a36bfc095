//! The retriever: requests for clients that cannot try again are asked for until they are there.
//!
//! In: a decided request of a route with `retrieve`, and how its origin is asked. Out: its response, once there is one that is
//! worth giving; where its content breaks off it goes on at the very byte, over whatever way the route leads then.
//! `answer`, `digest`, `pause` and `resume` are pure, and but for the last one what `hermes fetch` works with as well.
//! Never: parts of two representations in one response; twice what must not be sent twice.

mod again;
pub mod answer;
mod body;
pub mod digest;
mod forward;
pub mod pause;
mod resume;

use std::time::Duration;

pub(crate) use self::body::RetrievedBody;
pub(crate) use self::forward::forward;
use crate::error::Error;

/// The longest pause where nothing reached the origin: it has no trouble with it, and a path may be there for a second.
const UNREACHED: Duration = Duration::from_secs(1);
/// The longest one where the origin said that it cannot.
const REFUSED: Duration = Duration::from_secs(30);

/// How long to leave it alone at the most after this error; `None` where no other try can help.
fn rests(error: &Error, may_repeat: bool) -> Option<Duration> {
    let is_passing = match error {
        // Not a byte was sent.
        Error::NoEndpoint { .. } | Error::Resolve(_) => true,
        Error::NoProgress(_) | Error::Connect { .. } | Error::ConnectTimeout { .. } => may_repeat,
        Error::NotConnected { .. } | Error::Broken { .. } => may_repeat,
        _ => false,
    };
    is_passing.then_some(UNREACHED)
}

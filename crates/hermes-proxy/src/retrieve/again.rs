//! A request of a live session, asked once more by the way that its route leads now.
//!
//! In: what is known of the session, and fields that ask for a part. Out: the answer to that.

use std::rc::Rc;

use hermes_model::snapshot::{Action, Terminate, TerminateKind};
use http::header::{IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, RANGE};
use http::uri::Scheme;
use http::{HeaderValue, Response, Version};

use crate::body::Body;
use crate::cache::Source;
use crate::error::Error;
use crate::live::Entry;
use crate::request::Request;
use crate::service::forward::head::{Amend, Dress};
use crate::service::terminate;
use crate::session;
use crate::worker::Worker;

/// How its client asked, beside what the facts say.
#[derive(Clone)]
pub(super) struct Manner {
    version: Version,
    scheme: Scheme,
    host: HeaderValue,
}

impl Manner {
    pub(super) fn of(dress: &Dress<'_>) -> Self {
        Self { version: dress.version, scheme: dress.scheme.clone(), host: dress.host.clone() }
    }
}

/// Asks for a part of it: `Range`, `If-Range`.
///
/// # Errors
/// As whoever is asked by; the route does not lead to anybody any more.
pub(super) async fn ask(
    worker: &Rc<Worker>,
    entry: &Rc<Entry>,
    manner: Manner,
    (range, of): (HeaderValue, HeaderValue),
) -> Result<Response<Body>, Error> {
    let generation = worker.generation();
    let route = entry.route.borrow().clone().ok_or_else(|| Error::Internal("a session without a route".to_owned()))?;
    let Manner { version, scheme, host } = manner;
    let request = Request { version, scheme, host, ..Request::again(entry) };
    let mut forward = session::forward(worker, &generation, entry, &route, &request, None);
    let remove = [RANGE, IF_RANGE, IF_NONE_MATCH, IF_MODIFIED_SINCE];
    forward.dress.amend = Some(Amend { remove, set: vec![(RANGE, range), (IF_RANGE, of)] });
    match &route.action {
        Action::Upstream(upstream) => {
            let state = generation.state_of(upstream)?;
            Source::Upstream(state, route.pace.as_ref()).ask(&forward).await
        }
        Action::Terminate(terminate @ Terminate { kind: TerminateKind::Http, .. }) => {
            let place = terminate::place(terminate, &entry.facts, &route)?;
            let destination = place.destination(terminate, None);
            Source::Origin(&destination, generation.route_owner(&route)).ask(&forward).await
        }
        _ => Err(Error::Unsuitable { route: route.name.clone(), kind: entry.facts.kind.as_str() }),
    }
}

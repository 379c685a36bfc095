//! A request of a live session, asked once more: it is decided anew, by the document of now.
//!
//! In: what is known of the session, and what is asked. Out: the answer to that; and the route that led to it is the
//! session's from then on.

use std::rc::Rc;
use std::sync::Arc;

use hermes_model::decide::{Decision, decide};
use hermes_model::rewrite::Vars;
use hermes_model::snapshot::{Action, Route, Terminate, TerminateKind};
use http::header::{IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, RANGE};
use http::uri::Scheme;
use http::{HeaderValue, Response, Version};

use crate::body::{Body, Interim, RequestBody};
use crate::error::Error;
use crate::filters::{self, NextHop};
use crate::live::Entry;
use crate::request::Request;
use crate::service::forward::head::{Amend, Dress};
use crate::service::forward::{Forward, is_idempotent};
use crate::service::{respond, terminate};
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

/// What is asked.
pub(super) struct Question<'a> {
    manner: Manner,
    body: RequestBody,
    interim: Option<Arc<Interim>>,
    amend: Option<Amend>,
    /// Whose cache it is that amends it. `None`: it means the same whoever is asked.
    kept_by: Option<&'a Route>,
}

/// An answer that the document gives itself, not an origin's.
#[derive(Clone)]
pub(super) struct OfDocument;

impl<'a> Question<'a> {
    /// The same once more.
    pub(super) fn of(forward: &Forward<'a>) -> Self {
        Self {
            manner: Manner::of(&forward.dress),
            body: forward.body.clone(),
            interim: forward.interim.clone(),
            amend: forward.dress.amend.clone(),
            kept_by: Some(forward.route),
        }
    }

    /// For a part of what a request without content brings: `Range`, `If-Range`.
    pub(super) fn for_part(manner: Manner, (range, of): (HeaderValue, HeaderValue)) -> Self {
        let remove = [RANGE, IF_RANGE, IF_NONE_MATCH, IF_MODIFIED_SINCE];
        let amend = Some(Amend { remove, set: vec![(RANGE, range), (IF_RANGE, of)] });
        Self { manner, body: RequestBody::Empty, interim: None, amend, kept_by: None }
    }
}

/// Asks.
///
/// # Errors
/// As whoever is asked by; no route takes it any more, or one that leads to nobody.
pub(super) async fn ask(
    worker: &Rc<Worker>,
    entry: &Rc<Entry>,
    question: Question<'_>,
) -> Result<Response<Body>, Error> {
    let generation = worker.generation();
    let route = match decide(&entry.facts, &generation.snapshot) {
        Decision::Act(route) => route,
        Decision::Deny(deny) => return Err(Error::Reconfigured(deny.reason.to_string())),
    };
    let Question { manner: Manner { version, scheme, host }, body, interim, amend, kept_by } = question;
    // Another route's origin is not asked by what is known of this one's: it might mean its own by the same tag.
    let amend = amend.filter(|_| kept_by.is_none_or(|by| hermes_cache::registry::is_one(by, &route)));
    let own = match &route.action {
        Action::Respond(answer) => Some(respond::respond(answer)),
        Action::Redirect(redirect) => {
            Some(respond::redirect(redirect, &Vars { facts: &entry.facts, node: &generation.snapshot.node })?)
        }
        _ => None,
    };
    if let Some(mut own) = own {
        *entry.route.borrow_mut() = Some(route);
        own.extensions_mut().insert(OfDocument);
        return Ok(own);
    }
    if entry.was_sent.get() && !is_idempotent(entry, &route) {
        let reason = format!("route {} takes it now, which does not say that it may be sent twice", route.name);
        return Err(Error::Reconfigured(reason));
    }
    *entry.route.borrow_mut() = Some(route.clone());
    let request = Request { version, scheme, host, ..Request::again(entry) };
    let mut forward = session::forward(worker, &generation, entry, &route, &request, interim);
    (forward.body, forward.dress.amend) = (body, amend);
    match &route.action {
        Action::Upstream(upstream) => {
            let state = generation.state_of(upstream)?;
            if route.custody.is_some() {
                entry.was_sent.set(true);
            }
            filters::send_again(&forward, NextHop::Upstream(state)).await
        }
        Action::Terminate(terminate @ Terminate { kind: TerminateKind::Http, .. }) => {
            let place = terminate::origin(&generation, terminate, &entry.facts, &route, &request.scheme)?;
            let destination = place.destination(terminate, None);
            let hop = NextHop::Origin { destination: &destination, owner: generation.route_owner(&route) };
            filters::send_again(&forward, hop).await
        }
        _ => Err(Error::Unsuitable { route: route.name.clone(), kind: entry.facts.kind.as_str() }),
    }
}

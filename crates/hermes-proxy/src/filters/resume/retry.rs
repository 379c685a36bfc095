//! Sends a request of a live session again, after a new decision with the current document.
//!
//! In: the session's state, and the request to send. Out: the response. The new route becomes the session's route.

use std::rc::Rc;
use std::sync::Arc;

use hermes_model::decide::{Decision, decide};
use hermes_model::rewrite::TemplateValues;
use hermes_model::snapshot::{Action, Route, Terminate, TerminateKind};
use http::header::{IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, RANGE};
use http::{HeaderValue, Response};

use crate::filters::{self, NextHop};
use crate::service::forward::head::{HeadOverrides, RequestForm};
use crate::service::forward::{Forward, is_idempotent};
use crate::service::respond;
use crate::worker::Worker;
use hermes_architecture::dial_target;
use hermes_transport::body::{Body, Interim, RequestBody};
use hermes_transport::error::Error;
use hermes_transport::runtime::session::{Delivery, SessionEntry};

/// A request to send again.
pub(super) struct Question<'a> {
    form: RequestForm,
    body: RequestBody,
    interim: Option<Arc<Interim>>,
    amend: Option<HeadOverrides>,
    /// The route whose cache made the header changes. `None`: the changes hold for any origin.
    kept_by: Option<&'a Route>,
}

/// Marks a response that the document defines (`respond`, `redirect`), as opposed to an origin's.
#[derive(Clone)]
pub(super) struct OfDocument;

impl<'a> Question<'a> {
    /// Creates a request that is equal to the original one.
    pub(super) fn of(forward: &Forward<'a>) -> Self {
        Self {
            form: RequestForm::of(&forward.rewriter),
            body: forward.body.clone(),
            interim: forward.interim.clone(),
            amend: forward.rewriter.amend.clone(),
            kept_by: Some(forward.route),
        }
    }

    /// A request for a part of a response, with `Range` and `If-Range`; the original request had no body.
    pub(super) fn for_part(form: RequestForm, (range, of): (HeaderValue, HeaderValue)) -> Self {
        let remove = [RANGE, IF_RANGE, IF_NONE_MATCH, IF_MODIFIED_SINCE];
        let amend = Some(HeadOverrides { remove: remove.into(), set: vec![(RANGE, range), (IF_RANGE, of)] });
        Self { form, body: RequestBody::Empty, interim: None, amend, kept_by: None }
    }
}

/// Sends the request.
///
/// # Errors
/// Errors of the next hop; no route matches any longer, or the new route cannot serve the request.
pub(super) async fn send_again(
    worker: &Rc<Worker>,
    entry: &Rc<SessionEntry>,
    question: Question<'_>,
) -> Result<Response<Body>, Error> {
    let generation = worker.generation();
    let route = match decide(&entry.facts, &generation.snapshot) {
        Decision::Act(route) => route,
        Decision::Deny(deny) => return Err(Error::Reconfigured(deny.reason.to_string())),
    };
    let Question { form, body, interim, amend, kept_by } = question;
    // Another route's origin must not receive this cache's validators: the same tag may mean other content there.
    let amend = amend.filter(|_| kept_by.is_none_or(|by| hermes_cache::registry::is_one(by, &route)));
    let own = match &route.action {
        Action::Respond(answer) => Some(respond::respond(answer)),
        Action::Redirect(redirect) => {
            Some(respond::redirect(redirect, &TemplateValues { facts: &entry.facts, node: &generation.snapshot.node })?)
        }
        _ => None,
    };
    if let Some(mut own) = own {
        *entry.route.borrow_mut() = Some(route);
        own.extensions_mut().insert(OfDocument);
        return Ok(own);
    }
    if entry.may_be_sent() && !is_idempotent(entry, &route) {
        let reason = format!("route {} now matches, and it does not permit a retry", route.name);
        return Err(Error::Reconfigured(reason));
    }
    *entry.route.borrow_mut() = Some(route.clone());
    let request = form.request(entry);
    let mut forward = Forward::new(worker, &generation, entry, &route, &request, interim);
    (forward.body, forward.rewriter.amend) = (body, amend);
    match &route.action {
        Action::Upstream(upstream) => {
            let state = generation.state_of(upstream)?;
            if route.custody.is_some() {
                entry.delivery.set(Delivery::MaybeSent);
            }
            filters::send_again(&forward, NextHop::Upstream(state)).await
        }
        Action::Terminate(terminate @ Terminate { kind: TerminateKind::Http, .. }) => {
            let place = dial_target::origin(&generation, terminate, &entry.facts, &route, &request.scheme)?;
            let destination = place.destination(terminate, None);
            let hop = NextHop::Origin { destination: &destination, owner: generation.route_owner(&route) };
            filters::send_again(&forward, hop).await
        }
        _ => Err(Error::Unsuitable { route: route.name.clone(), kind: entry.facts.kind.as_str() }),
    }
}

//! Races GET and HEAD requests between NDN and an HTTP origin.
//!
//! In: a request of a route with `terminate: {race: ...}`. Out: the first usable response. If its body breaks off, another
//! alternative sends the content again (`hermes_architecture::race::repeatable_body`). Never: a repeated unsafe request.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use hermes_architecture::race::repeatable_body::{Answer, Attempt, Head, Repeatable, RepeatableBody};
use hermes_architecture::race::{self, RaceContext};
use hermes_architecture::{dial_target, ndn};
use hermes_model::decide::{Decision, decide};
use hermes_model::facts::Kind;
use hermes_model::snapshot::{Action, Route, Terminate, TerminateKind};
use http::{Method, Response, StatusCode};
use http_body::Body as _;

use super::forward::Forward;
use super::forward::head::RequestForm;
use crate::request::{Request, UpgradeKind};
use crate::worker::Worker;
use hermes_transport::body::{Body, RequestBody};
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

/// Whether the alternatives of a race answer this request. Other requests go to the HTTP origin alone.
pub(crate) fn is_raced(request: &Request<'_>) -> bool {
    let is_bare = request.upgrade == UpgradeKind::None && matches!(request.body, RequestBody::Empty);
    is_bare && matches!(request.facts.method, Method::GET | Method::HEAD)
}

/// The HTTP origin among the alternatives of a race.
pub(crate) fn origin(route: &Route) -> Option<&Terminate> {
    route.action.alternatives().iter().find_map(|action| match action {
        Action::Terminate(terminate @ Terminate { kind: TerminateKind::Http, .. }) => Some(terminate),
        _ => None,
    })
}

/// A request that is raced, with all that its repetition needs.
#[derive(Clone)]
pub(crate) struct ContentRace {
    pub(crate) worker: Rc<Worker>,
    pub(crate) entry: Rc<SessionEntry>,
    pub(crate) route: Arc<Route>,
    pub(crate) form: RequestForm,
}

impl ContentRace {
    /// Serves the request.
    ///
    /// # Errors
    /// The error of the preferred alternative, if none has a response.
    pub(crate) async fn serve(self) -> Result<Response<Body>, Error> {
        let (entry, alternatives) = (&self.entry, self.route.action.alternatives());
        let last_refusal = RefCell::new(None);
        let (this, refused) = (&self, &last_refusal);
        let start = |at| async move {
            let answer = this.send_to(alternatives.get(at)).await?;
            let status = answer.response.status();
            if !may_do_better(status) {
                return Ok(answer);
            }
            let error = Error::Refused { peer: answer.peer.clone(), status };
            *refused.borrow_mut() = Some(answer);
            Err(error)
        };
        let is_name = ndn::gateway::is_name(&entry.facts.method, entry.facts.path.path());
        let reaches = |at: usize| is_name || !matches!(alternatives.get(at), Some(Action::Face(_)));
        let of = RaceContext { outbound: &self.worker.outbound, standings: &self.worker.standings, route: &self.route };
        let outcome = race::run(of, &entry.facts, alternatives.len(), reaches, start).await;
        let (at, Answer { peer, response }) = match (outcome, last_refusal.take()) {
            (Ok(winner), _) => winner,
            // The response of the origin is more precise than the error of the race.
            (Err(_), Some(Answer { peer, response })) => {
                *entry.peer.borrow_mut() = Some(peer);
                return Ok(response);
            }
            (Err(error), None) => return Err(error),
        };
        *entry.peer.borrow_mut() = Some(peer.clone());
        let has_content = matches!(response.status(), StatusCode::OK | StatusCode::PARTIAL_CONTENT);
        if entry.facts.method == Method::HEAD || !has_content || response.body().is_end_stream() {
            return Ok(response);
        }
        let (parts, body) = response.into_parts();
        let (patience, count) = (self.route.timeout.progress, self.route.action.alternatives().len());
        let body = RepeatableBody::new((self, patience), (at, count), peer, Head::of(&parts), body);
        Ok(Response::from_parts(parts, Body::boxed(body)))
    }

    async fn send_to(&self, alternative: Option<&Action>) -> Result<Answer, Error> {
        let Self { worker, entry, route, form } = self;
        let generation = worker.generation();
        match alternative {
            Some(Action::Face(face)) => {
                let forwarders = &worker.ndn_forwarders;
                let response = ndn::gateway::serve(worker, forwarders, &generation, entry, face, route).await?;
                Ok(Answer { peer: Arc::from(format!("{}/{}", route.name, face.uri)), response })
            }
            Some(Action::Terminate(terminate @ Terminate { kind: TerminateKind::Http, .. })) => {
                let place = dial_target::origin(&generation, terminate, &entry.facts, route, form.scheme())?;
                let destination = place.destination(terminate, None);
                let request = form.clone().request(entry);
                let forward = Forward::new(worker, &generation, entry, route, &request, None);
                let response = Box::pin(forward.to_origin(&destination, generation.route_owner(route))).await?;
                Ok(Answer { peer: destination.label.clone(), response })
            }
            _ => Err(Error::Unsuitable { route: route.name.clone(), kind: Kind::Http.as_str() }),
        }
    }

    /// Sends the request to another alternative, if the document still allows it.
    async fn repeat(&self, at: usize) -> Result<Answer, Error> {
        match decide(&self.entry.facts, &self.worker.generation().snapshot) {
            Decision::Act(route) if route.name == self.route.name && route.action == self.route.action => {
                self.send_to(self.route.action.alternatives().get(at)).await
            }
            _ => Err(Error::Reconfigured(format!("route {} has changed", self.route.name))),
        }
    }
}

impl Repeatable for ContentRace {
    fn entry(&self) -> &Rc<SessionEntry> {
        &self.entry
    }

    fn send_again(&self, at: usize) -> Attempt {
        self.worker.shared.metrics.retries.inc();
        let this = self.clone();
        Box::pin(async move { this.repeat(at).await })
    }

    fn is_replaced(&self, by: usize) {
        self.worker.shared.metrics.resumed(&self.route.name, "replaced");
        self.worker.standings.replaced(&self.route, &self.entry.facts, by);
    }
}

/// Whether another alternative may do better than a response with this status.
fn may_do_better(status: StatusCode) -> bool {
    status.is_server_error()
        || matches!(status, StatusCode::NOT_FOUND | StatusCode::GONE | StatusCode::TOO_MANY_REQUESTS)
}

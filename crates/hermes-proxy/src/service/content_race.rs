//! Races of content: a GET or HEAD request that NDN and an HTTP origin can answer.
//!
//! In: a request of a route with `terminate: {race: ...}`. Out: the response that arrives first. If its body breaks off,
//! another alternative sends the content again. The client receives the rest of it if the bytes so far are the same.
//! Never: the repetition of a request that could change something, or parts of two contents.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use aws_lc_rs::digest;
use bytes::Bytes;
use hermes_architecture::race;
use hermes_architecture::{dial_target, ndn};
use hermes_model::facts::Kind;
use hermes_model::snapshot::{Action, Route, Terminate, TerminateKind};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Response, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use super::forward::Forward;
use super::forward::head::RequestForm;
use crate::request::{Request, UpgradeKind};
use crate::worker::Worker;
use hermes_transport::body::{Body, BoxedBody, RequestBody};
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

/// Fields that are the same in all responses whose bytes may be joined.
const SAME: [HeaderName; 3] = [CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE];

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

/// A request whose answer several alternatives have.
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
        let (entry, alternatives, kept) = (&self.entry, self.route.action.alternatives(), RefCell::new(None));
        let (this, refusal) = (&self, &kept);
        let start = |at| async move {
            let (peer, response) = this.ask(alternatives.get(at)).await?;
            if !is_passing_failure(response.status()) {
                return Ok((peer, response));
            }
            let error = Error::Refused { peer: peer.clone(), status: response.status() };
            *refusal.borrow_mut() = Some((peer, response));
            Err(error)
        };
        let session = (&self.worker.outbound, &self.worker.standings, &*self.route);
        let outcome = race::run(session, &entry.facts, alternatives.len(), |_| true, start).await;
        let (at, (peer, response)) = match (outcome, kept.take()) {
            (Ok(winner), _) => winner,
            // What an origin says of its failure tells more.
            (Err(_), Some((peer, response))) => {
                *entry.peer.borrow_mut() = Some(peer);
                return Ok(response);
            }
            (Err(error), None) => return Err(error),
        };
        *entry.peer.borrow_mut() = Some(peer);
        let has_content = matches!(response.status(), StatusCode::OK | StatusCode::PARTIAL_CONTENT);
        if entry.facts.method == Method::HEAD || !has_content || response.body().is_end_stream() {
            return Ok(response);
        }
        let (parts, body) = response.into_parts();
        let body = RepeatableBody::new(self, at, (parts.status, same_fields(&parts.headers)), body);
        Ok(Response::from_parts(parts, Body::boxed(body)))
    }

    /// Asks one of the alternatives. Returns its name for the log, and its response.
    async fn ask(&self, alternative: Option<&Action>) -> Result<(Arc<str>, Response<Body>), Error> {
        let Self { worker, entry, route, form } = self;
        let generation = worker.generation();
        match alternative {
            Some(Action::Face(face)) => {
                let forwarders = &worker.ndn_forwarders;
                let response = ndn::gateway::serve(worker, forwarders, &generation, entry, face, route).await?;
                Ok((Arc::from(face.uri.to_string()), response))
            }
            Some(Action::Terminate(terminate @ Terminate { kind: TerminateKind::Http, .. })) => {
                let place = dial_target::origin(&generation, terminate, &entry.facts, route, form.scheme())?;
                let destination = place.destination(terminate, None);
                let request = form.clone().request(entry);
                let forward = Forward::new(worker, &generation, entry, route, &request, None);
                let response = Box::pin(forward.to_origin(&destination, generation.route_owner(route))).await?;
                Ok((destination.label.clone(), response))
            }
            _ => Err(Error::Unsuitable { route: route.name.clone(), kind: Kind::Http.as_str() }),
        }
    }
}

/// Whether another alternative may do better: a gateway failed, or the origin is overloaded.
fn is_passing_failure(status: StatusCode) -> bool {
    matches!(status, StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT)
}

fn same_fields(headers: &HeaderMap) -> [Option<HeaderValue>; 3] {
    SAME.map(|name| headers.get(name).cloned())
}

/// Whether the bytes of a second response may continue those of the first one. A gateway of NDN knows no length, so one that
/// is absent agrees with any.
fn may_continue(first: &Head, second: &Head) -> bool {
    let agree = |at: usize| match (&first.1[at], &second.1[at]) {
        (Some(first), Some(second)) => first == second,
        (None, None) => true,
        _ => SAME[at] == CONTENT_LENGTH,
    };
    first.0 == second.0 && (0..SAME.len()).all(agree)
}

type Head = (StatusCode, [Option<HeaderValue>; 3]);
type Asking = Pin<Box<dyn Future<Output = Result<(Arc<str>, Response<Body>), Error>>>>;

enum State {
    Reading(Body),
    /// The next alternative was asked.
    Asking(Asking),
    Done,
}

/// The bytes of a repeated content that the client already has.
struct Repeated {
    hash: digest::Context,
    left: u64,
}

/// A body that another alternative continues when the first one breaks off.
struct RepeatableBody {
    race: ContentRace,
    /// The alternative that sends, and those that may still be asked.
    at: usize,
    others: Vec<usize>,
    head: Head,
    state: State,
    /// The hash and the number of the bytes that the client has.
    hash: digest::Context,
    sent: u64,
    repeated: Option<Repeated>,
    /// Why the first alternative failed.
    failure: Option<Error>,
    session: RefCell<Option<Rc<SessionEntry>>>,
    /// Ends the wait for an alternative that is silent.
    timer: Pin<Box<Sleep>>,
    /// The client received all available bytes and has not polled again.
    is_given: bool,
}

impl RepeatableBody {
    fn new(race: ContentRace, at: usize, head: Head, body: Body) -> Self {
        let others = (0..race.route.action.alternatives().len()).filter(|other| *other != at).rev().collect();
        let timer = Box::pin(tokio::time::sleep(race.route.timeout.progress));
        Self {
            race,
            at,
            others,
            head,
            state: State::Reading(body),
            hash: digest::Context::new(&digest::SHA256),
            sent: 0,
            repeated: None,
            failure: None,
            session: RefCell::new(None),
            timer,
            is_given: false,
        }
    }

    fn is_patient_again(&mut self) {
        self.timer.as_mut().reset(Instant::now() + self.race.route.timeout.progress);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        loop {
            match &mut self.state {
                State::Done => return Poll::Ready(None),
                State::Reading(body) => {
                    let frame = match Pin::new(body).poll_frame(cx) {
                        Poll::Ready(frame) => frame,
                        Poll::Pending => {
                            ready!(self.timer.as_mut().poll(cx));
                            Some(Err(Error::NoProgress(self.race.route.timeout.progress)))
                        }
                    };
                    self.is_patient_again();
                    match frame {
                        Some(Ok(frame)) => {
                            if let Some(frame) = self.take(frame)? {
                                return Poll::Ready(Some(Ok(frame)));
                            }
                        }
                        Some(Err(error)) => self.ask_next(error)?,
                        None if self.repeated.is_some() => self.ask_next(self.other_content())?,
                        None => self.state = State::Done,
                    }
                }
                State::Asking(asking) => {
                    let asked = match asking.as_mut().poll(cx) {
                        Poll::Ready(asked) => asked,
                        Poll::Pending => {
                            ready!(self.timer.as_mut().poll(cx));
                            Err(Error::NoProgress(self.race.route.timeout.progress))
                        }
                    };
                    self.is_patient_again();
                    self.continue_with(asked)?;
                }
            }
        }
    }

    /// Handles a frame; `None` if the client has all of it.
    fn take(&mut self, frame: Frame<Bytes>) -> Result<Option<Frame<Bytes>>, Error> {
        let mut data = match frame.into_data() {
            Ok(data) => data,
            Err(trailers) => return Ok(self.repeated.is_none().then_some(trailers)),
        };
        if let Some(mut repeated) = self.repeated.take() {
            let known = usize::try_from(repeated.left).unwrap_or(usize::MAX).min(data.len());
            repeated.hash.update(&data.split_to(known));
            repeated.left -= known as u64;
            if repeated.left > 0 {
                self.repeated = Some(repeated);
                return Ok(None);
            }
            if repeated.hash.finish().as_ref() != self.hash.clone().finish().as_ref() {
                self.ask_next(self.other_content())?;
                return Ok(None);
            }
            if data.is_empty() {
                return Ok(None);
            }
        }
        self.hash.update(&data);
        self.sent += data.len() as u64;
        Ok(Some(Frame::data(data)))
    }

    fn other_content(&self) -> Error {
        let peer = self.race.entry.peer.borrow().clone().unwrap_or_default();
        Error::Broken { peer, reason: "it has other content under this name".to_owned(), unprocessed: false }
    }

    /// Asks the next alternative. Fails with the first error if there is none.
    fn ask_next(&mut self, error: Error) -> Result<(), Error> {
        tracing::debug!(route = %self.race.route.name, alternative = self.at, %error, "content has broken off");
        let error = self.failure.take().unwrap_or(error);
        let Some(next) = self.others.pop() else { return Err(error) };
        let ContentRace { worker, entry, route, .. } = &self.race;
        worker.standings.replaced(route, &entry.facts, self.at, next);
        worker.shared.metrics.retries.inc();
        (self.at, self.failure, self.repeated) = (next, Some(error), None);
        let race = self.race.clone();
        self.state = State::Asking(Box::pin(async move { race.ask(race.route.action.alternatives().get(next)).await }));
        Ok(())
    }

    fn continue_with(&mut self, asked: Result<(Arc<str>, Response<Body>), Error>) -> Result<(), Error> {
        let (peer, response) = match asked {
            Ok(asked) => asked,
            Err(error) => return self.ask_next(error),
        };
        *self.race.entry.peer.borrow_mut() = Some(peer);
        let (parts, body) = response.into_parts();
        if !may_continue(&self.head, &(parts.status, same_fields(&parts.headers))) {
            return self.ask_next(self.other_content());
        }
        if let Some(session) = &*self.session.borrow() {
            body.bind(session);
        }
        let hash = digest::Context::new(&digest::SHA256);
        self.repeated = (self.sent > 0).then_some(Repeated { hash, left: self.sent });
        self.state = State::Reading(body);
        Ok(())
    }
}

impl BoxedBody for RepeatableBody {
    fn bind(&self, session: &Rc<SessionEntry>) {
        if let State::Reading(body) = &self.state {
            body.bind(session);
        }
        *self.session.borrow_mut() = Some(session.clone());
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if std::mem::take(&mut self.is_given) {
            // Time that the client spends on reading does not count.
            self.is_patient_again();
        }
        let polled = self.poll(cx);
        self.is_given = polled.is_ready();
        self.race.entry.set_held(polled.is_pending());
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.state = State::Done;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Done)
    }

    fn size_hint(&self) -> SizeHint {
        let length = self.head.1[1].as_ref().and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        length.map_or_else(SizeHint::default, |length| SizeHint::with_exact(length.saturating_sub(self.sent)))
    }

    fn is_resumed(&self) -> bool {
        true
    }
}

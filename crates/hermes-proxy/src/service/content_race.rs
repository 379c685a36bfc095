//! Races GET and HEAD requests between NDN and an HTTP origin.
//!
//! In: a request of a route with `terminate: {race: ...}`. Out: the first usable response. If its body breaks off, another
//! alternative sends the content again. The client receives the rest of it if the bytes so far are the same. Never: a
//! repeated unsafe request, or a continuation whose first bytes or whose length differ.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use aws_lc_rs::digest;
use bytes::Bytes;
use hermes_architecture::race::{self, RaceContext};
use hermes_architecture::{dial_target, ndn};
use hermes_model::decide::{Decision, decide};
use hermes_model::facts::Kind;
use hermes_model::snapshot::{Action, Route, Terminate, TerminateKind};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, HeaderValue};
use http::response::Parts;
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

/// The bytes of a repeated content that must arrive within `timeout.progress`. A slower alternative is given up.
const MIN_REPEATED_BYTES: u64 = 1 << 20;
/// Frames that are handled before other tasks run.
const FRAMES_A_TURN: usize = 32;

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

/// The response of an alternative, and the alternative's name for the log.
struct Answer {
    peer: Arc<str>,
    response: Response<Body>,
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
        let body = RepeatableBody::new(self, at, peer, Head::of(&parts), body);
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

    /// Sends the request again, if the document still allows it.
    async fn send_again(&self, at: usize) -> Result<Answer, Error> {
        match decide(&self.entry.facts, &self.worker.generation().snapshot) {
            Decision::Act(route) if route.name == self.route.name && route.action == self.route.action => {
                self.send_to(self.route.action.alternatives().get(at)).await
            }
            _ => Err(Error::Reconfigured(format!("route {} has changed", self.route.name))),
        }
    }
}

/// Whether another alternative may do better than a response with this status.
fn may_do_better(status: StatusCode) -> bool {
    status.is_server_error()
        || matches!(status, StatusCode::NOT_FOUND | StatusCode::GONE | StatusCode::TOO_MANY_REQUESTS)
}

/// The parts of a head that must agree before two bodies are joined.
struct Head {
    status: StatusCode,
    encoding: Option<HeaderValue>,
    range: Option<HeaderValue>,
    /// `None`: the sender knows no length, as a gateway of NDN.
    length: Option<u64>,
}

impl Head {
    fn of(parts: &Parts) -> Self {
        let field = |name| parts.headers.get(name).cloned();
        let length = parts.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        Self { status: parts.status, encoding: field(CONTENT_ENCODING), range: field(CONTENT_RANGE), length }
    }

    /// Why a second body cannot continue the first one; `None` if it can.
    fn contradicts(&self, second: &Self) -> Option<&'static str> {
        let lengths_differ = self.length.zip(second.length).is_some_and(|(first, second)| first != second);
        match () {
            () if self.encoding != second.encoding => Some("its Content-Encoding differs"),
            () if self.range != second.range => Some("its Content-Range differs"),
            () if lengths_differ => Some("its Content-Length differs"),
            () => None,
        }
    }
}

type Attempt = Pin<Box<dyn Future<Output = Result<Answer, Error>>>>;

enum State {
    Reading(Body),
    /// The request was sent to the next alternative.
    Asking(Attempt),
    Done,
}

/// Compares the bytes of a repeated content with those that the client has.
struct PrefixCheck {
    hash: digest::Context,
    remaining: u64,
    /// Bytes since the timer was reset.
    since_reset: u64,
}

/// A body that another alternative continues when the first one breaks off.
struct RepeatableBody {
    race: ContentRace,
    /// The alternative that sends, and its name.
    current: usize,
    peer: Arc<str>,
    /// Alternatives that may still be asked.
    untried: Vec<usize>,
    head: Head,
    state: State,
    /// The hash and the number of the bytes that the client has.
    hash: digest::Context,
    sent: u64,
    prefix_check: Option<PrefixCheck>,
    /// The error of the first alternative, once that has failed.
    failure: Option<Error>,
    /// The last bytes of a joined content. They are withheld until its end confirms the announced length, so that no client
    /// takes another content for complete.
    withheld: Option<Bytes>,
    session: RefCell<Option<Rc<SessionEntry>>>,
    /// Ends the wait for an alternative that is silent.
    timer: Pin<Box<Sleep>>,
    /// The last poll returned a frame, so the client may be reading.
    has_yielded: bool,
}

impl RepeatableBody {
    fn new(race: ContentRace, current: usize, peer: Arc<str>, head: Head, body: Body) -> Self {
        let all = 0..race.route.action.alternatives().len();
        let timer = Box::pin(tokio::time::sleep(race.route.timeout.progress));
        Self {
            race,
            current,
            peer,
            untried: all.filter(|other| *other != current).rev().collect(),
            head,
            state: State::Reading(body),
            hash: digest::Context::new(&digest::SHA256),
            sent: 0,
            prefix_check: None,
            failure: None,
            withheld: None,
            session: RefCell::new(None),
            timer,
            has_yielded: false,
        }
    }

    fn reset_timer(&mut self) {
        self.timer.as_mut().reset(Instant::now() + self.race.route.timeout.progress);
    }

    fn broken(&self, reason: String) -> Error {
        Error::Broken { peer: self.peer.clone(), reason, unprocessed: false }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        for _ in 0..FRAMES_A_TURN {
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
                    match frame {
                        Some(Ok(frame)) => {
                            if let Some(frame) = self.take(frame)? {
                                return Poll::Ready(Some(Ok(frame)));
                            }
                        }
                        Some(Err(error)) => self.try_next(error)?,
                        None => {
                            if let Some(last) = self.end()? {
                                return Poll::Ready(Some(Ok(Frame::data(last))));
                            }
                        }
                    }
                }
                State::Asking(attempt) => {
                    let answer = match attempt.as_mut().poll(cx) {
                        Poll::Ready(answer) => answer,
                        Poll::Pending => {
                            ready!(self.timer.as_mut().poll(cx));
                            Err(Error::NoProgress(self.race.route.timeout.progress))
                        }
                    };
                    self.continue_with(answer)?;
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Handles a frame. `None`: the client has all of it, or must wait for it.
    fn take(&mut self, frame: Frame<Bytes>) -> Result<Option<Frame<Bytes>>, Error> {
        let mut data = match frame.into_data() {
            Ok(data) => data,
            Err(trailers) => return Ok(self.failure.is_none().then_some(trailers)),
        };
        if self.prefix_check.is_some() && !self.compare(&mut data)? || data.is_empty() {
            return Ok(None);
        }
        self.reset_timer();
        let total = self.sent + data.len() as u64;
        if self.failure.is_some() && self.head.length.is_some_and(|length| total > length) {
            return Err(self.broken("it is longer than the first one".to_owned()));
        }
        self.hash.update(&data);
        self.sent = total;
        if self.failure.is_some() && self.head.length == Some(total) {
            self.withheld = Some(data);
            return Ok(None);
        }
        Ok(Some(Frame::data(data)))
    }

    /// Removes and compares bytes that the client has already. False if more of them are to come, or another alternative was
    /// asked because they differ.
    fn compare(&mut self, data: &mut Bytes) -> Result<bool, Error> {
        let Some(mut check) = self.prefix_check.take() else { return Ok(true) };
        let known = usize::try_from(check.remaining).unwrap_or(usize::MAX).min(data.len());
        check.hash.update(&data.split_to(known));
        check.remaining -= known as u64;
        check.since_reset += known as u64;
        if check.since_reset >= MIN_REPEATED_BYTES {
            check.since_reset = 0;
            self.reset_timer();
        }
        if check.remaining > 0 {
            self.prefix_check = Some(check);
            return Ok(false);
        }
        if check.hash.finish().as_ref() != self.hash.clone().finish().as_ref() {
            self.try_next(self.broken(format!("its first {} bytes differ from those already sent", self.sent)))?;
            return Ok(false);
        }
        let ContentRace { worker, entry, route, .. } = &self.race;
        worker.standings.replaced(route, &entry.facts, self.current);
        Ok(true)
    }

    /// Handles the end of a body. Returns the last bytes, if they were withheld.
    fn end(&mut self) -> Result<Option<Bytes>, Error> {
        let is_short = self.failure.is_some() && self.head.length.is_some_and(|length| length != self.sent);
        if self.prefix_check.is_some() || is_short {
            self.try_next(self.broken(format!("it ended early, after less than {} bytes", self.sent.max(1))))?;
            return Ok(None);
        }
        self.state = State::Done;
        Ok(self.withheld.take())
    }

    /// Asks the next alternative. Fails with the first error if all have failed, or if the client has no byte by which the
    /// contents could be compared.
    fn try_next(&mut self, error: Error) -> Result<(), Error> {
        tracing::debug!(route = %self.race.route.name, peer = %self.peer, %error, "response body failed");
        let error = self.failure.take().unwrap_or(error);
        let Some(next) = self.untried.pop().filter(|_| self.sent > 0 && self.withheld.is_none()) else {
            return Err(error);
        };
        self.race.worker.shared.metrics.retries.inc();
        (self.current, self.failure, self.prefix_check) = (next, Some(error), None);
        let race = self.race.clone();
        self.state = State::Asking(Box::pin(async move { race.send_again(next).await }));
        self.reset_timer();
        Ok(())
    }

    fn continue_with(&mut self, answer: Result<Answer, Error>) -> Result<(), Error> {
        let Answer { peer, response } = match answer {
            Ok(answer) => answer,
            Err(error) => return self.try_next(error),
        };
        *self.race.entry.peer.borrow_mut() = Some(peer.clone());
        self.peer = peer;
        let (parts, body) = response.into_parts();
        if parts.status != self.head.status {
            return self.try_next(Error::Refused { peer: self.peer.clone(), status: parts.status });
        }
        if let Some(reason) = self.head.contradicts(&Head::of(&parts)) {
            return self.try_next(self.broken(reason.to_owned()));
        }
        if let Some(session) = &*self.session.borrow() {
            body.bind(session);
        }
        let hash = digest::Context::new(&digest::SHA256);
        self.prefix_check = Some(PrefixCheck { hash, remaining: self.sent, since_reset: 0 });
        self.state = State::Reading(body);
        self.reset_timer();
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
        if std::mem::take(&mut self.has_yielded) {
            // Time that the client spends on reading does not count.
            self.reset_timer();
        }
        let polled = self.poll(cx);
        self.has_yielded = polled.is_ready();
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
        let withheld = self.withheld.as_ref().map_or(0, Bytes::len) as u64;
        let left = |length: u64| (length + withheld).saturating_sub(self.sent);
        self.head.length.map_or_else(SizeHint::default, |length| SizeHint::with_exact(left(length)))
    }
}

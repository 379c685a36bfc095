//! A response body that resumes after an interruption.
//!
//! In: a body, and the means to request its missing part. Out: the complete content, in order, each byte once. The body
//! fails if nothing arrives within the route's `deadline`, if the origin's representation changed, or if the content
//! contradicts its digest (`Repr-Digest`, RFC 9530). After a digest mismatch, the last bytes are withheld, so that no
//! client takes the content for complete.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hermes_model::snapshot::Resume;
use http::Response;
use http_body::{Body as _, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use super::attempts::FAIR_ENDPOINT_TIME;
use super::retry::{Question, send_again};
use super::{REFUSED, Waiting, rests};
use crate::service::forward::head::RequestForm;
use crate::worker::Worker;
use hermes_resume::backoff;
use hermes_resume::digest::{Digests, Hashes};
use hermes_resume::response::ResponseHead;
use hermes_resume::resume::{Resumable, ResumeOutcome};
use hermes_transport::body::{Body, BoxedBody};
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

/// Minimum interval between two requests for the rest of one response, even if each delivers some bytes.
const MIN_REQUEST_INTERVAL: Duration = Duration::from_millis(200);

type Asking = Pin<Box<dyn Future<Output = Result<Response<Body>, Error>>>>;

/// The state of the download.
enum State {
    /// Bytes are arriving.
    Reading(Body),
    /// Waiting for the back-off to end.
    Resting,
    /// The rest has been requested.
    Asking(Asking),
    /// The content is complete.
    Done,
}

/// A body that ends only when it is complete, or fails.
pub(crate) struct ResumableBody {
    worker: Rc<Worker>,
    entry: Rc<SessionEntry>,
    /// The current session, passed on to the bodies that follow.
    session: RefCell<Option<Rc<SessionEntry>>>,
    form: RequestForm,
    resume: Resume,
    rest: Resumable,
    state: State,
    /// Bytes of the current response that were delivered before.
    skip: u64,
    /// The current response continues after the wanted range.
    is_wider: bool,
    /// The expected digests, and the hashes of the bytes so far.
    proof: Option<(Digests, Hashes)>,
    /// The time of the last byte.
    came: Instant,
    /// The timeout of the current state.
    timer: Pin<Box<Sleep>>,
    fruitless: u32,
    /// The time of the last request for the rest.
    asked: Option<Instant>,
    /// The error of the previous try.
    last: Option<Error>,
    /// Set while the body waits for more.
    waiting: Option<Waiting>,
    /// The client received all available bytes and has not polled again.
    is_given: bool,
}

impl BoxedBody for ResumableBody {
    /// Binds the body to this session.
    fn bind(&self, session: &Rc<SessionEntry>) {
        if let State::Reading(body) = &self.state {
            body.bind(session);
        }
        *self.session.borrow_mut() = Some(session.clone());
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Done)
    }

    fn size_hint(&self) -> SizeHint {
        self.rest.missing().map_or_else(SizeHint::default, SizeHint::with_exact)
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if std::mem::take(&mut self.is_given) {
            // Time that the client spends on reading does not count.
            self.came = Instant::now();
            if let State::Reading(_) = self.state {
                self.wait(self.patience(false));
            }
        }
        let polled = self.poll(cx);
        self.is_given = polled.is_ready();
        self.entry.set_held(polled.is_pending());
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.state = State::Done;
        }
        polled
    }

    fn is_resumed(&self) -> bool {
        true
    }
}

impl ResumableBody {
    pub(super) fn new(
        worker: Rc<Worker>,
        entry: Rc<SessionEntry>,
        (form, resume): (RequestForm, Resume),
        (body, rest, answer): (Body, Resumable, &ResponseHead),
    ) -> Self {
        // The digest covers the complete representation, so it cannot verify a part.
        let digests = Some(&answer.digests).filter(|digests| answer.status != 206 && !digests.is_empty());
        let proof = digests.map(|digests| (digests.clone(), Hashes::start(digests.iter().map(|(which, _)| which))));
        let now = Instant::now();
        // The first poll sets the timer.
        let timer = Box::pin(tokio::time::sleep(Duration::ZERO));
        let state = State::Reading(body);
        Self {
            worker,
            entry,
            session: RefCell::new(None),
            form,
            resume,
            rest,
            state,
            skip: 0,
            is_wider: false,
            proof,
            came: now,
            timer,
            fruitless: 0,
            asked: None,
            last: None,
            waiting: None,
            is_given: true,
        }
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
                            Some(Err(Error::NoProgress(self.patience(false))))
                        }
                    };
                    if let Some(frame) = self.take(frame).transpose() {
                        return Poll::Ready(frame.transpose());
                    }
                }
                State::Resting => {
                    ready!(self.timer.as_mut().poll(cx));
                    self.request_rest()?;
                }
                State::Asking(asking) => {
                    let asked = match asking.as_mut().poll(cx) {
                        Poll::Ready(asked) => asked,
                        Poll::Pending => {
                            ready!(self.timer.as_mut().poll(cx));
                            // Reports to passive health checking whether the dropped attempt had enough time. Only then
                            // it counts against the endpoint.
                            self.entry
                                .is_starved
                                .set(self.asked.is_some_and(|asked| asked.elapsed() >= FAIR_ENDPOINT_TIME));
                            Err(Error::NoProgress(self.patience(true)))
                        }
                    };
                    self.continue_with(asked)?;
                }
            }
        }
    }

    /// Handles a frame: `Some(Some(frame))` is a frame to deliver, `Some(None)` the end, and `None` means to poll
    /// again.
    fn take(&mut self, frame: Option<Result<Frame<Bytes>, Error>>) -> Result<Option<Option<Frame<Bytes>>>, Error> {
        let missing = self.rest.missing();
        match frame {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => self.take_data(data),
                // Trailers of a partial response are discarded unless it completes the content.
                Err(trailers) if self.skip == 0 && self.rest.may_end() => {
                    self.verify()?;
                    Ok(Some(Some(trailers)))
                }
                Err(_) => Ok(None),
            },
            None if self.skip == 0 && self.rest.may_end() => {
                self.verify()?;
                Ok(Some(None))
            }
            None => {
                let reason = "the response ended early".to_owned();
                self.broke(Error::Broken { peer: self.peer(), reason, unprocessed: false })
            }
            // The content is complete, so the failure does not matter.
            Some(Err(_)) if missing == Some(0) => Ok(Some(None)),
            Some(Err(error)) => self.broke(error),
        }
    }

    fn take_data(&mut self, mut data: Bytes) -> Result<Option<Option<Frame<Bytes>>>, Error> {
        let before = usize::try_from(self.skip).unwrap_or(usize::MAX).min(data.len());
        drop(data.split_to(before));
        self.skip -= before as u64;
        // Bytes beyond the announced length are discarded.
        let most = self.rest.missing().map_or(usize::MAX, |missing| usize::try_from(missing).unwrap_or(usize::MAX));
        self.is_wider |= data.len() > most;
        data.truncate(most);
        // Skipped bytes are no progress for the client, but they show that the path works.
        self.wait(self.patience(false));
        if data.is_empty() {
            let is_over = self.is_wider && self.rest.missing() == Some(0);
            return Ok(is_over.then_some(None));
        }
        (self.came, self.fruitless) = (Instant::now(), 0);
        (self.waiting, self.last) = (None, None);
        self.rest.took(data.len());
        if let Some((_, hashes)) = &mut self.proof {
            hashes.update(&data);
        }
        if self.rest.missing() == Some(0) {
            self.verify()?;
            if self.is_wider {
                // The response may continue for long, and its rest is not needed. Otherwise it ends soon and frees its
                // connection.
                self.state = State::Done;
            }
        }
        Ok(Some(Some(Frame::data(data))))
    }

    /// Handles an interruption.
    fn broke(&mut self, error: Error) -> Result<Option<Option<Frame<Bytes>>>, Error> {
        tracing::debug!(peer = %self.peer(), %error, "response interrupted; requesting the rest");
        if self.rest.fields().is_none() {
            return Err(error);
        }
        self.rest_for(error, None, super::UNREACHED)?;
        Ok(None)
    }

    /// Backs off before the next request, unless the deadline has passed.
    fn rest_for(&mut self, error: Error, after: Option<Duration>, most: Duration) -> Result<(), Error> {
        let left = self.left();
        if left.is_zero() {
            self.note("expired");
            // The last attempt had only the remaining time, so the error of the attempt before it is more meaningful.
            let last = self.last.take().filter(|_| matches!(error, Error::NoProgress(_)));
            return Err(last.unwrap_or(error));
        }
        if self.waiting.is_none() {
            self.waiting = Waiting::begin(&self.worker, &self.entry);
        }
        if self.waiting.is_none() {
            return Err(error);
        }
        // The first retry is immediate, since mostly a connection broke. After progress it is immediate too, but an
        // origin that sends one byte for each request is not asked without pause.
        let detached = self.asked.map_or(Duration::ZERO, |asked| MIN_REQUEST_INTERVAL.saturating_sub(asked.elapsed()));
        let pause = match self.fruitless {
            0 if after.is_none() => detached,
            fruitless => {
                backoff::pause(fruitless, after, left, most, rand::random()).max(detached.min(left.mul_f64(0.9)))
            }
        };
        self.fruitless += 1;
        self.last = Some(error);
        self.wait(pause);
        self.state = State::Resting;
        Ok(())
    }

    fn request_rest(&mut self) -> Result<(), Error> {
        let fields = self.rest.fields().ok_or_else(|| Error::Internal("a range that is no field".to_owned()))?;
        let (worker, entry, form) = (self.worker.clone(), self.entry.clone(), self.form.clone());
        self.note("resumed");
        self.asked = Some(Instant::now());
        self.entry.is_starved.set(false);
        self.wait(self.patience(true));
        let question = Question::for_part(form, fields);
        self.state = State::Asking(Box::pin(async move { send_again(&worker, &entry, question).await }));
        Ok(())
    }

    /// Continues with the response to a request for the rest.
    fn continue_with(&mut self, asked: Result<Response<Body>, Error>) -> Result<(), Error> {
        let response = match asked {
            Ok(response) => response,
            Err(error) => {
                return match rests(&error) {
                    Some(most) => self.rest_for(error, None, most),
                    None => Err(error),
                };
            }
        };
        let (parts, body) = response.into_parts();
        let peer = self.peer();
        let broken = |reason: String| Error::Broken { peer, reason, unprocessed: false };
        let answer = ResponseHead::read(&parts, SystemTime::now());
        match self.rest.assess(&answer) {
            ResumeOutcome::Behind(skip) => {
                if let Some(session) = &*self.session.borrow() {
                    body.bind(session);
                }
                (self.skip, self.is_wider) = (skip, self.rest.is_passed_by(&answer));
                self.wait(self.patience(false));
                self.state = State::Reading(body);
                Ok(())
            }
            ResumeOutcome::Nothing => {
                self.verify()?;
                self.state = State::Done;
                Ok(())
            }
            ResumeOutcome::Later(after) => {
                let error = broken(format!("the request for the rest was answered with {}", parts.status));
                self.rest_for(error, after, REFUSED)
            }
            ResumeOutcome::Never(why) => Err(broken(format!("{why} ({})", parts.status))),
        }
    }

    fn verify(&mut self) -> Result<(), Error> {
        match self.proof.take() {
            Some((expected, hashes)) if expected.contradicts(&hashes.so_far()) => {
                let reason = "the content does not match its digest (Repr-Digest)".to_owned();
                Err(Error::Broken { peer: self.peer(), reason, unprocessed: false })
            }
            _ => Ok(()),
        }
    }

    fn left(&self) -> Duration {
        self.resume.deadline.saturating_sub(self.came.elapsed())
    }

    /// The time that an attempt may take without progress. `with_turn`: includes the wait for the rate limit.
    fn patience(&self, with_turn: bool) -> Duration {
        let route = self.entry.route.borrow();
        let timeouts = route.as_ref().map(|route| route.timeout).unwrap_or_default();
        let turn = route
            .as_ref()
            .filter(|_| with_turn)
            .and_then(|route| route.upstream_rate_limit)
            .map(|limit| limit.deadline);
        (timeouts.progress + turn.unwrap_or_default()).min(self.left())
    }

    fn wait(&mut self, time: Duration) {
        self.timer.as_mut().reset(Instant::now() + time);
    }

    fn note(&self, event: &'static str) {
        if let Some(route) = &*self.entry.route.borrow() {
            self.worker.shared.metrics.resumed(&route.name, event);
        }
    }

    fn peer(&self) -> std::sync::Arc<str> {
        self.entry.peer.borrow().clone().unwrap_or_else(|| "the origin".into())
    }
}

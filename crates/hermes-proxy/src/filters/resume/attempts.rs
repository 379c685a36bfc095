//! Retries a request until it has a usable response.
//!
//! In: a decided request, and the rest of the chain. Out: the first usable response, or the last one at the deadline.

use std::time::{Duration, SystemTime};

use hermes_model::snapshot::Resume;
use http::response::Parts;
use http::{Method, Response};
use http_body::Body as _;
use tokio::time::Instant;

use super::body::ResumableBody;
use super::retry::{OfDocument, Question, send_again};
use super::{REFUSED, Waiting, is_sent, rests};
use crate::filters::Next;
use crate::service::forward::head::RequestForm;
use crate::service::forward::{Forward, is_idempotent};
use hermes_resume::backoff;
use hermes_resume::response::ResponseHead;
use hermes_resume::resume::Resumable;
use hermes_transport::body::{Body, RequestBody};
use hermes_transport::error::Error;
use hermes_transport::runtime::session::{Delivery, OwnTimeoutGuard};

/// Tries the request until a response is usable.
///
/// # Errors
/// The error of the last try, if no retry can help, too many sessions wait, or the deadline has passed.
pub(crate) async fn handle(resume: Resume, forward: &Forward<'_>, next: Next<'_>) -> Result<Response<Body>, Error> {
    let (worker, entry, metrics) = (forward.worker, forward.entry, &forward.worker.shared.metrics);
    let until = Instant::now() + resume.deadline;
    let left = || until.saturating_duration_since(Instant::now());
    // This filter applies its own timeout to each try, in place of the session's.
    let _watched = OwnTimeoutGuard::begin(entry);
    let mut waiting = None;
    let mut last = None;
    let mut fruitless = 0_u32;
    loop {
        let asking = async {
            match fruitless {
                0 => next.run(forward).await,
                // Later tries decide again: the document may have changed, often because the previous upstream was
                // unreachable.
                _ => Box::pin(send_again(worker, entry, Question::of(forward))).await,
            }
        };
        let tried = watched(forward, left(), asking).await;
        // After a timeout, the exchange itself has recorded whether any byte was sent.
        if tried.as_ref().err().is_none_or(|error| is_sent(error) && !matches!(error, Error::NoProgress(_))) {
            entry.delivery.set(Delivery::MaybeSent);
        }
        let may_repeat = || {
            let route = entry.route.borrow();
            let is_harmless = !entry.may_be_sent() || is_idempotent(entry, route.as_deref().unwrap_or(forward.route));
            is_harmless && forward.body.can_be_sent()
        };
        let is_over = left().is_zero();
        let (outcome, most, after) = match tried {
            Ok(response) if response.extensions().get::<OfDocument>().is_some() => return Ok(response),
            Ok(response) => {
                let (parts, body) = response.into_parts();
                let answer = ResponseHead::read(&parts, SystemTime::now());
                let is_asked_again = answer.may_pass() && may_repeat();
                if is_asked_again && is_over {
                    metrics.resumed(&forward.route.name, "expired");
                }
                if !is_asked_again || is_over {
                    return Ok(resumable(forward, resume, (parts, body), &answer));
                }
                // Dropping the response frees its connection for other requests while this one waits.
                (Ok(Body::small(Response::from_parts(parts, body)).await), REFUSED, answer.retry_after)
            }
            // The client, not the upstream, is silent.
            Err(error @ Error::NoProgress(_)) if forward.body.waits_for_client() => return Err(error),
            // The last attempt had only the remaining time, so the outcome of the attempt before it is more meaningful.
            Err(Error::NoProgress(_)) if is_over && let Some((last, by)) = last.take() => {
                metrics.resumed(&forward.route.name, "expired");
                // The session must show the route of the returned outcome: the last try may have used another one.
                *entry.route.borrow_mut() = by;
                return last;
            }
            Err(error) => match rests(&error).filter(|_| may_repeat()) {
                Some(most) => (Err(error), most, None),
                None => return Err(error),
            },
        };
        if is_over {
            metrics.resumed(&forward.route.name, "expired");
            return outcome;
        }
        if waiting.is_none() {
            waiting = Waiting::begin(worker, forward.entry);
        }
        if waiting.is_none() {
            return outcome;
        }
        // From here on, the download may take long. A client that half-closes counts as gone, and makes room for
        // others.
        entry.set_ends_half_closed(true);
        metrics.resumed(&forward.route.name, "retried");
        tokio::time::sleep(backoff::pause(fruitless, after, left(), most, rand::random())).await;
        let by = entry.route.borrow().clone();
        (fruitless, last) = (fruitless.saturating_add(1), Some((outcome, by)));
    }
}

/// Runs one try, which ends when it is silent for as long as the route allows, or at the deadline.
async fn watched(
    forward: &Forward<'_>,
    left: Duration,
    asking: impl Future<Output = Result<Response<Body>, Error>>,
) -> Result<Response<Body>, Error> {
    let (worker, entry) = (forward.worker, forward.entry);
    entry.add_sent(worker, 0);
    entry.is_starved.set(false);
    let patience = || {
        let route = entry.route.borrow();
        let route = route.as_deref().unwrap_or(forward.route);
        let turn = route.upstream_rate_limit.map(|limit| limit.deadline).unwrap_or_default();
        let custody = route.custody.map(|custody| custody.deadline).unwrap_or_default();
        (route.timeout.progress + turn + custody).min(left)
    };
    let watch = async {
        while let Some(rest) = patience().checked_sub(Duration::from_millis(entry.silence(worker)))
            && !rest.is_zero()
        {
            tokio::time::sleep(rest.max(CLOCK_RESOLUTION)).await;
        }
        // Reports to passive health checking whether the dropped attempt had enough time. Only then it counts against
        // the endpoint.
        entry.is_starved.set(patience() >= FAIR_ENDPOINT_TIME);
    };
    let tried = tokio::select! {
        biased;
        tried = asking => tried,
        () = watch => Err(Error::NoProgress(patience())),
    };
    entry.add_sent(worker, 0);
    tried
}

/// The resolution of a worker's clock.
const CLOCK_RESOLUTION: Duration = Duration::from_millis(100);

/// An endpoint that had less time than this is not at fault for its silence.
pub(super) const FAIR_ENDPOINT_TIME: Duration = Duration::from_millis(500);

/// Wraps a response so that an interruption leads to a request for its rest.
fn resumable(
    forward: &Forward<'_>,
    resume: Resume,
    (parts, body): (Parts, Body),
    answer: &ResponseHead,
) -> Response<Body> {
    // A request with a body may mean something else on each send, and its body is no longer available.
    let is_bare = forward.entry.facts.method == Method::GET && matches!(forward.body, RequestBody::Empty);
    let body = match Resumable::of(answer).filter(|_| is_bare) {
        Some(rest) if !body.is_end_stream() => Body::boxed(ResumableBody::new(
            forward.worker.clone(),
            forward.entry.clone(),
            (RequestForm::of(&forward.rewriter), resume),
            (body, rest, answer),
        )),
        _ => body,
    };
    Response::from_parts(parts, body)
}

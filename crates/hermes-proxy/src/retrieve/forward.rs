//! A session whose route retrieves.
//!
//! In: a decided request, and how its origin is asked. Out: its response: the first one that is worth giving, or the last one
//! that there was when its time was over.

use std::time::SystemTime;

use hermes_model::snapshot::Retrieve;
use http::{Method, Response};
use http_body::Body as _;
use tokio::time::Instant;

use super::again::{Manner, Question, ask};
use super::answer::Answer;
use super::body::RetrievedBody;
use super::resume::Resumable;
use super::{REFUSED, pause, rests};
use crate::body::Body;
use crate::cache::Source;
use crate::error::Error;
use crate::live::Held;
use crate::service::forward::Forward;

/// Asks until there is an answer.
///
/// # Errors
/// The last try's, where no other one can help or its time is over.
pub(crate) async fn forward(
    forward: &Forward<'_>,
    source: &Source<'_>,
    retrieve: Retrieve,
) -> Result<Response<Body>, Error> {
    let (worker, entry) = (forward.worker, forward.entry);
    let until = Instant::now() + retrieve.deadline;
    let waits = forward.route.pace.map(|pace| pace.deadline).unwrap_or_default();
    let within = forward.route.timeout.progress + waits;
    // Its own patience holds, not that of any session; and a client that sends its request slowly is not waited for.
    let mut held = None;
    let mut fruitless = 0;
    loop {
        if forward.body.is_taken() {
            held.get_or_insert_with(|| Held::begin(entry));
        }
        let asking = async {
            match fruitless {
                0 => source.ask(forward).await,
                // The document may have changed, and most of all because nobody could be reached by the one before.
                _ => Box::pin(ask(worker, entry, Question::of(forward))).await,
            }
        };
        let asked = tokio::time::timeout(within, asking).await;
        let tried = asked.unwrap_or(Err(Error::NoProgress(within)));
        let (outcome, most, after) = match tried {
            Ok(response) => {
                let (parts, body) = response.into_parts();
                let answer = Answer::read(&parts, SystemTime::now());
                if !answer.may_pass() || !forward.is_idempotent() || !forward.body.can_be_sent() {
                    let body = match Resumable::of(&answer).filter(|_| entry.facts.method == Method::GET) {
                        Some(rest) if !body.is_end_stream() => Body::Retrieved(Box::new(RetrievedBody::new(
                            worker.clone(),
                            entry.clone(),
                            (Manner::of(&forward.dress), retrieve),
                            (body, rest, &answer),
                        ))),
                        _ => body,
                    };
                    return Ok(Response::from_parts(parts, body));
                }
                // Off its connection, which others need meanwhile.
                (Ok(Body::small(Response::from_parts(parts, body)).await), REFUSED, answer.retry_after)
            }
            Err(error) => match rests(&error, forward.may_repeat(&error)) {
                Some(most) => (Err(error), most, None),
                None => return Err(error),
            },
        };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            worker.shared.metrics.retrieved(&forward.route.name, "expired");
            return outcome;
        }
        worker.shared.metrics.retrieved(&forward.route.name, "retried");
        let dice = rand::random();
        tokio::time::sleep(pause::pause(fruitless, after, left, most, dice)).await;
        fruitless = fruitless.saturating_add(1);
    }
}

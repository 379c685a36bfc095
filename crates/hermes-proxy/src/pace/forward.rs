//! A session whose route keeps the rate of its service.
//!
//! In: a decided request. Out: its response. What the service refuses for the rate is asked for again in its turn, where it
//! may be and can be, until the route's `deadline`; then the client gets the last answer. Holds of that answer what is small.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hermes_model::snapshot::Pace;
use http::header::CONTENT_LENGTH;
use http::{HeaderValue, Response};
use http_body_util::{BodyExt as _, Limited};
use tokio::time::Instant;

use super::hint::{self, Hint};
use super::queue::Client;
use super::{Admitted, Denied};
use crate::body::Body;
use crate::error::Error;
use crate::live::Entry;
use crate::metrics::RouteLabels;
use crate::service::forward::Forward;
use crate::upstream::UpstreamState;

/// What is kept of a refusal's content; of what is larger the head.
const KEPT: usize = 16 << 10;
/// How long that may take: the connection is held up by it.
const READ_WITHIN: Duration = Duration::from_secs(2);

/// Forwards it as soon as the service has room.
///
/// # Errors
/// The last attempt's; or it was never sent, since too many wait, or for too long.
pub(crate) async fn forward(
    forward: &Forward<'_>,
    upstream: &Arc<UpstreamState>,
    pace: &Pace,
) -> Result<Response<Body>, Error> {
    let (worker, entry, route) = (forward.worker, forward.entry, &forward.route.name);
    let metrics = &worker.shared.metrics;
    let pacer = worker.shared.paces.of(route, &upstream.config.name, pace.queue);
    let client = Client::of(entry.facts.user.as_ref(), entry.facts.source.ip());
    let arrived = Instant::now();
    let until = arrived + pace.deadline;
    let mut last: Option<Response<Body>> = None;
    loop {
        let began = Instant::now();
        // The route says how long it may wait here.
        let held = Held::begin(entry);
        let admitted = pacer.admit(worker, &client, last.is_some(), pace.queue, until).await;
        drop(held);
        entry.add_sent(worker, 0);
        let went_at = match admitted {
            Ok(Admitted { went_at, has_waited }) => {
                if has_waited {
                    metrics.paced(route, "released");
                    let labels = RouteLabels { route: route.clone() };
                    metrics.pace_waits.get_or_create(&labels).observe(began.elapsed().as_secs_f64());
                    let rate = metrics.pace_rate.get_or_create(&labels);
                    if let Some(found) = pacer.rate() {
                        rate.set(found);
                    }
                }
                went_at
            }
            Err(denied) => {
                let (event, why) = match denied {
                    Denied::Full => {
                        metrics.limit("pace-queue");
                        ("turned-away", "as many requests wait for it as may (`pace.queue`)")
                    }
                    Denied::Late => ("expired", "it was not its turn in time (`pace.deadline`)"),
                };
                metrics.paced(route, event);
                return last.ok_or_else(|| Error::Paced { route: route.clone(), why });
            }
        };
        let response = forward.to_upstream(upstream).await?;
        let (status, headers) = (response.status(), response.headers());
        if !hint::is_refusal(status, headers) {
            pacer.passed(went_at, || Hint::read(headers, SystemTime::now()));
            return Ok(response);
        }
        metrics.paced(route, "refused");
        pacer.refused(went_at, &Hint::read(headers, SystemTime::now()));
        let may_repeat = hint::may_repeat(status, &entry.facts.method) && forward.body.can_be_sent();
        if !may_repeat || Instant::now() >= until {
            return Ok(response);
        }
        metrics.paced(route, "queued");
        last = Some(small(response).await);
    }
}

/// A session that waits its turn, and not for its peer: however that ends.
struct Held<'e>(&'e Entry);

impl<'e> Held<'e> {
    fn begin(entry: &'e Entry) -> Self {
        entry.set_held(true);
        Self(entry)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.set_held(false);
    }
}

/// The same response, off its connection, which others need.
async fn small(response: Response<Body>) -> Response<Body> {
    let (mut head, body) = response.into_parts();
    let collected = tokio::time::timeout(READ_WITHIN, Limited::new(body, KEPT).collect()).await;
    if let Ok(Ok(collected)) = collected {
        return Response::from_parts(head, Body::Full(collected.to_bytes()));
    }
    head.headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    Response::from_parts(head, Body::Empty)
}

//! Runs a request through the rate limit of its route.
//!
//! In: a decided request. Out: its response. If the service rejects the request for its rate, the request queues and is
//! sent again, provided that it may be repeated. After the route's `deadline`, the client receives the last response.
//! Only a small part of that response is buffered.

use std::time::SystemTime;

use hermes_model::snapshot::UpstreamRateLimit;
use http::Response;
use tokio::time::Instant;

use crate::filters::Next;
use crate::service::forward::Forward;
use hermes_outbound::rate_limit::{Admitted, Denied};
use hermes_outbound::upstream::UpstreamState;
use hermes_rate_limit::fair_queue::Client;
use hermes_rate_limit::headers::{self as rate_headers, RateHeaders};
use hermes_transport::body::Body;
use hermes_transport::error::Error;
use hermes_transport::metrics::RouteLabels;
use hermes_transport::runtime::session::WaitGuard;

/// Forwards the request as soon as the service has capacity.
///
/// # Errors
/// The error of the last attempt; or the request was never sent, since the queue is full or the deadline passed.
pub(crate) async fn handle(
    limit: &UpstreamRateLimit,
    upstream: &UpstreamState,
    forward: &Forward<'_>,
    next: Next<'_>,
) -> Result<Response<Body>, Error> {
    let (worker, entry, route) = (forward.worker, forward.entry, &forward.route.name);
    let metrics = &worker.shared.metrics;
    let limiter = worker.services.rate_limiters.of(route, &upstream.config.name, limit.queue);
    let client = Client::of(entry.facts.user.as_ref(), entry.facts.source.ip());
    let arrived = Instant::now();
    let until = arrived + limit.deadline;
    let mut last: Option<Response<Body>> = None;
    loop {
        let began = Instant::now();
        // A session that waits here counts as waiting, so only the route's deadline limits it.
        let held = WaitGuard::begin(entry);
        let admitted = limiter.admit(worker, &client, last.is_some(), limit.queue, until).await;
        drop(held);
        entry.add_sent(worker, 0);
        let went_at = match admitted {
            Ok(Admitted { went_at, has_waited }) => {
                if has_waited {
                    metrics.rate_limited(route, "released");
                    let labels = RouteLabels { route: route.clone() };
                    metrics.rate_limit_waits.get_or_create(&labels).observe(began.elapsed().as_secs_f64());
                    let rate = metrics.rate_limit_rate.get_or_create(&labels);
                    if let Some(found) = limiter.rate() {
                        rate.set(found);
                    }
                }
                went_at
            }
            Err(denied) => {
                let (event, why) = match denied {
                    Denied::Full => {
                        metrics.limit("upstream-rate-limit-queue");
                        ("queue-full", "queue full (`upstream-rate-limit.queue`)")
                    }
                    Denied::Late => ("expired", "deadline exceeded (`upstream-rate-limit.deadline`)"),
                };
                metrics.rate_limited(route, event);
                return last.ok_or_else(|| Error::RateLimited { route: route.clone(), why });
            }
        };
        let response = next.run(forward).await?;
        let (status, headers) = (response.status(), response.headers());
        if !rate_headers::is_refusal(status, headers) {
            limiter.passed(went_at, || RateHeaders::read(headers, SystemTime::now()));
            return Ok(response);
        }
        metrics.rate_limited(route, "refused");
        limiter.refused(went_at, &RateHeaders::read(headers, SystemTime::now()));
        let may_repeat = rate_headers::may_repeat(status, forward.is_idempotent()) && forward.body.can_be_sent();
        if !may_repeat || Instant::now() >= until {
            return Ok(response);
        }
        metrics.rate_limited(route, "queued");
        last = Some(Body::small(response).await);
    }
}

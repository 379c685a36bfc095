//! Forwards a request to an endpoint of an upstream, with retries.
//!
//! In: a decided request. Out: the upstream's response, whose body is still arriving. One attempt chooses an endpoint,
//! leases a connection, builds the head and performs the exchange. The outcome of each attempt decides whether another
//! one is safe: a request is never sent twice unless that is allowed.

pub(crate) mod head;
pub(crate) mod tunnel;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::facts::{Facts, Kind};
use hermes_model::snapshot::{Action, Retry as RetryPolicy, Route, UpstreamProtocol};
use http::{HeaderMap, Method, Response, StatusCode, Version};

use self::head::{HeadOverrides, HeadRewriter, Outgoing};
use crate::request::{Request, UpgradeKind};
use crate::worker::Worker;
use hermes_outbound::generation::Generation;
use hermes_outbound::outbound::connect::Destination;
use hermes_outbound::outbound::exchange::{self, ExchangeBody, ExchangeContext};
use hermes_outbound::outbound::pool::{ADDED_BYTES, ADDED_LINES, ConnectSpec, Failed, Leased, Pool, PoolKey};
use hermes_outbound::upstream::{GaugeGuard, InFlight, UpstreamState};
use hermes_rate_limit::headers as rate_headers;
use hermes_transport::body::{Body, Interim, RequestBody};
use hermes_transport::error::{Error, Retry};
use hermes_transport::headers::{IDEMPOTENCY_KEY, UNSENT};
use hermes_transport::metrics::UpstreamLabels;
use hermes_transport::runtime::session::{Delivery, SessionEntry};

/// Maximum number of times that a refused stream is opened again on a route without `retry`. The pause before each
/// grows by [`REFUSAL_PAUSE`].
const MAX_REFUSALS: u32 = 2;
const REFUSAL_PAUSE: Duration = Duration::from_millis(50);
/// The share of requests in flight that may be such repeats.
const REFUSAL_BUDGET: f64 = 0.2;

/// A request to forward, independent of its target.
pub(crate) struct Forward<'a> {
    pub(crate) worker: &'a Rc<Worker>,
    pub(crate) entry: &'a Rc<SessionEntry>,
    pub(crate) route: &'a Route,
    pub(crate) rewriter: HeadRewriter<'a>,
    pub(crate) body: RequestBody,
    pub(crate) interim: Option<Arc<Interim>>,
}

impl<'a> Forward<'a> {
    /// Builds the forwarded form of a request.
    pub(crate) fn new(
        worker: &'a Rc<Worker>,
        generation: &'a Generation,
        entry: &'a Rc<SessionEntry>,
        route: &'a Route,
        request: &'a Request<'_>,
        interim: Option<Arc<Interim>>,
    ) -> Self {
        // An upgrade may have a body before the tunnel. In a tunnel by POST, the body is the tunnel.
        let has_body = match request.upgrade {
            UpgradeKind::None => true,
            UpgradeKind::Upgrade(_) => entry.facts.kind == Kind::Http && request.version < Version::HTTP_2,
            UpgradeKind::Connect | UpgradeKind::Post => false,
        };
        let body = if has_body { request.body.clone() } else { RequestBody::Empty };
        let may_be_sent_again = route.retry.is_some() || route.upstream_rate_limit.is_some() || route.resume.is_some();
        let keep = if may_be_sent_again { generation.snapshot.limits.request_body_buffer } else { 0 };
        body.prepare(entry, keep, interim.clone().filter(|_| request.expects_continue()));
        let rewriter = HeadRewriter {
            node: &generation.snapshot.node,
            via: &generation.via,
            rewrite: route.rewrite.as_ref(),
            version: request.version,
            scheme: &request.scheme,
            host: &request.host,
            trace: request.trace,
            to_proxy: matches!(&route.action, Action::Upstream(upstream) if upstream.forward_proxy),
            amend: None,
        };
        Self { worker, entry, route, rewriter, body, interim }
    }
}

/// The outcome of one attempt.
#[allow(clippy::large_enum_variant)] // The large one is the common one.
enum AttemptOutcome {
    Response(Response<ExchangeBody>),
    Failed {
        error: Error,
        /// The connection was idle before or its peer was closing, so the failure says nothing about the endpoint.
        stale: bool,
        /// The failure must not count against the endpoint. Either a stream to a node failed while its connection
        /// lives, so a later node may be at fault; or another request's dial failed, which reports it itself.
        tells_nothing: bool,
        /// The peer refused the stream, or closed before processing it: the request may be sent again (RFC 9113, 8.7).
        is_refused: bool,
    },
}

impl AttemptOutcome {
    /// True if the peer refused the stream without processing it.
    fn is_refused(&self) -> bool {
        matches!(self, AttemptOutcome::Failed { is_refused: true, .. })
    }

    fn failed(error: Error) -> Self {
        Self::Failed { error, stale: false, tells_nothing: false, is_refused: false }
    }

    fn error(&self) -> Option<Error> {
        match self {
            Self::Response(_) => None,
            Self::Failed { error, .. } => Some(error.clone()),
        }
    }

    /// Replaces a "loop detected" response by an earlier error, which says more about the cause.
    fn unless_round(self, dead: Option<Error>) -> Self {
        match (self, dead) {
            (Self::Response(response), Some(dead)) if is_round(response.status(), response.headers()) => {
                Self::failed(dead)
            }
            (this, _) => this,
        }
    }
}

/// A drop guard for an endpoint that was sent a request: records a failure if the session starves before a response.
struct OutcomeGuard<'a> {
    forward: &'a Forward<'a>,
    upstream: &'a UpstreamState,
    index: usize,
    is_settled: bool,
}

impl<'a> OutcomeGuard<'a> {
    fn new(forward: &'a Forward<'a>, upstream: &'a UpstreamState, index: usize) -> Self {
        Self { forward, upstream, index, is_settled: false }
    }

    /// The attempt ended with a response or an error, which is recorded separately.
    fn settle(mut self) {
        self.is_settled = true;
    }
}

impl Drop for OutcomeGuard<'_> {
    fn drop(&mut self) {
        // The sweep or a resumed download may cancel a session during an attempt. No other code records that outcome.
        let forward = self.forward;
        let starved = || {
            let entry = forward.entry;
            entry.is_starved.get() || matches!(entry.end.get(), Some(Error::NoProgress(_)))
        };
        if !self.is_settled && starved() && !forward.body.waits_for_client() {
            forward.blame(self.upstream, self.index);
        }
    }
}

impl<'a> Forward<'a> {
    /// The same request with the header changes of a cache.
    pub(crate) fn amended(&self, amend: HeadOverrides) -> Self {
        Self {
            worker: self.worker,
            entry: self.entry,
            route: self.route,
            rewriter: HeadRewriter { amend: Some(amend), ..self.rewriter.clone() },
            body: self.body.clone(),
            interim: self.interim.clone(),
        }
    }
}

impl Forward<'_> {
    /// Forwards to an upstream.
    ///
    /// # Errors
    /// The error of the last attempt.
    pub(crate) async fn to_upstream(&self, upstream: &Arc<UpstreamState>) -> Result<Response<Body>, Error> {
        let _active = upstream.begin_request();
        if !matches!(upstream.config.protocol, UpstreamProtocol::H1 | UpstreamProtocol::Tcp) {
            self.body.keep_until_answered(self.worker.generation().snapshot.limits.request_body_buffer);
        }
        let mut refusals = 0;
        let mut avoid: Vec<usize> = Vec::new();
        let mut tries = 0;
        let (mut fresh, mut went_back) = (false, false);
        let mut retrying: Option<GaugeGuard<'_>> = None;
        let mut dead = None;
        loop {
            let now = self.worker.shared.now();
            let index = upstream
                .choose(&self.entry.facts, now, self.worker.random().1, &avoid)
                .ok_or_else(|| Error::NoEndpoint { upstream: upstream.config.name.clone() })?;
            tries += 1;
            self.entry.tries.set(tries);
            self.is_at(upstream, index);
            let attempted = self.attempt(upstream, index, fresh).await;
            if let AttemptOutcome::Failed { error, stale: true, .. } = &attempted
                && !fresh
                && self.may_repeat(error)
            {
                // This repetition does not count as a retry: the peer closed a reused connection during the write.
                fresh = true;
                tries -= 1;
                continue;
            }
            drop(retrying.take());
            avoid.push(index);
            fresh = false;
            let goes_back = !went_back && self.goes_back(&attempted);
            let goes_on = (goes_back || self.fails_over(&attempted)) && upstream.has_another(&avoid, now);
            let repeats = !goes_on && self.repeats_refused(refusals, &attempted);
            let is_last = !(goes_on || repeats || self.wants_retry(tries, &attempted));
            // An endpoint that refuses a stream is alive but busy or shutting down. The refusal counts as a failure
            // only if it ends the exchange.
            if is_last || !attempted.is_refused() {
                self.record_outcome(upstream, index, &attempted);
            }
            if goes_on {
                went_back |= goes_back;
                dead = attempted.error().or(dead);
                self.worker.shared.metrics.retries.inc();
                continue;
            }
            refusals += u32::from(repeats);
            if !is_last {
                retrying = self.begin_retry(upstream);
            }
            if retrying.is_none() {
                return self.conclude(attempted.unless_round(Self::without_way(upstream, index, dead)));
            }
            drop(attempted);
            self.worker.shared.metrics.retries.inc();
            let pause = if repeats { self.jitter(REFUSAL_PAUSE * refusals) } else { self.backoff(tries) };
            Box::pin(tokio::time::sleep(pause)).await;
        }
    }

    /// True if a refused stream is opened again without the route's `retry`: the peer has not processed it.
    fn repeats_refused(&self, refusals: u32, attempted: &AttemptOutcome) -> bool {
        self.route.retry.is_none() && refusals < MAX_REFUSALS && attempted.is_refused() && self.body.can_be_sent()
    }

    /// Records the chosen endpoint.
    fn is_at(&self, upstream: &UpstreamState, index: usize) {
        *self.entry.peer.borrow_mut() = Some(upstream.endpoints[index].label.clone());
        if upstream.is_backup(index) {
            let labels = UpstreamLabels { upstream: upstream.config.name.clone() };
            self.worker.shared.metrics.upstream_backups.get_or_create(&labels).inc();
        }
    }

    /// True if another endpoint may be tried, since this one received nothing of the request.
    fn fails_over(&self, attempted: &AttemptOutcome) -> bool {
        let AttemptOutcome::Failed { error, .. } = attempted else { return false };
        error.retry() == Retry::Always && self.body.can_be_sent()
    }

    /// True if another node may be tried, since this one reports that its own path is dead. A node does so once for
    /// each request; every node on the path may.
    fn goes_back(&self, attempted: &AttemptOutcome) -> bool {
        let AttemptOutcome::Response(response) = attempted else { return false };
        says_unsent(response) && self.body.can_be_sent()
    }

    /// The error for a request whose last path led back to this node. A client then learns why there was no other path.
    /// `dead`: the error of an earlier attempt.
    fn without_way(upstream: &UpstreamState, index: usize, dead: Option<Error>) -> Option<Error> {
        let none = || Error::NoEndpoint { upstream: upstream.config.name.clone() };
        dead.or_else(|| upstream.is_backup(index).then(none))
    }

    async fn attempt(&self, upstream: &Arc<UpstreamState>, index: usize, fresh: bool) -> AttemptOutcome {
        let endpoint = &upstream.endpoints[index];
        let in_flight = InFlight::begin(upstream, index);
        let pool = self.worker.pool(upstream.pool_key(index));
        let spec = upstream.spec(index, self.entry.facts.source, self.route.timeout.connect, fresh);
        let spec = ConnectSpec { client: self.entry.binding_connection(), session: Some(self.entry), ..spec };
        let leased = match pool.lease(self.worker, &spec).await {
            Ok(leased) => leased,
            Err(Failed { error, was_others }) => {
                // The peer accepted the connection just before it shut down (GOAWAY, RFC 9113, 6.8); the next
                // connection may last.
                let stale = is_untouched(&error);
                return AttemptOutcome::Failed { error, stale, tells_nothing: was_others, is_refused: false };
            }
        };
        let is_node = head::is_node(upstream, &leased);
        let debt = OutcomeGuard::new(self, upstream, index);
        let shareable = !upstream.config.proxy_protocol;
        let attempted = self.exchange(leased, pool, endpoint.label.clone(), is_node, shareable, Some(in_flight)).await;
        debt.settle();
        attempted
    }

    /// Performs one exchange on a connection.
    async fn exchange(
        &self,
        leased: Leased,
        pool: Rc<Pool>,
        peer: Arc<str>,
        is_node: bool,
        shareable: bool,
        in_flight: Option<InFlight>,
    ) -> AttemptOutcome {
        let session = Some(self.entry.clone());
        let context =
            ExchangeContext { worker: self.worker.outbound.clone(), pool, peer, shareable, session, in_flight };
        let outgoing = match Outgoing::new(self.entry, &self.rewriter, is_node) {
            Ok(outgoing) => outgoing,
            Err(error) => return AttemptOutcome::failed(error),
        };
        // Set before the exchange, so that the flag is set even if this future is dropped.
        let before = self.entry.delivery.replace(Delivery::MaybeSent);
        let is_shared = matches!(leased, Leased::Shared(_));
        let (result, stale, tells_nothing) = match leased {
            Leased::H1(connection) => {
                let stale = connection.reused;
                let request = outgoing.into_h1(self.body.attempt(), &connection, is_node);
                (exchange::over_h1(connection, request, context, self.entry, self.interim.clone()).await, stale, false)
            }
            Leased::Shared(lease) => {
                let (connection, reused) = (lease.connection.clone(), lease.reused);
                let request = outgoing.into_h2();
                let result = exchange::over_shared(
                    lease,
                    request,
                    self.body.attempt(),
                    context,
                    self.entry,
                    self.interim.clone(),
                )
                .await;
                // A failed stream says nothing about its connection.
                let is_closed = connection.is_closed();
                let is_left = reused || result.as_ref().is_err_and(is_untouched);
                (result, is_left && is_closed, is_node && !is_closed)
            }
        };
        if result.as_ref().is_err_and(is_untouched) {
            self.entry.delivery.set(before);
        }
        let result = result.map(|mut response| {
            if says_unsent(&response) {
                if is_node {
                    self.entry.delivery.set(before);
                } else {
                    // An origin cannot vouch for the servers after it.
                    response.headers_mut().remove(UNSENT);
                }
            }
            response
        });
        match result {
            // The client did not request a switch (RFC 9110, 15.2.2) and would misread the following bytes.
            Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                AttemptOutcome::failed(response.body().context().broken("unexpected protocol switch", false))
            }
            Ok(response) => match self.check_head(&response.body().context().peer, response.headers(), is_node) {
                Ok(()) => AttemptOutcome::Response(response),
                Err(error) => AttemptOutcome::failed(error),
            },
            // If the client aborted its request body, the endpoint is not at fault, whatever the exchange reports.
            Err(error) => {
                let is_refused = is_shared && is_untouched(&error);
                let error = self.body.failure().unwrap_or(error);
                AttemptOutcome::Failed { error, stale, tells_nothing, is_refused }
            }
        }
    }

    /// Forwards to the origin that the request names, over HTTP/1.1: a forward proxy.
    ///
    /// # Errors
    /// No address within `reach`, no connection, or no response.
    pub(crate) async fn to_origin(&self, to: &Destination<'_>, owner: u64) -> Result<Response<Body>, Error> {
        *self.entry.peer.borrow_mut() = Some(to.label.clone());
        let pool = self.worker.pool(PoolKey { owner, endpoint: to.label.clone() });
        let mut fresh = false;
        loop {
            let spec = self.origin_wish(to, fresh);
            let leased = pool.lease(self.worker, &spec).await?;
            let attempted = self.exchange(leased, pool.clone(), to.label.clone(), false, true, None).await;
            match &attempted {
                AttemptOutcome::Failed { error, stale: true, .. } if !fresh && self.may_repeat(error) => fresh = true,
                _ => return self.conclude(attempted),
            }
        }
    }

    /// The connection spec for the pool of an origin that the request names.
    fn origin_wish<'d>(&'d self, to: &Destination<'d>, fresh: bool) -> ConnectSpec<'d> {
        ConnectSpec {
            destination: Destination { label: to.label, ..*to },
            protocol: UpstreamProtocol::H1,
            connect_within: self.route.timeout.connect,
            fresh,
            node: None,
            client: self.entry.binding_connection(),
            session: Some(self.entry),
        }
    }

    /// Checks the size of a response head. h2 limits only its total size; hyper limits its lines and bytes. A head that
    /// the next hop would reject is rejected here, where the upstream can be named as the cause. Nodes get an allowance
    /// for the fields that they add.
    fn check_head(&self, peer: &Arc<str>, headers: &HeaderMap, is_node: bool) -> Result<(), Error> {
        let generation = self.worker.generation();
        let limits = &generation.snapshot.limits;
        let broken = |reason: String| Err(Error::Broken { peer: peer.clone(), reason, unprocessed: false });
        let (more_lines, more_bytes) = if is_node { (ADDED_LINES, ADDED_BYTES as usize) } else { (0, 0) };
        if headers.len() > limits.header_count + more_lines {
            let most = limits.header_count;
            return broken(format!(
                "it has more than {most} header lines; `limits.header-count` of this node allows no more"
            ));
        }
        // Each line counts 32 bytes extra (RFC 9113, 6.5.2).
        let size: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum();
        if size > limits.header_bytes + more_bytes {
            let most = limits.header_bytes;
            return broken(format!(
                "its head has {size} bytes, 32 counted for each line; `limits.header-bytes` of this node allows {most}"
            ));
        }
        Ok(())
    }

    fn conclude(&self, attempted: AttemptOutcome) -> Result<Response<Body>, Error> {
        match attempted {
            AttemptOutcome::Response(response) => {
                if says_unsent(&response) {
                    self.entry.reported_unsent();
                }
                if let Some(interim) = &self.interim {
                    interim.allow_body();
                }
                self.body.answered();
                Ok(response.map(ExchangeBody::settle))
            }
            AttemptOutcome::Failed { error, .. } => Err(error),
        }
    }

    /// Records the outcome for passive health checking.
    fn record_outcome(&self, upstream: &UpstreamState, index: usize, attempted: &AttemptOutcome) {
        let failed = match attempted {
            // The endpoint is healthy and limits the request rate.
            AttemptOutcome::Response(response) if self.is_rate_limited(response) => false,
            AttemptOutcome::Response(response) => {
                let is_failure = matches!(response.status().as_u16(), 502..=504);
                if is_failure && response.headers().contains_key(hermes_transport::headers::PROXY_STATUS) {
                    // A proxy that reports a failure of a later hop must not be ejected because of one service among
                    // many.
                    return;
                }
                is_failure
            }
            AttemptOutcome::Failed { tells_nothing: true, .. } => return,
            AttemptOutcome::Failed { error, .. } => match error {
                Error::Connect { .. } | Error::ConnectTimeout { .. } | Error::Broken { .. } => true,
                // Other errors say nothing about the endpoint.
                _ => return,
            },
        };
        if failed {
            self.blame(upstream, index);
        } else {
            upstream.succeeded(index);
        }
    }

    /// Records a failure of the endpoint.
    fn blame(&self, upstream: &UpstreamState, index: usize) {
        if upstream.failed(index, self.worker.shared.now()) {
            tracing::warn!(endpoint = %upstream.endpoints[index].label, "the endpoint failed several times in a row and rests");
        }
    }

    /// True if the response rejects the request for its rate, and the route has rate limiting.
    fn is_rate_limited(&self, response: &Response<ExchangeBody>) -> bool {
        self.route.upstream_rate_limit.is_some() && rate_headers::is_refusal(response.status(), response.headers())
    }

    /// True if the origin may receive the request twice.
    pub(crate) fn is_idempotent(&self) -> bool {
        is_idempotent(self.entry, self.route)
    }

    /// True if the request may be sent again after this error.
    pub(crate) fn may_repeat(&self, error: &Error) -> bool {
        if !self.body.can_be_sent() {
            return false;
        }
        match error.retry() {
            Retry::Always => true,
            Retry::IfNothingWasSent => self.is_idempotent(),
            Retry::Never => false,
        }
    }

    fn wants_retry(&self, tries: u32, attempted: &AttemptOutcome) -> bool {
        let Some(policy) = &self.route.retry else { return false };
        let wanted = match attempted {
            // A rate-limited request waits in the queue instead.
            AttemptOutcome::Response(response) if self.is_rate_limited(response) => false,
            AttemptOutcome::Response(response) => {
                retries_status(policy, response.status())
                    && self.body.can_be_sent()
                    && (self.is_idempotent() || response.status() == StatusCode::TOO_MANY_REQUESTS)
            }
            AttemptOutcome::Failed { error, .. } => {
                let named = match error {
                    Error::Connect { .. } | Error::ConnectTimeout { .. } | Error::NotConnected { .. } => {
                        policy.on_connect_failure
                    }
                    Error::Broken { unprocessed: true, .. } => policy.on_connect_failure || policy.on_reset,
                    Error::Broken { .. } => policy.on_reset,
                    _ => false,
                };
                named && self.may_repeat(error)
            }
        };
        wanted && tries < policy.attempts
    }

    /// Reserves a retry within the budget.
    fn begin_retry<'u>(&self, upstream: &'u UpstreamState) -> Option<GaugeGuard<'u>> {
        let budget = self.route.retry.as_ref().map_or(REFUSAL_BUDGET, |retry| retry.budget);
        let floor = self.worker.generation().snapshot.limits.min_retry_concurrency as usize;
        let retry = upstream.begin_retry(budget, floor);
        if retry.is_none() {
            self.worker.shared.metrics.limit("retry-budget");
        }
        retry
    }

    /// Exponential back-off with full jitter, so that clients that failed together do not return together.
    fn backoff(&self, tries: u32) -> Duration {
        let Some(policy) = &self.route.retry else { return Duration::ZERO };
        self.jitter(policy.backoff_base.saturating_mul(1 << tries.saturating_sub(1).min(16)).min(policy.backoff_max))
    }

    fn jitter(&self, ceiling: Duration) -> Duration {
        let part = (self.worker.random().1 >> 11) as f64 / (1u64 << 53) as f64;
        ceiling.mul_f64(part)
    }
}

/// True if the method is idempotent (RFC 9110, 9.2.2), or if the route trusts the idempotency key of the request.
pub(crate) fn is_idempotent(entry: &SessionEntry, route: &Route) -> bool {
    let Facts { method, headers, .. } = &*entry.facts;
    let by_key = || headers.get(IDEMPOTENCY_KEY).is_some_and(|key| !key.is_empty());
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::PUT | Method::DELETE)
        || (route.trusts_idempotency_key && by_key())
}

/// True if a failure carries the field that reports that nothing of the request was sent on. Only failures are checked:
/// nodes set it on no other response.
fn says_unsent<B>(response: &Response<B>) -> bool {
    let status = response.status();
    (status.is_client_error() || status.is_server_error()) && response.headers().contains_key(UNSENT)
}

/// True if a node reports a loop and sent the request to no origin.
fn is_round(status: StatusCode, headers: &HeaderMap) -> bool {
    status == StatusCode::LOOP_DETECTED && headers.contains_key(UNSENT)
}

/// True if the peer processed nothing of the request.
fn is_untouched(error: &Error) -> bool {
    matches!(error, Error::Broken { unprocessed: true, .. })
}

fn retries_status(policy: &RetryPolicy, status: StatusCode) -> bool {
    policy.on_status.contains(&status) || (policy.on_5xx && status.is_server_error())
}

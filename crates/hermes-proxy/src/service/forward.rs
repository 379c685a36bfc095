//! Forwards a request to an endpoint of an upstream, and tries again what may be tried again.
//!
//! In: a decided request. Out: the upstream's response, its body still on its way. One attempt is:
//! choose an endpoint, lease a connection, dress the head for it, exchange. What the next attempt
//! may do follows from what this one did: nothing is sent twice that must not be.

pub(crate) mod head;
pub(crate) mod tunnel;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hermes_model::facts::Facts;
use hermes_model::snapshot::{Retry as RetryPolicy, Route, UpstreamProtocol};
use http::{HeaderMap, Method, Response, StatusCode};

use self::head::{Amend, Dress, Outgoing};
use crate::body::{Body, Interim, RequestBody};
use crate::error::{Error, Retry};
use crate::headers::{IDEMPOTENCY_KEY, UNSENT};
use crate::live::Entry;
use crate::metrics::UpstreamLabels;
use crate::upstream::connect::Destination;
use crate::upstream::exchange::{self, ExchangeBody, Place};
use crate::upstream::pool::{ADDED_BYTES, ADDED_LINES, Failed, Leased, Pool, PoolKey, Wish};
use crate::upstream::{InFlight, UpstreamState};
use crate::worker::Worker;
use hermes_rate_limit::headers as rate_headers;

/// How often a refused stream is opened again on a route without `retry`, after a pause that grows by
/// [`REFUSAL_PAUSE`].
const MAX_REFUSALS: u32 = 2;
const REFUSAL_PAUSE: Duration = Duration::from_millis(50);
/// The share of requests in flight that may be such repeats.
const REFUSAL_BUDGET: f64 = 0.2;

/// What is forwarded, apart from where to.
pub(crate) struct Forward<'a> {
    pub(crate) worker: &'a Rc<Worker>,
    pub(crate) entry: &'a Rc<Entry>,
    pub(crate) route: &'a Route,
    pub(crate) dress: Dress<'a>,
    pub(crate) body: RequestBody,
    pub(crate) interim: Option<Arc<Interim>>,
}

/// How one attempt ended.
#[allow(clippy::large_enum_variant)] // The large one is the common one.
enum Attempted {
    Response(Response<ExchangeBody>),
    Failed {
        error: Error,
        /// The connection had been idle, or its peer was about to go: that it broke says nothing of the endpoint.
        stale: bool,
        /// A stream of a node failed, and its connection lives: what is behind the node may be at fault. Or the dial of
        /// somebody else did, who is heard of it.
        tells_nothing: bool,
        /// The peer refused the stream, or closed before processing it: the request may be sent again (RFC 9113, 8.7).
        is_refused: bool,
    },
}

impl Attempted {
    /// True if the peer refused the stream and has processed nothing of it.
    fn is_refused(&self) -> bool {
        matches!(self, Attempted::Failed { is_refused: true, .. })
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

    /// That the last way led back to us says less than why there was no other one.
    fn unless_round(self, dead: Option<Error>) -> Self {
        match (self, dead) {
            (Self::Response(response), Some(dead)) if is_round(response.status(), response.headers()) => {
                Self::failed(dead)
            }
            (this, _) => this,
        }
    }
}

/// Counts in a gauge while it lives.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(gauge: &'a AtomicUsize) -> Self {
        gauge.fetch_add(1, Ordering::Relaxed);
        Self(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An endpoint that was sent a request and owes its answer.
struct Debt<'a> {
    forward: &'a Forward<'a>,
    upstream: &'a UpstreamState,
    index: usize,
    is_settled: bool,
}

impl<'a> Debt<'a> {
    fn new(forward: &'a Forward<'a>, upstream: &'a UpstreamState, index: usize) -> Self {
        Self { forward, upstream, index, is_settled: false }
    }

    /// It answered, or failed: either is judged by itself.
    fn settle(mut self) {
        self.is_settled = true;
    }
}

impl Drop for Debt<'_> {
    fn drop(&mut self) {
        // The sweep ends a session in the midst of an attempt, or the retriever gives it up, and nobody judges that.
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
    /// The same request with other fields: those that a cache asks with.
    pub(crate) fn amended(&self, amend: Amend) -> Self {
        Self {
            worker: self.worker,
            entry: self.entry,
            route: self.route,
            dress: Dress { amend: Some(amend), ..self.dress.clone() },
            body: self.body.clone(),
            interim: self.interim.clone(),
        }
    }
}

impl Forward<'_> {
    /// Forwards to an upstream.
    ///
    /// # Errors
    /// The last attempt's.
    pub(crate) async fn to_upstream(&self, upstream: &Arc<UpstreamState>) -> Result<Response<Body>, Error> {
        let _active = Counted::new(&upstream.active);
        if !matches!(upstream.config.protocol, UpstreamProtocol::H1 | UpstreamProtocol::Tcp) {
            self.body.keep_until_answered(self.worker.generation().snapshot.limits.request_body_buffer);
        }
        let mut refusals = 0;
        let mut avoid: Vec<usize> = Vec::new();
        let mut tries = 0;
        let (mut fresh, mut went_back) = (false, false);
        let mut retrying: Option<Counted<'_>> = None;
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
            if let Attempted::Failed { error, stale: true, .. } = &attempted
                && !fresh
                && self.may_repeat(error)
            {
                // Free of charge: the peer closed a connection while we wrote to it.
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
            // An endpoint that refuses a stream is alive, and busy or leaving. Only a refusal that ends the exchange is a
            // failure.
            if is_last || !attempted.is_refused() {
                self.judge(upstream, index, &attempted);
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
    fn repeats_refused(&self, refusals: u32, attempted: &Attempted) -> bool {
        self.route.retry.is_none() && refusals < MAX_REFUSALS && attempted.is_refused() && self.body.can_be_sent()
    }

    /// An endpoint was chosen.
    fn is_at(&self, upstream: &UpstreamState, index: usize) {
        *self.entry.peer.borrow_mut() = Some(upstream.endpoints[index].label.clone());
        if upstream.is_backup(index) {
            let labels = UpstreamLabels { upstream: upstream.config.name.clone() };
            self.worker.shared.metrics.upstream_backups.get_or_create(&labels).inc();
        }
    }

    /// Whether it may go on to another endpoint, since this one got nothing of it.
    fn fails_over(&self, attempted: &Attempted) -> bool {
        let Attempted::Failed { error, .. } = attempted else { return false };
        error.retry() == Retry::Always && self.body.can_be_sent()
    }

    /// Whether it may go by another node, since this one says that its own way is dead. Once: each node on the way may.
    fn goes_back(&self, attempted: &Attempted) -> bool {
        let Attempted::Response(response) = attempted else { return false };
        says_unsent(response) && self.body.can_be_sent()
    }

    /// Why there was no other way, where the last one led back to us: to whoever stands in it is said that we do. `dead`: what was
    /// tried before.
    fn without_way(upstream: &UpstreamState, index: usize, dead: Option<Error>) -> Option<Error> {
        let none = || Error::NoEndpoint { upstream: upstream.config.name.clone() };
        dead.or_else(|| upstream.is_backup(index).then(none))
    }

    async fn attempt(&self, upstream: &Arc<UpstreamState>, index: usize, fresh: bool) -> Attempted {
        let endpoint = &upstream.endpoints[index];
        let in_flight = InFlight::begin(upstream, index);
        let pool = self.worker.pool(upstream.pool_key(index));
        let wish = upstream.wish(index, self.entry.facts.source, self.route.timeout.connect, fresh);
        let wish = Wish { client: self.entry.binding_connection(), session: Some(self.entry), ..wish };
        let leased = match pool.lease(self.worker, &wish).await {
            Ok(leased) => leased,
            Err(Failed { error, was_others }) => {
                // It was accepted by who was just about to go, and said so (RFC 9113, 6.8): the next one may stay.
                let stale = is_untouched(&error);
                return Attempted::Failed { error, stale, tells_nothing: was_others, is_refused: false };
            }
        };
        let is_node = head::is_node(upstream, &leased);
        let debt = Debt::new(self, upstream, index);
        let shareable = !upstream.config.proxy_protocol;
        let attempted = self.exchange(leased, pool, endpoint.label.clone(), is_node, shareable, Some(in_flight)).await;
        debt.settle();
        attempted
    }

    /// One exchange on a connection.
    async fn exchange(
        &self,
        leased: Leased,
        pool: Rc<Pool>,
        peer: Arc<str>,
        is_node: bool,
        shareable: bool,
        in_flight: Option<InFlight>,
    ) -> Attempted {
        let session = Some(self.entry.clone());
        let place = Place { worker: self.worker.clone(), pool, peer, shareable, session, in_flight };
        let outgoing = match Outgoing::new(self.entry, &self.dress, is_node) {
            Ok(outgoing) => outgoing,
            Err(error) => return Attempted::failed(error),
        };
        // Whatever becomes of it, and of this future.
        let was_sent = self.entry.was_sent.replace(true);
        let is_shared = matches!(leased, Leased::Shared(_));
        let (result, stale, tells_nothing) = match leased {
            Leased::H1(connection) => {
                let stale = connection.reused;
                let request = outgoing.into_h1(self.body.attempt(), &connection, is_node);
                (exchange::over_h1(connection, request, place, self.entry, self.interim.clone()).await, stale, false)
            }
            Leased::Shared(lease) => {
                let (connection, reused) = (lease.connection.clone(), lease.reused);
                let request = outgoing.into_h2();
                let result =
                    exchange::over_shared(lease, request, self.body.attempt(), place, self.entry, self.interim.clone())
                        .await;
                // One stream that fails says nothing of the connection.
                let is_closed = connection.is_closed();
                let is_left = reused || result.as_ref().is_err_and(is_untouched);
                (result, is_left && is_closed, is_node && !is_closed)
            }
        };
        if result.as_ref().is_err_and(is_untouched) {
            self.entry.was_sent.set(was_sent);
        }
        let result = result.map(|mut response| {
            if says_unsent(&response) {
                if is_node {
                    self.entry.was_sent.set(was_sent);
                } else {
                    // An origin cannot vouch for what happened after it.
                    response.headers_mut().remove(UNSENT);
                }
            }
            response
        });
        match result {
            // Nobody asked to switch (RFC 9110, 15.2.2): the client would take what follows for its own.
            Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                Attempted::failed(response.body().place().broken("it switches protocols unasked", false))
            }
            Ok(response) => match self.check_head(&response.body().place().peer, response.headers(), is_node) {
                Ok(()) => Attempted::Response(response),
                Err(error) => Attempted::failed(error),
            },
            // A client that broke its request is not the endpoint's fault, whatever the exchange made of it.
            Err(error) => {
                let is_refused = is_shared && is_untouched(&error);
                let error = self.body.failure().unwrap_or(error);
                Attempted::Failed { error, stale, tells_nothing, is_refused }
            }
        }
    }

    /// Forwards to an origin that the request named, over h1: a forward proxy.
    ///
    /// # Errors
    /// No address in reach, no connection, no response.
    pub(crate) async fn to_origin(&self, to: &Destination<'_>, owner: u64) -> Result<Response<Body>, Error> {
        *self.entry.peer.borrow_mut() = Some(to.label.clone());
        let pool = self.worker.pool(PoolKey { owner, endpoint: to.label.clone() });
        let mut fresh = false;
        loop {
            let wish = self.origin_wish(to, fresh);
            let leased = pool.lease(self.worker, &wish).await?;
            let attempted = self.exchange(leased, pool.clone(), to.label.clone(), false, true, None).await;
            match &attempted {
                Attempted::Failed { error, stale: true, .. } if !fresh && self.may_repeat(error) => fresh = true,
                _ => return self.conclude(attempted),
            }
        }
    }

    /// The connection spec for the pool of an origin that the request names.
    fn origin_wish<'d>(&'d self, to: &Destination<'d>, fresh: bool) -> Wish<'d> {
        Wish {
            destination: Destination { label: to.label, ..*to },
            protocol: UpstreamProtocol::H1,
            connect_within: self.route.timeout.connect,
            fresh,
            node: None,
            client: self.entry.binding_connection(),
            session: Some(self.entry),
        }
    }

    /// h2 bounds a head by its size alone, hyper by its lines and its bytes on the wire. A head that the
    /// next hop's h2 would refuse is refused here, where it is known whose fault it is.
    /// Nodes have added to it what others sent them.
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
        // RFC 9113, 6.5.2: 32 bytes are added for each line.
        let size: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum();
        if size > limits.header_bytes + more_bytes {
            let most = limits.header_bytes;
            return broken(format!(
                "its head has {size} bytes, 32 counted for each line; `limits.header-bytes` of this node allows {most}"
            ));
        }
        Ok(())
    }

    fn conclude(&self, attempted: Attempted) -> Result<Response<Body>, Error> {
        match attempted {
            Attempted::Response(response) => {
                self.entry.is_unsent.set(says_unsent(&response));
                if let Some(interim) = &self.interim {
                    interim.allow_body();
                }
                self.body.answered();
                Ok(response.map(ExchangeBody::settle))
            }
            Attempted::Failed { error, .. } => Err(error),
        }
    }

    /// Tells the endpoint's passive health what happened.
    fn judge(&self, upstream: &UpstreamState, index: usize, attempted: &Attempted) {
        let failed = match attempted {
            // It works, and has enough of us.
            Attempted::Response(response) if self.is_paced(response) => false,
            Attempted::Response(response) => {
                let is_failure = matches!(response.status().as_u16(), 502..=504);
                if is_failure && response.headers().contains_key(crate::headers::PROXY_STATUS) {
                    // A proxy that tells what failed behind it shall not rest for one service of many.
                    return;
                }
                is_failure
            }
            Attempted::Failed { tells_nothing: true, .. } => return,
            Attempted::Failed { error, .. } => match error {
                Error::Connect { .. } | Error::ConnectTimeout { .. } | Error::Broken { .. } => true,
                // It tells nothing about the endpoint.
                _ => return,
            },
        };
        if failed {
            self.blame(upstream, index);
        } else {
            upstream.succeeded(index);
        }
    }

    /// The session failed by this endpoint's fault.
    fn blame(&self, upstream: &UpstreamState, index: usize) {
        if upstream.failed(index, self.worker.shared.now()) {
            tracing::warn!(endpoint = %upstream.endpoints[index].label, "the endpoint failed several times in a row and rests");
        }
    }

    /// Refused for the rate, which the route keeps by itself.
    fn is_paced(&self, response: &Response<ExchangeBody>) -> bool {
        self.route.pace.is_some() && rate_headers::is_refusal(response.status(), response.headers())
    }

    /// Its origin may have it twice.
    pub(crate) fn is_idempotent(&self) -> bool {
        is_idempotent(self.entry, self.route)
    }

    /// May the request be sent once more after this error, as far as its nature goes?
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

    fn wants_retry(&self, tries: u32, attempted: &Attempted) -> bool {
        let Some(policy) = &self.route.retry else { return false };
        let wanted = match attempted {
            // It waits for its turn with all others.
            Attempted::Response(response) if self.is_paced(response) => false,
            Attempted::Response(response) => {
                retries_status(policy, response.status())
                    && self.body.can_be_sent()
                    && (self.is_idempotent() || response.status() == StatusCode::TOO_MANY_REQUESTS)
            }
            Attempted::Failed { error, .. } => {
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

    /// Takes a place within the retry budget, before the pause: requests that fail together must
    /// not all find it empty.
    fn begin_retry<'u>(&self, upstream: &'u UpstreamState) -> Option<Counted<'u>> {
        let budget = self.route.retry.as_ref().map_or(REFUSAL_BUDGET, |retry| retry.budget);
        let floor = self.worker.generation().snapshot.limits.retry_floor as usize;
        let place = Counted::new(&upstream.retrying);
        if upstream.retrying.load(Ordering::Relaxed) > upstream.retries_allowed(budget, floor) {
            self.worker.shared.metrics.limit("retry-budget");
            return None;
        }
        Some(place)
    }

    /// Full jitter: anywhere between nothing and the doubled base, so that clients that failed
    /// together do not come back together.
    fn backoff(&self, tries: u32) -> Duration {
        let Some(policy) = &self.route.retry else { return Duration::ZERO };
        self.jitter(policy.backoff_base.saturating_mul(1 << tries.saturating_sub(1).min(16)).min(policy.backoff_max))
    }

    fn jitter(&self, ceiling: Duration) -> Duration {
        let part = (self.worker.random().1 >> 11) as f64 / (1u64 << 53) as f64;
        ceiling.mul_f64(part)
    }
}

/// By its method (RFC 9110, 9.2.2), or since the origin knows it by a key, as its route says.
pub(crate) fn is_idempotent(entry: &Entry, route: &Route) -> bool {
    let Facts { method, headers, .. } = &*entry.facts;
    let by_key = || headers.get(IDEMPOTENCY_KEY).is_some_and(|key| !key.is_empty());
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::PUT | Method::DELETE)
        || (route.trusts_idempotency_key && by_key())
}

/// True if a failure carries the field that nothing of the request was sent on. Other responses are not searched: nodes
/// set it on failures alone, and it is removed like all fields of the overlay.
fn says_unsent<B>(response: &Response<B>) -> bool {
    let status = response.status();
    (status.is_client_error() || status.is_server_error()) && response.headers().contains_key(UNSENT)
}

/// Whether a node says that the request came round, and went to nobody.
fn is_round(status: StatusCode, headers: &HeaderMap) -> bool {
    status == StatusCode::LOOP_DETECTED && headers.contains_key(UNSENT)
}

/// Its peer did nothing with it.
fn is_untouched(error: &Error) -> bool {
    matches!(error, Error::Broken { unprocessed: true, .. })
}

fn retries_status(policy: &RetryPolicy, status: StatusCode) -> bool {
    policy.on_status.contains(&status) || (policy.on_5xx && status.is_server_error())
}

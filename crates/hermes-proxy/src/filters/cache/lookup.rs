//! Handles a request at the cache: from the store, or from the origin.
//!
//! In: a decided request, and the rest of the chain. Out: the response. If the same request is in progress for another
//! client, this one waits for the head for a limited time, and shares the response if permitted; otherwise it goes to
//! the origin itself. A separate task (`fetch.rs`) stores the body.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::{CONTENT_LENGTH, CONTENT_LOCATION, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, LOCATION, RANGE};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use tokio::time::Instant;

use super::answer::{BodySource, Note, answer};
use super::store_response::NotStorable;
use crate::filters::Next;
use crate::service::forward::Forward;
use crate::service::forward::head::{HeadOverrides, Outgoing};
use hermes_cache::conditional::{freshened, validators};
use hermes_cache::content::Content;
use hermes_cache::head::{Head, Millis, Times};
use hermes_cache::lookup::{CacheLookup, RequestHead};
use hermes_cache::range::to_range;
use hermes_cache::registry::is_one;
use hermes_cache::store::disk::Loaded;
use hermes_cache::store::{Cache, FlightOwner, LookupResult, Miss, Stored, WAIT};
use hermes_transport::body::{Body, RequestBody};
use hermes_transport::error::{Error, Side};
use hermes_transport::headers::{PROXY_STATUS, strip_hop_by_hop};

/// Maximum number of waits for other clients' fetches before the request goes to the origin itself.
const MAX_FLIGHT_WAITS: u32 = 3;
/// The share of the session's time that the origin gets if a stale response could replace its response.
const ORIGIN_TIME_SHARE: f64 = 0.75;

/// Serves a request of a route with a cache.
///
/// # Errors
/// Errors of the rest of the chain.
pub(crate) async fn handle(cache: &Arc<Cache>, forward: &Forward<'_>, next: Next<'_>) -> Result<Response<Body>, Error> {
    let facts = &forward.entry.facts;
    let user = facts.user.clone();
    let ask = CacheLookup::new(
        request_head(Outgoing::new(forward.entry, &forward.rewriter, true)?),
        cache.settings.shared,
        user,
    );
    let is_read = matches!(facts.method, Method::GET | Method::HEAD);
    let is_bare = matches!(forward.body, RequestBody::Empty);
    let visit = CacheRequest { cache, ask, node: forward.rewriter.node };
    if !is_read || !is_bare || visit.ask.is_for_the_origin() {
        return visit.pass(forward, next, if is_read { "bypass" } else { "method" }).await;
    }
    visit.read(forward, next).await
}

/// A request at the cache.
pub(super) struct CacheRequest<'a> {
    pub(super) cache: &'a Arc<Cache>,
    pub(super) ask: CacheLookup,
    node: &'a str,
}

/// The kind of request to the origin.
enum Plan {
    /// The client's request, unchanged.
    Plain,
    /// Revalidate the stored response.
    Validate,
    /// Request the missing range of a stored partial response.
    Complete { missing: std::ops::Range<u64>, content: Arc<Content> },
}

/// The availability of a stored response's bytes.
enum Supplied {
    With(BodySource),
    /// The bytes exist but cannot be read at the moment.
    Busy,
    /// The bytes no longer exist.
    Gone,
}

impl CacheRequest<'_> {
    pub(super) fn note(&self) -> Note {
        Note::of(self.node)
    }

    /// Forwards past the cache. A successful unsafe request invalidates stored responses (RFC 9111, 4.4).
    async fn pass(&self, forward: &Forward<'_>, next: Next<'_>, why: &str) -> Result<Response<Body>, Error> {
        self.cache.metrics.bypassed.inc();
        let mut response = next.run(forward).await?;
        let method = &forward.entry.facts.method;
        let status = response.status();
        if !method.is_safe() && (status.is_success() || status.is_redirection()) {
            self.cache.forget(&self.ask.key);
            for name in [LOCATION, CONTENT_LOCATION] {
                let reference = response.headers().get(name).and_then(|value| value.to_str().ok());
                if let Some(other) = reference.and_then(|reference| self.ask.target.named(reference)) {
                    self.cache.forget(&other.key());
                }
            }
        }
        self.note().forwarded(why).write(response.headers_mut());
        Ok(response)
    }

    async fn read(&self, forward: &Forward<'_>, next: Next<'_>) -> Result<Response<Body>, Error> {
        // A wait must leave enough of the session's time for the request's own attempt.
        let deadline = match next.custody() {
            // A path in custody may be unavailable for long, for all clients.
            Some(custody) => {
                forward.entry.set_held(true);
                Instant::now() + custody.deadline
            }
            _ => Instant::now() + WAIT.min(forward.route.timeout.progress / 2),
        };
        let mut waits = 0;
        let mut first = None;
        loop {
            let now = millis();
            let may_wait = waits < MAX_FLIGHT_WAITS && !next.bypasses_session();
            let found = self.cache.lookup(&self.ask, now, may_wait);
            if self.ask.says.only_if_cached && !matches!(found, LookupResult::Hit(_)) {
                return Ok(self.not_there());
            }
            match found {
                LookupResult::Hit(stored) => {
                    forward.entry.set_held(false);
                    let supply = match self.supply(&stored, &stored.head).await {
                        Supplied::With(supply) => supply,
                        Supplied::Gone => continue,
                        // The entry stays in the store for later requests. This request does not wait for memory.
                        Supplied::Busy if self.ask.says.only_if_cached => return Ok(self.not_there()),
                        Supplied::Busy => {
                            return self.ask_origin(forward, next, None, first.unwrap_or(Miss::Busy), None).await;
                        }
                    };
                    let mut response = answer(&stored.head, Some(stored.shape.total), &self.ask, supply, now);
                    let ttl = stored.head.ttl(now);
                    let note = match first {
                        Some(miss) => self.note().forwarded(Miss::as_str(miss)).collapsed().ttl(ttl),
                        None => self.note().hit(ttl),
                    };
                    note.write(response.headers_mut());
                    self.cache.metrics.hits.inc();
                    return Ok(response);
                }
                LookupResult::Join { reader, head, total, miss } => {
                    let mut response = answer(&head, total, &self.ask, BodySource::Coming(reader), now);
                    let note = self.note().forwarded(first.unwrap_or(miss).as_str()).collapsed().ttl(head.ttl(now));
                    note.write(response.headers_mut());
                    self.cache.metrics.collapsed.inc();
                    return Ok(response);
                }
                LookupResult::Wait(flight, miss) => {
                    first = first.or(Some(miss));
                    waits += 1;
                    if tokio::time::timeout_at(deadline, flight.settled()).await.is_err() {
                        self.cache.hit_limit("cache-wait");
                        waits = MAX_FLIGHT_WAITS;
                    }
                }
                LookupResult::Fetch { stored, miss, lead } => {
                    return self.ask_origin(forward, next, stored, miss, lead).await;
                }
            }
        }
    }

    /// The response to `only-if-cached` without a usable stored response (RFC 9111, 5.2.1.7).
    fn not_there(&self) -> Response<Body> {
        let mut response = Response::new(Body::Empty);
        *response.status_mut() = StatusCode::GATEWAY_TIMEOUT;
        response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(0));
        self.note().detail("only-if-cached").write(response.headers_mut());
        response
    }

    /// The source of a stored response's bytes. Reads them from disk if they are only there.
    async fn supply(&self, stored: &Stored, head: &Head) -> Supplied {
        let ask = &self.ask;
        if ask.is_head || ask.is_met(head) || ask.wanted(head, stored.shape.total).is_empty() {
            return Supplied::With(BodySource::Nothing);
        }
        match self.cache.content(&ask.key, stored).await {
            Loaded::Content(content) => Supplied::With(BodySource::Kept(content)),
            Loaded::Busy => Supplied::Busy,
            Loaded::Gone => Supplied::Gone,
        }
    }

    /// Chooses the kind of request. `leads`: other clients may share the response.
    async fn plan(&self, stored: Option<&Stored>, leads: bool) -> Plan {
        let Some(stored) = stored.filter(|_| !self.ask.is_head) else { return Plan::Plain };
        let head = &stored.head;
        if self.ask.is_served_by(head, &stored.shape) {
            return if head.has_validator() { Plan::Validate } else { Plan::Plain };
        }
        let wanted = self.ask.wanted(head, stored.shape.total);
        // Combining parts requires a response that may be stored.
        let may_be = leads && head.strong_etag().is_some() && head.may_be_kept(&self.ask.fields, millis()).is_ok();
        let missing = stored.shape.missing(&wanted).filter(|_| may_be);
        match missing {
            Some(missing) => match self.cache.content(&self.ask.key, stored).await {
                Loaded::Content(content) => Plan::Complete { missing, content },
                Loaded::Busy | Loaded::Gone => Plan::Plain,
            },
            None => Plan::Plain,
        }
    }

    async fn ask_origin(
        &self,
        forward: &Forward<'_>,
        next: Next<'_>,
        stored: Option<Stored>,
        miss: Miss,
        mut lead: Option<FlightOwner>,
    ) -> Result<Response<Body>, Error> {
        let leads = lead.is_some();
        let mut plan = if next.bypasses_session() { Plan::Plain } else { self.plan(stored.as_ref(), leads).await };
        loop {
            let amended;
            let asking = match stored.as_ref().and_then(|stored| amend(&plan, stored)) {
                None => forward,
                Some(amend) => {
                    amended = forward.amended(amend);
                    &amended
                }
            };
            let asked = millis();
            let fetched = self.fetch(asking, next, stored.as_ref()).await;
            let times = Times { asked, came: millis() };
            if is_elsewhere(forward) {
                // Clients that wait for this fetch learn that it ended, and use their own route.
                return fetched.map(|response| self.pass_on(response, miss));
            }
            let mut response = match fetched {
                Ok(response) => response,
                Err(error) => {
                    let unreachable = (error.side() == Side::Upstream).then_some(self.cache.settings.stale_if_error);
                    return match self.stand_in(stored.as_ref(), miss, unreachable, None, times.came).await {
                        Some(response) if error.side() == Side::Upstream => Ok(response),
                        _ => Err(error),
                    };
                }
            };
            let status = response.status();
            if matches!(status.as_u16(), 500 | 502 | 503 | 504) {
                // A proxy after this node reports that it did not reach the origin either.
                let is_proxys = status.as_u16() != 500 && response.headers().contains_key(PROXY_STATUS);
                let unreachable = is_proxys.then_some(self.cache.settings.stale_if_error);
                let stands_in = self.stand_in(stored.as_ref(), miss, unreachable, Some(status), times.came).await;
                if let Some(kept) = stands_in {
                    return Ok(kept);
                }
            }
            match (&plan, stored.as_ref()) {
                (Plan::Validate, Some(stored)) if status == StatusCode::NOT_MODIFIED => {
                    strip_hop_by_hop(response.headers_mut());
                    if let Some(response) = self.validated(stored, response.headers(), times, miss).await {
                        return Ok(response);
                    }
                }
                (Plan::Complete { missing, content }, Some(stored))
                    if status == StatusCode::PARTIAL_CONTENT || status == StatusCode::RANGE_NOT_SATISFIABLE =>
                {
                    match self.complete(asking, response, stored, (missing, content), times, &mut lead) {
                        Ok((mut response, ttl)) => {
                            let note = self.note().forwarded(miss.as_str()).status(status).stored().ttl(ttl);
                            note.write(response.headers_mut());
                            self.cache.metrics.missed.inc();
                            return Ok(response);
                        }
                        Err(NotStorable::Other) => self.cache.drop_one(&self.ask.key, stored.id),
                        Err(NotStorable::ForOne) => {}
                    }
                }
                _ => return Ok(self.receive(asking, response, stored.as_ref(), times, miss, lead)),
            }
            // The stored response belongs to another representation or was removed, so the client's own request is
            // sent.
            plan = Plan::Plain;
        }
    }

    /// Runs the rest of the chain within a time limit. If a stale response could be used, some time remains for it.
    async fn fetch(
        &self,
        forward: &Forward<'_>,
        next: Next<'_>,
        stored: Option<&Stored>,
    ) -> Result<Response<Body>, Error> {
        let stale = self.cache.settings.stale_if_error;
        let now = millis();
        let has_other = stored.is_some_and(|stored| {
            let head = &stored.head;
            self.ask.is_served_by(head, &stored.shape) && head.may_stand_in(&self.ask.says, Some(stale), now)
        });
        if !has_other || next.custody().is_some() {
            return next.run(forward).await;
        }
        let within = forward.route.timeout.progress.mul_f64(ORIGIN_TIME_SHARE);
        let mut fetching = pin!(next.run(forward));
        match tokio::time::timeout(within, &mut fetching).await {
            Ok(fetched) => fetched,
            // No stored response applies to the other route.
            Err(_) if is_elsewhere(forward) => fetching.await,
            Err(_) => Err(Error::NoProgress(within)),
        }
    }

    /// Passes on the response of another route, for this client only.
    fn pass_on(&self, mut response: Response<Body>, miss: Miss) -> Response<Body> {
        self.cache.metrics.missed.inc();
        let note = self.note().forwarded(miss.as_str()).status(response.status());
        note.detail("rerouted").write(response.headers_mut());
        response
    }

    /// A stale response in place of a failed origin's, if permitted.
    async fn stand_in(
        &self,
        stored: Option<&Stored>,
        miss: Miss,
        unreachable: Option<Duration>,
        status: Option<StatusCode>,
        now: Millis,
    ) -> Option<Response<Body>> {
        let stored = stored?;
        let head = &stored.head;
        if !self.ask.is_served_by(head, &stored.shape) || !head.may_stand_in(&self.ask.says, unreachable, now) {
            return None;
        }
        let Supplied::With(supply) = self.supply(stored, head).await else { return None };
        let mut response = answer(head, Some(stored.shape.total), &self.ask, supply, now);
        let mut note = self.note().forwarded(miss.as_str());
        if let Some(status) = status {
            note = note.status(status);
        }
        note.ttl(head.ttl(now)).detail("stale-if-error").write(response.headers_mut());
        self.cache.metrics.stale.inc();
        Some(response)
    }

    /// Updates the stored head, if later clients may receive it: an origin may send more to a particular client.
    pub(super) fn renew(&self, stored: &Stored, head: &Arc<Head>, times: Times) {
        match head.may_be_kept(&self.ask.fields, times.came) {
            Ok(()) => self.cache.freshen(&self.ask.key, stored.id, head),
            Err(why) if is_for_nobody(why) => self.cache.drop_one(&self.ask.key, stored.id),
            // The response was for this client only, so the next client revalidates again.
            Err(_) => {}
        }
    }

    /// Answers with a stored response that the origin confirmed (304).
    async fn validated(&self, stored: &Stored, by: &HeaderMap, times: Times, miss: Miss) -> Option<Response<Body>> {
        let Some(head) = freshened(&stored.head, by, times).map(Arc::new) else {
            // The 304 refers to another representation, so the stored response is invalid for all clients.
            self.cache.drop_one(&self.ask.key, stored.id);
            return None;
        };
        self.renew(stored, &head, times);
        let Supplied::With(supply) = self.supply(stored, &head).await else { return None };
        let mut response = answer(&head, Some(stored.shape.total), &self.ask, supply, times.came);
        let note = self.note().forwarded(miss.as_str()).status(StatusCode::NOT_MODIFIED);
        note.ttl(head.ttl(times.came)).write(response.headers_mut());
        self.cache.metrics.revalidated.inc();
        Some(response)
    }
}

/// True if a changed document led the request to a route with another cache. Responses of that route and entries of
/// this cache must not mix.
fn is_elsewhere(forward: &Forward<'_>) -> bool {
    let led = forward.entry.route.borrow();
    led.as_deref().is_some_and(|led| !is_one(led, forward.route))
}

/// True if the response must no longer be stored for any client.
pub(super) fn is_for_nobody(why: &str) -> bool {
    matches!(why, "private" | "no-store" | "must-understand")
}

/// Header changes for the request to the origin. `None`: the client's own.
fn amend(plan: &Plan, stored: &Stored) -> Option<HeadOverrides> {
    let remove = [IF_NONE_MATCH, IF_MODIFIED_SINCE, RANGE, IF_RANGE];
    match plan {
        Plan::Plain => None,
        Plan::Validate => Some(HeadOverrides { remove: remove.into(), set: validators(&stored.head) }),
        Plan::Complete { missing, .. } => {
            let tag = stored.head.strong_etag()?.clone();
            Some(HeadOverrides {
                remove: remove.into(),
                set: vec![(RANGE, to_range(missing, stored.shape.total)), (IF_RANGE, tag)],
            })
        }
    }
}

/// Unix time in milliseconds. A clock jump causes at worst an early revalidation.
fn millis() -> Millis {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as Millis)
}

fn request_head(outgoing: Outgoing) -> RequestHead {
    let Outgoing { method, scheme, authority, path, fields, .. } = outgoing;
    RequestHead { method, scheme, authority, path, fields }
}

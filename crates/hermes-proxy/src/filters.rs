//! The filters of a request: processing steps of a route between its decision and the exchange with the next hop.
//!
//! In: a decided request, and the filters that its route configures. Out: its response. A filter may respond itself,
//! run the rest of the chain once or several times, or change the response. The order is fixed: cache, resume, rate
//! limit, custody. A route without filters sends its requests straight to the next hop. Never: a choice among
//! endpoints, or a decision about routes; `service` and `session` make them.

pub(crate) mod cache;
pub(crate) mod rate_limit;
pub(crate) mod resume;

use std::sync::Arc;

use hermes_cache::store::Cache;
use hermes_model::snapshot::{Custody, Resume, Route, UpstreamRateLimit};
use http::{Method, Response};
use smallvec::SmallVec;

use crate::custody::forward as custody;
use crate::request::InboundExchange;
use crate::service::forward::Forward;
use hermes_outbound::outbound::connect::Destination;
use hermes_outbound::upstream::UpstreamState;
use hermes_transport::body::Body;
use hermes_transport::error::Error;

/// The hop at the end of the chain.
#[derive(Clone, Copy)]
pub(crate) enum NextHop<'a> {
    /// An endpoint of this upstream.
    Upstream(&'a Arc<UpstreamState>),
    /// The origin that the request names. `owner` separates the connections of different routes.
    Origin { destination: &'a Destination<'a>, owner: u64 },
}

impl NextHop<'_> {
    async fn send(self, forward: &Forward<'_>) -> Result<Response<Body>, Error> {
        match self {
            Self::Upstream(upstream) => forward.to_upstream(upstream).await,
            Self::Origin { destination, owner } => forward.to_origin(destination, owner).await,
        }
    }
}

/// A filter with its configuration.
enum Filter<'a> {
    Cache(Arc<Cache>),
    Resume(Resume),
    RateLimit { limit: &'a UpstreamRateLimit, upstream: &'a Arc<UpstreamState> },
    Custody { custody: &'a Custody, upstream: &'a UpstreamState, arrived: Option<InboundExchange> },
}

/// The rest of the chain, as a filter sees it.
#[derive(Clone, Copy)]
pub(crate) struct Next<'a> {
    filters: &'a [Filter<'a>],
    hop: NextHop<'a>,
}

impl Next<'_> {
    /// Runs the rest of the chain.
    ///
    /// # Errors
    /// Errors of the filters and of the next hop.
    pub(crate) async fn run(self, forward: &Forward<'_>) -> Result<Response<Body>, Error> {
        let Some((filter, filters)) = self.filters.split_first() else { return self.hop.send(forward).await };
        let next = Next { filters, hop: self.hop };
        // Boxed, since a filter's future contains that of the rest of the chain.
        match filter {
            Filter::Cache(cache) => Box::pin(cache::handle(cache, forward, next)).await,
            Filter::Resume(resume) => Box::pin(resume::handle(*resume, forward, next)).await,
            Filter::RateLimit { limit, upstream } => Box::pin(rate_limit::handle(limit, upstream, forward, next)).await,
            Filter::Custody { custody, upstream, arrived } => {
                Box::pin(custody::handle(custody, upstream, *arrived, forward)).await
            }
        }
    }

    /// The custody settings, if the chain ends with custody.
    fn custody(&self) -> Option<&Custody> {
        self.filters.iter().find_map(|filter| match filter {
            Filter::Custody { custody, .. } => Some(*custody),
            _ => None,
        })
    }

    /// True if custody passes the body from one neighbour to the next, so that no filter sees a byte of it.
    fn bypasses_session(self) -> bool {
        self.filters.iter().any(|filter| matches!(filter, Filter::Custody { arrived: Some(_), .. }))
    }
}

/// Sends a request through the filters of its route, and to the next hop. `arrived`: the request arrived in custody.
///
/// # Errors
/// Errors of the filters and of the next hop.
pub(crate) async fn send(
    forward: &Forward<'_>,
    hop: NextHop<'_>,
    arrived: Option<InboundExchange>,
) -> Result<Response<Body>, Error> {
    if !has_filters(forward.route) {
        return hop.send(forward).await;
    }
    Box::pin(async move {
        let mut filters = SmallVec::<[Filter<'_>; 4]>::new();
        let cache = forward.worker.services.caches.of(forward.route);
        // A response that may be stored must pass through this node, so it arrives by another exchange.
        let is_stored = cache.is_some() && matches!(forward.entry.facts.method, Method::GET | Method::HEAD);
        filters.extend(cache.map(Filter::Cache));
        filters.extend(forward.route.resume.map(Filter::Resume));
        filters.extend(last_filter(forward.route, hop, arrived.filter(|_| !is_stored)));
        Next { filters: &filters, hop }.run(forward).await
    })
    .await
}

/// Sends a request again. The filters before the retrying filter have run already and do not run again.
///
/// # Errors
/// Errors of the filters and of the next hop.
async fn send_again(forward: &Forward<'_>, hop: NextHop<'_>) -> Result<Response<Body>, Error> {
    let filter = last_filter(forward.route, hop, None);
    Next { filters: filter.as_slice(), hop }.run(forward).await
}

fn has_filters(route: &Route) -> bool {
    route.cache.is_some() || route.resume.is_some() || route.upstream_rate_limit.is_some() || route.custody.is_some()
}

/// The last filter of a route. Custody waits for its next hop anyway, so it excludes rate limiting.
fn last_filter<'a>(route: &'a Route, hop: NextHop<'a>, arrived: Option<InboundExchange>) -> Option<Filter<'a>> {
    let NextHop::Upstream(upstream) = hop else { return None };
    match (&route.custody, &route.upstream_rate_limit) {
        (Some(custody), _) => Some(Filter::Custody { custody, upstream, arrived }),
        (None, Some(limit)) => Some(Filter::RateLimit { limit, upstream }),
        (None, None) => None,
    }
}

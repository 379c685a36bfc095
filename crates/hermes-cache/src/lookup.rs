//! A cache lookup: the request as the cache sees it.
//!
//! In: the head of a request after its route's rewrite. Out: its key, conditions and ranges, and whether a stored
//! response satisfies it. Pure.

use std::ops::Range;
use std::sync::Arc;

use hermes_model::authority::Authority;
use http::header::{IF_MATCH, IF_UNMODIFIED_SINCE, RANGE};
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderMap, Method, StatusCode};

use super::conditional::Conditions;
use super::content::StoredRanges;
use super::directives::{Directives, Scope};
use super::flight::{Flight, FlightReader};
use super::head::{Head, Millis, Use};
use super::key::Target;
use super::range::{RequestedRanges, Resolved};

/// The head of a request as it would go to the origin.
pub struct RequestHead {
    /// GET or HEAD.
    pub method: Method,
    /// `http` or `https`.
    pub scheme: Scheme,
    /// The authority after the route's rewrite.
    pub authority: Authority,
    /// The path after the route's rewrite.
    pub path: PathAndQuery,
    /// The fields after the route's rewrite.
    pub fields: HeaderMap,
}

/// A request as the cache sees it: its key and its parsed fields.
pub struct CacheLookup {
    /// The target of the request.
    pub target: Target,
    /// The key of the target.
    pub key: Arc<str>,
    /// The fields as they go to the origin, before the cache adds its own conditions.
    pub fields: HeaderMap,
    /// The directives of the request.
    pub says: Directives,
    /// True for HEAD.
    pub is_head: bool,
    /// The requested ranges; the whole representation for HEAD.
    pub asked: RequestedRanges,
    /// The conditions of the request.
    pub conditions: Conditions,
    /// True if the rules of a shared cache apply to the response.
    pub shared: bool,
    /// True if the request may join another request's fetch, and other requests may join its fetch.
    pub may_join: bool,
}

/// A joined fetch: the reader, the head, and the length of the representation; `None` if it is unknown.
pub type Joined = (FlightReader, Arc<Head>, Option<u64>);

impl CacheLookup {
    /// Creates a lookup. `user` is `None` if the client is unknown; a shared cache ignores it.
    pub fn new(head: RequestHead, is_shared: bool, user: Option<Arc<str>>) -> Self {
        // Without a user, the rules of a shared cache apply.
        let shared = is_shared || user.is_none();
        let RequestHead { method, scheme, authority, path, fields } = head;
        let target = Target::new(scheme, authority, path, user.filter(|_| !is_shared));
        let is_head = method == Method::HEAD;
        let says = Directives::of_request(&fields);
        let asked = if is_head { RequestedRanges::Whole } else { RequestedRanges::parse(fields.get(RANGE)) };
        Self {
            key: target.key(),
            target,
            is_head,
            asked,
            conditions: Conditions::of(&fields),
            shared,
            may_join: !says.no_store,
            says,
            fields,
        }
    }

    /// Whether the request may wait for the head of another request's fetch. A client that demands revalidation would
    /// wait in vain, because the earlier fetch is too old for it. HEAD does not wait either, because it is served only
    /// from a complete response.
    pub fn may_wait(&self) -> bool {
        self.may_join && !self.is_head && self.says.no_cache != Scope::All && self.says.max_age != Some(0)
    }

    /// Whether the request has preconditions that only the origin can evaluate.
    pub fn is_for_the_origin(&self) -> bool {
        self.fields.contains_key(IF_MATCH) || self.fields.contains_key(IF_UNMODIFIED_SINCE)
    }

    /// Returns the part of the representation that the response to this request contains.
    pub fn requested_range(&self, head: &Head, total: u64) -> Resolved {
        if head.status != StatusCode::OK || !self.conditions.want_part(&head.headers) {
            return Resolved::Whole;
        }
        self.asked.resolve(total)
    }

    /// Whether the response is 304, because the client's copy is current.
    pub fn is_met(&self, head: &Head) -> bool {
        head.status == StatusCode::OK && self.conditions.are_there() && self.conditions.are_met(&head.headers)
    }

    /// Whether the stored ranges `shape` suffice to serve the request.
    pub fn is_served_by(&self, head: &Head, shape: &StoredRanges) -> bool {
        self.is_head || self.is_met(head) || shape.covers(&self.wanted(head, shape.total))
    }

    /// Returns the range of bytes that the response to this request contains.
    pub fn wanted(&self, head: &Head, total: u64) -> Range<u64> {
        match self.requested_range(head, total) {
            Resolved::Whole => 0..total,
            Resolved::Part(range) => range,
            Resolved::Unsatisfiable => 0..0,
        }
    }

    /// Joins another request's fetch; `None` if its response may not serve this request.
    pub fn join(&self, flight: &Arc<Flight>, now: Millis) -> Option<Joined> {
        let (head, total) = flight.view()?;
        if self.is_head || !head.vary.is_met_by(&self.fields) || head.usability(&self.says, now) != Use::Fresh {
            return None;
        }
        let part = match total.map(|total| self.requested_range(&head, total)) {
            // A range of a representation of unknown length cannot be resolved.
            None if self.asked != RequestedRanges::Whole => return None,
            Some(Resolved::Unsatisfiable) => return None,
            Some(Resolved::Part(range)) => Some(range),
            None | Some(Resolved::Whole) => None,
        };
        let reader = flight.join(part.as_ref())?;
        Some((reader, head, total))
    }
}

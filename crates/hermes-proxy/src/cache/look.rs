//! What a request asks of a cache.
//!
//! In: the head of a request as it goes on. Out: its key, its conditions and ranges, and whether a kept response is
//! enough for it. Pure.

use std::ops::Range;
use std::sync::Arc;

use http::header::{IF_MATCH, IF_UNMODIFIED_SINCE, RANGE};
use http::{HeaderMap, Method, StatusCode};

use super::conditional::Conditions;
use super::content::Shape;
use super::directives::{Directives, Scope};
use super::flight::{Flight, FlightReader};
use super::head::{Head, Millis, Use};
use super::key::Target;
use super::range::{Asked, Resolved};
use crate::service::forward::head::Outgoing;

/// What a request asks for.
pub(crate) struct Ask {
    pub(crate) target: Target,
    pub(crate) key: Arc<str>,
    /// As they go on, before the cache asks in their place.
    pub(crate) fields: HeaderMap,
    pub(crate) says: Directives,
    pub(crate) is_head: bool,
    pub(crate) asked: Asked,
    pub(crate) conditions: Conditions,
    /// What it gets is under the rules of a cache for many.
    pub(crate) shared: bool,
    /// It may read what others fetch, and they what it does.
    pub(crate) may_join: bool,
}

/// Reading along: with what, of what, and how long that is.
pub(crate) type Joined = (FlightReader, Arc<Head>, Option<u64>);

impl Ask {
    /// `user`: whose it is, in a cache that keeps users apart.
    pub(crate) fn new(outgoing: Outgoing, is_shared: bool, user: Option<Arc<str>>) -> Self {
        // Who has no name is one of many.
        let shared = is_shared || user.is_none();
        let target = Target::new(&outgoing, user.filter(|_| !is_shared));
        let (fields, is_head) = (outgoing.fields, outgoing.method == Method::HEAD);
        let says = Directives::of_request(&fields);
        let asked = if is_head { Asked::Whole } else { Asked::parse(fields.get(RANGE)) };
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

    /// What others have asked for may do for it. Who wants it from the origin itself, and now, would wait for nothing: what
    /// was asked for before is too old. Nor is anything given to HEAD before all of it is there.
    pub(crate) fn may_wait(&self) -> bool {
        self.may_join && !self.is_head && self.says.no_cache != Scope::All && self.says.max_age != Some(0)
    }

    /// It has conditions that only its origin can judge.
    pub(crate) fn is_for_the_origin(&self) -> bool {
        self.fields.contains_key(IF_MATCH) || self.fields.contains_key(IF_UNMODIFIED_SINCE)
    }

    /// The part of a response that it gets.
    pub(crate) fn part(&self, head: &Head, total: u64) -> Resolved {
        if head.status != StatusCode::OK || !self.conditions.want_part(head) {
            return Resolved::Whole;
        }
        self.asked.resolve(total)
    }

    /// The client has it already.
    pub(crate) fn is_met(&self, head: &Head) -> bool {
        head.status == StatusCode::OK && self.conditions.are_there() && self.conditions.are_met(head)
    }

    /// Is what is there enough?
    pub(crate) fn is_served_by(&self, head: &Head, shape: &Shape) -> bool {
        self.is_head || self.is_met(head) || shape.covers(&self.wanted(head, shape.total))
    }

    /// The bytes that it needs.
    pub(crate) fn wanted(&self, head: &Head, total: u64) -> Range<u64> {
        match self.part(head, total) {
            Resolved::Whole => 0..total,
            Resolved::Part(range) => range,
            Resolved::Unsatisfiable => 0..0,
        }
    }

    /// Reads along with others, where it may.
    pub(crate) fn join(&self, flight: &Arc<Flight>, now: Millis) -> Option<Joined> {
        let (head, total) = flight.view()?;
        if self.is_head || !head.vary.is_met_by(&self.fields) || head.judge(&self.says, now) != Use::Fresh {
            return None;
        }
        let part = match total.map(|total| self.part(&head, total)) {
            // What is asked for of an unknown length cannot be told.
            None if self.asked != Asked::Whole => return None,
            Some(Resolved::Unsatisfiable) => return None,
            Some(Resolved::Part(range)) => Some(range),
            None | Some(Resolved::Whole) => None,
        };
        let reader = flight.join(part.as_ref())?;
        Some((reader, head, total))
    }
}

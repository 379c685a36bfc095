//! Builds responses from stored heads, with `Cache-Status` (RFC 9211).
//!
//! In: a head, the supply of its bytes, and the request. Out: a response: complete, partial, 304 or 416.

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use http::header::{AGE, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderName};
use http::{HeaderMap, HeaderValue, Response, StatusCode};

use super::body::CachedBody;
use hermes_cache::conditional::{CONTENT_DIGEST, CONTENT_MD5, not_modified};
use hermes_cache::content::Content;
use hermes_cache::flight::FlightReader;
use hermes_cache::head::{Head, Millis};
use hermes_cache::lookup::CacheLookup;
use hermes_cache::range::{Resolved, to_content_range, unsatisfied};
use hermes_transport::body::Body;

const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");

/// The source of the body.
pub(super) enum BodySource {
    Kept(Arc<Content>),
    /// A reader of the arriving response; its range was fixed when it joined.
    Coming(FlightReader),
    /// The response needs no body.
    Nothing,
}

/// Builds a response with this head. `total`: the length of the complete representation, if known.
pub(super) fn answer(
    head: &Head,
    total: Option<u64>,
    ask: &CacheLookup,
    supply: BodySource,
    now: Millis,
) -> Response<Body> {
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = head.status;
    *response.version_mut() = head.version;
    let mut headers = head.headers.clone();
    if let Some(age) = head.age_at(now) {
        headers.insert(AGE, HeaderValue::from(age / 1000));
    }
    if ask.is_met(head) {
        not_modified(&mut headers);
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        *response.headers_mut() = headers;
        return response;
    }
    let part = match total {
        Some(total) if !ask.is_head => ask.requested_range(head, total),
        _ => Resolved::Whole,
    };
    let range = match (part, total) {
        (Resolved::Part(range), Some(total)) => {
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            headers.insert(CONTENT_RANGE, to_content_range(&range, total));
            // The digests of the stored head cover the complete content, so a partial response omits them.
            headers.remove(CONTENT_DIGEST);
            headers.remove(CONTENT_MD5);
            Some(range)
        }
        (Resolved::Unsatisfiable, Some(total)) => {
            *response.status_mut() = StatusCode::RANGE_NOT_SATISFIABLE;
            not_modified(&mut headers);
            headers.remove(CONTENT_TYPE);
            headers.insert(CONTENT_RANGE, unsatisfied(total));
            headers.insert(CONTENT_LENGTH, HeaderValue::from(0));
            *response.headers_mut() = headers;
            return response;
        }
        (_, total) => total.map(|total| 0..total),
    };
    if let Some(range) = &range
        && may_have_length(head.status)
    {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(range.end - range.start));
    }
    *response.headers_mut() = headers;
    if !ask.is_head {
        *response.body_mut() = body(supply, range);
    }
    response
}

fn body(supply: BodySource, range: Option<Range<u64>>) -> Body {
    let left = range.as_ref().map(|range| range.end - range.start);
    match (supply, range) {
        (_, Some(range)) if range.is_empty() => Body::Empty,
        (BodySource::Kept(content), Some(rest)) => Body::boxed(CachedBody::Kept { content, rest }),
        (BodySource::Coming(reader), _) => Body::boxed(CachedBody::Coming { reader, left }),
        (BodySource::Kept(_) | BodySource::Nothing, _) => Body::Empty,
    }
}

fn may_have_length(status: StatusCode) -> bool {
    status != StatusCode::NO_CONTENT
}

/// The `Cache-Status` entry of this cache for one response.
pub(super) struct Note(String);

impl Note {
    /// An entry for this node.
    pub(super) fn of(node: &str) -> Self {
        // A token begins with a letter; other names must be quoted (RFC 8941, 3.3).
        let is_token = node.starts_with(|c: char| c.is_ascii_alphabetic())
            && node.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        Self(if is_token { node.to_owned() } else { format!("\"{}\"", node.replace(['"', '\\'], "")) })
    }

    pub(super) fn hit(mut self, ttl: i64) -> Self {
        let _ = write!(self.0, "; hit; ttl={ttl}");
        self
    }

    /// The request was forwarded for this reason.
    pub(super) fn forwarded(mut self, why: &str) -> Self {
        let _ = write!(self.0, "; fwd={why}");
        self
    }

    pub(super) fn status(mut self, status: StatusCode) -> Self {
        let _ = write!(self.0, "; fwd-status={}", status.as_u16());
        self
    }

    pub(super) fn ttl(mut self, ttl: i64) -> Self {
        let _ = write!(self.0, "; ttl={ttl}");
        self
    }

    pub(super) fn stored(self) -> Self {
        self.word("stored")
    }

    pub(super) fn collapsed(self) -> Self {
        self.word("collapsed")
    }

    /// Appends a detail of this implementation.
    pub(super) fn detail(mut self, detail: &str) -> Self {
        let _ = write!(self.0, "; detail={detail}");
        self
    }

    fn word(mut self, word: &str) -> Self {
        let _ = write!(self.0, "; {word}");
        self
    }

    /// Appends the entry after those of caches closer to the origin.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        if let Ok(value) = HeaderValue::try_from(self.0) {
            headers.append(CACHE_STATUS, value);
        }
    }
}

//! Processes an origin's response: for the client at once, and for later requests if it may be stored.
//!
//! In: a response, and the request. Out: the client's response, whose body comes from a flight if it is stored; and the
//! updated index.

use std::ops::Range;
use std::sync::Arc;

use hermes_model::facts::Kind;
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, LAST_MODIFIED};
use http::{HeaderValue, Response, StatusCode};
use http_body::Body as _;

use super::answer::{BodySource, answer};
use super::body::CachedBody;
use super::fetch::Fetch;
use super::lookup::{CacheRequest, is_for_nobody};
use crate::service::forward::Forward;
use hermes_cache::conditional::{CONTENT_DIGEST, CONTENT_MD5, freshened};
use hermes_cache::content::Content;
use hermes_cache::flight::FlightHead;
use hermes_cache::head::{Head, Times};
use hermes_cache::range::{RequestedRanges, content_range};
use hermes_cache::store::{FlightOwner, Miss, Stored};
use hermes_transport::body::Body;
use hermes_transport::headers::strip_hop_by_hop;

/// The reason why a response does not complete a stored one.
pub(super) enum NotStorable {
    /// The response belongs to another representation, so the stored one is invalid for all clients.
    Other,
    /// The response is for this client only. The stored response remains valid for other clients.
    ForOne,
}

impl CacheRequest<'_> {
    /// Combines a stored part and the arriving missing part into one response.
    ///
    /// # Errors
    /// The parts do not fit together.
    pub(super) fn complete(
        &self,
        forward: &Forward<'_>,
        response: Response<Body>,
        stored: &Stored,
        (missing, content): (&Range<u64>, &Arc<Content>),
        times: Times,
        lead: &mut Option<FlightOwner>,
    ) -> Result<(Response<Body>, i64), NotStorable> {
        let (mut parts, body) = response.into_parts();
        strip_hop_by_hop(&mut parts.headers);
        let (range, total) = content_range(parts.headers.get(CONTENT_RANGE)).ok_or(NotStorable::Other)?;
        let is_same = parts.headers.get(ETAG) == stored.head.strong_etag() && total == stored.shape.total;
        if !is_same || range != *missing {
            return Err(NotStorable::Other);
        }
        let head = Arc::new(freshened(&stored.head, &parts.headers, times).ok_or(NotStorable::Other)?);
        let may_be = head.may_be_kept(&self.ask.fields, times.came);
        may_be.map_err(|why| if is_for_nobody(why) { NotStorable::Other } else { NotStorable::ForOne })?;
        let mut lead = lead.take().ok_or(NotStorable::ForOne)?;
        let opening = FlightHead {
            head: head.clone(),
            total: Some(total),
            base: Some(content.clone()),
            start: range.start,
            until: Some(range.end),
        };
        lead.flight.open(opening);
        let wanted = self.ask.wanted(&head, total);
        let reader = lead.flight.join(Some(&wanted)).ok_or(NotStorable::ForOne)?;
        lead.is_open = true;
        self.spawn(forward, &lead, head.clone(), body, Some(range.end - range.start));
        let response = answer(&head, Some(total), &self.ask, BodySource::Coming(reader), times.came);
        Ok((response, head.ttl(times.came)))
    }

    fn spawn(&self, forward: &Forward<'_>, lead: &FlightOwner, head: Arc<Head>, body: Body, owed: Option<u64>) {
        // The requesting session may end before the other readers.
        let entry = forward.entry.detached(forward.worker);
        body.bind(&entry);
        let resume = forward.route.resume.filter(|_| body.is_resumed());
        if forward.route.custody.is_some() || resume.is_some() {
            // Readers that share the response wait as long as the requesting session, since the path may be unavailable
            // to all of them.
            forward.entry.set_held(true);
        }
        let led = forward.entry.route.borrow().clone();
        let fetch = Fetch {
            cache: self.cache.clone(),
            key: self.ask.key.clone(),
            flight: lead.flight.clone(),
            head,
            body,
            entry,
            resumed: resume.and(led).map(|route| (forward.entry.clone(), route)),
            owed,
            idle: match (&forward.route.custody, resume) {
                (Some(custody), _) => custody.deadline,
                (None, Some(resume)) => resume.deadline + forward.route.timeout.progress,
                (None, None) => forward.route.timeout.idle_of(Kind::Http),
            },
            is_done: false,
        };
        forward.worker.spawn(fetch.run());
    }

    /// Passes on a response of the origin, and stores it if permitted.
    pub(super) fn receive(
        &self,
        forward: &Forward<'_>,
        mut response: Response<Body>,
        stored: Option<&Stored>,
        times: Times,
        miss: Miss,
        lead: Option<FlightOwner>,
    ) -> Response<Body> {
        let note = self.note().forwarded(miss.as_str()).status(response.status());
        self.cache.metrics.missed.inc();
        if self.ask.is_head {
            if let Some(stored) = stored {
                self.update_by_head(stored, &response, times);
            }
            note.write(response.headers_mut());
            return response;
        }
        strip_hop_by_hop(response.headers_mut());
        match self.open(forward, &mut response, times, lead) {
            Ok(ttl) => note.stored().ttl(ttl).write(response.headers_mut()),
            Err(why) => {
                if why != "not-kept" {
                    self.cache.is_solitary(&self.ask.key, times.came);
                }
                note.detail(why).write(response.headers_mut());
            }
        }
        response
    }

    /// Starts a fetch of the body through a flight.
    ///
    /// # Errors
    /// The reason why the response is not stored.
    fn open(
        &self,
        forward: &Forward<'_>,
        response: &mut Response<Body>,
        times: Times,
        lead: Option<FlightOwner>,
    ) -> Result<i64, &'static str> {
        let Some(mut lead) = lead.filter(|lead| !lead.flight.is_forgotten()) else { return Err("not-kept") };
        let (ask, status) = (&self.ask, response.status());
        if matches!(response.body(), Body::Led { .. }) || status == StatusCode::NOT_MODIFIED {
            return Err("not-kept");
        }
        let owed = length(response);
        let part =
            (status == StatusCode::PARTIAL_CONTENT).then(|| content_range(response.headers().get(CONTENT_RANGE)));
        let (status, start, until, total) = match &part {
            None => (status, 0, owed, owed),
            // A multipart response, or one with an unknown range.
            Some(None) => return Err("multipart"),
            Some(Some((range, total))) if owed == Some(range.end - range.start) => {
                (StatusCode::OK, range.start, Some(range.end), Some(*total))
            }
            Some(Some(_)) => return Err("content-range"),
        };
        let mut headers = response.headers().clone();
        if let (Some(_), Some(total)) = (&part, total) {
            headers.remove(CONTENT_RANGE);
            // These digests cover the part's bytes (RFC 9530, section 2), which other responses split differently.
            headers.remove(CONTENT_DIGEST);
            headers.remove(CONTENT_MD5);
            headers.insert(CONTENT_LENGTH, HeaderValue::from(total));
        }
        let head = Head::new(status, response.version(), headers, &ask.fields, times, ask.shared).ok_or("vary")?;
        head.may_be_kept(&ask.fields, times.came)?;
        if owed.is_some_and(|owed| owed > self.cache.largest()) {
            self.cache.hit_limit("cache-object");
            return Err("size");
        }
        let ttl = head.ttl(times.came);
        let full = head.clone();
        let mut head = head;
        head.strip();
        let head = Arc::new(head);
        if owed == Some(0) || response.body().is_end_stream() {
            self.cache.keep(&ask.key, &head, Content::new([], 0), Some(&lead.flight));
            return Ok(ttl);
        }
        lead.flight.open(FlightHead { head: head.clone(), total, base: None, start, until });
        let range = part.flatten().map(|(range, _)| range);
        let Some(reader) = lead.flight.join(range.as_ref()) else { return Err("not-kept") };
        lead.is_open = true;
        let body = std::mem::replace(response.body_mut(), Body::Empty);
        self.spawn(forward, &lead, head.clone(), body, owed);
        let coming = CachedBody::Coming { reader, left: owed };
        *response.body_mut() = Body::boxed(coming);
        // The cache requested the complete response, but the client needs only a part or has it already.
        if range.is_none()
            && forward.rewriter.amend.is_some()
            && (ask.asked != RequestedRanges::Whole || ask.is_met(&head))
        {
            let part = total.map(|total| ask.wanted(&head, total));
            if let Some(reader) = part.and_then(|part| lead.flight.join(Some(&part))) {
                *response = answer(&full, total, ask, BodySource::Coming(reader), times.came);
            }
        }
        Ok(ttl)
    }

    /// Updates a stored GET response from a HEAD response (RFC 9111, 4.3.5).
    fn update_by_head(&self, stored: &Stored, response: &Response<Body>, times: Times) {
        if response.status() != StatusCode::OK || stored.head.status != StatusCode::OK {
            return;
        }
        let (by, head) = (response.headers(), &stored.head);
        let differs = |name| by.get(&name).is_some_and(|value| head.headers.get(&name).is_some_and(|own| own != value));
        let length = by.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let is_other =
            differs(ETAG) || differs(LAST_MODIFIED) || length.is_some_and(|length: u64| length != stored.shape.total);
        let mut by = by.clone();
        strip_hop_by_hop(&mut by);
        match freshened(head, &by, times).filter(|_| !is_other) {
            Some(head) => self.renew(stored, &Arc::new(head), times),
            None => self.cache.drop_one(&self.ask.key, stored.id),
        }
    }
}

/// The length of a body, if its head declares it.
fn length(response: &Response<Body>) -> Option<u64> {
    response.body().size_hint().exact().or_else(|| {
        let value = response.headers().get(CONTENT_LENGTH)?;
        value.to_str().ok()?.parse().ok()
    })
}

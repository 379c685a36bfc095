//! What an origin has answered: for the client at once, and for those who come if it may be.
//!
//! In: a response, and what was asked. Out: the response for the client, whose body comes by a flight where it is kept;
//! and the index as the answer has it.

use std::ops::Range;
use std::sync::Arc;

use hermes_model::facts::Kind;
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, LAST_MODIFIED};
use http::{HeaderValue, Response, StatusCode};
use http_body::Body as _;

use super::answer::{Supply, answer};
use super::body::CachedBody;
use super::fetch::Fetch;
use super::serve::{Visit, is_for_nobody};
use crate::body::Body;
use crate::headers::strip_hop_by_hop;
use crate::service::forward::Forward;
use hermes_cache::conditional::{CONTENT_DIGEST, CONTENT_MD5, freshened};
use hermes_cache::content::Content;
use hermes_cache::flight::Opening;
use hermes_cache::head::{Head, Times};
use hermes_cache::range::{Asked, content_range};
use hermes_cache::store::{Lead, Miss, Stored};

/// Why what came does not complete what is kept.
pub(super) enum Unfit {
    /// It is of another one: what is kept is no answer to anybody any more.
    Other,
    /// It is for who asked alone: what is kept stays for the others.
    ForOne,
}

impl Visit<'_> {
    /// What was missing comes: the answer is of both.
    ///
    /// # Errors
    /// They do not fit.
    pub(super) fn complete(
        &self,
        forward: &Forward<'_>,
        response: Response<Body>,
        stored: &Stored,
        (missing, content): (&Range<u64>, &Arc<Content>),
        times: Times,
        lead: &mut Option<Lead>,
    ) -> Result<(Response<Body>, i64), Unfit> {
        let (mut parts, body) = response.into_parts();
        strip_hop_by_hop(&mut parts.headers);
        let (range, total) = content_range(parts.headers.get(CONTENT_RANGE)).ok_or(Unfit::Other)?;
        let is_same = parts.headers.get(ETAG) == stored.head.strong_etag() && total == stored.shape.total;
        if !is_same || range != *missing {
            return Err(Unfit::Other);
        }
        let head = Arc::new(freshened(&stored.head, &parts.headers, times).ok_or(Unfit::Other)?);
        let may_be = head.may_be_kept(&self.ask.fields, times.came);
        may_be.map_err(|why| if is_for_nobody(why) { Unfit::Other } else { Unfit::ForOne })?;
        let mut lead = lead.take().ok_or(Unfit::ForOne)?;
        let opening = Opening {
            head: head.clone(),
            total: Some(total),
            base: Some(content.clone()),
            start: range.start,
            until: Some(range.end),
        };
        lead.flight.open(opening);
        let wanted = self.ask.wanted(&head, total);
        let reader = lead.flight.join(Some(&wanted)).ok_or(Unfit::ForOne)?;
        lead.is_open = true;
        self.spawn(forward, &lead, head.clone(), body, Some(range.end - range.start));
        let response = answer(&head, Some(total), &self.ask, Supply::Coming(reader), times.came);
        Ok((response, head.ttl(times.came)))
    }

    fn spawn(&self, forward: &Forward<'_>, lead: &Lead, head: Arc<Head>, body: Body, owed: Option<u64>) {
        // The session that asked may end before the others who read.
        let entry = forward.entry.apart(forward.worker);
        body.bind(&entry);
        let retrieve = forward.route.retrieve.filter(|_| matches!(body, Body::Retrieved(_)));
        if forward.route.custody.is_some() || retrieve.is_some() {
            // Who reads along waits as long as who asked: the path may be dark to all of them.
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
            retrieved: retrieve.and(led).map(|route| (forward.entry.clone(), route)),
            owed,
            idle: match (&forward.route.custody, retrieve) {
                (Some(custody), _) => custody.deadline,
                (None, Some(retrieve)) => retrieve.deadline + forward.route.timeout.progress,
                (None, None) => forward.route.timeout.idle_of(Kind::Http),
            },
            is_done: false,
        };
        forward.worker.spawn(fetch.run());
    }

    /// A response of the origin, for the client, and for those who come if it may be.
    pub(super) fn take_in(
        &self,
        forward: &Forward<'_>,
        mut response: Response<Body>,
        stored: Option<&Stored>,
        times: Times,
        miss: Miss,
        lead: Option<Lead>,
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

    /// Has the body come by a flight.
    ///
    /// # Errors
    /// Why it is not kept.
    fn open(
        &self,
        forward: &Forward<'_>,
        response: &mut Response<Body>,
        times: Times,
        lead: Option<Lead>,
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
            // Several of them, or nobody knows which.
            Some(None) => return Err("multipart"),
            Some(Some((range, total))) if owed == Some(range.end - range.start) => {
                (StatusCode::OK, range.start, Some(range.end), Some(*total))
            }
            Some(Some(_)) => return Err("content-range"),
        };
        let mut headers = response.headers().clone();
        if let (Some(_), Some(total)) = (&part, total) {
            headers.remove(CONTENT_RANGE);
            // They are of the part's bytes (RFC 9530, section 2), which are given out in other parts, or in the whole.
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
        lead.flight.open(Opening { head: head.clone(), total, base: None, start, until });
        let range = part.flatten().map(|(range, _)| range);
        let Some(reader) = lead.flight.join(range.as_ref()) else { return Err("not-kept") };
        lead.is_open = true;
        let body = std::mem::replace(response.body_mut(), Body::Empty);
        self.spawn(forward, &lead, head.clone(), body, owed);
        let coming = CachedBody::Coming { reader, left: owed };
        *response.body_mut() = Body::Cached(Box::new(coming));
        // The whole came since the cache asked for it; the client wanted a part, or has it.
        if range.is_none() && forward.dress.amend.is_some() && (ask.asked != Asked::Whole || ask.is_met(&head)) {
            let part = total.map(|total| ask.wanted(&head, total));
            if let Some(reader) = part.and_then(|part| lead.flight.join(Some(&part))) {
                *response = answer(&full, total, ask, Supply::Coming(reader), times.came);
            }
        }
        Ok(ttl)
    }

    /// A HEAD tells of what a GET would bring (RFC 9111, 4.3.5).
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

/// Bytes of a body, where its head says them.
fn length(response: &Response<Body>) -> Option<u64> {
    response.body().size_hint().exact().or_else(|| {
        let value = response.headers().get(CONTENT_LENGTH)?;
        value.to_str().ok()?.parse().ok()
    })
}

//! The head of a stored response: its freshness, whether it may be stored, and which requests it may serve (RFC 9111,
//! sections 3, 4.2 and 5.2; RFC 5861; RFC 8246; RFC 9213).
//!
//! In: status and fields of a response, fields of its request, times. Out: decisions on storage and use. Pure; callers
//! pass the time.
//!
//! The crate `http-cache-semantics` (3.0.0) is not used. It reads directives out of quoted values, compares only one
//! line of a field that `Vary` names, and stores the request's head with each response. It supports neither partial
//! content nor `stale-if-error` nor targeted fields.

use std::time::Duration;

use http::header::{AGE, AUTHORIZATION, CACHE_CONTROL, DATE, ETAG, EXPIRES, HeaderName, LAST_MODIFIED, SET_COOKIE};
use http::{HeaderMap, HeaderValue, StatusCode, Version};

use super::directives::{Directives, Scope, seconds};
use super::key::Vary;

/// `CDN-Cache-Control`: directives of the origin that apply to shared caches only (RFC 9213).
const TARGETED: HeaderName = HeaderName::from_static("cdn-cache-control");
/// Heuristic freshness lifetime: a tenth of the time since the last modification, and at most a day, in seconds (RFC
/// 9111, section 4.2.2).
const GUESS_SHARE: u64 = 10;
const MAX_GUESSED: u64 = 24 * 3600;
/// Estimated memory of a head besides its fields, in bytes.
const HEAD_COST: usize = 512;

/// Milliseconds of Unix time.
pub type Millis = u64;

/// The times of the request and of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// When the request was sent.
    pub asked: Millis,
    /// When the response was received.
    pub came: Millis,
}

/// The head of a stored response.
#[derive(Clone, Debug)]
pub struct Head {
    /// The status. It is 200 for a stored 206, because the content records which ranges are stored.
    pub status: StatusCode,
    /// The version of the response.
    pub version: Version,
    /// The fields of the response.
    pub headers: HeaderMap,
    /// The request fields that the response depends on.
    pub vary: Vary,
    /// When the response was requested and received.
    pub times: Times,
    /// True if the rules of a shared cache apply.
    pub shared: bool,
    says: Directives,
    /// Freshness lifetime in milliseconds, from the response's creation on.
    lifetime: u64,
    /// Age at reception in milliseconds; `None` if the `Age` field is invalid.
    age: Option<u64>,
}

/// The permitted use of a stored response for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Serve the response.
    Fresh,
    /// Serve the response although it is stale; the request allows that.
    StaleAllowed,
    /// Validate the response at the origin, because it is stale.
    Stale,
    /// Validate the response at the origin, because the request or the response demands it.
    Asked,
}

impl Head {
    /// Creates the head of a received response. `request` has the fields of its request. Returns `None` if `Vary` is
    /// `*`, invalid or too long.
    pub fn new(
        status: StatusCode,
        version: Version,
        mut headers: HeaderMap,
        request: &HeaderMap,
        times: Times,
        shared: bool,
    ) -> Option<Self> {
        let vary = Vary::of(&headers, request)?;
        if !headers.contains_key(DATE) {
            // A cache adds a missing `Date` (RFC 9110, section 6.6.1).
            headers.insert(DATE, date(times.came));
        }
        Some(Self::again(status, version, headers, vary, times, shared))
    }

    /// Creates a head whose `Vary` has been parsed before, such as one read from disk.
    pub fn again(
        status: StatusCode,
        version: Version,
        headers: HeaderMap,
        vary: Vary,
        times: Times,
        shared: bool,
    ) -> Self {
        // A targeted field without directives is ignored (RFC 9213, section 2.2).
        let targeted = Directives::of(&headers, &TARGETED);
        let is_targeted = shared && targeted != Directives::default();
        let says = if is_targeted { targeted } else { Directives::of(&headers, &CACHE_CONTROL) };
        let mut this = Self { status, version, headers, vary, times, shared, says, lifetime: 0, age: None };
        this.lifetime = this.lifetime(is_targeted).saturating_mul(1000);
        this.age = this.age();
        this
    }

    fn lifetime(&self, is_targeted: bool) -> u64 {
        if let Some(seconds) = self.says.s_maxage.filter(|_| self.shared).or(self.says.max_age) {
            return seconds;
        }
        let sent = instant(&self.headers, &DATE).unwrap_or(self.times.came / 1000);
        if self.headers.contains_key(EXPIRES) && !is_targeted {
            // An invalid `Expires` is a time in the past (RFC 9111, section 5.3).
            return instant(&self.headers, &EXPIRES).map_or(0, |end| end.saturating_sub(sent));
        }
        if !(is_understood(self.status) || self.says.public) {
            return 0;
        }
        let changed = instant(&self.headers, &LAST_MODIFIED);
        changed.map_or(0, |changed| (sent.saturating_sub(changed) / GUESS_SHARE).min(MAX_GUESSED))
    }

    fn age(&self) -> Option<u64> {
        let mut lines = self.headers.get_all(AGE).iter();
        let said = match (lines.next(), lines.next()) {
            (None, _) => 0,
            (Some(line), None) => seconds(line.as_bytes())?,
            (Some(_), Some(_)) => return None,
        };
        let came = self.times.came;
        let sent = instant(&self.headers, &DATE).unwrap_or(came / 1000);
        let apparent = (came / 1000).saturating_sub(sent) * 1000;
        let corrected = said * 1000 + came.saturating_sub(self.times.asked);
        Some(apparent.max(corrected))
    }

    /// Returns the age at `now` in milliseconds; `None` if the `Age` field of the response is invalid.
    pub fn age_at(&self, now: Millis) -> Option<u64> {
        self.age.map(|age| age + now.saturating_sub(self.times.came))
    }

    /// Remaining freshness in seconds; negative if the response is stale.
    pub fn ttl(&self, now: Millis) -> i64 {
        let Some(age) = self.age_at(now) else { return -(self.lifetime as i64 / 1000) };
        (self.lifetime as i64 - age as i64).div_euclid(1000)
    }

    fn is_fresh(&self, now: Millis) -> bool {
        self.age_at(now).is_some_and(|age| age < self.lifetime)
    }

    /// Returns the time since the response became stale, in milliseconds; [`u64::MAX`] if the age is unknown.
    fn staleness(&self, now: Millis) -> u64 {
        self.age_at(now).map_or(u64::MAX, |age| age.saturating_sub(self.lifetime))
    }

    /// Whether the response to a GET with these fields may be stored.
    ///
    /// # Errors
    ///
    /// The reason against it, as a token for `Cache-Status`.
    pub fn may_be_kept(&self, request: &HeaderMap, now: Millis) -> Result<(), &'static str> {
        let says = &self.says;
        let is_understood = is_understood(self.status);
        if says.must_understand && !is_understood {
            return Err("must-understand");
        }
        // A cache that understands the status ignores `no-store` beside `must-understand` (RFC 9111, section 5.2.2.3).
        if says.no_store && !says.must_understand {
            return Err("no-store");
        }
        if Directives::of_request(request).no_store {
            return Err("request-no-store");
        }
        let is_public = says.public || says.s_maxage.is_some();
        if self.shared {
            if says.private == Scope::All {
                return Err("private");
            }
            if request.contains_key(AUTHORIZATION) && !is_public && !says.must_revalidate {
                return Err("authorization");
            }
            // A response that sets a cookie is meant for one user, unless it has `public` or `s-maxage`.
            if self.headers.contains_key(SET_COOKIE) && !is_public {
                return Err("set-cookie");
            }
        }
        let is_explicit = says.public
            || says.max_age.is_some()
            || (self.shared && says.s_maxage.is_some())
            || (!self.shared && says.private == Scope::All)
            || self.headers.contains_key(EXPIRES);
        if !is_explicit && !is_understood {
            return Err("status");
        }
        // A response that can neither be served nor validated is useless.
        if !self.is_fresh(now) && !self.has_validator() && says.stale_if_error.is_none() {
            return Err("stale");
        }
        Ok(())
    }

    /// Removes the fields that `no-cache` or, in a shared cache, `private` names, because later clients must not
    /// receive them.
    pub fn strip(&mut self) {
        let mut names = Vec::new();
        if let Scope::Fields(fields) = &self.says.no_cache {
            names.extend(fields.iter().cloned());
        }
        if let Scope::Fields(fields) = &self.says.private
            && self.shared
        {
            names.extend(fields.iter().cloned());
        }
        names.iter().for_each(|name| drop(self.headers.remove(name)));
    }

    /// Decides whether the response may serve a request with these directives.
    pub fn usability(&self, request: &Directives, now: Millis) -> Use {
        if request.no_cache == Scope::All || self.says.no_cache == Scope::All {
            return Use::Asked;
        }
        let age = self.age_at(now).unwrap_or(u64::MAX);
        let is_fresh = self.is_fresh(now);
        // Browsers reload with `max-age=0`; an immutable response needs no validation (RFC 8246).
        let is_reload = request.max_age == Some(0) && self.says.immutable && is_fresh;
        let is_too_old = |seconds: u64| age > seconds * 1000 || seconds == 0;
        let left = self.lifetime.saturating_sub(age);
        if request.min_fresh.is_some_and(|seconds| left < seconds * 1000) {
            return Use::Asked;
        }
        if is_fresh {
            let is_refused = request.max_age.is_some_and(is_too_old) && !is_reload;
            return if is_refused { Use::Asked } else { Use::Fresh };
        }
        let staleness = self.staleness(now);
        let is_taken = request.max_stale.is_some_and(|seconds| staleness / 1000 <= seconds);
        if is_taken && self.may_be_stale() && !request.max_age.is_some_and(is_too_old) {
            return Use::StaleAllowed;
        }
        Use::Stale
    }

    fn may_be_stale(&self) -> bool {
        let says = &self.says;
        let is_for_many = self.shared && (says.proxy_revalidate || says.s_maxage.is_some());
        !says.must_revalidate && !is_for_many && says.no_cache != Scope::All && self.age.is_some()
    }

    /// Whether the stale response may be served because the origin failed. `stale-if-error` limits the staleness.
    /// Without it, the limit is `unreachable`, which applies only without a path to the origin (RFC 9111, section
    /// 4.2.4). It is `None` if the origin was reached.
    pub fn may_stand_in(&self, request: &Directives, unreachable: Option<Duration>, now: Millis) -> bool {
        if !self.may_be_stale() || request.no_cache == Scope::All {
            return false;
        }
        let staleness = self.staleness(now);
        let said = self.says.stale_if_error.or(request.stale_if_error).map(|seconds| seconds * 1000);
        let most = said.or_else(|| unreachable.map(|stale| stale.as_millis() as u64));
        most.is_some_and(|most| staleness < most || (staleness == 0 && self.is_fresh(now)))
    }

    /// Whether the origin can validate the response.
    pub fn has_validator(&self) -> bool {
        self.headers.contains_key(ETAG) || self.headers.contains_key(LAST_MODIFIED)
    }

    /// The strong entity tag, which identifies the exact bytes.
    pub fn strong_etag(&self) -> Option<&HeaderValue> {
        strong_etag(&self.headers)
    }

    /// Estimated bytes in memory.
    pub fn cost(&self) -> usize {
        let lines: usize = self.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum();
        HEAD_COST + lines + self.vary.bytes()
    }
}

/// The entity tag, if it is strong.
pub fn strong_etag(headers: &HeaderMap) -> Option<&HeaderValue> {
    headers.get(ETAG).filter(|tag| tag.as_bytes().starts_with(b"\""))
}

/// Statuses that the cache understands and that are heuristically cacheable (RFC 9110, section 15.1).
fn is_understood(status: StatusCode) -> bool {
    matches!(status.as_u16(), 200 | 203 | 204 | 206 | 300 | 301 | 308 | 404 | 405 | 410 | 414 | 501)
}

/// Returns a date field in seconds of Unix time; `None` if it is absent, invalid or repeated.
pub fn instant(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    let mut lines = headers.get_all(name).iter();
    let (first, second) = (lines.next()?, lines.next());
    second.is_none().then_some(first).and_then(seconds_of_date)
}

/// Parses a date in any of the three HTTP formats (RFC 9110, section 5.6.7) to seconds of Unix time.
pub fn seconds_of_date(value: &HeaderValue) -> Option<u64> {
    let time = httpdate::parse_http_date(value.to_str().ok()?).ok()?;
    Some(time.duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

/// Formats a time as the value of a date field.
pub fn date(millis: Millis) -> HeaderValue {
    let text = httpdate::fmt_http_date(std::time::UNIX_EPOCH + Duration::from_millis(millis));
    HeaderValue::try_from(text).unwrap_or_else(|_| unreachable!("words and numbers"))
}

#[cfg(test)]
mod tests;

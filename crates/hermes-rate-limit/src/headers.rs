//! Reads rate limits from response headers.
//!
//! In: status and fields. Out: whether the response is a refusal, when to retry, and the stated quota.
//!
//! Supported are `Retry-After` (RFC 9110), and `RateLimit` and `RateLimit-Policy`
//! (draft-ietf-httpapi-ratelimit-headers, in its newer and older forms). `X-RateLimit-Remaining` and `-Reset` have no
//! specification, and two meanings.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::StatusCode;
use http::header::{DATE, HeaderMap, HeaderName, RETRY_AFTER};

/// RFC 9209.
const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");

/// Numbers above this are a point in time; as a duration, it would be thirty years.
const EPOCH_FROM: f64 = 1e9;
/// Longer waits are cut to this; every deadline expires earlier.
const MAX_WAIT_SECONDS: f64 = 1e8;

/// The content of the headers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RateHeaders {
    /// Wait before a retry.
    pub after: Option<Duration>,
    /// Number of requests, and the window for it.
    pub quota: Option<(f64, Duration)>,
}

/// Whether a response is a refusal by rate. A 503 without `Retry-After` has another reason, and so has one of a proxy
/// that reports a failure in `Proxy-Status`.
pub fn is_refusal(status: StatusCode, headers: &HeaderMap) -> bool {
    let is_503 = status == StatusCode::SERVICE_UNAVAILABLE;
    let is_asked_back = || headers.contains_key(RETRY_AFTER) && !headers.contains_key(PROXY_STATUS);
    status == StatusCode::TOO_MANY_REQUESTS || (is_503 && is_asked_back())
}

/// Whether a refused request may be repeated: a 429 was not processed, but a 503 may have been.
pub fn may_repeat(status: StatusCode, is_idempotent: bool) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || is_idempotent
}

impl RateHeaders {
    /// Reads the fields of a response that came at `now`.
    pub fn read(headers: &HeaderMap, now: SystemTime) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let number = |name: &str| text(name).and_then(first_number);
        let current = text("ratelimit").unwrap_or_default();
        let remaining = param(current, &["r", "remaining"])
            .or_else(|| number("ratelimit-remaining"))
            .or_else(|| number("x-ratelimit-remaining"));
        let reset = param(current, &["t", "reset"])
            .or_else(|| number("ratelimit-reset"))
            .or_else(|| number("x-ratelimit-reset").map(|reset| from_epoch(reset, now)));
        let after = text("retry-after").and_then(|after| retry_after(after, headers, now));
        // If nothing remains, the reset time is the retry time.
        let by_reset = reset.filter(|_| remaining.is_some_and(|remaining| remaining < 1.0)).and_then(seconds);
        Self { after: after.or(by_reset), quota: text("ratelimit-policy").and_then(quota) }
    }
}

fn seconds(number: f64) -> Option<Duration> {
    (number >= 0.0).then(|| Duration::from_secs_f64(number.min(MAX_WAIT_SECONDS)))
}

fn from_epoch(reset: f64, now: SystemTime) -> f64 {
    if reset < EPOCH_FROM {
        return reset;
    }
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    (reset - now).max(0.0)
}

/// Parses seconds, or a date, which counts by the sender's clock.
fn retry_after(text: &str, headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    if let Ok(number) = text.trim().parse::<u64>() {
        return seconds(number as f64);
    }
    let date = |text: &str| httpdate::parse_http_date(text.trim()).ok();
    let theirs = headers.get(DATE).and_then(|value| value.to_str().ok()).and_then(date).unwrap_or(now);
    Some(date(text)?.duration_since(theirs).unwrap_or_default())
}

/// The leading number: `100`, or `100, 100;w=60` of the older drafts.
fn first_number(text: &str) -> Option<f64> {
    let digits = text.trim().split([',', ';', ' ']).next()?;
    digits.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0)
}

/// A parameter of the first item: `"name";r=5;t=1`, or `limit=5, remaining=1, reset=1` of the older drafts.
fn param(text: &str, names: &[&str]) -> Option<f64> {
    // Each item is a policy; the first one with the parameter is used.
    text.split([',', ';']).find_map(|part| {
        let (name, value) = part.split_once('=')?;
        names.contains(&name.trim()).then(|| first_number(value))?
    })
}

/// The policy with the shortest window. Longer windows refuse by themselves when they are used up.
fn quota(text: &str) -> Option<(f64, Duration)> {
    let policies = text.split(',').filter_map(|item| {
        let window = param(item, &["w"]).filter(|window| *window > 0.0 && *window < MAX_WAIT_SECONDS)?;
        let count = param(item, &["q"]).or_else(|| first_number(item)).filter(|count| *count > 0.0)?;
        Some((count, Duration::from_secs_f64(window)))
    });
    policies.min_by_key(|(_, window)| *window)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;

    fn hint(fields: &[(&'static str, &str)]) -> RateHeaders {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, value.parse().unwrap());
        }
        RateHeaders::read(&headers, UNIX_EPOCH + Duration::from_secs(2_000_000_000))
    }

    fn after(fields: &[(&'static str, &str)]) -> Option<f64> {
        hint(fields).after.map(|after| after.as_secs_f64())
    }

    #[test]
    fn when_to_come_again_is_read_in_all_its_forms() {
        assert_eq!(after(&[("retry-after", "7")]), Some(7.0));
        let date = ("date", "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(after(&[date, ("retry-after", "Sun, 06 Nov 1994 08:49:47 GMT")]), Some(10.0));
        assert_eq!(after(&[date, ("retry-after", "Sun, 06 Nov 1994 08:00:00 GMT")]), Some(0.0));
        assert_eq!(after(&[("retry-after", "never")]), None);
        assert_eq!(after(&[("retry-after", "18446744073709551615")]), Some(MAX_WAIT_SECONDS));
        assert_eq!(after(&[("ratelimit", "\"default\";r=0;t=5")]), Some(5.0));
        assert_eq!(after(&[("ratelimit", "limit=10, remaining=0, reset=4")]), Some(4.0));
        assert_eq!(after(&[("ratelimit", "\"default\";r=3;t=5")]), None, "something remains");
        assert_eq!(after(&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "9")]), Some(9.0));
        assert_eq!(after(&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "2000000030")]), Some(30.0));
        assert_eq!(after(&[("x-ratelimit-remaining", "-1"), ("x-ratelimit-reset", "nan")]), None);
    }

    #[test]
    fn how_much_is_allowed_is_read_from_a_policy() {
        let quota = |text: &str| hint(&[("ratelimit-policy", text)]).quota;
        let of = |count: f64, seconds: u64| Some((count, Duration::from_secs(seconds)));
        assert_eq!(quota("\"burst\";q=100;w=60,\"daily\";q=1000;w=86400"), of(100.0, 60));
        assert_eq!(quota("10;w=1, 50;w=60"), of(10.0, 1));
        for nothing in ["", "\"x\";q=5", "\"x\";w=5", "\"x\";q=0;w=5", "\"x\";q=5;w=0", "10;w=inf"] {
            assert_eq!(quota(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn a_503_is_about_the_rate_only_where_it_says_when_to_come_again() {
        let mut headers = HeaderMap::new();
        assert!(is_refusal(StatusCode::TOO_MANY_REQUESTS, &headers));
        assert!(!is_refusal(StatusCode::SERVICE_UNAVAILABLE, &headers));
        headers.insert(RETRY_AFTER, "1".parse().unwrap());
        assert!(is_refusal(StatusCode::SERVICE_UNAVAILABLE, &headers) && !is_refusal(StatusCode::OK, &headers));
        headers.insert(PROXY_STATUS, "node; error=destination_unavailable".parse().unwrap());
        assert!(!is_refusal(StatusCode::SERVICE_UNAVAILABLE, &headers));
        assert!(may_repeat(StatusCode::TOO_MANY_REQUESTS, false));
        assert!(!may_repeat(StatusCode::SERVICE_UNAVAILABLE, false));
        assert!(may_repeat(StatusCode::SERVICE_UNAVAILABLE, true));
    }
}

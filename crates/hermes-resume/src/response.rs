//! The head of a response, reduced to the fields that a download needs.
//!
//! In: status and fields. Out: parsed values: the range, the validator of the representation, when to retry. Never: a
//! decision.

use std::time::{Duration, SystemTime};

use http::header::{
    CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, DATE, ETAG, HeaderMap, HeaderName, LAST_MODIFIED, LOCATION,
    RETRY_AFTER, TRANSFER_ENCODING,
};
use http::response::Parts;
use serde::{Deserialize, Serialize};

use crate::digest::{self, Digests};

/// Minimum age of a modification when the response was sent. A younger date is no strong validator, because another
/// change within the same second would be invisible, and clocks may differ (RFC 9110, section 8.8.2.2).
const SETTLED: Duration = Duration::from_secs(60);

/// A strong validator: two representations share it only if they are identical byte for byte.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Validator {
    /// A strong entity tag, with its quotes.
    Etag(String),
    /// A `Last-Modified` date, as the origin writes it.
    Modified(String),
}

impl Validator {
    /// The value for `If-Range`.
    pub fn text(&self) -> &str {
        match self {
            Self::Etag(text) | Self::Modified(text) => text,
        }
    }
}

/// `Content-Range`: a range, and the total length if it is known. A 416 has the total length alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContentRange {
    /// The first and the last byte position, from 0.
    pub bytes: Option<(u64, u64)>,
    /// The total length.
    pub of: Option<u64>,
}

/// The head of a response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseHead {
    /// The HTTP status.
    pub status: u16,
    /// The value of `Content-Length`.
    pub length: Option<u64>,
    /// Only the end of the connection marks the end of the content, so a truncation is invisible.
    pub is_endless: bool,
    /// The range, for partial content.
    pub part: Option<ContentRange>,
    /// The content is multipart, which was not requested and is not supported.
    pub is_multipart: bool,
    /// The strong validator, which identifies other responses with the same representation.
    pub validator: Option<Validator>,
    /// The raw entity tag. A comparison detects changes even if the tag is not a strong validator.
    pub etag: Option<String>,
    /// The raw `Last-Modified` date, for the same purpose.
    pub modified: Option<String>,
    /// The digest of the whole representation (`Repr-Digest`).
    pub digests: Digests,
    /// Wait before a retry.
    pub retry_after: Option<Duration>,
    /// The target of a redirect.
    pub location: Option<String>,
    /// The `Proxy-Status` of a failure (RFC 9209).
    pub proxy_status: Option<String>,
}

impl ResponseHead {
    /// Reads a head that arrived at `now`.
    pub fn read(head: &Parts, now: SystemTime) -> Self {
        let headers = &head.headers;
        let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let etag = text(ETAG);
        let modified = text(LAST_MODIFIED);
        Self {
            status: head.status.as_u16(),
            is_endless: !headers.contains_key(CONTENT_LENGTH) && !headers.contains_key(TRANSFER_ENCODING),
            length: text(CONTENT_LENGTH).and_then(|length| length.parse().ok()),
            part: text(CONTENT_RANGE).as_deref().and_then(content_range),
            is_multipart: text(CONTENT_TYPE)
                .is_some_and(|kind| kind.to_ascii_lowercase().starts_with("multipart/byteranges")),
            validator: validator(etag.as_deref(), modified.as_deref(), headers),
            etag,
            modified,
            digests: Digests::of(headers, &digest::REPR),
            retry_after: text(RETRY_AFTER).and_then(|after| retry_after(&after, date(headers).unwrap_or(now))),
            location: text(LOCATION),
            proxy_status: text(HeaderName::from_static("proxy-status")),
        }
    }

    /// Whether a later attempt may succeed.
    pub fn may_pass(&self) -> bool {
        matches!(self.status, 408 | 425 | 429 | 500 | 502 | 503 | 504)
    }

    /// Whether the response shows that it belongs to another representation than this validator.
    pub fn contradicts(&self, validator: &Validator) -> bool {
        match validator {
            Validator::Etag(ours) => self.etag.as_ref().is_some_and(|theirs| theirs != ours),
            Validator::Modified(ours) => self.modified.as_ref().is_some_and(|theirs| theirs != ours),
        }
    }

    /// Whether a part belongs to the representation with this validator. A 206 contains the entity tag (RFC 9110,
    /// section 15.3.7), but not necessarily the date. A 206 without a tag may come from an origin that ignores
    /// `If-Range`.
    pub fn is_of(&self, validator: &Validator) -> bool {
        !self.contradicts(validator) && (self.etag.is_some() || matches!(validator, Validator::Modified(_)))
    }
}

/// A strong entity tag, or else a date that is old enough.
fn validator(etag: Option<&str>, modified: Option<&str>, headers: &HeaderMap) -> Option<Validator> {
    if let Some(tag) = etag {
        let is_strong = tag.len() >= 2 && tag.starts_with('"') && tag.ends_with('"');
        // A weak tag means that the origin does not guarantee equal bytes; a date would be no better.
        return is_strong.then(|| Validator::Etag(tag.to_owned()));
    }
    let text = modified?;
    let age = date(headers)?.duration_since(httpdate::parse_http_date(text).ok()?).ok()?;
    (age >= SETTLED).then(|| Validator::Modified(text.to_owned()))
}

fn date(headers: &HeaderMap) -> Option<SystemTime> {
    headers.get(DATE)?.to_str().ok().and_then(|text| httpdate::parse_http_date(text).ok())
}

/// Parses seconds, or a date, which counts by the sender's clock.
fn retry_after(text: &str, theirs: SystemTime) -> Option<Duration> {
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text.trim()).ok()?;
    // A date in the past means now.
    Some(date.duration_since(theirs).unwrap_or_default())
}

/// Parses `bytes 0-9/100`, `bytes 0-9/*` or `bytes */100` (RFC 9110, section 14.4). Returns `None` for anything else,
/// and for contradictory numbers.
fn content_range(text: &str) -> Option<ContentRange> {
    let (unit, rest) = text.trim().split_once(' ')?;
    let (range, complete) = rest.trim().split_once('/')?;
    let of = match complete {
        "*" => None,
        digits => Some(number(digits)?),
    };
    let bytes = match range {
        "*" => None,
        range => {
            let (first, last) = range.split_once('-')?;
            let (first, last) = (number(first)?, number(last)?);
            (first <= last && last < u64::MAX && of.is_none_or(|of| last < of)).then_some(())?;
            Some((first, last))
        }
    };
    (unit.eq_ignore_ascii_case("bytes") && (bytes.is_some() || of.is_some())).then_some(ContentRange { bytes, of })
}

/// Accepts digits alone; `parse` would accept a sign as well.
fn number(digits: &str) -> Option<u64> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http::Response;

    use super::*;

    fn head(fields: &[(&str, &str)]) -> ResponseHead {
        let mut response = Response::builder().status(200);
        for (name, value) in fields {
            response = response.header(*name, *value);
        }
        ResponseHead::read(&response.body(()).unwrap().into_parts().0, SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn ranges_are_read_strictly() {
        let whole = |first, last, of| Some(ContentRange { bytes: Some((first, last)), of });
        assert_eq!(content_range("bytes 0-9/100"), whole(0, 9, Some(100)));
        assert_eq!(content_range("Bytes 5-5/*"), whole(5, 5, None));
        assert_eq!(content_range("bytes */100"), Some(ContentRange { bytes: None, of: Some(100) }));
        for bad in [
            "bytes 9-0/100",
            "bytes 0-100/100",
            "bytes +1-2/9",
            "lines 0-1/2",
            "bytes */*",
            "bytes 0-9",
            "0-9/10",
            "bytes 0-18446744073709551615/*",
            "bytes -1/9",
        ] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_what_vouches_for_each_byte_is_a_validator() {
        let date = ("date", "Sun, 06 Nov 1994 08:49:37 GMT");
        let of = |fields: &[(&str, &str)]| head(fields).validator;
        assert_eq!(of(&[("etag", "\"a\"")]), Some(Validator::Etag("\"a\"".into())));
        assert_eq!(of(&[("etag", "W/\"a\"")]), None);
        assert_eq!(of(&[("etag", "W/\"a\""), date, ("last-modified", "Sun, 06 Nov 1994 07:00:00 GMT")]), None);
        assert_eq!(of(&[("etag", "bare")]), None);
        let old = "Sun, 06 Nov 1994 08:48:37 GMT";
        assert_eq!(of(&[date, ("last-modified", old)]), Some(Validator::Modified(old.into())));
        assert_eq!(of(&[date, ("last-modified", "Sun, 06 Nov 1994 08:49:00 GMT")]), None, "too young");
        assert_eq!(of(&[("last-modified", old)]), None, "nothing tells its age");
    }

    #[test]
    fn when_to_come_again_is_seconds_or_a_date_by_their_clock() {
        let date = ("date", "Sun, 06 Nov 1994 08:49:37 GMT");
        let after = |text: &str| head(&[date, ("retry-after", text)]).retry_after;
        assert_eq!(after("120"), Some(Duration::from_secs(120)));
        assert_eq!(after("Sun, 06 Nov 1994 08:50:37 GMT"), Some(Duration::from_secs(60)));
        assert_eq!(after("Sun, 06 Nov 1994 08:00:00 GMT"), Some(Duration::ZERO));
        assert_eq!(after("soon"), None);
        assert_eq!(after("-1"), None);
    }
}

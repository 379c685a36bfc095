//! The head of a response, read for what a download needs of it.
//!
//! In: a status and fields. Out: their meaning as values: which bytes of how many, what identifies the representation,
//! when to come again. Never: a decision.

use std::time::{Duration, SystemTime};

use http::header::{
    CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, DATE, ETAG, HeaderMap, HeaderName, LAST_MODIFIED, LOCATION,
    RETRY_AFTER, TRANSFER_ENCODING,
};
use http::response::Parts;
use serde::{Deserialize, Serialize};

use crate::digest::{self, Digests};

/// How much older than its answer a modification has to be, for nothing to have changed unseen within the same second,
/// by clocks that need not agree (RFC 9110, 8.8.2.2).
const SETTLED: Duration = Duration::from_secs(60);

/// What two representations have in common only if they are the same, byte for byte.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Validator {
    /// A strong entity tag, with its quotes.
    Etag(String),
    /// A date, as the origin writes it.
    Modified(String),
}

impl Validator {
    /// As If-Range has it.
    pub fn text(&self) -> &str {
        match self {
            Self::Etag(text) | Self::Modified(text) => text,
        }
    }
}

/// `Content-Range`: which bytes, of how many where that is known. A 416 has the latter alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The first and the last one, from 0.
    pub bytes: Option<(u64, u64)>,
    /// So many all of them are.
    pub of: Option<u64>,
}

/// What a response's head says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// HTTP's.
    pub status: u16,
    /// What `Content-Length` says.
    pub length: Option<u64>,
    /// Nothing but the connection's end says where its content ends: a cut looks the same.
    pub is_endless: bool,
    /// Which bytes it has, where it is a part.
    pub part: Option<Part>,
    /// Several parts in one: not asked for, and nothing that we read.
    pub is_multipart: bool,
    /// By what another answer is known as of the same.
    pub validator: Option<Validator>,
    /// As it is: for seeing that what was a validator has changed, whatever it is worth now.
    pub etag: Option<String>,
    /// `Last-Modified`, for the same.
    pub modified: Option<String>,
    /// Of the whole representation (`Repr-Digest`).
    pub digests: Digests,
    /// When to come again.
    pub retry_after: Option<Duration>,
    /// Where it is to be had instead.
    pub location: Option<String>,
    /// What a proxy says of a failure (RFC 9209).
    pub proxy_status: Option<String>,
}

impl Answer {
    /// Reads a head that came at this time.
    pub fn read(head: &Parts, now: SystemTime) -> Self {
        let headers = &head.headers;
        let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let etag = text(ETAG);
        let modified = text(LAST_MODIFIED);
        Self {
            status: head.status.as_u16(),
            is_endless: !headers.contains_key(CONTENT_LENGTH) && !headers.contains_key(TRANSFER_ENCODING),
            length: text(CONTENT_LENGTH).and_then(|length| length.parse().ok()),
            part: text(CONTENT_RANGE).as_deref().and_then(part),
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

    /// Whether another time the answer may be another.
    pub fn may_pass(&self) -> bool {
        matches!(self.status, 408 | 425 | 429 | 500 | 502 | 503 | 504)
    }

    /// Whether it is of another representation than the one that has this validator, as far as it tells.
    pub fn contradicts(&self, validator: &Validator) -> bool {
        match validator {
            Validator::Etag(ours) => self.etag.as_ref().is_some_and(|theirs| theirs != ours),
            Validator::Modified(ours) => self.modified.as_ref().is_some_and(|theirs| theirs != ours),
        }
    }

    /// Whether a part is of the representation that has this validator. A part says its tag (RFC 9110, section 15.3.7),
    /// but not when it was modified: who does not may never have looked at what it was asked for.
    pub fn is_of(&self, validator: &Validator) -> bool {
        !self.contradicts(validator) && (self.etag.is_some() || matches!(validator, Validator::Modified(_)))
    }
}

/// A tag that is not weak, else a date that has settled.
fn validator(etag: Option<&str>, modified: Option<&str>, headers: &HeaderMap) -> Option<Validator> {
    if let Some(tag) = etag {
        let is_strong = tag.len() >= 2 && tag.starts_with('"') && tag.ends_with('"');
        // A weak one says that the origin itself does not vouch for each byte: the date is worth no more.
        return is_strong.then(|| Validator::Etag(tag.to_owned()));
    }
    let text = modified?;
    let age = date(headers)?.duration_since(httpdate::parse_http_date(text).ok()?).ok()?;
    (age >= SETTLED).then(|| Validator::Modified(text.to_owned()))
}

fn date(headers: &HeaderMap) -> Option<SystemTime> {
    headers.get(DATE)?.to_str().ok().and_then(|text| httpdate::parse_http_date(text).ok())
}

/// Seconds, or a date by the clock of whoever wrote it.
fn retry_after(text: &str, theirs: SystemTime) -> Option<Duration> {
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text.trim()).ok()?;
    // A time that is over says: now.
    Some(date.duration_since(theirs).unwrap_or_default())
}

/// `bytes 0-9/100`, `bytes 0-9/*` or `bytes */100` (RFC 9110, 14.4). `None` for anything else, so that what contradicts
/// itself is no range.
fn part(text: &str) -> Option<Part> {
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
    (unit.eq_ignore_ascii_case("bytes") && (bytes.is_some() || of.is_some())).then_some(Part { bytes, of })
}

/// Digits alone: `parse` would take a sign.
fn number(digits: &str) -> Option<u64> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http::Response;

    use super::*;

    fn head(fields: &[(&str, &str)]) -> Answer {
        let mut response = Response::builder().status(200);
        for (name, value) in fields {
            response = response.header(*name, *value);
        }
        Answer::read(&response.body(()).unwrap().into_parts().0, SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn ranges_are_read_strictly() {
        let whole = |first, last, of| Some(Part { bytes: Some((first, last)), of });
        assert_eq!(part("bytes 0-9/100"), whole(0, 9, Some(100)));
        assert_eq!(part("Bytes 5-5/*"), whole(5, 5, None));
        assert_eq!(part("bytes */100"), Some(Part { bytes: None, of: Some(100) }));
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
            assert_eq!(part(bad), None, "{bad}");
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

//! Validation of stored responses, and conditional requests of clients (RFC 9110, section 13; RFC 9111, section 4.3).
//!
//! In: a stored head, the conditions of a request, an origin's response. Out: the fields of a validation request,
//! whether a 304 answers a client, and the updated head. Pure.

use http::header::{
    AGE, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, DATE, ETAG, HeaderName, IF_MODIFIED_SINCE, IF_NONE_MATCH,
    IF_RANGE, LAST_MODIFIED, VARY,
};
use http::{HeaderMap, HeaderValue};

use super::head::{Head, Times, instant, seconds_of_date, strong_etag};

/// `Content-MD5`, which clients still send although RFC 7231 removed it.
pub const CONTENT_MD5: HeaderName = HeaderName::from_static("content-md5");
/// `Content-Digest` (RFC 9530).
pub const CONTENT_DIGEST: HeaderName = HeaderName::from_static("content-digest");

/// The preconditions that a cache evaluates itself: `If-None-Match`, `If-Modified-Since` and `If-Range` (RFC 9110,
/// section 13.1).
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    none_match: Vec<HeaderValue>,
    modified_since: Option<HeaderValue>,
    range: Option<HeaderValue>,
}

impl Conditions {
    /// Reads the preconditions from the fields of a request.
    pub fn of(headers: &HeaderMap) -> Self {
        Self {
            none_match: headers.get_all(IF_NONE_MATCH).iter().cloned().collect(),
            modified_since: headers.get(IF_MODIFIED_SINCE).cloned(),
            range: headers.get(IF_RANGE).cloned(),
        }
    }

    /// Whether the request has `If-None-Match` or `If-Modified-Since`.
    pub fn are_there(&self) -> bool {
        !self.none_match.is_empty() || self.modified_since.is_some()
    }

    /// Whether the client already has the representation that a response with these fields carries, so that the response
    /// is 304.
    pub fn are_met(&self, response: &HeaderMap) -> bool {
        if !self.none_match.is_empty() {
            let tag = response.get(ETAG);
            return self.none_match.iter().any(|line| {
                line.as_bytes().trim_ascii() == b"*"
                    || tag.is_some_and(|tag| tags(line.as_bytes()).any(|known| opaque(known) == opaque(tag.as_bytes())))
            });
        }
        let Some(since) = self.modified_since.as_ref().and_then(seconds_of_date) else { return false };
        // Without `Last-Modified`, `Date` is compared, because the representation changed no later than that.
        match instant(response, &LAST_MODIFIED) {
            Some(changed) => changed <= since,
            None => instant(response, &DATE).is_some_and(|sent| sent <= since),
        }
    }

    /// Whether the client may receive a 206: `If-Range` is absent, or its validator matches the response with these
    /// fields (RFC 9110, section 13.1.5).
    pub fn want_part(&self, response: &HeaderMap) -> bool {
        let Some(of) = &self.range else { return true };
        if of.as_bytes().starts_with(b"\"") {
            return strong_etag(response) == Some(of);
        }
        // A date is a strong validator only if `Date` is at least a second later than it (RFC 9110, section 8.8.2.2).
        let is_strong = || {
            let changed = instant(response, &LAST_MODIFIED);
            changed.zip(instant(response, &DATE)).is_some_and(|(changed, sent)| changed < sent)
        };
        response.get(LAST_MODIFIED) == Some(of) && is_strong()
    }
}

/// Splits a list of entity tags; a tag may contain a comma.
fn tags(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = list;
    std::iter::from_fn(move || {
        rest = rest.trim_ascii_start();
        while let Some(behind) = rest.strip_prefix(b",") {
            rest = behind.trim_ascii_start();
        }
        if rest.is_empty() {
            return None;
        }
        let opening = if rest.starts_with(b"W/\"") { 3 } else { usize::from(rest.starts_with(b"\"")) };
        let end = if opening > 0 {
            rest[opening..].iter().position(|byte| *byte == b'"').map_or(rest.len(), |at| opening + at + 1)
        } else {
            rest.iter().position(|byte| *byte == b',').unwrap_or(rest.len())
        };
        let (tag, behind) = rest.split_at(end);
        rest = behind;
        Some(tag.trim_ascii_end())
    })
}

/// Returns an entity tag without `W/`, because weak comparison ignores that prefix (RFC 9110, section 8.8.3.2).
fn opaque(tag: &[u8]) -> &[u8] {
    tag.strip_prefix(b"W/").unwrap_or(tag)
}

/// Returns the conditions of a validation request, made from the validators of a stored response.
pub fn validators(head: &Head) -> Vec<(HeaderName, HeaderValue)> {
    let one = |from: &HeaderName, to: HeaderName| head.headers.get(from).map(|value| (to, value.clone()));
    [one(&ETAG, IF_NONE_MATCH), one(&LAST_MODIFIED, IF_MODIFIED_SINCE)].into_iter().flatten().collect()
}

/// Returns a stored head, updated with the fields `by`. These come from a 304, a 206 that completes the content, or a
/// 200 to a HEAD request. Returns `None` if they describe another representation, or change `Vary`.
pub fn freshened(head: &Head, by: &HeaderMap, times: Times) -> Option<Head> {
    if is_of_another(&head.headers, by) {
        return None;
    }
    // A changed `Vary` changes the requests that the response may serve.
    if by.contains_key(VARY) && !head.vary.is_of(by) {
        return None;
    }
    let mut headers = head.headers.clone();
    // These fields describe the previous response.
    headers.remove(AGE);
    headers.remove(DATE);
    for name in by.keys() {
        // Fields that describe the content stay, because the content does not change (RFC 9111, section 3.2).
        if [CONTENT_LENGTH, CONTENT_ENCODING, CONTENT_RANGE, CONTENT_MD5, CONTENT_DIGEST, ETAG].contains(name) {
            continue;
        }
        headers.remove(name);
        for value in by.get_all(name) {
            headers.append(name, value.clone());
        }
    }
    if !headers.contains_key(DATE) {
        headers.insert(DATE, super::head::date(times.came));
    }
    let mut fresh = Head::again(head.status, head.version, headers, head.vary.clone(), times, head.shared);
    fresh.strip();
    Some(fresh)
}

/// Whether a response with the fields `by` describes another representation than the stored fields `own` (RFC 9111,
/// section 4.3.4). Entity tags are compared, or `Last-Modified` if there is no entity tag. If only `by` has an entity
/// tag and it is strong, it names another representation unless `Last-Modified` is the same.
fn is_of_another(own: &HeaderMap, by: &HeaderMap) -> bool {
    let tags = (own.get(ETAG), by.get(ETAG));
    match tags {
        (Some(own), Some(tag)) if strong_etag(by).is_none() => opaque(own.as_bytes()) != opaque(tag.as_bytes()),
        (Some(own), Some(tag)) => own != tag,
        (None, Some(_)) if strong_etag(by).is_some() && own.get(LAST_MODIFIED) != by.get(LAST_MODIFIED) => true,
        (None, _) => matches!((own.get(LAST_MODIFIED), by.get(LAST_MODIFIED)), (Some(own), Some(date)) if own != date),
        (Some(_), None) => false,
    }
}

/// Removes the fields that a 304 omits: those that describe the content, and `Last-Modified` beside an entity tag (RFC
/// 9110, section 15.4.5).
pub fn not_modified(headers: &mut HeaderMap) {
    let has_tag = headers.contains_key(ETAG);
    let names: Vec<HeaderName> = headers.keys().cloned().collect();
    for name in names {
        let is_of_content = name.as_str().starts_with("content-") && name != http::header::CONTENT_LOCATION;
        let is_policy = name.as_str() == "content-security-policy";
        if (is_of_content && !is_policy) || (has_tag && name == LAST_MODIFIED) {
            headers.remove(name);
        }
    }
}

#[cfg(test)]
mod tests;

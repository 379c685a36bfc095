//! Asking whether a kept response still holds, and being asked (RFC 9110, 13; RFC 9111, 4.3).
//!
//! In: a kept head, a request's conditions, what an origin said of it. Out: the fields that ask, whether a client has
//! what it would get, and the head as it is now. Pure.

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

/// The fields of a request that a cache answers by itself.
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    none_match: Vec<HeaderValue>,
    modified_since: Option<HeaderValue>,
    range: Option<HeaderValue>,
}

impl Conditions {
    /// The conditions of a request.
    pub fn of(headers: &HeaderMap) -> Self {
        Self {
            none_match: headers.get_all(IF_NONE_MATCH).iter().cloned().collect(),
            modified_since: headers.get(IF_MODIFIED_SINCE).cloned(),
            range: headers.get(IF_RANGE).cloned(),
        }
    }

    /// The client wants something only if it has not got it.
    pub fn are_there(&self) -> bool {
        !self.none_match.is_empty() || self.modified_since.is_some()
    }

    /// It has it: 304 is the answer.
    pub fn are_met(&self, head: &Head) -> bool {
        if !self.none_match.is_empty() {
            let tag = head.headers.get(ETAG);
            return self.none_match.iter().any(|line| {
                line.as_bytes().trim_ascii() == b"*"
                    || tag.is_some_and(|tag| tags(line.as_bytes()).any(|known| opaque(known) == opaque(tag.as_bytes())))
            });
        }
        let Some(since) = self.modified_since.as_ref().and_then(seconds_of_date) else { return false };
        // Without a date of its own it has changed when it was sent, at the latest; so the client's has to be later.
        match instant(&head.headers, &LAST_MODIFIED) {
            Some(changed) => changed <= since,
            None => instant(&head.headers, &DATE).is_some_and(|sent| sent <= since),
        }
    }

    /// A part is wanted of this one, or the whole of another one (RFC 9110, 13.1.5).
    pub fn want_part(&self, head: &Head) -> bool {
        let Some(of) = &self.range else { return true };
        if of.as_bytes().starts_with(b"\"") {
            return head.strong_etag() == Some(of);
        }
        // A date says which one it is where a second had passed before it was sent.
        let is_strong = || {
            let changed = instant(&head.headers, &LAST_MODIFIED);
            changed.zip(instant(&head.headers, &DATE)).is_some_and(|(changed, sent)| changed < sent)
        };
        head.headers.get(LAST_MODIFIED) == Some(of) && is_strong()
    }
}

/// Entity tags of a list; a comma may stand within one.
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

/// Weak comparison looks at this alone.
fn opaque(tag: &[u8]) -> &[u8] {
    tag.strip_prefix(b"W/").unwrap_or(tag)
}

/// Fields that ask whether it still holds.
pub fn validators(head: &Head) -> Vec<(HeaderName, HeaderValue)> {
    let one = |from: &HeaderName, to: HeaderName| head.headers.get(from).map(|value| (to, value.clone()));
    [one(&ETAG, IF_NONE_MATCH), one(&LAST_MODIFIED, IF_MODIFIED_SINCE)].into_iter().flatten().collect()
}

/// The head as an origin says that it is now: of a 304, a 206 that completes it, or a 200 to HEAD. `None` where what it
/// says is of another representation.
pub fn freshened(head: &Head, by: &HeaderMap, times: Times) -> Option<Head> {
    if is_of_another(&head.headers, by) {
        return None;
    }
    // Who may be given it hangs on other fields than it was kept by.
    if by.contains_key(VARY) && !head.vary.is_of(by) {
        return None;
    }
    let mut headers = head.headers.clone();
    // They are of the response that came before.
    headers.remove(AGE);
    headers.remove(DATE);
    for name in by.keys() {
        // What the content is like does not change without it (RFC 9111, 3.2).
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

/// What is said names another representation (RFC 9111, 4.3.4): by its tag, or without one by its date. A strong tag
/// that was not asked by names one that is not known.
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

/// What a 304 says of what the client has: which one it is, and how long it holds.
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

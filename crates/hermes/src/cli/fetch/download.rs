//! The state of a download: the bytes held, the representation they belong to, the next request, and the meaning of a
//! response.
//!
//! In: heads of responses, numbers of bytes, digests. Out: the next request's range, and how to handle the content.
//! Pure: no sockets, no files, no clock.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::digest::Digests;
use super::remedy;
use super::response::{ContentRange, ResponseHead, Validator};

/// Maximum number of digest mismatches. A first mismatch may be the fault of the path or of combined ranges.
const MISMATCHES: u32 = 2;

/// The next request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RangeRequest {
    Whole,
    /// A range from this byte, conditional on the representation if a validator exists.
    From(u64, Option<Validator>),
}

/// The meaning of a response.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// The response's content is new data.
    Content(Take),
    /// All data is already held.
    Whole,
    /// A retry may give another response.
    Later { why: String, after: Option<Duration> },
    /// The data held is useless; request all of it at once.
    Anew(&'static str),
    /// The object is at another URL.
    Elsewhere(String),
    /// A retry cannot help.
    Never { why: String, remedy: &'static str },
}

/// Handling of a response's content.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Take {
    /// Discard the data held first, for this reason.
    pub(super) anew: Option<&'static str>,
    /// Number of bytes at the beginning that are already held.
    pub(super) skip: u64,
    /// Compare the skipped bytes, since nothing proves that they are equal.
    pub(super) compare: bool,
    /// Length of the content, including the skipped bytes.
    pub(super) length: Option<u64>,
}

/// The meaning of an orderly end of content.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The object is complete.
    Whole,
    /// The content was a range; more follows.
    More,
}

/// The verdict on a complete download.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Good,
    /// Start again.
    Again,
    /// The content does not match its digest.
    Bad,
}

/// State of a download that a later run needs too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Known {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) validator: Option<Validator>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) total: Option<u64>,
    /// Digests of the object that the origin announced.
    #[serde(default, skip_serializing_if = "Digests::is_empty")]
    pub(super) digests: Digests,
}

/// A download.
#[derive(Debug)]
pub(super) struct Download {
    held: u64,
    known: Known,
    /// Digests that the user demands.
    demanded: Digests,
    /// True for a pipe: written data cannot be taken back.
    is_final: bool,
    /// Request no ranges until a complete response was interrupted too.
    whole_only: bool,
    /// True if the data held came from several responses.
    is_pieced: bool,
    /// True if only the end of the connection delimits the current content.
    is_endless: bool,
    /// Number of bytes held when such a content ended and a further range was requested.
    doubted: Option<u64>,
    mismatches: u32,
}

impl Download {
    pub(super) fn new(demanded: Digests, is_final: bool) -> Self {
        let known = Known::default();
        Self {
            held: 0,
            known,
            demanded,
            is_final,
            whole_only: false,
            is_pieced: false,
            is_endless: false,
            doubted: None,
            mismatches: 0,
        }
    }

    /// Continues an earlier run.
    pub(super) fn resume(&mut self, held: u64, known: Known) {
        self.held = held;
        self.known = known;
        self.is_pieced = true;
    }

    pub(super) fn held(&self) -> u64 {
        self.held
    }

    pub(super) fn known(&self) -> &Known {
        &self.known
    }

    /// Returns all expected digests.
    pub(super) fn expected(&self) -> Digests {
        let mut all = self.demanded.clone();
        all.join(&self.known.digests);
        all
    }

    /// Returns the next request.
    pub(super) fn range_request(&self) -> RangeRequest {
        if self.held == 0 || self.whole_only {
            return RangeRequest::Whole;
        }
        // A range after the last byte yields 416, which does not tell whether the representation has changed.
        let from = if self.known.total == Some(self.held) { self.held - 1 } else { self.held };
        match &self.known.validator {
            Some(validator) => RangeRequest::From(from, Some(validator.clone())),
            // The digest detects ranges of two different representations.
            None if !self.expected().is_empty() => RangeRequest::From(from, None),
            None => RangeRequest::Whole,
        }
    }

    /// Interprets the response to a request. Discards data that the response proves wrong.
    pub(super) fn read(&mut self, ask: &RangeRequest, answer: &ResponseHead) -> Meaning {
        match answer.status {
            200 | 203 => Meaning::Content(self.whole(answer)),
            206 => match ask {
                RangeRequest::Whole => self.unasked(answer),
                RangeRequest::From(..) => self.handle_range(answer),
            },
            416 if *ask != RangeRequest::Whole => self.beyond(answer),
            301 | 302 | 303 | 307 | 308 if answer.location.is_some() => {
                Meaning::Elsewhere(answer.location.clone().unwrap_or_default())
            }
            _ if answer.may_pass() => Meaning::Later { why: remedy::said(answer), after: answer.retry_after },
            status => Meaning::Never { why: remedy::said(answer), remedy: remedy::of(status) },
        }
    }

    /// Handles a complete response.
    fn whole(&mut self, answer: &ResponseHead) -> Take {
        self.is_endless = answer.is_endless;
        let is_same = self.held > 0
            && self.known.validator.is_some()
            && self.known.validator == answer.validator
            && !self.known.digests.contradicts(&answer.digests)
            && answer.length.is_none_or(|length| self.known.total.map_or(length >= self.held, |total| total == length));
        if is_same {
            // The origin ignores ranges. The data held stays valid if this response is interrupted earlier.
            self.known.total = self.known.total.or(answer.length);
            self.is_pieced = true;
            return Take { skip: self.held, length: answer.length, ..Take::default() };
        }
        let anew = match (self.held, &self.known.validator) {
            (0, _) => None,
            (_, None) => Some("the response has no validator"),
            (_, Some(_)) => Some("the object changed at the origin"),
        };
        self.known =
            Known { validator: answer.validator.clone(), total: answer.length, digests: answer.digests.clone() };
        if self.is_final {
            // A comparison shows whether the pipe's reader received the same data.
            return Take { skip: self.held, compare: self.held > 0, length: answer.length, anew: None };
        }
        self.forget();
        Take { anew, length: answer.length, ..Take::default() }
    }

    /// Handles a requested range.
    fn handle_range(&mut self, answer: &ResponseHead) -> Meaning {
        let Some(ContentRange { bytes: Some((first, last)), of }) = answer.part.filter(|_| !answer.is_multipart) else {
            return self.lied("the partial response has no valid Content-Range");
        };
        let length = last - first + 1;
        if answer.length.is_some_and(|said| said != length) {
            return self.lied("the length of the partial response differs from its Content-Range");
        }
        if self.known.validator.as_ref().is_some_and(|ours| answer.contradicts(ours))
            || self.known.digests.contradicts(&answer.digests)
            || matches!((self.known.total, of), (Some(ours), Some(theirs)) if ours != theirs)
        {
            return self.changed();
        }
        if self.known.validator.as_ref().is_some_and(|ours| !answer.is_of(ours)) {
            return self.lied("the partial response has no validator");
        }
        let is_at_end = of.or(self.known.total) == Some(self.held);
        if first > self.held || last + 1 < self.held || (last + 1 == self.held && !is_at_end) {
            return self.lied("the partial response has a range that was not requested");
        }
        self.known.total = self.known.total.or(of);
        self.known.digests.join(&answer.digests);
        self.is_pieced = true;
        Meaning::Content(Take { skip: self.held - first, length: Some(length), ..Take::default() })
    }

    /// Handles a range that was not requested; it is valid if it covers the whole object.
    fn unasked(&mut self, answer: &ResponseHead) -> Meaning {
        match answer.part {
            Some(ContentRange { bytes: Some((0, last)), of: Some(of) }) if last + 1 == of && !answer.is_multipart => {
                let length = answer.length.or(Some(of));
                Meaning::Content(self.whole(&ResponseHead { length, ..answer.clone() }))
            }
            _ => self.lied("partial response to a request for the whole object"),
        }
    }

    /// Handles a range that does not exist.
    fn beyond(&mut self, answer: &ResponseHead) -> Meaning {
        let of = answer.part.and_then(|part| part.of);
        let is_other = self.known.validator.as_ref().is_some_and(|ours| answer.contradicts(ours));
        if of == Some(self.held) && !is_other && self.known.total.is_none_or(|total| total == self.held) {
            self.known.total = of;
            return Meaning::Whole;
        }
        self.changed()
    }

    fn changed(&mut self) -> Meaning {
        self.give_up();
        Meaning::Anew("the object changed at the origin")
    }

    /// Requests the whole object next time: the data held may be right.
    fn lied(&mut self, why: &str) -> Meaning {
        self.whole_only = true;
        Meaning::Later { why: why.to_owned(), after: None }
    }

    /// Counts bytes that were stored.
    pub(super) fn took(&mut self, bytes: usize) {
        self.held += bytes as u64;
    }

    /// Handles the orderly end of content.
    ///
    /// # Errors
    /// The content was shorter than announced.
    pub(super) fn ended(&mut self, status: u16) -> Result<End, String> {
        match self.known.total {
            Some(total) if self.held == total => Ok(End::Whole),
            Some(total) if status == 206 && self.held < total => Ok(End::More),
            Some(total) => Err(format!("the response ended after {} of {total} bytes", self.held)),
            None if status == 206 => Ok(End::More),
            // The content may have been truncated. A request for the next byte tells, once for each end.
            None if self.is_endless && self.known.validator.is_some() && self.doubted != Some(self.held) => {
                self.doubted = Some(self.held);
                Ok(End::More)
            }
            None => {
                self.known.total = Some(self.held);
                Ok(End::Whole)
            }
        }
    }

    /// Handles interrupted content.
    pub(super) fn broke(&mut self) {
        self.whole_only = false;
    }

    /// Verifies the complete object. After [`Verdict::Again`] no data is held.
    pub(super) fn verify(&mut self, found: &Digests) -> Verdict {
        if !self.expected().contradicts(found) {
            return Verdict::Good;
        }
        self.failed_digest()
    }

    /// Handles a response whose content does not match its digest.
    pub(super) fn failed_digest(&mut self) -> Verdict {
        self.mismatches += 1;
        if self.is_final || self.mismatches >= MISMATCHES {
            return Verdict::Bad;
        }
        let was_pieced = self.is_pieced;
        self.give_up();
        // The ranges may not belong together.
        self.whole_only = was_pieced;
        Verdict::Again
    }

    /// Discards all data and state, except for what a pipe has received.
    fn give_up(&mut self) {
        self.known = Known::default();
        if self.is_final {
            self.whole_only = true;
        } else {
            self.forget();
        }
    }

    fn forget(&mut self) {
        self.held = 0;
        self.is_pieced = false;
    }
}

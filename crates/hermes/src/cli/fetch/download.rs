//! The state of a download: what is held of which representation, what to ask next, what an answer means.
//!
//! In: heads of responses, counts of bytes, digests. Out: the next request's range, and what to do with what comes. Pure:
//! neither sockets, nor files, nor time.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::digest::Digests;
use super::remedy;
use super::response::{Answer, Part, Validator};

/// How often content may fail its digest before nobody believes in it: once may be the path's or the pieces' fault.
const MISMATCHES: u32 = 2;

/// What is to be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Whole,
    /// From this byte on; if the representation is still this one, where that can be said.
    From(u64, Option<Validator>),
}

/// What a response means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// Its content is to be taken.
    Content(Take),
    /// All was held already.
    Whole,
    /// Another time the answer may be another.
    Later { why: String, after: Option<Duration> },
    /// What is held is worth nothing; ask again at once.
    Anew(&'static str),
    /// It is to be had there.
    Elsewhere(String),
    /// It will not change by itself.
    Never { why: String, remedy: &'static str },
}

/// How to take a response's content.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Take {
    /// What is held goes first, for this reason.
    pub(super) anew: Option<&'static str>,
    /// So many bytes are held already.
    pub(super) skip: u64,
    /// Nothing proves that those are the same: compare.
    pub(super) compare: bool,
    /// So many come, with those.
    pub(super) length: Option<u64>,
}

/// What the orderly end of a content means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Nothing is missing.
    Whole,
    /// It was a part.
    More,
}

/// What a finished download is worth.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Good,
    /// Begin anew.
    Again,
    /// It is not what it should be.
    Bad,
}

/// What is known of what is held: what a later run has to know as well.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Known {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) validator: Option<Validator>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) total: Option<u64>,
    /// What the origin says that all must come to.
    #[serde(default, skip_serializing_if = "Digests::is_empty")]
    pub(super) digests: Digests,
}

/// A download.
#[derive(Debug)]
pub(super) struct Download {
    held: u64,
    known: Known,
    /// What the user says that all must come to.
    demanded: Digests,
    /// What was held cannot be taken back: it was written to a pipe.
    is_final: bool,
    /// Ask for no ranges, until a whole answer has broken off too.
    whole_only: bool,
    /// What is held came in more than one answer.
    is_pieced: bool,
    /// Only the connection's end says where the content that comes ends.
    is_endless: bool,
    /// So much was held when such a content ended, and whether there is more was asked for.
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

    /// Goes on where an earlier run was.
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

    /// All that it must come to.
    pub(super) fn expected(&self) -> Digests {
        let mut all = self.demanded.clone();
        all.join(&self.known.digests);
        all
    }

    /// The next request.
    pub(super) fn ask(&self) -> Ask {
        if self.held == 0 || self.whole_only {
            return Ask::Whole;
        }
        // A range behind the last byte would be refused with 416, which does not say whether the rest is still the same.
        let from = if self.known.total == Some(self.held) { self.held - 1 } else { self.held };
        match &self.known.validator {
            Some(validator) => Ask::From(from, Some(validator.clone())),
            // Pieces of two representations would be found out in the end.
            None if !self.expected().is_empty() => Ask::From(from, None),
            None => Ask::Whole,
        }
    }

    /// What the answer to that request means. Of what is held it forgets what the answer proves wrong.
    pub(super) fn read(&mut self, ask: &Ask, answer: &Answer) -> Meaning {
        match answer.status {
            200 | 203 => Meaning::Content(self.whole(answer)),
            206 => match ask {
                Ask::Whole => self.unasked(answer),
                Ask::From(..) => self.part(answer),
            },
            416 if *ask != Ask::Whole => self.beyond(answer),
            301 | 302 | 303 | 307 | 308 if answer.location.is_some() => {
                Meaning::Elsewhere(answer.location.clone().unwrap_or_default())
            }
            _ if answer.may_pass() => Meaning::Later { why: remedy::said(answer), after: answer.retry_after },
            status => Meaning::Never { why: remedy::said(answer), remedy: remedy::of(status) },
        }
    }

    /// All of it.
    fn whole(&mut self, answer: &Answer) -> Take {
        self.is_endless = answer.is_endless;
        let is_same = self.held > 0
            && self.known.validator.is_some()
            && self.known.validator == answer.validator
            && !self.known.digests.contradicts(&answer.digests)
            && answer.length.is_none_or(|length| self.known.total.map_or(length >= self.held, |total| total == length));
        if is_same {
            // Ranges are ignored, and what is held remains what it is should this break off earlier.
            self.known.total = self.known.total.or(answer.length);
            self.is_pieced = true;
            return Take { skip: self.held, length: answer.length, ..Take::default() };
        }
        let anew = match (self.held, &self.known.validator) {
            (0, _) => None,
            (_, None) => Some("nothing tells whether it is still the same"),
            (_, Some(_)) => Some("it changed at the origin"),
        };
        self.known =
            Known { validator: answer.validator.clone(), total: answer.length, digests: answer.digests.clone() };
        if self.is_final {
            // Whether the reader has got the same is found by comparing it.
            return Take { skip: self.held, compare: self.held > 0, length: answer.length, anew: None };
        }
        self.forget();
        Take { anew, length: answer.length, ..Take::default() }
    }

    /// A part that was asked for.
    fn part(&mut self, answer: &Answer) -> Meaning {
        let Some(Part { bytes: Some((first, last)), of }) = answer.part.filter(|_| !answer.is_multipart) else {
            return self.lied("it answers with a part, and does not say which");
        };
        let length = last - first + 1;
        if answer.length.is_some_and(|said| said != length) {
            return self.lied("its answer has another length than the range that it says");
        }
        if self.known.validator.as_ref().is_some_and(|ours| answer.contradicts(ours))
            || self.known.digests.contradicts(&answer.digests)
            || matches!((self.known.total, of), (Some(ours), Some(theirs)) if ours != theirs)
        {
            return self.changed();
        }
        if self.known.validator.as_ref().is_some_and(|ours| !answer.is_of(ours)) {
            return self.lied("it answers with a part, and does not say of what");
        }
        let is_at_end = of.or(self.known.total) == Some(self.held);
        if first > self.held || last + 1 < self.held || (last + 1 == self.held && !is_at_end) {
            return self.lied("it answers with another range than it was asked for");
        }
        self.known.total = self.known.total.or(of);
        self.known.digests.join(&answer.digests);
        self.is_pieced = true;
        Meaning::Content(Take { skip: self.held - first, length: Some(length), ..Take::default() })
    }

    /// A part that nobody asked for: fine where it is all.
    fn unasked(&mut self, answer: &Answer) -> Meaning {
        match answer.part {
            Some(Part { bytes: Some((0, last)), of: Some(of) }) if last + 1 == of && !answer.is_multipart => {
                let length = answer.length.or(Some(of));
                Meaning::Content(self.whole(&Answer { length, ..answer.clone() }))
            }
            _ => self.lied("it answers with a part where all was asked for"),
        }
    }

    /// The range that was asked for is not there.
    fn beyond(&mut self, answer: &Answer) -> Meaning {
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
        Meaning::Anew("it changed at the origin")
    }

    /// It is asked for all the next time: what is held may be right.
    fn lied(&mut self, why: &str) -> Meaning {
        self.whole_only = true;
        Meaning::Later { why: why.to_owned(), after: None }
    }

    /// So many bytes came, and are held.
    pub(super) fn took(&mut self, bytes: usize) {
        self.held += bytes as u64;
    }

    /// A content came to its orderly end.
    ///
    /// # Errors
    /// It was shorter than the whole.
    pub(super) fn ended(&mut self, status: u16) -> Result<End, String> {
        match self.known.total {
            Some(total) if self.held == total => Ok(End::Whole),
            Some(total) if status == 206 && self.held < total => Ok(End::More),
            Some(total) => Err(format!("it ended after {} of {total} bytes", self.held)),
            None if status == 206 => Ok(End::More),
            // It may have been cut. Where the origin can be asked for what is behind that, it says so; once for each end.
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

    /// A content broke off.
    pub(super) fn broke(&mut self) {
        self.whole_only = false;
    }

    /// Judges all of it. After [`Verdict::Again`] nothing is held.
    pub(super) fn judge(&mut self, found: &Digests) -> Verdict {
        if !self.expected().contradicts(found) {
            return Verdict::Good;
        }
        self.failed_digest()
    }

    /// The content of one answer was not what the answer said.
    pub(super) fn failed_digest(&mut self) -> Verdict {
        self.mismatches += 1;
        if self.is_final || self.mismatches >= MISMATCHES {
            return Verdict::Bad;
        }
        let was_pieced = self.is_pieced;
        self.give_up();
        // It may be that the pieces do not fit together.
        self.whole_only = was_pieced;
        Verdict::Again
    }

    /// Nothing is held any more, and nothing known, but for what cannot be taken back.
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

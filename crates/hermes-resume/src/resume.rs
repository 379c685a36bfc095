//! The state of an interrupted response, and the request for the rest.
//!
//! In: heads of responses, counts of received bytes. Out: the fields of the next request, and an assessment of its
//! response. Pure.

use std::time::Duration;

use http::HeaderValue;

use crate::response::{ContentRange, ResponseHead, Validator};

/// A response that can be continued at any byte.
#[derive(Debug, PartialEq, Eq)]
pub struct Resumable {
    validator: Validator,
    /// Offset of the next byte in the representation.
    at: u64,
    /// End offset of the wanted range; `None` if only the end of the response tells.
    end: Option<u64>,
    /// The client requested a part, so only that part is requested.
    is_part: bool,
    total: Option<u64>,
    /// The present response is a part with unknown total length, so its end is not the end of the representation.
    is_amid: bool,
}

/// The assessment of a response to the request for the rest.
#[derive(Debug, PartialEq, Eq)]
pub enum ResumeOutcome {
    /// The response continues the content after this number of its bytes.
    Behind(u64),
    /// The content was complete already.
    Nothing,
    /// Retry later.
    Later(Option<Duration>),
    /// The content cannot be continued.
    Never(&'static str),
}

impl Resumable {
    /// Returns `None` if the response has no validator that identifies later responses of the same representation.
    pub fn of(answer: &ResponseHead) -> Option<Self> {
        let validator = answer.validator.clone()?;
        match (answer.status, answer.part) {
            (200 | 203, _) => Some(Self {
                validator,
                at: 0,
                end: answer.length,
                is_part: false,
                total: answer.length,
                is_amid: false,
            }),
            (206, Some(ContentRange { bytes: Some((first, last)), of })) if is_one_part(answer, first, last) => {
                Some(Self { validator, at: first, end: Some(last + 1), is_part: true, total: of, is_amid: false })
            }
            _ => None,
        }
    }

    /// The fields that request the rest: `Range` and `If-Range`.
    pub fn fields(&self) -> Option<(HeaderValue, HeaderValue)> {
        let last = self.end.filter(|_| self.is_part).map(|end| (end - 1).to_string()).unwrap_or_default();
        let range = HeaderValue::try_from(format!("bytes={}-{last}", self.at)).ok()?;
        Some((range, HeaderValue::try_from(self.validator.text()).ok()?))
    }

    /// Assesses the response to that request.
    pub fn assess(&mut self, answer: &ResponseHead) -> ResumeOutcome {
        if answer.may_pass() {
            return ResumeOutcome::Later(answer.retry_after);
        }
        let differs =
            |theirs: Option<u64>| matches!((self.total, theirs), (Some(ours), Some(theirs)) if ours != theirs);
        match (answer.status, answer.part) {
            (206, Some(ContentRange { bytes: Some((first, last)), of })) if is_one_part(answer, first, last) => {
                if !answer.is_of(&self.validator) || differs(of) {
                    return ResumeOutcome::Never("the content changed at the origin meanwhile");
                }
                if first > self.at || last < self.at {
                    return ResumeOutcome::Never("the origin returned a range that was not requested");
                }
                // The first response may have had no length.
                self.total = self.total.or(of);
                self.end = self.end.or(of);
                self.is_amid = self.end.is_none();
                ResumeOutcome::Behind(self.at - first)
            }
            // Only the end of the response had been lost.
            (416, Some(ContentRange { bytes: None, of }))
                if of == Some(self.at) && !answer.contradicts(&self.validator) =>
            {
                ResumeOutcome::Nothing
            }
            // The 416 states no length, but there is nothing after the received bytes.
            (416, None) if self.is_amid && !answer.contradicts(&self.validator) => ResumeOutcome::Nothing,
            // The response is the whole representation, because the origin does not support ranges.
            (200 | 203, _) if answer.validator.as_ref() == Some(&self.validator) && !differs(answer.length) => {
                self.end = self.end.or(answer.length);
                self.is_amid = false;
                ResumeOutcome::Behind(self.at)
            }
            (200 | 203 | 412 | 416, _) => ResumeOutcome::Never("the content changed at the origin meanwhile"),
            _ => ResumeOutcome::Never("the origin does not send the rest"),
        }
    }

    /// Whether a response that continues the content has bytes after the wanted range.
    pub fn is_passed_by(&self, answer: &ResponseHead) -> bool {
        let Some(end) = self.end else { return false };
        match answer.part {
            Some(ContentRange { bytes: Some((_, last)), .. }) if answer.status == 206 => last >= end,
            // The whole representation ends with the wanted part, or its length is unknown.
            _ => self.is_part && self.total.or(answer.length) != Some(end),
        }
    }

    /// Whether the content may end here.
    pub fn may_end(&self) -> bool {
        self.missing().map_or(!self.is_amid, |missing| missing == 0)
    }

    /// Number of missing bytes, if it is known.
    pub fn missing(&self) -> Option<u64> {
        self.end.map(|end| end.saturating_sub(self.at))
    }

    /// Records received bytes.
    pub fn took(&mut self, bytes: usize) {
        self.at += bytes as u64;
    }
}

/// Whether the response is a single part of consistent length. The end of an inconsistent one is unknown: under another
/// `Content-Length`, the origin could place bytes of its choice into the next response.
fn is_one_part(answer: &ResponseHead, first: u64, last: u64) -> bool {
    !answer.is_multipart && answer.length.is_none_or(|length| last - first == length.wrapping_sub(1))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::SystemTime;

    use http::Response;

    use super::*;

    fn answer(status: u16, fields: &[(&str, &str)]) -> ResponseHead {
        let mut response = Response::builder().status(status);
        for (name, value) in fields {
            response = response.header(*name, *value);
        }
        ResponseHead::read(&response.body(()).unwrap().into_parts().0, SystemTime::UNIX_EPOCH)
    }

    const TAG: (&str, &str) = ("etag", "\"a\"");

    fn whole() -> Resumable {
        let mut whole = Resumable::of(&answer(200, &[TAG, ("content-length", "100")])).unwrap();
        whole.took(40);
        whole
    }

    fn text(fields: Option<(HeaderValue, HeaderValue)>) -> (String, String) {
        let (range, of) = fields.unwrap();
        (range.to_str().unwrap().to_owned(), of.to_str().unwrap().to_owned())
    }

    #[test]
    fn the_rest_is_asked_for_of_the_same() {
        assert_eq!(text(whole().fields()), ("bytes=40-".into(), "\"a\"".into()));
        assert_eq!(whole().missing(), Some(60));
        let mut part = Resumable::of(&answer(206, &[TAG, ("content-range", "bytes 10-19/100")])).unwrap();
        part.took(4);
        assert_eq!(text(part.fields()), ("bytes=14-19".into(), "\"a\"".into()));
        assert_eq!(part.missing(), Some(6));
    }

    #[test]
    fn what_nothing_vouches_for_is_not_put_together() {
        assert_eq!(Resumable::of(&answer(200, &[("content-length", "100")])), None);
        assert_eq!(Resumable::of(&answer(200, &[("etag", "W/\"a\"")])), None);
        assert_eq!(Resumable::of(&answer(404, &[TAG])), None);
        let parts = [TAG, ("content-range", "bytes 0-9/20"), ("content-type", "multipart/byteranges; boundary=x")];
        assert_eq!(Resumable::of(&answer(206, &parts)), None);
    }

    #[test]
    fn it_goes_on_in_a_part_or_in_the_whole() {
        let mut whole = whole();
        let mut judge = |status, fields: &[(&str, &str)]| whole.assess(&answer(status, fields));
        assert_eq!(judge(206, &[TAG, ("content-range", "bytes 40-99/100")]), ResumeOutcome::Behind(0));
        assert_eq!(judge(206, &[TAG, ("content-range", "bytes 32-63/*")]), ResumeOutcome::Behind(8));
        assert_eq!(judge(200, &[TAG, ("content-length", "100")]), ResumeOutcome::Behind(40));
        assert_eq!(judge(503, &[("retry-after", "3")]), ResumeOutcome::Later(Some(Duration::from_secs(3))));
    }

    #[test]
    fn what_is_wider_than_what_is_wanted_is_known() {
        let part = |range| Resumable::of(&answer(206, &[TAG, ("content-range", range)])).unwrap();
        let answers: [(u16, &[_], [bool; 4]); 5] = [
            (206, &[TAG, ("content-range", "bytes 12-19/100")], [false, true, false, false]),
            (206, &[TAG, ("content-range", "bytes 12-20/100")], [true, true, false, true]),
            (206, &[TAG, ("content-range", "bytes 12-99/100")], [true, true, false, true]),
            (200, &[TAG, ("content-length", "100")], [true, true, false, true]),
            (200, &[TAG], [true, true, false, true]),
        ];
        for (status, fields, is_wider) in answers {
            let answer = answer(status, fields);
            let of = |rest: &Resumable| rest.is_passed_by(&answer);
            let (ten, open) = (part("bytes 10-19/100"), part("bytes 10-19/*"));
            assert_eq!(
                [of(&ten), of(&part("bytes 10-18/100")), of(&whole()), of(&open)],
                is_wider,
                "{status} {fields:?}"
            );
        }
        // The wanted part ends with the representation.
        assert!(!part("bytes 10-99/100").is_passed_by(&answer(200, &[TAG])));
        assert!(!part("bytes 10-99/*").is_passed_by(&answer(200, &[TAG, ("content-length", "100")])));
    }

    #[test]
    fn of_what_has_no_length_the_rest_tells_the_end() {
        let mut endless = Resumable::of(&answer(200, &[TAG])).unwrap();
        endless.took(40);
        assert_eq!(endless.missing(), None);
        assert_eq!(endless.assess(&answer(416, &[("content-range", "bytes */40")])), ResumeOutcome::Nothing);
        assert!(matches!(endless.assess(&answer(416, &[("content-range", "bytes */30")])), ResumeOutcome::Never(_)));
        assert_eq!(endless.assess(&answer(206, &[TAG, ("content-range", "bytes 40-59/60")])), ResumeOutcome::Behind(0));
        assert_eq!(endless.missing(), Some(20));
    }

    #[test]
    fn a_part_of_nobody_knows_how_much_is_not_the_end() {
        let mut endless = Resumable::of(&answer(200, &[TAG])).unwrap();
        endless.took(40);
        assert!(endless.may_end());
        assert_eq!(endless.assess(&answer(206, &[TAG, ("content-range", "bytes 40-59/*")])), ResumeOutcome::Behind(0));
        endless.took(20);
        assert!(!endless.may_end());
        assert_eq!(endless.assess(&answer(416, &[])), ResumeOutcome::Nothing);
        assert_eq!(endless.assess(&answer(206, &[TAG, ("content-range", "bytes 60-69/70")])), ResumeOutcome::Behind(0));
        endless.took(10);
        assert!(endless.may_end());
    }

    #[test]
    fn what_contradicts_itself_is_no_part() {
        for (length, is_part) in [("10", true), ("9", false), ("11", false), ("0", false)] {
            let fields = [TAG, ("content-range", "bytes 0-9/100"), ("content-length", length)];
            assert_eq!(Resumable::of(&answer(206, &fields)).is_some(), is_part, "{length}");
            let fields = [TAG, ("content-range", "bytes 40-49/100"), ("content-length", length)];
            assert_eq!(matches!(whole().assess(&answer(206, &fields)), ResumeOutcome::Behind(0)), is_part, "{length}");
        }
    }

    #[test]
    fn another_one_is_never_its_rest() {
        let mut whole = whole();
        let other = ("etag", "\"b\"");
        for (status, fields) in [
            (206, &[other, ("content-range", "bytes 40-99/100")][..]),
            (206, &[TAG, ("content-range", "bytes 40-89/90")]),
            (206, &[TAG, ("content-range", "bytes 41-99/100")]),
            (206, &[TAG, ("content-range", "bytes 0-39/100")]),
            (206, &[TAG]),
            (206, &[("content-range", "bytes 40-99/100")]),
            (200, &[other, ("content-length", "100")]),
            (200, &[("content-length", "100")]),
            (200, &[TAG, ("content-length", "99")]),
            (416, &[("content-range", "bytes */30")]),
            (404, &[]),
            (302, &[("location", "/elsewhere")]),
        ] {
            assert!(matches!(whole.assess(&answer(status, fields)), ResumeOutcome::Never(_)), "{status} {fields:?}");
        }
    }
}

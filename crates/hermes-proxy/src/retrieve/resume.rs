//! What of a response has come, and how to ask for the rest.
//!
//! In: the heads of its answers, counts of bytes. Out: fields that ask for what is missing, and what an answer to that is
//! worth. Pure.

use std::time::Duration;

use http::HeaderValue;

use super::answer::{Answer, Part, Validator};

/// A response whose content can be had from any byte on.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Resumable {
    validator: Validator,
    /// The next byte of the representation.
    at: u64,
    /// Behind the last one that is wanted. `None`: its end tells.
    end: Option<u64>,
    /// It was asked for in part: no more is asked for than it has.
    is_part: bool,
    total: Option<u64>,
}

/// What an answer for the rest is worth.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// It goes on behind so many bytes of its content.
    Behind(u64),
    /// There is none.
    Nothing,
    /// Another time.
    Later(Option<Duration>),
    /// It cannot go on.
    Never(&'static str),
}

impl Resumable {
    /// `None` where nothing would tell that what comes later is of the same.
    pub(super) fn of(answer: &Answer) -> Option<Self> {
        let validator = answer.validator.clone()?;
        match (answer.status, answer.part) {
            (200 | 203, _) => Some(Self { validator, at: 0, end: answer.length, is_part: false, total: answer.length }),
            (206, Some(Part { bytes: Some((first, last)), of })) if !answer.is_multipart => {
                Some(Self { validator, at: first, end: Some(last + 1), is_part: true, total: of })
            }
            _ => None,
        }
    }

    /// The fields that ask for the rest.
    pub(super) fn fields(&self) -> Option<(HeaderValue, HeaderValue)> {
        let last = self.end.filter(|_| self.is_part).map(|end| (end - 1).to_string()).unwrap_or_default();
        let range = HeaderValue::try_from(format!("bytes={}-{last}", self.at)).ok()?;
        Some((range, HeaderValue::try_from(self.validator.text()).ok()?))
    }

    /// What the answer to them is worth.
    pub(super) fn judge(&mut self, answer: &Answer) -> Rest {
        if answer.may_pass() {
            return Rest::Later(answer.retry_after);
        }
        let differs =
            |theirs: Option<u64>| matches!((self.total, theirs), (Some(ours), Some(theirs)) if ours != theirs);
        match (answer.status, answer.part) {
            (206, Some(Part { bytes: Some((first, last)), of })) if !answer.is_multipart => {
                if answer.contradicts(&self.validator) || differs(of) {
                    return Rest::Never("it changed at the origin meanwhile");
                }
                if first > self.at || last < self.at {
                    return Rest::Never("the origin answers with another range than it was asked for");
                }
                // A first answer without a length did not tell.
                self.total = self.total.or(of);
                self.end = self.end.or(of);
                Rest::Behind(self.at - first)
            }
            // Its end alone had not come.
            (416, Some(Part { bytes: None, of })) if of == Some(self.at) && !answer.contradicts(&self.validator) => {
                Rest::Nothing
            }
            // The whole of it: ranges are not for everybody.
            (200 | 203, _) if answer.validator.as_ref() == Some(&self.validator) && !differs(answer.length) => {
                Rest::Behind(self.at)
            }
            (200 | 203 | 412 | 416, _) => Rest::Never("it changed at the origin meanwhile"),
            _ => Rest::Never("the origin does not give the rest of it"),
        }
    }

    /// Bytes that are missing, where that is known.
    pub(super) fn missing(&self) -> Option<u64> {
        self.end.map(|end| end.saturating_sub(self.at))
    }

    /// So many came.
    pub(super) fn took(&mut self, bytes: usize) {
        self.at += bytes as u64;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::SystemTime;

    use http::Response;

    use super::*;

    fn answer(status: u16, fields: &[(&str, &str)]) -> Answer {
        let mut response = Response::builder().status(status);
        for (name, value) in fields {
            response = response.header(*name, *value);
        }
        Answer::read(&response.body(()).unwrap().into_parts().0, SystemTime::UNIX_EPOCH)
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
        let mut judge = |status, fields: &[(&str, &str)]| whole.judge(&answer(status, fields));
        assert_eq!(judge(206, &[TAG, ("content-range", "bytes 40-99/100")]), Rest::Behind(0));
        assert_eq!(judge(206, &[("content-range", "bytes 32-63/*")]), Rest::Behind(8));
        assert_eq!(judge(200, &[TAG, ("content-length", "100")]), Rest::Behind(40));
        assert_eq!(judge(503, &[("retry-after", "3")]), Rest::Later(Some(Duration::from_secs(3))));
    }

    #[test]
    fn of_what_has_no_length_the_rest_tells_the_end() {
        let mut endless = Resumable::of(&answer(200, &[TAG])).unwrap();
        endless.took(40);
        assert_eq!(endless.missing(), None);
        assert_eq!(endless.judge(&answer(416, &[("content-range", "bytes */40")])), Rest::Nothing);
        assert!(matches!(endless.judge(&answer(416, &[("content-range", "bytes */30")])), Rest::Never(_)));
        assert_eq!(endless.judge(&answer(206, &[("content-range", "bytes 40-59/60")])), Rest::Behind(0));
        assert_eq!(endless.missing(), Some(20));
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
            (200, &[other, ("content-length", "100")]),
            (200, &[("content-length", "100")]),
            (200, &[TAG, ("content-length", "99")]),
            (416, &[("content-range", "bytes */30")]),
            (404, &[]),
            (302, &[("location", "/elsewhere")]),
        ] {
            assert!(matches!(whole.judge(&answer(status, fields)), Rest::Never(_)), "{status} {fields:?}");
        }
    }
}

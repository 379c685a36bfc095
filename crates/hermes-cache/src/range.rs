//! Byte ranges: requested, received and missing ones (RFC 9110, section 14).
//!
//! In: `Range` and `Content-Range`. Out: intervals. Pure arithmetic. Ends are exclusive in this code, and inclusive on
//! the wire.

use std::ops::Range;

use http::HeaderValue;

/// Maximum number of ranges in a request. A request with more receives the whole representation, because each range
/// takes time to resolve.
const MAX_RANGES: usize = 32;

/// A range of a request. Its ends may depend on the length of the representation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ByteRange {
    /// From the first byte position to the last one, both inclusive, or to the end.
    From(u64, Option<u64>),
    /// The last bytes of the representation; the value is their number.
    Last(u64),
}

/// The ranges that a request asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum RequestedRanges {
    /// The whole representation.
    #[default]
    Whole,
    /// Parts of the representation; at least one.
    Parts(Vec<ByteRange>),
}

/// The requested ranges, resolved for a representation of known length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// The whole representation.
    Whole,
    /// A part of it.
    Part(Range<u64>),
    /// No requested byte exists.
    Unsatisfiable,
}

impl RequestedRanges {
    /// Parses a `Range` field. An invalid one is ignored (RFC 9110, section 14.2).
    pub fn parse(value: Option<&HeaderValue>) -> Self {
        Self::try_parse(value).unwrap_or_default()
    }

    fn try_parse(value: Option<&HeaderValue>) -> Option<Self> {
        let text = value?.to_str().ok()?;
        let (unit, set) = text.split_once('=')?;
        if !unit.trim().eq_ignore_ascii_case("bytes") {
            return None;
        }
        let pieces: Vec<_> = set.split(',').map(str::trim).filter(|piece| !piece.is_empty()).collect();
        if pieces.len() > MAX_RANGES || pieces.is_empty() {
            return None;
        }
        pieces.into_iter().map(piece).collect::<Option<Vec<_>>>().map(RequestedRanges::Parts)
    }

    /// Resolves the ranges for a length. Ranges that do not join to a single range resolve to the whole representation.
    /// A server may ignore `Range`, and a multipart response costs more than it saves.
    pub fn resolve(&self, total: u64) -> Resolved {
        let RequestedRanges::Parts(pieces) = self else { return Resolved::Whole };
        let mut ranges: Vec<Range<u64>> = pieces.iter().filter_map(|piece| piece.resolve(total)).collect();
        ranges.sort_by_key(|range| range.start);
        let mut ranges = ranges.into_iter();
        let Some(mut joined) = ranges.next() else { return Resolved::Unsatisfiable };
        for range in ranges {
            if range.start > joined.end {
                return Resolved::Whole;
            }
            joined.end = joined.end.max(range.end);
        }
        Resolved::Part(joined)
    }
}

impl ByteRange {
    fn resolve(self, total: u64) -> Option<Range<u64>> {
        let range = match self {
            ByteRange::From(first, last) => first..last.map_or(total, |last| last.saturating_add(1).min(total)),
            ByteRange::Last(count) => total.saturating_sub(count)..total,
        };
        (range.start < range.end).then_some(range)
    }
}

fn piece(text: &str) -> Option<ByteRange> {
    let (first, last) = text.split_once('-')?;
    let (first, last) = (first.trim(), last.trim());
    if first.is_empty() {
        return number(last).map(ByteRange::Last);
    }
    let first = number(first)?;
    if last.is_empty() {
        return Some(ByteRange::From(first, None));
    }
    let last = number(last)?;
    (first <= last).then_some(ByteRange::From(first, Some(last)))
}

fn number(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // A number that overflows is beyond any length, as the replacement is.
    Some(text.parse().unwrap_or(u64::MAX - 1))
}

/// Parses a `Content-Range` field: the range and the total length. Returns `None` without a total length, because such
/// a part cannot be stored.
pub fn content_range(value: Option<&HeaderValue>) -> Option<(Range<u64>, u64)> {
    let text = value?.to_str().ok()?;
    let (unit, rest) = text.trim().split_once(' ')?;
    let (range, total) = rest.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let exact = |text: &str| text.trim().bytes().all(|byte| byte.is_ascii_digit()).then(|| text.trim().parse().ok())?;
    let (first, last, total): (u64, u64, u64) = (exact(first)?, exact(last)?, exact(total)?);
    let is_sane = unit.eq_ignore_ascii_case("bytes") && first <= last && last < total;
    is_sane.then_some((first..last + 1, total))
}

/// Returns the `Content-Range` field of a 206 response.
pub fn to_content_range(range: &Range<u64>, total: u64) -> HeaderValue {
    value(format!("bytes {}-{}/{total}", range.start, range.end.saturating_sub(1)))
}

/// Returns the `Content-Range` field of a 416 response.
pub fn unsatisfied(total: u64) -> HeaderValue {
    value(format!("bytes */{total}"))
}

/// Returns a `Range` field for a part of a representation. It omits an end that equals the total length, because the
/// meaning is the same.
pub fn to_range(range: &Range<u64>, total: u64) -> HeaderValue {
    if range.end == total {
        return value(format!("bytes={}-", range.start));
    }
    value(format!("bytes={}-{}", range.start, range.end.saturating_sub(1)))
}

fn value(text: String) -> HeaderValue {
    HeaderValue::try_from(text).unwrap_or_else(|_| unreachable!("words and numbers"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    fn asked(text: &'static str) -> RequestedRanges {
        RequestedRanges::parse(Some(&HeaderValue::from_static(text)))
    }

    #[test]
    fn ranges_are_of_a_length() {
        for (text, total, resolved) in [
            ("bytes=0-0", 10, Resolved::Part(0..1)),
            ("bytes=0-99", 10, Resolved::Part(0..10)),
            ("bytes=9-", 10, Resolved::Part(9..10)),
            ("bytes=10-", 10, Resolved::Unsatisfiable),
            ("bytes=-3", 10, Resolved::Part(7..10)),
            ("bytes=-30", 10, Resolved::Part(0..10)),
            ("bytes=-0", 10, Resolved::Unsatisfiable),
            ("bytes=0-", 0, Resolved::Unsatisfiable),
            ("Bytes = 1-2", 10, Resolved::Part(1..3)),
            ("bytes=4-5, 0-3", 10, Resolved::Part(0..6)),
            ("bytes=0-0,-1", 10, Resolved::Whole),
            ("bytes=0-0,77-", 10, Resolved::Part(0..1)),
            ("bytes=0-99999999999999999999", 10, Resolved::Part(0..10)),
            ("bytes=99999999999999999999-", 10, Resolved::Unsatisfiable),
            // Invalid ranges.
            ("bytes=5-4", 10, Resolved::Whole),
            ("bytes=a-b", 10, Resolved::Whole),
            ("bytes=", 10, Resolved::Whole),
            ("bytes=-", 10, Resolved::Whole),
            ("items=0-1", 10, Resolved::Whole),
            ("bytes", 10, Resolved::Whole),
            ("bytes=+1-2", 10, Resolved::Whole),
        ] {
            assert_eq!(asked(text).resolve(total), resolved, "{text}");
        }
        let many = (0..=MAX_RANGES).map(|_| "0-1").collect::<Vec<_>>().join(",");
        assert_eq!(
            RequestedRanges::parse(HeaderValue::try_from(format!("bytes={many}")).ok().as_ref()),
            RequestedRanges::Whole
        );
    }

    #[test]
    fn parts_say_what_they_are_of() {
        let read = |text| content_range(Some(&HeaderValue::from_static(text)));
        assert_eq!(read("bytes 4-9/10"), Some((4..10, 10)));
        for text in
            ["bytes 4-9/*", "bytes */10", "bytes 9-4/10", "bytes 4-10/10", "bytes 4-9", "items 4-9/10", "bytes -9/10"]
        {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(to_content_range(&(4..10), 10), "bytes 4-9/10");
        assert_eq!(
            (to_range(&(4..9), 10), to_range(&(4..10), 10)),
            ("bytes=4-8".parse().unwrap(), "bytes=4-".parse().unwrap())
        );
    }
}

//! Directives of `Cache-Control` and similar fields, in requests and responses.
//!
//! In: field lines. Out: directives. Malformed directives have the cautious meaning: an invalid lifetime counts as
//! zero, and of several lifetimes the shortest counts (RFC 9111, section 4.2.1).

use http::header::HeaderName;
use http::{HeaderMap, HeaderValue};

/// Maximum value of a directive, in seconds (68 years). Larger values are reduced to it (RFC 9111, section 1.2.2).
const MAX_SECONDS: u64 = (1 << 31) - 1;

/// The scope of `no-cache` or `private`, which may name single fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// The directive is absent.
    #[default]
    None,
    /// The directive applies to these fields.
    Fields(Vec<HeaderName>),
    /// The directive applies to the whole response.
    All,
}

/// Parsed directives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Directives {
    /// `no-store`.
    pub no_store: bool,
    /// `no-cache`, perhaps for some fields.
    pub no_cache: Scope,
    /// `private`, perhaps for some fields.
    pub private: Scope,
    /// `public`.
    pub public: bool,
    /// `must-revalidate`.
    pub must_revalidate: bool,
    /// `proxy-revalidate`.
    pub proxy_revalidate: bool,
    /// `must-understand`.
    pub must_understand: bool,
    /// `immutable` (RFC 8246).
    pub immutable: bool,
    /// `only-if-cached`.
    pub only_if_cached: bool,
    /// `max-age`, in seconds.
    pub max_age: Option<u64>,
    /// `s-maxage`, in seconds.
    pub s_maxage: Option<u64>,
    /// `stale-if-error`, in seconds (RFC 5861).
    pub stale_if_error: Option<u64>,
    /// `min-fresh`, in seconds.
    pub min_fresh: Option<u64>,
    /// `max-stale`, in seconds; [`u64::MAX`] if the directive has no value, which allows any staleness.
    pub max_stale: Option<u64>,
}

impl Directives {
    /// Parses all lines of a field.
    pub fn of(headers: &HeaderMap, name: &HeaderName) -> Self {
        let mut this = Self::default();
        headers.get_all(name).iter().for_each(|line| each(line.as_bytes(), &mut |name, value| this.take(name, value)));
        this
    }

    /// Parses the directives of a request. `Pragma` counts only without `Cache-Control`, as in HTTP/1.0.
    pub fn of_request(headers: &HeaderMap) -> Self {
        let mut this = Self::of(headers, &http::header::CACHE_CONTROL);
        let is_old = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"no-cache");
        if !headers.contains_key(http::header::CACHE_CONTROL)
            && headers.get_all(http::header::PRAGMA).iter().any(is_old)
        {
            this.no_cache = Scope::All;
        }
        this
    }

    fn take(&mut self, name: &[u8], value: Option<&[u8]>) {
        let name = name.to_ascii_lowercase();
        match &name[..] {
            b"no-store" => self.no_store = true,
            b"no-cache" => self.no_cache.add(value),
            b"private" => self.private.add(value),
            b"public" => self.public = true,
            b"must-revalidate" => self.must_revalidate = true,
            b"proxy-revalidate" => self.proxy_revalidate = true,
            b"must-understand" => self.must_understand = true,
            b"immutable" => self.immutable = true,
            b"only-if-cached" => self.only_if_cached = true,
            b"max-age" => shortest(&mut self.max_age, value),
            b"s-maxage" => shortest(&mut self.s_maxage, value),
            b"stale-if-error" => shortest(&mut self.stale_if_error, value),
            b"min-fresh" => shortest(&mut self.min_fresh, value),
            b"max-stale" if value.is_none() => self.max_stale = self.max_stale.or(Some(u64::MAX)),
            b"max-stale" => shortest(&mut self.max_stale, value),
            _ => {}
        }
    }
}

impl Scope {
    fn add(&mut self, value: Option<&[u8]>) {
        let Some(list) = value else { return *self = Scope::All };
        let named: Option<Vec<HeaderName>> = list
            .split(|byte| *byte == b',')
            .map(<[u8]>::trim_ascii)
            .filter(|name| !name.is_empty())
            .map(|name| HeaderName::from_bytes(name).ok())
            .collect();
        match (named, &mut *self) {
            (_, Scope::All) => {}
            (Some(more), Scope::Fields(names)) => names.extend(more),
            (Some(names), Scope::None) => *self = Scope::Fields(names),
            // A directive with an invalid list of fields applies to the whole response, which is the cautious reading.
            (None, _) => *self = Scope::All,
        }
    }
}

fn shortest(known: &mut Option<u64>, value: Option<&[u8]>) {
    let seconds = value.and_then(seconds).unwrap_or(0);
    *known = Some(known.map_or(seconds, |known| known.min(seconds)));
}

/// Parses a number of seconds, which consists of digits alone.
pub fn seconds(value: &[u8]) -> Option<u64> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let add = |sum: u64, digit: &u8| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0'));
    Some(value.iter().fold(0, add).min(MAX_SECONDS))
}

/// Calls `take` with the name and value of each directive in a line. A quoted value may contain commas and `=`.
fn each(mut line: &[u8], take: &mut impl FnMut(&[u8], Option<&[u8]>)) {
    loop {
        line = line.trim_ascii_start();
        while let Some(rest) = line.strip_prefix(b",") {
            line = rest.trim_ascii_start();
        }
        if line.is_empty() {
            return;
        }
        let end = line.iter().position(|byte| matches!(byte, b',' | b'=')).unwrap_or(line.len());
        let (name, rest) = line.split_at(end);
        let Some(behind) = rest.strip_prefix(b"=") else {
            take(name.trim_ascii_end(), None);
            line = rest;
            continue;
        };
        if let Some(quoted) = behind.strip_prefix(b"\"") {
            let (value, rest) = unquote(quoted);
            let is_whole = rest.trim_ascii_start().first().is_none_or(|byte| *byte == b',');
            take(name, Some(if is_whole { &value } else { b"?" }));
            line = &rest[rest.iter().position(|byte| *byte == b',').unwrap_or(rest.len())..];
        } else {
            let end = behind.iter().position(|byte| *byte == b',').unwrap_or(behind.len());
            take(name, Some(behind[..end].trim_ascii_end()));
            line = &behind[end..];
        }
    }
}

/// Splits text after an opening quote into the unescaped value and the text after the closing quote.
fn unquote(text: &[u8]) -> (Vec<u8>, &[u8]) {
    let mut value = Vec::new();
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        match byte {
            b'"' => return (value, &text[at + 1..]),
            b'\\' => {
                value.extend(text.get(at + 1));
                at += 2;
            }
            byte => {
                value.push(*byte);
                at += 1;
            }
        }
    }
    (value, &[])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parsed(lines: &[&str]) -> Directives {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(http::header::CACHE_CONTROL, HeaderValue::from_str(line).unwrap());
        }
        Directives::of(&headers, &http::header::CACHE_CONTROL)
    }

    #[test]
    fn lifetimes_are_read_with_care() {
        for (line, seconds) in [
            ("max-age=3600", Some(3600)),
            ("MaX-aGe=3600", Some(3600)),
            ("max-age=\"3600\"", Some(3600)),
            ("max-age=003600", Some(3600)),
            ("max-age=99999999999999999999", Some(MAX_SECONDS)),
            ("max-age='3600'", Some(0)),
            ("max-age=-1", Some(0)),
            ("max-age=3600.0", Some(0)),
            ("max-age=a100", Some(0)),
            ("max-age", Some(0)),
            ("max-age= 3600", Some(0)),
            ("max-age =3600", None),
            ("extension=\"max-age=3600\", max-age=1", Some(1)),
            ("max-age=1, extension=\"max-age=3600\"", Some(1)),
            ("extension=\"a\\\"max-age=7\", max-age=1", Some(1)),
            ("max-age=1800, max-age=1", Some(1)),
            ("max-age=1, max-age=1800", Some(1)),
            (", ,,max-age=5,", Some(5)),
            ("x-max-age=5", None),
            ("", None),
        ] {
            assert_eq!(parsed(&[line]).max_age, seconds, "{line}");
        }
        assert_eq!(parsed(&["max-age=9", "max-age=8"]).max_age, Some(8));
    }

    #[test]
    fn directives_may_be_about_fields() {
        assert_eq!(parsed(&["private"]).private, Scope::All);
        let names = vec![HeaderName::from_static("a"), HeaderName::from_static("b")];
        assert_eq!(parsed(&["private=\"a, B\""]).private, Scope::Fields(names.clone()));
        assert_eq!(parsed(&["no-cache=\"a\"", "no-cache=b"]).no_cache, Scope::Fields(names));
        assert_eq!(parsed(&["no-cache=\"a\", no-cache"]).no_cache, Scope::All);
        assert_eq!(parsed(&["no-cache=\"a b\""]).no_cache, Scope::All);
    }

    #[test]
    fn a_request_may_take_what_is_stale() {
        assert_eq!(parsed(&["max-stale"]).max_stale, Some(u64::MAX));
        assert_eq!(parsed(&["max-stale=7"]).max_stale, Some(7));
        let mut headers = HeaderMap::new();
        headers.insert(http::header::PRAGMA, HeaderValue::from_static("no-cache"));
        assert_eq!(Directives::of_request(&headers).no_cache, Scope::All);
        headers.insert(http::header::CACHE_CONTROL, HeaderValue::from_static("max-stale"));
        assert_eq!(Directives::of_request(&headers).no_cache, Scope::None);
    }
}

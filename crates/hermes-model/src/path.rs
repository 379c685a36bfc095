//! Paths as they are matched: one path may be read in two ways, and no route may be evaded by that.
//!
//! In: the path of a request, as received. Out: its plain reading, and where some origins would
//! see another path, those too; or a refusal.
//! Never: changes what is forwarded.
//!
//! The rule. A path has one spelling here: escapes of characters that may stand in a path as they
//! are, are those characters (`/%61dmin` is `/admin`), and whatever may not is escaped. That is
//! RFC 3986, 6.2.2.2, and a little more (`%21` is `!`), which is safe since nothing but the
//! decision sees it. A path with a dot segment in any spelling is refused: clients resolve those
//! before they send (RFC 3986, 5.2.4), and whoever does not wants to reach `/admin` as
//! `/public/../admin`. Empty segments, escaped slashes, backslashes and parameters (`/cart;id=7`)
//! mean different things to different origins, yet are in honest use (`/scope%2Fname`): such a path
//! is decided under all readings, and refused where they do not come to the same route. A `%` without two digits
//! behind it is refused: no URI has one (RFC 3986, 2.1), origins differ on what it means, and one
//! pass of decoding can put it together with what follows (`/%2%65` would become `/%2e`).

use std::borrow::Cow;

/// A path in the ways it may be understood.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Readings<'a> {
    /// With escapes of unreserved characters decoded, and the others in upper case.
    pub(crate) plain: Cow<'a, str>,
    /// With slashes decoded and merged, and with the parameters of segments dropped (as servlet
    /// containers do), where that differs.
    pub(crate) others: Vec<String>,
}

/// Why a path cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// It has `.` or `..` as a segment, in one of its readings.
    DotSegment,
    /// It has a `%` that begins no escape.
    Escape,
}

/// The ways to read `path`, which has no query. Allocates only where the path has escapes or
/// doubtful slashes or parameters.
pub(crate) fn readings(path: &str) -> Result<Readings<'_>, Unreadable> {
    let mut respell = false;
    let mut dots = false;
    let mut doubtful = false;
    let mut parameters = false;
    let mut previous = 0;
    for byte in path.bytes() {
        match byte {
            b'/' => doubtful |= previous == b'/',
            b'.' => dots |= previous == b'/',
            b';' => parameters = true,
            _ => respell |= !is_pchar(byte),
        }
        previous = byte;
    }
    if respell && !has_whole_escapes(path) {
        return Err(Unreadable::Escape);
    }
    let plain = if respell { canonical(path) } else { Cow::Borrowed(path) };
    if (dots || respell) && has_dot_segment(&plain) {
        return Err(Unreadable::DotSegment);
    }
    let others = if doubtful || parameters || respell { other_readings(&plain) } else { Vec::new() };
    if others.iter().any(|other| has_dot_segment(other)) {
        return Err(Unreadable::DotSegment);
    }
    Ok(Readings { plain, others })
}

/// The path without segments that are a single dot, as its client should have sent it (RFC 3986, 5.2.4): `/a/./b` is `/a/b` to
/// everyone. `None` if it has none. An escaped dot segment stays, and is refused later.
pub fn without_single_dots(path: &str) -> Option<String> {
    if !path.contains("/./") && !path.ends_with("/.") {
        return None;
    }
    let mut segments: Vec<&str> = path.split('/').collect();
    let ends_with_dot = segments.last() == Some(&".");
    segments.retain(|segment| *segment != ".");
    if ends_with_dot {
        segments.push("");
    }
    Some(segments.join("/"))
}

/// An origin may merge slashes, drop parameters, or do both; either first: a slash that is decoded may
/// stand in a parameter, and one that is left may be double.
fn other_readings(plain: &str) -> Vec<String> {
    let merged = has_doubtful_slashes(plain).then(|| merge_slashes(plain));
    let bare = [Some(plain), merged.as_deref()].into_iter().flatten().filter(|path| path.contains(';'));
    let bare: Vec<String> = bare.map(drop_parameters).collect();
    let mut others = Vec::new();
    let merged_bare = bare.iter().filter(|path| has_doubtful_slashes(path)).map(|path| merge_slashes(path));
    for path in merged.into_iter().chain(merged_bare.collect::<Vec<_>>()).chain(bare) {
        if !others.contains(&path) {
            others.push(path);
        }
    }
    others
}

/// True where a segment is `.` or `..`; parameters behind `;` do not hide it, since servlet
/// containers drop them before they resolve dots.
pub(crate) fn has_dot_segment(path: &str) -> bool {
    path.split('/').any(|segment| matches!(segment.split(';').next(), Some("." | "..")))
}

/// True where every `%` has two hexadecimal digits behind it.
pub(crate) fn has_whole_escapes(path: &str) -> bool {
    path.match_indices('%').all(|(at, _)| escaped_byte(&path.as_bytes()[at + 1..]).is_some())
}

/// The one spelling of a path for the decision: see the rule above.
pub(crate) fn canonical(path: &str) -> Cow<'_, str> {
    respell(path, is_pchar, true)
}

/// Decodes the escapes of unreserved characters (RFC 3986, 6.2.2.2): the same URI, and fit to be
/// forwarded.
pub(crate) fn decode_unreserved(path: &str) -> Cow<'_, str> {
    respell(path, is_unreserved, false)
}

/// Decodes escapes of bytes that are `plain`; where `encode`, escapes raw bytes that are not. A `%`
/// that begins no escape is escaped in any case, lest it begin one with what is decoded behind it.
fn respell(path: &str, plain: fn(u8) -> bool, encode: bool) -> Cow<'_, str> {
    let foreign = |b: u8| b == b'%' || (encode && b != b'/' && !plain(b));
    if !path.bytes().any(foreign) {
        return Cow::Borrowed(path);
    }
    let mut out = Vec::with_capacity(path.len() + 16);
    let mut rest = path.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        match (first, escaped_byte(tail)) {
            (b'%', Some(byte)) => {
                if plain(byte) {
                    out.push(byte)
                } else {
                    out.extend(escape(byte))
                }
                rest = &tail[2..];
            }
            (byte, _) if foreign(byte) => out.extend(escape(byte)),
            (byte, _) => out.push(byte),
        }
    }
    // Raw bytes pass whole or are escaped one by one, and decoded ones are ASCII.
    Cow::Owned(String::from_utf8(out).unwrap_or_else(|_| path.to_owned()))
}

/// `%XX`
pub(crate) fn escape(byte: u8) -> [u8; 3] {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    [b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]
}

/// The byte that two hexadecimal digits at the beginning of `bytes` stand for.
pub(crate) fn escaped_byte(bytes: &[u8]) -> Option<u8> {
    let hex = |b: u8| char::from(b).to_digit(16);
    let (high, low) = (hex(*bytes.first()?)?, hex(*bytes.get(1)?)?);
    u8::try_from(high * 16 + low).ok()
}

/// RFC 3986, 2.3.
pub(crate) const fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// Characters that stand in a path segment as they are (RFC 3986, 3.3).
const PCHAR: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        let b = byte as u8;
        table[byte] = is_unreserved(b)
            || matches!(b, b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b',' | b';' | b'=' | b':' | b'@');
        byte += 1;
    }
    table
};

fn is_pchar(byte: u8) -> bool {
    PCHAR[usize::from(byte)]
}

fn has_doubtful_slashes(plain: &str) -> bool {
    plain.contains("//") || plain.contains("%2F") || plain.contains("%5C")
}

/// `/a;x=1/b` becomes `/a/b`.
fn drop_parameters(plain: &str) -> String {
    let bare: Vec<&str> = plain.split('/').map(|segment| segment.split(';').next().unwrap_or_default()).collect();
    bare.join("/")
}

fn merge_slashes(plain: &str) -> String {
    let decoded = plain.replace("%2F", "/").replace("%5C", "/");
    let mut out = String::with_capacity(decoded.len());
    for c in decoded.chars() {
        if c != '/' || !out.ends_with('/') {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_paths_are_borrowed() {
        for path in ["/", "/a/b.c", "*", "/.well-known/x", "/a/...", "/a/.b"] {
            let readings = readings(path).ok();
            assert!(
                matches!(&readings, Some(Readings { plain: Cow::Borrowed(p), others }) if *p == path && others.is_empty()),
                "{path}: {readings:?}"
            );
        }
    }

    #[test]
    fn dot_segments_are_refused_in_every_spelling() {
        for path in [
            "/..",
            "/a/../b",
            "/a/./b",
            "/a/..",
            "/%2e%2e/b",
            "/a/.%2E/b",
            "/a%2f../b",
            "/a%2F%2e%2e%2Fb",
            "/a\\..\\b",
            "/a%5c..%5cb",
            "/a/..;x=1/b",
            "//..",
            "/a//%2e",
        ] {
            assert_eq!(readings(path), Err(Unreadable::DotSegment), "{path}");
        }
    }

    #[test]
    fn single_dots_are_left_out() {
        let cases = [
            ("/a/./b", "/a/b"),
            ("/./Packages.gz", "/Packages.gz"),
            ("/a/././b/.", "/a/b/"),
            ("/.", "/"),
            ("/a/.//b", "/a//b"),
            ("/./../b", "/../b"),
        ];
        for (path, wanted) in cases {
            assert_eq!(without_single_dots(path).as_deref(), Some(wanted), "{path}");
        }
        for path in ["/", "/a.b/.c/d.", "/a/%2e/b", "/a/.;x/b", "*"] {
            assert_eq!(without_single_dots(path), None, "{path}");
        }
    }

    #[test]
    fn a_percent_sign_that_begins_no_escape_is_refused() {
        for path in ["/100%", "/%zz", "/%4", "/a%/b", "/%%61", "/a/%2%65%2%65/admin", "/6%1%61", "/%c3%a", "/%\u{e9}"] {
            assert_eq!(readings(path), Err(Unreadable::Escape), "{path}");
        }
    }

    #[test]
    fn what_is_decoded_never_completes_an_escape() {
        for (path, decoded) in [
            ("/a/%2%65%2%65/admin", "/a/%252e%252e/admin"),
            ("/6%1%61", "/6%251a"),
            ("/%%36%31", "/%2561"),
            ("/100%", "/100%25"),
            ("/%7E%2f", "/~%2F"),
        ] {
            assert_eq!(decode_unreserved(path), decoded);
            assert_eq!(canonical(path), decoded);
            assert_eq!(decode_unreserved(decoded), decoded, "another pass finds more");
        }
    }

    #[test]
    fn doubtful_paths_are_read_in_all_their_ways() {
        let cases: &[(&str, &str, &[&str])] = &[
            ("/%61dmin", "/admin", &[]),
            ("/a%7eb%2dc", "/a~b-c", &[]),
            ("/a%3ab", "/a:b", &[]),
            ("/a%21%2ab", "/a!*b", &[]),
            ("/caf\u{e9}", "/caf%C3%A9", &[]),
            ("/caf%c3%a9", "/caf%C3%A9", &[]),
            ("/a\"b|c", "/a%22b%7Cc", &[]),
            ("/a%2fb", "/a%2Fb", &["/a/b"]),
            ("//a///b", "//a///b", &["/a/b"]),
            ("/a\\b", "/a%5Cb", &["/a/b"]),
            // Decoded once and no more: what an origin would do twice is its own bug.
            ("/%252e%252e/", "/%252e%252e/", &[]),
            ("/a;x/b;y=1", "/a;x/b;y=1", &["/a/b"]),
            ("/a%3bx", "/a;x", &["/a"]),
            ("//a;x", "//a;x", &["/a;x", "/a", "//a"]),
            ("/a;b%2Fc", "/a;b%2Fc", &["/a;b/c", "/a", "/a/c"]),
            // What was none before may be doubtful without its parameters.
            ("/;x/a", "/;x/a", &["/a", "//a"]),
            ("/a%2fb;x", "/a%2Fb;x", &["/a/b;x", "/a/b", "/a%2Fb"]),
        ];
        for &(path, plain, others) in cases {
            let read = readings(path).ok();
            let read =
                read.as_ref().map(|r| (r.plain.as_ref(), r.others.iter().map(String::as_str).collect::<Vec<_>>()));
            assert_eq!(read, Some((plain, others.to_vec())), "{path}");
        }
    }
}

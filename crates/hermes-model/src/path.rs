//! Canonical paths: some paths have two readings, and no client may bypass a route that way.
//!
//! In: the path of a request, as received. Out: its canonical reading, and the readings of origins that would interpret
//! it differently; or a rejection.
//! Never: a change of the forwarded path.
//!
//! The canonical spelling decodes escapes of characters that need none (`/%61dmin` is `/admin`) and escapes all others.
//! RFC 3986, 6.2.2.2, only decodes unreserved characters. Decoding more (`%21` is `!`) is safe because only the
//! decision uses this spelling.
//!
//! A path with a dot segment in any spelling is rejected. Clients resolve these before they send a request (RFC 3986,
//! 5.2.4); a client that does not may try to reach `/admin` as `/public/../admin`.
//!
//! Origins disagree about empty segments, escaped slashes, backslashes and parameters (`/cart;id=7`), but honest
//! clients use them (`/scope%2Fname`). Such a path is decided under all readings, and rejected if these lead to
//! different routes.
//!
//! A `%` without two hexadecimal digits is rejected. No URI has one (RFC 3986, 2.1), and origins disagree about it. One
//! pass of decoding could even join it with the following text: `/%2%65` would become `/%2e`.

use std::borrow::Cow;

/// The readings of a path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PathForms<'a> {
    /// Canonical reading: escapes of plain characters decoded, other escapes in upper case.
    pub(crate) plain: Cow<'a, str>,
    /// Different readings: slashes decoded and merged, parameters of segments dropped (as servlet containers do).
    pub(crate) others: Vec<String>,
}

/// Reason for rejecting a path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PathError {
    /// A segment is `.` or `..` in one of the readings.
    DotSegment,
    /// A `%` is not followed by two hexadecimal digits.
    Escape,
}

/// The readings of `path`, which has no query. Allocates only for escapes, ambiguous slashes or parameters.
pub(crate) fn readings(path: &str) -> Result<PathForms<'_>, PathError> {
    let mut respell = false;
    let mut dots = false;
    let mut ambiguous = false;
    let mut parameters = false;
    let mut previous = 0;
    for byte in path.bytes() {
        match byte {
            b'/' => ambiguous |= previous == b'/',
            b'.' => dots |= previous == b'/',
            b';' => parameters = true,
            _ => respell |= !is_pchar(byte),
        }
        previous = byte;
    }
    if respell && !has_whole_escapes(path) {
        return Err(PathError::Escape);
    }
    let plain = if respell { canonical(path) } else { Cow::Borrowed(path) };
    if (dots || respell) && has_dot_segment(&plain) {
        return Err(PathError::DotSegment);
    }
    let others = if ambiguous || parameters || respell { other_readings(&plain) } else { Vec::new() };
    if others.iter().any(|other| has_dot_segment(other)) {
        return Err(PathError::DotSegment);
    }
    Ok(PathForms { plain, others })
}

/// The path without `.` segments, as its client should have sent it (RFC 3986, 5.2.4): every origin reads `/a/./b` as
/// `/a/b`. `None` if there are none. An escaped dot segment remains, and is rejected later.
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

/// An origin may merge slashes, drop parameters, or do both in either order. The order matters: a decoded slash may be
/// part of a parameter, and dropping a parameter may leave a double slash.
fn other_readings(plain: &str) -> Vec<String> {
    let merged = has_ambiguous_slashes(plain).then(|| merge_slashes(plain));
    let bare = [Some(plain), merged.as_deref()].into_iter().flatten().filter(|path| path.contains(';'));
    let bare: Vec<String> = bare.map(drop_parameters).collect();
    let mut others = Vec::new();
    let merged_bare = bare.iter().filter(|path| has_ambiguous_slashes(path)).map(|path| merge_slashes(path));
    for path in merged.into_iter().chain(merged_bare.collect::<Vec<_>>()).chain(bare) {
        if !others.contains(&path) {
            others.push(path);
        }
    }
    others
}

/// True if a segment is `.` or `..`, even with parameters after `;`: servlet containers drop them before they resolve
/// dots.
pub(crate) fn has_dot_segment(path: &str) -> bool {
    path.split('/').any(|segment| matches!(segment.split(';').next(), Some("." | "..")))
}

/// True if two hexadecimal digits follow every `%`.
pub(crate) fn has_whole_escapes(path: &str) -> bool {
    path.match_indices('%').all(|(at, _)| escaped_byte(&path.as_bytes()[at + 1..]).is_some())
}

/// The canonical spelling of a path for the decision; see the module documentation.
pub(crate) fn canonical(path: &str) -> Cow<'_, str> {
    respell(path, is_pchar, true)
}

/// Decodes escapes of unreserved characters (RFC 3986, 6.2.2.2): the result is an equivalent URI, and may be forwarded.
pub fn decode_unreserved(path: &str) -> Cow<'_, str> {
    respell(path, is_unreserved, false)
}

/// Decodes escapes of `plain` bytes and, with `encode`, escapes all other raw bytes. A `%` that begins no escape is
/// always escaped: otherwise it could form one with decoded text.
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
    // The result is UTF-8: raw bytes are copied or escaped one by one, and decoded bytes are ASCII.
    Cow::Owned(String::from_utf8(out).unwrap_or_else(|_| path.to_owned()))
}

/// `%XX`
pub(crate) fn escape(byte: u8) -> [u8; 3] {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    [b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]
}

/// The byte that two hexadecimal digits at the beginning of `bytes` encode.
pub(crate) fn escaped_byte(bytes: &[u8]) -> Option<u8> {
    let hex = |b: u8| char::from(b).to_digit(16);
    let (high, low) = (hex(*bytes.first()?)?, hex(*bytes.get(1)?)?);
    u8::try_from(high * 16 + low).ok()
}

/// Unreserved characters (RFC 3986, 2.3).
pub(crate) const fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// Characters that a path segment may contain unescaped (RFC 3986, 3.3).
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

fn has_ambiguous_slashes(plain: &str) -> bool {
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
                matches!(&readings, Some(PathForms { plain: Cow::Borrowed(p), others }) if *p == path && others.is_empty()),
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
            assert_eq!(readings(path), Err(PathError::DotSegment), "{path}");
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
            assert_eq!(readings(path), Err(PathError::Escape), "{path}");
        }
    }

    #[test]
    fn decoded_text_never_completes_an_escape() {
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
    fn ambiguous_paths_have_all_readings() {
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
            // What was none before may be ambiguous without its parameters.
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

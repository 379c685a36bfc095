//! Escapes characters that clients send in a request target although URIs forbid them: quotes, angle brackets, UTF-8.
//!
//! In: unparsed bytes of a client of HTTP/1.1 or HTTP/3. Out: the same bytes with those characters escaped. Browsers,
//! `curl -g` and others send them, and the crate `http` rejects them. Never: a change to a header line or a body. If
//! the start of a request is uncertain, nothing is changed.

use std::cell::Cell;

const HEX: &[u8; 16] = b"0123456789ABCDEF";

/// True for characters that clients send unescaped, although URIs forbid them.
fn is_bare(byte: u8) -> bool {
    matches!(byte, b'"' | b'<' | b'>' | b'`') || byte >= 0x80
}

/// The target with such characters escaped; `None` if it contains none.
pub fn escaped(target: &[u8]) -> Option<Vec<u8>> {
    if !target.iter().any(|byte| is_bare(*byte)) {
        return None;
    }
    let mut out = Vec::with_capacity(target.len() + 32);
    for &byte in target {
        if is_bare(byte) {
            out.extend([b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        } else {
            out.push(byte);
        }
    }
    Some(out)
}

/// The position in the connection before the next read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// The next bytes begin a request.
    Request,
    /// The bytes so far are one complete head, which is not served yet.
    BehindHead,
    /// Unknown: no further change is made.
    Unknown,
}

/// Tracks the requests of an HTTP/1.1 connection until one has a body or is pipelined.
#[derive(Debug)]
pub struct RequestTargetEscaper(Cell<At>);

impl Default for RequestTargetEscaper {
    fn default() -> Self {
        Self(Cell::new(At::Request))
    }
}

impl RequestTargetEscaper {
    /// The bytes with an escaped request line. `None` if no change is needed.
    pub fn read(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        if bytes.is_empty() {
            return None;
        }
        if self.0.replace(At::Unknown) != At::Request {
            return None;
        }
        let line = memchr::memchr(b'\n', bytes)?;
        if is_one_head(bytes) {
            self.0.set(At::BehindHead);
        }
        // Only the target is escaped: such characters make a method or a version invalid.
        let from = memchr::memchr(b' ', &bytes[..line])?;
        let to = memchr::memrchr(b' ', &bytes[..line])?;
        let target = escaped(&bytes[from..to])?;
        Some([&bytes[..from], &target, &bytes[to..]].concat())
    }

    /// Records that the request is being served, and whether it has a body.
    pub fn is_served(&self, has_body: bool) {
        let next = if self.0.get() == At::BehindHead && !has_body { At::Request } else { At::Unknown };
        self.0.set(next);
    }
}

/// True if the first empty line ends the bytes. Lines end with LF, optionally after CR, as in hyper.
fn is_one_head(bytes: &[u8]) -> bool {
    if !bytes.ends_with(b"\r\n\r\n") {
        return false;
    }
    let mut begin = 0;
    let is_empty = |end: usize| {
        let line = &bytes[std::mem::replace(&mut begin, end + 1)..end];
        matches!(line, b"" | b"\r")
    };
    let mut ends = memchr::memchr_iter(b'\n', bytes);
    let first_empty = ends.position(is_empty);
    first_empty.is_some_and(|at| at > 0) && ends.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_characters_are_escaped() {
        assert_eq!(escaped("/a?q=\"<\u{e9}>\"`".as_bytes()).as_deref(), Some(&b"/a?q=%22%3C%C3%A9%3E%22%60"[..]));
        assert_eq!(escaped(b"/a?{b}|^\\%22"), None);
    }

    #[test]
    fn only_the_target_is_changed_whenever_it_comes() {
        let requests = RequestTargetEscaper::default();
        assert_eq!(requests.read(b""), None, "nothing was read yet");
        let changed = requests.read(b"GE\x80T /\" x HTTP/1.1\"\r\n\r\n");
        assert_eq!(changed.as_deref(), Some(&b"GE\x80T /%22 x HTTP/1.1\"\r\n\r\n"[..]));
        assert_eq!(RequestTargetEscaper::default().read(b"GET\"\r\n\r\n"), None);
    }

    #[test]
    fn only_what_begins_a_request_for_certain_is_changed() {
        let get = b"GET /\" HTTP/1.1\r\nx: \"\r\n\r\n";
        let changed = &b"GET /%22 HTTP/1.1\r\nx: \"\r\n\r\n"[..];
        let requests = RequestTargetEscaper::default();
        assert_eq!(requests.read(get).as_deref(), Some(changed));
        requests.is_served(false);
        assert_eq!(requests.read(get).as_deref(), Some(changed), "the next one");
        assert_eq!(requests.read(get), None, "the one before was not served");
        // After a body, two heads at once, or a partial head, anything may follow.
        for (first, has_body) in [
            (&get[..], true),
            (&[&get[..], get].concat(), false),
            (&get[..20], false),
            (b"\r\n\r\n", false),
            (b"GET / HTTP/1.1\n\nx\r\n\r\n", false),
        ] {
            let requests = RequestTargetEscaper::default();
            requests.read(first);
            requests.is_served(has_body);
            assert_eq!(requests.read(get), None, "{first:?}");
        }
    }
}

//! Characters that clients leave bare in a request target, though no URI has them: quotes, angle brackets, UTF-8.
//!
//! In: bytes of a client of HTTP/1.1 or HTTP/3, before they are parsed. Out: the same with those characters escaped,
//! since the crate `http` refuses targets that have them. Browsers, `curl -g` and others send them. Never: a change of
//! a header line or of a body; if it is uncertain that a request begins, nothing is changed.

use std::cell::Cell;

const HEX: &[u8; 16] = b"0123456789ABCDEF";

/// True for characters that clients leave bare, although URIs do not allow them.
fn is_bare(byte: u8) -> bool {
    matches!(byte, b'"' | b'<' | b'>' | b'`') || byte >= 0x80
}

/// The target with such characters escaped; `None` where it has none.
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

/// The state of the connection before the next read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// A request begins with them.
    Request,
    /// The bytes so far are one head, which is not served yet.
    BehindHead,
    /// Unknown: nothing is changed any more.
    Unknown,
}

/// Follows the requests of an HTTP/1.1 connection, as long as none has a body or is pipelined.
#[derive(Debug)]
pub struct RequestTargetEscaper(Cell<At>);

impl Default for RequestTargetEscaper {
    fn default() -> Self {
        Self(Cell::new(At::Request))
    }
}

impl RequestTargetEscaper {
    /// The bytes with an escaped request line. `None` if nothing has to be changed.
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
        // The target alone: a method or a version with such characters is none.
        let from = memchr::memchr(b' ', &bytes[..line])?;
        let to = memchr::memrchr(b' ', &bytes[..line])?;
        let target = escaped(&bytes[from..to])?;
        Some([&bytes[..from], &target, &bytes[to..]].concat())
    }

    /// Records that the request is being served, with a body or without.
    pub fn is_served(&self, has_body: bool) {
        let next = if self.0.get() == At::BehindHead && !has_body { At::Request } else { At::Unknown };
        self.0.set(next);
    }
}

/// True where the first empty line ends the bytes. As hyper reads lines: they end with LF, perhaps with CR before it.
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

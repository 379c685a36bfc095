//! `Via` (RFC 9110, 7.6.3): the nodes that a message passed, and loop detection.
//!
//! In: the lines of the field, from any client. Out: the received-by names in order.
//! Never: an error. A malformed entry counts as a hop.

use http::{HeaderMap, header};

/// Maximum number of hops; a message with more is in a loop.
pub const MAX_HOPS: usize = 16;

/// Summary of the `Via` lines of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ViaChain<'a> {
    /// Number of entries in all lines.
    pub hops: usize,
    /// True if the own name is among them.
    pub own: bool,
    /// The received-by name of the last entry, as the previous hop wrote it; empty if malformed.
    pub last: &'a str,
}

/// Parses every `Via` line. Names compare case-insensitively and without a port.
pub fn trail<'a>(headers: &'a HeaderMap, own: &str) -> ViaChain<'a> {
    let mut trail = ViaChain::default();
    for line in headers.get_all(header::VIA) {
        // A comment may contain obs-text; a name that is not ASCII belongs to another node.
        let Ok(line) = line.to_str() else {
            trail.hops += 1;
            trail.last = "";
            continue;
        };
        for entry in entries(line) {
            trail.hops += 1;
            trail.last = received_by(entry);
            trail.own |= is_node(trail.last, own);
        }
    }
    trail
}

/// The entries of one line, split at commas outside of comments; empty entries are skipped (RFC 9110, 5.6.1).
fn entries(line: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(line);
    std::iter::from_fn(move || {
        let text = rest?;
        let end = entry_end(text);
        rest = text.get(end + 1..);
        Some(text[..end].trim_matches([' ', '\t']))
    })
    .filter(|entry| !entry.is_empty())
}

fn entry_end(text: &str) -> usize {
    let mut depth = 0usize;
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if depth > 0 => escaped = true,
            b'(' => depth += 1,
            b')' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => return at,
            _ => {}
        }
    }
    // An unterminated comment must not hide the entries after it.
    match (depth, text.find(',')) {
        (1.., Some(comma)) => comma,
        _ => text.len(),
    }
}

/// The second word of `received-protocol RWS received-by [ RWS comment ]`.
fn received_by(entry: &str) -> &str {
    let mut words = entry.split([' ', '\t']).filter(|word| !word.is_empty());
    words.next();
    words.next().filter(|word| !word.starts_with('(')).unwrap_or("")
}

fn is_node(received_by: &str, node: &str) -> bool {
    let host = match received_by.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
        _ => received_by,
    };
    host.eq_ignore_ascii_case(node) || received_by.eq_ignore_ascii_case(node)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn read(lines: &[&str], own: &str) -> (usize, bool, String) {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(header::VIA, http::HeaderValue::from_bytes(line.as_bytes()).unwrap());
        }
        let trail = trail(&headers, own);
        (trail.hops, trail.own, trail.last.to_owned())
    }

    #[test]
    fn names_are_found_in_every_legal_form() {
        for (lines, hops, own, last) in [
            (&[][..], 0, false, ""),
            (&["1.1 edge"], 1, true, "edge"),
            (&["HTTP/1.1 EDGE:8080, 2 b"], 2, true, "b"),
            (&["2 a", "1.1 edge (Hermes, v1), 2 c"], 3, true, "c"),
            (&["1.1 a (edge)"], 1, false, "a"),
            (&["1.1 a (x \\) , 1.1 edge)"], 1, false, "a"),
            (&["1.1\tedge\t(comment (nested, too))"], 1, true, "edge"),
            (&[", ,1.1 a,,"], 1, false, "a"),
            (&["1.1 edge-7"], 1, false, "edge-7"),
            (&["1.1 [::1]:80"], 1, false, "[::1]:80"),
        ] {
            assert_eq!(read(lines, "edge"), (hops, own, last.to_owned()), "{lines:?}");
        }
    }

    #[test]
    fn malformed_entries_count_and_hide_nothing() {
        for (lines, hops, own, last) in [
            (&["edge"][..], 1, false, ""),
            (&["1.1 a (open, 1.1 edge"], 2, true, "edge"),
            (&["1.1 caf\u{e9}"], 1, false, ""),
            (&["1.1 )a), 1.1 edge"], 2, true, "edge"),
            (&["1.1 (only a comment)"], 1, false, ""),
        ] {
            assert_eq!(read(lines, "edge"), (hops, own, last.to_owned()), "{lines:?}");
        }
    }
}

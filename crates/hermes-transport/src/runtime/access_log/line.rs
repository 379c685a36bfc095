//! Formats the access-log line of a session as JSON.
//!
//! In: the data of a session that ended. Out: a line. The code does not use serde: with serde, the line took a twelfth
//! of a request's time, most of it in generic formatting. Strings are escaped (RFC 8259, section 7).

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::headers::write_ipv4;
use crate::runtime::session::Record;

/// The text of the last written second. It is cached because most entries begin in the same second as the previous one.
#[derive(Default)]
pub(super) struct Clock {
    second: u64,
    /// The text up to and including the decimal point before the milliseconds.
    text: Vec<u8>,
}

impl Clock {
    /// Writes a time in the format of RFC 3339, in UTC, with milliseconds.
    fn write(&mut self, out: &mut Vec<u8>, time: SystemTime) {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        if self.second != since.as_secs() || self.text.is_empty() {
            self.second = since.as_secs();
            self.text.clear();
            // Writing into a Vec cannot fail.
            let _ = write!(self.text, "{}", humantime::format_rfc3339_seconds(UNIX_EPOCH + since));
            // Removes the zone `Z`, which follows the milliseconds.
            self.text.pop();
            self.text.push(b'.');
        }
        out.extend_from_slice(&self.text);
        out.extend_from_slice(&three_digits(since.subsec_millis()));
        out.push(b'Z');
    }
}

/// Returns the three decimal digits of a number below 1,000.
fn three_digits(number: u32) -> [u8; 3] {
    [number / 100, number / 10 % 10, number % 10].map(|digit| b'0' + digit as u8)
}

/// Appends the line of a session, including its newline.
pub(super) fn write(out: &mut Vec<u8>, node: &str, clock: &mut Clock, record: &Record<'_>) {
    let facts = record.facts;
    out.extend_from_slice(b"{\"time\":\"");
    clock.write(out, record.time);
    out.push(b'"');
    text(out, "node", node);
    number(out, "id", record.id);
    text(out, "listener", &facts.listener);
    text(out, "kind", facts.kind.as_str());
    key(out, "source");
    source(out, facts.source);
    if let Some(peer) = facts.trust.peer().and_then(|peer| peer.node.as_deref()) {
        text(out, "peer", peer);
    }
    if let Some(user) = facts.user.as_deref() {
        text(out, "user", user);
    }
    text(out, "method", facts.method.as_str());
    key(out, "authority");
    authority(out, &facts.authority);
    text(out, "path", facts.path.path());
    match record.route {
        Some(route) => text(out, "route", &route.name),
        None => out.extend_from_slice(b",\"route\":null"),
    }
    if let Some(endpoint) = record.peer {
        text(out, "endpoint", endpoint);
    }
    number(out, "status", u64::from(record.status));
    number(out, "received", record.received);
    number(out, "sent", record.sent);
    milliseconds(out, record.duration);
    if record.tries > 1 {
        number(out, "attempts", u64::from(record.tries));
    }
    if let Some(error) = record.error {
        text(out, "error", error.label());
        text(out, "reason", &error.to_string());
    }
    out.extend_from_slice(b",\"trace\":\"");
    // The 32 digits after the version are the trace ID.
    out.extend_from_slice(&record.trace.render()[3..35]);
    out.extend_from_slice(b"\"}\n");
}

fn key(out: &mut Vec<u8>, name: &str) {
    out.extend_from_slice(b",\"");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
}

fn number(out: &mut Vec<u8>, name: &str, value: u64) {
    key(out, name);
    out.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

fn text(out: &mut Vec<u8>, name: &str, value: &str) {
    key(out, name);
    out.push(b'"');
    escape(out, value);
    out.push(b'"');
}

/// Appends a string with the escapes that JSON requires. Also escapes control characters that a terminal would execute,
/// and characters that change the direction of text.
fn escape(out: &mut Vec<u8>, value: &str) {
    if value.bytes().all(|byte| (0x20..0x7f).contains(&byte) && byte != b'"' && byte != b'\\') {
        out.extend_from_slice(value.as_bytes());
        return;
    }
    for char in value.chars() {
        match char {
            '"' => out.extend_from_slice(b"\\\""),
            '\\' => out.extend_from_slice(b"\\\\"),
            '\0'..' ' | '\u{7f}'..='\u{9f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(char));
            }
            _ => out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

fn source(out: &mut Vec<u8>, source: SocketAddr) {
    out.push(b'"');
    match source.ip() {
        IpAddr::V4(v4) => write_ipv4(out, v4),
        IpAddr::V6(v6) => {
            let _ = write!(out, "[{v6}]");
        }
    }
    out.push(b':');
    out.extend_from_slice(itoa::Buffer::new().format(source.port()).as_bytes());
    out.push(b'"');
}

fn authority(out: &mut Vec<u8>, authority: &hermes_model::Authority) {
    out.push(b'"');
    escape(out, &authority.uri_host());
    if let Some(port) = authority.explicit_port() {
        out.push(b':');
        out.extend_from_slice(itoa::Buffer::new().format(port).as_bytes());
    }
    out.push(b'"');
}

/// Appends the member `duration_ms`, in milliseconds with three decimals.
fn milliseconds(out: &mut Vec<u8>, duration: std::time::Duration) {
    key(out, "duration_ms");
    let micros = duration.as_micros() as u64;
    let mut digits = itoa::Buffer::new();
    out.extend_from_slice(digits.format(micros / 1000).as_bytes());
    out.push(b'.');
    out.extend_from_slice(&three_digits((micros % 1000) as u32));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn escaped(value: &str) -> String {
        let mut out = Vec::new();
        text(&mut out, "k", value);
        // The text follows another member of an object.
        let json = format!("{{\"a\":0{}}}", String::from_utf8(out).unwrap());
        serde_json::from_str::<serde_json::Value>(&json).unwrap()["k"].as_str().unwrap().to_owned()
    }

    #[test]
    fn strings_survive() {
        for value in ["plain", "a\"b", "a\\b", "line\nbreak\u{1}", "snow \u{2603}", ""] {
            assert_eq!(escaped(value), value);
        }
    }

    #[test]
    fn nothing_is_written_that_a_terminal_obeys() {
        for value in ["\u{1b}[2J", "\u{9b}2J", "\u{7f}", "a\u{202e}b", "a\u{2066}b", "\u{2028}"] {
            let mut out = Vec::new();
            text(&mut out, "k", value);
            assert!(out.is_ascii() && out.iter().all(|byte| (0x20..0x7f).contains(byte)), "{value:?}: {out:?}");
            assert_eq!(escaped(value), value);
        }
    }

    #[test]
    fn addresses_are_written_as_the_standard_library_does() {
        for address in ["127.0.0.1:80", "255.1.20.3:65535", "[::1]:8080", "[2001:db8::1]:1"] {
            let mut out = Vec::new();
            source(&mut out, address.parse().unwrap());
            assert_eq!(String::from_utf8(out).unwrap(), format!("\"{address}\""));
        }
    }

    #[test]
    fn times_are_written_as_the_library_does() {
        let mut clock = Clock::default();
        for millis in [0, 999, 1_000, 1_005, 1_005, 951_782_400_050, 4_102_444_799_999, 7] {
            let time = UNIX_EPOCH + std::time::Duration::from_millis(millis);
            let mut out = Vec::new();
            clock.write(&mut out, time);
            assert_eq!(String::from_utf8(out).unwrap(), humantime::format_rfc3339_millis(time).to_string());
        }
    }

    #[test]
    fn durations_keep_their_zeros() {
        let mut out = Vec::new();
        milliseconds(&mut out, std::time::Duration::from_micros(12_005));
        assert_eq!(out, b",\"duration_ms\":12.005");
    }
}

//! The frames of connections: the content of publications to receive channels and listen channels.
//!
//! A frame is a JSON object, a line feed, and bytes of the stream. So a client in a browser can write one, too. In: bytes of
//! anybody. Out: a frame within its bounds, or nothing.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::ranges::Range;

/// The longest JSON object, in bytes.
const MAX_HEAD: usize = 8 << 10;
/// The most receive channels of one end.
pub(super) const MAX_CHANNELS: usize = 8;
/// The most ranges that one frame acknowledges out of order.
pub(super) const MAX_RANGES: usize = 32;
/// The longest reason of a reset, in bytes.
const MAX_REASON: usize = 512;

/// An end of a connection: 128 random bits, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct EndId(String);

impl EndId {
    pub(super) fn random() -> Self {
        Self(format!("{:032x}", rand::random::<u128>()))
    }

    fn is_valid(&self) -> bool {
        self.0.len() == 32 && self.0.bytes().all(|byte| byte.is_ascii_hexdigit())
    }
}

impl std::fmt::Display for EndId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A frame. Each part may be absent; a frame has several parts if it can.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Frame {
    /// The end that gets the frame. Absent in the first one, which opens the connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<EndId>,
    /// The end that sends the frame, in its first ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<EndId>,
    /// The URLs at which the sender receives, in its first frames.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub receive: Vec<String>,
    /// The place of `data` in the sender's stream, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The sender's stream ends after `data`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub end: bool,
    /// The part of the other stream that the sender has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acknowledged: Option<Acknowledgement>,
    /// Both ends have received everything, and the application of the sender has taken it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub closed: bool,
    /// The connection fails, for this reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset: Option<String>,
    /// Bytes of the stream.
    #[serde(skip)]
    pub data: Bytes,
}

/// The parts of a stream that an end has received.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Acknowledgement {
    /// All bytes before this one.
    pub before: u64,
    /// Ranges after it, in their order: `[first, after the last]`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<Range>,
    /// The end of the stream, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub end: bool,
    /// The other end may send up to this byte, without it.
    pub limit: u64,
}

impl Frame {
    /// The content of a publication.
    pub(super) fn encode(&self) -> Bytes {
        // A frame has no map whose keys could be unfit.
        let mut content = serde_json::to_vec(self).unwrap_or_default();
        content.push(b'\n');
        content.extend_from_slice(&self.data);
        content.into()
    }

    /// Reads the content of a publication. `None`: it is no frame.
    pub(super) fn decode(content: &Bytes) -> Option<Self> {
        let head = content.get(..content.len().min(MAX_HEAD))?;
        let length = memchr(b'\n', head)?;
        let mut frame: Self = serde_json::from_slice(&head[..length]).ok()?;
        frame.data = content.slice(length + 1..);
        if let Some(reason) = &mut frame.reset {
            // A terminal may show it.
            reason.retain(|character| !character.is_control());
        }
        let ends = [&frame.to, &frame.from];
        let are_ends_valid = ends.into_iter().flatten().all(EndId::is_valid);
        let is_reason_short = frame.reset.as_ref().is_none_or(|reason| reason.len() <= MAX_REASON);
        let is_placed = frame.offset.is_some() || (frame.data.is_empty() && !frame.end);
        let are_lists_short = frame.receive.len() <= MAX_CHANNELS
            && frame.acknowledged.as_ref().is_none_or(|acknowledged| acknowledged.ranges.len() <= MAX_RANGES);
        (are_ends_valid && is_reason_short && is_placed && are_lists_short).then_some(frame)
    }

    /// A frame that ends the connection.
    pub(super) fn reset(from: EndId, to: EndId, reason: &str) -> Self {
        let end = (0..=reason.len().min(MAX_REASON)).rev().find(|end| reason.is_char_boundary(*end));
        Self {
            to: Some(to),
            from: Some(from),
            reset: Some(reason[..end.unwrap_or_default()].to_owned()),
            ..Self::default()
        }
    }
}

/// Reads the content of a publication as a frame of a connection, and returns what the same frame is when it is written.
/// `None`: it is no frame.
pub fn rewritten_frame(content: &Bytes) -> Option<Bytes> {
    Frame::decode(content).map(|frame| frame.encode())
}

fn memchr(byte: u8, text: &[u8]) -> Option<usize> {
    text.iter().position(|other| *other == byte)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_survives_its_encoding() {
        let frame = Frame {
            to: Some(EndId::random()),
            from: Some(EndId::random()),
            receive: vec!["http://relay/x/1".to_owned()],
            offset: Some(7),
            end: true,
            acknowledged: Some(Acknowledgement { before: 3, ranges: vec![(5, 9)], end: false, limit: 100 }),
            data: Bytes::from_static(b"one\ntwo"),
            ..Frame::default()
        };
        assert_eq!(Frame::decode(&frame.encode()), Some(frame));
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let id = "0123456789abcdef0123456789abcdef";
        let decode = |text: String| Frame::decode(&Bytes::from(text));
        assert!(decode(format!("{{\"to\":\"{id}\"}}\n")).is_some());
        for (what, text) in [
            ("nothing", String::new()),
            ("no line feed", format!("{{\"to\":\"{id}\"}}")),
            ("no JSON", "hello\n".to_owned()),
            ("a short end", "{\"to\":\"0123\"}\n".to_owned()),
            ("data without a place", format!("{{\"to\":\"{id}\"}}\ndata")),
            ("an end without a place", "{\"end\":true}\n".to_owned()),
            ("an unknown key", "{\"colour\":1}\n".to_owned()),
            ("too many channels", format!("{{\"receive\":[{}\"\"]}}\n", "\"\",".repeat(MAX_CHANNELS))),
            ("a long reason", format!("{{\"reset\":\"{}\"}}\n", "x".repeat(MAX_REASON + 1))),
            ("a head without an end", " ".repeat(3 * MAX_HEAD) + "{}\n"),
        ] {
            assert_eq!(decode(text), None, "{what}");
        }
    }

    #[test]
    fn a_reason_does_not_control_a_terminal() {
        let frame = Frame::decode(&Bytes::from_static(b"{\"reset\":\"a\\u001b[2Jb\"}\n"));
        assert_eq!(frame.and_then(|frame| frame.reset).as_deref(), Some("a[2Jb"));
    }

    #[test]
    fn a_long_reason_is_cut_at_a_character() {
        let frame = Frame::reset(EndId::random(), EndId::random(), &"ü".repeat(MAX_REASON));
        assert_eq!(frame.reset.as_deref(), Some("ü".repeat(MAX_REASON / 2).as_str()));
    }
}

//! Publications as server-sent events (HTML Standard, section 9.2).
//!
//! In: deliveries. Out: events, whose `id` is the position to resume from. Text without carriage returns is written as
//! it is; other content as base64 with the event type `base64`, since the format changes line ends. A gap is an event of
//! type `gap`. Never: a line of a publication that a browser takes for a field.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;

use crate::publication::{Encoded, Form};
use crate::{Delivery, Publication};

/// A comment.
pub(super) const HEARTBEAT: Bytes = Bytes::from_static(b":\n\n");

/// An identifier without an event. A browser resumes from it.
pub(super) fn begin(position: &str) -> Bytes {
    format!("id: {position}\n\n").into()
}

/// The bytes after the lines of an event.
const TAIL: Bytes = Bytes::from_static(b"\n");

pub(super) fn write(out: &mut Vec<u8>, delivery: &Delivery, position: &str, names_channel: bool) {
    let (channel, missed) = match delivery {
        Delivery::Publication(publication) if !publication.is_aborted() => {
            let encoded = encode(&publication.content.body.whole());
            write_head(out, &publication.channel, kind(&encoded), position, names_channel);
            out.extend_from_slice(&encoded.bytes);
            out.extend_from_slice(&TAIL);
            return;
        }
        Delivery::Publication(publication) => (&publication.channel, super::missed_text(Some(1))),
        Delivery::Gap { channel, missed, .. } => (channel, super::missed_text(*missed)),
    };
    write_head(out, channel, Some("gap"), position, names_channel);
    out.extend_from_slice(&lines(&missed));
    out.extend_from_slice(&TAIL);
}

/// Writes what comes before the content of a publication, and returns the content and what follows it.
pub(super) fn write_around(
    out: &mut Vec<u8>,
    publication: &Publication,
    position: &str,
    names_channel: bool,
) -> (Bytes, Bytes) {
    let encoded = publication.encoded(Form::EventStream, encode);
    write_head(out, &publication.channel, kind(encoded), position, names_channel);
    (encoded.bytes.clone(), TAIL)
}

/// The content as lines of an event.
fn encode(content: &[u8]) -> Encoded {
    match std::str::from_utf8(content) {
        Ok(text) if !text.contains('\r') => Encoded { is_base64: false, bytes: lines(text).into() },
        _ => Encoded { is_base64: true, bytes: lines(&BASE64_STANDARD.encode(content)).into() },
    }
}

fn kind(encoded: &Encoded) -> Option<&'static str> {
    encoded.is_base64.then_some("base64")
}

fn write_head(out: &mut Vec<u8>, channel: &str, kind: Option<&str>, position: &str, names_channel: bool) {
    out.extend_from_slice(b"id: ");
    out.extend_from_slice(position.as_bytes());
    out.push(b'\n');
    // The path of a URI has no line feed.
    let channel = super::path_of(channel);
    match (kind, names_channel) {
        (None, false) => {}
        (None, true) => out.extend_from_slice(format!("event: {channel}\n").as_bytes()),
        (Some(kind), false) => out.extend_from_slice(format!("event: {kind}\n").as_bytes()),
        (Some(kind), true) => out.extend_from_slice(format!("event: {kind} {channel}\n").as_bytes()),
    }
}

fn lines(text: &str) -> Vec<u8> {
    let mut lines = Vec::with_capacity(text.len() + 16);
    for line in text.split('\n') {
        lines.extend_from_slice(b"data: ");
        lines.extend_from_slice(line.as_bytes());
        lines.push(b'\n');
    }
    lines
}

//! Publications as server-sent events (HTML Standard, section 9.2).
//!
//! In: deliveries. Out: events, whose `id` is the position to resume from. Text without carriage returns is written as
//! it is; other content as base64 with the event type `base64`, since the format changes line ends. A gap is an event of
//! type `gap`. Never: a line of a publication that a browser takes for a field.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;

use crate::Delivery;

/// A comment.
pub(super) const HEARTBEAT: Bytes = Bytes::from_static(b":\n\n");

/// An identifier without an event. A browser resumes from it.
pub(super) fn begin(position: &str) -> Bytes {
    format!("id: {position}\n\n").into()
}

pub(super) fn write(out: &mut Vec<u8>, delivery: &Delivery, position: &str, names_channel: bool) {
    let (channel, kind, data) = match delivery {
        Delivery::Publication(publication) if !publication.is_aborted() => {
            let body = publication.content.body.whole();
            match std::str::from_utf8(&body) {
                Ok(text) if !text.contains('\r') => (&publication.channel, None, text.to_owned()),
                _ => (&publication.channel, Some("base64"), BASE64_STANDARD.encode(body)),
            }
        }
        Delivery::Publication(publication) => (&publication.channel, Some("gap"), super::missed_text(Some(1))),
        Delivery::Gap { channel, missed, .. } => (channel, Some("gap"), super::missed_text(*missed)),
    };
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
    for line in data.split('\n') {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(line.as_bytes());
        out.push(b'\n');
    }
    out.push(b'\n');
}

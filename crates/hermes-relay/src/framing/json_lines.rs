//! Publications as lines of JSON.
//!
//! In: deliveries. Out: an object a line: `id`, `channel` (if there are several), `type`, and `data` for text or `base64`
//! for other content; `missed` for a gap. An empty line means nothing. Never: a line feed within a line.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use serde_json::{Map, Value};

use crate::publication::{Encoded, Form};
use crate::{Delivery, Publication};

pub(super) fn write(out: &mut Vec<u8>, delivery: &Delivery, position: &str, names_channel: bool) {
    if let Delivery::Publication(publication) = delivery
        && !publication.is_aborted()
    {
        let encoded = encode(&publication.content.body.whole());
        out.extend_from_slice(head(&encoded));
        out.extend_from_slice(&encoded.bytes);
        out.extend_from_slice(&tail(publication, position, names_channel));
        return;
    }
    let mut line = Map::new();
    line.insert("id".to_owned(), position.into());
    let channel = match delivery {
        Delivery::Publication(publication) => {
            line.insert("missed".to_owned(), 1.into());
            &publication.channel
        }
        Delivery::Gap { channel, missed, .. } => {
            line.insert("missed".to_owned(), missed.map_or(Value::Null, Value::from));
            channel
        }
    };
    if names_channel {
        line.insert("channel".to_owned(), super::path_of(channel).into());
    }
    out.extend_from_slice(Value::Object(line).to_string().as_bytes());
    out.push(b'\n');
}

/// Writes what comes before the content of a publication, and returns the content and what follows it.
pub(super) fn write_around(
    out: &mut Vec<u8>,
    publication: &Publication,
    position: &str,
    names_channel: bool,
) -> (Bytes, Bytes) {
    let encoded = publication.encoded(Form::Json, encode);
    out.extend_from_slice(head(encoded));
    (encoded.bytes.clone(), tail(publication, position, names_channel).into())
}

/// The content as a JSON string.
fn encode(content: &[u8]) -> Encoded {
    match std::str::from_utf8(content) {
        Ok(text) => Encoded { is_base64: false, bytes: Value::from(text).to_string().into() },
        Err(_) => Encoded { is_base64: true, bytes: format!("\"{}\"", BASE64_STANDARD.encode(content)).into() },
    }
}

fn head(encoded: &Encoded) -> &'static [u8] {
    if encoded.is_base64 { b"{\"base64\":" } else { b"{\"data\":" }
}

fn tail(publication: &Publication, position: &str, names_channel: bool) -> Vec<u8> {
    let mut rest = Map::new();
    rest.insert("id".to_owned(), position.into());
    if let Some(kind) = super::content_type(publication) {
        rest.insert("type".to_owned(), kind.into());
    }
    if names_channel {
        rest.insert("channel".to_owned(), super::path_of(&publication.channel).into());
    }
    // The content is the first field of the object: a comma replaces the opening brace.
    let mut tail = Value::Object(rest).to_string().into_bytes();
    tail[0] = b',';
    tail.push(b'\n');
    tail
}

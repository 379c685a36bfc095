//! Publications as lines of JSON.
//!
//! In: deliveries. Out: an object a line: `id`, `channel` (if there are several), `type`, and `data` for text or `base64`
//! for other content; `missed` for a gap. An empty line means nothing. Never: a line feed within a line.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value};

use crate::Delivery;

pub(super) fn write(out: &mut Vec<u8>, delivery: &Delivery, position: &str, names_channel: bool) {
    let mut line = Map::new();
    line.insert("id".to_owned(), position.into());
    let channel = match delivery {
        Delivery::Publication(publication) if !publication.is_aborted() => {
            if let Some(kind) = super::content_type(publication) {
                line.insert("type".to_owned(), kind.into());
            }
            let body = publication.content.body.whole();
            match std::str::from_utf8(&body) {
                Ok(text) => line.insert("data".to_owned(), text.into()),
                Err(_) => line.insert("base64".to_owned(), BASE64_STANDARD.encode(body).into()),
            };
            &publication.channel
        }
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

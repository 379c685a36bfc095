//! The forms in which a response carries publications, one after the other.
//!
//! In: deliveries. Out: bytes of a response body that never ends by itself, and parsers of the forms that programs of
//! ours read. Never: a publication that looks like the bytes between two of them.
//!
//! | form | content | identifier, fields |
//! |---|---|---|
//! | `text/event-stream` | text; other bytes as base64, with the event type `base64` | `id` |
//! | `multipart/mixed` | any bytes | fields of each part |
//! | `application/x-ndjson` | text, or `base64` | members of each line |

pub mod event_stream;
pub mod json_lines;
pub mod multipart;

use bytes::Bytes;
use http::HeaderValue;
use http::header::CONTENT_TYPE;

use crate::{Content, Delivery, Publication};

/// A form of a stream of publications.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Framing {
    /// `text/event-stream`
    EventStream,
    /// `multipart/mixed`
    Multipart {
        /// A random number, so that no publisher can write it.
        boundary: String,
    },
    /// `application/x-ndjson`
    JsonLines,
}

impl Framing {
    /// Selects the form by `Accept`. Without one, or for `*/*`, it is `multipart/mixed`, which carries any bytes.
    /// `None`: the client accepts none of the forms.
    pub fn select(accept: Option<&str>, boundary: u128) -> Option<Self> {
        let multipart = || Self::Multipart { boundary: format!("hermes-{boundary:032x}") };
        let Some(accept) = accept else { return Some(multipart()) };
        let mut best: Option<(u16, Self)> = None;
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let form = match parts.next().unwrap_or_default().to_ascii_lowercase().as_str() {
                "text/event-stream" => Self::EventStream,
                "application/x-ndjson" | "application/*" => Self::JsonLines,
                "multipart/mixed" | "multipart/*" | "*/*" => multipart(),
                "text/*" => Self::EventStream,
                _ => continue,
            };
            let quality = parts.find_map(|part| part.strip_prefix("q=")).map_or(1000, quality);
            if quality > 0 && best.as_ref().is_none_or(|(other, _)| quality > *other) {
                best = Some((quality, form));
            }
        }
        best.map(|(_, form)| form)
    }

    /// The media type of the response.
    pub fn content_type(&self) -> HeaderValue {
        match self {
            Self::EventStream => HeaderValue::from_static("text/event-stream"),
            Self::JsonLines => HeaderValue::from_static("application/x-ndjson"),
            // A boundary consists of letters, digits and hyphens.
            Self::Multipart { boundary } => HeaderValue::try_from(format!("multipart/mixed; boundary={boundary}"))
                .unwrap_or_else(|_| HeaderValue::from_static("multipart/mixed")),
        }
    }

    /// The bytes before the first delivery. They tell the client at once that the subscription stands, and an EventSource
    /// from where to resume.
    pub fn begin(&self, position: &str) -> Bytes {
        match self {
            Self::EventStream => event_stream::begin(position),
            Self::JsonLines => Bytes::new(),
            Self::Multipart { boundary } => multipart::begin(boundary),
        }
    }

    /// Writes a delivery. `position` is the identifier to resume after it. The channel is written if `names_channel`.
    pub fn write(&self, out: &mut Vec<u8>, delivery: &Delivery, position: &str, names_channel: bool) {
        match self {
            Self::EventStream => event_stream::write(out, delivery, position, names_channel),
            Self::JsonLines => json_lines::write(out, delivery, position, names_channel),
            Self::Multipart { boundary } => multipart::write(out, delivery, position, names_channel, boundary),
        }
    }

    /// Writes a delivery like [`Self::write`]. If its content is at least this long, or needs no change and still arrives, writes
    /// only the bytes before it, and returns it with the bytes after it. All subscribers share it.
    pub fn write_around(
        &self,
        out: &mut Vec<u8>,
        delivery: &Delivery,
        position: &str,
        names_channel: bool,
        min_bytes: usize,
    ) -> Option<(Content, Bytes)> {
        let long = match delivery {
            Delivery::Publication(publication) => Some((publication, &publication.content.body)),
            Delivery::Gap { .. } => None,
        };
        let is_long =
            |publication: &Publication, content: &Content| content.len() >= min_bytes && !publication.is_aborted();
        match (self, long) {
            (Self::Multipart { boundary }, Some((publication, content)))
                if content.is_arriving() || is_long(publication, content) =>
            {
                multipart::write_head(out, delivery, position, names_channel, Some(content.len()));
                Some((content.clone(), multipart::tail(boundary)))
            }
            (Self::JsonLines, Some((publication, content))) if is_long(publication, content) => {
                let (data, tail) = json_lines::write_around(out, publication, position, names_channel);
                Some((data.into(), tail))
            }
            (Self::EventStream, Some((publication, content))) if is_long(publication, content) => {
                let (data, tail) = event_stream::write_around(out, publication, position, names_channel);
                Some((data.into(), tail))
            }
            _ => {
                self.write(out, delivery, position, names_channel);
                None
            }
        }
    }

    /// The bytes that keep an idle connection open, and mean nothing.
    pub fn heartbeat(&self) -> Bytes {
        match self {
            Self::EventStream => event_stream::HEARTBEAT,
            Self::JsonLines => Bytes::from_static(b"\n"),
            Self::Multipart { boundary } => multipart::heartbeat(boundary),
        }
    }

    /// The bytes after the last delivery.
    pub fn end(&self) -> Bytes {
        match self {
            Self::EventStream | Self::JsonLines => Bytes::new(),
            Self::Multipart { boundary } => multipart::end(boundary),
        }
    }
}

/// Reads a quality value (RFC 9110, section 12.4.2) in thousandths. A malformed one counts as 0.
fn quality(text: &str) -> u16 {
    let number: f32 = text.parse().unwrap_or_default();
    // In range after the clamp.
    (number.clamp(0.0, 1.0) * 1000.0) as u16
}

fn content_type(publication: &Publication) -> Option<&str> {
    publication.content.headers.get(CONTENT_TYPE)?.to_str().ok()
}

/// The path of a channel, whose name is an authority and a path.
fn path_of(channel: &str) -> &str {
    channel.find('/').map_or(channel, |at| &channel[at..])
}

/// The number of publications of a gap, as text.
fn missed_text(missed: Option<u64>) -> String {
    missed.map_or_else(|| "unknown".to_owned(), |missed| missed.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accept_selects_the_form() {
        let multipart = Some(Framing::Multipart { boundary: "hermes-00000000000000000000000000000007".to_owned() });
        for (accept, form) in [
            (None, multipart.clone()),
            (Some("*/*"), multipart.clone()),
            (Some("text/event-stream"), Some(Framing::EventStream)),
            (Some("text/html, Text/Event-Stream;q=0.5, */*;q=0.1"), Some(Framing::EventStream)),
            (Some("text/event-stream;q=0.2, application/x-ndjson;q=0.9"), Some(Framing::JsonLines)),
            (Some("text/event-stream;q=0, */*;q=0.1"), multipart),
            (Some("text/html"), None),
            (Some("multipart/mixed;q=x"), None),
        ] {
            assert_eq!(Framing::select(accept, 7), form, "{accept:?}");
        }
    }
}

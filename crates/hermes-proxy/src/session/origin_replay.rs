//! Checks that an origin repeats its response when a request is sent to it again.
//!
//! In: the stored part of the earlier response, and the new response. Out: the part of the new response that follows.
//! The part that later nodes already hold must be its beginning, byte for byte.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;

use bytes::Bytes;
use hermes_wire::binary_http::{Control, Part as Piece};
use hermes_wire::custody::{Direction, ExchangeId};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderName, LAST_MODIFIED};
use http::response::Parts;
use http_body::Body as HttpBody;

use crate::custody::message::{Reading, chunk, end};
use crate::worker::Worker;
use hermes_transport::body::ResponseBody;
use hermes_transport::error::Error;

/// The read size for the stored response.
const READ: u64 = 256 << 10;
/// The header fields that must be equal.
const SAME: [HeaderName; 6] = [CONTENT_LENGTH, CONTENT_TYPE, CONTENT_ENCODING, CONTENT_RANGE, ETAG, LAST_MODIFIED];

/// The reason why the responses do not match.
pub(super) enum ReplayMismatch {
    /// The named part of the new response differs from the stored one.
    Differs(&'static str),
    /// The new response broke off before that point.
    Broken(Error),
}

/// Reads the new response up to `kept`, the length of the stored part, and compares. Returns the content that follows,
/// framed, and whether it is the end.
pub(super) async fn prove(
    worker: &Rc<Worker>,
    id: ExchangeId,
    kept: u64,
    parts: &Parts,
    body: &mut ResponseBody,
) -> Result<(Bytes, bool), ReplayMismatch> {
    let office = &worker.services.custody;
    let (mut at, mut reading, mut now) = (0, Reading::new(worker), Bytes::new());
    loop {
        let piece = reading.next().map_err(|_| ReplayMismatch::Differs("the stored response is damaged"))?;
        match piece {
            Some(Piece::Head(control, fields)) => {
                let status = matches!(control, Control::Response { status } if status == parts.status.as_u16());
                let same = |name: &HeaderName| {
                    let before = fields.iter().find(|(known, _)| *known == name.as_str()).map(|(_, value)| &value[..]);
                    before == parts.headers.get(name).map(http::HeaderValue::as_bytes)
                };
                if !status || !SAME.iter().all(same) {
                    return Err(ReplayMismatch::Differs("status or content fields"));
                }
            }
            Some(Piece::Content(before)) => {
                let mut before = &before[..];
                while !before.is_empty() {
                    if now.is_empty() {
                        now = next(body).await?.ok_or(ReplayMismatch::Differs("shorter content"))?;
                    }
                    let both = before.len().min(now.len());
                    if before[..both] != now.split_to(both)[..] {
                        return Err(ReplayMismatch::Differs("its content"));
                    }
                    before = &before[both..];
                }
            }
            // A complete response is never requested again.
            Some(Piece::End(_)) => return Err(ReplayMismatch::Differs("longer content")),
            None if at < kept => {
                let length = (kept - at).min(READ);
                let bytes = office.read_back(id, Direction::Response, at, length).await;
                reading.push(bytes.ok_or(ReplayMismatch::Differs("the stored response cannot be read"))?);
                at += length;
            }
            None => break,
        }
    }
    if !now.is_empty() {
        return Ok((chunk(&now), false));
    }
    // Either the next chunk follows or the end.
    match next(body).await? {
        Some(data) => Ok((chunk(&data), false)),
        None => Ok((end(None), true)),
    }
}

/// The next chunk of a body. Trailers are dropped: the earlier head may not have announced them.
async fn next(body: &mut ResponseBody) -> Result<Option<Bytes>, ReplayMismatch> {
    loop {
        match poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) if data.is_empty() => {}
                Ok(data) => return Ok(Some(data)),
                Err(_) => return Ok(None),
            },
            Some(Err(error)) => return Err(ReplayMismatch::Broken(error)),
            None => return Ok(None),
        }
    }
}

//! An origin that is asked for the same once more: whether it answers the same.
//!
//! In: what was kept of the answer before, and the answer now. Out: what comes behind the former. What the next ones have of
//! an answer already must be its beginning, byte for byte.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;

use bytes::Bytes;
use hermes_wire::binary_http::{Control, Part as Piece};
use hermes_wire::custody::{ExchangeId, Part};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderName, LAST_MODIFIED};
use http::response::Parts;
use http_body::Body as HttpBody;

use super::message::{Reading, chunk, end};
use crate::body::ResponseBody;
use crate::error::Error;
use crate::worker::Worker;

/// Bytes of the former answer that are read at once.
const READ: u64 = 256 << 10;
/// What may not differ.
const SAME: [HeaderName; 6] = [CONTENT_LENGTH, CONTENT_TYPE, CONTENT_ENCODING, CONTENT_RANGE, ETAG, LAST_MODIFIED];

/// Why it is not the same.
pub(super) enum Unproven {
    /// In this.
    Differs(&'static str),
    /// It broke before it had come so far.
    Broken(Error),
}

/// Reads as much of the answer as was kept before, so many bytes of its string, and compares. What of it came behind that,
/// in its frame; and whether that is the end.
pub(super) async fn prove(
    worker: &Rc<Worker>,
    id: ExchangeId,
    kept: u64,
    parts: &Parts,
    body: &mut ResponseBody,
) -> Result<(Bytes, bool), Unproven> {
    let office = &worker.shared.custody;
    let (mut at, mut reading, mut now) = (0, Reading::new(worker), Bytes::new());
    loop {
        let piece = reading.next().map_err(|_| Unproven::Differs("what was kept of it is damaged"))?;
        match piece {
            Some(Piece::Head(control, fields)) => {
                let status = matches!(control, Control::Response { status } if status == parts.status.as_u16());
                let same = |name: &HeaderName| {
                    let before = fields.iter().find(|(known, _)| *known == name.as_str()).map(|(_, value)| &value[..]);
                    before == parts.headers.get(name).map(http::HeaderValue::as_bytes)
                };
                if !status || !SAME.iter().all(same) {
                    return Err(Unproven::Differs("its status, or what it says of its content"));
                }
            }
            Some(Piece::Content(before)) => {
                let mut before = &before[..];
                while !before.is_empty() {
                    if now.is_empty() {
                        now = next(body).await?.ok_or(Unproven::Differs("it is shorter"))?;
                    }
                    let both = before.len().min(now.len());
                    if before[..both] != now.split_to(both)[..] {
                        return Err(Unproven::Differs("its content"));
                    }
                    before = &before[both..];
                }
            }
            // It was whole, and nobody asks for it then.
            Some(Piece::End(_)) => return Err(Unproven::Differs("it was over")),
            None if at < kept => {
                let length = (kept - at).min(READ);
                let bytes = office.read_back(id, Part::Response, at, length).await;
                reading.push(bytes.ok_or(Unproven::Differs("what was kept of it cannot be read again"))?);
                at += length;
            }
            None => break,
        }
    }
    if !now.is_empty() {
        return Ok((chunk(&now), false));
    }
    // Something has to come next, or nothing more does.
    match next(body).await? {
        Some(data) => Ok((chunk(&data), false)),
        None => Ok((end(None), true)),
    }
}

/// The next data of a body. What trails behind it is left out: the head before may not have announced it.
async fn next(body: &mut ResponseBody) -> Result<Option<Bytes>, Unproven> {
    loop {
        match poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) if data.is_empty() => {}
                Ok(data) => return Ok(Some(data)),
                Err(_) => return Ok(None),
            },
            Some(Err(error)) => return Err(Unproven::Broken(error)),
            None => return Ok(None),
        }
    }
}

//! HTTP messages encoded as the byte streams of custody (RFC 9292), and back.
//!
//! In: heads and bodies of a session, or byte streams. Out: byte streams, or heads and bodies. Never: the meaning of a
//! field.

mod body;
mod body_writer;

use bytes::{BufMut, Bytes, BytesMut};
use hermes_wire::binary_http::{
    BinaryHttpError, Control, Decoder, Field, Part as Piece, put_chunk_head, put_end, put_head,
};
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};

pub(crate) use self::body::CustodyBody;
pub(crate) use self::body::Uploading;
pub(crate) use self::body_writer::{WriteError, Writing};
use crate::service::forward::head::Outgoing;
use crate::worker::Worker;
use hermes_outbound::outbound::pool::ADDED_BYTES;

/// Encodes the head of a request.
pub(crate) fn request_head(outgoing: Outgoing) -> Bytes {
    let bytes = |text: &str| Bytes::copy_from_slice(text.as_bytes());
    // CONNECT has neither scheme nor path (RFC 9292, section 3.4).
    let is_connect = outgoing.method == Method::CONNECT;
    let unless_connect = |text: &str| if is_connect { Bytes::new() } else { bytes(text) };
    let control = Control::Request {
        method: bytes(outgoing.method.as_str()),
        scheme: unless_connect(outgoing.scheme.as_str()),
        authority: Bytes::copy_from_slice(outgoing.host.as_bytes()),
        path: unless_connect(outgoing.path.as_str()),
    };
    put(&control, &outgoing.fields)
}

/// Encodes the head of a response.
pub(crate) fn response_head(status: StatusCode, fields: &HeaderMap) -> Bytes {
    put(&Control::Response { status: status.as_u16() }, fields)
}

fn put(control: &Control, fields: &HeaderMap) -> Bytes {
    let mut out = BytesMut::with_capacity(512);
    put_head(control, lines(fields), &mut out);
    out.freeze()
}

fn lines(fields: &HeaderMap) -> impl Iterator<Item = (&[u8], &[u8])> {
    fields.iter().map(|(name, value)| (name.as_str().as_bytes(), value.as_bytes()))
}

/// Decodes the head of a request.
///
/// # Errors
/// The reason why the head is invalid.
pub(crate) fn request(control: Control, fields: Vec<Field>) -> Result<http::request::Parts, String> {
    let Control::Request { method, scheme, authority, path } = control else {
        return Err("expected a request, found a response".to_owned());
    };
    if method == Method::CONNECT.as_str() {
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.method = Method::CONNECT;
        parts.uri = Uri::try_from(&authority[..]).map_err(|error| error.to_string())?;
        parts.version = Version::HTTP_2;
        parts.headers = head_fields(fields)?;
        return Ok(parts);
    }
    let text =
        |bytes: &Bytes| String::from_utf8(bytes.to_vec()).map_err(|_| "the request target is not UTF-8".to_owned());
    let uri = Uri::builder().scheme(text(&scheme)?.as_str()).authority(text(&authority)?).path_and_query(text(&path)?);
    let (mut parts, ()) = Request::new(()).into_parts();
    parts.method = Method::from_bytes(&method).map_err(|error| error.to_string())?;
    parts.uri = uri.build().map_err(|error| error.to_string())?;
    parts.version = Version::HTTP_2;
    parts.headers = head_fields(fields)?;
    Ok(parts)
}

/// The header fields of a head. All `content-length` fields must hold one number, or the end of the message is
/// ambiguous.
fn head_fields(fields: Vec<Field>) -> Result<HeaderMap, String> {
    let headers = headers(fields)?;
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    if let Some(first) = lengths.next() {
        let digits = first.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        let is_number = digits.is_some_and(|text| text.parse::<u64>().is_ok());
        if !is_number || lengths.any(|other| other != first) {
            return Err("its lengths differ, or are none".to_owned());
        }
    }
    Ok(headers)
}

fn headers(fields: Vec<Field>) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::with_capacity(fields.len());
    for (name, value) in fields {
        let name = HeaderName::from_lowercase(&name).map_err(|error| error.to_string())?;
        let value = HeaderValue::from_maybe_shared(value).map_err(|error| error.to_string())?;
        headers.try_append(name, value).map_err(|error| error.to_string())?;
    }
    Ok(headers)
}

/// A decoder of a byte stream.
pub(crate) struct Reading {
    decoder: Decoder,
    /// The number of bytes given to the decoder.
    taken: u64,
}

impl Reading {
    pub(crate) fn new(worker: &Worker) -> Self {
        let most = worker.generation().snapshot.limits.header_bytes + ADDED_BYTES as usize;
        Self { decoder: Decoder::new(most), taken: 0 }
    }

    pub(crate) fn push(&mut self, bytes: Bytes) {
        self.taken += bytes.len() as u64;
        self.decoder.push(bytes);
    }

    pub(crate) fn next(&mut self) -> Result<Option<Piece>, BinaryHttpError> {
        self.decoder.next()
    }

    /// The number of bytes that were decoded.
    pub(crate) fn read(&self) -> u64 {
        self.taken - self.decoder.unread() as u64
    }
}

/// The head of a response, and the offset of its end in the stream.
pub(crate) struct ResponseHead {
    pub(crate) response: Response<()>,
    pub(crate) length: u64,
}

/// Decodes the head of a response; `None`: another piece must be read first.
pub(crate) fn response(piece: Option<Piece>, reading: &Reading) -> Result<Option<ResponseHead>, String> {
    match piece {
        Some(Piece::Head(Control::Response { status }, fields)) if status >= 200 => {
            let mut response = Response::new(());
            *response.status_mut() = StatusCode::from_u16(status).map_err(|error| error.to_string())?;
            *response.version_mut() = Version::HTTP_2;
            *response.headers_mut() = head_fields(fields)?;
            Ok(Some(ResponseHead { response, length: reading.read() }))
        }
        Some(Piece::Head(Control::Request { .. }, _)) => Err("expected a response, found a request".to_owned()),
        _ => Ok(None),
    }
}

/// Frames a chunk of content.
pub(crate) fn chunk(data: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(data.len() + 8);
    put_chunk_head(data.len(), &mut out);
    out.put_slice(data);
    out.freeze()
}

pub(crate) fn end(trailers: Option<&HeaderMap>) -> Bytes {
    let mut out = BytesMut::new();
    match trailers {
        Some(trailers) => put_end(lines(trailers), &mut out),
        None => put_end(std::iter::empty(), &mut out),
    }
    out.freeze()
}

/// Encodes a message without content.
pub(crate) fn with_end(head: &Bytes) -> Bytes {
    [&head[..], &end(None)].concat().into()
}

//! HTTP messages as the strings that custody moves (RFC 9292), and back.
//!
//! In: heads and bodies of a session, or strings. Out: strings, or heads and bodies. Never: what a field means.

use std::cell::OnceCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use hermes_wire::binary_http::{
    BinaryHttpError, Control, Decoder, Field, Part as Piece, put_chunk_head, put_end, put_head,
};
use hermes_wire::custody::{ExchangeId, Part};
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};

use super::office::{Failure, Office};
use crate::error::Error;
use crate::live::Entry;
use crate::service::forward::head::Outgoing;
use crate::upstream::pool::ADDED_BYTES;
use crate::worker::Worker;

/// Bytes that are read at once.
const READ: usize = 64 << 10;

/// The string that a request begins with.
pub(super) fn request_head(outgoing: Outgoing) -> Bytes {
    let bytes = |text: &str| Bytes::copy_from_slice(text.as_bytes());
    // CONNECT has neither (RFC 9292, section 3.4).
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

/// The string that a response begins with.
pub(super) fn response_head(status: StatusCode, fields: &HeaderMap) -> Bytes {
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

/// A request's head of its string.
///
/// # Errors
/// What is wrong with it.
pub(super) fn request(control: Control, fields: Vec<Field>) -> Result<http::request::Parts, String> {
    let Control::Request { method, scheme, authority, path } = control else {
        return Err("it is a response".to_owned());
    };
    if method == Method::CONNECT.as_str() {
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.method = Method::CONNECT;
        parts.uri = Uri::try_from(&authority[..]).map_err(|error| error.to_string())?;
        parts.version = Version::HTTP_2;
        parts.headers = head_fields(fields)?;
        return Ok(parts);
    }
    let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).map_err(|_| "its target is no text".to_owned());
    let uri = Uri::builder().scheme(text(&scheme)?.as_str()).authority(text(&authority)?).path_and_query(text(&path)?);
    let (mut parts, ()) = Request::new(()).into_parts();
    parts.method = Method::from_bytes(&method).map_err(|error| error.to_string())?;
    parts.uri = uri.build().map_err(|error| error.to_string())?;
    parts.version = Version::HTTP_2;
    parts.headers = head_fields(fields)?;
    Ok(parts)
}

/// A head's fields. What they say of a length is one number, or nobody could tell where the message ends.
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

/// What is read of a string.
pub(super) struct Reading {
    decoder: Decoder,
    /// Bytes that were given to the decoder.
    taken: u64,
}

impl Reading {
    pub(super) fn new(worker: &Worker) -> Self {
        let most = worker.generation().snapshot.limits.header_bytes + ADDED_BYTES as usize;
        Self { decoder: Decoder::new(most), taken: 0 }
    }

    pub(super) fn push(&mut self, bytes: Bytes) {
        self.taken += bytes.len() as u64;
        self.decoder.push(bytes);
    }

    pub(super) fn next(&mut self) -> Result<Option<Piece>, BinaryHttpError> {
        self.decoder.next()
    }

    /// Bytes of all that was read of it.
    pub(super) fn read(&self) -> u64 {
        self.taken - self.decoder.unread() as u64
    }
}

/// A response's head, and where it ends in its string.
pub(super) struct ResponseHead {
    pub(super) response: Response<()>,
    pub(super) length: u64,
}

/// Reads on until a response's head is there. `next` gives the string's bytes.
pub(super) fn response(piece: Option<Piece>, reading: &Reading) -> Result<Option<ResponseHead>, String> {
    match piece {
        Some(Piece::Head(Control::Response { status }, fields)) if status >= 200 => {
            let mut response = Response::new(());
            *response.status_mut() = StatusCode::from_u16(status).map_err(|error| error.to_string())?;
            *response.version_mut() = Version::HTTP_2;
            *response.headers_mut() = head_fields(fields)?;
            Ok(Some(ResponseHead { response, length: reading.read() }))
        }
        Some(Piece::Head(Control::Request { .. }, _)) => Err("it is a request".to_owned()),
        _ => Ok(None),
    }
}

/// The content of a message that comes as a string.
pub(crate) struct CustodyBody {
    office: Arc<Office>,
    id: ExchangeId,
    part: Part,
    reading: Reading,
    /// Whose session waits for it.
    entry: OnceCell<Rc<Entry>>,
    peer: Arc<str>,
    length: Option<u64>,
    /// The exchange is known to end here.
    is_taken_in: bool,
    /// The string has been read to its end.
    is_read: bool,
    is_done: bool,
    /// Somebody has to read it to its end. What its client had asked, where it may ask that again.
    owed: Option<Option<Bytes>>,
    /// Goes with it.
    _with: Option<Uploading>,
    /// A piece that was read already.
    ahead: Option<Piece>,
}

/// Brings the rest of a request; its drop ends that.
pub(super) struct Uploading(pub(super) tokio::task::AbortHandle);

impl Drop for Uploading {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl CustodyBody {
    /// What is left of a string whose head was read.
    pub(super) fn new(office: Arc<Office>, id: ExchangeId, part: Part, reading: Reading, peer: Arc<str>) -> Self {
        Self {
            office,
            id,
            part,
            reading,
            entry: OnceCell::new(),
            peer,
            length: None,
            is_taken_in: part == Part::Response,
            is_read: false,
            is_done: false,
            owed: None,
            _with: None,
            ahead: None,
        }
    }

    /// All of the string was read before.
    pub(super) fn having_read_all(mut self, is_read: bool) -> Self {
        self.is_read = is_read;
        self
    }

    /// That the exchange ends here is known already.
    pub(super) fn taken_in(mut self) -> Self {
        self.is_taken_in = true;
        self
    }

    /// This piece was read before.
    pub(super) fn behind(mut self, ahead: Option<Piece>) -> Self {
        self.ahead = ahead;
        self
    }

    /// Of a session whose client is to have it: where the client goes, the exchange comes to nothing, or is kept for one
    /// that asks the same.
    pub(super) fn owed(mut self, asked: Option<Bytes>, with: Option<Uploading>) -> Self {
        (self.owed, self._with) = (Some(asked), with);
        self
    }

    /// It is this session's, which has patience.
    pub(crate) fn bind(&self, session: &Rc<Entry>) {
        // It is bound once.
        let _ = self.entry.set(session.clone());
    }

    /// So much of it comes, as its head says.
    pub(super) fn expect(&mut self, length: Option<u64>) {
        self.length = length;
    }

    /// What is known of its length.
    pub(crate) fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
    }

    /// The next piece of the message; `None` behind its end.
    pub(super) fn poll_piece(&mut self, cx: &Context<'_>) -> Poll<Option<Result<Piece, Error>>> {
        if let Some(piece) = self.ahead.take() {
            return Poll::Ready(Some(Ok(piece)));
        }
        loop {
            match self.reading.next() {
                Ok(Some(piece)) => return Poll::Ready(Some(Ok(piece))),
                Ok(None) if self.is_read => return Poll::Ready(None),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Some(Err(self.malformed(&error.to_string())))),
            }
            if !std::mem::replace(&mut self.is_taken_in, true) {
                self.office.take_in(self.id, false);
            }
            let read = self.office.poll_read(cx, self.id, self.part, READ);
            if let Some(entry) = self.entry.get() {
                entry.set_held(read.is_pending());
            }
            match ready!(read) {
                Ok((bytes, is_last)) => {
                    self.is_read = is_last;
                    self.reading.push(bytes);
                }
                Err(failure) => return Poll::Ready(Some(Err(self.failed(&failure)))),
            }
        }
    }

    fn malformed(&mut self, why: &str) -> Error {
        let reason = format!("{} holds no message: {why}", self.peer);
        self.office.fail(self.id, 502, &reason);
        self.failed(&Failure { status: 502, reason: Arc::from(reason) })
    }

    fn failed(&mut self, failure: &Failure) -> Error {
        self.is_done = true;
        match self.part {
            Part::Request => Error::ClientGone(failure.reason.to_string()),
            Part::Response => Error::custody(&self.peer, failure),
        }
    }

    pub(crate) fn poll_frame(&mut self, cx: &Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        while !self.is_done {
            match ready!(self.poll_piece(cx)) {
                Some(Ok(Piece::Content(bytes))) => {
                    if let Some(left) = &mut self.length {
                        match left.checked_sub(bytes.len() as u64) {
                            Some(0) => {
                                *left = 0;
                                self.read_end(cx);
                            }
                            Some(less) => *left = less,
                            None => return Poll::Ready(Some(Err(self.malformed("it is longer than it says")))),
                        }
                    }
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                // Its own head, where it was read before by others.
                Some(Ok(Piece::Head(..))) => {}
                Some(Ok(Piece::End(_))) if self.length.is_some_and(|left| left > 0) => {
                    return Poll::Ready(Some(Err(self.malformed("it is shorter than it says"))));
                }
                Some(Ok(Piece::End(fields))) => {
                    // Whoever brought it hears that it is held.
                    while let Poll::Ready(Some(Ok(_))) = self.poll_piece(cx) {}
                    self.is_done = true;
                    if !fields.is_empty() {
                        let trailers = headers(fields).map_err(|why| self.malformed(&why));
                        return Poll::Ready(Some(trailers.map(Frame::trailers)));
                    }
                }
                Some(Err(error)) => {
                    self.is_done = true;
                    return Poll::Ready(Some(Err(error)));
                }
                None => return Poll::Ready(Some(Err(self.malformed("it is cut off")))),
            }
        }
        Poll::Ready(None)
    }

    /// Its content is whole, and nobody may ask for more of it: its end is taken along, if it is there.
    fn read_end(&mut self, cx: &Context<'_>) {
        if let Poll::Ready(Some(Ok(piece))) = self.poll_piece(cx) {
            match piece {
                // There is nothing behind it; whoever brought it hears that it is held.
                Piece::End(fields) if fields.is_empty() => {
                    while let Poll::Ready(Some(Ok(_))) = self.poll_piece(cx) {}
                    self.is_done = true;
                }
                other => self.ahead = Some(other),
            }
        }
    }

    /// All of it was read.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done
    }
}

impl Drop for CustodyBody {
    fn drop(&mut self) {
        // Of a content that is whole nothing is missing but its end, which nobody waits for.
        let is_whole = self.is_done || self.length == Some(0);
        match self.owed.take() {
            Some(Some(asked)) if !is_whole => self.office.leave(self.id, asked),
            Some(_) => {
                if !self.is_done {
                    self.office.fail(self.id, 499, "its client is gone");
                }
                self.office.part(self.id);
            }
            None => {}
        }
    }
}

/// Brings a body as what follows a head, until all of it is taken.
pub(super) struct Writing<B> {
    office: Arc<Office>,
    id: ExchangeId,
    part: Part,
    body: B,
    /// Goes before what comes next of the body, if that is there: what is small is one piece.
    head: Option<Bytes>,
    /// What is to be taken next, and whether that is the end.
    next: Option<(Bytes, bool)>,
    is_over: bool,
    entry: Option<Rc<Entry>>,
}

/// How a body was not brought.
pub(super) enum Unwritten {
    /// It broke.
    Body(Error),
    /// The exchange is over.
    Over,
}

impl<B: HttpBody<Data = Bytes, Error = Error> + Unpin> Writing<B> {
    /// What comes first is this head.
    pub(super) fn new(office: Arc<Office>, id: ExchangeId, part: Part, head: Bytes, body: B) -> Self {
        Self { office, id, part, body, head: Some(head), next: None, is_over: false, entry: None }
    }

    /// It is this session's, which has patience.
    pub(super) fn bound(mut self, entry: &Rc<Entry>) -> Self {
        self.entry = Some(entry.clone());
        self
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Unwritten>> {
        loop {
            if let Some((bytes, is_last)) = &self.next {
                let taken = self.office.poll_append(cx, self.id, self.part, bytes, *is_last);
                if let Some(entry) = &self.entry {
                    entry.set_held(taken.is_pending());
                }
                ready!(taken).map_err(|_| Unwritten::Over)?;
                self.is_over = *is_last;
                self.next = None;
            }
            if self.is_over {
                return Poll::Ready(Ok(()));
            }
            let (bytes, is_last) = match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) if frame.data_ref().is_some_and(Bytes::is_empty) => continue,
                Poll::Ready(Some(Ok(frame))) => self.framed(frame),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(Unwritten::Body(error))),
                Poll::Ready(None) => (end(None), true),
                Poll::Pending if self.head.is_none() => return Poll::Pending,
                Poll::Pending => (Bytes::new(), false),
            };
            self.next = Some(match self.head.take() {
                Some(head) => ([&head[..], &bytes].concat().into(), is_last),
                None => (bytes, is_last),
            });
        }
    }

    /// A piece of the body, and whether it is the last one.
    fn framed(&self, frame: Frame<Bytes>) -> (Bytes, bool) {
        match frame.into_data() {
            // With its end, where that is known: who reads so far knows that it is whole.
            Ok(data) if self.body.is_end_stream() => ([chunk(&data), end(None)].concat().into(), true),
            Ok(data) => (chunk(&data), false),
            Err(frame) => (end(frame.trailers_ref()), true),
        }
    }
}

/// A piece of content in its frame.
pub(super) fn chunk(data: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(data.len() + 8);
    put_chunk_head(data.len(), &mut out);
    out.put_slice(data);
    out.freeze()
}

pub(super) fn end(trailers: Option<&HeaderMap>) -> Bytes {
    let mut out = BytesMut::new();
    match trailers {
        Some(trailers) => put_end(lines(trailers), &mut out),
        None => put_end(std::iter::empty(), &mut out),
    }
    out.freeze()
}

/// A whole message without content.
pub(super) fn with_end(head: &Bytes) -> Bytes {
    [&head[..], &end(None)].concat().into()
}

//! Translates HTTP requests to Named Data Networking: the path is the name of the content.
//!
//! In: a GET or HEAD request, and the forwarder of its route. Out: Interests for the segments of the name, and their
//! content as the response, in order and as it arrives; a part of it if the request has `Range`. The forwarder judges
//! each packet before a byte of it is used. Never: content under a name that its signer may not sign.

use std::fmt::Write as _;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_cache::conditional::{Conditions, not_modified};
use hermes_cache::range::{RequestedRanges, Resolved, to_content_range, unsatisfied};
use hermes_model::snapshot::{Face as FaceConfig, Route};
use hermes_ndn::fetch::{Fetch, FetchError, FetchLimits, MAX_SEGMENT};
use hermes_ndn::forwarder::Delivery;
use hermes_ndn::lp::NackReason;
use hermes_ndn::name::types;
use hermes_ndn::packet::Data;
use hermes_ndn::trust::Distrust;
use hermes_ndn::{Component, Name};
use http::header::{
    ACCEPT_RANGES, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, HeaderName, RANGE,
};
use http::{HeaderValue, Method, Response, StatusCode};
use tokio::time::Instant;

use super::face::label;
use super::forwarder::{Closed, Consumer, Forwarders, random_nonce};
use hermes_outbound::generation::Generation;
use hermes_outbound::outbound::Outbound;
use hermes_transport::body::{Body, ChannelSender, channel};
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

/// The name of the first packet of the content, in the response.
const CONTENT_NAME: HeaderName = HeaderName::from_static("ndn-name");

/// The longest name that a path may have. The Interest for it must fit in a packet, with room for other fields.
const MAX_NAME_BYTES: usize = 8000;
/// The most components of a name that a path may have. Each arriving packet is compared with names under way.
const MAX_COMPONENTS: usize = 256;

/// Serves a request.
///
/// # Errors
/// The path is no name, the method is another one, nobody answers, or a signature is not trusted.
pub async fn serve(
    worker: &Rc<Outbound>,
    forwarders: &Forwarders,
    generation: &Generation,
    entry: &Rc<SessionEntry>,
    config: &FaceConfig,
    route: &Route,
) -> Result<Response<Body>, Error> {
    let facts = &entry.facts;
    let name = name_of(&facts.method, facts.path.path())?;
    let join = || forwarders.join(worker, generation, entry, config, route);
    let mut limits = FetchLimits { patience: route.timeout.progress, ..FetchLimits::default() };
    if facts.method == Method::HEAD {
        // The first segment tells all that the response says.
        limits.max_window = 1;
    }
    let source = Source { peer: label(&config.uri, route), patience: route.timeout.progress };
    let consumer = join().await?;
    let is_kept = consumer.is_kept;
    let mut transfer = Transfer::new(worker.clone(), consumer, name.clone(), limits);
    let mut first = transfer.next_content().await;
    if is_kept && matches!(first, Err(TransferError::Closed)) {
        // The peer has closed the face since its last use.
        transfer = Transfer::new(worker.clone(), join().await?, name, limits);
        first = transfer.next_content().await;
    }
    let first = first.map_err(|error| failure(error, &source))?.unwrap_or_default();
    let mut response = Response::new(Body::Empty);
    if let Some(data) = transfer.fetch.first() {
        describe(data, response.headers_mut());
    }
    let conditions = Conditions::of(&facts.headers);
    if conditions.are_there() && conditions.are_met(response.headers()) {
        not_modified(response.headers_mut());
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        return Ok(response);
    }
    if facts.method == Method::HEAD {
        return Ok(response);
    }
    let ranges = RequestedRanges::parse(facts.headers.get(RANGE));
    let mut first = Some(first);
    if ranges != RequestedRanges::Whole && conditions.want_part(response.headers()) {
        let part = transfer.seek(&ranges, first.as_ref().map_or(0, Bytes::len)).await;
        match part.map_err(|error| failure(error, &source))? {
            Some(Part::Whole) => first = None,
            Some(Part::Range { range, total }) => {
                *response.status_mut() = StatusCode::PARTIAL_CONTENT;
                response.headers_mut().insert(CONTENT_RANGE, to_content_range(&range, total));
                response.headers_mut().insert(CONTENT_LENGTH, (range.end - range.start).into());
                first = None;
            }
            Some(Part::Unsatisfiable(total)) => {
                response.headers_mut().clear();
                *response.status_mut() = StatusCode::RANGE_NOT_SATISFIABLE;
                response.headers_mut().insert(CONTENT_RANGE, unsatisfied(total));
                return Ok(response);
            }
            None => {}
        }
    }
    if let Some(all) = first.as_mut().filter(|_| transfer.fetch.is_complete()) {
        *response.body_mut() = Body::Full(std::mem::take(all));
        return Ok(response);
    }
    let (sender, body) = channel();
    worker.spawn(async move { transfer.send_all(first, sender, &source).await });
    *response.body_mut() = Body::Channel(body);
    Ok(response)
}

/// Whether the path of a request is the name of content.
pub fn is_name(method: &Method, path: &str) -> bool {
    name_of(method, path).is_ok()
}

/// Reads the name in a path.
fn name_of(method: &Method, path: &str) -> Result<Name, Error> {
    if method != Method::GET && method != Method::HEAD {
        let reason = format!("{method} has no meaning for NDN content; use GET or HEAD");
        return Err(denied(StatusCode::METHOD_NOT_ALLOWED, reason));
    }
    let name: Name = path.parse().map_err(Error::Malformed)?;
    // Routes match the path. With a second spelling of a name, a client would pass the route for the first one.
    if normalized(path) != name.to_string() {
        let reason = format!("the path is not the only spelling of its name; write {name}");
        return Err(Error::Malformed(reason));
    }
    let is_number = |part: Component| part.number(types::SEGMENT).is_some_and(|number| number <= MAX_SEGMENT);
    if !name.components().filter(|part| part.kind() == types::SEGMENT).all(is_number) {
        return Err(Error::Malformed(format!("a segment of the path is no number up to {MAX_SEGMENT}")));
    }
    if name.is_empty() {
        return Err(Error::Malformed("the path / is no name of content".to_owned()));
    }
    if name.len() > MAX_COMPONENTS || name.encoded().len() > MAX_NAME_BYTES {
        let limits = format!("at most {MAX_COMPONENTS} components and {MAX_NAME_BYTES} bytes");
        return Err(Error::Malformed(format!("the path is too long for a name of content: {limits}")));
    }
    Ok(name)
}

/// The path with all characters escaped that names escape, too. Programs may leave some of them as they are.
fn normalized(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let digits = bytes.by_ref().take(2).map(|digit| char::from(digit.to_ascii_uppercase()));
                out.extend(std::iter::once('%').chain(digits));
            }
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b'=' => {
                out.push(char::from(byte));
            }
            // Writing to a String cannot fail.
            _ => drop(write!(out, "%{byte:02X}")),
        }
    }
    out
}

fn denied(status: StatusCode, reason: String) -> Error {
    Error::Denied { status, reason, label: "http_request_error" }
}

/// The header fields that describe the content.
fn describe(data: &Data, headers: &mut HeaderMap) {
    let version = data.name.components().find_map(|part| part.number(types::VERSION));
    // The tag of an HTTP origin must not pass for one of these: a race serves both.
    let tag = version.map(|version| format!("\"ndn:v={version}\""));
    let age = data.freshness.unwrap_or_default().as_secs();
    let cache = if age > 0 { format!("max-age={age}") } else { "no-cache".to_owned() };
    let ranges = is_segmented(&data.name).then(|| "bytes".to_owned());
    let fields = [
        (ETAG, tag),
        (CACHE_CONTROL, Some(cache)),
        (CONTENT_NAME, Some(data.name.to_string())),
        (ACCEPT_RANGES, ranges),
        (CONTENT_TYPE, media_type(&data.name)),
    ];
    for (field, value) in fields {
        if let Some(Ok(value)) = value.map(HeaderValue::try_from) {
            headers.insert(field, value);
        }
    }
}

/// Whether parts of the content can be found by the number of their segment. Without a version, its segments may change
/// meanwhile.
fn is_segmented(name: &Name) -> bool {
    let has = |part: Option<Component>, kind| part.is_some_and(|part| part.number(kind).is_some());
    has(name.last(), types::SEGMENT) && has(name.parent().last(), types::VERSION)
}

/// The media type that the ending of the name stands for. NDN packets name none, and browsers need one.
fn media_type(name: &Name) -> Option<String> {
    let file = name.components().filter(|part| part.kind() == types::GENERIC).last()?;
    let value = file.value();
    let kind = mime_guess::from_path(std::str::from_utf8(&value).ok()?).first()?;
    let is_text = kind.type_() == mime_guess::mime::TEXT;
    Some(if is_text { format!("{kind}; charset=utf-8") } else { kind.to_string() })
}

/// The reason why content does not arrive.
#[derive(Debug)]
enum TransferError {
    Fetch(FetchError),
    /// A packet may not be used.
    Untrusted(Distrust),
    /// The face has closed.
    Closed,
}

impl From<Closed> for TransferError {
    fn from(_: Closed) -> Self {
        Self::Closed
    }
}

impl From<FetchError> for TransferError {
    fn from(error: FetchError) -> Self {
        Self::Fetch(error)
    }
}

/// The face that sends the content, for errors.
struct Source {
    peer: Arc<str>,
    patience: Duration,
}

fn failure(error: TransferError, source: &Source) -> Error {
    let peer = source.peer.clone();
    let broken = |reason: String| Error::Broken { peer: peer.clone(), reason, unprocessed: false };
    match error {
        TransferError::Fetch(FetchError::NoAnswer) => {
            Error::ConnectTimeout { peer: peer.clone(), missing: "send Data for the name", after: source.patience }
        }
        TransferError::Fetch(error @ FetchError::NotFound) => denied(StatusCode::NOT_FOUND, error.to_string()),
        TransferError::Fetch(error) => broken(error.to_string()),
        TransferError::Untrusted(distrust) => broken(distrust.to_string()),
        TransferError::Closed => broken("the face has closed".to_owned()),
    }
}

/// The part of the content that a request asks for.
enum Part {
    /// All of it, from the beginning.
    Whole,
    /// A range of content of this many bytes in total.
    Range { range: Range<u64>, total: u64 },
    /// The content has no byte of the range.
    Unsatisfiable(u64),
}

/// The part of the segments that remains for a range.
struct Cut {
    /// Bytes to leave out before the range.
    skip: usize,
    /// Bytes of the range that are still to come.
    remaining: u64,
    /// The length of each segment but the last of the content.
    segment_bytes: usize,
}

/// A fetch through a forwarder.
struct Transfer {
    worker: Rc<Outbound>,
    consumer: Consumer,
    fetch: Fetch,
    limits: FetchLimits,
    /// `None` for the whole content.
    cut: Option<Cut>,
    started: Instant,
}

impl Transfer {
    fn new(worker: Rc<Outbound>, consumer: Consumer, name: Name, limits: FetchLimits) -> Self {
        let fetch = Fetch::new(name, limits, random_nonce(&worker));
        Self { worker, consumer, fetch, limits, cut: None, started: Instant::now() }
    }

    /// Waits for the next content. `None` after the last.
    async fn next_content(&mut self) -> Result<Option<Bytes>, TransferError> {
        loop {
            if let Some(content) = self.fetch.next_content() {
                return Ok(Some(content));
            }
            if self.fetch.is_complete() {
                return Ok(None);
            }
            let now = self.now();
            while let Some(interest) = self.fetch.next_interest(now) {
                let name = interest.name.clone();
                if self.consumer.send_interest(&self.worker, interest).await?.is_err() {
                    self.fetch.take_nack(&name, NackReason::Congestion, now)?;
                    break;
                }
            }
            let timeout = self.fetch.next_timeout().unwrap_or(now).saturating_sub(now);
            match tokio::time::timeout(timeout, self.consumer.next()).await {
                Ok(delivery) => self.take(delivery?)?,
                Err(_) => {
                    let now = self.now();
                    self.fetch.handle_timeout(now)?;
                }
            }
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn take(&mut self, delivery: Delivery) -> Result<(), TransferError> {
        let now = self.now();
        match delivery {
            Delivery::Data(data, is_marked) => Ok(self.fetch.take_data(Rc::unwrap_or_clone(data), is_marked, now)?),
            Delivery::Nack(name, reason) => Ok(self.fetch.take_nack(&name, reason, now)?),
            // Another answer may have come while this one waited for a certificate.
            Delivery::Untrusted(data, _) if !self.fetch.awaits(&data) => Ok(()),
            Delivery::Untrusted(_, distrust) => Err(TransferError::Untrusted(distrust)),
        }
    }

    /// Goes to the part that a request asks for. `segment_bytes` is the length of the first segment. `None` if only the whole
    /// content can be sent.
    async fn seek(&mut self, ranges: &RequestedRanges, segment_bytes: usize) -> Result<Option<Part>, TransferError> {
        let Some(data) = self.fetch.first().filter(|data| is_segmented(&data.name)) else { return Ok(None) };
        let prefix = data.name.parent();
        let is_begin = data.name.last().and_then(|last| last.number(types::SEGMENT)) == Some(0);
        let Some(last) = self.fetch.last_segment().filter(|_| is_begin && segment_bytes > 0) else { return Ok(None) };
        let nonce = random_nonce(&self.worker);
        // The length of the last segment tells that of the content.
        let tail = if last == 0 {
            segment_bytes
        } else {
            self.fetch = Fetch::segments(prefix.clone(), last..=last, self.limits, nonce);
            self.next_content().await?.map_or(0, |content| content.len())
        };
        let total = last.saturating_mul(segment_bytes as u64).saturating_add(tail as u64);
        let range = match ranges.resolve(total) {
            // The last segment is shorter, or as long. Otherwise the segments have different lengths.
            Resolved::Part(range) if tail <= segment_bytes => range,
            Resolved::Part(_) | Resolved::Whole => {
                self.fetch = Fetch::segments(prefix, 0..=last, self.limits, nonce);
                return Ok(Some(Part::Whole));
            }
            Resolved::Unsatisfiable => return Ok(Some(Part::Unsatisfiable(total))),
        };
        let segments = range.start / segment_bytes as u64..=(range.end - 1) / segment_bytes as u64;
        self.fetch = Fetch::segments(prefix, segments, self.limits, nonce);
        let skip = usize::try_from(range.start % segment_bytes as u64).unwrap_or_default();
        self.cut = Some(Cut { skip, remaining: range.end - range.start, segment_bytes });
        Ok(Some(Part::Range { range, total }))
    }

    /// Sends all content as the body, with the first part if that has arrived. A failure breaks the body off, which the
    /// client can tell from its end.
    async fn send_all(mut self, first: Option<Bytes>, body: ChannelSender, source: &Source) {
        let mut first = first;
        loop {
            let content = match first.take() {
                Some(content) => content,
                None => {
                    let next = tokio::select! {
                        next = self.next_content() => next,
                        () = std::future::poll_fn(|cx| body.poll_reader_gone(cx)) => return,
                    };
                    match next {
                        Ok(Some(content)) => content,
                        Ok(None) => break,
                        Err(error) => return body.fail(failure(error, source)),
                    }
                }
            };
            let content = match &mut self.cut {
                None => content,
                Some(cut) => match cut.apply(content) {
                    Some(content) => content,
                    None => return body.fail(failure(FetchError::Unexpected.into(), source)),
                },
            };
            if std::future::poll_fn(|cx| body.poll_ready(cx)).await.is_err() {
                return;
            }
            body.send(content);
        }
        body.finish();
    }
}

impl Cut {
    /// Cuts the next segment. `None` if it has not the length that the others have.
    fn apply(&mut self, segment: Bytes) -> Option<Bytes> {
        let is_last = (segment.len().saturating_sub(self.skip)) as u64 >= self.remaining;
        if segment.len() != self.segment_bytes && !(is_last && segment.len() < self.segment_bytes) {
            return None;
        }
        let end = usize::try_from(self.remaining).unwrap_or(usize::MAX).saturating_add(self.skip).min(segment.len());
        let part = segment.slice(std::mem::take(&mut self.skip)..end);
        self.remaining -= part.len() as u64;
        Some(part)
    }
}

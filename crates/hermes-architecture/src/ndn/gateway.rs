//! Translates HTTP requests to Named Data Networking: the path is the name of the content.
//!
//! In: a GET or HEAD request, and a face of a forwarder. Out: Interests for the segments of the name, and their content
//! as the response, in order and as it arrives. The signature of each packet is checked by the anchors of the route
//! before a byte of it is used. Never: content under a name that its signer may not sign.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_model::snapshot::{Face as FaceConfig, Route};
use hermes_ndn::Name;
use hermes_ndn::fetch::{Fetch, FetchError, FetchLimits};
use hermes_ndn::lp::LpPacket;
use hermes_ndn::name::types;
use hermes_ndn::packet::{Data, Packet};
use hermes_ndn::signature::{VerifyingKey, digest_matches};
use http::header::{CACHE_CONTROL, ETAG, HeaderName};
use http::{HeaderValue, Method, Response, StatusCode};
use tokio::time::Instant;

use super::face::{Face, IdleFaces, connect_face, label};
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

/// The keys of a route, each with the prefix of the names that it may sign.
struct TrustSchema {
    anchors: Vec<(Name, VerifyingKey)>,
    accept_digest: bool,
}

impl TrustSchema {
    fn of(generation: &Generation, config: &FaceConfig) -> Self {
        let anchor = |(prefix, file): &(Arc<str>, std::path::PathBuf)| {
            let key = hermes_net::tls::public_key(generation.file(file)?).ok()?;
            Some((prefix.parse().ok()?, VerifyingKey::Public(key.into())))
        };
        let anchors = config.anchors.iter().filter_map(anchor).collect();
        Self { anchors, accept_digest: config.accept_digest }
    }

    /// Whether a packet may be used: its digest is right if digests are accepted, or a key for its name has signed it.
    fn admits(&self, data: &Data) -> bool {
        if self.accept_digest && digest_matches(&data.signature) {
            return true;
        }
        let mut keys = self.anchors.iter().filter(|(prefix, _)| prefix.is_prefix_of(&data.name));
        keys.any(|(_, key)| key.verifies(&data.signature))
    }
}

/// Serves a request.
///
/// # Errors
/// The path is no name, the method is another one, nobody answers, or a signature is not trusted.
pub async fn serve(
    worker: &Rc<Outbound>,
    idle: &Rc<IdleFaces>,
    generation: &Generation,
    entry: &Rc<SessionEntry>,
    config: &FaceConfig,
    route: &Route,
) -> Result<Response<Body>, Error> {
    let facts = &entry.facts;
    if facts.method != Method::GET && facts.method != Method::HEAD {
        let reason = format!("{} has no meaning for NDN content; use GET or HEAD", facts.method);
        return Err(denied(StatusCode::METHOD_NOT_ALLOWED, reason));
    }
    let name: Name = facts.path.path().parse().map_err(Error::Malformed)?;
    if name.is_empty() {
        return Err(Error::Malformed("the path / is no name of content".to_owned()));
    }
    if name.len() > MAX_COMPONENTS || name.encoded().len() > MAX_NAME_BYTES {
        let limits = format!("at most {MAX_COMPONENTS} components and {MAX_NAME_BYTES} bytes");
        return Err(Error::Malformed(format!("the path is too long for a name of content: {limits}")));
    }
    let kept = idle.take(&config.uri);
    let is_kept = kept.is_some();
    let face = match kept {
        Some(face) => {
            *entry.peer.borrow_mut() = Some(label(&config.uri, route));
            face
        }
        None => connect_face(worker, entry, &config.uri, route).await?,
    };
    let limits = FetchLimits { patience: route.timeout.progress, ..FetchLimits::default() };
    let nonce = u32::try_from(worker.random().1 & u64::from(u32::MAX)).unwrap_or_default();
    let fetch = Fetch::new(name.clone(), limits, nonce);
    let trust = TrustSchema::of(generation, config);
    let started = Instant::now();
    let mut transfer = Transfer { worker: worker.clone(), face, fetch, trust, started };
    let mut first = transfer.next_content().await;
    if is_kept && matches!(first, Err(TransferError::Closed)) {
        // The forwarder has closed the face since its last use.
        transfer.face = connect_face(worker, entry, &config.uri, route).await?;
        transfer.fetch = Fetch::new(name, limits, nonce);
        first = transfer.next_content().await;
    }
    let first = first.map_err(|error| failure(error, entry))?.unwrap_or_default();
    let mut response = Response::new(Body::Empty);
    if let Some(data) = transfer.fetch.first() {
        describe(data, response.headers_mut());
    }
    if transfer.fetch.is_complete() {
        idle.put(&config.uri, transfer.face);
        if facts.method != Method::HEAD {
            *response.body_mut() = Body::Full(first);
        }
        return Ok(response);
    }
    if facts.method == Method::HEAD {
        return Ok(response);
    }
    let (sender, body) = channel();
    let (entry, idle, uri) = (entry.clone(), idle.clone(), config.uri.clone());
    worker.spawn(async move {
        if let Some(face) = transfer.send_all(first, sender, &entry).await {
            idle.put(&uri, face);
        }
    });
    *response.body_mut() = Body::Channel(body);
    Ok(response)
}

fn denied(status: StatusCode, reason: String) -> Error {
    Error::Denied { status, reason, label: "http_request_error" }
}

/// The header fields that describe the content.
fn describe(data: &Data, headers: &mut http::HeaderMap) {
    let version = data.name.components().find_map(|part| part.number(types::VERSION));
    let tag = version.map(|version| format!("\"{version}\""));
    let age = data.freshness.unwrap_or_default().as_secs();
    let cache = if age > 0 { format!("max-age={age}") } else { "no-cache".to_owned() };
    let fields = [(ETAG, tag), (CACHE_CONTROL, Some(cache)), (CONTENT_NAME, Some(data.name.to_string()))];
    for (field, value) in fields {
        if let Some(Ok(value)) = value.map(HeaderValue::try_from) {
            headers.insert(field, value);
        }
    }
}

/// The reason why content does not arrive.
#[derive(Debug)]
enum TransferError {
    Fetch(FetchError),
    /// A packet has no valid signature of a key for its name.
    Untrusted(Name),
    /// The face has closed.
    Closed,
}

fn failure(error: TransferError, entry: &SessionEntry) -> Error {
    let peer = entry.peer.borrow().clone().unwrap_or_default();
    let broken = |reason: String| Error::Broken { peer: peer.clone(), reason, unprocessed: false };
    match error {
        TransferError::Fetch(FetchError::NoAnswer) => Error::ConnectTimeout {
            peer: peer.clone(),
            missing: "send Data for the name",
            after: entry.route.borrow().as_ref().map_or(Duration::ZERO, |route| route.timeout.progress),
        },
        TransferError::Fetch(error @ FetchError::NotFound) => denied(StatusCode::NOT_FOUND, error.to_string()),
        TransferError::Fetch(error) => broken(error.to_string()),
        TransferError::Untrusted(name) => {
            broken(format!("{name} has no valid signature of an anchor for its name; see `anchors` of the route"))
        }
        TransferError::Closed => broken("the face has closed".to_owned()),
    }
}

/// A fetch over a face.
struct Transfer {
    worker: Rc<Outbound>,
    face: Face,
    fetch: Fetch,
    trust: TrustSchema,
    started: Instant,
}

impl Transfer {
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
                self.face.to_face.send(interest.encode()).await.map_err(|_| TransferError::Closed)?;
            }
            let timeout = self.fetch.next_timeout().unwrap_or(now).saturating_sub(now);
            match tokio::time::timeout(timeout, self.face.from_face.recv()).await {
                Ok(Some(frame)) => self.take(frame)?,
                Ok(None) => return Err(TransferError::Closed),
                Err(_) => {
                    let now = self.now();
                    self.fetch.handle_timeout(now).map_err(TransferError::Fetch)?;
                }
            }
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn take(&mut self, frame: Bytes) -> Result<(), TransferError> {
        let now = self.now();
        let frame = LpPacket::decode(frame).ok();
        let Some((packet, nack, is_marked)) =
            frame.and_then(|frame| Some((frame.fragment?, frame.nack, frame.congestion.is_some())))
        else {
            self.worker.shared.metrics.dropped("ndn-malformed", 1);
            return Ok(());
        };
        match (Packet::decode(packet), nack) {
            (Ok(Packet::Data(data)), None) if !self.fetch.awaits(&data) => Ok(()),
            (Ok(Packet::Data(data)), None) => {
                if !self.trust.admits(&data) {
                    self.worker.shared.metrics.dropped("ndn-untrusted", 1);
                    return Err(TransferError::Untrusted(data.name));
                }
                self.fetch.take_data(data, is_marked, now).map_err(TransferError::Fetch)
            }
            (Ok(Packet::Interest(interest)), Some(reason)) => {
                self.fetch.take_nack(&interest.name, reason, now).map_err(TransferError::Fetch)
            }
            // An Interest of the forwarder; the gateway offers no content.
            (Ok(_), _) => Ok(()),
            (Err(_), _) => {
                self.worker.shared.metrics.dropped("ndn-malformed", 1);
                Ok(())
            }
        }
    }

    /// Sends all content as the body, and returns the face. A failure breaks the body off, which the client can tell
    /// from its end.
    async fn send_all(mut self, first: Bytes, body: ChannelSender, entry: &SessionEntry) -> Option<Face> {
        let mut next = Some(first);
        while let Some(content) = next {
            if std::future::poll_fn(|cx| body.poll_ready(cx)).await.is_err() {
                return None;
            }
            body.send(content);
            next = match self.next_content().await {
                Ok(content) => content,
                Err(error) => {
                    entry.fail(&failure(error, entry));
                    return None;
                }
            };
        }
        body.finish();
        Some(self.face)
    }
}

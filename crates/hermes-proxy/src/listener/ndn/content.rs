//! Content of HTTP hosts for consumers of NDN: an Interest becomes a GET whose path is the name of the content.
//!
//! In: Interests under the prefixes in `content` of a listener. Out: requests that are decided like all others, and
//! signed Data made from their responses. Interests for content that is being requested wait for the one request. A
//! response is stored, so that its segments belong together. Never: content that its host declares private.

use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use hermes_architecture::ndn::waiting_interest::WaitingInterest;
use hermes_cache::directives::{Directives, Scope};
use hermes_model::authority::Authority;
use hermes_model::snapshot::{Listener, Ndn};
use hermes_ndn::Name;
use hermes_ndn::content_store::{ContentKey, Found};
use hermes_ndn::lp::{LpPacket, NackReason};
use hermes_ndn::packet::{Interest, Packet};
use hermes_ndn::publish::{PublishedContent, content_name, no_content};
use hermes_ndn::signature::Signer;
use http::header::{CACHE_CONTROL, HOST};
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt as _;

use super::Face;
use crate::request::{Origin, from_head};
use crate::session::{self, SessionOutcome};
use crate::worker::Worker;
use hermes_outbound::generation::Generation;
use hermes_transport::body::{RequestBody, ResponseBody};

/// The longest content in bytes, since it is stored as a whole.
const MAX_CONTENT_BYTES: usize = 32 << 20;
/// The freshness of content whose response names none. The consumers that ask at the same time then share one request.
const MIN_FRESHNESS: Duration = Duration::from_secs(1);

/// The content that a face offers.
pub(super) struct ContentOffer {
    /// The listener and the client's address. The decision about a request may depend on both, so that stored content
    /// is for clients with the same alone.
    scope: Arc<str>,
    /// Prefixes with their hosts, the longest first.
    hosts: Vec<(Name, Authority)>,
    /// `None` if the key of the listener cannot sign; then nothing is answered.
    signer: Option<Rc<Signer>>,
}

impl ContentOffer {
    pub(super) fn new(listener: &Listener, ndn: &Ndn, source: IpAddr, generation: &Generation) -> Self {
        let parsed = ndn.content.iter().filter_map(|(prefix, host)| Some((prefix.parse().ok()?, host.clone())));
        let mut hosts: Vec<(Name, Authority)> = parsed.collect();
        hosts.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
        let signer = match &ndn.signing_key {
            None => Some(Rc::new(Signer::digest())),
            Some((name, file)) => signer(generation, name, file).map(Rc::new),
        };
        Self { scope: format!("{}@{source}", listener.name).into(), hosts, signer }
    }

    /// The prefix and the host of a name.
    pub(super) fn host_of(&self, name: &Name) -> Option<(&Name, &Authority)> {
        self.hosts.iter().find(|(prefix, _)| prefix.is_prefix_of(name)).map(|(prefix, host)| (prefix, host))
    }
}

fn signer(generation: &Generation, name: &str, file: &std::path::Path) -> Option<Signer> {
    let key = hermes_net::tls::private_key(generation.file(file)?).ok()?;
    let signer = Signer::from_pkcs8(key.secret_pkcs8_der(), name.parse().ok()?);
    signer.inspect_err(|error| tracing::error!(file = %file.display(), %error, "no NDN content can be signed")).ok()
}

/// Takes a packet whose name is under a prefix of content. Returns the frame for the face, or `None` if the packet
/// needs none, or waits.
pub(super) fn take_packet(face: &Rc<Face>, packet: &LpPacket, host: &Authority) -> Option<Bytes> {
    // Neither Data nor a returned Interest answers anything here, since this node sends no Interests for content.
    let inner = packet.fragment.clone().filter(|_| packet.nack.is_none())?;
    let Ok(Packet::Interest(interest)) = Packet::decode(inner) else { return None };
    if interest.parameters.is_some() {
        return refusal(packet, NackReason::NoRoute);
    }
    let worker = &face.worker;
    let key: ContentKey = (face.content.scope.clone(), content_name(&interest.name));
    let found = {
        let mut store = worker.ndn_content.borrow_mut();
        store.set_generation(worker.generation().number);
        store.find(&key, &interest.name, worker.now())
    };
    if let Found::Versions(versions, freshness) = found {
        let signer = face.content.signer.as_deref();
        return answer(signer, &interest, packet, &versions, freshness.max(MIN_FRESHNESS));
    }
    let waiter = WaitingInterest {
        to_face: face.to_face.clone(),
        signer: face.content.signer.clone(),
        interest,
        packet: packet.clone(),
    };
    let waits = worker.ndn_content.borrow_mut().wait(&key, waiter);
    match waits {
        Ok(true) => {
            let (face, host) = (face.clone(), host.clone());
            worker.spawn(async move { request(&face, key, &host).await });
            None
        }
        Ok(false) => None,
        Err(waiter) => {
            worker.shared.metrics.limit("ndn-content");
            refusal(&waiter.packet, NackReason::Congestion)
        }
    }
}

/// Requests content, and answers all Interests that wait for it.
async fn request(face: &Rc<Face>, key: ContentKey, host: &Authority) {
    let worker = face.worker.clone();
    let outcome = get(face, &key.1, host).await;
    let (waiters, found) = {
        let mut store = worker.ndn_content.borrow_mut();
        store.set_generation(worker.generation().number);
        let waiters = store.take_waiters(&key);
        let found = match outcome {
            Ok(Some((bytes, freshness, generation))) if generation == worker.generation().number => store
                .put(key, version(), bytes, freshness, worker.now())
                .map(|content| (vec![content], freshness))
                .ok_or(NackReason::NoRoute),
            // The document that granted it has been replaced; the consumers repeat their Interests.
            Ok(Some(_)) => Err(NackReason::Congestion),
            Ok(None) => Ok((Vec::new(), MIN_FRESHNESS)),
            Err(reason) => Err(reason),
        };
        (waiters, found)
    };
    for WaitingInterest { to_face, signer, interest, packet } in waiters {
        let frame = match &found {
            Ok((versions, freshness)) => answer(signer.as_deref(), &interest, &packet, versions, *freshness),
            Err(reason) => refusal(&packet, *reason),
        };
        if frame.is_some_and(|frame| to_face.try_send(frame).is_err()) {
            worker.shared.metrics.dropped("queue-full", 1);
        }
    }
}

/// The version of content that arrives now: milliseconds since 1970.
fn version() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or_default()
}

/// Requests content from its host. Returns it with its freshness, and the number of the generation that decided the
/// request; `None` if the host has none of this name.
///
/// # Errors
/// The reason with which the Interests come back.
async fn get(face: &Rc<Face>, name: &Name, host: &Authority) -> Result<Option<(Bytes, Duration, u64)>, NackReason> {
    let generation = face.worker.generation().number;
    let request = http::Request::get(name.to_string()).header(HOST, host.to_string()).body(());
    let (parts, ()) = request.map_err(|_| NackReason::NoRoute)?.into_parts();
    let outcome = {
        let origin = Origin {
            worker: &face.worker,
            listener: &face.listener,
            source: face.source,
            trust: &face.trust,
            secure: false,
        };
        match from_head(&origin, parts, RequestBody::Empty) {
            Ok(mut request) => {
                request.connection.clone_from(&face.connection);
                session::serve(&face.worker, request).await
            }
            Err(rejected) => SessionOutcome::Response(session::reject(&face.worker, *rejected)),
        }
    };
    let SessionOutcome::Response(response) = outcome else { return Err(NackReason::NoRoute) };
    let (head, body) = response.into_parts();
    match head.status {
        StatusCode::OK => {}
        StatusCode::NOT_FOUND | StatusCode::GONE => return Ok(None),
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => return Err(NackReason::Congestion),
        _ => return Err(NackReason::NoRoute),
    }
    let Some(freshness) = freshness(&head.headers) else {
        face.worker.shared.metrics.dropped("ndn-private", 1);
        return Err(NackReason::NoRoute);
    };
    let bytes = collect(&face.worker, body).await?;
    Ok(Some((bytes, freshness, generation)))
}

/// The time that a response may be given to others. `None` if it is for one client: any forwarder stores NDN content.
fn freshness(headers: &HeaderMap) -> Option<Duration> {
    let directives = Directives::of(headers, &CACHE_CONTROL);
    if directives.no_store || directives.private != Scope::None || headers.contains_key(http::header::SET_COOKIE) {
        return None;
    }
    let seconds = directives.s_maxage.or(directives.max_age).filter(|_| directives.no_cache == Scope::None);
    Some(Duration::from_secs(seconds.unwrap_or_default()).max(MIN_FRESHNESS))
}

/// Bytes of a body that is being received. They count until this is dropped.
struct ReceivedBytes<'a> {
    worker: &'a Worker,
    count: usize,
}

impl Drop for ReceivedBytes<'_> {
    fn drop(&mut self) {
        self.worker.ndn_content.borrow_mut().release(self.count);
    }
}

/// Reads a body to its end.
///
/// # Errors
/// The body breaks off, is longer than [`MAX_CONTENT_BYTES`], or finds no room beside others.
async fn collect(worker: &Worker, mut body: ResponseBody) -> Result<Bytes, NackReason> {
    let mut received = ReceivedBytes { worker, count: 0 };
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| NackReason::NoRoute)?.into_data() else { continue };
        if all.len() + data.len() > MAX_CONTENT_BYTES {
            worker.shared.metrics.limit("ndn-content-bytes");
            return Err(NackReason::NoRoute);
        }
        if !worker.ndn_content.borrow_mut().reserve(data.len()) {
            worker.shared.metrics.limit("ndn-content");
            return Err(NackReason::Congestion);
        }
        received.count += data.len();
        all.extend_from_slice(&data);
    }
    Ok(all.freeze())
}

/// Makes the frame for an Interest: Data, or the negative answer if no version has the part that it names.
fn answer(
    signer: Option<&Signer>,
    interest: &Interest,
    packet: &LpPacket,
    versions: &[Rc<PublishedContent>],
    freshness: Duration,
) -> Option<Bytes> {
    let Some(signer) = signer else { return refusal(packet, NackReason::NoRoute) };
    for content in versions {
        match content.answer(interest, freshness, signer) {
            Ok(Some(data)) => return Some(frame(data, packet)),
            Ok(None) => {}
            Err(_) => return refusal(packet, NackReason::NoRoute),
        }
    }
    match no_content(interest, MIN_FRESHNESS, signer) {
        Ok(data) => Some(frame(data, packet)),
        Err(_) => refusal(packet, NackReason::NoRoute),
    }
}

/// The frame of a Data packet, with the token of its Interest.
fn frame(data: Bytes, packet: &LpPacket) -> Bytes {
    LpPacket { pit_token: packet.pit_token.clone(), ..LpPacket::bare(data) }.encode()
}

/// The frame that returns an Interest.
fn refusal(packet: &LpPacket, reason: NackReason) -> Option<Bytes> {
    Some(LpPacket::returning(packet.fragment.clone()?, reason, packet.pit_token.clone()).encode())
}

//! A custody channel: records on a stream between two nodes.
//!
//! In: a stream that one node has opened to the other. Out: the neighbour's records go to the custody service, and the
//! service's records for it go out. Exchanges that a neighbour begins are sessions of the channel's worker; they
//! outlive the channel.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_model::facts::Trust;
use hermes_model::snapshot::Contact as Plan;
use hermes_wire::capsule::{Capsule, CapsuleDecoder};
use hermes_wire::custody::{self as wire, ExchangeId, Record};
use http::{HeaderName, StatusCode};
use tokio::time::Instant;

use super::arrived;
use super::link::Link;
use crate::error::Error;
use crate::live::{Phase, Session, Watched};
use crate::request::{Ask, Request};
use crate::session::{self, Far, Served, Tunnel};
use crate::stream::ByteStream;
use crate::upgrade;
use crate::worker::Worker;
use hermes_custody::BY;
use hermes_custody::contact_plan;
use hermes_custody::service::Office;

/// The header that names the path of a neighbour, which may have several.
pub(super) const LINE: HeaderName = HeaderName::from_static("hermes-line");
/// The longest value of that header.
const MOST_LINE: usize = 256;
/// Records are coalesced up to this size.
const GATHER: usize = 32 << 10;
/// A silence after which the path may have had an outage.
const SILENCE: Duration = Duration::from_millis(60);
/// The limit of turns before other tasks of the worker run.
const TURNS: usize = 16;

/// True if a request opens a channel.
pub(crate) fn is_asked_for(request: &Request<'_>) -> bool {
    matches!(&request.ask, Ask::Upgrade(protocol) if **protocol == *wire::PROTOCOL)
        && request.facts.path.as_str() == wire::PATH
}

/// Accepts a channel from an authenticated node or a trusted address.
pub(crate) fn accept(worker: &Rc<Worker>, request: &Request<'_>) -> Served {
    let generation = worker.generation();
    let facts = &request.facts;
    let session = Session::begin(worker, facts.clone(), request.connection.clone(), request.trace);
    let Some(peer) = name_of(request) else {
        if worker.shared.custody.refuses(facts.source.ip()) {
            tracing::warn!(
                neighbour = %facts.source.ip(), listener = %facts.listener,
                "a neighbour was refused custody, since it has not proven who it is: give that node an `identity` and have this \
                 listener ask for it (tls: {{client: required}}), or list its address in the listener's `trust`"
            );
        }
        let reason = "only nodes of the overlay give exchanges into custody".to_owned();
        let (status, label) = (StatusCode::FORBIDDEN, "http_request_denied");
        return session::fail(session, &Error::Denied { status, reason, label });
    };
    if !worker.shared.custody.is_ready() {
        return session::fail(session, &Error::Limit("another process of this node still has its journal of custody"));
    }
    if !session.take_tunnel(generation.snapshot.limits.tunnels) {
        return session::fail(session, &Error::Limit("tunnels of this node"));
    }
    *session.entry.peer.borrow_mut() = Some(peer.clone());
    let head = upgrade::accepted(&request.ask, request.version, facts, None);
    session.entry.status.set(head.status().as_u16());
    let way = Way {
        listener: facts.listener.clone(),
        source: facts.source,
        trust: facts.trust.clone(),
        peer,
        plan: contact_plan::told(&facts.headers),
    };
    Served::Tunnel(Box::new(Tunnel { head, far: Far::Custody(Rc::new(way)), session, body: None }))
}

/// The name of a dialling neighbour in the engine: its identity and its path.
fn name_of(request: &Request<'_>) -> Option<Arc<str>> {
    let facts = &request.facts;
    if !facts.trust.is_believed() {
        return None;
    }
    let line = facts.headers.get(LINE).and_then(|line| line.to_str().ok()).filter(|line| line.len() <= MOST_LINE)?;
    let node = facts.trust.peer().and_then(|peer| peer.node.clone());
    let who = node.unwrap_or_else(|| Arc::from(facts.source.ip().to_string()));
    Some(Arc::from(format!("{who}{BY}{line}")))
}

/// The properties of a channel that apply to its exchanges.
pub(crate) struct Way {
    pub(super) listener: Arc<str>,
    pub(super) source: SocketAddr,
    pub(super) trust: Trust,
    pub(super) peer: Arc<str>,
    /// The neighbour's contact plan for the link.
    plan: Option<Plan>,
}

/// Runs an accepted channel until it closes or a newer one replaces it.
pub(crate) async fn carry_accepted(session: &Session, mut stream: ByteStream, way: &Rc<Way>) {
    let worker = &session.worker;
    session.entry.set_phase(worker, Phase::Open);
    let _watched = Watched::begin(&session.entry);
    let link = Link::accepted(&mut stream, way.plan);
    let (mut channel, resumed) = Channel::begin(worker.shared.custody.clone(), way.peer.clone(), link);
    resumed.into_iter().for_each(|id| begin(worker, way, id, true));
    let carried = poll_fn(|cx| channel.poll(cx, &mut stream, |id| begin(worker, way, id, false)));
    tokio::select! {
        over = carried => tracing::debug!(peer = %way.peer, why = over, "a channel of custody is over"),
        _ = session.entry.end.wait() => {}
    }
    drop(channel);
    stream.abort();
    // The connection carried nothing else, and unsent records are useless.
    session.entry.close_connection("its channel of custody is over");
}

/// A channel to a neighbour.
pub(super) struct Channel {
    office: Arc<Office>,
    peer: Arc<str>,
    number: u64,
    decoder: CapsuleDecoder,
    out: Bytes,
    /// The link, if it is QUIC.
    link: Option<Link>,
    /// A counter of reads, and the time of the last one.
    pub(super) heard: u64,
    heard_at: Instant,
    /// A ping must be sent even if there is no record.
    pub(super) owes_ping: bool,
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.office.close(&self.peer, self.number);
    }
}

impl Channel {
    /// Opens a channel. Also returns the neighbour's exchanges from before this process started.
    pub(super) fn begin(office: Arc<Office>, peer: Arc<str>, link: Option<Link>) -> (Self, Vec<ExchangeId>) {
        let (number, resumed) = office.open(&peer);
        let decoder = wire::decoder();
        (
            Self {
                office,
                peer,
                number,
                decoder,
                out: Bytes::new(),
                link,
                heard: 0,
                heard_at: Instant::now(),
                owes_ping: false,
            },
            resumed,
        )
    }

    /// Reads and writes as much as possible. Ready with a reason when the channel ends.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut ByteStream,
        mut begun: impl FnMut(ExchangeId),
    ) -> Poll<&'static str> {
        for _ in 0..TURNS {
            let has_word = self.link.as_mut().is_some_and(|link| link.poll_words(cx));
            if has_word {
                self.hears();
            }
            let has_read = match stream.poll_read(cx) {
                Poll::Ready(Ok(Some(bytes))) => {
                    self.hears();
                    self.decoder.push(bytes);
                    if !self.hear(&mut begun) {
                        return Poll::Ready("it said what is no record of custody");
                    }
                    true
                }
                Poll::Ready(Ok(None)) => return Poll::Ready("it was ended"),
                Poll::Ready(Err(_)) => return Poll::Ready("it broke"),
                Poll::Pending => has_word,
            };
            if self.out.is_empty() && self.gather(cx) {
                return Poll::Ready("another one has taken its place");
            }
            if self.out.is_empty() {
                if stream.poll_flush(cx).is_ready() && !has_read {
                    return Poll::Pending;
                }
                continue;
            }
            match stream.poll_write(cx, &mut self.out) {
                Poll::Ready(Ok(())) => {
                    if let Some(link) = &self.link {
                        link.known.asked(std::time::Instant::now());
                    }
                }
                Poll::Ready(Err(_)) => return Poll::Ready("it broke"),
                Poll::Pending if has_read => {}
                Poll::Pending => return Poll::Pending,
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Notes that bytes came.
    fn hears(&mut self) {
        self.heard += 1;
        // Any acknowledged packet shows earlier losses at once, instead of after a timer.
        let now = Instant::now();
        // A ping that answers a ping does not count as silence.
        let silence = self.link.as_ref().map_or(SILENCE, |link| SILENCE.max(2 * link.known.trip()));
        self.owes_ping |= now - self.heard_at >= silence;
        self.heard_at = now;
        if let Some(link) = &mut self.link {
            link.heard(now);
        }
    }

    /// Handles received records. False: a record is invalid.
    fn hear(&mut self, begun: &mut impl FnMut(ExchangeId)) -> bool {
        loop {
            match self.decoder.next() {
                Ok(Some(Capsule::Kept { kind, payload })) => match Record::parse(kind, payload) {
                    Ok(record) => {
                        self.office.hear(&self.peer, self.number, record).into_iter().for_each(&mut *begun);
                    }
                    Err(error) => {
                        tracing::warn!(peer = %self.peer, %error, "a channel of custody is ended");
                        return false;
                    }
                },
                Ok(Some(_)) => {}
                Ok(None) => return true,
                Err(error) => {
                    tracing::warn!(peer = %self.peer, %error, "a channel of custody is ended");
                    return false;
                }
            }
        }
    }

    /// Collects outgoing records. True if another channel has replaced this one.
    fn gather(&mut self, cx: &mut Context<'_>) -> bool {
        let mut out = BytesMut::new();
        let window = self.link.as_mut().and_then(|link| link.window(cx));
        while out.len() < GATHER {
            match self.office.poll_record(cx, &self.peer, self.number, window) {
                Poll::Ready(Some(record)) => record.put(&mut out),
                Poll::Ready(None) => return true,
                Poll::Pending => break,
            }
        }
        let owes_ping = std::mem::take(&mut self.owes_ping);
        if out.is_empty() && (owes_ping || self.link.as_mut().is_some_and(|link| link.poll_tail(cx))) {
            if !self.link.as_mut().is_some_and(|link| link.say_word(cx)) {
                wire::put_ping(&mut out);
            }
        } else if let Some(link) = self.link.as_mut().filter(|_| !out.is_empty()) {
            link.sends();
        }
        self.out = out.freeze();
        false
    }
}

/// Starts a session for an exchange of a neighbour.
fn begin(worker: &Rc<Worker>, way: &Rc<Way>, id: ExchangeId, is_resumed: bool) {
    let (here, way) = (worker.clone(), way.clone());
    worker.spawn(async move { arrived::serve(&here, &way, id, is_resumed).await });
}

//! NDN listeners: a forwarder on this machine sends its packets to the node, over UDP, TCP or a Unix socket.
//!
//! In: packets of a face. Out: for each namespace of a face a session, CONNECT to the listener's authority with the
//! headers `hermes-service` and `hermes-namespace`. The longest prefix of a packet's name selects the namespace. An
//! Interest outside all namespaces comes back with the reason "no route". A stream face is stopped while its session has
//! no room; a datagram face gets congestion marks, and loses packets when its queue is full. Interests for content of
//! HTTP hosts are answered here (`ndn/content.rs`). Never: a cache, or a table of pending Interests, for packets that
//! pass.

mod content;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_architecture::ndn::link::{DatagramLink, count_lost, next_frames, read_packets, write_packets};
use hermes_architecture::ndn::packet_stream::{PacketStream, QUEUE_PACKETS};
use hermes_model::authority::Authority;
use hermes_model::facts::{Kind, Trust};
use hermes_model::snapshot::{Listener, ListenerProtocol, Ndn};
use hermes_ndn::lp::{LpPacket, NackReason};
use hermes_ndn::packet::{INTEREST, name_of};
use hermes_ndn::{MAX_PACKET, Name};
use hermes_net::udp::{self, UdpSocket};
use http::{HeaderName, HeaderValue};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

use self::content::ContentOffer;
use super::{Ending, flow_table, open, trust_by_address};
use crate::request::{Origin, Rejected, Request, from_flow};
use crate::session::{self, DownstreamEnd, SessionOutcome};
use crate::worker::Worker;
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::fair_shares::Share;
use hermes_transport::runtime::session::Connection;
use hermes_transport::runtime::yield_to_network;
use hermes_transport::stream::ByteStream;

const SERVICE: HeaderName = HeaderName::from_static("hermes-service");
const NAMESPACE: HeaderName = HeaderName::from_static("hermes-namespace");
/// After a session could not be opened, Interests for its namespace come back for this time.
const PENALTY: Duration = Duration::from_secs(1);
/// The interval at which faces without a session are removed, in milliseconds.
const PRUNE_INTERVAL: u64 = 1000;
/// Receive calls before other tasks run.
const ROUNDS: usize = 16;

/// A face, and its sessions by namespace.
struct Face {
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    authority: Authority,
    source: SocketAddr,
    trust: Trust,
    connection: Option<Rc<Connection>>,
    content: ContentOffer,
    /// Prefixes with their namespaces, the longest first.
    namespaces: Vec<(Name, Arc<str>)>,
    to_face: mpsc::Sender<Bytes>,
    sessions: RefCell<HashMap<Arc<str>, SessionState>>,
    /// The first packets of sessions that are being opened, by namespace. They come back if a session is refused.
    opening: RefCell<HashMap<Arc<str>, Vec<LpPacket>>>,
    /// The next packet to the face carries a congestion mark.
    is_congested: Cell<bool>,
}

/// The destination of a packet.
enum PacketDestination {
    /// To the session of its namespace.
    Session(mpsc::Sender<Bytes>),
    /// Nowhere; this frame goes back to the face.
    Face(Bytes),
}

enum SessionState {
    Open(mpsc::Sender<Bytes>),
    /// The session failed; it is not opened again before this time of the worker's clock, in milliseconds.
    Failed(u64),
}

impl Face {
    fn new(
        worker: &Rc<Worker>,
        (listener, ndn): (&Arc<Listener>, &Ndn),
        (source, trust): (SocketAddr, Trust),
        connection: Option<Rc<Connection>>,
        to_face: mpsc::Sender<Bytes>,
    ) -> Rc<Self> {
        // `check` accepts only URIs; one with an invalid component matches nothing.
        let parsed = ndn.namespaces.iter().filter_map(|(name, prefix)| Some((prefix.parse().ok()?, name.clone())));
        let mut namespaces: Vec<(Name, Arc<str>)> = parsed.collect();
        namespaces.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
        Rc::new(Self {
            worker: worker.clone(),
            listener: listener.clone(),
            authority: ndn.authority.clone(),
            source,
            trust,
            connection,
            content: ContentOffer::new(listener, ndn, source.ip(), &worker.generation()),
            namespaces,
            to_face,
            sessions: RefCell::default(),
            opening: RefCell::default(),
            is_congested: Cell::new(false),
        })
    }

    /// Decides where a packet goes, by its name. Opens a session if necessary. `None` if the packet goes nowhere, or
    /// waits for content.
    fn destination_of(self: &Rc<Self>, packet: &LpPacket) -> Option<PacketDestination> {
        let inner = packet.fragment.clone()?;
        let dropped = |reason| self.worker.shared.metrics.dropped(reason, 1);
        let Ok((kind, name)) = name_of(inner.clone()) else {
            dropped("ndn-malformed");
            return None;
        };
        let in_namespace = self.namespaces.iter().find(|(prefix, _)| prefix.is_prefix_of(&name));
        // The longest prefix counts, whether it is of content or of a namespace.
        if let Some((prefix, host)) = self.content.host_of(&name)
            && in_namespace.is_none_or(|(other, _)| other.len() < prefix.len())
        {
            return content::take_packet(self, packet, host).map(PacketDestination::Face);
        }
        let Some((_, namespace)) = in_namespace else {
            dropped("ndn-no-namespace");
            self.return_interest(kind, inner, packet);
            return None;
        };
        match self.sessions.borrow().get(namespace) {
            Some(SessionState::Open(queue)) if !queue.is_closed() => {
                if let Some(first) = self.opening.borrow_mut().get_mut(namespace)
                    && first.len() < QUEUE_PACKETS
                {
                    first.push(packet.clone());
                }
                return Some(PacketDestination::Session(queue.clone()));
            }
            Some(SessionState::Failed(until)) if *until > self.worker.now() => {
                dropped("ndn-session-failed");
                self.return_interest(kind, inner, packet);
                return None;
            }
            _ => {}
        }
        let (queue, packets) = mpsc::channel(QUEUE_PACKETS);
        self.sessions.borrow_mut().insert(namespace.clone(), SessionState::Open(queue.clone()));
        self.opening.borrow_mut().insert(namespace.clone(), vec![packet.clone()]);
        self.worker.spawn(serve_namespace(self.clone(), namespace.clone(), packets));
        Some(PacketDestination::Session(queue))
    }

    /// Whether a session lives, or has failed so recently that the face must know of it.
    fn is_live(&self) -> bool {
        self.sessions.borrow().values().any(|session| match session {
            SessionState::Open(queue) => !queue.is_closed(),
            SessionState::Failed(until) => *until > self.worker.now(),
        })
    }

    /// Sends an Interest back to the face, with the reason.
    fn return_interest(&self, kind: u32, interest: Bytes, frame: &LpPacket) {
        if kind == INTEREST && frame.nack.is_none() {
            let nack = LpPacket::returning(interest, NackReason::NoRoute, frame.pit_token.clone());
            let _ = self.to_face.try_send(nack.encode());
        }
    }

    fn request<'a>(&self, namespace: &str) -> Result<Request<'a>, Box<Rejected>> {
        let origin = Origin {
            worker: &self.worker,
            listener: &self.listener,
            source: self.source,
            trust: &self.trust,
            secure: false,
        };
        let mut request = from_flow(&origin, Kind::Tcp, &self.authority, "")?;
        if let (Some(facts), Ok(namespace)) = (Rc::get_mut(&mut request.facts), HeaderValue::from_str(namespace)) {
            facts.headers.insert(SERVICE, HeaderValue::from_static("NDN"));
            facts.headers.insert(NAMESPACE, namespace);
        }
        Ok(request)
    }
}

/// Serves the session of one namespace of a face.
async fn serve_namespace(face: Rc<Face>, namespace: Arc<str>, packets: mpsc::Receiver<Bytes>) {
    let stream = PacketStream::new(packets, face.to_face.clone());
    let mut near = ByteStream::Boxed(Box::new(stream));
    let opened = open(&face.worker, face.connection.as_ref(), &mut near, face.request(&namespace)).await;
    let first = face.opening.borrow_mut().remove(&namespace).unwrap_or_default();
    let state = match opened {
        SessionOutcome::Tunnel(tunnel) => {
            session::relay(DownstreamEnd::Stream(near), *tunnel).await;
            None
        }
        SessionOutcome::Response(_) => {
            near.abort();
            for frame in first {
                if let Some(inner) = frame.fragment.clone()
                    && let Ok((kind, _)) = name_of(inner.clone())
                {
                    face.return_interest(kind, inner, &frame);
                }
            }
            Some(SessionState::Failed(face.worker.now() + PENALTY.as_millis() as u64))
        }
    };
    let mut sessions = face.sessions.borrow_mut();
    match state {
        Some(state) => drop(sessions.insert(namespace, state)),
        // A newer session of the namespace stays.
        None if matches!(sessions.get(&namespace), Some(SessionState::Open(queue)) if queue.is_closed()) => {
            sessions.remove(&namespace);
        }
        None => {}
    }
}

/// Serves a connection of a forwarder until it ends.
pub(super) async fn serve(
    worker: &Rc<Worker>,
    connection: &Rc<Connection>,
    ndn: &Ndn,
    io: impl AsyncRead + AsyncWrite,
    source: SocketAddr,
    trust: Trust,
) {
    let (to_face, mut queue) = mpsc::channel(QUEUE_PACKETS);
    let face = Face::new(worker, (&connection.listener, ndn), (source, trust), Some(connection.clone()), to_face);
    let (mut read, mut write) = tokio::io::split(io);
    let reading = read_packets(&mut read, async |frame| {
        let Ok(packet) = LpPacket::decode(frame) else {
            worker.shared.metrics.dropped("ndn-malformed", 1);
            return;
        };
        // A session that has ended loses the packet, as a link that breaks.
        let _ = match face.destination_of(&packet) {
            Some(PacketDestination::Session(session)) => session.send(packet.encode()).await,
            Some(PacketDestination::Face(answer)) => face.to_face.send(answer).await,
            None => Ok(()),
        };
    });
    let ended = tokio::select! {
        ended = reading => ended,
        ended = write_packets(&mut write, &mut queue) => ended,
        _ = connection.drain.wait() => Ok(()),
    };
    if let Err(error) = ended {
        tracing::debug!(source = %connection.source.get(), %error, "a face has ended");
    }
    face.sessions.borrow_mut().clear();
}

/// The face of one source of datagrams.
struct UdpFace {
    face: Rc<Face>,
    link: Rc<RefCell<DatagramLink>>,
    _share: Share,
}

/// The faces of a socket, by their source.
struct UdpFaces {
    known: HashMap<SocketAddr, UdpFace>,
    pruned_at: u64,
}

impl UdpFaces {
    /// Removes faces without a live session, at most once an interval: sources can be forged, and a pass visits all.
    fn prune(&mut self, now: u64) {
        if now >= self.pruned_at + PRUNE_INTERVAL {
            self.pruned_at = now;
            self.known.retain(|_, known| known.face.is_live());
        }
    }
}

/// Receives for all faces of a socket until the listener ends.
pub(super) async fn receive_all(worker: Rc<Worker>, socket: UdpSocket, name: Arc<str>, ending: Rc<Oneshot<Ending>>) {
    let socket = Rc::new(socket);
    let mut faces = UdpFaces { known: HashMap::new(), pruned_at: worker.now() };
    std::future::poll_fn(|cx| {
        if ending.poll(cx).is_ready() {
            return std::task::Poll::Ready(());
        }
        for _ in 0..ROUNDS {
            let receiving = socket.clone();
            let mut buffer = worker.udp_buffer.borrow_mut();
            let received = receiving.poll_receive(cx, &mut buffer, |source, datagram| {
                take_datagram(&worker, &name, &socket, &mut faces, source, datagram);
            });
            if received.is_pending() {
                return std::task::Poll::Pending;
            }
        }
        yield_to_network(cx);
        std::task::Poll::Pending
    })
    .await;
}

fn take_datagram(
    worker: &Rc<Worker>,
    name: &Arc<str>,
    socket: &Rc<UdpSocket>,
    faces: &mut UdpFaces,
    source: SocketAddr,
    datagram: Bytes,
) {
    let metrics = &worker.shared.metrics;
    if !faces.known.contains_key(&source) {
        faces.prune(worker.now());
        let Some(face) = begin_face(worker, name, socket, source) else { return };
        faces.known.insert(source, face);
    }
    let Some(known) = faces.known.get_mut(&source) else { return };
    let Ok(received) = known.link.borrow_mut().take(datagram) else {
        metrics.dropped("ndn-malformed", 1);
        return;
    };
    let face = &known.face;
    received.answers.into_iter().for_each(|answer| drop(face.to_face.try_send(answer)));
    let Some(packet) = received.packet else { return };
    let sent = match face.destination_of(&packet) {
        Some(PacketDestination::Session(session)) => {
            if session.capacity() < QUEUE_PACKETS / 2 {
                face.is_congested.set(true);
            }
            session.try_send(packet.encode())
        }
        Some(PacketDestination::Face(answer)) => face.to_face.try_send(answer),
        None => Ok(()),
    };
    if sent.is_err() {
        metrics.dropped("queue-full", 1);
    }
}

fn begin_face(worker: &Rc<Worker>, name: &Arc<str>, socket: &Rc<UdpSocket>, source: SocketAddr) -> Option<UdpFace> {
    let generation = worker.generation();
    let state = generation.listening(name)?;
    // The socket's listener may have another protocol since a reload.
    let ListenerProtocol::Ndn(ndn) = &state.listener.protocol else { return None };
    let trust = trust_by_address(&state.listener, source);
    let share = flow_table::take(worker, &state.shares.flows, &trust, source.ip())?;
    let (to_face, queue) = mpsc::channel(QUEUE_PACKETS);
    let face = Face::new(worker, (&state.listener, ndn), (source, trust), None, to_face);
    // The kernel knows the path; without a route, nothing can be sent anyway.
    let mtu = udp::whole_payload(source).unwrap_or(MAX_PACKET);
    let link = Rc::new(RefCell::new(DatagramLink::new(mtu, false, worker.random().1)));
    worker.spawn(send_all(face.clone(), socket.clone(), link.clone(), queue));
    Some(UdpFace { face, link, _share: share })
}

/// Sends packets to a source of datagrams until its face and all sessions have gone.
async fn send_all(
    face: Rc<Face>,
    socket: Rc<UdpSocket>,
    link: Rc<RefCell<DatagramLink>>,
    mut queue: mpsc::Receiver<Bytes>,
) {
    let (worker, source) = (face.worker.clone(), face.source);
    let congested = Rc::downgrade(&face);
    drop(face);
    let mark = |packet: Bytes| {
        if let Some(face) = congested.upgrade()
            && face.is_congested.get()
            && let Ok(frame) = LpPacket::decode(packet.clone())
            && frame.fragment.is_some()
        {
            face.is_congested.set(false);
            worker.shared.metrics.limit("ndn-congestion");
            return LpPacket { congestion: Some(1), ..frame }.encode();
        }
        packet
    };
    while let Some(frames) = next_frames(&link, &mut queue, mark).await {
        count_lost(&worker, &link);
        for frame in frames {
            let sent = socket.send(source, &frame);
            if sent.await.is_err() {
                worker.shared.metrics.dropped("send-failed", 1);
            }
        }
    }
}

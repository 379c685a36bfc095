//! Transparent listeners: TCP connections to other hosts, intercepted on their way.
//!
//! In: an interception of this worker: its listening sockets, and the SYNs that the kernel holds. Out: a session to the
//! address that the client dialled. A held SYN begins the session; the client gets its SYN-ACK only when the far
//! connection stands. It gets a reset if that was refused, and nothing if nobody answered. Beyond `limits.held-syns`,
//! connections pass without a session. Never: a packet of a connection that began before the listener.

mod udp;

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_architecture::flow_requests::{Refusal, RequestedFlow};
use hermes_model::authority::Authority;
use hermes_model::facts::Kind;
use hermes_model::snapshot::{Listener, Step};
use hermes_net::Io;
use hermes_net::nfqueue::{HeldPacket, PacketVerdict, QueueReader};
use hermes_net::transparent::Interception;
use hermes_wire::ip;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{CurrentListener, Ending, Ready, begin_tcp, open as open_session, requested_flow, trust_by_address};
use crate::request::{Origin, Rejected, Request};
use crate::session::{self, DownstreamEnd, SessionOutcome};
use crate::worker::Worker;
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::session::{Connection, ConnectionGuard, Stage};
use hermes_transport::stream::ByteStream;

/// The number of waits before a session gives up on its client's handshake. The client's kernel answers a SYN-ACK at once, and ours
/// repeats a lost one after a second.
const HANDSHAKE_WAITS: usize = 10;
/// A worker that stands still uses up one of these waits, however long it stands: the connection may be in its accept queue.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(1);

/// Source and destination of an intercepted connection.
type Flow = (SocketAddr, SocketAddr);
/// Sequence numbers of SYNs.
type AcceptedFlows = RefCell<HashMap<Flow, u32>>;

/// The interception of one listener on one worker.
pub(super) struct Interceptor {
    worker: Rc<Worker>,
    interception: Arc<Interception>,
    slot: usize,
    queue: QueueReader,
    listeners: Vec<TcpListener>,
    /// Local addresses of `listeners`. A connection to one of them was not intercepted.
    listener_addresses: Vec<SocketAddr>,
    /// Sockets for the first datagrams of UDP flows, until their tasks take them.
    udp: RefCell<Vec<tokio::net::UdpSocket>>,
    held: RefCell<HashMap<Flow, HeldState>>,
    /// The sequence numbers of the SYNs whose connections have sessions now. A repeated SYN of theirs may still be in the queue.
    accepted: Rc<AcceptedFlows>,
}

/// A held SYN, with its sequence number, which tells a repeated SYN from that of another connection.
struct HeldState {
    sequence: u32,
    held: Held,
}

/// The progress of a held SYN.
enum Held {
    /// The session is being opened.
    Opening,
    /// The SYN was released; the accepted connection goes to its session.
    Released(oneshot::Sender<TcpStream>),
}

/// Prepares the sockets of a worker.
///
/// # Errors
/// No file descriptor is left.
pub(super) fn open(worker: &Rc<Worker>, interception: Arc<Interception>, slot: usize) -> io::Result<Rc<Interceptor>> {
    let sockets = interception.sockets(slot)?;
    let listeners = sockets.listeners.into_iter().map(TcpListener::from_std).collect::<io::Result<Vec<_>>>()?;
    let listener_addresses = listeners.iter().map(TcpListener::local_addr).collect::<io::Result<_>>()?;
    let udp = sockets.udp.into_iter().map(tokio::net::UdpSocket::from_std).collect::<io::Result<_>>()?;
    let queue = QueueReader::new(sockets.queue)?;
    let (worker, udp) = (worker.clone(), RefCell::new(udp));
    Ok(Rc::new(Interceptor {
        worker,
        interception,
        slot,
        queue,
        listeners,
        listener_addresses,
        udp,
        held: RefCell::default(),
        accepted: Rc::default(),
    }))
}

/// Serves connections until the listener ends, and then those whose SYN is still held.
pub(super) async fn accept_all(
    this: Rc<Interceptor>,
    mut known: CurrentListener,
    ending: Rc<Oneshot<Ending>>,
    ended: Rc<Oneshot<()>>,
) {
    // A signal has one waiter, so each of the UDP tasks has one of its own.
    let udp_endings: Vec<Rc<Oneshot<Ending>>> = this
        .udp
        .take()
        .into_iter()
        .map(|socket| {
            let ending = Rc::<Oneshot<Ending>>::default();
            this.worker.spawn(udp::receive_all(this.worker.clone(), socket, known.name.clone(), ending.clone()));
            ending
        })
        .collect();
    let mut is_ending = false;
    let mut packets = Vec::new();
    let mut pause: Option<Instant> = None;
    loop {
        if is_ending && this.held.borrow().is_empty() {
            return;
        }
        // Connections come before SYNs: a client whose SYN was released waits, and repeats it after a second.
        tokio::select! {
            biased;
            how = ending.wait(), if !is_ending => {
                // No other process shares these sockets.
                is_ending = true;
                udp_endings.iter().for_each(|ending| ending.set(how));
                ended.set(());
            }
            () = tokio::time::sleep_until(pause.unwrap_or_else(Instant::now)), if pause.is_some() => pause = None,
            // SYNs are still read in a pause: they pass if no descriptor is left.
            accepted = this.accept(), if pause.is_none() => match accepted {
                Ok((tcp, source)) => if this.take_connection(&mut known, tcp, source) {
                    // The session begins first, as at other listeners.
                    tokio::task::yield_now().await;
                },
                Err(error) => pause = super::pause_after(&this.worker, &known.name, &error),
            },
            complete = this.queue.next(&mut packets) => match complete {
                Ok(complete) => {
                    if !complete {
                        this.worker.shared.metrics.limit("held-syns");
                    }
                    packets.drain(..).for_each(|packet| this.clone().take_packet(&mut known, &packet, is_ending));
                }
                Err(error) => {
                    tracing::error!(listener = %known.name, %error, "cannot read held SYNs; connections pass unserved");
                    let how = ending.wait().await;
                    udp_endings.iter().for_each(|ending| ending.set(how));
                    return ended.set(());
                }
            },
        }
    }
}

impl Interceptor {
    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        std::future::poll_fn(|cx| {
            let ready = self.listeners.iter().map(|listener| listener.poll_accept(cx)).find(std::task::Poll::is_ready);
            ready.unwrap_or(std::task::Poll::Pending)
        })
        .await
    }

    fn decide(&self, packet: u32, verdict: PacketVerdict) {
        if let Err(error) = self.queue.queue().decide(packet, verdict) {
            tracing::debug!(%error, "no verdict on a held SYN");
        }
    }

    /// Begins the session of a held SYN.
    fn take_packet(self: Rc<Self>, known: &mut CurrentListener, packet: &HeldPacket, is_ending: bool) {
        let Some((flow, sequence)) = flow_of(&packet.bytes).filter(|_| !is_ending) else {
            return self.decide(packet.id, PacketVerdict::Accept);
        };
        if let Some(known) = self.held.borrow().get(&flow) {
            let verdict = match known.held {
                Held::Released(_) if known.sequence == sequence => self.interception.release(self.slot),
                // The client repeats its SYN; or it uses its port again before the connection before has reached its
                // session, and then sends its SYN again, too.
                Held::Opening | Held::Released(_) => PacketVerdict::Drop,
            };
            return self.decide(packet.id, verdict);
        }
        if self.accepted.borrow().get(&flow) == Some(&sequence) {
            // The client repeated its SYN before the answer reached it.
            return self.decide(packet.id, PacketVerdict::Drop);
        }
        let metrics = &self.worker.shared.metrics;
        if self.worker.overload.takes(Step::Stop) {
            metrics.limit("unsplit");
            return self.decide(packet.id, PacketVerdict::Accept);
        }
        let limit = self.worker.snapshot().limits.held_syns.div_ceil(self.worker.shared.workers);
        let Some(guard) = known.current(&self.worker).and_then(|(state, _)| {
            let trust = trust_by_address(&state.listener, flow.0);
            ConnectionGuard::take(&self.worker, state.listener.clone(), flow.0, &trust)
        }) else {
            metrics.limit("unsplit");
            return self.decide(packet.id, PacketVerdict::Accept);
        };
        if self.held.borrow().len() >= limit {
            metrics.limit("held-syns");
            metrics.limit("unsplit");
            return self.decide(packet.id, PacketVerdict::Accept);
        }
        super::count_connection(&self.worker, &guard.connection);
        self.held.borrow_mut().insert(flow, HeldState { sequence, held: Held::Opening });
        let syn = HeldSyn { interceptor: self.clone(), flow, sequence, packet: Some(packet.id), is_accepted: false };
        let session = SessionFlow { accepted: self.accepted.clone(), flow, sequence };
        self.worker.spawn(async move {
            let (worker, connection) = (syn.interceptor.worker.clone(), guard.connection.clone());
            let served = serve_held(&worker, &connection, syn);
            tokio::select! {
                biased;
                () = Box::pin(served) => {}
                reason = connection.kill.wait() => {
                    tracing::debug!(source = %connection.source.get(), reason, "a connection was closed");
                }
            }
            drop((session, guard));
        });
    }

    /// Gives an accepted connection to the session of its SYN, or begins a session if SYNs are not held. Returns true in that case.
    fn take_connection(&self, known: &mut CurrentListener, tcp: TcpStream, source: SocketAddr) -> bool {
        let Ok(destination) = tcp.local_addr() else { return false };
        if let Some(session) = self.take_released(&(source, destination)) {
            // A session that has ended drops the connection.
            drop(session.send(tcp));
            return false;
        }
        let holds = known.current(&self.worker).is_some_and(|(state, _)| holds_syns(&state.listener));
        if holds || self.listener_addresses.contains(&destination) {
            // No session waits for the connection: it has ended, or a program of this machine connected to the port itself.
            tracing::debug!(listener = %known.name, %source, %destination, "a connection without a session is reset");
            hermes_net::tcp::reset_on_close(&tcp);
            return false;
        }
        begin_tcp(&self.worker, known, tcp, source);
        true
    }
}

impl Interceptor {
    /// Moves a released SYN from those that are held to those that are accepted.
    fn take_released(&self, flow: &Flow) -> Option<oneshot::Sender<TcpStream>> {
        let mut held = self.held.borrow_mut();
        if matches!(held.get(flow)?.held, Held::Opening) {
            return None;
        }
        let HeldState { sequence, held: Held::Released(session) } = held.remove(flow)? else { return None };
        self.accepted.borrow_mut().insert(*flow, sequence);
        Some(session)
    }
}

fn holds_syns(listener: &Listener) -> bool {
    use hermes_model::snapshot::ListenerProtocol;
    matches!(&listener.protocol, ListenerProtocol::Transparent(transparent) if transparent.hold_syn)
}

/// A SYN in the table of its worker. Dropping it removes the entry, and drops the packet if it is still held.
struct HeldSyn {
    interceptor: Rc<Interceptor>,
    flow: Flow,
    sequence: u32,
    /// `None` once the verdict was sent.
    packet: Option<u32>,
    /// The connection was accepted, so the table has no entry of this SYN. An entry of the flow belongs to a later one.
    is_accepted: bool,
}

impl HeldSyn {
    fn decide(&mut self, verdict: PacketVerdict) {
        if let Some(packet) = self.packet.take() {
            self.interceptor.decide(packet, verdict);
        }
    }

    /// Releases the SYN, and waits for the connection.
    async fn accepted(&mut self) -> Option<TcpStream> {
        let (sender, mut accepted) = oneshot::channel();
        let state = HeldState { sequence: self.sequence, held: Held::Released(sender) };
        self.interceptor.held.borrow_mut().insert(self.flow, state);
        self.decide(self.interceptor.interception.release(self.interceptor.slot));
        for _ in 0..HANDSHAKE_WAITS {
            if let Ok(tcp) = tokio::time::timeout(HANDSHAKE_WAIT, &mut accepted).await {
                self.is_accepted = true;
                return tcp.ok();
            }
        }
        None
    }
}

impl Drop for HeldSyn {
    fn drop(&mut self) {
        self.decide(PacketVerdict::Drop);
        if !self.is_accepted {
            self.interceptor.held.borrow_mut().remove(&self.flow);
        }
    }
}

/// The flow of a session. Dropping it ends the session's place among those that are accepted. Sessions outlive their listener, whose
/// sockets close before.
struct SessionFlow {
    accepted: Rc<AcceptedFlows>,
    flow: Flow,
    sequence: u32,
}

impl Drop for SessionFlow {
    fn drop(&mut self) {
        let mut accepted = self.accepted.borrow_mut();
        // The client may use its port again before this session has ended.
        if accepted.get(&self.flow) == Some(&self.sequence) {
            accepted.remove(&self.flow);
        }
    }
}

/// Opens the session of a held SYN, answers the client, and relays.
async fn serve_held(worker: &Rc<Worker>, connection: &Rc<Connection>, mut syn: HeldSyn) {
    connection.set_stage(worker, Stage::Idle);
    let trust = trust_by_address(&connection.listener, syn.flow.0);
    if !connection.is_of(worker, &trust, syn.flow.0) {
        return syn.decide(PacketVerdict::Accept);
    }
    let origin = Origin { worker, listener: &connection.listener, source: syn.flow.0, trust: &trust, secure: false };
    let request = request(&origin, Kind::Tcp, syn.flow.1);
    let flow = HeldConnection { syn, congestion: connection.listener.congestion.clone() };
    requested_flow::serve(worker, connection, request, flow).await;
}

/// A connection whose SYN is held.
struct HeldConnection {
    syn: HeldSyn,
    congestion: Option<Arc<str>>,
}

impl RequestedFlow for HeldConnection {
    async fn accept(mut self) -> Option<ByteStream> {
        let tcp = self.syn.accepted().await?;
        hermes_net::tcp::set_congestion(&tcp, self.congestion.as_deref());
        Some(ByteStream::io(Io::Plain(tcp), Bytes::new()))
    }

    fn refuse(mut self, refusal: Refusal) {
        let interception = &self.syn.interceptor.interception;
        let verdict = match refusal {
            // The far host is dark, and so are we: the client repeats its SYN.
            Refusal::Silent => PacketVerdict::Drop,
            Refusal::Unreachable => interception.unreachable(),
            Refusal::Refused => interception.refuse(),
        };
        self.syn.decide(verdict);
    }
}

/// Serves a connection whose SYN was not held.
pub(super) async fn serve(worker: &Rc<Worker>, connection: &Rc<Connection>, ready: Ready) {
    let Ok(destination) = ready.io.tcp().local_addr() else { return };
    let origin = Origin {
        worker,
        listener: &connection.listener,
        source: ready.source,
        trust: &ready.trust,
        secure: ready.secure,
    };
    let mut near = ByteStream::io(ready.io, Bytes::new());
    match open_session(worker, Some(connection), &mut near, request(&origin, Kind::Tcp, destination)).await {
        SessionOutcome::Tunnel(tunnel) => session::relay(DownstreamEnd::Stream(near), *tunnel).await,
        SessionOutcome::Response(_) => near.abort(),
    }
}

/// The request for an intercepted connection or flow, to the address that the client used.
fn request<'a>(origin: &Origin<'_>, kind: Kind, destination: SocketAddr) -> Result<Request<'a>, Box<Rejected>> {
    let destination = SocketAddr::new(destination.ip().to_canonical(), destination.port());
    requested_flow::request(origin, kind, &authority(destination))
}

fn authority(destination: SocketAddr) -> Authority {
    // The text of a socket address is a valid authority.
    Authority::parse(&destination.to_string(), None).unwrap_or_else(|_| unreachable!("an address that parses"))
}

/// The flow and the sequence number of a held SYN; `None` if the packet is malformed.
fn flow_of(packet: &[u8]) -> Option<(Flow, u32)> {
    let header = ip::parse(packet).ok()?;
    let (source, destination): (IpAddr, IpAddr) = (header.source, header.destination);
    let (from, to) = ip::ports(packet, &header)?;
    let sequence = packet.get(header.transport + 4..)?.first_chunk().map(|number| u32::from_be_bytes(*number))?;
    Some((((source, from).into(), (destination, to).into()), sequence))
}

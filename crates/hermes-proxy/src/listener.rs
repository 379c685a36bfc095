//! Listeners: accept connections, authenticate the peer and start its protocol.
//!
//! In: a listening socket of this worker. Out: one task for each connection or flow, within the limits of the node. A
//! closing listener first serves the connections that already wait in its accept queue.

mod dns;
mod flow_table;
pub(crate) mod h1;
pub(crate) mod h2;
pub(crate) mod h3;
pub(crate) mod http;
mod interim;
mod ip;
mod ndn;
pub(crate) mod quic;
pub(crate) mod relief;
mod requested_flow;
pub(crate) mod reverse_dialer;
mod rina;
mod socks5;
mod stream_limits;
pub(crate) mod tcp;
mod transparent;
pub(crate) mod tun;
pub(crate) mod udp;
mod unix;

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use hermes_model::facts::Trust;
use hermes_model::snapshot::{DispatchMode, Listener, ListenerProtocol, Step};
use hermes_net::dispatch::ExclusiveListener;
use hermes_net::quic::Group;
use hermes_net::tcp::accept_waiting;
use hermes_net::tls::RustlsServerConfig;
use hermes_net::transparent::Interception;
use hermes_net::{Io, tls};
use hermes_wire::proxy_protocol::{self, Parsed};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use self::quic::QuicAcceptors;
use crate::request::{Rejected, Request};
use crate::session::{self, SessionOutcome};
use crate::worker::Worker;
use hermes_outbound::generation::ListenerState;
use hermes_outbound::outbound::reverse_acceptor;
use hermes_outbound::reverse::{self, ReverseTransport};
use hermes_transport::early_payload::{EarlyPayload, EarlyReader};
use hermes_transport::metrics::ListenerLabels;
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::session::{Connection, ConnectionGuard, Stage};

/// A bound socket for one worker.
pub(crate) struct ListeningSocket {
    /// The listener's name.
    pub(crate) name: Arc<str>,
    pub(crate) socket: BoundSocket,
}

impl ListeningSocket {
    /// Identifies the socket: the listener's name and the transport.
    pub(crate) fn place(&self) -> (Arc<str>, Transport) {
        (self.name.clone(), self.socket.transport())
    }
}

pub(crate) enum BoundSocket {
    Tcp(std::net::TcpListener),
    /// One socket of the listener, on which all workers wait.
    SharedTcp(std::net::TcpListener),
    Udp(std::net::UdpSocket),
    /// A socket group and the slot of this worker in it.
    Quic(Arc<Group>, u8),
    Dns(std::net::UdpSocket),
    Ndn(std::net::UdpSocket),
    Rina(std::net::UdpSocket),
    Unix(std::os::unix::net::UnixListener),
    /// An interception and the slot of this worker in it.
    Transparent(Arc<Interception>, usize),
}

/// The transport of a listening socket. Some listeners have two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Transport {
    Tcp,
    /// TCP connections to one socket, on which all workers wait (`dispatch: exclusive`).
    SharedTcp,
    /// UDP flows, or packets of an IP listener.
    Udp,
    Quic,
    /// DNS queries over UDP.
    Dns,
    /// Frames of NDN over UDP.
    Ndn,
    /// PDUs of a DIF over UDP.
    Rina,
    /// Connections to a Unix socket.
    Unix,
    /// Intercepted connections.
    Transparent,
}

impl Transport {
    /// All transports of a listener. TCP comes first: if the document leaves the port to the kernel, the other sockets
    /// use the port that TCP received.
    pub(crate) fn all_of(listener: &Listener, dispatch: DispatchMode) -> impl Iterator<Item = Self> {
        let of_protocol: &[Self] = match listener.protocol {
            ListenerProtocol::Http if listener.http3 => &[Transport::Tcp, Transport::Quic],
            ListenerProtocol::Http | ListenerProtocol::Tcp { .. } | ListenerProtocol::Socks5 => &[Transport::Tcp],
            ListenerProtocol::Dns(_) => &[Transport::Tcp, Transport::Dns],
            ListenerProtocol::Ndn(_) => &[Transport::Tcp, Transport::Ndn, Transport::Unix],
            ListenerProtocol::Rina(_) => &[Transport::Rina],
            ListenerProtocol::Udp { .. } | ListenerProtocol::Ip(_) => &[Transport::Udp],
            ListenerProtocol::Transparent(_) => &[Transport::Transparent],
            ListenerProtocol::Tun(_) => &[],
        };
        let is_shared = dispatch == DispatchMode::Exclusive && of_protocol.contains(&Transport::Tcp);
        of_protocol.iter().copied().chain(is_shared.then_some(Transport::SharedTcp))
    }
}

impl BoundSocket {
    pub(crate) fn transport(&self) -> Transport {
        match self {
            BoundSocket::Tcp(_) => Transport::Tcp,
            BoundSocket::SharedTcp(_) => Transport::SharedTcp,
            BoundSocket::Udp(_) => Transport::Udp,
            BoundSocket::Quic(..) => Transport::Quic,
            BoundSocket::Dns(_) => Transport::Dns,
            BoundSocket::Ndn(_) => Transport::Ndn,
            BoundSocket::Rina(_) => Transport::Rina,
            BoundSocket::Unix(_) => Transport::Unix,
            BoundSocket::Transparent(..) => Transport::Transparent,
        }
    }
}

/// The way in which a listener stops on this worker.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The listener was removed: serve the accept queue, then close.
    Close,
    /// Another process received the socket: stop reading from it.
    HandOver,
}

/// A running listener.
pub(crate) struct Acceptor {
    ending: Rc<Oneshot<Ending>>,
    ended: Rc<Oneshot<()>>,
}

impl Acceptor {
    /// Starts to accept.
    pub(crate) fn start(
        worker: &Rc<Worker>,
        acceptors: &mut QuicAcceptors,
        socket: ListeningSocket,
    ) -> io::Result<Self> {
        let this = Self { ending: Rc::default(), ended: Rc::default() };
        let (ending, ended) = (this.ending.clone(), this.ended.clone());
        let here = worker.clone();
        match socket.socket {
            BoundSocket::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                let listener = TcpListener::from_std(listener)?;
                let known = CurrentListener::new(worker, socket.name);
                spawn_until(worker, ended, accept_all(here, listener, known, ending, begin_tcp));
            }
            BoundSocket::SharedTcp(listener) => {
                let listener = ExclusiveListener::new(listener)?;
                let known = CurrentListener::new(worker, socket.name);
                spawn_until(worker, ended, accept_all(here, listener, known, ending, begin_tcp));
            }
            BoundSocket::Quic(group, slot) => {
                let known = CurrentListener::new(worker, socket.name);
                let acceptor = quic::open(worker, acceptors, &group, slot, &known)?;
                spawn_until(worker, ended, quic::accept_all(here, acceptor, known, ending));
            }
            BoundSocket::Transparent(interception, slot) => {
                let interceptor = transparent::open(worker, interception, slot)?;
                let known = CurrentListener::new(worker, socket.name);
                worker.spawn(transparent::accept_all(interceptor, known, ending, ended));
            }
            BoundSocket::Udp(bound) => {
                bound.set_nonblocking(true)?;
                let bound = hermes_net::udp::UdpSocket::from_std(bound)?;
                spawn_until(worker, ended, udp::receive_all(here, bound, socket.name, ending, udp::Targets::Document));
            }
            BoundSocket::Ndn(bound) => {
                bound.set_nonblocking(true)?;
                let bound = hermes_net::udp::UdpSocket::from_std(bound)?;
                spawn_until(worker, ended, ndn::receive_all(here, bound, socket.name, ending));
            }
            BoundSocket::Unix(bound) => {
                bound.set_nonblocking(true)?;
                let bound = tokio::net::UnixListener::from_std(bound)?;
                let known = CurrentListener::new(worker, socket.name);
                spawn_until(worker, ended, accept_all(here, bound, known, ending, unix::begin));
            }
            BoundSocket::Rina(bound) => {
                bound.set_nonblocking(true)?;
                let known = CurrentListener::new(worker, socket.name);
                spawn_until(worker, ended, rina::accept_all(here, bound, known, ending));
            }
            BoundSocket::Dns(bound) => {
                bound.set_nonblocking(true)?;
                let bound = hermes_net::udp::UdpSocket::from_std(bound)?;
                let known = CurrentListener::new(worker, socket.name);
                spawn_until(worker, ended, dns::receive_all(here, bound, known, ending));
            }
        }
        Ok(this)
    }

    pub(crate) fn close(self) {
        self.ending.set(Ending::Close);
    }

    /// Stops the listener; returns once nothing reads from the socket any longer.
    pub(crate) async fn end(self, how: Ending) {
        self.ending.set(how);
        self.ended.wait().await;
    }
}

/// Spawns the task of a listener, which tells when it has ended.
fn spawn_until(worker: &Worker, ended: Rc<Oneshot<()>>, task: impl Future<Output = ()> + 'static) {
    worker.spawn(async move {
        task.await;
        ended.set(());
    });
}

/// Pause after an error that an immediate retry would repeat, such as exhausted file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The current configuration of a listener. After the listener is removed, its last one.
struct CurrentListener {
    name: Arc<str>,
    state: Option<ListenerState>,
    generation: u64,
}

impl CurrentListener {
    fn new(worker: &Worker, name: Arc<str>) -> Self {
        let generation = worker.generation();
        Self { state: generation.listening(&name).cloned(), generation: generation.number, name }
    }

    /// The listener's configuration, and `true` while the listener is configured.
    fn current(&mut self, worker: &Worker) -> Option<(&ListenerState, bool)> {
        let generation = worker.generation();
        let now = generation.listening(&self.name);
        if generation.number != self.generation {
            self.generation = generation.number;
            self.state = now.cloned().or(self.state.take());
        }
        self.state.as_ref().map(|state| (state, now.is_some()))
    }
}

/// The longest accept queue that `hermes_net::tcp` requests from the kernel.
const MAX_ACCEPT_BACKLOG: usize = 4096;

/// A socket that accepts connections.
trait Accept: Sized {
    type Stream;

    /// Waits for the next connection. Cancel-safe.
    async fn accept(&self) -> io::Result<(Self::Stream, SocketAddr)>;

    /// Returns the `accept` of the kernel, because the runtime may not have reported the latest connections yet.
    fn into_queue(self) -> io::Result<impl FnMut() -> io::Result<(Self::Stream, SocketAddr)>>;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        TcpListener::accept(self).await
    }

    fn into_queue(self) -> io::Result<impl FnMut() -> io::Result<(TcpStream, SocketAddr)>> {
        let listener = self.into_std()?;
        Ok(move || accept_waiting(&listener))
    }
}

impl Accept for ExclusiveListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        ExclusiveListener::accept(self).await
    }

    fn into_queue(self) -> io::Result<impl FnMut() -> io::Result<(TcpStream, SocketAddr)>> {
        Ok(move || accept_waiting(self.listener()))
    }
}

/// Begins to serve a connection.
type Begin<Stream> = fn(&Rc<Worker>, &mut CurrentListener, Stream, SocketAddr);

async fn accept_all<A: Accept>(
    worker: Rc<Worker>,
    listener: A,
    mut known: CurrentListener,
    ending: Rc<Oneshot<Ending>>,
    begin: Begin<A::Stream>,
) {
    loop {
        tokio::select! {
            accepted = accept(&worker, &listener) => match accepted {
                Ok((stream, source)) => {
                    begin(&worker, &mut known, stream, source);
                    // The connection is served first: the next `accept` usually returns `WouldBlock`. Displaced
                    // connections also close before more are accepted.
                    tokio::task::yield_now().await;
                }
                Err(error) => {
                    if let Some(end) = pause_after(&worker, &known.name, &error) {
                        tokio::time::sleep_until(end).await;
                    }
                }
            },
            _ = ending.wait() => {
                // A handover drains the queue too: the other process may have no listener for this socket.
                drain_queue(&worker, listener, &mut known, begin);
                return;
            }
        }
    }
}

/// Accepts a connection, but none while this worker stops because of overload. Cancel-safe.
async fn accept<A: Accept>(worker: &Worker, listener: &A) -> io::Result<(A::Stream, SocketAddr)> {
    loop {
        worker.overload.until(Step::Stop, false).await;
        tokio::select! {
            biased;
            () = worker.overload.until(Step::Stop, true) => {}
            accepted = listener.accept() => return accepted,
        }
    }
}

/// Reports a failed `accept`. Returns the end of a pause if the next one would fail, too.
fn pause_after(worker: &Worker, listener: &str, error: &io::Error) -> Option<Instant> {
    if is_about_one_connection(error) {
        return None;
    }
    worker.shared.metrics.limit("accept");
    if let Some(more) = worker.shared.unaccepted.happened(worker.now()) {
        tracing::error!(%listener, %error, more, "cannot accept connections; retrying");
    }
    Some(Instant::now() + ACCEPT_PAUSE)
}

fn is_about_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

/// Serves connections that the kernel has accepted: closing the socket would reset them.
fn drain_queue<A: Accept>(worker: &Rc<Worker>, listener: A, known: &mut CurrentListener, begin: Begin<A::Stream>) {
    let Ok(mut accept) = listener.into_queue() else { return };
    for _ in 0..MAX_ACCEPT_BACKLOG {
        match accept() {
            Ok((stream, source)) => begin(worker, known, stream, source),
            Err(error) if is_about_one_connection(&error) => {}
            Err(_) => return,
        }
    }
}

fn begin_tcp(worker: &Rc<Worker>, known: &mut CurrentListener, tcp: TcpStream, source: SocketAddr) {
    let Some((state, is_there)) = known.current(worker) else { return };
    let trust = trust_by_address(&state.listener, source);
    let Some(guard) = ConnectionGuard::take(worker, state.listener.clone(), source, &trust) else {
        // Beyond the limit, the connection closes at once, so that the client can try another node.
        return;
    };
    // A connection may have waited here since before its listener was confined.
    if !is_there || worker.is_confined_elsewhere(&state.listener.name) {
        guard.connection.start_drain(worker);
    }
    count_connection(worker, &guard.connection);
    hermes_net::tcp::set_congestion(&tcp, state.listener.congestion.as_deref());
    if state.listener.protocol == ListenerProtocol::Http {
        hermes_net::tcp::bound_unsent(&tcp);
    }
    worker.spawn_for(&state.listener, serve(worker.clone(), guard, state.tls.clone(), tcp));
}

fn count_connection(worker: &Worker, connection: &Connection) {
    let labels = ListenerLabels { listener: connection.listener.name.clone() };
    worker.shared.metrics.connections.get_or_create(&labels).inc();
}

async fn serve(worker: Rc<Worker>, guard: ConnectionGuard, tls: Option<Arc<RustlsServerConfig>>, tcp: TcpStream) {
    let connection = guard.connection.clone();
    let killed = connection.kill.wait();
    let served = serve_connection(&worker, &connection, tls, tcp);
    tokio::select! {
        biased;
        () = served => {}
        reason = killed => tracing::debug!(source = %connection.source.get(), reason, "a connection was closed"),
    }
    drop(guard);
}

/// A connection after its handshake, ready for its protocol.
pub(crate) struct Ready {
    pub(crate) io: Io,
    pub(crate) source: SocketAddr,
    pub(crate) trust: Trust,
    pub(crate) secure: bool,
}

async fn serve_connection(
    worker: &Rc<Worker>,
    connection: &Rc<Connection>,
    tls: Option<Arc<RustlsServerConfig>>,
    tcp: TcpStream,
) {
    let listener = connection.listener.clone();
    let ready = match Box::pin(make_ready(worker, &listener, connection.source.get(), tls, tcp)).await {
        Ok(ready) => ready,
        Err(error) => {
            note_failed_handshake(worker, connection, &error);
            return;
        }
    };
    if !connection.is_of(worker, &ready.trust, ready.source) {
        return;
    }
    match &listener.protocol {
        ListenerProtocol::Http if ready.io.alpn() == Some(reverse::ALPN) => {
            let Ready { io, source, trust, .. } = ready;
            reverse_acceptor::take(worker, &listener, &trust, source, ReverseTransport::Tcp(io));
        }
        ListenerProtocol::Http => http::serve(worker, connection, ready).await,
        ListenerProtocol::Tcp { authority } => {
            connection.set_stage(worker, Stage::Idle);
            Box::pin(tcp::serve(worker, connection, authority, ready)).await;
        }
        ListenerProtocol::Transparent(transparent) if transparent.http => {
            http::serve(worker, connection, ready).await;
        }
        ListenerProtocol::Transparent(_) => {
            connection.set_stage(worker, Stage::Idle);
            Box::pin(transparent::serve(worker, connection, ready)).await;
        }
        ListenerProtocol::Ndn(config) => {
            connection.set_stage(worker, Stage::Idle);
            let Ready { io, source, trust, .. } = ready;
            Box::pin(ndn::serve(worker, connection, config, io, source, trust)).await;
        }
        ListenerProtocol::Socks5 => {
            connection.set_stage(worker, Stage::Head);
            Box::pin(socks5::serve(worker, connection, ready)).await;
        }
        ListenerProtocol::Dns(_) => {
            connection.set_stage(worker, Stage::Idle);
            Box::pin(dns::stream::serve(worker, connection, ready)).await;
        }
        // Listeners of datagrams and packets have no connections.
        ListenerProtocol::Udp { .. }
        | ListenerProtocol::Tun(_)
        | ListenerProtocol::Ip(_)
        | ListenerProtocol::Rina(_) => {}
    }
}

/// Counts a failed handshake and logs it, rate-limited.
fn note_failed_handshake(worker: &Worker, connection: &Connection, error: &io::Error) {
    let (listener, source) = (&connection.listener.name, connection.source.get());
    let labels = ListenerLabels { listener: listener.clone() };
    worker.shared.metrics.handshake_failures.get_or_create(&labels).inc();
    if let Some(more) = worker.shared.handshakes.happened(worker.now()) {
        tracing::info!(%listener, %source, %error, more, "handshake failed");
    }
}

/// Serves the request that a listener derived from a raw connection or flow. The first bytes of the client travel with
/// the request where the protocol allows it.
async fn open<'a>(
    worker: &Rc<Worker>,
    connection: Option<&Rc<Connection>>,
    near: &'a mut dyn EarlyReader,
    request: Result<Request<'a>, Box<Rejected>>,
) -> SessionOutcome {
    match request {
        Ok(mut request) => {
            request.connection = connection.cloned();
            request.early = Some(EarlyPayload::new(near));
            // Boxed, so that a tunnel does not keep the memory of its opening.
            Box::pin(session::serve(worker, request)).await
        }
        Err(rejected) => SessionOutcome::Response(session::reject(worker, *rejected)),
    }
}

/// Reads the PROXY header, completes TLS and identifies the peer. The sweep limits its duration.
async fn make_ready(
    worker: &Worker,
    listener: &Listener,
    accepted_from: SocketAddr,
    tls: Option<Arc<RustlsServerConfig>>,
    mut tcp: TcpStream,
) -> io::Result<Ready> {
    let mut source = accepted_from;
    if contains(&listener.proxy_protocol, accepted_from) {
        source = read_proxy_header(&mut tcp).await?.unwrap_or(accepted_from);
    }
    let io = match tls {
        Some(config) => tls::accept(config, tcp).await?,
        None => Io::Plain(tcp),
    };
    let secure = matches!(io, Io::Tls(_));
    // Trust depends on the address of the TCP connection: a PROXY header must not lend trust.
    let trust = trust_of(worker, listener, tls::peer_uris(&io), accepted_from)?;
    Ok(Ready { io, source, trust, secure })
}

/// The identity of the peer, from its certificate or its address.
pub(crate) fn trust_of(
    worker: &Worker,
    listener: &Listener,
    uris: Option<Vec<String>>,
    accepted_from: SocketAddr,
) -> io::Result<Trust> {
    Ok(match uris {
        Some(uris) => {
            let generation = worker.generation();
            let peer =
                generation.identify(&uris).map_err(|reason| io::Error::new(io::ErrorKind::PermissionDenied, reason))?;
            Trust::Certified(Arc::new(peer))
        }
        None => trust_by_address(listener, accepted_from),
    })
}

/// The trust of a peer without a certificate. A member of a DIF with a key is trusted.
pub(crate) fn trust_by_address(listener: &Listener, source: SocketAddr) -> Trust {
    let has_key = matches!(&listener.protocol, ListenerProtocol::Rina(membership) if membership.key.is_some());
    if has_key || contains(&listener.trust, source) { Trust::Address } else { Trust::Anonymous }
}

fn contains(prefixes: &[ipnet::IpNet], source: SocketAddr) -> bool {
    prefixes.iter().any(|prefix| prefix.contains(&source.ip().to_canonical()))
}

/// Reads a PROXY protocol header. `None`: the header carries no address (LOCAL). The read stops exactly at the end of
/// the header, since the bytes after it belong to TLS or HTTP.
async fn read_proxy_header(tcp: &mut TcpStream) -> io::Result<Option<SocketAddr>> {
    let mut seen = BytesMut::new();
    loop {
        match proxy_protocol::parse(&seen).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))? {
            Parsed::Done { len, source } => {
                seen.advance(len);
                debug_assert!(seen.is_empty(), "only as much was read as was asked for");
                return Ok(source.map(|(source, _)| source));
            }
            Parsed::Incomplete(needed) => {
                let have = seen.len();
                seen.resize(needed.max(have + 1), 0);
                let wanted = &mut seen[have..];
                tcp.read_exact(wanted).await?;
            }
        }
    }
}

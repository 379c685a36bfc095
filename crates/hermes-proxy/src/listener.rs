//! Listeners: where bytes come in, and what is spoken there.
//!
//! In: a listening socket of this worker. Out: a task a connection or flow, each within the limits
//! of the node. A listener that closes first serves what already waits in its accept queue.

pub(crate) mod h1;
pub(crate) mod h2;
pub(crate) mod http;
pub(crate) mod tcp;
pub(crate) mod udp;

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use hermes_model::facts::Trust;
use hermes_model::snapshot::{Listener, ListenerProtocol};
use hermes_net::{Io, tls};
use hermes_wire::proxy_protocol::{self, Parsed};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};

use crate::live::{Connection, ConnectionGuard, Stage};
use crate::metrics::ListenerLabels;
use crate::signal::Signal;
use crate::worker::Worker;

/// A bound socket for one worker.
pub(crate) struct ListeningSocket {
    /// The listener's name.
    pub(crate) name: Arc<str>,
    pub(crate) socket: BoundSocket,
}

pub(crate) enum BoundSocket {
    Tcp(std::net::TcpListener),
    Udp(std::net::UdpSocket),
}

/// How a listener ends on this worker.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It is gone: serve what waits, then close.
    Close,
    /// Another process has the socket: stop at once, it serves what waits.
    HandOver,
}

/// A running listener.
pub(crate) struct Acceptor {
    ending: Rc<Signal<Ending>>,
}

impl Acceptor {
    /// Starts to accept.
    pub(crate) fn start(worker: &Rc<Worker>, socket: ListeningSocket) -> io::Result<Self> {
        let ending = Rc::new(Signal::default());
        match socket.socket {
            BoundSocket::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                let listener = TcpListener::from_std(listener)?;
                worker.spawn(accept_all(worker.clone(), listener, socket.name, ending.clone()));
            }
            BoundSocket::Udp(bound) => {
                bound.set_nonblocking(true)?;
                let bound = hermes_net::udp::UdpSocket::from_std(bound)?;
                worker.spawn(udp::receive_all(worker.clone(), bound, socket.name, ending.clone()));
            }
        }
        Ok(Self { ending })
    }

    pub(crate) fn close(self) {
        self.ending.set(Ending::Close);
    }

    pub(crate) fn hand_over(self) {
        self.ending.set(Ending::HandOver);
    }
}

/// After an error that more tries at once would only repeat (no descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

async fn accept_all(worker: Rc<Worker>, listener: TcpListener, name: Arc<str>, ending: Rc<Signal<Ending>>) {
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((tcp, source)) => begin(&worker, &name, tcp, source),
                Err(error) if is_about_one_connection(&error) => {}
                Err(error) => {
                    tracing::error!(listener = %name, %error, "no connection can be accepted; trying again");
                    worker.shared.metrics.limit("accept");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            how = ending.wait() => {
                if how == Ending::Close {
                    drain_queue(&worker, &listener, &name);
                }
                return;
            }
        }
    }
}

fn is_about_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

/// Serves what the kernel has accepted for us: closing the socket would reset it.
fn drain_queue(worker: &Rc<Worker>, listener: &TcpListener, name: &Arc<str>) {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    while let std::task::Poll::Ready(Ok((tcp, source))) = listener.poll_accept(&mut cx) {
        begin(worker, name, tcp, source);
    }
}

fn begin(worker: &Rc<Worker>, name: &Arc<str>, tcp: TcpStream, source: SocketAddr) {
    // While it closes, a listener may be out of the document already: its last connections are
    // served by what they were accepted for, if that is still known, or not at all.
    let Some(listener) = worker.generation().listener(name).cloned() else { return };
    hermes_net::tcp::tune(&tcp);
    let Some(guard) = ConnectionGuard::take(worker, listener, source) else {
        // Over the limit: closed at once, so that the client may try elsewhere.
        return;
    };
    worker.shared.metrics.connections.get_or_create(&ListenerLabels { listener: name.clone() }).inc();
    worker.spawn(serve(worker.clone(), guard, tcp));
}

async fn serve(worker: Rc<Worker>, guard: ConnectionGuard, tcp: TcpStream) {
    let connection = guard.connection.clone();
    let killed = connection.kill.wait();
    let served = serve_connection(&worker, &connection, tcp);
    tokio::select! {
        biased;
        () = served => {}
        reason = killed => tracing::debug!(source = %connection.source, reason, "a connection was closed"),
    }
    drop(guard);
}

/// A connection that is ready to speak its protocol.
pub(crate) struct Ready {
    pub(crate) io: Io,
    pub(crate) source: SocketAddr,
    pub(crate) trust: Trust,
    pub(crate) secure: bool,
}

async fn serve_connection(worker: &Rc<Worker>, connection: &Rc<Connection>, tcp: TcpStream) {
    let listener = connection.listener.clone();
    let ready = match Box::pin(make_ready(worker, &listener, connection.source, tcp)).await {
        Ok(ready) => ready,
        Err(error) => {
            let labels = ListenerLabels { listener: listener.name.clone() };
            worker.shared.metrics.handshake_failures.get_or_create(&labels).inc();
            tracing::debug!(listener = %listener.name, source = %connection.source, %error, "handshake failed");
            return;
        }
    };
    match &listener.protocol {
        ListenerProtocol::Http => http::serve(worker, connection, ready).await,
        ListenerProtocol::Tcp { authority } => {
            connection.set_stage(worker, Stage::Idle);
            Box::pin(tcp::serve(worker, connection, authority, ready)).await;
        }
        // UDP has no connections.
        ListenerProtocol::Udp { .. } => {}
    }
}

/// PROXY header, TLS, identity. The sweep bounds its time.
async fn make_ready(
    worker: &Worker,
    listener: &Listener,
    accepted_from: SocketAddr,
    mut tcp: TcpStream,
) -> io::Result<Ready> {
    let mut source = accepted_from;
    if contains(&listener.proxy_protocol, accepted_from) {
        source = read_proxy_header(&mut tcp).await?.unwrap_or(accepted_from);
    }
    let generation = worker.generation();
    let io = match generation.server_tls(&listener.name) {
        Some(config) => tls::accept(config, tcp).await?,
        None => Io::Plain(tcp),
    };
    let secure = matches!(io, Io::Tls(_));
    let trust = match tls::peer_uris(&io) {
        Some(uris) => {
            let peer =
                generation.identify(&uris).map_err(|reason| io::Error::new(io::ErrorKind::PermissionDenied, reason))?;
            Trust::Certified(Arc::new(peer))
        }
        // By the address that really connected: a PROXY header must not lend trust.
        None if contains(&listener.trust, accepted_from) => Trust::Address,
        None => Trust::Anonymous,
    };
    Ok(Ready { io, source, trust, secure })
}

fn contains(prefixes: &[ipnet::IpNet], source: SocketAddr) -> bool {
    prefixes.iter().any(|prefix| prefix.contains(&source.ip().to_canonical()))
}

/// Reads a PROXY protocol v2 header; `None` where it speaks for nobody (LOCAL). Reads not one byte
/// beyond it: what follows is TLS's or HTTP's.
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

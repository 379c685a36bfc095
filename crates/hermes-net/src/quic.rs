//! QUIC, by quinn, of one worker. Nobody else names quinn.
//!
//! In: a bound UDP socket, TLS configurations, the worker's number. Out: an endpoint whose connection
//! ids carry that number, so that [`steer`](crate::steer) finds the worker again when a peer moves.
//! Its tasks have one owner, who ends them. Never: HTTP; a task of nobody.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    AsyncTimer, AsyncUdpSocket, ConnectionId, ConnectionIdGenerator, EndpointConfig, IdleTimeout, MtuDiscoveryConfig,
    Runtime, TokioRuntime, TransportConfig,
};
pub use quinn::{
    ClientConfig, Connection, ConnectionError, Endpoint, Incoming, ReadError, RecvStream, SendDatagramError,
    SendStream, ServerConfig, StoppedError, StreamId, VarInt, WriteError,
};
use tokio::task::JoinSet;

use crate::tls::TlsError;

/// What HTTP/3 is called in ALPN (RFC 9114, section 3.1).
pub const ALPN: &[u8] = b"h3";
/// Bytes of our connection ids: the worker's number, and what nobody guesses.
const ID_LENGTH: usize = 8;

/// The bounds of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Streams of requests that the peer may have open.
    pub streams: u32,
    /// Bytes that may be on their way on one stream.
    pub stream_window: u32,
    /// Bytes that may be on their way on all streams.
    pub connection_window: u32,
    /// Bytes of datagrams that wait, in each direction.
    pub datagrams: usize,
    /// Silence after which the connection is over.
    pub idle: Duration,
    /// We ask so often whether the peer is there; `None`: never.
    pub keep_alive: Option<Duration>,
}

impl Bounds {
    fn transport(self) -> Arc<TransportConfig> {
        let mut config = TransportConfig::default();
        config
            .max_concurrent_bidi_streams(self.streams.into())
            // Control, both of QPACK, and what a peer greases with (RFC 9114, section 6.2).
            .max_concurrent_uni_streams(8_u32.into())
            .stream_receive_window(self.stream_window.into())
            .receive_window(self.connection_window.into())
            .send_window(self.connection_window.into())
            .datagram_receive_buffer_size(Some(self.datagrams))
            .datagram_send_buffer_size(self.datagrams)
            .max_idle_timeout(IdleTimeout::try_from(self.idle).ok())
            .keep_alive_interval(self.keep_alive)
            .mtu_discovery_config(Some(MtuDiscoveryConfig::default()));
        Arc::new(config)
    }
}

/// The server's side of connections, from a TLS configuration for [`ALPN`].
///
/// # Errors
/// The configuration has no cipher suite of TLS 1.3 that QUIC begins with.
pub fn server_config(tls: &Arc<rustls::ServerConfig>, bounds: Bounds) -> Result<ServerConfig, TlsError> {
    let crypto = QuicServerConfig::try_from(tls.clone())
        .map_err(|error| TlsError::Configuration { what: "QUIC of a listener", reason: error.to_string() })?;
    let mut config = ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(bounds.transport());
    Ok(config)
}

/// The client's side of connections, from a TLS configuration for [`ALPN`].
///
/// # Errors
/// As [`server_config`].
pub fn client_config(tls: &Arc<rustls::ClientConfig>, bounds: Bounds) -> Result<ClientConfig, TlsError> {
    let crypto = QuicClientConfig::try_from(tls.clone())
        .map_err(|error| TlsError::Configuration { what: "QUIC of an upstream", reason: error.to_string() })?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    config.transport_config(bounds.transport());
    Ok(config)
}

/// The tasks of one worker's endpoints and connections. They end with it.
#[derive(Clone, Debug, Default)]
pub struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl Tasks {
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that ended meanwhile.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }
}

/// quinn's view of the worker.
#[derive(Debug)]
struct WorkerRuntime(Tasks);

impl Runtime for WorkerRuntime {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn AsyncTimer>> {
        TokioRuntime.new_timer(at)
    }

    fn spawn(&self, task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        self.0.spawn(task);
    }

    fn wrap_udp_socket(&self, socket: UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        TokioRuntime.wrap_udp_socket(socket)
    }

    fn now(&self) -> Instant {
        TokioRuntime.now()
    }
}

/// Connection ids of one worker.
struct WorkerIds(u8);

impl ConnectionIdGenerator for WorkerIds {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut id: [u8; ID_LENGTH] = rand::random();
        id[0] = self.0;
        ConnectionId::new(&id)
    }

    fn cid_len(&self) -> usize {
        ID_LENGTH
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

/// An endpoint on a socket of a worker. With `server` it accepts connections.
///
/// # Errors
/// The socket cannot be used.
pub fn endpoint(socket: UdpSocket, server: Option<ServerConfig>, worker: u8, tasks: &Tasks) -> io::Result<Endpoint> {
    let runtime = Arc::new(WorkerRuntime(tasks.clone()));
    let mut config = EndpointConfig::default();
    config.cid_generator(move || Box::new(WorkerIds(worker)));
    let socket = runtime.wrap_udp_socket(socket)?;
    Endpoint::new_with_abstract_socket(config, server, socket, runtime)
}

/// An endpoint for connections of our own, at any port.
///
/// # Errors
/// No socket is to be had.
pub fn client_endpoint(is_v4: bool, worker: u8, tasks: &Tasks) -> io::Result<Endpoint> {
    let any: SocketAddr = if is_v4 { ([0, 0, 0, 0], 0).into() } else { (std::net::Ipv6Addr::UNSPECIFIED, 0).into() };
    let socket = UdpSocket::bind(any)?;
    crate::mark::apply(socket2::SockRef::from(&socket));
    endpoint(socket, None, worker, tasks)
}

/// The URI SANs of the peer's certificate. `None`: it showed none.
pub fn peer_uris(connection: &Connection) -> Option<Vec<String>> {
    let identity = connection.peer_identity()?;
    let chain = identity.downcast_ref::<Vec<rustls::pki_types::CertificateDer<'static>>>()?;
    chain.first().map(|leaf| crate::tls::uris(leaf))
}

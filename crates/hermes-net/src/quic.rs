//! QUIC endpoints of one worker, implemented with quinn. Outside this module, only [`tls`](crate::tls) uses quinn, for
//! its error type.
//!
//! In: sockets, TLS configurations. Out: server endpoints whose connection ids name the socket that reads them, so that
//! [`reuseport`](crate::reuseport) finds that socket again after a peer migrates; and client endpoints. All tasks have
//! one owner, which ends them. Never: HTTP, or a detached task.

mod connection_id;
mod forwarder;
mod gro_split;
mod group;
mod gso_batch;
mod intermittent_cc;
pub mod path_monitor;
mod socket;
mod stateless_reset;
mod tokens;

use std::fmt;
use std::future::Future;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    AsyncTimer, AsyncUdpSocket, EndpointConfig, IdleTimeout, MtuDiscoveryConfig, Runtime, TokioRuntime,
    TransportConfig, ValidationTokenConfig,
};
pub use quinn::{
    ClientConfig, Connection, ConnectionError, ConnectionStats, Endpoint, Incoming, ReadError, RecvStream,
    SendDatagramError, SendStream, ServerConfig, StoppedError, StreamId, VarInt, WriteError,
};
use tokio::task::JoinSet;

use self::connection_id::ReaderIdGenerator;
pub use self::group::{ForwardSocket, Group, MAX_READERS};
use self::gso_batch::GsoBatcher;
use self::socket::Reader;
pub use self::stateless_reset::ResetKey;
use self::tokens::UsedTokens;
use crate::tls::TlsError;
use crate::udp;

/// The ALPN name of HTTP/3 (RFC 9114, section 3.1).
pub const ALPN: &[u8] = b"h3";

/// Limits of one connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Maximum number of bidirectional streams that the peer may have open at a time.
    pub streams: u32,
    /// Flow-control window of one stream, in bytes.
    pub stream_window: u32,
    /// Flow-control window of the connection, in bytes.
    pub connection_window: u32,
    /// Maximum number of queued bytes in DATAGRAM frames, in each direction.
    pub datagrams: usize,
    /// Idle timeout of the connection (RFC 9000, section 10.1).
    pub idle: Duration,
    /// Interval of keep-alive packets. `None`: the endpoint sends none.
    pub keep_alive: Option<Duration>,
    /// Assumed round-trip time until one is measured. The first packet is retransmitted after three times this value.
    /// `None`: the default of QUIC, which leads to one second (RFC 9002, section 6.2.2).
    pub first_rtt: Option<Duration>,
    /// Initial and largest size of the UDP payload that the endpoint sends, in bytes.
    pub mtu: (u16, u16),
}

impl ConnectionLimits {
    fn transport(self, controllers: path_monitor::PathMonitorFactory) -> Arc<TransportConfig> {
        let (initial, largest) = self.mtu;
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(largest);
        let mut config = TransportConfig::default();
        config
            .initial_mtu(initial)
            .max_concurrent_bidi_streams(self.streams.into())
            // The peer's control stream, both QPACK streams, and reserved stream types (RFC 9114, section 6.2).
            .max_concurrent_uni_streams(8_u32.into())
            .stream_receive_window(self.stream_window.into())
            .receive_window(self.connection_window.into())
            .send_window(self.connection_window.into())
            .datagram_receive_buffer_size(Some(self.datagrams))
            .datagram_send_buffer_size(self.datagrams)
            .max_idle_timeout(IdleTimeout::try_from(self.idle).ok())
            .keep_alive_interval(self.keep_alive)
            .congestion_controller_factory(Arc::new(controllers))
            .mtu_discovery_config(Some(discovery));
        if let Some(rtt) = self.first_rtt {
            config.initial_rtt(rtt);
        }
        Arc::new(config)
    }
}

/// Builds the server configuration from a TLS configuration for [`ALPN`]. With `early_data`, returning clients may send
/// 0-RTT data. Each ticket of rustls's own store works once, so TLS itself rejects a replayed first packet (RFC 8446,
/// section 8.1). Each address validation token works once, too.
///
/// # Errors
/// The TLS configuration has no TLS 1.3 cipher suite that QUIC can use for initial packets.
pub fn server_config(
    tls: &Arc<rustls::ServerConfig>,
    bounds: ConnectionLimits,
    early_data: bool,
) -> Result<ServerConfig, TlsError> {
    let mut tls = tls.clone();
    if early_data {
        // QUIC allows no other value (RFC 9001, section 4.6.1).
        Arc::make_mut(&mut tls).max_early_data_size = u32::MAX;
    }
    let crypto = QuicServerConfig::try_from(tls)
        .map_err(|error| TlsError::Configuration { what: "QUIC of a listener", reason: error.to_string() })?;
    let mut config = ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(bounds.transport(path_monitor::PathMonitorFactory::default())).max_incoming(MAX_INCOMING);
    config.incoming_buffer_size(INCOMING_BUFFER).incoming_buffer_size_total(16 * INCOMING_BUFFER);
    if early_data {
        let mut tokens = ValidationTokenConfig::default();
        tokens.log(Arc::new(UsedTokens::new())).sent(2);
        config.validation_token_config(tokens);
    }
    Ok(config)
}

/// Returns a copy of the configuration for a single connection. The connection's
/// [`PathMonitor`](path_monitor::PathMonitor), with the settings made on it, then survives a migration of the client to
/// another address.
pub fn for_one(config: &ServerConfig, bounds: ConnectionLimits) -> ServerConfig {
    let mut config = config.clone();
    config.transport_config(bounds.transport(path_monitor::PathMonitorFactory::of_one()));
    config
}

/// Every endpoint receives UDP payloads of at least this size, in bytes: the Ethernet MTU less the IPv4 and UDP
/// headers.
const MIN_RECEIVE_PAYLOAD: u16 = 1472;
/// Maximum number of connections that wait to be accepted. First packets of further connections are dropped.
const MAX_INCOMING: usize = 1024;
/// Maximum number of buffered bytes of a connection that waits to be accepted. All these connections together may
/// buffer sixteen times as much.
const INCOMING_BUFFER: u64 = 256 << 10;

/// Builds the client configuration from a TLS configuration for [`ALPN`].
///
/// # Errors
/// The errors of [`server_config`].
pub fn client_config(tls: &Arc<rustls::ClientConfig>, bounds: ConnectionLimits) -> Result<ClientConfig, TlsError> {
    let crypto = QuicClientConfig::try_from(tls.clone())
        .map_err(|error| TlsError::Configuration { what: "QUIC of an upstream", reason: error.to_string() })?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    config.transport_config(bounds.transport(path_monitor::PathMonitorFactory::default()));
    Ok(config)
}

/// The tasks of one worker's endpoints and connections. [`EndpointTasks::finish`] ends them.
#[derive(Clone, Default)]
pub struct EndpointTasks {
    tasks: Arc<Mutex<JoinSet<()>>>,
    /// Called before each poll of a task.
    polled: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for EndpointTasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointTasks").field("tasks", &self.tasks).finish_non_exhaustive()
    }
}

impl EndpointTasks {
    /// Tasks that call `polled` before each poll.
    pub fn watched(polled: impl Fn() + Send + Sync + 'static) -> Self {
        Self { tasks: Arc::default(), polled: Some(Arc::new(polled)) }
    }

    fn spawn(&self, mut task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        // Reap tasks that have ended.
        while tasks.try_join_next().is_some() {}
        match self.polled.clone() {
            Some(polled) => tasks.spawn(std::future::poll_fn(move |cx| {
                polled();
                task.as_mut().poll(cx)
            })),
            None => tasks.spawn(task),
        };
    }

    /// Runs the tasks for up to 50 ms after the last connection was closed, so that CONNECTION_CLOSE reaches the peers.
    /// Tasks that are still running then end.
    pub async fn finish(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        let all = async { while tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(CLOSE_FLUSH_TIMEOUT, all).await;
    }
}

/// Time in which the endpoints send CONNECTION_CLOSE before their tasks end. No peer acknowledges the frame.
const CLOSE_FLUSH_TIMEOUT: Duration = Duration::from_millis(50);

/// The runtime that quinn uses. The worker owns the tasks that it spawns.
#[derive(Debug)]
struct WorkerRuntime(EndpointTasks);

impl Runtime for WorkerRuntime {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn AsyncTimer>> {
        TokioRuntime.new_timer(at)
    }

    fn spawn(&self, task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        self.0.spawn(task);
    }

    fn wrap_udp_socket(&self, socket: UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        Ok(Arc::new(GsoBatcher::new(TokioRuntime.wrap_udp_socket(socket)?)))
    }

    fn now(&self) -> Instant {
        TokioRuntime.now()
    }
}

/// A server endpoint that reads one socket of a group.
#[derive(Debug)]
pub struct Server {
    endpoint: Endpoint,
    reader: Arc<Reader>,
}

impl Server {
    /// Opens the endpoint that reads the socket at index `slot` of the group; only one endpoint may. The endpoint
    /// accepts connections if `config` is `Some`. With `reset`, it sends stateless resets for connections of a process
    /// that died. `largest` is the largest UDP payload that it receives, in bytes.
    ///
    /// # Errors
    /// The group has no such socket, or the socket cannot be used.
    pub fn open(
        group: &Arc<Group>,
        slot: u8,
        config: Option<ServerConfig>,
        reset: Option<&ResetKey>,
        largest: u16,
        tasks: &EndpointTasks,
    ) -> io::Result<Self> {
        let runtime = Arc::new(WorkerRuntime(tasks.clone()));
        let reader = Arc::new(Reader::new(group, slot)?);
        let socket = Arc::new(GsoBatcher::new(reader.clone()));
        let reader_id = group.reader(slot);
        let mut endpoint = reset.map_or_else(EndpointConfig::default, |key| key.endpoint(group.address()));
        endpoint.max_udp_payload_size(largest.max(MIN_RECEIVE_PAYLOAD)).map_err(io::Error::other)?;
        endpoint.cid_generator(move || Box::new(ReaderIdGenerator(reader_id)));
        let endpoint = Endpoint::new_with_abstract_socket(endpoint, config, socket, runtime)?;
        Ok(Self { endpoint, reader })
    }

    /// Returns the endpoint of quinn.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Prepares for clients without a certificate, which nobody chose to trust: from now on, a buffered byte retains
    /// few other bytes of its GRO batch in memory.
    pub fn expect_strangers(&self) {
        self.reader.split_batches();
    }

    /// Returns the number of datagrams since the last call that belonged to other readers, and how many of these were
    /// dropped because the socket to the other reader was full.
    pub fn passed_on(&self) -> (u64, u64) {
        self.reader.passed_on()
    }

    /// Stops reading the socket, because another process reads it now and forwards the datagrams of our connections.
    pub fn stop_reading(&self) {
        self.reader.stop_reading();
    }
}

/// Opens a client endpoint at an ephemeral port. `largest` is the largest UDP payload that it receives, in bytes.
///
/// # Errors
/// No socket can be opened.
pub fn client_endpoint(is_v4: bool, largest: u16, tasks: &EndpointTasks) -> io::Result<Endpoint> {
    let runtime = Arc::new(WorkerRuntime(tasks.clone()));
    let socket = runtime.wrap_udp_socket(udp::bind(anywhere(is_v4))?)?;
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(largest.max(MIN_RECEIVE_PAYLOAD)).map_err(io::Error::other)?;
    Endpoint::new_with_abstract_socket(config, None, socket, runtime)
}

/// Connects to `address`. `name` is the server name (SNI).
///
/// # Errors
/// The handshake failed, the name is not valid for TLS, or the kernel reported the address as unreachable and the peer
/// did not answer within 300 ms after that.
pub async fn connect(
    endpoint: &Endpoint,
    config: ClientConfig,
    address: SocketAddr,
    name: &str,
) -> io::Result<Connection> {
    let mut connecting = pin!(endpoint.connect_with(config, address, name).map_err(io::Error::other)?);
    let refusal = tokio::select! {
        connected = &mut connecting => return connected.map_err(io::Error::other),
        refusal = udp::refusal(address) => refusal,
    };
    match tokio::time::timeout(UNREACHABLE_GRACE, connecting).await {
        Ok(connected) => connected.map_err(io::Error::other),
        Err(_) => Err(refusal),
    }
}

/// A peer that the kernel reports as unreachable may still answer within this time. Anybody can forge such an ICMP
/// error, and a firewall may refuse the empty probe but let QUIC pass.
const UNREACHABLE_GRACE: Duration = Duration::from_millis(300);

/// Moves a client endpoint to another local port and to the current source address, and sends a packet to each peer
/// immediately. Otherwise the peers would notice the move only with the next packet.
///
/// # Errors
/// No socket can be opened.
pub fn move_client(endpoint: &Endpoint) -> io::Result<()> {
    let is_v4 = endpoint.local_addr()?.is_ipv4();
    let socket = TokioRuntime.wrap_udp_socket(udp::bind(anywhere(is_v4))?)?;
    endpoint.rebind_abstract(Arc::new(GsoBatcher::new(socket)))
}

fn anywhere(is_v4: bool) -> SocketAddr {
    if is_v4 { ([0, 0, 0, 0], 0).into() } else { (std::net::Ipv6Addr::UNSPECIFIED, 0).into() }
}

/// Returns the protocol that ALPN selected. `None` before the handshake, or without ALPN.
pub fn alpn(connection: &Connection) -> Option<Vec<u8>> {
    let data = connection.handshake_data()?;
    data.downcast::<quinn::crypto::rustls::HandshakeData>().ok()?.protocol
}

/// Returns the [`names`](crate::tls::names) of the peer's certificate. `None` if the peer sent no certificate.
pub fn peer_uris(connection: &Connection) -> Option<Vec<String>> {
    let identity = connection.peer_identity()?;
    let chain = identity.downcast_ref::<Vec<rustls::pki_types::CertificateDer<'static>>>()?;
    chain.first().map(|leaf| crate::tls::names(leaf))
}

//! QUIC, by quinn, of one worker. Nobody else names quinn.
//!
//! In: sockets, TLS configurations. Out: endpoints that accept, whose connection ids say which of a
//! group's sockets they read, so that [`steer`](crate::steer) finds them again when a peer moves; and
//! endpoints for connections of our own. Their tasks have one owner, who ends them. Never: HTTP; a task
//! of nobody.

mod apart;
mod gather;
mod group;
mod id;
mod known;
pub mod narrow;
mod passage;
mod reset;
mod socket;
mod tokens;

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

use self::gather::Gather;
pub use self::group::{Group, MOST, Way};
use self::id::Ids;
pub use self::reset::ResetKey;
use self::socket::Reader;
use self::tokens::UsedTokens;
use crate::tls::{Fault, TlsError};
use crate::udp;

/// What HTTP/3 is called in ALPN (RFC 9114, section 3.1).
pub const ALPN: &[u8] = b"h3";

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
    /// A round trip, as long as none was measured: a first packet without an answer is sent again after three. `None`:
    /// QUIC's own, which is a second (RFC 9002, section 6.2.2).
    pub first_rtt: Option<Duration>,
    /// Bytes of a datagram of UDP, at first and at the most.
    pub mtu: (u16, u16),
}

impl Bounds {
    fn transport(self, controllers: narrow::Factory) -> Arc<TransportConfig> {
        let (initial, largest) = self.mtu;
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(largest);
        let mut config = TransportConfig::default();
        config
            .initial_mtu(initial)
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
            .congestion_controller_factory(Arc::new(controllers))
            .mtu_discovery_config(Some(discovery));
        if let Some(rtt) = self.first_rtt {
            config.initial_rtt(rtt);
        }
        Arc::new(config)
    }
}

/// The server's side of connections, from a TLS configuration for [`ALPN`]. With `early_data` clients that were here
/// before may send data with their first packet. Each ticket of rustls's own store is good once, so that TLS itself
/// takes no such packet twice (RFC 8446, section 8.1); each token of ours too.
///
/// # Errors
/// The configuration has no cipher suite of TLS 1.3 that QUIC begins with.
pub fn server_config(
    tls: &Arc<rustls::ServerConfig>,
    bounds: Bounds,
    early_data: bool,
) -> Result<ServerConfig, TlsError> {
    let mut tls = tls.clone();
    if early_data {
        // QUIC knows no other size (RFC 9001, section 4.6.1).
        Arc::make_mut(&mut tls).max_early_data_size = u32::MAX;
    }
    let crypto = QuicServerConfig::try_from(tls)
        .map_err(|error| TlsError::Configuration { what: "QUIC of a listener", reason: error.to_string() })?;
    let mut config = ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(bounds.transport(narrow::Factory::default())).max_incoming(MOST_INCOMING);
    config.incoming_buffer_size(INCOMING_BUFFER).incoming_buffer_size_total(16 * INCOMING_BUFFER);
    if early_data {
        let mut tokens = ValidationTokenConfig::default();
        tokens.log(Arc::new(UsedTokens::new())).sent(2);
        config.validation_token_config(tokens);
    }
    Ok(config)
}

/// The same for one connection alone: what is known of its path, and what was asked of it, stays where its client moves to
/// another address.
pub fn for_one(config: &ServerConfig, bounds: Bounds) -> ServerConfig {
    let mut config = config.clone();
    config.transport_config(bounds.transport(narrow::Factory::of_one()));
    config
}

/// Bytes of a datagram that everybody takes: those of Ethernet, without the headers of IPv4 and UDP.
const TAKEN: u16 = 1472;
/// Connections that wait until they are taken up; with more, their first packets are dropped.
const MOST_INCOMING: usize = 1024;
/// Bytes of such a connection that are kept; of all together sixteen times as many.
const INCOMING_BUFFER: u64 = 256 << 10;

/// The client's side of connections, from a TLS configuration for [`ALPN`].
///
/// # Errors
/// As [`server_config`].
pub fn client_config(tls: &Arc<rustls::ClientConfig>, bounds: Bounds) -> Result<ClientConfig, TlsError> {
    let crypto = QuicClientConfig::try_from(tls.clone())
        .map_err(|error| TlsError::Configuration { what: "QUIC of an upstream", reason: error.to_string() })?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    config.transport_config(bounds.transport(narrow::Factory::default()));
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

    /// Runs them on for a moment after the last connection was closed: that is when peers are told. Those that are left
    /// end.
    pub async fn finish(&self) {
        let mut tasks = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let all = async { while tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(FAREWELL, all).await;
    }
}

/// For what is said last: nobody hears whether it arrived.
const FAREWELL: Duration = Duration::from_millis(50);

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
        Ok(Arc::new(Gather::new(TokioRuntime.wrap_udp_socket(socket)?)))
    }

    fn now(&self) -> Instant {
        TokioRuntime.now()
    }
}

/// An endpoint that reads at one place of a group, and accepts there.
#[derive(Debug)]
pub struct Server {
    endpoint: Endpoint,
    reader: Arc<Reader>,
}

impl Server {
    /// Reads at this place of the group; it is the only one who does. Accepts where `config` is there. With `reset`
    /// it ends connections of a process before it that died; `largest` bytes of a datagram are taken.
    ///
    /// # Errors
    /// The group has no such place, or its socket cannot be used.
    pub fn open(
        group: &Arc<Group>,
        slot: u8,
        config: Option<ServerConfig>,
        reset: Option<&ResetKey>,
        largest: u16,
        tasks: &Tasks,
    ) -> io::Result<Self> {
        let runtime = Arc::new(WorkerRuntime(tasks.clone()));
        let reader = Arc::new(Reader::new(group, slot)?);
        let socket = Arc::new(Gather::new(reader.clone()));
        let place = group.place(slot);
        let mut endpoint = reset.map_or_else(EndpointConfig::default, |key| key.endpoint(group.address()));
        endpoint.max_udp_payload_size(largest.max(TAKEN)).map_err(io::Error::other)?;
        endpoint.cid_generator(move || Box::new(Ids(place)));
        let endpoint = Endpoint::new_with_abstract_socket(endpoint, config, socket, runtime)?;
        Ok(Self { endpoint, reader })
    }

    /// What quinn does here.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// From now on it has clients that nobody knows: of what they send no more is kept than waits.
    pub fn expect_strangers(&self) {
        self.reader.take_apart();
    }

    /// Datagrams that came here and were another reader's, since this was asked last; and those of them
    /// that found no room on the way to him.
    pub fn passed_on(&self) -> (u64, u64) {
        self.reader.passed_on()
    }

    /// Another process reads the socket from now on, and passes on to us what is ours.
    pub fn part(&self) {
        self.reader.part();
    }
}

/// An endpoint for connections of our own, at any port; `largest` bytes of a datagram are taken.
///
/// # Errors
/// No socket is to be had.
pub fn client_endpoint(is_v4: bool, largest: u16, tasks: &Tasks) -> io::Result<Endpoint> {
    let runtime = Arc::new(WorkerRuntime(tasks.clone()));
    let socket = runtime.wrap_udp_socket(udp::bind(anywhere(is_v4))?)?;
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(largest.max(TAKEN)).map_err(io::Error::other)?;
    Endpoint::new_with_abstract_socket(config, None, socket, runtime)
}

/// Connects. `name` is what SNI asks for.
///
/// # Errors
/// The handshake's failure, a name that TLS cannot carry, or the kernel's word that nobody can be reached there, where
/// nobody answers a moment later either.
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
    match tokio::time::timeout(PROOF, connecting).await {
        Ok(connected) => connected.map_err(io::Error::other),
        Err(_) => Err(refusal),
    }
}

/// Who is said not to be there has so long to show that it is: anybody can send that word, and a firewall may refuse the
/// empty datagram and let QUIC pass.
const PROOF: Duration = Duration::from_millis(300);

/// What TLS has to find fault with in a handshake, where it is that. QUIC hands on rustls's words alone, and an alert
/// that is not the same for every certificate (RFC 9001, section 4.8).
pub(crate) fn tls_fault(error: &ConnectionError) -> Option<Fault> {
    let (code, is_certificate) = match error {
        ConnectionError::TransportError(ours) => {
            (ours.code, OF_CERTIFICATES.iter().any(|words| ours.reason.starts_with(words)))
        }
        ConnectionError::ConnectionClosed(theirs) => (theirs.error_code, false),
        _ => return None,
    };
    let is_tls = (CRYPTO..=CRYPTO + 0xff).contains(&u64::from(code));
    is_tls.then_some(if is_certificate { Fault::Certificate } else { Fault::Protocol })
}

/// How rustls begins where a certificate is not valid, and where our own verifier has said so.
const OF_CERTIFICATES: [&str; 2] = ["invalid peer certificate: ", "unexpected error: "];
/// CRYPTO_ERROR, with the alert added (RFC 9000, section 20.1).
const CRYPTO: u64 = 0x100;

/// Says to an endpoint's peers that it goes on at another port, from whichever address packets leave now: at once,
/// where they would notice only when they hear of us again.
///
/// # Errors
/// No socket is to be had.
pub fn move_client(endpoint: &Endpoint) -> io::Result<()> {
    let is_v4 = endpoint.local_addr()?.is_ipv4();
    let socket = TokioRuntime.wrap_udp_socket(udp::bind(anywhere(is_v4))?)?;
    endpoint.rebind_abstract(Arc::new(Gather::new(socket)))
}

fn anywhere(is_v4: bool) -> SocketAddr {
    if is_v4 { ([0, 0, 0, 0], 0).into() } else { (std::net::Ipv6Addr::UNSPECIFIED, 0).into() }
}

/// What ALPN settled on.
pub fn alpn(connection: &Connection) -> Option<Vec<u8>> {
    let data = connection.handshake_data()?;
    data.downcast::<quinn::crypto::rustls::HandshakeData>().ok()?.protocol
}

/// The URI SANs of the peer's certificate. `None`: it showed none.
pub fn peer_uris(connection: &Connection) -> Option<Vec<String>> {
    let identity = connection.peer_identity()?;
    let chain = identity.downcast_ref::<Vec<rustls::pki_types::CertificateDer<'static>>>()?;
    chain.first().map(|leaf| crate::tls::names(leaf))
}

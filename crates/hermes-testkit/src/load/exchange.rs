//! Clients with a single exchange: open, send one request, compare the response, close.
//!
//! In: an [`Exchange`]. Out: [`Client`], which runs it any number of times, each with its own sockets. Preparation
//! happens before the measured time (socket, TLS configuration, request). Everything that a user waits for is measured
//! (handshakes, the response).

use std::{fs, net::SocketAddr, sync::Arc, time::Duration};

use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream, UdpSocket},
    time::timeout,
};
use tokio_rustls::TlsConnector;

use super::{Exchange, PAYLOAD_SEED, outcome::Failure, response::Connection};
use crate::{Error, Result, origin::connect_udp, pattern::Pattern, tls};

/// Longer than any queue that a thousand clients make; then an exchange has failed.
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// Everything that all clients of one exchange share.
pub struct Client {
    address: SocketAddr,
    payload: Vec<u8>,
    request: Vec<u8>,
    kind: Kind,
}

enum Kind {
    Http,
    Tls { connect: Option<Vec<u8>>, connector: TlsConnector, name: ServerName<'static> },
    Tcp,
    Udp,
}

/// A socket that has sent nothing yet.
pub enum PreparedSocket {
    /// Unconnected.
    Tcp(TcpSocket),
    /// Bound and directed.
    Udp(UdpSocket),
}

/// A client that has had its answer and keeps its connection.
pub enum IdleClient {
    /// TCP, with or without HTTP on it.
    Stream(TcpStream),
    /// TLS.
    Tls(Box<tokio_rustls::client::TlsStream<TcpStream>>),
    /// A UDP flow.
    Socket(UdpSocket),
}

impl Client {
    /// Prepares what clients share.
    ///
    /// # Errors
    /// When the CA file or the name in it is unusable.
    pub fn new(exchange: &Exchange) -> Result<Self> {
        Ok(match exchange {
            Exchange::Http { address, authority, length } => {
                Self { address: *address, payload: payload(*length), request: get(authority), kind: Kind::Http }
            }
            Exchange::Tls { address, connect, server_name, ca, length } => Self {
                address: *address,
                payload: payload(*length),
                request: get(server_name),
                kind: Kind::tls(connect.as_deref(), server_name, ca)?,
            },
            Exchange::Tcp { address, length } => {
                Self { address: *address, payload: payload(*length), request: Vec::new(), kind: Kind::Tcp }
            }
            Exchange::Udp { address, length } => {
                Self { address: *address, payload: payload(*length), request: Vec::new(), kind: Kind::Udp }
            }
        })
    }

    /// Opens a socket without sending anything.
    ///
    /// # Errors
    /// No socket is left.
    pub async fn prepare(&self) -> Result<PreparedSocket> {
        let what = "opening a client's socket";
        if matches!(self.kind, Kind::Udp) {
            let socket = UdpSocket::from_std(connect_udp(self.address)?).map_err(Error::io(what))?;
            return Ok(PreparedSocket::Udp(socket));
        }
        let socket = if self.address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        Ok(PreparedSocket::Tcp(socket.map_err(Error::io(what))?))
    }

    /// Runs a whole exchange. `number` distinguishes this client if the client chooses the bytes.
    ///
    /// # Errors
    /// The failure, to be counted.
    pub async fn exchange(&self, prepared: PreparedSocket, number: u64) -> std::result::Result<IdleClient, Failure> {
        match timeout(RESPONSE_TIMEOUT, self.attempt(prepared, number)).await {
            Ok(result) => result,
            Err(_) => Err(Failure::Timeout),
        }
    }

    async fn attempt(&self, prepared: PreparedSocket, number: u64) -> std::result::Result<IdleClient, Failure> {
        let socket = match prepared {
            PreparedSocket::Udp(socket) => return self.datagram(socket, number).await,
            PreparedSocket::Tcp(socket) => socket,
        };
        let mut stream = socket.connect(self.address).await.map_err(|e| Failure::Connect(e.kind()))?;
        stream.set_nodelay(true)?;
        match &self.kind {
            Kind::Http => Connection::new(&mut stream).get(&self.request, &self.payload).await?,
            Kind::Tls { connect, connector, name } => {
                if let Some(connect) = connect {
                    stream = Connection::new(stream).tunnel(connect).await?;
                }
                let inner = connector.connect(name.clone(), stream).await;
                let mut inner = inner.map_err(|e| Failure::Tls(e.to_string()))?;
                Connection::new(&mut inner).get(&self.request, &self.payload).await?;
                return Ok(IdleClient::Tls(Box::new(inner)));
            }
            Kind::Tcp | Kind::Udp => self.echo(&mut stream, number).await?,
        }
        Ok(IdleClient::Stream(stream))
    }

    async fn echo(&self, stream: &mut TcpStream, number: u64) -> std::result::Result<(), Failure> {
        let sent = self.marked(number);
        stream.write_all(&sent).await?;
        let mut received = vec![0; sent.len()];
        stream.read_exact(&mut received).await.map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => Failure::Closed,
            kind => Failure::Io(kind),
        })?;
        if received == sent { Ok(()) } else { Err(Failure::WrongBytes) }
    }

    async fn datagram(&self, socket: UdpSocket, number: u64) -> std::result::Result<IdleClient, Failure> {
        let sent = self.marked(number);
        socket.send(&sent).await?;
        let mut received = vec![0; sent.len() + 1];
        let length = socket.recv(&mut received).await?;
        if received[..length] == sent { Ok(IdleClient::Socket(socket)) } else { Err(Failure::WrongBytes) }
    }

    /// The payload with the client's number at its head: an answer that is another client's is a wrong one.
    fn marked(&self, number: u64) -> Vec<u8> {
        let mut bytes = self.payload.clone();
        let mark = number.to_le_bytes();
        let take = mark.len().min(bytes.len());
        bytes[..take].copy_from_slice(&mark[..take]);
        bytes
    }
}

impl Kind {
    fn tls(connect: Option<&str>, server_name: &str, ca: &std::path::Path) -> Result<Self> {
        let pem = fs::read_to_string(ca).map_err(Error::io(format!("reading {}", ca.display())))?;
        let connector = TlsConnector::from(Arc::clone(&tls::client(&pem, None, &["http/1.1"])?));
        let name = ServerName::try_from(server_name.to_owned()).map_err(|e| Error::Tls(e.to_string()))?;
        let connect = connect.map(|to| format!("CONNECT {to} HTTP/1.1\r\nhost: {to}\r\n\r\n").into_bytes());
        Ok(Self::Tls { connect, connector, name })
    }
}

/// The fixed payload.
pub fn payload(length: usize) -> Vec<u8> {
    Pattern::new(PAYLOAD_SEED).bytes(length)
}

pub(super) fn get(authority: &str) -> Vec<u8> {
    format!("GET / HTTP/1.1\r\nhost: {authority}\r\nuser-agent: hermes-bench\r\naccept: */*\r\n\r\n").into_bytes()
}

//! HTTP/3 peers of a test: a client with access to each stream, and an origin scripted for each stream.
//!
//! In: a listener client, requests, bodies, or any bytes on any stream. Out: responses with interim responses and trailers, or the
//! error code of a reset stream or closed connection. QUIC is that of quinn; the layers above are written here by hand
//! (see [`wire`]), so that the product's codec does not check itself. Every wait is bounded.

mod origin;
pub mod relay;
pub mod returning_client;
pub mod wire;

use std::{io, net::IpAddr, sync::Arc};

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use http::{HeaderMap, Method, Request};
use quinn::{
    ClientConfig, ConnectionError, Endpoint, ReadError, TransportConfig, VarInt, WriteError,
    crypto::rustls::QuicClientConfig,
};

pub use self::origin::{Exchange, Origin};
use self::wire::kind;
use crate::{
    dial::{ListenerClient, NODE_NAME},
    multiplex::Answer,
    raw_http1::in_time,
    tls, varint,
};

/// Windows large enough to move 64 MiB without waiting at every step.
const WINDOW: u32 = 4 << 20;

/// The way in which a stream or a connection was aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abort {
    /// RESET_STREAM or STOP_SENDING, with this code.
    Stream(u64),
    /// The application closed the connection, with this code.
    Connection(u64),
}

/// The error code in an error of this module; `None` if the peer sent none.
pub fn abort_of(error: &io::Error) -> Option<Abort> {
    let inner = error.get_ref()?;
    let connection = |error: &ConnectionError| match error {
        ConnectionError::ApplicationClosed(close) => Some(Abort::Connection(close.error_code.into_inner())),
        _ => None,
    };
    match inner.downcast_ref::<ReadError>() {
        Some(ReadError::Reset(code)) => return Some(Abort::Stream(code.into_inner())),
        Some(ReadError::ConnectionLost(error)) => return connection(error),
        _ => {}
    }
    match inner.downcast_ref::<WriteError>() {
        Some(WriteError::Stopped(code)) => Some(Abort::Stream(code.into_inner())),
        Some(WriteError::ConnectionLost(error)) => connection(error),
        _ => inner.downcast_ref::<ConnectionError>().and_then(connection),
    }
}

/// A connection of either side. It is closed when this value and the last of its streams are dropped.
#[derive(Debug)]
pub struct Connection {
    /// The QUIC connection.
    pub quic: quinn::Connection,
    /// Our control stream, if any; it must live as long as the connection.
    pub control: Option<quinn::SendStream>,
    /// The peer's SETTINGS.
    settings: Vec<(u64, u64)>,
    /// The identifier of the peer's GOAWAY.
    goaway: Option<u64>,
    /// The peer's control stream.
    received: Option<Receiving>,
    /// The peer's other streams, kept to avoid STOP_SENDING.
    _others: Vec<quinn::RecvStream>,
    endpoint: Endpoint,
}

fn transport() -> Arc<TransportConfig> {
    let mut config = TransportConfig::default();
    config.stream_receive_window(WINDOW.into()).receive_window((4 * WINDOW).into()).send_window(u64::from(4 * WINDOW));
    Arc::new(config)
}

fn refused(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

impl Connection {
    /// A QUIC connection to a listener client, without any HTTP/3 streams yet.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn bare(client: &ListenerClient) -> io::Result<Self> {
        Self::dial(client, transport()).await
    }

    /// A QUIC connection of a client without support for QUIC datagrams.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn without_datagrams(client: &ListenerClient) -> io::Result<Self> {
        let mut config = TransportConfig::default();
        config.datagram_receive_buffer_size(None);
        Self::dial(client, Arc::new(config)).await
    }

    async fn dial(listener: &ListenerClient, transport: Arc<TransportConfig>) -> io::Result<Self> {
        let (ca, identity) = listener.tls.as_ref().ok_or_else(|| refused("HTTP/3 is never in the clear"))?;
        let config = tls::client(ca, identity.as_ref(), &["h3"]).map_err(refused)?;
        let any = if listener.address.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
        let endpoint = Endpoint::client((listener.from.unwrap_or(any), 0).into())?;
        let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).map_err(refused)?));
        config.transport_config(transport);
        let connecting = endpoint.connect_with(config, listener.address, NODE_NAME).map_err(refused)?;
        let quic = in_time("the QUIC handshake", async { connecting.await.map_err(io::Error::other) }).await?;
        Ok(Self::over(quic, endpoint))
    }

    /// Wraps a connection without any HTTP/3 streams yet.
    fn over(quic: quinn::Connection, endpoint: Endpoint) -> Self {
        let (settings, _others) = Default::default();
        Self { quic, control: None, settings, goaway: None, received: None, _others, endpoint }
    }

    /// Connects as a normal client: sends our SETTINGS, and waits for those of the peer.
    ///
    /// # Errors
    /// The connection failed, or the peer does not speak HTTP/3.
    pub async fn connect(client: &ListenerClient, settings: &[(u64, u64)]) -> io::Result<Self> {
        let mut this = Self::bare(client).await?;
        this.begin(&wire::settings(settings)).await?;
        Ok(this)
    }

    async fn begin(&mut self, greeting: &[u8]) -> io::Result<()> {
        let mut control = self.open_uni().await?;
        write(&mut control, Bytes::from([&[0][..], greeting].concat())).await?;
        self.control = Some(control);
        self.hear_settings().await
    }

    /// Waits for the peer's SETTINGS. [`Self::connect`] includes this.
    ///
    /// # Errors
    /// The peer sends something else first, or nothing.
    pub async fn hear_settings(&mut self) -> io::Result<()> {
        loop {
            let accepting = async { self.quic.accept_uni().await.map_err(io::Error::other) };
            let recv = in_time("waiting for the peer's control stream", accepting).await?;
            let mut stream = Receiving { recv, unread: BytesMut::new() };
            while stream.unread.is_empty() {
                stream.fill().await?;
            }
            let is_control = stream.unread.split_to(1)[0] == 0;
            if !is_control {
                self._others.push(stream.recv);
                continue;
            }
            let Some((kind::SETTINGS, mut payload)) = stream.frame().await? else {
                return Err(refused("the control stream does not begin with SETTINGS"));
            };
            while let (Some(id), Some(value)) = (take_varint(&mut payload), take_varint(&mut payload)) {
                self.settings.push((id, value));
            }
            self.received = Some(stream);
            return Ok(());
        }
    }

    /// Migrates the connection to another socket.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn move_to(&self, socket: std::net::UdpSocket) -> io::Result<()> {
        self.endpoint.rebind(socket)
    }

    /// Whether the peer accepts no further requests: it sent GOAWAY, or closed the connection.
    pub fn is_going(&mut self) -> bool {
        while let Some(Some(Ok(Some((kind, mut payload))))) = self.received.as_mut().map(|s| s.frame().now_or_never()) {
            if kind == kind::GOAWAY {
                self.goaway = take_varint(&mut payload).or(self.goaway);
            }
        }
        self.goaway.is_some() || self.quic.close_reason().is_some()
    }

    /// The value of a setting in the peer's SETTINGS.
    pub fn setting(&self, id: u64) -> Option<u64> {
        self.settings.iter().find(|(found, _)| *found == id).map(|(_, value)| *value)
    }

    /// Opens an empty unidirectional stream.
    ///
    /// # Errors
    /// The connection is closed.
    pub async fn open_uni(&self) -> io::Result<quinn::SendStream> {
        in_time("opening a stream", async { self.quic.open_uni().await.map_err(io::Error::other) }).await
    }

    /// Opens an empty request stream.
    ///
    /// # Errors
    /// The connection is closed.
    pub async fn open(&self) -> io::Result<(Sending, Receiving)> {
        let (send, recv) =
            in_time("opening a stream", async { self.quic.open_bi().await.map_err(io::Error::other) }).await?;
        Ok((Sending { send }, Receiving { recv, unread: BytesMut::new() }))
    }

    /// Sends a request's head.
    ///
    /// # Errors
    /// The connection is closed.
    pub async fn request(&self, request: &Request<()>, ends: bool) -> io::Result<(Sending, Receiving)> {
        let (mut send, recv) = self.open().await?;
        send.bytes(request_head(request)).await?;
        if ends {
            send.finish()?;
        }
        Ok((send, recv))
    }

    /// Sends a request with its whole body, and reads the whole response.
    ///
    /// # Errors
    /// The stream or the connection was aborted.
    pub async fn ask(&self, request: &Request<()>, body: &[u8]) -> io::Result<Answer> {
        let (mut send, mut recv) = self.request(request, body.is_empty()).await?;
        let sending = async {
            // A peer that responds early may stop the rest of the request.
            if !body.is_empty() && send.data(Bytes::copy_from_slice(body)).await.is_ok() {
                let _ = send.finish();
            }
            io::Result::Ok(())
        };
        let (answer, ()) = tokio::try_join!(recv.answer(), sending)?;
        Ok(answer)
    }

    /// Sends a GET request.
    ///
    /// # Errors
    /// The errors of [`Self::ask`].
    pub async fn get(&self, uri: &str) -> io::Result<Answer> {
        self.ask(&Request::get(uri).body(()).map_err(io::Error::other)?, b"").await
    }

    /// Waits until the peer closes the connection; returns its error code.
    ///
    /// # Errors
    /// The connection stays open, or is lost without an error code.
    pub async fn closed(&self) -> io::Result<u64> {
        let closed = in_time("waiting for the end of a connection", async { Ok(self.quic.closed().await) }).await?;
        match closed {
            ConnectionError::ApplicationClosed(close) => Ok(close.error_code.into_inner()),
            other => Err(io::Error::other(other)),
        }
    }
}

fn take_varint(bytes: &mut Bytes) -> Option<u64> {
    let (value, length) = varint::varint(bytes)?;
    let _ = bytes.split_to(length);
    Some(value)
}

fn request_head(request: &Request<()>) -> Bytes {
    let uri = request.uri();
    let protocol = request.extensions().get::<h2::ext::Protocol>();
    let mut lines = vec![(":method", request.method().as_str())];
    if let Some(authority) = uri.authority() {
        lines.push((":authority", authority.as_str()));
    }
    if request.method() != Method::CONNECT || protocol.is_some() {
        lines.push((":scheme", uri.scheme_str().unwrap_or("https")));
        lines.push((":path", uri.path_and_query().map_or("/", |path| path.as_str())));
    }
    if let Some(protocol) = protocol {
        lines.push((":protocol", protocol.as_str()));
    }
    let fields = request.headers().iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap_or_default()));
    lines.extend(fields);
    wire::headers(&lines)
}

/// The sending side of a stream. Dropping it sends FIN, as quinn does.
#[derive(Debug)]
pub struct Sending {
    /// The stream of quinn.
    pub send: quinn::SendStream,
}

async fn write(send: &mut quinn::SendStream, bytes: Bytes) -> io::Result<()> {
    in_time("sending", async { send.write_chunk(bytes).await.map_err(io::Error::other) }).await
}

impl Sending {
    /// Sends raw bytes.
    ///
    /// # Errors
    /// The peer stopped the stream, or closed the connection.
    pub async fn bytes(&mut self, bytes: impl Into<Bytes>) -> io::Result<()> {
        write(&mut self.send, bytes.into()).await
    }

    /// Sends a DATA frame.
    ///
    /// # Errors
    /// The errors of [`Self::bytes`].
    pub async fn data(&mut self, data: Bytes) -> io::Result<()> {
        let mut head = BytesMut::new();
        varint::put_varint(&mut head, kind::DATA);
        varint::put_varint(&mut head, data.len() as u64);
        self.bytes(head.freeze()).await?;
        self.bytes(data).await
    }

    /// Sends a HEADERS frame.
    ///
    /// # Errors
    /// The errors of [`Self::bytes`].
    pub async fn headers(&mut self, lines: &[(&str, &str)]) -> io::Result<()> {
        self.bytes(wire::headers(lines)).await
    }

    /// Sends FIN.
    ///
    /// # Errors
    /// The stream was finished or reset before.
    pub fn finish(&mut self) -> io::Result<()> {
        self.send.finish().map_err(io::Error::other)
    }

    /// Resets the stream with this code.
    pub fn reset(&mut self, code: u64) {
        let _ = self.send.reset(VarInt::from_u64(code).unwrap_or_default());
    }

    /// Waits until the peer stops the stream; returns its error code. `None`: the peer has received everything.
    ///
    /// # Errors
    /// The connection is closed.
    pub async fn stopped(&mut self) -> io::Result<Option<u64>> {
        let stopped = self.send.stopped();
        let code = in_time("waiting for STOP_SENDING", async { stopped.await.map_err(io::Error::other) }).await?;
        Ok(code.map(VarInt::into_inner))
    }
}

/// The receiving side of a stream.
#[derive(Debug)]
pub struct Receiving {
    recv: quinn::RecvStream,
    unread: BytesMut,
}

impl Receiving {
    /// Reads more bytes; false after FIN.
    async fn fill(&mut self) -> io::Result<bool> {
        let read = async { self.recv.read_chunk(usize::MAX, true).await.map_err(io::Error::other) };
        let chunk = in_time("reading a stream", read).await?;
        if let Some(chunk) = &chunk {
            self.unread.extend_from_slice(&chunk.bytes);
        }
        Ok(chunk.is_some())
    }

    /// Reads the next whole frame: its type and payload; `None` after FIN between two frames.
    ///
    /// # Errors
    /// The stream was aborted, or ended within a frame.
    pub async fn frame(&mut self) -> io::Result<Option<(u64, Bytes)>> {
        loop {
            if let Some(frame) = wire::take_frame(&mut self.unread) {
                return Ok(Some(frame));
            }
            if !self.fill().await? {
                return if self.unread.is_empty() { Ok(None) } else { Err(refused("the stream ended within a frame")) };
            }
        }
    }

    /// Reads the next head: pseudo-header fields, and the other fields.
    ///
    /// # Errors
    /// The stream was aborted, or ended before.
    pub async fn head(&mut self) -> io::Result<(Vec<(String, String)>, HeaderMap)> {
        match self.frame().await? {
            Some((kind::HEADERS, section)) => wire::lines(section),
            other => Err(refused(format!("no head, but {:?}", other.map(|(kind, _)| kind)))),
        }
    }

    /// Reads the next part of a body; `None` after the last part, with or without trailers.
    ///
    /// # Errors
    /// The stream was aborted.
    pub async fn chunk(&mut self) -> io::Result<Option<Bytes>> {
        match self.frame().await? {
            Some((kind::DATA, data)) => Ok(Some(data)),
            None => Ok(None),
            Some((other, _)) => Err(refused(format!("a frame of type {other} in a body"))),
        }
    }

    /// Reads the whole response.
    ///
    /// # Errors
    /// The stream or the connection was aborted.
    pub async fn answer(&mut self) -> io::Result<Answer> {
        let mut answer = Answer::default();
        loop {
            let (pseudo, fields) = self.head().await?;
            let [(_, status)] = &pseudo[..] else { return Err(refused(format!("a response with {pseudo:?}"))) };
            answer.status = status.parse().map_err(refused)?;
            if answer.status >= 200 {
                answer.headers = fields;
                break;
            }
            answer.interim.push((answer.status, fields));
        }
        while let Some((kind, payload)) = self.frame().await? {
            match kind {
                kind::DATA => answer.data.extend_from_slice(&payload),
                kind::HEADERS => answer.trailers = Some(wire::lines(payload)?.1),
                other => return Err(refused(format!("a frame of type {other} in a response"))),
            }
        }
        Ok(answer)
    }
}

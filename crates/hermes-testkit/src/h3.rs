//! HTTP/3 peers of a test: a client that is asked stream by stream, and an origin that is scripted stream by stream.
//!
//! In: a door, requests, bodies, or any bytes on any stream. Out: answers with their interim responses and trailers,
//! or what a peer says when it breaks a stream or the connection off. QUIC is quinn's; everything above it is written
//! here by hand (see [`wire`]), so that the product's codec is not what checks itself. Every wait is bounded.

mod origin;
pub mod relay;
pub mod visitor;
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
    dial::{Door, NODE_NAME},
    dialog::in_time,
    multiplex::Answer,
    tls, varint,
};

/// Windows large enough to move 64 MiB without waiting at every step.
const WINDOW: u32 = 4 << 20;

/// How a stream or a connection was broken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// RESET_STREAM or STOP_SENDING, with this code.
    Stream(u64),
    /// The application closed the connection, with this code.
    Connection(u64),
}

/// What an error of this module says about how it ended; `None` where it was none of the peer's words.
pub fn broken(error: &io::Error) -> Option<Broken> {
    let inner = error.get_ref()?;
    let connection = |error: &ConnectionError| match error {
        ConnectionError::ApplicationClosed(close) => Some(Broken::Connection(close.error_code.into_inner())),
        _ => None,
    };
    match inner.downcast_ref::<ReadError>() {
        Some(ReadError::Reset(code)) => return Some(Broken::Stream(code.into_inner())),
        Some(ReadError::ConnectionLost(error)) => return connection(error),
        _ => {}
    }
    match inner.downcast_ref::<WriteError>() {
        Some(WriteError::Stopped(code)) => Some(Broken::Stream(code.into_inner())),
        Some(WriteError::ConnectionLost(error)) => connection(error),
        _ => inner.downcast_ref::<ConnectionError>().and_then(connection),
    }
}

/// A connection, of either side. It is closed when the last of its streams and this are dropped.
#[derive(Debug)]
pub struct Connection {
    /// QUIC's.
    pub quic: quinn::Connection,
    /// Our control stream, where there is one; it must live as long as the connection.
    pub control: Option<quinn::SendStream>,
    /// What the peer's SETTINGS said.
    settings: Vec<(u64, u64)>,
    /// What it has said of its end.
    goaway: Option<u64>,
    /// Its control stream.
    heard: Option<Receiving>,
    /// Its other streams, kept from being stopped.
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
    /// A QUIC connection to a door on which nothing was said yet.
    ///
    /// # Errors
    /// No connection.
    pub async fn bare(door: &Door) -> io::Result<Self> {
        Self::dial(door, transport()).await
    }

    /// The same for a client that takes no datagrams of QUIC.
    ///
    /// # Errors
    /// No connection.
    pub async fn without_datagrams(door: &Door) -> io::Result<Self> {
        let mut config = TransportConfig::default();
        config.datagram_receive_buffer_size(None);
        Self::dial(door, Arc::new(config)).await
    }

    async fn dial(door: &Door, transport: Arc<TransportConfig>) -> io::Result<Self> {
        let (ca, identity) = door.tls.as_ref().ok_or_else(|| refused("HTTP/3 is never in the clear"))?;
        let config = tls::client(ca, identity.as_ref(), &["h3"]).map_err(refused)?;
        let any = if door.address.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
        let endpoint = Endpoint::client((door.from.unwrap_or(any), 0).into())?;
        let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).map_err(refused)?));
        config.transport_config(transport);
        let connecting = endpoint.connect_with(config, door.address, NODE_NAME).map_err(refused)?;
        let quic = in_time("the QUIC handshake", async { connecting.await.map_err(io::Error::other) }).await?;
        Ok(Self::over(quic, endpoint))
    }

    /// One on which nothing was said yet.
    fn over(quic: quinn::Connection, endpoint: Endpoint) -> Self {
        let (settings, _others) = Default::default();
        Self { quic, control: None, settings, goaway: None, heard: None, _others, endpoint }
    }

    /// As any client begins: SETTINGS of ours are sent, those of the peer awaited.
    ///
    /// # Errors
    /// No connection, or no HTTP/3 on it.
    pub async fn connect(door: &Door, settings: &[(u64, u64)]) -> io::Result<Self> {
        let mut this = Self::bare(door).await?;
        this.begin(&wire::settings(settings)).await?;
        Ok(this)
    }

    async fn begin(&mut self, greeting: &[u8]) -> io::Result<()> {
        let mut control = self.open_uni().await?;
        write(&mut control, Bytes::from([&[0][..], greeting].concat())).await?;
        self.control = Some(control);
        self.hear_settings().await
    }

    /// Waits for the peer's SETTINGS. [`Self::connect`] has done so.
    ///
    /// # Errors
    /// The peer says something else first, or nothing.
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
            self.heard = Some(stream);
            return Ok(());
        }
    }

    /// Goes on from another socket: what is under way goes with it.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn move_to(&self, socket: std::net::UdpSocket) -> io::Result<()> {
        self.endpoint.rebind(socket)
    }

    /// The peer takes no further request on it, as far as it has said so by now: it said goodbye, or is gone.
    pub fn is_going(&mut self) -> bool {
        while let Some(Some(Ok(Some((kind, mut payload))))) = self.heard.as_mut().map(|s| s.frame().now_or_never()) {
            if kind == kind::GOAWAY {
                self.goaway = take_varint(&mut payload).or(self.goaway);
            }
        }
        self.goaway.is_some() || self.quic.close_reason().is_some()
    }

    /// One of the peer's SETTINGS.
    pub fn setting(&self, id: u64) -> Option<u64> {
        self.settings.iter().find(|(found, _)| *found == id).map(|(_, value)| *value)
    }

    /// A unidirectional stream of ours, on which nothing was said yet.
    ///
    /// # Errors
    /// The connection is over.
    pub async fn open_uni(&self) -> io::Result<quinn::SendStream> {
        in_time("opening a stream", async { self.quic.open_uni().await.map_err(io::Error::other) }).await
    }

    /// A request's stream, on which nothing was said yet.
    ///
    /// # Errors
    /// The connection is over.
    pub async fn open(&self) -> io::Result<(Sending, Receiving)> {
        let (send, recv) =
            in_time("opening a stream", async { self.quic.open_bi().await.map_err(io::Error::other) }).await?;
        Ok((Sending { send }, Receiving { recv, unread: BytesMut::new() }))
    }

    /// Sends a request's head.
    ///
    /// # Errors
    /// The connection is over.
    pub async fn request(&self, request: &Request<()>, ends: bool) -> io::Result<(Sending, Receiving)> {
        let (mut send, recv) = self.open().await?;
        send.bytes(request_head(request)).await?;
        if ends {
            send.finish()?;
        }
        Ok((send, recv))
    }

    /// Sends a request with its whole body, and reads the whole answer.
    ///
    /// # Errors
    /// The stream or the connection broke.
    pub async fn ask(&self, request: &Request<()>, body: &[u8]) -> io::Result<Answer> {
        let (mut send, mut recv) = self.request(request, body.is_empty()).await?;
        let sending = async {
            // A peer that answers early may stop what it does not want to hear.
            if !body.is_empty() && send.data(Bytes::copy_from_slice(body)).await.is_ok() {
                let _ = send.finish();
            }
            io::Result::Ok(())
        };
        let (answer, ()) = tokio::try_join!(recv.answer(), sending)?;
        Ok(answer)
    }

    /// GET.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn get(&self, uri: &str) -> io::Result<Answer> {
        self.ask(&Request::get(uri).body(()).map_err(io::Error::other)?, b"").await
    }

    /// Waits until the peer closes the connection; the code that it gives.
    ///
    /// # Errors
    /// It stays open, or is lost without a word.
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

/// What we say on a stream. Dropped, it ends in order: that is quinn's way.
#[derive(Debug)]
pub struct Sending {
    /// QUIC's.
    pub send: quinn::SendStream,
}

async fn write(send: &mut quinn::SendStream, bytes: Bytes) -> io::Result<()> {
    in_time("sending", async { send.write_chunk(bytes).await.map_err(io::Error::other) }).await
}

impl Sending {
    /// Sends bytes as they are.
    ///
    /// # Errors
    /// The peer wants no more, or is gone.
    pub async fn bytes(&mut self, bytes: impl Into<Bytes>) -> io::Result<()> {
        write(&mut self.send, bytes.into()).await
    }

    /// Sends a DATA frame.
    ///
    /// # Errors
    /// As [`Self::bytes`].
    pub async fn data(&mut self, data: Bytes) -> io::Result<()> {
        let mut head = BytesMut::new();
        varint::put_varint(&mut head, kind::DATA);
        varint::put_varint(&mut head, data.len() as u64);
        self.bytes(head.freeze()).await?;
        self.bytes(data).await
    }

    /// Sends HEADERS.
    ///
    /// # Errors
    /// As [`Self::bytes`].
    pub async fn headers(&mut self, lines: &[(&str, &str)]) -> io::Result<()> {
        self.bytes(wire::headers(lines)).await
    }

    /// Ends our side.
    ///
    /// # Errors
    /// It was ended or reset before.
    pub fn finish(&mut self) -> io::Result<()> {
        self.send.finish().map_err(io::Error::other)
    }

    /// Resets it with this code.
    pub fn reset(&mut self, code: u64) {
        let _ = self.send.reset(VarInt::from_u64(code).unwrap_or_default());
    }

    /// Waits until the peer wants no more; the code that it gives. `None`: it has received all.
    ///
    /// # Errors
    /// The connection is over.
    pub async fn stopped(&mut self) -> io::Result<Option<u64>> {
        let stopped = self.send.stopped();
        let code = in_time("waiting for STOP_SENDING", async { stopped.await.map_err(io::Error::other) }).await?;
        Ok(code.map(VarInt::into_inner))
    }
}

/// What we hear on a stream.
#[derive(Debug)]
pub struct Receiving {
    recv: quinn::RecvStream,
    unread: BytesMut,
}

impl Receiving {
    /// Reads on; false at the orderly end.
    async fn fill(&mut self) -> io::Result<bool> {
        let read = async { self.recv.read_chunk(usize::MAX, true).await.map_err(io::Error::other) };
        let chunk = in_time("reading a stream", read).await?;
        if let Some(chunk) = &chunk {
            self.unread.extend_from_slice(&chunk.bytes);
        }
        Ok(chunk.is_some())
    }

    /// The next frame, whole: its type and payload; `None` at the orderly end between two.
    ///
    /// # Errors
    /// The stream broke, or ended within a frame.
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

    /// The next head: pseudo-header fields, and the others.
    ///
    /// # Errors
    /// The stream broke, or ended before.
    pub async fn head(&mut self) -> io::Result<(Vec<(String, String)>, HeaderMap)> {
        match self.frame().await? {
            Some((kind::HEADERS, section)) => wire::lines(section),
            other => Err(refused(format!("no head, but {:?}", other.map(|(kind, _)| kind)))),
        }
    }

    /// The next piece of a body; `None` at its end, whether trailers stand there or not.
    ///
    /// # Errors
    /// The stream broke.
    pub async fn piece(&mut self) -> io::Result<Option<Bytes>> {
        match self.frame().await? {
            Some((kind::DATA, data)) => Ok(Some(data)),
            None => Ok(None),
            Some((other, _)) => Err(refused(format!("a frame of type {other} in a body"))),
        }
    }

    /// The whole answer.
    ///
    /// # Errors
    /// The stream or the connection broke.
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

//! Clients of a node's listeners: plaintext or TLS; HTTP/1.1, HTTP/2 or HTTP/3; raw or as tunnels.
//!
//! In: an address, an optional certificate, and a tunnel mode. Out: a connection, or an open tunnel. Heads of HTTP/1.1
//! are written here by hand. A refused tunnel is an error with the whole response.

use std::{io, sync::Arc};

use bytes::Bytes;
use http::{Method, Request, Version};
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::{
    h3,
    multiplex::{Multiplex, answer},
    raw_http1::{RawHttp1, in_time},
    tls,
    tunnel::{BoxedStream, Tunnel},
};

pub use crate::dial::{ListenerClient, NODE_NAME};

/// The mode of a TCP connection through the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TunnelMode {
    /// A plain connection to a `tcp` listener.
    Raw,
    /// CONNECT over HTTP/1.1.
    ConnectH1,
    /// CONNECT over HTTP/2.
    ConnectH2,
    /// The bodies of a POST over HTTP/1.1.
    PostH1,
    /// The bodies of a POST over HTTP/2.
    PostH2,
    /// CONNECT over HTTP/3.
    ConnectH3,
    /// The bodies of a POST over HTTP/3.
    PostH3,
}

impl ListenerClient {
    /// Opens a connection; `alpn` applies to TLS.
    ///
    /// # Errors
    /// The connection or the handshake failed.
    pub async fn stream(&self, alpn: &[&str]) -> io::Result<BoxedStream> {
        let stream = in_time("connecting", TcpStream::connect(self.address)).await?;
        stream.set_nodelay(true)?;
        let Some((ca, identity)) = &self.tls else { return Ok(Box::new(stream)) };
        let config = tls::client(ca, identity.as_ref(), alpn).map_err(io::Error::other)?;
        let name = ServerName::try_from(NODE_NAME).map_err(io::Error::other)?;
        let connector = TlsConnector::from(Arc::clone(&config));
        Ok(Box::new(in_time("the TLS handshake", connector.connect(name, stream)).await?))
    }

    /// An HTTP/1.1 connection.
    ///
    /// # Errors
    /// The errors of [`Self::stream`].
    pub async fn h1(&self) -> io::Result<RawHttp1<BoxedStream>> {
        Ok(RawHttp1::new(self.stream(&["http/1.1"]).await?))
    }

    /// An HTTP/2 connection.
    ///
    /// # Errors
    /// The errors of [`Self::stream`], or the peer does not speak HTTP/2.
    pub async fn h2(&self) -> io::Result<Multiplex> {
        Multiplex::over(self.stream(&["h2"]).await?).await
    }

    /// An HTTP/3 connection, without QUIC datagrams.
    ///
    /// # Errors
    /// The connection failed, or the peer does not speak HTTP/3.
    pub async fn h3(&self) -> io::Result<h3::Connection> {
        h3::Connection::connect(self, &[]).await
    }

    /// Opens a tunnel to `authority` (a raw listener uses its configured one).
    ///
    /// # Errors
    /// The tunnel was refused (with the response), or the connection failed.
    pub async fn tunnel(&self, mode: TunnelMode, authority: &str) -> io::Result<Tunnel> {
        match mode {
            TunnelMode::Raw => Ok(Tunnel::io(self.stream(&[]).await?, Bytes::new())),
            TunnelMode::ConnectH1 => self.over_h1("CONNECT", authority, authority, "").await,
            TunnelMode::PostH1 => self.post_h1("/", authority).await,
            TunnelMode::ConnectH2 => {
                let request = Request::builder().method(Method::CONNECT).uri(authority);
                self.over_h2(request).await
            }
            TunnelMode::PostH2 => {
                let request = Request::builder().method(Method::POST).uri(format!("http://{authority}/"));
                self.over_h2(request).await
            }
            TunnelMode::ConnectH3 => {
                let request = Request::builder().method(Method::CONNECT).uri(authority);
                self.over_h3(request).await
            }
            TunnelMode::PostH3 => {
                let request = Request::builder().method(Method::POST).uri(format!("https://{authority}/"));
                self.over_h3(request).await
            }
        }
    }

    pub(crate) async fn post_h1(&self, path: &str, host: &str) -> io::Result<Tunnel> {
        self.over_h1("POST", path, host, "transfer-encoding: chunked\r\n").await
    }

    async fn over_h1(&self, method: &str, target: &str, authority: &str, more: &str) -> io::Result<Tunnel> {
        let mut http1 = self.h1().await?;
        let fields: String = self.fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        http1.send(format!("{method} {target} HTTP/1.1\r\nhost: {authority}\r\n{fields}{more}\r\n")).await?;
        let head = http1.head().await?;
        if head.status() != 200 {
            let body = http1.body(&head).await?;
            return Err(io::Error::other(format!("{method} {target}: {head:?}: {}", body.text())));
        }
        let chunked = head.header("transfer-encoding").is_some();
        let (stream, ahead) = http1.into_parts();
        Ok(if chunked { Tunnel::chunked(stream, ahead) } else { Tunnel::io(stream, ahead) })
    }

    /// A tunnel of capsules by Upgrade over HTTP/1.1 (RFC 9297, section 3.2).
    pub(crate) async fn upgrade(&self, protocol: &str, path: &str) -> io::Result<Tunnel> {
        let mut http1 = self.h1().await?;
        let fields: String = self.fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        http1
            .send(format!(
                "GET {path} HTTP/1.1\r\nhost: proxy.test\r\nconnection: Upgrade\r\nupgrade: {protocol}\r\n\
                 capsule-protocol: ?1\r\n{fields}\r\n"
            ))
            .await?;
        let head = http1.head().await?;
        if head.status() != 101 {
            let body = http1.body(&head).await?;
            return Err(io::Error::other(format!("{path}: {head:?}: {}", body.text())));
        }
        let (stream, ahead) = http1.into_parts();
        Ok(Tunnel::io(stream, ahead))
    }

    /// A request with the common fields.
    pub(crate) fn dressed(&self, request: http::request::Builder) -> http::request::Builder {
        self.fields.iter().fold(request, |request, (name, value)| request.header(name, value))
    }

    pub(crate) async fn over_h2(&self, request: http::request::Builder) -> io::Result<Tunnel> {
        let mut connection = self.h2().await?;
        let request = self.dressed(request).version(Version::HTTP_2).body(()).map_err(io::Error::other)?;
        open_h2(&mut connection, request).await.map(|(recv, send)| Tunnel::h2(connection, recv, send))
    }

    pub(crate) async fn over_h3(&self, request: http::request::Builder) -> io::Result<Tunnel> {
        let connection = self.h3().await?;
        let request = self.dressed(request).body(()).map_err(io::Error::other)?;
        open_h3(&connection, &request).await.map(|(recv, send)| Tunnel::h3(connection, recv, send))
    }
}

/// Opens a stream that stays open in both directions.
///
/// # Errors
/// The stream was refused (with the response), or the connection failed.
pub async fn open_h2(
    connection: &mut Multiplex,
    request: Request<()>,
) -> io::Result<(h2::RecvStream, h2::SendStream<Bytes>)> {
    let what = format!("{} {}", request.method(), request.uri());
    let (response, send) = connection.open(request, false).await?;
    let response = in_time("waiting for a tunnel", async { response.await.map_err(io::Error::other) }).await?;
    if !response.status().is_success() {
        let (parts, body) = response.into_parts();
        let (data, _) = crate::multiplex::receive_all(body).await.unwrap_or_default();
        let text = String::from_utf8_lossy(&data).into_owned();
        return Err(io::Error::other(format!("{what}: {} {:?}: {text}", parts.status, parts.headers)));
    }
    Ok((response.into_body(), send))
}

/// Works like [`open_h2`], over HTTP/3.
///
/// # Errors
/// The stream was refused (with the response), or the connection failed.
pub async fn open_h3(connection: &h3::Connection, request: &Request<()>) -> io::Result<(h3::Receiving, h3::Sending)> {
    let (send, mut recv) = connection.request(request, false).await?;
    let (pseudo, fields) = recv.head().await?;
    if !pseudo.iter().any(|(name, value)| name == ":status" && value.starts_with('2')) {
        let output = recv.chunk().await.ok().flatten().unwrap_or_default();
        let text = String::from_utf8_lossy(&output);
        return Err(io::Error::other(format!("{} {}: {pseudo:?} {fields:?}: {text}", request.method(), request.uri())));
    }
    Ok((recv, send))
}

/// Works like [`Multiplex::ask`], on a connection of its own.
///
/// # Errors
/// The stream or the connection was aborted.
pub async fn ask_h2(client: &ListenerClient, request: Request<()>) -> io::Result<crate::multiplex::Answer> {
    let mut connection = client.h2().await?;
    let (response, _) = connection.open(request, true).await?;
    answer(response).await
}

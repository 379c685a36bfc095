//! A small HTTP/1.1 client over any byte stream.
//!
//! In: a connected stream, then requests. Out: complete responses. The request target is sent unchanged: with an
//! absolute URI the peer acts as a proxy. Never: a response of more than 64 MiB, or a wait of more than ten seconds without being asked for it.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use http::header::HOST;
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::namespace::Namespace;

/// The longest wait for one response.
pub(crate) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// A connection that is kept alive.
pub(crate) struct Client {
    sender: SendRequest<Full<Bytes>>,
    timeout: Duration,
    /// The task that drives the connection; it ends with this value.
    _driver: JoinSet<()>,
}

impl Client {
    /// Speaks HTTP over a stream.
    ///
    /// # Errors
    /// The stream is closed already.
    pub(crate) async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> anyhow::Result<Self> {
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(async move {
            // An error of the connection also fails its request, which reports it.
            let _ = connection.await;
        });
        Ok(Self { sender, timeout: RESPONSE_TIMEOUT, _driver: driver })
    }

    /// The same client, which waits this long for each response.
    pub(crate) fn waiting_for(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Connects and speaks HTTP.
    ///
    /// # Errors
    /// The connection fails.
    pub(crate) async fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        Self::over(stream).await
    }

    /// Connects from a namespace and speaks HTTP.
    ///
    /// # Errors
    /// The connection fails.
    pub(crate) async fn connect_from(place: &Namespace, address: SocketAddr) -> anyhow::Result<Self> {
        Self::over(place.tcp()?.connect(address).await?).await
    }

    /// GET.
    ///
    /// # Errors
    /// The same errors as [`Client::ask`].
    pub(crate) async fn get(&mut self, uri: &str) -> anyhow::Result<Bytes> {
        self.send_request(Method::GET, uri, Bytes::new()).await
    }

    /// Sends a request and expects status 200.
    ///
    /// # Errors
    /// The connection broke, the response timed out, or its status is not 200.
    pub(crate) async fn send_request(&mut self, method: Method, uri: &str, body: Bytes) -> anyhow::Result<Bytes> {
        self.ask_with(method, uri, &[], body).await
    }

    /// Sends a request like [`Client::ask`], with additional headers.
    ///
    /// # Errors
    /// The same errors as [`Client::ask`].
    pub(crate) async fn ask_with(
        &mut self,
        method: Method,
        uri: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Bytes> {
        let (status, body) = self.try_ask(method, uri, headers, body).await?;
        let text = || String::from_utf8_lossy(&body[..body.len().min(200)]).trim().to_owned();
        ensure!(status == StatusCode::OK, "{uri} was answered {status}: {}", text());
        Ok(body)
    }

    async fn try_ask(
        &mut self,
        method: Method,
        uri: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let parsed: Uri = uri.parse().with_context(|| format!("{uri} is no URI"))?;
        let host = parsed.authority().map_or("localhost", http::uri::Authority::as_str).to_owned();
        let request = Request::builder().method(method).uri(parsed).header(HOST, host);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let request = request.body(Full::new(body))?;
        let timeout = self.timeout;
        let exchange = async {
            self.sender.ready().await?;
            let response = self.sender.send_request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES)
                .collect()
                .await
                .map_err(anyhow::Error::from_boxed)?;
            anyhow::Ok((status, body.to_bytes()))
        };
        let answered = tokio::time::timeout(self.timeout, exchange).await;
        answered.with_context(|| format!("{uri} was not answered within {timeout:?}"))?.with_context(|| uri.to_owned())
    }
}

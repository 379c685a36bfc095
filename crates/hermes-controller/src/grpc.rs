//! gRPC client over one HTTP/2 connection, for controllers and etcd.
//!
//! In: a connected stream, and messages. Out: the answers of the server.
//! Never: a second connection. The caller replaces a broken connection.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::stream::{self, Stream, StreamExt as _};
use hermes_net::Io;
use hermes_net::tls::{self, RustlsClientConfig};
use http::uri::PathAndQuery;
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;

use crate::control::MAX_MESSAGE;

/// The maximum time for a connection and its TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval between HTTP/2 keepalive pings, and the timeout of each.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(10));
/// The reason why a server sent no response.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection could be made.
    #[error("{place} unreachable: {reason}")]
    Unreachable {
        /// The address of the server.
        place: String,
        /// The reason.
        reason: String,
    },
    /// The connection broke after a request was sent: the controller may have acted on it.
    #[error("{place} did not answer: {reason}")]
    Broken {
        /// The address of the server.
        place: String,
        /// The reason.
        reason: String,
    },
    /// The server did not answer in time.
    #[error("no answer within {0:?}")]
    Silent(Duration),
    /// The server refused the request.
    #[error("refused: {}", .0.message())]
    Refused(Box<Status>),
}

impl ClientError {
    /// True if the server is temporarily unable to answer.
    pub fn is_for_later(&self) -> bool {
        matches!(self, Self::Refused(status) if status.code() == tonic::Code::Unavailable)
    }

    /// True if the caller lacks permission, so that a retry alone does not help.
    pub fn is_denial(&self) -> bool {
        matches!(self, Self::Refused(status) if status.code() == tonic::Code::PermissionDenied)
    }
}

/// A gRPC channel: one connection, closed when its last clone is dropped.
#[derive(Clone)]
pub(crate) struct GrpcChannel {
    connection: Connection,
    /// Runs the HTTP/2 connection.
    _task: Arc<JoinSet<()>>,
}

impl GrpcChannel {
    /// Connects to a server other than a controller, at `HOST:PORT`. If `tls` is `None`, the connection has no TLS.
    pub(crate) async fn to_server(place: &str, tls: Option<&Arc<RustlsClientConfig>>) -> Result<Self, ClientError> {
        let connecting = async {
            let tcp = TcpStream::connect(place).await?;
            tcp.set_nodelay(true)?;
            let Some(config) = tls else { return Ok(Io::Plain(tcp)) };
            let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
            let connected = tls::connect(config.clone(), host.trim_start_matches('[').trim_end_matches(']'), tcp).await;
            connected.map_err(|error| match tls::HandshakeFault::of(&error) {
                Some(tls::HandshakeFault::Certificate) => io::Error::other(format!("{error}; see --store-ca")),
                _ => error,
            })
        };
        Self::over(if tls.is_some() { "https" } else { "http" }, place.to_owned(), connecting).await
    }

    pub(crate) async fn over(
        scheme: &'static str,
        authority: String,
        connecting: impl Future<Output = io::Result<Io>>,
    ) -> Result<Self, ClientError> {
        let unreachable = |reason: String| ClientError::Unreachable { place: authority.clone(), reason };
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
        let io = connected.map_err(|_| unreachable(format!("no answer within {CONNECT_TIMEOUT:?}")))?;
        let io = io.map_err(|error| unreachable(error_text(&error)))?;
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEPALIVE.0)
            .keep_alive_timeout(KEEPALIVE.1)
            .keep_alive_while_idle(true);
        let made = builder.handshake(TokioIo::new(io)).await;
        let (sender, driver) = made.map_err(|error| unreachable(error.to_string()))?;
        let mut task = JoinSet::new();
        task.spawn(async move { drop(driver.await) });
        Ok(Self { connection: Connection { sender, scheme, authority }, _task: Arc::new(task) })
    }

    /// Sends a plain HTTP request over the same connection.
    pub(crate) async fn request(&self, mut request: Request<Body>) -> Result<Response<Incoming>, ClientError> {
        let mut connection = self.connection.clone();
        let path = request.uri().path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"));
        *request.uri_mut() = connection.uri(path);
        connection.sender.send_request(request).await.map_err(|error| {
            let (place, reason) = (connection.authority.clone(), error.to_string());
            match error.is_canceled() {
                // The request was not sent.
                true => ClientError::Unreachable { place, reason },
                false => ClientError::Broken { place, reason },
            }
        })
    }

    async fn grpc(&self) -> Result<Grpc<Connection>, ClientError> {
        let mut grpc = Grpc::new(self.connection.clone()).max_decoding_message_size(MAX_MESSAGE);
        let gone = |error: hyper::Error| ClientError::Unreachable {
            place: self.connection.authority.clone(),
            reason: error.to_string(),
        };
        grpc.ready().await.map_err(gone)?;
        Ok(grpc)
    }

    /// Sends one message and returns the answer.
    pub(crate) async fn unary<Q, A>(&self, path: &'static str, message: Q) -> Result<A, ClientError>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut grpc = self.grpc().await?;
        let codec = ProstCodec::<Q, A>::default();
        let answered = grpc.unary(tonic::Request::new(message), PathAndQuery::from_static(path), codec).await;
        answered.map(tonic::Response::into_inner).map_err(|status| ClientError::Refused(Box::new(status)))
    }

    /// Sends one message and returns the stream of answers.
    pub(crate) async fn stream<Q, A>(&self, path: &'static str, message: Q) -> Result<Streaming<A>, ClientError>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        // The request stream stays open: to end it would end the answers.
        let messages = stream::iter([message]).chain(stream::pending());
        self.stream_of(path, messages).await
    }

    pub(crate) async fn stream_of<Q, A>(
        &self,
        path: &'static str,
        messages: impl Stream<Item = Q> + Send + 'static,
    ) -> Result<Streaming<A>, ClientError>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut grpc = self.grpc().await?;
        let codec = ProstCodec::<Q, A>::default();
        let answered = grpc.streaming(tonic::Request::new(messages), PathAndQuery::from_static(path), codec).await;
        answered.map(tonic::Response::into_inner).map_err(|status| ClientError::Refused(Box::new(status)))
    }
}

/// Converts an error to text, and adds the remedy if the server's certificate was rejected.
fn error_text(error: &io::Error) -> String {
    match tls::HandshakeFault::of(error) {
        Some(tls::HandshakeFault::Certificate) => format!(
            "{error}. The server is not a controller of this overlay, or the CA was rotated too often while this \
             client was disconnected: enrol the node again with a token, or create the operator's file again"
        ),
        _ => error.to_string(),
    }
}

/// An HTTP/2 connection, as a service for tonic.
#[derive(Clone)]
struct Connection {
    sender: SendRequest<Body>,
    scheme: &'static str,
    authority: String,
}

impl Connection {
    fn uri(&self, path: PathAndQuery) -> Uri {
        let built = Uri::builder().scheme(self.scheme).authority(self.authority.as_str()).path_and_query(path).build();
        built.unwrap_or_default()
    }
}

impl tower::Service<Request<Body>> for Connection {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.sender.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let path = request.uri().path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"));
        *request.uri_mut() = self.uri(path);
        Box::pin(self.sender.send_request(request))
    }
}

//! The node's side of [`crate::control`], and the client of the REST API: connections to a controller.
//!
//! In: where it is, and how it is to be known. Out: its answers.
//! Never: a word to a server that has not proven to be a controller of this overlay.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::stream::{self, Stream, StreamExt as _};
use hermes_net::Io;
use hermes_net::tls::{self, CertifiedKey, Roots, RustlsClientConfig, ServerIdentity};
use http::uri::PathAndQuery;
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tonic::Status;
pub use tonic::Streaming;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic_prost::ProstCodec;

use crate::ca::Office;
use crate::control::{self, EnrolRequest, Issued, MAX_MESSAGE, Order, RenewRequest, Report};

/// A connection is there within this, or not at all.
const CONNECT: Duration = Duration::from_secs(10);
/// How often a connection is asked whether it is alive, and how long it has for the answer.
const ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(10));
/// The controller's port, where its URL has none.
pub const PORT: u16 = 9400;

/// How a controller is known.
#[derive(Clone)]
pub enum Known {
    /// By its authority's digest, from a token.
    Pin([u8; 32]),
    /// By its authority's certificate (PEM), which is there since the first time.
    Authorities(String),
}

/// Where a controller is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Place {
    /// The controller's host and port.
    pub fn host_and_port(&self) -> (String, u16) {
        (self.host.clone(), self.port)
    }
}

impl std::str::FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no controller; write https://HOST:PORT");
        let uri: Uri =
            if text.contains("://") { text.parse() } else { format!("https://{text}").parse() }.map_err(|_| wrong())?;
        match (uri.scheme_str(), uri.host(), uri.path()) {
            (Some("https"), Some(host), "" | "/") => {
                let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
                Ok(Self { host, port: uri.port_u16().unwrap_or(PORT) })
            }
            _ => Err(wrong()),
        }
    }
}

impl Place {
    fn authority(&self) -> String {
        let Self { host, port } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "https://{}", self.authority())
    }
}

/// Why a controller gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no connection.
    #[error("{place} cannot be reached: {reason}")]
    Unreachable {
        /// Which controller.
        place: String,
        /// Why not.
        reason: String,
    },
    /// The connection broke after a request was sent: the controller may have acted on it.
    #[error("{place} did not answer: {reason}")]
    Broken {
        /// Which controller.
        place: String,
        /// Why not.
        reason: String,
    },
    /// It says nothing.
    #[error("no answer within {0:?}")]
    Silent(Duration),
    /// It answers that it will not.
    #[error("refused: {}", .0.message())]
    Refused(Box<Status>),
}

impl ClientError {
    /// Whether the controller says that it cannot at the moment.
    pub fn is_for_later(&self) -> bool {
        matches!(self, Self::Refused(status) if status.code() == tonic::Code::Unavailable)
    }

    /// Whether it says that whoever asks must not: asking again changes nothing by itself.
    pub fn is_denial(&self) -> bool {
        matches!(self, Self::Refused(status) if status.code() == tonic::Code::PermissionDenied)
    }
}

/// A connection to a controller; it ends with this.
pub struct Client {
    line: Line,
}

impl Client {
    /// Connects, as `own` where that is somebody.
    ///
    /// # Errors
    /// Nobody answers there, or it is no controller of this overlay.
    pub async fn connect(place: &Place, known: &Known, own: Option<&CertifiedKey>) -> Result<Self, ClientError> {
        let unreachable = |reason: String| ClientError::Unreachable { place: place.to_string(), reason };
        let is_controller = |uris: &[String]| match Office::of(uris.iter().map(String::as_str)) {
            Some(Office::Controller) => Ok(()),
            _ => Err("its certificate is no controller's".to_owned()),
        };
        let accepts: tls::NodePredicate = Arc::new(is_controller);
        let server = match known {
            Known::Pin(pin) => ServerIdentity::Pinned(*pin, accepts),
            Known::Authorities(pem) => {
                let roots = Roots::from_pem(pem.as_bytes()).map_err(|error| unreachable(error.to_string()))?;
                ServerIdentity::Node(roots, accepts)
            }
        };
        let config = tls::client_config(own, server, &[b"h2"]).map_err(|error| unreachable(error.to_string()))?;
        let connecting = async {
            let tcp = TcpStream::connect((&*place.host, place.port)).await?;
            tcp.set_nodelay(true)?;
            tls::connect(config, &place.host, tcp).await
        };
        Ok(Self { line: Line::over("https", place.authority(), connecting).await? })
    }

    /// A node's first certificate.
    ///
    /// # Errors
    /// The controller refuses.
    pub async fn enrol(&self, request: EnrolRequest) -> Result<Issued, ClientError> {
        self.line.unary(control::ENROL, request).await
    }

    /// The next one.
    ///
    /// # Errors
    /// The controller refuses.
    pub async fn renew(&self, request: RenewRequest) -> Result<Issued, ClientError> {
        self.line.unary(control::RENEW, request).await
    }

    /// What the node is to run, from now on; it says what it runs by these reports.
    ///
    /// # Errors
    /// The controller refuses.
    pub async fn follow(
        &self,
        reports: impl Stream<Item = Report> + Send + 'static,
    ) -> Result<Streaming<Order>, ClientError> {
        self.line.stream_of(control::FOLLOW, reports).await
    }

    /// One request of the REST API.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn request(&self, mut request: Request<Body>) -> Result<Response<Incoming>, ClientError> {
        let mut connection = self.line.connection.clone();
        let path = request.uri().path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"));
        *request.uri_mut() = connection.uri(path);
        connection.sender.send_request(request).await.map_err(|error| {
            let (place, reason) = (connection.authority.clone(), error.to_string());
            match error.is_canceled() {
                // It was never sent.
                true => ClientError::Unreachable { place, reason },
                false => ClientError::Broken { place, reason },
            }
        })
    }
}

/// A body of a request.
pub fn body(bytes: http_body_util::Full<bytes::Bytes>) -> Body {
    Body::new(bytes)
}

/// A connection over which gRPC is spoken; it ends with the last of its clones.
#[derive(Clone)]
pub(crate) struct Line {
    connection: Connection,
    /// Drives it.
    _task: Arc<JoinSet<()>>,
}

impl Line {
    /// A connection to a server that is no controller, at `HOST:PORT`; in the clear where there is no `tls`.
    pub(crate) async fn to_server(place: &str, tls: Option<&Arc<RustlsClientConfig>>) -> Result<Self, ClientError> {
        let connecting = async {
            let tcp = TcpStream::connect(place).await?;
            tcp.set_nodelay(true)?;
            let Some(config) = tls else { return Ok(Io::Plain(tcp)) };
            let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
            let connected = tls::connect(config.clone(), host.trim_start_matches('[').trim_end_matches(']'), tcp).await;
            connected.map_err(|error| match tls::Fault::of(&error) {
                Some(tls::Fault::Certificate) => io::Error::other(format!("{error}; see --store-ca")),
                _ => error,
            })
        };
        Self::over(if tls.is_some() { "https" } else { "http" }, place.to_owned(), connecting).await
    }

    async fn over(
        scheme: &'static str,
        authority: String,
        connecting: impl Future<Output = io::Result<Io>>,
    ) -> Result<Self, ClientError> {
        let unreachable = |reason: String| ClientError::Unreachable { place: authority.clone(), reason };
        let connected = tokio::time::timeout(CONNECT, connecting).await;
        let io = connected.map_err(|_| unreachable(format!("no answer within {CONNECT:?}")))?;
        let io = io.map_err(|error| unreachable(told(&error)))?;
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(ALIVE.0)
            .keep_alive_timeout(ALIVE.1)
            .keep_alive_while_idle(true);
        let made = builder.handshake(TokioIo::new(io)).await;
        let (sender, driver) = made.map_err(|error| unreachable(error.to_string()))?;
        let mut task = JoinSet::new();
        task.spawn(async move { drop(driver.await) });
        Ok(Self { connection: Connection { sender, scheme, authority }, _task: Arc::new(task) })
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

    /// One message, and its answer.
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

    /// One message, and what comes of it from then on.
    pub(crate) async fn stream<Q, A>(&self, path: &'static str, message: Q) -> Result<Streaming<A>, ClientError>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        // Who ends the request ends the answers.
        let messages = stream::iter([message]).chain(stream::pending());
        self.stream_of(path, messages).await
    }

    async fn stream_of<Q, A>(
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

/// What there is to be done where a server's certificate is not believed.
fn told(error: &io::Error) -> String {
    match tls::Fault::of(error) {
        Some(tls::Fault::Certificate) => format!(
            "{error}. It is no controller of this overlay; or its authority was replaced too often while nobody here asked: a \
             node enrols anew with a token, an operator's file is made anew"
        ),
        _ => error.to_string(),
    }
}

/// One HTTP/2 connection, as gRPC needs it.
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

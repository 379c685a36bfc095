//! The node's side of [`crate::control`], and the client of the REST API: connections to a controller.
//!
//! In: where it is, and how it is to be known. Out: its answers.
//! Never: a word to a server that has not proven to be a controller of this overlay.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::Stream;
use hermes_net::tls::{self, CertifiedKey, Roots, ServerIdentity};
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

use crate::authority::Office;
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
    host: String,
    port: u16,
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

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.host.contains(':') {
            write!(f, "https://[{}]:{}", self.host, self.port)
        } else {
            write!(f, "https://{}:{}", self.host, self.port)
        }
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
    /// It answers that it will not.
    #[error("the controller refuses: {}", .0.message())]
    Refused(Box<Status>),
}

/// A connection to a controller; it ends with this.
pub struct Client {
    connection: Connection,
    /// Drives it.
    _task: JoinSet<()>,
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
        let connected = tokio::time::timeout(CONNECT, connecting).await;
        let io = connected.map_err(|_| unreachable(format!("no answer within {CONNECT:?}")))?;
        let io = io.map_err(|error| unreachable(error.to_string()))?;
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(ALIVE.0)
            .keep_alive_timeout(ALIVE.1)
            .keep_alive_while_idle(true);
        let (sender, driver) =
            builder.handshake(TokioIo::new(io)).await.map_err(|error| unreachable(error.to_string()))?;
        let mut task = JoinSet::new();
        task.spawn(async move { drop(driver.await) });
        let authority = format!(
            "{}:{}",
            if place.host.contains(':') { format!("[{}]", place.host) } else { place.host.clone() },
            place.port
        );
        Ok(Self { connection: Connection { sender, authority }, _task: task })
    }

    fn grpc(&self) -> Grpc<Connection> {
        Grpc::new(self.connection.clone()).max_decoding_message_size(MAX_MESSAGE)
    }

    /// A node's first certificate.
    ///
    /// # Errors
    /// The controller refuses.
    pub async fn enrol(&self, request: EnrolRequest) -> Result<Issued, ClientError> {
        self.unary::<EnrolRequest>(request, control::ENROL).await
    }

    /// The next one.
    ///
    /// # Errors
    /// The controller refuses.
    pub async fn renew(&self, request: RenewRequest) -> Result<Issued, ClientError> {
        self.unary::<RenewRequest>(request, control::RENEW).await
    }

    async fn unary<M: prost::Message + Send + Sync + 'static>(
        &self,
        message: M,
        path: &'static str,
    ) -> Result<Issued, ClientError> {
        let mut grpc = self.grpc();
        // What connection it is, it knows already.
        let _ = grpc.ready().await;
        let codec = ProstCodec::<M, Issued>::default();
        let answered = grpc.unary(tonic::Request::new(message), PathAndQuery::from_static(path), codec).await;
        answered.map(tonic::Response::into_inner).map_err(|status| ClientError::Refused(Box::new(status)))
    }

    /// What the node is to run, from now on; it says what it runs by these reports.
    ///
    /// # Errors
    /// The controller refuses.
    pub async fn follow(
        &self,
        reports: impl Stream<Item = Report> + Send + 'static,
    ) -> Result<Streaming<Order>, ClientError> {
        let mut grpc = self.grpc();
        let _ = grpc.ready().await;
        let codec = ProstCodec::<Report, Order>::default();
        let answered =
            grpc.streaming(tonic::Request::new(reports), PathAndQuery::from_static(control::FOLLOW), codec).await;
        answered.map(tonic::Response::into_inner).map_err(|status| ClientError::Refused(Box::new(status)))
    }

    /// One request of the REST API.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn request(&self, mut request: Request<Body>) -> Result<Response<Incoming>, ClientError> {
        let mut connection = self.connection.clone();
        let path = request.uri().path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"));
        *request.uri_mut() = connection.uri(path);
        connection.sender.send_request(request).await.map_err(|error| ClientError::Unreachable {
            place: connection.authority.clone(),
            reason: error.to_string(),
        })
    }
}

/// A body of a request.
pub fn body(bytes: http_body_util::Full<bytes::Bytes>) -> Body {
    Body::new(bytes)
}

/// One HTTP/2 connection, as gRPC needs it.
#[derive(Clone)]
struct Connection {
    sender: SendRequest<Body>,
    authority: String,
}

impl Connection {
    fn uri(&self, path: PathAndQuery) -> Uri {
        let built = Uri::builder().scheme("https").authority(self.authority.as_str()).path_and_query(path).build();
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

//! Client of a controller: the node's side of [`crate::control`], and the REST API.
//!
//! In: the controller's address, and how to authenticate it. Out: the answers of the controller.
//! Never: a request to a server that has not proven to be a controller of this overlay.

use std::sync::Arc;

use futures_util::stream::Stream;
use hermes_net::tls::{self, CertifiedKey, Roots, ServerIdentity};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use tokio::net::TcpStream;
pub use tonic::Streaming;
use tonic::body::Body;

use crate::ca::CertificateRole;
use crate::control::{self, EnrolRequest, Issued, Order, RenewRequest, Report};
pub use crate::grpc::ClientError;
use crate::grpc::GrpcChannel;

/// The port of a controller whose URL has none.
pub const PORT: u16 = 9400;

/// The trust anchor with which a client authenticates a controller.
#[derive(Clone)]
pub enum ControllerPin {
    /// The digest of the CA's certificate, from a token.
    Pin([u8; 32]),
    /// The CA certificates (PEM), stored since enrolment.
    Authorities(String),
}

/// The address of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerAddr {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl ControllerAddr {
    /// The controller's host and port.
    pub fn host_and_port(&self) -> (String, u16) {
        (self.host.clone(), self.port)
    }
}

impl std::str::FromStr for ControllerAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("invalid controller {text:?}; expected https://HOST:PORT");
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

impl ControllerAddr {
    fn authority(&self) -> String {
        let Self { host, port } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

impl std::fmt::Display for ControllerAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "https://{}", self.authority())
    }
}

/// A connection to a controller. Dropping it closes the connection.
pub struct Client {
    channel: GrpcChannel,
}

impl Client {
    /// Connects to a controller. `own` is the client certificate; `None` before enrolment.
    ///
    /// # Errors
    /// The address is unreachable, or its server is not a controller of this overlay.
    pub async fn connect(
        place: &ControllerAddr,
        known: &ControllerPin,
        own: Option<&CertifiedKey>,
    ) -> Result<Self, ClientError> {
        let unreachable = |reason: String| ClientError::Unreachable { place: place.to_string(), reason };
        let is_controller = |uris: &[String]| match CertificateRole::of(uris.iter().map(String::as_str)) {
            Some(CertificateRole::Controller) => Ok(()),
            _ => Err("the server's certificate is not a controller's".to_owned()),
        };
        let accepts: tls::NodePredicate = Arc::new(is_controller);
        let server = match known {
            ControllerPin::Pin(pin) => ServerIdentity::Pinned(*pin, accepts),
            ControllerPin::Authorities(pem) => {
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
        Ok(Self { channel: GrpcChannel::over("https", place.authority(), connecting).await? })
    }

    /// Requests a node's first certificate.
    ///
    /// # Errors
    /// The controller refused the request, or the connection broke.
    pub async fn enrol(&self, request: EnrolRequest) -> Result<Issued, ClientError> {
        self.channel.unary(control::ENROL, request).await
    }

    /// Renews a node's certificate.
    ///
    /// # Errors
    /// The controller refused the request, or the connection broke.
    pub async fn renew(&self, request: RenewRequest) -> Result<Issued, ClientError> {
        self.channel.unary(control::RENEW, request).await
    }

    /// Opens the stream on which the controller sends orders to a node, and the node sends `reports` of its status.
    ///
    /// # Errors
    /// The controller refused the request, or the connection broke.
    pub async fn follow(
        &self,
        reports: impl Stream<Item = Report> + Send + 'static,
    ) -> Result<Streaming<Order>, ClientError> {
        self.channel.stream_of(control::FOLLOW, reports).await
    }

    /// Sends one request to the REST API.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn request(&self, request: Request<Body>) -> Result<Response<Incoming>, ClientError> {
        self.channel.request(request).await
    }
}

/// Converts bytes to the body of a request.
pub fn body(bytes: http_body_util::Full<bytes::Bytes>) -> Body {
    Body::new(bytes)
}

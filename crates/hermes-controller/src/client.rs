//! The node's side of [`crate::control`], and the client of the REST API: connections to a controller.
//!
//! In: where it is, and how it is to be known. Out: its answers.
//! Never: a word to a server that has not proven to be a controller of this overlay.

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

/// The controller's port, where its URL has none.
pub const PORT: u16 = 9400;

/// How a controller is known.
#[derive(Clone)]
pub enum ControllerPin {
    /// By its authority's digest, from a token.
    Pin([u8; 32]),
    /// By its authority's certificate (PEM), which is there since the first time.
    Authorities(String),
}

/// Where a controller is.
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

/// A connection to a controller; it ends with this.
pub struct Client {
    channel: GrpcChannel,
}

impl Client {
    /// Connects, as `own` where that is somebody.
    ///
    /// # Errors
    /// Nobody answers there, or it is no controller of this overlay.
    pub async fn connect(
        place: &ControllerAddr,
        known: &ControllerPin,
        own: Option<&CertifiedKey>,
    ) -> Result<Self, ClientError> {
        let unreachable = |reason: String| ClientError::Unreachable { place: place.to_string(), reason };
        let is_controller = |uris: &[String]| match CertificateRole::of(uris.iter().map(String::as_str)) {
            Some(CertificateRole::Controller) => Ok(()),
            _ => Err("its certificate is no controller's".to_owned()),
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

    /// A node's first certificate.
    ///
    /// # Errors
    /// The controller refuses.
    pub async fn enrol(&self, request: EnrolRequest) -> Result<Issued, ClientError> {
        self.channel.unary(control::ENROL, request).await
    }

    /// The next one.
    ///
    /// # Errors
    /// The controller refuses.
    pub async fn renew(&self, request: RenewRequest) -> Result<Issued, ClientError> {
        self.channel.unary(control::RENEW, request).await
    }

    /// What the node is to run, from now on; it says what it runs by these reports.
    ///
    /// # Errors
    /// The controller refuses.
    pub async fn follow(
        &self,
        reports: impl Stream<Item = Report> + Send + 'static,
    ) -> Result<Streaming<Order>, ClientError> {
        self.channel.stream_of(control::FOLLOW, reports).await
    }

    /// One request of the REST API.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn request(&self, request: Request<Body>) -> Result<Response<Incoming>, ClientError> {
        self.channel.request(request).await
    }
}

/// A body of a request.
pub fn body(bytes: http_body_util::Full<bytes::Bytes>) -> Body {
    Body::new(bytes)
}

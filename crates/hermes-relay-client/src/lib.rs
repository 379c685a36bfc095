//! A client of relays, for programs and for the command line.
//!
//! In: the URL of a channel. Out: a [`Publisher`], which sends one publication after the other and learns how many
//! subscribers each reached, or a [`Subscription`], which receives them across failures. Requests are HTTP/1.1, in plaintext
//! or over TLS. Never: a publication that is sent twice; the caller knows whether it may be.

pub mod connection;
mod encryption;
mod publisher;
mod subscriber;
mod subscription;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hermes_net::resolve::Resolver;
use hermes_net::tls::{self, Roots, RustlsClientConfig, ServerIdentity};
use hermes_net::{Io, dial};
use hermes_relay::fields::MAX_TIMEOUT;
use hermes_signature::{CONTENT_DIGEST, SignedRequest, SigningKey, content_digest, is_content_of};
use http::header::{HOST, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::task::JoinSet;

pub use self::encryption::{Secret, SecretError};
pub use self::publisher::{Acceptance, PublishOptions, Publisher};
pub use self::subscriber::{Event, SubscribeOptions, Subscriber};
pub use self::subscription::{Received, Subscription};

/// The longest reason of a refusal that is read.
const MAX_REASON: usize = 4096;

/// How a client reaches a relay.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// An HTTP proxy (`http://HOST:PORT`), such as a node that knows the name of the relay; `None` means no proxy. Only for
    /// `http:` URLs.
    pub proxy: Option<Uri>,
    /// A file of CA certificates (PEM); `None` means those of the system.
    pub ca: Option<PathBuf>,
    /// The local address of connections, for hosts with several networks; `None` lets the system choose.
    pub source: Option<IpAddr>,
    /// Fields of each request.
    pub headers: HeaderMap,
    /// The key that signs each request, for self-certifying channels; `None` means no signature.
    pub key: Option<Arc<SigningKey>>,
    /// The secret that encrypts the content of publications from client to client; `None` means no encryption.
    pub secret: Option<Secret>,
    /// The time for a connection, for the answer to a subscription, and for that to a refresh. A publication waits for as long as
    /// the relay does.
    pub patience: Duration,
}

impl Default for ClientOptions {
    fn default() -> Self {
        let patience = Duration::from_secs(30);
        Self { proxy: None, ca: None, source: None, headers: HeaderMap::new(), key: None, secret: None, patience }
    }
}

/// The reason why a request failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientError {
    /// The URL or an option is unusable.
    #[error("{0}")]
    Invalid(String),
    /// The relay cannot be reached, or the connection broke. A later attempt may succeed.
    #[error("{0}")]
    Broken(String),
    /// The relay refused the request.
    #[error("the relay refused with {status}: {reason}")]
    Refused {
        /// The status of the response.
        status: StatusCode,
        /// The beginning of its body.
        reason: String,
        /// The longest timeout, if that of the request was too long.
        max_timeout: Option<Duration>,
    },
}

impl ClientError {
    /// Whether the same request may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Invalid(_) => false,
            Self::Broken(_) => true,
            Self::Refused { status, .. } => status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS,
        }
    }
}

/// A client of one channel.
pub struct Client {
    url: Uri,
    /// The relay or the proxy.
    host: String,
    port: u16,
    tls: Option<Arc<RustlsClientConfig>>,
    resolver: Resolver,
    options: ClientOptions,
}

/// A connection to the relay. Dropping it closes the connection.
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    _driver: JoinSet<()>,
}

impl Client {
    /// A client of the channel at this `http:` or `https:` URL.
    ///
    /// # Errors
    /// The URL has no host or another scheme, or the CA certificates cannot be read.
    pub fn new(url: Uri, options: ClientOptions) -> Result<Arc<Self>, ClientError> {
        let tls = if url.scheme_str() == Some("https") { Some(tls_config(&options)?) } else { None };
        Self::with_tls(url, options, tls)
    }

    fn with_tls(
        url: Uri,
        options: ClientOptions,
        tls: Option<Arc<RustlsClientConfig>>,
    ) -> Result<Arc<Self>, ClientError> {
        let invalid =
            |why: &str| ClientError::Invalid(format!("{url}: {why}; write http://HOST/PATH or https://HOST/PATH"));
        if !matches!(url.scheme_str(), Some("http" | "https")) {
            return Err(invalid("unknown scheme"));
        }
        if tls.is_some() && options.proxy.is_some() {
            return Err(ClientError::Invalid(format!("{url}: a proxy serves http: URLs only; leave it out")));
        }
        let peer = options.proxy.as_ref().unwrap_or(&url);
        let host = peer.host().filter(|host| !host.is_empty()).ok_or_else(|| invalid("missing host"))?;
        let host = host.trim_matches(['[', ']']).to_owned();
        let port = peer.port_u16().unwrap_or(if tls.is_some() { 443 } else { 80 });
        Ok(Arc::new(Self { url, host, port, tls, resolver: Resolver::from_system(), options }))
    }

    /// The URL of the channel.
    pub fn url(&self) -> &Uri {
        &self.url
    }

    /// A client of another channel with the same options and CA certificates, from this local address.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn sibling(&self, url: Uri, source: Option<IpAddr>) -> Result<Arc<Self>, ClientError> {
        let options = ClientOptions { source, ..self.options.clone() };
        match &self.tls {
            Some(tls) if url.scheme() == self.url.scheme() => Self::with_tls(url, options, Some(tls.clone())),
            _ => Self::new(url, options),
        }
    }

    async fn connect(&self) -> Result<Connection, ClientError> {
        let whole = async {
            let addresses = self.resolver.resolve(&self.host).await;
            let addresses = addresses.map_err(|error| ClientError::Broken(error.to_string()))?;
            let failed = |error| ClientError::Broken(format!("cannot connect to {}:{}: {error}", self.host, self.port));
            let tcp = dial::connect_from(self.options.source, &addresses, self.port).await.map_err(failed)?;
            let io = match &self.tls {
                Some(config) => tls::connect(config.clone(), &self.host, tcp).await.map_err(failed)?,
                None => Io::Plain(tcp),
            };
            let shaken = http1::handshake(TokioIo::new(io)).await;
            let (sender, connection) = shaken.map_err(|error| ClientError::Broken(error.to_string()))?;
            let mut driver = JoinSet::new();
            // The exchange reports errors of the connection.
            driver.spawn(async move { drop(connection.await) });
            Ok(Connection { sender, _driver: driver })
        };
        self.patiently("a connection", whole).await?
    }

    fn request(&self, method: Method, body: Bytes, fields: HeaderMap) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        let root = || http::uri::PathAndQuery::from_static("/");
        *request.uri_mut() = match &self.options.proxy {
            Some(_) => self.url.clone(),
            None => self.url.path_and_query().cloned().unwrap_or_else(root).into(),
        };
        let headers = request.headers_mut();
        if let Some(Ok(host)) = self.url.authority().map(|authority| HeaderValue::from_str(authority.as_str())) {
            headers.insert(HOST, host);
        }
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("hermes/", env!("CARGO_PKG_VERSION"))));
        headers.extend(fields);
        headers.extend(self.options.headers.clone());
        if let Some(key) = &self.options.key {
            self.sign(key, &mut request);
        }
        request
    }

    /// The authority of the channel in lower case, without the default port.
    fn authority(&self) -> String {
        let default = self.url.scheme_str().map(|scheme| if scheme == "https" { 443 } else { 80 });
        let host = self.url.host().unwrap_or_default().to_ascii_lowercase();
        match self.url.port_u16().filter(|port| Some(*port) != default) {
            Some(port) => format!("{host}:{port}"),
            None => host,
        }
    }

    /// Checks that the holder of the key published this, if the channel names one. So no relay need be trusted.
    fn check_holder(&self, id: &str, headers: &HeaderMap, body: &[u8]) -> Result<(), ClientError> {
        let key = self.url.path().strip_prefix("/pk/").and_then(|rest| rest.split_once("/from/"));
        let Some((name, _)) = key else { return Ok(()) };
        let authority = self.authority();
        let fits = |method: &Method| {
            let (path, query) = (self.url.path(), None);
            let signed = SignedRequest { method, authority: &authority, path, query, headers };
            hermes_signature::verify(&signed).is_ok_and(|signed| signed.key.name() == name)
        };
        if (fits(&Method::PUT) || fits(&Method::POST)) && is_content_of(headers, body) {
            return Ok(());
        }
        let reason = "is not signed by the holder of the key in the URL; a relay on the way may have forged it";
        Err(ClientError::Invalid(format!("publication {id} {reason}")))
    }

    fn sign(&self, key: &SigningKey, request: &mut Request<Full<Bytes>>) {
        let content = request.body().clone().into_inner().unwrap_or_default();
        if *request.method() != Method::GET {
            request.headers_mut().insert(CONTENT_DIGEST, content_digest(&content));
        }
        let authority = self.authority();
        let signed = SignedRequest {
            method: request.method(),
            authority: &authority,
            path: self.url.path(),
            query: self.url.query(),
            headers: request.headers(),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let fields = hermes_signature::sign(key, &signed, now, &format!("{:032x}", rand::random::<u128>()));
        // A URL is ASCII, so that it can be signed.
        request.headers_mut().extend(fields.into_iter().flatten());
    }

    /// Sends a request, and returns the response if it has this status.
    async fn exchange(
        &self,
        connection: &mut Connection,
        request: Request<Full<Bytes>>,
        expected: StatusCode,
    ) -> Result<Response<Incoming>, ClientError> {
        let broken = |error: hyper::Error| ClientError::Broken(format!("no response: {error}"));
        let response = connection.sender.send_request(request).await.map_err(broken)?;
        if response.status() == expected {
            return Ok(response);
        }
        let status = response.status();
        let max_timeout = number(response.headers(), &MAX_TIMEOUT).map(Duration::from_secs);
        let reason =
            self.patiently("the reason of a refusal", Limited::new(response.into_body(), MAX_REASON).collect());
        let reason = reason.await?.map(|body| body.to_bytes()).unwrap_or_default();
        Err(ClientError::Refused { status, reason: String::from_utf8_lossy(&reason).trim().to_owned(), max_timeout })
    }

    async fn patiently<F: Future>(&self, what: &str, future: F) -> Result<F::Output, ClientError> {
        let within = self.options.patience;
        let waited = tokio::time::timeout(within, future).await;
        waited.map_err(|_| ClientError::Broken(format!("waited {} s for {what}", within.as_secs_f32())))
    }
}

fn tls_config(options: &ClientOptions) -> Result<Arc<RustlsClientConfig>, ClientError> {
    let invalid = |error: String| ClientError::Invalid(error);
    let roots = match &options.ca {
        Some(file) => Roots::load(file).map_err(|error| invalid(format!("{}: {error}", file.display())))?,
        None => Roots::system().map_err(|error| invalid(error.to_string()))?,
    };
    tls::client_config(None, ServerIdentity::Name(roots), &[b"http/1.1"]).map_err(|error| invalid(error.to_string()))
}

/// Reads a field as a number.
fn number(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}

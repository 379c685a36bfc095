//! A request and its response over HTTP/1.1: directly or through a forward proxy, in plaintext or over TLS.
//!
//! In: a URL and fields. Out: a head, then content in chunks; or an error, and whether it is transient. Bounded: each
//! wait has a timeout, the whole transfer has none.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use hermes_net::resolve::Resolver;
use hermes_net::tls::{self, HandshakeFault, Roots, RustlsClientConfig, ServerIdentity};
use hermes_net::{Io, dial};
use http::header::{
    ACCEPT, ACCEPT_ENCODING, ACCEPT_LANGUAGE, CACHE_CONTROL, HOST, HeaderName, IF_RANGE, PRAGMA, PROXY_AUTHORIZATION,
    RANGE, USER_AGENT,
};
use http::response::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Uri};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::download::RangeRequest;
use super::{authority, digest, remedy};

/// Header fields that are sent to any origin after a redirect. Every other field may be a secret between the user and
/// the named origin, whatever its name (`x-api-key`), or may name that origin (`host`). curl withholds only
/// `authorization` and `cookie`.
const FOR_ANYBODY: [HeaderName; 5] = [ACCEPT, ACCEPT_LANGUAGE, CACHE_CONTROL, PRAGMA, USER_AGENT];

/// A failed request.
#[derive(Debug)]
pub(super) enum AttemptError {
    /// A transient failure; a retry may succeed.
    Passing { why: String, after: Option<Duration> },
    /// A permanent failure.
    Lasting { why: String, remedy: &'static str },
}

impl AttemptError {
    fn passing(why: impl Into<String>) -> Self {
        Self::Passing { why: why.into(), after: None }
    }
}

/// The client that sends requests.
pub(super) struct Client {
    resolver: Resolver,
    tls: OnceLock<Arc<RustlsClientConfig>>,
    pub(super) proxy: Option<Uri>,
    pub(super) ca: Option<PathBuf>,
    pub(super) headers: HeaderMap,
    pub(super) patience: Duration,
}

/// A response in progress.
pub(super) struct Exchange {
    pub(super) head: Parts,
    body: Incoming,
    patience: Duration,
    /// Drives the connection; ends with this value.
    _connection: JoinSet<()>,
}

/// A chunk of a response's content.
pub(super) enum Chunk {
    Data(Bytes),
    Trailers(HeaderMap),
}

impl Client {
    pub(super) fn new(proxy: Option<Uri>, ca: Option<PathBuf>, headers: HeaderMap, patience: Duration) -> Self {
        Self { resolver: Resolver::from_system(), tls: OnceLock::new(), proxy, ca, headers, patience }
    }

    /// Sends a request. An origin that the user has not named receives no fields meant for the named one.
    ///
    /// # Errors
    /// No response arrived.
    pub(super) async fn send(&self, url: &Uri, ask: &RangeRequest, is_named: bool) -> Result<Exchange, AttemptError> {
        let is_tls = url.scheme_str() == Some("https");
        let tcp = self.dial(self.proxy.as_ref().unwrap_or(url)).await?;
        let mut connection = JoinSet::new();
        let io = if is_tls {
            let tcp = if self.proxy.is_some() { self.tunnel(tcp, url).await? } else { tcp };
            self.secure(tcp, url).await?
        } else {
            Io::Plain(tcp)
        };
        let sender = self.speak(io, &mut connection).await?;
        let request = self.request(url, ask, is_named, !is_tls && self.proxy.is_some());
        let (head, body) = self.exchange(sender, request).await?.into_parts();
        Ok(Exchange { head, body, patience: self.patience, _connection: connection })
    }

    async fn dial(&self, to: &Uri) -> Result<TcpStream, AttemptError> {
        let (host, port) = authority(to);
        let addresses = self.patiently(format!("{host} to be resolved"), self.resolver.resolve(host)).await?;
        let addresses = addresses.map_err(|error| AttemptError::passing(error.to_string()))?;
        let dialled = self.patiently(format!("{host}:{port} to be connected"), dial::connect(&addresses, port)).await?;
        dialled.map_err(|error| AttemptError::passing(format!("{host}:{port} cannot be connected: {error}")))
    }

    /// Opens a tunnel through the proxy.
    async fn tunnel(&self, tcp: TcpStream, url: &Uri) -> Result<TcpStream, AttemptError> {
        let (host, port) = authority(url);
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let to = format!("{host}:{port}");
        let mut connection = JoinSet::new();
        let sender = self.speak(Io::Plain(tcp), &mut connection).await?;
        let mut request = Request::builder().method(Method::CONNECT).uri(&to).header(HOST, &to);
        if let Some(proof) = self.headers.get(PROXY_AUTHORIZATION) {
            request = request.header(PROXY_AUTHORIZATION, proof);
        }
        let request = request.body(Empty::new()).map_err(|error| AttemptError::passing(error.to_string()))?;
        let response = self.exchange(sender, request).await?;
        if !response.status().is_success() {
            let (head, _) = response.into_parts();
            return Err(remedy::of_proxy(&head));
        }
        let broken = |why: &dyn std::fmt::Display| AttemptError::passing(format!("the proxy's tunnel broke: {why}"));
        let upgraded = hyper::upgrade::on(response).await.map_err(|error| broken(&error))?;
        let parts = upgraded.downcast::<TokioIo<Io>>().map_err(|_| broken(&"unexpected stream"))?;
        match parts.io.into_inner() {
            // A TLS client speaks first, so bytes from the server are an error.
            Io::Plain(tcp) if parts.read_buf.is_empty() => Ok(tcp),
            _ => Err(broken(&"the response has bytes that were not requested")),
        }
    }

    async fn secure(&self, tcp: TcpStream, url: &Uri) -> Result<Io, AttemptError> {
        let (host, _) = authority(url);
        let config = match self.tls.get() {
            Some(config) => config.clone(),
            None => {
                let config = self.tls_config().map_err(|error| AttemptError::Lasting {
                    why: format!("{error:#}"),
                    remedy: "name a file of CA certificates with --ca",
                })?;
                self.tls.get_or_init(|| config).clone()
            }
        };
        let shaken = self.patiently(format!("TLS of {host}"), tls::connect(config, host, tcp)).await?;
        shaken.map_err(|error| match HandshakeFault::of(&error) {
            Some(HandshakeFault::Certificate) => AttemptError::Lasting {
                why: format!("cannot verify the certificate of {host}: {error}"),
                remedy: "if you trust its CA, name it with --ca",
            },
            Some(HandshakeFault::Protocol) => AttemptError::Lasting {
                why: format!("{host} does not speak TLS as we do: {error}"),
                remedy: "look at the URL's scheme and port",
            },
            None => AttemptError::passing(format!("TLS of {host} broke off: {error}")),
        })
    }

    fn tls_config(&self) -> anyhow::Result<Arc<RustlsClientConfig>> {
        let roots = match &self.ca {
            Some(file) => Roots::load(file).context("--ca")?,
            None => Roots::system()?,
        };
        Ok(tls::client_config(None, ServerIdentity::Name(roots), &[b"http/1.1"])?)
    }

    async fn speak(&self, io: Io, driver: &mut JoinSet<()>) -> Result<SendRequest<Empty<Bytes>>, AttemptError> {
        let (sender, connection) =
            http1::handshake(TokioIo::new(io)).await.map_err(|error| AttemptError::passing(error.to_string()))?;
        driver.spawn(async move {
            // The exchange reports errors of the connection.
            let _ = connection.with_upgrades().await;
        });
        Ok(sender)
    }

    fn request(&self, url: &Uri, ask: &RangeRequest, is_named: bool, absolute: bool) -> Request<Empty<Bytes>> {
        let target = if absolute { url.clone() } else { url.path_and_query().cloned().unwrap_or_else(root).into() };
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = target;
        let headers = request.headers_mut();
        let text = |text: &str| HeaderValue::from_str(text).ok();
        let own = [
            (HOST, url.authority().and_then(|authority| text(authority.as_str()))),
            (USER_AGENT, text(concat!("hermes/", env!("CARGO_PKG_VERSION")))),
            // The file holds the representation itself; ranges of a content-encoded response would not match.
            (ACCEPT_ENCODING, text("identity")),
            (HeaderName::from_static(digest::WANT.0), text(digest::WANT.1)),
        ];
        headers.extend(own.into_iter().filter_map(|(name, value)| Some((name, value?))));
        for name in self.headers.keys() {
            let is_for_it = match name {
                // The proxy has received this field with CONNECT; the origin must not.
                name if name == PROXY_AUTHORIZATION => absolute,
                name => is_named || FOR_ANYBODY.contains(name),
            };
            if !is_for_it {
                continue;
            }
            headers.remove(name);
            for value in self.headers.get_all(name) {
                headers.append(name, value.clone());
            }
        }
        if let RangeRequest::From(first, validator) = ask {
            headers.extend(text(&format!("bytes={first}-")).map(|value| (RANGE, value)));
            headers
                .extend(validator.as_ref().and_then(|validator| text(validator.text())).map(|value| (IF_RANGE, value)));
        }
        request
    }

    async fn exchange(
        &self,
        mut sender: SendRequest<Empty<Bytes>>,
        request: Request<Empty<Bytes>>,
    ) -> Result<Response<Incoming>, AttemptError> {
        let answered = self.patiently("an answer".to_owned(), sender.send_request(request)).await?;
        answered.map_err(|error| broken("no response", &error))
    }

    async fn patiently<F: Future>(&self, what: String, future: F) -> Result<F::Output, AttemptError> {
        patiently(self.patience, &what, future).await
    }
}

impl Exchange {
    /// Returns the next chunk, or `None` at the orderly end.
    ///
    /// # Errors
    /// The response was interrupted, or no data arrived in time.
    pub(super) async fn next(&mut self) -> Result<Option<Chunk>, AttemptError> {
        match patiently(self.patience, "more of it", self.body.frame()).await? {
            None => Ok(None),
            Some(Err(error)) => Err(broken("the response was interrupted", &error)),
            Some(Ok(frame)) => Ok(Some(match frame.into_data() {
                Ok(data) => Chunk::Data(data),
                Err(frame) => Chunk::Trailers(frame.into_trailers().unwrap_or_default()),
            })),
        }
    }
}

async fn patiently<F: Future>(patience: Duration, what: &str, future: F) -> Result<F::Output, AttemptError> {
    let waited = tokio::time::timeout(patience, future).await;
    waited.map_err(|_| AttemptError::passing(format!("waited {} s for {what}", patience.as_secs_f32())))
}

/// Describes a broken response; hyper's own text omits the cause.
fn broken(what: &str, error: &hyper::Error) -> AttemptError {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    let why = match cause.downcast_ref::<io::Error>().map(io::Error::kind) {
        Some(io::ErrorKind::UnexpectedEof) => "the connection ended".to_owned(),
        _ => cause.to_string(),
    };
    AttemptError::passing(format!("{what}: {why}"))
}

fn root() -> http::uri::PathAndQuery {
    http::uri::PathAndQuery::from_static("/")
}

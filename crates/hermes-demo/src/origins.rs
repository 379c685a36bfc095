//! The services of a demo's overlay, which do not depend on Hermes.
//!
//! In: loopback. Out: two web servers that differ in their name, one of TLS, an echo over TCP and
//! one over UDP, all in this process, each on a port that the kernel chose.
//! Never: more than 256 connections each.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

use super::content::{self, content};
use super::ports::loopback;

const CONNECTIONS: usize = 256;
/// The cache lifetime of content, which never changes: the value of the papers' server.
const FRESH: HeaderValue = HeaderValue::from_static("public, max-age=900");
/// The pause after an accept error, which an immediate retry would only repeat.
const PAUSE: Duration = Duration::from_millis(50);

type Body = Either<Full<Bytes>, Incoming>;
pub(super) type ServerTls = Arc<hermes_net::tls::RustlsServerConfig>;

/// The running services; all end with this value.
pub(crate) struct Origins {
    /// The web server that the name SHOP maps to at first.
    pub(crate) blue: SocketAddr,
    /// The web server that SHOP maps to after the change.
    pub(crate) green: SocketAddr,
    /// HTTP over TLS.
    pub(crate) bank: SocketAddr,
    /// Echo of byte streams.
    pub(crate) database: SocketAddr,
    /// Echo of datagrams.
    pub(crate) call: SocketAddr,
    _tasks: JoinSet<()>,
}

impl Origins {
    /// Starts all of them.
    ///
    /// # Errors
    /// No port is left.
    pub(crate) async fn start(bank_tls: ServerTls) -> io::Result<Self> {
        let mut tasks = JoinSet::new();
        let blue = listen().await?;
        let green = listen().await?;
        let bank = listen().await?;
        let database = listen().await?;
        let call = UdpSocket::bind(loopback(0)).await?;
        let this = Self {
            blue: blue.local_addr()?,
            green: green.local_addr()?,
            bank: bank.local_addr()?,
            database: database.local_addr()?,
            call: call.local_addr()?,
            _tasks: JoinSet::new(),
        };
        tasks.spawn(accept(blue, |stream| serve_http(stream, "blue")));
        tasks.spawn(accept(green, |stream| serve_http(stream, "green")));
        tasks.spawn(accept(bank, move |stream| serve_https(stream, bank_tls.clone(), "bank")));
        tasks.spawn(accept(database, echo));
        tasks.spawn(echo_datagrams(call));
        Ok(Self { _tasks: tasks, ..this })
    }
}

async fn listen() -> io::Result<TcpListener> {
    TcpListener::bind(loopback(0)).await
}

/// Serves each connection in its own task; ends with the future.
pub(super) async fn accept<F>(listener: TcpListener, serve: impl Fn(TcpStream) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < CONNECTIONS => match accepted {
                Ok((stream, _)) => {
                    let _ = stream.set_nodelay(true);
                    connections.spawn(serve(stream));
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// HTTP over TLS.
pub(super) async fn serve_https(stream: TcpStream, tls: ServerTls, name: &str) {
    // A failed handshake needs no handling: TLS sends the alert to the client.
    if let Ok(stream) = hermes_net::tls::accept(tls, stream).await {
        serve_http(stream, name).await;
    }
}

/// HTTP/1.1, by a server of this name.
pub(super) async fn serve_http(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, name: impl AsRef<str>) {
    let name = name.as_ref();
    let service = service_fn(move |request| async move { Ok::<_, Infallible>(answer(request, name)) });
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

/// `GET /` and `/whoami` return the server's name, `GET /content/SEED/LENGTH` returns those bytes, and `POST /echo`
/// streams the request body back.
fn answer(request: Request<Incoming>, name: &str) -> Response<Body> {
    let path = request.uri().path();
    match *request.method() {
        Method::POST if path == "/echo" => Response::new(Either::Right(request.into_body())),
        Method::GET if path == "/whoami" => text(StatusCode::OK, name.to_owned()),
        Method::GET if path == "/" => text(StatusCode::OK, format!("hello from the {name} server\n")),
        Method::GET | Method::HEAD => match asked_content(path) {
            Some(bytes) => {
                let mut response = Response::new(Either::Left(Full::new(bytes)));
                response.headers_mut().insert(CACHE_CONTROL, FRESH);
                response
            }
            None => text(StatusCode::NOT_FOUND, "try / or /whoami\n".to_owned()),
        },
        _ => text(StatusCode::METHOD_NOT_ALLOWED, "try GET / or POST /echo\n".to_owned()),
    }
}

fn asked_content(path: &str) -> Option<Bytes> {
    let (seed, length) = path.strip_prefix("/content/")?.split_once('/')?;
    let length = length.parse().ok().filter(|length| *length <= content::MAX_BYTES)?;
    Some(content(seed.parse().ok()?, length))
}

fn text(status: StatusCode, text: String) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::new(text.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}

/// Sends everything back; the other direction ends after this one.
async fn echo(mut stream: TcpStream) {
    let (mut read, mut write) = stream.split();
    if tokio::io::copy(&mut read, &mut write).await.is_ok() {
        let _ = write.shutdown().await;
    }
}

async fn echo_datagrams(socket: UdpSocket) {
    let mut datagram = vec![0; 65_535];
    loop {
        // An error here refers to an earlier datagram, whose sender has closed its socket.
        let Ok((length, from)) = socket.recv_from(&mut datagram).await else { continue };
        let _ = socket.send_to(&datagram[..length], from).await;
    }
}

//! HTTP/1.1 and HTTP/2 origins, in plaintext and over TLS.
//!
//! In: requests. Out, by path: `/echo` returns the request's body, and `/upload` its length and digest as JSON.
//! `/bytes/N` returns N bytes of [`crate::pattern`] (seed [`BYTES_SEED`]). `/drip/COUNT/SIZE/MS` returns COUNT chunks
//! of SIZE bytes, one each MS milliseconds. All other paths return the fixed payload. Bodies are streamed.

use std::{convert::Infallible, pin::Pin, sync::Arc, task::Poll, time::Duration};

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{
    Request, Response, StatusCode,
    body::{Frame, Incoming},
    header::CONTENT_LENGTH,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};
use tokio_rustls::TlsAcceptor;

use crate::{
    Result,
    origin::Origin,
    pattern::{Digest, Pattern},
};

/// Seed of the content of `/bytes/N`.
pub const BYTES_SEED: u64 = 0x6865_726d_6573;
/// Bytes in one piece of a generated body.
const CHUNK_SIZE: u64 = 64 << 10;
/// Maximum number of concurrent streams of a connection.
const STREAMS: u32 = 4096;
/// Flow-control windows: larger than any bandwidth-delay product here, so that the origin is not the brake.
const WINDOW: u32 = 16 << 20;

pub(super) type Body = BoxBody<Bytes, hyper::Error>;

/// The HTTP version of a plaintext connection. Over TLS, ALPN decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// HTTP/1.1.
    H1,
    /// HTTP/2 by prior knowledge.
    H2,
}

/// Serves plaintext HTTP. `payload` is the content of all other paths.
///
/// # Errors
/// The listener has no address.
pub fn serve(listener: TcpListener, version: Version, payload: Bytes) -> Result<Origin> {
    Origin::accepting(listener, move |stream| serve_connection(stream, version, payload.clone()))
}

/// Serves HTTP over TLS, with HTTP/2 if ALPN selects `h2`.
///
/// # Errors
/// The listener has no address.
pub fn serve_tls(listener: TcpListener, config: Arc<ServerConfig>, payload: Bytes) -> Result<Origin> {
    let acceptor = TlsAcceptor::from(config);
    Origin::accepting(listener, move |stream| {
        let (acceptor, payload) = (acceptor.clone(), payload.clone());
        async move {
            let Ok(stream) = acceptor.accept(stream).await else {
                return;
            };
            let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
            serve_connection(stream, if h2 { Version::H2 } else { Version::H1 }, payload).await;
        }
    })
}

async fn serve_connection<S>(stream: S, version: Version, payload: Bytes)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let io = TokioIo::new(stream);
    let service = service_fn(move |request| answer(request, payload.clone()));
    // The client evaluates the result of a connection.
    let _ = match version {
        Version::H1 => http1::Builder::new().serve_connection(io, service).with_upgrades().await,
        Version::H2 => {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder
                .max_concurrent_streams(STREAMS)
                .initial_stream_window_size(WINDOW)
                .initial_connection_window_size(WINDOW);
            builder.serve_connection(io, service).await
        }
    };
}

async fn answer(request: Request<Incoming>, payload: Bytes) -> std::result::Result<Response<Body>, Infallible> {
    let mut path = request.uri().path().split('/').skip(1);
    let number = |part: Option<&str>| part.and_then(|p| p.parse::<u64>().ok());
    Ok(match path.next() {
        Some("echo") => Response::new(request.into_body().boxed()),
        Some("upload") => digest(request.into_body()).await,
        Some("bytes") => match number(path.next()) {
            Some(length) => generated(length),
            None => refused("/bytes/N needs a number"),
        },
        Some("drip") => match (number(path.next()), number(path.next()), number(path.next())) {
            (Some(count), Some(size), Some(pause)) => drip(count, size, Duration::from_millis(pause)),
            _ => refused("/drip/COUNT/SIZE/MS needs three numbers"),
        },
        _ => Response::new(whole(payload)),
    })
}

/// The length in a path that ends with `/bytes/N`.
pub(super) fn length(path: &str) -> Option<u64> {
    path.rsplit_once("/bytes/")?.1.parse().ok()
}

pub(super) fn whole(payload: Bytes) -> Body {
    Full::new(payload).map_err(|never| match never {}).boxed()
}

fn refused(why: &'static str) -> Response<Body> {
    let mut response = Response::new(whole(Bytes::from_static(why.as_bytes())));
    *response.status_mut() = StatusCode::BAD_REQUEST;
    response
}

async fn digest(mut body: Incoming) -> Response<Body> {
    let (mut digest, mut length) = (Digest::default(), 0u64);
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            return refused("the upload broke off");
        };
        if let Some(data) = frame.data_ref() {
            digest.update(data);
            length += data.len() as u64;
        }
    }
    let text = serde_json::json!({"bytes": length, "digest": digest.hex()}).to_string();
    Response::new(whole(Bytes::from(text)))
}

pub(super) fn generated(length: u64) -> Response<Body> {
    let pattern = Pattern::new(BYTES_SEED);
    let chunks = (0..length.div_ceil(CHUNK_SIZE)).map(move |i| {
        let start = i * CHUNK_SIZE;
        let mut chunk = vec![0; (length - start).min(CHUNK_SIZE) as usize];
        pattern.fill(start, &mut chunk);
        Ok(Frame::data(Bytes::from(chunk)))
    });
    let mut response = Response::new(BodyExt::boxed(StreamBody::new(stream::iter(chunks))));
    response.headers_mut().insert(CONTENT_LENGTH, length.into());
    response
}

fn drip(count: u64, size: u64, pause: Duration) -> Response<Body> {
    let size = size.min(CHUNK_SIZE) as usize;
    let mut timer: Option<Pin<Box<tokio::time::Sleep>>> = None;
    let mut sent = 0;
    let drops = stream::poll_fn(move |cx| {
        if sent == count {
            return Poll::Ready(None);
        }
        if let Some(running) = &mut timer {
            std::task::ready!(running.as_mut().poll(cx));
        }
        timer = Some(Box::pin(tokio::time::sleep(pause)));
        let mut chunk = vec![0; size];
        Pattern::new(BYTES_SEED).fill(sent * size as u64, &mut chunk);
        sent += 1;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(chunk)))))
    });
    Response::new(BodyExt::boxed(StreamBody::new(drops)))
}

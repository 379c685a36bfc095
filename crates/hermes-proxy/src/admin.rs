//! The admin endpoint: health, metrics, configuration and sessions over HTTP.
//!
//! In: GET requests on its own listener, on the main thread, so that scraping never delays traffic. Out: text and JSON.
//! Never: a change of anything, or a secret.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderValue};
use http::{Method, Request, Response, StatusCode, Version};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::{AbortHandle, JoinSet};

use crate::node::NodeView;
use hermes_transport::log_throttle::LogThrottle;

/// The limit of simultaneous connections; a scraper needs one. Beyond it, the oldest is closed.
const CONNECTIONS: usize = 64;
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval between two log lines about connections that could not be accepted.
const UNACCEPTED_INTERVAL: Duration = Duration::from_secs(60);
/// The timeout for sending a response: a client that reads nothing must not occupy a connection forever.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The readiness of the node: false from the start of a drain.
pub type Readiness = Arc<AtomicBool>;

/// Serves the admin endpoint for as long as it is polled.
pub async fn serve(listener: TcpListener, view: NodeView, ready: Readiness) {
    let on_loopback = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    view.guard_admin(listener.local_addr().ok());
    let accept = |listener: &TcpListener, cx: &mut Context<'_>| listener.poll_accept(cx).map_ok(|(tcp, _)| tcp);
    accept_all(listener, accept, view, ready, on_loopback).await;
}

/// Serves the endpoint at a Unix socket too, for as long as it is polled. The file's permissions decide who may read
/// it.
pub async fn serve_local(listener: UnixListener, view: NodeView, ready: Readiness) {
    let accept = |listener: &UnixListener, cx: &mut Context<'_>| listener.poll_accept(cx).map_ok(|(stream, _)| stream);
    accept_all(listener, accept, view, ready, false).await;
}

async fn accept_all<L, S>(
    listener: L,
    accept: fn(&L, &mut Context<'_>) -> Poll<io::Result<S>>,
    view: NodeView,
    ready: Readiness,
    on_loopback: bool,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut connections = JoinSet::new();
    let mut open = VecDeque::new();
    let (unaccepted, begun) = (LogThrottle::every(UNACCEPTED_INTERVAL), Instant::now());
    loop {
        tokio::select! {
            accepted = std::future::poll_fn(|cx| accept(&listener, cx)) => match accepted {
                Ok(stream) => {
                    // A silent connection must not keep others out.
                    open.retain(|connection: &AbortHandle| !connection.is_finished());
                    if open.len() >= CONNECTIONS {
                        open.pop_front().inspect(AbortHandle::abort);
                    }
                    open.push_back(connections.spawn(converse(stream, view.clone(), ready.clone(), on_loopback)));
                }
                Err(error) => {
                    if let Some(more) = unaccepted.happened(begun.elapsed().as_millis() as u64) {
                        tracing::error!(%error, more, "the admin endpoint cannot accept connections; retrying");
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    view: NodeView,
    ready: Readiness,
    on_loopback: bool,
) {
    let service = service_fn(move |request| {
        let (view, ready) = (view.clone(), ready.clone());
        async move { Ok::<_, Infallible>(answer(&request, &view, &ready, on_loopback).await) }
    });
    let _ = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        // A client that polls rarely must not hold a connection in between.
        .keep_alive(false)
        .half_close(true)
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(WriteDeadline { stream, overdue: None }), service)
        .await;
}

/// A connection whose client must accept responses within `ANSWER_TIMEOUT`.
struct WriteDeadline<S> {
    stream: S,
    /// Runs from the first write that had to wait until everything is sent.
    overdue: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteDeadline<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteDeadline<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if let Poll::Ready(written) = Pin::new(&mut this.stream).poll_write(cx, buf) {
            return Poll::Ready(written);
        }
        let overdue = this.overdue.get_or_insert_with(|| Box::pin(tokio::time::sleep(ANSWER_TIMEOUT)));
        ready!(overdue.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper flushes once it has written everything.
        let this = self.get_mut();
        this.overdue = None;
        Pin::new(&mut this.stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

async fn answer(
    request: &Request<Incoming>,
    view: &NodeView,
    ready: &Readiness,
    on_loopback: bool,
) -> Response<Full<Bytes>> {
    // A web page that resolves its own name to 127.0.0.1 must not read this (DNS rebinding).
    if on_loopback && !names_loopback(request) {
        return text(
            StatusCode::FORBIDDEN,
            "the admin endpoint answers to localhost and IP addresses only\n".to_owned(),
        );
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n".to_owned());
    }
    match request.uri().path() {
        "/healthz" => text(StatusCode::OK, "ok\n".to_owned()),
        "/readyz" if view.stands_still() => {
            text(StatusCode::SERVICE_UNAVAILABLE, "all workers stand still\n".to_owned())
        }
        "/readyz" if view.is_stopped() => text(StatusCode::SERVICE_UNAVAILABLE, "overloaded\n".to_owned()),
        "/readyz" if ready.load(Ordering::Acquire) => text(StatusCode::OK, "ready\n".to_owned()),
        "/readyz" => text(StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned()),
        "/metrics" => {
            typed(StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", view.metrics())
        }
        "/config" => json(&view.config()),
        "/sessions" => json(&view.sessions().await),
        "/workers" => json(&view.workers()),
        _ => text(StatusCode::NOT_FOUND, "try /healthz /readyz /metrics /config /sessions /workers\n".to_owned()),
    }
}

fn names_loopback(request: &Request<Incoming>) -> bool {
    let Some(host) = request.headers().get(HOST) else {
        // Browsers, which such a page needs, always send `Host`; HAProxy's checks are HTTP/1.0 without it.
        return request.version() == Version::HTTP_10;
    };
    let Ok(host) = host.to_str() else { return false };
    let Ok(authority) = host.parse::<http::uri::Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

fn json(value: &impl serde::Serialize) -> Response<Full<Bytes>> {
    match serde_json::to_string_pretty(value) {
        Ok(body) => typed(StatusCode::OK, "application/json", body + "\n"),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    typed(status, "text/plain; charset=utf-8", body)
}

fn typed(status: StatusCode, kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

//! HTTP/1.1 of a client, on hyper.
//!
//! In: a connection. Out: its requests in sequence; and, if a request became a tunnel, the bytes of the connection.
//! hyper implements framing, the rules against request smuggling, and `100 Continue` (RFC 9112).

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, HOST};
use http::request::Parts;
use http::{HeaderValue, Request as HttpRequest, Response, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

use super::http::{Client, WatchedIo};
use crate::request::{Origin, from_head};
use crate::session::{self, DownstreamEnd, SessionOutcome, Tunnel};
use crate::worker::Worker;
use hermes_outbound::outbound::post_tunnel::PostTunnel;
use hermes_transport::body::{Body, RequestBody, ResponseBody, TrailerSlot, channel};
use hermes_transport::error::{Error, Side};
use hermes_transport::headers::{self, HYPER_HEADERS};
use hermes_transport::pinned::pinned;
use hermes_transport::runtime::session::{Connection, Drain};
use hermes_transport::stream::ByteStream;

/// The minimum buffer size that hyper accepts.
const HYPER_BUFFER: usize = 8192;

/// Serves a connection until it ends.
pub(crate) async fn serve(worker: &Rc<Worker>, connection: &Rc<Connection>, mut io: WatchedIo, client: Client) {
    let tunnel: Rc<Cell<Option<Box<Tunnel>>>> = Rc::default();
    let client = Rc::new(client);
    io.is_looked_at();
    let trailers = io.trailers().clone();
    let requests = io.follow_requests();
    let service = service_fn(|request: HttpRequest<Incoming>| {
        requests.is_served(!request.body().is_end_stream());
        let (worker, connection, client, tunnel) = (worker.clone(), connection.clone(), client.clone(), tunnel.clone());
        let trailers = headers::takes_trailers(request.headers()).then(|| trailers.clone());
        // Boxed: hyper releases a connection only if the future of its service can be moved.
        pinned(|| async move {
            let mut response = respond(&worker, connection, &client, request, &tunnel).await;
            let is_chunked =
                !response.headers().contains_key(CONTENT_LENGTH) && response.body().size_hint().exact().is_none();
            response.body_mut().trailers = trailers.filter(|_| is_chunked);
            Ok::<_, Error>(response)
        })
    });
    let limits = &worker.generation().snapshot.limits;
    let mut builder = http1::Builder::new();
    // A client may half-close after its requests, and still gets its responses (RFC 9112, 9.6). The sweep detects
    // clients that have left.
    builder.half_close(true);
    builder.max_buf_size(limits.header_bytes.max(HYPER_BUFFER)).max_header_size(limits.header_bytes);
    if limits.header_count != HYPER_HEADERS {
        builder.max_headers(limits.header_count);
    }
    let mut http = builder.serve_connection(TokioIo::new(io), service);
    let mut leaving = Leaving::Not;
    let result = std::future::poll_fn(|cx| {
        if leaving.poll(cx, connection).is_ready() {
            Pin::new(&mut http).graceful_shutdown();
        }
        match http.poll_without_shutdown(cx) {
            Poll::Pending => connection.poll_left(cx).map(Ok),
            ended => ended,
        }
    })
    .await;
    if let Err(error) = &result {
        if error.is_parse_too_large() {
            worker.shared.metrics.limit("headers");
        }
        tracing::debug!(source = %client.source, %error, "an HTTP/1.1 connection ended");
    }
    let parts = http.into_parts();
    let mut io = parts.io.into_inner();
    match tunnel.take() {
        Some(tunnel) if result.is_ok() => {
            let Some(io) = io.into_io() else { return };
            Box::pin(session::relay(DownstreamEnd::Stream(ByteStream::http_tunnel(io, parts.read_buf, None)), *tunnel))
                .await;
        }
        _ => {
            // Sends TLS's close_notify and lets the last response arrive.
            let _ = tokio::io::AsyncWriteExt::shutdown(&mut io).await;
        }
    }
}

/// Grace period before an idle connection of a removed listener closes.
const DRAIN_PAUSE: Duration = Duration::from_millis(500);

/// The drain state of a connection.
enum Leaving {
    Not,
    /// Requests that are in transit when the drain begins are still answered, the last one with `Connection: close`.
    Lingering(Pin<Box<tokio::time::Sleep>>),
    Closing,
}

impl Leaving {
    /// Completes once, when the connection should close as soon as it is idle.
    fn poll(&mut self, cx: &mut Context<'_>, connection: &Connection) -> Poll<()> {
        loop {
            match self {
                Leaving::Closing => return Poll::Pending,
                Leaving::Not => match std::task::ready!(connection.drain.poll(cx)) {
                    Drain::Idle => break,
                    Drain::ListenerRemoved => *self = Leaving::Lingering(Box::pin(tokio::time::sleep(DRAIN_PAUSE))),
                },
                Leaving::Lingering(timer) => {
                    std::task::ready!(timer.as_mut().poll(cx));
                    break;
                }
            }
        }
        *self = Leaving::Closing;
        Poll::Ready(())
    }
}

async fn respond(
    worker: &Rc<Worker>,
    connection: Rc<Connection>,
    client: &Client,
    request: HttpRequest<Incoming>,
    tunnel: &Cell<Option<Box<Tunnel>>>,
) -> Response<H1Body> {
    let (mut parts, incoming) = request.into_parts();
    name_host(&connection, &mut parts);
    let listener = connection.current_listener(worker);
    let origin =
        Origin { worker, listener: &listener, source: client.source, trust: &client.trust, secure: client.secure };
    let body = RequestBody::new(worker, Body::H1(incoming));
    let rest = body.clone();
    let mut leaves = false;
    let served = match from_head(&origin, parts, body) {
        Ok(mut request) => {
            request.came_by(&connection);
            session::serve(worker, request).await
        }
        Err(rejected) => {
            // A proxy in front of this node may have parsed a malformed request differently, including where the
            // request ends.
            leaves = rejected.error.side() == Side::Client;
            SessionOutcome::Response(session::reject(worker, *rejected))
        }
    };
    match served {
        SessionOutcome::Response(mut response) => {
            headers::announce_trailers(response.headers_mut());
            // A server that closes the connection announces it (RFC 9112, section 9.6).
            if leaves || rest.is_abandoned() || connection.drain.get().is_some() {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            response.map(|body| H1Body::new(Inner::Response(body)))
        }
        SessionOutcome::Tunnel(open) => match open.body {
            Some(_) => {
                drop(rest);
                by_post(worker, open)
            }
            None => {
                let mut open = open;
                let (parts, ()) = open.head_parts().into_parts();
                tunnel.set(Some(open));
                Response::from_parts(parts, H1Body::new(Inner::Empty))
            }
        },
    }
}

/// Adds a missing `Host`. HTTP/1.0 may lack it (RFC 1945, section 10), so the address and port that the client
/// connected to replace it.
fn name_host(connection: &Connection, parts: &mut Parts) {
    let is_nameless =
        parts.version == Version::HTTP_10 && !parts.headers.contains_key(HOST) && parts.uri.authority().is_none();
    if is_nameless
        && let Some(local) = connection.local_address()
        && let Ok(host) = HeaderValue::try_from(local.to_string())
    {
        parts.headers.insert(HOST, host);
    }
}

/// Relays a tunnel whose two directions are HTTP bodies. A task copies between them and the upstream, and ends with
/// either.
fn by_post(worker: &Rc<Worker>, mut open: Box<Tunnel>) -> Response<H1Body> {
    let head = open.head_parts();
    let (send, body) = channel();
    let received = open.body.take().and_then(RequestBody::into_body).unwrap_or(Body::Empty);
    worker.spawn(session::relay(DownstreamEnd::Stream(PostTunnel::stream(received, send, None)), *open));
    head.map(|()| H1Body::new(Inner::Tunnel(Body::Channel(body))))
}

/// The response body that hyper sends.
struct H1Body {
    inner: Inner,
    /// Receives the trailers, if the client accepts them and the body is chunked.
    trailers: Option<TrailerSlot>,
}

impl H1Body {
    fn new(inner: Inner) -> Self {
        Self { inner, trailers: None }
    }
}

enum Inner {
    Empty,
    Response(ResponseBody),
    Tunnel(Body),
}

impl HttpBody for H1Body {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = self.get_mut();
        let frame = match &mut this.inner {
            Inner::Empty => Poll::Ready(None),
            Inner::Response(body) => Pin::new(body).poll_frame(cx),
            Inner::Tunnel(body) => Pin::new(body).poll_frame(cx),
        };
        match (frame, &this.trailers) {
            (Poll::Ready(Some(Ok(frame))), Some(slot)) if frame.is_trailers() => {
                frame.into_trailers().into_iter().for_each(|trailers| slot.set(trailers));
                Poll::Ready(None)
            }
            (frame, _) => frame,
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Empty => true,
            Inner::Response(body) => body.is_end_stream(),
            Inner::Tunnel(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Empty => SizeHint::with_exact(0),
            Inner::Response(body) => body.size_hint(),
            Inner::Tunnel(body) => body.size_hint(),
        }
    }
}

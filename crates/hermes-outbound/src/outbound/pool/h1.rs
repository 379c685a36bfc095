//! HTTP/1.1 connections to one endpoint.
//!
//! In: a connection spec. Out: an exclusive connection, either an idle or a new one. The lessee drives it. Nothing
//! drives an idle connection, so a close by the peer is detected when the connection is leased again.

use std::future::Future;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use hermes_net::Io;
use hermes_net::tls::with_alpn;
use http::uri::Scheme;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;

use super::idle::IdlePlace;
use super::queue::Permit;
use super::{ConnectSpec, Leased, Pool};
use crate::outbound::Outbound;
use crate::outbound::connect::{Destination, connect};
use crate::outbound::read_quota::{QuotaSocket, ReadMeter};
use crate::upstream::ClientTls;
use hermes_transport::body::{Attempt, TrailerSlot};
use hermes_transport::error::Error;
use hermes_transport::headers::HYPER_HEADERS;
use hermes_transport::runtime::session::Connection;

/// The minimum limit of hyper's read buffer of an HTTP/1.1 connection, in bytes.
const READ_BUFFER: usize = 64 << 10;

/// An HTTP/1.1 connection, which combines hyper's sender and hyper's connection future.
pub struct H1Connection {
    pub sender: http1::SendRequest<Attempt>,
    connection: http1::Connection<TokioIo<QuotaSocket>, Attempt>,
    meter: ReadMeter,
    trailers: TrailerSlot,
    is_secure: bool,
    /// True if the connection future has completed and must not be polled again.
    pub finished: bool,
    /// True if the connection was idle in the pool before it was leased for the current request.
    pub reused: bool,
    /// The time since which the connection is idle, in milliseconds of the worker's clock.
    pub(super) idle_since: u64,
    pub(super) idle: Option<IdlePlace>,
    /// The only client connection whose requests may use this connection. `None` if requests of all clients may.
    bound: Option<Weak<Connection>>,
    permit: Permit,
}

impl H1Connection {
    /// Drives the connection.
    ///
    /// # Errors
    /// The connection failed.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Result<(), hyper::Error> {
        if self.finished {
            return Ok(());
        }
        match self.connection.poll_without_shutdown(cx) {
            Poll::Ready(result) => {
                self.finished = true;
                result
            }
            Poll::Pending => Ok(()),
        }
    }

    /// Returns the scheme of requests that are sent in origin form on this connection.
    pub fn scheme(&self) -> Scheme {
        if self.is_secure { Scheme::HTTPS } else { Scheme::HTTP }
    }

    /// Returns the meter that limits the reads of this connection.
    pub fn meter(&self) -> &ReadMeter {
        &self.meter
    }

    /// Binds this connection to a client's connection. NTLM and Negotiate authenticate a connection instead of a
    /// request, so the origin attributes all requests on it to that client. With `None`, this connection serves no
    /// further request.
    pub fn bind(&mut self, client: Option<&Rc<Connection>>) {
        self.bound = Some(client.map(Rc::downgrade).unwrap_or_default());
    }

    fn is_bound_to(&self, client: &Rc<Connection>) -> bool {
        self.bound.as_ref().is_some_and(|bound| std::ptr::eq(bound.as_ptr(), Rc::as_ptr(client)))
    }

    /// True if this connection is bound to a client connection that has ended.
    pub(super) fn is_orphaned(&self) -> bool {
        self.bound.as_ref().is_some_and(|bound| bound.strong_count() == 0)
    }

    /// Returns the slot for the trailers of a chunked request.
    pub fn trailers(&self) -> &TrailerSlot {
        &self.trailers
    }

    /// True if another request can be sent on this connection.
    pub fn is_reusable(&self) -> bool {
        !self.finished && self.sender.is_ready()
    }

    /// Returns the underlying connection after `101` or 2xx to CONNECT, the bytes that were already read from it, and
    /// the permit.
    pub async fn into_io(mut self: Box<Self>) -> (Io, Bytes, Permit) {
        // hyper releases the connection once it has processed the end of HTTP on it.
        std::future::poll_fn(|cx| {
            let _ = self.poll(cx);
            if self.finished { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let Self { connection, permit, .. } = *self;
        let parts = connection.into_parts();
        (parts.io.into_inner().into_inner(), parts.read_buf, permit)
    }
}

impl Pool {
    pub(super) async fn lease_h1(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
    ) -> Result<Leased, Error> {
        let mut had_turn = false;
        loop {
            if self.comes_after(worker, had_turn) {
                self.wait(worker, spec.session, had_turn).await?;
                had_turn = true;
            }
            // A connection with a PROXY header is for requests of one source address, and is never reused.
            if !spec.fresh
                && spec.destination.proxy_source.is_none()
                && let Some(connection) = self.take_idle(spec.client)
            {
                return Ok(Leased::H1(connection));
            }
            if !self.is_full(worker) {
                return self.dial_or_idle(worker, spec).await;
            }
            self.wait(worker, spec.session, had_turn).await?;
            had_turn = true;
        }
    }

    /// Dials, and leases an idle connection instead if one becomes free first. This happens in a burst of requests to
    /// an origin with a short accept queue. The dial then continues, and its connection serves a later request, so that
    /// the pool grows to the demand.
    async fn dial_or_idle(self: &Rc<Self>, worker: &Rc<Outbound>, spec: &ConnectSpec<'_>) -> Result<Leased, Error> {
        let permit = Permit::take(&self.open);
        if spec.fresh || spec.destination.proxy_source.is_some() {
            return Ok(Leased::H1(Box::pin(dial_h1(worker, spec, permit)).await?));
        }
        let mut dial = Box::pin(self.dial_standing(worker, spec, permit));
        while let Some(mut free) = self.open.dialing.join(self.open.count.get(), false) {
            tokio::select! {
                biased;
                dialled = &mut dial => return dialled.map(Leased::H1),
                () = free.turn() => {
                    if let Some(connection) = self.take_idle(spec.client) {
                        let (owner, pool) = (worker.clone(), self.clone());
                        worker.spawn(async move {
                            // `probe` polls the connection, because hyper accepts a request only after the first poll.
                            if let Ok(mut connection) = dial.await
                                && probe(&mut connection)
                            {
                                pool.give_back(&owner, connection, true);
                            }
                        });
                        return Ok(Leased::H1(connection));
                    }
                }
            }
        }
        dial.await.map(Leased::H1)
    }

    /// Opens an HTTP/1.1 connection to an endpoint whose configured version is newer, for an upgrade that the newer
    /// version does not support.
    ///
    /// # Errors
    /// The dial failed, or too many requests wait for a connection.
    pub async fn dial_h1_instead(
        &self,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
    ) -> Result<Box<H1Connection>, Error> {
        let permit = self.permit(worker, spec.session).await?;
        let tls =
            spec.destination.tls.map(|tls| ClientTls { config: with_alpn(&tls.config, b"http/1.1"), ..tls.clone() });
        let destination = Destination { tls: tls.as_ref(), ..spec.destination };
        dial_h1(worker, &ConnectSpec { destination, ..*spec }, permit).await
    }

    /// Returns a future that dials and may outlive the request.
    fn dial_standing(
        &self,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
        permit: Permit,
    ) -> impl Future<Output = Result<Box<H1Connection>, Error>> + 'static {
        let (worker, standing) = (worker.clone(), spec.to_owned_spec());
        async move { dial_h1(&worker, &standing.spec(), permit).await }
    }

    /// Takes an idle connection that is bound to this client, or otherwise an unbound one. Returns `None` if the pool
    /// has neither.
    pub(super) fn take_idle(&self, client: Option<&Rc<Connection>>) -> Option<Box<H1Connection>> {
        loop {
            let mut connection = {
                let mut idle = self.idle.borrow_mut();
                let own = client.and_then(|client| idle.iter().rposition(|one| one.is_bound_to(client)));
                let at = own.or_else(|| idle.iter().rposition(|one| one.bound.is_none()))?;
                idle.remove(at)
            };
            if probe(&mut connection) {
                connection.reused = true;
                connection.idle = None;
                return Some(connection);
            }
        }
    }

    /// Closes the longest idle connection that is bound to a client, so that a connection for any client can be opened.
    /// Returns false if the pool has no such connection.
    pub(super) fn close_bound(&self, worker: &Outbound) -> bool {
        let oldest = self.idle.borrow().iter().position(|one| one.bound.is_some());
        let closed = oldest.map(|at| self.idle.borrow_mut().remove(at));
        if closed.is_some() {
            worker.shared.metrics.limit("upstream-bound-connections");
        }
        closed.is_some()
    }

    /// Returns a connection to the pool if another request can be sent on it. Otherwise, or if `shareable` is false,
    /// drops it.
    pub fn give_back(&self, worker: &Outbound, mut connection: Box<H1Connection>, shareable: bool) {
        if shareable && !self.retired.get() && !connection.is_orphaned() && connection.is_reusable() {
            worker.make_room_for_idle();
            connection.idle_since = worker.now();
            connection.idle = Some(worker.idle.enter());
            self.idle.borrow_mut().push(connection);
            self.open.wake_for_idle();
        }
    }
}

async fn dial_h1(worker: &Rc<Outbound>, spec: &ConnectSpec<'_>, permit: Permit) -> Result<Box<H1Connection>, Error> {
    let io = connect(worker, &spec.destination, spec.connect_within).await?;
    Ok(Box::new(handshake_h1(worker, spec, io, permit).await?))
}

pub(super) async fn handshake_h1(
    worker: &Outbound,
    spec: &ConnectSpec<'_>,
    io: Io,
    permit: Permit,
) -> Result<H1Connection, Error> {
    let limits = &worker.snapshot().limits;
    let mut builder = http1::Builder::new();
    builder.max_buf_size(limits.header_bytes.max(READ_BUFFER)).max_header_size(limits.header_bytes);
    if limits.header_count != HYPER_HEADERS {
        builder.max_headers(limits.header_count);
    }
    let (trailers, is_secure) = (TrailerSlot::default(), matches!(io, Io::Tls(_)));
    let (metered, meter) = QuotaSocket::new(io, trailers.clone());
    let (sender, connection) = builder.handshake(TokioIo::new(metered)).await.map_err(|error| Error::Broken {
        peer: spec.destination.label.clone(),
        reason: error.to_string(),
        unprocessed: true,
    })?;
    Ok(H1Connection {
        sender,
        connection,
        meter,
        trailers,
        is_secure,
        finished: false,
        reused: false,
        idle_since: 0,
        idle: None,
        bound: None,
        permit,
    })
}

/// True if an idle connection is still usable. Polls the connection, because nothing polled it while it was idle.
pub(super) fn probe(connection: &mut H1Connection) -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    connection.poll(&mut cx).is_ok() && connection.is_reusable()
}

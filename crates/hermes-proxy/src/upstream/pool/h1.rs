//! HTTP/1.1 connections to one endpoint.
//!
//! In: a wish. Out: a connection of one's own: one that stood idle, or a new one. Whoever holds it drives it,
//! and nobody while it is idle: what the peer did meanwhile is seen when the next one takes it.

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
use super::{Leased, Pool, Wish};
use crate::body::{Attempt, TrailerSlot};
use crate::error::Error;
use crate::headers::HYPER_HEADERS;
use crate::live::Connection;
use crate::upstream::ClientTls;
use crate::upstream::connect::{Destination, connect};
use crate::upstream::metered::{Meter, Metered};
use crate::worker::Worker;

/// What an h1 connection reads ahead.
const READ_BUFFER: usize = 64 << 10;

/// An h1 connection: hyper's two halves, held together.
pub(crate) struct H1Connection {
    pub(crate) sender: http1::SendRequest<Attempt>,
    connection: http1::Connection<TokioIo<Metered>, Attempt>,
    meter: Meter,
    trailers: TrailerSlot,
    is_secure: bool,
    /// The connection future is over: it must not be polled again.
    pub(crate) finished: bool,
    pub(crate) reused: bool,
    pub(super) idle_since: u64,
    pub(super) idle: Option<IdlePlace>,
    /// The only client connection whose requests may use it; `None`: any.
    bound: Option<Weak<Connection>>,
    permit: Permit,
}

impl H1Connection {
    /// Moves the connection on. An error is the connection's.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Result<(), hyper::Error> {
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

    /// The scheme of requests in origin form on this connection.
    pub(crate) fn scheme(&self) -> Scheme {
        if self.is_secure { Scheme::HTTPS } else { Scheme::HTTP }
    }

    /// What is read of it.
    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Binds it to a client's connection: NTLM and Negotiate authenticate a connection instead of a request, so that
    /// the origin takes all its requests for that client's. Without a client it serves no other request.
    pub(crate) fn bind(&mut self, client: Option<&Rc<Connection>>) {
        self.bound = Some(client.map(Rc::downgrade).unwrap_or_default());
    }

    fn is_bound_to(&self, client: &Rc<Connection>) -> bool {
        self.bound.as_ref().is_some_and(|bound| std::ptr::eq(bound.as_ptr(), Rc::as_ptr(client)))
    }

    /// True if the client connection that it is bound to has ended.
    pub(super) fn is_orphaned(&self) -> bool {
        self.bound.as_ref().is_some_and(|bound| bound.strong_count() == 0)
    }

    /// Sends the trailers of a chunked request.
    pub(crate) fn trailers(&self) -> &TrailerSlot {
        &self.trailers
    }

    /// Can it take another request?
    pub(crate) fn is_reusable(&self) -> bool {
        !self.finished && self.sender.is_ready()
    }

    /// The bare connection after `101` or a CONNECT's 2xx, with what was read beyond it, and its
    /// place in the pool.
    pub(crate) async fn into_io(mut self: Box<Self>) -> (Io, Bytes, Permit) {
        // hyper lets go of the connection once it has seen that it is no longer its own.
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
    pub(super) async fn lease_h1(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Error> {
        let mut had_turn = false;
        loop {
            if self.comes_after(worker, had_turn) {
                self.wait(worker, wish.session, had_turn).await?;
                had_turn = true;
            }
            // With a PROXY header a connection belongs to one source: it is never shared.
            if !wish.fresh
                && wish.destination.proxy_source.is_none()
                && let Some(connection) = self.take_idle(wish.client)
            {
                return Ok(Leased::H1(connection));
            }
            if !self.is_full(worker) {
                return self.dial_or_idle(worker, wish).await;
            }
            self.wait(worker, wish.session, had_turn).await?;
            had_turn = true;
        }
    }

    /// Dials, unless a connection comes free before that is done. In a burst the first are served
    /// before the last dials get through, where the origin's accept queue is short. A dial that lost
    /// goes on by itself and is there for the next: the pool grows to what is asked of it.
    async fn dial_or_idle(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Error> {
        let permit = Permit::take(&self.open);
        if wish.fresh || wish.destination.proxy_source.is_some() {
            return Ok(Leased::H1(Box::pin(dial_h1(worker, wish, permit)).await?));
        }
        let mut dial = Box::pin(self.dial_standing(worker, wish, permit));
        while let Some(mut free) = self.open.dialing.join(self.open.count.get(), false) {
            tokio::select! {
                biased;
                dialled = &mut dial => return dialled.map(Leased::H1),
                () = free.turn() => {
                    if let Some(connection) = self.take_idle(wish.client) {
                        let (owner, pool) = (worker.clone(), self.clone());
                        worker.spawn(async move {
                            // hyper says that it takes a request once it was polled.
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

    /// Dials an HTTP/1.1 connection to an endpoint with a newer version, for upgrades that this version does not carry
    /// there.
    ///
    /// # Errors
    /// The dial failed, or too many requests wait for a connection.
    pub(crate) async fn dial_h1_instead(
        &self,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
    ) -> Result<Box<H1Connection>, Error> {
        let permit = self.permit(worker, wish.session).await?;
        let tls =
            wish.destination.tls.map(|tls| ClientTls { config: with_alpn(&tls.config, b"http/1.1"), ..tls.clone() });
        let destination = Destination { tls: tls.as_ref(), ..wish.destination };
        dial_h1(worker, &Wish { destination, ..*wish }, permit).await
    }

    /// A dial that may outlive the request that began it.
    fn dial_standing(
        &self,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        permit: Permit,
    ) -> impl Future<Output = Result<Box<H1Connection>, Error>> + 'static {
        let (worker, standing) = (worker.clone(), wish.standing());
        async move { dial_h1(&worker, &standing.wish(), permit).await }
    }

    /// Takes an idle connection that is bound to this client, or else an unbound one.
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

    /// Closes the longest idle bound connection, to make room for one that others may use. False if there is none.
    pub(super) fn close_bound(&self, worker: &Worker) -> bool {
        let oldest = self.idle.borrow().iter().position(|one| one.bound.is_some());
        let closed = oldest.map(|at| self.idle.borrow_mut().remove(at));
        if closed.is_some() {
            worker.shared.metrics.limit("upstream-bound-connections");
        }
        closed.is_some()
    }

    /// Gives an h1 connection back, if it can take another request.
    pub(crate) fn give_back(&self, worker: &Worker, mut connection: Box<H1Connection>, shareable: bool) {
        if shareable && !self.retired.get() && !connection.is_orphaned() && connection.is_reusable() {
            worker.make_room_for_idle();
            connection.idle_since = worker.now();
            connection.idle = Some(worker.idle.enter());
            self.idle.borrow_mut().push(connection);
            self.open.wake_for_idle();
        }
    }
}

async fn dial_h1(worker: &Rc<Worker>, wish: &Wish<'_>, permit: Permit) -> Result<Box<H1Connection>, Error> {
    let io = connect(worker, &wish.destination, wish.connect_within).await?;
    Ok(Box::new(handshake_h1(worker, wish, io, permit).await?))
}

pub(super) async fn handshake_h1(
    worker: &Worker,
    wish: &Wish<'_>,
    io: Io,
    permit: Permit,
) -> Result<H1Connection, Error> {
    let limits = &worker.generation().snapshot.limits;
    let mut builder = http1::Builder::new();
    builder.max_buf_size(limits.header_bytes.max(READ_BUFFER)).max_header_size(limits.header_bytes);
    if limits.header_count != HYPER_HEADERS {
        builder.max_headers(limits.header_count);
    }
    let (trailers, is_secure) = (TrailerSlot::default(), matches!(io, Io::Tls(_)));
    let (metered, meter) = Metered::new(io, trailers.clone());
    let (sender, connection) = builder.handshake(TokioIo::new(metered)).await.map_err(|error| Error::Broken {
        peer: wish.destination.label.clone(),
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

/// Is an idle connection still open? Looks at what the peer did while nobody did.
pub(super) fn probe(connection: &mut H1Connection) -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    connection.poll(&mut cx).is_ok() && connection.is_reusable()
}

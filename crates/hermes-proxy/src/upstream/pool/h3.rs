//! HTTP/3 connections to an endpoint.
//!
//! In: a wish. Out: a connection that has begun, and is driven. Never: a wish without TLS; `check` knows.

use std::future::{Future, pending};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use hermes_net::quic;
use hermes_wire::h3::{Code, Settings};
use tokio::time::Instant;

use super::fallback::Way;
use super::queue::Permit;
use super::shared::{Lease, SharedConnection, Speaks};
use super::{ADDED_BYTES, Pool, Wish};
use crate::error::{Error, NO_CONNECTION, NO_SETTINGS};
use crate::h3::{Link, Windows};
use crate::upstream::connect::{Destination, addresses, count, guard};
use crate::worker::Worker;

impl Pool {
    pub(super) async fn dial_h3(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        permit: Permit,
    ) -> Result<Rc<SharedConnection>, Error> {
        let deadline = Instant::now() + wish.connect_within;
        let begun = match tokio::time::timeout_at(deadline, dial(worker, &wish.destination)).await {
            Ok(Ok(connection)) => self.adopt_h3(worker, wish, connection, permit, deadline).await,
            Ok(Err(error)) => Err(error),
            Err(_) => Err(late(wish, NO_CONNECTION)),
        };
        count(worker, &wish.destination, begun.is_ok());
        begun
    }

    /// Speaks HTTP/3 on a connection that was made elsewhere, and that nobody gives up because its path is dark. A place
    /// on it.
    ///
    /// # Errors
    /// As of a dial.
    pub(crate) async fn adopt_quic(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        connection: quic::Connection,
        deadline: Instant,
    ) -> Result<Lease, Error> {
        // Without TLS of its own there is no way to look for.
        let destination = Destination { tls: None, ..wish.destination };
        let wish = Wish { destination, ..*wish };
        let shared = self.adopt_h3(worker, &wish, connection, Permit::take(&self.open), deadline).await?;
        Ok(Lease::take(&shared, self, worker, false))
    }

    async fn adopt_h3(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        connection: quic::Connection,
        permit: Permit,
        deadline: Instant,
    ) -> Result<Rc<SharedConnection>, Error> {
        let way = Way::of(wish, connection.remote_address());
        let ours = settings(worker);
        let link = Link::new(connection, false, windows(worker));
        let shared = SharedConnection::new(Speaks::H3(link.clone()), worker.now());
        let (here, driven, driven_link) = (worker.clone(), shared.clone(), link.clone());
        let (pool, peer) = (self.clone(), wish.destination.label.clone());
        self.share(worker, &shared, permit, async move {
            let watching = async {
                let Some(way) = way else { return pending().await };
                pool.watch_h3(&here, &driven, &driven_link, &way, &peer).await;
            };
            tokio::select! {
                () = drive_h3(&here, &driven_link, &driven, ours) => {}
                () = watching => {}
                () = muteness(&driven_link, deadline) => {}
            }
        });
        // What it can do has to be known before it is asked for a tunnel. It is in use meanwhile: a pool that is left
        // by a reload closes what is not, and those who wait are served all the same.
        let _in_use = Lease::take(&shared, self, worker, false);
        match link.settled().await {
            None if Instant::now() >= deadline => Err(late(wish, NO_SETTINGS)),
            _ => Ok(shared),
        }
    }
}

/// Ends a connection whose peer has not said until then what it takes. Whoever dialled may be served by another one
/// meanwhile, and wait no more.
async fn muteness(link: &Link, deadline: Instant) {
    tokio::time::sleep_until(deadline).await;
    if link.settings().is_some() {
        pending::<()>().await;
    }
    link.close(Code::MissingSettings, "no SETTINGS came in time");
}

fn late(wish: &Wish<'_>, missing: &'static str) -> Error {
    Error::ConnectTimeout { peer: wish.destination.label.clone(), missing, after: wish.connect_within }
}

/// A connection of QUIC to an endpoint, which has proven who it is.
///
/// # Errors
/// Which endpoint could not be reached, and why.
pub(crate) async fn dial(worker: &Worker, to: &Destination<'_>) -> Result<quic::Connection, Error> {
    let fault = |error: io::Error| Error::Connect { peer: to.label.clone(), source: Arc::new(error) };
    let tls = to.tls.and_then(|tls| Some((tls.quic.clone()?, &tls.name)));
    let (config, name) = tls.ok_or_else(|| Error::Internal("HTTP/3 without TLS".to_owned()))?;
    let mut addresses = addresses(worker, to.host, to.reach).await?;
    if to.guarded {
        addresses = guard(worker, (to.host, to.port), addresses).await?;
    }
    let connected = hermes_net::dial::first(&addresses, |ip| {
        let (endpoint, config, name) = (worker.quic_client(ip.is_ipv4()), config.clone(), name.clone());
        let address = (ip, to.port).into();
        async move { quic::connect(&endpoint?, config, address, &name).await }
    });
    connected.await.map_err(fault)
}

/// What we let a peer send before it is read.
pub(super) fn windows(worker: &Worker) -> Windows {
    let limits = &worker.generation().snapshot.limits;
    Windows { stream: limits.stream_window, connection: limits.connection_window }
}

/// What we say that we take.
pub(super) fn settings(worker: &Worker) -> Settings {
    let limits = &worker.generation().snapshot.limits;
    let most = limits.header_bytes as u64 + u64::from(ADDED_BYTES);
    Settings { max_field_section: Some(most), extended_connect: false, datagrams: true }
}

pub(super) async fn drive_h3(worker: &Worker, link: &Link, shared: &SharedConnection, ours: Settings) {
    let mut driver = pin!(link.drive(worker, ours, None));
    std::future::poll_fn(|cx| {
        if shared.poll_done(cx).is_ready() {
            link.close(Code::NoError, "");
            return Poll::Ready(());
        }
        let polled = driver.as_mut().poll(cx);
        shared.look_for_goaway(worker);
        polled
    })
    .await;
}

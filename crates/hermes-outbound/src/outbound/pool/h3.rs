//! HTTP/3 connections to an endpoint.
//!
//! In: a connection spec. Out: a connection that a task of the worker drives and monitors. `check` rejects HTTP/3
//! without TLS.

use std::future::{Future, pending};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use hermes_net::quic;
use hermes_wire::h3::{Code, Settings};
use tokio::time::Instant;

use super::fallback::Redial;
use super::queue::Permit;
use super::shared::{Lease, SharedConnection, SharedProtocol};
use super::{ADDED_BYTES, ConnectSpec, Pool};
use crate::outbound::Outbound;
use crate::outbound::connect::{Destination, addresses, count, guard};
use hermes_transport::error::{Error, NO_CONNECTION, NO_SETTINGS};
use hermes_transport::h3::{Link, Windows};

impl Pool {
    pub(super) async fn dial_h3(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
        permit: Permit,
    ) -> Result<Rc<SharedConnection>, Error> {
        let deadline = Instant::now() + spec.connect_within;
        let begun = match tokio::time::timeout_at(deadline, dial(worker, &spec.destination)).await {
            Ok(Ok(connection)) => self.adopt_h3(worker, spec, connection, permit, deadline).await,
            Ok(Err(error)) => Err(error),
            Err(_) => Err(late(spec, NO_CONNECTION)),
        };
        count(worker, &spec.destination, begun.is_ok());
        begun
    }

    /// Starts HTTP/3 on a connection that the caller has opened, adds it to the pool, and leases a stream on it. The
    /// connection is not closed if its path fails.
    ///
    /// # Errors
    /// The peer sent no SETTINGS before `deadline`.
    pub async fn adopt_quic(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
        connection: quic::Connection,
        deadline: Instant,
    ) -> Result<Lease, Error> {
        // Without a TLS configuration, `adopt_h3` does not monitor the path.
        let destination = Destination { tls: None, ..spec.destination };
        let spec = ConnectSpec { destination, ..*spec };
        let shared = self.adopt_h3(worker, &spec, connection, Permit::take(&self.open), deadline).await?;
        Ok(Lease::take(&shared, self, worker, false))
    }

    async fn adopt_h3(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
        connection: quic::Connection,
        permit: Permit,
        deadline: Instant,
    ) -> Result<Rc<SharedConnection>, Error> {
        let redial = Redial::of(spec, connection.remote_address());
        let ours = settings(worker);
        let link = Link::new(connection, false, windows(worker));
        let shared = SharedConnection::new(SharedProtocol::H3(link.clone()), worker.now());
        let (here, driven, driven_link) = (worker.clone(), shared.clone(), link.clone());
        let (pool, peer) = (self.clone(), spec.destination.label.clone());
        self.share(worker, &shared, permit, async move {
            let watching = async {
                let Some(redial) = redial else { return pending().await };
                pool.watch_h3(&here, &driven, &driven_link, &redial, &peer).await;
            };
            tokio::select! {
                () = drive_h3(&here, &driven_link, &driven, ours) => {}
                () = watching => {}
                () = muteness(&driven_link, deadline) => {}
            }
        });
        // The peer's SETTINGS must have arrived before a tunnel is requested. During this wait, the lease marks the
        // connection as used: if a reload retires the pool, unused connections are closed, but waiters must still be
        // served.
        let _in_use = Lease::take(&shared, self, worker, false);
        match link.settled().await {
            None if Instant::now() >= deadline => Err(late(spec, NO_SETTINGS)),
            _ => Ok(shared),
        }
    }
}

/// Closes a connection whose peer sent no SETTINGS before the deadline, even if no request waits for them any more.
/// Returns only then.
async fn muteness(link: &Link, deadline: Instant) {
    tokio::time::sleep_until(deadline).await;
    if link.settings().is_some() {
        pending::<()>().await;
    }
    link.close(Code::MissingSettings, "timeout: the peer sent no SETTINGS");
}

fn late(spec: &ConnectSpec<'_>, missing: &'static str) -> Error {
    Error::ConnectTimeout { peer: spec.destination.label.clone(), missing, after: spec.connect_within }
}

/// Opens an authenticated QUIC connection to an endpoint.
///
/// # Errors
/// The host did not resolve, an address is not permitted, or the handshake failed.
pub async fn dial(worker: &Outbound, to: &Destination<'_>) -> Result<quic::Connection, Error> {
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

/// Returns the flow-control windows that this node grants to peers.
pub(super) fn windows(worker: &Outbound) -> Windows {
    let limits = &worker.snapshot().limits;
    Windows { stream: limits.stream_window, connection: limits.connection_window }
}

/// Returns the SETTINGS that this node sends.
pub(super) fn settings(worker: &Outbound) -> Settings {
    let limits = &worker.snapshot().limits;
    let most = limits.header_bytes as u64 + u64::from(ADDED_BYTES);
    Settings { max_field_section: Some(most), extended_connect: false, datagrams: true }
}

pub(super) async fn drive_h3(worker: &Outbound, link: &Link, shared: &SharedConnection, ours: Settings) {
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

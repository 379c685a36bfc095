//! HTTP/3 where QUIC passes, HTTP/2 where it does not.
//!
//! In: a wish for HTTP/3. Out: a connection of either, and a word about it where it is the other one. QUIC has
//! a head start; who blocks UDP, or has paths too narrow for it (RFC 9000, section 14: 1,200 bytes), is served
//! over TCP at the same address. A connection that has lost the way is given up: its streams begin anew.

use std::cell::Cell;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use hermes_net::quic;

use super::queue::Permit;
use super::shared::SharedConnection;
use super::{Pool, Wish};
use crate::error::Error;
use crate::h3::Link;
use crate::worker::Worker;

/// So long QUIC's handshake is waited for before TCP is tried beside it.
const HEAD_START: Duration = Duration::from_millis(700);
/// After QUIC failed where TCP passed, it is not tried again for so long (milliseconds).
const AVOID: u64 = 30_000;
/// A connection is looked at so often.
const LOOK: Duration = Duration::from_millis(250);
/// With something on its way, and nothing heard for so long, the path is dark.
const DARK: Duration = Duration::from_secs(2);
/// Lost packets of so many bytes may have been too long for the path.
const LONG: u64 = 1000;
/// So long a new handshake, of packets as long as QUIC's shortest may be, is waited for: a lost one is sent again after a
/// second (RFC 9002, section 6.2.2), and a lossy path is none that is too narrow.
const PROBE: Duration = Duration::from_millis(1300);
/// A path that was found wide enough is not doubted again for so long; doubles up to the last.
const DOUBT_AGAIN: Duration = Duration::from_secs(4);
const LAST_DOUBT: Duration = Duration::from_secs(64);

/// Until when QUIC is avoided, in milliseconds of the worker's clock.
#[derive(Default)]
pub(super) struct Avoids(Cell<u64>);

impl Avoids {
    pub(super) fn holds(&self, now: u64) -> bool {
        self.0.get() > now
    }
}

/// Where a connection leads, to dial it once more.
pub(super) struct Way {
    config: quic::ClientConfig,
    address: SocketAddr,
    name: Arc<str>,
}

impl Way {
    pub(super) fn of(wish: &Wish<'_>, address: SocketAddr) -> Option<Self> {
        let tls = wish.destination.tls?;
        Some(Self { config: tls.quic.clone()?, address, name: tls.name.clone() })
    }
}

impl Pool {
    /// Dials by QUIC, and by TCP where that does not answer.
    pub(super) async fn dial_h3_or_h2(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        permit: Permit,
    ) -> Result<Rc<SharedConnection>, Error> {
        if self.avoids_quic.holds(worker.now()) {
            return self.dial_h2(worker, wish, permit).await;
        }
        let by_quic = pin!(self.dial_h3(worker, wish, permit));
        let head_start = pin!(tokio::time::sleep(HEAD_START));
        let (failure, by_quic) = match select(by_quic, head_start).await {
            Either::Left((Ok(connection), _)) => return Ok(connection),
            Either::Left((Err(error), _)) => (Some(error), None),
            Either::Right(((), by_quic)) => (None, Some(by_quic)),
        };
        let by_tcp = pin!(self.dial_h2(worker, wish, Permit::take(&self.open)));
        let result = match by_quic {
            Some(by_quic) => first_of(by_quic, by_tcp).await,
            None => by_tcp.await.map_err(|_| failure.unwrap_or_else(|| Error::Internal("no failure".to_owned()))),
        };
        if result.as_ref().is_ok_and(|connection| !connection.is_h3()) {
            self.avoid_quic(worker, wish.destination.label, "its handshake is not answered");
        }
        result
    }

    /// From now on HTTP/2, for a while, and says so.
    fn avoid_quic(&self, worker: &Worker, peer: &str, reason: &str) {
        self.avoids_quic.0.set(worker.now() + AVOID);
        worker.shared.metrics.quic_fallbacks.inc();
        tracing::warn!(peer, reason, "QUIC does not get through; HTTP/2 is used instead");
    }

    /// Watches a connection until its path is dark, or too narrow for QUIC. Then it is ended.
    pub(super) async fn watch_h3(
        &self,
        worker: &Worker,
        shared: &SharedConnection,
        link: &Link,
        way: &Way,
        peer: &str,
    ) {
        let reason = darkness(worker, shared, link, way).await;
        self.avoid_quic(worker, peer, reason);
        shared.close();
        link.connection.close(quic::VarInt::from_u32(0), reason.as_bytes());
    }
}

/// The first of the two that succeeds; of two failures that of the first.
async fn first_of<T>(
    one: impl Future<Output = Result<T, Error>> + Unpin,
    other: impl Future<Output = Result<T, Error>> + Unpin,
) -> Result<T, Error> {
    match select(one, other).await {
        Either::Left((Ok(value), _)) | Either::Right((Ok(value), _)) => Ok(value),
        Either::Left((Err(error), other)) => other.await.map_err(|_| error),
        Either::Right((Err(_), one)) => one.await,
    }
}

/// Ready with the reason, where nothing is heard any more though something was sent, or long packets are lost
/// and no new handshake comes through.
async fn darkness(worker: &Worker, shared: &SharedConnection, link: &Link, way: &Way) -> &'static str {
    let mut look = tokio::time::interval(LOOK);
    let mut before = link.connection.stats();
    let (mut silent, mut doubt_again) = (Duration::ZERO, DOUBT_AGAIN);
    let mut trusted_until = tokio::time::Instant::now();
    let mut arrived = link.arrived();
    loop {
        look.tick().await;
        let now = link.connection.stats();
        let is_heard = now.udp_rx.datagrams > before.udp_rx.datagrams;
        let is_owed = now.udp_tx.datagrams > before.udp_tx.datagrams || silent > Duration::ZERO;
        silent = if is_heard || !is_owed || shared.is_unused() { Duration::ZERO } else { silent + LOOK };
        if silent >= DARK {
            return "nothing is heard of it";
        }
        let lost = now.path.lost_packets.saturating_sub(before.path.lost_packets);
        let bytes = now.path.lost_bytes.saturating_sub(before.path.lost_bytes);
        before = now;
        // Where others of that length arrive, losses say nothing of the path's width.
        let is_wide = std::mem::replace(&mut arrived, link.arrived()) != arrived;
        if is_wide || lost == 0 || bytes / lost < LONG || tokio::time::Instant::now() < trusted_until {
            continue;
        }
        let still = || link.arrived() == arrived && link.connection.close_reason().is_none();
        if !shakes_hands(worker, way).await && still() {
            return "its packets are too long for the path";
        }
        trusted_until = tokio::time::Instant::now() + doubt_again;
        doubt_again = (2 * doubt_again).min(LAST_DOUBT);
    }
}

/// A handshake begins with packets of 1,200 bytes: where they pass, the path is wide enough.
async fn shakes_hands(worker: &Worker, way: &Way) -> bool {
    let Ok(endpoint) = worker.quic_client(way.address.is_ipv4()) else { return true };
    let Ok(connecting) = endpoint.connect_with(way.config.clone(), way.address, &way.name) else { return true };
    match tokio::time::timeout(PROBE, connecting).await {
        Ok(Ok(connection)) => {
            connection.close(quic::VarInt::from_u32(0), b"");
            true
        }
        // Whoever refuses has heard us.
        Ok(Err(_)) => true,
        Err(_) => false,
    }
}

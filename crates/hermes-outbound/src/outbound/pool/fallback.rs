//! Falls back from HTTP/3 to HTTP/2 if the path does not carry QUIC.
//!
//! In: a connection spec for HTTP/3. Out: a connection of either version, and a log line about a fallback. QUIC has a
//! head start over TCP. On networks that block UDP, or whose MTU is too small for QUIC (1,200 bytes; RFC 9000, section
//! 14), TCP to the same address is used. A QUIC connection whose path fails is closed, and its requests are sent again.
//! After a while QUIC is dialled again in addition to TCP, and replaces it on success.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use hermes_net::quic;

use super::queue::Permit;
use super::shared::SharedConnection;
use super::{ConnectSpec, Pool};
use crate::outbound::Outbound;
use hermes_transport::error::{Error, NO_CONNECTION};
use hermes_transport::h3::Link;

/// The time for which only the QUIC handshake runs before TCP is dialled in parallel.
pub const HEAD_START: Duration = Duration::from_millis(700);
/// The time for which QUIC is not dialled after it failed and TCP succeeded, in milliseconds. Each failure doubles it.
const AVOID: u64 = 30_000;
/// The maximum time for which QUIC is not dialled, in milliseconds.
const LAST_AVOID: u64 = 16 * AVOID;
/// The interval at which the path of a connection is checked.
pub(super) const PATH_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// The time after which a path with unacknowledged data counts as dark, that is, as interrupted.
pub(super) const DARK_AFTER: Duration = Duration::from_secs(2);
/// The number of round trips after which a path with unacknowledged data counts as dark, if that is longer.
pub(super) const DARK_ROUND_TRIPS: u32 = 3;
/// The average size in bytes of lost packets from which on they may have exceeded the path MTU.
const LARGE_PACKET_BYTES: u64 = 1000;
/// The timeout of a test handshake, whose first packets have QUIC's minimum size. A lost packet is sent again after a
/// second (RFC 9002, section 6.2.2), so a lossy path is not mistaken for one with a small MTU.
const PROBE: Duration = Duration::from_millis(1300);
/// The time after a successful test handshake until the next one. Each success doubles it.
const FIRST_RETEST_DELAY: Duration = Duration::from_secs(4);
/// The maximum time between two test handshakes.
const LAST_DOUBT: Duration = Duration::from_secs(64);

/// The record of QUIC failures of one pool, which decides whether QUIC is dialled.
#[derive(Default)]
pub(super) struct QuicAvoidance {
    /// The time until which QUIC is not dialled, in milliseconds of the worker's clock.
    until: Cell<u64>,
    /// The number of failures in succession.
    failures: Cell<u32>,
    /// The addresses of this host when the avoidance began. If they change, the host may be in another network, which
    /// may carry QUIC.
    network: RefCell<Arc<HashSet<IpAddr>>>,
    /// True while a task dials QUIC in addition to an HTTP/2 connection.
    is_tried: Cell<bool>,
    /// The time when a path that had carried QUIC for at least [`AVOID`] was last found dark; 0 if never.
    dark_at: Cell<u64>,
}

impl QuicAvoidance {
    /// True if QUIC should not be dialled now.
    pub(super) fn holds(&self, worker: &Outbound) -> bool {
        self.until.get() > worker.now() && *self.network.borrow() == worker.shared.own_addresses()
    }

    /// True if failures are recorded that still influence later decisions.
    pub(super) fn counts(&self, now: u64) -> bool {
        let is_known = self.dark_at.get() > 0 || self.failures.get() > 0;
        is_known && now < self.dark_at.get().max(self.until.get()) + LAST_AVOID
    }

    /// Records that a path became dark after it had carried QUIC for a while. Returns true if this happened before on
    /// an earlier connection, so that the network probably blocks QUIC. Connections that existed at the same time count
    /// as one event.
    fn is_dark_again(&self, began: u64, now: u64) -> bool {
        let before = self.dark_at.get();
        let is_again = before > 0 && began >= before && self.counts(now);
        self.dark_at.set(now.max(1));
        is_again
    }

    fn begin(&self, worker: &Outbound) {
        let network = worker.shared.own_addresses();
        if self.network.replace(network.clone()) != network {
            self.failures.set(0);
        }
        let failures = self.failures.get();
        self.failures.set(failures.saturating_add(1));
        self.until.set(worker.now() + (AVOID << failures.min(16)).min(LAST_AVOID));
    }
}

/// The target of a test handshake.
pub(super) struct Redial {
    config: quic::ClientConfig,
    address: SocketAddr,
    name: Arc<str>,
}

impl Redial {
    pub(super) fn of(spec: &ConnectSpec<'_>, address: SocketAddr) -> Option<Self> {
        let tls = spec.destination.tls?;
        Some(Self { config: tls.quic.clone()?, address, name: tls.name.clone() })
    }
}

impl Pool {
    /// Opens a connection over QUIC, or over TCP if QUIC fails, is not answered in time, or is avoided.
    pub(super) async fn dial_h3_or_h2(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
        permit: Permit,
    ) -> Result<Rc<SharedConnection>, Error> {
        if self.avoids_quic.holds(worker) {
            return self.dial_h2(worker, spec, permit).await;
        }
        let by_quic = pin!(self.dial_h3(worker, spec, permit));
        let head_start = pin!(tokio::time::sleep(HEAD_START));
        let begun = select(by_quic, head_start).await;
        let by_tcp = pin!(self.dial_h2(worker, spec, Permit::take(&self.open)));
        let (reason, result) = match begun {
            Either::Left((Ok(connection), _)) => return Ok(connection),
            Either::Left((Err(failure), _)) => {
                (failure.to_string(), by_tcp.await.map_err(|other| telling(failure, other)))
            }
            Either::Right(((), by_quic)) => {
                ("no response to the QUIC handshake".to_owned(), first_of(by_quic, by_tcp, telling).await)
            }
        };
        if result.as_ref().is_ok_and(|connection| !connection.is_h3()) {
            self.avoid_quic(worker, spec.destination.label, &reason);
        }
        result
    }

    /// Dials QUIC in a task while HTTP/2 is the fallback, unless QUIC is avoided. If the dial succeeds, later requests
    /// use HTTP/3.
    pub(super) fn try_quic_again(self: &Rc<Self>, worker: &Rc<Outbound>, spec: &ConnectSpec<'_>) {
        let avoids = &self.avoids_quic;
        if avoids.is_tried.get() || self.dialing_for_all.get() || avoids.holds(worker) {
            return;
        }
        let takes = |other: &Rc<SharedConnection>| other.is_h3() && other.has_room() && other.is_alive();
        if self.shared.borrow().iter().any(takes) {
            return self.leave_h2(worker, spec.destination.label);
        }
        avoids.is_tried.set(true);
        // The new connection replaces existing ones, so the pool may exceed its limit of connections for a moment.
        let (permit, standing) = (Permit::take(&self.open), spec.to_owned_spec());
        let (pool, here) = (self.clone(), worker.clone());
        worker.spawn(async move {
            let spec = standing.spec();
            let dialled = pool.dial_h3(&here, &spec, permit).await;
            pool.avoids_quic.is_tried.set(false);
            match dialled {
                Ok(connection) if connection.has_room() => pool.leave_h2(&here, spec.destination.label),
                Ok(connection) => {
                    connection.retire();
                    pool.avoids_quic.begin(&here);
                }
                Err(error) => {
                    tracing::debug!(peer = %spec.destination.label, %error, "QUIC still does not get through");
                    pool.avoids_quic.begin(&here);
                }
            }
        });
    }

    /// Drains all HTTP/2 connections, because QUIC works again. Flows that can move use HTTP/3.
    fn leave_h2(&self, worker: &Outbound, peer: &str) {
        tracing::info!(peer, "QUIC works again");
        for connection in self.shared.borrow().iter().filter(|connection| !connection.is_h3()) {
            connection.leave(worker);
        }
    }

    /// Avoids QUIC for a while, and logs this. Several connections that fail at the same time count as one failure.
    fn avoid_quic(&self, worker: &Outbound, peer: &str, reason: &str) {
        if self.avoids_quic.holds(worker) {
            return;
        }
        self.avoids_quic.begin(worker);
        worker.shared.metrics.quic_fallbacks.inc();
        tracing::warn!(peer, reason, "QUIC does not get through; HTTP/2 is used instead");
    }

    /// Monitors the path of a connection until it is dark or its MTU is too small for QUIC. Then closes the connection.
    pub(super) async fn watch_h3(
        &self,
        worker: &Outbound,
        shared: &SharedConnection,
        link: &Link,
        redial: &Redial,
        peer: &str,
    ) {
        let began = worker.now();
        let reason = darkness(worker, shared, link, redial).await;
        let (avoids, now) = (&self.avoids_quic, worker.now());
        let got_through = now >= began + AVOID;
        // After a single event, an outage of the peer or the path is the likelier cause, so QUIC is dialled again. A
        // repeated event suggests a middlebox that permits QUIC at first and blocks it later.
        let is_darkness = got_through && reason == DARKNESS;
        let is_again = is_darkness && avoids.is_dark_again(began, now);
        if got_through && !is_again {
            avoids.failures.set(0);
        }
        if is_darkness && !is_again {
            tracing::warn!(peer, reason, "closing a QUIC connection");
        } else {
            self.avoid_quic(worker, peer, reason);
        }
        shared.close();
        link.connection.close(quic::VarInt::from_u32(0), reason.as_bytes());
    }
}

/// Returns the value of the future that succeeds first. If both fail, `telling` chooses between the two errors.
pub async fn first_of<T, E>(
    one: impl Future<Output = Result<T, E>> + Unpin,
    other: impl Future<Output = Result<T, E>> + Unpin,
    telling: fn(E, E) -> E,
) -> Result<T, E> {
    match select(one, other).await {
        Either::Left((Ok(value), _)) | Either::Right((Ok(value), _)) => Ok(value),
        Either::Left((Err(error), other)) => other.await.map_err(|second| telling(error, second)),
        Either::Right((Err(second), one)) => one.await.map_err(|error| telling(error, second)),
    }
}

/// Returns the more specific of the two errors. A timeout of the QUIC handshake is the less specific one.
fn telling(by_quic: Error, by_tcp: Error) -> Error {
    if matches!(by_quic, Error::ConnectTimeout { missing: NO_CONNECTION, .. }) { by_tcp } else { by_quic }
}

const DARKNESS: &str = "no packet is answered";

/// Waits until the path of a connection fails, and returns the reason: sent data is not acknowledged, or large packets
/// are lost and a test handshake fails.
async fn darkness(worker: &Outbound, shared: &SharedConnection, link: &Link, redial: &Redial) -> &'static str {
    let mut look = tokio::time::interval(PATH_CHECK_INTERVAL);
    let mut before = link.connection.stats();
    let (mut silent, mut doubt_again) = (Duration::ZERO, FIRST_RETEST_DELAY);
    let mut trusted_until = tokio::time::Instant::now();
    let (mut arrived, mut answered) = (link.arrived(), link.answered());
    loop {
        look.tick().await;
        let now = link.connection.stats();
        // Received data does not count, because a path may fail in one direction only, while the peer continues to
        // send.
        let is_heard = std::mem::replace(&mut answered, link.answered()) != answered;
        let is_owed = answerable(&now) > answerable(&before) || silent > Duration::ZERO;
        silent = if is_heard || !is_owed || shared.is_unused() { Duration::ZERO } else { silent + PATH_CHECK_INTERVAL };
        if silent >= DARK_AFTER.max(DARK_ROUND_TRIPS * now.path.rtt) {
            return DARKNESS;
        }
        let lost = now.path.lost_packets.saturating_sub(before.path.lost_packets);
        let bytes = now.path.lost_bytes.saturating_sub(before.path.lost_bytes);
        before = now;
        // If other large packets are acknowledged, the losses are not caused by the path MTU.
        let is_wide = std::mem::replace(&mut arrived, link.arrived()) != arrived;
        if is_wide || lost == 0 || bytes / lost < LARGE_PACKET_BYTES || tokio::time::Instant::now() < trusted_until {
            continue;
        }
        let still = || link.arrived() == arrived && link.connection.close_reason().is_none();
        if !shakes_hands(worker, redial).await && still() {
            return "QUIC packets exceed the MTU of the path";
        }
        trusted_until = tokio::time::Instant::now() + doubt_again;
        doubt_again = (2 * doubt_again).min(LAST_DOUBT);
    }
}

/// Returns the number of sent frames that the peer must acknowledge (RFC 9000, section 13.2). A number of packets would
/// include acknowledgements of the peer's keepalives, which the peer does not answer: the path of an idle tunnel would
/// seem dark.
fn answerable(stats: &quic::ConnectionStats) -> u64 {
    let sent = &stats.frame_tx;
    let data = sent.stream + sent.datagram + sent.reset_stream + sent.stop_sending;
    let credit = sent.max_data + sent.max_stream_data + sent.max_streams_bidi + sent.max_streams_uni;
    // PING and IMMEDIATE_ACK are the frames of a probe without data.
    data + credit + sent.ping + sent.immediate_ack
}

/// True if a test handshake is answered. Its first packets have 1,200 bytes, so the path MTU then suffices for QUIC.
/// Also true if the handshake cannot be started.
async fn shakes_hands(worker: &Outbound, redial: &Redial) -> bool {
    let Ok(endpoint) = worker.quic_client(redial.address.is_ipv4()) else { return true };
    let Ok(connecting) = endpoint.connect_with(redial.config.clone(), redial.address, &redial.name) else {
        return true;
    };
    match tokio::time::timeout(PROBE, connecting).await {
        Ok(Ok(connection)) => {
            connection.close(quic::VarInt::from_u32(0), b"");
            true
        }
        // A refusal proves that the packets arrived.
        Ok(Err(_)) => true,
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stops_quic_each_time_is_told_from_a_peer_that_was_gone_once() {
        let avoids = QuicAvoidance::default();
        assert!(!avoids.counts(0));
        assert!(!avoids.is_dark_again(0, 60_000));
        // A connection that existed at that time belongs to the same event. One that began later is a new event.
        assert!(!avoids.is_dark_again(10, 60_250));
        assert!(avoids.counts(61_000) && avoids.is_dark_again(61_000, 120_000));
        // The record remains relevant for a while after the avoidance has ended.
        avoids.until.set(120_000 + LAST_AVOID);
        assert!(avoids.is_dark_again(120_000 + LAST_AVOID, 180_000 + LAST_AVOID));
        let long_after = avoids.dark_at.get() + LAST_AVOID;
        assert!(!avoids.counts(long_after) && !avoids.is_dark_again(long_after - 60_000, long_after));
    }
}

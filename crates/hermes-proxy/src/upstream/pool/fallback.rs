//! HTTP/3 where QUIC passes, HTTP/2 where it does not.
//!
//! In: a wish for HTTP/3. Out: a connection of either, and a word about it where it is the other one. QUIC has
//! a head start; who blocks UDP, or has paths too narrow for it (RFC 9000, section 14: 1,200 bytes), is served
//! over TCP at the same address. A connection that has lost the way is given up: its streams begin anew. QUIC is
//! tried again after a while, beside TCP, and takes over where it gets through.

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
use super::{Pool, Wish};
use crate::error::{Error, NO_CONNECTION};
use crate::h3::Link;
use crate::worker::Worker;

/// So long QUIC's handshake is waited for before TCP is tried beside it.
pub(crate) const HEAD_START: Duration = Duration::from_millis(700);
/// After QUIC failed where TCP passed, it is not tried again for so long (milliseconds); doubles up to the last.
const AVOID: u64 = 30_000;
const LAST_AVOID: u64 = 16 * AVOID;
/// A connection is looked at so often.
pub(super) const LOOK: Duration = Duration::from_millis(250);
/// With something on its way, and no answer for so long, the path is dark.
pub(super) const DARK: Duration = Duration::from_secs(2);
/// Where its round trips are long, it is so many of them.
pub(super) const ANSWERS: u32 = 3;
/// Lost packets of so many bytes may have been too long for the path.
const LONG: u64 = 1000;
/// So long a new handshake, of packets as long as QUIC's shortest may be, is waited for: a lost one is sent again
/// after a second (RFC 9002, section 6.2.2), and a lossy path is none that is too narrow.
const PROBE: Duration = Duration::from_millis(1300);
/// A path that was found wide enough is not doubted again for so long; doubles up to the last.
const DOUBT_AGAIN: Duration = Duration::from_secs(4);
const LAST_DOUBT: Duration = Duration::from_secs(64);

/// Whether QUIC is avoided, and since how many failures.
#[derive(Default)]
pub(super) struct Avoids {
    /// In milliseconds of the worker's clock.
    until: Cell<u64>,
    failures: Cell<u32>,
    /// This machine's addresses then: with others it is in another network, where QUIC may get through.
    network: RefCell<Arc<HashSet<IpAddr>>>,
    /// It is tried again by a task.
    is_tried: Cell<bool>,
    /// When a path that had been good for long was dark last.
    dark_at: Cell<u64>,
}

impl Avoids {
    pub(super) fn holds(&self, worker: &Worker) -> bool {
        self.until.get() > worker.now() && *self.network.borrow() == worker.shared.own_addresses()
    }

    /// What is known of it is still of use.
    pub(super) fn counts(&self, now: u64) -> bool {
        let is_known = self.dark_at.get() > 0 || self.failures.get() > 0;
        is_known && now < self.dark_at.get().max(self.until.get()) + LAST_AVOID
    }

    /// The path of a connection is dark that had been good for long. Whether that is so once more, and QUIC's own fault:
    /// what befalls several connections at once is one darkness.
    fn is_dark_again(&self, began: u64, now: u64) -> bool {
        let before = self.dark_at.get();
        let is_again = before > 0 && began >= before && self.counts(now);
        self.dark_at.set(now.max(1));
        is_again
    }

    fn begin(&self, worker: &Worker) {
        let network = worker.shared.own_addresses();
        if self.network.replace(network.clone()) != network {
            self.failures.set(0);
        }
        let failures = self.failures.get();
        self.failures.set(failures.saturating_add(1));
        self.until.set(worker.now() + (AVOID << failures.min(16)).min(LAST_AVOID));
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
        if self.avoids_quic.holds(worker) {
            return self.dial_h2(worker, wish, permit).await;
        }
        let by_quic = pin!(self.dial_h3(worker, wish, permit));
        let head_start = pin!(tokio::time::sleep(HEAD_START));
        let begun = select(by_quic, head_start).await;
        let by_tcp = pin!(self.dial_h2(worker, wish, Permit::take(&self.open)));
        let (reason, result) = match begun {
            Either::Left((Ok(connection), _)) => return Ok(connection),
            Either::Left((Err(failure), _)) => {
                (failure.to_string(), by_tcp.await.map_err(|other| telling(failure, other)))
            }
            Either::Right(((), by_quic)) => {
                ("its handshake is not answered".to_owned(), first_of(by_quic, by_tcp, telling).await)
            }
        };
        if result.as_ref().is_ok_and(|connection| !connection.is_h3()) {
            self.avoid_quic(worker, wish.destination.label, &reason);
        }
        result
    }

    /// Somebody is served by HTTP/2 instead: where QUIC is not avoided any more, it is tried again beside, once for all,
    /// and the next ones go by it.
    pub(super) fn try_quic_again(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) {
        let avoids = &self.avoids_quic;
        if avoids.is_tried.get() || self.dialing_for_all.get() || avoids.holds(worker) {
            return;
        }
        let takes = |other: &Rc<SharedConnection>| other.is_h3() && other.has_room() && other.is_alive();
        if self.shared.borrow().iter().any(takes) {
            return self.leave_h2(worker, wish.destination.label);
        }
        avoids.is_tried.set(true);
        // It is to replace what is there: at the most of connections it is one more meanwhile.
        let (permit, standing) = (Permit::take(&self.open), wish.standing());
        let (pool, here) = (self.clone(), worker.clone());
        worker.spawn(async move {
            let wish = standing.wish();
            let dialled = pool.dial_h3(&here, &wish, permit).await;
            pool.avoids_quic.is_tried.set(false);
            match dialled {
                Ok(connection) if connection.has_room() => pool.leave_h2(&here, wish.destination.label),
                Ok(connection) => {
                    connection.retire();
                    pool.avoids_quic.begin(&here);
                }
                Err(error) => {
                    tracing::debug!(peer = %wish.destination.label, %error, "QUIC still does not get through");
                    pool.avoids_quic.begin(&here);
                }
            }
        });
    }

    /// QUIC gets through: what is under way over HTTP/2 moves, or ends there, and nothing new begins.
    fn leave_h2(&self, worker: &Worker, peer: &str) {
        tracing::info!(peer, "QUIC gets through again");
        for connection in self.shared.borrow().iter().filter(|connection| !connection.is_h3()) {
            connection.leave(worker);
        }
    }

    /// From now on HTTP/2, for a while, and says so. What befalls several connections at once is one failure.
    fn avoid_quic(&self, worker: &Worker, peer: &str, reason: &str) {
        if self.avoids_quic.holds(worker) {
            return;
        }
        self.avoids_quic.begin(worker);
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
        let began = worker.now();
        let reason = darkness(worker, shared, link, way).await;
        let (avoids, now) = (&self.avoids_quic, worker.now());
        let got_through = now >= began + AVOID;
        // Once, it is more likely the peer that is gone, or the way to it, than QUIC alone: it is dialled anew by QUIC
        // too. What lies between may let QUIC begin, and stop it each time.
        let is_darkness = got_through && reason == DARKNESS;
        let is_again = is_darkness && avoids.is_dark_again(began, now);
        if got_through && !is_again {
            avoids.failures.set(0);
        }
        if is_darkness && !is_again {
            tracing::warn!(peer, reason, "a connection over QUIC is given up");
        } else {
            self.avoid_quic(worker, peer, reason);
        }
        shared.close();
        link.connection.close(quic::VarInt::from_u32(0), reason.as_bytes());
    }
}

/// The first of the two that succeeds; of two failures that of the first, or what `telling` makes of both.
pub(crate) async fn first_of<T, E>(
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

/// Of QUIC's failure and TCP's the one that says more: that nothing was heard in time could be anything.
fn telling(by_quic: Error, by_tcp: Error) -> Error {
    if matches!(by_quic, Error::ConnectTimeout { missing: NO_CONNECTION, .. }) { by_tcp } else { by_quic }
}

const DARKNESS: &str = "no packet is answered";

/// Ready with the reason, where no answer comes any more though something was sent, or long packets are lost
/// and no new handshake comes through.
async fn darkness(worker: &Worker, shared: &SharedConnection, link: &Link, way: &Way) -> &'static str {
    let mut look = tokio::time::interval(LOOK);
    let mut before = link.connection.stats();
    let (mut silent, mut doubt_again) = (Duration::ZERO, DOUBT_AGAIN);
    let mut trusted_until = tokio::time::Instant::now();
    let (mut arrived, mut answered) = (link.arrived(), link.answered());
    loop {
        look.tick().await;
        let now = link.connection.stats();
        // Not what comes: a path may be dark one way alone, and the peer asks again and again what became of us.
        let is_heard = std::mem::replace(&mut answered, link.answered()) != answered;
        let is_owed = answerable(&now) > answerable(&before) || silent > Duration::ZERO;
        silent = if is_heard || !is_owed || shared.is_unused() { Duration::ZERO } else { silent + LOOK };
        if silent >= DARK.max(ANSWERS * now.path.rtt) {
            return DARKNESS;
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

/// Frames sent for which the peer owes an acknowledgement (RFC 9000, section 13.2). Not packets: who answers the
/// peer's own sign of life in the last moment before a look is owed nothing, and an idle tunnel's path is no dark one.
fn answerable(stats: &quic::ConnectionStats) -> u64 {
    let sent = &stats.frame_tx;
    let data = sent.stream + sent.datagram + sent.reset_stream + sent.stop_sending;
    let credit = sent.max_data + sent.max_stream_data + sent.max_streams_bidi + sent.max_streams_uni;
    // What a probe carries where nothing else is to be said.
    data + credit + sent.ping + sent.immediate_ack
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stops_quic_each_time_is_told_from_a_peer_that_was_gone_once() {
        let avoids = Avoids::default();
        assert!(!avoids.counts(0));
        assert!(!avoids.is_dark_again(0, 60_000));
        // Another connection of then is the same darkness, and one that began behind it another.
        assert!(!avoids.is_dark_again(10, 60_250));
        assert!(avoids.counts(61_000) && avoids.is_dark_again(61_000, 120_000));
        // QUIC is avoided meanwhile: that is no time in which it was good.
        avoids.until.set(120_000 + LAST_AVOID);
        assert!(avoids.is_dark_again(120_000 + LAST_AVOID, 180_000 + LAST_AVOID));
        let long_after = avoids.dark_at.get() + LAST_AVOID;
        assert!(!avoids.counts(long_after) && !avoids.is_dark_again(long_after - 60_000, long_after));
    }
}

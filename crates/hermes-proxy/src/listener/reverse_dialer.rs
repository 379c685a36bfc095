//! The dialling side of reverse connections.
//!
//! In: listeners with `dial`. Out: to each endpoint of their upstream, as many connections as it has workers,
//! distributed over the workers of this node; each serves the listener's sessions. A lost connection is dialled again:
//! at once at first, with a backoff later, and at once after a network change. The old connection stays until the new
//! one is accepted. Never: a claim of identity beyond the certificate.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::snapshot::{Listener, UpstreamProtocol};
use hermes_net::tcp::AckMonitor;
use hermes_net::{host, quic, tls};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::listener::http::{Client, WatchedIo};
use crate::listener::{h2, h3, trust_of};
use crate::worker::Worker;
use hermes_outbound::generation::kept_bounds;
use hermes_outbound::outbound::connect::{Destination, connect};
use hermes_outbound::outbound::pool;
use hermes_outbound::reverse::keepalive::{DEAD_AFTER, UNUSED_PROBE_INTERVAL};
use hermes_outbound::reverse::{ALPN, ALPN_H3, ReplaceReason, ReverseTransport, UplinkConnection, UplinkGroup};
use hermes_outbound::upstream::{ClientTls, Target, UpstreamState};
use hermes_transport::error::{Error, NO_CONNECTION};
use hermes_transport::metrics::ListenerLabels;
use hermes_transport::runtime::session::{Connection, ConnectionGuard};

/// The maximum number of endpoints of one upstream that are dialled. Further ones count as a limit hit.
const MAX_ENDPOINTS: usize = 16;
/// The timeout for the dial and TLS, and then again until the peer accepts the connection.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout after which TCP is tried: many networks block UDP.
const QUIC_TIMEOUT: Duration = Duration::from_secs(3);
/// A connection that lasted this long was good: its replacement is dialled without a pause, up to this many times in a
/// row.
const GOOD_CONNECTION_AFTER: Duration = Duration::from_secs(1);
const MAX_IMMEDIATE_REDIALS: u32 = 8;
/// A connection that lasted this long resets the count of losses.
const LOSSES_FORGOTTEN_AFTER: Duration = Duration::from_secs(30);
/// The time for a dial in progress after a network change; then the dial starts again.
const STALLED_DIAL_TIMEOUT: Duration = Duration::from_millis(300);
const MAX_RESTARTED_DIALS: usize = 3;
/// The pause after the first failure; it doubles up to the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// The dialling listeners of a worker.
#[derive(Default)]
pub(crate) struct ReverseDialers(HashMap<Arc<str>, DialingListener>);

/// A listener that dials.
struct DialingListener {
    upstream: u64,
    /// Dropping the sender stops the dialling tasks.
    _stop: watch::Sender<()>,
}

impl ReverseDialers {
    /// Stops dialling; open connections continue.
    pub(crate) fn stop_all(&mut self) {
        self.0.clear();
    }

    /// Follows the running document: starts and stops listeners that dial, and restarts them if their upstream changed.
    pub(crate) fn follow(&mut self, worker: &Rc<Worker>) {
        if worker.is_draining() {
            return;
        }
        let generation = worker.generation();
        let dials = |listener: &Arc<Listener>| {
            let upstream = generation.upstream(listener.dial.as_ref()?)?;
            Some((listener.name.clone(), upstream.clone()))
        };
        let wanted: HashMap<Arc<str>, Arc<UpstreamState>> =
            generation.snapshot.listeners.iter().filter_map(dials).collect();
        let running = &mut self.0;
        running.retain(|name, uplink| {
            let stays = wanted.get(name).is_some_and(|upstream| upstream.id == uplink.upstream);
            if !stays {
                // Dropping the sender stops dialling; open connections drain.
                worker.tables.drain_listener(worker, name);
            }
            stays
        });
        for (name, upstream) in wanted {
            running.entry(name.clone()).or_insert_with(|| begin(worker, &name, &upstream));
        }
    }
}

fn begin(worker: &Rc<Worker>, listener: &Arc<str>, upstream: &Arc<UpstreamState>) -> DialingListener {
    let stop = watch::Sender::new(());
    if upstream.endpoints.len() > MAX_ENDPOINTS {
        worker.shared.metrics.limit("dial-endpoints");
        let (name, most) = (&upstream.config.name, MAX_ENDPOINTS);
        tracing::warn!(%listener, upstream = %name, most, "too many endpoints; reverse connections are dialled to the first ones only");
    }
    for index in 0..upstream.endpoints.len().min(MAX_ENDPOINTS) {
        let Target::Address { group, .. } = &upstream.endpoints[index].target else { continue };
        let tls = match tls_of(worker, upstream) {
            Ok(tls) => tls,
            Err(error) => {
                tracing::error!(%listener, upstream = %upstream.config.name, %error, "cannot dial reverse connections");
                break;
            }
        };
        let keeper = DialTask {
            worker: worker.clone(),
            listener: listener.clone(),
            upstream: upstream.clone(),
            index,
            group: group.clone(),
            tls,
            stop: stop.subscribe(),
        };
        worker.spawn(keeper.keep());
    }
    DialingListener { upstream: upstream.id, _stop: stop }
}

/// The upstream's TLS, with the ALPN of reverse connections. QUIC sends keepalives after `UNUSED_PROBE_INTERVAL`, in use or not.
fn tls_of(worker: &Worker, upstream: &UpstreamState) -> Result<ClientTls, Error> {
    // `check` ensures TLS.
    let tls = upstream.tls.as_ref().ok_or_else(|| Error::Internal("an upstream to dial without TLS".to_owned()))?;
    let over_tcp = ClientTls { config: tls::with_alpn(&tls.config, ALPN), ..tls.clone() };
    if upstream.config.protocol != UpstreamProtocol::H3 {
        return Ok(over_tcp);
    }
    let bounds = kept_bounds(&worker.generation().snapshot.limits, DEAD_AFTER, Some(UNUSED_PROBE_INTERVAL));
    let quic = quic::client_config(&tls::with_alpn(&tls.config, ALPN_H3), bounds);
    Ok(ClientTls { quic: Some(quic.map_err(|error| Error::Internal(error.to_string()))?), ..over_tcp })
}

/// The dialler of connections to one endpoint.
#[derive(Clone)]
struct DialTask {
    worker: Rc<Worker>,
    listener: Arc<str>,
    upstream: Arc<UpstreamState>,
    index: usize,
    group: UplinkGroup,
    tls: ClientTls,
    /// Closed when dialling should stop: the sender was dropped.
    stop: watch::Receiver<()>,
}

/// The losses and failed dials since the last lasting connection.
#[derive(Default)]
struct Losses {
    /// Failures that delay the next dial.
    failures: u32,
    /// Losses that did not delay the next dial.
    at_once: u32,
}

impl Losses {
    fn failed(&mut self) {
        self.failures += 1;
    }

    /// Counts a loss. A peer that closes every connection is not dialled without pauses.
    fn lost(&mut self, why: ReplaceReason, lasted: Duration) {
        if why == ReplaceReason::Moved || lasted >= LOSSES_FORGOTTEN_AFTER {
            *self = Self::default();
        } else if lasted >= GOOD_CONNECTION_AFTER && self.at_once < MAX_IMMEDIATE_REDIALS {
            *self = Self { failures: 0, at_once: self.at_once + 1 };
        } else {
            self.failures += 1;
        }
    }
}

/// An established connection.
struct Dialled {
    connection: Rc<Connection>,
    uplink: Rc<UplinkConnection>,
    local: IpAddr,
    remote: SocketAddr,
    /// QUIC may migrate it to another address.
    is_quic: bool,
    since: Instant,
    /// The replacement reports it to the peer as dead.
    is_given_up: bool,
}

impl Dialled {
    /// True if nothing can arrive on it: it closed, its local address was removed, or its path is dead. The peer may
    /// not know, and may have waiting flows on it.
    fn is_dead(&self) -> bool {
        self.uplink.is_dead() || (!self.is_quic && !host::is_at(self.local))
    }
}

impl DialTask {
    /// Maintains this worker's share: the connections whose number modulo the number of workers is its own.
    async fn keep(mut self) {
        let mut wanted = self.group.wanted();
        let (first, step) = (self.worker.number, self.worker.shared.workers.max(1));
        let mut next = first;
        loop {
            let most = *wanted.borrow_and_update();
            while next < most {
                let (one, number) = (self.clone(), next);
                self.worker.spawn(async move { one.keep_one(number).await });
                next += step;
            }
            tokio::select! {
                changed = wanted.changed() => if changed.is_err() { return },
                _ = self.stop.changed() => return,
            }
        }
    }

    async fn keep_one(self, number: usize) {
        let mut wanted = self.group.wanted();
        let mut network = self.worker.shared.network.subscribe();
        let mut doubts = self.group.doubts();
        let mut stop = self.stop.clone();
        let mut before: Vec<Dialled> = Vec::new();
        let mut losses = Losses::default();
        let mut is_told = false;
        let keep = async {
            loop {
                if wanted.wait_for(|wanted| number < *wanted).await.is_err() {
                    return;
                }
                self.pause(losses.failures, &mut network).await;
                match self.dial(number, &mut before, &mut network).await {
                    Ok(dialled) => {
                        is_told = false;
                        tracing::info!(listener = %self.listener, endpoint = %self.label(), "reverse connection up");
                        // Make before break: earlier connections finish their sessions if they can.
                        for old in before.drain(..) {
                            if old.is_given_up {
                                old.connection.kill.set("the path is down; another connection has replaced this one");
                            }
                            old.connection.start_drain(&self.worker);
                        }
                        let why = moves_on(&dialled, &mut network, &mut doubts).await;
                        if why == ReplaceReason::Moved && dialled.is_quic {
                            self.worker.migrate_quic_clients();
                        }
                        tracing::info!(listener = %self.listener, endpoint = %self.label(), ?why, "a reverse connection is being replaced");
                        losses.lost(why, dialled.since.elapsed());
                        before.push(dialled);
                    }
                    Err(error) => {
                        losses.failed();
                        if !std::mem::replace(&mut is_told, true) {
                            tracing::warn!(listener = %self.listener, endpoint = %self.label(), %error, "reverse connection failed; retrying");
                        }
                    }
                }
            }
        };
        tokio::select! {
            () = keep => {}
            _ = stop.changed() => {}
        }
    }

    fn label(&self) -> Arc<str> {
        self.upstream.endpoints[self.index].label.clone()
    }

    /// Pauses before the next dial. Half of the pause is random, so that nodes that lost the same neighbour do not
    /// return together.
    async fn pause(&self, failures: u32, network: &mut watch::Receiver<()>) {
        network.mark_unchanged();
        let Some(doublings) = failures.checked_sub(1) else { return };
        let ceiling = FIRST_PAUSE.saturating_mul(1 << doublings.min(16)).min(MAX_PAUSE);
        let part = (self.worker.random().1 >> 11) as f64 / (1_u64 << 53) as f64;
        // A network change ends the pause, because the new network may reach the peer.
        let _ = tokio::time::timeout(ceiling.mul_f64(0.5 + part / 2.0), network.changed()).await;
    }

    async fn dial(
        &self,
        number: usize,
        before: &mut [Dialled],
        network: &mut watch::Receiver<()>,
    ) -> Result<Dialled, Error> {
        let nobody = SocketAddr::from(([0, 0, 0, 0], 0));
        let destination =
            Destination { tls: Some(&self.tls), urgent: true, ..self.upstream.destination(self.index, nobody) };
        let mut anew = 0..MAX_RESTARTED_DIALS;
        let carrier = loop {
            let stalls = async {
                // During a network change a first packet is easily lost, and TCP retransmits it only after a second.
                if anew.next().is_some() && network.changed().await.is_ok() {
                    tokio::time::sleep(STALLED_DIAL_TIMEOUT).await;
                } else {
                    std::future::pending().await
                }
            };
            tokio::select! {
                carrier = self.connect(&destination) => break carrier?,
                () = stalls => {}
            }
        };
        let fault = |source| Error::Connect { peer: self.label(), source: Arc::new(source) };
        let (remote, local) = match &carrier {
            ReverseTransport::Tcp(io) => (io.peer_addr().map_err(fault)?, io.tcp().local_addr().map_err(fault)?.ip()),
            ReverseTransport::Quic(quic) => {
                let remote = quic.remote_address();
                (remote, host::source_towards(remote).map_err(fault)?)
            }
        };
        // The state is evaluated once, so that the report to the peer matches the action here.
        before.iter_mut().for_each(|old| old.is_given_up = old.is_dead());
        let given_up = before.iter().filter(|old| old.is_given_up).filter_map(|old| old.uplink.number.get()).collect();
        let acks = match &carrier {
            ReverseTransport::Tcp(io) => Some(AckMonitor::of(io.tcp()).map_err(fault)?),
            ReverseTransport::Quic(_) => None,
        };
        let uplink = Rc::new(UplinkConnection::new(self.group.clone(), number == 0, acks, given_up));
        let dialled = self.serve(carrier, local, remote, uplink).map_err(fault)?;
        // TLS completes before the peer has verified the certificate of this node; its first call shows that it
        // accepted the connection.
        let judged = async {
            tokio::select! {
                _ = dialled.uplink.number.wait() => None,
                why = dialled.uplink.moves_on.wait() => Some(why),
            }
        };
        let why = match tokio::time::timeout(DIAL_TIMEOUT, judged).await {
            Ok(None) => return Ok(dialled),
            Ok(Some(ReplaceReason::Silent)) => "no data since the TLS handshake",
            Ok(Some(ReplaceReason::Leaving)) => "the peer accepts no more connections: it is shutting down",
            Ok(Some(_)) => {
                "the peer rejected the connection: it does not trust this node's certificate, or has no upstream that names this node"
            }
            Err(_) => "the peer accepted the connection but did not use it in time: it may be overloaded",
        };
        // No task serves the connection from here on, so it is marked for closing.
        dialled.connection.kill.set(why);
        Err(fault(std::io::Error::other(why)))
    }

    async fn connect(&self, to: &Destination<'_>) -> Result<ReverseTransport, Error> {
        if self.upstream.config.protocol != UpstreamProtocol::H3 {
            return connect(&self.worker, to, DIAL_TIMEOUT).await.map(ReverseTransport::Tcp);
        }
        let error = match tokio::time::timeout(QUIC_TIMEOUT, pool::h3::dial(&self.worker, to)).await {
            Ok(Ok(quic)) => return Ok(ReverseTransport::Quic(quic)),
            Ok(Err(error)) => error,
            Err(_) => Error::ConnectTimeout { peer: self.label(), missing: NO_CONNECTION, after: QUIC_TIMEOUT },
        };
        // If TCP fails too, the error of QUIC is reported.
        let Ok(io) = connect(&self.worker, to, DIAL_TIMEOUT).await else { return Err(error) };
        self.worker.shared.metrics.quic_fallbacks.inc();
        tracing::info!(listener = %self.listener, endpoint = %self.label(), %error, "QUIC does not get through; over HTTP/2");
        Ok(ReverseTransport::Tcp(io))
    }

    /// Serves the listener's sessions on the connection.
    fn serve(
        &self,
        carrier: ReverseTransport,
        local: IpAddr,
        remote: SocketAddr,
        uplink: Rc<UplinkConnection>,
    ) -> std::io::Result<Dialled> {
        let generation = self.worker.generation();
        let gone = || std::io::Error::other("the listener was removed");
        let listener = generation.listener(&self.listener).ok_or_else(gone)?;
        let (uris, is_quic) = match &carrier {
            ReverseTransport::Tcp(io) => (tls::peer_uris(io), false),
            ReverseTransport::Quic(quic) => (quic::peer_uris(quic), true),
        };
        let trust = trust_of(&self.worker, listener, uris, remote)?;
        let full = || std::io::Error::other("limits.connections of this node reached");
        let guard = ConnectionGuard::take(&self.worker, listener.clone(), remote, &trust).ok_or_else(full)?;
        let connection = guard.connection.clone();
        connection.is_kept.set(true);
        let _ = connection.trust.set(trust.clone());
        let client = Client { source: remote, trust, secure: true, uplink: Some(uplink.clone()) };
        let worker = self.worker.clone();
        let (over, labels) = (uplink.clone(), ListenerLabels { listener: listener.name.clone() });
        self.worker.spawn(async move {
            let gauge = worker.shared.metrics.reverse_connections.get_or_create_owned(&labels);
            gauge.inc();
            let served = async {
                match carrier {
                    ReverseTransport::Tcp(io) => {
                        let watched = WatchedIo::new(&worker, &guard.connection, io);
                        Box::pin(h2::serve(&worker, &guard.connection, watched, client)).await;
                    }
                    ReverseTransport::Quic(quic) => Box::pin(h3::serve(&worker, &guard.connection, quic, client)).await,
                }
            };
            tokio::select! {
                biased;
                () = served => {}
                reason = guard.connection.kill.wait() => tracing::debug!(source = %remote, reason, "a connection was closed"),
            }
            gauge.dec();
            over.end();
        });
        Ok(Dialled { connection, uplink, local, remote, is_quic, since: Instant::now(), is_given_up: false })
    }
}

/// Waits until the connection must be replaced.
async fn moves_on(
    dialled: &Dialled,
    network: &mut watch::Receiver<()>,
    doubts: &mut watch::Receiver<()>,
) -> ReplaceReason {
    loop {
        tokio::select! {
            why = dialled.uplink.moves_on.wait() => return why,
            Ok(()) = doubts.changed() => dialled.uplink.probe(),
            changed = network.changed() => {
                let from = host::source_towards(dialled.remote);
                // Without any route to the peer, nothing is dialled; the next network change may bring one.
                if changed.is_err() || from.is_ok_and(|from| from != dialled.local) {
                    return ReplaceReason::Moved;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_met_at_once_and_one_after_the_other_is_not() {
        let mut losses = Losses::default();
        let mut lost = |why, lasted| {
            losses.lost(why, lasted);
            losses.failures
        };
        let brief = GOOD_CONNECTION_AFTER + Duration::from_millis(100);
        let waits: Vec<u32> = (0..MAX_IMMEDIATE_REDIALS + 3).map(|_| lost(ReplaceReason::Over, brief)).collect();
        assert_eq!(waits[..MAX_IMMEDIATE_REDIALS as usize], [0; MAX_IMMEDIATE_REDIALS as usize]);
        assert_eq!(waits[MAX_IMMEDIATE_REDIALS as usize..], [1, 2, 3]);
        assert_eq!(lost(ReplaceReason::Over, LOSSES_FORGOTTEN_AFTER), 0);
        assert_eq!(lost(ReplaceReason::Over, Duration::ZERO), 1, "it was hardly there");
        assert_eq!(lost(ReplaceReason::Over, brief), 0);
        assert_eq!(lost(ReplaceReason::Silent, Duration::ZERO), 1);
        assert_eq!(lost(ReplaceReason::Moved, Duration::ZERO), 0, "the far end has no part in it");
    }
}

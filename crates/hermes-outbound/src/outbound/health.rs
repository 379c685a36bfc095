//! Active health checks: one prober for each endpoint, for all workers of the node.
//!
//! In: an upstream's `health`. Out: `Endpoint::healthy`. The probers run on the node's main thread, so that they do not
//! delay traffic. An endpoint counts as healthy until checks fail, so that a new node need not wait for the first
//! checks.

mod connection;
mod h3;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use hermes_model::snapshot::{Health, UpstreamProtocol};
use hermes_net::dial::{self, Addresses};
use hermes_net::resolve::Resolver;
use hermes_net::{Io, tls};
use hermes_wire::proxy_protocol;
use http::StatusCode;
use http::header::HOST;
use http_body_util::Empty;
use hyper_util::rt::TokioIo;
use rand::Rng;
use tokio::io::AsyncWriteExt;
use tokio::time::Instant;

use self::connection::ProbeConnection;
use super::pool::{HEAD_START, first_of};
use crate::reverse::ReversePeer;
use crate::reverse::channels::Channels;
use crate::upstream::{Endpoint, Target, UpstreamState};
use hermes_transport::metrics::{EndpointLabels, Metrics};
use hermes_transport::runtime::Shared;

/// Probes one endpoint until the future is dropped.
pub async fn probe_forever(
    state: Arc<UpstreamState>,
    index: usize,
    health: Health,
    shared: Arc<Shared>,
    channels: Arc<Channels>,
) {
    let endpoint = &state.endpoints[index];
    let mut means = ProbeResources { resolver: Resolver::from_system(), sockets: h3::Sockets::default(), held: None };
    let mut streak = Streak { good: 0, bad: 0 };
    publish(&shared.metrics, &state, endpoint);
    loop {
        let asked = means.probe(&channels, &state, endpoint, &health);
        let result = tokio::time::timeout(health.timeout, asked).await;
        let outcome = result.unwrap_or_else(|_| Err(format!("no answer within {:?}", health.timeout)));
        if outcome.is_err() {
            // The answer on this connection may never arrive, so the next check opens a new one.
            means.held = None;
        }
        if streak.changes(&health, endpoint, &outcome) {
            publish(&shared.metrics, &state, endpoint);
        }
        // The random factor spreads the probes of many nodes over time.
        let part = rand::rng().random_range(0.9..1.1);
        means.pause(health.interval.mul_f64(part).max(Duration::from_millis(10))).await;
    }
}

/// Removes the health metrics of an upstream that was removed.
pub fn forget(metrics: &Metrics, state: &UpstreamState) {
    for endpoint in &state.endpoints {
        let labels = EndpointLabels { upstream: state.config.name.clone(), endpoint: endpoint.name.clone() };
        metrics.upstream_healthy.remove(&labels);
    }
}

fn publish(metrics: &Metrics, state: &UpstreamState, endpoint: &Endpoint) {
    let labels = EndpointLabels { upstream: state.config.name.clone(), endpoint: endpoint.name.clone() };
    metrics.upstream_healthy.get_or_create(&labels).set(i64::from(endpoint.healthy.load(Ordering::Relaxed)));
}

/// The number of successful or failed checks since the last check with the opposite outcome.
struct Streak {
    good: u32,
    bad: u32,
}

impl Streak {
    /// Records the outcome of a check. Returns true if the endpoint has become healthy or unhealthy.
    fn changes(&mut self, health: &Health, endpoint: &Endpoint, outcome: &Result<(), String>) -> bool {
        let was = endpoint.healthy.load(Ordering::Relaxed);
        match outcome {
            Ok(()) => {
                if self.bad > 0 {
                    // The endpoint has recovered, so failures of sessions during the outage no longer count against it.
                    endpoint.passive.recovered();
                }
                (self.good, self.bad) = (self.good.saturating_add(1), 0);
            }
            Err(_) => (self.good, self.bad) = (0, self.bad.saturating_add(1)),
        }
        if !was && self.good >= health.healthy {
            endpoint.healthy.store(true, Ordering::Relaxed);
            tracing::info!(endpoint = %endpoint.label, "healthy again");
            return true;
        }
        if was && self.bad >= health.unhealthy {
            endpoint.healthy.store(false, Ordering::Relaxed);
            let reason = outcome.as_ref().err().map_or("", String::as_str);
            tracing::warn!(endpoint = %endpoint.label, reason, "unhealthy");
            return true;
        }
        false
    }
}

/// The resources of one endpoint's probes.
struct ProbeResources {
    resolver: Resolver,
    sockets: h3::Sockets,
    held: Option<ProbeConnection>,
}

impl ProbeResources {
    async fn probe(
        &mut self,
        channels: &Channels,
        state: &UpstreamState,
        endpoint: &Endpoint,
        health: &Health,
    ) -> Result<(), String> {
        let (host, port) = match &endpoint.target {
            Target::Address { host, port, .. } => (host, *port),
            Target::Node(reverse_peer) => return probe_node(channels, reverse_peer, health).await,
        };
        if let Some(held) = &mut self.held {
            if held.probe().await.is_ok() {
                return Ok(());
            }
            self.held = None;
        }
        let addresses = self.resolver.resolve(host).await.map_err(|error| error.to_string())?;
        let (host, path) = (&*endpoint.authority, health.path.as_deref());
        let by_tcp = connect_by_tcp(state, &addresses, port, path.is_some());
        let connected = match &state.tls {
            Some(client) if state.config.protocol == UpstreamProtocol::H3 => {
                let by_quic =
                    async { h3::connect(&mut self.sockets, client, &addresses, port).await.map(Connected::Quic) };
                // TCP starts after at most half of the timeout, so that a check over TCP can still succeed.
                either(pin!(by_quic), pin!(by_tcp), HEAD_START.min(health.timeout / 2)).await?
            }
            _ => by_tcp.await?,
        };
        // The check uses the same transport that sessions would use.
        let status = match (connected, path) {
            (Connected::Quic(connected), path) => connected.probe(host, path).await?,
            (Connected::Tcp { io, is_h2: true }, Some(path)) => Some(ask_h2(*io, host, path).await?),
            (Connected::Tcp { io, is_h2: false }, Some(path)) => Some(ask_h1(*io, host, path).await?),
            (Connected::Tcp { io, is_h2: true }, None) if is_held(state) => {
                self.held.insert(ProbeConnection::begin(*io).await?).probe().await?;
                None
            }
            (Connected::Tcp { .. }, None) => None,
        };
        path.zip(status).map_or(Ok(()), |(path, status)| check_status(path, status))
    }

    /// Waits for the time of the next probe. If a probe connection ends, the next probe starts early.
    async fn pause(&mut self, pause: Duration) {
        let until = Instant::now() + pause;
        if let Some(held) = &mut self.held
            && let Ok(lasted) = tokio::time::timeout_at(until, held.over()).await
        {
            self.held = None;
            // A connection that ends sooner than the interval does not trigger extra probes.
            if lasted >= pause {
                return;
            }
        }
        tokio::time::sleep_until(until).await;
    }
}

/// True if checks without a path keep an HTTP/2 connection open and send PING on it. TLS then authenticates the
/// endpoint once, and later checks need no handshake. With HTTP/3, each check opens a QUIC connection instead.
fn is_held(state: &UpstreamState) -> bool {
    state.tls.is_some() && matches!(state.config.protocol, UpstreamProtocol::H2 | UpstreamProtocol::Auto)
}

/// A connection that was opened for a probe.
enum Connected {
    Quic(h3::Connected),
    Tcp { io: Box<Io>, is_h2: bool },
}

/// Connects over QUIC, and over TCP if QUIC fails or does not connect within `head_start`, as sessions do. Only the
/// connection attempts decide this: a request that fails later on the connection is a failed check.
async fn either<T>(
    mut by_quic: impl Future<Output = Result<T, String>> + Unpin,
    by_tcp: impl Future<Output = Result<T, String>> + Unpin,
    head_start: Duration,
) -> Result<T, String> {
    match tokio::time::timeout(head_start, &mut by_quic).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(failure)) => by_tcp.await.map_err(|_| failure),
        Err(_) => first_of(by_quic, by_tcp, |by_quic, _| by_quic).await,
    }
}

async fn connect_by_tcp(
    state: &UpstreamState,
    addresses: &Addresses,
    port: u16,
    asks: bool,
) -> Result<Connected, String> {
    let mut tcp = dial::connect(addresses, port).await.map_err(|error| error.to_string())?;
    if state.config.proxy_protocol {
        // A probe belongs to no session, so the PROXY header has the command LOCAL, which names no other addresses.
        tcp.write_all(&proxy_protocol::LOCAL).await.map_err(|error| error.to_string())?;
    }
    // A check without a path completes the TLS handshake only if the connection is kept, or if TCP replaces HTTP/3.
    let shakes_hands = asks || is_held(state) || state.config.protocol == UpstreamProtocol::H3;
    let io = match &state.tls {
        Some(client) if shakes_hands => {
            tls::connect(client.config.clone(), &client.name, tcp).await.map_err(|error| error.to_string())?
        }
        _ => Io::Plain(tcp),
    };
    let is_h2 = match state.config.protocol {
        UpstreamProtocol::H2 | UpstreamProtocol::H3 => true,
        UpstreamProtocol::Auto => io.alpn() == Some(b"h2"),
        UpstreamProtocol::H1 | UpstreamProtocol::Tcp => false,
    };
    Ok(Connected::Tcp { io: Box::new(io), is_h2 })
}

fn check_status(path: &str, status: StatusCode) -> Result<(), String> {
    if status.is_success() { Ok(()) } else { Err(format!("GET {path} answers {status}")) }
}

/// Probes a node through a worker that has a reverse connection from that node.
async fn probe_node(channels: &Channels, reverse_peer: &Arc<ReversePeer>, health: &Health) -> Result<(), String> {
    if !reverse_peer.is_here() {
        return Err(format!("no reverse connection from node {}", reverse_peer.node));
    }
    let Some(path) = &health.path else { return Ok(()) };
    check_status(path, channels.query(reverse_peer, path).await?)
}

async fn ask_h1(io: Io, host: &str, path: &str) -> Result<StatusCode, String> {
    let text = |error: hyper::Error| error.to_string();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(io)).await.map_err(text)?;
    let request =
        http::Request::get(path).header(HOST, host).body(Empty::<Bytes>::new()).map_err(|error| error.to_string())?;
    let mut response = pin!(sender.send_request(request));
    // The connection may end directly after it has received the response, which is then still available.
    let answered = tokio::select! {
        response = &mut response => Some(response),
        _ = connection => None,
    };
    let response = if let Some(response) = answered { response } else { response.await };
    response.map(|response| response.status()).map_err(text)
}

async fn ask_h2(io: Io, host: &str, path: &str) -> Result<StatusCode, String> {
    let text = |error: h2::Error| error.to_string();
    let scheme = if matches!(io, Io::Tls(_)) { "https" } else { "http" };
    let (sender, connection) = h2::client::handshake(io).await.map_err(text)?;
    let ask = async {
        let request =
            http::Request::get(format!("{scheme}://{host}{path}")).body(()).map_err(|error| error.to_string())?;
        let (response, _) = sender.ready().await.map_err(text)?.send_request(request, true).map_err(text)?;
        response.await.map(|response| response.status()).map_err(text)
    };
    let mut ask = pin!(ask);
    let answered = tokio::select! {
        status = &mut ask => Some(status),
        _ = connection => None,
    };
    if let Some(status) = answered { status } else { ask.await }
}

//! Active health checks: one prober an endpoint, for the whole node.
//!
//! In: an upstream's `health`. Out: `Endpoint::healthy`. Runs on the node's main thread, away from
//! traffic. An endpoint is believed healthy until checks say otherwise, so that a start waits for
//! nothing.

mod h3;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use hermes_model::snapshot::{Health, UpstreamProtocol};
use hermes_net::resolve::Resolver;
use hermes_net::{Io, dial, tls};
use hermes_wire::proxy_protocol;
use http::StatusCode;
use http::header::HOST;
use http_body_util::Empty;
use hyper_util::rt::TokioIo;
use rand::Rng;
use tokio::io::AsyncWriteExt;

use super::{Endpoint, Target, UpstreamState};
use crate::metrics::{EndpointLabels, Metrics};
use crate::reverse::Presence;
use crate::worker::Shared;

/// Probes one endpoint for as long as it is polled.
pub(crate) async fn probe_forever(state: Arc<UpstreamState>, index: usize, health: Health, shared: Arc<Shared>) {
    let resolver = Resolver::from_system();
    let endpoint = &state.endpoints[index];
    let mut sockets = h3::Sockets::default();
    let mut streak = Streak { good: 0, bad: 0 };
    publish(&shared.metrics, &state, endpoint);
    loop {
        let asked = probe(&resolver, &mut sockets, &shared, &state, endpoint, &health);
        let result = tokio::time::timeout(health.timeout, asked).await;
        let outcome = result.unwrap_or_else(|_| Err(format!("no answer within {:?}", health.timeout)));
        if streak.changes(&health, endpoint, &outcome) {
            publish(&shared.metrics, &state, endpoint);
        }
        // Jitter: the probes of many nodes must not come together.
        let part = rand::rng().random_range(0.9..1.1);
        tokio::time::sleep(health.interval.mul_f64(part).max(Duration::from_millis(10))).await;
    }
}

/// Takes back what was published of an upstream that is gone.
pub(crate) fn forget(metrics: &Metrics, state: &UpstreamState) {
    for endpoint in &state.endpoints {
        let labels = EndpointLabels { upstream: state.config.name.clone(), endpoint: endpoint.name.clone() };
        metrics.upstream_healthy.remove(&labels);
    }
}

fn publish(metrics: &Metrics, state: &UpstreamState, endpoint: &Endpoint) {
    let labels = EndpointLabels { upstream: state.config.name.clone(), endpoint: endpoint.name.clone() };
    metrics.upstream_healthy.get_or_create(&labels).set(i64::from(endpoint.healthy.load(Ordering::Relaxed)));
}

struct Streak {
    good: u32,
    bad: u32,
}

impl Streak {
    /// True where the endpoint's health changed.
    fn changes(&mut self, health: &Health, endpoint: &Endpoint, outcome: &Result<(), String>) -> bool {
        let was = endpoint.healthy.load(Ordering::Relaxed);
        match outcome {
            Ok(()) => (self.good, self.bad) = (self.good.saturating_add(1), 0),
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

async fn probe(
    resolver: &Resolver,
    sockets: &mut h3::Sockets,
    shared: &Shared,
    state: &UpstreamState,
    endpoint: &Endpoint,
    health: &Health,
) -> Result<(), String> {
    let (host, port) = match &endpoint.target {
        Target::Address { host, port, .. } => (host, *port),
        Target::Node(presence) => return probe_node(shared, presence, health).await,
    };
    let addresses = resolver.resolve(host).await.map_err(|error| error.to_string())?;
    if state.config.protocol == UpstreamProtocol::H3 {
        let client = state.tls.as_ref().ok_or("HTTP/3 without TLS")?;
        let status = h3::ask(sockets, client, &addresses, port, &endpoint.name, health.path.as_deref()).await?;
        return health.path.as_deref().zip(status).map_or(Ok(()), |(path, status)| judge(path, status));
    }
    let mut tcp = dial::connect(&addresses, port).await.map_err(|error| error.to_string())?;
    if state.config.proxy_protocol {
        // Nobody's session: LOCAL, by which the endpoint takes the connection's own addresses.
        tcp.write_all(&proxy_protocol::LOCAL).await.map_err(|error| error.to_string())?;
    }
    let Some(path) = &health.path else { return Ok(()) };
    let io = match &state.tls {
        Some(client) => {
            tls::connect(client.config.clone(), &client.name, tcp).await.map_err(|error| error.to_string())?
        }
        None => Io::Plain(tcp),
    };
    let is_h2 = match state.config.protocol {
        UpstreamProtocol::H2 => true,
        UpstreamProtocol::Auto => io.alpn() == Some(b"h2"),
        UpstreamProtocol::H1 | UpstreamProtocol::Tcp | UpstreamProtocol::H3 => false,
    };
    let status = if is_h2 { ask_h2(io, &endpoint.name, path).await? } else { ask_h1(io, &endpoint.name, path).await? };
    judge(path, status)
}

fn judge(path: &str, status: StatusCode) -> Result<(), String> {
    if status.is_success() { Ok(()) } else { Err(format!("GET {path} answers {status}")) }
}

/// A node that keeps connections to us is asked by a worker that has one.
async fn probe_node(shared: &Shared, presence: &Arc<Presence>, health: &Health) -> Result<(), String> {
    if !presence.is_here() {
        return Err(format!("node {} keeps no connection to us", presence.node));
    }
    let Some(path) = &health.path else { return Ok(()) };
    judge(path, shared.ask_node(presence, path).await?)
}

async fn ask_h1(io: Io, host: &str, path: &str) -> Result<StatusCode, String> {
    let text = |error: hyper::Error| error.to_string();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(io)).await.map_err(text)?;
    let request =
        http::Request::get(path).header(HOST, host).body(Empty::<Bytes>::new()).map_err(|error| error.to_string())?;
    let mut response = pin!(sender.send_request(request));
    // The connection may end right after its answer, which then waits to be taken.
    let answered = tokio::select! {
        response = &mut response => Some(response),
        _ = connection => None,
    };
    let response = if let Some(response) = answered { response } else { response.await };
    response.map(|response| response.status()).map_err(text)
}

async fn ask_h2(io: Io, host: &str, path: &str) -> Result<StatusCode, String> {
    let text = |error: h2::Error| error.to_string();
    let (sender, connection) = h2::client::handshake(io).await.map_err(text)?;
    let ask = async {
        let request = http::Request::get(format!("http://{host}{path}")).body(()).map_err(|error| error.to_string())?;
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

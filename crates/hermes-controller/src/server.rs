//! The controller's server: one TLS port for nodes (gRPC) and people (the REST API).
//!
//! In: connections. Out: authenticated requests, for [`crate::push`] or `api.rs`.
//! Never: an unlimited number of connections, a handshake without a timeout, or a request of an unknown sender.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hermes_net::Io;
use hermes_net::tls::{self, CertifiedKey, ClientCertificates, HandshakeFault, Roots};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rcgen::{CertificateParams, KeyPair};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tonic::Status;
use tonic::body::Body;
use tonic::server::Grpc;
use tonic_prost::ProstCodec;
use tower::service_fn;

use crate::api;
use crate::audit::{Audit, Event};
use crate::ca::{CertificateInfo, Subject};
use crate::control::{self, EnrolRequest, Issued, MAX_MESSAGE, MAX_REPORT, MAX_REQUEST, Order, RenewRequest, Report};
use crate::controller::{ApplyError, Controller};
use crate::digest::key_digest;
use crate::metrics;
use crate::push::{Peer, Push, envoy};

/// The maximum number of connections.
const MAX_CONNECTIONS: usize = 50_000;
/// The maximum time for a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum time between the handshake and the first request.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum time for a connection without a client certificate, which only permits an enrolment.
const ANONYMOUS_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum time for a certificate request, including the store.
const ISSUE_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval between HTTP/2 keepalive pings, and the timeout of each.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(20));
/// The maximum number of streams of a connection; a node needs two.
const MAX_STREAMS: u32 = 32;
/// The lifetime of the controller's own certificate. A new one is made at each start, and after half of this time.
const CERTIFICATE_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
/// The interval between attempts to accept after a failure.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Serves nodes and operators until the future is dropped.
///
/// # Errors
/// The controller's certificate cannot be issued.
pub async fn serve(
    controller: Arc<Controller>,
    audit: Arc<Audit>,
    (listener, admin): (TcpListener, Option<TcpListener>),
    hosts: Vec<String>,
) -> Result<(), ApplyError> {
    let push = Push::new(controller.clone(), audit.clone());
    let api = api::router(controller.clone(), push.clone(), audit.clone());
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    controller.authority().await?;
    let mut trust = controller.trust();
    let mut own = config(&controller, &hosts)?;
    let mut renewal =
        tokio::time::interval_at(tokio::time::Instant::now() + CERTIFICATE_LIFE / 2, CERTIFICATE_LIFE / 2);
    let watched = async {
        match admin {
            Some(admin) => metrics::serve(admin, push.clone()).await,
            None => std::future::pending().await,
        }
    };
    let beside =
        async { tokio::join!(watched, push.roll_out(), push.share(), push.rotate(), push.settle(), push.confirm()) };
    let mut beside = std::pin::pin!(beside);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut beside => return Ok(()),
            Some(_) = connections.join_next() => continue,
            _ = renewal.tick() => {
                own = renewed(own, &controller, &hosts);
                continue;
            }
            Ok(()) = trust.changed() => {
                own = renewed(own, &controller, &hosts);
                continue;
            }
        };
        let (tcp, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(again_in = ?ACCEPT_RETRY_INTERVAL, "cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                continue;
            }
        };
        let Ok(slot) = slots.clone().try_acquire_owned() else {
            tracing::warn!(%from, "connection refused: limit of {MAX_CONNECTIONS} reached");
            continue;
        };
        let (own, push, api, audit) = (own.clone(), push.clone(), api.clone(), audit.clone());
        connections.spawn(async move {
            if let Some(io) = shake_hands(own, tcp, from, &audit).await {
                let peer = peer(&io, from);
                converse(io, peer, push, api).await;
            }
            drop(slot);
        });
    }
}

/// The TLS configuration: a certificate for these names and addresses, and the CAs of accepted clients.
///
/// The chain includes the CA and the cross-certificates of earlier CAs, so that a client with only a pin finds the CA
/// that it trusts.
fn config(controller: &Controller, hosts: &[String]) -> Result<Arc<tls::RustlsServerConfig>, ApplyError> {
    let denied = |error: String| ApplyError::Denied(format!("the controller's own certificate: {error}"));
    let key = KeyPair::generate().map_err(|error| denied(error.to_string()))?;
    let request = CertificateParams::default().serialize_request(&key).map_err(|error| denied(error.to_string()))?;
    let (own, trust) = controller.sign_alone(request.der(), &Subject::Controller { hosts }, CERTIFICATE_LIFE)?;
    let tls = |error: tls::TlsError| denied(error.to_string());
    let shown = CertifiedKey::from_pem((own + &trust.shown).as_bytes(), key.serialize_pem().as_bytes());
    let clients = ClientCertificates::Optional(Roots::from_pem(trust.issuers.as_bytes()).map_err(tls)?);
    tls::server_config(&shown.map_err(tls)?, &clients, &[b"h2", b"http/1.1"]).map_err(tls)
}

/// Returns a configuration with a new certificate, or the earlier configuration if no certificate can be issued.
fn renewed(
    before: Arc<tls::RustlsServerConfig>,
    controller: &Controller,
    hosts: &[String],
) -> Arc<tls::RustlsServerConfig> {
    config(controller, hosts).unwrap_or_else(|error| {
        tracing::error!("cannot renew the controller's own certificate: {error}");
        before
    })
}

async fn shake_hands(
    config: Arc<tls::RustlsServerConfig>,
    tcp: TcpStream,
    from: SocketAddr,
    audit: &Audit,
) -> Option<Io> {
    // Without Nagle's algorithm, small messages are sent at once.
    let _ = tcp.set_nodelay(true);
    // HTTP/2 detects a dead peer by keepalive pings; HTTP/1.1 has none.
    hermes_net::tcp::bound_unread(&tcp, KEEPALIVE.0 + KEEPALIVE.1);
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, tls::accept(config, tcp)).await {
        Ok(Ok(io)) => return Some(io),
        Ok(Err(error)) if HandshakeFault::of(&error) == Some(HandshakeFault::Certificate) => {
            // The subject of a rejected certificate is not proven, so the log does not name it.
            let refused = Some(format!("certificate rejected: {error}"));
            audit.record(Event { what: "connect", from: Some(from), refused, ..Event::default() });
        }
        Ok(Err(error)) => tracing::debug!(%from, "no handshake: {error}"),
        Err(_) => tracing::debug!(%from, "handshake timeout after {HANDSHAKE_TIMEOUT:?}"),
    }
    None
}

async fn converse(io: Io, peer: Peer, push: Arc<Push>, api: axum::Router) {
    let (from, is_nobody, peer) = (peer.from, peer.uris.is_empty(), Arc::new(peer));
    let asked = Arc::new(Notify::new());
    let asks = asked.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        asks.notify_one();
        let (push, api, peer) = (push.clone(), api.clone(), peer.clone());
        async move { Ok::<_, Infallible>(answer(push, api, peer, request).await) }
    });
    let mut server = auto::Builder::new(TokioExecutor::new());
    server
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(if is_nobody { 2 } else { MAX_STREAMS })
        .initial_connection_window_size(1 << 20)
        .initial_stream_window_size(1 << 20)
        .max_header_list_size(16 << 10)
        .keep_alive_interval(KEEPALIVE.0)
        .keep_alive_timeout(KEEPALIVE.1);
    server.http1().half_close(true).timer(TokioTimer::new()).header_read_timeout(HANDSHAKE_TIMEOUT);
    let mut served = std::pin::pin!(server.serve_connection(TokioIo::new(io), TowerToHyperService::new(service)));
    let visit = async {
        tokio::select! {
            ended = &mut served => ended,
            () = asked.notified() => served.await,
            () = tokio::time::sleep(FIRST_REQUEST_TIMEOUT) => {
                tracing::debug!(?from, "no request within {FIRST_REQUEST_TIMEOUT:?}");
                Ok(())
            }
        }
    };
    let visit = tokio::time::timeout(if is_nobody { ANONYMOUS_TIMEOUT } else { Duration::MAX }, visit);
    let Ok(ended) = visit.await else {
        return tracing::debug!(?from, "a connection without a certificate was closed after {ANONYMOUS_TIMEOUT:?}");
    };
    if let Err(error) = ended {
        tracing::debug!(?from, "a connection ended: {error}");
    }
}

fn peer(io: &Io, from: SocketAddr) -> Peer {
    let uris = tls::peer_uris(io).unwrap_or_default();
    let key = tls::peer_public_key(io).map(|info| key_digest(&info)).unwrap_or_default();
    let chain = tls::peer_chain(io);
    let until = chain.first().and_then(|leaf| Some(CertificateInfo::of(leaf).ok()?.until)).unwrap_or_default();
    Peer { uris, key, from: Some(from), until }
}

async fn answer(
    push: Arc<Push>,
    api: axum::Router,
    peer: Arc<Peer>,
    mut request: Request<Incoming>,
) -> Response<axum::body::Body> {
    let grpc: Response<Body> = match request.uri().path() {
        control::ENROL => {
            let mut grpc =
                Grpc::new(ProstCodec::<Issued, EnrolRequest>::default()).max_decoding_message_size(MAX_REPORT);
            let enrol = service_fn(move |request: tonic::Request<EnrolRequest>| {
                let (push, peer) = (push.clone(), peer.clone());
                async move { push.enrol(&peer, request.into_inner()).await }
            });
            in_time(grpc.unary(enrol, request)).await
        }
        control::RENEW => {
            let mut grpc =
                Grpc::new(ProstCodec::<Issued, RenewRequest>::default()).max_decoding_message_size(MAX_REPORT);
            let renew = service_fn(move |request: tonic::Request<RenewRequest>| {
                let (push, peer) = (push.clone(), peer.clone());
                async move { push.renew(&peer, &request.into_inner()) }
            });
            in_time(grpc.unary(renew, request)).await
        }
        control::FOLLOW => {
            let mut grpc = Grpc::new(ProstCodec::<Order, Report>::default())
                .max_decoding_message_size(MAX_REPORT)
                .max_encoding_message_size(MAX_MESSAGE);
            let follow = service_fn(move |request: tonic::Request<tonic::Streaming<Report>>| {
                let (push, peer) = (push.clone(), peer.clone());
                async move { push.follow(&peer, request.into_inner()).await }
            });
            grpc.streaming(follow, request).await
        }
        envoy::DELTA => {
            let mut grpc = Grpc::new(ProstCodec::<envoy::DeltaResponse, envoy::DeltaRequest>::default())
                .max_decoding_message_size(MAX_REQUEST)
                .max_encoding_message_size(MAX_MESSAGE);
            let serve = service_fn(move |request: tonic::Request<tonic::Streaming<envoy::DeltaRequest>>| {
                let (push, peer) = (push.clone(), peer.clone());
                async move { envoy::serve::<envoy::Delta>(push, &peer, request.into_inner()).await }
            });
            grpc.streaming(serve, request).await
        }
        envoy::SOTW => {
            let mut grpc = Grpc::new(ProstCodec::<envoy::SotwResponse, envoy::SotwRequest>::default())
                .max_decoding_message_size(MAX_REQUEST)
                .max_encoding_message_size(MAX_MESSAGE);
            let serve = service_fn(move |request: tonic::Request<tonic::Streaming<envoy::SotwRequest>>| {
                let (push, peer) = (push.clone(), peer.clone());
                async move { envoy::serve::<envoy::StateOfTheWorld>(push, &peer, request.into_inner()).await }
            });
            grpc.streaming(serve, request).await
        }
        // Probes have no certificate, so the response leaves out the reason, which only operators may see.
        "/healthz" => {
            let (status, _) = metrics::health(&push);
            let word = if status.is_success() { "ok\n" } else { "store unreachable\n" };
            let mut response = Response::new(axum::body::Body::from(word));
            *response.status_mut() = status;
            return response;
        }
        _ => {
            request.extensions_mut().insert(peer);
            let mut api = api;
            return match tower::Service::call(&mut api, request.map(axum::body::Body::new)).await {
                Ok(response) => response,
                Err(never) => match never {},
            };
        }
    };
    grpc.map(axum::body::Body::new)
}

/// Ends a request that takes too long.
async fn in_time(answering: impl Future<Output = Response<Body>>) -> Response<Body> {
    let late = || Status::deadline_exceeded(format!("timeout after {ISSUE_TIMEOUT:?}; try again")).into_http();
    tokio::time::timeout(ISSUE_TIMEOUT, answering).await.unwrap_or_else(|_| late())
}

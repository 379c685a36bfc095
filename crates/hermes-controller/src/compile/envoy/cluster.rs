//! Clusters of an Envoy: the next nodes, and the origins of its services.
//!
//! In: the upstreams of a node document, and the targets of its routes. Out: clusters by name.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use envoy_types::pb::envoy::config::cluster::v3::circuit_breakers::Thresholds;
use envoy_types::pb::envoy::config::cluster::v3::cluster::{ClusterDiscoveryType, DiscoveryType, LbPolicy};
use envoy_types::pb::envoy::config::cluster::v3::{CircuitBreakers, Cluster, OutlierDetection};
use envoy_types::pb::envoy::config::core::v3::health_check::{HealthChecker, TcpHealthCheck};
use envoy_types::pb::envoy::config::core::v3::{HealthCheck, Http1ProtocolOptions};
use envoy_types::pb::envoy::config::endpoint::v3::lb_endpoint::HostIdentifier;
use envoy_types::pb::envoy::config::endpoint::v3::{
    ClusterLoadAssignment, Endpoint as Place, LbEndpoint, LocalityLbEndpoints,
};
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::UpstreamTlsContext;
use envoy_types::pb::envoy::extensions::upstreams::http::v3::HttpProtocolOptions;
use envoy_types::pb::envoy::extensions::upstreams::http::v3::http_protocol_options::{
    ExplicitHttpConfig, UpstreamProtocolOptions, explicit_http_config::ProtocolConfig,
};
use envoy_types::pb::google::protobuf::UInt32Value;
use hermes_model::Problem;
use hermes_model::document::Document;
use hermes_model::document::scalar::OneOrMany;
use hermes_model::document::upstream::{Endpoint, Health, Upstream, UpstreamTls};
use hermes_model::snapshot::{HostPort, UpstreamProtocol};
use prost::Name as _;

use super::listener::http2;
use super::{EnvoyIdentity, address_of, duration, exact, pack, problem, tls, transport};

/// The default connect timeout, as at a Hermes node.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The limits of a cluster: connections, pending requests, and active requests including tunnels.
const CIRCUIT_BREAKER: (u32, u32, u32) = (1024, 4096, 1 << 17);
/// The consecutive failures that eject an endpoint, and the first ejection time.
const EJECTION: (u32, Duration) = (5, Duration::from_secs(10));

/// The protocol of an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OriginProtocol {
    /// HTTP/1.1.
    Http,
    /// Bytes or datagrams.
    Raw,
}

/// Returns the name of an upstream's cluster.
pub(super) fn hop(upstream: &str) -> String {
    format!("hop/{upstream}")
}

/// Returns the clusters of the next nodes, one for each upstream.
pub(super) fn hops(
    document: &Document,
    identity: EnvoyIdentity<'_>,
    problems: &mut Vec<Problem>,
) -> BTreeMap<String, Cluster> {
    let mut clusters = BTreeMap::new();
    for (at, upstream) in document.upstreams.iter().enumerate() {
        let path = format!("upstreams[{at}]");
        // A node with HTTP/3 always accepts HTTP/2 too.
        let protocol = match upstream.protocol {
            UpstreamProtocol::H3 => UpstreamProtocol::H3,
            _ => UpstreamProtocol::H2,
        };
        let nodes = upstream.tls.as_ref().map(|tls| tls.node.clone()).unwrap_or_default();
        let understood = Upstream {
            endpoints: upstream.endpoints.clone(),
            backup: upstream.backup.clone(),
            health: upstream.health.clone(),
            tls: Some(UpstreamTls { node: nodes.clone(), ..UpstreamTls::default() }),
            ..Upstream::new(&upstream.name, protocol)
        };
        let mut dialled = Vec::new();
        for endpoint in upstream.endpoints.iter().chain(upstream.backup.iter()) {
            match endpoint {
                Endpoint::Address(address) => dialled.push(address.clone()),
                Endpoint::Node(next) => {
                    let own = &document.node;
                    let message = format!(
                        "an Envoy dials the nodes that it sends to; give {next} an address, and {own} a link to it"
                    );
                    problems.push(problem(&path, message));
                }
            }
        }
        let first_backup = upstream.endpoints.0.len();
        if dialled.len() < first_backup + upstream.backup.0.len() {
            continue;
        }
        if *upstream != understood || nodes.is_empty() {
            problems.push(problem(path, "an Envoy dials only other nodes, over HTTP/2 and by their names"));
            continue;
        }
        let name = hop(&upstream.name);
        clusters.insert(
            name.clone(),
            Cluster {
                health_checks: upstream.health.iter().map(health_check).collect(),
                ..to_nodes(&name, dialled.split_at(first_backup), &nodes, identity)
            },
        );
    }
    clusters
}

fn to_nodes(
    name: &str,
    endpoints: (&[HostPort], &[HostPort]),
    nodes: &OneOrMany<String>,
    identity: EnvoyIdentity<'_>,
) -> Cluster {
    let peers = nodes.iter().map(|node| exact(format!("spiffe://{}/node/{node}", identity.overlay)));
    let context =
        UpstreamTlsContext { common_tls_context: Some(tls(identity, peers)), ..UpstreamTlsContext::default() };
    Cluster {
        transport_socket: Some(transport(&context)),
        typed_extension_protocol_options: speaking(ProtocolConfig::Http2ProtocolOptions(http2())),
        ..cluster(name, endpoints)
    }
}

/// Adds the cluster of an origin. Returns its name.
pub(super) fn origin(clusters: &mut BTreeMap<String, Cluster>, speaks: OriginProtocol, at: &HostPort) -> String {
    let word = if speaks == OriginProtocol::Http { "http" } else { "raw" };
    let name = format!("origin/{word}/{at}");
    clusters.entry(name.clone()).or_insert_with(|| {
        let plain = cluster(&name, (std::slice::from_ref(at), &[]));
        match speaks {
            OriginProtocol::Raw => plain,
            OriginProtocol::Http => {
                let options = Http1ProtocolOptions { enable_trailers: true, ..Http1ProtocolOptions::default() };
                let options = speaking(ProtocolConfig::HttpProtocolOptions(options));
                Cluster { typed_extension_protocol_options: options, ..plain }
            }
        }
    });
    name
}

/// Extends the connect timeout of a cluster to that of a service.
pub(super) fn patient(clusters: &mut BTreeMap<String, Cluster>, name: &str, connect: Option<Duration>) {
    if let (Some(cluster), Some(connect)) =
        (clusters.get_mut(name), connect.filter(|connect| *connect > CONNECT_TIMEOUT))
    {
        let wanted = duration(connect);
        if cluster.connect_timeout.is_none_or(|known| (known.seconds, known.nanos) < (wanted.seconds, wanted.nanos)) {
            cluster.connect_timeout = Some(wanted);
        }
    }
}

/// Returns HTTP options for one protocol. The map has one entry, so its order is fixed and the same options have the
/// same bytes.
fn speaking(protocol: ProtocolConfig) -> HashMap<String, envoy_types::pb::google::protobuf::Any> {
    let explicit = ExplicitHttpConfig { protocol_config: Some(protocol) };
    let options = HttpProtocolOptions {
        upstream_protocol_options: Some(UpstreamProtocolOptions::ExplicitHttpConfig(explicit)),
        ..HttpProtocolOptions::default()
    };
    HashMap::from([(HttpProtocolOptions::full_name(), pack(&options))])
}

/// Returns a TCP health check over TLS. It sends no bytes, and so checks only that a connection with the peer's name is
/// possible.
fn health_check(health: &Health) -> HealthCheck {
    let number = |value| Some(UInt32Value { value });
    let interval = health.interval.map_or(Duration::from_secs(5), |interval| interval.0);
    HealthCheck {
        interval: Some(duration(interval)),
        timeout: Some(duration(health.timeout.map_or(Duration::from_secs(2).min(interval), |timeout| timeout.0))),
        healthy_threshold: number(health.healthy.unwrap_or(2)),
        unhealthy_threshold: number(health.unhealthy.unwrap_or(3)),
        health_checker: Some(HealthChecker::TcpHealthCheck(TcpHealthCheck::default())),
        ..HealthCheck::default()
    }
}

/// Returns a cluster with these endpoints. Each backup endpoint has a separate priority: it receives requests only
/// while all endpoints before it are down.
fn cluster(name: &str, (endpoints, backup): (&[HostPort], &[HostPort])) -> Cluster {
    let is_fixed = endpoints.iter().chain(backup).all(|at| at.host.parse::<IpAddr>().is_ok());
    let kind = if is_fixed { DiscoveryType::Static } else { DiscoveryType::StrictDns };
    let endpoint = |at: &HostPort| LbEndpoint {
        host_identifier: Some(HostIdentifier::Endpoint(Place { address: Some(address_of(at)), ..Place::default() })),
        ..LbEndpoint::default()
    };
    let number = |value| Some(UInt32Value { value });
    let locality = |(priority, places): (u32, &[HostPort])| LocalityLbEndpoints {
        lb_endpoints: places.iter().map(endpoint).collect(),
        priority,
        ..LocalityLbEndpoints::default()
    };
    let localities = std::iter::once(endpoints).chain(backup.chunks(1));
    Cluster {
        name: name.to_owned(),
        cluster_discovery_type: Some(ClusterDiscoveryType::Type(kind.into())),
        connect_timeout: Some(duration(CONNECT_TIMEOUT)),
        lb_policy: LbPolicy::LeastRequest.into(),
        load_assignment: Some(ClusterLoadAssignment {
            cluster_name: name.to_owned(),
            endpoints: (0..).zip(localities).map(locality).collect(),
            ..ClusterLoadAssignment::default()
        }),
        circuit_breakers: Some(CircuitBreakers {
            thresholds: vec![Thresholds {
                max_connections: number(CIRCUIT_BREAKER.0),
                max_pending_requests: number(CIRCUIT_BREAKER.1),
                max_requests: number(CIRCUIT_BREAKER.2),
                ..Thresholds::default()
            }],
            ..CircuitBreakers::default()
        }),
        // An error response of an origin does not mean that the endpoint is down.
        outlier_detection: Some(OutlierDetection {
            split_external_local_origin_errors: true,
            consecutive_local_origin_failure: number(EJECTION.0),
            base_ejection_time: Some(duration(EJECTION.1)),
            max_ejection_percent: number(50),
            enforcing_consecutive_5xx: number(0),
            enforcing_consecutive_gateway_failure: number(0),
            enforcing_success_rate: number(0),
            enforcing_local_origin_success_rate: number(0),
            ..OutlierDetection::default()
        }),
        ..Cluster::default()
    }
}

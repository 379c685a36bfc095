//! The listener of an Envoy for other nodes.
//!
//! In: the listeners of a node document. Out: one listener: HTTP/2 over TLS, for nodes of this overlay.
//! Never: the check of user claims. The routes have it, because they change without closing connections.

use std::collections::BTreeMap;

use envoy_types::pb::envoy::config::accesslog::v3::{AccessLog as Log, access_log::ConfigType as LogConfig};
use envoy_types::pb::envoy::config::common::mutation_rules::v3::{HeaderMutation as Mutation, header_mutation};
use envoy_types::pb::envoy::config::core::v3::{
    HeaderValue, HeaderValueOption, Http2ProtocolOptions, TypedExtensionConfig, header_value_option::HeaderAppendAction,
};
use envoy_types::pb::envoy::config::listener::v3::{Filter, FilterChain, Listener, filter::ConfigType as FilterConfig};
use envoy_types::pb::envoy::config::rbac::v3::Rbac as Rules;
use envoy_types::pb::envoy::extensions::access_loggers::file::v3::FileAccessLog;
use envoy_types::pb::envoy::extensions::filters::http::header_mutation::v3::HeaderMutation;
use envoy_types::pb::envoy::extensions::filters::http::rbac::v3::Rbac;
use envoy_types::pb::envoy::extensions::filters::http::router::v3::Router;
use envoy_types::pb::envoy::extensions::filters::network::http_connection_manager::v3::http_connection_manager::{
    CodecType, RouteSpecifier, ServerHeaderTransformation, UpgradeConfig,
};
use envoy_types::pb::envoy::extensions::filters::network::http_connection_manager::v3::{
    HttpConnectionManager, HttpFilter, Rds, http_filter::ConfigType as HttpConfig,
};
use envoy_types::pb::envoy::extensions::http::early_header_mutation::header_mutation::v3::HeaderMutation as EarlyMutation;
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::{
    DownstreamTlsContext, downstream_tls_context::SessionTicketKeysType,
};
use envoy_types::pb::envoy::r#type::matcher::v3::{StringMatcher, string_matcher::MatchPattern};
use envoy_types::pb::google::protobuf::{BoolValue, UInt32Value, UInt64Value};
use hermes_model::Problem;
use hermes_model::document::keyword::Protocol;
use hermes_model::document::listener::ListenerTls;
use hermes_model::document::{AccessLog, Document, listener};
use hermes_model::snapshot::ClientAuth;

use super::{EnvoyIdentity, OVERLAY, VersionedResource, ads, duration, pack, problem, tls, transport};

/// The filter that checks user claims.
pub(super) const TRUST: &str = "envoy.filters.http.rbac";
/// The filter that removes the overlay's headers from requests to an origin and from its responses.
pub(super) const MUTATION: &str = "envoy.filters.http.header_mutation";
/// The maximum number of requests and tunnels on a connection, as at a Hermes node.
const MAX_STREAMS: u32 = 1000;
/// The flow-control windows of a stream and of a connection, in bytes, as at a Hermes node.
const FLOW_WINDOWS: (u32, u32) = (4 << 20, 16 << 20);
/// The limit of stream resets by a peer: burst, and rate a second.
const RESET_LIMITS: (u64, u64) = (100_000, 10_000);
/// The maximum time for a request's headers, and for a TLS handshake.
const HEADER_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

pub(super) fn listeners(
    document: &Document,
    identity: EnvoyIdentity<'_>,
    problems: &mut Vec<Problem>,
) -> BTreeMap<String, VersionedResource> {
    let mut found = BTreeMap::new();
    for (at, listener) in document.listeners.iter().enumerate() {
        let path = format!("listeners[{at}]");
        let understood = listener::Listener {
            bind: listener.bind,
            tls: Some(ListenerTls { client: Some(ClientAuth::Required), ..ListenerTls::default() }),
            ..listener::Listener::new(OVERLAY, Protocol::Http)
        };
        match listener.bind {
            _ if listener.dial.is_some() => {
                let node = listener.name.trim_start_matches("uplink-");
                let message = format!("an Envoy keeps no reverse connections; give {node} a link to {}", document.node);
                problems.push(problem(path, message));
            }
            Some(bind) if *listener == understood => {
                let listener = Listener {
                    name: OVERLAY.to_owned(),
                    address: Some(super::address(&bind.0.ip().to_string(), bind.0.port())),
                    filter_chains: vec![FilterChain {
                        filters: vec![manager(document)],
                        transport_socket: Some(transport(&server_tls(identity))),
                        transport_socket_connect_timeout: Some(duration(HEADER_TIMEOUT)),
                        ..FilterChain::default()
                    }],
                    per_connection_buffer_limit_bytes: Some(UInt32Value { value: 1 << 20 }),
                    ..Listener::default()
                };
                found.insert(OVERLAY.to_owned(), VersionedResource::new(pack(&listener)));
            }
            _ => problems.push(problem(path, "an Envoy supports one listener, for other nodes; remove this one")),
        }
    }
    found
}

/// The TLS server context, for nodes of the overlay.
fn server_tls(identity: EnvoyIdentity<'_>) -> DownstreamTlsContext {
    let nodes = StringMatcher {
        match_pattern: Some(MatchPattern::Prefix(format!("spiffe://{}/node/", identity.overlay))),
        ignore_case: false,
    };
    DownstreamTlsContext {
        common_tls_context: Some(tls(identity, [nodes])),
        require_client_certificate: Some(BoolValue { value: true }),
        // Without session resumption, each connection presents its certificate, which may have expired or been revoked
        // meanwhile.
        disable_stateful_session_resumption: true,
        session_ticket_keys_type: Some(SessionTicketKeysType::DisableStatelessSessionResumption(true)),
        ..DownstreamTlsContext::default()
    }
}

/// Returns the HTTP/2 options of downstream and upstream connections, with extended CONNECT (RFC 8441) for tunnels.
pub(super) fn http2() -> Http2ProtocolOptions {
    let value = |value| Some(UInt32Value { value });
    Http2ProtocolOptions {
        allow_connect: true,
        max_concurrent_streams: value(MAX_STREAMS),
        initial_stream_window_size: value(FLOW_WINDOWS.0),
        initial_connection_window_size: value(FLOW_WINDOWS.1),
        // The peer is a node whose connection carries many users. A few broken tunnels must not close it.
        stream_reset_burst: Some(UInt64Value { value: RESET_LIMITS.0 }),
        stream_reset_rate: Some(UInt64Value { value: RESET_LIMITS.1 }),
        ..Http2ProtocolOptions::default()
    }
}

fn manager(document: &Document) -> Filter {
    let yes = || Some(BoolValue { value: true });
    let no = || Some(BoolValue { value: false });
    // A rule without a policy denies everyone. Routes override it.
    let nobody = Rbac { rules: Some(Rules::default()), ..Rbac::default() };
    let upgrade = |name: &str| UpgradeConfig { upgrade_type: name.to_owned(), ..UpgradeConfig::default() };
    let manager = HttpConnectionManager {
        codec_type: CodecType::Http2.into(),
        stat_prefix: OVERLAY.to_owned(),
        route_specifier: Some(RouteSpecifier::Rds(Rds {
            config_source: Some(ads()),
            route_config_name: OVERLAY.to_owned(),
        })),
        http_filters: vec![
            filter(TRUST, &nobody),
            filter(MUTATION, &HeaderMutation::default()),
            filter("envoy.filters.http.router", &Router { suppress_envoy_headers: true, ..Router::default() }),
        ],
        http2_protocol_options: Some(http2()),
        upgrade_configs: ["CONNECT", "CONNECT-UDP", "websocket"].map(upgrade).into(),
        request_headers_timeout: Some(duration(HEADER_TIMEOUT)),
        max_request_headers_kb: Some(UInt32Value { value: 64 }),
        // Routes match the normalised path, so Envoy must forward the same path.
        normalize_path: yes(),
        // Hermes nodes set tracing and client-address headers; Envoy forwards them.
        use_remote_address: no(),
        skip_xff_append: true,
        generate_request_id: no(),
        early_header_mutation_extensions: vec![scheme()],
        server_header_transformation: ServerHeaderTransformation::PassThrough.into(),
        via: format!("2 {}", document.node),
        access_log: log(&document.access_log).into_iter().collect(),
        stream_error_on_invalid_http_message: yes(),
        ..HttpConnectionManager::default()
    };
    Filter {
        name: "envoy.filters.network.http_connection_manager".to_owned(),
        config_type: Some(FilterConfig::TypedConfig(pack(&manager))),
    }
}

/// Returns a mutation that preserves the request's scheme. By default, Envoy sends origins the scheme of its own
/// connection.
fn scheme() -> TypedExtensionConfig {
    let header = HeaderValue {
        key: "x-forwarded-proto".to_owned(),
        value: "%REQ(:SCHEME)%".to_owned(),
        ..HeaderValue::default()
    };
    let absent = HeaderValueOption {
        header: Some(header),
        append_action: HeaderAppendAction::AddIfAbsent.into(),
        ..HeaderValueOption::default()
    };
    let mutation = Mutation { action: Some(header_mutation::Action::Append(absent)) };
    TypedExtensionConfig {
        name: "envoy.http.early_header_mutation.header_mutation".to_owned(),
        typed_config: Some(pack(&EarlyMutation { mutations: vec![mutation] })),
    }
}

fn filter<M: prost::Message + prost::Name>(name: &str, config: &M) -> HttpFilter {
    HttpFilter {
        name: name.to_owned(),
        config_type: Some(HttpConfig::TypedConfig(pack(config))),
        ..HttpFilter::default()
    }
}

fn log(to: &AccessLog) -> Option<Log> {
    let path = match to {
        AccessLog::Off => return None,
        AccessLog::Stdout => "/dev/stdout",
        AccessLog::Stderr => "/dev/stderr",
        AccessLog::File(path) => path,
    };
    let config = FileAccessLog { path: path.to_owned(), ..FileAccessLog::default() };
    Some(Log {
        name: "envoy.access_loggers.file".to_owned(),
        config_type: Some(LogConfig::TypedConfig(pack(&config))),
        ..Log::default()
    })
}

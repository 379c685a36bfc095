//! The files that an Envoy starts with: its bootstrap, and the location of its identity.
//!
//! In: controllers, a node, and the directory of its key and certificates. Out: JSON files for that directory.
//! Never: a key or a certificate. Envoy reads these from their own files, and again after a renewal.

use serde_json::{Value, json};

use crate::client::ControllerAddr;
use crate::compile::IDENTITY;

/// The metadata key with the directory of the Envoy's identity.
pub const DIRECTORY: &str = "hermes-directory";
/// The names of Envoy's secrets, and their files.
pub(super) const SECRETS: [(&str, &str); 2] =
    [("identity", "envoy-identity.json"), ("authorities", "envoy-authorities.json")];
/// The maximum program size of a regular expression.
const MAX_REGEX_PROGRAM: u32 = 10_000;
/// The maximum number of connections, as at a Hermes node.
const MAX_CONNECTIONS: u64 = 50_000;

const TYPES: &str = "type.googleapis.com/envoy";

/// The secret files for an identity in this directory, by name.
pub fn secrets(directory: &str) -> [(&'static str, Value); 2] {
    let [certificate, key, authorities] = IDENTITY.map(|file| json!({"filename": format!("{directory}/{file}")}));
    let watched = json!({"path": directory});
    let identity = json!({"tls_certificate": {
        "certificate_chain": certificate, "private_key": key, "watched_directory": watched,
    }});
    let trusted = json!({"validation_context": {"trusted_ca": authorities, "watched_directory": watched}});
    let [identity_of, trusted_of] = SECRETS;
    [(identity_of, identity), (trusted_of, trusted)].map(|((name, file), mut secret)| {
        secret["@type"] = format!("{TYPES}.extensions.transport_sockets.tls.v3.Secret").into();
        secret["name"] = name.into();
        (file, json!({"resources": [secret]}))
    })
}

/// The bootstrap of an Envoy. `admin` is the address of its admin endpoint.
pub fn bootstrap(node: &str, places: &[ControllerAddr], directory: &str, admin: Option<std::net::SocketAddr>) -> Value {
    let socket = |host: &str, port: u16| json!({"socket_address": {"address": host, "port_value": port}});
    let endpoint = |place: &ControllerAddr| json!({"endpoint": {"address": socket(&place.host, place.port)}});
    let [identity, authorities] = SECRETS.map(|(name, file)| {
        let source = json!({"path": format!("{directory}/{file}"), "watched_directory": {"path": directory}});
        json!({"name": name, "sds_config": {"path_config_source": source, "resource_api_version": "V3"}})
    });
    let tls = json!({
        "@type": format!("{TYPES}.extensions.transport_sockets.tls.v3.UpstreamTlsContext"),
        "common_tls_context": {
            "alpn_protocols": ["h2"],
            "tls_certificate_sds_secret_configs": [identity],
            "combined_validation_context": {
                "default_validation_context": {
                    "match_typed_subject_alt_names": [{"san_type": "URI", "matcher": {"exact": "hermes:controller"}}],
                },
                "validation_context_sds_secret_config": authorities,
            },
        },
    });
    let options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    let alive = json!({"interval": "20s", "timeout": "20s"});
    let http = json!({
        "@type": format!("type.googleapis.com/{options}"),
        "explicit_http_config": {"http2_protocol_options": {"connection_keepalive": alive}},
    });
    let controller = json!({
        "name": "hermes-controller",
        "type": "STRICT_DNS",
        "connect_timeout": "5s",
        "load_assignment": {
            "cluster_name": "hermes-controller",
            "endpoints": [{"lb_endpoints": places.iter().map(endpoint).collect::<Vec<_>>()}],
        },
        "typed_extension_protocol_options": {options: http},
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
    });
    let ads = json!({"ads": {}, "resource_api_version": "V3"});
    let connections = json!({
        "name": "envoy.resource_monitors.global_downstream_max_connections",
        "typed_config": {
            "@type": format!("{TYPES}.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig"),
            "max_active_downstream_connections": MAX_CONNECTIONS,
        },
    });
    let mut whole = json!({
        "node": {"id": node, "cluster": "hermes", "metadata": {DIRECTORY: directory}},
        "dynamic_resources": {
            "ads_config": {
                "api_type": "DELTA_GRPC",
                "transport_api_version": "V3",
                "set_node_on_first_message_only": true,
                "grpc_services": [{"envoy_grpc": {"cluster_name": "hermes-controller"}}],
            },
            "cds_config": ads,
            "lds_config": ads,
        },
        "static_resources": {"clusters": [controller]},
        "layered_runtime": {"layers": [
            {"name": "hermes", "static_layer": {"re2.max_program_size.error_level": MAX_REGEX_PROGRAM}},
        ]},
        "overload_manager": {"resource_monitors": [connections]},
    });
    if let Some(admin) = admin {
        whole["admin"] = json!({"address": socket(&admin.ip().to_string(), admin.port())});
    }
    whole
}

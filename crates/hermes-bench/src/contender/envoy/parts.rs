//! Parts of an Envoy configuration.
//!
//! In: names, addresses, files. Out: JSON. Some settings differ from the defaults to make the comparison fair.
//! `use_oghttp2_codec`: the server side of the other codec closes the shared connection after some thousand resets, and
//! every tunnel with it. UDP socket buffers of 4 MiB and a larger session buffer: bursts overflow the defaults.
//! `prefer_gro: true`: without it coalesced datagrams are lost. Circuit breakers are far above a thousand clients.
//! Upstream connections use TLS 1.3, like those of the other contenders. Limits like those of the other contenders are
//! on.

use std::{net::SocketAddr, path::Path};

use hermes_testkit::ca::IdentityFiles;
use serde_json::{Value, json};

/// The protocol of an upstream.
pub(super) enum Upstream<'a> {
    /// HTTP/1.1.
    H1,
    /// HTTP/2, over mutual TLS with these files.
    H2(Option<&'a IdentityFiles>),
    /// HTTP/3, with these files.
    H3(&'a IdentityFiles),
    /// Raw bytes of a tunnel.
    Raw,
}

/// Bytes of a UDP socket's send and receive buffer.
const UDP_BUFFER: u32 = 4 << 20;
/// Connections, requests and pending requests that a cluster allows.
const BREAKER: u32 = 16_384;
/// Bytes that Envoy buffers for a connection. A quarter of the default fits the cache and raises bulk throughput by 5
/// to 10 %.
const CONNECTION_BUFFER: u32 = 256 << 10;
/// Linux: `SOL_SOCKET`, `SO_SNDBUF`, `SO_RCVBUF`.
const SOCKET_BUFFERS: [(u8, u8); 2] = [(1, 7), (1, 8)];

fn typed(name: &str, fields: Value) -> Value {
    let mut value = json!({"@type": format!("type.googleapis.com/{name}")});
    if let (Some(all), Value::Object(fields)) = (value.as_object_mut(), fields) {
        all.extend(fields);
    }
    value
}

fn address(protocol: &str, at: SocketAddr) -> Value {
    json!({"socket_address": {"protocol": protocol, "address": at.ip(), "port_value": at.port()}})
}

/// The whole document.
pub(super) fn bootstrap(admin: u16, listeners: &[Value], clusters: &[Value]) -> Value {
    let connections = typed(
        "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        json!({"max_active_downstream_connections": 8000}),
    );
    json!({
        "admin": {"address": address("TCP", SocketAddr::from(([127, 0, 0, 1], admin)))},
        "overload_manager": {"resource_monitors": [
            {"name": "envoy.resource_monitors.global_downstream_max_connections", "typed_config": connections},
        ]},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    })
}

/// A TCP listener with one network filter.
pub(super) fn tcp_listener(name: &str, at: SocketAddr, filter: &Value, tls: Option<&IdentityFiles>) -> Value {
    let mut chain = json!({"filters": [filter]});
    if let Some(files) = tls {
        chain["transport_socket"] = tls_socket(
            "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            json!({"require_client_certificate": true, "common_tls_context": tls_context(files, "near")}),
        );
    }
    json!({
        "name": name,
        "address": address("TCP", at),
        "tcp_backlog_size": 4096,
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER,
        "filter_chains": [chain],
    })
}

/// An HTTP/3 listener. Over QUIC Envoy does not request a client certificate.
pub(super) fn quic_listener(name: &str, at: SocketAddr, mut filter: Value, files: &IdentityFiles) -> Value {
    filter["typed_config"]["codec_type"] = "HTTP3".into();
    filter["typed_config"]["http3_protocol_options"] = http3();
    let mut tls = tls_context(files, "near");
    tls["alpn_protocols"] = json!(["h3"]);
    tls.as_object_mut().and_then(|tls| tls.remove("validation_context"));
    json!({
        "name": name,
        "address": address("UDP", at),
        "udp_listener_config": {"quic_options": {}, "downstream_socket_config": {"prefer_gro": true}},
        "socket_options": socket_buffers(),
        "filter_chains": [{
            "filters": [filter],
            "transport_socket": quic_socket("Downstream", json!({"downstream_tls_context": {"common_tls_context": tls}})),
        }],
    })
}

fn http3() -> Value {
    json!({
        "allow_extended_connect": true,
        "quic_protocol_options": {
            "max_concurrent_streams": 1024,
            "initial_stream_window_size": 16 << 20,
            "initial_connection_window_size": 24 << 20,
        },
    })
}

fn quic_socket(side: &str, fields: Value) -> Value {
    let name = format!("envoy.extensions.transport_sockets.quic.v3.Quic{side}Transport");
    json!({"name": "envoy.transport_sockets.quic", "typed_config": typed(&name, fields)})
}

fn tls_socket(context: &str, fields: Value) -> Value {
    json!({"name": "envoy.transport_sockets.tls", "typed_config": typed(context, fields)})
}

fn tls_context(files: &IdentityFiles, peer: &str) -> Value {
    let san = json!({"san_type": "URI", "matcher": {"exact": format!("spiffe://bench/node/{peer}")}});
    json!({
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"},
        "alpn_protocols": ["h2"],
        "tls_certificates": [{
            "certificate_chain": {"filename": files.cert},
            "private_key": {"filename": files.key},
        }],
        "validation_context": {"trusted_ca": {"filename": files.ca}, "match_typed_subject_alt_names": [san]},
    })
}

fn access_log(path: &Path, fields: Value) -> Value {
    let config = typed(
        "envoy.extensions.access_loggers.file.v3.FileAccessLog",
        json!({"path": path, "log_format": {"json_format": fields}}),
    );
    json!([{"name": "envoy.access_loggers.file", "typed_config": config}])
}

fn http2() -> Value {
    json!({
        "allow_connect": true,
        "use_oghttp2_codec": true,
        "max_concurrent_streams": 1024,
        "initial_stream_window_size": 16 << 20,
        "initial_connection_window_size": 24 << 20,
    })
}

/// The HTTP connection manager: h1 and h2 on one port.
pub(super) fn http_filter(log: &Path, hosts: &Value, upgrades: &[&str]) -> Value {
    let upgrades: Vec<_> = upgrades.iter().map(|name| json!({"upgrade_type": name})).collect();
    let record = json!({
        "time": "%START_TIME%", "client": "%DOWNSTREAM_REMOTE_ADDRESS%", "method": "%REQ(:METHOD)%",
        "authority": "%REQ(:AUTHORITY)%", "path": "%REQ(:PATH)%", "protocol": "%PROTOCOL%",
        "status": "%RESPONSE_CODE%", "flags": "%RESPONSE_FLAGS%", "bytes_in": "%BYTES_RECEIVED%",
        "bytes_out": "%BYTES_SENT%", "ms": "%DURATION%", "upstream": "%UPSTREAM_HOST%",
    });
    let router = typed("envoy.extensions.filters.http.router.v3.Router", json!({}));
    let fields = json!({
        "stat_prefix": "http",
        "codec_type": "AUTO",
        "access_log": access_log(log, record),
        "route_config": {"name": "routes", "virtual_hosts": hosts},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
        "http2_protocol_options": http2(),
        "upgrade_configs": upgrades,
        "common_http_protocol_options": {"idle_timeout": "75s", "max_headers_count": 100},
        "max_request_headers_kb": 64,
        "request_headers_timeout": "10s",
    });
    let name = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    json!({"name": "http", "typed_config": typed(name, fields)})
}

/// A route that forwards requests and tunnels, without terminating the tunnels.
pub(super) fn forward(matching: Value, cluster: &str) -> Value {
    json!({"match": matching, "route": {"cluster": cluster, "timeout": "0s"}})
}

/// A route that terminates a tunnel.
pub(super) fn terminate(cluster: &str, upgrade: &str) -> Value {
    let upgrades = json!([{"upgrade_type": upgrade, "connect_config": {}}]);
    json!({
        "match": {"connect_matcher": {}},
        "route": {"cluster": cluster, "timeout": "0s", "upgrade_configs": upgrades},
    })
}

/// Each connection becomes CONNECT `authority`.
pub(super) fn tcp_tunnel(log: &Path, authority: &str, cluster: &str) -> Value {
    let record = json!({
        "time": "%START_TIME%", "client": "%DOWNSTREAM_REMOTE_ADDRESS%", "flags": "%RESPONSE_FLAGS%",
        "bytes_in": "%BYTES_RECEIVED%", "bytes_out": "%BYTES_SENT%", "ms": "%DURATION%",
        "upstream": "%UPSTREAM_HOST%",
    });
    let fields = json!({
        "stat_prefix": "tcp",
        "cluster": cluster,
        "access_log": access_log(log, record),
        "idle_timeout": "60s",
        "tunneling_config": {"hostname": authority},
    });
    json!({"name": "tcp", "typed_config": typed("envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy", fields)})
}

/// Each flow becomes CONNECT-UDP to `target`.
pub(super) fn udp_listener(name: &str, at: SocketAddr, log: &Path, target: (&str, u16), cluster: &str) -> Value {
    let route = typed("envoy.extensions.filters.udp.udp_proxy.v3.Route", json!({"cluster": cluster}));
    let capsules = typed("envoy.extensions.filters.udp.udp_proxy.session.http_capsule.v3.FilterConfig", json!({}));
    let record = json!({
        "time": "%START_TIME%", "client": "%DOWNSTREAM_REMOTE_ADDRESS%", "bytes_in": "%BYTES_RECEIVED%",
        "bytes_out": "%BYTES_SENT%", "ms": "%DURATION%", "upstream": "%UPSTREAM_HOST%",
    });
    let fields = json!({
        "stat_prefix": "udp",
        "idle_timeout": "60s",
        "access_log": access_log(log, record),
        "matcher": {"on_no_match": {"action": {"name": "route", "typed_config": route}}},
        "session_filters": [{"name": "envoy.filters.udp.session.http_capsule", "typed_config": capsules}],
        "upstream_socket_config": {"prefer_gro": true},
        "tunneling_config": {
            "proxy_host": format!("{}:{}", target.0, target.1),
            "target_host": target.0,
            "default_target_port": target.1,
            "retry_options": {"max_connect_attempts": 2},
            "buffer_options": {"max_buffered_datagrams": 1024, "max_buffered_bytes": 1 << 20},
        },
    });
    let proxy = typed("envoy.extensions.filters.udp.udp_proxy.v3.UdpProxyConfig", fields);
    json!({
        "name": name,
        "address": address("UDP", at),
        "udp_listener_config": {"downstream_socket_config": {"prefer_gro": true}},
        "socket_options": socket_buffers(),
        "listener_filters": [{"name": "envoy.filters.udp_listener.udp_proxy", "typed_config": proxy}],
    })
}

fn socket_buffers() -> Vec<Value> {
    let option = |(level, name): &(u8, u8)| json!({"level": level, "name": name, "int_value": UDP_BUFFER, "state": "STATE_PREBIND"});
    SOCKET_BUFFERS.iter().map(option).collect()
}

/// A cluster of one endpoint.
pub(super) fn cluster(name: &str, at: SocketAddr, upstream: Upstream<'_>) -> Value {
    let breaker = json!({
        "max_connections": BREAKER, "max_pending_requests": BREAKER, "max_requests": BREAKER,
    });
    let mut cluster = json!({
        "name": name,
        "connect_timeout": "5s",
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER,
        "circuit_breakers": {"thresholds": [breaker]},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address("TCP", at)}}]}],
        },
    });
    let protocol = match &upstream {
        Upstream::Raw => return cluster,
        Upstream::H1 => json!({"http_protocol_options": {}}),
        Upstream::H2(_) => json!({"http2_protocol_options": http2()}),
        Upstream::H3(_) => json!({"http3_protocol_options": http3()}),
    };
    let options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    cluster["typed_extension_protocol_options"] =
        json!({options: typed(options, json!({"explicit_http_config": protocol}))});
    if let Upstream::H3(files) = upstream {
        let mut tls = tls_context(files, "far");
        tls["alpn_protocols"] = json!(["h3"]);
        let fields = json!({"upstream_tls_context": {"sni": "far", "common_tls_context": tls}});
        cluster["transport_socket"] = quic_socket("Upstream", fields);
    }
    if let Upstream::H2(Some(files)) = upstream {
        cluster["transport_socket"] = tls_socket(
            "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            json!({"common_tls_context": tls_context(files, "far")}),
        );
    }
    cluster
}

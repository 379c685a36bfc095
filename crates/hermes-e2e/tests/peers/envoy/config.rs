//! Pieces of an Envoy document, as its own documentation has them.
//!
//! In: names, addresses, files. Out: JSON, which Envoy reads as well as YAML. Every port is chosen by the system. What
//! is set beyond the least is what Envoy does not do by itself: trailers over HTTP/1.1, CONNECT, upgrades.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
};

use hermes_testkit::{ca::IdentityFiles, listener_client::NODE_NAME};
use serde_json::{Value, json};

const CORE: &str = "envoy.extensions";

fn typed(name: &str, mut fields: Value) -> Value {
    fields["@type"] = format!("type.googleapis.com/{name}").into();
    fields
}

fn address(protocol: &str, at: SocketAddr) -> Value {
    json!({"socket_address": {"protocol": protocol, "address": at.ip(), "port_value": at.port()}})
}

fn anywhere(protocol: &str) -> Value {
    address(protocol, (Ipv4Addr::LOCALHOST, 0).into())
}

/// The whole document.
pub(crate) fn bootstrap(listeners: &[Value], clusters: &[Value]) -> Value {
    json!({
        "admin": {"address": anywhere("TCP")},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    })
}

/// The far end of TLS: our files, and the URI that its certificate must have.
#[derive(Clone, Copy)]
pub(crate) struct Tls<'a> {
    pub(crate) files: &'a IdentityFiles,
    pub(crate) peer: &'a str,
}

impl Tls<'_> {
    fn context(&self, alpn: &[&str]) -> Value {
        let Self { files, peer } = self;
        json!({
            "alpn_protocols": alpn,
            "tls_certificates": [{
                "certificate_chain": {"filename": files.cert},
                "private_key": {"filename": files.key},
            }],
            "validation_context": {
                "trusted_ca": {"filename": files.ca},
                "match_typed_subject_alt_names": [{"san_type": "URI", "matcher": {"exact": peer}}],
            },
        })
    }

    fn socket(&self, side: &str, alpn: &[&str]) -> Value {
        let mut fields = json!({"common_tls_context": self.context(alpn)});
        if side == "Downstream" {
            fields["require_client_certificate"] = true.into();
        }
        let name = format!("{CORE}.transport_sockets.tls.v3.{side}TlsContext");
        json!({"name": "envoy.transport_sockets.tls", "typed_config": typed(&name, fields)})
    }
}

impl Tls<'_> {
    /// As [`Self::socket`], within QUIC. Envoy asks no client over QUIC for a certificate.
    fn quic(&self, side: &str) -> Value {
        let mut context = self.context(&["h3"]);
        let mut fields = json!({});
        if side == "Downstream" {
            context.as_object_mut().and_then(|context| context.remove("validation_context"));
        } else {
            fields["sni"] = NODE_NAME.into();
        }
        fields["common_tls_context"] = context;
        let context = format!("{}_tls_context", side.to_lowercase());
        let name = format!("{CORE}.transport_sockets.quic.v3.Quic{side}Transport");
        json!({"name": "envoy.transport_sockets.quic", "typed_config": typed(&name, json!({context: fields}))})
    }
}

/// A TCP listener with one network filter.
pub(crate) fn listener(name: &str, filter: &Value, tls: Option<Tls<'_>>) -> Value {
    let mut chain = json!({"filters": [filter]});
    if let Some(tls) = tls {
        chain["transport_socket"] = tls.socket("Downstream", &["h2", "http/1.1"]);
    }
    json!({"name": name, "address": anywhere("TCP"), "filter_chains": [chain]})
}

/// An HTTP connection manager for both versions. Each virtual host is a domain with its routes.
pub(crate) fn http(log: &Path, hosts: &[(&str, Vec<Value>)]) -> Value {
    let hosts: Vec<Value> =
        hosts.iter().map(|(domain, routes)| json!({"name": domain, "domains": [domain], "routes": routes})).collect();
    let upgrades = ["CONNECT", "CONNECT-UDP", "websocket"].map(|name| json!({"upgrade_type": name}));
    let router = typed(&format!("{CORE}.filters.http.router.v3.Router"), json!({}));
    let record = "%REQ(:METHOD)% %REQ(:AUTHORITY)% %REQ(:PATH)% %PROTOCOL% %RESPONSE_CODE% %RESPONSE_CODE_DETAILS% \
                  %RESPONSE_FLAGS% %UPSTREAM_TRANSPORT_FAILURE_REASON% %UPSTREAM_HOST%\n";
    let log_config = typed(
        &format!("{CORE}.access_loggers.file.v3.FileAccessLog"),
        json!({"path": log, "log_format": {"text_format_source": {"inline_string": record}}}),
    );
    let fields = json!({
        "stat_prefix": "http",
        "codec_type": "AUTO",
        "access_log": [{"name": "envoy.access_loggers.file", "typed_config": log_config}],
        "route_config": {"name": "routes", "virtual_hosts": hosts},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
        "http_protocol_options": {"enable_trailers": true},
        "http2_protocol_options": {"allow_connect": true},
        "upgrade_configs": upgrades,
    });
    let name = format!("{CORE}.filters.network.http_connection_manager.v3.HttpConnectionManager");
    json!({"name": "http", "typed_config": typed(&name, fields)})
}

/// A listener of HTTP/3, before which a connection manager of its own stands.
pub(crate) fn listener_h3(name: &str, log: &Path, hosts: &[(&str, Vec<Value>)], tls: Tls<'_>) -> Value {
    let mut filter = http(log, hosts);
    filter["typed_config"]["codec_type"] = "HTTP3".into();
    filter["typed_config"]["http3_protocol_options"] = json!({"allow_extended_connect": true});
    json!({
        "name": name,
        "address": anywhere("UDP"),
        "udp_listener_config": {"quic_options": {}, "downstream_socket_config": {"prefer_gro": true}},
        "filter_chains": [{"filters": [filter], "transport_socket": tls.quic("Downstream")}],
    })
}

/// Routes that forward all to a cluster, tunnels unopened.
pub(crate) fn forward(cluster: &str) -> Vec<Value> {
    let route = json!({"cluster": cluster, "timeout": "0s"});
    vec![json!({"match": {"connect_matcher": {}}, "route": route}), json!({"match": {"prefix": "/"}, "route": route})]
}

/// A route at which tunnels of this type end: `CONNECT`, or `CONNECT-UDP`.
pub(crate) fn terminate(cluster: &str, upgrade: &str) -> Value {
    json!({
        "match": {"connect_matcher": {}},
        "route": {
            "cluster": cluster,
            "timeout": "0s",
            "upgrade_configs": [{"upgrade_type": upgrade, "connect_config": {}}],
        },
    })
}

/// A route at which tunnels by POST end.
pub(crate) fn terminate_post(cluster: &str) -> Value {
    json!({
        "match": {"prefix": "/", "headers": [{"name": ":method", "string_match": {"exact": "POST"}}]},
        "route": {
            "cluster": cluster,
            "timeout": "0s",
            "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {"allow_post": true}}],
        },
    })
}

/// Each connection becomes a tunnel to `authority`.
pub(crate) fn tcp_tunnel(authority: &str, cluster: &str, use_post: bool) -> Value {
    let mut tunneling = json!({"hostname": authority, "use_post": use_post});
    if use_post {
        tunneling["post_path"] = "/".into();
    }
    let fields = json!({"stat_prefix": "tcp", "cluster": cluster, "tunneling_config": tunneling});
    json!({"name": "tcp", "typed_config": typed(&format!("{CORE}.filters.network.tcp_proxy.v3.TcpProxy"), fields)})
}

/// Each flow becomes CONNECT-UDP to `target`, or a POST of capsules to the same path.
pub(crate) fn udp_tunnel(name: &str, (host, port): (&str, u16), cluster: &str, use_post: bool) -> Value {
    let udp = format!("{CORE}.filters.udp.udp_proxy");
    let route = typed(&format!("{udp}.v3.Route"), json!({"cluster": cluster}));
    let capsules = typed(&format!("{udp}.session.http_capsule.v3.FilterConfig"), json!({}));
    let mut tunneling = json!({
        "proxy_host": "proxy.test",
        "target_host": host,
        "default_target_port": port,
        "use_post": use_post,
        "buffer_options": {"max_buffered_datagrams": 1024, "max_buffered_bytes": 1 << 20},
    });
    if use_post {
        tunneling["post_path"] = format!("/.well-known/masque/udp/{host}/{port}/").into();
    }
    let fields = json!({
        "stat_prefix": "udp",
        "matcher": {"on_no_match": {"action": {"name": "route", "typed_config": route}}},
        "session_filters": [{"name": "envoy.filters.udp.session.http_capsule", "typed_config": capsules}],
        "tunneling_config": tunneling,
    });
    json!({
        "name": name,
        "address": anywhere("UDP"),
        // Without it datagrams that the kernel merged are cut off.
        "udp_listener_config": {"downstream_socket_config": {"prefer_gro": true, "max_rx_datagram_size": 65_535}},
        "listener_filters": [{
            "name": "envoy.filters.udp_listener.udp_proxy",
            "typed_config": typed(&format!("{udp}.v3.UdpProxyConfig"), fields),
        }],
    })
}

/// What a cluster speaks.
#[derive(Clone, Copy)]
pub(crate) enum Speaks {
    Bytes,
    H1,
    H2,
    /// With TLS, which is within it.
    H3,
}

/// A cluster of one endpoint.
pub(crate) fn cluster(name: &str, at: SocketAddr, speaks: Speaks, tls: Option<Tls<'_>>) -> Value {
    let endpoint = json!({"lb_endpoints": [{"endpoint": {"address": address("TCP", at)}}]});
    let mut cluster = json!({
        "name": name,
        "connect_timeout": "5s",
        "load_assignment": {"cluster_name": name, "endpoints": [endpoint]},
    });
    let (protocol, alpn) = match speaks {
        Speaks::Bytes => return cluster,
        Speaks::H1 => (json!({"http_protocol_options": {"enable_trailers": true}}), "http/1.1"),
        Speaks::H2 => (json!({"http2_protocol_options": {"allow_connect": true}}), "h2"),
        Speaks::H3 => (json!({"http3_protocol_options": {"allow_extended_connect": true}}), "h3"),
    };
    let options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    cluster["typed_extension_protocol_options"] =
        json!({options: typed(options, json!({"explicit_http_config": protocol}))});
    if let Some(tls) = tls {
        let within_quic = matches!(speaks, Speaks::H3);
        cluster["transport_socket"] = if within_quic { tls.quic("Upstream") } else { tls.socket("Upstream", &[alpn]) };
    }
    cluster
}

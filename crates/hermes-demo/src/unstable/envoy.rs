//! Envoy as the papers use it: one on each machine, hop by hop over TLS, with their retries.
//!
//! In: Envoy's binary, names and namespaces. Out: its documents (JSON, which Envoy reads as well as YAML) and its
//! command line. Envoys use HTTP/1.1 over mutual TLS between each other. Retries are the poster's: 4 of 180 s each,
//! without another time limit, so that received bytes are not discarded while a client waits. Its cache is off, since
//! requests are first ones.

use std::io::Read as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::lab::{NODES, WEB};
use super::nodes::{ADMIN, APPS, door, name};

/// The sysctl, new in Linux 6.15, that bounds TCP's backoff in a namespace.
pub(super) const KNOB: &str = "net/ipv4/tcp_rto_max_ms";
/// The sysctl's value in the tuned case, its minimum.
pub(super) const TUNED: &str = "1000";
/// The admin path that reports readiness.
pub(super) const READY: &str = "/ready";
const EXTENSIONS: &str = "type.googleapis.com/envoy.extensions";

/// Checks the binary that the user named.
///
/// # Errors
/// The file does not exist.
pub(super) fn named(path: &Path) -> anyhow::Result<PathBuf> {
    ensure!(path.is_file(), "--envoy {} is no file; name Envoy's binary, or leave it out", path.display());
    path.canonicalize().with_context(|| path.display().to_string())
}

/// Finds Envoy: the first executable in the PATH that is not a script.
///
/// # Errors
/// No binary was found; the error names the remedy.
pub(super) fn on_path() -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|directory| directory.join("envoy")).find(|path| is_program(path)).context(
        "there is no `envoy` on the path: name its binary by --envoy PATH (make demo-unstable ENVOY=PATH), or have \
             `make setup` install it, where `make demo-unstable` finds it",
    )
}

/// Some packages install a wrapper script of this name, which would outlive Envoy.
fn is_program(path: &Path) -> bool {
    let mut magic = [0; 4];
    std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"\x7fELF"
}

/// Whether TCP's backoff can be bounded here.
pub(super) fn has_knob() -> bool {
    Path::new("/proc/sys").join(KNOB).exists()
}

/// A command line that runs it with this document.
pub(super) fn command<'a>(binary: &'a str, config: &'a str) -> [&'a str; 8] {
    [binary, "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning", "-c", config]
}

/// A node's document; `directory` has the certificates.
pub(super) fn document(node: usize, overlay: &str, directory: &Path) -> Value {
    let tls =
        |side: &str, peer: usize| tls(side, &name(node), &format!("spiffe://{overlay}/node/{}", name(peer)), directory);
    let (listener, next) = if node == 0 {
        (listener(APPS, None), 1)
    } else {
        (listener(door(node), Some(tls("Downstream", node - 1))), node + 1)
    };
    let cluster = if next == NODES {
        cluster(SocketAddr::from(([127, 0, 0, 1], WEB)), None)
    } else {
        cluster(door(next), Some(tls("Upstream", next)))
    };
    json!({
        "admin": {"address": address(ADMIN)},
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    })
}

fn address(at: SocketAddr) -> Value {
    json!({"socket_address": {"address": at.ip(), "port_value": at.port()}})
}

fn listener(at: SocketAddr, tls: Option<Value>) -> Value {
    let route = json!({
        "cluster": "next",
        "timeout": "0s",
        "idle_timeout": "0s",
        "retry_policy": {
            "retry_on": "5xx,reset,refused-stream,connect-failure,gateway-error",
            "num_retries": 4,
            "per_try_timeout": "180s",
        },
    });
    let host = json!({"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]});
    let http = json!({
        "@type": format!("{EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "http",
        "stream_idle_timeout": "0s",
        "route_config": {"name": "routes", "virtual_hosts": [host]},
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": format!("{EXTENSIONS}.filters.http.router.v3.Router")},
        }],
    });
    let mut chain = json!({"filters": [{"name": "http", "typed_config": http}]});
    if let Some(tls) = tls {
        chain["transport_socket"] = tls;
    }
    json!({"name": "in", "address": address(at), "filter_chains": [chain]})
}

fn cluster(at: SocketAddr, tls: Option<Value>) -> Value {
    let endpoint = json!({"endpoint": {"address": address(at)}});
    let mut cluster = json!({
        "name": "next",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "next", "endpoints": [{"lb_endpoints": [endpoint]}]},
    });
    if let Some(tls) = tls {
        cluster["transport_socket"] = tls;
    }
    cluster
}

fn tls(side: &str, own: &str, peer: &str, directory: &Path) -> Value {
    let file = |name: &str| json!({"filename": directory.join(name)});
    let mut context = json!({
        "@type": format!("{EXTENSIONS}.transport_sockets.tls.v3.{side}TlsContext"),
        "common_tls_context": {
            "alpn_protocols": ["http/1.1"],
            "tls_params": {"tls_maximum_protocol_version": "TLSv1_3"},
            "tls_certificates": [{
                "certificate_chain": file(&format!("{own}.pem")),
                "private_key": file(&format!("{own}.key")),
            }],
            "validation_context": {
                "trusted_ca": file("overlay-ca.pem"),
                "match_typed_subject_alt_names": [{"san_type": "URI", "matcher": {"exact": peer}}],
            },
        },
    });
    if side == "Downstream" {
        context["require_client_certificate"] = true.into();
    }
    json!({"name": "envoy.transport_sockets.tls", "typed_config": context})
}

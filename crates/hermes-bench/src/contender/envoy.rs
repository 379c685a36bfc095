//! Envoy 1.40, as the paper uses it: HTTP and CONNECT on one listener, TCP and UDP tunnelled over HTTP/2.
//!
//! In: a plan. Out: one or two Envoys with one worker each. Configurations are JSON, which Envoy reads as well as YAML.
//! [`parts`] lists the settings that Envoy needs for a fair result, and why.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::Result;
use hermes_testkit::{envoy as envoy_binary, process::Port};
use serde_json::{Value, json};

use super::{Contender, launch, ready};
use crate::chain::{Chain, ClientListeners, ECHO, FLOOD, Plan, SECURE, SINK, Security, Shape, VOICE, WEB};

mod parts;

/// Envoy's own binary.
pub(crate) struct Envoy {
    /// The path of the binary.
    pub(crate) binary: PathBuf,
}

impl Contender for Envoy {
    fn name(&self) -> &'static str {
        "envoy"
    }

    fn version(&self) -> String {
        envoy_binary::version(&self.binary).unwrap_or_else(|error| error.to_string())
    }

    fn start(&self, plan: &Plan<'_>) -> Result<Option<Chain>> {
        let ports = plan.ports;
        let near = near(plan).to_string();
        let mut near = launch(plan, plan.near, "envoy-near", &self.binary, ("envoy-near.json", &near), arguments)?;
        let logs = ["near", "far"].map(|side| log(plan, side)).to_vec();
        if plan.shape == Shape::OneHop {
            ready(&mut [(&mut near, &[Port::Tcp(ports.http)])])?;
            let listeners =
                ClientListeners { secure: None, tcp: None, udp: None, sink: None, flood: None, ..listeners(plan) };
            return Ok(Some(Chain { contender: self.name(), listeners, programs: vec![near], logs }));
        }
        let far = far(plan).to_string();
        let mut far = launch(plan, plan.far, "envoy-far", &self.binary, ("envoy-far.json", &far), arguments)?;
        let clients = [Port::Tcp(ports.http), Port::Tcp(ports.tcp), Port::Udp(ports.udp)];
        ready(&mut [(&mut near, &clients), (&mut far, &[plan.link()])])?;
        Ok(Some(Chain { contender: self.name(), listeners: listeners(plan), programs: vec![near, far], logs }))
    }
}

/// Hot restart is off: it would let two Envoys on one machine conflict in shared memory.
fn arguments(config: &Path) -> Vec<String> {
    let config = config.to_string_lossy();
    ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning", "-c", &config].map(str::to_owned).to_vec()
}

fn log(plan: &Plan<'_>, side: &str) -> PathBuf {
    plan.dir.join(format!("envoy-{side}.access.json"))
}

fn listeners(plan: &Plan<'_>) -> ClientListeners {
    let ports = plan.ports;
    ClientListeners {
        http: local(ports.http),
        http2: Some(local(ports.http)),
        secure: Some(local(ports.http)),
        connect: true,
        tcp: Some(local(ports.tcp)),
        udp: Some(local(ports.udp)),
        sink: Some(local(ports.sink)),
        flood: Some(local(ports.flood)),
    }
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// The client's Envoy.
fn near(plan: &Plan<'_>) -> Value {
    let log = log(plan, "near");
    let ports = plan.ports;
    let next = if plan.shape == Shape::OneHop { "origin" } else { "far" };
    let hosts = json!([{
        "name": "any",
        "domains": ["*"],
        "routes": [parts::forward(json!({"connect_matcher": {}}), next), parts::forward(json!({"prefix": "/"}), next)],
    }]);
    let web = parts::http_filter(&log, &hosts, &["CONNECT"]);
    let mut listeners = vec![parts::tcp_listener("web", local(ports.http), &web, None)];
    if plan.shape == Shape::OneHop {
        let clusters = [parts::cluster("origin", plan.origins.http, parts::Upstream::H1)];
        return parts::bootstrap(ports.admin[0], &listeners, &clusters);
    }
    for (name, port, authority) in [("echo", ports.tcp, ECHO), ("sink", ports.sink, SINK)] {
        let tunnel = parts::tcp_tunnel(&log, authority, "far");
        listeners.push(parts::tcp_listener(name, local(port), &tunnel, None));
    }
    for (name, port, target) in [("voice", ports.udp, VOICE), ("flood", ports.flood, FLOOD)] {
        listeners.push(parts::udp_listener(name, local(port), &log, target, "far"));
    }
    let link = SocketAddr::from((plan.far.address, ports.link));
    let files = &plan.identities[0];
    let upstream = match plan.security {
        Security::Plain => parts::Upstream::H2(None),
        Security::Mtls => parts::Upstream::H2(Some(files)),
        Security::Quic => parts::Upstream::H3(files),
    };
    parts::bootstrap(ports.admin[0], &listeners, &[parts::cluster("far", link, upstream)])
}

/// The server's Envoy.
fn far(plan: &Plan<'_>) -> Value {
    let log = log(plan, "far");
    let voice = format!("{}:{}", VOICE.0, VOICE.1);
    let flood = format!("{}:{}", FLOOD.0, FLOOD.1);
    let tunnels = [
        ("secure", SECURE, "CONNECT"),
        ("echo", ECHO, "CONNECT"),
        ("sink", SINK, "CONNECT"),
        // The authority of CONNECT-UDP is the next proxy; `parts::udp_listener` names it after its target.
        ("voice", &voice, "CONNECT-UDP"),
        ("flood", &flood, "CONNECT-UDP"),
    ];
    let mut hosts: Vec<Value> = tunnels
        .iter()
        .map(|(cluster, domain, upgrade)| {
            json!({"name": cluster, "domains": [domain], "routes": [parts::terminate(cluster, upgrade)]})
        })
        .collect();
    let web = parts::forward(json!({"prefix": "/"}), "origin");
    hosts.push(json!({"name": "web", "domains": [WEB], "routes": [web]}));
    let filter = parts::http_filter(&log, &json!(hosts), &["CONNECT", "CONNECT-UDP"]);
    let files = &plan.identities[1];
    let bind = SocketAddr::from((plan.far.address, plan.ports.link));
    let overlay = match plan.security {
        Security::Plain => parts::tcp_listener("overlay", bind, &filter, None),
        Security::Mtls => parts::tcp_listener("overlay", bind, &filter, Some(files)),
        Security::Quic => parts::quic_listener("overlay", bind, filter, files),
    };
    let listeners = [overlay];
    let origins = plan.origins;
    let clusters = [
        parts::cluster("origin", origins.http, parts::Upstream::H1),
        parts::cluster("secure", origins.secure, parts::Upstream::Raw),
        parts::cluster("echo", origins.tcp, parts::Upstream::Raw),
        parts::cluster("sink", origins.sink, parts::Upstream::Raw),
        parts::cluster("voice", origins.udp, parts::Upstream::Raw),
        parts::cluster("flood", origins.flood, parts::Upstream::Raw),
    ];
    parts::bootstrap(plan.ports.admin[1], &listeners, &clusters)
}

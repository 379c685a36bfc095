//! Hermes itself, configured by a node document.
//!
//! In: a plan. Out: one or two `hermes proxy` processes. The documents use only keys of the contract. Limits keep their
//! defaults, except the number of UDP flows, which repeated bursts of a thousand clients would reach.

use std::{fmt::Write as _, net::SocketAddr, path::PathBuf};

use anyhow::Result;
use hermes_testkit::process::Port;

use super::{Contender, launch, ready, version_of};
use crate::chain::{Chain, ClientListeners, ECHO, FLOOD, Plan, SECURE, SINK, Security, Shape, VOICE, WEB};

/// The binary under test.
pub(crate) struct Hermes {
    /// The path of the binary.
    pub(crate) binary: PathBuf,
}

impl Contender for Hermes {
    fn name(&self) -> &'static str {
        "hermes"
    }

    fn version(&self) -> String {
        version_of(&self.binary, "--version")
    }

    fn start(&self, plan: &Plan<'_>) -> Result<Option<Chain>> {
        let ports = plan.ports;
        let args = |config: &std::path::Path| {
            vec!["proxy".to_owned(), "--config".to_owned(), config.to_string_lossy().into_owned()]
        };
        let mut near =
            launch(plan, plan.near, "hermes-near", &self.binary, ("hermes-near.yaml", &near_document(plan)), args)?;
        let clients = [Port::Tcp(ports.http), Port::Tcp(ports.tcp), Port::Udp(ports.udp)];
        let listeners = listeners(plan);
        if plan.shape == Shape::OneHop {
            ready(&mut [(&mut near, &clients[..1])])?;
            let listeners =
                ClientListeners { secure: None, tcp: None, udp: None, sink: None, flood: None, ..listeners };
            return Ok(Some(Chain { contender: self.name(), listeners, programs: vec![near], logs: logs(plan, 1) }));
        }
        let mut far =
            launch(plan, plan.far, "hermes-far", &self.binary, ("hermes-far.yaml", &far_document(plan)), args)?;
        ready(&mut [(&mut near, &clients), (&mut far, &[plan.link()])])?;
        Ok(Some(Chain { contender: self.name(), listeners, programs: vec![near, far], logs: logs(plan, 2) }))
    }
}

fn logs(plan: &Plan<'_>, count: usize) -> Vec<PathBuf> {
    ["near", "far"][..count].iter().map(|side| log(plan, side)).collect()
}

fn log(plan: &Plan<'_>, side: &str) -> PathBuf {
    plan.dir.join(format!("hermes-{side}.access.json"))
}

fn listeners(plan: &Plan<'_>) -> ClientListeners {
    let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let ports = plan.ports;
    ClientListeners {
        http: at(ports.http),
        // One port accepts both protocols.
        http2: Some(at(ports.http)),
        secure: Some(at(ports.http)),
        connect: true,
        tcp: Some(at(ports.tcp)),
        udp: Some(at(ports.udp)),
        sink: Some(at(ports.sink)),
        flood: Some(at(ports.flood)),
    }
}

fn head(plan: &Plan<'_>, side: usize) -> String {
    let name = ["near", "far"][side];
    let files = &plan.identities[side];
    let mut text = format!(
        "node: {name}\nadmin: 127.0.0.1:{}\nworkers: 1\nrole: standalone\naccess-log: {}\n",
        plan.ports.admin[side],
        log(plan, name).display()
    );
    text += "limits: {udp-flows: 16384}\n";
    let identity = [&files.cert, &files.key, &files.ca].map(|p| p.display().to_string());
    if plan.security != Security::Plain {
        let [cert, key, ca] = identity;
        let _ = writeln!(text, "identity: {{cert: {cert}, key: {key}, ca: {ca}}}");
    }
    text
}

/// The document of the client's node, which forwards everything to the far node, or for one hop to the origin.
pub(crate) fn near_document(plan: &Plan<'_>) -> String {
    let ports = plan.ports;
    let mut text = head(plan, 0);
    let _ = write!(text, "listeners:\n- {{name: web, bind: \"127.0.0.1:{}\", protocol: http}}\n", ports.http);
    if plan.shape == Shape::OneHop {
        let _ = write!(
            text,
            "routes:\n- {{name: web, match: {{authority: {WEB}}}, upstream: origin}}\n\
             upstreams:\n- {{name: origin, protocol: h1, endpoints: [\"{}\"]}}\n",
            plan.origins.http
        );
        return text;
    }
    let voice = format!("{}:{}", VOICE.0, VOICE.1);
    let flood = format!("{}:{}", FLOOD.0, FLOOD.1);
    for (name, port, protocol, authority) in [
        ("echo", ports.tcp, "tcp", ECHO),
        ("sink", ports.sink, "tcp", SINK),
        ("voice", ports.udp, "udp", voice.as_str()),
        ("flood", ports.flood, "udp", flood.as_str()),
    ] {
        let _ = writeln!(
            text,
            "- {{name: {name}, bind: \"127.0.0.1:{port}\", protocol: {protocol}, authority: \"{authority}\"}}"
        );
    }
    let path = match plan.security {
        Security::Plain => "protocol: h2",
        Security::Mtls => "protocol: h2, tls: {node: far}",
        Security::Quic => "protocol: h3, tls: {node: far}",
    };
    let _ = write!(
        text,
        "routes:\n- {{name: all, upstream: far}}\n\
         upstreams:\n- {{name: far, {path}, endpoints: [\"{}:{}\"]}}\n",
        plan.far.address, ports.link
    );
    text
}

/// The server's node.
pub(crate) fn far_document(plan: &Plan<'_>) -> String {
    let mut text = head(plan, 1);
    let guard = match plan.security {
        // A node trusts plaintext peers only if its document lists them.
        Security::Plain => format!("trust: [{}/32]", plan.near.address),
        Security::Mtls => "tls: {client: required}".to_owned(),
        Security::Quic => "http3: true, tls: {client: required}".to_owned(),
    };
    let bind = format!("{}:{}", plan.far.address, plan.ports.link);
    let _ = write!(
        text,
        "listeners:\n- {{name: overlay, bind: \"{bind}\", protocol: http, {guard}}}\n\
         routes:\n- {{name: web, match: {{authority: {WEB}}}, upstream: origin}}\n"
    );
    let origins = plan.origins;
    for (name, kind, authority, target) in [
        ("secure", "tcp", SECURE.to_owned(), origins.secure),
        ("echo", "tcp", ECHO.to_owned(), origins.tcp),
        ("sink", "tcp", SINK.to_owned(), origins.sink),
        ("voice", "udp", format!("{}:{}", VOICE.0, VOICE.1), origins.udp),
        ("flood", "udp", format!("{}:{}", FLOOD.0, FLOOD.1), origins.flood),
    ] {
        let _ = writeln!(
            text,
            "- {{name: {name}, match: {{kind: {kind}, authority: \"{authority}\"}}, terminate: {{{kind}: \"{target}\"}}}}"
        );
    }
    let _ = write!(text, "upstreams:\n- {{name: origin, protocol: h1, endpoints: [\"{}\"]}}\n", origins.http);
    text
}

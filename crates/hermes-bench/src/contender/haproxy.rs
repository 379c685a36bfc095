//! HAProxy: one hop h1 and h2; two hops with h2 between, in the clear or with mutual TLS.
//!
//! In: a plan. Out: one or two HAProxy processes with one thread each. HAProxy forwards HTTP. It could only pass
//! CONNECT on, and it does not tunnel TCP and UDP.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use hermes_testkit::process::{Port, Running};

use super::{Contender, launch, ready, version_of};
use crate::chain::{Chain, ClientListeners, Location, Plan, Security, Shape};
use hermes_testkit::tool::on_path;

/// Debian's HAProxy.
pub(crate) struct HaProxy;

impl Contender for HaProxy {
    fn name(&self) -> &'static str {
        "haproxy"
    }

    fn version(&self) -> String {
        on_path("haproxy").map_or_else(|| "missing".into(), |binary| version_of(&binary, "-v"))
    }

    fn start(&self, plan: &Plan<'_>) -> Result<Option<Chain>> {
        let ports = plan.ports;
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let link = SocketAddr::from((plan.far.address, ports.link));
        let tls = bundles(plan)?;
        let (server, bind) = match plan.security {
            Security::Plain => (format!("{link} proto h2"), format!("{link} proto h2")),
            // Only tunnels are measured over HTTP/3, and HAProxy does not support them.
            Security::Quic => return Ok(None),
            Security::Mtls => {
                let ca = plan.identities[0].ca.display();
                let [near, far] = tls;
                (
                    format!("{link} ssl crt {near} ca-file {ca} verify required alpn h2 ssl-min-ver TLSv1.3"),
                    format!("{link} ssl crt {far} ca-file {ca} verify required alpn h2 ssl-min-ver TLSv1.3"),
                )
            }
        };
        let origin = plan.origins.http.to_string();
        let target = if plan.shape == Shape::OneHop { &origin } else { &server };
        let clients = [at(ports.http).to_string(), format!("{} proto h2", at(ports.http2))];
        let near = config(plan.ports.admin[0], &clients, target);
        let listening = [Port::Tcp(ports.http), Port::Tcp(ports.http2)];
        let mut programs = vec![start(plan, plan.near, "haproxy-near", &near, &listening)?];
        if plan.shape == Shape::TwoHops {
            let far = config(plan.ports.admin[1], &[bind], &origin);
            programs.push(start(plan, plan.far, "haproxy-far", &far, &[Port::Tcp(ports.link)])?);
        }
        let listeners = ClientListeners {
            http: at(ports.http),
            http2: Some(at(ports.http2)),
            secure: None,
            connect: false,
            tcp: None,
            udp: None,
            sink: None,
            flood: None,
        };
        Ok(Some(Chain { contender: self.name(), listeners, programs, logs: Vec::new() }))
    }
}

/// HAProxy requires certificate and key in one file.
fn bundles(plan: &Plan<'_>) -> Result<[String; 2]> {
    let mut names = [String::new(), String::new()];
    for (name, (side, files)) in names.iter_mut().zip(["near", "far"].iter().zip(plan.identities)) {
        let bundle = plan.dir.join(format!("haproxy-{side}.bundle.pem"));
        let parts = [std::fs::read(&files.cert)?, std::fs::read(&files.key)?].concat();
        std::fs::write(&bundle, parts)?;
        *name = bundle.display().to_string();
    }
    Ok(names)
}

fn start(plan: &Plan<'_>, location: Location<'_>, name: &str, config: &str, ports: &[Port]) -> Result<Running> {
    let binary = on_path("haproxy").context("HAProxy is gone")?;
    let args = |path: &std::path::Path| vec!["-db".to_owned(), "-f".to_owned(), path.to_string_lossy().into_owned()];
    let mut running = launch(plan, location, name, &binary, (&format!("{name}.cfg"), config), args)?;
    ready(&mut [(&mut running, ports)])?;
    Ok(running)
}

/// Logs go to standard output, which is the access log's file.
fn config(admin: u16, binds: &[String], server: &str) -> String {
    let binds: String = binds.iter().map(|bind| format!("  bind {bind}\n")).collect();
    format!(
        r#"global
  log stdout format raw local0
  nbthread 1
  maxconn 8000
  tune.h2.max-concurrent-streams 1024
defaults
  mode http
  log global
  log-format '{{"time":"%t","client":"%ci","method":"%HM","path":"%HP","protocol":"%HV","status":%ST,"bytes_in":%U,"bytes_out":%B,"ms":%Tt,"upstream":"%s"}}'
  timeout connect 5s
  timeout client 75s
  timeout server 75s
  timeout http-request 10s
  timeout http-keep-alive 75s
frontend web
{binds}  default_backend next
backend next
  http-reuse always
  server next {server}
frontend metrics
  bind 127.0.0.1:{admin}
  http-request use-service prometheus-exporter if {{ path /metrics }}
  http-request set-log-level silent
"#
    )
}

//! nginx: one hop h1 and h2; two hops with h1 between, since it speaks no h2 upstream.
//!
//! In: a plan. Out: one or two nginx masters with a worker each.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use hermes_testkit::process::{Port, Running};

use super::{Contender, launch, ready, version_of};
use crate::chain::{Chain, ClientListeners, Location, Plan, Security, Shape};
use hermes_testkit::tool::on_path;

/// Debian's nginx.
pub(crate) struct Nginx;

impl Contender for Nginx {
    fn name(&self) -> &'static str {
        "nginx"
    }

    fn version(&self) -> String {
        on_path("nginx").map_or_else(|| "missing".into(), |binary| version_of(&binary, "-v"))
    }

    fn start(&self, plan: &Plan<'_>) -> Result<Option<Chain>> {
        if plan.security != Security::Plain {
            // The path is skipped: nginx would use h1 over TLS between the proxies, which is not comparable with the
            // others.
            return Ok(None);
        }
        let ports = plan.ports;
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let mut programs = Vec::new();
        let target = match plan.shape {
            Shape::OneHop => plan.origins.http,
            Shape::TwoHops => SocketAddr::from((plan.far.address, ports.link)),
        };
        let listen = format!("listen {};\n", at(ports.http));
        let listen2 = format!("listen {} http2;\n", at(ports.http2));
        let near = config(plan, 0, &[listen, listen2], target);
        programs.push(start(plan, plan.near, "nginx-near", &near, &[Port::Tcp(ports.http), Port::Tcp(ports.http2)])?);
        if plan.shape == Shape::TwoHops {
            let listen = format!("listen {target};\n");
            let far = config(plan, 1, &[listen], plan.origins.http);
            programs.push(start(plan, plan.far, "nginx-far", &far, &[Port::Tcp(ports.link)])?);
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
        let logs = ["nginx-near", "nginx-far"].map(|name| plan.dir.join(format!("{name}.access.json")));
        Ok(Some(Chain { contender: self.name(), listeners, programs, logs: logs.to_vec() }))
    }
}

fn start(plan: &Plan<'_>, location: Location<'_>, name: &str, config: &str, ports: &[Port]) -> Result<Running> {
    let binary = on_path("nginx").context("nginx is gone")?;
    let prefix = plan.dir.to_string_lossy().into_owned();
    let args = |path: &std::path::Path| {
        let path = path.to_string_lossy().into_owned();
        ["-p", &prefix, "-e", "stderr", "-c", &path].map(str::to_owned).to_vec()
    };
    let mut running = launch(plan, location, name, &binary, (&format!("{name}.conf"), config), args)?;
    ready(&mut [(&mut running, ports)])?;
    Ok(running)
}

/// `limit_conn` and the header limits correspond to the limits of the others, `stub_status` to their metrics.
fn config(plan: &Plan<'_>, side: usize, listens: &[String], target: SocketAddr) -> String {
    let name = ["nginx-near", "nginx-far"][side];
    let dir = plan.dir.display();
    let admin = plan.ports.admin[side];
    let listens = listens.concat();
    format!(
        r#"daemon off;
user root;
worker_processes 1;
worker_rlimit_nofile 20000;
pid {dir}/{name}.pid;
error_log stderr warn;
events {{ worker_connections 16384; }}
http {{
  log_format record escape=json '{{"time":"$time_iso8601","client":"$remote_addr","method":"$request_method",'
    '"authority":"$host","path":"$request_uri","protocol":"$server_protocol","status":$status,'
    '"bytes_in":$request_length,"bytes_out":$bytes_sent,"seconds":$request_time,"upstream":"$upstream_addr"}}';
  access_log {dir}/{name}.access.json record buffer=64k flush=1s;
  client_body_temp_path {dir}/{name}.body;
  proxy_temp_path {dir}/{name}.proxy;
  fastcgi_temp_path {dir}/{name}.fastcgi;
  uwsgi_temp_path {dir}/{name}.uwsgi;
  scgi_temp_path {dir}/{name}.scgi;
  tcp_nodelay on;
  keepalive_timeout 75s;
  keepalive_requests 100000000;
  client_header_timeout 10s;
  large_client_header_buffers 4 16k;
  http2_max_concurrent_streams 1024;
  limit_conn_zone $binary_remote_addr zone=clients:1m;
  upstream next {{ server {target}; keepalive 256; keepalive_requests 100000000; }}
  server {{
    {listens}
    limit_conn clients 8000;
    location / {{
      proxy_pass http://next;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
    }}
  }}
  server {{ listen 127.0.0.1:{admin}; location = /metrics {{ stub_status; access_log off; }} }}
}}
"#
    )
}

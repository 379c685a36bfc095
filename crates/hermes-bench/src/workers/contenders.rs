//! The proxies of `workers`, with several workers each, in the modes in which they distribute connections.
//!
//! In: a directory, and the binaries. Out: a running proxy that answers all requests itself. Every proxy reads requests through a
//! library that does the work that they ask for (`hermes_testkit::work`). Never: an origin, which would share the cores.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use hermes_testkit::netns::Namespace;
use hermes_testkit::process::{Port, Program, Running};
use serde_json::json;

use hermes_testkit::tool::on_path;

/// The first port of the listeners.
pub(super) const FIRST_PORT: u16 = 9000;
/// The port of the admin endpoint of Hermes.
pub(super) const ADMIN: u16 = 8999;
const START: Duration = Duration::from_secs(20);

/// A proxy in one of its modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Contender {
    Hermes(&'static str),
    HaProxy(&'static str),
    Envoy(&'static str),
}

/// All contenders, in the order of their turns.
pub(super) const ALL: [Contender; 8] = [
    Contender::Hermes("directed"),
    Contender::Hermes("reuseport"),
    Contender::Hermes("exclusive"),
    Contender::Hermes("roundrobin"),
    Contender::HaProxy("on"),
    Contender::HaProxy("fair"),
    Contender::Envoy("exact"),
    Contender::Envoy("reuse_port"),
];

impl Contender {
    pub(super) fn name(self) -> String {
        match self {
            Self::Hermes(mode) => format!("hermes {mode}"),
            Self::HaProxy(mode) => format!("haproxy {mode}"),
            Self::Envoy(mode) => format!("envoy {mode}"),
        }
    }
}

/// How the proxies are started.
pub(super) struct Place<'a> {
    pub(super) hermes: &'a Path,
    /// `None`: Envoy is left out.
    pub(super) envoy: Option<&'a Path>,
    pub(super) library: &'a Path,
    pub(super) dir: &'a Path,
    pub(super) namespace: &'a Namespace,
    pub(super) workers: usize,
    pub(super) listeners: u16,
    /// Settings of `dispatch`, such as `connections-offset: 20`.
    pub(super) settings: &'a str,
}

impl Place<'_> {
    /// Starts a contender. `None`: it is not installed.
    pub(super) fn start(&self, contender: Contender) -> Result<Option<Running>> {
        let name = contender.name().replace(' ', "-");
        let (binary, file, text, args) = match contender {
            Contender::Hermes(mode) => {
                let args = ["proxy", "--config"].map(str::to_owned).to_vec();
                (Some(self.hermes.to_owned()), "yaml", self.hermes_document(mode), args)
            }
            Contender::HaProxy(mode) => {
                (on_path("haproxy"), "cfg", self.haproxy(mode), ["-db", "-f"].map(str::to_owned).to_vec())
            }
            Contender::Envoy(mode) => {
                let workers = self.workers.to_string();
                let args = ["--concurrency", &workers, "--disable-hot-restart", "--log-level", "error", "-c"];
                let args = args.map(str::to_owned).to_vec();
                (self.envoy.map(Path::to_owned), "json", self.envoy_config(mode)?, args)
            }
        };
        let Some(binary) = binary else { return Ok(None) };
        let config = self.dir.join(format!("{name}.{file}"));
        std::fs::write(&config, text)?;
        let program = Program::new(&name, binary, self.dir).args(args).args([&config]);
        let mut running = program.env("LD_PRELOAD", self.library).within(Some(self.namespace)).start()?;
        let ports: Vec<Port> = self.ports().map(Port::Tcp).collect();
        running.wait_listening(&ports, START)?;
        Ok(Some(running))
    }

    pub(super) fn ports(&self) -> impl Iterator<Item = u16> {
        FIRST_PORT..FIRST_PORT + self.listeners
    }

    fn hermes_document(&self, mode: &str) -> String {
        let listeners: String = self
            .ports()
            .map(|port| format!("- {{name: l{port}, bind: '127.0.0.1:{port}', protocol: http}}\n"))
            .collect();
        format!(
            "node: bench\nworkers: {}\ndispatch: {{mode: {mode}, {}}}\naccess-log: off\nadmin: '127.0.0.1:{ADMIN}'\n\
             limits: {{connections: 20000}}\n\
             listeners:\n{listeners}routes:\n- {{name: all, match: {{path: '/*'}}, respond: {{status: 200, body: \"ok\\n\"}}}}\n",
            self.workers, self.settings
        )
    }

    fn haproxy(&self, mode: &str) -> String {
        let binds: String = self.ports().map(|port| format!("  bind 127.0.0.1:{port}\n")).collect();
        format!(
            "global\n  nbthread {}\n  maxconn 8000\n  tune.listener.multi-queue {mode}\ndefaults\n  mode http\n  \
             timeout connect 5s\n  timeout client 75s\n  timeout server 75s\nfrontend web\n{binds}  \
             http-request return status 200 content-type text/plain string \"ok\\n\"\n",
            self.workers
        )
    }

    fn envoy_config(&self, mode: &str) -> Result<String> {
        let manager = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "web",
            "route_config": {"virtual_hosts": [{
                "name": "all", "domains": ["*"],
                "routes": [{"match": {"prefix": "/"}, "direct_response": {"status": 200, "body": {"inline_string": "ok\n"}}}],
            }]},
            "http_filters": [{
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }],
        });
        let listener = |port: u16| {
            let mut listener = json!({
                "name": format!("l{port}"),
                "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
                "tcp_backlog_size": 4096,
                "enable_reuse_port": mode == "reuse_port",
                "filter_chains": [{"filters": [{
                    "name": "envoy.filters.network.http_connection_manager", "typed_config": manager,
                }]}],
            });
            if mode == "exact" {
                listener["connection_balance_config"] = json!({"exact_balance": {}});
            }
            listener
        };
        let listeners: Vec<_> = self.ports().map(listener).collect();
        Ok(serde_json::to_string(&json!({"static_resources": {"listeners": listeners}}))?)
    }
}

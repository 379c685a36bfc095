//! `hermes install --print`: service files for a node or a controller.
//!
//! In: options. Out: a systemd unit, a container file, or manifests of a controller, on standard output. Never: a
//! change of this machine; the administrator reviews and installs the output.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use hermes_controller::client::{ControllerAddr, PORT};
use hermes_model::document::Bind;
use hermes_model::document::scalar::HumanDuration;

use crate::document;
use crate::kubernetes::{self, Cluster, GRACE};

/// The default drain of a node, as in a node document.
const DRAIN: Duration = Duration::from_secs(10);

/// Print the unit or manifests for a node or a controller.
///
/// Changes nothing. To install: `hermes install --print systemd ... > /etc/systemd/system/hermes.service`.
#[derive(Debug, Parser)]
pub(super) struct Install {
    /// Print a systemd unit, a container file that builds an image from this source, or manifests of a controller
    #[arg(long, value_name = "KIND")]
    print: Option<Kind>,
    /// Run a node (proxy) or a controller
    #[arg(value_enum, default_value_t = What::Proxy)]
    what: What,
    /// Connect the node to this controller. Repeat or separate by commas for several
    #[arg(long, value_name = "URL", conflicts_with = "config", value_delimiter = ',')]
    controller: Vec<ControllerAddr>,
    /// Store state in this directory below /var/lib; its last segment names the unit [default: /var/lib/hermes, or
    /// /var/lib/hermes-controller for a controller]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Run the node from this document, without a controller
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Wait this long for a drain before the node is killed: the longest `drain` of its documents
    #[arg(long, value_name = "DURATION")]
    drain: Option<HumanDuration>,
    /// Listen for nodes at this address, for a controller
    #[arg(long, value_name = "ADDR", default_value_t = Bind(SocketAddr::from(([0, 0, 0, 0], PORT))))]
    listen: Bind,
    /// Start the program at this path
    #[arg(long, value_name = "FILE", default_value = "/usr/local/bin/hermes")]
    program: PathBuf,
    /// Allow the node to listen on ports below 1024
    #[arg(long)]
    low_ports: bool,
    /// Allow the node to create devices, routes and rules (`tun` listeners, gateways)
    #[arg(long)]
    devices: bool,
    /// Allow the node to load programs into the kernel (`dispatch: directed` and `roundrobin`)
    #[arg(long)]
    directed: bool,
    /// Set the namespace of the manifests [default: kubectl's]
    #[arg(long, value_name = "NAMESPACE", value_parser = namespace, help_heading = "Kubernetes")]
    namespace: Option<String>,
    #[command(flatten)]
    cluster: Cluster,
}

fn namespace(text: &str) -> Result<String, String> {
    let wrong = || "a namespace has small letters, digits and hyphens, the first a letter".to_owned();
    kubernetes::is_label(text).then(|| text.to_owned()).ok_or_else(wrong)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    Systemd,
    Container,
    Kubernetes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    Proxy,
    Controller,
}

impl Install {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Some(kind) = self.print else {
            anyhow::bail!(
                "missing --print: add --print systemd, --print container or --print kubernetes. This command prints files and installs nothing"
            )
        };
        if self.what == What::Proxy && kind == Kind::Kubernetes {
            anyhow::bail!(
                "nodes in a cluster are not installed; `hermes node deploy NAME --on kubernetes` prints their manifests"
            );
        }
        if self.what == What::Proxy && self.controller.is_empty() == self.config.is_none() {
            anyhow::bail!("say what the node runs: --controller URL, or --config FILE");
        }
        let text = match kind {
            Kind::Systemd => self.unit()?,
            Kind::Container => self.container()?,
            Kind::Kubernetes => kubernetes::controller(self.listen.0.port(), self.namespace.as_deref(), &self.cluster),
        };
        super::print(&text)?;
        Ok(ExitCode::SUCCESS)
    }

    /// The unit's state directory. A node and a controller on one machine do not share one.
    fn state(&self) -> &Path {
        let default = if self.what == What::Controller { "/var/lib/hermes-controller" } else { "/var/lib/hermes" };
        self.state.as_deref().unwrap_or(Path::new(default))
    }

    /// Returns the arguments of the program.
    fn arguments(&self, state: &str) -> anyhow::Result<Vec<String>> {
        Ok(match (self.what, &self.config) {
            (What::Controller, _) => {
                let listen = self.listen.to_string();
                ["controller", "--listen", &listen, "--data", state].map(str::to_owned).to_vec()
            }
            (What::Proxy, Some(config)) => ["proxy", "--config", plain(config)?].map(str::to_owned).to_vec(),
            (What::Proxy, None) => {
                let places: Vec<_> = self.controller.iter().map(ToString::to_string).collect();
                ["proxy", "--controller", &places.join(","), "--state", state].map(str::to_owned).to_vec()
            }
        })
    }

    /// Returns the time that the service has to stop.
    fn stop_within(&self) -> anyhow::Result<Duration> {
        let drain = match (self.what, self.drain, &self.config) {
            (What::Controller, ..) => Duration::ZERO,
            (_, Some(drain), _) => drain.0,
            (_, None, Some(config)) if config.exists() => document::read_at_once(config)?
                .map(|checked| checked.snapshot.drain)
                .map_err(|_| anyhow::anyhow!("{} is wrong; see `hermes check`", config.display()))?,
            _ => DRAIN,
        };
        Ok(drain + GRACE)
    }

    fn unit(&self) -> anyhow::Result<String> {
        let state = self.state();
        let outside = || format!("--state {}: a unit's directory is one below /var/lib", state.display());
        let name = state.strip_prefix("/var/lib").ok().and_then(Path::to_str).with_context(outside)?;
        let is_one =
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        anyhow::ensure!(is_one, "{}", outside());
        let program = plain(&self.program)?;
        anyhow::ensure!(self.program.is_absolute(), "--program {program}: a unit names it by its whole path");
        if let Some(config) = self.config.as_ref().filter(|config| !config.is_absolute()) {
            // The service runs in the root directory.
            anyhow::bail!(
                "--config {}: a unit names it by its whole path, such as /etc/hermes/node.yaml",
                config.display()
            );
        }
        let command = self.command(name)?;
        let word = if self.what == What::Proxy { "node" } else { "controller" };
        let stop = self.stop_within()?.as_secs();
        let mut unit = format!(
            "# {name}.service, a Hermes {word}. Install: write this to /etc/systemd/system/{name}.service, then\n\
             # systemctl daemon-reload && systemctl enable --now {name}\n"
        );
        if self.config.is_none() && self.what == What::Proxy {
            let _ = writeln!(
                unit,
                "# Its token, until it has enrolled: a line HERMES_TOKEN=... in /etc/{name}.env, which root alone may read."
            );
        }
        if self.what == What::Proxy {
            unit.push_str(&self.upgrade(name)?);
        }
        let _ = write!(
            unit,
            "[Unit]\nDescription=Hermes {word}\nWants=network-online.target\nAfter=network-online.target\n\
             # It is tried again for as long as it takes.\nStartLimitIntervalSec=0\n\n\
             [Service]\nType=notify\nExecStart={program} {command}\n"
        );
        if self.what == What::Proxy {
            let _ = writeln!(unit, "# The socket of --takeover lasts from one process to the next.");
            let _ = writeln!(unit, "RuntimeDirectory={name}\nRuntimeDirectoryMode=0700\nRuntimeDirectoryPreserve=yes");
        }
        match (self.what, &self.config) {
            (What::Proxy, None) => _ = writeln!(unit, "EnvironmentFile=-/etc/{name}.env"),
            (What::Proxy, Some(_)) => unit.push_str("ExecReload=kill -HUP $MAINPID\n"),
            (What::Controller, _) => {}
        }
        let _ = write!(
            unit,
            "Restart=always\nRestartSec=1\n\
             # SIGTERM lets live sessions finish; systemd kills the process after the stop timeout.\n\
             KillSignal=SIGTERM\nKillMode=mixed\nTimeoutStopSec={stop}\nTimeoutStartSec=60\n\n\
             # The unit runs as user {name} if it exists, else as a dynamic user. That user must be able to read the files that\n\
             # a document names.\n\
             User={name}\nDynamicUser=yes\nStateDirectory={name}\nStateDirectoryMode=0700\nLogsDirectory={name}\nUMask=0077\n\
             LimitNOFILE=1048576\n\n"
        );
        unit.push_str(&self.privileges());
        unit.push_str(HARDENED);
        unit.push_str("\n[Install]\nWantedBy=multi-user.target\n");
        Ok(unit)
    }

    /// The command line of the unit. A node listens for a successor.
    fn command(&self, name: &str) -> anyhow::Result<String> {
        let mut arguments = self.arguments(&format!("%S/{name}"))?;
        if self.what == What::Proxy {
            arguments.extend(["--takeover".to_owned(), format!("%t/{name}/takeover")]);
        }
        Ok(arguments.join(" "))
    }

    /// Comments on an upgrade without a refused connection: a successor runs outside the unit, and the restarted unit
    /// takes over from it in turn.
    fn upgrade(&self, name: &str) -> anyhow::Result<String> {
        let (program, command) = (plain(&self.program)?, self.command(name)?);
        let command = command.replace("%S/", "/var/lib/").replace("%t/", "/run/");
        let capabilities = self.capabilities();
        let ambient =
            if capabilities.is_empty() { String::new() } else { format!(" -p AmbientCapabilities=\"{capabilities}\"") };
        Ok(format!(
            "# To upgrade without a refused connection, replace {program}, then run:\n\
             # systemd-run --unit={name}-next -p Type=notify -p User={name} -p DynamicUser=yes -p StateDirectory={name} \
             -p RuntimeDirectory={name} -p RuntimeDirectoryPreserve=yes{ambient} {program} {command}\n\
             # The new process takes over. The old one exits after its last session, and systemd restarts this unit, which\n\
             # takes over in turn.\n"
        ))
    }

    /// Returns the capabilities of a node that needs some.
    fn capabilities(&self) -> String {
        let is_node = self.what == What::Proxy;
        let low = (self.low_ports && is_node).then_some("CAP_NET_BIND_SERVICE");
        let programs = (self.directed && is_node).then_some("CAP_BPF");
        let network = ((self.devices || self.directed) && is_node).then_some("CAP_NET_ADMIN");
        low.into_iter().chain(programs).chain(network).collect::<Vec<_>>().join(" ")
    }

    /// Returns the unit's privileges: none, unless options ask for them.
    fn privileges(&self) -> String {
        let all = self.capabilities();
        let mut text = format!("CapabilityBoundingSet={all}\nAmbientCapabilities={all}\n");
        if self.directed && self.what == What::Proxy {
            // It comes on top of those below.
            text.push_str("SystemCallFilter=bpf\n");
        }
        if self.devices && self.what == What::Proxy {
            // Devices also need their part of /proc/sys: forwarding, and the MTU of routes.
            text.push_str("DevicePolicy=closed\nDeviceAllow=/dev/net/tun rw\nProtectKernelTunables=no\n");
        } else {
            text.push_str("PrivateDevices=yes\nProtectKernelTunables=yes\n");
        }
        text
    }

    fn container(&self) -> anyhow::Result<String> {
        let state = plain(self.state())?;
        let arguments = self.arguments(state)?;
        let (user, rust) = (65532, env!("CARGO_PKG_RUST_VERSION"));
        let health = match (self.what, &self.config) {
            (What::Controller, _) => None,
            (What::Proxy, Some(config)) => Some(["--config", plain(config)?]),
            (What::Proxy, None) => Some(["--state", state]),
        };
        let list = |words: &[String]| serde_json::to_string(words).unwrap_or_default();
        let mut text = format!(
            "# A Hermes image, built from this source: docker build -f THIS-FILE -t hermes .\n\
             # SIGTERM lets live sessions finish: docker stop --time {}\n\
             FROM rust:{rust}-slim-bookworm AS build\nWORKDIR /source\n\
             RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*\n\
             COPY . .\nRUN cargo build --release --locked -p hermes\n\n\
             FROM debian:bookworm-slim\n\
             COPY --from=build /source/target/release/hermes /usr/local/bin/hermes\n\
             RUN install -d -m 0700 -o {user} -g {user} {state}\n\
             USER {user}:{user}\nVOLUME {state}\nSTOPSIGNAL SIGTERM\n",
            self.stop_within()?.as_secs()
        );
        if let Some(health) = health {
            let health = ["/usr/local/bin/hermes", "health"].iter().chain(&health).map(ToString::to_string);
            let health: Vec<String> = health.collect();
            let _ = writeln!(text, "# The node's document must contain `admin`.");
            let _ = writeln!(text, "HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD {}", list(&health));
        }
        let _ = write!(text, "ENTRYPOINT [\"/usr/local/bin/hermes\"]\nCMD {}\n", list(&arguments));
        Ok(text)
    }
}

/// Returns a path that needs no quotes. Units and container files quote differently.
fn plain(path: &Path) -> anyhow::Result<&str> {
    let text = path.to_str().filter(|text| {
        text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-+@,:".contains(&byte)) && !text.is_empty()
    });
    text.with_context(|| format!("{}: choose a path of letters, digits and . _ - + @ , : /", path.display()))
}

/// Restrictions for a process that needs only sockets, a directory and threads.
const HARDENED: &str = "\
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
LockPersonality=yes
MemoryDenyWriteExecute=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
";

//! `hermes health`: reports by its exit status whether the node on this machine accepts sessions.
//!
//! In: the node's document, for its admin endpoint. Out: status 0 or 1, and a line. Never: longer than a few seconds.
//! Containers and load balancers use it as a probe.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use hermes_model::document::Bind;

use crate::agent::StateDir;
use crate::document;
use crate::run::ADMIN_SOCKET;

/// Timeout of the admin endpoint, which answers at once if it is healthy.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Probe a node on this machine: exit status 0 if it accepts sessions.
///
/// Requests the admin endpoint, which the document must configure. Intended for container probes.
#[derive(Debug, Parser)]
pub(super) struct Health {
    /// Probe the node with this state directory, under a controller
    #[arg(long, value_name = "DIR", required_unless_present_any = ["config", "admin"])]
    state: Option<PathBuf>,
    /// Probe the node with this document, without a controller
    #[arg(long, value_name = "FILE", conflicts_with = "state")]
    config: Option<PathBuf>,
    /// Probe this admin endpoint
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["state", "config"])]
    admin: Option<Bind>,
    /// Probe only that the node runs, also while it drains
    #[arg(long)]
    live: bool,
}

impl Health {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let path = if self.live { "/healthz" } else { "/readyz" };
        // A node under a controller serves a socket in its directory, whatever its document contains.
        let socket = self.state.as_ref().map(|state| StateDir::at(state).path(ADMIN_SOCKET));
        if let Some(stream) = socket.and_then(|socket| UnixStream::connect(socket).ok()) {
            let answered = stream
                .set_read_timeout(Some(ADMIN_TIMEOUT))
                .and_then(|()| stream.set_write_timeout(Some(ADMIN_TIMEOUT)))
                .map_err(anyhow::Error::from)
                .and_then(|()| converse(stream, "localhost", path));
            let (is_well, said) = answered.context("the admin endpoint in the node's directory")?;
            super::print(&format!("{said}\n"))?;
            return Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        let file = match (&self.state, self.config) {
            (Some(state), _) => Some(StateDir::at(state).document()),
            (None, config) => config,
        };
        let address = match file {
            None => self.admin.map(|admin| admin.0),
            // The node has no document yet, and is healthy.
            Some(file) if self.live && std::fs::metadata(&file).map_or(true, |file| file.len() == 0) => {
                super::print("no document yet\n")?;
                return Ok(ExitCode::SUCCESS);
            }
            Some(file) => {
                let checked = document::read_at_once(&file)?;
                let checked =
                    checked.map_err(|_| anyhow::anyhow!("{} is wrong; see `hermes check`", file.display()))?;
                let missing = || {
                    format!(
                        "no node responds for {}: it does not run, or it has neither `admin` (\"127.0.0.1:9900\") nor a controller",
                        file.display()
                    )
                };
                Some(checked.snapshot.admin.with_context(missing)?)
            }
        };
        let Some(address) = address else { anyhow::bail!("say where: --state, --config or --admin") };
        let (is_well, said) = query(address, path).with_context(|| format!("the admin endpoint at {address}"))?;
        super::print(&format!("{said}\n"))?;
        Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Requests a path, and returns whether the status is 200, with the body.
fn query(address: SocketAddr, path: &str) -> anyhow::Result<(bool, String)> {
    // A node that listens on all addresses is reached on loopback.
    let address = match address.ip() {
        ip if !ip.is_unspecified() => address,
        ip if ip.is_ipv4() => SocketAddr::from(([127, 0, 0, 1], address.port())),
        _ => SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, address.port())),
    };
    let stream = TcpStream::connect_timeout(&address, ADMIN_TIMEOUT)?;
    stream.set_read_timeout(Some(ADMIN_TIMEOUT))?;
    stream.set_write_timeout(Some(ADMIN_TIMEOUT))?;
    converse(stream, &address.to_string(), path)
}

fn converse(mut stream: impl Read + Write, host: &str, path: &str) -> anyhow::Result<(bool, String)> {
    write!(stream, "GET {path} HTTP/1.0\r\nhost: {host}\r\n\r\n")?;
    let mut text = String::new();
    // The peer may be any process on this machine, so its response is bounded.
    stream.take(4096).read_to_string(&mut text)?;
    let status = text.split(' ').nth(1).unwrap_or_default();
    anyhow::ensure!(text.starts_with("HTTP/1."), "the response is not HTTP");
    let said = text.split_once("\r\n\r\n").map_or("", |(_, body)| body.trim());
    Ok((status == "200", said.to_owned()))
}

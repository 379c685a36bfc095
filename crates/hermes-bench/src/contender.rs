//! Contenders: the proxies between client and origin.
//!
//! In: a [`Plan`]. Out: a running [`Chain`]. Each contender renders its own configuration with the same features on: a
//! JSON access log in a file, metrics, limits, one worker. An unsupported protocol has no listener.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};
use hermes_testkit::{
    envoy as envoy_binary,
    process::{Port, Program, Running},
    tool::on_path,
};

use crate::chain::{Chain, Location, Plan};

pub(crate) mod direct;
pub(crate) mod envoy;
pub(crate) mod haproxy;
pub(crate) mod hermes;
pub(crate) mod nginx;

/// The time that a proxy may take to listen.
const START: Duration = Duration::from_secs(20);

/// The programs that carry IP.
pub(crate) struct Programs {
    /// Hermes.
    pub(crate) hermes: PathBuf,
    /// The path of wireguard-go; `None` if it is not installed.
    pub(crate) wireguard: Option<PathBuf>,
}

/// A path from client to origin.
pub(crate) trait Contender {
    /// The name in result files and on the command line.
    fn name(&self) -> &'static str;
    /// The version that the program reports.
    fn version(&self) -> String;
    /// Starts the proxies and waits until they listen; `None` if the contender does not support such a path.
    fn start(&self, plan: &Plan<'_>) -> Result<Option<Chain>>;
}

/// All installed contenders, in the order of their turns; missing ones are printed.
pub(crate) fn present(hermes: &Path, only: &[String], dir: &Path) -> Vec<Box<dyn Contender>> {
    let wanted = |name: &str| only.is_empty() || only.iter().any(|o| o == name);
    let mut found: Vec<Box<dyn Contender>> = vec![Box::new(direct::Direct)];
    if wanted("envoy") {
        match envoy_binary::find(dir) {
            Ok(binary) => found.push(Box::new(envoy::Envoy { binary })),
            Err(error) => missing("envoy", &error.to_string()),
        }
    }
    if wanted("hermes") {
        if hermes.is_file() {
            // Programs run in their own directories, so the path must be absolute.
            let binary = hermes.canonicalize().unwrap_or_else(|_| hermes.to_owned());
            found.push(Box::new(hermes::Hermes { binary }));
        } else {
            missing("hermes", &format!("{} does not exist; build it or say --hermes PATH", hermes.display()));
        }
    }
    for (name, contender) in [
        ("haproxy", Box::new(haproxy::HaProxy) as Box<dyn Contender>),
        ("nginx", Box::new(nginx::Nginx) as Box<dyn Contender>),
    ] {
        if wanted(name) {
            match on_path(name) {
                Some(_) => found.push(contender),
                None => missing(name, "install the Debian package of that name"),
            }
        }
    }
    found.retain(|c| wanted(c.name()));
    found
}

/// The programs that carry IP. wireguard-go is the one that `scripts/setup.sh` builds: distributions package a version
/// without support for the kernel's offloads, which is five times slower.
pub(crate) fn layer3(hermes: &Path, only: &[String]) -> Programs {
    let tools = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let built = tools.join("tools/wireguard");
    let wireguard = (built.is_file() && on_path("wg").is_some()).then(|| built.canonicalize().unwrap_or(built));
    if wireguard.is_none() && (only.is_empty() || only.iter().any(|o| o == "wireguard-go")) {
        missing("wireguard-go", "run scripts/setup.sh, which needs Go, and install wireguard-tools");
    }
    Programs { hermes: hermes.canonicalize().unwrap_or_else(|_| hermes.to_owned()), wireguard }
}

/// The module version that Go embeds in a binary.
pub(crate) fn build_of(binary: &Path) -> String {
    let output = Command::new("go").args(["version", "-m"]).arg(binary).stdin(Stdio::null()).output();
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    let words = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let version = words.filter(|words| words.first() == Some(&"mod")).find_map(|words| words.get(2).copied());
    version.unwrap_or("unknown").to_owned()
}

fn missing(name: &str, why: &str) {
    eprintln!("!!! {name} IS LEFT OUT: {why}");
}

/// The first word that begins with a digit in a program's version output, on either stream.
fn version_of(binary: &Path, argument: &str) -> String {
    let output = Command::new(binary).arg(argument).stdin(Stdio::null()).output();
    let text = output.map(|o| [o.stdout, o.stderr].concat()).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let number = text.split([' ', '/', '\n']).find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    number.unwrap_or("unknown").to_owned()
}

/// Writes a configuration and starts a program with it in the namespace of `location`.
fn launch(
    plan: &Plan<'_>,
    location: Location<'_>,
    name: &str,
    binary: &Path,
    config: (&str, &str),
    args: impl Fn(&Path) -> Vec<String>,
) -> Result<Running> {
    let path = plan.dir.join(config.0);
    fs::write(&path, config.1).with_context(|| format!("writing {}", path.display()))?;
    let program =
        Program::new(name, binary, plan.dir).args(args(&path)).within(location.namespace).on_cpus(location.cpus);
    Ok(program.start()?)
}

/// Waits until every port of every program accepts connections.
fn ready(programs: &mut [(&mut Running, &[Port])]) -> Result<()> {
    for (program, ports) in programs {
        program.wait_listening(ports, START)?;
    }
    Ok(())
}

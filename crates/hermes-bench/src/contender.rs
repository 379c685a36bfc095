//! Contenders: what can stand between client and origin.
//!
//! In: a [`Plan`]. Out: a [`Chain`] that is up. Each renders its own configuration with the same things on: an access
//! log in JSON to a file, metrics, limits, one worker. A contender says what it cannot carry by leaving the entrance
//! out.

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
};

use crate::{
    chain::{Chain, Place, Plan},
    row::Programs,
};

pub(crate) mod direct;
pub(crate) mod envoy;
pub(crate) mod haproxy;
pub(crate) mod hermes;
pub(crate) mod nginx;

/// How long a proxy may take to listen.
const START: Duration = Duration::from_secs(20);

/// A way from client to origin.
pub(crate) trait Contender {
    /// As in result files and on the command line.
    fn name(&self) -> &'static str;
    /// What the program calls its version.
    fn version(&self) -> String;
    /// Starts it and waits until it listens; `None` when it cannot make such a path at all.
    fn start(&self, plan: &Plan<'_>) -> Result<Option<Chain>>;
}

/// All contenders that are here, in the order in which they take turns; those that are missing are named aloud.
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
            // Programs run in directories of their own.
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

/// The programs that carry IP. wireguard-go is the one that `scripts/setup.sh` has built, since distributions have
/// one from before it knew the kernel's offloads, which is five times slower.
pub(crate) fn layer3(hermes: &Path, only: &[String]) -> Programs {
    let tools = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let built = tools.join("tools/wireguard");
    let wireguard = (built.is_file() && on_path("wg").is_some()).then(|| built.canonicalize().unwrap_or(built));
    if wireguard.is_none() && (only.is_empty() || only.iter().any(|o| o == "wireguard-go")) {
        missing("wireguard-go", "run scripts/setup.sh, which needs Go, and install wireguard-tools");
    }
    Programs { hermes: hermes.canonicalize().unwrap_or_else(|_| hermes.to_owned()), wireguard }
}

/// What Go has written into a program of its module's version.
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

/// The first program of that name on the path, or in the directories of system programs.
fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(system).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// The first word that begins with a digit in what a program says of its version, on either output.
fn version_of(binary: &Path, argument: &str) -> String {
    let output = Command::new(binary).arg(argument).stdin(Stdio::null()).output();
    let text = output.map(|o| [o.stdout, o.stderr].concat()).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let number = text.split([' ', '/', '\n']).find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    number.unwrap_or("unknown").to_owned()
}

/// Writes a configuration and starts a program with it at `place`.
fn launch(
    plan: &Plan<'_>,
    place: Place<'_>,
    name: &str,
    binary: &Path,
    config: (&str, &str),
    args: impl Fn(&Path) -> Vec<String>,
) -> Result<Running> {
    let path = plan.dir.join(config.0);
    fs::write(&path, config.1).with_context(|| format!("writing {}", path.display()))?;
    let program = Program::new(name, binary, plan.dir).args(args(&path)).within(place.namespace).on_cpus(place.cpus);
    Ok(program.start()?)
}

/// Waits for every port of every program.
fn ready(programs: &mut [(&mut Running, &[Port])]) -> Result<()> {
    for (program, ports) in programs {
        program.wait_listening(ports, START)?;
    }
    Ok(())
}

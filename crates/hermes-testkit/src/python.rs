//! Peers in Python: aioquic and pycurl, unmodified, driven by short scripts.
//!
//! In: the requests to send or to serve, as JSON. Out: their results. The packages are third-party software:
//! `scripts/setup.sh` installs them into the target directory. Scripts end with their caller.

use std::{
    env,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, Command},
};

use crate::{
    Error, Result,
    ca::{Identity, IdentityFiles},
    raw_http1::in_time,
};

/// A script.
#[derive(Debug, Clone, Copy)]
pub struct Script {
    name: &'static str,
    source: &'static str,
    package: &'static str,
}

/// A client over HTTP/3.
pub const AIOQUIC_CLIENT: Script =
    Script { name: "aioquic_client", source: include_str!("python/aioquic_client.py"), package: "aioquic" };
/// An origin over HTTP/3.
pub const AIOQUIC_ORIGIN: Script =
    Script { name: "aioquic_origin", source: include_str!("python/aioquic_origin.py"), package: "aioquic" };
/// A client over any version.
pub const CURL: Script = Script { name: "curl", source: include_str!("python/curl.py"), package: "pycurl" };

/// A consumer of Named Data Networking.
pub const NDN_CONSUMER: Script =
    Script { name: "ndn_consumer", source: include_str!("python/ndn_consumer.py"), package: "ndn" };
/// A producer of Named Data Networking.
pub const NDN_PRODUCER: Script =
    Script { name: "ndn_producer", source: include_str!("python/ndn_producer.py"), package: "ndn" };

/// Timeout of a script: Python is slow, and shares the machine.
const WITHIN: Duration = Duration::from_secs(120);

/// Finds the packages: `HERMES_PYTHON`, or `tools/python` in the target directory.
///
/// # Errors
/// The script's package is not installed; the message contains the remedy.
pub fn find(target: &Path, script: Script) -> Result<PathBuf> {
    let tools = env::var_os("HERMES_PYTHON").map_or_else(|| target.join("tools/python"), PathBuf::from);
    let package = tools.join(script.package);
    if package.is_dir() || tools.join(format!("{}.py", script.package)).is_file() {
        return Ok(tools);
    }
    Err(Error::Missing {
        program: format!("the Python package {}", script.package),
        remedy: format!("run scripts/setup.sh, which puts it into {}, or set HERMES_PYTHON", tools.display()),
    })
}

fn command(script: Script, tools: &Path, args: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command.args(["-c", script.source]).args(args).env("PYTHONPATH", tools).env("PYTHONDONTWRITEBYTECODE", "1");
    command.kill_on_drop(true).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a script with `task` on its standard input, and reads its answer.
///
/// # Errors
/// The script cannot be run, takes too long, or fails; the error contains its output.
pub async fn run(script: Script, tools: &Path, task: &Value) -> Result<Value> {
    let failed = |output: String| Error::Command { command: script.name.to_owned(), output };
    let mut child = command(script, tools, &[]).spawn().map_err(Error::io("running python3"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(task.to_string().as_bytes()).await.map_err(Error::io(script.name))?;
    }
    let output = tokio::time::timeout(WITHIN, child.wait_with_output()).await;
    let output = output.map_err(|_| failed(format!("no answer within {WITHIN:?}")))?.map_err(Error::io(script.name))?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    serde_json::from_slice(&output.stdout).map_err(|_| failed(text))
}

/// A script that serves until it is dropped.
#[derive(Debug)]
pub struct Server {
    /// The port on loopback.
    pub port: u16,
    _child: Child,
}

/// Starts a script that serves with this identity, and waits until it listens.
///
/// # Errors
/// The script cannot be run or does not start; the error contains its output.
pub async fn serve(script: Script, tools: &Path, identity: &Identity, dir: &Path, more: &[&str]) -> Result<Server> {
    let IdentityFiles { cert, key, .. } = identity.write(dir, script.name)?;
    let (cert, key) = (cert.display().to_string(), key.display().to_string());
    let args = [&[cert.as_str(), key.as_str()], more].concat();
    start(script, tools, &args).await
}

/// Starts a script that serves, and waits until it listens.
///
/// # Errors
/// The errors of [`serve`].
pub async fn start(script: Script, tools: &Path, args: &[&str]) -> Result<Server> {
    let child = command(script, tools, args).spawn().map_err(Error::io("running python3"))?;
    listening(script.name, child).await
}

/// Waits until a program prints its port.
pub(crate) async fn listening(name: &'static str, mut child: Child) -> Result<Server> {
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        let mut lines = BufReader::new(stdout);
        in_time(name, lines.read_line(&mut line)).await.map_err(Error::io(name))?;
    }
    match line.trim().parse() {
        Ok(port) => Ok(Server { port, _child: child }),
        Err(_) => {
            // A script that cannot start ends immediately.
            let output = child.wait_with_output().await.map_err(Error::io(name))?;
            let output = String::from_utf8_lossy(&output.stderr).into_owned();
            Err(Error::Command { command: name.to_owned(), output })
        }
    }
}

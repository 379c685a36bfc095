//! The NDN forwarder of NDNts (`@ndn/fw`), unmodified, started by a short script.
//!
//! In: the face to which all Interests go. Out: a TCP port on loopback where programs connect. The packages are
//! third-party software: `scripts/setup.sh` installs them into the target directory. The forwarder ends with its value.

use std::path::Path;
use std::process::Stdio;

use tokio::process::Command;

use crate::python::{Server, listening};
use crate::{Error, Result};

/// Starts a forwarder whose Interests go to a face: `tcp://HOST:PORT`, `udp://HOST:PORT` or `unix:///PATH`.
///
/// # Errors
/// The packages or Node.js are not installed (the message contains the remedy), or the face has no forwarder.
pub async fn start(target: &Path, face: &str) -> Result<Server> {
    let tools = target.join("tools/ndnts");
    let script = tools.join("forwarder.mjs");
    if !script.is_file() || !tools.join("node_modules/@ndn/fw").is_dir() {
        let remedy = format!("run scripts/setup.sh, which puts it into {}", tools.display());
        return Err(Error::Missing { program: "the NDN forwarder of NDNts".to_owned(), remedy });
    }
    let mut command = Command::new("node");
    command.arg(script).args(["127.0.0.1:0", face]).kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().map_err(Error::io("running node"))?;
    listening("the NDN forwarder of NDNts", child).await
}

//! moq-relay, and a load that speaks its protocol.
//!
//! In: a directory with both programs (`make bench-relay` builds them), and the numbers of the benchmark. Out: a relay, and a
//! load whose subscribers are ready or have everything. Never: its library in this program; the load is a process.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use hermes_testkit::process::Program;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::RelayOptions;

fn relay(dir: &Path) -> PathBuf {
    dir.join("bin/moq-relay")
}

fn load(dir: &Path) -> PathBuf {
    dir.join("release/moq-load")
}

/// Whether both programs have been built.
pub(super) fn exists(dir: &Path) -> bool {
    relay(dir).exists() && load(dir).exists()
}

/// The relay. Everybody may publish and subscribe.
pub(super) fn server(moq: &Path, port: u16, dir: &Path) -> Program {
    let listen = format!("127.0.0.1:{port}");
    Program::new("moq-relay", relay(moq), dir).args([
        "--listen",
        &listen,
        "--listen-tls-generate",
        "localhost",
        "--auth-public",
        "**",
        "--log-level",
        "warn",
    ])
}

/// A publisher and its subscribers.
pub(super) struct Load {
    _child: Child,
    begin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Load {
    /// Waits until all have subscribed.
    pub(super) async fn start(options: &RelayOptions, port: u16) -> Result<Self> {
        let numbers = [port.to_string(), options.subscribers.to_string(), options.publications.to_string()];
        let mut child = Command::new(load(&options.moq))
            .args(numbers)
            .arg(options.bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let (begin, output) = (child.stdin.take().context("no input")?, child.stdout.take().context("no output")?);
        let mut load = Self { _child: child, begin, lines: BufReader::new(output).lines() };
        load.await_line("ready").await?;
        Ok(load)
    }

    /// Publishes, and waits until everything has arrived.
    pub(super) async fn run(&mut self) -> Result<()> {
        self.begin.write_all(b"\n").await?;
        self.await_line("done").await
    }

    async fn await_line(&mut self, expected: &str) -> Result<()> {
        let line = self.lines.next_line().await?.context("the load has ended")?;
        ensure!(line == expected, "the load wrote {line:?}");
        Ok(())
    }
}

//! A child process of a demo: started on the leash, its output in a file, stopped with its owner.
//!
//! In: a name, a command line, a file for the output. Out: the state of the process, and its last lines. Never: a
//! process that outlives this value.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::Instant;

use super::child_guard;

/// The interval at which a process is polled for its exit: the kernel notifies only a blocking wait.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The part of a log that is read for its last lines.
const TAIL: u64 = 16 << 10;

/// A running child.
#[derive(Debug)]
pub(crate) struct Program {
    /// The name in messages.
    pub(crate) name: String,
    child: Child,
    log: PathBuf,
}

impl Program {
    /// Starts a command; both of its outputs are appended to `log`.
    ///
    /// # Errors
    /// The command cannot be started, or the log cannot be written.
    pub(crate) fn start<S: AsRef<OsStr>>(name: &str, log: &Path, command: &[S]) -> anyhow::Result<Self> {
        let failed = || format!("{name} cannot be started");
        let file = File::options().create(true).append(true).open(log).with_context(failed)?;
        let child = child_guard::leashed(command)?
            .stdin(Stdio::null())
            .stdout(file.try_clone().with_context(failed)?)
            .stderr(file)
            // Ctrl-C must reach only the demo, which stops its children in order.
            .process_group(0)
            .spawn()
            .with_context(failed)?;
        Ok(Self { name: name.to_owned(), child, log: log.to_owned() })
    }

    /// The exit status; `None` while the process runs.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        // An error would mean that the child does not exist, which is impossible before it is waited for.
        self.child.try_wait().ok().flatten()
    }

    /// Waits for the exit; `None` if the process still runs after `patience`.
    pub(crate) async fn wait(&mut self, patience: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + patience;
        loop {
            if let Some(status) = self.ended() {
                return Some(status);
            }
            if Instant::now() >= until {
                return None;
            }
            tokio::time::sleep(EXIT_POLL_INTERVAL).await;
        }
    }

    /// Sends a signal; no effect on a process that has ended.
    pub(crate) fn signal(&mut self, signal: Signal) {
        if self.ended().is_none() {
            // The process was not waited for yet, so its pid is not reused.
            let _ = kill(Pid::from_raw(self.child.id().cast_signed()), signal);
        }
    }

    /// Requests the exit, and kills the process after `patience`.
    pub(crate) async fn stop(&mut self, patience: Duration) {
        self.signal(Signal::SIGTERM);
        if self.wait(patience).await.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    /// The last lines of the output.
    pub(crate) fn last_lines(&self, count: usize) -> Vec<String> {
        let text = tail(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(count)..].iter().map(|line| (*line).to_owned()).collect()
    }
}

/// Stops all processes: the exit is requested in order, the waits run in parallel.
pub(crate) async fn stop_all(programs: &mut [Program], patience: Duration) {
    programs.iter_mut().for_each(|program| program.signal(Signal::SIGTERM));
    for program in programs {
        program.stop(patience).await;
    }
}

/// The last log lines of each node.
pub(crate) fn last_words(programs: &mut [Program]) -> String {
    let mut text = String::new();
    for program in programs {
        let state = program.ended().map_or_else(|| "runs".to_owned(), |status| format!("ended, {status}"));
        text += &format!("\nnode {} ({state}):", program.name);
        program.last_lines(3).iter().for_each(|line| text += &format!("\n    {line}"));
    }
    text
}

fn tail(log: &Path) -> std::io::Result<String> {
    let mut file = File::open(log)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.ended().is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

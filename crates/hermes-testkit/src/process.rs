//! Programs under test: started, awaited, measured, and always ended.
//!
//! In: a command line, a namespace and a log directory. Out: a running program with readable CPU time and memory, ended
//! by its pid when dropped. Readiness is read from the program's own `/proc/PID/net`, so that no probe connection
//! disturbs it and no fixed sleep is needed.

#![allow(clippy::disallowed_methods, reason = "a process of others gives no event to await but its end")]

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{Error, Result, netns::Namespace};

pub use usage::{Memory, Usage, machine_busy};

mod usage;

/// Poll interval of waits: short compared with every wait, long compared with a poll.
const POLL_INTERVAL: Duration = Duration::from_millis(4);
/// Time between SIGTERM and SIGKILL when a program is dropped.
const GRACE: Duration = Duration::from_secs(2);
/// A program of util-linux; without it a killed owner leaves its programs behind.
const SETPRIV: &str = "/usr/bin/setpriv";

/// A program before its start.
#[derive(Debug)]
pub struct Program {
    name: String,
    path: OsString,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    namespace: Option<String>,
    cpus: Vec<usize>,
    dir: PathBuf,
}

/// A port that a program opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Port {
    /// Listening TCP.
    Tcp(u16),
    /// Bound UDP.
    Udp(u16),
}

/// A started program. Dropping it ends it and all its descendants.
#[derive(Debug)]
pub struct Running {
    name: String,
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Program {
    /// The `name` is for messages, and for the logs `NAME.out` and `NAME.err` in `dir`.
    pub fn new(name: &str, path: impl AsRef<OsStr>, dir: &Path) -> Self {
        Self {
            name: name.to_owned(),
            path: path.as_ref().to_owned(),
            args: Vec::new(),
            env: Vec::new(),
            namespace: None,
            cpus: Vec::new(),
            dir: dir.to_owned(),
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.args.extend(args.into_iter().map(|a| a.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.into(), value.as_ref().to_owned()));
        self
    }

    /// Runs it in a namespace.
    #[must_use]
    pub fn within(mut self, namespace: Option<&Namespace>) -> Self {
        self.namespace = namespace.map(|n| n.name().to_owned());
        self
    }

    /// Runs it only on these cores; empty means any.
    #[must_use]
    pub fn on_cpus(mut self, cpus: &[usize]) -> Self {
        self.cpus = cpus.to_vec();
        self
    }

    /// Starts it.
    ///
    /// # Errors
    /// The program cannot be run, or its logs cannot be opened.
    pub fn start(&self) -> Result<Running> {
        let (stdout, out) = self.log("out")?;
        let (stderr, err) = self.log("err")?;
        let mut command = self.command();
        command.stdin(Stdio::piped()).stdout(out).stderr(err);
        // A child inherits the affinity of the thread that starts it, from its first instruction on.
        let before = sched_getaffinity(Pid::from_raw(0))?;
        if !self.cpus.is_empty() {
            sched_setaffinity(Pid::from_raw(0), &cpu_set(&self.cpus)?)?;
        }
        let child = command.spawn();
        sched_setaffinity(Pid::from_raw(0), &before)?;
        let child = child.map_err(Error::io(format!("starting {}", self.path.to_string_lossy())))?;
        Ok(Running { name: self.name.clone(), child, stdout, stderr })
    }

    /// The wrappers execute the program, so that the pid stays the same.
    fn command(&self) -> Command {
        let mut line: Vec<&OsStr> = Vec::new();
        if let Some(namespace) = &self.namespace {
            line.extend(["ip", "netns", "exec", namespace].map(OsStr::new));
        }
        if Path::new(SETPRIV).exists() {
            // If we are killed, our programs end, too. (Bound to the starting thread.)
            line.extend([SETPRIV, "--pdeathsig", "TERM", "--"].map(OsStr::new));
        }
        line.push(&self.path);
        let mut command = Command::new(line[0]);
        command.args(&line[1..]).args(&self.args).envs(self.env.iter().map(|(k, v)| (k, v)));
        command
    }

    /// Logs are opened for appending, so that they can be truncated while the program writes.
    fn log(&self, kind: &str) -> Result<(PathBuf, File)> {
        let path = self.dir.join(format!("{}.{kind}", self.name));
        let what = format!("opening the log {}", path.display());
        // The log of an earlier program with this name would be mistaken for this one's.
        let _ = fs::remove_file(&path);
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io(what))?;
        Ok((path, file))
    }
}

impl Running {
    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path of its standard output.
    pub fn stdout(&self) -> &Path {
        &self.stdout
    }

    /// The path of its standard error.
    pub fn stderr(&self) -> &Path {
        &self.stderr
    }

    /// Waits until all ports are open.
    ///
    /// # Errors
    /// The program ends before, or `timeout` passes.
    pub fn wait_listening(&mut self, ports: &[Port], timeout: Duration) -> Result<()> {
        let what = format!("{ports:?}");
        self.wait_for(&what, timeout, |running| {
            let seen = running.has_become_itself() && ports.iter().all(|port| running.listens(*port));
            Ok(seen.then_some(()))
        })
    }

    /// Waits for its first line on standard output and returns it.
    ///
    /// # Errors
    /// The program ends before, or `timeout` passes.
    pub fn wait_first_line(&mut self, timeout: Duration) -> Result<String> {
        self.wait_for("its first line", timeout, |running| {
            let text = fs::read_to_string(&running.stdout)
                .map_err(Error::io(format!("reading {}", running.stdout.display())))?;
            Ok(text.split_once('\n').map(|(line, _)| line.to_owned()))
        })
    }

    /// Waits for its end and returns its standard output.
    ///
    /// # Errors
    /// The program fails, or does not end within `timeout`.
    pub fn wait_output(mut self, timeout: Duration) -> Result<String> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.exited()? {
                if !status.success() {
                    return Err(self.died(status));
                }
                let what = format!("reading {}", self.stdout.display());
                return fs::read_to_string(&self.stdout).map_err(Error::io(what));
            }
            if Instant::now() > deadline {
                return Err(self.not_ready("its end", timeout));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Closes its standard input, which ends the testkit's own programs.
    pub fn close_stdin(&mut self) {
        drop(self.child.stdin.take());
    }

    /// The exit status, or `None` while it runs.
    ///
    /// # Errors
    /// The system does not report the status.
    pub fn exited(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().map_err(Error::io(format!("asking after {}", self.name)))
    }

    /// CPU time and memory of the program and its descendants.
    ///
    /// # Errors
    /// The program has ended.
    pub fn usage(&self) -> Result<Usage> {
        Usage::of_tree(self.pid()).map_err(Error::io(format!("weighing {}", self.name)))
    }

    /// Ends it with SIGTERM, and with SIGKILL after `grace`.
    ///
    /// # Errors
    /// The system does not report the exit status.
    pub fn end(mut self, grace: Duration) -> Result<ExitStatus> {
        let what = format!("ending {}", self.name);
        self.stop(grace).map_err(Error::io(what))
    }

    fn stop(&mut self, grace: Duration) -> io::Result<ExitStatus> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(status);
        }
        let family = usage::family(self.pid());
        let _ = kill(pid(self.pid()), Signal::SIGTERM);
        let deadline = Instant::now() + grace;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            thread::sleep(POLL_INTERVAL);
        }
        // Children first: a killed parent could not end them.
        for member in family.into_iter().rev() {
            let _ = kill(pid(member), Signal::SIGKILL);
        }
        self.child.wait()
    }

    fn wait_for<T>(
        &mut self,
        what: &str,
        timeout: Duration,
        mut look: impl FnMut(&Self) -> Result<Option<T>>,
    ) -> Result<T> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(seen) = look(self)? {
                return Ok(seen);
            }
            if let Some(status) = self.exited()? {
                return Err(self.died(status));
            }
            if Instant::now() > deadline {
                return Err(self.not_ready(what, timeout));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Until the wrappers have executed the program, `/proc/PID/net` may show the caller's namespace.
    fn has_become_itself(&self) -> bool {
        let exe = fs::read_link(format!("/proc/{}/exe", self.pid()));
        exe.is_ok_and(|exe| !["ip", "setpriv"].iter().any(|wrapper| exe.file_name() == Some(OsStr::new(wrapper))))
    }

    fn listens(&self, port: Port) -> bool {
        let (tables, number, state) = match port {
            Port::Tcp(number) => (["tcp", "tcp6"], number, "0A"),
            Port::Udp(number) => (["udp", "udp6"], number, "07"),
        };
        let suffix = format!(":{number:04X}");
        tables.iter().any(|table| {
            let text = fs::read_to_string(format!("/proc/{}/net/{table}", self.pid())).unwrap_or_default();
            text.lines().skip(1).any(|line| {
                let mut fields = line.split_ascii_whitespace().skip(1);
                let local = fields.next().unwrap_or_default();
                local.ends_with(&suffix) && fields.nth(1) == Some(state)
            })
        })
    }

    fn died(&self, status: ExitStatus) -> Error {
        let mut words = tail(&self.stderr);
        if words.is_empty() {
            words = tail(&self.stdout);
        }
        Error::Died { program: self.name.clone(), status, words }
    }

    fn not_ready(&self, what: &str, waited: Duration) -> Error {
        Error::NotReady { program: self.name.clone(), what: what.to_owned(), waited, log: self.stderr.clone() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.stop(GRACE);
    }
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(number.cast_signed())
}

fn cpu_set(cpus: &[usize]) -> Result<CpuSet> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu)?;
    }
    Ok(set)
}

/// The last few lines of a log, for an error message.
fn tail(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<_> = text.lines().rev().take(6).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests;

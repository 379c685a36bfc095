//! Deploys nodes on machines: starts them, checks them and removes them.
//!
//! In: a machine, as a command that runs a shell on it, and the node's settings. Out: a process there with its own
//! directory. Tokens and keys go through standard input, and never into an argument or a log.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::str::FromStr;

use anyhow::Context as _;
use hermes_controller::digest::sha256;

use crate::kubernetes;

/// The program of this process.
const OWN_EXECUTABLE: &str = "/proc/self/exe";
/// Shell code that sets `pid` to the process of the node in `$dir`. It stays empty if another process now has that
/// pid.
const FIND: &str = "pid=$(cat \"$dir/pid\" 2>/dev/null) && tr '\\0' ' ' <\"/proc/$pid/cmdline\" 2>/dev/null \
                    | grep -qF -- \"--state $dir/state \" || pid=; ";

/// A place where nodes can be deployed.
pub(crate) trait Infrastructure {
    /// Starts a node unless it already runs. Returns true if it was started.
    ///
    /// # Errors
    /// The machine reports a failure; the error carries its message.
    fn put(&self, node: &Placement) -> anyhow::Result<bool>;

    /// Returns true if the node runs.
    ///
    /// # Errors
    /// The machine cannot be asked.
    fn is_running(&self, directory: &str) -> anyhow::Result<bool>;

    /// Stops the node, waits for its exit, and deletes its directory together with its key.
    ///
    /// # Errors
    /// The node does not exit in time, or the machine cannot be asked.
    fn take(&self, directory: &str, within: std::time::Duration) -> anyhow::Result<()>;
}

/// The settings of a node that gets deployed.
pub(crate) struct Placement {
    /// The node's directory: absolute, or relative to the directory where a shell starts.
    pub(crate) directory: String,
    /// The address of the node's controller.
    pub(crate) controller: String,
    /// The enrolment token.
    pub(crate) token: String,
}

/// The value of `--on`: the place where a node runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum On {
    /// On a machine, where it is started.
    Machine(Machine),
    /// `kubernetes[:NAMESPACE]`: a cluster. The user applies the printed manifests.
    Kubernetes { namespace: Option<String> },
}

impl FromStr for On {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "kubernetes" => Ok(Self::Kubernetes { namespace: None }),
            Some(("kubernetes", name)) if kubernetes::is_label(name) => {
                Ok(Self::Kubernetes { namespace: Some(name.to_owned()) })
            }
            _ => text.parse().map(Self::Machine),
        }
    }
}

/// A machine with a shell: this one, one of its network namespaces, or a host that ssh connects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Machine {
    /// `process[:NETNS]`.
    Process { netns: Option<String> },
    /// `ssh:USER@HOST[:PORT]`.
    Ssh { host: String, port: Option<u16>, config: Option<PathBuf> },
}

impl FromStr for Machine {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "unknown target {text:?}; expected process, process:NETNS, ssh:[USER@]HOST[:PORT] or kubernetes[:NAMESPACE]"
            )
        };
        // A leading hyphen would turn the name into an option of `ip` or `ssh`.
        let is_plain = |text: &str| {
            !text.is_empty()
                && !text.starts_with('-')
                && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-@".contains(&byte))
        };
        match text.split_once(':') {
            None if text == "process" => Ok(Self::Process { netns: None }),
            Some(("process", name)) if is_plain(name) => Ok(Self::Process { netns: Some(name.to_owned()) }),
            Some(("ssh", rest)) => {
                let (host, port) = match rest.split_once(':') {
                    Some((host, port)) => (host, Some(port.parse().map_err(|_| wrong())?)),
                    None => (rest, None),
                };
                is_plain(host).then(|| Self::Ssh { host: host.to_owned(), port, config: None }).ok_or_else(wrong)
            }
            _ => Err(wrong()),
        }
    }
}

impl Machine {
    /// Sets the configuration file of ssh.
    pub(crate) fn with_ssh_config(self, file: Option<PathBuf>) -> Self {
        match self {
            Self::Ssh { host, port, .. } => Self::Ssh { host, port, config: file },
            machine @ Self::Process { .. } => machine,
        }
    }

    /// Runs a script on the machine and returns its standard output. On failure the error carries its standard error.
    fn run(&self, script: &str, input: &[u8]) -> anyhow::Result<String> {
        let mut command = match self {
            Self::Process { netns: None } => Command::new("sh"),
            Self::Process { netns: Some(name) } => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name, "sh"]);
                command
            }
            Self::Ssh { host, port, config } => {
                let mut command = Command::new("ssh");
                // Nobody can answer a prompt here, and unknown host keys are rejected.
                command.args(["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=10"]);
                command.args(config.iter().flat_map(|file| ["-F".as_ref(), file.as_os_str()]));
                command.args(port.iter().flat_map(|port| ["-p".to_owned(), port.to_string()]));
                command.args(["--", host, "sh"]);
                command
            }
        };
        let script = match self {
            Self::Process { .. } => script.to_owned(),
            // The shell at the remote end parses the script once more.
            Self::Ssh { .. } => quoted(script),
        };
        command.arg("-c").arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("{:?} cannot be run", command.get_program()))?;
        // A script may exit before it has read all input; its exit status then gives the reason.
        let _ = child.stdin.take().map(|mut stdin| stdin.write_all(input));
        let output = child.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "{}: {}", self.name(), said.trim());
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn name(&self) -> String {
        match self {
            Self::Process { netns: None } => "this machine".to_owned(),
            Self::Process { netns: Some(name) } => format!("network namespace {name}"),
            Self::Ssh { host, .. } => format!("ssh {host}"),
        }
    }

    /// The path of the program there. A remote machine receives a copy of this program unless it already has one.
    fn program(&self, directory: &str) -> anyhow::Result<String> {
        if let Self::Process { .. } = self {
            return Ok(std::env::current_exe()?.to_string_lossy().into_owned());
        }
        let program = std::fs::read(OWN_EXECUTABLE)?;
        let hash: String = sha256(&program).iter().map(|byte| format!("{byte:02x}")).collect();
        let file = format!("{directory}/hermes");
        let ask = format!("sha256sum {} 2>/dev/null | cut -c1-64", quoted(&file));
        if self.run(&ask, &[])? != hash {
            let new = quoted(&format!("{file}.new"));
            let bring = format!(
                "umask 077; mkdir -p {} && cat >{new} && chmod 700 {new} && mv {new} {}",
                quoted(directory),
                quoted(&file)
            );
            self.run(&bring, &program)?;
        }
        Ok(file)
    }

    /// The absolute path of the directory: `FIND` recognises the node's process by it.
    fn whole(&self, directory: &str) -> anyhow::Result<String> {
        let begin = if directory.starts_with('/') { String::new() } else { format!("{}/", self.run("pwd -P", &[])?) };
        Ok(format!("{begin}{directory}"))
    }
}

impl Infrastructure for Machine {
    fn put(&self, node: &Placement) -> anyhow::Result<bool> {
        let directory = self.whole(&node.directory)?;
        if self.is_running(&directory)? {
            return Ok(false);
        }
        let program = quoted(&self.program(&directory)?);
        let controller = quoted(&node.controller);
        // `setsid` execs the program, so `$!` is the program's pid.
        let start = format!(
            "dir={}; umask 077; mkdir -p \"$dir\" && cat >\"$dir/token\" || exit 1; \
             setsid {program} proxy --controller {controller} --state \"$dir/state\" --token-file \"$dir/token\" \
             </dev/null >>\"$dir/log\" 2>&1 & echo $! >\"$dir/pid\"",
            quoted(&directory)
        );
        self.run(&start, node.token.as_bytes())?;
        Ok(true)
    }

    fn is_running(&self, directory: &str) -> anyhow::Result<bool> {
        let directory = self.whole(directory)?;
        let script = format!("dir={}; {FIND}echo \"$pid\"", quoted(&directory));
        Ok(!self.run(&script, &[])?.is_empty())
    }

    fn take(&self, directory: &str, within: std::time::Duration) -> anyhow::Result<()> {
        let directory = self.whole(directory)?;
        let tries = within.as_millis() / 100 + 1;
        let script = format!(
            "dir={}; {FIND}[ -n \"$pid\" ] && kill -TERM \"$pid\"; tries={tries}; \
             while [ -n \"$pid\" ]; do {FIND}[ $tries -gt 0 ] || {{ echo \"process $pid does not end\" >&2; exit 1; }}; \
             tries=$((tries-1)); [ -z \"$pid\" ] || sleep 0.1; done; \
             rm -rf \"$dir/state\" && rm -f \"$dir/token\" \"$dir/pid\" \"$dir/log\" \"$dir/hermes\" && rmdir \"$dir\"",
            quoted(&directory)
        );
        self.run(&script, &[]).map(drop)
    }
}

/// Quotes text as one word for a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

//! The leash of a demo's child processes: they end when the demo does, even if it is killed.
//!
//! In: the demo's pid and a command line. Out: this process becomes that command. A process may ask the kernel for a
//! signal at its parent's death (`PR_SET_PDEATHSIG`), and the request survives `exec`. A request from the parent's side
//! would need code between fork and exec, which is unsafe.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, ensure};
use nix::sys::prctl;
use nix::sys::signal::Signal;

/// The hidden subcommand of `hermes demo` that runs [`exec`].
pub(crate) const VERB: &str = "leash";

/// A command line that runs `command` on the leash of this process.
///
/// The kernel watches the *thread* that starts it: start children from the main thread only.
///
/// # Errors
/// This process cannot find its own binary.
pub(crate) fn leashed<S: AsRef<OsStr>>(command: &[S]) -> anyhow::Result<Command> {
    let own = std::env::current_exe().context("cannot find the hermes binary itself")?;
    let mut leashed = Command::new(own);
    leashed.args(["demo", VERB, &std::process::id().to_string(), "--"]).args(command);
    Ok(leashed)
}

/// Becomes `command`, and ends by SIGTERM when the process `parent` ends.
///
/// # Errors
/// The command cannot be run, or the parent has exited already.
pub(crate) fn exec(parent: i32, command: &[OsString]) -> anyhow::Result<Infallible> {
    let (program, arguments) = command.split_first().context("leash: no command was given")?;
    prctl::set_pdeathsig(Signal::SIGTERM).context("leash")?;
    // A parent that died before the request was made causes no signal, so it is checked afterwards.
    ensure!(nix::unistd::getppid().as_raw() == parent, "leash: process {parent} is not the parent");
    let error = Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}

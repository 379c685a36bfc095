//! A demo in a network of its own: what it takes of this machine, and what is cleared away when it ends.
//!
//! In: a case of the papers by its name, and how it is played. Out: what is missing here, and how to get it; or the
//! play's exit status, or that of the signal which cut it short. What killed demos left of namespaces goes first.
//! Never: anything outside of namespaces and of one directory.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, ensure};

use super::interrupt::Interrupt;
use super::place;

/// What is to be known of a case before it is played.
pub(super) struct Case {
    /// As in `hermes demo NAME`.
    pub(super) name: &'static str,
    /// What the names of its namespaces begin with, and that of its directory.
    pub(super) prefix: &'static str,
    /// What it makes besides namespaces with the kernel's driver of devices; `None`: nothing.
    pub(super) devices: Option<&'static str>,
    /// Beside Hermes: programs, what each is asked to see that it is there, and the package that has it.
    pub(super) programs: &'static [(&'static str, &'static str, &'static str)],
}

impl Case {
    /// Looks for what it needs beside Hermes.
    ///
    /// # Errors
    /// What is missing, and how to get it.
    pub(super) fn requirements(&self) -> anyhow::Result<()> {
        let name = self.name;
        // The doctor looks at devices.
        let (devices, doctor) = match self.devices {
            Some(kind) => (format!(" and {kind} devices"), "; `hermes doctor` tells what else this machine lacks"),
            None => Default::default(),
        };
        ensure!(
            nix::unistd::geteuid().is_root(),
            "demo {name} makes network namespaces{devices}, and that takes root: run it as root (sudo hermes demo {name})\
             {doctor}"
        );
        for (program, argument, package) in self.programs {
            let found = Command::new(program).arg(argument).output().is_ok_and(|output| output.status.success());
            ensure!(found, "demo {name} needs {program}: install it (Debian, Ubuntu: apt-get install {package})");
        }
        if let Some(kind) = self.devices {
            let driver = Path::new(hermes_net::tun::DRIVER);
            ensure!(
                driver.exists(),
                "demo {name} needs {kind} devices, and there is no {0}: load the kernel's module (modprobe tun), or \
                 give a container `--device {0}`; `hermes doctor` tells more",
                driver.display()
            );
        }
        Ok(())
    }

    /// Plays it in a directory that is gone afterwards, or in `files`, which stays, until it is over or a signal comes.
    ///
    /// # Errors
    /// The directory cannot be had, or what failed in the play.
    pub(super) fn stage(
        &self,
        files: Option<&Path>,
        play: impl AsyncFnOnce(&Path) -> anyhow::Result<ExitCode>,
    ) -> anyhow::Result<ExitCode> {
        place::sweep(self.prefix);
        let (_temporary, directory) = place::directory(self.prefix, files)?;
        // One thread, the main one: children are on the leash of the thread that starts them.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut interrupt = Interrupt::listen()?;
            tokio::select! {
                biased;
                status = interrupt.next() => Ok(status),
                played = play(&directory) => played.with_context(|| format!("demo {}", self.name)),
            }
        })
        // What the future held went with it: processes, then their namespaces. The directory goes last.
    }
}

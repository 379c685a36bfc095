//! A demo in its own network: its requirements on this machine, and the cleanup when it ends.
//!
//! In: the name of a case of the papers, and a function that plays it. Out: the missing requirements and how to install
//! them; or the exit status of the case, or that of the signal that interrupted it. Namespaces that killed demos left
//! behind are removed first. Never: a change outside of namespaces and one directory.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, ensure};

use super::interrupt::Interrupt;
use super::namespace;

/// The properties of a case that are needed before it runs.
pub(super) struct Case {
    /// The name, as in `hermes demo NAME`.
    pub(super) name: &'static str,
    /// The prefix of its namespaces and of its directory.
    pub(super) prefix: &'static str,
    /// The kind of devices that the case creates, such as TUN; `None` if it needs none.
    pub(super) devices: Option<&'static str>,
    /// Programs required besides Hermes: the name, the argument that proves it is installed, and its package.
    pub(super) programs: &'static [(&'static str, &'static str, &'static str)],
}

impl Case {
    /// Checks the requirements besides Hermes.
    ///
    /// # Errors
    /// Names the missing requirements and how to install them.
    pub(super) fn requirements(&self) -> anyhow::Result<()> {
        let name = self.name;
        // The doctor checks device support.
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

    /// Runs the case until it ends or a signal arrives. Files are stored in `files`, which remains, or in a temporary
    /// directory, which is removed.
    ///
    /// # Errors
    /// The directory cannot be created, or the case failed.
    pub(super) fn stage(
        &self,
        files: Option<&Path>,
        play: impl AsyncFnOnce(&Path) -> anyhow::Result<ExitCode>,
    ) -> anyhow::Result<ExitCode> {
        namespace::sweep(self.prefix);
        let (_temporary, directory) = namespace::directory(self.prefix, files)?;
        // The runtime has one thread, the main one: the leash ends child processes when the thread that started them
        // ends.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut interrupt = Interrupt::listen()?;
            tokio::select! {
                biased;
                status = interrupt.next() => Ok(status),
                played = play(&directory) => played.with_context(|| format!("demo {}", self.name)),
            }
        })
        // Dropping the future ended the processes, then removed their namespaces. The directory is removed last.
    }
}

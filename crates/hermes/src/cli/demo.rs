//! `hermes demo`: a whole overlay on this machine, and what it does.

use std::process::ExitCode;

use clap::Parser;

/// Runs an overlay on loopback and shows what it does.
#[derive(Debug, Parser)]
pub(super) struct Demo {
    /// Leaves the overlay up and prints commands to try by hand.
    #[arg(long)]
    keep: bool,
}

impl Demo {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        crate::demo::run(self.keep)
    }
}

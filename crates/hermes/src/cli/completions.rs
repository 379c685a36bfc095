//! `hermes completions`: shell completions on standard output.

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

/// Print shell completions
#[derive(Debug, Parser)]
pub(super) struct Completions {
    /// Print completions for this shell
    #[arg(value_enum)]
    shell: clap_complete::Shell,
}

impl Completions {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut command = super::Hermes::command();
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut command, "hermes", &mut text);
        super::print(&String::from_utf8_lossy(&text))?;
        Ok(ExitCode::SUCCESS)
    }
}

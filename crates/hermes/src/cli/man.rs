//! `hermes man`: manual pages, generated from the same definitions as `--help`.
//!
//! In: the words of a command, or a directory. Out: one page on standard output, or `hermes.1` and a page for each
//! command in the directory. Packages ship these pages.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Command, CommandFactory, Parser};
use clap_mangen::Man;

/// Print a manual page, or write all of them to a directory
///
/// `hermes man node list | man -l -` shows a page.
#[derive(Debug, Parser)]
pub(super) struct Manual {
    /// Write the pages of all commands to this directory
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    all: Option<PathBuf>,
    /// Print the page of this command [default: the page of hermes itself]
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
}

/// The files of an installation. The definitions of the command line do not contain them.
const FILES: [(&str, &str); 3] = [
    ("/etc/hermes/node.yaml", "The document of the node that hermes.service of the package runs."),
    ("/etc/hermes.env", "Variables of the unit of a node under a controller, such as HERMES_TOKEN."),
    ("/var/lib/hermes, /var/lib/hermes\\-controller", "The state of a node and of a controller."),
];
const STATUS: &str = "0 for success, 1 for a failure, 2 for wrong usage, 3 for a denial or an unknown outcome.";

impl Manual {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut hermes = super::Hermes::command().disable_help_subcommand(true);
        // Gives each subcommand its full name.
        hermes.build();
        if let Some(directory) = self.all {
            write_all(&hermes, &directory)?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut command = &hermes;
        for word in &self.command {
            let find = || format!("unknown command \"{word}\"; `{} --help` lists them", command_line(command));
            command = command.find_subcommand(word).with_context(find)?;
        }
        super::print(&page(command)?)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Writes the pages of a command and of those below it.
fn write_all(command: &Command, directory: &Path) -> anyhow::Result<()> {
    let path = directory.join(Man::new(command.clone()).get_filename());
    std::fs::write(&path, page(command)?).with_context(|| path.display().to_string())?;
    let mut below = command.get_subcommands().filter(|command| !command.is_hide_set());
    below.try_for_each(|command| write_all(command, directory))
}

fn page(command: &Command) -> anyhow::Result<String> {
    let mut text = Vec::new();
    let source = format!("hermes {}", env!("CARGO_PKG_VERSION"));
    Man::new(command.clone()).source(source).manual("Hermes").render(&mut text)?;
    let mut text = String::from_utf8(text)?;
    if command.get_name() == "hermes" {
        text.push_str(".SH FILES\n");
        for (path, purpose) in FILES {
            let _ = writeln!(text, ".TP\n\\fI{path}\\fR\n{purpose}");
        }
        let _ = writeln!(text, ".SH \"EXIT STATUS\"\n{STATUS}");
    }
    Ok(text)
}

fn command_line(command: &Command) -> &str {
    command.get_bin_name().unwrap_or_else(|| command.get_name())
}

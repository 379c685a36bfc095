//! `hermes demo`: a whole overlay on this machine, and what it does.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::demo::{self, Options};

/// Runs an overlay on this machine and shows what it does.
///
/// Three nodes start on loopback, real traffic of all four kinds (HTTP, HTTPS through CONNECT, TCP,
/// UDP) goes through them, a route is changed under load, and a table tells what happened. It ends
/// by itself after some seconds; the exit status is 0 only if everything arrived intact.
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Demo {
    #[command(subcommand)]
    case: Option<Case>,
    /// Leaves the overlay up and prints commands to try by hand, until Ctrl-C.
    #[arg(long)]
    keep: bool,
    /// Prints the result as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Case {
    /// Runs a command that ends with its parent.
    #[command(name = demo::leash::VERB, hide = true)]
    Leash {
        parent: i32,
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
}

impl Demo {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.case {
            Some(Case::Leash { parent, command }) => match demo::leash::exec(parent, &command)? {},
            None => demo::run(Options { keep: self.keep, json: self.json }),
        }
    }
}

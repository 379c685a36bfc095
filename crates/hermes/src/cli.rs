//! The command line: one file for each command.
//!
//! In: arguments. Out: a command that ran. Exit status 1 is a failure (`main`), 2 wrong usage (clap), 3 a denial of
//! `explain`.

mod authority;
mod backup;
mod check;
mod completions;
mod controller;
mod doctor;
mod envoy;
mod explain;
mod fetch;
mod health;
mod install;
mod man;
mod node;
mod operator;
mod output;
mod overlay;
mod proxy;
mod rollout;
mod tun;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};

use self::output::{counted, print};

/// A proxy overlay: run nodes and controllers, and manage them from the command line.
#[derive(Debug, Parser)]
#[command(name = "hermes", version, propagate_version = true, arg_required_else_help = true)]
pub(crate) struct Hermes {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Proxy(proxy::Proxy),
    Controller(controller::Run),
    Envoy(envoy::Envoy),
    Apply(overlay::Apply),
    Diff(overlay::Diff),
    Get(overlay::Get),
    Delete(overlay::Delete),
    Token(overlay::Token),
    Node(node::Node),
    Rollout(rollout::Rollout),
    Authority(authority::Authority),
    Operator(operator::Operator),
    Backup(backup::Backup),
    Restore(backup::Restore),
    Tun(tun::Tun),
    Check(check::Check),
    Explain(explain::Explain),
    Fetch(fetch::Fetch),
    Demo(hermes_demo::Demo),
    Doctor(doctor::Doctor),
    Health(health::Health),
    Install(install::Install),
    Completions(completions::Completions),
    Man(man::Manual),
}

impl Hermes {
    /// Runs the command.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self.verb {
            Verb::Proxy(verb) => verb.run(),
            Verb::Controller(verb) => verb.run(),
            Verb::Envoy(verb) => verb.run(),
            Verb::Apply(verb) => verb.run(),
            Verb::Diff(verb) => verb.run(),
            Verb::Get(verb) => verb.run(),
            Verb::Delete(verb) => verb.run(),
            Verb::Token(verb) => verb.run(),
            Verb::Node(verb) => verb.run(),
            Verb::Rollout(verb) => verb.run(),
            Verb::Authority(verb) => verb.run(),
            Verb::Operator(verb) => verb.run(),
            Verb::Backup(verb) => verb.run(),
            Verb::Restore(verb) => verb.run(),
            Verb::Tun(verb) => verb.run(),
            Verb::Check(verb) => verb.run(),
            Verb::Explain(verb) => verb.run(),
            Verb::Fetch(verb) => verb.run(),
            Verb::Demo(verb) => verb.run(),
            Verb::Doctor(verb) => verb.run(),
            Verb::Health(verb) => verb.run(),
            Verb::Install(verb) => verb.run(),
            Verb::Completions(verb) => verb.run(),
            Verb::Man(verb) => verb.run(),
        }
    }
}

/// Exits with the usage of a command and status 2.
fn misuse(verb: &str, kind: ErrorKind, text: &str) -> ! {
    let mut whole = Hermes::command();
    // Gives the subcommand its full name.
    whole.build();
    let verb = whole.find_subcommand(verb).cloned();
    verb.unwrap_or(whole).error(kind, text).exit()
}

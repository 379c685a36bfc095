//! The command line: one file for each command.
//!
//! In: arguments. Out: a command that ran. Exit status 1 is a failure (`main`), 2 wrong usage (clap), 3 a denial of
//! `explain`.

mod backup;
mod ca;
mod check;
mod completions;
mod connect;
mod controller;
mod doctor;
mod envoy;
mod explain;
mod fetch;
mod health;
mod install;
mod key;
mod man;
mod node;
mod operator;
mod output;
mod overlay;
mod proxy;
mod publish;
mod rollout;
mod subscribe;
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
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
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
    Ca(ca::Ca),
    Operator(operator::Operator),
    Backup(backup::Backup),
    Restore(backup::Restore),
    Tun(tun::Tun),
    Check(check::Check),
    Explain(explain::Explain),
    Fetch(fetch::Fetch),
    Key(key::Key),
    Publish(publish::Publish),
    Subscribe(subscribe::Subscribe),
    Connect(connect::Connect),
    Demo(hermes_demo::Demo),
    Doctor(doctor::Doctor),
    Health(health::Health),
    Install(install::Install),
    Completions(completions::Completions),
    Man(man::Manual),
    #[command(name = "authority", hide = true)]
    FormerAuthority(Former),
}

impl Hermes {
    /// Runs the command.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Proxy(command) => command.run(),
            Command::Controller(command) => command.run(),
            Command::Envoy(command) => command.run(),
            Command::Apply(command) => command.run(),
            Command::Diff(command) => command.run(),
            Command::Get(command) => command.run(),
            Command::Delete(command) => command.run(),
            Command::Token(command) => command.run(),
            Command::Node(command) => command.run(),
            Command::Rollout(command) => command.run(),
            Command::Ca(command) => command.run(),
            Command::Operator(command) => command.run(),
            Command::Backup(command) => command.run(),
            Command::Restore(command) => command.run(),
            Command::Tun(command) => command.run(),
            Command::Check(command) => command.run(),
            Command::Explain(command) => command.run(),
            Command::Fetch(command) => command.run(),
            Command::Key(command) => command.run(),
            Command::Publish(command) => command.run(),
            Command::Subscribe(command) => command.run(),
            Command::Connect(command) => command.run(),
            Command::Demo(command) => command.run(),
            Command::Doctor(command) => command.run(),
            Command::Health(command) => command.run(),
            Command::Install(command) => command.run(),
            Command::Completions(command) => command.run(),
            Command::Man(command) => command.run(),
            Command::FormerAuthority(command) => command.reject("authority", "ca"),
        }
    }
}

/// A command under its former name: it runs nothing, and its error names the new one.
#[derive(Debug, Parser)]
#[command(disable_help_flag = true)]
struct Former {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<String>,
}

impl Former {
    fn reject(&self, former: &str, new: &str) -> ! {
        let arguments = self.arguments.iter().fold(String::new(), |text, argument| text + " " + argument);
        let text = format!("`hermes {former}` was renamed; use `hermes {new}{arguments}`");
        Hermes::command().error(ErrorKind::InvalidSubcommand, text).exit()
    }
}

/// Exits with the usage of a command and status 2.
fn misuse(command: &str, kind: ErrorKind, text: &str) -> ! {
    let mut whole = Hermes::command();
    // Gives the subcommand its full name.
    whole.build();
    let command = whole.find_subcommand(command).cloned();
    command.unwrap_or(whole).error(kind, text).exit()
}

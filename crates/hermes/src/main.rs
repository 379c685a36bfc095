//! The `hermes` binary: one program that is the proxy, the router and the command line.
//!
//! In: a command line. Out: exit status 0, 1 (failure), 2 (usage) or 3 (outcome unknown), and one clear sentence on
//! standard error where something failed.

#![forbid(unsafe_code)]

mod agent;
mod cli;
mod deploy;
mod document;
mod kubernetes;
mod log;
mod notify;
mod operator;
mod run;
mod signals;
mod takeover;
mod tun;
mod watch;

use std::process::ExitCode;

use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let command = cli::Hermes::parse();
    match command.run() {
        Ok(code) => code,
        // A closed reader (`hermes explain | head`) is not a failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hermes: {error:#}");
            if error.is::<operator::OutcomeUnknown>() { ExitCode::from(3) } else { ExitCode::FAILURE }
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

//! The `hermes` binary: one program that is the proxy, the router and the command line.
//!
//! In: a command line. Out: exit status 0, 1 (failure) or 2 (usage), and one clear sentence on
//! standard error where something failed.

#![forbid(unsafe_code)]

mod cli;
mod demo;
mod document;
mod handover;
mod run;
mod watch;

use std::process::ExitCode;

use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // A reader that went away (`hermes explain | head`) is no failure worth a backtrace.
    let command = cli::Hermes::parse();
    match command.run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("hermes: {error:#}");
            ExitCode::FAILURE
        }
    }
}

//! `hermes demo`: a whole overlay on this machine, and what it does.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::demo::{self, Options, ip, video};

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
    /// Streams video along a path that loses packets: over an overlay, and directly.
    ///
    /// The paper's video case in network namespaces of its own; takes root, ffmpeg, iproute2 and
    /// nftables, and two and a half minutes.
    Video {
        /// Length of the shorter of two clips; the other is twice as long.
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(2..=1800))]
        seconds: u64,
        /// Repeats it; the result is means and standard deviations.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
        runs: u16,
        /// Runs side by side, each in namespaces of its own; by default one a core.
        #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
        at_once: Option<u16>,
        /// Prints the result as JSON.
        #[arg(long)]
        json: bool,
        /// Keeps clips, streams, documents and logs in this empty directory.
        #[arg(long, value_name = "DIRECTORY")]
        files: Option<PathBuf>,
    },
    /// Moves a user's ingress and then her server to another continent, under her pings.
    ///
    /// The paper's IP case in network namespaces of its own, with a path Poland - United States that takes as long as
    /// the paper's; takes root, TUN devices and iproute2, and half a minute.
    Ip {
        /// What the hops speak.
        #[arg(long, value_enum, default_value = "h3")]
        protocol: ip::Protocol,
        /// Seconds of each of three phases.
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=600))]
        seconds: u64,
        /// Runs, one after the other; in the first nobody has spoken to the new hops before.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=100))]
        runs: u16,
        /// Prints the result as JSON.
        #[arg(long)]
        json: bool,
        /// Writes the round trips over time as a picture (SVG).
        #[arg(long, value_name = "FILE")]
        picture: Option<PathBuf>,
        /// Keeps documents, logs and a list of all echoes in this empty directory.
        #[arg(long, value_name = "DIRECTORY")]
        files: Option<PathBuf>,
    },
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
            Some(Case::Video { seconds, runs, at_once, json, files }) => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                let at_once = at_once.map_or(cores, usize::from);
                video::run(&video::Options { seconds, runs: runs.into(), at_once, json, files })
            }
            Some(Case::Ip { protocol, seconds, runs, json, picture, files }) => {
                let phase = Duration::from_secs(seconds);
                ip::run(&ip::Options { protocol, phase, runs: runs.into(), json, picture, files })
            }
            None => demo::run(Options { keep: self.keep, json: self.json }),
        }
    }
}

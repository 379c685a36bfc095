//! `hermes demo`: a whole overlay on this machine, and what it does.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::unstable::Extent;
use crate::unstable::way::{Way, parse_size};
use crate::{Options, ip, leash, unstable, video};

/// Runs an overlay on this machine and shows what it does.
///
/// A controller and three nodes start on loopback, real traffic of all four kinds (HTTP, HTTPS through
/// CONNECT, TCP, UDP) goes through them, `hermes apply` changes the overlay under load, and a table
/// tells what happened. It ends by itself after some seconds; the exit status is 0 only if everything
/// arrived intact.
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Demo {
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
    /// Downloads over three links of which one is up at a time: directly, by Envoy, by Hermes.
    ///
    /// The papers' intermittent case in network namespaces of its own, beside their figures and what physics allows; takes
    /// root, TUN/TAP devices, iproute2 and curl, and some four minutes. Envoy takes part where it is installed.
    Unstable(Unstable),
    /// Runs a command that ends with its parent.
    #[command(name = leash::VERB, hide = true)]
    Leash {
        parent: i32,
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
}

#[derive(Debug, Args)]
struct Unstable {
    /// What nodes of Hermes speak to each other.
    #[arg(long, value_enum, default_value = "h2")]
    protocol: unstable::Protocol,
    /// What is downloaded, up to 8M; binary. [default: 45K,500K,1M]
    #[arg(long, value_delimiter = ',', value_name = "SIZES", value_parser = parse_size)]
    sizes: Option<Vec<u64>>,
    /// Downloads of each size, spread over the links' turns; once where nothing is expected to arrive. [default: 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    phases: Option<u32>,
    /// Seconds that a client waits for what does not come by Hermes. [default: 60]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=3600))]
    patience: Option<u64>,
    /// Which ways are gone; by default all.
    #[arg(long, value_delimiter = ',', value_enum)]
    cases: Option<Vec<Way>>,
    /// Envoy's binary, where it is not on the path.
    #[arg(long, value_name = "PATH")]
    envoy: Option<PathBuf>,
    /// 45 KB once, and 10 seconds of patience.
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// All four sizes, 10 phases, 300 seconds of patience: up to an hour.
    #[arg(long)]
    full: bool,
    /// Prints the result as JSON.
    #[arg(long)]
    json: bool,
    /// Writes the bytes at each hop over time as a picture (SVG).
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Keeps documents and logs in this empty directory.
    #[arg(long, value_name = "DIRECTORY")]
    files: Option<PathBuf>,
}

impl Unstable {
    fn options(self) -> unstable::Options {
        let extent = match (self.quick, self.full) {
            (true, _) => Extent::Quick,
            (_, true) => Extent::Full,
            _ => Extent::Usual,
        };
        let (sizes, tries, patience) = extent.defaults();
        let mut ways = self.cases.unwrap_or(Way::ALL.to_vec());
        ways.sort_unstable();
        ways.dedup();
        let mut sizes = self.sizes.unwrap_or(sizes);
        sizes.sort_unstable();
        sizes.dedup();
        unstable::Options {
            protocol: self.protocol,
            sizes,
            tries: self.phases.unwrap_or(tries),
            hopeless_tries: if self.full { 3 } else { 1 },
            patience: Duration::from_secs(self.patience.unwrap_or(patience)),
            ways,
            envoy: self.envoy,
            json: self.json,
            picture: self.picture,
            files: self.files,
        }
    }
}

impl Demo {
    /// Runs the case that the command line names.
    ///
    /// # Errors
    /// When the overlay cannot be started, or something did not arrive intact.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.case {
            Some(Case::Leash { parent, command }) => match leash::exec(parent, &command)? {},
            Some(Case::Video { seconds, runs, at_once, json, files }) => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                let at_once = at_once.map_or(cores, usize::from);
                video::run(&video::Options { seconds, runs: runs.into(), at_once, json, files })
            }
            Some(Case::Ip { protocol, seconds, runs, json, picture, files }) => {
                let phase = Duration::from_secs(seconds);
                ip::run(&ip::Options { protocol, phase, runs: runs.into(), json, picture, files })
            }
            Some(Case::Unstable(unstable)) => unstable::run(&unstable.options()),
            None => crate::run(Options { keep: self.keep, json: self.json }),
        }
    }
}

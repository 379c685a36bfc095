//! `hermes demo`: a complete overlay on this machine.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::ndn::SIZES;
use crate::unstable::Extent;
use crate::unstable::variant::{Variant, parse_size};
use crate::{Options, child_guard, ip, ndn, pep, relay, unstable, video};

/// Run an overlay on this machine and show what it does.
///
/// A controller and three nodes start on loopback. Traffic of four kinds passes through them: HTTP, HTTPS through
/// CONNECT, TCP and UDP. `hermes apply` changes the overlay under load, and a table shows the result. The demo ends
/// after some seconds. The exit status is 0 only if everything arrived intact.
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Demo {
    #[command(subcommand)]
    case: Option<Case>,
    /// Keep the overlay running until Ctrl-C, and print commands to try
    #[arg(long)]
    keep: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Case {
    /// Stream video over a path that loses packets, through an overlay and directly.
    ///
    /// Runs the paper's video case in network namespaces. Needs root, ffmpeg, iproute2, nftables, and two and a half
    /// minutes.
    Video {
        /// Set the length of the shorter clip in seconds; the other is twice as long
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(2..=1800))]
        seconds: u64,
        /// Repeat the case, and report means and standard deviations
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
        runs: u16,
        /// Run this many repetitions in parallel [default: one for each core]
        #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
        at_once: Option<u16>,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        /// Keep clips, streams, documents and logs in this empty directory
        #[arg(long, value_name = "DIRECTORY")]
        files: Option<PathBuf>,
    },
    /// Move a user's ingress and server to another continent while pings continue.
    ///
    /// Runs the paper's IP case in network namespaces, with the paper's latency between Poland and the United States.
    /// Needs root, TUN devices, iproute2, and half a minute.
    Ip {
        /// Set the protocol between nodes
        #[arg(long, value_enum, default_value = "h3")]
        protocol: ip::Protocol,
        /// Set the length of each of three phases in seconds
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=600))]
        seconds: u64,
        /// Set the number of consecutive runs. Connections to the new hops are cold in the first run
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=100))]
        runs: u16,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        /// Write the round-trip times as a picture (SVG)
        #[arg(long, value_name = "FILE")]
        picture: Option<PathBuf>,
        /// Keep documents, logs and a list of all echoes in this empty directory
        #[arg(long, value_name = "DIRECTORY")]
        files: Option<PathBuf>,
    },
    /// Download over three links, one of which is up at a time: directly, with Envoy, with Hermes.
    ///
    /// Runs the papers' intermittent case in network namespaces, beside their figures and the physical limit. Needs
    /// root, TUN/TAP devices, iproute2, curl, and about four minutes. Envoy is included if it is installed.
    Unstable(Unstable),
    /// Fetch files of Named Data Networking over 10 Mbit/s: directly, and through an overlay.
    ///
    /// Runs the NDN case of the first paper in network namespaces, beside its figures. Two users in two namespaces have a
    /// replica each, which two proxies select. Needs root, TUN/TAP devices, iproute2, and a minute and a half.
    Ndn {
        /// Set the sizes of the files in bytes, at most 50000000 [default: 0,1090352]
        #[arg(long, value_delimiter = ',', value_parser = parse_file_size)]
        sizes: Option<Vec<usize>>,
        /// Set the number of fetches of each file on each way [default: 5]
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
        repeats: Option<u32>,
        /// Set the number of short files that the users fetch with each version of HTTP [default: 400]
        #[arg(long, value_parser = clap::value_parser!(u32).range(0..=100_000))]
        policy_fetches: Option<u32>,
        /// Fetch all four files of the paper 20 times, and 10000 short ones: takes two and a half hours
        #[arg(long)]
        full: bool,
        /// Run this NDN forwarder at both ends of each way. The command is split at spaces. It gets two arguments: the
        /// address to listen on, over TCP and UDP, and the face to which Interests go
        #[arg(long, value_name = "COMMAND")]
        forwarder: Option<String>,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        /// Write the time that each way adds to the largest file as a picture (SVG)
        #[arg(long, value_name = "FILE")]
        picture: Option<PathBuf>,
        /// Keep documents and logs in this empty directory
        #[arg(long, value_name = "DIRECTORY")]
        files: Option<PathBuf>,
    },
    /// Split TCP connections on a router: over TCP, HTTP/2, RINA and NDN, beside a direct connection.
    ///
    /// Runs the scenarios of PEP-DNA in network namespaces, beside the paper's figures. Needs root, TUN/TAP devices,
    /// iproute2, and a minute. HAProxy is included if it is installed.
    Pep {
        /// Set the number of requests of each kind on each way
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        requests: u32,
        /// Set the pause between two requests in milliseconds; the paper's is 1000
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=10_000))]
        pause_ms: u64,
        /// Set the number of downloads on each way over the path that loses packets
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=100))]
        downloads: u32,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        /// Write the rates over the path that loses packets as a picture (SVG)
        #[arg(long, value_name = "FILE")]
        picture: Option<PathBuf>,
        /// Keep documents and logs in this empty directory
        #[arg(long, value_name = "DIRECTORY")]
        files: Option<PathBuf>,
    },
    /// Chat and send a voice-like stream over a tree of three relays.
    ///
    /// Three nodes start on loopback. Two shells at different nodes chat, and 50 packets of 160 bytes a second pass from
    /// one node to the other, beside UDP. Takes a quarter of a minute, and no root.
    Relay {
        /// Set the length of the voice-like stream in seconds
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
        seconds: u64,
        /// Keep the nodes running until Ctrl-C, and print pages and commands to try
        #[arg(long)]
        keep: bool,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        /// Write the delays and the gaps as a picture (SVG)
        #[arg(long, value_name = "FILE")]
        picture: Option<PathBuf>,
        /// Keep documents and logs in this empty directory
        #[arg(long, value_name = "DIRECTORY")]
        files: Option<PathBuf>,
    },
    /// Run a command that ends with its parent
    #[command(name = child_guard::VERB, hide = true)]
    Leash {
        parent: i32,
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
}

#[derive(Debug, Args)]
struct Unstable {
    /// Set the protocol between nodes of Hermes
    #[arg(long, value_enum, default_value = "h2")]
    protocol: unstable::Protocol,
    /// Set the download sizes, at most 8M, in binary units [default: 45K,500K,1M]
    #[arg(long, value_delimiter = ',', value_name = "SIZES", value_parser = parse_size)]
    sizes: Option<Vec<u64>>,
    /// Set the number of downloads for each size, spread over the links' phases [default: 3]. Cases that are expected
    /// to fail run once
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    phases: Option<u32>,
    /// Set the client timeout in seconds for downloads without Hermes [default: 60]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=3600))]
    patience: Option<u64>,
    /// Run only these cases [default: all]
    #[arg(long, value_delimiter = ',', value_enum)]
    cases: Option<Vec<Variant>>,
    /// Use this Envoy binary [default: the one in PATH]
    #[arg(long, value_name = "PATH")]
    envoy: Option<PathBuf>,
    /// Run one download of 45 KB, with a client timeout of 10 seconds
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// Run all four sizes in 10 phases, with a client timeout of 300 seconds: up to an hour
    #[arg(long)]
    full: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// Write the bytes at each hop over time as a picture (SVG)
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Keep documents and logs in this empty directory
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
        let mut ways = self.cases.unwrap_or(Variant::ALL.to_vec());
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

/// Parses the size of a file of NDN.
fn parse_file_size(text: &str) -> Result<usize, String> {
    let most = SIZES.iter().copied().max().unwrap_or_default();
    let size = text.parse().map_err(|_| format!("use a number of bytes, at most {most}"))?;
    if size > most { Err(format!("the largest file has {most} bytes")) } else { Ok(size) }
}

impl Demo {
    /// Runs the case that the command line names.
    ///
    /// # Errors
    /// When the overlay cannot be started, or something did not arrive intact.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.case {
            Some(Case::Leash { parent, command }) => match child_guard::exec(parent, &command)? {},
            Some(Case::Video { seconds, runs, at_once, json, files }) => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                let at_once = at_once.map_or(cores, usize::from);
                video::run(&video::Options { seconds, runs: runs.into(), at_once, json, files })
            }
            Some(Case::Ip { protocol, seconds, runs, json, picture, files }) => {
                let phase = Duration::from_secs(seconds);
                ip::run(&ip::Options { protocol, phase, runs: runs.into(), json, picture, files })
            }
            Some(Case::Ndn { sizes, repeats, policy_fetches, full, forwarder, json, picture, files }) => {
                let (default_sizes, default_repeats, default_fetches) =
                    if full { (SIZES.to_vec(), 20, 10_000) } else { (SIZES[..2].to_vec(), 5, 400) };
                ndn::run(&ndn::Options {
                    sizes: sizes.unwrap_or(default_sizes),
                    repeats: repeats.unwrap_or(default_repeats),
                    policy_fetches: policy_fetches.unwrap_or(default_fetches),
                    forwarder: forwarder.unwrap_or_default().split_whitespace().map(str::to_owned).collect(),
                    json,
                    picture,
                    files,
                })
            }
            Some(Case::Pep { requests, pause_ms, downloads, json, picture, files }) => {
                let pause = Duration::from_millis(pause_ms);
                pep::run(&pep::Options { requests, pause, downloads, json, picture, files })
            }
            Some(Case::Relay { seconds, keep, json, picture, files }) => {
                relay::run(&relay::Options { voice: Duration::from_secs(seconds), keep, json, picture, files })
            }
            Some(Case::Unstable(unstable)) => unstable::run(&unstable.options()),
            None => crate::run(Options { keep: self.keep, json: self.json }),
        }
    }
}

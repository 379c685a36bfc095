//! `hermes-bench`: measures Hermes beside Envoy, HAProxy, nginx and no proxy at all.
//!
//! In: the benchmarks to run, the path of the `hermes` binary, the output directory. Out: one JSON file per benchmark
//! with every round, a Markdown table and a picture of Figure 10. Progress goes to standard error. The program measures
//! only processes that it started itself, in its own namespaces; a missing contender is skipped with a message.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand};
use hermes_testkit::load;

mod cases;
mod chain;
mod contender;
mod gateway;
mod idle;
mod machine;
mod origins;
mod packet_path;
mod pep;
mod progress;
mod record;
mod relay;
mod run;
mod settings;
mod svg;
mod table;
mod testbed;
mod unstable;
mod workers;

#[cfg(test)]
mod tests;

/// Benchmarks of Hermes: the paper's Table IX and Figure 10, throughput, tunnels and memory.
#[derive(Debug, Parser)]
#[command(name = "hermes-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs every benchmark and writes the report.
    All(Options),
    /// Table IX and Figure 10 on loopback: single requests, and 200 to 1,000 clients at once.
    Figure10(Options),
    /// Requests a second on lasting connections: one hop h1 and h2, two hops with h2 between.
    Throughput(Options),
    /// TCP over HTTP/2 in Gbit/s and UDP over HTTP/2 in datagrams a second.
    Tunnels(Options),
    /// Resident memory with idle client connections.
    Memory(Options),
    /// Figure 10 with 20 ms of round-trip time between the proxies and the paper's Python server.
    Delayed(Options),
    /// IP through devices beside wireguard-go and the bare path: bulk, small packets, many flows, echoes a hop.
    Layer3(Options),
    /// Table VII: echoes to a far and to a near site.
    Table7(Options),
    /// Downloads over three links that are up in turns, in custody, beside what physics allows.
    Unstable(unstable::UnstableOptions),
    /// Connections split on a router, beside HAProxy and a minimal splitter (PEP-DNA, Table II, Figures 5 and 6).
    Pep(pep::PepOptions),
    /// Content of an NDN producer by HTTP, beside the same content read natively.
    Gateway(gateway::GatewayOptions),
    /// One publisher and many subscribers of a relay, beside NATS.
    Relay(relay::RelayOptions),
    /// Two clients and a relay between them, beside a bare relay, ping and a bare forwarder (HTTP-RS, Table 1, Figure 7).
    RelayPair(relay::pair::PairOptions),
    /// Many receivers and many pairs, and a relaying node beside the receivers (HTTP-RS, Figure 8a to c).
    RelayReceivers(relay::receivers::ReceiversOptions),
    /// A relay that a rendezvous chooses, beside the relay of median performance (HTTP-RS, Figure 8d).
    RelayRendezvous(relay::rendezvous::RendezvousOptions),
    /// Modes of distributing connections to workers, beside HAProxy and Envoy (paper 003, Table 3).
    Workers(workers::WorkersOptions),
    /// As many idle connections and streams as descriptors and time allow: their memory, and what active clients notice.
    Idle(idle::IdleOptions),
    /// Writes table and picture again from the JSON files.
    Report(Options),
    /// The origins' process; prints its addresses and serves until standard input ends.
    #[command(hide = true)]
    Origin(origins::OriginArgs),
    /// A server of the benchmark that does the least.
    #[command(hide = true)]
    Bare(relay::bare::BareArgs),
    /// The load's process; does a task (JSON) and prints the outcome (JSON).
    #[command(hide = true)]
    Load {
        /// A task of the testkit.
        task: String,
    },
}

/// The options of every benchmark.
#[derive(Debug, Clone, Args)]
struct Options {
    /// Directory of JSON, table and picture.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// Few and short rounds: a test of the benchmark, not for publication.
    #[arg(long)]
    quick: bool,
    /// Rounds, instead of the benchmark's own number.
    #[arg(long)]
    rounds: Option<usize>,
    /// Only these contenders: direct, envoy, haproxy, nginx, hermes; for layer 3 also wireguard-go, hermes-h2, ...
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Directory for logs and rendered configurations, kept afterwards; without it a temporary one.
    #[arg(long)]
    keep: Option<PathBuf>,
}

fn main() -> ExitCode {
    match dispatch(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("hermes-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> Result<ExitCode> {
    match command {
        Command::Origin(args) => origins::serve(&args).map(|()| ExitCode::SUCCESS),
        Command::Load { task } => {
            let task = serde_json::from_str(&task).context("the task of a load")?;
            println!("{}", serde_json::to_string(&load::run(&task)?)?);
            Ok(ExitCode::SUCCESS)
        }
        Command::All(options) => run::run(&options, &run::BENCHMARKS),
        Command::Figure10(options) => run::run(&options, &["figure10"]),
        Command::Throughput(options) => run::run(&options, &["throughput"]),
        Command::Tunnels(options) => run::run(&options, &["tunnels"]),
        Command::Memory(options) => run::run(&options, &["memory"]),
        Command::Delayed(options) => run::run(&options, &["delayed"]),
        Command::Layer3(options) => run::run(&options, &["layer3"]),
        Command::Table7(options) => run::run(&options, &["table7"]),
        Command::Pep(options) => pep::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Idle(options) => idle::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Workers(options) => workers::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Gateway(options) => gateway::run(&options).map(|()| ExitCode::SUCCESS),
        Command::RelayPair(options) => relay::pair::run(&options).map(|()| ExitCode::SUCCESS),
        Command::RelayReceivers(options) => relay::receivers::run(&options).map(|()| ExitCode::SUCCESS),
        Command::RelayRendezvous(options) => relay::rendezvous::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Bare(args) => relay::bare::serve(&args).map(|()| ExitCode::SUCCESS),
        Command::Relay(options) => relay::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Unstable(options) => Ok(if unstable::run(&options)? { ExitCode::SUCCESS } else { ExitCode::FAILURE }),
        Command::Report(options) => run::report(&options.out).map(|()| ExitCode::SUCCESS),
    }
}

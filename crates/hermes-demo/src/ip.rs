//! `hermes demo ip`: the IP case of the paper's Section IV-C, Figure 7.
//!
//! In: root, TUN devices and iproute2. Out: two users who call different machines 10.0.0.1, one of whom moved from
//! Poland to the United States; their pings while first her ingress and then her server follow her, each by one changed
//! document; round trips, lost packets, and the time from document to path, beside the paper's. Exit status 0 only if
//! no packet was lost and none came to a wrong machine.
//! Never: anything outside of namespaces and of a directory that it made itself.

mod chart;
mod figures;
mod lab;
mod nodes;
mod picture;
mod ping;
mod play;
mod typing;
mod wire;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::ValueEnum;
use serde::Serialize;

use super::case::Case;
use super::drawing;
use super::report::print;
use super::terminal::{Paint, Progress};
use figures::Figures;

const CASE: Case =
    Case { name: "ip", prefix: lab::PREFIX, devices: Some("TUN"), programs: &[("ip", "-V", "iproute2")] };

/// How the case is run.
#[derive(Clone)]
pub(crate) struct Options {
    /// What the hops speak.
    pub(crate) protocol: Protocol,
    /// How long each phase lasts.
    pub(crate) phase: Duration,
    /// Runs, one after the other. In the first the new hops are cold.
    pub(crate) runs: usize,
    /// JSON instead of tables.
    pub(crate) json: bool,
    /// Where the picture goes (SVG).
    pub(crate) picture: Option<PathBuf>,
    /// Where documents, logs and a list of all echoes stay; else they are removed.
    pub(crate) files: Option<PathBuf>,
}

/// Which HTTP carries the tunnels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protocol {
    /// HTTP/3 on every hop: packets as QUIC datagrams.
    H3,
    /// HTTP/2 on every hop: packets as capsules.
    H2,
    /// HTTP/3 from the users to the ingress, HTTP/2 after it.
    Mixed,
}

impl Protocol {
    fn of_users(self) -> &'static str {
        if self == Self::H2 { "h2" } else { "h3" }
    }

    fn of_ingresses(self) -> &'static str {
        if self == Self::H3 { "h3" } else { "h2" }
    }

    /// Round trips before a request may be sent on a new connection: TCP's where there is one, TLS's, and over HTTP/2
    /// the settings that say that extended CONNECT is known, which come once the server has seen the certificate; over
    /// HTTP/3 they come with the handshake's answer.
    fn handshake_round_trips(self) -> u32 {
        if self == Self::H3 { 1 } else { 3 }
    }
}

/// Runs the IP case.
///
/// # Errors
/// What is missing on this machine, or what failed.
pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    // Seconds before it is written.
    options.picture.as_deref().map(drawing::probe).transpose()?;
    CASE.requirements()?;
    CASE.stage(options.files.as_deref(), async |directory| show(options, directory).await)
}

async fn show(options: &Options, directory: &Path) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    let progress = Progress::begin();
    let played = play::play(options, directory, &progress).await?;
    drop(progress);
    let figures = Figures::of(options, &played);
    // First what people wait for: what became of the picture's path meanwhile is nothing to them.
    let seconds = begun.elapsed().as_secs_f64();
    print(&if options.json { figures.json()? } else { figures.text(Paint::for_stdout(), &played, seconds) });
    if let Some(path) = &options.picture {
        drawing::write(path, &picture::svg(&played), options.json)?;
    }
    if options.files.is_some() {
        let path = directory.join("echoes.csv");
        std::fs::write(&path, figures::csv(&played)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(if figures.is_lossless() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

//! `hermes demo ip`: the IP case of the paper's Section IV-C, Figure 7.
//!
//! In: root, TUN devices and iproute2. Out: two users who use 10.0.0.1 for different machines, one of whom moved from
//! Poland to the United States. Their pings continue while first her ingress and then her server follow her, each by
//! one changed document. The report shows round trips, lost packets, and the time from document to path, beside the
//! paper's. Exit status 0 only if no packet was lost and none reached a wrong machine. Never: a change outside of
//! namespaces and of a directory that the demo created.

mod chart;
mod delayed_link;
mod figures;
mod lab;
mod nodes;
mod picture;
mod ping;
mod run;
mod shell_session;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::ValueEnum;
use serde::Serialize;

use super::case::Case;
use super::picture_file;
use super::report::print;
use super::terminal::{Paint, Progress};
use figures::Figures;

const CASE: Case =
    Case { name: "ip", prefix: lab::PREFIX, devices: Some("TUN"), programs: &[("ip", "-V", "iproute2")] };

/// The options of the case.
#[derive(Clone)]
pub(crate) struct Options {
    /// The HTTP version of the hops.
    pub(crate) protocol: Protocol,
    /// The length of each phase.
    pub(crate) phase: Duration,
    /// The number of consecutive runs. In the first run the new hops are cold.
    pub(crate) runs: usize,
    /// JSON instead of tables.
    pub(crate) json: bool,
    /// The output file of the picture (SVG).
    pub(crate) picture: Option<PathBuf>,
    /// The directory in which documents, logs and a list of all echoes are kept; `None` removes them.
    pub(crate) files: Option<PathBuf>,
}

/// The HTTP version that carries the tunnels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protocol {
    /// HTTP/3 on every hop: packets are QUIC datagrams.
    H3,
    /// HTTP/2 on every hop: packets are capsules.
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

    /// Round trips before a request may be sent on a new connection: TCP's, if used, and TLS's. Over HTTP/2 the client
    /// also waits for the SETTINGS that announce extended CONNECT, which the server sends once it has verified the
    /// certificate. Over HTTP/3 the SETTINGS arrive with the handshake's response.
    fn handshake_round_trips(self) -> u32 {
        if self == Self::H3 { 1 } else { 3 }
    }
}

/// Runs the IP case.
///
/// # Errors
/// A requirement is missing on this machine, or the case failed.
pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    // The picture is written only at the end, so its path is checked first.
    options.picture.as_deref().map(picture_file::probe).transpose()?;
    CASE.requirements()?;
    CASE.stage(options.files.as_deref(), async |directory| show(options, directory).await)
}

async fn show(options: &Options, directory: &Path) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    let progress = Progress::begin();
    let played = run::play(options, directory, &progress).await?;
    drop(progress);
    let figures = Figures::of(options, &played);
    // The report comes first: an error of the picture's path must not suppress it.
    let seconds = begun.elapsed().as_secs_f64();
    print(&if options.json { figures.json()? } else { figures.text(Paint::for_stdout(), &played, seconds) });
    if let Some(path) = &options.picture {
        picture_file::write(path, &picture::svg(&played), options.json)?;
    }
    if options.files.is_some() {
        let path = directory.join("echoes.csv");
        std::fs::write(&path, figures::csv(&played)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(if figures.is_lossless() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

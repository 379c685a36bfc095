//! `hermes demo unstable`: downloads over three links of which one is up at a time, a second each.
//!
//! In: root, TUN devices, iproute2 and curl; Envoy where there is one. Out: what arrives directly, through Envoys as in the
//! papers, and through Hermes, and when, beside the papers' figures and what physics allows; a picture of the bytes that
//! each link carried. Exit status 0 only if everything that was asked for through Hermes came whole.
//! Never: anything outside of namespaces and of a directory that it made itself.

mod chain;
mod envoy;
mod figures;
mod lab;
mod nodes;
mod picture;
mod play;
pub(crate) mod way;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;

use super::case::Case;
use super::drawing;
use super::report::print;
use super::terminal::{Paint, Progress};
use chain::Setting;
use figures::Figures;
use way::Way;

const CASE: Case = Case {
    name: "unstable",
    prefix: lab::PREFIX,
    devices: Some("TAP"),
    programs: &[("ip", "-V", "iproute2"), ("curl", "-V", "curl")],
};

/// How the case is run.
#[derive(Clone)]
pub(crate) struct Options {
    /// What nodes of Hermes speak to each other.
    pub(crate) protocol: Protocol,
    /// What is asked for, in bytes.
    pub(crate) sizes: Vec<u64>,
    /// Downloads of each size on each way, at other moments of the links' turns.
    pub(crate) tries: u32,
    /// The same on ways on which next to nothing arrives.
    pub(crate) hopeless_tries: u32,
    /// How long a client waits for what does not come by Hermes.
    pub(crate) patience: Duration,
    /// How it is tried, in the table's order.
    pub(crate) ways: Vec<Way>,
    /// Envoy's binary, where it is not on the path.
    pub(crate) envoy: Option<PathBuf>,
    /// JSON instead of a table.
    pub(crate) json: bool,
    /// Where the picture goes (SVG).
    pub(crate) picture: Option<PathBuf>,
    /// Where documents and logs stay; else they are removed.
    pub(crate) files: Option<PathBuf>,
}

/// How much is done, where nothing else is said.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Extent {
    /// A look: 45 KB, once.
    Quick,
    /// What the table needs, in minutes.
    Usual,
    /// Everything, in an hour.
    Full,
}

impl Extent {
    /// Sizes, downloads of each, and how long a client waits.
    pub(crate) fn defaults(self) -> (Vec<u64>, u32, u64) {
        let [smallest, small, large, _] = way::SIZES;
        match self {
            Self::Quick => (vec![smallest], 1, 10),
            Self::Usual => (vec![smallest, small, large], 3, 60),
            Self::Full => (way::SIZES.to_vec(), 10, 300),
        }
    }
}

/// Which HTTP carries the hops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protocol {
    /// HTTP/2 over TCP.
    H2,
    /// HTTP/3 over QUIC.
    H3,
}

impl Protocol {
    /// As documents have it.
    fn name(self) -> &'static str {
        match self {
            Self::H2 => "h2",
            Self::H3 => "h3",
        }
    }
}

impl Options {
    /// The size whose bytes are drawn: 1 MB shows most, since larger ones only go on like that.
    fn drawn(&self) -> u64 {
        let largest = self.sizes.iter().copied().max().unwrap_or_default();
        if self.sizes.contains(&way::SIZES[2]) { way::SIZES[2] } else { largest }
    }
}

/// Runs the unstable case.
///
/// # Errors
/// What is missing on this machine, or what failed.
pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    // What was named on purpose is there before minutes go by.
    let envoy = options.envoy.as_deref().map(envoy::named).transpose()?;
    options.picture.as_deref().map(drawing::probe).transpose()?;
    CASE.requirements()?;
    CASE.stage(options.files.as_deref(), async |directory| show(options, envoy, directory).await)
}

async fn show(options: &Options, envoy: Option<PathBuf>, directory: &Path) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    let progress = Progress::begin();
    let estimate = play::estimate(options).as_secs();
    progress.step(&format!("this takes about {}:{:02}", estimate / 60, estimate % 60));
    let setting = Setting::new(options.protocol, envoy, directory)?;
    let played = play::play(options, &setting, &progress).await?;
    drop(progress);
    let figures = Figures::of(options, &played);
    // First what people wait for: what became of the picture's path meanwhile is nothing to them.
    let seconds = begun.elapsed().as_secs_f64();
    print(&if options.json { figures.json()? } else { figures.text(Paint::for_stdout(), seconds) });
    if let Some(path) = &options.picture {
        drawing::write(path, &picture::svg(&played.drawn), options.json)?;
    }
    Ok(if figures.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

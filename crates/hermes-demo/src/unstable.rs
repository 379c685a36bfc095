//! `hermes demo unstable`: downloads over three links, one of which is up at a time, for a second each.
//!
//! In: root, TUN devices, iproute2 and curl; Envoy if installed. Out: the completed downloads and their duration:
//! directly, through Envoys as in the papers, and through Hermes, beside the papers' figures and the physical limit. A
//! picture shows the bytes that each link carried. Exit status 0 only if every download through Hermes is complete.
//! Never: a change outside of namespaces and of a directory that the demo created.

mod envoy;
mod figures;
mod lab;
mod nodes;
mod picture;
mod run;
mod test_path;
pub(crate) mod variant;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;

use super::case::Case;
use super::picture_file;
use super::report::print;
use super::terminal::{Paint, Progress};
use figures::Figures;
use test_path::Setting;
use variant::Variant;

const CASE: Case = Case {
    name: "unstable",
    prefix: lab::PREFIX,
    devices: Some("TAP"),
    programs: &[("ip", "-V", "iproute2"), ("curl", "-V", "curl")],
};

/// The options of the case.
#[derive(Clone)]
pub(crate) struct Options {
    /// The HTTP version between nodes of Hermes.
    pub(crate) protocol: Protocol,
    /// The sizes of the downloads, in bytes.
    pub(crate) sizes: Vec<u64>,
    /// Downloads of each size on each way, at different positions in the links' cycle.
    pub(crate) tries: u32,
    /// The number of downloads on ways on which next to nothing arrives.
    pub(crate) hopeless_tries: u32,
    /// The client timeout for downloads without Hermes.
    pub(crate) patience: Duration,
    /// The ways, in the table's order.
    pub(crate) ways: Vec<Variant>,
    /// The path of Envoy's binary, if it is not in the PATH.
    pub(crate) envoy: Option<PathBuf>,
    /// JSON instead of a table.
    pub(crate) json: bool,
    /// The output file of the picture (SVG).
    pub(crate) picture: Option<PathBuf>,
    /// The directory in which documents and logs are kept; `None` removes them.
    pub(crate) files: Option<PathBuf>,
}

/// The extent of the case, which sets the defaults of other options.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Extent {
    /// One download of 45 KB.
    Quick,
    /// The downloads that the table needs; takes minutes.
    Usual,
    /// All downloads; takes an hour.
    Full,
}

impl Extent {
    /// The default sizes, downloads of each, and client timeout in seconds.
    pub(crate) fn defaults(self) -> (Vec<u64>, u32, u64) {
        let [smallest, small, large, _] = variant::SIZES;
        match self {
            Self::Quick => (vec![smallest], 1, 10),
            Self::Usual => (vec![smallest, small, large], 3, 60),
            Self::Full => (variant::SIZES.to_vec(), 10, 300),
        }
    }
}

/// The HTTP version of the hops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protocol {
    /// HTTP/2 over TCP.
    H2,
    /// HTTP/3 over QUIC.
    H3,
}

impl Protocol {
    /// The name in documents.
    fn name(self) -> &'static str {
        match self {
            Self::H2 => "h2",
            Self::H3 => "h3",
        }
    }
}

impl Options {
    /// The size that the picture shows: 1 MB, since larger downloads only repeat the pattern.
    fn drawn(&self) -> u64 {
        let largest = self.sizes.iter().copied().max().unwrap_or_default();
        if self.sizes.contains(&variant::SIZES[2]) { variant::SIZES[2] } else { largest }
    }
}

/// Runs the unstable case.
///
/// # Errors
/// A requirement is missing on this machine, or the case failed.
pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    // A binary that the user named is checked before the case runs for minutes.
    let envoy = options.envoy.as_deref().map(envoy::named).transpose()?;
    options.picture.as_deref().map(picture_file::probe).transpose()?;
    CASE.requirements()?;
    CASE.stage(options.files.as_deref(), async |directory| show(options, envoy, directory).await)
}

async fn show(options: &Options, envoy: Option<PathBuf>, directory: &Path) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    let progress = Progress::begin();
    let estimate = run::estimate(options).as_secs();
    progress.step(&format!("this takes about {}:{:02}", estimate / 60, estimate % 60));
    let setting = Setting::new(options.protocol, envoy, directory)?;
    let played = run::play(options, &setting, &progress).await?;
    drop(progress);
    let figures = Figures::of(options, &played);
    // The report comes first: an error of the picture's path must not suppress it.
    let seconds = begun.elapsed().as_secs_f64();
    print(&if options.json { figures.json()? } else { figures.text(Paint::for_stdout(), seconds) });
    if let Some(path) = &options.picture {
        picture_file::write(path, &picture::svg(&played.drawn), options.json)?;
    }
    Ok(if figures.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

//! `hermes demo pep`: TCP connections that a router splits, over TCP and over other architectures (PEP-DNA).
//!
//! In: root, TUN devices and iproute2; HAProxy if installed. Out: for each way from a client to a server the time
//! that it adds to a request, its rate, its gain where packets are lost, and the address that the server sees. The report has
//! the paper's figures, too. Neither client nor server is configured. Exit status 0 only if all bytes arrived intact and each
//! refusal reached the client. Never: a change outside of namespaces and of a directory that the demo created.

mod figures;
mod lab;
mod nodes;
mod picture;
mod run;
mod way;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::case::Case;
use super::picture_file;
use super::report::print;
use super::terminal::{Paint, Progress};
use figures::Figures;

const CASE: Case =
    Case { name: "pep", prefix: lab::PREFIX, devices: Some("TAP"), programs: &[("ip", "-V", "iproute2")] };

/// The options of the case.
#[derive(Clone)]
pub(crate) struct Options {
    /// Requests of each kind on each way.
    pub(crate) requests: u32,
    /// The pause between two requests.
    pub(crate) pause: Duration,
    /// Downloads over the path that loses packets, on each way.
    pub(crate) downloads: u32,
    /// JSON instead of tables.
    pub(crate) json: bool,
    /// The output file of the picture (SVG).
    pub(crate) picture: Option<PathBuf>,
    /// The directory in which documents and logs are kept; `None` removes them.
    pub(crate) files: Option<PathBuf>,
}

/// Runs the case.
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
    let seconds = begun.elapsed().as_secs_f64();
    // The report comes first: an error of the picture's path must not suppress it.
    print(&if options.json { figures.json()? } else { figures.text(Paint::for_stdout(), seconds) });
    if let Some(path) = &options.picture {
        picture_file::write(path, &picture::svg(&figures), options.json)?;
    }
    Ok(if figures.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

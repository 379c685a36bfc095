//! `hermes demo ndn`: files of Named Data Networking over a slow link, directly and through an overlay.
//!
//! In: root, TUN devices and iproute2. Out: the time of each file on each way beside that of the first paper (Table
//! VIII), and whether the Interests of two users in two namespaces reached the replica that policy names. Exit status 0
//! only if every byte arrived intact and every Interest reached the right replica. Never: a change outside of namespaces
//! and of a directory that the demo created.

mod consumer;
mod figures;
mod forwarders;
mod lab;
mod nodes;
mod picture;
mod producer;
mod run;
mod way;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use super::case::Case;
use super::picture_file;
use super::report::print;
use super::terminal::{Paint, Progress};
use figures::Figures;

pub(crate) use way::SIZES;

const CASE: Case =
    Case { name: "ndn", prefix: lab::PREFIX, devices: Some("TAP"), programs: &[("ip", "-V", "iproute2")] };

/// The options of the case.
#[derive(Clone)]
pub(crate) struct Options {
    /// The sizes of the files, in bytes.
    pub(crate) sizes: Vec<usize>,
    /// Fetches of each file on each way.
    pub(crate) repeats: u32,
    /// Empty files fetched by two users in two namespaces, on each version of HTTP.
    pub(crate) policy_fetches: u32,
    /// The command of a forwarder that others wrote, for both ends of each way; empty means none.
    pub(crate) forwarder: Vec<String>,
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
    let figures = Figures::of(&played, &options.forwarder);
    let seconds = begun.elapsed().as_secs_f64();
    // The report comes first: an error of the picture's path must not suppress it.
    print(&if options.json { figures.json()? } else { figures.text(Paint::for_stdout(), seconds) });
    if let Some(path) = &options.picture {
        picture_file::write(path, &picture::svg(&figures), options.json)?;
    }
    Ok(if figures.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

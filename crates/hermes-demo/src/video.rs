//! `hermes demo video`: the video case of the paper's Section IV-A.
//!
//! In: root, ffmpeg, iproute2 and nftables. Out: one and two minutes of video, streamed as RTP over UDP along a path
//! that loses one packet in a hundred. Each clip is streamed directly to the user, and through an overlay of five nodes
//! that carries the datagrams over HTTP/2 with mutual TLS. The report compares the received streams with the paper's
//! Table V. Exit status 0 only if the overlay lost nothing. Never: a change outside of namespaces and of a directory
//! that the demo created.

mod clip;
mod comparison;
mod figures;
mod lab;
mod nodes;
mod run;
mod server;
mod tap;
mod viewer;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::task::JoinSet;

use super::case::Case;
use super::report::print;
use super::terminal::{Paint, Progress, grouped};
use clip::Clip;
use figures::Figures;
use run::{Board, Round};

const POLL_INTERVAL: Duration = Duration::from_millis(500);

const CASE: Case = Case {
    name: "video",
    prefix: lab::PREFIX,
    devices: None,
    programs: &[
        ("ffmpeg", "-version", "ffmpeg"),
        ("ip", "-V", "iproute2"),
        ("tc", "-V", "iproute2"),
        ("nft", "-v", "nftables"),
    ],
};

/// The options of the case.
#[derive(Clone)]
pub(crate) struct Options {
    /// Length of the shorter clip in seconds; the other is twice as long. The paper's is a minute.
    pub(crate) seconds: u64,
    /// The total number of runs.
    pub(crate) runs: usize,
    /// The number of parallel runs, each in its own namespaces.
    pub(crate) at_once: usize,
    /// JSON instead of a table.
    pub(crate) json: bool,
    /// The directory in which clips, streams, documents and logs are kept; `None` removes them.
    pub(crate) files: Option<PathBuf>,
}

/// Runs the video case.
///
/// # Errors
/// A requirement is missing on this machine, or a stream was not sent or received to its end.
pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    CASE.requirements()?;
    clip::can_encode()?;
    CASE.stage(options.files.as_deref(), async |directory| show(options, directory).await)
}

async fn show(options: &Options, directory: &Path) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    let progress = Progress::begin();
    progress.step("making the clips");
    let (short, long) = (Clip::make(directory, options.seconds), Clip::make(directory, 2 * options.seconds));
    let (short, long) = tokio::try_join!(short, long)?;
    let (rounds, failed) = play_all(options, &[short, long], directory, &progress).await?;
    drop(progress);
    let figures = Figures::of(rounds, failed);
    let text =
        if options.json { figures.json()? } else { figures.text(Paint::for_stdout(), begun.elapsed().as_secs_f64()) };
    print(&text);
    Ok(if figures.overlay_is_perfect() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs all rounds; returns the results, and the reasons of failed rounds.
async fn play_all(
    options: &Options,
    clips: &[Clip],
    directory: &Path,
    progress: &Progress,
) -> anyhow::Result<(Vec<Round>, Vec<String>)> {
    let board = Arc::new(Board::default());
    let mut playing = JoinSet::new();
    let (mut rounds, mut failed) = (Vec::new(), Vec::new());
    let mut numbers = 0..options.runs;
    let mut ticks = tokio::time::interval(POLL_INTERVAL);
    let begun = Instant::now();
    progress.step("streaming, over the overlay and directly");
    loop {
        while playing.len() < options.at_once {
            let Some(number) = numbers.next() else { break };
            playing.spawn(play(number, clips.to_vec(), directory.to_owned(), board.clone()));
        }
        if playing.is_empty() {
            return Ok((rounds, failed));
        }
        tokio::select! {
            Some(played) = playing.join_next() => match played? {
                Ok(round) => rounds.push(round),
                // A failure of one run among many is listed in the report; if every run failed, the last error is
                // returned.
                Err(error) if failed.len() + 1 < options.runs => failed.push(format!("{error:#}")),
                Err(error) => return Err(error),
            },
            _ = ticks.tick() => progress.detail(&standing(options, &board, rounds.len(), begun.elapsed())),
        }
    }
}

async fn play(number: usize, clips: Vec<Clip>, directory: PathBuf, board: Arc<Board>) -> anyhow::Result<Round> {
    let directory = directory.join(format!("run-{}", number + 1));
    std::fs::create_dir(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    run::play(number, &clips, &directory, &board).await.with_context(|| format!("run {}", number + 1))
}

fn standing(options: &Options, board: &Board, done: usize, elapsed: Duration) -> String {
    let [overlay, direct] = [0, 1].map(|column| grouped(board.packets[column].load(Ordering::Relaxed) as u64));
    let packets = format!("packets so far: overlay {overlay}, direct {direct}");
    if options.runs > 1 {
        return format!("{done} of {} runs done; {packets}", options.runs);
    }
    if elapsed.as_secs() > 2 * options.seconds + 2 {
        return format!("decoding what came, frame by frame; {packets}");
    }
    let clock = |seconds: u64| format!("{}:{:02}", seconds / 60, seconds % 60);
    format!("streaming {} of {}; {packets}", clock(elapsed.as_secs()), clock(2 * options.seconds))
}

//! `hermes demo relay`: a chat and a voice-like stream over a tree of three relays.
//!
//! In: loopback. Out: the lines of a chat at two nodes; the delays and gaps of a stream of 50 packets of 160 bytes a
//! second, beside UDP on the same machine. The output is text, JSON or a picture. Exit status 0 only if everything
//! arrived, in order and once. Never: root, a fixed port, or a file outside of one directory.

mod chat;
mod figures;
mod nodes;
mod picture;
mod voice;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;

use super::interrupt::Interrupt;
use super::namespace;
use super::picture_file;
use super::program::stop_all;
use super::report::print;
use super::terminal::{Paint, Progress};
use figures::Figures;
use nodes::Tree;

const PREFIX: &str = "hermes-relay-";
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// The options of the case.
#[derive(Clone)]
pub(crate) struct Options {
    /// The length of the voice-like stream.
    pub(crate) voice: Duration,
    /// Keeps the nodes running until a signal arrives.
    pub(crate) keep: bool,
    /// JSON instead of text.
    pub(crate) json: bool,
    /// The output file of the picture (SVG).
    pub(crate) picture: Option<PathBuf>,
    /// The directory in which documents and logs are kept; `None` removes them.
    pub(crate) files: Option<PathBuf>,
}

/// Runs the case.
///
/// # Errors
/// A node does not start, or a publication does not arrive.
pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    // The picture is written only at the end, so its path is checked first.
    options.picture.as_deref().map(picture_file::probe).transpose()?;
    let (_temporary, directory) = namespace::directory(PREFIX, options.files.as_deref())?;
    // The runtime has one thread, the main one: the leash ends child processes when the thread that started them ends.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupt = Interrupt::listen()?;
        let mut tree = None;
        let status = tokio::select! {
            biased;
            status = interrupt.next() => status,
            shown = show(options, &directory, &mut tree) => shown.context("demo relay")?,
        };
        if let (true, Some(tree)) = (options.keep, &tree) {
            print(&tree.to_try(Paint::for_stdout()));
            interrupt.next().await;
        }
        if let Some(mut tree) = tree {
            stop_all(&mut tree.programs, STOP_TIMEOUT).await;
        }
        Ok(status)
    })
}

async fn show(options: &Options, directory: &Path, tree: &mut Option<Tree>) -> anyhow::Result<ExitCode> {
    let progress = Progress::begin();
    progress.step("three nodes start: hall and yard below root");
    let tree = tree.insert(nodes::start(directory).await?);
    progress.step("two shells, at hall and at yard, chat");
    let chat = chat::play(tree).await?;
    progress.step(&format!("50 packets of 160 B a second from hall to yard, for {} s", options.voice.as_secs()));
    let voice = voice::play(tree, options.voice).await?;
    let links = nodes::link_publications(tree).await?;
    drop(progress);
    let figures = Figures { chat, voice, links };
    print(&if options.json { figures.json()? } else { figures.text(Paint::for_stdout()) });
    if let Some(path) = &options.picture {
        picture_file::write(path, &picture::svg(&figures), options.json)?;
    }
    Ok(if figures.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

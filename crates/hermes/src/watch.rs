//! Notices changes of the document and of the files that it names.
//!
//! In: paths. Out: an event once a change has settled. Directories are watched, not files: editors
//! and secret mounts replace files instead of writing them. What counts is the content: an event
//! without a difference is none.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;

/// Writers that write in pieces are waited for, so long after their last event.
const SETTLE: Duration = Duration::from_millis(10);
/// But a file that is written all the time is looked at now and then.
const AT_LATEST: Duration = Duration::from_millis(60);

/// Watches a document and the files that it names.
pub(crate) struct Watch {
    watcher: RecommendedWatcher,
    events: mpsc::Receiver<()>,
    directories: Vec<PathBuf>,
    seen: HashMap<PathBuf, Option<Vec<u8>>>,
    document: PathBuf,
}

impl Watch {
    /// Watches a document.
    pub(crate) fn new(document: &Path) -> anyhow::Result<Self> {
        // One waiting event is enough: it says "look", not what changed.
        let (sender, events) = mpsc::channel(1);
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if event.is_ok_and(|event| !event.kind.is_access()) {
                let _ = sender.try_send(());
            }
        })
        .context("file changes cannot be watched")?;
        let mut this =
            Self { watcher, events, directories: Vec::new(), seen: HashMap::new(), document: document.to_owned() };
        this.follow(std::iter::empty());
        Ok(this)
    }

    /// Follows these files beside the document, as they are now.
    pub(crate) fn follow<'a>(&mut self, files: impl Iterator<Item = &'a Path>) {
        let all: Vec<PathBuf> = files.map(Path::to_owned).chain([self.document.clone()]).collect();
        for directory in all.iter().filter_map(|file| file.parent()) {
            let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
            if self.directories.iter().any(|known| known == directory) {
                continue;
            }
            match self.watcher.watch(directory, RecursiveMode::NonRecursive) {
                Ok(()) => self.directories.push(directory.to_owned()),
                Err(error) => {
                    tracing::warn!(directory = %directory.display(), %error, "changes here are not noticed; send SIGHUP after a change")
                }
            }
        }
        // What was seen of files that are still followed stays: a change since then is one.
        let mut seen = HashMap::new();
        for file in all {
            let content = self.seen.remove(&file).unwrap_or_else(|| std::fs::read(&file).ok());
            seen.insert(file, content);
        }
        self.seen = seen;
    }

    /// Waits until a followed file has another content.
    pub(crate) async fn changed(&mut self) {
        loop {
            if self.events.recv().await.is_none() {
                std::future::pending::<()>().await;
            }
            let latest = tokio::time::Instant::now() + AT_LATEST;
            while tokio::time::Instant::now() < latest {
                match tokio::time::timeout(SETTLE, self.events.recv()).await {
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
            if self.look() {
                return;
            }
        }
    }

    fn look(&mut self) -> bool {
        let mut changed = false;
        for (file, seen) in &mut self.seen {
            let now = std::fs::read(file).ok();
            if *seen != now {
                *seen = now;
                changed = true;
            }
        }
        changed
    }
}

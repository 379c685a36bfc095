//! Notices changes of the document and of the files that it names.
//!
//! In: paths. Out: an event once a change has settled. Directories are watched, not files: editors
//! and secret mounts replace files instead of writing them, and where a path leads through symbolic
//! links each of them can be turned. What counts is the content: an event without a difference is
//! none. Never: a half of what somebody is still writing, as far as the system tells us.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::document::MAX_DOCUMENT;

/// Files that change together (a certificate and its key) are waited for, so long after the last.
const SETTLE: Duration = Duration::from_millis(4);
/// A file that was written to and not closed is waited for, so long after the last write.
const UNCLOSED: Duration = Duration::from_millis(50);
/// But a file that is written all the time is looked at now and then.
const AT_LATEST: Duration = Duration::from_millis(500);
/// Symbolic links in one path; the kernel follows as many.
const MAX_LINKS: usize = 40;

/// Watches a document and the files that it names.
pub(crate) struct Watch {
    watcher: RecommendedWatcher,
    events: Arc<Events>,
    directories: HashSet<PathBuf>,
    seen: HashMap<PathBuf, Option<Vec<u8>>>,
    document: PathBuf,
    /// When to look. Kept here: whoever waits for a change may be interrupted, the change stays.
    due: Option<Due>,
}

#[derive(Clone, Copy)]
struct Due {
    first: Instant,
    at: Instant,
}

/// What the system told since the last look.
#[derive(Default)]
struct Events {
    arrived: Notify,
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    /// Directory entries whose change matters.
    entries: HashSet<PathBuf>,
    /// Of those, files that were written to and not closed yet.
    writing: HashSet<PathBuf>,
    any: bool,
}

impl Events {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, event: notify::Event) {
        let is_written = matches!(event.kind, EventKind::Modify(ModifyKind::Data(_)));
        let is_closed = matches!(event.kind, EventKind::Access(AccessKind::Close(AccessMode::Write)));
        if event.kind.is_access() && !is_closed {
            return;
        }
        let mut told = self.told();
        let overflowed = event.need_rescan();
        for path in event.paths {
            if !told.entries.contains(&path) {
                continue;
            }
            told.any = true;
            if is_written {
                told.writing.insert(path);
            } else {
                told.writing.remove(&path);
            }
        }
        told.any |= overflowed;
        if told.any {
            self.arrived.notify_one();
        }
    }
}

impl Watch {
    /// Whether it is this document that somebody writes.
    pub(crate) fn is_of(&self, document: &Path) -> bool {
        std::path::absolute(document).is_ok_and(|document| document == self.document)
    }

    /// Watches a document.
    pub(crate) fn new(document: &Path) -> anyhow::Result<Self> {
        let events = Arc::new(Events::default());
        let teller = events.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if let Ok(event) = event {
                teller.tell(event);
            }
        })
        .context("file changes cannot be watched")?;
        let document = std::path::absolute(document).context("the document's path")?;
        let (directories, seen) = (HashSet::new(), HashMap::new());
        let mut this = Self { watcher, events, directories, seen, document, due: None };
        this.follow(std::iter::empty());
        Ok(this)
    }

    /// Follows these files beside the document, as they are now.
    pub(crate) fn follow<'a>(&mut self, files: impl Iterator<Item = &'a Path>) {
        let named = files.filter_map(|file| std::path::absolute(file).ok());
        let all: HashSet<PathBuf> = named.chain([self.document.clone()]).collect();
        self.seen.retain(|file, _| all.contains(file));
        self.watch_places(&all);
        for file in all {
            // What was seen of files that are still followed stays: a change since then is one.
            self.seen.entry(file).or_insert_with_key(|file| content(file));
        }
    }

    /// Watches the directories of all entries on the way to these files, and no others.
    fn watch_places(&mut self, files: &HashSet<PathBuf>) {
        let entries: HashSet<PathBuf> = files.iter().flat_map(|file| entries_of(file)).collect();
        let wanted: HashSet<PathBuf> = entries.iter().filter_map(|entry| entry.parent()).map(Path::to_owned).collect();
        self.events.told().entries = entries;
        for gone in self.directories.difference(&wanted) {
            // It may be gone from the disk as well.
            let _ = self.watcher.unwatch(gone);
        }
        self.directories.retain(|directory| wanted.contains(directory));
        for directory in wanted {
            if self.directories.contains(&directory) {
                continue;
            }
            match self.watcher.watch(&directory, RecursiveMode::NonRecursive) {
                Ok(()) => drop(self.directories.insert(directory)),
                Err(error) => {
                    tracing::warn!(directory = %directory.display(), %error, "changes here are not noticed; send SIGHUP after a change");
                }
            }
        }
    }

    /// Waits until a followed file has another content. May be dropped and called again.
    pub(crate) async fn changed(&mut self) {
        loop {
            let arrived = self.events.arrived.notified();
            match self.due {
                None => arrived.await,
                Some(due) => drop(tokio::time::timeout_at(due.at, arrived).await),
            }
            self.reckon();
            if self.due.is_some_and(|due| due.at <= Instant::now()) {
                self.due = None;
                if self.look() {
                    return;
                }
            }
        }
    }

    /// When to look, after what was told.
    fn reckon(&mut self) {
        let mut told = self.events.told();
        if !std::mem::take(&mut told.any) {
            return;
        }
        let now = Instant::now();
        let first = self.due.map_or(now, |due| due.first);
        let wait = if told.writing.is_empty() { SETTLE } else { UNCLOSED };
        self.due = Some(Due { first, at: (now + wait).min(first + AT_LATEST) });
    }

    /// Looks now: whether a followed file has another content than was seen of it.
    pub(crate) fn look(&mut self) -> bool {
        self.events.told().writing.clear();
        // Before the files are read: a link that was turned leads to other directories now.
        let files = self.seen.keys().cloned().collect();
        self.watch_places(&files);
        let mut changed = false;
        for (file, seen) in &mut self.seen {
            let now = content(file);
            if *seen != now {
                *seen = now;
                changed = true;
            }
        }
        changed
    }
}

/// What a file holds. `None`: it is not there, or is nothing that a node reads.
fn content(file: &Path) -> Option<Vec<u8>> {
    hermes_net::file::read(file, MAX_DOCUMENT).ok()
}

/// The directory entries that a path leads through and that can be turned: symbolic links, and the
/// file itself. Directories in them are real ones.
fn entries_of(file: &Path) -> Vec<PathBuf> {
    let mut entries = Vec::new();
    let mut at = PathBuf::from("/");
    let mut rest: VecDeque<OsString> = names(file);
    while let Some(name) = rest.pop_front() {
        if name == ".." {
            at.pop();
            continue;
        }
        let entry = at.join(&name);
        match std::fs::read_link(&entry) {
            Ok(target) if entries.len() < MAX_LINKS => {
                entries.push(entry);
                if target.is_absolute() {
                    at = PathBuf::from("/");
                }
                for name in names(&target).into_iter().rev() {
                    rest.push_front(name);
                }
            }
            _ if rest.is_empty() => entries.push(entry),
            _ => at = entry,
        }
    }
    entries
}

fn names(path: &Path) -> VecDeque<OsString> {
    let normal = |component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsString::from("..")),
        _ => None,
    };
    path.components().filter_map(normal).collect()
}

#[cfg(test)]
mod tests;

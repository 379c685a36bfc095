//! Notices changes of the document and of the files that it names.
//!
//! In: paths. Out: an event once a change has settled. The watch covers directories instead of files, because editors
//! and secret mounts replace files. If a path contains symbolic links, each of them may be replaced. Only content
//! counts: an event without a difference is ignored. A replaced directory is watched anew. A slow poll finds changes
//! without an event, such as those of a parent directory. A file that is still being written is not read, as far as
//! the system reports writers.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::document::MAX_DOCUMENT;

/// The pause after the last event, so that files that change together (a certificate and its key) are read together.
const SETTLE: Duration = Duration::from_millis(4);
/// The pause after the last write to a file that is still open for writing.
const UNCLOSED: Duration = Duration::from_millis(50);
/// The longest wait for a file that is written continuously.
const AT_LATEST: Duration = Duration::from_millis(500);
/// The interval between two polls, which look only at attributes of files and directories.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The interval while a directory is missing, since no event reports its return.
const MISSING_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The maximum number of symbolic links in one path, as in the kernel.
const MAX_LINKS: usize = 40;

/// Watches a document and the files that it names.
pub(crate) struct Watch {
    watcher: RecommendedWatcher,
    events: Arc<Events>,
    /// The watched directories, with their identity at that time.
    directories: HashMap<PathBuf, Stamp>,
    /// The directories that cannot be watched at the moment; `None`: missing.
    unwatched: HashMap<PathBuf, Option<Stamp>>,
    seen: HashMap<PathBuf, Option<Vec<u8>>>,
    /// The stamps of the files in `seen` at the last poll.
    stamps: HashMap<PathBuf, Option<Stamp>>,
    next_poll: Instant,
    document: PathBuf,
    /// When to read the files. Stored here so that a cancelled wait does not lose the change.
    due: Option<Due>,
}

/// Distinguishes a file or directory from its replacement, and a file from its earlier content. For a directory only
/// its identity counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    changed: Option<(i64, i64, u64)>,
}

impl Stamp {
    /// `None`: not found.
    fn of(path: &Path) -> Option<Self> {
        let metadata = std::fs::metadata(path).ok()?;
        let changed = (!metadata.is_dir()).then(|| (metadata.ctime(), metadata.ctime_nsec(), metadata.size()));
        Some(Self { device: metadata.dev(), inode: metadata.ino(), changed })
    }
}

#[derive(Clone, Copy)]
struct Due {
    first: Instant,
    at: Instant,
}

/// The events since the files were last read.
#[derive(Default)]
struct Events {
    arrived: Notify,
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    /// Directory entries whose change matters.
    entries: HashSet<PathBuf>,
    /// The directories of these files.
    directories: HashSet<PathBuf>,
    /// The files that were written to and not closed yet.
    writing: HashSet<PathBuf>,
    any: bool,
}

impl Events {
    fn state(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, event: notify::Event) {
        let is_written = matches!(event.kind, EventKind::Modify(ModifyKind::Data(_)));
        let is_closed = matches!(event.kind, EventKind::Access(AccessKind::Close(AccessMode::Write)));
        if event.kind.is_access() && !is_closed {
            return;
        }
        let mut told = self.state();
        let overflowed = event.need_rescan();
        for path in event.paths {
            if !told.entries.contains(&path) {
                // A directory that is moved or removed loses its watch.
                let goes = event.kind.is_remove() || matches!(event.kind, EventKind::Modify(ModifyKind::Name(_)));
                told.any |= goes && told.directories.contains(&path);
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
    /// True if this document is the watched file, so that a person writes it.
    pub(crate) fn is_of(&self, document: &Path) -> bool {
        std::path::absolute(document).is_ok_and(|document| document == self.document)
    }

    /// Watches a document.
    pub(crate) fn new(document: &Path) -> anyhow::Result<Self> {
        let events = Arc::new(Events::default());
        let teller = events.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if let Ok(event) = event {
                teller.record(event);
            }
        })
        .context("file changes cannot be watched")?;
        let document = std::path::absolute(document).context("the document's path")?;
        let mut this = Self {
            watcher,
            events,
            directories: HashMap::new(),
            unwatched: HashMap::new(),
            seen: HashMap::new(),
            stamps: HashMap::new(),
            next_poll: Instant::now() + POLL_INTERVAL,
            document,
            due: None,
        };
        this.follow(std::iter::empty());
        Ok(this)
    }

    /// Watches these files beside the document. Later changes are compared with their present content.
    pub(crate) fn follow<'a>(&mut self, files: impl Iterator<Item = &'a Path>) {
        let named = files.filter_map(|file| std::path::absolute(file).ok());
        let all: HashSet<PathBuf> = named.chain([self.document.clone()]).collect();
        self.seen.retain(|file, _| all.contains(file));
        self.watch_places(&all);
        for file in all {
            // Files that were watched before keep their earlier content, so that a change since then still counts.
            if !self.seen.contains_key(&file) {
                self.stamps.insert(file.clone(), Stamp::of(&file));
                let content = content(&file);
                self.seen.insert(file, content);
            }
        }
        self.stamps.retain(|file, _| self.seen.contains_key(file));
    }

    /// Watches the directories of all entries on the paths to these files, and no others.
    fn watch_places(&mut self, files: &HashSet<PathBuf>) {
        let entries: HashSet<PathBuf> = files.iter().flat_map(|file| entries_of(file)).collect();
        let wanted: HashSet<PathBuf> = entries.iter().filter_map(|entry| entry.parent()).map(Path::to_owned).collect();
        {
            let mut told = self.events.state();
            (told.entries, told.directories) = (entries, wanted.clone());
        }
        let is_current = |directory: &PathBuf, stamp: &Stamp| Stamp::of(directory) == Some(*stamp);
        for (gone, _) in self.directories.extract_if(|path, stamp| !wanted.contains(path) || !is_current(path, stamp)) {
            // The directory may no longer exist.
            let _ = self.watcher.unwatch(&gone);
        }
        self.unwatched.retain(|directory, _| wanted.contains(directory));
        for directory in wanted {
            if self.directories.contains_key(&directory) {
                continue;
            }
            // Taken before the watch begins, so that a replacement in between is noticed.
            let stamp = Stamp::of(&directory);
            match (stamp, self.watcher.watch(&directory, RecursiveMode::NonRecursive)) {
                (Some(stamp), Ok(())) => {
                    self.unwatched.remove(&directory);
                    self.directories.insert(directory, stamp);
                }
                (_, watched) => {
                    let _ = self.watcher.unwatch(&directory);
                    if self.unwatched.insert(directory.clone(), stamp).is_none() {
                        let error = watched.err().map(|error| error.to_string()).unwrap_or_default();
                        let directory = directory.display();
                        tracing::warn!(%directory, %error, "cannot watch this directory; polling for changes");
                    }
                }
            }
        }
    }

    /// True if a file or directory has changed since the last poll, whether or not events reported it.
    fn poll(&mut self) -> bool {
        self.next_poll = Instant::now() + self.poll_interval();
        self.directories.iter().any(|(directory, stamp)| Stamp::of(directory) != Some(*stamp))
            || self.unwatched.iter().chain(&self.stamps).any(|(path, stamp)| Stamp::of(path) != *stamp)
    }

    fn poll_interval(&self) -> Duration {
        let misses_any = self.unwatched.values().any(Option::is_none);
        if misses_any { MISSING_POLL_INTERVAL } else { POLL_INTERVAL }
    }

    /// Waits until the content of a watched file changes. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        loop {
            let arrived = self.events.arrived.notified();
            let until = self.due.map_or(self.next_poll, |due| due.at.min(self.next_poll));
            let _ = tokio::time::timeout_at(until, arrived).await;
            self.reckon();
            let now = Instant::now();
            if self.next_poll <= now && self.poll() && self.due.is_none() {
                self.due = Some(Due { first: now, at: now + UNCLOSED });
            }
            if self.due.is_some_and(|due| due.at <= Instant::now()) {
                self.due = None;
                if self.read_files() {
                    return;
                }
            }
        }
    }

    /// Computes when to read the files, from the events so far.
    fn reckon(&mut self) {
        let mut told = self.events.state();
        if !std::mem::take(&mut told.any) {
            return;
        }
        let now = Instant::now();
        let first = self.due.map_or(now, |due| due.first);
        let wait = if told.writing.is_empty() { SETTLE } else { UNCLOSED };
        self.due = Some(Due { first, at: (now + wait).min(first + AT_LATEST) });
    }

    /// Reads the files now. Returns true if the content of one has changed.
    pub(crate) fn read_files(&mut self) -> bool {
        self.events.state().writing.clear();
        // Directories are updated before the files are read, since a replaced link leads to other directories.
        let files = self.seen.keys().cloned().collect();
        self.watch_places(&files);
        let mut changed = false;
        for (file, seen) in &mut self.seen {
            self.stamps.insert(file.clone(), Stamp::of(file));
            let now = content(file);
            if *seen != now {
                *seen = now;
                changed = true;
            }
        }
        self.next_poll = self.next_poll.min(Instant::now() + self.poll_interval());
        changed
    }
}

/// The content of a file. `None`: it does not exist or is not a file that a node reads.
fn content(file: &Path) -> Option<Vec<u8>> {
    hermes_net::file::read(file, MAX_DOCUMENT).ok()
}

/// The directory entries on a path that can be replaced: symbolic links and the file itself. Their directories are
/// canonical.
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

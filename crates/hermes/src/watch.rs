//! Notices changes of the document and of the files that it names.
//!
//! In: paths. Out: an event once a change has settled. The watch covers directories instead of files, because editors
//! and secret mounts replace files. If a path contains symbolic links, each of them may be replaced. Only content
//! counts: an event without a difference is ignored. A replaced directory is watched anew. A slow poll finds changes
//! without an event, such as those of a parent directory. A file that is still being written is not read, as far as
//! the system reports writers. Never: an event for each write, since the access log may lie in a watched directory.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use hermes_net::directory::{DirectoryEvents, Event, Watched};
use tokio::time::Instant;

use crate::document::MAX_DOCUMENT;

/// The pause after the last event, so that files that change together (a certificate and its key) are read together.
const SETTLE: Duration = Duration::from_millis(4);
/// The pause after a poll has found a change, since it does not tell whether the writer has ended.
const UNCLOSED: Duration = Duration::from_millis(50);
/// The longest wait for events to end, and for a new file to be closed.
const AT_LATEST: Duration = Duration::from_millis(500);
/// The interval between two polls, which look only at attributes of files and directories.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The interval while a directory is missing, since no event reports its return.
const MISSING_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The maximum number of symbolic links in one path, as in the kernel.
const MAX_LINKS: usize = 40;

/// Watches a document and the files that it names.
pub(crate) struct Watch {
    events: DirectoryEvents,
    directories: HashMap<PathBuf, WatchedDirectory>,
    /// The directories that cannot be watched at the moment; `None`: missing.
    unwatched: HashMap<PathBuf, Option<Stamp>>,
    /// Directory entries whose change matters.
    entries: HashSet<PathBuf>,
    /// Those that were created and not closed yet.
    unclosed: HashSet<PathBuf>,
    seen: HashMap<PathBuf, Option<Vec<u8>>>,
    /// The stamps of the files in `seen` at the last poll.
    stamps: HashMap<PathBuf, Option<Stamp>>,
    next_poll: Instant,
    document: PathBuf,
    /// When to read the files. Stored here so that a cancelled wait does not lose the change.
    due: Option<Due>,
}

struct WatchedDirectory {
    /// Its identity when the watch began.
    stamp: Stamp,
    watch: Watched,
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

impl Watch {
    /// True if this document is the watched file, so that a person writes it.
    pub(crate) fn is_of(&self, document: &Path) -> bool {
        std::path::absolute(document).is_ok_and(|document| document == self.document)
    }

    /// Watches a document.
    pub(crate) fn new(document: &Path) -> anyhow::Result<Self> {
        let events = DirectoryEvents::new().context("file changes cannot be watched")?;
        let document = std::path::absolute(document).context("the document's path")?;
        let mut this = Self {
            events,
            directories: HashMap::new(),
            unwatched: HashMap::new(),
            entries: HashSet::new(),
            unclosed: HashSet::new(),
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
        self.entries = entries;
        let is_wanted = |path: &PathBuf, watched: &WatchedDirectory| {
            wanted.contains(path) && Stamp::of(path) == Some(watched.stamp)
        };
        for (_, gone) in self.directories.extract_if(|path, watched| !is_wanted(path, watched)) {
            self.events.unwatch(gone.watch);
        }
        self.unwatched.retain(|directory, _| wanted.contains(directory));
        for directory in wanted {
            if self.directories.contains_key(&directory) {
                continue;
            }
            // Taken before the watch begins, so that a replacement in between is noticed.
            let stamp = Stamp::of(&directory);
            match (stamp, self.events.watch(&directory)) {
                (Some(stamp), Ok(watch)) => {
                    self.unwatched.remove(&directory);
                    self.directories.insert(directory, WatchedDirectory { stamp, watch });
                }
                (_, watched) => {
                    if let Ok(watch) = watched {
                        self.events.unwatch(watch);
                    }
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
        self.directories.iter().any(|(directory, watched)| Stamp::of(directory) != Some(watched.stamp))
            || self.unwatched.iter().chain(&self.stamps).any(|(path, stamp)| Stamp::of(path) != *stamp)
    }

    fn poll_interval(&self) -> Duration {
        let misses_any = self.unwatched.values().any(Option::is_none);
        if misses_any { MISSING_POLL_INTERVAL } else { POLL_INTERVAL }
    }

    /// Waits until the content of a watched file changes. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        loop {
            let until = self.due.map_or(self.next_poll, |due| due.at.min(self.next_poll));
            match tokio::time::timeout_at(until, self.events.next()).await {
                Ok(Ok(events)) => self.record(events),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "file changes are not reported; polling for them");
                    tokio::time::sleep_until(until).await;
                }
                Err(_elapsed) => {}
            }
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

    /// Computes when to read the files after these events.
    fn record(&mut self, events: Vec<Event>) {
        let mut matter = false;
        for event in events {
            matter |= self.matters(event);
        }
        if matter {
            let now = Instant::now();
            let first = self.due.map_or(now, |due| due.first);
            let wait = if self.unclosed.is_empty() { SETTLE } else { AT_LATEST };
            self.due = Some(Due { first, at: (now + wait).min(first + AT_LATEST) });
        }
    }

    /// True if the event may change the content of a watched file.
    fn matters(&mut self, event: Event) -> bool {
        match event {
            // The lost events may have ended watches.
            Event::Lost => {
                self.unwatch(|_| true);
                true
            }
            // The directory that has this path later may look the same, with the same inode.
            Event::Gone(watch) => self.unwatch(|watched| watched.watch == watch),
            Event::Attributes(watch, name) => !self.entries_named(watch, &name).is_empty(),
            Event::Created(watch, name) => {
                let entries = self.entries_named(watch, &name);
                let unclosed = entries.iter().filter(|entry| is_regular(entry)).cloned();
                self.unclosed.extend(unclosed);
                !entries.is_empty()
            }
            Event::Ended(watch, name) => {
                let entries = self.entries_named(watch, &name);
                self.unclosed.retain(|entry| !entries.contains(entry));
                !entries.is_empty()
            }
        }
    }

    /// Ends these watches. The directories that still matter are watched again before files are read. Returns false for none.
    fn unwatch(&mut self, mut goes: impl FnMut(&WatchedDirectory) -> bool) -> bool {
        let gone: Vec<_> = self.directories.extract_if(|_, watched| goes(watched)).collect();
        gone.iter().for_each(|(_, watched)| self.events.unwatch(watched.watch));
        !gone.is_empty()
    }

    /// The paths of a watched directory: several may lead to it.
    fn directories_of(&self, watch: Watched) -> impl Iterator<Item = &PathBuf> {
        self.directories.iter().filter(move |(_, watched)| watched.watch == watch).map(|(path, _)| path)
    }

    /// The entries of this name whose change matters.
    fn entries_named(&self, watch: Watched, name: &OsString) -> Vec<PathBuf> {
        let entries = self.directories_of(watch).map(|directory| directory.join(name));
        entries.filter(|entry| self.entries.contains(entry)).collect()
    }

    /// Reads the files now. Returns true if the content of one has changed.
    pub(crate) fn read_files(&mut self) -> bool {
        self.unclosed.clear();
        // The watched directories are updated before the files are read, since a replaced link leads to other directories.
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

/// True if a new entry is a file that its creator will close: no symbolic link, and no further name of another file.
fn is_regular(entry: &Path) -> bool {
    std::fs::symlink_metadata(entry).is_ok_and(|metadata| metadata.is_file() && metadata.nlink() == 1)
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

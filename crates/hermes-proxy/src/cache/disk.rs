//! The disk tier: a file an object, and a thread that reads and writes them.
//!
//! In: contents to keep, heads that changed, files that are wanted again or no more. Out: contents; and after a start,
//! what is there. No worker waits for a disk: it leaves a job, and hears of a content when it is read. Files that are cut,
//! or not what was written, are removed and were never there.

mod file;

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak, mpsc};

use rand::Rng as _;
use tokio::sync::oneshot;

use self::file::Layout;
use super::content::Content;
use super::head::Head;
use super::store::Cache;

/// Jobs that hold a content, or whose answer somebody waits for; more are refused.
const MOST_JOBS: usize = 1024;

/// Names a file.
pub(crate) type FileId = u64;

enum Job {
    /// Tell what is there.
    Look,
    Keep {
        key: Arc<str>,
        id: u64,
        head: Arc<Head>,
        content: Arc<Content>,
    },
    Patch {
        file: FileId,
        key: Arc<str>,
        head: Arc<Head>,
    },
    Load {
        file: FileId,
        reply: oneshot::Sender<Option<Arc<Content>>>,
    },
    Remove {
        file: FileId,
    },
}

/// The way to the thread, which ends with it.
pub(crate) struct Disk {
    jobs: mpsc::Sender<Job>,
    pending: Arc<AtomicUsize>,
}

impl Disk {
    /// Begins. `None` where there can be no such directory.
    pub(super) fn start(directory: PathBuf, cache: Weak<Cache>) -> Option<Self> {
        if let Err(error) = DirBuilder::new().recursive(true).mode(0o700).create(&directory) {
            tracing::warn!(directory = %directory.display(), %error, "the cache has no disk: make the directory writable");
            return None;
        }
        let (jobs, todo) = mpsc::channel();
        let pending = Arc::new(AtomicUsize::new(0));
        let mut clerk = Clerk { directory, cache, pending: pending.clone(), layouts: HashMap::new() };
        let run = move || {
            while let Ok(job) = todo.recv() {
                clerk.work(job);
            }
        };
        let started = std::thread::Builder::new().name("cache-disk".to_owned()).spawn(run);
        started.inspect_err(|error| tracing::warn!(%error, "the cache has no disk: no thread is to be had")).ok()?;
        Some(Self { jobs, pending })
    }

    /// Tells the cache what is in the directory. Once, when the cache is there to be told.
    pub(super) fn look(&self) {
        let _ = self.push(Job::Look);
    }

    /// Writes a content. False where too much waits already.
    pub(super) fn keep(&self, key: &Arc<str>, id: u64, head: &Arc<Head>, content: Arc<Content>) -> bool {
        self.push(Job::Keep { key: key.clone(), id, head: head.clone(), content })
    }

    /// Writes a head over the one before.
    pub(super) fn patch(&self, file: FileId, key: &Arc<str>, head: &Arc<Head>) {
        // Without it the file has the older head, which is stale earlier.
        let _ = self.push(Job::Patch { file, key: key.clone(), head: head.clone() });
    }

    /// Removes a file. Never refused: what is gone must not be found again.
    pub(super) fn remove(&self, file: FileId) {
        self.pending.fetch_add(1, Ordering::Relaxed);
        let _ = self.jobs.send(Job::Remove { file });
    }

    /// Reads a content into memory. `None` where it is not there any more, or there is no room.
    pub(crate) async fn load(&self, file: FileId) -> Option<Arc<Content>> {
        let (reply, answer) = oneshot::channel();
        if !self.push(Job::Load { file, reply }) {
            return None;
        }
        answer.await.ok().flatten()
    }

    fn push(&self, job: Job) -> bool {
        if self.pending.load(Ordering::Relaxed) >= MOST_JOBS {
            return false;
        }
        self.pending.fetch_add(1, Ordering::Relaxed);
        self.jobs.send(job).is_ok()
    }
}

/// Does the jobs, one after the other.
struct Clerk {
    directory: PathBuf,
    cache: Weak<Cache>,
    pending: Arc<AtomicUsize>,
    layouts: HashMap<FileId, Layout>,
}

impl Clerk {
    fn work(&mut self, job: Job) {
        self.pending.fetch_sub(1, Ordering::Relaxed);
        match job {
            Job::Look => self.look(),
            Job::Keep { key, id, head, content } => self.keep(&key, id, &head, &content),
            Job::Patch { file, key, head } => {
                let path = self.path(file);
                if let Some(layout) = self.layouts.get_mut(&file)
                    && let Err(error) = layout.patch(&path, &key, &head)
                {
                    tracing::debug!(%error, "a head of the cache could not be written");
                }
            }
            Job::Load { file, reply } => {
                let _ = reply.send(self.load(file));
            }
            Job::Remove { file } => self.remove(file),
        }
    }

    fn path(&self, file: FileId) -> PathBuf {
        self.directory.join(format!("{file:016x}.object"))
    }

    fn keep(&mut self, key: &Arc<str>, id: u64, head: &Head, content: &Content) {
        let Some(cache) = self.cache.upgrade() else { return };
        // Random, since a process that takes over writes to the same directory.
        let file: FileId = rand::rng().random();
        let path = self.path(file);
        let draft = path.with_extension("draft");
        let written = Layout::write(&draft, key, head, content);
        match written.and_then(|layout| fs::rename(&draft, &path).map(|()| layout)) {
            Ok(layout) => {
                let bytes = layout.bytes();
                self.layouts.insert(file, layout);
                if !cache.filed(key, id, file, bytes) {
                    self.remove(file);
                }
            }
            Err(error) => {
                let _ = fs::remove_file(&draft);
                cache.hit_limit("cache-disk");
                tracing::warn!(path = %path.display(), %error, "an object of the cache could not be written; is the disk full?");
            }
        }
    }

    fn load(&self, file: FileId) -> Option<Arc<Content>> {
        let cache = self.cache.upgrade()?;
        let read = self.layouts.get(&file)?.read(&self.path(file), |bytes| cache.room(bytes));
        read.inspect_err(|error| tracing::warn!(%error, "an object of the cache cannot be read; it is dropped"))
            .ok()
            .map(Arc::new)
    }

    fn remove(&mut self, file: FileId) {
        self.layouts.remove(&file);
        // Another process may have been earlier.
        let _ = fs::remove_file(self.path(file));
    }

    /// Tells the cache what is there, the latest last.
    fn look(&mut self) {
        let Ok(entries) = fs::read_dir(&self.directory) else { return };
        let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(|path| is_object(path)).collect();
        let modified = |path: &PathBuf| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
        files.sort_by_cached_key(modified);
        let count = files.len();
        let mut dropped = 0;
        for path in files {
            let Some(cache) = self.cache.upgrade() else { return };
            let name = path.file_stem().and_then(|stem| stem.to_str());
            let file = name.and_then(|name| FileId::from_str_radix(name, 16).ok());
            let (Some(file), Ok((layout, key, head))) = (file, Layout::open(&path)) else {
                dropped += 1;
                let _ = fs::remove_file(&path);
                continue;
            };
            let (shape, bytes) = (layout.shape(), layout.bytes());
            self.layouts.insert(file, layout);
            if head.shared != cache.settings.shared || !cache.found(&key, &Arc::new(head), shape, file, bytes) {
                self.remove(file);
            }
        }
        if count > 0 {
            tracing::info!(directory = %self.directory.display(), files = count, dropped, "the cache found what it had kept");
        }
    }
}

/// Drafts are of a process that ended within, or writes now: to remove those of the latter costs it one object.
fn is_object(path: &Path) -> bool {
    if path.extension().is_some_and(|extension| extension == "draft") {
        let _ = fs::remove_file(path);
    }
    path.extension().is_some_and(|extension| extension == "object")
}

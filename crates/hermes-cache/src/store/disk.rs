//! The disk tier: one file for each object, and one thread that reads and writes them.
//!
//! In: contents to store, changed heads, files to read or remove. Out: contents, and after a start, the stored objects.
//! A worker never waits for the disk. It queues a job; for a read, it awaits a future. Truncated or damaged files are
//! removed and count as missing.

mod file;
pub mod root;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::Duration;

use hermes_net::lock::Lock;
use rand::Rng as _;
use tokio::sync::oneshot;

use self::file::Layout;
use self::root::Root;
use super::Cache;
use crate::content::Content;
use crate::head::Head;

/// Maximum number of queued jobs that hold a content or have a waiting caller; further ones are refused.
const MAX_JOBS: usize = 1024;
/// Interval of retries while another process holds the lock, because nothing signals its release.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// File extensions of an object, and of an object that is being written.
const OBJECT: &str = "object";
const DRAFT: &str = "draft";

/// The number that names a file.
pub type FileId = u64;

/// The result of a read.
#[derive(Clone)]
pub enum Loaded {
    /// The bytes.
    Content(Arc<Content>),
    /// The read was refused: memory is full of contents in use, or too many jobs are queued.
    Busy,
    /// The file does not exist any longer, or is damaged.
    Gone,
}

enum Job {
    /// The cache exists and can receive the objects found on disk.
    Begin,
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
    },
    Remove {
        file: FileId,
    },
    /// The thread ends; it drops the jobs that are still queued.
    Retire,
}

/// Stages of a [`Disk`]. The lock of the directory is not taken yet, or held by this process, or by another process; in
/// the last stage, the thread has ended. Jobs stay queued in the first stage, and are dropped in the third.
const OPENING: u8 = 0;
const READY: u8 = 1;
const BARRED: u8 = 2;
const RETIRED: u8 = 3;

/// Waiting readers by file: each file is read once for all of them.
type Loading = Mutex<HashMap<FileId, Vec<oneshot::Sender<Loaded>>>>;

/// Handle of the thread that reads and writes files. The thread ends when the handle is dropped.
pub struct Disk {
    jobs: mpsc::Sender<Job>,
    pending: Arc<AtomicUsize>,
    loading: Arc<Loading>,
    stage: Arc<AtomicU8>,
    ended: Mutex<Option<Ended>>,
}

/// Signals that a thread has ended and its directory is free.
pub struct Ended(mpsc::Receiver<()>);

impl Ended {
    /// Waits until the thread has ended.
    pub fn wait(self) {
        // The channel closes with the thread; it never carries a value.
        let _ = self.0.recv();
    }
}

/// The location of a cache, and its previous owner.
pub struct CacheDir {
    /// The directory of all caches.
    pub root: Arc<Root>,
    /// The directory of this cache.
    pub directory: PathBuf,
    /// The end of an earlier cache of this process, which is releasing the same directory; `None` if there was none.
    pub former: Option<Ended>,
}

impl Disk {
    /// Starts the thread. Returns `None` if the thread cannot be started. The cache receives the stored objects once
    /// the directory is locked.
    pub fn start(place: CacheDir, cache: Weak<Cache>) -> Option<Self> {
        let (jobs, todo) = mpsc::channel();
        let (alive, ended) = mpsc::channel::<()>();
        let pending = Arc::new(AtomicUsize::new(0));
        let (loading, stage) = (Arc::<Loading>::default(), Arc::new(AtomicU8::new(OPENING)));
        let clerk = DiskThread {
            directory: place.directory.clone(),
            cache,
            pending: pending.clone(),
            loading: loading.clone(),
            stage: stage.clone(),
            layouts: HashMap::new(),
        };
        let run = move || {
            clerk.run(place, todo);
            drop(alive);
        };
        let started = std::thread::Builder::new().name("cache-disk".to_owned()).spawn(run);
        started
            .inspect_err(|error| tracing::warn!(%error, "cannot start the disk thread; caching in memory only"))
            .ok()?;
        Some(Self { jobs, pending, loading, stage, ended: Mutex::new(Some(Ended(ended))) })
    }

    /// Signals that the cache exists and can receive the objects on disk. Must be the first call, made once.
    pub fn begin(&self) {
        let _ = self.jobs.send(Job::Begin);
    }

    /// Stops the thread, because another owner takes the directory. The first call returns the signal that the
    /// directory is free, further calls return `None`.
    pub fn retire(&self) -> Option<Ended> {
        self.stage.store(RETIRED, Ordering::Release);
        self.pending.fetch_add(1, Ordering::Relaxed);
        let _ = self.jobs.send(Job::Retire);
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Queues a content for writing. Returns false if too many jobs are queued.
    pub fn keep(&self, key: &Arc<str>, id: u64, head: &Arc<Head>, content: Arc<Content>) -> bool {
        self.push(Job::Keep { key: key.clone(), id, head: head.clone(), content })
    }

    /// Whether jobs are useful. False if another process holds the directory, or the thread has ended.
    pub fn is_open(&self) -> bool {
        matches!(self.stage.load(Ordering::Acquire), OPENING | READY)
    }

    /// Queues an update of a stored head.
    pub fn patch(&self, file: FileId, key: &Arc<str>, head: &Arc<Head>) {
        // If the job is refused, the file keeps the older head, which is stale earlier.
        let _ = self.push(Job::Patch { file, key: key.clone(), head: head.clone() });
    }

    /// Removes a file. The job is never refused, because a removed object must not be found again.
    pub fn remove(&self, file: FileId) {
        self.pending.fetch_add(1, Ordering::Relaxed);
        let _ = self.jobs.send(Job::Remove { file });
    }

    /// Reads a content into memory, once for all concurrent callers.
    pub async fn load(&self, file: FileId) -> Loaded {
        let (reply, answer) = oneshot::channel();
        {
            let mut loading = waiting(&self.loading);
            match loading.entry(file) {
                Entry::Occupied(mut others) => others.get_mut().push(reply),
                Entry::Vacant(_) if !self.push(Job::Load { file }) => return Loaded::Busy,
                Entry::Vacant(first) => drop(first.insert(vec![reply])),
            }
        }
        answer.await.unwrap_or(Loaded::Busy)
    }

    fn push(&self, job: Job) -> bool {
        if self.pending.load(Ordering::Relaxed) >= MAX_JOBS {
            return false;
        }
        self.pending.fetch_add(1, Ordering::Relaxed);
        self.jobs.send(job).is_ok()
    }
}

fn waiting(loading: &Loading) -> MutexGuard<'_, HashMap<FileId, Vec<oneshot::Sender<Loaded>>>> {
    loading.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread's state; it runs the jobs in order.
struct DiskThread {
    directory: PathBuf,
    cache: Weak<Cache>,
    pending: Arc<AtomicUsize>,
    loading: Arc<Loading>,
    stage: Arc<AtomicU8>,
    layouts: HashMap<FileId, Layout>,
}

impl DiskThread {
    fn run(mut self, place: CacheDir, todo: mpsc::Receiver<Job>) {
        // The first job is always `Begin`.
        let Ok(Job::Begin) = todo.recv() else { return };
        if let Some(former) = place.former {
            former.wait();
        }
        if let Some(_lock) = self.take(&place.root, &todo) {
            self.report_objects();
            if let Some(cache) = self.cache.upgrade() {
                cache.has_looked();
            }
            while let Ok(job) = todo.recv() {
                match job {
                    Job::Retire => break,
                    job => self.work(job),
                }
            }
        }
        self.stage.store(RETIRED, Ordering::Release);
        todo.try_iter().for_each(|job| self.leave(job));
        // The queue is dropped first: afterwards, no caller can queue a read, and all callers that wait for one are in
        // `loading`.
        drop(todo);
        waiting(&self.loading).clear();
    }

    /// Moves to a stage, unless the thread has retired.
    fn enter(&self, stage: u8) {
        let next = |before| (before != RETIRED).then_some(stage);
        let _ = self.stage.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }

    /// Locks the directory. Returns `None` if that is impossible, or if the cache retires first.
    fn take(&mut self, root: &Arc<Root>, todo: &mpsc::Receiver<Job>) -> Option<Arc<Lock>> {
        let mut has_told = false;
        loop {
            match root.take().and_then(|lock| self.make_directory().map(|()| lock)) {
                Ok(lock) => {
                    self.enter(READY);
                    return Some(lock);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.enter(BARRED),
                Err(error) => {
                    let directory = self.directory.display();
                    tracing::warn!(%directory, %error, "cannot use the cache directory; make it writable for this node");
                    return None;
                }
            }
            if !std::mem::replace(&mut has_told, true) {
                let directory = self.directory.display();
                tracing::info!(%directory, "another process uses the cache directory; waiting until it exits");
            }
            // While another process holds the lock, all jobs are dropped except for the one that ends the thread.
            match todo.recv_timeout(LOCK_POLL_INTERVAL) {
                Ok(Job::Retire) | Err(mpsc::RecvTimeoutError::Disconnected) => return None,
                Ok(job) => self.leave(job),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn make_directory(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        // The target of a symbolic link does not belong to the cache.
        match fs::symlink_metadata(&self.directory)?.is_dir() {
            true => Ok(()),
            false => Err(io::Error::other("it is a symbolic link")),
        }
    }

    /// Drops a job.
    fn leave(&self, job: Job) {
        self.pending.fetch_sub(1, Ordering::Relaxed);
        if let (Job::Keep { key, id, .. }, Some(cache)) = (job, self.cache.upgrade()) {
            cache.unwritten(&key, id);
        }
    }

    fn work(&mut self, job: Job) {
        self.pending.fetch_sub(1, Ordering::Relaxed);
        match job {
            // `Begin` was received before, and `Retire` ends the loop.
            Job::Begin | Job::Retire => {}
            Job::Keep { key, id, head, content } => self.keep(&key, id, &head, &content),
            Job::Patch { file, key, head } => {
                let path = self.path(file);
                if let Some(layout) = self.layouts.get_mut(&file) {
                    patch(layout, &path, &key, &head);
                }
            }
            Job::Load { file } => {
                let loaded = self.load(file);
                let others = waiting(&self.loading).remove(&file).unwrap_or_default();
                others.into_iter().for_each(|other| drop(other.send(loaded.clone())));
            }
            Job::Remove { file } => self.remove(file),
        }
    }

    fn path(&self, file: FileId) -> PathBuf {
        self.directory.join(format!("{file:016x}.{OBJECT}"))
    }

    fn keep(&mut self, key: &Arc<str>, id: u64, head: &Arc<Head>, content: &Content) {
        let Some(cache) = self.cache.upgrade() else { return };
        let file: FileId = rand::rng().random();
        let path = self.path(file);
        let draft = path.with_extension(DRAFT);
        let written = Layout::write(&draft, key, head, content);
        match written.and_then(|layout| fs::rename(&draft, &path).map(|()| layout)) {
            Ok(mut layout) => {
                let current = cache.filed(key, id, file, layout.bytes(), layout.shape());
                let Some(current) = current else { return drop(fs::remove_file(&path)) };
                if !Arc::ptr_eq(&current, head) {
                    patch(&mut layout, &path, key, &current);
                }
                self.layouts.insert(file, layout);
            }
            Err(error) => {
                let _ = fs::remove_file(&draft);
                cache.unwritten(key, id);
                cache.hit_limit("cache-disk");
                tracing::warn!(path = %path.display(), %error, "cannot write a cached response; is the disk full?");
            }
        }
    }

    fn load(&self, file: FileId) -> Loaded {
        let Some(cache) = self.cache.upgrade() else { return Loaded::Busy };
        let Some(layout) = self.layouts.get(&file) else { return Loaded::Gone };
        match layout.read(&self.path(file), |bytes| cache.room(bytes)) {
            Ok(content) => Loaded::Content(Arc::new(content)),
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => Loaded::Busy,
            Err(error) => {
                tracing::warn!(%error, "cannot read a cached object; removing it");
                Loaded::Gone
            }
        }
    }

    fn remove(&mut self, file: FileId) {
        if self.layouts.remove(&file).is_some() {
            let _ = fs::remove_file(self.path(file));
        }
    }

    /// Reports the objects on disk to the cache, the most recently modified last. Foreign files stay unchanged.
    fn report_objects(&mut self) {
        let Ok(entries) = fs::read_dir(&self.directory) else { return };
        let mut files = Vec::new();
        let (mut foreign, mut dropped) = (0, 0);
        for entry in entries.flatten() {
            // For a symbolic link, these are the link's own metadata.
            let metadata = entry.metadata().ok().filter(fs::Metadata::is_file);
            match (metadata, ours(&entry.path())) {
                (Some(metadata), Some((file, OBJECT))) => files.push((metadata.modified().ok(), file)),
                // A draft is left over from a killed process, because this thread has not written one yet.
                (Some(_), Some(_)) => drop(fs::remove_file(entry.path())),
                _ => foreign += 1,
            }
        }
        files.sort_unstable();
        let count = files.len();
        for (_, file) in files {
            let Some(cache) = self.cache.upgrade() else { return };
            let path = self.path(file);
            let Ok((layout, key, head)) = Layout::open(&path) else {
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
        let directory = self.directory.display();
        if foreign > 0 {
            tracing::warn!(%directory, foreign, "the cache directory has files that no cache wrote; leaving them unchanged");
        }
        if count > 0 {
            tracing::info!(%directory, files = count, dropped, "cache restored from disk");
        }
    }
}

fn patch(layout: &mut Layout, path: &Path, key: &Arc<str>, head: &Head) {
    if let Err(error) = layout.patch(path, key, head) {
        tracing::debug!(%error, "cannot update the head of a cached response");
    }
}

/// Returns the id and extension of a file; `None` if the cache does not use such names.
fn ours(path: &Path) -> Option<(FileId, &'static str)> {
    let (stem, extension) = path.file_name()?.to_str()?.split_once('.')?;
    let extension = [OBJECT, DRAFT].into_iter().find(|known| *known == extension)?;
    let is_hex = stem.len() == 16 && stem.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    is_hex.then(|| FileId::from_str_radix(stem, 16).ok().map(|file| (file, extension)))?
}

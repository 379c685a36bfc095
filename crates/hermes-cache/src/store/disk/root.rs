//! The directory that holds the directories of all caches of a process.
//!
//! In: the directories in use. Out: a lock against other processes, and the removal of directories whose routes no
//! longer exist. Never: removal of a file that no cache has written, or a followed symbolic link.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use hermes_net::lock::{Lock, make_own_directory};
use rand::Rng as _;

use super::{Ended, ours};

/// Name of the lock file. The file is never removed, because a waiting process would then wait for a deleted file.
const LOCK: &str = "lock";
/// Name prefix of a folder that is being removed. The rename frees the folder's own name at once.
const GONE: &str = "gone";

/// The directory of a process's caches.
pub struct Root {
    path: PathBuf,
    /// The lock, held as long as any cache uses its directory.
    lock: Mutex<Weak<Lock>>,
    used: Mutex<HashSet<PathBuf>>,
}

impl Root {
    /// Creates the handle; nothing is read yet.
    pub fn new(path: PathBuf) -> Arc<Self> {
        Arc::new(Self { path, lock: Mutex::default(), used: Mutex::default() })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Locks the directory against other processes.
    ///
    /// # Errors
    ///
    /// Another process holds the lock (`WouldBlock`), or the directory cannot be created.
    pub fn take(&self) -> io::Result<Arc<Lock>> {
        let mut known = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = known.upgrade() {
            return Ok(lock);
        }
        make_own_directory(&self.path)?;
        let lock = Arc::new(Lock::take(&self.path.join(LOCK))?);
        *known = Arc::downgrade(&lock);
        Ok(lock)
    }

    fn used(&self) -> MutexGuard<'_, HashSet<PathBuf>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the directories in use.
    pub fn uses(&self, used: HashSet<PathBuf>) {
        *self.used() = used;
    }

    /// Removes the directories of routes that no longer exist, in a thread of its own, after the former caches have
    /// ended. If another process holds the lock, the directories stay until the next sweep.
    pub fn sweep(self: &Arc<Self>, former: Vec<Ended>) {
        let root = self.clone();
        let run = move || {
            former.into_iter().for_each(Ended::wait);
            if let Err(error) = root.remove_others()
                && error.kind() != io::ErrorKind::NotFound
            {
                let directory = root.path.display();
                tracing::debug!(%directory, %error, "cannot delete the cache files of removed routes");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("cache-sweep".to_owned()).spawn(run) {
            tracing::warn!(%error, "cannot start a thread; cache files of removed routes stay until the next reload");
        }
    }

    fn remove_others(&self) -> io::Result<()> {
        // The sweep does not create the directory if it does not exist.
        let entries = fs::read_dir(&self.path)?;
        let _lock = self.take()?;
        for entry in entries.flatten() {
            // A symbolic link has a type of its own, and is not a folder here.
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let Some(gone) = self.set_apart(&entry.path()) else { continue };
            remove_ours(&gone);
            // A folder with foreign files is renamed back.
            if gone.exists() {
                let _ = fs::rename(&gone, entry.path());
                tracing::warn!(path = %entry.path().display(), "the cache directory has files that no cache wrote; leaving them unchanged");
            }
        }
        Ok(())
    }

    /// Renames an unused folder for its removal. Returns `None` if the folder is in use, or not a cache's folder.
    fn set_apart(&self, folder: &Path) -> Option<PathBuf> {
        let used = self.used();
        if used.contains(folder) || !is_folder_of_ours(folder) {
            return None;
        }
        let gone = folder.with_file_name(format!("{GONE}.{:016x}", rand::rng().random::<u64>()));
        fs::rename(folder, &gone).ok().map(|()| gone)
    }
}

/// Whether a folder has a cache's name, which ends in a dot and a digest.
fn is_folder_of_ours(folder: &Path) -> bool {
    let digest = folder.file_name().and_then(|name| name.to_str()?.rsplit_once('.')).map(|(_, digest)| digest);
    digest.is_some_and(|digest| digest.len() == 16 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn remove_ours(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_file()) && ours(&entry.path()).is_some() {
            let _ = fs::remove_file(entry.path());
        }
    }
    let _ = fs::remove_dir(folder);
}

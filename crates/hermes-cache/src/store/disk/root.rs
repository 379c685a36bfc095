//! The directory that all caches of a process have theirs in.
//!
//! In: which of them are in use. Out: that no other process has them, and that what routes have kept that are there no more
//! goes. Never: a file removed that no cache has written, a link followed.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use hermes_net::lock::{Lock, make_own_directory};
use rand::Rng as _;

use super::{Ended, ours};

/// Has who has the directory. It stays: who waits for it must not wait for one that is gone.
const LOCK: &str = "lock";
/// A folder that is being removed has such a name, so that its own is free at once.
const GONE: &str = "gone";

/// The directory of a process's caches.
pub struct Root {
    path: PathBuf,
    /// As long as any cache has its directory.
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

    /// Keeps other processes out.
    ///
    /// # Errors
    /// Another one has it (`WouldBlock`), or there can be no such directory.
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

    /// These are in use from now on.
    pub fn uses(&self, used: HashSet<PathBuf>) {
        *self.used() = used;
    }

    /// What routes have kept that are there no more goes, at leisure, once those of before have ended. Where another
    /// process has the directory it stays until the next time.
    pub fn sweep(self: &Arc<Self>, former: Vec<Ended>) {
        let root = self.clone();
        let run = move || {
            former.into_iter().for_each(Ended::wait);
            if let Err(error) = root.remove_others()
                && error.kind() != io::ErrorKind::NotFound
            {
                let directory = root.path.display();
                tracing::debug!(%directory, %error, "what routes that are gone have kept is still there");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("cache-sweep".to_owned()).spawn(run) {
            tracing::warn!(%error, "what routes that are gone have kept stays for now: no thread is to be had");
        }
    }

    fn remove_others(&self) -> io::Result<()> {
        // Nothing is made for it where nothing is.
        let entries = fs::read_dir(&self.path)?;
        let _lock = self.take()?;
        for entry in entries.flatten() {
            // Of a link it is the link's own: not a folder.
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let Some(gone) = self.set_apart(&entry.path()) else { continue };
            remove_ours(&gone);
            // Where something else is in it, that has its folder back.
            if gone.exists() {
                let _ = fs::rename(&gone, entry.path());
                tracing::warn!(path = %entry.path().display(), "there are files that no cache has written; they stay");
            }
        }
        Ok(())
    }

    /// Gives a folder that nobody uses another name. `None` where somebody does, or it is no cache's.
    fn set_apart(&self, folder: &Path) -> Option<PathBuf> {
        let used = self.used();
        if used.contains(folder) || !is_folder_of_ours(folder) {
            return None;
        }
        let gone = folder.with_file_name(format!("{GONE}.{:016x}", rand::rng().random::<u64>()));
        fs::rename(folder, &gone).ok().map(|()| gone)
    }
}

/// By its name: something, and a digest.
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

//! Files that are a process's own: that one at a time has, and that no link stands for.
//!
//! In: paths. Out: a lock, until it is dropped or the process ends, in whatever way; an open file; or room for one. Never:
//! what they stand for.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::fcntl::{Flock, FlockArg, OFlag, posix_fallocate};

/// Opens a file that must be there itself: where its name is a link, what that leads to is somebody else's.
///
/// # Errors
/// It is a link, is not there, or may not be opened.
pub fn open_own(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    options.custom_flags(OFlag::O_NOFOLLOW.bits()).open(path)
}

/// Creates a directory and its parents, readable by the owner alone. An existing directory stays as it is.
///
/// # Errors
/// It cannot be made.
pub fn make_own_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Has the file system keep room for so many bytes of a file.
///
/// # Errors
/// It has none, or cannot.
pub fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    posix_fallocate(file, 0, i64::try_from(bytes).unwrap_or(i64::MAX)).map_err(io::Error::from)
}

/// Bytes that are free for us in the file system of this path.
///
/// # Errors
/// It is not there.
pub fn available(path: &Path) -> io::Result<u64> {
    let of = nix::sys::statvfs::statvfs(path)?;
    Ok(of.blocks_available().saturating_mul(of.fragment_size()))
}

/// A file that nobody else has.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<File>,
}

impl Lock {
    /// Takes it, where it is free. It is made if it is not there.
    ///
    /// # Errors
    /// It cannot be made, or another process has it (`WouldBlock`).
    pub fn take(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(OFlag::O_NOFOLLOW.bits())
            .open(path)?;
        let file = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| io::Error::from(error))?;
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn one_has_it_at_a_time() {
        let path = std::env::temp_dir().join(format!("hermes-lock-{}", std::process::id()));
        let first = Lock::take(&path).unwrap();
        assert_eq!(Lock::take(&path).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(first);
        Lock::take(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}

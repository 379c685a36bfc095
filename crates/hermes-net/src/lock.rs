//! Opens and locks files that only this process uses, without following symbolic links.
//!
//! In: paths. Out: a lock that ends with its guard or with the process; an open file; reserved disk space. Never: the
//! contents.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::fcntl::{Flock, FlockArg, OFlag, posix_fallocate};

/// Opens a file without following a symbolic link, whose target could belong to somebody else.
///
/// # Errors
/// The path is a symbolic link, does not exist, or may not be opened.
pub fn open_own(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    options.custom_flags(OFlag::O_NOFOLLOW.bits()).open(path)
}

/// Creates a directory and its parents, readable by the owner alone. An existing directory stays as it is.
///
/// # Errors
/// The directory cannot be created.
pub fn make_own_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// True if every user of this machine may create and replace files in the directory. A sticky directory such as
/// `/tmp` counts as well: others can create a file before its owner does.
///
/// # Errors
/// The directory cannot be inspected.
pub fn is_writable_by_all(directory: &Path) -> io::Result<bool> {
    Ok(std::fs::metadata(directory)?.mode() & 0o002 != 0)
}

/// Reserves disk space for this many bytes of a file.
///
/// # Errors
/// The file system is full, or does not support the reservation.
pub fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    posix_fallocate(file, 0, i64::try_from(bytes).unwrap_or(i64::MAX)).map_err(io::Error::from)
}

/// Returns the number of bytes that this user can still write in the file system of `path`.
///
/// # Errors
/// The path does not exist.
pub fn available(path: &Path) -> io::Result<u64> {
    let of = nix::sys::statvfs::statvfs(path)?;
    Ok(of.blocks_available().saturating_mul(of.fragment_size()))
}

/// An exclusive lock on a file, released when the guard is dropped or the process ends.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<File>,
}

impl Lock {
    /// Takes the lock without waiting. Creates the file if it does not exist.
    ///
    /// # Errors
    /// The file cannot be created, or another process has the lock (`WouldBlock`).
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
    fn a_directory_for_everyone_is_recognised() {
        let directory = std::env::temp_dir().join(format!("hermes-writable-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let mode = |mode| {
            std::fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
            is_writable_by_all(&directory).unwrap()
        };
        assert_eq!(
            [mode(0o700), mode(0o755), mode(0o775), mode(0o777), mode(0o1777)],
            [false, false, false, true, true]
        );
        std::fs::remove_dir_all(&directory).unwrap();
    }

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

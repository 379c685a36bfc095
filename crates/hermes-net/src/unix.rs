//! Listening Unix sockets.
//!
//! In: a path. Out: a socket with the permissions of its purpose. The file that a dead process left is replaced.
//! Never: the replacement or the removal of another process's socket, or of a file of another type.

use std::fs::Permissions;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket};
use nix::sys::stat::{Mode, fchmod};

/// The length of the accept queue. A caller beyond it waits in connect(2).
const BACKLOG: i32 = 128;
/// Read and write, for the owner and the group.
const GROUP_MODE: u32 = 0o660;
const FLAGS: SockFlag = SockFlag::SOCK_CLOEXEC.union(SockFlag::SOCK_NONBLOCK);

/// A listening socket, and the file at its path.
#[derive(Debug)]
pub struct PathListener {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file. `None`: it was already gone.
    file: Option<(u64, u64)>,
    /// Drop removes the file, because nobody has taken the socket into use yet.
    is_tentative: bool,
}

impl PathListener {
    /// Listens for the owner and the group, which is that of the directory if the directory has the setgid bit. Replaces
    /// the socket of a process that has ended. Until [`keep`](Self::keep) is called, a drop removes the file.
    ///
    /// # Errors
    /// A process listens at the path, a file of another type exists there, the path is too long (over 99 bytes), or its
    /// directory is not writable.
    pub fn open(path: &Path) -> io::Result<Self> {
        match std::fs::symlink_metadata(path) {
            Ok(file) if file.file_type().is_socket() => remove_stale(path)?,
            Ok(_) => return Err(Errno::EADDRINUSE.into()),
            Err(_) => {}
        }
        // bind(2) applies the umask, which may remove the group's permissions. So the mode is set before the file gets its
        // public name.
        let temporary = temporary(path);
        let _ = std::fs::remove_file(&temporary);
        let published = listen_privately(&temporary).and_then(|listener| {
            std::fs::set_permissions(&temporary, Permissions::from_mode(GROUP_MODE))?;
            // A rename would replace a socket that another process has published meanwhile.
            std::fs::hard_link(&temporary, path).map(|()| listener)
        });
        let _ = std::fs::remove_file(&temporary);
        let listener = published.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => Errno::EADDRINUSE.into(),
            _ => error,
        })?;
        Ok(Self { listener, path: path.to_owned(), file: identity(path), is_tentative: true })
    }

    /// Takes the socket of a previous process, with the file at its path.
    pub fn inherit(socket: OwnedFd, path: &Path) -> Self {
        Self { listener: socket.into(), path: path.to_owned(), file: identity(path), is_tentative: false }
    }

    /// The socket.
    pub fn socket(&self) -> &UnixListener {
        &self.listener
    }

    /// The socket is in use from now on.
    pub fn keep(&mut self) {
        self.is_tentative = false;
    }

    /// Removes the file, so that callers do not wait in vain. A file that another process has put there stays.
    pub fn remove(&self) {
        if self.file.is_some()
            && identity(&self.path) == self.file
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(socket = %self.path.display(), %error, "cannot remove the file of a closed Unix socket");
        }
    }
}

impl Drop for PathListener {
    fn drop(&mut self) {
        if self.is_tentative {
            self.remove();
        }
    }
}

/// Listens on a Unix socket that only the owner may connect to, from the moment it exists.
///
/// # Errors
/// The path exists, is too long (over 107 bytes), or its directory is not writable.
pub fn listen_privately(path: &Path) -> io::Result<UnixListener> {
    let address = UnixAddr::new(path)?;
    let socket = socket(AddressFamily::Unix, SockType::Stream, FLAGS, None)?;
    // bind(2) gives the file the mode of the unbound socket. A chmod afterwards would leave a moment in which every
    // user of this machine can connect; a umask would hold for all threads of the process.
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(socket.as_raw_fd(), &address)?;
    listen(&socket, Backlog::new(BACKLOG)?)?;
    Ok(UnixListener::from(socket))
}

/// Returns the advice for an operator whose socket cannot be bound.
pub fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "Stop the process that listens there (`ss -lxp` lists it, perhaps as PATH.PID), remove the file if it is not a \
             socket, or choose another path"
        }
        io::ErrorKind::NotFound => "Create the directory first",
        io::ErrorKind::PermissionDenied => "Choose a directory in which this user may create and replace files",
        _ => "Choose another path",
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

fn temporary(path: &Path) -> PathBuf {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    PathBuf::from(temporary)
}

/// Removes a socket on which no process listens.
fn remove_stale(path: &Path) -> io::Result<()> {
    let in_use = || Err(Errno::EADDRINUSE.into());
    if !is_stale(path)? {
        return in_use();
    }
    // Another process may do the same. The rename moves one file to one of them, and it may be the new socket of the other.
    let moved = temporary(path);
    std::fs::rename(path, &moved)?;
    if is_stale(&moved)? {
        return std::fs::remove_file(&moved);
    }
    let _ = std::fs::hard_link(&moved, path);
    let _ = std::fs::remove_file(&moved);
    in_use()
}

/// True if no process listens on the socket at the path.
fn is_stale(path: &Path) -> io::Result<bool> {
    let probe = socket(AddressFamily::Unix, SockType::Stream, FLAGS, None)?;
    match connect(probe.as_raw_fd(), &UnixAddr::new(path)?) {
        Err(Errno::ECONNREFUSED) => Ok(true),
        // EAGAIN: the queue of a living listener is full.
        Ok(()) | Err(Errno::EAGAIN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    fn failure(path: &Path) -> io::ErrorKind {
        PathListener::open(path).unwrap_err().kind()
    }

    #[test]
    fn only_the_owner_may_connect_to_a_private_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = listen_privately(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        UnixStream::connect(&path).unwrap();
        drop(listener);
        assert_eq!(listen_privately(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(listen_privately(&directory.path().join("x".repeat(120))).is_err(), "longer than an address may be");
    }

    #[test]
    fn the_socket_of_a_dead_process_is_replaced_and_that_of_a_living_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let mut listener = PathListener::open(&path).unwrap();
        listener.keep();
        assert_eq!(mode(&path), 0o660);
        assert_eq!(failure(&path), io::ErrorKind::AddrInUse);
        // A full queue of callers is a sign of life as well.
        let callers: Vec<_> = (0..).map_while(|_| try_connect(&path)).collect();
        assert!(callers.len() >= BACKLOG as usize);
        assert_eq!(failure(&path), io::ErrorKind::AddrInUse);
        drop(listener);
        let next = PathListener::open(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        assert!(next.socket().accept().is_ok());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
        drop(next);
        assert!(!path.exists(), "nobody has used the socket");
    }

    fn try_connect(path: &Path) -> Option<OwnedFd> {
        let caller = socket(AddressFamily::Unix, SockType::Stream, FLAGS, None).unwrap();
        connect(caller.as_raw_fd(), &UnixAddr::new(path).unwrap()).ok().map(|()| caller)
    }

    #[test]
    fn of_many_that_replace_a_stale_socket_one_succeeds() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        for _ in 0..50 {
            drop(listen_privately(&path).unwrap());
            // Threads stand for processes; each has a temporary name of its own there.
            let one = std::thread::scope(|scope| {
                let start = || scope.spawn(|| PathListener::open(&path));
                let opened: Vec<_> = [start(), start()].map(|thread| thread.join().unwrap()).into_iter().collect();
                opened.into_iter().flatten().collect::<Vec<_>>()
            });
            assert!(one.len() <= 1, "{one:?}");
            drop(one);
            let _ = std::fs::remove_file(&path);
        }
    }

    #[test]
    fn files_of_others_stay() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name| directory.path().join(name);
        let (file, link, path) = (at("file"), at("link"), at("socket"));
        std::fs::write(&file, "content").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&file, &link] {
            assert_eq!(failure(path), io::ErrorKind::AddrInUse);
        }
        assert_eq!(std::fs::read_to_string(&link).unwrap(), "content");
        // An operator has removed the file, and another process listens there now.
        let first = PathListener::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = PathListener::open(&path).unwrap();
        first.remove();
        UnixStream::connect(&path).unwrap();
        drop(second);
    }
}

//! Listening Unix sockets.
//!
//! In: a path. Out: a socket with the permissions of its purpose. The file that a dead process left is replaced.
//! Never: the replacement of a socket on which a process still listens, or of a file of another type.

use std::fs::Permissions;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen as start, socket};
use nix::sys::stat::{Mode, fchmod};

/// Connections that wait to be accepted. A caller beyond them waits in connect(2).
const BACKLOG: i32 = 128;
/// Read and write, for the owner and the group.
const GROUP_MODE: u32 = 0o660;
const FLAGS: SockFlag = SockFlag::SOCK_CLOEXEC.union(SockFlag::SOCK_NONBLOCK);

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
    start(&socket, Backlog::new(BACKLOG)?)?;
    Ok(UnixListener::from(socket))
}

/// Listens on a Unix socket for its owner and its group, which is that of the directory if the directory has the setgid
/// bit. Replaces the socket of a process that has ended.
///
/// # Errors
/// A process listens at the path, a file of another type exists there, the path is too long (over 107 bytes), or its
/// directory is not writable.
pub fn listen_for_group(path: &Path) -> io::Result<UnixListener> {
    if std::fs::symlink_metadata(path).is_ok() && !is_left_behind(path)? {
        return Err(Errno::EADDRINUSE.into());
    }
    // The temporary file has its permissions before callers find it.
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let _ = std::fs::remove_file(&temporary);
    let published = listen_privately(&temporary).and_then(|listener| {
        std::fs::set_permissions(&temporary, Permissions::from_mode(GROUP_MODE))?;
        std::fs::rename(&temporary, path).map(|()| listener)
    });
    if published.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    published
}

/// Returns the advice for an operator whose socket cannot be bound.
pub fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "Stop the process that listens there (`ss -lxp` shows it), remove the file if it is no socket, or choose another path"
        }
        io::ErrorKind::NotFound => "Create the directory first",
        io::ErrorKind::PermissionDenied => "Choose a directory in which this user may create files",
        _ => "Choose another path",
    }
}

/// Removes the file of a listener that closes, so that callers do not wait in vain.
pub fn remove(path: &Path) {
    if is_socket(path)
        && let Err(error) = std::fs::remove_file(path)
    {
        tracing::warn!(socket = %path.display(), %error, "the file of a closed Unix socket stays");
    }
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}

/// Whether the socket at the path belongs to a process that has ended.
fn is_left_behind(path: &Path) -> io::Result<bool> {
    if !is_socket(path) {
        return Ok(false);
    }
    // Without waiting: a listener with a full queue answers EAGAIN.
    let probe = socket(AddressFamily::Unix, SockType::Stream, FLAGS, None)?;
    Ok(connect(probe.as_raw_fd(), &UnixAddr::new(path)?) == Err(Errno::ECONNREFUSED))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn only_the_owner_may_connect_to_a_private_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = listen_privately(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        drop(listener);
        assert_eq!(listen_privately(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(listen_privately(&directory.path().join("x".repeat(120))).is_err(), "longer than an address may be");
    }

    #[test]
    fn the_socket_of_a_dead_process_is_replaced_and_that_of_a_living_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = listen_for_group(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
        assert_eq!(listen_for_group(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        // A full queue of callers is a sign of life as well.
        let callers: Vec<_> = (0..).map_while(|_| try_connect(&path)).collect();
        assert!(callers.len() >= BACKLOG as usize);
        assert_eq!(listen_for_group(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        let next = listen_for_group(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        assert!(next.accept().is_ok());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
        remove(&path);
        assert!(!path.exists());
    }

    fn try_connect(path: &Path) -> Option<std::os::fd::OwnedFd> {
        let caller = socket(AddressFamily::Unix, SockType::Stream, FLAGS, None).unwrap();
        connect(caller.as_raw_fd(), &UnixAddr::new(path).unwrap()).ok().map(|()| caller)
    }

    #[test]
    fn files_and_links_to_elsewhere_stay() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("file"), directory.path().join("link"));
        std::fs::write(&file, "content").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&file, &link] {
            assert_eq!(listen_for_group(path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
            remove(path);
        }
        assert_eq!(std::fs::read_to_string(&link).unwrap(), "content");
    }
}

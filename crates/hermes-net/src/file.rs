//! Opens files that a document names, so that none of them can block the node.
//!
//! In: paths. Out: contents of regular files, documents that may come through a pipe, and logs to append to. A FIFO
//! without a reader and an endless device are errors at once. Waits only for the writer of a pipe.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal as _, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The largest certificate, key or CA bundle that is read, in bytes. (A bundle of all public CAs has 300 KiB.)
pub const MAX_FILE_BYTES: u64 = 16 << 20;

/// Reads a whole regular file of at most `most` bytes.
///
/// # Errors
/// The file cannot be read, is not a regular file, or is larger than `most`.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("larger than {most} bytes")));
    }
    Ok(bytes)
}

/// Opens a file of at most `most` bytes, or a pipe. The reader waits for the end of a pipe however long the writer
/// takes. A named pipe without a writer is an error after `within`.
///
/// # Errors
/// The file cannot be read, is too large, has no writer, or is a device, which may be endless.
pub fn open_or_pipe(path: &Path, most: u64, within: Duration) -> io::Result<File> {
    // Without O_NONBLOCK, opening a named pipe would block until it has a writer.
    let file = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let metadata = file.metadata()?;
    let kind = metadata.file_type();
    let refuse = |reason: String| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    if kind.is_file() && metadata.len() > most {
        return refuse(format!("larger than {most} bytes"));
    }
    if !kind.is_file() && !kind.is_fifo() && !file.is_terminal() {
        return refuse("neither a regular file nor a pipe".to_owned());
    }
    // Only a named pipe may lack a writer: the writer of a shell's pipe (`<(...)`) has opened it already.
    let is_named = std::fs::canonicalize(path).is_ok_and(|path| path.exists());
    if kind.is_fifo() && is_named {
        let mut pipes = [PollFd::new(file.as_fd(), PollFlags::POLLIN)];
        let within = PollTimeout::try_from(within).unwrap_or(PollTimeout::MAX);
        if poll(&mut pipes, within)? == 0 {
            return refuse("no process writes to this pipe".to_owned());
        }
    }
    let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?);
    fcntl(&file, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    Ok(file)
}

/// Opens a log to append to. Creates it with the permissions `mode` if it does not exist. Later writes may block.
///
/// # Errors
/// The file cannot be written, for example a FIFO without a reader.
pub fn append(path: &Path, mode: u32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.create(true).append(true).mode(mode).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?);
    fcntl(&file, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    Ok(file)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_waited_for() {
        let directory = std::env::temp_dir().join(format!("hermes-file-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let fifo = directory.join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(read(&fifo, MAX_FILE_BYTES).is_err() && append(&fifo, 0o600).is_err());
        assert!(read(Path::new("/dev/zero"), MAX_FILE_BYTES).is_err() && read(&directory, MAX_FILE_BYTES).is_err());
        let log = directory.join("log");
        io::Write::write_all(&mut append(&log, 0o600).unwrap(), b"one").unwrap();
        io::Write::write_all(&mut append(&log, 0o600).unwrap(), b"two").unwrap();
        assert_eq!(read(&log, 6).unwrap(), b"onetwo");
        assert!(read(&log, 5).is_err());
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

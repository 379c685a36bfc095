//! The handover of listening sockets from a running process to its successor.
//!
//! The sockets themselves are passed (SCM_RIGHTS) with their accept queues, so that no connection is refused or reset.
//! A new socket could not replace them: `tcp_migrate_req` is off by default, so closing one socket of a reuseport group
//! resets the connections in its queue.
//!
//! In: descriptors with a label each. Out: the same descriptors and labels in the other process. Never: to a process of
//! another user, which callers detect with [`peer_uid`] (SO_PEERCRED).

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// Maximum number of descriptors in one message. The kernel's limit is 253.
const BATCH: usize = 64;
/// Maximum length of a text that is handed over, in bytes.
const MAX_TEXT: u64 = 64 << 20;
/// Maximum length of a label, in bytes.
const MAX_LABEL: usize = 512;

/// A file descriptor with a label that both processes understand.
pub struct LabelledFd {
    /// The kind and address, for example `tcp/127.0.0.1:8080`.
    pub label: String,
    /// The socket, or a memory file with a text.
    pub fd: OwnedFd,
}

impl LabelledFd {
    /// Stores a text that is too long for a label in a memory file, whose descriptor can be passed.
    ///
    /// # Errors
    /// No file descriptor or no memory is left.
    pub fn text(label: String, text: &str) -> io::Result<Self> {
        let mut file = File::from(memfd_create(c"hermes-handover", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(text.as_bytes())?;
        Ok(Self { label, fd: file.into() })
    }
}

/// Replaces a text that was handed over. All processes that received its memory file read the new text from now on.
///
/// # Errors
/// No memory is left.
pub fn rewrite_text(fd: &OwnedFd, text: &str) -> io::Result<()> {
    let mut file = File::from(fd.try_clone()?);
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(text.as_bytes())
}

/// Reads a text that was handed over.
///
/// # Errors
/// The memory file cannot be read as text, or the text is too long.
pub fn read_text(fd: &OwnedFd) -> io::Result<String> {
    let mut file = File::from(fd.try_clone()?);
    file.rewind()?;
    let mut text = String::new();
    file.take(MAX_TEXT + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_TEXT {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "handover: text too long"));
    }
    Ok(text)
}

/// Sends the sockets, then an empty message as the terminator. Blocks at most for the stream's timeouts.
///
/// # Errors
/// The peer has closed the stream, or is slower than the timeouts.
pub fn send(stream: &UnixStream, sockets: &[LabelledFd]) -> io::Result<()> {
    for batch in sockets.chunks(BATCH) {
        let labels = batch.iter().map(|handed| handed.label.as_str()).collect::<Vec<_>>().join("\n");
        let fds: Vec<RawFd> = batch.iter().map(|handed| handed.fd.as_raw_fd()).collect();
        send_batch(stream, labels.as_bytes(), &fds)?;
    }
    send_batch(stream, b"", &[])
}

/// Sends a batch: the length of its labels, with the descriptors attached, then the labels.
fn send_batch(mut stream: &UnixStream, labels: &[u8], fds: &[RawFd]) -> io::Result<()> {
    let length = u32::try_from(labels.len()).map_err(io::Error::other)?.to_be_bytes();
    let rights = [ControlMessage::ScmRights(fds)];
    let control: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
    let sent = sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(&length)], control, MsgFlags::empty(), None)?;
    if sent != length.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    io::Write::write_all(&mut stream, labels)
}

/// Receives the sockets that [`send`] sent.
///
/// # Errors
/// The stream ends early, or the data is not in the format of [`send`].
pub fn receive(mut stream: &UnixStream) -> io::Result<Vec<LabelledFd>> {
    let mut all = Vec::new();
    loop {
        let mut length = [0u8; 4];
        let fds = receive_rights(stream, &mut length)?;
        let length = u32::from_be_bytes(length) as usize;
        if length > BATCH * MAX_LABEL {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "handover: label too long"));
        }
        if length == 0 {
            return Ok(all);
        }
        let mut labels = vec![0u8; length];
        io::Read::read_exact(&mut stream, &mut labels)?;
        let labels = String::from_utf8(labels).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let labels: Vec<&str> = labels.split('\n').collect();
        if labels.len() != fds.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "handover: the numbers of labels and sockets differ",
            ));
        }
        all.extend(labels.into_iter().zip(fds).map(|(label, fd)| LabelledFd { label: label.to_owned(), fd }));
    }
}

#[allow(unsafe_code)] // A number that the kernel sent becomes an owned descriptor.
fn receive_rights(stream: &UnixStream, length: &mut [u8; 4]) -> io::Result<Vec<OwnedFd>> {
    let mut space = cmsg_space!([RawFd; BATCH]);
    let mut slices = [IoSliceMut::new(length)];
    let message = loop {
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        // If the stream has a timeout, a signal interrupts the call, even with SA_RESTART.
        match recvmsg::<()>(stream.as_raw_fd(), &mut slices, Some(&mut space), flags) {
            Err(Errno::EINTR) => {}
            message => break message?,
        }
    };
    if message.bytes != 4 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel has just created these descriptors for us; no other code owns them.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok(fds)
}

/// Returns the user ID of the process at the other end of a Unix stream.
///
/// # Errors
/// The stream is closed.
pub fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    let credentials = nix::sys::socket::getsockopt(stream, nix::sys::socket::sockopt::PeerCredentials)?;
    Ok(credentials.uid())
}

/// A reference to a process (pidfd) that stays valid if its PID is reused.
#[derive(Debug)]
pub struct ProcessHandle(OwnedFd);

impl ProcessHandle {
    /// Returns a reference to the process that listened for a Unix stream when this process connected to it.
    ///
    /// # Errors
    /// The stream is closed; the process has ended, or is in another PID namespace; the kernel is older than Linux 5.3.
    #[allow(unsafe_code)] // nix does not have the call.
    pub fn of_peer(stream: &UnixStream) -> io::Result<Self> {
        let credentials = nix::sys::socket::getsockopt(stream, nix::sys::socket::sockopt::PeerCredentials)?;
        // SAFETY: the call takes two numbers, and returns a new descriptor or an error.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, credentials.pid(), 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just created it for us; no other code owns it. Descriptors fit this type.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }))
    }

    /// Waits until the process ends. Returns false if it does not end within `time`.
    pub fn ends_within(&self, time: Duration) -> bool {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
                Err(Errno::EINTR) => {}
                ready => return ready.is_ok_and(|ready| ready > 0),
            }
        }
    }
}

/// Returns the effective user ID of this process.
pub fn own_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_connection_that_waits_in_the_queue_survives() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(b"early").unwrap();

        let (ours, theirs) = UnixStream::pair().unwrap();
        send(&ours, &[LabelledFd { label: "tcp/x".to_owned(), fd: listener.into() }]).unwrap();
        let mut handed = receive(&theirs).unwrap();
        let one = handed.pop().unwrap();
        assert_eq!(one.label, "tcp/x");

        let (mut accepted, _) = TcpListener::from(one.fd).accept().unwrap();
        let mut bytes = [0; 5];
        accepted.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"early");
    }

    #[test]
    fn more_sockets_than_one_message_holds() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let again = |n| LabelledFd { label: format!("tcp/{n}"), fd: listener.try_clone().unwrap().into() };
        let many: Vec<_> = (0..150).map(again).collect();
        let (ours, theirs) = UnixStream::pair().unwrap();
        send(&ours, &many).unwrap();
        let handed = receive(&theirs).unwrap();
        assert_eq!(handed.len(), 150);
        assert_eq!(handed[149].label, "tcp/149");
    }

    #[test]
    fn garbage_is_an_error() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&[0xff; 16]).unwrap();
        drop(ours);
        assert!(receive(&theirs).is_err());
    }
}

//! A listening socket on which the workers wait together, and the kernel wakes one of those that are idle (EPOLLEXCLUSIVE).
//!
//! In: a listening socket, in each worker's runtime. Out: connections. The runtime registers descriptors without the flag, and an epoll
//! descriptor of our own within that of the runtime would not do: the kernel then wakes all workers. So the socket is added to the
//! epoll of the runtime itself. Its events carry the registration of a placeholder, by which the runtime finds whom to wake.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpStream;

use crate::tcp::accept_waiting;

/// A listening socket, as one worker waits on it.
#[derive(Debug)]
pub struct ExclusiveListener {
    // Dropped in this order, after the socket is removed from the epoll: no event may carry a registration that has ended.
    epoll: OwnedFd,
    placeholder: AsyncFd<EventFd>,
    listener: TcpListener,
}

impl ExclusiveListener {
    /// Waits on the socket from now on, in the runtime of the caller.
    ///
    /// # Errors
    /// No file descriptor is left, or the epoll of the runtime is not found (without `/proc`).
    pub fn new(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let placeholder = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        let placeholder = registered(placeholder)?;
        let registration = registration_of(placeholder.get_ref().as_fd().as_raw_fd())?;
        let epoll = duplicate(registration.epoll)?;
        add(&epoll, &listener, registration.data)?;
        Ok(Self { epoll, placeholder, listener })
    }

    /// Waits for the next connection. Cancel-safe.
    ///
    /// # Errors
    /// As of accept(2).
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        loop {
            let mut ready = self.placeholder.readable().await?;
            if let Ok(accepted) = ready.try_io(|_| accept_waiting(&self.listener)) {
                return accepted;
            }
        }
    }

    /// The socket, without waiting.
    pub fn listener(&self) -> &TcpListener {
        &self.listener
    }
}

impl Drop for ExclusiveListener {
    fn drop(&mut self) {
        remove(&self.epoll, &self.listener);
    }
}

/// A descriptor as an epoll knows it.
struct Registration {
    epoll: RawFd,
    data: u64,
}

/// Finds the epoll with which a descriptor of this process is registered.
fn registration_of(descriptor: RawFd) -> io::Result<Registration> {
    for entry in fs::read_dir("/proc/self/fdinfo")? {
        let Some(epoll) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // The descriptors of the directory itself, and those of other threads, may have been closed since.
        let Ok(text) = fs::read_to_string(format!("/proc/self/fdinfo/{epoll}")) else { continue };
        if let Some(data) = text.lines().find_map(|line| data_of(line, descriptor)) {
            return Ok(Registration { epoll, data });
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "the epoll of the runtime is not in /proc/self/fdinfo"))
}

/// Reads a line such as `tfd:        7 events: 80002019 data:     7f12a0c0  pos:0 ino:5 sdev:f` (proc_pid_fdinfo(5)).
fn data_of(line: &str, descriptor: RawFd) -> Option<u64> {
    let mut words = line.strip_prefix("tfd:")?.split_whitespace();
    let target: RawFd = words.next()?.parse().ok()?;
    let data = words.skip_while(|word| *word != "data:").nth(1)?;
    if target == descriptor { u64::from_str_radix(data, 16).ok() } else { None }
}

#[allow(unsafe_code)]
fn registered(placeholder: EventFd) -> io::Result<AsyncFd<EventFd>> {
    // SAFETY: an `EventFd` always has the same descriptor, and closes it only when it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(placeholder, Interest::READABLE) }?)
}

#[allow(unsafe_code)] // The number comes from /proc.
fn duplicate(descriptor: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: an epoll with this registration exists as long as the caller's runtime, which the caller runs in.
    unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned()
}

#[allow(unsafe_code)] // nix has no call that adds a descriptor with any data to an epoll that is not its own.
fn add(epoll: &OwnedFd, listener: &TcpListener, data: u64) -> io::Result<()> {
    let events = (libc::EPOLLIN | libc::EPOLLET | libc::EPOLLEXCLUSIVE).cast_unsigned();
    let mut event = libc::epoll_event { events, u64: data };
    // SAFETY: both descriptors are open for the call, and the kernel copies the event.
    let result =
        unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, listener.as_raw_fd(), &raw mut event) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[allow(unsafe_code)] // As above.
fn remove(epoll: &OwnedFd, listener: &TcpListener) {
    // SAFETY: both descriptors are open for the call, and the kernel reads no event.
    unsafe {
        libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, listener.as_raw_fd(), std::ptr::null_mut());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::net::Ipv4Addr;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn reads_a_registration() {
        let line = "tfd:        7 events: 80002019 data:     7f12a0c0  pos:0 ino:5 sdev:f";
        assert_eq!((data_of(line, 7), data_of(line, 8)), (Some(0x7f12_a0c0), None));
        assert_eq!((data_of("pos:\t0", 7), data_of("tfd: 7", 7)), (None, None));
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    /// The kernel prefers one of two idle workers. While one worker stands still, the other one accepts every connection.
    #[test]
    fn one_idle_worker_is_woken_for_each_connection() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (accepted, by) = mpsc::channel();
        let (continues, waits) = mpsc::channel();
        let waits = std::sync::Arc::new(std::sync::Mutex::new(waits));
        let (ready, started) = mpsc::channel();
        for worker in 0..2 {
            let (listener, accepted) = (listener.try_clone().unwrap(), accepted.clone());
            let (ready, waits) = (ready.clone(), waits.clone());
            std::thread::spawn(move || {
                run(async {
                    let listener = ExclusiveListener::new(listener).unwrap();
                    ready.send(()).unwrap();
                    while let Ok((mut stream, _)) = listener.accept().await {
                        let mut byte = [0; 1];
                        tokio::io::AsyncReadExt::read_exact(&mut stream, &mut byte).await.unwrap();
                        accepted.send(worker).unwrap();
                        // The first byte of a connection says whether its worker stands still.
                        if byte[0] == 1 {
                            waits.lock().unwrap().recv().unwrap();
                        }
                    }
                });
            });
            started.recv().unwrap();
        }
        let connect = |byte| {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.write_all(&[byte]).unwrap();
            by.recv_timeout(Duration::from_secs(60)).unwrap()
        };
        let idle = || {
            #[expect(clippy::disallowed_methods, reason = "no event says that both wait again")]
            std::thread::sleep(Duration::from_millis(5));
        };
        let one_more = || {
            idle();
            connect(0)
        };
        let accepted: Vec<usize> = std::iter::repeat_with(one_more).take(20).collect();
        let by_first = accepted.iter().filter(|worker| **worker == 0).count();
        assert!(!(5..=15).contains(&by_first), "{accepted:?}");
        for _ in 0..2 {
            let stuck = connect(1);
            for _ in 0..20 {
                assert_eq!(connect(0), 1 - stuck);
            }
            continues.send(()).unwrap();
            idle();
        }
    }

    #[test]
    fn a_dropped_listener_leaves_the_epoll() {
        run(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let address = listener.local_addr().unwrap();
            let first = ExclusiveListener::new(listener.try_clone().unwrap()).unwrap();
            drop(first);
            let _queued = std::net::TcpStream::connect(address).unwrap();
            // An event with a registration that ended would be one of freed memory.
            tokio::time::sleep(Duration::from_millis(20)).await;
            let second = ExclusiveListener::new(listener).unwrap();
            second.accept().await.unwrap();
        });
    }
}

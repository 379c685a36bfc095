//! The `bpf` system call: maps and programs, without a compiler or a library.
//!
//! In: the shapes of maps, the instructions of a program. Out: descriptors of what the kernel has verified, and the shared memory of a
//! map. Never: the content of a program (`program.rs`). Needs CAP_BPF and CAP_NET_ADMIN, or root.

use std::ffi::c_long;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

use super::assembler::Instruction;

/// linux/bpf.h: the commands of the system call.
const BPF_MAP_CREATE: c_long = 0;
const BPF_MAP_UPDATE_ELEM: c_long = 2;
const BPF_MAP_DELETE_ELEM: c_long = 3;
const BPF_PROG_LOAD: c_long = 5;

/// linux/bpf.h: the types of maps.
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_LRU_HASH: u32 = 9;
const BPF_MAP_TYPE_REUSEPORT_SOCKARRAY: u32 = 20;
const BPF_F_MMAPABLE: u32 = 1 << 10;

/// linux/bpf.h: the type of a program that selects a socket of a reuseport group, and its two ways to be attached.
const BPF_PROG_TYPE_SK_REUSEPORT: u32 = 21;
const BPF_SK_REUSEPORT_SELECT: u32 = 39;
const BPF_SK_REUSEPORT_SELECT_OR_MIGRATE: u32 = 40;

/// linux/socket.h (asm-generic).
const SO_ATTACH_REUSEPORT_EBPF: libc::c_int = 52;

/// The kernel's helper functions need a program under this licence.
const LICENCE: &[u8] = b"GPL\0";

/// The start of `union bpf_attr` for `BPF_MAP_CREATE`.
#[repr(C)]
#[derive(Default)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

/// The same for `BPF_MAP_UPDATE_ELEM`.
#[repr(C)]
struct MapUpdate {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// The same for `BPF_PROG_LOAD`.
#[repr(C)]
#[derive(Default)]
struct ProgramLoad {
    kind: u32,
    count: u32,
    instructions: u64,
    licence: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach_type: u32,
}

/// An array whose memory the process and the kernel share.
pub(super) struct SharedMap {
    fd: OwnedFd,
    memory: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory belongs to the mapping alone, which no thread owns.
#[allow(unsafe_code)]
unsafe impl Send for SharedMap {}
// SAFETY: the users of the memory share it by atomics alone.
#[allow(unsafe_code)]
unsafe impl Sync for SharedMap {}

impl SharedMap {
    /// Makes a map of `count` elements of `bytes`, a multiple of 8, all zero.
    ///
    /// # Errors
    /// The kernel denies it, or it is older than Linux 5.5.
    #[allow(unsafe_code)]
    pub(super) fn new(bytes: usize, count: usize) -> io::Result<Self> {
        let value_size = u32::try_from(bytes).map_err(io::Error::other)?;
        let max_entries = u32::try_from(count).map_err(io::Error::other)?;
        let shape = MapCreate { kind: BPF_MAP_TYPE_ARRAY, key_size: 4, value_size, max_entries, flags: BPF_F_MMAPABLE };
        let fd = descriptor(BPF_MAP_CREATE, &shape)?;
        let bytes = bytes * count;
        // SAFETY: a new mapping of a descriptor that is open; the kernel chooses the place.
        let memory = unsafe {
            libc::mmap(null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd.as_raw_fd(), 0)
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = NonNull::new(memory.cast()).ok_or_else(|| io::Error::other("a mapping at address 0"))?;
        Ok(Self { fd, memory, length: bytes })
    }

    /// The memory as words.
    #[cfg(test)]
    #[allow(unsafe_code)]
    pub(super) fn words(&self) -> &[std::sync::atomic::AtomicU64] {
        // SAFETY: the mapping begins at a page, has this length and lives as long as `self`; all bytes are valid for atomics.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.length / 8) }
    }

    /// The memory, which begins at a page.
    pub(super) fn memory(&self) -> NonNull<u8> {
        self.memory
    }
}

impl AsFd for SharedMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SharedMap {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length, and nobody has references beyond the life of `self`.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.length) };
    }
}

/// The sockets of a reuseport group by worker.
pub(super) struct SocketArray {
    fd: OwnedFd,
}

impl SocketArray {
    pub(super) fn new(length: usize) -> io::Result<Self> {
        let max_entries = u32::try_from(length).map_err(io::Error::other)?;
        let shape =
            MapCreate { kind: BPF_MAP_TYPE_REUSEPORT_SOCKARRAY, key_size: 4, value_size: 8, max_entries, flags: 0 };
        Ok(Self { fd: descriptor(BPF_MAP_CREATE, &shape)? })
    }

    /// Names the socket of a worker, in the place of the one before. The kernel forgets a socket that is closed.
    ///
    /// # Errors
    /// The socket is in no reuseport group, or it is in another array.
    pub(super) fn set(&self, worker: usize, socket: BorrowedFd<'_>) -> io::Result<()> {
        let key = u32::try_from(worker).map_err(io::Error::other)?;
        let value = u64::try_from(socket.as_raw_fd()).map_err(io::Error::other)?;
        let update = MapUpdate {
            map: number(self.fd.as_fd()),
            padding: 0,
            key: address(&key),
            value: address(&value),
            flags: 0,
        };
        call(BPF_MAP_UPDATE_ELEM, &update).map(drop)
    }

    /// Forgets the socket of a worker, so that another array can have it: a socket is in one array at most.
    pub(super) fn remove(&self, worker: usize) {
        let key = u32::try_from(worker).unwrap_or(u32::MAX);
        let removal = MapUpdate { map: number(self.fd.as_fd()), padding: 0, key: address(&key), value: 0, flags: 0 };
        // There may be none.
        let _ = call(BPF_MAP_DELETE_ELEM, &removal);
    }
}

impl AsFd for SocketArray {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A table of 8-byte keys and 4-byte values, which the program alone reads and writes. A full one forgets what was used longest ago.
pub(super) struct LruMap {
    fd: OwnedFd,
}

impl LruMap {
    pub(super) fn new(entries: u32) -> io::Result<Self> {
        let shape =
            MapCreate { kind: BPF_MAP_TYPE_LRU_HASH, key_size: 8, value_size: 4, max_entries: entries, flags: 0 };
        Ok(Self { fd: descriptor(BPF_MAP_CREATE, &shape)? })
    }
}

impl AsFd for LruMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A program that the kernel has verified.
pub(super) struct Program {
    fd: OwnedFd,
}

impl Program {
    /// Loads a program that selects sockets of a reuseport group. On kernels from Linux 5.14 on, it also selects for TCP connections
    /// that wait at a socket which closes.
    ///
    /// # Errors
    /// The kernel denies it. The message has the last line of the verifier.
    pub(super) fn load(instructions: &[Instruction]) -> io::Result<Self> {
        let with = |attach_type| Self::load_as(BPF_PROG_TYPE_SK_REUSEPORT, attach_type, instructions);
        with(BPF_SK_REUSEPORT_SELECT_OR_MIGRATE).or_else(|_| with(BPF_SK_REUSEPORT_SELECT))
    }

    pub(super) fn load_as(kind: u32, attach_type: u32, instructions: &[Instruction]) -> io::Result<Self> {
        let mut name = [0; 16];
        name[..15].copy_from_slice(b"hermes_dispatch");
        let program = |log: &mut [u8]| ProgramLoad {
            kind,
            count: u32::try_from(instructions.len()).unwrap_or(u32::MAX),
            instructions: address(&instructions[0]),
            licence: address(&LICENCE[0]),
            log_level: u32::from(!log.is_empty()),
            log_size: u32::try_from(log.len()).unwrap_or_default(),
            log: if log.is_empty() { 0 } else { address(&log[0]) },
            name,
            attach_type,
            ..ProgramLoad::default()
        };
        descriptor(BPF_PROG_LOAD, &program(&mut [])).map(|fd| Self { fd }).map_err(|error| {
            // Again, for what the verifier says.
            let mut log = vec![0; 1 << 20];
            let _ = descriptor(BPF_PROG_LOAD, &program(&mut log));
            let text = String::from_utf8_lossy(log.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned();
            let lines: Vec<&str> = text.lines().rev().take(3).collect();
            io::Error::new(error.kind(), format!("{error} {}", lines.into_iter().rev().collect::<Vec<_>>().join("; ")))
        })
    }

    /// Has the program select for the group of this socket.
    ///
    /// # Errors
    /// The socket is in no reuseport group.
    #[allow(unsafe_code)]
    pub(super) fn attach(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let fd = self.fd.as_raw_fd();
        let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).map_err(io::Error::other)?;
        // SAFETY: both descriptors are open during the call, and `fd` is as long as `length` says.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_ATTACH_REUSEPORT_EBPF,
                std::ptr::from_ref(&fd).cast(),
                length,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl AsFd for Program {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A descriptor as the kernel wants it in attributes and instructions.
pub(super) fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

pub(super) fn address<T>(value: &T) -> u64 {
    std::ptr::from_ref(value).addr() as u64
}

#[allow(unsafe_code)]
fn descriptor<T>(command: c_long, attributes: &T) -> io::Result<OwnedFd> {
    let fd = call(command, attributes)?;
    // SAFETY: the kernel has just made the descriptor for this call, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).map_err(io::Error::other)?) })
}

#[allow(unsafe_code)] // libc and nix have no function for bpf(2).
pub(super) fn call<T>(command: c_long, attributes: &T) -> io::Result<c_long> {
    // SAFETY: the attributes and what they point to live until the call returns; the kernel checks the rest.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            c_long::try_from(size_of::<T>()).unwrap_or(0),
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

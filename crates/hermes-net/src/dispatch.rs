//! New connections go to the workers that have the least to do (paper 003).
//!
//! In: what workers say of themselves, the sockets of a listener by worker. Out: a program in the kernel that chooses the socket of
//! each new connection, by a selection that the workers renew. Without privileges, the kernel hashes. Never: a connection that is
//! refused because nobody was selected.

use std::io;
use std::os::fd::AsFd;

mod assembler;
mod bpf;
mod exclusive;
pub mod listeners;
mod program;
pub mod scheduler;
mod table;

pub use exclusive::ExclusiveListener;
pub use table::{Groups, MAX_WORKERS, Table, WorkerRow, now};

use assembler::Instruction;
use bpf::{LruMap, Program, SocketArray};
use program::Build;
use socket2::SockRef;

/// How the kernel chooses the worker of a new connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// By the hash of its addresses.
    #[default]
    Hash,
    /// By the hash, among the selected workers.
    Directed,
    /// One after the other.
    RoundRobin,
    /// The first one.
    First,
}

/// First ids of QUIC connections whose worker is kept until the client has got an id of the node. A flood of new ones pushes others
/// out; their next packets are dispatched again.
const FIRST_IDS: u32 = 16 << 10;

/// The program of a listener.
pub struct Dispatcher {
    sockets: SocketArray,
    /// The length of the array.
    length: usize,
    /// The kernel keeps them for the program, too.
    _first_ids: Option<LruMap>,
    _program: Program,
}

impl Dispatcher {
    /// Has the kernel choose among the sockets of a reuseport group by the table, which is shared. The sockets listen, and have the order
    /// of their workers. `bit` is the program's among those of confined listeners.
    ///
    /// # Errors
    /// The process has no CAP_BPF and CAP_NET_ADMIN, or a socket is in no group.
    pub fn attach<S: AsFd>(table: &Table, sockets: &[S], bit: Option<u8>) -> io::Result<Self> {
        Self::with(table, sockets, bit, None, program::tcp)
    }

    /// The same for QUIC. `tag` is in the connection ids that this process issues.
    ///
    /// # Errors
    /// As above.
    pub(crate) fn attach_quic<S: AsFd>(table: &Table, sockets: &[S], bit: Option<u8>, tag: u16) -> io::Result<Self> {
        if cfg!(target_endian = "big") {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let first_ids = LruMap::new(FIRST_IDS)?;
        let ids = bpf::number(first_ids.as_fd());
        Self::with(table, sockets, bit, Some(first_ids), |build| program::quic::program(build, ids, tag))
    }

    fn with<S: AsFd>(
        table: &Table,
        sockets: &[S],
        bit: Option<u8>,
        first_ids: Option<LruMap>,
        write: impl Fn(&Build) -> Option<Vec<Instruction>>,
    ) -> io::Result<Self> {
        let map = table.map().ok_or_else(|| io::Error::other("the kernel did not accept the table of workers"))?;
        let Groups { count, size, .. } = table.groups();
        let array = SocketArray::new(count * size)?;
        for (worker, socket) in sockets.iter().enumerate().take(count * size) {
            array.set(worker, socket.as_fd())?;
        }
        let port = sockets.first().map(|first| SockRef::from(first).local_addr()).transpose()?;
        let port = port.and_then(|address| address.as_socket()).map_or(0, |address| address.port());
        let (map, sockets_map) = (bpf::number(map), bpf::number(array.as_fd()));
        let instructions = write(&Build { table: map, sockets: sockets_map, groups: table.groups(), port, bit });
        let instructions = instructions.ok_or_else(|| io::Error::other("a jump of the program leads too far"))?;
        let program = Program::load(&instructions)?;
        if let Some(first) = sockets.first() {
            program.attach(first.as_fd())?;
        }
        Ok(Self { sockets: array, length: count * size, _first_ids: first_ids, _program: program })
    }

    /// Leaves the choice to the kernel, so that another process can dispatch to the same sockets.
    pub fn release(&self) {
        (0..self.length).for_each(|worker| self.sockets.remove(worker));
    }

    /// Gives a worker another socket.
    ///
    /// # Errors
    /// The socket is in no group.
    #[cfg(test)]
    fn replace(&self, worker: usize, socket: &impl AsFd) -> io::Result<()> {
        self.sockets.set(worker, socket.as_fd())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

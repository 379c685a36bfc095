//! New connections go to the workers that have the least to do (paper 003).
//!
//! In: what workers say of themselves, the sockets of a listener by worker. Out: a program in the kernel that chooses the socket of
//! each new connection, by a selection that the workers renew. Without privileges, the kernel hashes. Never: a connection that is
//! refused because nobody was selected.

use std::io;
use std::os::fd::AsFd;

mod assembler;
mod bpf;
mod program;
pub mod scheduler;
mod table;

pub use table::{MAX_WORKERS, Table, WorkerRow, now};

use bpf::{Program, SocketArray};

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
}

/// The program of a listener.
pub struct Dispatcher {
    sockets: SocketArray,
    _program: Program,
}

impl Dispatcher {
    /// Has the kernel choose among the sockets of a reuseport group by the table, which is shared. The sockets listen, and have the order
    /// of their workers.
    ///
    /// # Errors
    /// The process has no CAP_BPF and CAP_NET_ADMIN, or a socket is in no group.
    pub fn attach<S: AsFd>(table: &Table, sockets: &[S]) -> io::Result<Self> {
        let map = table.map().ok_or_else(|| io::Error::other("the kernel does not read this table"))?;
        let array = SocketArray::new(MAX_WORKERS)?;
        for (worker, socket) in sockets.iter().enumerate().take(MAX_WORKERS) {
            array.set(worker, socket.as_fd())?;
        }
        let instructions = program::dispatch(bpf::number(map), bpf::number(array.as_fd()));
        let instructions = instructions.ok_or_else(|| io::Error::other("a jump of the program leads too far"))?;
        let program = Program::load(&instructions)?;
        if let Some(first) = sockets.first() {
            program.attach(first.as_fd())?;
        }
        Ok(Self { sockets: array, _program: program })
    }

    /// A worker has another socket from now on.
    ///
    /// # Errors
    /// The socket is in no group.
    pub fn replace(&self, worker: usize, socket: &impl AsFd) -> io::Result<()> {
        self.sockets.set(worker, socket.as_fd())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

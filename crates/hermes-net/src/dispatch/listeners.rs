//! The way in which the kernel chooses among the sockets of each listener.
//!
//! In: the mode, and the sockets of all listeners. Out: a filter or a program for each group of sockets. A program is attached once, and
//! stays: it reads the mode from the table. Without privileges, the kernel hashes. Never: a socket without a reader.

use std::collections::HashMap;
use std::hash::Hash;
use std::io;
use std::net::{TcpListener, UdpSocket};
use std::sync::Arc;

use super::{Dispatcher, Mode, Table};
use crate::reuseport;

/// The sockets of a listener, one for each worker.
#[derive(Clone, Copy, Debug)]
pub enum Sockets<'s> {
    /// Of TCP.
    Tcp(&'s [&'s Arc<TcpListener>]),
    /// Of QUIC, with the tag in the connection ids of this process.
    Quic(&'s [UdpSocket], u16),
}

/// The way in which the kernel chooses among the sockets of a listener.
enum Choice {
    /// By the hash of the addresses, or of the connection id of QUIC.
    Hash,
    /// A filter takes the first socket. It needs no privilege.
    First,
    /// By a program, which reads the mode from the table, and its bit among those of confined listeners.
    Program(Dispatcher, Option<u8>),
}

/// The way in which the kernel chooses sockets, for each listener.
pub struct Listeners<Key> {
    choices: HashMap<Key, Choice>,
}

impl<Key> Default for Listeners<Key> {
    fn default() -> Self {
        Self { choices: HashMap::new() }
    }
}

impl<Key: Clone + Eq + Hash> Listeners<Key> {
    /// Forgets listeners that are closed.
    pub fn retain(&mut self, is_open: impl Fn(&Key) -> bool) {
        self.choices.retain(|key, _| is_open(key));
    }

    /// Leaves all sockets to another process.
    pub fn release(&mut self) {
        for (_, choice) in self.choices.drain() {
            if let Choice::Program(program, _) = choice {
                program.release();
            }
        }
    }

    /// The bit of a listener for [`Table::confine`], or 0 if it cannot be confined.
    pub fn bit(&self, key: &Key) -> u64 {
        match self.choices.get(key) {
            Some(Choice::Program(_, Some(bit))) => 1 << bit,
            _ => 0,
        }
    }

    /// The bits of all listeners.
    pub fn bits(&self) -> u64 {
        self.choices.keys().fold(0, |bits, key| bits | self.bit(key))
    }

    /// `None`: 64 listeners have all of them.
    fn free_bit(&self) -> Option<u8> {
        let used = self.bits();
        (0..64).find(|bit| used >> bit & 1 == 0)
    }

    /// Applies a mode to a listener.
    ///
    /// # Errors
    /// The kernel hashes: the process has no CAP_BPF and CAP_NET_ADMIN, or the kernel is too old.
    pub fn apply(&mut self, mode: Mode, table: &Table, key: &Key, sockets: Sockets<'_>) -> io::Result<()> {
        let is_applied = match self.choices.get(key) {
            Some(Choice::Program(..)) => true,
            Some(Choice::First) => mode == Mode::First,
            Some(Choice::Hash) => mode == Mode::Hash,
            None => false,
        };
        if is_applied {
            return Ok(());
        }
        let bit = self.free_bit();
        let chosen = match sockets {
            Sockets::Tcp(group) => choose_tcp(mode, table, group, bit),
            Sockets::Quic(sockets, tag) => choose_quic(mode, table, sockets, tag, bit),
        };
        let (choice, result) = chosen.map_or_else(|error| (Choice::Hash, Err(error)), |choice| (choice, Ok(())));
        self.choices.insert(key.clone(), choice);
        result
    }
}

fn choose_tcp(mode: Mode, table: &Table, group: &[&Arc<TcpListener>], bit: Option<u8>) -> io::Result<Choice> {
    let first = group.first().ok_or(io::ErrorKind::InvalidInput)?;
    // A predecessor or another mode may have left a filter.
    reuseport::by_kernel(&***first);
    match mode {
        Mode::Hash => Ok(Choice::Hash),
        Mode::First => reuseport::to_first(&***first).map(|()| Choice::First),
        Mode::Directed | Mode::RoundRobin => Dispatcher::attach(table, group, bit).map(|it| Choice::Program(it, bit)),
    }
}

/// A group has its filter already, by which datagrams come to the worker of their connection.
fn choose_quic(mode: Mode, table: &Table, sockets: &[UdpSocket], tag: u16, bit: Option<u8>) -> io::Result<Choice> {
    match mode {
        Mode::Hash | Mode::First => Ok(Choice::Hash),
        Mode::Directed | Mode::RoundRobin => {
            Dispatcher::attach_quic(table, sockets, bit, tag).map(|it| Choice::Program(it, bit))
        }
    }
}

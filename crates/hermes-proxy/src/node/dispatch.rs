//! How new connections come to workers, in the mode of the document (paper 003).
//!
//! In: the mode, and the sockets of all listeners. Out: for each listener, what the kernel chooses a socket by. A program is attached
//! once, and stays: it reads the mode from the table. Without privileges, the kernel hashes. Never: a socket without a reader.

use std::collections::{HashMap, HashSet};
use std::io;

use hermes_model::snapshot::{Dispatch, DispatchMode};
use hermes_net::dispatch::scheduler::Parameters;
use hermes_net::dispatch::{Dispatcher, Groups, Mode, Table};
use hermes_net::quic::Group;
use hermes_net::reuseport;

use super::sockets::{Socket, SocketKey};

/// What the kernel chooses among the sockets of a listener by.
enum Choice {
    /// The hash of the addresses, or of the connection id of QUIC.
    Hash,
    /// A filter that takes the first socket. It needs no privilege.
    First,
    /// A program, which reads the mode from the table.
    Program(#[expect(dead_code, reason = "it keeps the program's maps")] Dispatcher),
}

/// What the kernel chooses sockets by, for each listener.
#[derive(Default)]
pub(super) struct Dispatchers {
    choices: HashMap<SocketKey, Choice>,
    /// It was said that the kernel hashes instead.
    is_reported: bool,
}

impl Dispatchers {
    /// Applies the mode of the document to all listeners. A predecessor still reads the sockets of `held_back`.
    pub(super) fn follow(
        &mut self,
        dispatch: &Dispatch,
        table: &Table,
        sockets: &HashMap<SocketKey, Vec<Socket>>,
        held_back: &HashSet<SocketKey>,
    ) {
        self.choices.retain(|key, _| sockets.contains_key(key));
        let mode = match dispatch.mode {
            DispatchMode::Reuseport => Mode::Hash,
            DispatchMode::Directed => Mode::Directed,
            DispatchMode::RoundRobin => Mode::RoundRobin,
            DispatchMode::Exclusive => Mode::First,
        };
        table.set_parameters(&parameters(dispatch));
        table.set_mode(mode);
        for (key, sockets) in sockets.iter().filter(|(key, sockets)| sockets.len() > 1 && !held_back.contains(key)) {
            let is_chosen = match self.choices.get(key) {
                Some(Choice::Program(_)) => true,
                Some(Choice::First) => mode == Mode::First,
                Some(Choice::Hash) => mode == Mode::Hash,
                None => false,
            };
            let chosen = match sockets.first() {
                Some(Socket::Tcp(_)) if !is_chosen => choose_tcp(mode, table, sockets),
                Some(Socket::Quic(group, _)) if !is_chosen => choose_quic(mode, table, group),
                _ => continue,
            };
            let choice = chosen.unwrap_or_else(|error| {
                self.report(key, &error);
                Choice::Hash
            });
            self.choices.insert(key.clone(), choice);
        }
    }

    fn report(&mut self, key: &SocketKey, error: &io::Error) {
        if !std::mem::replace(&mut self.is_reported, true) {
            tracing::warn!(
                address = %key,
                %error,
                "the kernel hashes connections onto workers; `dispatch: directed` needs CAP_BPF and CAP_NET_ADMIN"
            );
        }
    }
}

/// How the workers of a node form groups, for its whole life.
pub(super) fn groups(dispatch: &Dispatch, workers: usize) -> Groups {
    dispatch.locality.map_or_else(|| Groups::of(workers), |size| Groups::by_destination(workers, size.into()))
}

fn parameters(dispatch: &Dispatch) -> Parameters {
    let share = |percent: u16| f64::from(percent) / 100.0;
    Parameters {
        hung_after: dispatch.hung_after,
        session_weight: share(dispatch.session_weight),
        connections_offset: share(dispatch.connections_offset),
        pending_offset: share(dispatch.pending_offset),
    }
}

fn choose_tcp(mode: Mode, table: &Table, sockets: &[Socket]) -> io::Result<Choice> {
    let group: Vec<_> = sockets.iter().filter_map(Socket::tcp).collect();
    // A predecessor or another mode may have left a filter.
    reuseport::by_kernel(&**group[0]);
    match mode {
        Mode::Hash => Ok(Choice::Hash),
        Mode::First => reuseport::to_first(&**group[0]).map(|()| Choice::First),
        Mode::Directed | Mode::RoundRobin => Dispatcher::attach(table, &group).map(Choice::Program),
    }
}

/// A group has its filter already, by which datagrams come to the worker of their connection.
fn choose_quic(mode: Mode, table: &Table, group: &Group) -> io::Result<Choice> {
    match mode {
        Mode::Hash | Mode::First => Ok(Choice::Hash),
        Mode::Directed | Mode::RoundRobin => group.direct(table).map(Choice::Program),
    }
}

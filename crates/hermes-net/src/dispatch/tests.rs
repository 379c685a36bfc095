//! The program in the real kernel: which worker gets a connection, by what the table says.
//!
//! In: listeners of one reuseport group, and connections to them. Out: who accepts them. To run as root with `--ignored`.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use rand::Rng as _;

use super::bpf::{self, Program, SharedMap};
use super::scheduler::{Parameters, Selection};
use super::{Dispatcher, Groups, Mode, Table, now, program};
use crate::{tcp, udp};

/// linux/bpf.h: a program type that the kernel runs for a test, and the command for it.
const BPF_PROG_TYPE_SOCKET_FILTER: u32 = 1;
const BPF_PROG_TEST_RUN: std::ffi::c_long = 10;
/// The bit of the programs among those of confined listeners.
const BIT: u8 = 5;
const HUNG_AFTER: Duration = Duration::from_millis(50);

#[repr(C)]
#[derive(Default)]
struct TestRun {
    program: u32,
    returned: u32,
    size_in: u32,
    size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
}

/// The position of the set bit that the hash picks: its rank is the hash scaled to their number.
fn reference(bits: u64, hash: u32) -> u64 {
    let rank = (u64::from(hash) * u64::from(bits.count_ones())) >> 32;
    (0..64).filter(|bit| bits >> bit & 1 == 1).nth(rank as usize).unwrap()
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn the_kernel_picks_as_the_reference() {
    let map = SharedMap::new(64, 1).unwrap();
    let instructions = program::pick_alone(bpf::number(std::os::fd::AsFd::as_fd(&map))).unwrap();
    let program = Program::load_as(BPF_PROG_TYPE_SOCKET_FILTER, 0, &instructions).unwrap();
    let packet = [0_u8; 64];
    let pick = |bits: u64, hash: u32| {
        let words = map.words();
        for (word, value) in words.iter().zip([bits, hash.into(), 99]) {
            word.store(value, std::sync::atomic::Ordering::Relaxed);
        }
        let run = TestRun {
            program: bpf::number(std::os::fd::AsFd::as_fd(&program)),
            size_in: 64,
            data_in: bpf::address(&packet),
            ..TestRun::default()
        };
        bpf::call(BPF_PROG_TEST_RUN, &run).unwrap();
        words[2].load(std::sync::atomic::Ordering::Relaxed)
    };
    let edges = [0, 1, u32::MAX / 2, u32::MAX / 2 + 1, u32::MAX - 1, u32::MAX];
    let mut random = rand::rng();
    for bits in 1..256 {
        for hash in edges.into_iter().chain((0..20).map(|_| random.random())) {
            assert_eq!(pick(bits, hash), reference(bits, hash), "{bits:#b} {hash}");
        }
    }
    for _ in 0..10_000 {
        // Few and many bits.
        let bits = match random.random_range(0..3) {
            0 => random.random::<u64>(),
            1 => random.random::<u64>() & random.random::<u64>() & random.random::<u64>(),
            _ => random.random::<u64>() | random.random::<u64>(),
        };
        let hash = random.random();
        if bits != 0 {
            assert_eq!(pick(bits, hash), reference(bits, hash), "{bits:#b} {hash}");
        }
    }
}

/// The workers of a listener.
struct Workers {
    address: SocketAddr,
    sockets: Vec<TcpListener>,
    table: Table,
    dispatcher: Dispatcher,
}

impl Workers {
    fn new(count: usize) -> Self {
        Self::with(count, Groups::of(count))
    }

    fn with(count: usize, groups: Groups) -> Self {
        let first = tcp::listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let address = first.local_addr().unwrap();
        let sockets: Vec<TcpListener> =
            std::iter::once(first).chain((1..count).map(|_| tcp::listen(address).unwrap())).collect();
        let table = Table::shared(count, groups).unwrap();
        table.set_parameters(&Parameters { hung_after: HUNG_AFTER, ..Parameters::default() });
        let dispatcher = Dispatcher::attach(&table, &sockets, Some(BIT)).unwrap();
        let workers = Self { address, sockets, table, dispatcher };
        (0..count).for_each(|worker| workers.table.row(worker).park());
        workers
    }

    fn select(&self, workers: u64) {
        self.table.set_mode(Mode::Directed);
        self.table.publish(&Selection { workers, turning: workers });
    }

    /// Opens connections, and returns how many each worker has got.
    fn connect(&self, count: usize) -> HashMap<usize, usize> {
        let clients: Vec<TcpStream> = (0..count).map(|_| TcpStream::connect(self.address).unwrap()).collect();
        let mut got = HashMap::new();
        for (worker, socket) in self.sockets.iter().enumerate() {
            while socket.accept().is_ok() {
                *got.entry(worker).or_default() += 1;
            }
        }
        assert_eq!(got.values().sum::<usize>(), clients.len(), "each connection is accepted once");
        got
    }

    /// The workers that got some of 200 connections.
    fn receivers(&self) -> Vec<usize> {
        let mut workers: Vec<usize> = self.connect(200).into_keys().collect();
        workers.sort_unstable();
        workers
    }
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn connections_go_to_the_selected_workers() {
    let workers = Workers::new(4);
    assert_eq!(workers.receivers(), [0, 1, 2, 3], "the hash, before anything else is said");
    workers.select(0b0110);
    assert_eq!(workers.receivers(), [1, 2]);
    let got = workers.connect(1000);
    assert!(got.values().all(|count| (350..=650).contains(count)), "{got:?}");
    workers.select(0b1000);
    assert_eq!(workers.receivers(), [3], "one takes all");
    workers.select(0);
    assert_eq!(workers.receivers(), [0, 1, 2, 3], "nobody was selected: all that turn");
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn a_worker_that_stands_still_is_passed_over_at_once() {
    let workers = Workers::new(4);
    workers.select(0b0111);
    // Its loop got events a while ago, and nobody has looked since.
    let begun = now().unwrap() - 2 * HUNG_AFTER;
    workers.table.row(1).unpark(begun);
    assert_eq!(workers.receivers(), [0, 2]);
    workers.table.row(1).turn(now().unwrap() + Duration::from_secs(60));
    assert_eq!(workers.receivers(), [0, 1, 2], "it turns");
    for worker in 0..3 {
        workers.table.row(worker).unpark(begun);
    }
    assert_eq!(workers.receivers(), [3], "all selected ones stand still, and another one turns");
    workers.table.row(3).unpark(begun);
    assert_eq!(workers.receivers(), [0, 1, 2, 3], "all stand still: the hash");
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn an_idle_worker_gets_one_connection_before_the_others() {
    let workers = Workers::new(4);
    workers.select(0b1111);
    let turn = |worker: usize| workers.table.row(worker).unpark(now().unwrap());
    for idle in [3, 0, 2] {
        (0..4).for_each(turn);
        workers.table.row(idle).park();
        assert_eq!(workers.connect(1), HashMap::from([(idle, 1)]));
        // It has not woken up yet, and counts like the others.
        assert!(workers.receivers().len() > 1);
    }
    (0..4).for_each(turn);
    workers.table.row(3).park();
    workers.select(0b0111);
    assert!(!workers.receivers().contains(&3), "idle, but not selected");
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn each_worker_has_its_turn() {
    let workers = Workers::new(3);
    workers.table.set_mode(Mode::RoundRobin);
    let got = workers.connect(300);
    assert!(got.len() == 3 && got.values().all(|count| *count == 100), "{got:?}");
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn the_first_one_gets_all() {
    let workers = Workers::new(3);
    workers.table.set_mode(Mode::First);
    assert_eq!(workers.receivers(), [0]);
    workers.table.set_mode(Mode::Hash);
    assert_eq!(workers.receivers(), [0, 1, 2]);
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn a_worker_without_a_socket_is_passed_over() {
    let mut workers = Workers::new(3);
    workers.select(0b111);
    drop(workers.sockets.pop());
    assert_eq!(workers.receivers(), [0, 1]);
    let again = tcp::listen(workers.address).unwrap();
    workers.dispatcher.replace(2, &again).unwrap();
    workers.sockets.push(again);
    assert_eq!(workers.receivers(), [0, 1, 2]);
}

/// The sockets of a listener over QUIC.
struct QuicWorkers {
    address: SocketAddr,
    sockets: Vec<UdpSocket>,
    table: Table,
    _dispatcher: Dispatcher,
}

const TAG: u16 = 0x1234;

impl QuicWorkers {
    fn new(count: usize) -> Self {
        let first = udp::listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let address = first.local_addr().unwrap();
        let sockets: Vec<UdpSocket> =
            std::iter::once(first).chain((1..count).map(|_| udp::listen(address).unwrap())).collect();
        let table = Table::shared(count, Groups::of(count)).unwrap();
        let dispatcher = Dispatcher::attach_quic(&table, &sockets, Some(BIT), TAG).unwrap();
        (0..count).for_each(|worker| table.row(worker).park());
        Self { address, sockets, table, _dispatcher: dispatcher }
    }

    fn select(&self, workers: u64) {
        self.table.set_mode(Mode::Directed);
        self.table.publish(&Selection { workers, turning: workers });
    }

    /// Sends a datagram from a new port, and returns the worker that has got it.
    fn send(&self, datagram: &[u8]) -> usize {
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        client.send_to(datagram, self.address).unwrap();
        let mut buffer = [0; 64];
        let got: Vec<usize> =
            (0..self.sockets.len()).filter(|worker| self.sockets[*worker].recv(&mut buffer).is_ok()).collect();
        assert_eq!(got.len(), 1, "{got:?}");
        got[0]
    }
}

/// A packet with a long header, as the first of a client (RFC 9000, Section 17.2.2).
fn initial(id: &[u8]) -> Vec<u8> {
    [&[0xc0, 0, 0, 0, 1, id.len() as u8], id, &[0; 20]].concat()
}

fn short(id: &[u8]) -> Vec<u8> {
    [&[0x40], id, &[0; 20]].concat()
}

/// An id that a process with this tag has issued for a worker.
fn issued(worker: u8, tag: u16) -> [u8; 8] {
    let [high, low] = tag.to_be_bytes();
    [worker, high, low, 1, 2, 3, 4, 5]
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn a_quic_connection_keeps_its_worker() {
    let workers = QuicWorkers::new(4);
    let mut random = rand::rng();
    for length in [8, 11, 20] {
        for _ in 0..20 {
            let mut id = vec![0; length];
            random.fill(&mut id[..]);
            id[1] = 0xff;
            workers.select(0b0010);
            assert_eq!(workers.send(&initial(&id)), 1, "the selected one");
            workers.select(0b1000);
            assert_eq!(workers.send(&initial(&id)), 1, "the same first id, from another address");
            id[0] ^= 0xff;
            assert_eq!(workers.send(&initial(&id)), 3, "another one");
        }
    }
    // Once the client has an id of the node, that names the worker.
    for worker in 0..4 {
        assert_eq!(workers.send(&short(&issued(worker, TAG))), usize::from(worker));
        assert_eq!(workers.send(&initial(&issued(worker, TAG))), usize::from(worker));
    }
    // Long headers of another process are like those of a new client: its worker passes them on.
    assert_eq!(workers.send(&initial(&issued(0, TAG + 1))), 3);
    // Datagrams that are not QUIC, and ids that name a worker that does not exist, still reach some worker.
    for datagram in [&[][..], &[0x40], &[0xc0, 0, 0], &short(&issued(200, TAG)), &initial(&issued(200, TAG))] {
        workers.send(datagram);
    }
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn new_quic_connections_pass_over_a_worker_that_stands_still() {
    let workers = QuicWorkers::new(3);
    workers.select(0b111);
    workers.table.row(1).unpark(now().unwrap() - Duration::from_secs(1));
    let mut random = rand::rng();
    for _ in 0..100 {
        assert_ne!(workers.send(&initial(&random.random::<[u8; 8]>())), 1);
    }
    assert_eq!(workers.send(&short(&issued(1, TAG))), 1, "its connections stay with it");
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn groups_share_connections_by_both_addresses_or_by_destination() {
    let mut workers = Workers::with(6, Groups { by_destination: false, ..Groups::by_destination(6, 3) });
    workers.table.set_mode(Mode::Directed);
    for worker in [0, 3] {
        workers.table.schedule(worker, now().unwrap());
    }
    let got = workers.connect(600);
    assert!(got.len() == 6 && got.values().all(|count| (50..=160).contains(count)), "{got:?}");
    let mut groups = std::collections::HashSet::new();
    for _ in 0..20 {
        workers = Workers::with(6, Groups::by_destination(6, 3));
        workers.table.set_mode(Mode::Directed);
        for worker in [0, 3] {
            workers.table.schedule(worker, now().unwrap());
        }
        let got = workers.receivers();
        assert!(got == [0, 1, 2] || got == [3, 4, 5], "one group for a destination: {got:?}");
        groups.insert(got);
    }
    assert_eq!(groups.len(), 2, "ports have different groups");
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn a_confined_listener_has_the_workers_of_the_sandbox() {
    let workers = Workers::new(5);
    workers.table.set_sandbox(2);
    workers.select(0b11111);
    assert_eq!(workers.receivers(), [0, 1, 2]);
    workers.table.confine(!(1 << BIT));
    assert_eq!(workers.receivers(), [0, 1, 2], "others are confined");
    workers.table.confine(1 << BIT);
    assert_eq!(workers.receivers(), [3, 4]);
    workers.select(0b00111);
    assert_eq!(workers.receivers(), [3, 4], "although they have more to do");
    // The sandbox stands still.
    for worker in [3, 4] {
        workers.table.row(worker).unpark(Duration::ZERO);
    }
    assert_eq!(workers.receivers(), [3, 4]);
    workers.table.set_sandbox(0);
    assert_eq!(workers.receivers(), [0, 1, 2], "there is no sandbox");
}

#[test]
#[ignore = "loads a program into the kernel, as root"]
fn the_kernel_accepts_programs_of_listeners_that_cannot_be_confined() {
    for groups in [Groups::of(1), Groups::of(65), Groups::by_destination(8, 4)] {
        let table = Table::shared(groups.count * groups.size, groups).unwrap();
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        drop(Dispatcher::attach(&table, &[tcp::listen(any).unwrap()], None).unwrap());
        drop(Dispatcher::attach_quic(&table, &[udp::listen(any).unwrap()], None, TAG).unwrap());
    }
}

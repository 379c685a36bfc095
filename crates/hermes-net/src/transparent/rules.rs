//! The chains and rules of an interception.
//!
//! In: a [`Plan`] and the addresses of the workers' sockets. Out: chains. Packets carry marks from one rule to another:
//! `0x4954_IICC`, with the number of the table and a code.

use std::net::SocketAddr;

use ipnet::IpNet;

use super::{Addresses, Plan, SPOOF_MARK};
use crate::nftables::{Chain, Expression, Hook, Verdict};
use crate::socket_mark::MARK;

/// The upper half of all marks and routing tables of interceptions ("IT").
pub(super) const MARKS: u32 = 0x4954_0000;
const MARK_PREFIX: u32 = 0xffff_0000;
const DIVERT: u32 = 0;
const FIRST_RELEASE: u32 = 1;
const REFUSE: u32 = 0xfe;
const UNREACHABLE: u32 = 0xff;
/// The most workers whose release fits in a mark.
pub(super) const MAX_WORKERS: usize = (REFUSE - FIRST_RELEASE) as usize;
/// The priorities of the kernel's `raw` and `mangle` tables.
const RAW: i32 = -300;
const MANGLE: i32 = -150;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// The marks, addresses and queues in the rules of an interception.
pub(super) struct Layout<'a> {
    pub(super) id: u8,
    /// The mark of the diversion.
    pub(super) divert: u32,
    pub(super) addresses: &'a [Addresses],
    pub(super) first_queue: u16,
    /// The kernel has the expression `queue`.
    pub(super) has_queue_expression: bool,
}

/// The name of an interception's table. It has no prefix in common with the tables of TUN devices.
pub(super) fn table_name(id: u8) -> String {
    format!("hermes_tproxy_{id:02x}")
}

/// The name of a diversion's table.
pub(super) fn diversion_name(id: u8) -> String {
    format!("hermes_divert_{id:02x}")
}

fn mark(id: u8, code: u32) -> u32 {
    MARKS | u32::from(id) << 8 | code
}

/// The mark of packets to deliver to this machine. It is also the number of the routing table that does it.
pub(super) fn divert_mark(id: u8) -> u32 {
    mark(id, DIVERT)
}

/// The mark of a released SYN.
pub(super) fn release_mark(id: u8, worker: usize) -> u32 {
    mark(id, FIRST_RELEASE + u32::try_from(worker.min(MAX_WORKERS)).unwrap_or_default())
}

/// The mark of a refused SYN.
pub(super) fn refuse_mark(id: u8) -> u32 {
    mark(id, REFUSE)
}

/// The mark of a SYN to an unreachable destination.
pub(super) fn unreachable_mark(id: u8) -> u32 {
    mark(id, UNREACHABLE)
}

fn chain(name: &'static str, hook: Hook, priority: i32, rules: Vec<Vec<Expression>>) -> Chain {
    Chain { name, kind: "filter", hook, priority, rules }
}

/// The chains of a diversion.
pub(super) fn diversion(mark: u32) -> Vec<Chain> {
    use Expression as E;
    // The listeners are bound to the loopback address, so the socket is that of a connection. Its mark is not compared:
    // the kernel knows none for a connection in its handshake or in TIME_WAIT.
    let divert = vec![E::TransparentSocket, E::SetMark(mark), E::Verdict(Verdict::Accept)];
    vec![
        chain(
            "untracked_in",
            Hook::Prerouting,
            RAW,
            vec![vec![E::TransparentSocket, E::SocketMarkIs(SPOOF_MARK), E::NoTrack]],
        ),
        chain("untracked_out", Hook::Output, RAW, vec![vec![E::MarkIs(SPOOF_MARK), E::NoTrack]]),
        chain("divert", Hook::Prerouting, MANGLE, vec![divert]),
    ]
}

/// The chain of an interception. It comes after those of all diversions.
pub(super) fn interception(layout: &Layout<'_>, plan: &Plan) -> Vec<Chain> {
    vec![chain("intercept", Hook::Prerouting, MANGLE + 1, intercept(layout, plan))]
}

fn intercept(layout: &Layout<'_>, plan: &Plan) -> Vec<Vec<Expression>> {
    use Expression as E;
    let id = layout.id;
    let divert = E::SetMark(layout.divert);
    let accept = E::Verdict(Verdict::Accept);
    let pass = E::Verdict(Verdict::Return);
    // Own connections through the loopback interface.
    let mut rules: Vec<Vec<E>> = [MARK, SPOOF_MARK].map(|mark| vec![E::MarkIs(mark), pass.clone()]).into();
    rules.push(vec![E::Protocol(TCP), E::MarkIs(refuse_mark(id)), E::RejectWithReset]);
    rules.push(vec![E::MarkIs(unreachable_mark(id)), E::RejectUnreachable]);
    for (worker, addresses) in layout.addresses.iter().enumerate() {
        for address in &addresses.tcp {
            rules.push(vec![
                E::MarkIs(release_mark(id, worker)),
                E::Protocol(TCP),
                E::Version4(address.is_ipv4()),
                divert.clone(),
                E::TproxyTo(*address),
                accept.clone(),
            ]);
        }
    }
    // Packets that a diversion or an interception has dealt with, also that of another process.
    rules.push(vec![E::MarkIn { bits: MARKS, mask: MARK_PREFIX }, pass]);
    for prefix in &plan.prefixes {
        let syn = [E::Protocol(TCP), E::TcpSyn];
        for selected in destinations(&syn, *prefix, &plan.ports) {
            let end = |addresses: &Addresses, queue| match (plan.hold, layout.has_queue_expression) {
                (false, _) => to_sockets(&addresses.tcp, &divert),
                (true, true) => vec![vec![E::Queue(queue)]],
                (true, false) => vec![vec![E::QueueByTarget(queue)]],
            };
            deliver(layout, &selected, end, &mut rules);
        }
        for selected in destinations(&[E::Protocol(UDP)], *prefix, &plan.ports) {
            if plan.udp {
                deliver(layout, &selected, |addresses, _| to_sockets(&addresses.udp, &divert), &mut rules);
            }
        }
    }
    rules
}

fn with<const N: usize>(selected: &[Expression], more: [Expression; N]) -> Vec<Expression> {
    selected.iter().cloned().chain(more).collect()
}

/// The conditions for a prefix: one list for each port, or one list for all ports.
fn destinations(first: &[Expression], prefix: IpNet, ports: &[u16]) -> Vec<Vec<Expression>> {
    use Expression as E;
    let mut selected = with(first, [E::To(prefix)]);
    if prefix.prefix_len() < prefix.max_prefix_len() {
        // A connection to this machine itself, such as its SSH server, is intercepted only if its address is named.
        // Multicast is never split.
        selected.push(E::ToOtherMachine);
    }
    if ports.is_empty() {
        return vec![selected];
    }
    ports.iter().map(|port| with(&selected, [E::ToPort(*port)])).collect()
}

/// Delivers packets to the workers. A hash of the flow selects one.
fn deliver(
    layout: &Layout<'_>,
    selected: &[Expression],
    ends: impl Fn(&Addresses, u16) -> Vec<Vec<Expression>>,
    rules: &mut Vec<Vec<Expression>>,
) {
    let workers = u32::try_from(layout.addresses.len()).unwrap_or(1);
    for (index, addresses) in (0..workers).zip(layout.addresses) {
        let queue = layout.first_queue + u16::try_from(index).unwrap_or_default();
        let of_worker = (workers > 1).then_some(Expression::FlowHashIs { modulus: workers, value: index });
        for end in ends(addresses, queue) {
            rules.push(selected.iter().cloned().chain(of_worker.clone()).chain(end).collect());
        }
    }
}

/// Delivers packets to these sockets, one for each IP version.
fn to_sockets(sockets: &[SocketAddr], divert: &Expression) -> Vec<Vec<Expression>> {
    use Expression as E;
    let to = |address: &SocketAddr| {
        let version = E::Version4(address.is_ipv4());
        vec![version, divert.clone(), E::TproxyTo(*address), E::Verdict(Verdict::Accept)]
    };
    sockets.iter().map(to).collect()
}

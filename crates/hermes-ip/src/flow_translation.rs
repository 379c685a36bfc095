//! Translation of TCP connections and UDP flows to virtual addresses, which stand for names. Both addresses and both
//! ports are rewritten (RFC 3022), so that the kernel serves the flows at two sockets of this process.
//!
//! A program at `client` sends packets to `target`. They are rewritten to come from an alias (the target's address with
//! a port of this node) and to go to the node's socket. The socket's packets to the alias are rewritten to come from
//! the target and to go to the client. The kernel has the TCP state on both sides.
//!
//! In: packets, and the time. Out: the same packets rewritten, or the reason why not; displaced flows. The number of
//! flows is limited, and shared among destinations. A closed connection retains its alias for a minute, for segments
//! that are still in flight. Never: a socket, or a name.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};

use hermes_wire::ip::{self, Header, Side};

/// Time for which a closed connection retains its alias, in milliseconds: the TIME-WAIT of Linux.
const CLOSED_KEPT: u64 = 60_000;
/// Time of silence after which a UDP flow may lose its alias to another flow, in milliseconds.
const SILENT_KEPT: u64 = 120_000;
/// Time of silence, in milliseconds, after which a flow yields to a new flow of the same destination, or of a
/// destination that has no flow.
const YIELD_AFTER_MS: u64 = 20_000;
/// The flow limit divided by this number is the size of a batch of displaced flows. Each choice scans all flows, so one
/// scan displaces several.
const BATCH: usize = 128;
/// Maximum number of entries of `unyielding`, besides the entry for destinations without flows.
const MAX_UNYIELDING: usize = 16;
/// The lowest port of an alias.
const FIRST_ALIAS: u16 = 1024;

/// The transport protocol of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// A TCP connection or UDP flow, by the addresses that its program uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// The protocol above IP.
    pub transport: Transport,
    /// The address and port of the client.
    pub client: SocketAddr,
    /// The address and port to which the client sent.
    pub target: SocketAddr,
}

/// The result of [`Translation::translate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The packet was rewritten. The caller writes it to the device.
    Rewritten,
    /// The packet is the first one of a flow that has no alias yet.
    Begins(FlowKey),
    /// The upstream connection is not open yet, so the client's SYN has to wait.
    Waits,
    /// The packet belongs to no known flow, and cannot begin one.
    Unknown,
    /// The packet is neither TCP nor UDP, or a fragment without ports.
    Untranslatable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The upstream connection is being opened; the client's SYN waits.
    Opening,
    Open,
    /// Closed at this time, in milliseconds.
    Closed(u64),
}

#[derive(Debug)]
struct Flow {
    key: FlowKey,
    state: State,
    used_at: u64,
}

/// The flows to the addresses of one prefix.
#[derive(Debug)]
pub struct Translation {
    /// The addresses of the two local sockets that serve the flows.
    tcp: SocketAddr,
    udp: SocketAddr,
    by_alias: HashMap<(Transport, SocketAddr), Flow>,
    aliases: HashMap<FlowKey, SocketAddr>,
    last_port: u16,
    /// Closed flows, by the time at which they closed.
    closed: BTreeSet<(u64, Transport, SocketAddr)>,
    /// The number of flows of each destination, without the closed ones.
    counts: HashMap<IpAddr, usize>,
    /// Displaced flows that [`Translation::take_displaced`] has not returned yet, by alias.
    displaced: Vec<(Transport, SocketAddr)>,
    /// A time, and the destinations for which no flow yielded at that time, so that a flood causes only one scan of the
    /// table. `None`: all destinations that have no flow.
    unyielding: (u64, Vec<Option<IpAddr>>),
}

impl Translation {
    /// Creates a table without flows; `tcp` and `udp` are the local sockets that serve them.
    pub fn new(tcp: SocketAddr, udp: SocketAddr) -> Self {
        Self {
            tcp,
            udp,
            by_alias: HashMap::new(),
            aliases: HashMap::new(),
            last_port: FIRST_ALIAS - 1,
            closed: BTreeSet::new(),
            counts: HashMap::new(),
            displaced: Vec::new(),
            unyielding: (0, Vec::new()),
        }
    }

    /// Rewrites a packet of a known flow.
    pub fn translate(&mut self, packet: &mut [u8], header: &Header, now: u64) -> Outcome {
        let transport = match header.protocol {
            ip::TCP => Transport::Tcp,
            ip::UDP => Transport::Udp,
            _ => return Outcome::Untranslatable,
        };
        if header.is_later_fragment {
            return self.translate_fragment(packet, header, transport);
        }
        let Some((source, destination)) = ip::ports(packet, header) else { return Outcome::Untranslatable };
        let (from, to) = (SocketAddr::new(header.source, source), SocketAddr::new(header.destination, destination));
        let own = self.own(transport);
        if from == own {
            let Some(flow) = self.by_alias.get_mut(&(transport, to)) else { return Outcome::Unknown };
            flow.used_at = now;
            rewrite(packet, header, flow.key.target, flow.key.client);
            return Outcome::Rewritten;
        }
        let key = FlowKey { transport, client: from, target: to };
        let is_first = transport == Transport::Udp || ip::tcp_flags(packet, header).is_some_and(is_syn);
        let found =
            self.aliases.get(&key).and_then(|alias| Some((*alias, self.by_alias.get_mut(&(transport, *alias))?)));
        match found {
            None if is_first => Outcome::Begins(key),
            // The client reuses the port for another connection.
            Some((_, Flow { state: State::Closed(_), .. })) if is_first && transport == Transport::Tcp => {
                self.forget(&key);
                Outcome::Begins(key)
            }
            None => Outcome::Unknown,
            Some((_, Flow { state: State::Opening, .. })) => Outcome::Waits,
            Some((alias, flow)) => {
                flow.used_at = now;
                rewrite(packet, header, alias, own);
                Outcome::Rewritten
            }
        }
    }

    /// Rewrites the addresses of a fragment without ports. Local programs and the node's sockets send from the same
    /// address, so that one rewrite serves both directions.
    fn translate_fragment(&self, packet: &mut [u8], header: &Header, transport: Transport) -> Outcome {
        let own = self.own(transport).ip();
        if header.source != own || transport == Transport::Tcp {
            return Outcome::Untranslatable;
        }
        let target = header.destination;
        ip::readdress(packet, header, Side::Destination, own);
        ip::readdress(packet, header, Side::Source, target);
        Outcome::Rewritten
    }

    /// Assigns an alias to a new flow. Returns `None` if `limit` flows exist and none yields, or if no port is free.
    /// Call [`Translation::take_displaced`] after each call.
    pub fn begin(&mut self, key: FlowKey, limit: usize, now: u64) -> Option<SocketAddr> {
        if self.by_alias.len() >= limit {
            self.make_room(key.target.ip(), limit, now);
        }
        if self.by_alias.len() >= limit {
            return None;
        }
        let alias = self.free_alias(key.transport, key.target.ip())?;
        let state = if key.transport == Transport::Tcp { State::Opening } else { State::Open };
        self.by_alias.insert((key.transport, alias), Flow { key, state, used_at: now });
        self.aliases.insert(key, alias);
        *self.counts.entry(key.target.ip()).or_default() += 1;
        Some(alias)
    }

    /// Returns the flows that were displaced since the last call, by alias. The caller must end their connections.
    pub fn take_displaced(&mut self) -> Vec<(Transport, SocketAddr)> {
        std::mem::take(&mut self.displaced)
    }

    /// Marks the flow open: the client's SYN can reach the node's socket.
    pub fn open(&mut self, key: &FlowKey) {
        if let Some(flow) = self.flow_mut(key).filter(|flow| flow.state == State::Opening) {
            flow.state = State::Open;
        }
    }

    /// Marks the flow with this alias closed: the connection at the node's socket has ended.
    pub fn close(&mut self, transport: Transport, alias: SocketAddr, now: u64) {
        let found = self.by_alias.get_mut(&(transport, alias));
        let Some(flow) = found.filter(|flow| !matches!(flow.state, State::Closed(_))) else { return };
        flow.state = State::Closed(now);
        let target = flow.key.target.ip();
        self.closed.insert((now, transport, alias));
        self.count_down(target);
    }

    /// Removes a flow.
    pub fn forget(&mut self, key: &FlowKey) {
        let Some(alias) = self.aliases.remove(key) else { return };
        match self.by_alias.remove(&(key.transport, alias)).map(|flow| flow.state) {
            Some(State::Closed(since)) => drop(self.closed.remove(&(since, key.transport, alias))),
            Some(State::Opening | State::Open) => self.count_down(key.target.ip()),
            None => {}
        }
    }

    fn count_down(&mut self, target: IpAddr) {
        if let Some(count) = self.counts.get_mut(&target) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&target);
            }
        }
    }

    /// Returns the flow with this alias, which is the peer of one of the node's sockets.
    pub fn flow_of(&self, transport: Transport, alias: SocketAddr) -> Option<FlowKey> {
        self.by_alias.get(&(transport, alias)).map(|flow| flow.key)
    }

    /// Whether no TCP connection is open or opening.
    pub fn has_no_connections(&self) -> bool {
        let is_over = |flow: &Flow| flow.key.transport == Transport::Udp || matches!(flow.state, State::Closed(_));
        self.by_alias.values().all(is_over)
    }

    fn own(&self, transport: Transport) -> SocketAddr {
        match transport {
            Transport::Tcp => self.tcp,
            Transport::Udp => self.udp,
        }
    }

    fn flow_mut(&mut self, key: &FlowKey) -> Option<&mut Flow> {
        self.by_alias.get_mut(&(key.transport, *self.aliases.get(key)?))
    }

    /// Frees the aliases of all flows that closed more than [`CLOSED_KEPT`] ago, or else that of the flow that closed
    /// first. If no flow is closed, displaces open flows.
    fn make_room(&mut self, target: IpAddr, limit: usize, now: u64) {
        while self.closed.first().is_some_and(|(since, ..)| since + CLOSED_KEPT <= now) {
            self.forget_oldest_closed();
        }
        if self.by_alias.len() >= limit && self.closed.is_empty() {
            self.displace_for(target, limit, now);
        }
        while self.by_alias.len() >= limit && self.forget_oldest_closed() {}
    }

    /// Displaces flows to make room for a flow to `target`. The longest idle flows of the destination with the most
    /// flows yield, as long as that destination retains at least as many flows as `target` has. Otherwise, flows that
    /// were silent for [`YIELD_AFTER_MS`] yield.
    fn displace_for(&mut self, target: IpAddr, limit: usize, now: u64) {
        if self.unyielding.0 != now {
            self.unyielding = (now, Vec::new());
        }
        let has = self.counts.get(&target).copied().unwrap_or_default();
        let whose = (has > 0).then_some(target);
        let (searches, most_searches) = (&self.unyielding.1, MAX_UNYIELDING + usize::from(has == 0));
        if searches.len() >= most_searches || searches.contains(&whose) {
            return;
        }
        let largest = self.counts.iter().max_by_key(|(_, count)| **count).filter(|(_, count)| **count >= has + 2);
        let surplus = largest.map(|(largest, count)| (*largest, (count - has) / 2));
        let mut expired = 0;
        let mut yielding: Vec<(bool, u64, Transport, SocketAddr)> = Vec::new();
        for ((transport, alias), flow) in &self.by_alias {
            let is_expired = *transport == Transport::Udp && flow.used_at + SILENT_KEPT <= now;
            let its = flow.key.target.ip();
            let yields = match surplus {
                Some((largest, _)) => its == largest,
                None => flow.used_at + YIELD_AFTER_MS <= now && whose.is_none_or(|whose| whose == its),
            };
            if (is_expired || yields) && !matches!(flow.state, State::Closed(_)) {
                expired += usize::from(is_expired);
                yielding.push((!is_expired, flow.used_at, *transport, *alias));
            }
        }
        if yielding.is_empty() {
            return self.unyielding.1.push(whose);
        }
        let batch = surplus.map_or(usize::MAX, |(_, surplus)| surplus).min(limit / BATCH).max(1);
        let count = batch.max(expired).min(yielding.len());
        yielding.select_nth_unstable(count - 1);
        for (_, _, transport, alias) in yielding.into_iter().take(count) {
            self.displaced.push((transport, alias));
            match (transport, self.flow_of(transport, alias)) {
                // The next datagram begins another flow.
                (Transport::Udp, Some(key)) => self.forget(&key),
                // The alias stays until it is needed, so that the connection's last segments reach its program.
                _ => self.close(transport, alias, now),
            }
        }
    }

    fn forget_oldest_closed(&mut self) -> bool {
        let Some((_, transport, alias)) = self.closed.pop_first() else { return false };
        if let Some(key) = self.flow_of(transport, alias) {
            self.forget(&key);
        }
        true
    }

    /// Assigns ports in turn, so that an alias is reused as late as possible.
    fn free_alias(&mut self, transport: Transport, target: IpAddr) -> Option<SocketAddr> {
        for _ in FIRST_ALIAS..=u16::MAX {
            self.last_port = self.last_port.checked_add(1).unwrap_or(FIRST_ALIAS);
            let alias = SocketAddr::new(target, self.last_port);
            if !self.by_alias.contains_key(&(transport, alias)) {
                return Some(alias);
            }
        }
        None
    }
}

fn is_syn(flags: u8) -> bool {
    flags & (ip::SYN | ip::ACK | ip::RST) == ip::SYN
}

fn rewrite(packet: &mut [u8], header: &Header, from: SocketAddr, to: SocketAddr) {
    ip::set_port(packet, header, Side::Source, from.port());
    ip::set_port(packet, header, Side::Destination, to.port());
    ip::readdress(packet, header, Side::Source, from.ip());
    ip::readdress(packet, header, Side::Destination, to.ip());
}

#[cfg(test)]
mod tests;

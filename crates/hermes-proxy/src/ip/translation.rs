//! Translation of TCP connections and UDP flows to addresses that stand for names (RFC 3022, both addresses and both
//! ports), so that the kernel serves them at two sockets of this process.
//!
//! A program at `client` talks to `target`. Its packets are rewritten to come from an alias (the target's address with
//! a port of ours) and to go to our socket; the packets of our socket to the alias are rewritten to come from the target
//! and to go to the client. The kernel keeps the TCP state on both sides.
//!
//! In: packets, and the time. Out: the same packets rewritten, or why not. Bounded: the number of flows; a closed
//! connection keeps its alias for a minute, for segments that are still in flight.
//! Never: a socket, or a name.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use hermes_wire::ip::{self, Header, Side};

/// A closed connection keeps its alias for this long (milliseconds): the TIME-WAIT of Linux.
const CLOSED_KEPT: u64 = 60_000;
/// A UDP flow that was silent for this long may give its alias to another flow (milliseconds).
const SILENT_KEPT: u64 = 120_000;
/// The lowest port of an alias.
const FIRST_ALIAS: u16 = 1024;

/// The transport protocol of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Transport {
    Tcp,
    Udp,
}

/// One connection or flow, as its program sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlowKey {
    pub(crate) transport: Transport,
    pub(crate) client: SocketAddr,
    pub(crate) target: SocketAddr,
}

/// The outcome for a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The packet was rewritten, and goes into the device.
    Rewritten,
    /// The first packet of a flow.
    Begins(FlowKey),
    /// The upstream connection is being opened: the client's SYN has to wait.
    Waits,
    /// A segment of no known connection.
    Unknown,
    /// Neither TCP nor UDP, or a fragment without the ports.
    Untranslatable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The far end is being opened; the client's SYN waits.
    Opening,
    Open,
    /// Closed at this time.
    Closed(u64),
}

#[derive(Debug)]
struct Flow {
    key: FlowKey,
    state: State,
    used_at: u64,
}

/// The flows of one prefix.
#[derive(Debug)]
pub(crate) struct Translation {
    /// The node's two sockets.
    tcp: SocketAddr,
    udp: SocketAddr,
    by_alias: HashMap<(Transport, SocketAddr), Flow>,
    aliases: HashMap<FlowKey, SocketAddr>,
    last_port: u16,
}

impl Translation {
    pub(crate) fn new(tcp: SocketAddr, udp: SocketAddr) -> Self {
        Self { tcp, udp, by_alias: HashMap::new(), aliases: HashMap::new(), last_port: FIRST_ALIAS - 1 }
    }

    /// Rewrites a packet of a known flow.
    pub(crate) fn translate(&mut self, packet: &mut [u8], header: &Header, now: u64) -> Outcome {
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

    /// In a fragment without ports only addresses can be rewritten. Local programs and the node's sockets send from the
    /// same address, so that one rewrite serves both directions.
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

    /// Gives a new flow its alias. `None`: there are `limit` flows, and all are in use.
    pub(crate) fn begin(&mut self, key: FlowKey, limit: usize, now: u64) -> Option<SocketAddr> {
        if self.by_alias.len() >= limit {
            self.sweep(now);
        }
        if self.by_alias.len() >= limit && !self.forget_oldest_closed() {
            return None;
        }
        let alias = self.free_alias(key.transport, key.target.ip())?;
        let state = if key.transport == Transport::Tcp { State::Opening } else { State::Open };
        self.by_alias.insert((key.transport, alias), Flow { key, state, used_at: now });
        self.aliases.insert(key, alias);
        Some(alias)
    }

    /// Marks the flow open: the client's SYN may go to the node's socket.
    pub(crate) fn open(&mut self, key: &FlowKey) {
        if let Some(flow) = self.flow_mut(key) {
            flow.state = State::Open;
        }
    }

    /// Marks the flow closed: the connection at the node's socket has ended.
    pub(crate) fn close(&mut self, key: &FlowKey, now: u64) {
        if let Some(flow) = self.flow_mut(key) {
            flow.state = State::Closed(now);
        }
    }

    /// Removes a flow that never opened.
    pub(crate) fn forget(&mut self, key: &FlowKey) {
        if let Some(alias) = self.aliases.remove(key) {
            self.by_alias.remove(&(key.transport, alias));
        }
    }

    /// The flow whose alias is the peer of one of the node's sockets.
    pub(crate) fn flow_of(&self, transport: Transport, alias: SocketAddr) -> Option<FlowKey> {
        self.by_alias.get(&(transport, alias)).map(|flow| flow.key)
    }

    /// True if no connection is open or opening.
    pub(crate) fn has_no_connections(&self) -> bool {
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

    fn sweep(&mut self, now: u64) {
        let aliases = &mut self.aliases;
        self.by_alias.retain(|_, flow| {
            let is_over = match (flow.state, flow.key.transport) {
                (State::Closed(since), _) => since + CLOSED_KEPT <= now,
                (_, Transport::Udp) => flow.used_at + SILENT_KEPT <= now,
                (State::Opening | State::Open, Transport::Tcp) => false,
            };
            if is_over {
                aliases.remove(&flow.key);
            }
            !is_over
        });
    }

    fn forget_oldest_closed(&mut self) -> bool {
        let closed = self.by_alias.values().filter_map(|flow| match flow.state {
            State::Closed(since) => Some((since, flow.key)),
            State::Opening | State::Open => None,
        });
        let oldest = closed.min_by_key(|(since, _)| *since).map(|(_, key)| key);
        oldest.inspect(|key| self.forget(key)).is_some()
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

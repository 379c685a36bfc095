//! Translation of TCP connections and UDP flows to addresses that stand for names (RFC 3022, both addresses and both
//! ports), so that the kernel serves them at two sockets of this process.
//!
//! A program at `client` talks to `target`. Its packets are rewritten to come from an alias (the target's address with
//! a port of ours) and to go to our socket; the packets of our socket to the alias are rewritten to come from the target
//! and to go to the client. The kernel keeps the TCP state on both sides.
//!
//! In: packets, and the time. Out: the same packets rewritten, or why not. Bounded: flows at a time; a flow that ended
//! keeps its alias for a minute, for segments that are still on their way.
//! Never: a socket, or what a name is.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use hermes_wire::ip::{self, Header, Side};

/// A closed connection keeps its alias for this long (milliseconds): the TIME-WAIT of Linux.
const CLOSED_KEPT: u64 = 60_000;
/// A UDP flow that was silent for this long may give its alias to another flow (milliseconds).
const SILENT_KEPT: u64 = 120_000;
/// Aliases have ports from this one on.
const FIRST_ALIAS: u16 = 1024;

/// What a flow is carried in.
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

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It was rewritten: it goes into the device.
    Rewritten,
    /// The first packet of a flow.
    Begins(FlowKey),
    /// Its connection is being opened: the client's retransmission has to wait.
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
    /// Since then.
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
    /// Our sockets.
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
            // The client has taken the same port for another connection.
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

    /// A fragment without ports has addresses alone to rewrite. Programs of this machine send from our own address, as
    /// our sockets do: whose it is follows from that.
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

    /// The far end is open: the client's SYN may go to our socket.
    pub(crate) fn open(&mut self, key: &FlowKey) {
        if let Some(flow) = self.flow_mut(key) {
            flow.state = State::Open;
        }
    }

    /// The connection at our socket has ended.
    pub(crate) fn close(&mut self, key: &FlowKey, now: u64) {
        if let Some(flow) = self.flow_mut(key) {
            flow.state = State::Closed(now);
        }
    }

    /// The flow never was one.
    pub(crate) fn forget(&mut self, key: &FlowKey) {
        if let Some(alias) = self.aliases.remove(key) {
            self.by_alias.remove(&(key.transport, alias));
        }
    }

    /// What the peer of one of our sockets stands for.
    pub(crate) fn flow_of(&self, transport: Transport, alias: SocketAddr) -> Option<FlowKey> {
        self.by_alias.get(&(transport, alias)).map(|flow| flow.key)
    }

    /// No connection is open, or on its way.
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

    /// Ports in turn, so that an alias is used again as late as can be.
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

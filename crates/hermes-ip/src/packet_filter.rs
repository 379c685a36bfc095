//! The packet filter of a session, in both directions.
//!
//! In: a packet, and the addresses on each side. Out: whether the packet passes, and otherwise the reason, and the ICMP
//! error for its sender. Never: sending or counting.

use std::net::IpAddr;

use hermes_wire::connect_ip::Route;
use hermes_wire::ip::{self, Header, IcmpError};

/// The decision on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The packet passes.
    Pass,
    /// The packet is too long, and may be fragmented to this length in bytes.
    Cut(usize),
    /// The packet is dropped for this reason, with an ICMP error for its sender if one is given.
    Drop(&'static str, Option<IcmpError>),
}

/// The sources and destinations that a session permits.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Address ranges on the device's side of the session, with their protocols.
    pub here: Vec<Route>,
    /// Address ranges on the tunnel's side of the session, with their protocols.
    pub there: Vec<Route>,
    /// The only permitted protocol besides ICMP. `None`: the routes alone decide.
    pub protocol: Option<u8>,
}

/// The direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the device into the tunnel.
    Out,
    /// From the tunnel to the device.
    In,
}

impl Rules {
    /// Decides on a packet. `mtu` is the MTU of the next link, in bytes.
    pub fn verdict(&self, way: Direction, packet: &[u8], header: &Header, mtu: usize) -> Verdict {
        let (from, to) = match way {
            Direction::Out => (&self.here, &self.there),
            Direction::In => (&self.there, &self.here),
        };
        if header.is_source_routed {
            // The next router would forward the packet to an address that no scope has permitted.
            return Verdict::Drop("source-route", None);
        }
        if header.hops == 0 {
            return Verdict::Drop("ttl-expired", None);
        }
        if !ip::is_one_host(header.destination) || !ip::is_one_host(header.source) {
            // Multicast and broadcast address hosts on the local link, and the link of a TUN device has none.
            return Verdict::Drop("not-unicast", None);
        }
        if !is_routed(header.destination) || !is_routed(header.source) {
            return Verdict::Drop("out-of-scope", None);
        }
        // A router on the path sends ICMP errors from its own address to the sender of the packet that it cites.
        let is_of_a_router = ip::cited(packet, header)
            .is_some_and(|(by, to)| by == header.destination && allows(from, to, header.protocol));
        if !is_of_a_router && !allows(from, header.source, header.protocol) {
            return Verdict::Drop("source-not-assigned", Some(IcmpError::Prohibited));
        }
        if !allows(to, header.destination, header.protocol) {
            return Verdict::Drop("out-of-scope", Some(IcmpError::Prohibited));
        }
        let icmp = if header.source.is_ipv4() { ip::ICMP } else { ip::ICMPV6 };
        let is_carried = |protocol| header.protocol == protocol || header.protocol == icmp;
        if !self.protocol.is_none_or(is_carried) {
            return Verdict::Drop("out-of-scope", Some(IcmpError::Prohibited));
        }
        fit(header, mtu)
    }
}

/// Whether routers forward the address: link-local and loopback addresses are dropped whatever the scope is (RFC 3927,
/// section 2.7; RFC 4291, sections 2.5.3 and 2.5.6). Clouds serve credentials to their machines on such addresses.
fn is_routed(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !(address.is_link_local() || address.is_loopback()),
        IpAddr::V6(address) => !(address.is_unicast_link_local() || address.is_loopback()),
    }
}

fn allows(routes: &[Route], address: IpAddr, protocol: u8) -> bool {
    routes.iter().any(|route| route.covers(address, protocol))
}

/// Checks the length. Each link must carry 1,280 bytes of IPv6 (RFC 8200, section 5), so a packet that is too long for
/// a QUIC datagram is sent on the stream.
fn fit(header: &Header, mtu: usize) -> Verdict {
    let mtu = if header.source.is_ipv6() { mtu.max(ip::MIN_MTU_V6) } else { mtu.max(ip::MIN_MTU_V4) };
    if header.length <= mtu {
        Verdict::Pass
    } else if header.may_be_cut {
        Verdict::Cut(mtu)
    } else {
        Verdict::Drop("too-big", Some(IcmpError::TooBig(mtu)))
    }
}

//! What a packet may do: the rules of one session, in both directions.
//!
//! In: a packet, and which addresses lie on which side. Out: whether it passes, and where it does not, why,
//! and what its sender is told. Never: sends or counts anything.

use std::net::IpAddr;

use hermes_wire::connect_ip::Route;
use hermes_wire::ip::{self, Header, IcmpError};

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The packet may go on.
    Pass,
    /// It is too long, and may be cut into packets of this length.
    Cut(usize),
    /// Dropped, for this reason; where there is trouble, its sender hears of it.
    Drop(&'static str, Option<IcmpError>),
}

/// Where packets of a session may come from and go to.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Addresses on the device's side.
    pub here: Vec<Route>,
    /// Addresses on the tunnel's side.
    pub there: Vec<Route>,
    /// The only protocol that is carried, ICMP aside.
    pub protocol: Option<u8>,
}

/// Which way a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the device into the tunnel.
    Out,
    /// From the tunnel to the device.
    In,
}

impl Rules {
    /// Judges a packet; `mtu` is the length of the longest that goes further.
    pub fn judge(&self, way: Way, packet: &[u8], header: &Header, mtu: usize) -> Verdict {
        let (from, to) = match way {
            Way::Out => (&self.here, &self.there),
            Way::In => (&self.there, &self.here),
        };
        if header.is_source_routed {
            // The next router would forward it to an address that no scope was checked for.
            return Verdict::Drop("source-route", None);
        }
        if header.hops == 0 {
            return Verdict::Drop("ttl-expired", None);
        }
        if !ip::is_one_host(header.destination) || !ip::is_one_host(header.source) {
            // What a device says to its link: there is nobody on it.
            return Verdict::Drop("not-unicast", None);
        }
        if !is_routed(header.destination) || !is_routed(header.source) {
            return Verdict::Drop("out-of-scope", None);
        }
        // Routers on the way speak for themselves, to whoever sent the packet that they speak of.
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

/// Routers forward nothing that is for one link or one machine (RFC 3927, 2.7; RFC 4291, 2.5.3 and 2.5.6), whatever a
/// scope says: that is also where clouds tell their machines secrets.
fn is_routed(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !(address.is_link_local() || address.is_loopback()),
        IpAddr::V6(address) => !(address.is_unicast_link_local() || address.is_loopback()),
    }
}

fn allows(routes: &[Route], address: IpAddr, protocol: u8) -> bool {
    routes.iter().any(|route| route.covers(address, protocol))
}

/// RFC 8200, section 5, has every link carry 1,280 bytes of IPv6: what no datagram takes goes on the stream.
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

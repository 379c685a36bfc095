//! 1:1 NAT (RFC 3022) between the address that the far side of a tunnel uses and the address of a machine. The machine
//! is one that a route names, or a client that keeps its own address although it was assigned another one.
//!
//! In: packets that the packet filter accepted. Out: the same packets with the translated address, also inside ICMP
//! errors. Never: a packet that may not pass.

use std::net::IpAddr;

use bytes::Bytes;
use hermes_wire::connect_ip::{Address, Prefix};
use hermes_wire::ip;
use ipnet::IpNet;

/// A pair of addresses that replace each other.
#[derive(Clone, Copy)]
pub struct AddressTranslation {
    /// The address that the session has, and that the tunnel's peer uses.
    pub asked: IpAddr,
    /// The address that the machine or client uses.
    pub inner: IpAddr,
}

impl AddressTranslation {
    /// Creates the translation that sends all packets for the session's single address to `inner`.
    ///
    /// # Errors
    ///
    /// The session's network is not a single address of the same IP version.
    pub fn of(inner: IpAddr, network: Option<IpNet>) -> Result<Self, String> {
        let one = network.filter(|network| network.prefix_len() == network.max_prefix_len());
        match one.map(|network| network.addr()) {
            Some(asked) if asked.is_ipv4() == inner.is_ipv4() => Ok(Self { asked, inner }),
            _ => Err(format!("packets go only to {inner}, but the session is not for one address of that IP version")),
        }
    }

    /// Returns the translation between the assigned and the requested address. `None` if they are equal, or not single
    /// addresses.
    pub fn instead(given: &Address, wanted: &[Address]) -> Option<Self> {
        let wanted = wanted.iter().find(|wanted| wanted.request == given.request)?;
        let (asked, inner) = (one_address(given.prefix)?, one_address(wanted.prefix)?);
        (asked != inner && asked.is_ipv4() == inner.is_ipv4()).then_some(Self { asked, inner })
    }

    /// Rewrites the destination from `asked` to `inner`.
    pub fn inwards(self, packet: &mut Bytes) {
        let Ok(header) = ip::parse(packet) else { return };
        if header.destination != self.asked {
            return;
        }
        let mut changed = packet.to_vec();
        if ip::readdress(&mut changed, &header, ip::Side::Destination, self.inner) {
            *packet = changed.into();
        }
    }

    /// Rewrites the source from `inner` to `asked`.
    pub fn outwards(self, packet: Bytes, header: ip::Header) -> (Bytes, ip::Header) {
        let mut changed = packet.to_vec();
        if !ip::readdress(&mut changed, &header, ip::Side::Source, self.asked) {
            return (packet, header);
        }
        (changed.into(), ip::Header { source: self.asked, ..header })
    }

    /// Rewrites the packet that an ICMP error cites: a router reports an error about a packet to `inner`, but the
    /// sender knows it as `asked`.
    pub fn cited_outwards(&self, packet: &[u8], header: &ip::Header) -> Bytes {
        let mut changed = packet.to_vec();
        ip::readdress_cited(&mut changed, header, ip::Side::Destination, self.inner, self.asked);
        changed.into()
    }
}

/// Returns the address of a prefix of full length. `None`: the prefix is shorter.
fn one_address(prefix: Prefix) -> Option<IpAddr> {
    let whole = if prefix.address().is_ipv4() { 32 } else { 128 };
    (prefix.length() == whole).then_some(prefix.address())
}
